"""Every model of the package with small data of its kind: contract tests take them from here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import fedem
from tests.tables import FAMILIES, mixed_tables


@dataclass(frozen=True)
class Entry:
    """A model, a version of it with every prior, and tables of four workers."""

    make: Callable[..., Any]
    priors: dict[str, Any]
    tables: list[Any]


def _mixed(kind: str, missing: bool) -> Entry:
    return Entry(
        lambda **options: fedem.mixed_mixture(2, FAMILIES[kind], missing=missing, **options),
        {"weight_concentration": 3.0, "prior_rows": 4.0},
        mixed_tables(kind, missing=0.15 if missing else 0.0),
    )


REGISTRY: dict[str, Entry] = {
    **{f"{kind} mixture": _mixed(kind, False) for kind in FAMILIES},
    **{f"{kind} mixture, NaN": _mixed(kind, True) for kind in FAMILIES},
}
