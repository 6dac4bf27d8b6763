"""The few calls through which everything durable goes.

They are an object, so that a test can stand in for the disk: stop between any two calls, and lose
or tear what was not synced.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import re
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, final


class Disk:
    """The machine's own disk."""

    def read(self, path: Path) -> bytes | None:
        """A file's content, None if there is none."""
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return None

    def first(self, path: Path, count: int) -> bytes:
        """The first bytes of a file, before all of it is read."""
        with path.open("rb") as file:
            return file.read(count)

    def create(self, path: Path, data: bytes) -> Path:
        """A new file beside ``path`` with this content, not yet safe from a crash; its name."""
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
        try:
            with os.fdopen(handle, "wb") as file:
                if hasattr(os, "fchmod"):  # Windows has other rights, which the folder hands down
                    os.fchmod(handle, 0o666 & ~_umask())
                file.write(data)
        except BaseException as error:
            self.remove(Path(name))
            if isinstance(error, OSError) and error.filename is None:
                error.filename = str(path)  # a full disk does not say what had no room
            raise
        return Path(name)

    def sync(self, path: Path) -> None:
        """Bring a file's content to the platters."""
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

    def replace(self, old: Path, new: Path) -> None:
        """Rename, over what has the new name."""
        old.replace(new)

    def sync_directory(self, directory: Path) -> None:
        """Make renames durable, where the system lets one open and sync a directory."""
        with _where_possible():
            self.sync(directory)

    def settle(self, path: Path) -> None:
        """Make what was read of a file safe before anyone is told what follows from it.

        Its writer may have been killed between the rename and the sync of the directory.
        """
        with _where_possible():
            self.sync(path)
        self.sync_directory(path.parent)

    def remove(self, path: Path) -> None:
        """Delete a file, if it is there."""
        with contextlib.suppress(OSError):
            path.unlink()

    def entries(self, directory: Path) -> list[Path]:
        """What a directory holds, changed last first; nothing if there is none."""
        try:
            with os.scandir(directory) as found:
                changed = {Path(entry.path): entry.stat().st_mtime_ns for entry in found}
        except FileNotFoundError:
            return []
        return sorted(changed, key=lambda path: (-changed[path], path))

    def make_directory(self, directory: Path) -> None:
        """A directory and those above it, durable; new ones are their owner's alone."""
        missing = []
        while not directory.is_dir():
            missing.append(directory)
            directory = directory.parent
        for new in reversed(missing):
            new.mkdir(mode=0o700, exist_ok=True)
            self.sync_directory(new.parent)

    @contextlib.contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        """One process at a time, by an advisory lock that dies with its holder."""
        try:
            import fcntl
        except ImportError:  # a system without them: there one must start each worker once
            yield
            return
        with path.open("ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


@final
class ScratchDisk(Disk):
    """A disk for folders that are thrown away: nothing in them must outlive a crash, so nothing
    syncs."""

    def sync(self, path: Path) -> None:
        """Leave it to the system."""


DISK = Disk()
_IMPOSSIBLE = {
    getattr(errno, name)
    for name in ("EINVAL", "ENOTSUP", "EOPNOTSUPP", "ENOSYS", "EACCES", "EPERM", "EROFS", "EISDIR")
}


@contextlib.contextmanager
def _where_possible() -> Iterator[None]:
    """Pass over what a system cannot do; a sync that failed (EIO, a full disk) is an error."""
    try:
        yield
    except OSError as error:
        if error.errno not in _IMPOSSIBLE:
            raise


def _umask() -> int:
    """The process's umask, which the system only tells by changing it."""
    current = os.umask(0o077)
    os.umask(current)
    return current


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


def read_json_file(path: Path) -> Any:
    """What a file of JSON holds; ValueError for anything else, however it is damaged."""
    try:
        return json.loads(path.read_bytes())
    except RecursionError:
        raise ValueError(f"{path} is nested too deeply.") from None


def remove_torn(folder: Path, names: Iterable[str], disk: Disk = DISK) -> None:
    """Remove what a killed process was writing beside these files; the caller alone writes them."""
    torn = re.compile(rf"\.({'|'.join(map(re.escape, names))})\..*\.tmp")
    for path in disk.entries(folder):
        if torn.fullmatch(path.name):
            disk.remove(path)
