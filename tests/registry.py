"""Every model of the package with small data of its kind: contract tests take them from here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import emfed
from emfed.models.row_owner import RowOwner
from tests.helpers import KINDS, make_data, make_model
from tests.tables import FAMILIES, column, mixed_tables


@dataclass(frozen=True)
class Entry:
    """A model, a version of it with every prior, and tables of four workers."""

    make: Callable[..., Any]
    priors: dict[str, Any]
    tables: list[Any]
    warm: int = 2
    """EM steps to the basin of one optimum; more where EM is slow."""


def _mixed(kind: str, missing: bool) -> Entry:
    return Entry(
        lambda **options: emfed.mixed_mixture(2, FAMILIES[kind], missing=missing, **options),
        {"weight_concentration": 3.0, "prior_rows": 4.0},
        mixed_tables(kind, missing=0.15 if missing else 0.0),
    )


def _gaussian(kind: str, k: int) -> Entry:
    rng = np.random.default_rng(k)
    tables = [np.where(rng.random(t.shape) < 0.2, np.nan, t) for t in make_data(k, k=k, d=3)]
    return Entry(
        lambda **options: emfed.gaussian_mixture(k, kind, missing=True, **options),
        {"weight_concentration": 3.0, "covariance_prior": emfed.models.InverseWishart(5.0, 0.5)},
        tables,
    )


def _plain(kind: str) -> Entry:
    prior = {} if kind == "known" else {"covariance_prior": emfed.models.InverseWishart(5.0, 0.5)}
    return Entry(
        lambda **options: make_model(kind, k=2, d=3, **options),
        {"weight_concentration": 3.0, **prior},
        make_data(6, k=2, d=3),
    )


def _factors(make: Any, k: int) -> Entry:
    rng = np.random.default_rng(3)
    loadings = rng.normal(size=(k, 9, 2))
    centres = 4 * rng.normal(size=(k, 9))
    tables = []
    for size in (80, 65, 50, 110):
        labels = rng.integers(k, size=size)
        z = rng.normal(size=(size, 2))
        noise = rng.normal(size=(size, 9)) * np.linspace(0.4, 0.8, 9)
        tables.append(centres[labels] + np.einsum("nij,nj->ni", loadings[labels], z) + noise)
    return Entry(
        lambda **options: make(2, k, **options),
        {"weight_concentration": 3.0, "noise_prior": emfed.models.InverseWishart(5.0, 0.5)},
        tables,
        warm=150,
    )


def _low_rank() -> Entry:
    rng = np.random.default_rng(4)
    loadings, units = rng.normal(size=(2, 6)), np.array([1, 1e-3, 50, 2, 1, 0.1])
    tables = []
    for size in (50, 45, 30, 60):
        rows = rng.normal(rng.normal(), 1, (size, 2)) @ loadings + 0.5 * rng.normal(size=(size, 6))
        tables.append(np.where(rng.random(rows.shape) < 0.2, np.nan, 3 + rows * units))
    return Entry(
        lambda **options: RowOwner(2, **({"ridge": 0.0} | options)), {"ridge": 2.0}, tables, warm=40
    )


def _regressions(k: int) -> Entry:
    rng = np.random.default_rng(5)
    lines = 3 * rng.normal(size=(k, 3))
    tables = []
    for size in (50, 45, 30, 60):
        x = rng.normal(size=(size, 2)) * [1, 3] + [5, 0]
        mine = lines[rng.integers(k, size=size)]
        y = mine[:, 0] + (mine[:, 1:] * x).sum(axis=1) + 0.4 * rng.normal(size=size)
        tables.append(np.column_stack([x[:, 0], y, x[:, 1]]))
    priors = {"ridge": 2.0, "noise_prior": emfed.models.InverseWishart(5.0, 0.5)}
    return Entry(
        lambda **options: emfed.regression_mixture(k, target=1, **options),
        {"weight_concentration": 3.0, **priors},
        tables,
        warm=2 if k > 1 else 0,  # one regression has nothing latent: one step is the answer
    )


def _chains(families: Any, seed: int = 0) -> Entry:
    rng = np.random.default_rng(seed)
    listed = [families] * 2 if isinstance(families, str) else list(families)
    stay = np.array([[0.9, 0.1], [0.2, 0.8]])
    workers = []
    for count in (14, 9, 20, 11):
        sequences = []
        for _ in range(count):
            labels = [int(rng.integers(2))]
            for _ in range(int(rng.integers(3, 18))):
                labels.append(int(rng.choice(2, p=stay[labels[-1]])))
            drawn = [
                column(f, 2, np.array(labels), np.ones(len(labels)), np.random.default_rng(j + 1))
                for j, f in enumerate(listed)
            ]
            shift = rng.normal(size=(len(labels), len(listed)))  # no two sequences alike
            noisy = np.stack(drawn, axis=1)
            where = [f == "gaussian" for f in listed]
            noisy[:, where] += 0.5 * shift[:, where]
            noisy[rng.random(noisy.shape) < 0.05] = np.nan
            noisy[-1] = np.nan_to_num(noisy[-1], nan=1.0)
            sequences.append(noisy)
        workers.append(sequences)
    return Entry(
        lambda **options: emfed.hidden_markov(2, families, **options),
        {"concentration": 2.0, "prior_rows": 4.0},
        emfed.data.pad_sequences(workers),
        warm=3,
    )


REGISTRY: dict[str, Entry] = {
    **{kind: _plain(kind) for kind in KINDS},
    **{f"{kind} mixture": _mixed(kind, False) for kind in FAMILIES},
    **{f"{kind} mixture, NaN": _mixed(kind, True) for kind in FAMILIES},
    **{f"{kind} {k}, NaN": _gaussian(kind, k) for kind in ("full", "diag") for k in (1, 2)},
    **{f"factors {k}": _factors(emfed.factor_analysis, k) for k in (1, 2)},
    "low rank, NaN": _low_rank(),
    **{f"regressions {k}": _regressions(k) for k in (1, 2)},
    "gaussian chain": _chains("gaussian"),
    "poisson chain": _chains("poisson"),
    "mixed chain": _chains(["gaussian", "poisson", emfed.models.Categorical(3)]),
    **{f"ppca {k}": _factors(emfed.ppca, k) for k in (1, 2)},
}
