"""What binds a model, as numbers that can be sent.

`Model.bind` needs of all summaries no more than `Model.combine` makes of them and the number of
rows: binding to the one combined summary gives the same model. So that, and nothing about single
workers, is what every worker is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import prod
from typing import Any, final

import numpy as np

from emfed.core.errors import SettingsError, WireError
from emfed.core.protocols import (
    FloatArray,
    IntArray,
    Model,
    Names,
    NamesColumns,
    Opening,
    Parameters,
    Question,
    Summaries,
    View,
)
from emfed.core.wire import (
    decode_constants,
    encode_constants,
    encode_floats,
    encode_moments,
    encode_numbers,
    rounded_moments,
    whole_loss,
    worker_loss,
)
from emfed.core.wording import Setting, Wording
from emfed.models.clusters import BUCKETS_PER_COMPONENT, Buckets, Clusters
from emfed.models.columns import Columns
from emfed.models.components import SMALLEST_COMPONENT
from emfed.models.side_by_side import SideBySide

Shapes = Mapping[str, tuple[int, ...]]


def rounded_columns(shapes: Shapes) -> int:
    """The columns of a summary that can be rounded: a mean and second moments; else 0."""
    moments = set(shapes) == {"mean", "scatter"} and len(shapes["mean"]) == 1
    return shapes["mean"][0] if moments else 0


def rounded_opening(opening: Opening, model: Model) -> Opening:
    """What a server has of this model's summaries, which travel rounded, and their bytes."""
    shapes = {name: values.shape[1:] for name, values in opening.summaries.items()}
    count = len(opening.counts)
    loss = worker_loss(count, model.fixed_data)
    parts = [opening.summaries[name].reshape(count, -1) for name in sorted(shapes)]
    if not parts:
        return opening
    values, sizes = rounded_moments(np.concatenate(parts, axis=1), rounded_columns(shapes), loss)
    ends = np.cumsum([part.shape[1] for part in parts])[:-1]
    pieces = zip(sorted(shapes), np.split(values, ends, axis=1), strict=True)
    summaries = {name: piece.reshape(count, *shapes[name]) for name, piece in pieces}
    return replace(opening, summaries=summaries, sizes=sizes)


def pack_constants(
    model: Model, opening: Opening, weights: FloatArray, loss: float = 0.0
) -> tuple[FloatArray, bytes]:
    """The number of rows, then the combined summary by name; and the bytes that tell both."""
    whole = opening.whole
    if whole is None:
        whole = model.combine(opening.summaries, weights)
    shapes = {name: values.shape for name, values in whole.items()}
    rows = int(opening.counts.sum())
    told = encode_constants(
        rows, encode_moments(flatten(whole), rounded_columns(shapes), loss, at_random=False)
    )
    return decode_constants(told, sum(map(prod, shapes.values()))), told


def bind_constants(model: Model, constants: FloatArray, shapes: Shapes) -> Model:
    """The model that knows all data, from `pack_constants`; ``shapes`` are those of a summary."""
    rows = constants[0]
    if not (rows >= 1 and rows == np.floor(rows) and rows < 2.0**53):
        raise WireError(f"constants begin with a number of rows; got {rows}.")
    whole = {name: values[None] for name, values in unflatten(constants[1:], shapes).items()}
    return model.bind(whole, np.array([int(rows)]), np.ones(1))


def flatten(summary: Summaries) -> FloatArray:
    """Arrays as one vector, by name."""
    return np.concatenate([np.empty(0), *(np.ravel(summary[name]) for name in sorted(summary))])


def unflatten(values: FloatArray, shapes: Shapes) -> dict[str, FloatArray]:
    """The inverse of `flatten`."""
    out, start = {}, 0
    for name in sorted(shapes):
        stop = start + prod(shapes[name])
        out[name] = values[start:stop].reshape(shapes[name])
        start = stop
    if start != len(values):
        raise WireError(f"expected {start} numbers of a summary; got {len(values)}.")
    return out


def flatten_params(params: Parameters | None) -> FloatArray:
    """theta as one vector; None is empty."""
    if params is None:
        return np.empty(0)
    return np.concatenate([np.ravel(array) for array in params.arrays().values()])


def told_parameters(question: Question) -> bytes:
    """What tells the parameters of a question: themselves, or statistics on a grid."""
    if question.statistics is not None:
        return encode_numbers(question.statistics)
    values = flatten_params(question.params)
    return encode_floats(values) if len(values) else b""


def unflatten_params(values: FloatArray, like: Parameters) -> Parameters:
    """The inverse of `flatten_params`, for parameters shaped like these."""
    wanted, arrays = like.arrays(), dict[str, Any]()
    expected = sum(array.size for array in wanted.values())
    if expected != len(values):
        raise WireError(f"expected {expected} parameters; got {len(values)}.")
    start = 0
    for name, array in wanted.items():
        arrays[name] = values[start : start + array.size].reshape(array.shape)
        start += array.size
    return like.with_arrays(arrays)


