"""What a worker keeps of a run: one directory, two files, each whole or absent.

``joined`` holds what the opening settled: the settings as they came, the instance, the shapes of
the summary and, once told, the constants, the worker's number and the settings of the present
phase. ``state`` holds all that changes in a round: the rows of `Algorithm.columns` (V_i, the
pending upload and its bytes, a local estimate) and the statistics last seen. It is replaced as a
whole before a reply leaves, so there is one moment at which a round has happened.

Why files and not a database: there is one writer; all of the state changes in every round, so there
is nothing to gain from smaller writes; and a file written beside, synced and renamed needs no
recovery, no journal and no locks that shared file systems get wrong.
"""

from __future__ import annotations

import hashlib
import logging
import re
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from emfed.core.errors import CheckpointError
from emfed.core.protocols import FloatArray, WorkerStates
from emfed.core.storage import (
    DISK,
    Disk,
    load_checkpoint,
    remove_torn,
    save_checkpoint,
    unpack_checkpoint,
)
from emfed.core.wire import Reason
from emfed.network.rules import Refusal

logger = logging.getLogger(__name__)
_ME = np.zeros(1, dtype=np.int64)
KEPT_RUNS = 8
"""Folders of runs that a site keeps, those used last: one that comes back later lost its memory."""
_RUN = re.compile("[0-9a-f]{16}")
FILES = [
    *("joined", "state", "answered", "secret", "spent"),
    *("ready", "asked", "sets", "roster", "company", "described"),
]
"""All that a site writes, in its folder and in that of a run."""


@final
@dataclass(frozen=True, eq=False)
class Joined:
    """What the opening settled."""

    settings: str
    """The body of the hello."""
    instance: int
    count: int
    """Rows at the opening: data that changed in mid-run are refused."""
    shapes: dict[str, tuple[int, ...]]
    columns: tuple[str, ...] | None
    number: int = -1
    """Which worker of the run this is."""
    constants: FloatArray = field(default_factory=lambda: np.empty(0))
    phase: str = ""
    """The body of the settings of the phase that was told last."""
    told_in: int = 0
    """The number under which the constants were told: those with a lower one are old."""
    rows: str = ""
    """What tells the rows from others (`digest_of_rows`)."""


@final
@dataclass(frozen=True)
class Links:
    """What masks of a round depend on besides its request; all are digests, in hexadecimal.

    An answer follows from the memory, too, and so from what the site was told before. Sites that
    were told different things have masks that do not cancel, then and ever after.
    """

    asked: str = ""
    """The request that was answered last."""
    about: str = ""
    """That request and the links before it: what the masks of its answer depend on."""
    accepted: str = ""
    """``about`` of the last answer that the server accepted: it is in the memory."""

    def after(self, committed: tuple[int, int], request: bytes) -> Links:
        """With one more answer, where rounds were committed before it and with it.

        While nothing is accepted an answer follows from its request alone.
        """
        asked, (was, now) = hashlib.sha256(request).hexdigest(), committed
        accepted = "" if now < 0 else self.accepted if now == was else self.about
        before = "" if now < 0 else self.asked
        about = hashlib.sha256(f"{asked} {before} {accepted}".encode()).hexdigest()
        return Links(asked, about, accepted)


@final
@dataclass(frozen=True, eq=False)
class State:
    """What changes in a round."""

    rows: WorkerStates
    round: int
    """The round that ``statistics`` belong to, -1 if none."""
    statistics: FloatArray
    phase: str = ""
    """The settings of the phase that it belongs to."""
    links: Links = Links()


