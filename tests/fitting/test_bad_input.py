"""Each bad input gets a clear message: what was expected, what came, what to do."""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import emfed
from emfed.data.workers import from_workers
from tests.helpers import KINDS, fit, make_data, make_model

GOOD = make_data(0)


def broken(value: float) -> list[Any]:
    tables = [t.copy() for t in GOOD]
    tables[2][3, 1] = value
    return tables


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("federation", ["loop", "stacked"])
def test_not_finite(kind: str, value: float, federation: Any) -> None:
    with pytest.raises(emfed.DataError, match=rf"worker '2': row 3, column 1 is {value}.*impute"):
        fit(make_model(kind), broken(value), rounds=1, federation=federation)


def test_not_finite_names_worker_and_column() -> None:
    frames = {
        "north": pd.DataFrame({"age": [1.0, 2.0], "dose": [0.5, 0.1]}),
        "south": pd.DataFrame({"age": [3.0, 4.0], "dose": [np.nan, 0.2]}),
    }
    with pytest.raises(emfed.DataError, match="worker 'south': row 0, column 'dose' is nan"):
        fit(make_model("diag", k=1), frames, rounds=1)


@pytest.mark.parametrize("federation", ["loop", "stacked"])
def test_empty_worker(federation: Any) -> None:
    tables = [*GOOD[:2], np.empty((0, 2)), *GOOD[2:]]
    with pytest.raises(emfed.DataError, match="worker '2' has no rows; expected at least one"):
        fit(make_model("full"), tables, rounds=1, federation=federation)


@pytest.mark.parametrize("kind", KINDS)
def test_one_sample_per_worker_works(kind: str) -> None:
    rows = np.concatenate(GOOD)[:40]
    alone = fit(make_model(kind), [r[None] for r in rows], rounds=30)
    together = fit(make_model(kind), [rows], rounds=30)
    np.testing.assert_allclose(alone.statistics, together.statistics, atol=1e-8)


@pytest.mark.parametrize("kind", KINDS)
def test_one_sample_in_all_works(kind: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", emfed.EmfedWarning)  # every column is constant
        result = fit(make_model(kind, k=1), [np.array([[1.0, 2.0]])], rounds=3)
    np.testing.assert_allclose(result.params.means, [[1.0, 2.0]], atol=1e-9)
    assert np.isfinite(result.params.covariances).all()


@pytest.mark.parametrize("kind", KINDS)
def test_one_feature_works(kind: str) -> None:
    tables = [t[:, :1] for t in GOOD]
    result = fit(make_model(kind, d=1), tables, rounds=50)
    assert result.params.means.shape == (3, 1)
    assert np.isfinite(result.log_likelihood(np.concatenate(tables)))


@pytest.mark.parametrize("kind", KINDS)
def test_constant_column(kind: str) -> None:
    tables = [np.column_stack([t, np.full(len(t), 7.5)]) for t in GOOD]
    with pytest.warns(emfed.EmfedWarning, match="column 2 .* one single value"):
        result = fit(make_model(kind, d=3), tables, rounds=60)
    assert np.isfinite(result.log_likelihood(np.concatenate(tables)))
    np.testing.assert_allclose(result.params.means[:, 2], 7.5, atol=1e-6)
    if kind in ("full", "tied", "diag"):
        with pytest.raises(emfed.DataError, match="column 2.*covariance_floor"):
            fit(make_model(kind, d=3, covariance_floor=0.0), tables, rounds=1)


@pytest.mark.parametrize("kind", KINDS)
def test_as_many_components_as_rows_stays_finite(kind: str) -> None:
    tables = [GOOD[0][:3], GOOD[1][:2]]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", emfed.EmfedWarning)
        result = fit(make_model(kind, k=5), tables, rounds=200)
    assert np.isfinite(result.statistics).all()
    assert np.isfinite(result.log_likelihood(np.concatenate(tables)))


@pytest.mark.parametrize("kind", KINDS)
def test_identical_rows_stay_finite(kind: str) -> None:
    tables = [np.tile(GOOD[0][:1], (20, 1)), np.tile(GOOD[0][:1], (5, 1)), GOOD[1][:3]]
    algorithm = emfed.FedEM(emfed.Dithering(1), step_size=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", emfed.EmfedWarning)
        result = fit(make_model(kind, k=2), tables, algorithm, rounds=200)
    assert np.isfinite(result.log_likelihood(np.concatenate(tables)))


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (np.array([["a", "b"]]), "expected numbers; got dtype <U1"),
        (np.array([[1 + 2j, 3]]), "got dtype complex128"),
        (np.array([[object(), object()]]), "got dtype object"),
        (np.arange(3.0), "expected a table .*reshape"),
        (np.empty((3, 0)), "at least one column"),
        (np.zeros((2, 2, 2)), "expected a table"),
    ],
)
def test_wrong_dtype_or_shape(table: Any, message: str) -> None:
    with pytest.raises(emfed.DataError, match=message):
        fit(make_model("diag", k=1), {"a": table}, rounds=1)


