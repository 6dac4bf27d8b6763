"""``emfed serve``: a relay, and the analyst of any number of runs beside it."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, final

from emfed.core.errors import EmfedError, SettingsError
from emfed.core.version import __version__
from emfed.deployment.analyst import AnalystRun, document_of, recognise
from emfed.deployment.config import Config
from emfed.deployment.console import Console
from emfed.deployment.relaying import RUNS, SEEN, mailboxes_of
from emfed.deployment.results import draw_report
from emfed.deployment.status import LOCK, StatusReport, logging_to, read_status
from emfed.deployment.views import run_view, status_line
from emfed.deployment.watchdog import Watchdog
from emfed.network.addresses import Terminated, alone, check_insecure_server
from emfed.network.exchange.identities import KeySigner, TrialMembers, TrialSigner
from emfed.network.exchange.member_line import MemberLine
from emfed.network.exchange.member_runs import MemberRuns
from emfed.network.exchange.relay import Relay
from emfed.network.exchange.relay_server import RelayServer
from emfed.network.exchange.statements import Roster, Signer
from emfed.network.keys import ANALYST, check_certificate, days_left
from emfed.network.roster import SeenMembers

logger = logging.getLogger(__name__)
LOOK_SECONDS = 0.1
"""Between two looks at the runs: signals are heard between them."""
HANDOVER_SECONDS = 5.0
"""Time that another `emfed serve` in our folder has to end."""
ENDING = "the run ends after the exchange under way; Ctrl-C once more stops at once"


@final
@dataclass(frozen=True)
class ServerPlace:
    """Where a server listens, and with whose keys.

    Parameters
    ----------
    host, port : str, int
        Where sites call.
    keys : Path or None
        The folder of keys; None: a trial on this machine.
    relay : str
        The address of a relay elsewhere, where this is an analyst alone.
    mailboxes : Path, optional
        Mailboxes of sites to which another platform carries messages.
    """

    host: str
    port: int
    keys: Path | None
    relay: str = ""
    mailboxes: Path | None = None

    def check(self) -> None:
        """Refuse what no site could join."""
        if self.keys is None:
            check_insecure_server(self.host)
        elif not self.relay:
            check_certificate(self.keys / "server.pem")


def place_of(configs: Sequence[Config], insecure: bool = False, relay: str = "") -> ServerPlace:
    """The one port, folder of keys and mailboxes that these runs share."""
    first = configs[0]
    for one in configs:
        for name in ("host", "port", "keys", "mailboxes"):
            if getattr(one.server, name) != getattr(first.server, name):
                raise SettingsError(
                    f"runs of one server share one port: {name} in [server] differs between "
                    f"{first.path.name} and {one.path.name}."
                )
    if len({str(one.path) for one in configs}) < len(configs):
        raise SettingsError("a file was named twice.")
    places = [str(one.place(name)) for one in configs for name in ("folder", "output")]
    if len({*places}) < len(places):
        raise SettingsError("each run needs a folder and an output of its own, in [server].")
    keys = None if insecure else first.place("keys")
    boxes = first.place("mailboxes") if first.server.mailboxes else None
    return ServerPlace(first.server.host, first.server.port, keys, relay, boxes)


def serve(
    runs: Sequence[tuple[Config, StatusReport]],
    place: ServerPlace,
    *,
    at_once: bool = False,
    json_logs: bool = False,
    make: Callable[..., Relay] = Relay,
    stop: threading.Event | None = None,
) -> None:
    """Fit what all of these say, one after the other or at once, and leave the models.

    Raises the first error of a run that could not come to its end, when all are over. Ctrl-C ends
    runs with what they have reached; a second one, SIGTERM, or ``stop`` from another thread, stops
    at once.
    """
    place.check()
    with contextlib.ExitStack() as stack:
        for config, report in runs:
            stack.enter_context(_in_folder(config, place, report, json_logs))
        serving = _Serving(runs, place, at_once, make)
        serving.run(threading.Event() if stop is None else stop)
        errors = serving.errors
    for config, _ in runs:
        if config.server.report and read_status(config.place("folder")).get("state") == "finished":
            draw_report(config)
    if errors:
        raise errors[0]


@contextlib.contextmanager
def _in_folder(
    config: Config, place: ServerPlace, report: StatusReport, json_logs: bool
) -> Iterator[None]:
    """Within, the folder of a run is ours, with its log and its page."""
    folder = config.place("folder")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)  # what sites said of their rows is in there
    words = f"another `emfed serve` works in {folder}"

    def waiting() -> None:
        report({"state": "waiting", "why": f"{words}; waiting for it to end"})

    def view() -> dict[str, Any]:
        about: dict[str, Any] = {}
        if place.keys is not None and not place.relay:
            about["certificate_days"] = days_left(place.keys / "server.pem")
        return run_view(folder, config.path.name, **about)

    logged = logging_to(folder / "logs" / "serve.log", json_logs)
    with logged, alone(folder / LOCK, HANDOVER_SECONDS, waiting) as mine:
        if not mine:
            raise EmfedError(f"{words}: stop it, or give this run a folder of its own.")
        recognise(folder, config, document_of(config, place.keys is not None))
        status = read_status(folder)
        said = f"emfed {__version__} begins to serve {config.path.name}"
        if status.get("state") in ("running", "waiting", "paused"):
            when = datetime.fromtimestamp(float(status.get("time") or 0))
            said += f"; the server before it said last, {when:%Y-%m-%d %H:%M:%S}: "
            said += status_line(status)
        logger.info("%s", said)
        folder.joinpath("page.port").unlink(missing_ok=True)
        with Console(folder, config.server.page, view):
            yield


@final
class _Serving:
    """The runs of one server, from the first look to the last word to sites."""

    def __init__(
        self,
        runs: Sequence[tuple[Config, StatusReport]],
        place: ServerPlace,
        at_once: bool,
        make: Callable[..., Relay],
    ) -> None:
        first = runs[0][0].place("folder")
        self._place, self._at_once, self._make = place, at_once, make
        roster: Roster = TrialMembers()
        signer: Signer = TrialSigner(ANALYST)
        if place.keys is not None:
            roster = SeenMembers(place.keys, first / SEEN)
            signer = KeySigner.of_analyst(place.keys)
        self._roster, self._signer, self._folder = roster, signer, first / RUNS
        self._server: RelayServer | None = None
        about: dict[str, Any] = {"secure": place.keys is not None, "contacts": self._contacts}
        self.runs = [
            AnalystRun(config, signer, roster, report=report, **about) for config, report in runs
        ]
        self._finished = {
            run.name for run in self.runs if read_status(run.folder).get("state") == "finished"
        }
        self._told_more: bool | None = None

    def _contacts(self) -> Mapping[str, float]:
        return {} if self._server is None else self._server.contacts

    @property
    def errors(self) -> list[EmfedError]:
        """What went wrong, in the order of the runs."""
        return [run.error for run in self.runs if run.error is not None]

    def run(self, stop: threading.Event) -> None:
        """Work until all runs are over, and sites know it."""
        if all(run.name in self._finished and not _untold(run) for run in self.runs):
            Watchdog()  # or systemd takes the end for a failure
            for run in self.runs:
                run.status.repeat()
            return
        with self._connected() as members:
            try:
                self._work(members, stop)
            finally:
                members.stop()

    @contextlib.contextmanager
    def _connected(self) -> Iterator[MemberRuns]:
        """A relay beside the analyst, or a line to one that is elsewhere."""
        members: MemberRuns
        place = self._place
        if place.relay:
            line = MemberLine(
                place.relay,
                lambda message: members.received(message),
                lambda: members.connected(),
                key=None if place.keys is None else place.keys / "ca.key",
                authority=None if place.keys is None else place.keys / "ca.pem",
                name=ANALYST,
            )
            members = MemberRuns(line.send)
            with _calling(line):
                yield members
            return
        homes = {run.name: run.folder / RUNS for run in self.runs}
        options: dict[str, Any] = {"homes": homes, "more": True}
        doors = (place.host, place.port, place.keys, self._roster)
        server = self._server = RelayServer(*doors, self._folder, self._make, **options)
        try:
            members = MemberRuns(server.attach(ANALYST, lambda message: members.received(message)))
            with mailboxes_of(server, place.mailboxes, place.keys):
                yield members
        finally:  # sites call again, unless there is nothing to come back for
            server.close(finished=all(run.end is not None for run in self.runs))

    def _work(self, members: MemberRuns, stop: threading.Event) -> None:
        """Look at the runs, again and again."""
        waiting, stopping = [*self.runs], False
        going: list[AnalystRun] = []
        alive = Watchdog()
        while waiting or going:
            alive()
            if waiting and (self._at_once or not going):
                going += waiting if self._at_once else waiting[:1]
                waiting = [] if self._at_once else waiting[1:]
            try:
                for run in going:
                    run.look(members)
                self._say_more(members, bool(waiting) or not all(one.announced for one in going))
                going = self._told(going)
                if stop.wait(LOOK_SECONDS):
                    raise Terminated
            except KeyboardInterrupt as signal:
                under_way = [run for run in going if run.begun and not run.over]
                if stopping or isinstance(signal, Terminated) or not under_way:
                    logger.warning("the server ends by a signal; the same command goes on")
                    raise
                stopping, waiting = True, []
                for run in going:
                    run.interrupted = True
                under_way[0].status.tell(ENDING)

    def _say_more(self, members: MemberRuns, more: bool) -> None:
        if more != self._told_more and members.here is not None:
            self._told_more = more
            members.say_more(more)

    def _told(self, going: list[AnalystRun]) -> list[AnalystRun]:
        """The runs that are not over, or whose sites are still to be told so."""
        left = []
        for run in going:
            if not run.over:
                left.append(run)
            elif run.end is not None and self._server is not None:
                untold = run.still_untold(self._server.untold(run.name))
                run.say_untold(untold)
                left += [run] if untold and not run.waited_to_tell else []
        return left


@contextlib.contextmanager
def _calling(line: MemberLine) -> Iterator[None]:
    """Within, a thread stays connected to a relay."""
    leave = threading.Event()

    def call() -> None:
        try:
            line.run(leave, lambda kind, words: logger.info("%s", words))
        except EmfedError as error:
            failed.append(error)

    failed: list[EmfedError] = []
    thread = threading.Thread(target=call, name="emfed-line", daemon=True)
    thread.start()
    try:
        yield
    finally:
        leave.set()
        thread.join()
    if failed:
        raise failed[0]


def _untold(run: AnalystRun) -> bool:
    return bool(read_status(run.folder).get("untold"))
