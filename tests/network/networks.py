"""A whole run over a network that misbehaves, from a seed: server, sites, disks and messages.

The coordinator, the sites and their stores are the real ones; the transport loses, repeats, delays,
reorders, cuts, spoils and replays what it carries, processes are killed between any two writes,
disks lose what was not synced, and sometimes everything. After every round, and after every crash
of the server, the invariant of `emfed.algorithms.memory` is measured on what is on the disks.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any, final
from unittest.mock import patch

import numpy as np

from emfed.algorithms import EM, AutoEM, Bernoulli, Everyone, FedEM, VRFedEM
from emfed.algorithms.memory import gap
from emfed.compressors import Dithering, Identity, RandomSparsification, SubtractiveDithering
from emfed.core.errors import EmfedError, ParticipationError
from emfed.core.protocols import Algorithm, FloatArray, Model, Participation, View, WorkerStates
from emfed.core.streams import Purpose, normals, uniforms
from emfed.data import as_workers
from emfed.fitting.driver import begin_run, main_view, open_session, start_at
from emfed.fitting.rounds import Run
from emfed.fitting.settings import FitSettings
from emfed.models import LinearGaussian, gaussian_mixture
from emfed.network import LoopFederation, RemoteFederation, Site, SiteRules, Transport, masking
from emfed.network.inprocess import narrow
from emfed.network.rules import Refusal
from emfed.network.store import SiteStore, State
from tests.network.disks import Killed, SimulatedDisk

_ONE = np.zeros(1, dtype=np.int64)
CALM = 150
SETTLED = 1e-10
"""So near the fixed point, in a step and in all, calm rounds end: a hundredth of what a plan may
miss it by."""
LONGEST = 100
"""Processes of the server after which a plan counts as one that never ends."""
SERVER = Path("server")
CHECKPOINT = SERVER / "run.checkpoint"


@final
class Dice:
    """Numbers in [0, 1), one after the other."""

    def __init__(self, seed: int) -> None:
        self._seed, self._block, self._left = seed, 0, list[float]()

    def __call__(self) -> float:
        """The next."""
        if not self._left:
            drawn = uniforms(self._seed, self._block, Purpose.NETWORK_FAULTS, _ONE, 256)
            self._left, self._block = drawn[0].tolist(), self._block + 1
        return self._left.pop()

    def pick(self, options: Any) -> Any:
        """One of several."""
        return options[int(self() * len(options))]


@final
@dataclass(frozen=True)
class NetworkPlan:
    """Probabilities per message, or per round for the server's."""

    lose_request: float = 0.0
    lose_reply: float = 0.0
    repeat_request: float = 0.0
    repeat_reply: float = 0.0
    delay_request: float = 0.0
    delay_reply: float = 0.0
    spoil_request: float = 0.0
    spoil_reply: float = 0.0
    kill_worker: float = 0.0
    kill_server: float = 0.0
    power: float = 0.0
    """Of kills: how many are power cuts."""
    lose_disk: float = 0.0

    @classmethod
    def draw(cls, dice: Dice, disks: bool) -> NetworkPlan:
        """A plan at random: most faults rare or absent, some frequent."""
        rates = {f.name: dice.pick((0.0, 0.05, 0.25)) for f in fields(cls)}
        rates["power"] = dice.pick((0.0, 0.5, 1.0))
        rates["lose_disk"] = dice.pick((0.0, 0.02)) if disks else 0.0
        return cls(**rates)


