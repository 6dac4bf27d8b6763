"""Models and the columns of tables."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import numpy as np

from emfed.core.protocols import IntArray, Model, Names, NamesColumns
from emfed.models.columns import Columns


@runtime_checkable
class HasFamilies(Protocol):
    """A model whose columns may have families of their own."""

    @property
    def columns(self) -> Any:
        """`Columns`; other models have other things of this name."""


def of_columns(model: Any, columns: Names) -> Any:
    """The model for a table with these columns, of which it may name some alone."""
    named = columns is not None and isinstance(model, NamesColumns)
    return model.among(columns) if named else model


def extra_owners(model: Model, width: int) -> IntArray:
    """The column that each number of a summary's ``extra`` is about, of so many columns."""
    if isinstance(model, HasFamilies) and isinstance(model.columns, Columns):
        return model.columns.fit_to(width).owners()
    return np.empty(0, dtype=np.int64)
