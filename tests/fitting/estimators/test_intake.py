"""Rows come in many shapes, and every shape gives the same fit."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from scipy import sparse

import emfed
from emfed.core.protocols import FloatArray
from tests.helpers import make_data

NAMES = ["height", "weight"]
TABLES = make_data(4, sizes=(40, 55, 30))
ROWS = np.concatenate(TABLES)
SITES = np.repeat(["a", "b", "c"], [40, 55, 30])


def estimator(**options: Any) -> emfed.FederatedGaussianMixture:
    return emfed.FederatedGaussianMixture(2, random_state=1, **options)


def answers(fitted: Any, rows: Any = ROWS) -> FloatArray:
    proba = fitted.predict_proba(rows)
    return np.concatenate([fitted.means_.ravel(), fitted.covariances_.ravel(), proba.ravel()])


def test_tables_groups_and_names_give_the_same_fit_bit_for_bit() -> None:
    shapes: list[tuple[Any, Any]] = [
        (ROWS, SITES),
        (TABLES, None),
        (dict(zip("abc", TABLES, strict=True)), None),
        (tuple(TABLES), None),
        (np.asfortranarray(ROWS), list(SITES)),
    ]
    reference = answers(estimator().fit(ROWS, groups=SITES))
    for X, groups in shapes:
        np.testing.assert_array_equal(answers(estimator().fit(X, groups=groups)), reference)


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_frames_give_what_arrays_give(frame: Any) -> None:
    columns = {name: ROWS[:, j] for j, name in enumerate(NAMES)}
    reference = answers(estimator().fit(ROWS, groups=SITES))
    table = frame(columns)
    fitted = estimator().fit(table, groups=SITES)
    np.testing.assert_array_equal(answers(fitted, table), reference)
    assert list(fitted.feature_names_in_) == NAMES
    whole = frame({**columns, "site": SITES})
    fitted = estimator().fit(whole, groups="site")
    np.testing.assert_array_equal(answers(fitted, whole), reference)  # the column is left out
    assert list(fitted.feature_names_in_) == NAMES
    assert fitted.result_.columns == tuple(NAMES)


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
def test_columns_are_matched_by_name_across_workers(frame: Any) -> None:
    tables = [frame({name: t[:, j] for j, name in enumerate(NAMES)}) for t in TABLES]
    turned = [tables[0], tables[1][NAMES[::-1]], tables[2]]
    reference = answers(estimator().fit(TABLES))
    fitted = estimator().fit(turned)
    np.testing.assert_array_equal(
        answers(fitted, frame(dict(zip(NAMES, ROWS.T, strict=True)))), reference
    )
    other = frame({"height": TABLES[1][:, 0], "age": TABLES[1][:, 1]})
    with pytest.raises(emfed.DataError, match=r"worker '1'.*missing \['weight'\], extra \['age'\]"):
        estimator().fit([tables[0], other])
    with pytest.raises(emfed.DataError, match="some workers name their columns"):
        estimator().fit([tables[0], TABLES[1]])


def test_bad_input_is_refused_in_words() -> None:
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (ROWS, {"groups": SITES[:-1]}, "one worker per row"),
        (ROWS, {"groups": "site"}, "not a column"),
        (TABLES, {"groups": SITES}, "groups go with one table"),
        ([], {}, "Expected 2D array"),
        ({}, {}, "at least one worker"),
        ([TABLES[0], TABLES[1][:, :1]], {}, "1 features, but"),
        (ROWS, {"sample_weight": -np.ones(len(ROWS))}, ">= 0"),
        (ROWS, {"sample_weight": np.ones(3)}, "expected 125"),
        (ROWS, {"sample_weight": np.zeros(len(ROWS))}, "zero"),
        (TABLES, {"sample_weight": [np.ones(3)]}, "shorter"),
        (np.where(ROWS > 2, np.nan, ROWS), {}, "NaN"),
        (sparse.csr_array(ROWS), {}, "dense"),
    ]
    for X, options, words in cases:
        with pytest.raises((ValueError, TypeError), match=words):
            estimator().fit(X, **options)


def test_settings_are_checked_at_fit_not_before() -> None:
    bad: list[tuple[dict[str, Any], str]] = [
        ({"tol": 0.0}, "tol"),
        ({"max_iter": 0}, "max_iter"),
        ({"n_init": 0}, "n_init"),
        ({"start": "nowhere"}, "start"),
        ({"algorithm": "adam"}, "algorithm"),
        ({"covariance_type": "round"}, "covariance"),
        ({"criterion": "dic"}, "criterion"),
        ({"random_state": -1}, "random_state"),
    ]
    for options, words in bad:
        with pytest.raises(emfed.SettingsError, match=words):
            emfed.FederatedGaussianMixture("2:3", **options).fit(ROWS)
    for components in ("two", "5:2", 0, [], "2:x"):
        with pytest.raises(emfed.SettingsError, match="components"):
            emfed.FederatedGaussianMixture(components).fit(ROWS)


@pytest.mark.parametrize("algorithm", ["em", "FedEM", "VR-FedEM", emfed.AutoEM()])
def test_follow_em_is_refused_where_it_would_do_nothing(algorithm: Any) -> None:
    follower = estimator(algorithm=algorithm, follow_em=True)
    with pytest.raises(emfed.SettingsError, match="follow_em goes with algorithm='auto'"):
        follower.fit(ROWS, groups=SITES)
    follower.set_params(algorithm="auto").fit(ROWS)  # alone, EM follows itself


def test_workers_with_bad_tables_are_named() -> None:
    holes = np.where(ROWS[:9] > 2, np.nan, ROWS[:9])
    for bad, words in ((ROWS[:0], "worker 'b' has no rows"), (holes, "(?s)worker 'b'.*NaN")):
        with pytest.raises(emfed.DataError, match=words):
            estimator().fit({"a": ROWS, "b": bad})


def test_answers_are_for_one_table() -> None:
    fitted = estimator().fit(ROWS)
    for tables in ({"a": ROWS}, [ROWS, ROWS]):
        for ask in (fitted.predict, fitted.score_samples, fitted.bic):
            with pytest.raises(emfed.DataError, match="expected one table of rows; got a"):
                ask(tables)
    with pytest.raises(emfed.DataError, match="expected numbers; got an object of type dict"):
        fitted.result_.predict({"a": ROWS})


def test_a_range_is_cut_to_what_the_rows_can_have() -> None:
    for fit in (
        lambda: emfed.FederatedGaussianMixture("1:8").fit(ROWS[:5]).selection_,
        lambda: emfed.select_components(emfed.gaussian_mixture(1), ROWS[:5], "1:8", rounds=9),
    ):
        with pytest.warns(emfed.EmfedWarning, match="5 rows cannot have 6, 7, 8 components"):
            found = fit()
        assert list(found.results) == [1, 2, 3, 4, 5]
    with pytest.raises(emfed.DataError, match="5 rows"):
        emfed.FederatedGaussianMixture("6:8").fit(ROWS[:5])


@pytest.mark.parametrize("shape", [np.asarray, pd.DataFrame, pl.DataFrame])
@pytest.mark.parametrize("missing", [False, True])
@pytest.mark.parametrize("column", [0, 1])
def test_infinity_is_refused_by_row_and_column(shape: Any, missing: bool, column: int) -> None:
    """As NaN is; with ``missing`` the words say what to put there instead."""
    rows = ROWS.copy()
    rows[7, column] = -np.inf
    table = shape(rows) if shape is np.asarray else shape(dict(zip(NAMES, rows.T, strict=True)))
    name = column if shape is np.asarray else repr(NAMES[column])
    with pytest.raises(emfed.DataError, match=f"row 7, column {name}: it contains infinity"):
        estimator(missing=missing).fit(table, groups=SITES)


ASKED = ["fit", "fit groups", "fit workers", "predict"]


@pytest.mark.parametrize("asked", ASKED)
def test_a_mask_is_not_passed_over(asked: str) -> None:
    """numpy would go on with the values beneath it."""
    rows = np.random.default_rng(0).normal(size=(30, 2))
    masked = np.ma.masked_array(rows, mask=rows > 1)
    mixture = emfed.FederatedGaussianMixture(1, max_iter=20).fit(rows)
    calls: dict[str, Any] = {
        "fit": lambda: mixture.fit(masked),
        "fit groups": lambda: mixture.fit(masked, groups=np.arange(30) % 2),
        "fit workers": lambda: mixture.fit({"a": rows, "b": masked}),
        "predict": lambda: mixture.predict(masked),
    }
    with pytest.raises(emfed.DataError, match="masked arrays are not taken"):
        calls[asked]()


def test_words_in_lists_are_categories() -> None:
    rows = [["a", "x"], ["b", "y"], ["a", "y"]] * 8
    mixture = emfed.FederatedMixture(1, families="categorical", max_iter=20).fit(rows)
    assert mixture.categories_ == {0: ["a", "b"], 1: ["x", "y"]}


def test_sparse_rows_are_refused_whatever_the_families_are() -> None:
    rows = sparse.csr_array(np.eye(6))
    with pytest.raises(TypeError, match="dense data is required"):
        emfed.FederatedMixture(2, families="categorical").fit(rows)


def test_a_value_that_its_family_cannot_have_is_told_by_the_name_of_its_column() -> None:
    frame = pd.DataFrame({"falls": [1, 2, 3], "age": [40.0, 41.5, 50.0]})
    with pytest.raises(emfed.DataError, match="row 1, column 'age' is 41.5; expected a whole"):
        emfed.FederatedMixture(1, families="poisson").fit(frame)
