"""``emfed join``: a site that follows the runs of a relay, under the rules of its owner."""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any, final

from emfed.core.errors import EmfedError, SettingsError
from emfed.core.records import RoundRecord
from emfed.core.storage import write_atomic
from emfed.core.version import __version__
from emfed.data.files import PLAIN, TextForm
from emfed.data.tables import Workers
from emfed.deployment.approval import answer_fit, owners_word
from emfed.deployment.consent import OfferedRows, OwnerTerms
from emfed.deployment.console import Console
from emfed.deployment.hints import Hints
from emfed.deployment.site import (
    JOURNAL,
    MODEL,
    RUNS,
    TABLE,
    describe,
    prepare,
    read_rows,
    seal_files,
    site_memory,
    write_site,
)
from emfed.deployment.status import Status, bearing_full_disks
from emfed.deployment.views import SiteView
from emfed.deployment.watchdog import Watchdog
from emfed.imputation.program import asks_for_table
from emfed.models.devices.placing import check_device
from emfed.network.addresses import alone, check_insecure_site, split_address
from emfed.network.exchange.followed import Ended, MemberStore
from emfed.network.exchange.identities import KeySigner, KnownMembers, TrialMembers, TrialSigner
from emfed.network.exchange.journalled import journal_post
from emfed.network.exchange.member import Follower
from emfed.network.exchange.member_line import MemberLine
from emfed.network.exchange.member_runs import MemberRuns, RunMember
from emfed.network.exchange.member_thread import Watcher
from emfed.network.exchange.statements import Roster, Signer
from emfed.network.exchange.transcript import Stage
from emfed.network.journal import Journal
from emfed.network.keys import read_private_key, read_seal
from emfed.network.mailbox import MailboxLine
from emfed.network.owner_rules import SiteRules
from emfed.network.roster import check_roster, roster_digest
from emfed.network.spending import SiteMemory, noise_key
from emfed.network.websocket.client import StateReport

logger = logging.getLogger(__name__)
MAILBOX = "mailbox:"
"""Before the folder of a mailbox, in place of an address."""
LOOK_SECONDS = 0.1
OVER = ".over"
"""Added to the name of a run that came to its end here: the relay may name it again."""
KEPT_RUNS = 64
"""Files of runs that a site keeps, the last."""


@dataclass
class Joining:
    """A site's side of a deployment: what ``emfed join`` is given."""

    address: str
    folder: Path
    data: Path
    authority: Path | None = None
    """ca.pem; None: without TLS, to this machine only."""
    key: Path | None = None
    columns: list[str] | None = None
    rules: SiteRules = field(default_factory=SiteRules)
    roster: Path | None = None
    """A folder of everybody's NAME.pub."""
    form: TextForm = PLAIN
    """How the file is written, where it is text."""
    device: str | None = None
    """Where passes over the rows run: ``cuda``; None: here."""
    seal: Path | None = None
    """A secret that encrypts the site's files at rest."""
    page: int = 0
    """The port of the site's page on this machine; 0 takes a free one."""
    stay: bool = False
    """Whether the site waits for the next run when one is over."""

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        if self.authority is None:
            self.rules = self.rules.on_this_machine()

    @property
    def name(self) -> str:
        """The site's."""
        return (self.key or self.data).stem

    @property
    def _carried(self) -> bool:
        """Whether another platform carries the messages."""
        return self.address.startswith(MAILBOX)

    def check(self) -> None:
        """Check what was given; writes nothing, since another process may work in the folder."""
        if not self._carried:
            split_address(self.address)
        if not self.data.exists():
            raise SettingsError(f"{self.data}: there is no such file.")
        if self.seal is not None:
            read_seal(self.seal)
        if self.device is not None:
            check_device(self.device)
        if self.authority is None:
            if not self._carried:
                check_insecure_site(self.address)
            return
        if not self.authority.exists():
            raise SettingsError(
                f"{self.authority}: there is no such file; ask the server's people for ca.pem."
            )
        if self.key is None:
            raise SettingsError(
                "a site shows who it is: give --key NAME.key, made by `emfed keys site NAME`."
            )
        read_private_key(self.key)
        if self.roster is None:
            raise SettingsError(
                "a site checks what the others sign: make a folder of everybody's NAME.pub with "
                "`emfed keys roster`, and say with --roster where it is."
            )
        check_roster(self.key, self.roster)

    def identity(self) -> tuple[Signer, Roster, set[str] | None]:
        """Who this site is, whose signatures it knows, and with whom it adds up."""
        if self.authority is None or self.key is None or self.roster is None:
            return TrialSigner(self.name), TrialMembers(), None
        pinned = check_roster(self.key, self.roster)
        return KeySigner.of_site(self.key), KnownMembers(pinned, self.authority), {*pinned}

    def company(self) -> str:
        """With whom this site adds up, for its people to compare with what they were told."""
        if self.key is None or self.roster is None:
            return "a trial without keys: whoever is on this machine may take part"
        found = check_roster(self.key, self.roster)
        return (
            f"sums with {', '.join(sorted(found))}; roster digest {roster_digest(found)}, the same "
            "at every site"
        )

    def line(
        self, received: Callable[[bytes], None], connected: Callable[[], None]
    ) -> MemberLine | MailboxLine:
        """What carries messages to the relay and back."""
        if self._carried:
            return MailboxLine(Path(self.address.removeprefix(MAILBOX)), received, connected)
        key = None if self.authority is None else self.key
        options: dict[str, Any] = {"key": key, "authority": self.authority, "name": self.name}
        return MemberLine(self.address, received, connected, stay=self.stay, **options)

    def rows(self, report: StateReport) -> tuple[dict[str, Any], Workers]:
        """The rows in a form that is quick to open, and where that is."""
        about = prepare(self.folder, self.data, self.columns, self.form, self.seal)
        for why in about["left_out"].values():
            report("state", f"{why}: no run can use it")
        return about, read_rows(about)

    def run(self, report: StateReport, stop: threading.Event | None = None) -> SiteOutcome:
        """Take part until there is nothing more, or until ``stop`` is set.

        Raises `EmfedError` for what trying again cannot mend.
        """
        self.check()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        with alone(self.folder / "join.lock") as mine:
            if not mine:
                raise EmfedError(f"another `emfed join` works in {self.folder}.")
            if many := seal_files(self.folder, self.seal, self.rules):
                report("state", f"{many} files that were kept without a seal are sealed now")
            about, data = self.rows(report)
            write_site(self.folder, about | {"device": self.device}, self.rules, self.columns)
            for words in self.rules.gives_away():
                report("rules", words)
            report("masks", self.company())
            report("state", f"calling {self.address}")
            logger.info("emfed %s begins to join %s", __version__, self.address)
            status = Status(self.folder)

            def tell(kind: str, words: str) -> None:
                with bearing_full_disks():
                    report(kind, words)
                if kind == "state":
                    status.say("site", why=words)

            self.folder.joinpath("page.port").unlink(missing_ok=True)
            view, answer = SiteView(self.folder), partial(answer_fit, self.folder)
            memory = site_memory(self.folder, about, self.rules)
            with Console(self.folder, self.page, view, answer):
                return SiteRuns(self, data, memory, tell).run(stop)