@final
class FaultyTransport(Transport):
    """Sites on simulated disks behind a network that follows a plan."""

    def __init__(
        self,
        tables: Mapping[str, FloatArray],
        plan: NetworkPlan,
        dice: Dice,
        identities: Mapping[str, Any] | None = None,
        replays: Dice | None = None,
        lives: Dice | None = None,
    ) -> None:
        self.tables, self.plan, self.dice, self.replays = dict(tables), plan, dice, replays
        self.lives, self._alive = lives, dict[str, Site]()
        """With ``lives`` a process answers five messages on average; else each has its own."""
        self._sent = {key: list[bytes]() for key in tables}
        """With ``replays``: all that was ever sent, of which some comes again at any time."""
        self.identities = {} if identities is None else identities
        """With masks: who everybody is."""
        self.disks = {key: SimulatedDisk(dice) for key in tables}
        self.wiped: set[str] = set()
        """Workers whose disk was lost since the last generation began."""
        self.kills = 0
        self.keep_fuses = False
        """Whether a fuse burns on over the worker's processes, to die at one given write."""
        self.up = self.down = 0
        self._late_requests: list[tuple[str, bytes]] = []
        self._late_replies: list[tuple[str, bytes]] = []

    def workers(self) -> list[str]:
        """All of them."""
        return list(self.tables)

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        """What is on its way from before, then this, each perhaps spoiled, in any order."""
        hit, plan = self.hit, self.plan
        self.down += sum(map(len, messages.values()))
        requests, self._late_requests = self._late_requests, []
        for key, message in messages.items():
            if hit(plan.delay_request):
                self._late_requests.append((key, message))
            elif not hit(plan.lose_request):
                requests += [(key, message)] * (2 if hit(plan.repeat_request) else 1)
        if self.replays is not None:
            for key, sent in self._sent.items():
                if sent and self.replays() < 0.2:
                    requests.append((key, self.replays.pick(sent)))
                sent += [messages[key]] if key in messages else []
        replies, self._late_replies = self._late_replies, []
        for key, message in self._shuffled(requests):
            answer = self._step(key, self._spoiled(message, plan.spoil_request))
            if answer is None or hit(plan.lose_reply):
                continue
            if hit(plan.delay_reply):
                self._late_replies.append((key, answer))
            else:
                replies += [(key, answer)] * (2 if hit(plan.repeat_reply) else 1)
        for key, answer in self._shuffled(replies):
            spoiled = self._spoiled(answer, plan.spoil_reply)
            self.up += len(spoiled)
            yield key, spoiled

    def hit(self, rate: float) -> bool:
        """Whether a fault of this probability strikes now."""
        return rate > 0 and self.dice() < rate

    def _shuffled(self, items: list[tuple[str, bytes]]) -> list[tuple[str, bytes]]:
        return [item for _, item in sorted(((self.dice(), i) for i in items), key=lambda p: p[0])]

    def _spoiled(self, message: bytes, rate: float) -> bytes:
        """Cut short, or with a byte changed."""
        if not self.hit(rate):
            return message
        at = int(self.dice() * len(message))
        if self.dice() < 0.5:
            return message[:at]
        return (
            message[:at] + bytes([message[at] ^ (1 + int(self.dice() * 255))]) + message[at + 1 :]
        )

    def _step(self, key: str, message: bytes) -> bytes | None:
        """One worker's step, whose process may die between any two writes."""
        disk, lives_on = self.disks[key], self.lives is not None and self.lives() > 0.2
        if self.hit(self.plan.lose_disk):
            disk.wipe()
            self.wiped.add(key)
            lives_on = False
        if self.hit(self.plan.kill_worker):
            disk.fuse = int(self.dice() * 6)
        site = self._alive.pop(key, None)
        if site is None or not lives_on:
            site = Site(
                self.tables[key],
                key,
                disk=disk,
                rules=SiteRules.loosest(),
                identity=self.identities.get(key),
                simulated=True,
            )
        try:
            answer = site.step(message)
        except Killed:
            answer = None
        spared = self.keep_fuses or disk.fuse is None or self.dice() < 0.5
        if answer is not None and spared:  # or it wrote all, and dies before it speaks
            if not self.keep_fuses:
                disk.fuse = None
            self._alive[key] = site
            return answer
        self.kills += 1
        disk.crash(self.hit(self.plan.power))
        return None

    def rows(self, run: int) -> list[State | None]:
        """What each worker's disk holds of a run."""
        found: list[State | None] = []
        for key, disk in self.disks.items():
            try:
                found.append(SiteStore(Path(key) / f"{run:016x}", disk).state())
            except Refusal:  # damaged
                found.append(None)
        return found