@pytest.mark.parametrize("dtype", [np.int64, np.int8, np.uint16, np.float32, np.bool_])
def test_numbers_of_any_kind_work(dtype: Any) -> None:
    table = (
        (np.concatenate(GOOD)[:60] > 0).astype(dtype)
        if dtype is np.bool_
        else np.concatenate(GOOD)[:60].clip(0, 100).astype(dtype)
    )
    result = fit(make_model("diag", k=2), [table], rounds=20)
    assert np.isfinite(result.params.means).all()


def test_text_column_of_a_frame() -> None:
    frame = pd.DataFrame({"x": [1.0, 2.0], "site": ["a", "b"]})
    with pytest.raises(
        emfed.DataError, match="column 'site': it holds .*, not numbers: encode or drop it"
    ):
        fit(make_model("diag", k=1), {"one": frame}, rounds=1)


def test_duplicate_worker_ids() -> None:
    with pytest.raises(emfed.DataError, match="two workers are called 'a'"):
        from_workers(GOOD, ["a", "b", "a", "c"])
    with pytest.raises(emfed.DataError, match="two workers are called '1'"):
        fit(make_model("diag"), {1: GOOD[0], "1": GOOD[1]}, rounds=1)


def test_other_columns() -> None:
    with pytest.raises(emfed.DataError, match="worker '1' has rows of shape"):
        fit(make_model("diag"), [GOOD[0], GOOD[1][:, :1]], rounds=1)
    frames = {"a": pd.DataFrame(GOOD[0], columns=["x", "y"])}
    other = pd.DataFrame(GOOD[1], columns=["x", "z"])
    with pytest.raises(emfed.DataError, match=r"missing \['y'\], extra \['z'\]"):
        fit(make_model("diag"), frames | {"b": other}, rounds=1)
    with pytest.raises(emfed.DataError, match="some workers name their columns"):
        fit(make_model("diag"), frames | {"b": GOOD[1]}, rounds=1)
    twice = pd.DataFrame(GOOD[1], columns=["x", "x"])
    with pytest.raises(emfed.DataError, match="two columns of one name"):
        fit(make_model("diag"), frames | {"b": twice}, rounds=1)


def test_frames_match_columns_by_name_and_all_kinds_agree() -> None:
    arrays = dict(zip("abcd", GOOD, strict=True))
    want = fit(make_model("full"), arrays, rounds=10)
    pandas = {k: pd.DataFrame(t, columns=["x", "y"]) for k, t in arrays.items()}
    pandas["b"] = pandas["b"][["y", "x"]]
    polars = {k: pl.DataFrame(t, schema=["x", "y"]) for k, t in arrays.items()}
    for frames in (pandas, polars):
        got = fit(make_model("full"), frames, rounds=10)
        np.testing.assert_allclose(got.statistics, want.statistics, atol=1e-12)
    rows = np.concatenate(GOOD)
    groups = np.repeat(list("abcd"), [len(t) for t in GOOD])
    order = np.random.default_rng(0).permutation(len(rows))
    got = fit(make_model("full"), rows[order], groups=groups[order], rounds=10)
    np.testing.assert_allclose(got.statistics, want.statistics, atol=1e-9)