@final
class SiteStore:
    """The directory of one worker in one run."""

    def __init__(self, directory: Path, disk: Disk = DISK) -> None:
        self.directory, self.disk = directory, disk

    def _load(self, name: str) -> tuple[dict[str, NDArray[Any]], dict[str, Any]] | None:
        """A file's content; if one is damaged, all counts as lost: the protocol can mend that.

        What is left must not go on as the same instance: it might answer a request that it answered
        before, and otherwise.
        """
        path = self.directory / name
        data = self.disk.read(path)
        if data is None:
            return None
        try:
            return unpack_checkpoint(data, path)
        except CheckpointError as error:
            logger.warning("%s is damaged: all of this run counts as lost", path)
            self.forget()
            raise Refusal(Reason.UNKNOWN_RUN, "its memory is damaged: say hello.") from error

    def forget(self) -> None:
        """Begin anew: the instance first, so that no crash leaves it alone."""
        for name in ("joined", "state"):
            if self.disk.read(self.directory / name) is not None:
                self.disk.remove(self.directory / name)
                self.disk.sync_directory(self.directory)

    def joined(self) -> Joined | None:
        """What the opening settled, if this worker heard of it."""
        found = self._load("joined")
        if found is None:
            return None
        arrays, about = found
        return Joined(
            about["settings"],
            int(about["instance"], 16),
            about["count"],
            {name: tuple(shape) for name, shape in about["shapes"].items()},
            None if about["columns"] is None else tuple(about["columns"]),
            about["number"],
            arrays["constants"],
            about["phase"],
            about.get("told_in", 0),
            about.get("rows", ""),
        )

    def join(self, joined: Joined) -> None:
        """Write what the opening settled."""
        self.disk.make_directory(self.directory)
        about = {
            "settings": joined.settings,
            "instance": f"{joined.instance:016x}",
            "count": joined.count,
            "shapes": {name: list(shape) for name, shape in joined.shapes.items()},
            "columns": None if joined.columns is None else list(joined.columns),
            "number": joined.number,
            "phase": joined.phase,
            "told_in": joined.told_in,
            "rows": joined.rows,
        }
        arrays = {"constants": joined.constants}
        save_checkpoint(self.directory / "joined", arrays, about, self.disk)

    def state(self) -> State | None:
        """What the last round left, if there was one."""
        found = self._load("state")
        if found is None:
            return None
        arrays, about = found
        rows = {n.removeprefix("rows/"): a for n, a in arrays.items() if n.startswith("rows/")}
        links = Links(*about.get("links", ()))
        return State(rows, about["round"], arrays["statistics"], about["phase"], links)

    def roster(self) -> bytes | None:
        """Keys of the others in a masked run, as the server told them, after their number."""
        path = self.directory / "roster"
        if self.disk.read(path) is None:
            return None
        try:
            return load_checkpoint(path, self.disk)[0]["roster"].tobytes()
        except CheckpointError as error:
            if isinstance(error.__cause__, OSError):
                raise
            logger.warning("%s is damaged: the server is asked for it anew", path)
            self.disk.remove(path)
            raise Refusal(Reason.UNKNOWN_RUN, "its roster is damaged: say hello.") from error

    def put_roster(self, roster: bytes) -> None:
        """Keep the keys of the others."""
        arrays = {"roster": np.frombuffer(roster, dtype=np.uint8)}
        save_checkpoint(self.directory / "roster", arrays, {}, self.disk)

    def settle(self, name: str) -> None:
        """Make a file safe that is answered from without being written."""
        self.disk.settle(self.directory / name)

    def put(self, state: State) -> None:
        """Write what a round leaves: after this, it has happened."""
        arrays = {f"rows/{name}": array for name, array in state.rows.items()}
        arrays["statistics"] = state.statistics
        about: dict[str, Any] = {"round": state.round, "phase": state.phase}
        if state.links != Links():
            about["links"] = astuple(state.links)
        save_checkpoint(self.directory / "state", arrays, about, self.disk)


def runs_in(directory: Path, disk: Disk = DISK) -> list[Path]:
    """The folders of runs, used last first."""
    return [path for path in disk.entries(directory) if _RUN.fullmatch(path.name)]


def clear_torn(directory: Path, disk: Disk = DISK) -> None:
    """Remove what a killed process was writing; whoever calls has the site's lock."""
    for folder in (directory, *runs_in(directory, disk)):
        remove_torn(folder, FILES, disk)


def clear_old(directory: Path, current: Path, disk: Disk = DISK) -> None:
    """Remove the folders of all but the last runs, never the current one's."""
    for old in [path for path in runs_in(directory, disk) if path != current][KEPT_RUNS - 1 :]:
        SiteStore(old, disk).forget()
        for left in disk.entries(old):
            disk.remove(left)
        disk.remove_directory(old)
