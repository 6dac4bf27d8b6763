"""Every model of the package with small data of its kind: contract tests take them from here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import fedem
from tests.helpers import make_data
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


def _gaussian(kind: str, k: int) -> Entry:
    rng = np.random.default_rng(k)
    tables = [np.where(rng.random(t.shape) < 0.2, np.nan, t) for t in make_data(k, k=k, d=3)]
    return Entry(
        lambda **options: fedem.gaussian_mixture(k, kind, missing=True, **options),
        {"weight_concentration": 3.0, "covariance_prior": fedem.InverseWishart(5.0, 0.5)},
        tables,
    )


REGISTRY: dict[str, Entry] = {
    **{f"{kind} mixture": _mixed(kind, False) for kind in FAMILIES},
    **{f"{kind} mixture, NaN": _mixed(kind, True) for kind in FAMILIES},
    **{f"{kind} {k}, NaN": _gaussian(kind, k) for kind in ("full", "diag") for k in (1, 2)},
}
