"""Standard errors: the curvature of the log-likelihood, and what it is good for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from tests.helpers import BARE, first
from tests.registry import REGISTRY

EDGE = ("categorical", "mixed", "poisson chain")
"""Models whose small tables have categories or states that nobody has: shares on their bound."""


ROUNDED = 0.02
"""What the rounding of the opening's moments may change, where these are the whole fit."""


def fitted(name: str, **options: Any) -> tuple[emfed.Result, Any]:
    entry = REGISTRY[name]
    settings = {"tol": 1e-9, "rounds": 500, "seed": 1, "errors": True, "algorithm": "em"}
    result = emfed.fit(entry.make(**options), entry.tables, **settings)
    rows = entry.tables if isinstance(entry.tables, list) else list(entry.tables)
    return result, np.concatenate(rows)


def two(rng: Any, rows: int, apart: float = 2.0) -> Any:
    labels = rng.random(rows) < 0.4
    return (np.where(labels, apart, 0.0) + rng.normal(size=rows) * np.where(labels, 0.7, 1.0))[
        :, None
    ]


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
@pytest.mark.parametrize("prior", first([False, True]))
@pytest.mark.parametrize("name", first(sorted(REGISTRY, key=lambda n: "NaN" in n)[::2], 12))
def test_one_standard_error_away_the_log_likelihood_is_half_a_nat_lower(
    name: str, prior: bool
) -> None:
    """Along any direction of the covariance, which only `log_likelihood` has a say in."""
    result, rows = fitted(name, **(REGISTRY[name].priors if prior else {}))
    assert result.uncertainty is not None
    model, middle = result.model.streamed(result.statistics)
    if not (prior or name.startswith(EDGE)):
        assert len(result.uncertainty) == model.free_parameters()

    def objective(by: Any) -> float:
        params = model.maximize(middle + by)
        return float(model.log_likelihood(rows, params)) - model.penalty(params)

    rng, step = np.random.default_rng(0), 0.02
    for _ in range(3):
        turn = rng.normal(size=len(result.uncertainty))
        by = step * (turn / np.linalg.norm(turn)) @ result.uncertainty
        lost = 2 * objective(0 * by) - objective(by) - objective(-by)
        assert lost * result.samples == pytest.approx(step**2, rel=0.02)


def test_of_one_gaussian_errors_are_those_of_the_textbook() -> None:
    rows = np.random.default_rng(1).normal(3, 2, (500, 2)) @ [[1, 0.5], [0, 1]]
    result = emfed.fit(emfed.gaussian_mixture(1), [rows[:100], rows[100:]], errors=True)
    table = result.summary().table
    told = dict(zip(table["name"], table["std_err"], strict=True))
    s = np.cov(rows.T, bias=True)
    assert told["mean[0, 0]"] == pytest.approx(np.sqrt(s[0, 0] / 500), rel=ROUNDED)
    assert told["variance[0, 1]"] == pytest.approx(s[1, 1] * np.sqrt(2 / 500), rel=ROUNDED)
    covariance = np.sqrt((s[0, 0] * s[1, 1] + s[0, 1] ** 2) / 500)
    assert told["covariance[0, 0, 1]"] == pytest.approx(covariance, rel=ROUNDED)


def test_of_one_regression_errors_are_those_of_least_squares() -> None:
    rng = np.random.default_rng(2)
    x = rng.normal(5, 2, (300, 2))
    y = 1 + x @ [2, -1] + rng.normal(size=300)
    model = emfed.regression_mixture(1)
    result = emfed.fit(model, [np.column_stack([x, y])[j::3] for j in range(3)], errors=True)
    design = np.column_stack([np.ones(300), x])
    noise = ((y - design @ np.linalg.lstsq(design, y)[0]) ** 2).mean()
    expected = np.sqrt(np.diagonal(np.linalg.inv(design.T @ design)) * noise)
    _, found = result.errors_of(lambda p: [p.intercepts[0], *p.coefficients[0]])
    np.testing.assert_allclose(found, expected, rtol=ROUNDED)