def test_groups_of_the_wrong_length() -> None:
    with pytest.raises(emfed.DataError, match="expected 142 values, got shape"):
        fit(make_model("diag"), np.concatenate(GOOD), groups=[1, 2, 3], rounds=1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ([t[:, 0] for t in GOOD], "worker '0': expected a table .*reshape"),
        ([np.zeros(5), np.zeros(5)], "worker '0': expected a table"),
        ([[1.0, 2.0], [3.0]], "rows differ in length"),
        (np.ma.masked_array(GOOD[0], GOOD[0] > 0), "masked arrays are not taken"),
        ({"a": {"b": 1}}, "worker 'a': expected numbers; got an object of type dict"),
        (None, "expected numbers; got an object of type NoneType"),
        (pd.DataFrame({"x": ["1", "2"]}), "column 'x': it holds"),
        (pd.DataFrame({"x": pd.to_datetime(["2020-01-01"])}), "column 'x': it holds datetime64"),
        (pl.DataFrame({"x": ["1", "2"]}), "column 'x': it holds String"),
        (pl.DataFrame({"x": [1.0]}).with_columns(pl.lit("2020-01-01").str.to_date()), "holds Date"),
        (pd.DataFrame({"x": pd.array([1, None], dtype="Int64")}), "row 1, column 'x' is nan"),
    ],
)
def test_data_that_is_no_table_of_numbers(data: Any, message: str) -> None:
    with pytest.raises(emfed.DataError, match=message):
        fit(make_model("diag", k=1), data, rounds=1)


def test_nullable_and_odd_floats_work() -> None:
    frame = pd.DataFrame({"x": pd.array([1, 2, 5], dtype="Int64"), "y": [0.5, 0.1, 0.2]})
    nullable = fit(make_model("diag", k=1), frame, rounds=2)
    np.testing.assert_allclose(nullable.params.means[0], [8 / 3, 0.8 / 3])
    for dtype in (np.float16, ">f8", np.longdouble):
        result = fit(make_model("diag", k=1), [GOOD[0].astype(dtype)], rounds=1)
        np.testing.assert_allclose(result.params.means[0], GOOD[0].mean(axis=0), rtol=1e-2)


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ([1] * 10 + ["1"] * 20, "groups mix int and str"),
        ([None] + ["a"] * 29, "row 0 has no worker"),
        (np.r_[np.nan, np.ones(29)], "row 0 has no worker"),
        ("site", "is not a column"),
    ],
)
def test_groups_that_are_none(groups: Any, message: str) -> None:
    with pytest.raises(emfed.DataError, match=message):
        fit(make_model("diag"), GOOD[0], groups=groups, rounds=1)


@pytest.mark.parametrize("kind", [pd.DataFrame, pl.DataFrame])
def test_groups_may_name_a_column(kind: Any) -> None:
    rows = np.concatenate(GOOD)
    sites = np.repeat(["a", "b", "c", "d"], [len(t) for t in GOOD])
    frame = kind({"x": rows[:, 0], "site": sites, "y": rows[:, 1]})
    got = fit(make_model("diag"), frame, groups="site", rounds=5)
    want = fit(make_model("diag"), GOOD, rounds=5)
    np.testing.assert_allclose(got.statistics, want.statistics, atol=1e-12)
    assert got.columns == ("x", "y")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: fit("gmm", GOOD), "model must be something like"),
        (lambda: fit(make_model("diag"), GOOD, 3), "algorithm must be something like"),
        (lambda: fit(make_model("diag"), GOOD, emfed.FedEM), "got the class FedEM"),
        (lambda: fit(make_model("diag"), GOOD, participation="half"), "participation must be"),
        (lambda: fit(make_model("diag"), GOOD, federation=None), "federation must be"),
        (lambda: fit(make_model("diag"), GOOD, monitor=10), "monitor must be"),
        (lambda: fit(make_model("diag"), GOOD, start=np.eye(2)), "start must be"),
        (lambda: fit(make_model("diag"), GOOD, callbacks=[3]), "a callback must be a function"),
        (lambda: fit(make_model("diag"), GOOD, threads=0), "threads must be"),
        (lambda: fit(make_model("diag"), GOOD, epochs=np.inf), "epochs must lie in"),
        (lambda: emfed.FedEM("dither"), "compressor must be"),
        (lambda: emfed.FedEM(broadcast="dither"), "broadcast must be"),
        (lambda: emfed.RandomSparsification(0.5, "x"), "then must be"),
        (
            lambda: emfed.network.FaultyFederation("stacked", emfed.network.FaultPlan()),
            "inner must be",
        ),
        (lambda: emfed.algorithms.Bernoulli("a"), "participation probabilities"),
        (lambda: emfed.gaussian_mixture(3, ["full"]), "covariance_type must be one of"),
        (lambda: emfed.gaussian_mixture(3, covariance_prior=3), "covariance_prior must be"),
        (lambda: emfed.gaussian_mixture(3, "known", known_covariance="eye"), "matrix of numbers"),
    ],
)
def test_wrong_kinds_of_objects(make: Any, message: str) -> None:
    with pytest.raises(emfed.SettingsError, match=message):
        make()


