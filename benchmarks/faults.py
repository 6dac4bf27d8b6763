"""Random fault plans on whole fits over a relay, in virtual time, many at a time.

``python -m benchmarks faults [--masks] [--plans N] [--first S] [--keep FILE] [--minutes M]``; the
file holds a line for each plan that was tried, and the next call goes on after them.

Members and the relay are killed, also between writing and sending, and start again with their disk,
with an old backup of it, or with none; second processes use the same key; messages are lost,
repeated, late and out of order. The fit is that of a mixture, from the opening to the end.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import time
import warnings
from dataclasses import asdict, dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from tests.network.exchanges import NAMES, WATCHED, Federation, Plan, Tried, masks
from tests.network.exchanges import Trial as OneTrial

import emfed
from emfed.aggregation.integers import WORD, to_floats
from emfed.aggregation.lattice import Lattice
from emfed.core.sums import Fit, Sum
from emfed.fitting.following import Conclusion, follow
from emfed.fitting.settings import FitSettings
from emfed.network.exchange.followed import EVERYONE, Comings
from emfed.network.exchange.member import Follower

BOUND = 1e-5
"""Nats a row: what roundings may change where parts were made again."""
UNTIL = 7200.0
"""Seconds of the network's own clock after which a run has not ended."""


@dataclass(frozen=True)
class Mixture:
    """A fit of two Gaussians, to convergence."""

    def begin(
        self, sites: tuple[str, ...], state: bytes, place: bytes, comings: Comings = EVERYONE
    ) -> Fit[Conclusion]:
        settings = FitSettings(emfed.gaussian_mixture(2, "diag"), seed=3, moves=0)
        return follow(settings, len(sites), {"mean": (2,), "scatter": (2,)})

    def extend(self, rounds: int | None) -> None: ...

    def state(self, reached: Conclusion | None) -> bytes:
        return b"" if reached is None else statistics(reached).tobytes()

    def digest(self, reached: Conclusion) -> bytes:
        return hashlib.sha256(self.state(reached)).digest()


def statistics(reached: Conclusion) -> Any:
    """Where a fit ended."""
    return reached.final.estimate.point.statistics


@cache
def tables() -> dict[str, np.ndarray]:
    """Rows of all sites: two groups, of which each has another share."""
    rng = np.random.default_rng(1)
    return {
        name: np.concatenate(
            [rng.normal(0.2 * j, 1, (20 + 4 * j, 2)), rng.normal((4, 2), 1, (10 + j, 2))]
        )
        for j, name in enumerate(NAMES)
    }


@cache
def exact(sites: int) -> Conclusion:
    """The fit of so many sites in one process."""
    found = Federation(sites, program=Mixture(), tables=tables()).exact()
    assert isinstance(found, Conclusion)
    return found


@dataclass
class Watched(Federation):
    """Keeps what every part that was made stands for, as integers of Python."""

    stands: dict[tuple[int, str], list[tuple[Lattice, list[int]]]] = field(default_factory=dict)
    """By exchange and site."""

    def watch(self, member: Follower) -> None:
        super().watch(member)
        inner = WATCHED[member._me.run.public]

        def made(keys: Any, about: Any, question: Any, values: Any) -> None:
            inner(keys, about, question, values)
            numbers = stands_for(question.lattice, values, masks(keys, about, question))
            place = question.exchange, member.name
            self.stands.setdefault(place, []).append((question.lattice, numbers))

        WATCHED[member._me.run.public] = made

    @property
    def once(self) -> bool:
        """Whether every part was made once."""
        return all(len(parts) == 1 for parts in self.stands.values())

    def from_parts(self) -> Any:
        """The fit of the sums of the parts that were made, if each was made once."""
        fit, exchange, rows = self.program.begin(self.names, b"", bytes(32)), 0, 0.0
        next(fit)
        while True:
            parts = [self.stands[exchange, name][0] for name in self.names]
            lattice = parts[0][0]
            value = summed(lattice, [numbers for _, numbers in parts])
            if exchange == 0:
                value, rows = value[:-1], float(value[-1])
            try:
                fit.send(Sum(value, rows, lattice.noise(len(self.names)), 0, 0))
            except StopIteration as end:
                return end.value
            exchange += 1


def integers(array: Any) -> list[int]:
    """Integers of Python, of words in two's complement."""
    return [int.from_bytes(row.tobytes(), "little", signed=True) for row in array]


def stands_for(lattice: Lattice, values: Any, masks: Any) -> list[int]:
    """T of docs/decisions/003: what a part stands for, in the units of Z."""
    found, words = [], WORD * lattice.words
    columns = integers(lattice.integers(values)), integers(masks), lattice.fraction.tolist()
    for z, m, places in zip(*columns, strict=True):
        half = 1 << (places - 1)
        below = ((z + m + half) % (1 << words)) % (1 << places) - half
        found.append(z - below)
    return found