def test_rows_that_are_missing_count_as_missing() -> None:
    rng = np.random.default_rng(3)
    rows = rng.normal(size=(400, 2))
    rows[:300, 1] = np.nan  # the second column was seen 100 times
    model = emfed.gaussian_mixture(1, "diag", missing=True)
    result = emfed.fit(model, [rows[::2], rows[1::2]], errors=True, tol=1e-10)
    _, found = result.errors_of(lambda p: p.means[0])
    seen = [rows[:, 0].std() / 20, np.nanstd(rows[:, 1]) / 10]
    np.testing.assert_allclose(found, seen, rtol=1e-3)


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_bounds_cover_the_truth_as_often_as_they_say_and_complete_data_would_not() -> None:
    """80 tables of two components that overlap: what is latent takes most of the information."""
    truth = {"weight[1]": 0.4, "mean[0, 0]": 0.0, "mean[1, 0]": 2.0, "variance[0, 0]": 1.0}
    rng = np.random.default_rng(4)
    inside, naive = [], []
    for _ in range(80):
        rows = two(rng, 600)
        start = emfed.models.GaussianParameters([0.6, 0.4], [[0.0], [2.0]], [[[1.0]], [[0.49]]])
        result = emfed.fit(emfed.gaussian_mixture(2), rows, start=start, errors=True, tol=1e-7)
        table = result.summary(level=0.9).table
        at = {name: j for j, name in enumerate(table["name"])}
        low, high = (np.array([table[n][at[q]] for q in truth]) for n in ("lower", "upper"))
        inside.append((low < [*truth.values()]) & ([*truth.values()] < high))
        weight, n = result.params.weights[1], len(rows)
        complete = 1.645 * np.sqrt(weight * (1 - weight) / n)
        naive.append(abs(weight - 0.4) < complete)
    covered = np.mean(inside, axis=0)
    # 0.9 +- 3 sqrt(0.9 * 0.1 / 80), and a little for 600 rows being no infinity
    assert np.all((covered > 0.79) & (covered < 0.99)), covered
    assert np.mean(naive) < 0.6


@pytest.mark.parametrize("kind", ["full", "tied"])
def test_errors_over_a_network_and_from_a_file_are_those_of_one_process(
    kind: str, tmp_path: Path
) -> None:
    rng = np.random.default_rng(5)
    data = {"north": two(rng, 150, 4.0), "south": two(rng, 250, 4.0)}
    model = emfed.gaussian_mixture(2, kind)
    with emfed.network.LocalSites(data, rules=BARE) as sites:
        here, there = (emfed.fit(model, given, errors=True, masks=False) for given in (data, sites))
    assert here.uncertainty is not None
    np.testing.assert_allclose(here.summary().errors, there.summary().errors, rtol=1e-6)
    pooled = here.with_errors(np.concatenate([*data.values()]))
    np.testing.assert_allclose(pooled.summary().errors, here.summary().errors, rtol=ROUNDED)
    np.testing.assert_allclose(here.with_errors(data).summary().errors, pooled.summary().errors)
    there.save(tmp_path / "model.emfed")
    again = emfed.load(tmp_path / "model.emfed").summary()
    assert again.table == there.summary().table
    assert "std err" in str(again)


def test_several_numbers_of_components_have_errors_for_the_chosen_one() -> None:
    rng = np.random.default_rng(6)
    tables = [two(rng, 150, 6.0), two(rng, 250, 6.0)]
    result = emfed.fit(emfed.gaussian_mixture(1), tables, n_components="1:3", errors=True)
    assert result.uncertainty is not None
    assert result.uncertainty.shape == (5, 6)


def test_a_fit_without_errors_says_how_to_get_them() -> None:
    rows = two(np.random.default_rng(7), 100, 5.0)
    result = emfed.fit(emfed.gaussian_mixture(2), [rows[::2], rows[1::2]])
    with pytest.raises(emfed.SettingsError, match="errors=True"):
        result.summary()
    with pytest.warns(emfed.EmfedWarning, match="has no likelihood"):
        emfed.fit(emfed.k_means(2), [rows[::2], rows[1::2]], errors=True)


