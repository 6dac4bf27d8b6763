"""Every registered model keeps the contract of `Model`."""

from __future__ import annotations

import json
import warnings
from typing import Any

import array_api_strict
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import emfed
from emfed.core.protocols import FloatArray
from emfed.models import GaussianParameters
from emfed.testing import check_model
from tests.helpers import KINDS, bind, first, make_data, make_model, plain_fit

each = pytest.mark.parametrize("kind", KINDS)
PRIORS: list[dict[str, Any]] = [
    {"covariance_floor": 0.0},
    {"weight_concentration": 3.0},
    {"covariance_prior": emfed.models.InverseWishart(5.0, 0.5)},
    {"covariance_floor": 0.3},
]
each_prior = pytest.mark.parametrize("options", PRIORS, ids=["plain", "dirichlet", "iw", "floor"])


def setup(kind: str, seed: int = 0, **options: Any) -> tuple[Any, list[FloatArray], Any]:
    if kind == "known":
        options.pop("covariance_prior", None)
    tables = make_data(seed)
    model = bind(make_model(kind, **options), tables)
    return model, tables, model.start(seed)


def pooled(model: Any, tables: list[FloatArray], params: Any) -> FloatArray:
    return model.expected_statistics(np.concatenate(tables), params)


@each
@each_prior
def test_the_contract_is_kept(kind: str, options: dict[str, Any]) -> None:
    options = {n: v for n, v in options.items() if (n, kind) != ("covariance_prior", "known")}
    check_model(make_model(kind, **options), make_data(0))


@each
@settings(max_examples=20)
@given(seed=st.integers(0, 1000), cut=st.integers(1, 141))
def test_statistics_of_a_union_are_the_weighted_mean(kind: str, seed: int, cut: int) -> None:
    model, tables, params = setup(kind, seed)
    rows = np.concatenate(tables)
    share = cut / len(rows)
    parts = [model.expected_statistics(part, params) for part in (rows[:cut], rows[cut:])]
    union = share * parts[0] + (1 - share) * parts[1]
    np.testing.assert_allclose(union, model.expected_statistics(rows, params), atol=1e-12)


@each
def test_mass_sums_to_one_and_layout_names_the_rest(kind: str) -> None:
    model, tables, params = setup(kind)
    parts = model.layout.split(pooled(model, tables, params))
    assert parts["mass"].sum() == pytest.approx(1)
    z = (np.concatenate(tables) - model.constants.frame.origin) / model.constants.frame.scale
    np.testing.assert_allclose(parts["first"].sum(axis=0), z.mean(axis=0), atol=1e-12)
    vector = model.layout.join(parts)
    assert vector.shape == (model.layout.size,)


@each
@each_prior
@settings(max_examples=8)
@given(seed=st.integers(0, 10_000))
def test_em_never_raises_the_penalised_objective(
    kind: str, options: dict[str, Any], seed: int
) -> None:
    model, tables, params = setup(kind, seed, **options)
    rows = np.concatenate(tables)
    statistics = pooled(model, tables, params)
    values = []
    for _ in range(8):
        params = model.maximize(statistics)
        values.append(model.penalty(params) - float(model.log_likelihood(rows, params)))
        statistics = pooled(model, tables, params)
    assert np.all(np.diff(values) <= 1e-10 * (1 + np.abs(values[0])))


