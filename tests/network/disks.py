"""A disk in memory that can die between any two writes, and forget what was not synced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import final

from emfed.core.storage import Disk


class Killed(BaseException):
    """The process died here; nothing that catches exceptions may go on after it."""


@final
class _File:
    """Content as programs see it, and as it is on the platters (None: nothing yet)."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.durable: bytes | None = None


@final
class SimulatedDisk(Disk):
    """Files by name, in two views: what programs see, and what a power cut leaves.

    ``fuse`` is the number of calls until the process dies, before the call takes effect; None is
    never. A file being created when it dies is left torn.
    """

    def __init__(self, draw: Callable[[], float]) -> None:
        self._draw = draw
        self._names: dict[Path, _File] = {}
        self._durable: dict[Path, _File] = {}
        self._changes: list[tuple[Path, _File | None]] = []
        """Entries of directories that were changed since the last sync, in order."""
        self._numbers = count()
        self.fuse: int | None = None
        self.calls = 0

    def _tick(self) -> bool:
        """Count a call; True if the process dies now."""
        self.calls += 1
        if self.fuse is None:
            return False
        self.fuse -= 1
        return self.fuse < 0

    def _die(self) -> None:
        if self._tick():
            raise Killed

    def _enter(self, path: Path, file: _File | None) -> None:
        self._changes.append((path, file))
        if file is None:
            self._names.pop(path, None)
        else:
            self._names[path] = file

    def read(self, path: Path) -> bytes | None:
        """What programs see."""
        file = self._names.get(path)
        return None if file is None else file.data

    def create(self, path: Path, data: bytes) -> Path:
        """A new file, perhaps torn."""
        name = path.with_name(f".{path.name}.{next(self._numbers)}.tmp")
        dies = self._tick()
        self._enter(name, _File(data[: int(self._draw() * len(data))] if dies else data))
        if dies:
            raise Killed
        return name

    def sync(self, path: Path) -> None:
        """The content is safe."""
        self._die()
        self._names[path].durable = self._names[path].data

    def replace(self, old: Path, new: Path) -> None:
        """A rename is one change of the directory."""
        self._die()
        file = self._names[old]
        self._changes += [(new, file), (old, None)]
        self._names[new] = self._names.pop(old)

    def sync_directory(self, directory: Path) -> None:
        """Names are safe."""
        self._die()
        self._settle(len(self._changes))

    def remove(self, path: Path) -> None:
        """Delete."""
        self._die()
        self._enter(path, None)

    def entries(self, directory: Path) -> list[Path]:
        """Names that were given last come first."""
        deep, names = len(directory.parts), directory.parts
        parts = [path.parts for path in reversed(self._names)]
        inside = dict.fromkeys(p[deep] for p in parts if len(p) > deep and p[:deep] == names)
        return [directory / name for name in inside]

    def remove_directory(self, directory: Path) -> None:
        """Directories are names; there is nothing to remove."""

    def make_directory(self, directory: Path) -> None:
        """Directories are names; there is nothing to make."""

    @contextlib.contextmanager
    def lock(self, path: Path) -> Iterator[None]:
        """There is one process."""
        yield

    def _settle(self, many: int) -> None:
        """The first of the changes of names reach the platters."""
        for path, file in self._changes[:many]:
            if file is None:
                self._durable.pop(path, None)
            else:
                self._durable[path] = file
        self._changes = self._changes[many:]

    def crash(self, power: bool) -> None:
        """The process dies; with the power, what was not synced is torn, old or absent."""
        self.fuse = None
        if not power:
            return
        self._settle(int(self._draw() * (len(self._changes) + 1)))  # a journal keeps a prefix
        self._changes = []
        self._names = {}
        for path, file in self._durable.items():
            if file.durable is None or file.durable != file.data:
                file.data = file.data[: int(self._draw() * (len(file.data) + 1))]
                file.durable = file.data
            self._names[path] = file
        self._durable = dict(self._names)

    def wipe(self) -> None:
        """Everything is gone."""
        self._names, self._durable, self._changes = {}, {}, []