def test_an_estimator_has_a_summary_with_the_names_of_its_columns() -> None:
    import pandas as pd

    rows = np.concatenate([two(np.random.default_rng(8), 200, 5.0) for _ in range(2)], axis=1)
    frame = pd.DataFrame(rows, columns=["kg", "cm"])
    fitted = emfed.FederatedGaussianMixture(2).fit(frame)
    with pytest.raises(emfed.SettingsError, match=r"call summary\(X\)"):
        fitted.summary()
    summary = fitted.summary(frame)
    assert {"weight[0]", "mean[1, kg]", "covariance[0, kg, cm]"} <= {*summary.names}
    assert np.isfinite(summary.errors).all()
    frame = frame.assign(ward=np.where(rows[:, 0] > 0, "er", "gp"))
    mixed = emfed.FederatedMixture(1, families={"ward": "categorical"}).fit(frame)
    assert {"probability[0, ward=er]", "probability[0, ward=gp]"} <= {*mixed.summary(frame).names}


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_bounds_of_coefficients_and_transitions_cover_the_truth() -> None:
    """15 tables each: 90% bounds of what other families have, within four deviations."""
    rng = np.random.default_rng(8)
    line = emfed.models.RegressionParameters([0.6, 0.4], [0.0, 2.0], [[1.0], [-1.0]], [0.25, 0.25])
    stay, hits, steps = np.array([0.8, 0.7]), [], []
    for _ in range(15):
        x, which = rng.normal(size=200), (rng.random(200) < 0.4).astype(int)
        y = line.intercepts[which] + line.coefficients[which, 0] * x + 0.5 * rng.normal(size=200)
        model, rows = emfed.regression_mixture(2), np.column_stack([x, y])
        fit = emfed.fit(model, rows, start=line, errors=True, tol=1e-6)
        value, error = fit.errors_of(lambda p: p.coefficients[:, 0])
        hits.append(np.abs(value - [1.0, -1.0]) < 1.645 * error)
        state, seen = (rng.random(40) < 0.5).astype(int), []
        for _ in range(6):
            seen.append(rng.normal(3.0 * state, 1.0))
            state = np.where(rng.random(40) < stay[state], state, 1 - state)
        chain = emfed.models.MarkovParameters(
            initial=[0.5, 0.5],
            transitions=[[0.8, 0.2], [0.3, 0.7]],
            gaussian=[[[0.0, 1.0]], [[3.0, 1.0]]],
        )
        told = np.stack(seen, axis=1)[..., None]
        fitted = emfed.fit(emfed.hidden_markov(2), told, start=chain, errors=True, tol=1e-6)
        value, error = fitted.errors_of(lambda p: np.diagonal(p.transitions))
        steps.append(np.abs(value - stay) < 1.645 * error)
    for name, found in (("coefficients", hits), ("transitions", steps)):
        assert 0.68 < np.mean(found) <= 1.0, (name, np.mean(found, axis=0))


def test_one_long_sequence_tells_transitions_as_several_do() -> None:
    """Shares of steps lie on their bound by the number of steps, not of sequences."""
    rng = np.random.default_rng(4)
    state = np.cumsum(rng.random(600) < 0.1) % 2
    seen = rng.normal(6.0 * state, 1.0)[None, :, None]
    whole, parts = seen, seen.reshape(12, 50, 1)
    told = [
        emfed.fit(emfed.hidden_markov(2), rows, errors=True).summary() for rows in (whole, parts)
    ]
    tables = [dict(zip(t.table["name"], t.table["std_err"], strict=True)) for t in told]
    moves = int((np.diff(state) != 0).sum())
    for name in ("transition[0, 1]", "transition[1, 0]"):
        assert tables[0][name] == pytest.approx(tables[1][name], rel=0.15)
        assert tables[0][name] == pytest.approx(0.1 * np.sqrt(2 / moves), rel=0.4)
    assert tables[0]["initial[0]"] is None
    assert "1 sequences" in str(told[0])