@final
@dataclass(frozen=True)
class Outcome:
    """What became of a plan."""

    seed: int
    gap: float
    """The largest relative violation of the invariant that was seen."""
    error: float
    """How far the answer is from the undisturbed one; NaN where faults may move it."""
    rounds: int
    kills: int
    """Of workers and of the server."""
    generations: int
    bytes_agree: bool
    """Whether the ledger has the bytes that crossed, where the server was not killed."""

    @property
    def good(self) -> bool:
        """Exact to what is promised."""
        return self.gap < 1e-12 and not self.error > 1e-8 and self.bytes_agree


@final
@dataclass(frozen=True)
class Case:
    """A run that faults are tried on."""

    model: Model
    tables: dict[str, FloatArray]
    algorithm: Algorithm
    participation: Participation
    rounds: int
    everyone: bool
    """Whether a round waits for all it asked: then faults must not change the answer at all."""
    calm: int = 0
    """Rounds without faults at the end, in which the run must come to the undisturbed answer,
    whatever disks were lost: for full local passes, where that is one point."""

    narrows: tuple[tuple[int, tuple[int, ...]], ...] = ()
    """Rounds after which only some of the candidates are left."""

    masks: bool = False

    def settings(self, seed: int) -> FitSettings:
        """What is fitted: just so many rounds; of three candidates, where some are to be left."""
        return FitSettings(
            candidate if self.narrows else self.model,
            n_components=(1, 2, 3) if self.narrows else None,
            algorithm=self.algorithm,
            participation=self.participation,
            rounds=self.rounds,
            tol=0,
            seed=seed,
            patience=None,  # here everyone comes back
            masks=self.masks,
        )

    @property
    def fixed_point(self) -> FloatArray:
        """Where a linear model ends: the mean of all rows."""
        rows: FloatArray = np.concatenate(list(self.tables.values()))
        return rows.mean(axis=0)

    def settled(self, run: Run) -> bool:
        """Whether calm rounds came to the undisturbed answer, and the last of them hardly moved."""
        state, last = run.state, run.records[-1]
        if not self.calm or (last.squared_H or 0.0) > SETTLED**2:
            return False
        return _distance(state.statistics, self.fixed_point) < SETTLED

    def narrow(self, run: Run) -> None:
        """Go on with fewer candidates, if it is time for it."""
        for after, parts in self.narrows:
            if run.state.round == after + 1 and run.view.parts != parts:
                run.narrow(View(parts))


def candidate(number: int) -> Model:
    """Models of the same rows that differ in their rate."""
    return LinearGaussian(0.5 + 0.1 * number)


def draw_case(seed: int, dice: Dice, masks: bool = False) -> Case:
    """A small federation, and an algorithm with any compressor; of three at least with masks."""
    sizes = [3 + int(dice() * 5) for _ in range(2 + masks + int(dice() * 3))]
    noise = normals(seed, 1, Purpose.NETWORK_FAULTS, _ONE, 2 * sum(sizes))[0].reshape(-1, 2)
    parts = np.split(noise, np.cumsum(sizes)[:-1])
    tables = {f"w{i}": part + 4 * dice() for i, part in enumerate(parts)}
    mixture = dice() < 0.15
    model: Model = gaussian_mixture(2, "diag") if mixture else LinearGaussian(0.8)
    up = dice.pick(
        (Identity(), Identity("float32"), Dithering(2), SubtractiveDithering(0.5))
        + ((RandomSparsification(1),) if not mixture else ())
    )
    step = 0.3 if mixture else None
    common = {"memory_start": dice.pick(("zero", "mean-field")), "step_size": step}
    algorithm: Algorithm = dice.pick(
        (
            EM(),
            FedEM(up, **common),
            FedEM(up, broadcast=Identity("float32"), **common),
            FedEM(up, batch_size=2, **common),
            AutoEM(),
            AutoEM(batch_size=2),
            VRFedEM(up, batch_size=2, inner_rounds=3, **common),
        )
    )
    participation = dice.pick((Everyone(), Everyone() if masks else Bernoulli(0.7)))
    everyone = dice() < 0.5
    # EM has no memories: without those who are absent it goes elsewhere, as it should.
    full = (isinstance(algorithm, EM) and isinstance(participation, Everyone)) or (
        isinstance(algorithm, FedEM) and algorithm.batch_size is None
    )
    calm = CALM if full and not mixture and not everyone and dice() < 0.2 else 0
    narrows = ((2, (0, 2)), (4, (2,))) if not (mixture or calm) and dice() < 0.3 else ()
    rounds = 5 + int(dice() * 4)
    return Case(model, tables, algorithm, participation, rounds, everyone, calm, narrows, masks)


