"""The network's part of run.toml: which engine, where the server listens, where its things are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, final

from emfed.core.errors import SettingsError

PORT = 9400


@final
@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """``[server]``; folders are relative to the file."""

    engine: Literal["websocket", "flower"] = "websocket"
    """What carries messages; Flower is for consortia that run it already."""
    host: str = "127.0.0.1"
    port: int = PORT
    keys: str = "keys"
    folder: str = "run"
    output: str = "model"

    def __post_init__(self) -> None:
        if not 0 < self.port < 65536:
            raise SettingsError(f"port must lie between 1 and 65535; got {self.port}.")
