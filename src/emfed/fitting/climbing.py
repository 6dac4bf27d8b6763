"""EM that watches its log-likelihood: it stops when little is left, and takes long steps late.

Every round tells the log-likelihood at the statistics it was asked for
(`emfed.models.side_by_side`).
Three points x0, x1 = EM(x0), x2 = EM(x1) tell at which rate gains fall, |x2 - x1|^2 / |x1 - x0|^2,
as the log-likelihood (less the penalty) is quadratic near its maximum, and so what is left after x1
(`emfed.core.series`). When that is below the tolerance twice in a row, a few plain steps and a bold
one find out whether EM only rests (`emfed.algorithms.safeguards`); if not, it has converged. Once
gains are small, x0, x1 and x2 also give the extrapolation of SQUAREM (Varadhan, Roland 2008),
x0 + 2 a r + a^2 v, which is kept only if it does not lower the log-likelihood: EM's guarantee
stands, and early steps are EM's.
"""

from __future__ import annotations

from typing import Any, final

import numpy as np

from emfed.algorithms import safeguards
from emfed.core import series
from emfed.core.protocols import FloatArray
from emfed.core.records import RoundRecord
from emfed.fitting.rounds import Run, under
from emfed.models.side_by_side import SideBySide

EARLY = 1e-2
"""Gains above this, in nats per row, are left to EM: long steps could leave its basin."""
LONGEST = 64.0
"""The longest step, in steps of EM. Not tuned: the log-likelihood of the next round decides whether
a step stands, so a longer one costs a round at most."""


