"""Tables whose records stay at sites: loop, stacked, network and processes come to the same."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.core.protocols import Federation
from emfed.core.storage import ScratchDisk
from emfed.data import WorkerData
from emfed.imputation import FieldTable, Structure, from_result, impute
from emfed.imputation.table import Grid, build_table
from emfed.models.site_owner import COLUMNS
from emfed.network import LocalTransport, RemoteFederation, Site
from emfed.network.inprocess import LoopFederation, StackedFederation
from tests.helpers import OPEN
from tests.imputation.tables import small_table
from tests.imputation.test_modes import owned
from tests.network.masked import masked_sites
from tests.network.processes import real_sites

FACTORS = Structure(rank=2, penalty=3.0, effects=False)
MODES: dict[str, dict[str, Any]] = {
    "observed": {"mode": "observed", "structure": Structure(rank=2, penalty=3.0)},
    "cell": {"mode": "cell", "structure": FACTORS},
    "chosen": {"mode": "cell", "rank": 2},
}
OWNED = Structure(rank=2, penalty=3.0, smoothing=10.0)


def frames(table: FieldTable) -> dict[str, pl.DataFrame]:
    """Each worker's own rows."""
    cells = table.rows
    parts = zip(table.workers, table.offsets[:-1], table.offsets[1:], strict=True)
    return {key: pl.DataFrame(cells[a:b], schema=list(COLUMNS)) for key, a, b in parts}


def sites_of(table: FieldTable, folder: Path, **rules: Any) -> dict[str, Site]:
    return {
        key: Site(rows, folder / key, **{"rules": OPEN, **rules})
        for key, rows in frames(table).items()
    }


def federations(table: FieldTable, folder: Path) -> dict[str, Federation]:
    data = WorkerData(table.rows, table.offsets, list(table.workers), COLUMNS)
    return {
        "loop": LoopFederation(data),
        "stacked": StackedFederation(data),
        "network": RemoteFederation(LocalTransport(sites_of(table, folder)), columns=COLUMNS),
    }


@pytest.mark.parametrize("mode", MODES)
def test_cells_elsewhere_are_fitted_as_here_byte_for_byte(mode: str, tmp_path: Path) -> None:
    """Sites with their own records, a loop and a stack: same parameters and ledger."""
    table = small_table(workers=7, records=260)
    here = impute(table, seed=3, **MODES[mode])
    everywhere = np.indices(table.shape).reshape(2, -1)
    for name, federation in federations(table, tmp_path).items():
        there = impute(federation, grid=table.grid, seed=3, **MODES[mode])
        found, wanted = there.params.theta(*everywhere), here.params.theta(*everywhere)
        np.testing.assert_array_equal(found, wanted, err_msg=name)
        assert there.ledger.summary() == here.ledger.summary(), name
        assert there.records.column("bytes_up").tolist() == here.records.column("bytes_up").tolist()
        assert list(there.table.workers) == list(table.workers)
        assert np.array_equal(there.cells.keys, here.cells.keys)


def test_site_owners_elsewhere_come_to_the_same_table(tmp_path: Path) -> None:
    """The server knows no cell; each owner carries the fit to its own sites."""
    table = owned(small_table())
    options: dict[str, Any] = {"mode": "site-owner", "structure": OWNED, "rounds": 25, "seed": 3}
    here = impute(table, **options)
    everywhere = np.indices(table.shape).reshape(2, -1)
    for name, federation in federations(table, tmp_path).items():
        there = impute(federation, grid=table.grid, **options)
        assert there.cells.size == 0, name
        assert there.ledger.summary() == here.ledger.summary()
        with pytest.raises(emfed.DataError, match="an owner's table"):
            there.intervals(0, 0)
        assert there.result is not None
        there.result.save(tmp_path / f"{name}.emfed")
        told = emfed.load(tmp_path / f"{name}.emfed")
        for worker in range(len(table.workers)):
            owns = np.repeat(np.arange(len(table.workers)), np.diff(table.offsets)) == worker
            mine = table.keep(owns)
            sites = np.unique(mine.site)
            cells = sites.repeat(table.shape[1]), np.tile(np.arange(table.shape[1]), len(sites))
            wanted = here.params.theta(*cells)
            for own in (there.transform(mine), from_result(told, mine)):
                np.testing.assert_allclose(own.params.theta(*cells), wanted, rtol=1e-6, atol=1e-6)
            assert np.all(own.intervals(*cells)[0] < own.intervals(*cells)[1])
        # Sites that nobody told of have the mean of all, the same at every server.
        assert np.ptp(there.params.dense(np.arange(table.shape[0])), axis=0).max() < 1e-9
    assert np.ptp(here.params.theta(*everywhere)) > 1