@final
@dataclass
class SiteOutcome:
    """What came of all runs that a site took part in."""

    doubts: list[str] = field(default_factory=list)
    """Why models must not be taken for good ones."""
    refused: list[str] = field(default_factory=list)
    """Why the owner's rules kept the site out of runs."""
    failed: list[str] = field(default_factory=list)
    """How runs ended that left no model."""


@final
class SiteRuns:
    """The runs of one site, over one line."""

    def __init__(
        self, joining: Joining, data: Workers, memory: SiteMemory, report: StateReport
    ) -> None:
        self._joining, self._data, self._memory, self._report = joining, data, memory, report
        self._signer, self._roster, self._known = joining.identity()
        self._lock, self._journal = threading.Lock(), Journal(joining.folder / JOURNAL)
        self._folder = joining.folder / RUNS
        self._folder.mkdir(mode=0o700, exist_ok=True)
        self._began: dict[str, JoinedRun] = {}
        self._noise = (joining.key or joining.folder / "trial").with_suffix(".noise")
        for old in sorted(self._folder.glob("*"), key=_age)[: -4 * KEPT_RUNS]:
            old.unlink()

    @cached_property
    def _commitment(self) -> bytes:
        return OfferedRows(self._data).commitment(self._signer.secret(b"emfed rows"))

    def run(self, stop: threading.Event | None = None) -> SiteOutcome:
        """Follow all runs that the relay names, until there is nothing more."""
        leaving = threading.Event() if stop is None else stop
        runs: MemberRuns
        line = self._joining.line(lambda data: runs.received(data), lambda: runs.connected())
        runs = MemberRuns(line.send, self._begin)

        def watch() -> None:
            alive = Watchdog()
            while self._joining.stay or not runs.over:
                alive()
                self._forget(runs)
                if leaving.wait(LOOK_SECONDS):
                    return
            time.sleep(LOOK_SECONDS)  # what was said last leaves first
            leaving.set()

        threading.Thread(target=watch, name="emfed-watch", daemon=True).start()
        try:
            line.run(leaving, self._report)
        finally:
            leaving.set()
            runs.stop()
        self._forget(runs)
        return self._outcome(runs)

    def _begin(self, run: str) -> RunMember | None:
        """What this site needs in a run; None: it came to its end here before."""
        path = self._folder / f"{run}.sqlite"
        if path.with_suffix(OVER).exists():
            return None
        joining = self._joining
        rows = OfferedRows(self._data, joining.device)
        watcher = self._began[run] = JoinedRun(joining.folder, run, self._journal, self._report)
        hints = Hints(rows, watcher.warn)
        terms = OwnerTerms(
            self._signer.name,
            joining.rules,
            self._known,
            rows,
            self._memory,
            joining.columns,
            callbacks=(watcher.record,),
            told=hints.look,
            approve=partial(owners_word, joining.folder) if joining.rules.ask_first else None,
            noise=noise_key(self._noise),
            lock=self._lock,
        )

        def make(store: MemberStore) -> Follower:
            return Follower(
                self._signer,
                self._roster,
                store,
                terms.consent(),
                rows=rows,
                commitment=self._commitment,
            )

        seal = None if joining.seal is None else read_seal(joining.seal)
        return RunMember(path, make, watcher, seal)

    def _forget(self, runs: MemberRuns) -> None:
        """Note which runs are over: the relay may name them for long."""
        for run, thread in [*runs.members.items()]:
            if thread.over.is_set() and thread.end is not None and not self._began[run].refused:
                (self._folder / run).with_suffix(OVER).touch()

    def _outcome(self, runs: MemberRuns) -> SiteOutcome:
        found = SiteOutcome()
        for run, thread in runs.members.items():
            watcher = self._began[run]
            if thread.error is not None:
                raise thread.error
            if thread.end is None:
                found.failed.append("the run was not over: the same command goes on from here.")
            elif thread.end.final:
                found.doubts += _doubts(thread.end)
            else:
                (found.refused if watcher.refused else found.failed).append(thread.end.words)
        return found


