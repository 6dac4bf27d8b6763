"""Replace a file as a whole: write beside it, flush to disk, rename."""

from __future__ import annotations

from pathlib import Path

from fedem.storage.disk import DISK, Disk


def write_atomic(path: Path, data: bytes, disk: Disk = DISK) -> None:
    """Write ``data`` to ``path`` so that a reader, or a crash, sees the old file or the new one.

    Raises OSError (a full disk, say) with the old file untouched and nothing left beside it.
    """
    temporary = disk.create(path, data)
    try:
        disk.sync(temporary)
        disk.replace(temporary, path)
    except BaseException:
        disk.remove(temporary)
        raise
    disk.sync_directory(path.parent)
