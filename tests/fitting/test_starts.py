"""Starts reveal no record, share their rounds, and are as good as scikit-learn's."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import datasets
from sklearn.decomposition import PCA
from sklearn.mixture import GaussianMixture

import emfed
from emfed.aggregation.unmasked import UnmaskedWorkers
from emfed.core.sums import drive
from emfed.data.held import HeldWorkers
from emfed.fitting.ascent import Cohort, Objective
from emfed.fitting.asks import Statistics
from emfed.fitting.convergence import Tolerance
from emfed.fitting.starting import buckets
from emfed.fitting.starts.merging import MOST_MERGED
from emfed.fitting.starts.own import own_sketch
from emfed.fitting.starts.sketch import Sketch, drawn
from emfed.models.clusters import Buckets, lloyd, seed_centres
from emfed.models.components import SMALLEST_COMPONENT
from emfed.network import FEDERATIONS
from emfed.testing import check_model
from tests.helpers import bind, make_data, make_model, plain_fit
from tests.tables import FAMILIES, mixed_tables

# k-means as a model.


def test_k_means_keeps_the_contract_of_a_model() -> None:
    check_model(emfed.k_means(3), make_data(0))
    check_model(emfed.k_means(3, standardised=True), make_data(1))


def test_k_means_in_a_federation_is_that_of_the_pooled_rows() -> None:
    tables = make_data(3, sizes=(60, 45, 80))
    rows = np.concatenate(tables)
    start = emfed.models.Centres(rows[:3])
    apart = plain_fit(emfed.k_means(3), tables, start=start, rounds=30)
    pooled = plain_fit(emfed.k_means(3), [rows], start=start, rounds=30)
    np.testing.assert_allclose(apart.params.centres, pooled.params.centres, atol=1e-10)
    labels = apart.predict(rows)
    means = [rows[labels == j].mean(axis=0) for j in range(3)]
    np.testing.assert_allclose(apart.params.centres, means, atol=1e-10)
    compressed = plain_fit(
        emfed.k_means(3),
        tables,
        emfed.FedEM(emfed.SubtractiveDithering(0.05)),
        start=start,
        rounds=60,
    )
    np.testing.assert_allclose(compressed.params.centres, pooled.params.centres, atol=1e-3)


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), k=st.integers(1, 6))
def test_lloyd_on_a_sketch_never_raises_the_inertia(seed: int, k: int) -> None:
    rng = np.random.default_rng(seed)
    points, mass = rng.normal(size=(20, 3)), rng.dirichlet(np.ones(20))
    several = seed_centres(mass, points, k, seed, range(3))
    centres = several[1]
    assert np.array_equal(centres, seed_centres(mass, points, k, seed, [1])[0])
    assert several.shape == (3, k, 3)
    values = [lloyd(mass, points, centres, steps)[2] for steps in (1, 2, 4, 50)]
    assert np.all(np.diff(values) <= 1e-12)
    model = emfed.gaussian_mixture(k)
    for shares, best in Sketch(points, points, mass).partitions(model, seed, 2):
        assert shares.sum() == pytest.approx(1)
        assert best.shape == (k, 3)


# Buckets and the sketch.


@settings(max_examples=25)
@given(seed=st.integers(0, 10_000), most=st.integers(2, 60), d=st.integers(1, 6))
def test_buckets_grow_where_rows_are_without_a_word(seed: int, most: int, d: int) -> None:
    """T alone says where the next ones stand; all rows stay counted, and none are told twice."""
    rng = np.random.default_rng(seed)
    rows = rng.normal(size=(300, d)) * rng.gamma(1.0, size=d)
    inner = plain_fit(emfed.k_means(most, standardised=True), [rows], rounds=1).model
    model = Buckets(inner, seed)
    statistics, used = model.origin(), []
    for _ in range(model.rounds + 2):
        params = model.maximize(statistics)
        stands = params.mass > 0
        assert params.mass.sum() == pytest.approx(1)
        assert np.all(np.isfinite(params.centres))
        assert np.all(np.abs(params.centres[stands]) < 1e5)
        told = model.expected_statistics(rows, params)
        assert model.layout.split(told)["mass"].sum() == pytest.approx(1)
        metric = model.metric(params)
        np.testing.assert_allclose(metric.unwhiten(metric.whiten(told)), told, atol=1e-12)
        statistics = model.protect(statistics, told)
        used.append(len(model.held(statistics)[0]))
    assert used[-1] <= most
    assert used[-1] >= min(0.5 * most, 4) or most < 4


@settings(max_examples=20)
@given(seed=st.integers(0, 10_000), count=st.integers(1, 30))
def test_a_sketch_has_the_variances_of_all_rows(seed: int, count: int) -> None:
    rng = np.random.default_rng(seed)
    mass, means = rng.dirichlet(np.ones(count)), 0.5 * rng.normal(size=(count, 3))
    means -= mass @ means
    between = np.einsum("k,ki,kj->ij", mass, means, means)
    shape = between + 0.2 * np.eye(3)
    for whole, wanted in ((shape, np.diagonal(shape)), (None, np.ones(3))):
        points, weights = drawn(mass, means, whole, seed)
        assert weights.sum() == pytest.approx(1)
        if np.all(np.diagonal(between) < 0.9):
            found = weights @ points**2 - (weights @ points) ** 2
            np.testing.assert_allclose(found, wanted, rtol=0.35)


def test_columns_that_do_not_go_together_are_not_columns_of_which_nobody_knows() -> None:
    """Principal components: buckets go together, so rows within them must go the other way."""
    rng = np.random.default_rng(1)
    mass, means = np.full(40, 1 / 40), rng.normal(size=(40, 2)) @ np.array([[0.6, 0.5], [0.0, 0.1]])
    means -= mass @ means
    found = []
    for matched, whole in itertools.product((False, True), (np.eye(2), np.ones(2))):
        points, weights = drawn(mass, means, whole, 0, matched)
        found.append((weights * points.T) @ points)
        if matched:
            np.testing.assert_allclose(np.diagonal(found[-1]), 1.0)
    assert found[0][0, 1] < 0 < found[1][0, 1]
    assert abs(found[2][0, 1]) < 1e-9
    assert found[3][0, 1] > 0.05


def test_the_start_of_many_workers_is_small() -> None:
    """So many bytes a worker; what follows from the seed is never sent."""
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(7000, 20)) + 2 * rng.normal(size=(10, 20))[rng.integers(10, size=7000)]
    run = emfed.fitting.open_run(
        emfed.gaussian_mixture(10, "tied"), list(rows.reshape(100, 70, 20)), start="merge", seed=1
    )
    told = run.ledger.summary()["start"]
    assert told["up"]["messages"] == 100
    assert told["up"]["payload"] <= 100 * 110
    assert told["down"]["payload"] + told["down"]["envelope"] <= 100 * 260


def test_a_fit_of_one_more_component_may_begin_at_a_split(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without lucky attempts of its own it still is no worse than the fit before it."""
    rows, _ = datasets.make_blobs(600, 2, centers=6, cluster_std=0.4, random_state=3)
    models = [bind(emfed.gaussian_mixture(k), [rows]) for k in range(2, 8)]
    frame = models[0].clusters(1).frame
    sketch = Sketch((rows - frame.origin) / frame.scale, rows, np.full(600, 1 / 600))
    far = np.zeros((7, 2)) + np.arange(7)[:, None] * 1e-3

    def unlucky(self: Sketch, model: Any, seed: int, tries: int) -> Any:
        k = model.n_components
        return [(np.full(k, 1 / k), far[:k] + attempt * 1e-4) for attempt in range(tries)]

    monkeypatch.setattr(Sketch, "partitions", unlucky)
    found = sketch.starts(models, 1, 0)
    values = [float(m.log_likelihood(rows, own[0])) for m, own in zip(models, found, strict=True)]
    assert np.all(np.diff(values) > -1e-3)
    assert values[4] > values[0] + 0.5


