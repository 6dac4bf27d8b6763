"""Processes of the exchange of sums: a relay with an analyst, and a site.

They are not behind `emfed serve` and `emfed join` yet.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, final

from emfed.core.errors import EmfedError, FederationError, SettingsError
from emfed.core.records import RoundRecord
from emfed.core.storage import write_atomic
from emfed.data.tables import Workers
from emfed.deployment.approval import owners_word
from emfed.deployment.config import Config
from emfed.deployment.consent import OfferedRows, OwnerTerms
from emfed.deployment.programs import program_of
from emfed.deployment.site import JOURNAL, MEMORY, MODEL
from emfed.fitting.program import settings_of
from emfed.fitting.progress import round_words
from emfed.network.addresses import alone
from emfed.network.exchange.followed import Consent, Ended, MemberStore, Program
from emfed.network.exchange.frames import is_run, new_run
from emfed.network.exchange.identities import KeySigner, KnownMembers
from emfed.network.exchange.journalled import journal_post
from emfed.network.exchange.member import Follower
from emfed.network.exchange.member_line import MemberLine
from emfed.network.exchange.member_runs import MemberRuns, RunMember
from emfed.network.exchange.member_thread import Watcher
from emfed.network.exchange.relay import Relay
from emfed.network.exchange.relay_server import RelayServer
from emfed.network.exchange.statements import Agreement, is_coded
from emfed.network.exchange.transcript import Stage
from emfed.network.journal import Journal
from emfed.network.keys import ANALYST, read_site_keys
from emfed.network.masking import read_roster
from emfed.network.owner_rules import SiteRules
from emfed.network.site import StateReport
from emfed.network.spending import SiteMemory, noise_key

logger = logging.getLogger(__name__)
RUNS = "runs"
"""The files of all runs, of a relay and of a member, in its folder."""
LOOK_SECONDS = 0.1
"""Between two looks at a thread: signals are heard between them."""


def progress(record: RoundRecord) -> str:
    """A round in words."""
    first, *rest = round_words(record)
    return f"{first}: {', '.join(rest)}" if rest else first


@final
class _Told(Watcher):
    """Tells people how a member fares, and keeps the journal and the model."""

    def __init__(self, model: Path, report: StateReport, journal: Path | None = None) -> None:
        self._model, self._report = model, report
        self._journal = Journal(journal)
        self._state = ""
        self.act: Callable[[Follower], None] = lambda follower: None

    def said(self, follower: Follower, post: bytes) -> None:
        """A part is in the journal before it leaves."""
        journal_post(self._journal, follower, post)

    def moved(self, follower: Follower) -> None:
        about = follower.transcript
        words = about.stage.name.lower()
        if about.stage is Stage.GATHERING:
            missing = [name for name in about.agreement.sites if name not in about.hellos]
            words = f"waiting for {', '.join(missing)}"
        elif about.stage is Stage.RUNNING:
            words = f"fitting with {', '.join(about.members)}" + ", paused" * about.paused
        if words != self._state:
            self._state = words
            self._report("state", words)
        self.act(follower)

    def ended(self, end: Ended) -> None:
        if not end.final:
            self._report("failed", end.words)
            return
        self._model.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(self._model, end.state)
        self._report("model", f"all sites have signed this model; it is in {self._model}")

    def troubled(self, words: str) -> None:
        self._report("trouble", words)


def follow_as_site(
    address: str,
    data: Workers,
    folder: Path,
    *,
    key: Path,
    authority: Path,
    roster: Path,
    rules: SiteRules | None = None,
    stop: threading.Event | None = None,
    report: StateReport = lambda kind, words: None,
) -> Ended:
    """Take part in one fit with these rows, until it is over; gives how it ended.

    Raises `EmfedError` for what trying again cannot mend, and where ``stop`` was set before the
    end.
    """
    rules = SiteRules() if rules is None else rules
    signer, public = KeySigner.of_site(key), read_roster(roster)
    members = KnownMembers(public, authority)
    rows = OfferedRows(data)
    commitment = rows.commitment(signer.secret(b"emfed rows"))
    watcher = _Told(folder / MODEL, report, folder / JOURNAL)

    copy = rules.second_ledger
    terms = OwnerTerms(
        signer.name,
        rules,
        set(public) | {signer.name},
        rows,
        SiteMemory(folder / MEMORY, copies=[] if copy is None else [Path(copy)]),
        noise=noise_key(key.with_suffix(".noise")),
        callbacks=(lambda record: report("round", progress(record)),),
        approve=partial(owners_word, folder) if rules.ask_first else None,
    )

    def make(store: MemberStore) -> Follower:
        return Follower(signer, members, store, terms.consent(), rows=rows, commitment=commitment)

    def begin(run: str) -> RunMember | None:
        return None if runs.members else RunMember(folder / RUNS / f"{run}.sqlite", make, watcher)

    (folder / RUNS).mkdir(parents=True, exist_ok=True, mode=0o700)
    with alone(folder / "join.lock") as mine:
        if not mine:
            raise EmfedError(f"another process works in {folder}: stop it first.")
        runs: MemberRuns
        line = MemberLine(
            address,
            lambda message: runs.received(message),
            lambda: runs.connected(),
            key=key,
            authority=authority,
            name=signer.name,
            stay=False,
        )
        runs = MemberRuns(line.send, begin)
        leaving = threading.Event()

        def watch() -> None:
            while not runs.over and not (stop is not None and stop.is_set()):
                time.sleep(LOOK_SECONDS)
            time.sleep(LOOK_SECONDS)  # what was said last leaves first
            leaving.set()

        threading.Thread(target=watch, daemon=True).start()
        try:
            line.run(leaving, report)
        finally:
            runs.stop()
        for thread in runs.members.values():
            if thread.error is not None:
                raise thread.error
            if thread.end is not None:
                return thread.end
        raise EmfedError("the fit was not over: the same command goes on from here.")


def document_of(config: Config) -> dict[str, Any]:
    """What a configuration asks for, as all members are told."""
    settings = config.settings
    fit = {"scores": settings.scores, **config.said["fit"]}
    if settings.epsilon is not None:
        fit |= {"epsilon": settings.epsilon, "delta": settings.delta}
    about = {"model": config.said["model"], "algorithm": config.said["algorithm"], "fit": fit}
    document = {**about, "columns": config.said["columns"]}
    settings_of(document, config.masked())  # whatever is wrong with it is said here
    return json.loads(json.dumps(document))


def serve_fit(
    config: Config,
    report: StateReport = lambda kind, words: None,
    make: Callable[..., Relay] = Relay,
) -> Ended:
    """A relay and an analyst in one process, for one fit; gives how it ended."""
    keys, folder = config.place("keys"), config.place("folder")
    document, signer = document_of(config), KeySigner.of_analyst(keys)
    sites, _ = read_site_keys(keys)
    members = KnownMembers(sites, keys / "ca.pem")
    run = run_of(folder)
    settings = Agreement(
        tuple(sorted(sites)),
        (ANALYST,),
        config.masked(),
        newcomers=config.sites.admit and config.settings.epsilon is None,
        run=run,
        program=document,
        coded=is_coded(config.masked(), document),
    )

    def accept(agreement: Agreement) -> Program:
        if agreement.program != document:
            raise FederationError(
                f"{folder} holds a fit with other settings than {config.path.name}: put these "
                "back, or give the new one a folder and an output of its own."
            )
        show = (lambda record: report("round", progress(record)),)
        return program_of(document, agreement.masked, show)

    with alone(folder / "serve.lock") as mine:
        if not mine:
            raise EmfedError(f"another server works in {folder}.")
        watcher = _Told(config.place("output") / MODEL, report)
        watcher.act = _begins(config.sites.expected)
        host, port = config.server.host, config.server.port
        with RelayServer(host, port, keys, members, folder / RUNS, make) as server:

            def member(store: MemberStore) -> Follower:
                return Follower(signer, members, store, Consent(accept), settings=settings)

            runs: MemberRuns
            runs = MemberRuns(server.attach(ANALYST, lambda message: runs.received(message)))
            thread = runs.start(run, RunMember(folder / "analyst.sqlite", member, watcher))
            try:
                while not thread.over.is_set():
                    time.sleep(LOOK_SECONDS)
                if thread.error is not None:
                    raise thread.error
                assert thread.end is not None
                if thread.end.final:
                    _say_farewell(server, set(sites), config.sites.farewell, report)
                return thread.end
            finally:
                thread.stop()


def run_of(folder: Path) -> str:
    """The name of the run in a folder, drawn when it is asked for first."""
    path = folder / "run.name"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_atomic(path, new_run().encode())
    name = path.read_text("ascii")
    if not is_run(name):
        raise SettingsError(f"{path} is damaged: delete {folder}, or put it back from a backup.")
    return name


def _begins(expected: int) -> Callable[[Follower], None]:
    """Orders the fit to begin once so many sites are there, though more may come."""
    ordered = False

    def act(follower: Follower) -> None:
        nonlocal ordered
        about = follower.transcript
        here = [name for name in about.agreement.sites if name in about.hellos]
        if about.stage is Stage.GATHERING and len(here) >= expected and not ordered:
            ordered = True
            follower.order("begin")

    return act


def _say_farewell(
    server: RelayServer, sites: set[str], seconds: float, report: StateReport
) -> None:
    """Stay until each site that takes part has got the end, and left."""
    end, here, untold = time.monotonic() + seconds, set(server.workers()), sites
    while untold and time.monotonic() < end:
        time.sleep(LOOK_SECONDS)
        now = set(server.workers())
        untold -= here - now
        here |= now
    if untold:
        report("state", f"not told that it is over: {', '.join(sorted(untold))}")
