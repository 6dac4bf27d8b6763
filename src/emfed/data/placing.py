"""Workers' rows on a device: tensors where they fit the card, else sources that stream to it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np

from emfed.core.errors import SettingsError, check_choice
from emfed.core.protocols import IntArray
from emfed.core.wording import Setting, Wording
from emfed.data.sources import Source
from emfed.models.devices import PassPrecision
from emfed.models.devices.placing import check_device, expect, place, stream


@final
class Streamed(Source):
    """A table that is too large for the card: its blocks come as tensors, the next one in time."""

    def __init__(self, table: Any, device: Any) -> None:
        self._table, self._device = table, device
        self.columns = getattr(table, "columns", None)
        self.dtype = np.dtype(np.float32 if _size(table) == 4 else np.float64)

    @property
    def shape(self) -> tuple[int, int]:
        return int(self._table.shape[0]), int(self._table.shape[1])

    def read(self, start: int, stop: int) -> Any:
        """Rows on the host: numpy, or a tensor if the table is one."""
        if isinstance(self._table, Source):
            return self._table.read(start, stop)
        return self._table[start:stop]

    def expect(self, start: int, stop: int) -> None:
        """Rows that will be read soon."""
        if not isinstance(self._table, Source):
            expect(self._table, start, stop)

    def blocks(self) -> Iterator[Any]:
        rows, width = self.shape
        return stream(self.read, rows, width, _size(self), self._device, self.expect)

    def take(self, indices: IntArray) -> Any:
        rows = super().take(indices) if isinstance(self._table, Source) else self._table[indices]
        return place(rows, self._device)


def check_precision(device: Any, precision: PassPrecision) -> Any:
    """The torch device, None without one: what can be said before a row is read."""
    check_choice("precision", precision, ("double", "fast"))
    if device is not None:
        return check_device(device)
    if precision != "double":
        fast, cuda = Setting("precision", "fast"), Setting("device", "cuda")
        raise SettingsError(Wording("{} goes with a device: give {} as well.", fast, cuda))
    return None


def n_bytes(table: Any) -> int:
    """Bytes of a table's numbers."""
    return int(np.prod(table.shape)) * _size(table)


def _size(table: Any) -> int:
    return 4 if str(table.dtype).endswith("float32") else 8