class Once(LocalTransport):
    """Sites that are there for one exchange, some of them not even for that."""

    exchanges = 0

    def __init__(self, sites: dict[str, Site], absent: tuple[str, ...] = ()) -> None:
        super().__init__(sites)
        self.absent = absent

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        self.exchanges += 1
        here = {k: m for k, m in messages.items() if k not in self.absent and self.exchanges == 1}
        return super().deliver(here, deadline)


def test_a_worker_that_is_away_is_not_in_the_fit_and_one_that_answered_may_leave(
    tmp_path: Path,
) -> None:
    table = small_table(workers=4, records=260)
    staying = table.keep(np.repeat(np.arange(4), np.diff(table.offsets)) < 3)
    sites = sites_of(table, tmp_path)
    transport = Once(sites, absent=(table.workers[3],))
    network = RemoteFederation(transport, columns=COLUMNS, minimum=3, attempts=1, pause=0.0)
    there = impute(network, grid=table.grid, **MODES["observed"])
    alone = impute(staying, **MODES["observed"])
    assert transport.exchanges == 1
    assert list(there.table.workers) == list(staying.workers)
    assert np.array_equal(there.params.sites, alone.params.sites)
    assert there.ledger.summary() == alone.ledger.summary()
    network = RemoteFederation(Once(sites, absent=tuple(sites)), columns=COLUMNS, attempts=1)
    with pytest.raises(emfed.ParticipationError):
        impute(network, grid=table.grid, **MODES["observed"])


def test_a_server_that_was_killed_has_what_its_sites_sent(tmp_path: Path) -> None:
    """It asks nobody again, and the fit is the same."""
    table = small_table(workers=4, records=260)
    transport = Once(sites_of(table, tmp_path / "sites"))

    def imputed(**more: Any) -> Any:
        network = RemoteFederation(transport, tmp_path / "server", columns=COLUMNS)
        return impute(network, grid=table.grid, **MODES["chosen"], **more)

    def killed(what: str, share: float) -> None:
        raise Killed

    with pytest.raises(Killed):
        imputed(progress=killed)
    there, here = imputed(), impute(table, **MODES["chosen"])
    assert transport.exchanges == 1
    assert np.array_equal(there.params.sites, here.params.sites)
    assert there.ledger.summary() == here.ledger.summary()


class Killed(Exception):
    """The server's process is gone."""


def killed_at(round_: int) -> Any:
    def look(record: emfed.fitting.RoundRecord) -> None:
        if record.round == round_:
            raise Killed

    return look


def test_tables_in_real_processes_go_on_through_kills_of_the_server(tmp_path: Path) -> None:
    """Over TLS: with rounds from a checkpoint, without from what the sites sent."""
    table = owned(small_table(workers=3, records=200))
    everywhere = np.indices(table.shape).reshape(2, -1)
    owned_mode = {"mode": "site-owner", "structure": OWNED, "rounds": 8}
    modes = {"observed": MODES["observed"], "chosen": MODES["chosen"], "owned": owned_mode}
    with real_sites(frames(table), tmp_path) as transport:
        for name, options in modes.items():
            here = impute(table, seed=3, **options)
            checkpoint = {"checkpoint": tmp_path / f"{name}.checkpoint"} if name == "owned" else {}
            for round_ in (1, 6, None) if name == "owned" else (1, None):
                server = RemoteFederation(transport, tmp_path / name, columns=COLUMNS, masks=False)
                again = {"grid": table.grid, "seed": 3, **checkpoint, **options}
                again |= {"resume": round_ != 1} if name == "owned" else {}
                if round_ is None:
                    there = impute(server, **again)
                else:
                    with pytest.raises(Killed):
                        impute(server, callbacks=killed_at(round_), **again)
            if name == "owned":
                there = there.transform(table)
            found, wanted = there.params.theta(*everywhere), here.params.theta(*everywhere)
            np.testing.assert_allclose(found, wanted, rtol=1e-6, atol=1e-6, err_msg=name)
            assert there.rounds == here.rounds
            assert there.params.rank == here.params.rank


