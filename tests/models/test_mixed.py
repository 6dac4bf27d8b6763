"""Mixtures of mixed types: scipy's densities and optimisers are the judges."""

from __future__ import annotations

from typing import Any

import array_api_strict
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import optimize, special, stats

import emfed
from emfed.models.categories import clip_simplex
from emfed.models.families import log_gamma
from emfed.models.positive_families import Gamma, _shape
from tests.helpers import bind, first, plain_fit
from tests.tables import FAMILIES, mixed_tables

each = pytest.mark.parametrize("kind", FAMILIES)
few = pytest.mark.parametrize("kind", first(FAMILIES, 3))


def setup(kind: str, missing: float = 0.2, **options: Any) -> tuple[Any, Any, Any]:
    tables = mixed_tables(kind, missing=missing)
    model = bind(emfed.mixed_mixture(2, FAMILIES[kind], **options), tables)
    rows = np.concatenate(tables)
    return model, rows, model.maximize(model.expected_statistics(rows, model.start(0)))


def log_density(family: Any, mine: Any, j: int, y: float, exposure: float) -> float:
    """log p of one value in component j, by scipy, from `by_column`'s parameters."""
    if family == "gaussian":
        return stats.norm(mine["mean"][j], np.sqrt(mine["variance"][j])).logpdf(y)
    if family == "poisson":
        return stats.poisson(mine["rate"][j]).logpmf(y)
    if isinstance(family, emfed.models.Poisson):
        return stats.poisson(mine["rate"][j] * exposure).logpmf(y)
    if family == "bernoulli":
        return stats.bernoulli(mine["probability"][j]).logpmf(y)
    if family == "exponential":
        return stats.expon(scale=mine["mean"][j]).logpdf(y)
    if family == "gamma":
        return stats.gamma(mine["shape"][j], scale=mine["mean"][j] / mine["shape"][j]).logpdf(y)
    if family == "negative_binomial":
        return stats.nbinom(2, 1 / (1 + 0.5 * mine["mean"][j])).logpmf(y)
    return float(np.log(mine["probabilities"][j][int(y)]))


@each
def test_likelihood_is_the_density_of_scipy(kind: str) -> None:
    model, rows, params = setup(kind)
    families = FAMILIES[kind]
    user = model.to_user(params)
    table = model.by_column(user)
    want = []
    for row in rows[:25]:
        exposure = row[families.index("exposure")] if "exposure" in families else 1.0
        joint = np.log(user.weights)
        for c, family in enumerate(families):
            if family != "exposure" and not np.isnan(row[c]):
                joint = joint + [
                    log_density(family, table[str(c)], j, row[c], exposure) for j in range(2)
                ]
        want.append(special.logsumexp(joint))
    np.testing.assert_allclose(model.score_samples(rows[:25], params), want, rtol=1e-9)


@each
def test_e_step_uses_the_array_api_alone(kind: str) -> None:
    model, rows, params = setup(kind)
    strict = array_api_strict.asarray(rows)
    np.testing.assert_allclose(
        model.expected_statistics(strict, params), model.expected_statistics(rows, params)
    )
    value = model.log_likelihood(strict, params)
    assert float(value) == pytest.approx(float(model.log_likelihood(rows, params)))
    model.check(strict, "strict rows")
    for name, part in model.summary(strict).items():
        np.testing.assert_allclose(part, model.summary(rows)[name])


LINKS: dict[str, Any] = {
    "gaussian": (
        lambda a: np.stack([a[..., 0], np.log(a[..., 1])], axis=-1),
        lambda x: np.stack([x[..., 0], np.exp(x[..., 1])], axis=-1),
    ),
    "poisson": (np.log, np.exp),
    "bernoulli": (special.logit, special.expit),
    "exponential": (np.log, np.exp),
    "gamma": (np.log, np.exp),
    "categorical": (np.log, np.exp),
    "weights": (np.log, np.exp),
}
"""Parameters to unconstrained numbers, and back."""


def unpacked(kind: str, vector: Any, shapes: Any) -> emfed.models.MixedParameters:
    arrays, at = {}, 0
    for name, shape in shapes.items():
        size = int(np.prod(shape))
        arrays[name] = LINKS[name][1](vector[at : at + size].reshape(shape))
        at += size
    arrays["weights"] = arrays["weights"] / arrays["weights"].sum()
    first = 0
    for family in FAMILIES[kind][: 3 if kind == "categorical" else None]:
        if isinstance(family, emfed.models.Categorical):
            mine = arrays["categorical"][:, first : first + family.categories]
            mine /= mine.sum(axis=1, keepdims=True)
            first += family.categories
    return emfed.models.MixedParameters(**arrays)


