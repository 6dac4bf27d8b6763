"""The server: fits what fedem.toml beside pyproject.toml describes, or what FEDEM_CONFIG names."""

import os
from pathlib import Path

from fedem.federations.flower import make_server_app

app = make_server_app(os.environ.get("FEDEM_CONFIG") or Path(__file__).parents[1] / "fedem.toml")
