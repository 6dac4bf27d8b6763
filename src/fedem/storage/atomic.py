"""Replace a file as a whole: write beside it, flush to disk, rename."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path


def write_atomic(path: Path, data: bytes) -> None:
    """Write ``data`` to ``path`` so that a reader, or a crash, sees the old file or the new one.

    Raises OSError (a full disk, say) with the old file untouched and nothing left beside it. A
    device or folder is never replaced.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "not a regular file", str(path))
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(handle, 0o666 & ~_umask())
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
    _sync_directory(path.parent)


def _umask() -> int:
    """The process's umask, which the system only tells by changing it."""
    current = os.umask(0o077)
    os.umask(current)
    return current


def _sync_directory(directory: Path) -> None:
    """Make the rename itself durable, where the system lets one open a directory."""
    with contextlib.suppress(OSError):
        handle = os.open(directory, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
