"""Hidden Markov models over sequences held by workers.

A worker's rows are sequences: an array ``(sequences, time, columns)``. A sequence ends with the
last step at which anything was seen, so shorter ones are filled up with NaN; NaN before that is a
missing value. Given the state, columns are independent and each has a family of its own.

The E-step is the scaled forward-backward pass (Rabiner 1989), all sequences at once, a loop over
time. Statistics are means over sequences: ``initial`` states and, divided by the mean length,
``mass`` (steps in each state), ``transitions``, ``moments`` and ``observed``. numpy only.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, final

import numpy as np

from emfed.core.errors import DataError, SettingsError, check_count, check_range, check_type, known
from emfed.core.protocols import (
    FloatArray,
    HeldUp,
    IntArray,
    Layout,
    Model,
    ModelWords,
    Names,
    Summaries,
    plural,
)
from emfed.core.registry import register_model, stored
from emfed.core.streams import Purpose, normal_row
from emfed.models import emissions
from emfed.models.categories import clip_simplex
from emfed.models.chains import filtered_log_densities, lengths, smooth
from emfed.models.column_metric import ColumnMetric
from emfed.models.columns import ColumnParameters, Columns
from emfed.models.component_summaries import Portrait, column_portrait
from emfed.models.components import SMALLEST_MASS, keep_dying
from emfed.models.families import positive
from emfed.models.mixture import to_numpy
from emfed.models.rows import mean_over_rows

BLOCK_ELEMENTS = 1 << 20
"""Doubles in the features of the sequences that run together."""


@final
@dataclass(frozen=True, init=False)
class MarkovParameters(ColumnParameters):
    """The parameters of a hidden Markov model.

    Parameters
    ----------
    initial : array of shape (K,)
        The probabilities of the first state.
    transitions : array of shape (K, K)
        The probabilities of the next state, one row for each state.
    families : mapping of str to array
        The parameters of the columns of each family, as in `MixedParameters`.
    **more : array
        The same by keywords.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.models import MarkovParameters
    >>> MarkovParameters([0.5, 0.5], np.eye(2), poisson=[[2.0], [7.0]]).transitions.shape
    (2, 2)
    """

    initial: FloatArray
    transitions: FloatArray

    def __init__(
        self,
        initial: Any,
        transitions: Any,
        families: Mapping[str, Any] | None = None,
        **more: Any,
    ) -> None:
        super().__init__({**(families or {}), **more}, initial=initial, transitions=transitions)


@stored("hidden-markov")
@final
@dataclass(frozen=True, eq=False)
class HiddenMarkov(Model):
    """A hidden Markov model of sequences; `emfed.hidden_markov` makes one and says what it takes.

    Examples
    --------
    >>> import emfed
    >>> emfed.hidden_markov(2).n_components
    2
    """

    n_components: int
    columns: Columns
    concentration: float = 1.0
    prior_rows: float = 0.0
    # Binding fills in what follows.
    samples: int = 0
    length: float = 0.0
    """The mean length of a sequence."""

    def __post_init__(self) -> None:
        check_count("n_components", self.n_components)
        check_range("concentration", self.concentration, 1, np.inf, open_high=True)
        check_range("prior_rows", self.prior_rows, 0, np.inf, open_high=True)

    @property
    def allows_missing(self) -> bool:
        return True

    @property
    def n_features(self) -> int:
        return self.columns.count

    @cached_property
    def layout(self) -> Layout:
        known(self.samples or None)
        k, (moments, observed) = self.n_components, self.columns.widths
        return Layout(
            (
                ("mass", (k,)),
                ("initial", (k,)),
                ("transitions", (k, k)),
                ("moments", (k, moments)),
                ("observed", (k, observed)),
            )
        )

    def among(self, names: Sequence[str]) -> Self:
        """The model for steps with these columns, of which ``families`` may name the exceptions
        alone."""
        return dataclasses.replace(self, columns=self.columns.among(names))

    # The opening exchange.

    @property
    def row_axes(self) -> int:
        return 2

    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        """Sequences in which something was seen, each entry NaN or one its family can give."""
        if data.ndim != 3 or 0 in data.shape:
            raise DataError(
                f"{where}: expected sequences (sequences, time, columns), short ones filled up "
                f"with NaN (see pad_sequences); got shape {tuple(data.shape)}."
            )
        rows = to_numpy(data)
        if rows.shape[-1] != (self.columns.width or rows.shape[-1]):
            raise DataError(
                f"{where}: expected {self.columns.width} columns; got {rows.shape[-1]}."
            )
        empty = np.flatnonzero(lengths(~np.isnan(rows)) == 0)
        if len(empty):
            raise DataError(f"{where}: sequence {first + int(empty[0])} has no value at all.")
        families = self.columns.fit_to(rows.shape[-1])
        with contextlib.suppress(DataError):  # or find the sequence, for the message
            families.check(rows.reshape(-1, rows.shape[-1]), where, columns, 0)
            return
        for number, sequence in enumerate(rows):
            families.check(sequence, f"{where}, sequence {first + number}", columns, 0)

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        """The mean length, and the summary of `Columns` over all steps."""
        rows = to_numpy(data)
        *lead, n, t, d = rows.shape
        length = lengths(~np.isnan(rows))
        w = np.ones((*lead, n)) if weights is None else to_numpy(weights)
        steps = (np.arange(t) < length[..., None]) * w[..., None]
        columns = self.columns.fit_to(d)
        flat = rows.reshape(*lead, n * t, d)
        of_steps = columns.summary(flat, steps.reshape(*lead, n * t))
        mean = (length * w).sum(axis=-1) / w.sum(axis=-1)
        return {"length": mean[..., None], **of_steps}

    def combine(self, summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
        """The summary of a union: steps count, not sequences."""
        length = summaries["length"][:, 0]
        steps = shares * length
        columns = self.columns.fit_to(summaries["mean"].shape[-1])
        whole = columns.combine(summaries, steps / steps.sum())
        return {"length": np.array([steps.sum()]), **whole}

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        """The frame of the columns, the mean length and the number of sequences."""
        length = float(weights @ summaries["length"][:, 0])
        if length <= 1:
            raise DataError("all sequences have one step: there is no chain to fit.")
        steps = weights * summaries["length"][:, 0]
        columns = self.columns.fit_to(summaries["mean"].shape[-1])
        bound = columns.bind(summaries, steps / steps.sum())
        return dataclasses.replace(self, columns=bound, samples=int(counts.sum()), length=length)

    # The E-step.

    def _blocks(self, data: Any) -> Iterator[tuple[slice, FloatArray, FloatArray]]:
        """Parts of the sequences: their place, rows ``(..., n, t, d)`` and lengths."""
        rows = data if isinstance(data, np.ndarray) else to_numpy(data)
        *lead, n, t, _ = rows.shape
        width = sum(self.columns.widths) + 4 * self.n_components
        size = max(1, BLOCK_ELEMENTS // (t * width * int(np.prod(lead))))
        for start in range(0, n, size):
            part = slice(start, start + size)
            block = np.asarray(rows[..., part, :, :], dtype=np.float64)
            yield part, block, lengths(~np.isnan(block))

    def _features(self, block: FloatArray) -> FloatArray:
        """``(..., f, n * t)``."""
        *lead, n, t, d = block.shape
        flat = self.columns.features(np, block.reshape(-1, d))
        shaped = flat.reshape(len(flat), *lead, n * t)
        return np.moveaxis(shaped, 0, -2)

    def _log_emissions(
        self, features: FloatArray, params: MarkovParameters, shape: tuple[int, ...]
    ) -> FloatArray:
        """``(..., K, n, t)`` without what no state changes."""
        _, slopes = self.columns.natural(params)
        return (slopes @ features).reshape(*shape[:-2], self.n_components, *shape[-2:])

    def expected_statistics(
        self, data: Any, params: MarkovParameters, weights: Any | None = None
    ) -> FloatArray:
        """s-bar(theta): means over sequences."""
        w = None if weights is None else to_numpy(weights)
        sums: dict[str, Any] = {"mass": 0.0, "initial": 0.0, "transitions": 0.0, "features": 0.0}
        for part, block, length in self._blocks(data):
            mine = None if w is None else w[..., part]
            features = self._features(block)
            logs = self._log_emissions(features, params, block.shape[:-1])
            states, pairs, _ = smooth(logs, params.initial, params.transitions, length, mine)
            if mine is not None:
                states = states * mine[..., None, :, None]
            flat = states.reshape(*states.shape[:-2], -1)
            sums["mass"] = sums["mass"] + flat.sum(axis=-1)
            sums["initial"] = sums["initial"] + states[..., 0].sum(axis=-1)
            sums["transitions"] = sums["transitions"] + pairs
            sums["features"] = sums["features"] + flat @ np.swapaxes(features, -1, -2)
        count = np.asarray(data.shape[-3] if w is None else w.sum(axis=-1))[..., None]
        width, steps = self.columns.widths[0], count * self.length
        parts = {
            "mass": sums["mass"] / steps,
            "initial": sums["initial"] / count,
            "transitions": sums["transitions"] / steps[..., None],
            "moments": sums["features"][..., :width] / steps[..., None],
            "observed": sums["features"][..., width:] / steps[..., None],
        }
        return self.layout.join(parts)

    def group_shares(self, statistics: FloatArray) -> FloatArray:
        """Shares of sequences, by state: steps, first steps, what was seen, codes.

        Transitions are counted one by one: times the mean length.
        """
        parts = self.layout.split(np.asarray(statistics, dtype=np.float64))
        lead = statistics.shape[:-1]
        found = (parts["mass"], parts["moments"], parts["observed"])
        counted = [parts["mass"], parts["initial"], parts["observed"]]
        flat = [part.reshape(*lead, -1) for part in (*counted, parts["transitions"] * self.length)]
        return np.concatenate([*flat, emissions.code_shares(self.columns, *found)], axis=-1)

    def component_shares(self, statistics: FloatArray) -> FloatArray:
        return self.layout.split(statistics)["mass"] * self.length

    def responsibilities(self, data: Any, params: MarkovParameters) -> FloatArray:
        """p(state | sequence) at each step, ``(..., sequences, time, K)``; 0 after the end."""
        parts = []
        for _, block, length in self._blocks(data):
            logs = self._log_emissions(self._features(block), params, block.shape[:-1])
            states = smooth(logs, params.initial, params.transitions, length).states
            parts.append(np.moveaxis(states, -3, -1))
        return np.concatenate(parts, axis=-3)

    def score_samples(self, data: Any, params: MarkovParameters) -> FloatArray:
        """log p of each sequence, in the user's units."""
        parts = []
        for _, block, _ in self._blocks(data):
            shape = block.shape[:-1]
            logs = self._log_emissions(self._features(block), params, shape)
            values = filtered_log_densities(logs, params.initial, params.transitions)
            base = self.columns.base(np, block.reshape(-1, block.shape[-1])).reshape(shape)
            parts.append(values + base.sum(axis=-1))
        return np.concatenate(parts, axis=-1)

    def log_likelihood(
        self, data: Any, params: MarkovParameters, weights: Any | None = None
    ) -> FloatArray:
        """The (weighted) mean over sequences of log p."""
        return mean_over_rows(self.score_samples(data, params), weights)

    # The M-step.

    @property
    def _steps(self) -> float:
        return self.samples * self.length

    @property
    def _prior(self) -> float:
        return self.prior_rows / self._steps

    def _chain(self, counts: FloatArray, pseudo: float) -> FloatArray:
        """Probabilities from counts, none below the floor."""
        filled = counts + pseudo
        shares = filled / filled.sum(axis=-1, keepdims=True)
        return clip_simplex(shares, self.columns.floor) if self.columns.floor > 0 else shares

    def maximize(self, statistics: FloatArray) -> MarkovParameters:
        """T(s): counts to probabilities, and each column by itself."""
        parts = self.layout.split(np.asarray(statistics, dtype=np.float64))
        found = (parts["mass"], parts["moments"], parts["observed"])
        extra = self.concentration - 1
        return MarkovParameters(
            initial=self._chain(parts["initial"], extra / self.samples),
            transitions=self._chain(parts["transitions"], extra / self._steps),
            families=emissions.estimate(self.columns, *found, self._prior),
        )

    def surrogate(self, statistics: FloatArray, params: MarkovParameters) -> FloatArray:
        parts = self.layout.split(np.asarray(statistics, dtype=np.float64))
        found = (parts["mass"], parts["moments"], parts["observed"])
        value = emissions.cross_entropy(self.columns, params, *found)
        value = value - (parts["transitions"] * np.log(params.transitions)).sum(axis=(-1, -2))
        start = (parts["initial"] * np.log(params.initial)).sum(axis=-1)
        return self.length * value - start + self.penalty(params)

    def penalty(self, params: MarkovParameters) -> float:
        """Dirichlet on initial and transition probabilities, conjugate priors on the columns."""
        value = 0.0
        if self.concentration > 1:
            chain = np.log(params.initial).sum() + np.log(params.transitions).sum()
            value -= (self.concentration - 1) / self.samples * float(chain)
        if self.prior_rows:
            value += self.length * emissions.penalty(self.columns, params, self._prior)
        return value

    def inside(self, statistics: FloatArray) -> bool:
        """Positive masses, some way out of every state, and moments the families can have."""
        if not np.all(np.isfinite(statistics)):
            return False
        parts = self.layout.split(np.asarray(statistics, dtype=np.float64))
        extra = self.concentration - 1
        outward = parts["transitions"].sum(axis=-1) + self.n_components * extra / self._steps
        begun = parts["initial"].sum(axis=-1)
        if any(np.any(x < SMALLEST_MASS) for x in (parts["mass"], outward, begun)):
            return False
        floor = self.columns.floor
        if floor == 0 and any(np.any(parts[n] <= 0) for n in ("initial", "transitions")):
            return False
        found = (parts["mass"], parts["moments"], parts["observed"])
        return emissions.defined(self.columns, *found, self._prior)

    def protect(self, before: FloatArray, after: FloatArray) -> FloatArray:
        """States of less than one step do not hold up the others, nor do impossible sums."""
        kept = keep_dying(self.layout, before, after, self._steps)
        first = self.layout.slices["initial"].start
        chain = slice(first, self.layout.slices["transitions"].stop)
        kept = kept.copy()
        kept[chain] = positive(kept[chain], before[chain])
        return emissions.possible(self.columns, self.layout, before, kept)

    def held_up(self, params: MarkovParameters) -> tuple[HeldUp, ...]:
        """States that sit on one value of a column."""
        mass = self.layout.split(self.statistics_of(params))["mass"]
        held = emissions.held_up(self.columns, params, mass)
        return tuple(dataclasses.replace(h, rows_per_sample=self.length) for h in held)

    def metric(self, params: MarkovParameters) -> ColumnMetric:
        """Every statistic in units of its spread."""
        mass = self.layout.split(self.statistics_of(params))["mass"]
        often = np.maximum(mass, 0.02 / self.n_components)
        extra = {
            "initial": np.sqrt(np.maximum(params.initial, 0.02)),
            "transitions": np.sqrt(often[:, None] * np.maximum(params.transitions, 0.02)),
        }
        return ColumnMetric.at(self.columns, self.layout, params, mass, extra, self._steps)

    # Starts and units.

    def start(self, seed: int) -> MarkovParameters:
        """Columns around those of all data; states that last a few steps."""
        k = self.n_components
        size = k * self.columns.widths[0]
        draws = normal_row(seed, 0, Purpose.START, size)
        return MarkovParameters(
            initial=np.full(k, 1 / k),
            transitions=0.5 * np.eye(k) + 0.5 / k,
            families=emissions.begin(self.columns, k, draws),
        )

    def statistics_of(self, params: MarkovParameters) -> FloatArray:
        """The statistics of chains of the mean length, as much missing as in the data."""
        now, transitions = params.initial, params.transitions
        mass, pairs = np.zeros_like(now), np.zeros_like(transitions)
        steps = max(2, round(self.length))
        for step in range(steps):
            mass = mass + now / steps
            if step + 1 < steps:
                pairs = pairs + now[..., None] * transitions / steps
                now = (now[..., None, :] @ transitions)[..., 0, :]
        moments, observed = emissions.expected(self.columns, params, mass)
        parts = {"mass": mass, "initial": params.initial, "transitions": pairs}
        return self.layout.join({**parts, "moments": moments, "observed": observed})

    def to_user(self, params: MarkovParameters) -> MarkovParameters:
        arrays = emissions.to_user(self.columns, params)
        return MarkovParameters(
            initial=params.initial, transitions=params.transitions, families=arrays
        )

    def from_user(self, params: MarkovParameters) -> MarkovParameters:
        """Check parameters given in the user's units and bring them into the frame."""
        check_type("start", params, MarkovParameters, "MarkovParameters(initial=..., ...)")
        k = self.n_components
        for name, shape in (("initial", (k,)), ("transitions", (k, k))):
            value = getattr(params, name)
            good = value.shape == shape and np.all(value >= 0)
            if not good or not np.allclose(value.sum(axis=-1), 1, atol=1e-6):
                raise SettingsError(
                    f"start {name}: expected probabilities of shape {shape} with sum 1; got shape "
                    f"{value.shape}."
                )
        arrays = emissions.from_user(self.columns, params, k)
        return MarkovParameters(
            initial=params.initial, transitions=params.transitions, families=arrays
        )

    def by_column(self, params: MarkovParameters) -> dict[str, Mapping[str, FloatArray]]:
        """A result's emission parameters by the name of the column, ``(K, ...)`` each."""
        return emissions.by_column(self.columns, params)

    def free_parameters(self) -> int:
        """Initial and transition probabilities, and the emissions of each state."""
        k = self.n_components
        return k - 1 + k * (k - 1) + k * self.columns.free_parameters()

    def portrait(self, params: MarkovParameters, names: Sequence[str]) -> Portrait:
        """The parameters of each column, and the long-run share of each state."""
        weights = _stationary(params.transitions)
        own = column_portrait(weights, self.columns, params, names)
        ways = {"first": params.initial}
        if len(weights) > 1:
            ways |= {f"then state {j}": to for j, to in enumerate(params.transitions.T)}
        cells = [[f"{v:.3f}" for v in to.tolist()] for to in ways.values()]
        return dataclasses.replace(own, features=[*own.features, *ways], cells=[*own.cells, *cells])

    def words(self) -> ModelWords:
        return ModelWords(
            f"hidden Markov model with {plural(self.n_components, 'state')}",
            part="state",
            row="sequence",
            meaning="how probable the sequences are under the model; higher is better",
        )

    def describe(self) -> dict[str, Any]:
        return {
            "model": "hidden-markov",
            "n_components": self.n_components,
            "families": self.columns.describe(),
            "floor": self.columns.floor,
            "concentration": self.concentration,
            "prior_rows": self.prior_rows,
        }