# Privacy.


def test_buckets_of_one_or_two_rows_of_all_are_not_split_and_not_sketched() -> None:
    tables = make_data(5, sizes=(9, 14, 6, 40), k=4)
    far = np.array([[90.0, 90.0], [91.0, 90.0]])
    tables[2][:2] = far
    sums = UnmaskedWorkers(HeldWorkers(emfed.data.as_workers(tables)))
    asked: list[Statistics] = []

    def answer(ask: Any) -> Any:
        asked.append(ask)
        return sums(ask)

    model = bind(emfed.gaussian_mixture(4, "full"), tables)
    mass, _ = drive(buckets(Objective(model, Cohort(4, 69.0), Tolerance(1e-6)), 0), answer)
    assert len(asked) >= 3
    shares = [mass, *(ask.model.held(ask.statistics)[0] for ask in asked)]
    assert min(share.min() for share in shares) * 69 > SMALLEST_COMPONENT - 1e-2


def test_models_that_clusters_cannot_start_say_so() -> None:
    tables = make_data(6)
    with pytest.raises(emfed.SettingsError, match="start='moments'"):
        emfed.fitting.open_run(emfed.factor_analysis(1, 2), tables, start="k-means")
    with pytest.raises(emfed.SettingsError, match="start must be one of"):
        emfed.fitting.open_run(make_model("full"), tables, start="k means")
    with pytest.raises(emfed.SettingsError, match="n_init"):
        emfed.fitting.open_run(make_model("full"), tables, start="auto", n_init=0)
    given_start = plain_fit(make_model("full"), tables, rounds=2).params
    with pytest.raises(emfed.SettingsError, match="n_init > 1"):
        emfed.fitting.open_run(make_model("full"), tables, start=given_start, n_init=2)


