"""What the analysis of an experiment hands on: numbers to judge, figures and tables to show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from emfed.artifacts import Explorer, Figure, Table
from emfed.core.protocols import FloatArray


@dataclass(frozen=True)
class Findings:
    """Measures have one value for every seed; figures are named as their files are."""

    measures: Mapping[str, FloatArray]
    figures: Mapping[str, Figure]
    tables: Sequence[Table] = field(default=())
    explorers: Sequence[Explorer] = field(default=())