@few
def test_an_optimiser_of_the_likelihood_ends_where_federated_em_ends(kind: str) -> None:
    """scipy's BFGS on the observed likelihood, missing values included, from the same start."""
    few = slice(3 if kind == "categorical" else None)  # a gradient costs a pass per parameter
    tables = [table[:, few] for table in mixed_tables(kind, missing=0.15)]
    rows = np.concatenate(tables)
    model = emfed.mixed_mixture(2, FAMILIES[kind][few], floor=1e-9)
    start = plain_fit(model, [rows], rounds=3).params
    got = plain_fit(model, tables, emfed.FedEM(), start=start, rounds=2000, field_tol=1e-22)
    shapes = {name: value.shape for name, value in start.arrays().items()}
    vector = np.concatenate([LINKS[n][0](v).ravel() for n, v in start.arrays().items()])

    def objective(x: Any) -> float:
        inner = got.model.from_user(unpacked(kind, x, shapes))
        return -float(got.model.log_likelihood(rows, inner))

    assert objective(vector) == pytest.approx(
        -float(got.model.log_likelihood(rows, got.model.from_user(start))), rel=1e-12
    )
    best = optimize.minimize(objective, vector, method="BFGS", options={"gtol": 1e-6})
    assert got.log_likelihood(rows) == pytest.approx(-best.fun, abs=1e-6)


def test_gaussian_columns_are_a_diagonal_mixture() -> None:
    tables = mixed_tables("gaussian")
    rows = np.concatenate(tables)
    diagonal = plain_fit(emfed.gaussian_mixture(2, "diag"), tables, rounds=200, seed=1)
    start = diagonal.model.to_user(diagonal.model.start(1))
    mine = emfed.models.MixedParameters(
        weights=start.weights, gaussian=np.stack([start.means, start.covariances], axis=-1)
    )
    model = emfed.mixed_mixture(2, ["gaussian", "gaussian"])
    got = plain_fit(model, tables, start=mine, start_statistics="parameters", rounds=200)
    assert got.log_likelihood(rows) == pytest.approx(diagonal.log_likelihood(rows), abs=1e-9)
    np.testing.assert_allclose(got.params.gaussian[..., 0], diagonal.params.means, atol=1e-6)


@each
def test_imputations_are_means_and_draws_and_intervals_of_the_posterior(kind: str) -> None:
    tables = mixed_tables(kind, seed=3, sizes=(150, 250))
    rows = np.concatenate(tables)
    result = plain_fit(emfed.mixed_mixture(2, FAMILIES[kind]), tables, rounds=100)
    holes = np.random.default_rng(0).random(rows.shape) < 0.3
    holes[:, [f == "exposure" for f in FAMILIES[kind]]] = False
    torn = np.where(holes, np.nan, rows)
    filled = result.impute(torn)
    np.testing.assert_array_equal(filled[~holes], rows[~holes])
    assert np.isfinite(filled).all()
    draws = result.impute_draws(torn, draws=400, seed=1)
    np.testing.assert_array_equal(draws[:, ~holes], np.tile(rows[~holes], (400, 1)))
    low, high = result.impute_intervals(torn, level=0.8)
    for c, family in enumerate(FAMILIES[kind]):
        where = holes[:, c]
        if family == "exposure" or not where.any():
            continue
        mine = draws[:, where, c]
        if isinstance(family, emfed.models.Categorical):
            assert np.isnan(low[where, c]).all()
            codes = np.arange(family.categories)
            modes = (mine[..., None] == codes).mean(axis=0).argmax(axis=-1)
            assert (modes == filled[where, c]).mean() > 0.9
            continue
        error = mine.mean(axis=0) - filled[where, c]
        assert np.all(np.abs(error) < 6 * mine.std(axis=0) / 20 + 1e-6)
        inside = (mine >= low[where, c]) & (mine <= high[where, c])
        assert inside.mean() > 0.79
        if family in ("gaussian", "exponential", "gamma"):
            assert inside.mean() == pytest.approx(0.8, abs=0.01)
    assert not np.array_equal(draws[0], draws[1])
    np.testing.assert_array_equal(result.impute_draws(torn, draws=3, seed=1), draws[:3])


@pytest.mark.parametrize(
    ("families", "rows", "words"),
    [
        (["poisson"], [[1.5]], "expected a whole number >= 0, or NaN"),
        (["bernoulli"], [[2.0]], "expected 0 or 1"),
        ([emfed.models.Categorical(3)], [[3.0]], "expected a code 0, 1"),
        (["gamma"], [[0.0]], "expected a finite number > 0"),
        (["exponential"], [[-1.0]], "expected a finite number >= 0"),
        (["gaussian"], [[np.inf]], "expected a finite number"),
        (
            [emfed.models.Poisson(exposure=1), "exposure"],
            [[1.0, 0.0]],
            "expected a positive exposure",
        ),
        (["gaussian", "gaussian"], [[1.0]], "expected 2 columns; got 1"),
        (["gaussian", "poisson"], [[1.0, np.nan]] * 9, "nobody has a single value in column 1"),
    ],
)
def test_bad_values_are_named(families: Any, rows: Any, words: str) -> None:
    with pytest.raises(emfed.DataError, match=words):
        plain_fit(emfed.mixed_mixture(1, families), np.array(rows), rounds=2)


