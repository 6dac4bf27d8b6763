"""The fit, top to bottom: open, start, rounds, escape, choose (docs/decisions/001).

It is a generator without I/O: it yields asks and is sent sums. A loop in one process and every
member of a federation between machines run this same program.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from emfed.artifacts.result import criterion
from emfed.core.protocols import Model, free_parameters
from emfed.core.sums import Fit, FloatArray
from emfed.fitting.climb import Climbed, Company, climb
from emfed.fitting.escape import charged, escaped
from emfed.fitting.joining import together
from emfed.fitting.moving import with_one_less, with_one_more
from emfed.fitting.opening import Opened, opened
from emfed.fitting.race import Race
from emfed.fitting.starting import starts
from emfed.fitting.starts.sketch import Sketch

MOST_GAIN = 0.5
"""Nats a row that proposals are granted to gain: a neighbouring number of components that needs
more to be chosen is left alone."""


@final
@dataclass(frozen=True)
class Plan:
    """What a fit is asked to do, in words and limits.

    Parameters
    ----------
    models : sequence of Model
        The candidates: one, or one for each number of components.
    workers : int
        How many workers there are.
    shapes : mapping
        The shapes of one worker's summary.
    start, starts, seed
        How starts are found, how many compete, and the seed of their draws.
    tolerance, rounds, moves
        Nats a row that may be left, exchanges at most, and proposals that are tried at once.
    by : str
        The criterion that chooses among candidates.
    """

    models: Sequence[Model]
    workers: int
    shapes: Mapping[str, tuple[int, ...]]
    start: str = "auto"
    starts: int = 1
    seed: int = 0
    tolerance: float = 1e-6
    rounds: int = 1000
    moves: int = 3
    by: str = "bic"


@final
@dataclass(frozen=True, eq=False)
class Candidate:
    """A candidate where its fit ended."""

    model: Any
    climbed: Climbed
    criterion: float


@final
@dataclass(frozen=True, eq=False)
class Found:
    """What a fit came to."""

    opened: Opened
    candidates: list[Candidate]
    chosen: int

    @property
    def best(self) -> Candidate:
        """The candidate that was chosen."""
        return self.candidates[self.chosen]


def follow(plan: Plan, sketch: Sketch | None = None) -> Fit[Found]:
    """Open, start, make rounds, escape local optima, choose."""
    told = yield from opened(plan.models[0], plan.shapes)
    company = Company(plan.workers, told.rows)
    models = [told.bind(model) for model in plan.models]
    begun = yield from _begun(plan, models, company, sketch)
    climbed = yield from _raced(plan, models, company, begun)
    candidates = [
        _candidate(plan, model, company, found)
        for model, found in zip(models, climbed, strict=True)
    ]
    candidates = yield from _refined(plan, company, candidates)
    return Found(told, candidates, _best(candidates))


def _begun(
    plan: Plan, models: Sequence[Any], company: Company, sketch: Sketch | None
) -> Fit[list[list[FloatArray]]]:
    """Where each candidate starts; a model that the opening says all of starts at its optimum."""
    known = {j: exact for j, model in enumerate(models) if (exact := _closed(model)) is not None}
    others = [j for j in range(len(models)) if j not in known]
    found = yield from starts(
        [models[j] for j in others], company, plan.start, plan.starts, plan.seed, sketch
    )
    begun = dict(zip(others, found, strict=True))
    return [[known[j]] if j in known else begun[j] for j in range(len(models))]


def _closed(model: Any) -> FloatArray | None:
    exact: FloatArray | None = model.closed_form()
    return exact if exact is not None and model.inside(exact) else None


def _raced(
    plan: Plan, models: Sequence[Any], company: Company, begun: Sequence[Sequence[FloatArray]]
) -> Fit[list[Climbed]]:
    """All candidates and all their starts in the same rounds; the best start of each candidate.

    A candidate that cannot be chosen any more is given up, and so is a start that cannot win.
    """
    places = [(j, own) for j, each in enumerate(begun) for own in each]
    race = Race([_charge(plan, models[j], company) for j, _ in places])
    judge = race if len(places) > 1 else None
    climbs = [
        climb(models[j], company, own, plan.tolerance, plan.rounds, judge, place)
        for place, (j, own) in enumerate(places)
    ]
    ended = yield from together(climbs)
    best: dict[int, Climbed] = {}
    for (j, _), found in zip(places, ended, strict=True):
        if j not in best or charged(models[j], company, found) > charged(
            models[j], company, best[j]
        ):
            best[j] = found
    return [best[j] for j in range(len(models))]


def _charge(plan: Plan, model: Any, company: Company) -> float:
    """Nats a row by which the criterion judges a candidate lower for its size."""
    if len(plan.models) == 1:
        return 0.0
    return criterion(plan.by, 0.0, 0.0, company.rows, free_parameters(model)) / (2 * company.rows)


def _candidate(plan: Plan, model: Any, company: Company, found: Climbed) -> Candidate:
    if len(plan.models) == 1:
        return Candidate(model, found, 0.0)
    owed = found.point.objective - charged(model, company, found)
    likelihood, entropy = found.point.values.tolist()
    free = free_parameters(model)
    value = criterion(plan.by, likelihood - owed, entropy, company.rows, free)
    return Candidate(model, found, value)


def _best(candidates: Sequence[Candidate]) -> int:
    return int(np.argmin([one.criterion for one in candidates]))


def _refined(plan: Plan, company: Company, candidates: list[Candidate]) -> Fit[list[Candidate]]:
    """Escape from local optima: the best candidate, then its neighbours, each once."""
    done: set[int] = set()
    room = 2 * MOST_GAIN * company.rows
    while True:
        best = _best(candidates)
        near = [j for j in (best, best + 1, best - 1) if 0 <= j < len(candidates)]
        limit = candidates[best].criterion + room
        todo = [j for j in near if j not in done and candidates[j].criterion <= limit]
        if not todo:
            return candidates
        j = todo[0]
        done.add(j)
        one = candidates[j]
        beside = list(_beside(candidates, j))
        found = yield from escaped(
            one.model, company, one.climbed, plan.tolerance, plan.moves, beside, plan.rounds
        )
        candidates = [*candidates]
        candidates[j] = _candidate(plan, one.model, company, found)


def _beside(candidates: Sequence[Candidate], j: int) -> list[FloatArray]:
    """Where a candidate may go on from: its neighbours with a component more, or less."""
    model, out = candidates[j].model, list[FloatArray]()
    components = [candidate.model.describe().get("n_components", 1) for candidate in candidates]
    for other, count in zip(candidates, components, strict=True):
        more = count - components[j]
        if more == -1:
            out += with_one_more(model, other.model, other.climbed.point.statistics)
        elif more == 1:
            out += with_one_less(model, other.model, other.climbed.point.statistics)
    return out
