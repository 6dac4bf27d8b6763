"""Sites from Python: `join` follows fits in this thread, `LocalSites` tries all of it in memory."""

from __future__ import annotations

import dataclasses
import math
import os
import shutil
import tempfile
import threading
import weakref
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, final

from emfed.core.errors import DataError, EmfedError, SettingsError
from emfed.core.noise import NoiseKey
from emfed.core.storage import ScratchDisk, write_atomic
from emfed.data.tables import Workers, WorkerTables
from emfed.data.workers import WorkerData, as_workers
from emfed.deployment.approval import owners_word
from emfed.deployment.consent import OfferedRows, OwnerTerms
from emfed.network.addresses import alone, terminated_as_interrupted
from emfed.network.conducting import Conductor
from emfed.network.exchange.followed import Consent, Ended, MemberStore
from emfed.network.exchange.frames import new_run
from emfed.network.exchange.identities import KeySigner, KnownMembers, TrialMembers, TrialSigner
from emfed.network.exchange.journalled import journal_post
from emfed.network.exchange.member import Follower
from emfed.network.exchange.member_line import MemberLine
from emfed.network.exchange.member_runs import MemberRuns, RunMember
from emfed.network.exchange.member_thread import Watcher
from emfed.network.exchange.relay import Relay
from emfed.network.exchange.statements import Roster, Signer
from emfed.network.exchange.virtual import (
    RELAY,
    Fate,
    IdentityKey,
    KnownKeys,
    VirtualNetwork,
    at_once,
)
from emfed.network.journal import Journal
from emfed.network.keys import ANALYST, check_site_name
from emfed.network.live import AskedRun, LiveSites, numbered
from emfed.network.owner_rules import SiteRules
from emfed.network.roster import read_roster
from emfed.network.spending import SiteMemory, noise_key
from emfed.network.websocket.client import StateReport

RUNS, MEMORY = "runs", "memory"
JOURNAL, MODEL = "messages.jsonl", "model.emfed"
"""Every message that left the site, and the model of the last fit, in its folder."""


def with_names(data: Workers, names: Sequence[str] | None) -> Workers:
    """Rows whose columns have names: these, or x1, x2 and so on where they have none."""
    if data.streaming:
        raise DataError(
            "a site commits to its rows when a fit begins, and those of a stream are others each "
            "time: give a table or a file. Streams go with fits in one process and in Ray."
        )
    if data.columns is not None:
        return data
    columns = numbered(data.worker(0).shape[-1])
    if names is not None and len(names) == len(columns):
        columns = tuple(names)
    if isinstance(data, WorkerData):
        return dataclasses.replace(data, columns=columns)
    assert isinstance(data, WorkerTables)
    return WorkerTables(data.tables, data.names, columns, data.row_weights, data.precision)


