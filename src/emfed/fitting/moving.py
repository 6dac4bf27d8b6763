"""Moves of components after a run has converged: a fit that ended below its best is led on.

EM ends at the optimum that its start leads to. A start by workers is drawn from sums over buckets,
which miss what is narrow or has few rows, so that two components may share what one describes as
well, while another covers what needs two. The server knows the two that lose least as one. It
merges them, splits another with the free one (the split and merge EM of Ueda, Nakano, Ghahramani
and Hinton, 2000), and makes more rounds; what gains is kept. No message tells more than before. Of
k-means the server knows the cost itself; of a mixture everyone is asked for the log-likelihood.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from itertools import chain, combinations, islice
from math import inf
from typing import Any, final

import numpy as np

from emfed.algorithms import EM, AutoEM
from emfed.algorithms.steps import rounded_statistics
from emfed.core.errors import ParticipationError
from emfed.core.protocols import Algorithm, BoolArray, FloatArray, MovesComponents, SplitsComponents
from emfed.core.records import RoundRecord
from emfed.fitting.rounds import Run
from emfed.fitting.selection import debt
from emfed.fitting.session import Session, of_everyone
from emfed.fitting.starts.start_search import MERGE_FROM
from emfed.fitting.stopping import remaining
from emfed.models.components import TRACE, as_copies, thin
from emfed.models.side_by_side import SideBySide

LEAST_GAIN = 1e-4
"""The share of its cost that is a gain of k-means. By workers, 11 tables with K=3 or 8, three
seeds: inertia is 1.21 times the best of five starts of scikit-learn without moves, on average,
1.03, 1.01 and 1.01 times with 1, 2 and 3 in a row that gain nothing, for 12, 24 and 33 rounds more
(a trial that is not kept; `benchmarks k-means` measures 3)."""
ROUNDS_OF_HOPE = 3
"""Rounds that a move of k-means has at least; and how many like the last one may bring it below
what is kept. With 6 or without end inertia is the same, for up to four times the bytes."""
LEAST_NATS = 1e-3
"""Nats a row that are a gain of a mixture."""
FIRST_LOOK, NEXT_LOOK = 6, 1.5
"""Rounds after a move of a mixture until everyone is asked what it came to, and the next over the
last. Not tuned: as many as tell at which rate gains fall."""
HOPE = 3.0
"""Times what its gains let expect that a mixture may still gain after a move. EM on pooled rows
from where 120 fits by workers ended, all types of Gaussian mixtures with K = 2 to 8: 3 closes as
many gaps to scikit-learn as 10 does, for half the rounds (a trial that is not kept)."""
NEIGHBOURS = 3
"""Starts that a number of components gets from each of its neighbours. BIC by workers above that of
scikit-learn, wine and zero-inflated counts, diag, means of three seeds: 9 and 1,693 with one, 4 and
619 with three, for 5% more bytes."""
MOST_PAIRS = 100
"""Pairs of components that are tried as one: all of up to 14. With a hundred components, 50 columns
and full covariances all 4,950 take half a minute."""
AXES = 3
"""Axes along which each component is split."""
MOVE_LOSS = 1e-4
"""Nats a row that rounding a moved component may cost: EM goes a long way from there."""


@final
class Moves:
    """Moves of a run; as a callback it ends rounds after a move that will not gain."""

    name = "moves"

    def __init__(self, idle: int) -> None:
        self._most_idle = idle
        """Moves in a row that may gain nothing before the fit ends."""
        self._others: list[FloatArray] = []
        """Places from elsewhere that are tried before any move."""
        self._begun = False
        """Whether the run stands where it is kept, with nothing to compare."""
        self._costs: list[float] = []
        self._made, self._look = 0, FIRST_LOOK
        self.hopeless = self.gained = False
        """Whether the last move will gain nothing, and whether any has gained."""

    def attach(self, run: Run) -> None:
        """Look at the rounds of this run, from here on."""
        self.run, self._costs, self.hopeless = run, [], False
        self._made, self._look, self._asked = 0, FIRST_LOOK, run.state.statistics

    def begin(self, run: Run, others: Sequence[FloatArray], values: FloatArray | None) -> None:
        """Lead on a run from where it stands; if it had converged there, these were its values.

        Those ``others`` are tried first; after a gain they are no longer worth it.
        """
        self.attach(run)
        self._others, self._begun = list(others), values is not None
        if values is not None:
            here = run.state.statistics.copy()
            run.kept, run.kept_cost = here, _asked_cost(run, here, values)

    def __call__(self, record: RoundRecord) -> bool:
        """After each round; True where the cost falls too slowly to get below what is kept."""
        before, self._asked = self._asked, self.run.state.statistics
        if self.run.kept is not None:
            known = isinstance(_part(self.run), MovesComponents)
            self.hopeless = self._above() if known else self._below_hope(before)
        return self.hopeless

    def _above(self) -> bool:
        """By costs that the server knows. Noise in S makes any, until the run has converged."""
        if not isinstance(self.run.algorithm, EM):
            return False
        self._costs.append(_known_cost(self.run, self.run.state.statistics))
        if len(self._costs) <= ROUNDS_OF_HOPE:
            return False
        before, now = self._costs[-2:]
        return now - self.run.kept_cost > ROUNDS_OF_HOPE * max(before - now, 0.0)

    def _below_hope(self, before: FloatArray) -> bool:
        """By a question about the last round's statistics, which who answered knows, now and then.

        A run that gets back to where it was is noticed, too: nothing more than that is left.
        """
        self._made += 1
        left = remaining(self.run.records) if self._made >= self._look else inf
        if left == inf:
            return False
        self._look = int(NEXT_LOOK * self._made) + 1
        with contextlib.suppress(ParticipationError):  # another time
            values = of_everyone(self.run.session, lambda: self.run.ask_before(before))
            cost = _asked_cost(self.run, before, values)
            return cost - HOPE * left > self.run.kept_cost - LEAST_NATS
        return False

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """What the rounds since the last move have cost, and when everyone is asked next."""
        arrays = {f"other{j}": place for j, place in enumerate(self._others)}
        about = {"costs": self._costs, "hopeless": self.hopeless, "others": len(self._others)}
        about |= {"made": self._made, "look": self._look}
        return {"asked": self._asked, **arrays}, about

    def load(self, arrays: dict[str, Any], about: dict[str, Any]) -> None:
        """Go on from there."""
        self._costs, self.hopeless = list(about["costs"]), about["hopeless"]
        self._asked, self._made, self._look = arrays["asked"], about["made"], about["look"]
        self._others = [arrays[f"other{j}"] for j in range(about["others"])]

    def move(self, run: Run) -> bool:
        """Go on from the best place so far with a component elsewhere, if one can be moved.

        After some moves in a row that gained nothing there is none.
        """
        try:
            if not self._begun:
                self._keep(run)
        except ParticipationError:  # nobody says what the place is worth: it is what there is
            return False
        self._begun = False
        if run.kept is None or run.idle_moves >= self._most_idle + len(self._others):
            return False
        model, cut, statistics = _part(run), _cut(run), run.kept.copy()
        moved = self._moved(model, statistics[cut], run.idle_moves)
        if moved is None or not model.inside(moved):
            return False
        statistics[cut] = moved
        run.restart(statistics)
        return True

    def _moved(self, model: Any, statistics: FloatArray, attempt: int) -> FloatArray | None:
        """Statistics with one component elsewhere; None: there is no other place."""
        if isinstance(model, MovesComponents):
            return model.moved(statistics, attempt)
        places = chain(self._others, merged_and_split(model, statistics))
        there = next(islice(places, attempt, None), None)
        return None if there is None else rounded_statistics(model, there, MOVE_LOSS)

    def _keep(self, run: Run) -> None:
        """Keep the place where the run has converged, if it is better than the one that is kept."""
        here = run.state.statistics
        if self.hopeless:
            run.idle_moves += 1
            return
        if isinstance(_part(run), MovesComponents):
            cost = _known_cost(run, here)
            gains = cost < (1 - LEAST_GAIN) * run.kept_cost
        else:
            cost = _asked_cost(run, here, of_everyone(run.session, lambda: run.ask("values")))
            gains = cost < run.kept_cost - LEAST_NATS and not _thinner(run, here)
        if run.kept is not None and not gains:
            run.idle_moves += 1
            return
        if run.kept is not None:
            self.gained, self._others = True, []
        run.kept, run.kept_cost, run.idle_moves = here.copy(), cost, 0

    def go_back(self, run: Run) -> bool:
        """Whether the run ends at the best place it has converged to, and not at the last."""
        if run.kept is None or np.array_equal(run.kept, run.state.statistics):
            return False
        run.move(run.kept)
        run.confirmed = True
        return True


def can_move(session: Session, parts: Sequence[int], algorithm: Algorithm, is_auto: bool) -> bool:
    """Whether components can be moved, and few workers pay for it.

    From `MERGE_FROM` workers on bytes count most, and starts are merged from what all tell. One
    worker's start has seen the rows; but numbers of components that it compares may differ by less
    than starts do.
    """
    models = [session.bound.part(part) for part in parts]
    several = session.federation.size > 1
    if all(isinstance(model, MovesComponents) for model in models):
        return several and len(parts) == 1
    led = isinstance(algorithm, AutoEM) and not algorithm.follow_em
    led = led if several else is_auto and len(parts) > 1
    few = session.effective < MERGE_FROM
    able = all(isinstance(model, SplitsComponents) for model in models)
    return led and few and able and max(model.n_components for model in models) > 1


def _part(run: Run) -> Any:
    return run.model.models[0] if isinstance(run.model, SideBySide) else run.model


def _cut(run: Run) -> slice:
    """Where its statistics lie among those of the run."""
    return run.model.cuts[0] if isinstance(run.model, SideBySide) else slice(None)


def _known_cost(run: Run, statistics: FloatArray) -> float:
    """What a model that knows its cost has not explained."""
    return float(_part(run).cost(statistics[_cut(run)]))


def _asked_cost(run: Run, statistics: FloatArray, values: FloatArray) -> float:
    """What EM lowers, in nats a row, without what components on few rows owe to the floor."""
    run.evaluations += run.samples
    model, rows = _part(run), run.session.total
    params = model.maximize(statistics[_cut(run)])
    owed = debt(model, params, rows) / rows
    return float(model.penalty(params)) - float(values[0, 0]) + owed


def _thinner(run: Run, statistics: FloatArray) -> bool:
    """Whether components have so few rows that owners tell of none such, more than before.

    With a common covariance one or two rows far out may be worth a component. A start may find
    them; nobody looks for them.
    """
    if run.kept is None:
        return False
    model, cut = _part(run), _cut(run)
    shares = (model.component_shares(own[cut]) for own in (run.kept, statistics))
    before, after = (thin(own, run.session.total).sum() for own in shares)
    return bool(after > before)


def merged_and_split(model: Any, statistics: FloatArray) -> Iterator[FloatArray]:
    """Statistics in which two components are one and another is two.

    First those in which the two that lose least are one and the widest is halved, then by turns
    other pairs and other halves: of 737 such moves 12% gained, whatever their rank. Halves of what
    was just merged would be the same again, unless there is nothing else.
    """
    k, mass = model.n_components, model.layout.slices["mass"]
    pairs, attempts = _pairs(model, statistics), (k - 1) * AXES
    seen = set[bytes]()
    turns = [(p, turn - p) for turn in range(len(pairs) + attempts - 1) for p in range(turn + 1)]
    for pair, attempt in turns:
        if pair < len(pairs) and attempt < attempts:
            one, free = pairs[pair]
            merged, empty = _merged(model, statistics, one, free)
            halved = model.split(merged, empty, attempt)
            lighter = halved[mass] < 0.75 * merged[mass]
            fine = (k == 2 or not lighter[one]) and lighter.any() and model.inside(halved)
            if fine and halved.tobytes() not in seen:
                seen.add(halved.tobytes())
                yield halved


def _pairs(model: Any, statistics: FloatArray) -> list[tuple[int, int]]:
    """Pairs of components, those first by which the surrogate grows least when they are one."""
    losses = []
    for one, free in _nearest(model, statistics):
        merged, _ = _merged(model, statistics, one, free)
        if model.inside(merged):
            losses.append((float(model.surrogate(merged, model.maximize(merged))), one, free))
    return [(one, free) for _, one, free in sorted(losses)]


def _nearest(model: Any, statistics: FloatArray) -> list[tuple[int, int]]:
    """All pairs of components; of many, those whose mean statistics are nearest to each other."""
    pairs = list(combinations(range(model.n_components), 2))
    if len(pairs) <= MOST_PAIRS:
        return pairs
    parts = model.layout.split(statistics)
    mass = parts["mass"][:, None]
    own = [v.reshape(len(v), -1) / mass for n, v in parts.items() if n not in ("mass", "total")]
    told = np.concatenate(own, axis=1)
    spread = told.std(axis=0)
    told = told / np.where(spread > 0, spread, 1.0)
    one, other = np.array(pairs).T
    apart = ((told[one] - told[other]) ** 2).sum(axis=1)
    return [pairs[place] for place in np.argsort(apart, kind="stable")[:MOST_PAIRS].tolist()]


def _merged(
    model: Any, statistics: FloatArray, one: int, free: int
) -> tuple[FloatArray, BoolArray]:
    """Statistics in which one component has the rows of another, which stands for none."""
    parts = {name: value.copy() for name, value in model.layout.split(statistics).items()}
    trace = TRACE / (parts["mass"][one] + parts["mass"][free])
    for name, value in parts.items():
        if name != "total":  # that of all components
            value[one] += value[free]
            value[free] = trace * value[one]
    return model.layout.join(parts), np.arange(model.n_components) == free


def with_one_more(model: Any, fewer: Any, statistics: FloatArray) -> Iterator[FloatArray]:
    """Where a model may begin after one with a component less has ended: a wide one is halved."""
    parts = fewer.layout.split(statistics)
    grown = {n: v if n == "total" else np.concatenate([v, v[:1]]) for n, v in parts.items()}
    empty = np.arange(model.n_components) == fewer.n_components
    begun = as_copies(model.layout, model.layout.join(grown), empty)
    for attempt in range(min(NEIGHBOURS, fewer.n_components)):
        halved = model.split(begun, empty, attempt)
        if model.inside(halved):
            yield halved


def with_one_less(model: Any, more: Any, statistics: FloatArray) -> Iterator[FloatArray]:
    """The same after one with a component more: two that lose little are one."""
    for one, free in _pairs(more, statistics)[:NEIGHBOURS]:
        parts = more.layout.split(_merged(more, statistics, one, free)[0])
        left = {n: v if n == "total" else np.delete(v, free, axis=0) for n, v in parts.items()}
        merged = model.layout.join(left)
        if model.inside(merged):
            yield merged
