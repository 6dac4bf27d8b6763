"""Replace a file as a whole: write beside it, flush to disk, rename."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable
from pathlib import Path

from emfed.core.storage.disk import DISK, Disk


def write_atomic(path: Path, data: bytes, disk: Disk = DISK) -> None:
    """Write ``data`` to ``path`` so that a reader, or a crash, sees the old file or the new one.

    Raises OSError (a full disk, say) with the old file untouched and nothing left beside it. A
    device or folder is never replaced.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    temporary = disk.create(path, data)
    try:
        disk.sync(temporary)
        disk.replace(temporary, path)
    except BaseException:
        disk.remove(temporary)
        raise
    disk.sync_directory(path.parent)


def remove_torn(folder: Path, names: Iterable[str], disk: Disk = DISK) -> None:
    """Remove what a killed process was writing beside these files; the caller alone writes them."""
    torn = re.compile(rf"\.({'|'.join(map(re.escape, names))})\..*\.tmp")
    for path in disk.entries(folder):
        if torn.fullmatch(path.name):
            disk.remove(path)