def test_nobody_answers() -> None:
    """No limit that counts work would ever be met: the run gives up and says so."""
    for options in (
        {"participation": emfed.algorithms.Schedule([[]], 0.5)},
        {
            "federation": emfed.network.FaultyFederation(
                emfed.network.StackedFederation(emfed.data.as_workers(GOOD)),
                emfed.network.FaultPlan(lose_request=1.0),
            )
        },
    ):
        data = None if "federation" in options else GOOD
        with pytest.warns(emfed.EmfedWarning, match="nobody answered for 1000 rounds"):
            result = fit(make_model("diag"), data, emfed.FedEM(), epochs=5, **options)
        assert result.stopped == "silence"


def test_an_outlier_that_inflates_the_floor_is_mentioned() -> None:
    rows = np.concatenate(GOOD)
    rows[0] = 1e6
    with pytest.warns(emfed.EmfedWarning, match="outliers or sentinel.*covariance_floor="):
        fit(make_model("full", k=4), [rows], rounds=100)


def test_numbers_too_large_to_square() -> None:
    rows = np.concatenate(GOOD)
    with pytest.raises(emfed.DataError, match="needs finite numbers .of at most 1e140"):
        fit(make_model("diag"), [rows * 1e200], rounds=1)
    with pytest.raises(emfed.DataError, match="use other units"):
        fit(make_model("diag"), [rows * 1e-170], rounds=1)
    for factor in (1e130, 1e-130):  # as far as doubles go
        result = fit(make_model("diag"), [rows * factor], rounds=5)
        assert np.isfinite(result.params.covariances).all()
    far = fit(make_model("diag"), [rows + 1e13], rounds=5)
    assert np.isfinite(far.params.means).all()


def test_data_given_twice_or_cut_wrong() -> None:
    workers = emfed.data.as_workers(GOOD)
    with pytest.raises(emfed.DataError, match="leave groups out"):
        fit(make_model("diag"), workers, groups=[1], rounds=1)
    with pytest.raises(emfed.SettingsError, match="has its own data"):
        fit(make_model("diag"), GOOD, federation=emfed.network.LoopFederation(workers), rounds=1)
    with pytest.raises(emfed.DataError, match="offsets must rise from 0 to the number of rows"):
        emfed.data.WorkerData(GOOD[0], np.array([0, 5]))
    with pytest.raises(emfed.DataError, match="worker '1': expected a table"):
        fit(make_model("diag"), [GOOD[0], GOOD[1][:, 0]], rounds=1)