@final
class JoinedRun(Watcher):
    """Keeps the journal of a run at a site, and its model, and tells the site's people."""

    def __init__(self, folder: Path, run: str, journal: Journal, report: StateReport) -> None:
        self._folder, self._run, self._journal, self._report = folder, run, journal, report
        self.refused = False
        """Whether the owner's rules, or its word, kept the site out."""
        self._state = self._title = ""
        self._table = False
        self._round = 0

    def said(self, follower: Follower, post: bytes) -> None:
        """A message is in the journal before it leaves."""
        if line := journal_post(self._journal, follower, post):
            self._report("sent", describe(line))

    def warn(self, words: str) -> None:
        """Tell the site's people, and nobody else, what to look at in their rows."""
        self._journal.write(kind="warning", run=self._run, bytes=0, content=words)
        self._report("look at your rows", words)

    def record(self, record: RoundRecord) -> None:
        """A round is over."""
        self._round = record.round

    def moved(self, follower: Follower) -> None:
        """Say where the run stands, where that has changed."""
        about, self.refused = follower.transcript, bool(follower.refusal)
        if about.stage in (Stage.EMPTY, Stage.FINAL, Stage.ENDED):
            return
        self._title = about.agreement.title
        self._table = asks_for_table(about.agreement.program)
        words = about.stage.name.lower()
        if about.stage is Stage.GATHERING:
            missing = [name for name in about.agreement.sites if name not in about.hellos]
            words = f"waiting for {', '.join(missing)}"
        elif about.stage is Stage.RUNNING:
            words = f"fitting with {', '.join(about.members)}" + ", paused" * about.paused
            if follower.silent:
                words += f"; no word from {', '.join(follower.silent)}"
        if follower.name in about.expelled:
            words = "the server's people took this site out; it waits, since they may let it in"
        if follower.refusal:
            words = f"this site takes no part: {follower.refusal}"
        if words != self._state:
            self._state = words
            self._report("state", f"{self._title}: {words}" if self._title else words)

    def ended(self, end: Ended) -> None:
        """Leave the model; how the run ended is in the journal, too."""
        name = f"{self._title}: " if self._title else ""
        if not end.final:
            self._journal.write(kind="end", run=self._run, bytes=0, content=f"{name}{end.words}")
            self._report("state", f"{name}{end.words}")
            return
        path = self._folder / (TABLE if self._table else MODEL)
        write_atomic(path, end.state)
        if _FILE_NAME.fullmatch(self._title):
            kept = self._folder / "models" / f"{self._title}{path.suffix}"
            kept.parent.mkdir(exist_ok=True)
            write_atomic(kept, end.state)
        rounds = f" after {self._round} rounds" if self._round else ""
        words = f"{name}the run ended{rounds}; all sites have signed the model in {path}"
        doubts = "".join(f"; it did not end well: {doubt}" for doubt in _doubts(end))
        self._journal.write(kind="end", run=self._run, bytes=0, content=words + doubts)
        self._report("state", words + doubts)

    def troubled(self, words: str) -> None:
        """Something must be mended here."""
        self._report("state", words)


_FILE_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9 ._-]{0,63}")


def _doubts(end: Ended) -> list[str]:
    """Why a model must not be taken for a good one."""
    found: list[str] = end.result.fitted().doubts if hasattr(end.result, "fitted") else []
    return found


def _age(path: Path) -> float:
    return path.stat().st_mtime
