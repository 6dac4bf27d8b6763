"""The server's program under Flower: `serve_run` over a `GridTransport`."""

from __future__ import annotations

import logging
import os
import threading
import time
from pathlib import Path

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from emfed.core.errors import EmfedError, SettingsError
from emfed.deployment.config import Config, read_config
from emfed.deployment.serving import serve_run
from emfed.deployment.status import HOST_LOCK, LOCK, Status, logging_to
from emfed.network.addresses import alone
from emfed.network.flower.transport import GridTransport

logger = logging.getLogger(__name__)
CONFIG = "EMFED_CONFIG"
HOST, SECURE = "EMFED_HOST", "EMFED_SECURE"
"""Environment variables: the ``emfed serve`` that started us (see `orphaned`), and whether sites
have keys."""


def server_app(config: str | Path | None = None) -> ServerApp:
    """See `emfed.network.flower.make_server_app`."""

    def main(grid: Grid, context: Context) -> None:
        given = config or os.environ.get(CONFIG)
        if not given:
            raise SettingsError("which run? Give make_server_app the path of a configuration.")
        run_server(grid, read_config(given))

    app = ServerApp()
    app.main()(main)
    return app


def orphaned(folder: Path, host: str) -> bool:
    """Whether the ``emfed serve`` of that name is gone, or another one has taken its place."""
    with alone(folder / HOST_LOCK) as gone:
        pass
    return gone or (folder / HOST_LOCK).read_text(encoding="utf-8") != host


def _end_with_host(folder: Path, host: str) -> None:
    """End at once when orphaned: we hold a lock that the next ``emfed serve`` waits for.

    What was reached is on disk. (A signal at our parent's death would not do: that is Flower's
    executor, which may be killed and come back while we go on.)
    """
    while not orphaned(folder, host):
        time.sleep(1.0)
    logger.warning("`emfed serve` is gone; the server's program ends with it")
    os._exit(1)


def run_server(grid: Grid, config: Config) -> None:
    """Fit, from the beginning or from where an earlier process was killed."""
    folder = config.place("folder")
    folder.mkdir(parents=True, exist_ok=True)

    def waiting() -> None:
        logger.warning("waiting for the other process that works in %s to end", folder)

    logged = logging_to(folder / "logs" / "server.log")
    with logged, alone(folder / LOCK, 3.0, waiting) as mine:
        if not mine:
            raise EmfedError(f"another server works in {folder}.")
        if host := os.environ.get(HOST):
            threading.Thread(target=_end_with_host, args=(folder, host), daemon=True).start()
        secure = os.environ.get(SECURE) == "1"
        serve_run(GridTransport(grid), config, Status(folder), secure)