def test_bad_settings_are_told() -> None:
    for families, words in (
        (["normal"], "must be one of gaussian"),
        ([], "one family per column"),
        (["exposure"], "at least one column"),
        ([emfed.models.Poisson(exposure=3)], "no such column"),
        ([emfed.models.Poisson(exposure=1), "gaussian"], "must have the family"),
    ):
        with pytest.raises(emfed.SettingsError, match=words):
            emfed.mixed_mixture(2, families)
    with pytest.raises(emfed.DataError, match="no NaN .say missing=True"):
        plain_fit(emfed.mixed_mixture(1, ["gaussian"], missing=False), np.full((9, 1), np.nan))
    result = plain_fit(emfed.gaussian_mixture(1, "diag"), np.eye(3), rounds=1)
    with pytest.raises(emfed.SettingsError, match="cannot impute: it has no missing values"):
        result.impute(np.eye(3))


def test_columns_are_known_by_name() -> None:
    import polars as pl

    rng = np.random.default_rng(0)
    frame = pl.DataFrame({"visits": rng.poisson(3, 60), "age": rng.normal(50, 9, 60)})
    model = emfed.mixed_mixture(1, {"visits": "poisson", "age": "gaussian"})
    result = plain_fit(model, frame, rounds=5)
    named = result.model.by_column(result.params)
    assert named["visits"]["rate"] == pytest.approx(frame["visits"].mean())
    assert named["age"]["mean"] == pytest.approx(frame["age"].mean())
    swapped = plain_fit(model, frame[["age", "visits"]], rounds=5)
    assert swapped.model.by_column(swapped.params) == named
    with pytest.raises(emfed.EmfedError, match="visits"):
        plain_fit(model, frame[["age"]], rounds=1)


def test_a_worker_that_never_saw_a_column_is_no_trouble() -> None:
    tables = mixed_tables("mixed", missing=0.1)
    tables[1][:, 0] = np.nan
    result = plain_fit(emfed.mixed_mixture(2, FAMILIES["mixed"]), tables, rounds=30)
    assert np.isfinite(result.impute(tables[1])).all()


@pytest.mark.parametrize("kind", ["gaussian", "poisson", "bernoulli", "exponential", "gamma"])
def test_metric_whitens_the_complete_data_statistics(kind: str) -> None:
    """Statistics of one drawn (y, z) have unit variances; in a component, no covariances."""
    model, _, params = setup(kind, missing=0.3)
    params = model.maximize(model.statistics_of(params))
    user, rng, n = model.to_user(params), np.random.default_rng(0), 200_000
    labels = rng.choice(2, size=n, p=params.weights)
    group = model.columns.groups[0]
    theta = group.read(user)[labels]
    u = np.clip(rng.random(theta.shape[:-1]), 1e-12, 1 - 1e-12)
    rows = group.family.draw(theta, np.ones(u.shape), u)
    rows[rng.random(rows.shape) >= model.columns.constants.observed] = np.nan
    features, shares = model.features(np, rows).T, np.eye(2)[labels]
    complete = model.assemble(shares, shares[:, :, None] * features[:, None, :])
    white = model.metric(params).whiten(complete)
    parts = model.layout.split(white)
    np.testing.assert_allclose((parts["moments"] ** 2).mean(axis=0), 1, atol=0.1)
    np.testing.assert_allclose((parts["observed"] ** 2).mean(axis=0), 1, atol=0.05)
    np.testing.assert_allclose((parts["mass"] ** 2).mean(axis=0), 1, atol=0.05)
    covariance = parts["moments"][:, 0].T @ parts["moments"][:, 0] / n
    np.testing.assert_allclose(covariance, np.eye(len(covariance)), atol=0.1)


@few
def test_compression_in_the_metric_ends_closer(kind: str) -> None:
    tables = mixed_tables(kind, missing=0.1)
    rows = np.concatenate(tables)
    start = plain_fit(emfed.mixed_mixture(2, FAMILIES[kind]), tables, rounds=3).params
    pooled = plain_fit(emfed.mixed_mixture(2, FAMILIES[kind]), tables, start=start, rounds=200)
    best, ends = pooled.log_likelihood(rows), []
    for metric in (False, True):
        algorithm = emfed.FedEM(
            emfed.Dithering(1, block="row"), step_size=0.3, memory_rate=0.0, in_metric=metric
        )
        run = emfed.fitting.open_run(
            emfed.mixed_mixture(2, FAMILIES[kind]), tables, algorithm, start=start, seed=3, tol=0
        )
        gaps = []
        for _ in range(80):
            run.step()
            gaps.append(best - float(run.model.log_likelihood(rows, run.params)))
        ends.append(float(np.mean(gaps[30:])))
    assert 0 < ends[1] < 0.5 * ends[0]


