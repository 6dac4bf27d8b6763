"""What binds a model, as numbers that can be sent.

`Model.bind` needs of all summaries no more than `Model.combine` makes of them and the number of
rows: binding to the one combined summary gives the same model. So that, and nothing about single
workers, is what every worker is told.
"""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

import numpy as np

from emfed.core.errors import WireError
from emfed.core.protocols import FloatArray, Model, Opening, Parameters

Shapes = Mapping[str, tuple[int, ...]]


def pack_constants(model: Model, opening: Opening, weights: FloatArray) -> FloatArray:
    """The number of rows, then the combined summary by name."""
    whole = model.combine(opening.summaries, weights)
    rows = np.array([float(opening.counts.sum())])
    return np.concatenate([rows, *(np.ravel(whole[name]) for name in sorted(whole))])


def bind_constants(model: Model, constants: FloatArray, shapes: Shapes) -> Model:
    """The model that knows all data, from `pack_constants`; ``shapes`` are those of a summary."""
    rows = constants[0]
    if not (rows >= 1 and rows == np.floor(rows) and rows < 2.0**53):
        raise WireError(f"constants begin with a number of rows; got {rows}.")
    whole = {name: values[None] for name, values in unflatten(constants[1:], shapes).items()}
    return model.bind(whole, np.array([int(rows)]), np.ones(1))


def flatten(summary: Mapping[str, FloatArray]) -> FloatArray:
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


def flatten_params(params: Parameters) -> FloatArray:
    """theta as one vector."""
    return np.concatenate([np.ravel(array) for array in params.arrays().values()])


def unflatten_params(values: FloatArray, like: Parameters) -> Parameters:
    """The inverse of `flatten_params`, for parameters shaped like these."""
    import dataclasses

    arrays: dict[str, Any] = {}
    start = 0
    for name, array in like.arrays().items():
        arrays[name] = values[start : start + array.size].reshape(array.shape)
        start += array.size
    if start != len(values):
        raise WireError(f"expected {start} parameters; got {len(values)}.")
    return dataclasses.replace(like, **arrays)