def test_no_workers() -> None:
    with pytest.raises(emfed.DataError, match="at least one worker"):
        fit(make_model("diag"), {}, rounds=1)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: emfed.FedEM(step_size=0.0), r"step_size must lie in \(0, 2\); got 0.0"),
        (lambda: emfed.FedEM(step_size=2.5), "step_size must lie in"),
        (lambda: emfed.FedEM(step_size=float("nan")), "step_size must lie in"),
        (lambda: emfed.FedEM(step_size="fast"), "step_size must be a number"),
        (lambda: emfed.FedEM(memory_rate=-0.1), r"memory_rate must lie in \[0, 1\]; got -0.1"),
        (lambda: emfed.FedEM(memory_rate=1.1), "memory_rate must lie in"),
        (lambda: emfed.FedEM(memory_start="warm"), "memory_start must be 'zero' or"),
        (lambda: emfed.FedEM(batch_size=0), "batch_size must be a whole number >= 1"),
        (lambda: emfed.VRFedEM(inner_rounds=0), "inner_rounds must be a whole number"),
        (lambda: emfed.VRFedEM(batch_size=None), "VRFedEM needs a batch_size"),
        (lambda: emfed.algorithms.Decreasing(first=3), "first must lie in"),
        (lambda: emfed.algorithms.Decreasing(power=2), "power must lie in"),
        (lambda: emfed.algorithms.Bernoulli(0), "participation probabilities"),
        (lambda: emfed.algorithms.Bernoulli([0.5, 1.5]), "participation probabilities"),
        (lambda: emfed.algorithms.FixedSize(0), "FixedSize count"),
        (lambda: emfed.algorithms.Schedule([], 1.0), "at least one round"),
        (lambda: emfed.algorithms.Schedule([[1, 1]], 1.0), "names a worker twice"),
        (lambda: emfed.algorithms.Schedule([[1]], 0.0), "schedule p"),
        (lambda: emfed.fitting.Stop(), "at least one of rounds"),
        (lambda: emfed.fitting.Stop(tolerance=1e-3), "at least one of rounds"),
        (lambda: emfed.fitting.Stop(rounds=-1), "rounds must be"),
        (lambda: emfed.fitting.Monitor(every=0), "Monitor every"),
        (lambda: emfed.gaussian_mixture(0), "n_components"),
        (lambda: emfed.gaussian_mixture(2, "round"), "covariance_type must be one of full, diag"),
        (lambda: emfed.gaussian_mixture(2, "known"), "needs known_covariance"),
        (lambda: emfed.gaussian_mixture(2, "full", known_covariance=np.eye(2)), "goes with"),
        (
            lambda: emfed.gaussian_mixture(2, "known", known_covariance=-np.eye(2)),
            "positive definite",
        ),
        (lambda: emfed.gaussian_mixture(2, covariance_floor=-1), "covariance_floor"),
        (lambda: emfed.gaussian_mixture(2, weight_concentration=0.5), "weight_concentration"),
        (lambda: emfed.models.InverseWishart(-1), "dof"),
        (lambda: emfed.models.InverseWishart(1, -1), "scale"),
        (lambda: emfed.models.InverseWishart(1, np.array([[1.0, 2.0], [2.0, 1.0]])), "scale"),
        (lambda: emfed.models.InverseWishart(np.inf), "dof"),
        (lambda: emfed.gaussian_mixture(2, covariance_floor=1e-15), "0 or at least 1e-12"),
        (lambda: emfed.RandomSparsification(0.5, emfed.Dithering(block="row")), "block size"),
        (lambda: emfed.Dithering(block="row").omega(8), "needs a layout"),
        (lambda: emfed.Dithering(scales="float16"), "scales must be one of"),
        (lambda: emfed.Identity("half"), "precision must be one of"),
        (lambda: emfed.network.FaultPlan(lose_reply=2), "lose_reply"),
    ],
)
def test_settings_out_of_range(make: Any, message: str) -> None:
    with pytest.raises(emfed.SettingsError, match=message):
        make()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weights": "equal"}, "weights must be 'samples', 'uniform' or numbers"),
        ({"weights": [1, 2]}, "weights must be 4 positive numbers"),
        ({"weights": [1, 2, 0, 1]}, "weights must be 4 positive numbers"),
        ({"federation": "cloud"}, "federation must be one of loop, stacked"),
        ({"participation": emfed.algorithms.Bernoulli([0.5])}, None),
        (
            {"participation": emfed.algorithms.Bernoulli([0.5, 0.5])},
            "2 participation probabilities for 4",
        ),
        ({"participation": emfed.algorithms.FixedSize(5)}, "asks for 5 workers; there are 4"),
        ({"participation": emfed.algorithms.Schedule([[7]], 1.0)}, "names worker 7; there are 4"),
        ({"seed": -1}, "seed"),
        ({"resume": True}, "needs the path"),
        ({"start_statistics": "mine"}, "start_statistics must be"),
    ],
)
def test_options_of_fit(options: dict[str, Any], message: str | None) -> None:
    if message is None:
        fit(make_model("diag"), GOOD, rounds=1, **options)
        return
    with pytest.raises(emfed.SettingsError, match=message):
        fit(make_model("diag"), GOOD, rounds=1, **options)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weights": np.array([0.5, 0.6, 0.1])}, "sum to 1"),
        ({"weights": np.array([1.2, -0.1, -0.1])}, "positive"),
        ({"means": np.zeros((2, 2))}, r"means: expected finite numbers of shape \(3, 2\)"),
        ({"means": np.full((3, 2), np.nan)}, "means: expected finite"),
        ({"covariances": -np.ones((3, 2))}, "positive definite"),
        ({"means": np.full((3, 2), 1e9)}, "no mass"),
    ],
)
def test_bad_starts(change: dict[str, Any], message: str) -> None:
    import dataclasses

    good = emfed.models.GaussianParameters(np.full(3, 1 / 3), np.eye(3)[:, :2], np.ones((3, 2)))
    bad = dataclasses.replace(good, **change)
    if message == "no mass":
        bad.means[0] = 0.0
    with pytest.raises(emfed.SettingsError, match=message):
        fit(make_model("diag"), GOOD, start=bad, rounds=1)


