"""Runs on sites x time tables: their settings, where the data come from, and one job of them."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from emfed.core.errors import DataError, EmfedWarning, check_count, check_range
from emfed.core.records import RoundRecord
from emfed.imputation import (
    Cells,
    ColumnNames,
    FieldTable,
    Imputation,
    Structure,
    impute,
    read_ebird,
    read_records,
    simulate_table,
)
from emfed.imputation.families import as_family
from emfed.imputation.simulate import simulated_totals
from emfed.imputation.sweeps import Solver

FILES = {
    "wood-thrush": "bbs_wood_thrush.csv.gz",
    "oystercatcher": "oystercatcher_monthly.csv.gz",
    "seabirds": "nz_seabirds_at_sea.csv.gz",
}
"""Open tables, in the folder that EMFED_DATA names."""
_DRAWS = 60
"""For the band of the trend: quantiles are normal ones, so that few draws will do."""
_UNCOUNTED = 99_999
"""The seabirds' code for more than a hundred thousand."""


@final
@dataclass(frozen=True, kw_only=True)
class TableSettings:
    """Everything that decides a run on a table but the seed; the keys of ``config.toml``."""

    data: Literal["simulated", "ebird", "wood-thrush", "oystercatcher", "seabirds"] = "simulated"
    records: int = 12_185
    """This and the next three are for simulated tables."""
    observers: int = 2465
    sites: int = 9721
    months: int = 525
    observations: str | None = None
    """For a download from eBird, its files, and what to take from them."""
    sampling: str | None = None
    species: str | None = None
    region: str | None = None
    since: str | None = None
    until: str | None = None
    draw: int = 0
    """For a simulated table: tables of other numbers are drawn apart."""
    family: Literal["log1p", "gaussian", "poisson", "negative-binomial", "bernoulli"] = "log1p"
    groups: int = 10
    """Workers: observers (or sites, where there are none) put at random into so many."""
    mode: Literal["observed", "paper", "site-owner"] = "observed"
    batch: Literal["grid", "observations", "rescaled"] = "grid"
    rounds: int | None = None
    epochs: float | None = None
    holdout: float = 0.1
    """The share of observed cells that no fit sees; with 0 it sees all, and nothing is scored."""

    def __post_init__(self) -> None:
        """Refuse bad settings at once."""
        for name in ("records", "observers", "sites", "months", "groups"):
            check_count(name, getattr(self, name))
        check_range("holdout", self.holdout, 0, 0.9)
        if self.data == "ebird" and self.observations is None:
            raise DataError("data = 'ebird' needs observations = 'the file of your download'.")

    @property
    def cost(self) -> float:
        """Very roughly, the milliseconds it takes."""
        if self.mode == "paper":
            epochs = np.inf if self.epochs is None else self.epochs
            rounds = np.inf if self.rounds is None else self.rounds
            return 25.0 * min(rounds, epochs * self.records / (100 * self.groups))
        return 15_000.0

    @property
    def used(self) -> dict[str, Any]:
        """The settings that play a role in this run."""
        simulated = ("records", "observers", "sites", "months", "draw")
        download = ("observations", "sampling", "species", "region", "since", "until")
        idle = {name for name in simulated if self.data != "simulated"}
        idle |= {name for name in download if self.data != "ebird"}
        idle |= {"batch"} if self.mode != "paper" else set()
        idle |= {"rounds", "epochs"} if self.mode == "observed" else set()
        return {
            name: value
            for name, value in asdict(self).items()
            if name not in idle and not (name in ("rounds", "epochs") and value is None)
        }

    @property
    def available(self) -> bool:
        """Whether its data are here."""
        return self.data not in FILES or (_folder() / FILES[self.data]).is_file()


def _folder() -> Path:
    return Path(os.environ.get("EMFED_DATA") or ".")


def load(settings: TableSettings, seed: int) -> FieldTable:
    """The table of a run."""
    groups, kind = settings.groups, settings.data
    common: dict[str, Any] = {"groups": groups, "family": settings.family, "seed": seed}
    if kind == "simulated":
        counts = settings.family == "gaussian"  # of counts as they are, as the paper has them
        table = simulate_table(
            settings.records,
            observers=settings.observers,
            sites=settings.sites,
            months=settings.months,
            groups=groups,
            family="poisson" if counts else settings.family,
            seed=table_seed(settings, seed),
        )
        return replace(table, family=as_family("gaussian")) if counts else table
    if kind == "ebird":
        assert settings.observations is not None
        return read_ebird(
            settings.observations,
            settings.sampling,
            species=settings.species,
            region=settings.region,
            since=settings.since,
            until=settings.until,
            bad_rows="skip",
            **common,
        )
    path = _folder() / FILES[kind]
    if kind == "wood-thrush":
        return read_records(path, ColumnNames(date="year"), bins="year", **common)
    if kind == "oystercatcher":
        columns = ColumnNames(date=("year", "month"), observer=None)
        return read_records(path, columns, **common)
    return read_records(
        _seabirds(path),
        ColumnNames(site="site_1deg"),
        bad_rows="skip",
        duplicates="keep",
        **common,
    )


