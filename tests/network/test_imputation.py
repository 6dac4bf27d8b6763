"""Tables whose records stay at sites: one process, a cluster and members come to the same."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.core.errors import FederationError
from emfed.data import WorkerData, as_workers
from emfed.deployment.consent import OfferedRows, OwnerTerms
from emfed.imputation import FieldTable, Structure, from_result, impute, load_table
from emfed.imputation.program import SharedTable, TableProgram
from emfed.imputation.table import Grid, build_table
from emfed.models.site_owner import COLUMNS
from emfed.network.exchange.statements import Agreement
from emfed.network.inprocess import LoopFederation, StackedFederation
from emfed.network.owner_rules import SiteRules
from tests.imputation.tables import small_table
from tests.imputation.test_modes import owned
from tests.network.exchanges import NAMES, Federation

FACTORS = Structure(rank=2, penalty=3.0, effects=False)
MODES: dict[str, dict[str, Any]] = {
    "observed": {"mode": "observed", "structure": Structure(rank=2, penalty=3.0)},
    "factors alone": {"mode": "observed", "structure": FACTORS},
    "chosen": {"mode": "observed", "rank": 2, "smoothing": 0.0},
}
OWNED = Structure(rank=2, penalty=3.0, smoothing=10.0)


def tables_of(table: FieldTable) -> dict[str, np.ndarray]:
    """Each worker's own rows, by the names of members."""
    return dict(zip(NAMES, np.split(table.rows, table.offsets[1:-1]), strict=False))


def frames(table: FieldTable) -> dict[str, pl.DataFrame]:
    """Each worker's own rows, with the names of columns."""
    return {n: pl.DataFrame(rows, schema=list(COLUMNS)) for n, rows in tables_of(table).items()}


def federations(table: FieldTable) -> dict[str, Any]:
    data = WorkerData(table.rows, table.offsets, list(table.workers), COLUMNS)
    return {"loop": LoopFederation(data), "stacked": StackedFederation(data)}


def members(table: FieldTable, observers: int, **more: Any) -> Federation:
    """Sites with a worker's records each, an analyst and a relay."""
    program = TableProgram(SharedTable(table.grid, observers))
    return Federation(len(table.workers), program=program, tables=tables_of(table), **more)


def loaded(federation: Federation, folder: Path) -> list[FieldTable]:
    """What the files of all members hold."""
    for name, end in federation.ends.items():
        (folder / f"{name}.emfed").write_bytes(end.state)
    return [load_table(folder / f"{name}.emfed") for name in federation.ends]


@pytest.mark.parametrize("mode", MODES)
def test_cells_elsewhere_are_fitted_as_here_byte_for_byte(mode: str) -> None:
    """Workers with their own records, in a loop or a stack: same parameters and ledger."""
    table = small_table(workers=7, records=260)
    here = impute(table, seed=3, **MODES[mode])
    everywhere = np.indices(table.shape).reshape(2, -1)
    for name, federation in federations(table).items():
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
    for name, federation in federations(table).items():
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


@pytest.mark.parametrize("family", ["gaussian", "poisson", "log1p"])
def test_members_come_to_the_sums_of_a_simulation(family: str, tmp_path: Path) -> None:
    """Every member has the same file, and what one process fits to it is the simulation's."""
    table = small_table(family, workers=4, records=400)
    federation = members(table, observers=2)
    federation.run()
    assert set(federation.ends) == {*NAMES[:4], "zoe"}
    assert all(end.final for end in federation.ends.values()), federation.ends
    there, *others = loaded(federation, tmp_path)
    assert all(np.array_equal(one.values, there.values) for one in others)
    here = impute(table, masks=True, observers=2, **MODES["observed"])
    assert list(there.sites) == list(table.sites)
    assert there.bins == table.bins
    for name in ("keys", "weights"):
        np.testing.assert_array_equal(getattr(there.pooled, name), getattr(here.cells, name))
    np.testing.assert_allclose(there.pooled.sums, here.cells.sums, rtol=0, atol=1e-9)
    found = impute(there, **MODES["observed"])
    np.testing.assert_allclose(found.params.sites, here.params.sites, rtol=0, atol=1e-6)
    several = np.bincount(table.keys)[table.keys] >= 2
    apart = table.keep(several).pooled
    assert np.array_equal(apart.keys, here.cells.keys)
    assert np.array_equal(apart.weights, here.cells.weights)
    np.testing.assert_allclose(here.cells.sums, apart.sums, rtol=0, atol=1e-9)
    if family == "poisson":  # whole numbers stay whole
        assert np.array_equal(there.pooled.sums, apart.sums)
        assert np.array_equal(here.cells.sums, apart.sums)