def test_an_owner_s_rule_on_small_groups_holds_for_cells(tmp_path: Path) -> None:
    table = small_table(workers=3, records=200)
    rules = emfed.network.SiteRules.loosest(smallest_group=3)
    sites = sites_of(table, tmp_path, rules=rules)
    federation = RemoteFederation(LocalTransport(sites), columns=COLUMNS, attempts=1)
    with pytest.raises(emfed.ParticipationError, match="no cell with as few records"):
        impute(federation, grid=table.grid)


def test_a_grid_makes_rows_of_a_site_s_own_records() -> None:
    """Whatever sites and months its own file has."""
    table = small_table(workers=2, records=120)
    grid, every = table.grid, table.rows
    for worker in range(2):
        part = slice(table.offsets[worker], table.offsets[worker + 1])
        names = sorted({table.sites[j] for j in table.site[part]}, reverse=True)
        first = int(table.time[part].min())
        bins = replace(table.bins, first=table.bins.first + first, count=grid.bins.count - first)
        own = build_table(
            Grid(names, bins, table.family),
            ["me"],
            np.zeros(part.stop - part.start, dtype=np.int64),
            np.array([names.index(table.sites[j]) for j in table.site[part]]),
            table.time[part] - first,
            table.weights[part],
            table.values[part],
            table.intake,
        )
        assert np.array_equal(grid.rows(own), every[part])
        with pytest.raises(emfed.DataError, match="lies outside the grid"):
            replace(grid, sites=grid.sites[:2]).rows(own)
    with pytest.raises(emfed.DataError, match="expected one worker's table"):
        grid.rows(table)


def test_what_a_federation_of_cells_needs_is_said(tmp_path: Path) -> None:
    table = small_table()
    loop = federations(table, tmp_path)["loop"]
    for given, options, words in (
        (loop, {}, "a federation needs one"),
        (table, {"grid": table.grid}, "a grid goes with a federation"),
        (loop, {"grid": table.grid, "mode": "paper"}, "needs the table in this process"),
        (loop, {"grid": table.grid, "round": 3}, "did you mean 'rounds'"),
    ):
        with pytest.raises(emfed.SettingsError, match=words):
            impute(given, **options)


@pytest.mark.parametrize("mode", ["observed", "cell"])
def test_masked_sums_of_cells_come_to_the_pooled_fit_everywhere(mode: str, tmp_path: Path) -> None:
    """A table here, sites of one process: one fit and one ledger; cells of few observers go."""
    table = small_table(workers=5, records=400)
    given = {**MODES[mode], "masks": True, "observers": 2, "seed": 3}
    here = impute(table, **given)
    sites = masked_sites(frames(table), tmp_path, disk=ScratchDisk())
    network = RemoteFederation(LocalTransport(sites), columns=COLUMNS)
    there = impute(network, grid=table.grid, **given)
    everywhere = np.indices(table.shape).reshape(2, -1)
    wanted = here.params.theta(*everywhere)
    np.testing.assert_allclose(there.params.theta(*everywhere), wanted, rtol=1e-9, atol=1e-9)
    np.testing.assert_array_equal(there.ledger.counts, here.ledger.counts)
    keys = table.site * table.shape[1] + table.time
    several = np.bincount(keys)[keys] >= 2
    apart = impute(table.keep(several), **MODES[mode], seed=3)
    np.testing.assert_allclose(apart.params.theta(*everywhere), wanted, rtol=1e-6, atol=1e-6)


def test_real_processes_mask_cells_and_refuse_those_of_few_observers(tmp_path: Path) -> None:
    """By default between machines, and under the default rules: three observers a cell."""
    table = small_table(workers=4, records=900)
    settings: dict[str, Any] = {"structure": Structure(rank=1, penalty=3.0)}
    with real_sites(frames(table), tmp_path, masked=True) as transport:
        network = RemoteFederation(transport, columns=COLUMNS, attempts=2)
        with pytest.raises(emfed.ParticipationError, match="observers=3"):
            impute(network, grid=table.grid, **settings)
        network = RemoteFederation(transport, columns=COLUMNS, attempts=2)
        there = impute(network, grid=table.grid, observers=3, **settings)
    here = impute(table, masks=True, observers=3, **settings)
    np.testing.assert_allclose(there.cells.sums, here.cells.sums, rtol=1e-12)
    np.testing.assert_array_equal(there.ledger.counts, here.ledger.counts)