def table_seed(settings: TableSettings, seed: int) -> int:
    """The seed of a simulated table."""
    return seed + 1000 * settings.draw


def _seabirds(path: Path) -> Any:
    """The seabirds without the counts that only say very many."""
    import polars as pl

    frame = pl.scan_csv(path, infer_schema=False)
    return frame.filter(pl.col("count").cast(pl.Int64, strict=False).fill_null(0) < _UNCOUNTED)


def run_table(
    settings: TableSettings, seed: int, report: Callable[[float], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Columns of the records, with the scores of the fit; and those of the trend, by time."""
    with warnings.catch_warnings():  # empty sites and bad rows of tables that are what they are
        warnings.simplefilter("ignore", EmfedWarning)
        return _run_table(settings, seed, report)


def _run_table(
    settings: TableSettings, seed: int, report: Callable[[float], None]
) -> tuple[dict[str, Any], dict[str, Any]]:
    table = load(settings, seed)
    nothing = table.pooled.take(np.empty(0, dtype=np.int64))
    train, held = table.split(settings.holdout, seed) if settings.holdout else (table, nothing)

    def show(record: RoundRecord) -> None:
        rounds = record.round / settings.rounds if settings.rounds else 0.0
        epochs = record.epochs / settings.epochs if settings.epochs else 0.0
        report(min(1.0, max(rounds, epochs)))

    options: dict[str, Any] = {"batch": settings.batch} if settings.mode == "paper" else {}
    if settings.mode != "observed":
        options |= {"rounds": settings.rounds, "epochs": settings.epochs}
    result = impute(
        train,
        mode=settings.mode,
        seed=seed,
        callbacks=[show],
        draws=_DRAWS,
        **options,
    )
    if result.stopped == "interrupted":
        raise KeyboardInterrupt
    columns: dict[str, Any] = dict(result.records.to_arrays())
    for name, value in scores(result, train, held).items():
        columns[name] = np.full(len(result.records), value)
    seen = np.bincount(table.pooled.times, minlength=table.bins.count)
    found, unknown = result.trend(), np.full(table.bins.count, np.nan)
    counted = settings.data == "simulated" and settings.family != "bernoulli"
    trend: dict[str, Any] = {
        "time": np.arange(table.bins.count, dtype=np.float64) + table.bins.first,
        "estimate": found["estimate"],
        "missing": (len(table.sites) - seen).astype(np.float64),
        "lower": found.get("lower", unknown),
        "upper": found.get("upper", unknown),
        "truth": unknown,
        "empty": (seen == 0).astype(np.float64),
    }
    if counted:
        trend["truth"] = simulated_totals(table.shape, table_seed(settings, seed))
    return columns, trend


def scores(result: Imputation, train: FieldTable, held: Cells) -> dict[str, float]:
    """Errors on held-out cells: the fit's, the start's, the additive fit's, the pooled fit's."""
    family, cells = train.family, train.pooled
    sent = {
        "rank": float(result.params.rank),
        "busiest_bytes_up": float(result.ledger.counts[:, 0, 1:].sum(axis=(0, 1)).max()),
    }
    if held.size == 0:
        names = ("rmse", "start_rmse", "additive_rmse", "pooled_rmse")
        return {**dict.fromkeys(names, float("nan")), **sent}
    nothing = family.deviance(np.zeros(held.size), held.sums, held.weights).sum()

    def error(structure: Structure) -> float:
        params = Solver(family, structure, sweeps=500, tolerance=1e-8).fit(cells)
        return _root(family, params.theta(held.sites, held.times), held)

    return {
        "rmse": result.score(held),
        "start_rmse": float(np.sqrt(2 * nothing / held.weights.sum())),
        "additive_rmse": min(error(Structure(0, 1.0, e, e)) for e in (0.1, 0.5, 2.0)),
        "pooled_rmse": error(result.solver.structure) if result.mode == "observed" else np.nan,
        **sent,
    }


def _root(family: Any, theta: Any, held: Cells) -> float:
    return float(
        np.sqrt(2 * family.deviance(theta, held.sums, held.weights).sum() / held.weights.sum())
    )