def test_a_step_size_that_becomes_bad_in_mid_run() -> None:
    algorithm = emfed.FedEM(step_size=lambda k: 0.5 if k < 5 else -1.0)
    with pytest.raises(emfed.SettingsError, match=r"step_size\(5\) must lie in"):
        fit(make_model("diag"), GOOD, algorithm, rounds=10)


def test_an_e_step_that_is_not_finite_is_named() -> None:
    data = emfed.data.as_workers(GOOD)
    run = emfed.fitting.open_run(make_model("diag"), data, emfed.FedEM(), seed=0)
    data.rows[40] = np.inf  # worker 1 changes its data behind our back
    with (
        np.errstate(invalid="ignore"),
        pytest.raises(emfed.NumericalError, match="worker 1, round 1: .* not finite"),
    ):
        run.step()


def test_predicting_other_columns() -> None:
    result = fit(make_model("diag"), GOOD, rounds=3)
    with pytest.raises(emfed.DataError, match="expected 2 columns; got 3"):
        result.predict(np.zeros((4, 3)))
    with pytest.raises(emfed.DataError, match="is nan"):
        result.log_likelihood(np.array([[np.nan, 0.0]]))
    frame = pd.DataFrame(GOOD[0], columns=["x", "y"])
    result = fit(make_model("diag"), {"a": frame}, rounds=5)
    np.testing.assert_array_equal(result.predict(frame), result.predict(frame[["y", "x"]]))
    with pytest.raises(emfed.DataError, match=r"missing \['y'\], extra \['z'\]"):
        result.predict(frame.rename(columns={"y": "z"}))


def test_a_model_that_knows_no_data_says_so() -> None:
    with pytest.raises(emfed.EmfedError, match="does not know its data yet"):
        _ = make_model("full").layout


MIXTURES: dict[str, Any] = {
    "gaussian": emfed.gaussian_mixture(4),
    "mixed": emfed.mixed_mixture(4, "gaussian"),
    "factors": emfed.factor_analysis(1, n_components=4),
    "regression": emfed.regression_mixture(4),
    "clusters": emfed.k_means(4),
}


@pytest.mark.parametrize("name", MIXTURES)
def test_more_components_than_rows(name: str) -> None:
    with pytest.raises(emfed.DataError, match="=4, but all workers together have 2 rows: use few"):
        emfed.fit(MIXTURES[name], np.array([[1.0, 2.0, 3.0], [2.0, 1.0, 4.0]]))


def test_inputs_that_are_combinations_of_others_name_what_a_regression_has() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 3))
    rows[:, 1] = 2 * rows[:, 0]
    with pytest.raises(emfed.SettingsError, match=r"Drop them, or set ridge > 0\."):
        emfed.fit(emfed.regression_mixture(2), rows)
    assert emfed.fit(emfed.regression_mixture(2, ridge=1.0), rows).params.noise.min() > 0


def test_numbers_are_no_categories() -> None:
    rows = np.random.default_rng(0).normal(size=(50, 2))
    with pytest.raises(emfed.DataError, match=r"column 0 has 50 different values in 50 rows"):
        emfed.FederatedMixture(2, families="categorical").fit(rows)


@pytest.mark.parametrize("family", ["exponential", "gamma", "gaussian"])
def test_columns_whose_squares_no_double_holds_are_refused_in_words(family: str) -> None:
    rows = np.random.default_rng(0).gamma(2.0, 1e-300, (60, 2))
    with pytest.raises(emfed.DataError, match="use other units"):
        emfed.fit(emfed.mixed_mixture(2, family), rows, groups=np.arange(60) % 3)
