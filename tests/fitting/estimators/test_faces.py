"""What users hold goes in, or is refused by its name; what they asked in their words comes back."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest

import emfed
from tests.network.processes import real_sites

RNG = np.random.default_rng(0)
COUNT = 200
WARDS = RNG.choice(["icu", "er", "gp"], COUNT).tolist()
WARDS[3] = None
COLUMNS: dict[str, Any] = {
    "age": RNG.normal(50, 9, COUNT).tolist(),
    "stays": RNG.poisson(3, COUNT).tolist(),
    "ward": WARDS,
    "smoker": (RNG.random(COUNT) < 0.3).tolist(),
    "site": RNG.choice(list("abc"), COUNT).tolist(),
}
FAMILIES = {"stays": "poisson", "ward": "categorical", "smoker": "bernoulli"}
PANDAS, POLARS = pd.DataFrame(COLUMNS), pl.DataFrame(COLUMNS)
NUMBERS = ["age", "stays"]


def mixture(**options: Any) -> emfed.FederatedMixture:
    return emfed.FederatedMixture(2, random_state=1, tol=1e-3, **{"families": FAMILIES, **options})


SAME: dict[str, Any] = {
    "pandas": PANDAS,
    "polars": POLARS,
    "lazy": POLARS.lazy(),
    "polars categorical": POLARS.with_columns(pl.col("ward").cast(pl.Categorical)),
    "polars enum": POLARS.with_columns(pl.col("ward").cast(pl.Enum(["er", "gp", "icu"]))),
    "pandas categorical": PANDAS.assign(ward=PANDAS["ward"].astype("category")),
    "objects": PANDAS.assign(ward=PANDAS["ward"].astype(object), stays=PANDAS.stays.astype(object)),
    "nullable": PANDAS.assign(
        smoker=PANDAS.smoker.astype("boolean"), stays=PANDAS.stays.astype("Int64")
    ),
}


@pytest.mark.parametrize("kind", SAME)
def test_every_way_of_holding_a_table_gives_the_same_fit(kind: str) -> None:
    fitted = mixture().fit(SAME[kind], groups="site")
    reference = mixture().fit(PANDAS, groups="site")
    np.testing.assert_array_equal(fitted.weights_, reference.weights_)
    assert list(fitted.parameters_) == ["age", "stays", "ward", "smoker"]  # age is Gaussian
    assert list(fitted.categories_["ward"]) == ["er", "gp", "icu"]
    np.testing.assert_array_equal(fitted.labels_, reference.predict(PANDAS))


def test_families_name_the_exceptions_in_every_face() -> None:
    frame = POLARS.select("age", "stays")
    named = emfed.mixed_mixture(2, {"stays": "poisson"})
    whole = emfed.mixed_mixture(2, {"age": "gaussian", "stays": "poisson"})
    few, all_ = (emfed.fit(model, frame, rounds=5) for model in (named, whole))
    np.testing.assert_array_equal(few.statistics, all_.statistics)
    by_number = mixture(families={1: "poisson"}).fit(frame.to_numpy())
    np.testing.assert_array_equal(
        by_number.weights_, mixture(families={"stays": "poisson"}).fit(frame).weights_
    )
    exposed = emfed.mixed_mixture(1, {"stays": emfed.models.Poisson(exposure="age")})
    assert emfed.fit(exposed, frame, rounds=2).model.columns.families[0] == "exposure"
    with pytest.raises(emfed.SettingsError, match="'nights', which is not among the columns"):
        mixture(families={"nights": "poisson"}).fit(frame)
    with pytest.raises(emfed.SettingsError, match="'nights', which is not among the columns"):
        emfed.fit(emfed.mixed_mixture(2, {"nights": "poisson"}), frame)
    width = frame.shape[1]
    with pytest.raises(emfed.SettingsError, match=f"lists 1 families, and X has {width} columns"):
        mixture(families=["poisson"]).fit(frame)


def test_nan_is_told_what_goes_with_missing_values() -> None:
    rows = np.array([[1.0, 2.0], [np.nan, 1.0], [3.0, 4.0]])
    with pytest.raises(emfed.DataError, match="with covariance_type 'full' or 'diag'"):
        emfed.FederatedGaussianMixture(covariance_type="tied").fit(rows)


def test_files_keep_which_word_is_which_code(tmp_path: Path) -> None:
    fitted = mixture().fit(PANDAS, groups="site")
    fitted.save(tmp_path / "m.emfed")
    loaded = emfed.load(tmp_path / "m.emfed")
    for frame in (PANDAS, POLARS):
        np.testing.assert_array_equal(loaded.predict(frame), fitted.labels_)
    with pytest.raises(
        emfed.DataError,
        match="row 0, column 'ward': 'x' is none of the categories that are known, 'er'",
    ):
        fitted.predict(PANDAS.assign(ward="x"))


@pytest.mark.parametrize("frame", [PANDAS, POLARS])
def test_frames_come_out_where_frames_came_in(frame: Any) -> None:
    imputer = emfed.FederatedImputer(1, families=FAMILIES, tol=1e-3).fit(frame, groups="site")
    filled = imputer.transform(frame)
    assert type(filled) is type(frame)
    assert list(filled.columns) == ["age", "stays", "ward", "smoker"]
    assert filled["ward"][3] in ("er", "gp", "icu")
    assert str(filled["smoker"].dtype).lower().startswith("bool")  # nothing was missing there
    kmeans = emfed.FederatedKMeans(2).fit(frame[NUMBERS])
    factors = emfed.FederatedFactorAnalysis(1).fit(frame[NUMBERS])
    for transformer in (kmeans, factors):
        out = transformer.transform(frame[NUMBERS])
        assert type(out) is type(frame)
        assert list(out.columns) == list(transformer.get_feature_names_out())
        if frame is PANDAS:
            assert (out.index == PANDAS.index).all()
        plain = transformer.set_output(transform="default").transform(frame[NUMBERS].to_numpy())
        assert isinstance(plain, np.ndarray)
    mixture = emfed.FederatedMixture(1, families=FAMILIES, random_state=0).fit(frame, groups="site")
    for drawn in (mixture.sample(30)[0], factors.sample(3)):
        assert type(drawn) is type(frame)
    drawn, labels = mixture.sample(30)
    assert list(drawn.columns) == ["age", "stays", "ward", "smoker"]
    assert set(drawn["ward"]) <= {"er", "gp", "icu"}
    assert mixture.predict(drawn).shape == labels.shape  # words are read as at the fit
    for array in (mixture.predict_proba(frame), mixture.score_samples(frame)):
        assert isinstance(array, np.ndarray)
    assert isinstance(
        emfed.FederatedFactorAnalysis(1).fit(RNG.normal(size=(30, 3))).sample(2), np.ndarray
    )


HOLES = np.where(np.arange(60).reshape(30, 2) == 9, np.nan, RNG.normal(size=(30, 2)))
GAUSS = emfed.FederatedGaussianMixture
REFUSED: dict[str, tuple[Any, Any, str]] = {
    "words": (
        GAUSS(2),
        PANDAS[["age", "ward"]],
        r"column 'ward': it holds .*\('.*'\), not numbers",
    ),
    "words of a mixture": (
        emfed.FederatedMixture(2),
        PANDAS[["age", "ward"]],
        "say families={'ward': 'categorical'}",
    ),
    "words in an array": (
        GAUSS(2),
        np.array([["1", "a"], ["2", "b"]]),
        "column 1: it holds str .'a'.",
    ),
    "dates": (
        GAUSS(2),
        PANDAS[["age"]].assign(born=pd.Timestamp("2020-01-01")),
        "column 'born': it holds datetime.*days since",
    ),
    "dates of Python": (
        GAUSS(2),
        PANDAS[["age"]].assign(born=[datetime.date(2020, 1, 1)] * len(PANDAS)),
        "column 'born': it holds date, not numbers: .*days since",
    ),
    "lists": (
        GAUSS(2),
        PANDAS[["age"]].assign(c=[[1]] * len(PANDAS)),
        "column 'c': it holds list, not",
    ),
    "structs": (GAUSS(2), POLARS.select("age", c=pl.struct("age")), "column 'c': it holds Struct"),
    "polars dates": (
        GAUSS(2),
        POLARS.select("age", born=pl.lit("2020-01-01").str.to_date()),
        "column 'born': it holds Date.*days since",
    ),
    "categories": (
        GAUSS(2),
        SAME["pandas categorical"][["age", "ward"]],
        "'ward': it holds category",
    ),
    "enums": (GAUSS(2), SAME["polars enum"][["age", "ward"]], "'ward': it holds Enum"),
    "grouped": (GAUSS(2), PANDAS.groupby("site"), "got a DataFrameGroupBy; give the data frame"),
    "grouped by polars": (GAUSS(2), POLARS.group_by("site"), "got a GroupBy; give the data frame"),
    "one name twice": (
        GAUSS(2),
        pd.DataFrame(HOLES[:3], columns=["x", "x"]),
        "two columns of one name, 'x'",
    ),
    "a dict of columns": (GAUSS(2), {"a": [1.0, 2.0], "b": [3.0, 4.0]}, "this one holds columns"),
    "holes": (GAUSS(2), HOLES, "row 4, column 1: it contains NaN: say missing=True"),
    "holes of a worker": (GAUSS(2), {"a": HOLES}, "worker 'a', row 4, .*say missing=True"),
    "holes of a mixture": (emfed.FederatedMixture(2, missing=False), HOLES, "say missing=True"),
    "holes of k-means": (emfed.FederatedKMeans(2), HOLES, "fill them in first"),
    "one category": (
        emfed.FederatedMixture(1, families={"w": "categorical"}),
        pd.DataFrame({"w": ["a", "a"], "x": [1.0, 2.0]}),
        "column 'w' has one category only",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_used_is_refused_by_name(name: str) -> None:
    estimator, X, words = REFUSED[name]
    with pytest.raises(emfed.DataError, match=words):
        estimator.fit(X)


def test_the_same_is_refused_by_fit() -> None:
    for data, words in (
        (PANDAS.groupby("site"), "the data: got a DataFrameGroupBy"),
        (PANDAS[["age", "ward"]], "column 'ward': it holds"),
        (SAME["polars enum"][["age", "ward"]], "column 'ward': it holds Enum"),
        (HOLES, "takes missing values with missing=True"),
    ):
        with pytest.raises(emfed.DataError, match=words):
            emfed.fit(emfed.gaussian_mixture(1), data)
    lazy = POLARS.select("age", "stays", "site").lazy()
    assert emfed.fit(emfed.gaussian_mixture(1), lazy, groups="site").columns == ("age", "stays")


@pytest.mark.parametrize(
    ("estimator", "words"),
    [
        (emfed.FederatedKMeans(50), "^n_clusters=50, but"),
        (emfed.FederatedKMeans("x"), "^n_clusters must be"),
        (GAUSS(50), "^n_components=50, but"),
        (GAUSS(2, max_iter=0), "^max_iter must be"),
        (GAUSS(2, random_state=-1), "^random_state must be"),
        (emfed.FederatedImputer(rank=0), "^rank must be"),
        (emfed.FederatedFactorAnalysis(0), "^n_components must be"),
    ],
)
def test_errors_call_settings_by_the_estimators_names(estimator: Any, words: str) -> None:
    with pytest.raises(emfed.EmfedError, match=words):
        estimator.fit(np.random.default_rng(0).normal(size=(30, 3)))


def test_scores_count_rows_with_their_weights() -> None:
    X = np.random.default_rng(2).normal(size=(60, 3))
    weights = np.r_[np.full(20, 2.0), np.zeros(10), np.ones(30)]
    twice = np.concatenate([X[:20], X[:20], X[30:]])
    for estimator in (GAUSS(2), emfed.FederatedMixture(2), emfed.FederatedFactorAnalysis(1)):
        fitted = estimator.fit(X)
        assert fitted.score(X, sample_weight=weights) == pytest.approx(fitted.score(twice))
    kmeans = emfed.FederatedKMeans(2).fit(X)
    assert kmeans.score(X, sample_weight=weights) == pytest.approx(kmeans.score(twice))
    with pytest.raises(emfed.DataError, match="one number per row: expected 60"):
        kmeans.score(X, sample_weight=[1.0])


def test_labels_have_the_shape_of_the_rows() -> None:
    X = np.random.default_rng(2).normal(size=(60, 2))
    for estimator in (GAUSS(2), emfed.FederatedKMeans(2), emfed.FederatedMixture(2)):
        assert estimator.fit(X).labels_.shape == (60,)
        np.testing.assert_array_equal(estimator.fit_predict(X), estimator.labels_)
        assert [len(part) for part in estimator.fit([X[:20], X[20:]]).labels_] == [20, 40]


def test_a_selection_prints_its_table_and_a_fit_its_figures(tmp_path: Path) -> None:
    X = np.random.default_rng(2).normal(size=(90, 2))
    fitted = GAUSS("1:3").fit(X, groups=np.arange(90) % 3)
    told = repr(fitted.selection_).splitlines()
    assert "free parameters" in told[1]
    assert [line.split()[0] for line in told[2:]] == ["1", "2", "3"]
    assert sum("<- chosen" in line for line in told) == 1
    for what in ("components", "course", "selection", "sites"):
        fitted.plot(what).savefig(tmp_path / "p.png")
    with pytest.raises(emfed.SettingsError, match="what must be one of components"):
        fitted.plot("nothing")
    fitted.report(tmp_path / "r.html", title="Three wards")
    assert "<h1>Three wards</h1>" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert fitted.raw_bytes_ == 90 * 2 * 8
    assert "the rows themselves are 1.4 kB" in repr(fitted.result_)


def test_every_estimator_draws_something_unasked(tmp_path: Path) -> None:
    X = np.random.default_rng(2).normal(size=(60, 3))
    kmeans = emfed.FederatedKMeans(2).fit(X, groups=np.arange(60) % 3)
    others = [emfed.FederatedFactorAnalysis(1), emfed.FederatedMixture(2), emfed.FederatedImputer()]
    for fitted in (kmeans, *(e.set_params(max_iter=30, tol=1e-3).fit(X) for e in others)):
        fitted.plot().savefig(tmp_path / "p.png")
    with pytest.raises(emfed.SettingsError, match="nothing to draw for what='components'"):
        kmeans.plot("components")


def test_a_family_that_nobody_knows_is_told_with_its_column() -> None:
    with pytest.raises(emfed.SettingsError, match="the family of column 'stays' must be one of"):
        emfed.FederatedMixture(2, families={"stays": "poissn"}).fit(PANDAS[NUMBERS])
    with pytest.raises(emfed.SettingsError, match="the family of column 1 must be one of"):
        emfed.mixed_mixture(2, ["gaussian", "poissn"])


def test_a_warning_names_no_setting_that_a_mixture_does_not_have() -> None:
    rng = np.random.default_rng(0)
    X = np.column_stack([rng.normal(size=90), np.arange(90) % 2])
    with pytest.warns(emfed.EmfedWarning, match="where the floor holds up the spread: column 1"):
        emfed.FederatedMixture(2, random_state=0).fit(X)


@pytest.mark.parametrize(
    "estimator",
    [
        GAUSS(2, verbose=True),
        emfed.FederatedMixture(2, verbose=True),
        emfed.FederatedKMeans(2, verbose=True),
        emfed.FederatedFactorAnalysis(1, verbose=True),
        emfed.FederatedImputer(verbose=True),
    ],
)
def test_progress_is_told_where_it_is_wanted(estimator: Any, capsys: Any) -> None:
    X = np.random.default_rng(2).normal(size=(60, 3))
    estimator.fit(X, groups=np.arange(60) % 3)
    told = capsys.readouterr()
    assert told.out == ""
    assert told.err.startswith(f"{type(estimator).__name__}: opening\n")
    assert " rounds, " in told.err.splitlines()[-1]
    estimator.set_params(verbose=False).fit(X)
    assert capsys.readouterr().err == ""


def test_progress_is_told_of_sites_elsewhere(tmp_path: Path, capsys: Any) -> None:
    rng = np.random.default_rng(1)
    data = {name: pl.DataFrame(rng.normal(size=(40, 2)), schema=["a", "b"]) for name in "xyz"}
    with real_sites(data, tmp_path) as sites:
        fitted = GAUSS(2, verbose=True, max_iter=30, tol=1e-3).fit(sites)
    err = capsys.readouterr().err
    assert "FederatedGaussianMixture: opening" in err
    assert "round 1 " in err
    assert "(the rows themselves are 1.9 kB)" in err
    assert fitted.labels_ is None
    fitted.report(tmp_path / "r.html")
    assert "fitted over a network" in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_online_em_says_why_it_has_no_range() -> None:
    rows = np.random.default_rng(0).normal(np.repeat([0, 9], 60)[:, None], 1, (120, 3))
    for estimator, name in (
        (emfed.FederatedGaussianMixture("1:3"), "n_components"),
        (emfed.FederatedMixture([1, 2]), "n_components"),
        (emfed.FederatedImputer(rank="1:2"), "rank"),
    ):
        assert not hasattr(estimator, "partial_fit")
        with pytest.raises(AttributeError, match="a batch is seen only once") as told:
            estimator.partial_fit(rows)
        assert told.value.__cause__ is told.value.__context__ is None  # the last line says it
        assert f"set_params({name}=estimator.{name}_)" in str(told.value)
        estimator.fit(rows)  # as it advises
        estimator.set_params(**{name: getattr(estimator, f"{name}_")}).partial_fit(rows)


def test_a_fit_in_python_shows_its_progress_too(capsys: pytest.CaptureFixture[str]) -> None:
    rows = np.random.default_rng(0).normal(size=(60, 2))
    emfed.fit(emfed.gaussian_mixture(2), [rows[:30], rows[30:]], rounds=3, tol=0)
    assert capsys.readouterr().err == ""
    emfed.fit(emfed.gaussian_mixture(2), [rows[:30], rows[30:]], rounds=3, tol=0, verbose=True)
    told = capsys.readouterr().err
    assert told.startswith("fit: opening")
    assert "round 1" in told
    emfed.select_components(emfed.gaussian_mixture(1), rows, (1, 2), rounds=3, tol=0, verbose=True)
    assert "round 1" in capsys.readouterr().err