@final
class Part:
    """The climb of one model."""

    def __init__(self, model: Any, tolerance: float, accelerate: bool) -> None:
        self.model, self.tolerance, self.accelerate = model, tolerance, accelerate
        self.likelihood = -np.inf
        self.calm = 0
        self._chain: list[tuple[FloatArray, FloatArray, float]] = []
        self._trial: tuple[FloatArray, float] | None = None

    @property
    def settled(self) -> bool:
        """Whether little was left, twice in a row, and a bold step then gained nothing."""
        return self.calm > safeguards.BOLD

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The chain of points and the trial that is under way."""
        arrays: dict[str, Any] = {}
        about: dict[str, Any] = {
            "calm": self.calm,
            "likelihood": self.likelihood if np.isfinite(self.likelihood) else None,
            "chain": [likelihood for _, _, likelihood in self._chain],
            "least": None if self._trial is None else self._trial[1],
        }
        for j, (before, after, _) in enumerate(self._chain):
            arrays |= {f"before{j}": before, f"after{j}": after}
        if self._trial is not None:
            arrays["fallback"] = self._trial[0]
        return arrays, about

    def load(self, arrays: dict[str, Any], about: dict[str, Any]) -> None:
        """The inverse of `save`."""
        self.calm = about["calm"]
        self.likelihood = -np.inf if about["likelihood"] is None else about["likelihood"]
        self._chain = [
            (arrays[f"before{j}"], arrays[f"after{j}"], likelihood)
            for j, likelihood in enumerate(about["chain"])
        ]
        self._trial = None if about["least"] is None else (arrays["fallback"], about["least"])

    def follow(
        self, asked: FloatArray, new: FloatArray, value: float, penalty: float
    ) -> FloatArray:
        """Where to go on after EM led from ``asked``, where the likelihood was this, to ``new``.

        What EM never lowers is the likelihood less the penalty.
        """
        likelihood = value - penalty
        if self._trial is not None:
            fallback, least = self._trial
            self._trial = None
            bold = self.calm == safeguards.BOLD
            if not likelihood >= least - 1e-12 * abs(least):
                self._chain, self.calm = [], self.calm + bold
                return fallback
            self.calm *= not bold
        self.likelihood = value
        self._chain.append((asked, new, likelihood))
        if len(self._chain) < 2:
            return new
        (x0, x1, before), (_, x2, after) = self._chain[-2:]
        self._chain = self._chain[-1:]
        r, step = x1 - x0, x2 - x1
        first, second, gain = float(r @ r), float(step @ step), abs(after - before)
        rate = series.rate([first, second])
        left = series.left(gain * min(rate, 1.0), rate, series.EXACT)
        if self.tolerance and not self.settled:
            self.calm = self.calm + 1 if left <= self.tolerance else 0
            if self.calm and second <= 1e-24:  # a fixed point has no direction
                self.calm = safeguards.JUDGE
        if self.calm == safeguards.BOLD:
            return self._bold(x1, x2, after + gain * min(rate, 1.0))
        if not self.accelerate or gain > EARLY or second == 0 or self.calm >= 2:
            return new
        v = step - r
        bend = float(np.sqrt(v @ v))
        length = min(np.sqrt(first) / bend, LONGEST) if bend > 0 else 1.0
        return self._try(x0 + 2 * length * r + length**2 * v, x2, after) if length > 1 else new

    def _bold(self, x1: FloatArray, x2: FloatArray, here: float) -> FloatArray:
        """A step along the slowest direction, to be kept if it gains half of what it is worth."""
        worth, step = safeguards.WORTH * self.tolerance, x2 - x1
        white = self.model.metric(self.model.maximize(x1)).whiten(step)
        tried = self._try(x2 + safeguards.factor(white, worth) * step, x2, here + worth / 2)
        self.calm += self._trial is None
        return tried

    def _try(self, there: FloatArray, fallback: FloatArray, least: float) -> FloatArray:
        """A long step, if it stays where the model is defined."""
        if not self.model.inside(there):
            return fallback
        self._trial, self._chain = (fallback, least), []
        return there


@final
class Climb:
    """A callback that watches and steers a run of models side by side under EM."""

    name = "climb"

    def __init__(self, tolerance: float, accelerate: bool = True) -> None:
        self.tolerance, self.accelerate = tolerance, accelerate
        self.parts: list[Part] = []

    def attach(self, run: Run) -> None:
        """Follow this run, whose statistics tell the log-likelihood of each part."""
        together = run.model
        assert isinstance(together, SideBySide)
        self.run, self.together = run, together
        self.parts = [Part(model, self.tolerance, self.accelerate) for model in together.models]
        self._asked, self._penalties = run.state.statistics, self._charged()

    @property
    def settled(self) -> bool:
        """Whether little is left for any part."""
        return bool(self.parts) and all(part.settled for part in self.parts)

    @property
    def likelihoods(self) -> list[float]:
        """The log-likelihood of each part where it was last asked."""
        return [part.likelihood for part in self.parts]

    def go_back(self, statistics: FloatArray) -> None:
        """The run ends at statistics that it had before."""
        for part, values in zip(self.parts, self.together.values(statistics), strict=True):
            part.likelihood = float(values[0])

    def _charged(self) -> list[float]:
        """The penalty of each part where it will be asked next."""
        pairs = zip(self.together.models, self.run.params.parts, strict=True)
        return [float(model.penalty(params)) for model, params in pairs]

    def __call__(self, record: RoundRecord) -> bool:
        """After each round; True when all have settled."""
        if self.run.model is not self.together:  # bound to others: their likelihoods do not compare
            self.attach(self.run)
            return False
        if record.answered < record.asked:  # a likelihood of some rows compares with none
            return False
        new = self.run.state.statistics
        values = self.together.values(new)
        moved = [
            part.follow(self._asked[cut], new[cut], float(values[j, 0]), self._penalties[j])
            for j, (part, cut) in enumerate(zip(self.parts, self.together.cuts, strict=True))
        ]
        statistics = self.together.join(moved, values)
        if not np.array_equal(statistics, new):
            self.run.move(statistics)
        self._asked, self._penalties = statistics, self._charged()
        return self.tolerance > 0 and self.settled

    def save(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Where each part stands."""
        arrays: dict[str, Any] = {"asked": self._asked}
        about: list[dict[str, Any]] = []
        for j, part in enumerate(self.parts):
            own, told = part.save()
            arrays |= {f"{j}/{name}": array for name, array in own.items()}
            about.append(told)
        return arrays, {"parts": about}

    def load(self, arrays: dict[str, Any], about: dict[str, Any]) -> None:
        """Go on from there."""
        self._asked = arrays["asked"]
        for j, (part, told) in enumerate(zip(self.parts, about["parts"], strict=True)):
            part.load(under(f"{j}/", arrays), told)
        self._penalties = self._charged()