def _stationary(transitions: FloatArray) -> FloatArray:
    """The long-run share of each state."""
    k = len(transitions)
    system = np.vstack([transitions.T - np.eye(k), np.ones(k)])
    shares = np.linalg.lstsq(system, np.append(np.zeros(k), 1.0), rcond=None)[0]
    return np.clip(shares, 0.0, 1.0)


@register_model("hidden-markov")
def hidden_markov(
    n_components: int,
    families: Mapping[str, Any] | Sequence[Any] | str = "gaussian",
    *,
    floor: float = 1e-6,
    concentration: float = 1.0,
    prior_rows: float = 0.0,
) -> HiddenMarkov:
    """Make a hidden Markov model of sequences of shape (sequences, time, columns).

    Parameters
    ----------
    n_components : int
        The number of states.
    families : str, sequence or mapping
        The families of the emissions as in `mixed_mixture`: one for all columns, a list or a dict.
    floor : float
        What keeps probabilities, variances and rates off zero, as a share of those of all data.
    concentration : float
        The concentration, at least 1, of a Dirichlet prior on initial and transition probabilities.
    prior_rows : float
        Steps with the average statistics of all data that are added to every state.

    Returns
    -------
    HiddenMarkov
        The model, not bound to data.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> steps = np.repeat([0.0, 5.0, 0.1, 5.2], 5)[None, :, None]
    >>> data = [steps, steps + 0.1]  # two workers with one sequence each
    >>> result = emfed.fit(emfed.hidden_markov(2), data, "em", seed=0, rounds=20)
    >>> result.params.transitions.shape
    (2, 2)
    """
    check_range("floor", floor, 0, 0.1)
    return HiddenMarkov(n_components, Columns.of(families, floor), concentration, prior_rows)
