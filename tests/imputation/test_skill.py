"""Effects of observers: a trend of skill is no trend of birds, and no name leaves its worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.data import as_workers
from emfed.imputation import (
    ColumnNames,
    ObserverSkill,
    Structure,
    impute,
    observer_rows,
    read_records,
)
from emfed.models import ObserverEffects
from emfed.models.site_owner import COLUMNS as CELLS
from emfed.network import LoopFederation
from emfed.testing import check_model

YEARS, SITES, WORKERS = 12, 15, 3
NAMES = ColumnNames(worker="society")
READ: dict[str, Any] = {"bins": "year", "duplicates": "keep"}
ADDITIVE: dict[str, Any] = {"structure": Structure(0)}


def records(seed: int, growth: float = 0.0, observers: int = 30) -> pl.DataFrame:
    """Counts at a constant (or growing) abundance by observers who come and go.

    Whoever joins later sees more: twice as much after seven years.
    """
    rng = np.random.default_rng(seed)
    abundance = rng.normal(1.5, 0.5, SITES)
    rows = []
    for observer in range(observers):
        joined = rng.integers(-3, YEARS - 1)
        skill = np.exp(0.1 * (joined - 4) + 0.1 * rng.normal())
        own = rng.choice(SITES, 6, replace=False)
        for year in range(max(0, joined), min(YEARS, joined + 5)):
            for site in own:
                mean = skill * np.exp(abundance[site] + growth * year)
                rows.append((f"o{observer}", f"soc{observer % WORKERS}", f"s{site:02d}",
                             str(2000 + year), rng.poisson(mean)))  # fmt: skip
    return pl.DataFrame(rows, schema=["observer", "society", "site", "date", "count"], orient="row")


def slope(table: Any) -> float:
    """The common growth a year, in logarithms."""
    fit = impute(table, **ADDITIVE)
    years = np.arange(table.shape[1])
    return float(np.polyfit(years, fit.params.times[:, -1], 1)[0])


@pytest.mark.parametrize("growth", [0.0, -0.05])
def test_a_trend_is_right_only_with_effects_of_observers(growth: float) -> None:
    with_effects, without = [], []
    for seed in range(2):
        frame = records(seed, growth)
        without.append(slope(read_records(frame, NAMES, **READ)))
        with_effects.append(slope(read_records(frame, NAMES, observer_effects=True, **READ)))
    assert np.mean(without) > growth + 0.05  # skill taken for birds
    assert abs(np.mean(with_effects) - growth) < 0.025


def test_observers_who_are_alike_are_found_alike_and_totals_stay() -> None:
    rng = np.random.default_rng(0)
    frame = records(5).with_columns(count=pl.Series(rng.poisson(4.0, records(5).height)))
    table = read_records(frame, NAMES, observer_effects=True, **READ)
    assert table.skill is not None
    assert table.skill.spread < 0.1
    plain = read_records(frame, NAMES, **READ)
    assert np.array_equal(table.values, plain.values)
    assert table.weights.sum() == pytest.approx(plain.weights.sum(), rel=0.02)


def test_the_model_keeps_its_contract_but_for_parts_of_an_observer() -> None:
    """Statistics of a union are the mean over its parts where no observer is cut in two."""
    frame = records(1)
    grid = read_records(frame, NAMES, **READ).grid
    tables = [
        observer_rows(frame.filter(society=f"soc{k}"), grid, NAMES, duplicates="keep")
        .with_columns(observer=pl.col("observer") + 100 * k)
        .to_numpy()
        for k in range(WORKERS)
    ]
    report = check_model(ObserverEffects(*grid.shape), tables, raises=False)
    broken = [line for line in str(report).splitlines() if "BROKEN" in line]
    assert all("statistics average" in line for line in broken), report


def test_sites_elsewhere_fit_the_same_and_no_number_of_an_observer_matters(tmp_path: Path) -> None:
    """Of their own rows: the same skill, table and bytes; renumbered observers change no byte."""
    frame = records(2)
    grid = read_records(frame, NAMES, **READ).grid
    own = {f"soc{k}": frame.filter(society=f"soc{k}") for k in range(WORKERS)}
    rows = {name: observer_rows(part, grid, NAMES, duplicates="keep") for name, part in own.items()}
    few: dict[str, Any] = {"rounds": 8, "tol": 0}
    wanted = ObserverSkill.fit(grid, rows, **few)
    found = []
    for turn in range(2):
        sites = {}
        for name, mine in rows.items():
            mine = mine.with_columns(observer=50 - 2 * pl.col("observer")) if turn else mine
            sites[name] = mine
        federation = LoopFederation(as_workers(sites))
        found.append(ObserverSkill.fit(grid, None, federation=federation, **few))
    for skill in found:
        assert np.allclose(skill.result.statistics, wanted.result.statistics, atol=1e-9)
        assert skill.result.ledger.summary() == wanted.result.ledger.summary()
    found[0].result.save(tmp_path / "skill.emfed")  # what owners are handed
    told = emfed.load(tmp_path / "skill.emfed")
    skill = ObserverSkill(told, grid.sites, grid.bins.unit, grid.bins.first)
    cells = {}
    for name, part in own.items():
        mine = read_records(part, NAMES, observer_effects=skill, **READ)
        cells[name] = pl.DataFrame(grid.rows(mine), schema=list(CELLS))
    there = impute(LoopFederation(as_workers(cells)), grid=grid, **ADDITIVE)
    here = read_records(frame, NAMES, observer_effects=wanted, **READ)
    whole = impute(here, **ADDITIVE)
    # Sums of exposures differ in their last bits, and take a few bytes more or less.
    assert abs(there.bytes_up / whole.bytes_up - 1) < 0.02
    assert np.allclose(there.params.times, whole.params.times, atol=1e-6)


def test_what_effects_of_observers_refuse() -> None:
    frame = records(3)
    with pytest.raises(emfed.SettingsError, match="goes with families of counts"):
        read_records(frame, NAMES, observer_effects=True, family="log1p", **READ)
    with pytest.raises(emfed.SettingsError, match="needs a column of observers"):
        read_records(frame, ColumnNames(observer=None), observer_effects=True, **READ)
    with pytest.raises(emfed.SettingsError, match="True, False or an ObserverSkill"):
        read_records(frame, NAMES, observer_effects="fit", **READ)
    table = read_records(frame, NAMES, observer_effects=True, **READ)
    later = frame.with_columns(date=pl.lit("2050"))
    with pytest.raises(emfed.DataError, match="a date is not among those that skill was fitted"):
        read_records(later, NAMES, observer_effects=table.skill, **READ)