def test_columns_of_any_family_start_from_clusters() -> None:
    rows = PCA(8, random_state=0).fit_transform(datasets.load_digits().data[:900])
    model = emfed.mixed_mixture(8, "gaussian", missing=False)
    ends = {
        how: [
            plain_fit(model, np.array_split(rows, 3), start=how, seed=seed, rounds=60)
            for seed in range(4)
        ]
        for how in ("moments", "k-means")
    }
    median = {
        how: np.median([r.log_likelihood(rows) for r in found]) for how, found in ends.items()
    }
    assert median["k-means"] > median["moments"]
    for kind in ("mixed", "exposed"):
        tables = mixed_tables(kind, missing=0.1)
        run = emfed.fitting.open_run(
            emfed.mixed_mixture(2, FAMILIES[kind]), tables, start="k-means"
        )
        assert run.model.inside(run.statistics)
        assert run.ledger.summary()["start"]["up"]["payload"] > 0
    codes = [np.random.default_rng(j).integers(3, size=(30, 2)) for j in range(3)]
    categories = emfed.mixed_mixture(2, emfed.models.Categorical(3))
    run = emfed.fitting.open_run(
        categories, codes, start="auto"
    )  # from moments: codes have no distances
    assert run.ledger.summary()["start"]["up"]["messages"] == 0


@pytest.mark.parametrize("federation", ["stacked", "loop"])
def test_a_search_is_charged_and_repeatable(federation: Any) -> None:
    tables = FEDERATIONS[federation](emfed.data.as_workers(make_data(9, sizes=(50, 70, 60))))
    options: dict[str, Any] = {"start": "k-means", "n_init": 4, "seed": 3}
    runs = [emfed.fitting.open_run(make_model("full"), tables, **options) for _ in range(2)]
    np.testing.assert_array_equal(runs[0].statistics, runs[1].statistics)
    books = runs[0].ledger.summary()
    assert books["start"]["up"]["payload"] > books["opening"]["up"]["payload"] > 0
    assert books["start"]["up"]["messages"] == books["start"]["down"]["messages"]
    assert books["round"]["up"]["messages"] == 0
    record = runs[0].records[0]
    assert record.bytes_up == runs[0].ledger.total("up")  # the opening record holds it all
    assert record.evaluations >= 4 * 180
    other = emfed.fitting.open_run(make_model("full"), tables, start="k-means", seed=4)
    assert not np.array_equal(other.statistics, runs[0].statistics)


def test_loop_and_stacked_find_the_same_start() -> None:
    workers = emfed.data.as_workers(make_data(9, sizes=(50, 70, 60)))
    found = [
        emfed.fitting.open_run(make_model("diag"), made(workers), start="auto", n_init=2)
        for made in FEDERATIONS.values()
    ]
    np.testing.assert_allclose(found[0].statistics, found[1].statistics, rtol=1e-8, atol=1e-10)


def test_very_many_workers_find_clusters_by_sums() -> None:
    rng, count = np.random.default_rng(0), MOST_MERGED + 1
    rows = rng.normal(size=(count, 2)) + 8 * rng.integers(0, 3, size=(count, 1))
    tables = emfed.data.WorkerData(rows, np.arange(count + 1))
    run = emfed.fitting.open_run(emfed.gaussian_mixture(3, "spherical"), tables, seed=1)
    means = run.model.to_user(run.params).means
    np.testing.assert_allclose(np.sort(means[:, 0]), [0, 8, 16], atol=1)