@given(x=st.floats(1, 1e6))
def test_log_gamma(x: float) -> None:
    assert float(log_gamma(np, np.array(x))) == pytest.approx(
        special.gammaln(x), rel=2e-13, abs=1e-13
    )


@given(a=st.floats(1e-3, 1e6))
def test_gamma_shape_solves_its_equation(a: float) -> None:
    gap = np.log(a) - special.digamma(a)
    assert float(_shape(np.array(gap))) == pytest.approx(a, rel=1e-5)


@pytest.mark.parametrize("start", ["auto", "moments"])
@pytest.mark.parametrize(("family", "level"), [("poisson", 1e4), ("poisson", 1e9), ("gamma", 1e4)])
def test_columns_that_vary_by_little_are_told_apart(family: str, level: float, start: str) -> None:
    """Starts within a factor of two would leave all rows to one component, 4 nats below."""
    rng = np.random.default_rng(0)
    first = rng.random(300) < 0.4
    rate = level + 6 * np.sqrt(level) * first
    column = rng.poisson(rate) if family == "poisson" else rng.gamma(rate)
    rows = np.column_stack([column, rng.normal(size=300)]).astype(float)
    model = emfed.mixed_mixture(2, [family, "gaussian"])
    result = emfed.fit(model, rows, groups=np.arange(300) % 3, start=start, n_init=2, seed=0)
    agree = np.mean(result.predict(rows) == first)
    assert max(agree, 1 - agree) > 0.98


def test_one_component_with_all_rows_gives_some_to_the_others() -> None:
    """By workers a start knows no exposures; its rates left one component empty, 77 nats below."""
    rng = np.random.default_rng(1)
    first, exposure = rng.random(400) < 0.5, rng.lognormal(0, 1.5, 400)
    counts = rng.poisson(1000 * exposure * np.where(first, 1.8, 1.0))
    rows = np.column_stack([counts, exposure, rng.normal(size=400)])
    model = bind(
        emfed.mixed_mixture(2, [emfed.models.Poisson(exposure=1), "exposure", "gaussian"]), [rows]
    )
    whole = model.statistics_of(
        model.start_at(np.array([1 - 1e-9, 1e-9]), np.zeros((2, 3)), np.ones(3))
    )
    statistics = model.split(whole, np.array([False, True]), 0)
    for _ in range(50):
        statistics = model.expected_statistics(rows, model.maximize(statistics))
    agree = np.mean(model.responsibilities(rows, model.maximize(statistics)).argmax(-1) == first)
    assert max(agree, 1 - agree) > 0.98


@given(a=st.floats(1e-3, 1e3), mean=st.floats(1e-6, 1e6))
def test_what_a_gamma_draws_it_allows(a: float, mean: float) -> None:
    """A small shape draws numbers below what a double holds, and zero has no logarithm."""
    family, u = Gamma(), np.array([0.0, 1e-9, 0.5, 1 - 1e-16])
    drawn = family.draw(np.array([[a, mean]]), np.ones(4), u)
    assert np.all(family.allowed(np, drawn))


@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), floor=st.floats(1e-6, 0.5))
def test_probabilities_under_a_floor_are_the_constrained_optimum(seed: int, floor: float) -> None:
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(5, 0.2))
    got = clip_simplex(shares[None], floor)[0]
    assert got.sum() == pytest.approx(1)
    assert got.min() >= floor / 5 * (1 - 1e-12)
    gradient = shares / got  # of the log-likelihood: equal where free, smaller where held up
    free = got > floor / 5 * (1 + 1e-9)
    if free.any():
        assert np.ptp(gradient[free]) < 1e-6 * gradient[free].max()
        assert np.all(gradient <= gradient[free].max() * (1 + 1e-9))


@pytest.mark.parametrize("rate", [0.3, 40.0, 0.99e6, 1.01e6])
def test_counts_are_drawn_by_inversion_at_any_rate(rate: float) -> None:
    u = np.random.default_rng(0).random(200)
    found = emfed.models.Poisson().draw(np.full((200, 1), rate), np.ones(200), u)
    assert np.abs(found - stats.poisson.ppf(u, rate)).max() <= (rate > 1e6)
    huge = emfed.models.Poisson().draw(
        np.full((9, 1), 1e250), np.ones(9), u[:9]
    )  # for ever, before
    np.testing.assert_allclose(huge, 1e250)