@lru_cache
def _known() -> dict[str, Any]:
    """Who is who in masked runs."""
    return masking.SiteIdentity.everybody(f"w{i}" for i in range(5))


@contextmanager
def signed_once() -> Iterator[None]:
    """Signatures are made and verified once each, whichever process of a site asks.

    A process that a fault ends would do both again: a third of the time of a masked plan.
    """
    known: dict[Any, Any] = {}

    def once(inner: Callable[..., Any]) -> Callable[..., Any]:
        def found(key: Any, *told: bytes) -> Any:
            place = (inner, id(key), *told)  # keys are those of `_known`, which stay
            if place not in known:
                known[place] = inner(key, *told)
            return known[place]

        return found

    with (
        patch.object(masking, "sign", once(masking.sign)),
        patch.object(masking, "verify", once(masking.verify)),
    ):
        yield


def try_plan(seed: int, masks: bool = False) -> Outcome:
    """One random plan on one random case; see `Outcome.good`.

    With masks every sum takes two exchanges, and all that can go wrong does so between them, too.
    """
    dice = Dice(seed)
    case = draw_case(seed, dice, masks)
    plan = NetworkPlan.draw(dice, disks=not case.everyone)
    known = _known() if masks else None
    # Dice of their own, so that plans stay those they were.
    replays, lives = (Dice(seed + 2**40), Dice(seed + 2**41)) if masks else (None, None)
    trial = Trial(seed, case, FaultyTransport(case.tables, plan, dice, known, replays, lives))
    with signed_once():
        trial.go()
    error = np.nan
    if case.everyone:
        error = _distance(trial.statistics, undisturbed(case, seed))
    elif case.calm:
        error = _distance(trial.statistics, case.fixed_point)
    return trial.outcome(error)


def undisturbed(case: Case, seed: int) -> FloatArray:
    """The statistics that the case ends with where nothing goes wrong."""
    settings, workers = case.settings(seed), LoopFederation(as_workers(case.tables))
    session, parts = open_session(settings, workers, [])
    view = main_view(session, parts, False)
    run = begin_run(settings, session, view, start_at(settings, session, parts, view))
    while run.state.round <= case.rounds:
        run.step()
        case.narrow(run)
    return run.state.statistics


def _rows_in(run: Run, state: State | None) -> WorkerStates | None:
    """A site's memories in the run's present phase; it may not have heard of it yet."""
    if state is None:
        return None
    told = json.loads(state.phase)
    if not run.since <= told["phase"] <= run.phase:
        return None
    places = run.session.bound.kept(View.read(told.get("view", {})), run.view)
    return narrow(state.rows, run.algorithm.state_fields(len(state.statistics)), places)


def _distance(found: FloatArray, right: FloatArray) -> float:
    return float(np.abs(found - right).max()) / (1 + float(np.abs(right).max()))


