"""Numbers of components are compared in one run, by criteria that pooled rows would give."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest
from sklearn import datasets

import emfed
from emfed.fitting.selection import choose, floor_remarks
from emfed.fitting.settings import read_range
from tests.fitting.test_in_process import fitted
from tests.helpers import make_data, plain_fit
from tests.registry import REGISTRY

ROWS, _ = datasets.make_blobs(700, 3, centers=4, random_state=2)
SITES = {"a": ROWS[:100], "b": ROWS[100:350], "c": ROWS[350:]}


@pytest.mark.parametrize(
    "algorithm",
    [emfed.EM(), emfed.FedEM(emfed.SubtractiveDithering(0.05), in_metric=True)],
    ids=["em", "FedEM"],
)
def test_the_table_is_that_of_pooled_rows(algorithm: Any) -> None:
    model = emfed.gaussian_mixture(1, "diag")
    found = emfed.select_components(model, SITES, "2:6", algorithm=algorithm, rounds=40)
    assert found.n_components == 4
    assert list(found.results) == [2, 3, 4, 5, 6]
    for row, (k, result) in zip(found.table, found.results.items(), strict=True):
        assert row["n_components"] == k == len(result.params.weights)
        assert row["log_likelihood"] == pytest.approx(result.log_likelihood(ROWS), abs=1e-6)
        for name in ("aic", "bic", "icl"):
            assert row[name] == pytest.approx(getattr(result, name)(ROWS), rel=1e-7)
    assert found.best is found.results[4]
    assert found.to_frame().shape == (5, 8)
    assert "4 components by bic" in repr(found)


def test_candidates_share_rounds_and_messages() -> None:
    model = emfed.gaussian_mixture(1, "diag")
    found = emfed.select_components(model, SITES, "2:6", algorithm=emfed.EM(), tol=0, rounds=20)
    alone = plain_fit(emfed.gaussian_mixture(6, "diag"), SITES, rounds=20, start="auto")
    books, one = found.best.ledger.summary(), alone.ledger.summary()
    # 20 rounds for all, which tell their likelihoods, too
    assert books["round"]["up"]["messages"] == one["round"]["up"]["messages"]
    for way in ("up", "down"):  # candidates are told by name: more text, no more messages
        assert books["opening"][way]["messages"] == one["opening"][way]["messages"]
    assert books["opening"]["up"] == one["opening"]["up"]
    assert books["start"]["up"]["messages"] == one["start"]["up"]["messages"]


def test_a_function_makes_the_models_too_and_icl_wants_distinct_ones() -> None:
    rng = np.random.default_rng(0)
    skew = np.concatenate([rng.gamma(2, size=(500, 1)), 14 + rng.gamma(2, size=(500, 1))])
    tables = np.array_split(rng.permutation(skew), 4)
    found = {
        name: emfed.select_components(
            lambda k: emfed.mixed_mixture(k, "gaussian", missing=False),
            tables,
            [1, 2, 3, 4],
            criterion=name,
            n_init=3,
            rounds=60,
        ).n_components
        for name in ("bic", "icl")
    }
    assert found["icl"] == 2 < found["bic"]  # two skewed clusters, several Gaussians


def test_hidden_markov_models_and_missing_values_can_be_selected() -> None:
    holes = [
        np.where(np.random.default_rng(j).random(t.shape) < 0.1, np.nan, t)
        for j, t in enumerate(SITES.values())
    ]
    missing = emfed.gaussian_mixture(1, "full", missing=True)
    assert emfed.select_components(missing, holes, "3:5", rounds=30).n_components == 4
    entry = REGISTRY["gaussian chain"]
    found = emfed.select_components(
        emfed.hidden_markov(1, "gaussian"), entry.tables, [1, 2], rounds=20
    )
    assert [row["free_parameters"] for row in found.table] == [4, 11]


def test_ranges_are_read_and_nonsense_refused() -> None:
    assert read_range("2:4") == [2, 3, 4]
    assert read_range(range(3, 5)) == [3, 4]
    assert read_range(7) == read_range("7") == [7]
    assert read_range(np.array([5, 2, 5])) == [2, 5]
    for bad in ("4:2", "a:b", [], 0, [1.5], "1:2:3"):
        with pytest.raises(emfed.SettingsError, match="components"):
            read_range(bad)
    with pytest.raises(emfed.SettingsError, match="criterion"):
        emfed.select_components(emfed.gaussian_mixture(1), SITES, criterion="r2")
    with pytest.raises(emfed.SettingsError, match="no number of components"):
        emfed.select_components(emfed.models.LinearGaussian(), make_data(0))


def test_k_means_takes_one_number_on_every_face() -> None:
    """Without a likelihood rows of one normal distribution had as many clusters as were allowed."""
    rows = np.random.default_rng(0).normal(size=(60, 2))
    with pytest.raises(emfed.SettingsError, match="no likelihood to compare n_components by"):
        emfed.fit(emfed.k_means, [rows[:30], rows[30:]], n_components="1:3")
    with pytest.raises(emfed.SettingsError, match="no likelihood to compare n_clusters by"):
        emfed.FederatedKMeans("1:3").fit(rows)
    assert emfed.FederatedKMeans("2:2").fit(rows).cluster_centers_.shape == (2, 2)


def test_candidates_that_cannot_be_chosen_are_dropped() -> None:
    model = emfed.gaussian_mixture(1, "diag")
    options: dict[str, Any] = {"algorithm": "auto", "tol": 1e-6, "rounds": 2000, "moves": 0}
    found, whole = (
        emfed.select_components(model, SITES, "2:6", drop=drop, **options) for drop in (True, False)
    )
    assert found.n_components == whole.n_components == 4
    assert found.best.converged
    assert found.best.rounds < 0.9 * whole.best.rounds
    assert found.best.bytes_up < 0.9 * whole.best.bytes_up
    assert found.best.bytes_down < whole.best.bytes_down  # questions take some of what is saved
    assert found.table[2]["bic"] == pytest.approx(whole.table[2]["bic"], abs=0.1)
    assert list(found.results) == [2, 3, 4, 5, 6]
    for row, (k, result) in zip(found.table, found.results.items(), strict=True):
        assert k == len(result.params.weights)
        assert row["log_likelihood"] == pytest.approx(result.log_likelihood(ROWS), abs=1e-6)


# Atoms of columns, and components on few rows.


def with_an_atom(seed: int = 0) -> pl.DataFrame:
    rng = np.random.default_rng(seed)
    z = rng.integers(3, size=400)
    dose = np.where(rng.random(400) < 0.83, 0.0, rng.normal(5, 1, 400))
    return pl.DataFrame(
        {"height": rng.normal(5 * z, 1), "weight": rng.normal(-4 * z, 1), "dose": dose}
    )


@pytest.mark.parametrize("kind", ["full", "tied", "diag", "spherical", "missing", "mixed"])
def test_a_column_with_an_atom_does_not_leave_one_component(kind: str) -> None:
    """Its value is named where a component sits on it, and no candidate is left out for it."""
    models: dict[str, Any] = {
        "missing": emfed.gaussian_mixture(1, "full", missing=True),
        "mixed": emfed.mixed_mixture(1, "gaussian", missing=False),
    }
    model = models.get(kind) or emfed.gaussian_mixture(1, kind)
    sites = with_an_atom().with_columns(site=np.arange(400) % 3)
    parts = {str(k): t.drop("site") for (k,), t in sites.partition_by("site", as_dict=True).items()}
    found = fitted(model, emfed.data.as_workers(parts), n_components="1:4", rounds=200)
    assert found.selection is not None
    assert found.selection.n_components > 1
    assert not any(row["collapsed"] for row in found.selection.table)
    assert not any("left out" in remark for remark in found.remarks)
    if kind in ("full", "diag", "missing", "mixed"):
        assert any("column 'dose' at 0 (" in remark for remark in found.remarks)


def few_alike(kind: str) -> tuple[Any, Any, str]:
    """A model, rows of which a few agree far away from the others, and where they are."""
    rng = np.random.default_rng(3)
    rows = np.concatenate([rng.normal(size=(200, 2)), np.full((4, 2), 9.0)])
    if kind in ("full", "diag", "spherical"):
        return emfed.gaussian_mixture(1, kind), rows, "column 0 at 9 (2.0% of rows)"
    if kind == "mixed":
        model: Any = emfed.mixed_mixture(1, "gaussian", missing=False)
        return model, rows, "column 0 at 9 (2.0% of rows)"
    if kind == "factors":
        rows = np.concatenate([rng.normal(size=(200, 3)), np.full((4, 3), 30.0)])
        return emfed.factor_analysis(1), rows, "a higher floor (say noise_floor=0.0001) may help"
    if kind == "regression":
        rows = rng.normal(size=(205, 2))
        rows[:5, 1] = 40 + 30 * rows[:5, 0]
        return emfed.regression_mixture(1), rows, "column 1 on the line of component"
    steps = rng.normal(size=(20, 10, 2))
    steps[3, 2:7] = 9.0
    return emfed.hidden_markov(1, "gaussian"), steps, "of steps); column 1 at 9"


@pytest.mark.parametrize(
    "kind", ["full", "diag", "spherical", "mixed", "factors", "regression", "chain"]
)
def test_a_component_on_few_rows_is_a_collapse(kind: str) -> None:
    """Rows that agree by chance are no atom: the table says so, and a remark where they are."""
    model, rows, where = few_alike(kind)
    starts = 4 if kind in ("regression", "chain") else 1
    options: dict[str, Any] = {"n_components": (1, 2), "rounds": 100, "n_init": starts}
    found = fitted(model, [rows[::2], rows[1::2]], **options)
    assert found.selection is not None
    assert [row["collapsed"] for row in found.selection.table] == [False, True]
    assert found.selection.to_frame()["collapsed"].to_list() == [False, True]
    assert found.selection.n_components == 2  # the others are better described without those rows
    told = [remark for remark in found.remarks if "collapsed onto few rows" in remark]
    assert len(told) == 1
    assert where in told[0]


def test_what_a_candidate_owes_to_the_floor_chooses_none() -> None:
    """Rows that coincide amid the others gain without bound; outliers far away gain really."""
    rng = np.random.default_rng(3)
    amid = np.concatenate([rng.normal(size=(200, 2)), np.full((4, 2), 0.3)])
    model = emfed.gaussian_mixture(2, "full")
    start = emfed.models.GaussianParameters(
        [0.98, 0.02], [[0, 0], [0.3, 0.3]], [np.eye(2), 1e-5 * np.eye(2)]
    )
    two = emfed.fit(model, amid, start=start, rounds=100)
    one = emfed.fit(emfed.gaussian_mixture(1, "full"), amid)
    assert two.bic(amid) < one.bic(amid)
    values = {r.model.n_components: np.array([r.log_likelihood(amid), 0.0]) for r in (one, two)}
    remarks: list[str] = []
    found = choose({1: one, 2: two}, values, "bic", remarks)
    assert found.n_components == 1
    assert "2 would be chosen for the sake of a component" in remarks[0]
    assert "column 0 at 0.3" in remarks[0]


def test_a_combination_of_columns_without_spread_is_told_as_one() -> None:
    rng = np.random.default_rng(4)
    rows = rng.normal(size=(300, 3))
    rows[:150, 1] = 2 * rows[:150, 0] + 8
    result = plain_fit(emfed.gaussian_mixture(2, "full"), [rows], start="auto", rounds=50)
    held = result.model.held_up(result.model.maximize(result.statistics))
    assert [h.columns for h in held] == [(0, 1)]
    assert held[0].share == pytest.approx(0.5, abs=0.02)
    assert "a combination of columns 0, 1 (50" in floor_remarks(result)[0]


def test_a_column_that_factors_explain_wholly_is_no_collapse() -> None:
    """A Heywood case: noise at the floor, where the column has spread all the same."""
    rng = np.random.default_rng(5)
    rows = rng.normal(size=(200, 4))
    result = plain_fit(emfed.factor_analysis(1, n_components=2), [rows], rounds=1)
    params = result.model.maximize(result.statistics)
    params.noise[:, 0] = 1e-6
    assert result.model.held_up(params) == ()
