"""The server: fits what emfed.toml beside pyproject.toml describes, or what EMFED_CONFIG names."""

import os
from pathlib import Path

from emfed.network.flower import make_server_app

app = make_server_app(os.environ.get("EMFED_CONFIG") or Path(__file__).parents[1] / "emfed.toml")