@final
class LocalSites(LiveSites):
    """Sites in this process, with a relay and an analyst: to try a federation out.

    All is as between machines: sites mask what they tell, their owners' rules hold, the relay adds,
    and messages are bytes. The network between them is in memory, with a clock of its own.

    Parameters
    ----------
    tables : mapping
        The rows of each site, by the site's name.
    rules : SiteRules or mapping, optional
        The rules of all owners, or of some by the names of their sites; default ones for others.
    columns : sequence of str, optional
        The columns that fits may choose among, and the names of columns that have none; None: each
        fit is of all columns that every site has, and those without names are x1, x2, ...
    directory : str or Path, optional
        Where sites keep what they have spent; None: in a folder that is thrown away.
    fate : callable
        What becomes of a message on its way: a function of sender, receiver (the relay is "") and
        bytes to a list of what arrives, each after so many seconds of the network's own clock.

    Examples
    --------
    >>> import numpy as np, emfed
    >>> rows = np.arange(180.0).reshape(3, 30, 2) % 7
    >>> with emfed.network.LocalSites(dict(zip(["north", "south", "west"], rows))) as sites:
    ...     result = emfed.fit(emfed.gaussian_mixture(1, "diag"), sites)
    >>> result.params.means.round(1)
    array([[3., 3.]])
    """

    def __init__(
        self,
        tables: Mapping[str, Any],
        *,
        rules: SiteRules | Mapping[str, SiteRules] | None = None,
        columns: Sequence[str] | None = None,
        directory: str | Path | None = None,
        fate: Fate = at_once,
    ) -> None:
        self._fate = fate
        where = Path(tempfile.mkdtemp(prefix="emfed-") if directory is None else directory)
        if directory is None:
            weakref.finalize(self, shutil.rmtree, where, ignore_errors=True)
        self._rows = {
            check_site_name(name): with_names(as_workers([table]), columns)
            for name, table in tables.items()
        }
        offered = [rows.columns or () for rows in self._rows.values()]
        shared = [name for name in (offered or [()])[0] if all(name in own for own in offered)]
        super().__init__(columns or shared or None)
        given = rules if isinstance(rules, Mapping) else dict.fromkeys(tables, rules)
        self._listed = columns
        self._rules = {name: given.get(name) or SiteRules() for name in tables}
        for name in tables:
            (where / name).mkdir(parents=True, exist_ok=True)
        self._memories = {name: SiteMemory(where / name, ScratchDisk()) for name in tables}
        self._noise = {name: NoiseKey() for name in tables}
        self._keys = {name: IdentityKey(name, os.urandom(32)) for name in (*tables, ANALYST)}
        self._roster = KnownKeys({name: key.public for name, key in self._keys.items()})
        self.ends: dict[str, Ended] = {}
        """How the last run ended at each site."""

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(sorted(self._rows))

    def follow(self, asked: AskedRun) -> tuple[Ended, Conductor]:
        if asked.keep is not None:
            raise SettingsError(
                "sites in memory are gone when the process ends, so there is nothing to go on "
                "with: leave checkpoint out."
            )
        conductor, settings = Conductor(asked), asked.agreement(new_run(), self.names, ANALYST)

        def analyst(store: MemberStore) -> Follower:
            consent = Consent(asked.make)
            return Follower(self._keys[ANALYST], self._roster, store, consent, settings=settings)

        members = {name: partial(self._site, name) for name in self.names}
        network = VirtualNetwork(
            lambda disk, now: Relay(self._roster, disk, now),
            {**members, ANALYST: analyst},
            self._fate,
        )
        for name in (RELAY, ANALYST, *self.names):
            network.start(name)

        since = math.inf

        def over() -> bool:
            nonlocal since
            conductor.look(network.follower(ANALYST))
            ends = [network.follower(name).ended for name in (ANALYST, *self.names)]
            if any(end is not None and not end.final for end in ends):
                since = min(since, network.now)
            return all(ends) or network.now - since > 2 * settings.wait

        network.run(math.inf, over)
        self.ends = {name: _ended(network.follower(name)) for name in self.names}
        return _ended(network.follower(ANALYST)), conductor

    def _site(self, name: str, store: MemberStore) -> Follower:
        rows, key = OfferedRows(self._rows[name]), self._keys[name]
        terms = OwnerTerms(
            name,
            self._rules[name],
            self.names,
            rows,
            self._memories[name],
            self._listed,
            noise=self._noise[name],
        )
        return Follower(
            key,
            self._roster,
            store,
            terms.consent(),
            rows=rows,
            commitment=rows.commitment(key.secret(b"emfed rows")),
        )


def _ended(follower: Follower) -> Ended:
    waits = Ended(words="it waits for a site whose program has ended.")
    return follower.ended or waits


# A site of its own.


@final
class _Told(Watcher):
    """Keeps the journal and the last model, and tells the site's people how its runs fare."""

    def __init__(self, folder: Path, report: StateReport) -> None:
        self._folder, self._report = folder, report
        self._journal = Journal(folder / JOURNAL)
        self._members: tuple[str, ...] = ()

    def said(self, follower: Follower, post: bytes) -> None:
        """A part is in the journal before it leaves."""
        journal_post(self._journal, follower, post)

    def moved(self, follower: Follower) -> None:
        """Tell whose sums this site's numbers are in."""
        if follower.transcript.members != self._members:
            self._members = follower.transcript.members
            self._report("state", f"fitting with {', '.join(self._members)}")

    def ended(self, end: Ended) -> None:
        """Keep the model that all have signed."""
        if end.final:
            write_atomic(self._folder / MODEL, end.state)
            self._report("model", f"all sites have signed a model: {self._folder / MODEL}")
        else:
            self._report("failed", end.words)

    def troubled(self, words: str) -> None:
        """Something is to be mended here."""
        self._report("trouble", words)