def test_a_race_keeps_a_good_start() -> None:
    rows, _ = datasets.make_blobs(1000, 2, centers=8, cluster_std=0.6, random_state=4)
    tables = np.array_split(rows, 4)
    model = emfed.gaussian_mixture(8, "spherical")

    def reached(n_init: int, seed: int) -> float:
        options: dict[str, Any] = {"start": "moments", "n_init": n_init, "seed": seed}
        result = plain_fit(model, tables, rounds=60, **options)
        return result.log_likelihood(rows)

    ones = [reached(1, seed) for seed in range(6)]
    many = [reached(8, 100 + seed) for seed in range(3)]
    assert np.mean(many) > np.mean(ones) + 0.02
    assert np.median(many) > np.median(ones)


@pytest.mark.parametrize("kind", [pytest.param("full", marks=pytest.mark.long), "diag"])
@pytest.mark.parametrize("split", [1, 6])
def test_the_start_is_as_good_as_scikit_learns(kind: str, split: int) -> None:
    """Medians over seeds of where EM ends; local optima differ, so on average of three tables."""
    gaps = []
    blobs, _ = datasets.make_blobs(1500, 4, centers=7, random_state=1)
    stretched = blobs @ np.random.default_rng(0).normal(size=(4, 4))
    wine = datasets.load_wine().data
    for rows, k in ((datasets.load_iris().data, 3), (wine / wine.std(axis=0), 3), (stretched, 7)):
        ours, theirs = [], []
        for seed in range(3):
            tables = np.array_split(rows[np.argsort(rows[:, 0], kind="stable")], split)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = emfed.fit(
                    emfed.gaussian_mixture(k, kind), tables, start="auto", rounds=150, seed=seed
                )
                peer = GaussianMixture(
                    k, covariance_type=kind, random_state=seed, max_iter=150, tol=1e-6
                ).fit(rows / rows.std(axis=0))
            ours.append(result.log_likelihood(rows))
            unit = rows.std(axis=0)
            theirs.append(peer.score(rows / unit) - np.log(unit).sum())
        gaps.append(np.median(ours) - np.median(theirs))
    assert np.mean(gaps) > -0.02


@pytest.mark.parametrize("count", [300, 4000])
def test_weights_of_one_worker_alone_count_as_repeated_rows_do(count: int) -> None:
    """Also where there are more rows than a sketch has, with two starts that lead to one place."""
    rng = np.random.default_rng(count)
    rows = rng.normal(size=(count, 3)) + 3 * (np.arange(count) % 2)[:, None]
    times = rng.integers(4, size=count)
    mixture = emfed.FederatedGaussianMixture(3, random_state=1)
    weighted = mixture.fit(rows, sample_weight=times).means_
    repeated = mixture.fit(np.repeat(rows, times, axis=0)).means_
    np.testing.assert_allclose(weighted, repeated, rtol=0, atol=1e-9)


@pytest.mark.parametrize("count", [300, 5000])
def test_equal_weights_draw_the_rows_that_no_weights_draw(count: int) -> None:
    rows = np.random.default_rng(0).normal(size=(count, 2))
    drawn_rows = []
    for weights in (None, np.ones(count), np.full(count, 0.5)):
        workers = emfed.data.as_workers(rows, sample_weight=weights)
        drawn_rows.append(own_sketch(workers, bind(emfed.gaussian_mixture(2), [rows]), 1))
    for other in drawn_rows[1:]:
        np.testing.assert_array_equal(other.rows, drawn_rows[0].rows)
        np.testing.assert_allclose(other.weights, drawn_rows[0].weights, rtol=1e-12)


def test_spherical_starts_of_workers_know_that_columns_go_together() -> None:
    """Spreads of columns say nothing of directions: rows of the sketch lay far from all others."""
    rng = np.random.default_rng(2)
    label = rng.choice(4, 600, p=[0.55, 0.25, 0.15, 0.05])
    rows = (6 * rng.normal(size=(4, 3)))[label] + rng.normal(size=(600, 3))
    model = emfed.gaussian_mixture(4, "spherical")
    ended = [
        emfed.fit(model, rows, groups=np.arange(600) % 5, start="auto", seed=seed)
        for seed in range(2)
    ]
    assert min(result.log_likelihood(rows) for result in ended) > -5.4