def summed(lattice: Lattice, parts: list[list[int]]) -> Any:
    """The sum of parts, to the nearest multiple of the lattice's guard."""
    places = (lattice.fraction + lattice.guard).tolist()
    totals = [sum(numbers) for numbers in zip(*parts, strict=True)]
    kept = [(n + (1 << (p - 1))) >> p << p for n, p in zip(totals, places, strict=True)]
    width = 8 * lattice.words + 64
    data = b"".join(number.to_bytes(width, "little", signed=True) for number in kept)
    words = np.frombuffer(data, dtype=np.uint64).reshape(len(kept), -1)
    return to_floats(words, lattice.exponents - lattice.fraction)


@dataclass(frozen=True)
class Outcome(Tried):
    """What became of a plan."""

    masked: bool = False
    once: bool = False
    """Whether nothing was made again."""
    difference: float = 0.0
    """Nats a row between the model and that of one process, without a sign."""

    @property
    def good(self) -> bool:
        """Whether all promises were kept."""
        return not self.wrong


class Trial(OneTrial):
    """A plan of a whole fit, with masks or without."""

    def __init__(self, seed: int, masked: bool) -> None:
        self.masked = masked
        super().__init__(seed)

    def made(self, plan: Plan) -> Federation:
        sites = max(3, plan.sites) if self.masked else plan.sites
        return Watched(sites, self.masked, program=Mixture(), tables=tables(), fate=plan.fate())

    def error(self, state: bytes) -> tuple[float, bool]:
        """How far the model is, and whether that is as promised.

        Without masks it is the model of one process, bit for bit. With masks it is that of the
        parts, bit for bit, where each was made once; else as near as roundings allow.
        """
        federation = self.federation
        assert isinstance(federation, Watched)
        alone, found = exact(federation.sites), np.frombuffer(state)
        away = found - statistics(federation.from_parts() if federation.once else alone)
        self.difference = abs(nats(alone, found, federation) - nats(alone, None, federation))
        same = not self.masked or federation.once
        largest = float(np.abs(away).max())
        return largest, self.difference < BOUND and not (same and largest)


def nats(alone: Conclusion, found: Any, federation: Federation) -> float:
    """The log-likelihood a row of all sites' rows."""
    model, place = alone.final.model, statistics(alone) if found is None else found
    rows = np.concatenate([tables()[name] for name in federation.names])
    return float(model.log_likelihood(rows, model.maximize(place)))


def try_plan(seed: int, masked: bool) -> Outcome:
    """Run a plan, and say what broke a promise."""
    logging.disable(logging.CRITICAL)  # what is refused is what is being tried
    warnings.simplefilter("ignore", emfed.EmfedWarning)
    trial = Trial(seed, masked)
    try:
        tried = trial.run(UNTIL)
    except Exception as error:
        return Outcome(seed, (repr(error),), np.inf, 0, 0, np.inf, np.inf, masked)
    finally:
        WATCHED.clear()  # thousands of plans are tried in one process
    assert isinstance(trial.federation, Watched)
    return Outcome(
        **asdict(tried), masked=masked, once=trial.federation.once, difference=trial.difference
    )


def bench_faults(
    plans: int,
    first: int = 0,
    masked: bool = False,
    keep: Path | None = None,
    minutes: float = np.inf,
) -> dict[str, Any]:
    """What became of so many plans; ``failed`` are the seeds of those that broke a promise."""
    began = time.perf_counter()
    outcomes = [o for o in _kept(keep, masked) if first <= o.seed < first + plans]
    known = {o.seed for o in outcomes}
    seeds = [seed for seed in range(first, first + plans) if seed not in known]
    # Each process starts afresh: a fork would copy the threads of the linear algebra. There are as
    # many as `taskset` allows.
    with multiprocessing.get_context("spawn").Pool(len(os.sched_getaffinity(0))) as pool:
        for one in pool.imap_unordered(partial(try_plan, masked=masked), seeds, chunksize=5):
            outcomes.append(one)
            if keep is not None:
                with keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(asdict(one)) + "\n")
            if time.perf_counter() - began > 60 * minutes:
                break
    once = [o for o in outcomes if o.once]
    again = [o for o in outcomes if not o.once]
    return {
        "plans": len(outcomes),
        "entries of transcripts": sum(o.entries for o in outcomes),
        "kills": sum(o.kills for o in outcomes),
        "plans with a kill": sum(o.kills > 0 for o in outcomes),
        "plans in which nothing was made again": len(once),
        "their largest difference to the sums of the parts": max(
            (o.error for o in once), default=0.0
        ),
        "largest difference of the others, nats a row": max(
            (o.difference for o in again), default=0.0
        ),
        "longest without an entry, s": max((o.largest_gap for o in outcomes), default=0.0),
        "failed": sorted(o.seed for o in outcomes if not o.good),
    }


def _kept(keep: Path | None, masked: bool) -> list[Outcome]:
    """What earlier calls tried."""
    if keep is None or not keep.exists():
        return []
    lines = map(json.loads, keep.read_text(encoding="utf-8").splitlines())
    found = [Outcome(**line | {"wrong": tuple(line["wrong"])}) for line in lines]
    return [one for one in found if one.masked is masked]
