"""What a site would send in a run: the fit on its own rows alone, in this process."""

from __future__ import annotations

import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import final

from emfed.aggregation.lattice import Lattice
from emfed.core.errors import EmfedError
from emfed.core.sums import Ask, Finish, Sum
from emfed.data.tables import Workers
from emfed.deployment.consent import OfferedRows, OwnerTerms
from emfed.deployment.joining import Joining
from emfed.network.exchange.followed import Consent, Ended, MemberStore, Program
from emfed.network.exchange.member import Follower
from emfed.network.exchange.member_runs import MemberRuns, RunMember
from emfed.network.exchange.member_thread import Watcher
from emfed.network.exchange.statements import Agreement
from emfed.network.websocket.client import StateReport

LOOK_SECONDS = 0.1
SETTLE_SECONDS = 1.0
"""For which other runs of the same server may show themselves."""
ENVELOPE = 150
"""Bytes of a message beside its part, about: its author's name, place and signature."""


def rehearse(joining: Joining, report: StateReport) -> None:
    """Ask the relay for the settings of its runs, and say what this site would send in them.

    Nothing leaves but the site's name, and that it is there.
    """
    joining.check()
    joining.folder.mkdir(parents=True, exist_ok=True)
    joining.folder.chmod(0o700)
    _, data = joining.rows(report)
    for agreement in _settings(joining, data, report):
        if agreement.title:
            report("state", f"rehearsing {agreement.title} on the rows of this site alone")
        for kind, words in rehearsed(joining, data, agreement):
            report(kind, words)
    report("state", "that was the rehearsal: nothing about the rows was sent")


def rehearsed(joining: Joining, data: Workers, agreement: Agreement) -> Iterator[tuple[str, str]]:
    """What a site would send in a run with these settings, in words with sizes."""
    rows, known = OfferedRows(data, joining.device), joining.identity()[2]
    terms = OwnerTerms(joining.name, joining.rules, known, rows, listed=joining.columns)
    try:
        program = terms.accept(agreement)
        assert program is not None  # nobody is asked here
        yield from _exchanges(program, rows, agreement)
    except EmfedError as error:
        yield "would refuse", str(error)


def _exchanges(
    program: Program, rows: OfferedRows, agreement: Agreement
) -> Iterator[tuple[str, str]]:
    """Each kind of part once, where it is asked for first; and all of them together."""
    sites, told = len(agreement.sites), set[str]()
    fit, exchange, total = program.begin(agreement.sites, b"", bytes(32)), 0, 0
    hidden = "masked" if agreement.masked else "without masks"
    try:
        ask: Ask = next(fit)
        while True:
            lattice = Lattice.placed(ask, exchange, 0)
            size = lattice.part_bytes + ENVELOPE
            total, exchange = total + size, exchange + 1
            if ask.words() not in told:
                told.add(ask.words())
                yield "would send", f"about {size} bytes, {hidden}: {ask.words()}"
            noise = lattice.noise(sites) + ask.noise
            answer = Sum(ask.part(rows), rows.total, noise, 0, 2 * sites * lattice.part_bytes)
            ask = fit.send(answer)
    except (StopIteration, Finish):
        yield "would send", f"in all about {exchange} such messages, {total / 1000:.1f} kB"


@final
class _Nobody(Watcher):
    """Looks at nothing."""

    def said(self, follower: Follower, post: bytes) -> None: ...

    def moved(self, follower: Follower) -> None: ...

    def ended(self, end: Ended) -> None: ...

    def troubled(self, words: str) -> None: ...


def _settings(joining: Joining, data: Workers, report: StateReport) -> list[Agreement]:
    """The settings of all runs that the relay names, once there is one."""
    signer, roster, _ = joining.identity()
    found: dict[str, Agreement] = {}
    leave, settled = threading.Event(), threading.Event()

    def accept(agreement: Agreement) -> None:
        found[agreement.run] = agreement
        settled.set()

    def make(store: MemberStore) -> Follower:
        return Follower(signer, roster, store, Consent(accept), rows=OfferedRows(data))

    with tempfile.TemporaryDirectory(dir=joining.folder) as place:

        def begin(run: str) -> RunMember:
            return RunMember(Path(place) / f"{run}.sqlite", make, _Nobody())

        runs: MemberRuns
        line = joining.line(lambda message: runs.received(message), lambda: runs.connected())
        runs = MemberRuns(line.send, begin)

        def watch() -> None:
            settled.wait()
            leave.wait(SETTLE_SECONDS)
            leave.set()

        threading.Thread(target=watch, daemon=True).start()
        try:
            line.run(leave, report)
        finally:
            settled.set()
            runs.stop()
    return [*found.values()]
