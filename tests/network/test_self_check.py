"""A site that differs by mistake is told so, by its own program alone, with the likely cause."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn import datasets

import emfed
from emfed.network.self_check import suspicions

COLUMNS = ("weight", "pressure", "day", "sex", "age")
MEANS = np.array([70.0, 120.0, 18000.0, 0.4, 50.0])
SPREADS = np.array([9.0, 12.0, 200.0, 0.49, 8.0])
FACTORS = {
    10.0: "10 times too large",
    0.1: "10 times too small",
    1000.0: "1,000 times too large",
    0.001: "1,000 times too small",
    1e6: "1,000,000 times too large",
    18.018: "times too large",
    1 / 88.42: "times too small",
}


def table(rng: Any, rows: int, shift: float = 0.0) -> Any:
    out = MEANS + SPREADS * (rng.normal(size=(rows, 5)) + shift * rng.normal(size=5))
    out[:, 3] = rng.random(rows) < 0.4
    return out


def told(mine: Any, others: Any) -> list[str]:
    """What a site with these rows hears, from moments alone."""
    every = np.concatenate([mine, others])
    parts = [
        {"observed": np.isfinite(x).mean(0), "mean": np.nanmean(x, 0), "scatter": np.nanvar(x, 0)}
        for x in (mine, every)
    ]
    return suspicions(parts[0], parts[1], len(mine) / len(every), mine, COLUMNS)


@settings(max_examples=60, deadline=None)
@given(
    factor=st.sampled_from(list(FACTORS)),
    column=st.sampled_from([0, 1, 4]),
    seed=st.integers(0, 1000),
    rows=st.integers(40, 400),
)
def test_a_column_in_another_unit_is_named_with_the_factor(
    factor: float, column: int, seed: int, rows: int
) -> None:
    rng = np.random.default_rng(seed)
    mine, others = table(rng, rows, shift=0.15), table(rng, 500)
    assert told(mine, others) == []
    mine[:, column] *= factor
    (words,) = told(mine, others)
    assert words.startswith(f"column {COLUMNS[column]!r}")
    assert FACTORS[factor] in words


@pytest.mark.parametrize("code", [-9.0, -99.0, -999.0, 9999.0])
def test_codes_of_missing_values_are_named(code: float) -> None:
    rng = np.random.default_rng(0)
    mine, others = table(rng, 100), table(rng, 300)
    mine[5:9, 0] = code
    (words,) = told(mine, others)
    assert f"column 'weight': 4 rows hold {code:.0f}, far from all others" in words
    mine[5:9, 0], mine[5, 0] = 70.0, code  # once is an outlier
    assert told(mine, others) == []
    others[:40, 0] = mine[5:9, 0] = code  # the others have it, too
    assert told(mine, others) == []


def test_a_sign_that_is_the_other_way_round_is_named() -> None:
    rng = np.random.default_rng(0)
    mine, others = table(rng, 100), table(rng, 300)
    mine[:, 0] *= -1
    (words,) = told(mine, others)
    assert "its sign looks the other way round" in words


@settings(max_examples=30, deadline=None)
@given(
    offset=st.sampled_from([25569.0, -25569.0, 2440587.5, 719163.0, 10957.0, 123456.0]),
    seed=st.integers(0, 1000),
)
def test_dates_of_another_origin_are_named(offset: float, seed: int) -> None:
    rng = np.random.default_rng(seed)
    mine, others = table(rng, 100, shift=0.2), table(rng, 300)
    mine[:, 2] += offset
    (words,) = told(mine, others)
    assert words.startswith("column 'day'")
    assert "dates" in words


@settings(max_examples=30, deadline=None)
@given(pair=st.sampled_from([(0, 1), (1, 4), (0, 2), (2, 4)]), seed=st.integers(0, 1000))
def test_exchanged_columns_are_named(pair: tuple[int, int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    mine, others = table(rng, 200, shift=0.05), table(rng, 300)
    mine[:, pair] = mine[:, pair[::-1]]
    names = [repr(COLUMNS[j]) for j in pair]
    assert any(
        "exchanged" in words and all(n in words for n in names) for words in told(mine, others)
    )


@pytest.mark.parametrize("here", [0, 1])
def test_codes_from_one_where_the_others_count_from_zero_are_named(here: int) -> None:
    rng = np.random.default_rng(1)
    mine, others = table(rng, 150), table(rng, 400)
    mine[:, 3] += here
    others[:, 3] += 1 - here
    (words,) = told(mine, others)
    assert f"it holds {here} and {here + 1} where the others seem to have {1 - here}" in words


def test_a_simulation_names_the_worker() -> None:
    rng = np.random.default_rng(3)
    data = {name: pl.DataFrame(table(rng, 60), schema=list(COLUMNS)) for name in ("a", "b", "c")}
    data["c"] = data["c"].with_columns(pl.col("pressure") / 1000)
    for model in (
        emfed.gaussian_mixture(1, "diag"),
        emfed.mixed_mixture(1, dict.fromkeys(COLUMNS, "gaussian")),
    ):
        with pytest.warns(emfed.EmfedWarning, match="worker 'c': column 'pressure'.*too small"):
            emfed.fit(model, data)
        with pytest.warns(emfed.EmfedWarning, match="1 of 3 sites doubts its units") as told:
            emfed.fit(model, data, masks=True)
        assert not any("'c'" in str(w.message) for w in told)


REAL = {
    "nmes1988": "region",
    "gapminder": "continent",
    "diamonds_fifth": "cut",
    "storms": "year",
    "penguins": "island",
    "wdbc6": "Diagnosis",
    "heart_disease_4hospitals": "hospital",
    "bbs_wood_thrush": "state",
}


def test_real_sites_that_differ_by_nature_are_left_in_peace(data_dir: Path) -> None:
    alarms, columns = [], 0
    for name, key in REAL.items():
        path = data_dir / f"{name}.csv.gz"
        frame = pl.read_csv(path, null_values=["NA", ""], infer_schema_length=None)
        kept = [c for c in frame.columns if c != key and frame[c].dtype.is_numeric()]
        rows, groups = frame.select(kept).to_numpy().astype(float), frame[key].to_numpy()
        whole = summary(rows)
        for group in np.unique(groups.astype(str)):
            mine = rows[groups.astype(str) == group]
            columns += len(kept)
            found = suspicions(summary(mine), whole, len(mine) / len(rows), mine, kept)
            alarms += [f"{name}, {group}: {words}" for words in found]
    told = f"{len(alarms)} warnings for {columns} columns of groups: {alarms}"
    print(told)  # noqa: T201 (a rate that people read)
    assert len(alarms) <= 0.005 * columns, told


def summary(x: Any) -> dict[str, Any]:
    seen = np.isfinite(x)
    share = np.maximum(seen.mean(axis=0), 1e-12)
    mean = np.where(seen, x, 0.0).mean(axis=0) / share
    scatter = np.where(seen, (x - mean) ** 2, 0.0).mean(axis=0) / share
    return {"observed": seen.mean(axis=0), "mean": mean, "scatter": scatter}


def test_columns_that_resemble_each_other_are_not_called_exchanged() -> None:
    """Writers of one digit each differ in many pixels, and some pixel is always like another."""
    digits = datasets.load_digits()
    tails = np.random.default_rng(1).standard_t(1.5, (800, 3))
    at_random = np.random.default_rng(2).integers(6, size=800)
    for rows, groups in ((digits.data, digits.target), (tails, at_random)):
        whole, names = summary(rows), [str(j) for j in range(rows.shape[1])]
        for group in np.unique(groups):
            mine = rows[groups == group]
            found = suspicions(summary(mine), whole, len(mine) / len(rows), mine, names)
            assert not [words for words in found if "exchanged" in words]


@pytest.mark.parametrize("tails", ["lognormal", "cauchy", "outlier"])
def test_means_that_a_few_rows_make_are_no_mistake(tails: str) -> None:
    """Sites of heavy-tailed columns differ by chance: no unit is to blame."""
    rng = np.random.default_rng(7)
    rows = {
        "lognormal": rng.lognormal(0, 2.5, (300, 3)),
        "cauchy": rng.standard_cauchy((300, 3)),
        "outlier": np.vstack([rng.normal(size=(299, 3)), np.full((1, 3), 1e6)]),
    }[tails]
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        emfed.fit(emfed.gaussian_mixture(1, "diag"), rows, groups=np.arange(300) % 4)
    assert not [str(w.message) for w in told if "looks" in str(w.message)]


@pytest.mark.parametrize("own_file", [True, False], ids=["each file counts", "one table counts"])
def test_a_column_that_counts_the_rows_is_named(own_file: bool) -> None:
    rng = np.random.default_rng(0)
    rows, groups = rng.normal(size=(300, 2)), rng.choice(["north", "south", "west"], 300)
    number = np.arange(1.0, 301.0)
    if own_file:
        for name in np.unique(groups):
            number[groups == name] = np.arange(1, (groups == name).sum() + 1)
    table = np.column_stack([number, rows])
    with pytest.warns(emfed.EmfedWarning, match="column '0': it counts the rows"):
        emfed.fit(emfed.gaussian_mixture(1, "diag"), table, groups=groups)
    years = np.column_stack([np.sort(rng.integers(1950, 2020, 300)), rows])
    with warnings.catch_warnings():
        warnings.simplefilter("error", emfed.EmfedWarning)
        emfed.fit(emfed.gaussian_mixture(1, "diag"), years, groups=groups)