def of_columns(model: Any, columns: Names) -> Any:
    """The model for a table with these columns, of which it may name some alone."""
    if columns is None:
        return model
    if isinstance(model, SideBySide):
        return replace(model, models=tuple(of_columns(part, columns) for part in model.models))
    return model.among(columns) if isinstance(model, NamesColumns) else model


def extra_owners(model: Model, width: int) -> IntArray:
    """The column that each number of a summary's ``extra`` is about, of so many columns."""
    asked = model.serves_all if isinstance(model, SideBySide) else model
    columns = getattr(asked, "columns", None)
    if isinstance(columns, Columns):
        return columns.fit_to(width).owners()
    return np.empty(0, dtype=np.int64)


def candidates_of(model: Model) -> tuple[Model, ...]:
    """The candidates that a run opened with; one where its model stands alone."""
    return model.models if isinstance(model, SideBySide) else (model,)


@final
class Bound:
    """A run's model and what binds it: both ends build every view from these alone, and alike.

    A candidate is bound when a view first names it. So candidates that the rows cannot have (more
    components than rows) do no harm as long as no view names them.
    """

    def __init__(
        self, model: Model, constants: FloatArray, shapes: Shapes, wire: bytes = b""
    ) -> None:
        self.model, self.constants, self.shapes = model, constants, dict(shapes)
        self.wire = wire
        """The constants as workers are told them."""
        self._parts: dict[int, Any] = {}
        self._views: dict[View, Model] = {}

    @classmethod
    def told(
        cls, model: Model, opening: Opening, weights: FloatArray, rounded: bool = False
    ) -> Bound:
        """Read what the opening exchange told."""
        shapes = {name: values.shape[1:] for name, values in opening.summaries.items()}
        loss = whole_loss(len(opening.counts), model.fixed_data) if rounded else 0.0
        constants, wire = pack_constants(model, opening, weights, loss)
        return cls(model, constants, shapes, wire)

    @classmethod
    def given(cls, model: Model) -> Bound:
        """A model that is bound already, alone; it does not travel."""
        bound = cls(model, np.empty(0), {})
        bound._parts[0] = model
        return bound

    def candidate(self, position: int) -> Any:
        """A candidate as it was described."""
        candidates = candidates_of(self.model)
        if position >= len(candidates):
            raise SettingsError(f"a view names part {position} of {len(candidates)}.")
        return candidates[position]

    def part(self, position: int) -> Any:
        """A candidate that knows all data."""
        if position not in self._parts:
            bound = bind_constants(self.candidate(position), self.constants, self.shapes)
            self._parts[position] = bound
        return self._parts[position]

    def view(self, view: View) -> Model:
        """The model that a view names."""
        if view not in self._views:
            self._views[view] = self._build(view)
        return self._views[view]

    def parts_of(self, view: View) -> tuple[int, ...]:
        """The candidates that a view names."""
        everything = range(len(candidates_of(self.model)))
        return tuple(everything) if view.parts is None else view.parts

    def kept(self, before: View, after: View) -> IntArray:
        """Where the statistics of the second view, some parts of the first, lie in the first's."""
        together = self.view(before)
        if not isinstance(together, SideBySide):
            return np.arange(together.layout.size)
        told = self.parts_of(before)
        missing = [j for j in self.parts_of(after) if j not in told]
        if missing or after.watched != before.watched:
            raise SettingsError(f"a phase cannot go on with parts {missing} that it did not have.")
        return together.places([told.index(j) for j in self.parts_of(after)])

    def _build(self, view: View) -> Model:
        parts = self.parts_of(view)
        alone = view.parts is None and not isinstance(self.model, SideBySide)
        if alone and view.clusters is None and not view.watched:
            return self.part(0)
        if view.clusters is not None:
            return _buckets(self.part(parts[0]), view)
        return SideBySide(tuple(self.part(j) for j in parts), view.watched)


def _buckets(model: Any, view: View) -> Model:
    assert view.clusters is not None
    found = model.clusters(1)
    if not isinstance(found, Clusters):
        raise SettingsError(
            Wording(
                "{} has no clusters: use {}.",
                *(type(model).__name__, Setting("start", "moments")),
            )
        )
    most = BUCKETS_PER_COMPONENT * model.n_components
    if view.clusters > most:  # before any work: a server can name any number
        raise SettingsError(f"{view.clusters} clusters for a start; a start asks for {most}.")
    found = model.clusters(view.clusters)
    # Without masks workers tell of two rows, and noise alone makes a bucket smaller.
    least = view.smallest if view.smallest >= SMALLEST_COMPONENT else 0
    return Buckets(found.silent_below(view.smallest), view.seed, least)