@each
@each_prior
@settings(max_examples=10)
@given(seed=st.integers(0, 10_000), size=st.sampled_from([1e-3, 1e-2, 0.1]))
def test_maximize_minimises_the_surrogate(
    kind: str, options: dict[str, Any], seed: int, size: float
) -> None:
    model, tables, params = setup(kind, seed, **options)
    statistics = pooled(model, tables, params)
    best = model.maximize(statistics)
    low = float(model.surrogate(statistics, best))
    rng = np.random.default_rng(seed)
    for _ in range(6):
        weights = best.weights * np.exp(size * rng.normal(size=best.weights.shape))
        covariances = best.covariances
        if kind == "full":
            noise = size * rng.normal(size=covariances.shape)
            covariances = covariances + noise @ np.swapaxes(noise, -1, -2)
        elif kind in ("tied", "streamed"):
            noise = size * rng.normal(size=covariances.shape)
            covariances = covariances + noise @ noise.T
        elif kind != "known":
            covariances = covariances * np.exp(size * np.abs(rng.normal(size=covariances.shape)))
        moved = GaussianParameters(
            weights / weights.sum(),
            best.means + size * rng.normal(size=best.means.shape),
            covariances,
        )
        assert low <= float(model.surrogate(statistics, moved)) + 1e-12


@each
@settings(max_examples=20)
@given(seed=st.integers(0, 10_000))
def test_maximize_recovers_parameters_from_exact_statistics(kind: str, seed: int) -> None:
    model, tables, params = setup(kind, seed, covariance_floor=0.0)
    params = model.maximize(pooled(model, tables, params))
    if kind in ("tied", "streamed"):
        # T takes the covariance from the data's second moment: make the parameters agree with it.
        params = model.maximize(model.statistics_of(params))
    again = model.maximize(model.statistics_of(params))
    for name, value in params.arrays().items():
        np.testing.assert_allclose(again.arrays()[name], value, rtol=1e-9, atol=1e-11)


@each
def test_leading_axes_of_data_and_parameters_broadcast(kind: str) -> None:
    model, _, params = setup(kind)
    data = np.stack(make_data(1, sizes=(20, 20, 20)))
    weights = np.random.default_rng(0).uniform(0.1, 1, size=(3, 20))
    stack = model.expected_statistics(data, params, weights)
    each_params = model.maximize(model.expected_statistics(data, params))
    own = model.expected_statistics(data, each_params)
    own_likelihood = model.log_likelihood(data, each_params, weights)
    for i in range(3):
        alone = model.expected_statistics(data[i], params, weights[i])
        np.testing.assert_allclose(stack[i], alone, atol=1e-13)
        mine = each_params.take(i)
        np.testing.assert_allclose(own[i], model.expected_statistics(data[i], mine), atol=1e-13)
        likelihood = model.log_likelihood(data[i], mine, weights[i])
        assert own_likelihood[i] == pytest.approx(float(likelihood), rel=1e-12)


@each
def test_weights_act_as_repetition(kind: str) -> None:
    model, tables, params = setup(kind)
    rows = tables[0][:10]
    times = np.arange(10)
    repeated = np.repeat(rows, times, axis=0)
    np.testing.assert_allclose(
        model.expected_statistics(rows, params, times.astype(float)),
        model.expected_statistics(repeated, params),
        atol=1e-12,
    )


