"""One worker's rows, in the columns that a run asks for."""

from __future__ import annotations

from typing import Any

from emfed.core.errors import DataError
from emfed.core.protocols import Names
from emfed.core.wire import Reason
from emfed.data import Workers, as_workers, with_columns
from emfed.data.placing import to_device
from emfed.network.rules import Refusal


def read_site(data: Any, columns: Names = None, device: Any | None = None) -> Workers:
    """A table, frame, path, source or stream as the rows of one worker, on a device if asked."""
    return to_device(_read_site(data, columns), device)


def _read_site(data: Any, columns: Names) -> Workers:
    if isinstance(data, Workers):
        workers = data
    else:
        workers = as_workers({"site": data})
    if workers.size != 1:
        raise DataError(f"a site is one worker; these are the data of {workers.size}.")
    if columns is None:
        return workers
    return with_columns(workers, tuple(columns))


def arrange(workers: Workers, columns: tuple[str, ...] | None) -> Workers:
    """The same worker with these columns, in this order; others it may have are left out."""
    try:
        return workers if columns is None else with_columns(workers, columns)
    except DataError as error:
        raise Refusal(Reason.REFUSED, str(error)) from None
