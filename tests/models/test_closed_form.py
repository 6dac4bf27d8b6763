"""One analyser, Gaussian or regression: the opening exchange says all, and no round is made."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from tests.helpers import bind, make_data, make_model

TABLES = ("storms", "wdbc6", "penguins", "gapminder", "diamonds_fifth", "nmes1988")


def numbers(folder: Path, name: str) -> np.ndarray:
    """The numeric columns of a real table, rows complete."""
    import polars as pl

    frame = pl.read_csv(folder / f"{name}.csv.gz", infer_schema_length=None)
    columns = [c for c in frame.columns if frame[c].dtype in (pl.Float64, pl.Int64)]
    return frame.select(columns).drop_nulls().to_numpy().astype(float)


def crawling() -> np.ndarray:
    """Six columns whose five factors EM looks for in thousands of steps."""
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(400, 5)) @ rng.normal(size=(5, 6)) * [1, 10, 0.1, 3, 1, 1]
    return rows + 0.3 * rng.normal(size=(400, 6))


def check_against_sklearn(rows: np.ndarray, factors: int) -> None:
    from sklearn.decomposition import FactorAnalysis

    unit = rows.std(axis=0)
    white = (rows - rows.mean(axis=0)) / unit
    peer = FactorAnalysis(factors, tol=1e-6, max_iter=2000, svd_method="lapack").fit(white)
    parts = np.array_split(rows, 4)
    ours = emfed.fit(emfed.factor_analysis(factors), parts, "auto", seed=1)
    assert ours.converged
    assert ours.rounds == 0
    assert ours.log_likelihood(rows) >= peer.score(white) - np.log(unit).sum() - 1e-6
    theta = ours.model.maximize(ours.statistics)
    for _ in range(20):
        theta = ours.model.maximize(ours.model.expected_statistics(rows, theta))
    gain = ours.model.log_likelihood(rows, theta) - ours.log_likelihood(rows)
    assert gain <= 1e-8


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("factors", [1, 3, 5])
def test_factor_analysis_ends_where_scikit_learn_does_or_higher(factors: int) -> None:
    check_against_sklearn(crawling(), factors)


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
@pytest.mark.parametrize("name", TABLES)
def test_factor_analysis_of_real_tables(name: str, data_dir: Path) -> None:
    rows = numbers(data_dir, name)
    for factors in range(1, rows.shape[1]):
        check_against_sklearn(rows, factors)


def test_ppca_is_that_of_scikit_learn() -> None:
    from sklearn.decomposition import PCA

    rows = crawling()
    for factors in (1, 3):
        ours = emfed.fit(emfed.ppca(factors), np.array_split(rows, 3), "auto")
        assert ours.rounds == 0
        assert ours.log_likelihood(rows) >= PCA(factors).fit(rows).score(rows) - 1e-9


@pytest.mark.parametrize("prior", [None, emfed.models.InverseWishart(5.0, 0.5)])
@pytest.mark.parametrize("make", [emfed.factor_analysis, emfed.ppca])
def test_em_stays_where_the_closed_form_is_with_priors_too(make: Any, prior: Any) -> None:
    rows = crawling()
    model = bind(make(2, noise_prior=prior), np.array_split(rows, 3))
    statistics = model.closed_form()
    theta = model.maximize(statistics)
    again = model.expected_statistics(rows, theta)
    np.testing.assert_allclose(again, statistics, atol=2e-5)
    white = float(model.surrogate(again, theta) - model.surrogate(again, model.maximize(again)))
    assert white <= 1e-9


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical", "known", "streamed"])
def test_one_gaussian_takes_no_round(kind: str) -> None:
    tables = make_data(5, d=3)
    rows = np.concatenate(tables)
    ours = emfed.fit(make_model(kind, k=1, d=3), tables, "auto")
    exact = emfed.fit(make_model(kind, k=1, d=3), tables, "em", rounds=3)
    assert ours.converged
    assert ours.rounds == 0
    assert ours.log_likelihood(rows) == pytest.approx(exact.log_likelihood(rows), abs=1e-12)


def test_one_regression_takes_no_round() -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(200, 3))
    rows[:, 2] += rows[:, 0] * 2
    ours = emfed.fit(emfed.regression_mixture(1), np.array_split(rows, 3), "auto")
    assert ours.rounds == 0
    design = np.column_stack([np.ones(200), rows[:, :2]])
    expected = np.linalg.lstsq(design, rows[:, 2], rcond=None)[0]
    np.testing.assert_allclose(ours.params.coefficients[0], expected[1:], atol=1e-10)


def test_missing_values_and_several_components_need_rounds() -> None:
    tables = make_data(5, d=3)
    assert bind(make_model("full", k=2, d=3), tables).closed_form() is None
    holes = [np.where(np.random.default_rng(1).random(t.shape) < 0.2, np.nan, t) for t in tables]
    assert bind(emfed.gaussian_mixture(1, "full", missing=True), holes).closed_form() is None