@final
class Trial:
    """A run to its end through all faults, by as many server processes as it takes."""

    def __init__(self, seed: int, case: Case, transport: FaultyTransport) -> None:
        self.seed, self.case, self.transport = seed, case, transport
        self.disk = SimulatedDisk(transport.dice)
        self.statistics: FloatArray = np.empty(0)
        self.gap, self.rounds, self.generations, self.crashes = 0.0, 0, 0, 0
        self.bytes_agree = True
        self.keep_fuse = False
        """Whether a fuse burns on from round to round, to die at one given write."""

    def outcome(self, error: float) -> Outcome:
        """In figures."""
        kills = self.transport.kills + self.crashes
        return Outcome(
            self.seed, self.gap, error, self.rounds, kills, self.generations, self.bytes_agree
        )

    def go(self) -> None:
        """Server after server, until the rounds are made."""
        for _ in range(LONGEST):
            try:
                if self._serve():
                    return
            except (Killed, ParticipationError) as error:
                if isinstance(error, Killed):
                    self.crashes += 1
                    self.disk.crash(self.transport.hit(self.transport.plan.power))
        raise EmfedError(f"plan {self.seed} did not end.")

    def _open(self) -> tuple[RemoteFederation, Run]:
        everyone = len(self.case.tables) if self.case.everyone else 1
        federation = RemoteFederation(
            self.transport,
            SERVER,
            deadline=1.0,
            minimum=everyone,
            attempts=30,
            pause=0,
            disk=self.disk,
        )
        settings = self.case.settings(self.seed)
        session, parts = open_session(settings, federation, [])
        view = main_view(session, parts, False)
        goes_on = self.disk.read(CHECKPOINT) is not None
        begun = None if goes_on else start_at(settings, session, parts, view)
        run = begin_run(settings, session, view, begun)
        if goes_on:
            run.restore(CHECKPOINT, self.disk)
        return federation, run

    def _serve(self) -> bool:
        """One process of the server; True when all rounds are made."""
        transport, plan = self.transport, self.transport.plan
        fresh = self.disk.calls == transport.up == transport.down == 0
        federation, run = self._open()
        self._check(federation, run)
        while run.state.round <= self.case.rounds + self.case.calm:
            if run.state.round > self.case.rounds:
                transport.plan = plan = NetworkPlan()
                if self.case.settled(run):
                    break
            if not self.keep_fuse:
                dies = transport.hit(plan.kill_server)
                self.disk.fuse = int(transport.dice() * 5) if dies else None
            if (
                self.disk.fuse == 4 and not self.keep_fuse
            ):  # after the replies came, before anything is written
                run.step()
                self.case.narrow(run)
                raise Killed
            generation = run.state.generation
            run.step()
            self.case.narrow(run)
            run.save(CHECKPOINT, self.disk)
            if run.state.generation > generation:
                transport.wiped.clear()
            self._check(federation, run)
        self.disk.fuse = None
        self.statistics, self.rounds = run.state.statistics, run.state.round - 1
        self.generations = run.state.generation
        if fresh:
            crossed = (transport.up, transport.down)
            outside = federation.outside
            charged = (
                run.ledger.total("up") + outside["up"],
                run.ledger.total("down") + outside["down"],
            )
            self.bytes_agree = crossed == charged
        return True

    def _check(self, federation: RemoteFederation, run: Run) -> None:
        """The invariant on what is on the disks; between the loss of one and its discovery
        there is none.
        """
        if self.transport.wiped:
            return
        states = enumerate(self.transport.rows(federation.members.run))
        known = {n: rows for n, state in states if (rows := _rows_in(run, state)) is not None}
        if not known:
            return
        workers = np.array(list(known), dtype=np.int64)
        names = run.algorithm.state_fields(run.model.layout.size)
        rows = {name: np.concatenate([own[name] for own in known.values()]) for name in names}
        weights = run.weights
        if self.case.masks:  # the server does not know them
            sizes = np.array([len(table) for table in self.case.tables.values()])
            weights = sizes / sizes.sum()
        found = gap(run.state.memory, run.state.generation, run.accepted, weights, workers, rows)
        self.gap = max(self.gap, found)
