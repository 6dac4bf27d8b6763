"""``emfed serve``: a folder for one run, and the server over WebSockets."""

from __future__ import annotations

import json
import logging
import secrets
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, final

from emfed.core.errors import EmfedError, SettingsError
from emfed.core.storage import remove_torn, write_atomic
from emfed.network.addresses import alone, check_insecure_server
from emfed.network.deployment.config import Config
from emfed.network.deployment.console import Console
from emfed.network.deployment.orders import read_orders
from emfed.network.deployment.serving import serve_run
from emfed.network.deployment.status import HOST_LOCK, LOCK, Status, StatusReport, read_status
from emfed.network.deployment.views import run_view
from emfed.network.keys import check_certificate, days_left

logger = logging.getLogger(__name__)
HANDOVER_SECONDS = 5.0
"""Time that another `emfed serve` in our folder has to end."""


class ServerSupervisor(ABC):
    """The server's side of a deployment, from start to end; started again, it goes on."""

    def __init__(self, config: Config, *, insecure: bool = False) -> None:
        self.config, self.folder = config, config.place("folder")
        self.keys = None if insecure else config.place("keys")
        self.name = secrets.token_hex(8)
        if self.keys is None:
            check_insecure_server(config.server.host)
        else:
            check_certificate(self.keys / "server.pem")

    @final
    def run(self, report: StatusReport) -> None:
        """Work until the model is there; raises `EmfedError` if that cannot be."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)  # what sites said of their rows is in there
        lock = self.folder / HOST_LOCK
        words = f"another `emfed serve` works in {self.folder}"

        def waiting() -> None:
            report({"state": "waiting", "why": f"{words}; waiting for it to end"})

        with alone(lock, HANDOVER_SECONDS, waiting) as mine:
            if not mine:
                raise EmfedError(f"{words}: stop it, or give this run a folder of its own.")
            lock.write_text(self.name, encoding="utf-8")
            remove_torn(self.folder, ("configuration.json",))
            recognise(self.folder, self.config)
            status = read_status(self.folder)
            if status.get("state") == "finished":
                if status.get("rounds", 0) < (self.config.settings.rounds or 0):
                    logger.warning("the run is finished; `rounds` has no effect any more")
                if (read_orders(self.folder).rounds or 0) > status.get("round", 0):
                    Status(self.folder).say("waiting", why="the run goes on to a new limit")
                else:
                    report(status)
                    if not status.get("untold"):
                        return
                    Status(self.folder).say("finished", told=False)
            self.folder.joinpath("page.port").unlink(missing_ok=True)
            with Console(self.folder, self.config.server.page, self.view):
                self.work(report)

    @final
    def view(self) -> dict[str, Any]:
        """What the page shows."""
        about: dict[str, Any] = {"deadline": self.config.sites.deadline}
        if self.keys is not None:
            about["certificate_days"] = days_left(self.keys / "server.pem")
        return run_view(self.folder, self.config.path.name, **about)

    @abstractmethod
    def work(self, report: StatusReport) -> None:
        """Do it; the folder is ours alone."""


@final
class WebSocketServerSupervisor(ServerSupervisor):
    """The server in this process, over WebSockets."""

    def work(self, report: StatusReport) -> None:
        """Listen, and serve the run."""
        from emfed.network.websocket.server import WebSocketTransport

        with alone(self.folder / LOCK, HANDOVER_SECONDS) as mine:
            if not mine:
                raise EmfedError(f"another server works in {self.folder}.")
            place = self.config.server
            transport, finished = WebSocketTransport(place.host, place.port, self.keys), False
            try:
                status = Status(self.folder, report)
                serve_run(transport, self.config, status, secure=self.keys is not None)
                finished = not self.config.more
            finally:
                transport.close(finished)


def recognise(folder: Path, config: Config) -> None:
    """Refuse a folder that holds another run than the configuration's."""
    path, ours = folder / "configuration.json", config.fixed()
    if not path.exists():
        write_atomic(path, (json.dumps(ours, indent=1) + "\n").encode())
        return
    try:
        theirs = dict(json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError):
        raise SettingsError(
            f"{path} is damaged: put it back from a backup. If {config.path.name} is what this run "
            "began with, deleting it does as well."
        ) from None
    changed = [name for name in ours if ours[name] != theirs.get(name)]
    if changed:
        raise SettingsError(
            f"{folder} holds a run with another {' and '.join(changed)} than "
            f"{config.path.name} says: put that back, or give the new run a folder and an "
            "output of its own ([server] folder and output)."
        )
