"""Checkpoints: the state of a run in one sealed file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from emfed.core.errors import CheckpointError
from emfed.core.storage.disk import DISK, Disk
from emfed.core.storage.sealed import Seal, load_sealed, save_sealed

_MEND = " Put back a backup of it, or begin anew in another folder."
_SEAL = Seal("emfed-checkpoint", "1", "checkpoint", CheckpointError, _MEND)


def save_checkpoint(
    path: str | Path,
    arrays: dict[str, NDArray[Any]],
    description: dict[str, Any],
    disk: Disk = DISK,
) -> None:
    """Write atomically; raise `CheckpointError` if the disk refuses, with the old file intact."""
    advice = "free space or choose another place, then resume."
    save_sealed(path, _SEAL, arrays, description, advice, disk)


def load_checkpoint(
    path: str | Path, disk: Disk = DISK
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read and check; raise `CheckpointError` for anything but a whole emfed checkpoint."""
    return load_sealed(path, _SEAL, disk)
