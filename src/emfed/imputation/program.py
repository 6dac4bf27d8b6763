"""A table that members fill together: from one document of settings to the sums of its cells.

Members agree on the sums. What is fitted to them is no part of what they sign: each may fit them
again as it likes (`emfed.impute`).
"""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, final

from emfed.core.configuration import check_keys
from emfed.core.errors import ModelFileError, SettingsError, check_count
from emfed.core.storage import Seal, load_sealed, save_sealed
from emfed.core.sums import Fit
from emfed.fitting.program import Told
from emfed.imputation.bins import Bins, check_unit
from emfed.imputation.cells import MOST_CELLS, pooled_cells
from emfed.imputation.families import as_family
from emfed.imputation.lowrank import Cells
from emfed.imputation.sums import table_of_sums
from emfed.imputation.table import FieldTable, Grid
from emfed.models.site_owner import COLUMNS
from emfed.network.exchange.followed import EVERYONE, Comings

KIND = "cells"
"""What documents and rules of owners call a table that is filled together."""
PLACE = "the settings"
SEAL = Seal("emfed-table", "1", "table", ModelFileError)


@final
@dataclass(frozen=True, eq=False)
class SharedTable:
    """What members are asked to fill: the grid, and how many must have seen a cell."""

    grid: Grid
    """Sites, time bins and family."""
    observers: int = 1
    """Cells that fewer sites have seen do not count."""

    def document(self) -> dict[str, Any]:
        """The document that all members sign; `read` is the inverse."""
        (sites, times), grid = self.grid.shape, self.grid
        return {
            "model": {"kind": KIND, "sites": sites, "times": times},
            "grid": {
                "sites": list(grid.sites),
                "unit": grid.bins.unit,
                "first": grid.bins.first,
                "family": grid.family.name,
            },
            "observers": self.observers,
            "columns": list(COLUMNS),
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """The table of a document; raises `SettingsError` for anything that none could be."""
        check_keys(document, ("model", "grid", "observers", "columns"), PLACE)
        model, about = document["model"], document.get("grid")
        if not isinstance(about, Mapping):
            raise SettingsError(f"{PLACE} of a table need a grid.")
        names, first = about.get("sites"), about.get("first")
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            raise SettingsError(f"{PLACE}: sites of the grid must be a list of names.")
        if type(first) is not int:
            raise SettingsError(f"{PLACE}: the first time of the grid must be a number.")
        check_unit(str(about.get("unit")))
        bins = Bins(about["unit"], first, check_count("times", model.get("times")))
        grid = Grid(tuple(names), bins, as_family(str(about.get("family"))))
        found = cls(grid, check_count("observers", document.get("observers", 0)))
        if found.document() != document or len({*names}) != len(names):
            raise SettingsError(f"{PLACE} contradict themselves: {PLACE} of a table are others.")
        if len(names) * bins.count > MOST_CELLS:
            raise SettingsError(f"{PLACE} are of more than {MOST_CELLS:,} cells.")
        return found


def asks_for_table(document: Mapping[str, Any] | None) -> bool:
    """Whether a document of settings is about a table of places and times."""
    model = (document or {}).get("model")
    return isinstance(model, Mapping) and model.get("kind") == KIND


@final
class TableProgram:
    """The program of a table: the same at every member (`emfed.network.exchange.followed`).

    Parameters
    ----------
    shared : SharedTable
        What the document says.
    told : callable
        Called with each ask and its sum.
    """

    def __init__(self, shared: SharedTable, told: Told = lambda ask, answer: None) -> None:
        self._shared, self._told = shared, told

    def begin(
        self, sites: tuple[str, ...], state: bytes, place: bytes, comings: Comings = EVERYONE
    ) -> Fit[Cells]:
        """The sums over these sites; those of an epoch before are not gone on from."""
        shared = self._shared
        fit = pooled_cells(shared.grid.shape, len(sites), shared.observers)
        ask = next(fit)
        try:
            while True:
                answer = yield ask
                self._told(ask, answer)
                ask = fit.send(answer)
        except StopIteration as end:
            found: Cells = end.value
            return found

    def extend(self, rounds: int | None) -> None:
        """A table has no rounds."""

    def state(self, reached: Cells | None) -> bytes:
        """The file of the table; empty if nothing was reached."""
        if reached is None:
            return b""
        with tempfile.TemporaryDirectory(prefix="emfed-") as folder:
            path = Path(folder) / "table.emfed"
            save_table(path, self._shared, reached)
            return path.read_bytes()

    def digest(self, reached: Cells) -> bytes:
        """Of the cells with their weights and sums."""
        found = hashlib.sha256(reached.keys.astype("<i8").tobytes())
        found.update(reached.weights.tobytes() + reached.sums.tobytes())
        return found.digest()


def save_table(path: str | Path, shared: SharedTable, cells: Cells) -> None:
    """Write the sums of a table's cells, as every member has them at the end."""
    arrays = {"keys": cells.keys, "weights": cells.weights, "sums": cells.sums}
    save_sealed(path, SEAL, arrays, shared.document(), "free space or choose another place.")


def load_table(path: str | Path) -> FieldTable:
    """Read the sums of cells that sites have added up, for `emfed.impute`.

    Parameters
    ----------
    path : str or Path
        The file that a member wrote at the end.

    Returns
    -------
    FieldTable
        The cells of all sites together, as those of one worker.

    Raises
    ------
    ModelFileError
        If the file is damaged, or none of a table.

    Examples
    --------
    >>> import tempfile
    >>> from emfed.imputation import load_table, simulate_table
    >>> from emfed.imputation.program import SharedTable, save_table
    >>> table = simulate_table(600, observers=40, sites=12, months=24, groups=4, seed=0)
    >>> path = tempfile.mkdtemp() + "/table.emfed"
    >>> save_table(path, SharedTable(table.grid), table.pooled)
    >>> load_table(path).shape
    (12, 24)
    """
    arrays, about = load_sealed(path, SEAL)
    shared = SharedTable.read(about)
    (_, times), keys = shared.grid.shape, arrays["keys"]
    cells = (keys // times, keys % times, arrays["weights"], arrays["sums"])
    return table_of_sums(shared.grid, Cells(*cells, shared.grid.shape))
