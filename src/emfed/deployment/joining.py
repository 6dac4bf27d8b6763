"""``emfed join``: a folder for one site, and the site over WebSockets."""

from __future__ import annotations

import json
import logging
import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import final

from emfed.core.errors import EmfedError, SettingsError
from emfed.core.version import __version__
from emfed.data.files import PLAIN, TextForm
from emfed.deployment.approval import answer_fit
from emfed.deployment.console import Console
from emfed.deployment.site import (
    JOURNAL,
    REHEARSAL,
    describe,
    look_first,
    open_site,
    prepare,
    seal_files,
    write_site,
)
from emfed.deployment.status import Status, bearing_full_disks
from emfed.deployment.views import SiteView
from emfed.models.devices.placing import check_device
from emfed.network import SiteRules
from emfed.network.addresses import alone, check_insecure_site, split_address
from emfed.network.keys import read_private_key, read_seal
from emfed.network.masking import SiteIdentity, roster_digest
from emfed.network.site import MORE, StateReport

logger = logging.getLogger(__name__)


@dataclass
class SiteSupervisor(ABC):
    """A site's side of a deployment."""

    address: str
    folder: Path
    data: Path
    authority: Path | None = None
    """ca.pem; None: without TLS, to this machine only."""
    key: Path | None = None
    columns: list[str] | None = None
    rules: SiteRules = field(default_factory=SiteRules)
    dry_run: bool = False
    roster: Path | None = None
    """A folder of everybody's NAME.pub: the site masks what it tells."""
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
    _told: int = field(default=0, init=False)
    _over: bool = field(default=False, init=False)

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()
        if self.authority is None:
            self.rules = self.rules.on_this_machine()

    @property
    def _masks(self) -> tuple[Path, Path] | None:
        return None if self.roster is None or self.key is None else (self.key, self.roster)

    def _company(self) -> str:
        """With whom this site adds up, for its people to compare with what they were told."""
        if self._masks is None:
            bare = "it joins runs without masks alone" if self.rules.unmasked else "it joins no run"
            return (
                f"no roster of the other sites' keys: {bare}. `emfed keys roster` makes one from "
                "everybody's NAME.pub"
            )
        found = SiteIdentity.read(*self._masks).roster
        return (
            f"sums with {', '.join(sorted(found))}; roster digest {roster_digest(found)}, the same "
            "at every site"
        )

    @property
    @final
    def journal(self) -> Path:
        """Where the site's program writes what it sends, or would."""
        return self.folder / (REHEARSAL if self.dry_run else JOURNAL)

    @final
    def check(self) -> None:
        """Check what was given; writes nothing, since another process may work in the folder."""
        split_address(self.address)
        if self.authority is not None:
            if not self.authority.exists():
                raise SettingsError(
                    f"{self.authority}: there is no such file; ask the server's people for ca.pem."
                )
            if self.key is None:
                raise SettingsError(
                    "a site shows who it is: give --key NAME.key, made by `emfed keys site NAME`."
                )
            read_private_key(self.key)
        if not self.data.exists():
            raise SettingsError(f"{self.data}: there is no such file.")
        if self.seal is not None:
            read_seal(self.seal)
        if self.device is not None:
            check_device(self.device)
        if self.roster is not None:
            if self.key is None:
                raise SettingsError("--roster goes with --key: masks are a site's own.")
            SiteIdentity.read(self.key, self.roster)
        if self.authority is None:
            check_insecure_site(self.address)

    @final
    def run(self, report: StateReport) -> None:
        """Answer until interrupted; raises `EmfedError` for what trying again cannot mend."""
        self.check()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        with alone(self.folder / "join.lock") as mine:
            if not mine:
                raise EmfedError(f"another `emfed join` works in {self.folder}.")
            if many := seal_files(self.folder, self.seal, self.rules):
                report("state", f"{many} files that were kept without a seal are sealed now")
            rows = prepare(self.folder, self.data, self.columns, self.form, self.seal)
            for why in rows["left_out"].values():
                report("state", f"{why}: no run can use it")
            write_site(
                self.folder, rows | {"device": self.device}, self.rules, self.columns, self._masks
            )
            if self.dry_run:
                self.journal.unlink(missing_ok=True)
            self._told = self.journal.stat().st_size if self.journal.exists() else 0
            greeting = "; the server greets when all sites that it expects are there"
            for words in self.rules.gives_away():
                report("rules", words)
            report("masks", self._company())
            report("state", f"calling {self.address}{greeting if self.dry_run else ''}")
            logger.info("emfed %s begins to join %s", __version__, self.address)
            status = Status(self.folder)

            def tell(kind: str, words: str) -> None:
                with bearing_full_disks():
                    report(kind, words)
                if kind == "state":
                    with bearing_full_disks():
                        status.say("site", why=words)

            self.folder.joinpath("page.port").unlink(missing_ok=True)
            view, answer = SiteView(self.folder), partial(answer_fit, self.folder)
            with Console(self.folder, self.page, view, answer):
                self.work(tell)

    @abstractmethod
    def work(self, report: StateReport) -> None:
        """Do it; the folder is ours alone, and what a site needs is in it."""

    @final
    def tell(self, report: StateReport) -> None:
        """Show lines that were added to the journal."""
        journal = self.journal
        if not journal.exists() or journal.stat().st_size <= self._told:
            return
        with journal.open("rb") as file:
            file.seek(self._told)
            new = file.read()
        whole = new.rfind(b"\n") + 1
        self._told += whole
        for line in new[:whole].decode(errors="replace").splitlines():
            try:
                entry = json.loads(line)
                if entry["kind"] == "warning":  # the site's own, for nobody else
                    report("look at your rows", entry["content"])
                elif entry["kind"] == "end":
                    report("state", entry["content"])
                    last = not (self.stay or entry["content"].endswith(MORE))
                    self._over = last and not self.dry_run
                else:
                    report("would send" if self.dry_run else "sent", describe(entry))
            except (json.JSONDecodeError, KeyError):
                continue


@final
class WebSocketSiteSupervisor(SiteSupervisor):
    """The site in this process, over WebSockets."""

    def work(self, report: StateReport) -> None:
        """Stay connected and answer; a rehearsal ends when it has shown its messages."""
        from emfed.network.websocket.client import SiteConnection

        stop, step = threading.Event(), None
        if not self.dry_run:
            step = open_site(self.folder).step

        def answer(message: bytes) -> bytes:
            reply = look_first(self.folder, message) if step is None else step(message)
            self.tell(report)
            connection.over = self._over
            if self.dry_run and self.journal.exists():  # it comes as a whole
                threading.Timer(0.5, stop.set).start()  # the refusal is to leave first
            return reply

        connection = SiteConnection(
            self.address,
            answer,
            key=self.key,
            authority=self.authority,
            name=(self.key or self.data).stem,
            stay=self.stay,
        )
        connection.run(stop, report)
