"""Several models side by side: one message carries the statistics of all of them.

Starts that compete, and numbers of components that are compared, run as one model whose statistics
are those of its parts, one after the other. So they share the rounds of one federation, under any
algorithm, and cost one message instead of many. Each part also says its mean log-likelihood and the
mean entropy of its components, both at the parameters it was asked for: what the server needs to
compare them.

Decision: docs/decisions/019-candidates-side-by-side.md
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any, Self, final

import numpy as np

from emfed.core.errors import SettingsError
from emfed.core.protocols import (
    FloatArray,
    IntArray,
    Layout,
    Metric,
    Model,
    ModelWords,
    Names,
    Parameters,
    Summaries,
    free_parameters,
    plural,
)
from emfed.core.registry import MODELS, register_model, stored
from emfed.models.components import thin, without_thin

MOST_PARTS = 1024
"""Models that one description may name: a hundred times what a range with a few starts needs."""
VALUES = 2
"""The log-likelihood and the entropy of each part."""


@final
@dataclass(frozen=True)
class SideBySideParameters(Parameters):
    """The parameters of each part."""

    parts: tuple[Any, ...]

    def take(self, index: Any) -> SideBySideParameters:
        return SideBySideParameters(tuple(part.take(index) for part in self.parts))

    def arrays(self) -> dict[str, FloatArray]:
        """The arrays of all parts, by part and name."""
        return {
            f"{position}/{name}": array
            for position, part in enumerate(self.parts)
            for name, array in part.arrays().items()
        }

    def with_arrays(self, arrays: Mapping[str, FloatArray]) -> SideBySideParameters:
        """The arrays by part and name."""
        own: list[dict[str, FloatArray]] = [{} for _ in self.parts]
        for key, array in arrays.items():
            position, _, name = key.partition("/")
            own[int(position)][name] = array
        pairs = zip(self.parts, own, strict=True)
        return SideBySideParameters(tuple(part.with_arrays(given) for part, given in pairs))


@final
@dataclass(frozen=True)
class SideBySideMetric(Metric):
    """The metric of each part on its own statistics."""

    metrics: tuple[Metric, ...]
    cuts: tuple[slice, ...]

    def _apply(self, vectors: FloatArray, name: str) -> FloatArray:
        out = vectors.copy()
        for metric, cut in zip(self.metrics, self.cuts, strict=True):
            out[..., cut] = getattr(metric, name)(vectors[..., cut])
        return out

    def whiten(self, vectors: FloatArray) -> FloatArray:
        return self._apply(vectors, "whiten")

    def unwhiten(self, vectors: FloatArray) -> FloatArray:
        return self._apply(vectors, "unwhiten")

    @property
    def lightest(self) -> float:
        return min(metric.lightest for metric in self.metrics)


@stored("side-by-side")
@final
@dataclass(frozen=True, eq=False)
class SideBySide(Model):
    """Several models of the same rows, fitted in the same rounds and messages.

    Competing starts and candidate numbers of components are fitted so. The models must have the
    same summaries.

    Parameters
    ----------
    models : tuple of Model
        The models.
    watched : bool
        Whether the log-likelihoods travel in every round; not where messages are compressed, whose
        noise would then be that of the largest numbers in them.

    Examples
    --------
    >>> import emfed
    >>> pair = emfed.models.SideBySide((emfed.gaussian_mixture(1), emfed.gaussian_mixture(2)))
    >>> len(pair.models)
    2
    """

    models: tuple[Any, ...]
    watched: bool = True

    def __post_init__(self) -> None:
        if not self.models:
            raise SettingsError("SideBySide needs at least one model.")

    @cached_property
    def layout(self) -> Layout:
        """The layouts of the parts, then ``values`` where they travel."""
        fields = [
            (f"{position}/{name}", shape)
            for position, model in enumerate(self.models)
            for name, shape in model.layout.fields
        ]
        values = [("values", (len(self.models), VALUES))] if self.watched else []
        return Layout((*fields, *values))

    @property
    def serves_all(self) -> Any:
        """The part whose summary serves all: the last, of candidates that with most components.

        Of one component alone more might be asked, what gives its optimum in closed form.
        """
        return self.models[-1]

    @cached_property
    def cuts(self) -> tuple[slice, ...]:
        """Where the statistics of each part lie."""
        ends = np.cumsum([0, *(model.layout.size for model in self.models)]).tolist()
        return tuple(slice(a, b) for a, b in pairwise(ends))

    def places(self, kept: Sequence[int]) -> IntArray:
        """Where the statistics of these parts, and what is told of them, lie among all."""
        spans = [np.arange(cut.start, cut.stop) for cut in (self.cuts[j] for j in kept)]
        if self.watched:
            told = np.arange(self.cuts[-1].stop, self.layout.size).reshape(-1, VALUES)
            spans.append(told[list(kept)].ravel())
        return np.concatenate(spans)

    def _each(self, params: SideBySideParameters) -> Iterator[tuple[Any, Any]]:
        return zip(self.models, params.parts, strict=True)

    def values(self, statistics: FloatArray) -> FloatArray:
        """Log-likelihood and entropy of each part, ``(..., parts, 2)``."""
        return self.layout.split(statistics)["values"]

    def join(self, parts: Sequence[FloatArray], values: FloatArray | None = None) -> FloatArray:
        """The statistics of all parts as one vector; values that nobody knows yet are 0."""
        if not self.watched:
            return np.concatenate(parts, axis=-1)
        lead = parts[0].shape[:-1]
        flat = np.zeros((*lead, len(self.models) * VALUES))
        if values is not None:
            flat = values.reshape(flat.shape)
        return np.concatenate([*parts, flat], axis=-1)

    @property
    def allows_missing(self) -> bool:
        return all(model.allows_missing for model in self.models)

    @property
    def sweeps(self) -> bool:
        return all(model.sweeps for model in self.models)

    @property
    def fixed_data(self) -> bool:
        return any(model.fixed_data for model in self.models)

    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        self.models[0].check(data, where, columns, first)

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        return dict(self.serves_all.summary(data, weights))

    def group_shares(self, statistics: FloatArray) -> FloatArray:
        pieces = zip(self.models, self.cuts, strict=True)
        return np.concatenate([m.group_shares(statistics[..., cut]) for m, cut in pieces], axis=-1)

    def component_shares(self, statistics: FloatArray) -> FloatArray:
        pieces = zip(self.models, self.cuts, strict=True)
        each = [m.component_shares(statistics[..., cut]) for m, cut in pieces]
        return np.concatenate(each, axis=-1)

    def summary_shares(self, summary: Summaries) -> FloatArray:
        shares: FloatArray = self.serves_all.summary_shares(summary)
        return shares

    def combine(self, summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
        return dict(self.serves_all.combine(summaries, shares))

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        bound = tuple(model.bind(summaries, counts, weights) for model in self.models)
        return dataclasses.replace(self, models=bound)

    def expected_statistics(
        self, data: Any, params: SideBySideParameters, weights: Any | None = None
    ) -> FloatArray:
        """Part by part, with what each thinks of the rows."""
        if not self.watched:
            each = self._each(params)
            return self.join([m.expected_statistics(data, p, weights) for m, p in each])
        parts, values = [], []
        for model, own in self._each(params):
            statistics, likelihood, entropy = model.evaluate(data, own, weights)
            parts.append(statistics)
            values.append(np.stack([likelihood, entropy], axis=-1))
        return self.join(parts, np.stack(values, axis=-2))

    def maximize(self, statistics: FloatArray) -> SideBySideParameters:
        pairs = zip(self.models, self.cuts, strict=True)
        return SideBySideParameters(tuple(m.maximize(statistics[..., cut]) for m, cut in pairs))

    def surrogate(self, statistics: FloatArray, params: SideBySideParameters) -> FloatArray:
        triples = zip(self.models, self.cuts, params.parts, strict=True)
        return np.sum([m.surrogate(statistics[..., cut], p) for m, cut, p in triples], axis=0)

    @property
    def exact_opening(self) -> bool:
        """If it is all of the fit; among candidates of a range one may be a little off."""
        return all(model.exact_opening for model in self.models)

    def closed_form(self) -> FloatArray | None:
        parts = [model.closed_form() for model in self.models]
        return None if any(p is None for p in parts) else self.join(parts)

    @property
    def regions(self) -> tuple[slice, ...]:
        return self.cuts

    def surrogates(self, statistics: FloatArray, params: SideBySideParameters) -> FloatArray:
        triples = zip(self.models, self.cuts, params.parts, strict=True)
        return np.array([float(m.surrogate(statistics[cut], p)) for m, cut, p in triples])

    def log_likelihood(
        self, data: Any, params: SideBySideParameters, weights: Any | None = None
    ) -> FloatArray:
        """The sum over the parts, which EM never lowers."""
        pairs = zip(self.models, params.parts, strict=True)
        return np.sum([m.log_likelihood(data, p, weights) for m, p in pairs], axis=0)

    def penalty(self, params: SideBySideParameters) -> float:
        return sum(m.penalty(p) for m, p in zip(self.models, params.parts, strict=True))

    def inside(self, statistics: FloatArray) -> bool:
        pairs = zip(self.models, self.cuts, strict=True)
        return all(m.inside(statistics[..., cut]) for m, cut in pairs)

    def protect(self, before: FloatArray, after: FloatArray) -> FloatArray:
        """A part that would leave its domain goes half as far, and does not hold up the others."""
        out = after.copy()
        for model, cut in zip(self.models, self.cuts, strict=True):
            move = after[cut] - before[cut]
            for halvings in range(61):
                there = before[cut] + 0.5**halvings * move if halvings else after[cut]
                moved = model.protect(before[cut], there)
                if model.inside(moved):
                    break
            else:
                moved = before[cut]
            out[cut] = moved
        return out

    def start(self, seed: int) -> SideBySideParameters:
        return SideBySideParameters(tuple(m.start(seed + j) for j, m in enumerate(self.models)))

    def statistics_of(self, params: SideBySideParameters) -> FloatArray:
        """Part by part; what they think of the rows is not known yet."""
        return self.join([model.statistics_of(own) for model, own in self._each(params)])

    def metric(self, params: SideBySideParameters) -> SideBySideMetric:
        return SideBySideMetric(tuple(m.metric(p) for m, p in self._each(params)), self.cuts)

    def to_user(self, params: SideBySideParameters) -> SideBySideParameters:
        return SideBySideParameters(tuple(m.to_user(p) for m, p in self._each(params)))

    def from_user(self, params: SideBySideParameters) -> SideBySideParameters:
        return SideBySideParameters(tuple(m.from_user(p) for m, p in self._each(params)))

    def free_parameters(self) -> int:
        return sum(free_parameters(model) for model in self.models)

    def words(self) -> ModelWords:
        name = f"{plural(len(self.models), 'model')} side by side"
        return dataclasses.replace(self.models[0].words(), name=name)

    def describe(self) -> dict[str, Any]:
        models = [model.describe() for model in self.models]
        return {"model": "side-by-side", "models": models, "watched": self.watched}


def leave_out_thin(model: Model, statistics: FloatArray, rows: float) -> FloatArray:
    """Statistics of a model, or of several, whose components all have so many rows as owners tell
    of, or none; the same array where they have."""
    out, pairs = statistics, [(model, slice(0, len(statistics)))]
    if isinstance(model, SideBySide):
        pairs = list(zip(model.models, model.cuts, strict=True))
    for one, cut in pairs:
        few = thin(one.component_shares(statistics[cut]), rows)
        if few.any():
            out = statistics.copy() if out is statistics else out
            out[cut] = without_thin(one.layout, statistics[cut], few)
    return out


@register_model("side-by-side")
def _side_by_side(models: Sequence[Any], watched: bool = True) -> SideBySide:
    """Models of the same rows from their descriptions."""
    if not isinstance(models, list) or len(models) > MOST_PARTS:
        raise SettingsError(f"models side by side are a list of at most {MOST_PARTS} descriptions.")
    if any(isinstance(part, Mapping) and part.get("model") == "side-by-side" for part in models):
        raise SettingsError("models side by side are none that are side by side themselves.")
    return SideBySide(tuple(MODELS.build(part) for part in models), watched)
