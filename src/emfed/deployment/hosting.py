"""``emfed serve``: a folder for one run, and the server over WebSockets."""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from emfed.core.errors import EmfedError, SettingsError
from emfed.core.storage import read_json_file, remove_torn, write_atomic
from emfed.core.version import __version__
from emfed.deployment.config import Config
from emfed.deployment.console import Console
from emfed.deployment.orders import Orders, StandingOrders
from emfed.deployment.serving import AtOnce, serve_run
from emfed.deployment.site import MODEL
from emfed.deployment.status import (
    HOST_LOCK,
    LOCK,
    NO_ROOM,
    Status,
    StatusReport,
    logging_to,
    read_status,
)
from emfed.deployment.views import run_view, status_line
from emfed.network.addresses import alone, check_insecure_server
from emfed.network.keys import check_certificate, days_left

if TYPE_CHECKING:
    from emfed.network.websocket.server import WebSocketTransport

logger = logging.getLogger(__name__)
HANDOVER_SECONDS = 5.0
"""Time that another `emfed serve` in our folder has to end."""
CLOSING_SECONDS = 5.0
"""Time for a run's thread to notice that its server is closed."""
REPORT = "report.html"


def _when(status: Mapping[str, Any]) -> str:
    """When a status was said, in the words of a log."""
    return datetime.fromtimestamp(float(status.get("time") or 0)).strftime("%Y-%m-%d %H:%M:%S")


def _goes_on(status: Mapping[str, Any], orders: Orders) -> bool:
    """Whether a finished run has rounds to make: a limit above those made, and no reason to end."""
    ended = orders.finish or status.get("converged")
    return not ended and (orders.rounds or 0) > status.get("round", 0)


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
            self._say_hello(status)
            if status.get("state") == "finished":
                if status.get("rounds", 0) < (self.config.settings.rounds or 0):
                    logger.warning("the run is finished; `rounds` has no effect any more")
                if _goes_on(status, StandingOrders(self.folder).read()):
                    Status(self.folder).say("waiting", why="the run goes on to a new limit")
                else:
                    report(status)
                    if not status.get("untold"):
                        return
                    Status(self.folder).say("finished", told=False)
            self.folder.joinpath("page.port").unlink(missing_ok=True)
            try:
                with Console(self.folder, self.config.server.page, self.view):
                    self.work(report)
            except KeyboardInterrupt:
                logger.warning("the server ends by a signal; the same command goes on")
                raise
            except OSError as error:
                if error.errno not in NO_ROOM:
                    raise
                raise EmfedError(
                    f"{self.folder} has no room ({error.strerror}): make some; the same command "
                    "goes on from here."
                ) from None
            if self.config.server.report and read_status(self.folder).get("state") == "finished":
                draw_report(self.config)

    def _say_hello(self, status: Mapping[str, Any]) -> None:
        """Log that a server begins; one that was killed leaves no word of its own."""
        words = f"emfed {__version__} begins to serve {self.config.path.name}"
        if status.get("state") in ("running", "waiting", "paused"):
            words += f"; the server before it said last, {_when(status)}: {status_line(status)}"
        logger.info("%s", words)

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
    """The server in this process, over WebSockets.

    ``shared`` is a transport that several runs use at once; without one it listens for itself.
    """

    def __init__(
        self,
        config: Config,
        *,
        insecure: bool = False,
        shared: tuple[WebSocketTransport, AtOnce] | None = None,
    ) -> None:
        super().__init__(config, insecure=insecure)
        self._shared = shared

    def work(self, report: StatusReport) -> None:
        """Listen, and serve the run."""
        with alone(self.folder / LOCK, HANDOVER_SECONDS) as mine:
            if not mine:
                raise EmfedError(f"another server works in {self.folder}.")
            status, secure = Status(self.folder, report), self.keys is not None
            if self._shared is not None:
                server, others = self._shared
                serve_run(server.channel(), self.config, status, secure, others)
                return
            finished, transport = False, listen_for(self.config, self.keys)
            try:
                serve_run(transport, self.config, status, secure)
                finished = not self.config.more
            finally:
                transport.close(finished)


def listen_for(config: Config, keys: Path | None) -> WebSocketTransport:
    """The port of a configuration."""
    from emfed.network.websocket.server import WebSocketTransport

    return WebSocketTransport(config.server.host, config.server.port, keys)


def _check_together(runs: Sequence[Config]) -> None:
    """Raise `SettingsError` unless these runs can share one port."""
    first = runs[0]
    for run in runs:
        for name in ("host", "port", "keys", "engine"):
            if getattr(run.server, name) != getattr(first.server, name):
                raise SettingsError(
                    f"runs at once share one port: {name} in [server] differs between "
                    f"{first.path.name} and {run.path.name}."
                )
    if first.server.engine != "websocket":
        raise SettingsError('runs at once need engine = "websocket" in [server].')
    if len({str(run.path) for run in runs}) < len(runs):
        raise SettingsError("a file was named twice.")


def serve_at_once(
    runs: Sequence[tuple[Config, StatusReport]], *, insecure: bool = False, json_logs: bool = False
) -> None:
    """Serve several runs over one port, each in its folder, with a thread and a log of its own.

    A site has one connection, one folder and one count of answers for all of them, so its owner's
    rules hold over all. (A server each would need a folder each at every site, and what is limited
    over all runs would be limited in each.) A run that fails leaves the others alone; its error is
    raised when they have ended.
    """
    first, names = runs[0][0], {str(run.path) for run, _ in runs}
    _check_together([run for run, _ in runs])
    others = AtOnce(names)
    errors: list[EmfedError] = []

    def work(config: Config, supervisor: WebSocketServerSupervisor, report: StatusReport) -> None:
        name, log = str(config.path), config.place("folder") / "logs" / "serve.log"
        try:
            with logging_to(log, json_logs, leave_out=names - {name}):
                supervisor.run(report)
        except EmfedError as error:
            errors.append(error)
            report({"state": "failed", "error": str(error)})
        except Exception as error:  # its log has it in full
            errors.append(EmfedError(f"{config.path.name}: {error}"))
        except KeyboardInterrupt:  # the server is closed: the same command goes on
            return
        finally:
            others.leave(name)

    server, threads = listen_for(first, None if insecure else first.place("keys")), []
    try:
        for run, report in runs:
            one = WebSocketServerSupervisor(run, insecure=insecure, shared=(server, others))
            # A daemon: what a run has on disk is whole at any moment.
            given, name = (run, one, report), str(run.path)
            threads.append(threading.Thread(target=work, name=name, args=given, daemon=True))
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.1)  # short: signals are heard between two of them
    finally:
        server.close(finished=not errors and not others.going)
        for thread in threads:
            if thread.is_alive():
                thread.join(CLOSING_SECONDS)
    if errors:
        raise errors[0]


_DRAWING = threading.Lock()


def draw_report(config: Config) -> None:
    """Draw the report beside the model; sites are told by now, and the model stays what it is."""
    from emfed.artifacts.result import load

    output = config.place("output")
    try:
        with _DRAWING:  # matplotlib's, for runs that end at once
            load(output / MODEL).report(output / REPORT, title=config.path.stem)
    except Exception:  # fonts, a full disk: the run is over and its model whole
        logger.exception("the report could not be drawn; `emfed report` draws it from the model")


def recognise(folder: Path, config: Config) -> None:
    """Refuse a folder that holds another run than the configuration's."""
    path, ours = folder / "configuration.json", config.fixed()
    if not path.exists():
        write_atomic(path, (json.dumps(ours, indent=1) + "\n").encode())
        return
    try:
        theirs = dict(read_json_file(path))
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
