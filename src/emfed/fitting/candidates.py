"""Which numbers of components can still be chosen: a run drops the others.

Candidates that are fitted side by side converge at their own pace, and those with too many
components are the slowest; as messages hold all of them, their noise also keeps the others from
converging. What a candidate may still gain is estimated from its own steps. One whose criterion
would be worse than the best's even after several times that gain is dropped, at both ends; the
memories of the others stay as they are.

It is an estimate, as convergence is: EM may leave a plateau on which it gained next to nothing.
Hence `hope` is generous.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from emfed.artifacts.result import criterion
from emfed.core.errors import ParticipationError
from emfed.core.protocols import FloatArray, View, free_parameters
from emfed.core.records import Records, RoundRecord
from emfed.fitting.moving import with_one_less, with_one_more
from emfed.fitting.rounds import Run, under
from emfed.fitting.selection import debt
from emfed.fitting.session import recast
from emfed.fitting.stopping import remaining

GAIN_MULTIPLES, GAIN_ROUNDS, LEAST_NATS = 20.0, 300.0, 1e-3
"""Times its remaining gain, rounds of its present gain, and nats per row that a candidate is
granted: the largest of the three. Of what the candidates 1:8 send in all rounds, 300 rounds save
61% and 10,000 rounds 45%, with the same choice in 29 of 29 runs on open tables; 100 rounds save
64% and change one choice."""
FIRST, PAUSE = 16, 1.5
"""The first round after which everyone is asked how the candidates fit, and the next over the
last: each question is a message to and from everyone. Earlier, as for starts, likelihoods say
little about where they lead."""


def hope(told: Records) -> float:
    """Nats per row that a candidate with these records of its own is granted still to gain."""
    left = remaining(told)
    if left == math.inf:
        return left
    return max(
        LEAST_NATS,
        GAIN_MULTIPLES * left,
        GAIN_ROUNDS * max(record.gain or 0.0 for record in told[-3:]),
    )


def contenders(
    models: Sequence[Any],
    params: Sequence[Any],
    values: FloatArray,
    hopes: Sequence[float],
    rows: float,
    by: str,
) -> list[int]:
    """Positions of the candidates that can still be chosen, the best of now among them.

    ``values`` are log-likelihood and entropy of each, ``hopes`` what its log-likelihood is granted
    to gain, all per row. An entropy may fall to zero, and a collapsed component may recover.
    """
    charged, hoped = [], []
    told = zip(models, params, values.tolist(), hopes, strict=True)
    for model, own, (likelihood, entropy), gain in told:
        free = free_parameters(model)
        owed = debt(model, own, rows) / rows
        charged.append(criterion(by, likelihood - owed, entropy, rows, free))
        hoped.append(criterion(by, likelihood + gain, 0.0, rows, free))
    best = min(range(len(models)), key=lambda j: charged[j])
    return [j for j in range(len(models)) if j == best or not hoped[j] > charged[best]]


MOST_GAIN = 0.5
"""Nats a row that moves of components are granted to gain: a neighbour that needs more to be chosen
is left alone. Of 84 fits by workers moves gained more in four."""


@dataclass(frozen=True)
class Dropped:
    """A candidate where it was left."""

    statistics: FloatArray
    values: FloatArray
    """Its log-likelihood and entropy there."""
    converged: bool = False


@final
class Candidates:
    """A callback of a fit that drops the candidates which cannot be chosen any more."""

    name = "candidates"

    def __init__(self, by: str, drops: bool = True) -> None:
        self._by, self._drops = by, drops
        self.dropped: dict[int, Dropped] = {}
        """The candidates, by their place in the run's model."""
        self.led_on: list[int] = []
        """Those that are led on after all have converged, one after the other."""

    def attach(self, run: Run) -> None:
        """Watch this run, if its steps tell gains in nats."""
        self._run, self._asked = run, run.state.statistics
        self._before = self._asked
        metrics = run.model.metric(run.params).metrics
        self._drops &= all(metric.in_nats for metric in metrics)
        self._told = [Records() for _ in metrics]
        self._next, self._bound = FIRST, run.session.bound

    @property
    def alive(self) -> tuple[int, ...]:
        """The candidates that are left."""
        return self._run.session.bound.parts_of(self._run.view)

    def __call__(self, record: RoundRecord) -> None:
        """After a round."""
        run = self._run
        if run.session.bound is not self._bound:
            self._rebound(run)
        if not self._drops or len(self.alive) == 1:
            return
        self._follow(run, record)
        if record.round < self._next:
            return
        hopes = [hope(told) for told in self._told]
        if min(hopes) == math.inf:
            return
        self._next = int(PAUSE * record.round)
        try:
            values = run.ask_before(self._before)
        except ParticipationError:  # another time: nobody is dropped unheard
            return
        run.evaluations += run.samples
        total, models = run.session.total, run.model.models
        parts = run.model.maximize(self._before).parts
        able = contenders(models, parts, values, hopes, total, self._by)
        if len(able) < len(hopes):
            self._drop(run, values, able)

    def _rebound(self, run: Run) -> None:
        """The model is bound to others: gains are told anew, and what was dropped is moved along.

        Its likelihood is that of rows which no longer count: everyone is asked for it at the end.
        """
        before, self._bound = self._bound, run.session.bound
        self._asked, self._told = run.state.statistics, [Records() for _ in self._told]
        for place, left in self.dropped.items():
            moved = recast(before.part(place), self._bound.part(place), left.statistics)
            self.dropped[place] = replace(left, statistics=moved, values=np.full(2, np.nan))
        if self.led_on:  # what converged for other rows has not for these
            self._together_again(run)

    def _together_again(self, run: Run) -> None:
        """All that had converged go on side by side, as before any was led on."""
        places = tuple(p for p, left in sorted(self.dropped.items()) if left.converged)
        reached = {self.alive[0]: run.state.statistics[run.model.cuts[0]]}  # its best place
        starts = [reached.get(p, self.dropped.pop(p).statistics) for p in places]
        models = [self._bound.part(place) for place in places]
        inside = [
            own if model.inside(own) else model.statistics_of(model.start(run.seed))
            for model, own in zip(models, starts, strict=True)
        ]
        self.led_on = []
        run.turn_to(View(places, watched=run.view.watched), inside)
        run.restart(run.state.statistics)
        self._asked, self._told = run.state.statistics, [Records() for _ in places]

    def settle(self, told: FloatArray) -> None:
        """Those who are left have converged: remember where, with what was told of them."""
        run = self._run
        for cut, place, values in zip(run.model.cuts, self.alive, told, strict=True):
            self.dropped[place] = Dropped(run.state.statistics[cut], values, converged=True)

    def turn(self) -> int | None:
        """Go on with one candidate alone, from where it had converged; None: all is done.

        The best comes first, then its neighbours, which may yet be better.
        """
        run = self._run
        charged = {place: self._charged(place) for place in self.dropped}
        models = {place: run.session.bound.part(place) for place in charged}
        best = min(charged, key=lambda place: charged[place])
        near = {p: m.n_components - models[best].n_components for p, m in models.items()}
        room = 2 * MOST_GAIN * run.session.total
        for place in sorted(near, key=lambda p: (abs(near[p]), -near[p])):
            open_ = models[place].n_components > 1 and place not in self.led_on
            if open_ and abs(near[place]) <= 1 and charged[place] - charged[best] <= room:
                self.led_on.append(place)
                here = View((place,), watched=run.view.watched)
                run.turn_to(here, [self.dropped[place].statistics])
                return place
        return None

    def beside(self, place: int) -> list[FloatArray]:
        """Where a candidate may go on from: its neighbours with a component more, or less."""
        bound = self._run.session.bound
        model, out = bound.part(place), list[FloatArray]()
        for other, left in sorted(self.dropped.items()):
            there = bound.part(other)
            if there.n_components == model.n_components - 1:
                out += with_one_more(model, there, left.statistics)
            elif there.n_components == model.n_components + 1:
                out += with_one_less(model, there, left.statistics)
        return out

    def _charged(self, place: int) -> float:
        """The criterion of a candidate where it was left, see `contenders`."""
        session, statistics = self._run.session, self.dropped[place].statistics
        model = session.bound.part(place)
        likelihood, entropy = self.values(place).tolist()
        owed = debt(model, model.maximize(statistics), session.total) / session.total
        free = free_parameters(model)
        return criterion(self._by, likelihood - owed, entropy, session.total, free)

    def values(self, place: int) -> FloatArray:
        """Log-likelihood and entropy of a candidate that was dropped."""
        left, session = self.dropped[place], self._run.session
        if not np.isnan(left.values).any():
            return left.values
        view = View((place,))
        told: FloatArray = session.ask("values", view, left.statistics)[0]
        self.dropped[place] = replace(left, values=told)
        return told

    def _follow(self, run: Run, record: RoundRecord) -> None:
        """The gain of each candidate's own step, as that of the whole run is told in records.

        The server moved by step x H, where an EM step is H, and by those who answered alone.
        """
        together = run.model
        before = self._before = self._asked
        self._asked = run.state.statistics
        metric = together.metric(together.maximize(before))
        moved = self._asked - before
        step = min(1.0, record.step_size) * record.answered / run.federation.size
        for cut, part, told in zip(together.cuts, metric.metrics, self._told, strict=True):
            white = part.whiten(moved[cut]) / (step or 1.0)
            gain = float(white @ white) / 2 if step else None
            told.append(replace(record, gain=gain))

    def _drop(self, run: Run, values: FloatArray, able: list[int]) -> None:
        """Go on without the others."""
        alive, together = self.alive, run.model
        for j, place in enumerate(alive):
            if j not in able:
                statistics = self._before[together.cuts[j]]
                self.dropped[place] = Dropped(statistics, values[j])
        run.narrow(View(tuple(alive[j] for j in able), watched=run.view.watched))
        self._asked = run.state.statistics
        self._told = [self._told[j] for j in able]

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Who was dropped where, and what the others gained."""
        arrays: dict[str, Any] = {"asked": self._asked}
        for place, left in self.dropped.items():
            arrays |= {f"{place}/statistics": left.statistics, f"{place}/values": left.values}
        for j, told in enumerate(self._told):
            arrays |= {f"told{j}/{name}": array for name, array in told.to_arrays().items()}
        about = {"next": self._next, "dropped": list(self.dropped), "led_on": self.led_on}
        converged = [place for place, left in self.dropped.items() if left.converged]
        return arrays, about | {"converged": converged}

    def load(self, arrays: dict[str, Any], about: dict[str, Any]) -> None:
        """The inverse of `save`."""
        self._asked, self._next = arrays["asked"], about["next"]
        self.dropped = {
            place: Dropped(
                arrays[f"{place}/statistics"],
                arrays[f"{place}/values"],
                place in about.get("converged", ()),
            )
            for place in about["dropped"]
        }
        self.led_on = list(about.get("led_on", ()))
        own = [under(f"told{j}/", arrays) for j in range(len(self.alive))]
        self._told = [Records.from_arrays(columns) for columns in own]