def join(
    address: str,
    data: Any,
    directory: str | Path,
    *,
    key: str | Path | None = None,
    ca: str | Path | None = None,
    roster: str | Path | None = None,
    rules: SiteRules | None = None,
    columns: Sequence[str] | None = None,
    name: str | None = None,
    stop: threading.Event | None = None,
    report: StateReport | None = None,
) -> None:
    """Take part in fits as one site, in this thread, until told to stop.

    It calls again by itself whenever the connection is lost, follows every fit that the owner's
    rules accept, and never ends because of the network. It returns soon after ``stop`` is set.
    Ctrl-C, and SIGTERM in the main thread, close the connection and raise `KeyboardInterrupt`.

    Parameters
    ----------
    address : str
        The address of the relay, like ``em.example.org:9400``. HTTPS_PROXY is heeded.
    data : table, str, Path or Source
        The rows. Columns without names are called x1, x2 and so on.
    directory : str or Path
        Where the site keeps what it must not lose: its part in each fit, what it has spent of its
        owner's allowances, the journal ``messages.jsonl`` and the last model.
    key : str or Path, optional
        The site's ``NAME.key``. Without ``key``, ``ca`` and ``roster`` there is no TLS and the
        relay must be on this machine: for trials, in which nothing is hidden.
    ca : str or Path, optional
        The relay's ``ca.pem``.
    roster : str or Path, optional
        A folder of everybody's ``NAME.pub``, each got by a way that the owner trusts.
    rules : SiteRules, optional
        The owner's rules.
    columns : sequence of str, optional
        The columns that analysts may choose among, and the names of columns that have none; None:
        each fit is of all columns.
    name : str, optional
        How the site calls itself where it has no key.
    stop : threading.Event, optional
        An event to set, from another thread, to end.
    report : callable, optional
        A function that is called with a word ("state", "model", "failed" or "trouble") and
        a sentence when something changes.

    Examples
    --------
    >>> import threading
    >>> import numpy as np
    >>> from emfed.network import join, listen
    >>> stop = threading.Event()
    >>> with listen("127.0.0.1:0", insecure=True) as sites:
    ...     options = {"name": "north", "stop": stop}
    ...     place = f"127.0.0.1:{sites.port}", np.zeros((20, 2)), "north"
    ...     site = threading.Thread(target=join, args=place, kwargs=options)
    ...     site.start()
    ...     sites.wait_for(1)
    ...     print(sites.names)
    ...     stop.set()
    ...     site.join()
    ('north',)
    """
    folder, chosen = Path(directory), SiteRules() if rules is None else rules
    files = (key, ca, roster)
    if any(files) != all(files):
        raise SettingsError(
            "a site needs its own key, the relay's ca.pem and the roster of all sites' public "
            "keys, or none of them for a trial on one machine."
        )
    signer: Signer
    members: Roster
    known: set[str] | None = None
    options: dict[str, Any] = {}
    if key is not None and ca is not None and roster is not None:
        signer, public = KeySigner.of_site(Path(key)), read_roster(Path(roster))
        members, known = KnownMembers(public, Path(ca)), {*public, signer.name}
        options = {"key": Path(key), "authority": Path(ca)}
    else:
        signer, members = TrialSigner(check_site_name(name or folder.name)), TrialMembers()
        chosen = chosen.on_this_machine()
    own, tell = with_names(as_workers([data]), columns), report or (lambda kind, words: None)
    commitment = OfferedRows(own).commitment(signer.secret(b"emfed rows"))
    for own_folder in (RUNS, MEMORY):
        (folder / own_folder).mkdir(parents=True, exist_ok=True, mode=0o700)
    copy = chosen.second_ledger
    memory = SiteMemory(folder / MEMORY, copies=[] if copy is None else [Path(copy)])
    noise = noise_key(folder / "trial.noise" if key is None else Path(key).with_suffix(".noise"))
    checking = threading.Lock()

    def make(store: MemberStore) -> Follower:
        terms = OwnerTerms(
            signer.name,
            chosen,
            known,
            OfferedRows(own),
            memory,
            columns,
            approve=partial(owners_word, folder) if chosen.ask_first else None,
            noise=noise,
            lock=checking,
        )
        return Follower(
            signer, members, store, terms.consent(), rows=terms.rows, commitment=commitment
        )

    def begin(run: str) -> RunMember:
        return RunMember(folder / RUNS / f"{run}.sqlite", make, _Told(folder, tell))

    with alone(folder / "join.lock") as mine, terminated_as_interrupted():
        if not mine:
            raise EmfedError(f"another process works in {folder}: stop it first.")
        runs: MemberRuns
        line = MemberLine(
            address,
            lambda message: runs.received(message),
            lambda: runs.connected(),
            name=signer.name,
            **options,
        )
        runs = MemberRuns(line.send, begin)
        try:
            line.run(stop, tell)
        finally:
            runs.stop()
