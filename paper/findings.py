"""What the analysis of an experiment hands on: numbers to judge, figures and tables to show."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from emfed.artifacts import Explorer, Figure, Table
from emfed.artifacts.figures import FEW
from emfed.core.protocols import FloatArray


@dataclass(frozen=True)
class Findings:
    """Measures have one value for every seed; figures are named as their files are."""

    measures: Mapping[str, FloatArray]
    figures: Mapping[str, Figure]
    tables: Sequence[Table] = field(default=())
    explorers: Sequence[Explorer] = field(default=())


def over_seeds(count: int) -> str:
    """How the curves of so many seeds are drawn, for captions."""
    if count >= FEW:
        return "medians and 90% bands over seeds"
    return "one seed" if count == 1 else "a line for every seed"


def in_words(value: float) -> str:
    """A number as captions print it: powers of ten as such."""
    exponent = math.log10(value)
    if exponent != round(exponent) or abs(exponent) < 4:
        return f"{value:g}"
    return "10" + f"{exponent:.0f}".translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