def test_no_cell_that_enough_sites_have_seen_ends_a_table_for_all() -> None:
    table = small_table(workers=3, records=60)
    federation = members(table, observers=3)
    federation.run()
    assert not any(end.final for end in federation.ends.values())
    assert {end.words for end in federation.ends.values()} >= {
        "no cell was seen by 3 workers; by 2 at most."
    }


def test_a_member_that_is_killed_goes_on_where_the_others_are(tmp_path: Path) -> None:
    table = small_table(workers=3, records=300)
    federation = members(table, observers=1)
    network = federation.network
    network.at(0.15, lambda: network.kill("bert"))
    network.at(9.0, lambda: network.start("bert"))
    federation.run()
    assert all(end.final for end in federation.ends.values()), federation.ends
    wanted = impute(table, masks=True, **MODES["observed"]).cells
    for found in loaded(federation, tmp_path):
        np.testing.assert_allclose(found.pooled.sums, wanted.sums, rtol=0, atol=1e-9)


def terms(table: FieldTable, rules: SiteRules, **more: Any) -> OwnerTerms:
    rows = OfferedRows(as_workers([frames(table)["bert"]]))
    return OwnerTerms("bert", rules, None, rows, **more)


def asked(document: Mapping[str, Any], masked: bool = True) -> Agreement:
    return Agreement(NAMES[:3], ("zoe",), masked, program=document)


def test_what_owners_accept_of_a_table() -> None:
    """By the document alone, and by its own rows."""
    table = small_table(workers=3, records=300)
    document = SharedTable(table.grid, 3).document()
    own = terms(table, SiteRules())
    program = own.accept(asked(document))
    assert isinstance(program, TableProgram)
    ask = next(program.begin(NAMES[:3], b"", bytes(32)))
    assert ask.words() == "the number of records and the sum of their values"
    assert ask.part(own.rows)[0] == pytest.approx(frames(table)["bert"]["weight"].sum())
    assert terms(table, SiteRules(models=["cells"])).accept(asked(document)) is not None
    fewer = SharedTable(table.grid, 2).document()
    smaller = SharedTable(replace(table.grid, sites=table.grid.sites[:5]), 3).document()
    for settings, rules, words in (
        (asked(fewer), SiteRules(), "at least 3 sites have seen, not 2: ask with observers = 3"),
        (asked(document, False), SiteRules(), "masked sums alone"),
        (asked(document), SiteRules(models=["k-means"]), "allows the models k-means; not 'cells'"),
        (asked(document), SiteRules(largest_epsilon=1.0), "sums of cells are not private"),
        (asked(document), SiteRules(smallest_rows=1000), "answers for more rows"),
        (asked(document), SiteRules(largest_model=100), "largest_model"),
        (asked(smaller), SiteRules(), "sites must lie below 5"),
        (asked({**document, "observers": 0}), SiteRules(), "observers must be"),
        (asked({**document, "columns": ["site"]}), SiteRules(), "contradict themselves"),
        (asked({**document, "grid": {**document["grid"], "family": "x"}}), SiteRules(), "family"),
        (asked({**document, "more": 1}), SiteRules(), "unknown key 'more'"),
    ):
        with pytest.raises(emfed.EmfedError, match=words):
            terms(table, rules).accept(settings)


def test_a_person_is_asked_about_a_table_in_words() -> None:
    table = small_table(workers=3, records=300)
    seen: list[Any] = []
    own = terms(table, SiteRules(), approve=lambda about: seen.append(about))
    assert own.accept(asked(SharedTable(table.grid, 3).document())) is None
    assert seen[0]["model"] == {"kind": "cells", "sites": 12, "times": 30}
    assert seen[0]["masks"] is True
    no = terms(table, SiteRules(), approve=lambda about: False)
    with pytest.raises(FederationError, match="does not take part"):
        no.accept(asked(SharedTable(table.grid, 3).document()))


def test_a_file_of_a_table_is_whole_or_refused(tmp_path: Path) -> None:
    table = small_table()
    program = TableProgram(SharedTable(table.grid))
    state = program.state(table.pooled)
    assert program.state(None) == b""
    path = tmp_path / "model.emfed"
    path.write_bytes(state[:-1])
    with pytest.raises(emfed.ModelFileError, match="damaged, cut short"):
        load_table(path)
    path.write_bytes(bytes([*state[:-1], state[-1] ^ 1]))
    with pytest.raises(emfed.ModelFileError, match="digest"):
        load_table(path)


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


def test_what_a_federation_of_cells_needs_is_said() -> None:
    table = small_table()
    loop = federations(table)["loop"]
    for given, options, words in (
        (loop, {}, "a federation needs one"),
        (table, {"grid": table.grid}, "a grid goes with a federation"),
        (loop, {"grid": table.grid, "mode": "paper"}, "needs the table in this process"),
        (loop, {"grid": table.grid, "round": 3}, "did you mean 'rounds'"),
    ):
        with pytest.raises(emfed.SettingsError, match=words):
            impute(given, **options)
