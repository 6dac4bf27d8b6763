"""One worker's rows, in the columns that a run asks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from emfed.core.errors import DataError
from emfed.core.wire import Reason
from emfed.data import ParquetRows, Stream, WorkerData, Workers, WorkerTables, as_workers
from emfed.data.placing import to_device
from emfed.network.rules import Refusal


def read_site(
    data: Any, columns: Sequence[str] | None = None, device: Any | None = None
) -> Workers:
    """A table, frame, path, source or stream as the rows of one worker, on a device if asked."""
    return to_device(_read_site(data, columns), device)


def _read_site(data: Any, columns: Sequence[str] | None) -> Workers:
    if isinstance(data, Workers):
        workers = data
    else:
        workers = as_workers({"site": data})
    if workers.size != 1:
        raise DataError(f"a site is one worker; these are the data of {workers.size}.")
    if columns is None:
        return workers
    try:
        return arrange(workers, tuple(columns))
    except Refusal as refusal:
        raise DataError(f"columns={list(columns)}: {refusal.text}") from None


def arrange(workers: Workers, columns: tuple[str, ...] | None) -> Workers:
    """The same worker with these columns, in this order; others it may have are left out."""
    have = workers.columns
    if columns is None or have == columns:
        return workers
    if have is None:
        raise Refusal(
            Reason.REFUSED, f"the run names its columns {list(columns)}; these data name none."
        )
    missing = [name for name in columns if name not in have]
    if missing:
        raise Refusal(Reason.REFUSED, f"expected the columns {list(columns)}; missing {missing}.")
    table = workers.worker(0)
    if isinstance(table, ParquetRows):
        return WorkerTables([table.with_columns(columns)], workers.names, columns)
    if isinstance(workers, WorkerData):
        picked = table[:, [have.index(name) for name in columns]]
        return WorkerData(picked, workers.offsets, workers.names, columns)
    if (
        isinstance(workers, WorkerTables)
        and isinstance(workers.tables[0], Stream)
        and set(have) == set(columns)  # rows are put in order as they are drawn
    ):
        return WorkerTables(workers.tables, workers.names, columns)
    raise Refusal(Reason.REFUSED, f"the columns {list(columns)} cannot be picked from these data.")
