"""Who is in a run: the server's side of the opening, kept on disk."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass, field
from itertools import pairwise
from math import prod
from pathlib import Path
from typing import Any, final

import numpy as np

from emfed.core.errors import WireError
from emfed.core.protocols import FloatArray, HasSupports, IntArray, Opening, Supports
from emfed.core.storage import DISK, Disk, load_checkpoint, save_checkpoint
from emfed.core.wire import Join, decode_cells
from emfed.models.binding import Shapes, unflatten


@final
@dataclass(eq=False)
class Members:
    """Workers by number, and what each said of itself; ``retired`` instances were replaced.

    It is written before anyone is told its number, and again when an instance changes.
    """

    run: int
    keys: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    """The hello that each answered."""
    instances: list[int] = field(default_factory=list)
    retired: dict[str, list[int]] = field(default_factory=dict)
    counts: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    values: FloatArray = field(default_factory=lambda: np.empty((0, 0)))
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    columns: tuple[str, ...] | None = None
    traffic: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The opening in the ledger's form."""
    description: Any = None
    """The model's."""
    totals: FloatArray | None = None
    """What each worker counts for, where rows have weights."""
    phase: int = 0
    """The last phase that anyone may have been told of."""
    cells: list[bytes] = field(default_factory=list)
    """The statistics that each has, where workers have their own."""

    @property
    def opening(self) -> Opening:
        """Counts and summaries, as an `Opening`; `supports` has the rest."""
        parts = [unflatten(values, self.shapes) for values in self.values]
        summaries = {name: np.stack([part[name] for part in parts]) for name in self.shapes}
        return Opening(self.counts, summaries, self.columns, self.keys, self.totals)

    def supports(self, model: Any) -> Supports | None:
        """Which statistics each has, where workers have their own."""
        if not isinstance(model, HasSupports):
            return None
        return Supports.of([decode_cells(own, model.cells) for own in self.cells])

    def save(self, path: Path, disk: Disk = DISK) -> None:
        """Write, atomically."""
        about = {
            "run": f"{self.run:016x}",
            "keys": self.keys,
            "settings": self.settings,
            "instances": [f"{i:016x}" for i in self.instances],
            "retired": {k: [f"{i:016x}" for i in v] for k, v in self.retired.items()},
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "columns": None if self.columns is None else list(self.columns),
            "description": self.description,
            "phase": self.phase,
        }
        arrays = {"counts": self.counts, "values": self.values, "traffic": self.traffic}
        if self.totals is not None:
            arrays["totals"] = self.totals
        if self.cells:
            arrays["cells"] = np.frombuffer(b"".join(self.cells), dtype=np.uint8)
            about["cells"] = [len(own) for own in self.cells]
        save_checkpoint(path, arrays, about, disk)

    @classmethod
    def load(cls, path: Path, disk: Disk = DISK) -> Members:
        """Read what `save` wrote."""
        arrays, about = load_checkpoint(path, disk)
        ends = np.cumsum([0, *about.get("cells", [])]).tolist()
        whole = arrays["cells"].tobytes() if "cells" in arrays else b""
        return cls(
            int(about["run"], 16),
            about["keys"],
            about["settings"],
            [int(i, 16) for i in about["instances"]],
            {k: [int(i, 16) for i in v] for k, v in about["retired"].items()},
            arrays["counts"],
            arrays["values"],
            {name: tuple(shape) for name, shape in about["shapes"].items()},
            None if about["columns"] is None else tuple(about["columns"]),
            arrays["traffic"],
            about["description"],
            arrays.get("totals"),
            about["phase"],
            [whole[start:stop] for start, stop in pairwise(ends)],
        )


def new_run() -> int:
    """64 bits that no run had before."""
    return int.from_bytes(os.urandom(8), "little")


def shapes_of(join: Join) -> Shapes | None:
    """What a worker says of the shapes of its summary, None if that makes no sense."""
    shapes = join.about.get("shapes")
    if not isinstance(shapes, dict):
        return None
    try:
        read = {str(name): tuple(int(n) for n in shape) for name, shape in shapes.items()}
        expected = sum(prod(shape) for shape in read.values()) + weighted(join)
        good = expected == len(join.values)
    except (TypeError, ValueError):
        return None
    return read if good and all(n >= 0 for shape in read.values() for n in shape) else None


def weighted(join: Join) -> bool:
    """Whether the last of a worker's numbers is the sum of its rows' weights."""
    return join.about.get("weighted") is True


def fits(join: Join, model: Any) -> bool:
    """Whether a worker has as many statistics of its own as rows, where the model wants that."""
    if not isinstance(model, HasSupports):
        return not join.cells
    try:
        return len(decode_cells(join.cells, model.cells)[0]) == join.count
    except WireError:
        return False


def columns_of(join: Join) -> tuple[str, ...] | None:
    """The names of a worker's columns."""
    columns = join.about.get("columns")
    return tuple(map(str, columns)) if isinstance(columns, list) else None


def most_common(values: list[Any]) -> Any:
    """The value that most have; of several the first."""
    return Counter(values).most_common(1)[0][0]