@each
def test_blocks_do_not_show(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tables, params = setup(kind)
    rows = np.concatenate(tables)
    whole = model.expected_statistics(rows, params), model.log_likelihood(rows, params)
    summary = model.summary(rows)
    monkeypatch.setattr("emfed.models.mixture.BLOCK_ELEMENTS", 16)
    np.testing.assert_allclose(model.expected_statistics(rows, params), whole[0], atol=1e-13)
    assert model.log_likelihood(rows, params) == pytest.approx(float(whole[1]))
    for name, value in model.summary(rows).items():
        np.testing.assert_allclose(value, summary[name], rtol=1e-12)


@each
def test_likelihood_is_the_density_of_scipy(kind: str) -> None:
    from scipy.stats import multivariate_normal

    model, tables, params = setup(kind)
    params = model.maximize(pooled(model, tables, params))
    user = model.to_user(params)
    rows, d = tables[0], tables[0].shape[1]
    density = np.zeros(len(rows))
    for j in range(3):
        covariance = {
            "full": lambda j: user.covariances[j],
            "diag": lambda j: np.diag(user.covariances[j]),
            "spherical": lambda j: np.eye(d) * user.covariances[j],
        }.get(kind, lambda j: user.covariances)(j)
        density += user.weights[j] * multivariate_normal(user.means[j], covariance).pdf(rows)
    np.testing.assert_allclose(model.score_samples(rows, params), np.log(density), rtol=1e-9)
    assert float(model.log_likelihood(rows, params)) == pytest.approx(np.log(density).mean())
    shares = model.responsibilities(rows, params)
    np.testing.assert_allclose(shares.sum(axis=1), 1)


@each
def test_e_step_uses_the_array_api_alone(kind: str) -> None:
    model, tables, params = setup(kind)
    rows = tables[0]
    strict = array_api_strict.asarray(rows)
    np.testing.assert_allclose(
        model.expected_statistics(strict, params), model.expected_statistics(rows, params)
    )
    assert model.log_likelihood(strict, params) == pytest.approx(
        float(model.log_likelihood(rows, params))
    )
    for name, value in model.summary(strict).items():
        np.testing.assert_allclose(value, model.summary(rows)[name])
    model.check(strict, "strict rows")


def test_wide_rows_give_what_their_products_give(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full covariances have two E-steps: one for many columns, one for few."""
    tables = make_data(4, sizes=(300, 200), k=2, d=21)
    model = bind(make_model("full", k=2, d=21), tables)
    params = model.start(1)
    stack = np.stack([tables[0][:90], tables[1][:90]])
    weights = np.random.default_rng(0).random(stack.shape[:2])
    own = model.maximize(
        np.stack([model.statistics_of(model.start(seed)) for seed in (2, 3)])
    )  # parameters of each worker's own

    def everything() -> list[FloatArray]:
        strict = array_api_strict.asarray(tables[0])
        return [
            model.expected_statistics(tables[0], params),
            model.expected_statistics(strict, params),
            model.expected_statistics(stack, params, weights),
            model.expected_statistics(stack, own),
            model.log_likelihood(stack, own, weights),
            model.score_samples(tables[1], params),
            model.responsibilities(tables[1], params),
        ]

    assert model.wide
    wide = everything()
    monkeypatch.setattr(type(model), "wide", False)
    for one, other in zip(wide, everything(), strict=True):
        np.testing.assert_allclose(one, other, atol=1e-10)


@each
@pytest.mark.parametrize("order", ["C", "F"])
def test_float32_rows_and_either_order_do_not_lose_the_answer(kind: str, order: Any) -> None:
    model, tables, params = setup(kind)
    rows = np.asarray(tables[0], dtype=np.float32, order=order)
    got = model.expected_statistics(rows, params)
    assert got.dtype == np.float64
    np.testing.assert_allclose(
        got, model.expected_statistics(rows.astype(np.float64), params), atol=1e-14
    )


@each
def test_large_means_do_not_cancel(kind: str) -> None:
    """Mean / standard deviation = 1e6: the same answer, moved."""
    tables = make_data(4)
    far = [t + 1e6 for t in tables]
    near, moved = bind(make_model(kind), tables), bind(make_model(kind), far)
    params = [m.start(1) for m in (near, moved)]
    for _ in range(20):
        params[0] = near.maximize(pooled(near, tables, params[0]))
        params[1] = moved.maximize(pooled(moved, far, params[1]))
    a, b = near.to_user(params[0]), moved.to_user(params[1])
    np.testing.assert_allclose(b.means - 1e6, a.means, atol=1e-7)
    np.testing.assert_allclose(b.covariances, a.covariances, rtol=1e-6, atol=1e-8)
    likelihoods = [
        near.log_likelihood(tables[0], params[0]),
        moved.log_likelihood(far[0], params[1]),
    ]
    assert likelihoods[0] == pytest.approx(float(likelihoods[1]), abs=1e-6)


@each
@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), size=st.sampled_from([0.1, 1.0, 30.0]))
def test_guard_keeps_the_domain(kind: str, seed: int, size: float) -> None:
    from emfed.algorithms.steps import shorten

    model, tables, params = setup(kind, seed)
    statistics = pooled(model, tables, params)
    move = size * np.random.default_rng(seed).normal(size=statistics.shape)
    after, factor, hits = shorten(model, statistics, move)
    want = model.protect(statistics, statistics + factor * move)
    np.testing.assert_array_equal(after, want)
    moved = (statistics + factor * move)[:3]
    some = statistics[:3] >= 1 / model.constants.samples
    alive, dying = some & (moved >= 1e-9), some & (moved < 0)
    np.testing.assert_array_equal(after[:3][alive], moved[alive])
    np.testing.assert_allclose(after[:3][dying], statistics[:3][dying] / 4)
    assert model.inside(after)
    assert 0 <= factor <= 1
    assert (hits == 0) == (factor == 1)
    if hits:
        longer = model.protect(statistics, statistics + min(1.0, 4 * factor) * move)
        assert not model.inside(longer) or factor == 0
    result = model.maximize(after)
    assert all(np.isfinite(a).all() for a in result.arrays().values())
    assert np.isfinite(model.log_likelihood(tables[0], result))


@pytest.mark.parametrize("kind", ["spherical", "diag", "tied", "full"])
@pytest.mark.parametrize("trial", first(range(6)))
def test_a_dying_component_does_not_freeze_the_others(kind: str, trial: int) -> None:
    """Twice as many components as clusters: EM goes on until the mean field is gone."""
    rng = np.random.default_rng(trial)
    centres = 6 * rng.normal(size=(4, 8))
    rows = centres[rng.integers(4, size=400)] + rng.normal(size=(400, 8))
    result = plain_fit(
        emfed.gaussian_mixture(8, kind),
        [rows[:150], rows[150:]],
        rounds=1500,
        seed=trial,
        monitor=emfed.fitting.Monitor(every=1499, objective=False),
    )
    assert result.records[-1].step_size > 0.1
    assert result.records[-1].squared_H is not None
    assert result.records[-1].squared_H < 1e-6
    assert np.isfinite(result.log_likelihood(rows))


@pytest.mark.parametrize("kind", ["full", "tied", "diag"])
@pytest.mark.parametrize("floor", [0.0, 1e-12, 1e-9, 1e-6])
def test_singular_data_never_escape_as_linear_algebra_errors(kind: str, floor: float) -> None:
    rng = np.random.default_rng(0)
    base = rng.normal(size=(60, 2))
    collinear = np.column_stack([base, base.sum(axis=1)])
    doubled = np.concatenate([np.tile(base[:1], (50, 1)), base[:10]])
    model = emfed.gaussian_mixture(3, kind, covariance_floor=floor)
    for rows in (collinear, doubled):
        parts = [rows[:20], rows[20:]]
        if kind in ("tied", "streamed") and floor == 0 and rows is collinear:
            with pytest.raises(emfed.SettingsError, match="combinations of others"):
                plain_fit(model, parts, rounds=150)
            continue
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", emfed.EmfedWarning)
            result = plain_fit(model, parts, rounds=150)
        assert np.isfinite(result.statistics).all()


@each
def test_statistics_outside_the_domain_are_seen(kind: str) -> None:
    model, tables, params = setup(kind)
    good = pooled(model, tables, params)
    assert model.inside(good)
    for bad in (np.nan, np.inf, -0.1, 0.0):
        wrong = good.copy()
        wrong[0] = bad
        assert not model.inside(wrong)
    if kind in ("full", "tied", "diag", "spherical"):
        wrong = good.copy()
        wrong[model.layout.slices["first"]] *= 50
        assert not model.inside(wrong)


@each
@settings(max_examples=15)
@given(seed=st.integers(0, 10_000))
def test_metric_is_invertible_and_linear(kind: str, seed: int) -> None:
    model, tables, params = setup(kind, seed)
    metric = model.metric(model.maximize(pooled(model, tables, params)))
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(2, 3, model.layout.size))
    np.testing.assert_allclose(metric.unwhiten(metric.whiten(x)), x, atol=1e-9)
    both = metric.whiten(2 * x[0] - 3 * x[1])
    np.testing.assert_allclose(both, 2 * metric.whiten(x[0]) - 3 * metric.whiten(x[1]), atol=1e-8)


@each
def test_metric_whitens_the_complete_data_statistics(kind: str) -> None:
    """At the parameters, statistics of one drawn (y, z) have unit covariance in the metric.

    Tied: given y y^T, whose mean is a constant of the data.
    """
    model, tables, params = setup(kind)
    params = model.maximize(pooled(model, tables, params))
    if kind in ("spherical", "diag", "full"):
        params = model.maximize(model.statistics_of(params))
    rng = np.random.default_rng(0)
    k, d = params.means.shape
    labels = rng.choice(k, size=200_000, p=params.weights)
    noise = rng.normal(size=(200_000, d))
    covariance = params.covariances
    if kind in ("diag", "spherical"):
        covariance = covariance.reshape(k, -1)[:, :, None] * np.eye(d)
    covariance = np.broadcast_to(covariance, (k, d, d))
    z = params.means[labels] + np.einsum(
        "nij,nj->ni", np.linalg.cholesky(covariance)[labels], noise
    )
    shares = np.eye(k)[labels]
    features = model.expand(np, z.T).T
    extra = (z[:, :, None] * z[:, None, :]).reshape(len(z), -1) if kind == "streamed" else None
    complete = model.assemble(shares, shares[:, :, None] * features[:, None, :], extra)
    if kind == "tied":
        known = (z[:, :, None] * z[:, None, :] - params.covariances)[:, *np.triu_indices(d)]
        complete = complete - known @ np.linalg.lstsq(known, complete, rcond=None)[0]
    white = model.metric(params).whiten(complete)
    second = white.T @ white / len(white)
    np.testing.assert_allclose(second, np.eye(model.layout.size), atol=0.08)


@each
@settings(max_examples=10)
@given(seed=st.integers(0, 10_000))
def test_metric_is_the_curvature_of_the_surrogate(kind: str, seed: int) -> None:
    """So |H|^2 / 2 is what a step is worth; among masses with one sum.

    Of spherical models at most: their metric is finer along columns that vary little.
    """
    model, tables, params = setup(kind, seed)
    at = pooled(model, tables, params)
    metric = model.metric(model.maximize(at))
    masses = model.layout.slices["mass"]
    assume(at[masses].min() > 0.02 / len(at[masses]))  # below, the metric is floored
    way = metric.unwhiten(np.random.default_rng(seed).normal(size=len(at)))
    way[0] -= way[masses].sum()
    length = float((metric.whiten(way) ** 2).sum())
    step = 5e-4 / np.sqrt(length)
    ends = [at + sign * step * way for sign in (-1, 0, 1)]
    low, middle, high = (float(model.surrogate(s, model.maximize(s))) for s in ends)
    bend = (2 * middle - low - high) / step**2
    assert bend <= length * (1 + 1e-3)
    if kind != "spherical" or np.all(metric.narrow == 1):
        assert bend >= length * (1 - 1e-3)


@each
@settings(max_examples=40)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 9), d=st.integers(1, 6))
def test_every_start_lies_inside_the_domain(kind: str, seed: int, k: int, d: int) -> None:
    tables = make_data(seed % 20, k=2, d=d)
    model = bind(make_model(kind, k=k, d=d), tables)
    params = model.start(seed)
    assert model.inside(model.statistics_of(params))
    user = model.to_user(params)
    for name, value in model.from_user(user).arrays().items():
        np.testing.assert_allclose(value, params.arrays()[name], rtol=1e-9, atol=1e-9)


@each
def test_description_is_plain_json(kind: str) -> None:
    model, _, _ = setup(kind)
    assert json.loads(json.dumps(model.describe()))["covariance_type"] == model.kind
