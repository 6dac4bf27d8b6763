"""As good as pooled: scikit-learn on all rows is the judge."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pytest
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

import emfed
from tests.helpers import first, make_data, plain_fit

SKLEARN_KINDS = ("full", "tied", "diag", "spherical")
SIZES = (13, 200, 75, 40, 1, 151)


def sklearn_fit(rows: Any, kind: str, start: emfed.models.GaussianParameters, rounds: int) -> Any:
    """scikit-learn's EM from the same start: no regularisation, as good as no tolerance."""
    inverse = {"diag": lambda c: 1 / c, "spherical": lambda c: 1 / c}.get(kind, np.linalg.inv)
    judge = GaussianMixture(
        len(start.weights),
        covariance_type=kind,
        reg_covar=0,
        tol=1e-300,
        max_iter=rounds,
        weights_init=start.weights,
        means_init=start.means,
        precisions_init=inverse(start.covariances),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        return judge.fit(rows)


def start_for(rows: Any, kind: str, k: int) -> emfed.models.GaussianParameters:
    d = rows.shape[1]
    centres = np.quantile(rows, np.linspace(0.1, 0.9, k), axis=0)
    covariance = {
        "full": np.tile(np.cov(rows.T), (k, 1, 1)),
        "tied": np.cov(rows.T),
        "diag": np.tile(rows.var(axis=0), (k, 1)),
        "spherical": np.full(k, rows.var(axis=0).mean()),
    }[kind]
    assert covariance.shape[-1] in (d, k)
    return emfed.models.GaussianParameters(np.full(k, 1 / k), centres, covariance)


@pytest.mark.parametrize("kind", first(SKLEARN_KINDS, 2))
@pytest.mark.parametrize("offset", first([1e3, 0.0]))
def test_uncompressed_fedem_ends_where_sklearn_ends(kind: str, offset: float) -> None:
    tables = [t + offset for t in make_data(11, SIZES, k=3, d=3, spread=3.0)]
    rows = np.concatenate(tables)
    start = start_for(rows, kind, 3)
    judge = sklearn_fit(rows, kind, start, 1500)
    model = emfed.gaussian_mixture(3, kind, covariance_floor=0.0)
    got = plain_fit(
        model, tables, emfed.FedEM(emfed.Identity()), start=start, rounds=1500, weights="samples"
    )
    assert got.log_likelihood(rows) == pytest.approx(judge.score(rows), abs=1e-6)
    np.testing.assert_allclose(got.params.means, judge.means_, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(got.predict_proba(rows), judge.predict_proba(rows), atol=1e-3)
    assert got.guard_hits == 0


@pytest.mark.parametrize("kind", SKLEARN_KINDS)
def test_the_whole_trajectory_is_sklearns(kind: str) -> None:
    tables = make_data(12, SIZES, k=3, d=2)
    rows = np.concatenate(tables)
    start = start_for(rows, kind, 3)
    model = emfed.gaussian_mixture(3, kind, covariance_floor=0.0)
    for rounds in (1, 2, 5, 10):
        judge = sklearn_fit(rows, kind, start, rounds)
        # S_0 is the first E-step and T its M-step; each round adds one of both.
        got = plain_fit(model, tables, start=start, rounds=rounds - 1, weights="samples")
        np.testing.assert_allclose(got.params.means, judge.means_, atol=1e-8)
        np.testing.assert_allclose(got.params.covariances, judge.covariances_, atol=1e-8)


@pytest.mark.parametrize("kind", SKLEARN_KINDS)
@pytest.mark.parametrize("seed", first(range(5)))
def test_uniform_weights_on_unequal_workers_keep_covariances_positive(kind: str, seed: int) -> None:
    # Two tiny, far-away workers weigh as much as the large ones.
    tables = make_data(seed, (300, 3, 250, 2), k=3, d=4)
    tables[1] = tables[1] * 0.1 + 20
    tables[3] = tables[3] * 0.1 - 20
    for algorithm in (
        emfed.EM(),
        emfed.FedEM(emfed.Dithering(4, block="row"), step_size=0.5),
    ):
        seen: list[float] = []
        run = emfed.fitting.open_run(
            emfed.gaussian_mixture(3, kind),
            tables,
            algorithm,
            weights="uniform",
            seed=seed,
            start="moments",
            tol=0,
        )
        for _ in range(60):
            run.step()
            c = run.params.covariances
            seen.append(
                float(
                    np.linalg.eigvalsh(c).min()
                    if c.ndim > 1 and kind in ("full", "tied")
                    else c.min()
                )
            )
            assert np.isfinite(run.params.means).all()
        assert min(seen) > 0
