"""What the algorithms share: step sizes, mini-batches, and steps that stay where T is defined."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from emfed.core.errors import check_range
from emfed.core.protocols import FloatArray, IntArray, Model
from emfed.core.streams import Purpose, choose, choose_distinct, uniforms

StepSize = float | Callable[[int], float]
"""gamma: one number, or a function of the round (which counts from 1)."""

_STEP_HINT = "EM itself is step 1; beyond 2 even a linear problem diverges."


@final
@dataclass(frozen=True)
class Decreasing:
    """A step that falls with the round k: first * (offset / (offset + k - 1)) ** power.

    Parameters
    ----------
    first : float
        The step of the first round.
    power : float
        How fast steps fall; online EM takes a power in (1/2, 1].
    offset : float
        After about so many rounds steps begin to fall.

    Examples
    --------
    >>> from emfed.algorithms import Decreasing
    >>> step = Decreasing(first=1.0, power=0.5, offset=1.0)
    >>> step(1), step(4)
    (1.0, 0.5)
    """

    first: float = 1.0
    power: float = 0.6
    offset: float = 10.0

    def __post_init__(self) -> None:
        check_range("Decreasing first", self.first, 0, 2, open_low=True, open_high=True)
        check_range("Decreasing power", self.power, 0, 1)
        check_range("Decreasing offset", self.offset, 0, np.inf, open_low=True)

    def __call__(self, round_: int) -> float:
        """The step of this round."""
        return float(self.first * (self.offset / (self.offset + round_ - 1)) ** self.power)


def check_step_size(step_size: StepSize) -> None:
    """Refuse a constant step outside (0, 2)."""
    if not callable(step_size):
        check_range("step_size", step_size, 0, 2, open_low=True, open_high=True, hint=_STEP_HINT)


def step_at(step_size: StepSize, round_: int) -> float:
    """gamma of a round, checked."""
    if not callable(step_size):
        return float(step_size)
    return check_range(
        f"step_size({round_})",
        step_size(round_),
        0,
        2,
        open_low=True,
        open_high=True,
        hint=_STEP_HINT,
    )


def describe_step(step_size: StepSize) -> Any:
    """A number, the settings of `Decreasing`, or a function's name and some of its values."""
    if isinstance(step_size, Decreasing):
        return {"first": step_size.first, "power": step_size.power, "offset": step_size.offset}
    if callable(step_size):
        name = getattr(step_size, "__qualname__", type(step_size).__qualname__)
        return {"function": name, "values": [float(step_size(k)) for k in (1, 2, 10, 100, 1000)]}
    return float(step_size)


def batch_indices(
    seed: int, round_: int, workers: IntArray, counts: IntArray, size: int, replacement: bool
) -> tuple[IntArray, FloatArray | None]:
    """Row indices ``(workers, b)``, and 0/1 weights if some workers have fewer rows than others."""
    if replacement:
        return choose(uniforms(seed, round_, Purpose.BATCH, workers, size), counts), None
    width = min(size, int(counts.max()))
    indices = np.broadcast_to(np.arange(width), (len(workers), width)).copy()
    large = np.flatnonzero(counts > size)
    if len(large):
        u = uniforms(seed, round_, Purpose.BATCH, workers[large], size)
        indices[large] = choose_distinct(u, counts[large])
    if np.all(counts >= width):
        return indices, None
    real = np.arange(width) < counts[:, None]
    return np.where(real, indices, 0), real.astype(np.float64)


def rounded_statistics(model: Model, statistics: FloatArray, loss: float) -> FloatArray:
    """Statistics on a grid so coarse that telling them takes few bytes, and no fit cares.

    The error is worth ``loss`` nats at most. Where no grid serves (the domain is narrow there) they
    stay as they are.
    """
    metric = model.metric(model.maximize(statistics))
    for exponent in range(4, 30):
        coarse = np.rint(statistics * 2.0**exponent) * 0.5**exponent + 0.0  # no -0
        white = metric.whiten(coarse - statistics)
        if float(white @ white) / 2 <= loss and model.inside(coarse):
            return np.asarray(coarse)
    return statistics


def shorten(
    model: Model, statistics: FloatArray, move: FloatArray
) -> tuple[FloatArray, float, int]:
    """Where the move leads inside the model's domain, the factor it was shortened by, and halvings.

    The domain is open and the statistics are inside, so halving ends; once inside, one more
    halving keeps a distance from the boundary. What the model can keep alive by itself (a mixture:
    a component that explains less than one sample) does not hold up the rest. A move so hostile
    that 2**-60 of it still leaves the domain is not made at all.
    """
    with np.errstate(all="ignore"):  # outside the domain, numbers may be anything
        for hits in range(61):
            factor = 0.5**hits
            after = model.protect(statistics, statistics + factor * move)
            if model.inside(after):
                break
        else:
            return statistics, 0.0, 61
        if hits:
            closer = model.protect(statistics, statistics + factor / 2 * move)
            if model.inside(closer):
                return closer, factor / 2, hits + 1
    return after, factor, hits
