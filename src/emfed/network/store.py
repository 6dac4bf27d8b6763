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
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

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
from emfed.data import Workers
from emfed.models.mixture import to_numpy
from emfed.network.rules import Refusal, SiteRules

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


class SpentOnce:
    """A small file of what was spent, in the site's folder and in every folder of ``copies``.

    The largest that is found counts: a backup that is put back forgets nothing as long as one copy
    was not. A damaged file is an error, and no reason to begin again at zero.
    """

    FILE: ClassVar[str]

    def __init__(self, directory: Path, disk: Disk = DISK, copies: Sequence[Path] = ()) -> None:
        self._paths, self._disk = [folder / self.FILE for folder in (directory, *copies)], disk

    def _found(self) -> list[dict[str, Any]]:
        """What each copy says that is there."""
        there = [path for path in self._paths if self._disk.read(path) is not None]
        return [load_checkpoint(path, self._disk)[1] for path in there]

    def _keep(self, about: dict[str, Any]) -> None:
        for path in self._paths:
            self._disk.make_directory(path.parent)
            save_checkpoint(path, {"none": np.empty(0)}, about, self._disk)


@final
class Tally(SpentOnce):
    """How often a site looked at its rows for a server, over all runs: a file, kept beforehand.

    ``answered`` counts messages, ``chosen`` those at parameters of the server's choice. Counting
    before looking means that refusals count too. A process takes answers from the file in blocks
    that double up to `BLOCK`, so that a long run seldom waits for the disk; those left when it ends
    are lost to the server.
    """

    FILE = "answered"

    def __init__(self, directory: Path, disk: Disk = DISK, copies: Sequence[Path] = ()) -> None:
        super().__init__(directory, disk, copies)
        self._left = {"answered": 0, "chosen": 0}
        self._block = 1

    def read(self) -> dict[str, int]:
        """What was taken so far."""
        found = self._found()
        return {name: max([0, *(int(a.get(name, 0)) for a in found)]) for name in self._left}

    def spend(self, limits: Mapping[str, int | None]) -> str | None:
        """One more of each of these; the name of a limit that is reached, if one is."""
        wanted = {name: limit for name, limit in limits.items() if limit is not None}
        if any(not self._left[name] for name in wanted):
            taken = self.read()
            blocks = {n: min(self._block, limit - taken[n]) for n, limit in wanted.items()}
            for name, block in blocks.items():
                if not self._left[name] and block <= 0:
                    return name
            short = {n: max(b, 0) for n, b in blocks.items() if not self._left[n]}
            about = {name: count + short.get(name, 0) for name, count in taken.items()}
            self._keep(about)
            self._left |= short
            self._block = min(BLOCK, 2 * self._block)
        for name in wanted:
            self._left[name] -= 1
        return None


class RunAllowance(NamedTuple):
    """What one run may tell and has told: mu squared, and the names of its answers."""

    budget: float = 0.0
    used: float = 0.0
    answers: tuple[str, ...] = ()


@final
class Allowance(SpentOnce):
    """What a site gave away of its rows' privacy, over all runs: mu squared, which adds up.

    A run's whole budget is charged when it joins, before the first word about any row leaves; each
    answer is then charged to the run, and none beyond its budget is given. So whatever the server
    asks, and however often it or this site is killed, no more than the charged sum is told. Answers
    have names: one that is given again bit for bit has the name that it had, and costs nothing.
    """

    FILE = "spent"

    def read(self) -> tuple[float, dict[str, RunAllowance]]:
        """Mu squared charged in all; and of each run what it was charged and what it used."""
        total, runs = 0.0, dict[str, RunAllowance]()
        for about in self._found():
            total = max(total, float(about["charged"]))
            for run, (budget, used, *names) in about["runs"].items():
                known = runs.get(run, RunAllowance())
                answers = names if used > known.used else known.answers
                runs[run] = RunAllowance(max(known[0], budget), max(known[1], used), (*answers,))
        return total, runs

    def _write(self, total: float, runs: Mapping[str, RunAllowance]) -> None:
        last = list(runs.items())[-KEPT_LEDGER:]
        kept = {run: [own.budget, own.used, *own.answers] for run, own in last}
        self._keep({"charged": total, "runs": kept})

    def charge(self, run: str, mu_squared: float, most: float | None) -> bool:
        """Charge a run's whole budget, once; False, and nothing is charged, if it is too much."""
        total, runs = self.read()
        known = runs.pop(run, RunAllowance())
        more = max(0.0, mu_squared - known.budget)
        if most is not None and total + more > most * (1 + 1e-9):
            return False
        self._write(total + more, runs | {run: known._replace(budget=known.budget + more)})
        return True

    def use(self, run: str, mu_squared: float, name: str) -> bool:
        """Charge an answer to its run, once; False if the run's budget does not reach for it."""
        total, runs = self.read()
        known = runs.pop(run, RunAllowance())
        if name in known.answers:
            for path in self._paths:
                self._disk.settle(path)
            return True
        if known.used + mu_squared > known.budget * (1 + 1e-9):
            return False
        told = (*known.answers, name)
        self._write(total, runs | {run: RunAllowance(known.budget, known.used + mu_squared, told)})
        return True


KEPT_LEDGER = 64
"""Runs whose use is remembered, the last: one that is forgotten gets no more answers."""


BLOCK = 64
"""Answers that a process takes from the allowance at once, at most: what a kill can cost."""


@final
class Secret:
    """32 random bytes of the site, on its disk before anything follows from them.

    A killed site that is asked again draws the same rows; the server never learns which.
    """

    def __init__(self, directory: Path, disk: Disk = DISK) -> None:
        self._path, self._disk = directory / "secret", disk
        self._known: bytes | None = None

    def read(self) -> bytes:
        """The secret, drawn the first time; a damaged file is an error, as with `Tally`."""
        if self._known is None:
            if self._disk.read(self._path) is None:
                drawn = np.frombuffer(os.urandom(32), dtype=np.uint8)
                save_checkpoint(self._path, {"secret": drawn}, {}, self._disk)
            self._known = load_checkpoint(self._path, self._disk)[0]["secret"].tobytes()
            self._disk.settle(self._path)
        return self._known

    def seed(self, purpose: str) -> int:
        """64 bits that follow from the secret and a purpose, and that nobody else can tell."""
        digest = hashlib.blake2b(purpose.encode(), key=self.read(), digest_size=8).digest()
        return int.from_bytes(digest, "little")

    def derive(self, purpose: str, content: bytes) -> bytes:
        """32 bytes that follow from the secret, a purpose and a content, alike."""
        person, key = purpose.encode(), self.read()
        return hashlib.blake2b(content, key=key, digest_size=32, person=person).digest()


@final
class DescribedRows:
    """Which tables were described to servers before, each as counts of rows by a secret digest.

    Where a single row came or went between two runs, the summaries of both tell it, to whoever
    subtracts them; so does a sum over sites, if nothing else changed. All tables of before count,
    not the last alone: a site may answer from two in turn. A stream is not looked at.

    Rows that came or went change as many counts, unless two of them cancel in one of `BUCKETS`; a
    digest of the whole tells that apart from no change.
    """

    def __init__(self, directory: Path, disk: Disk = DISK) -> None:
        self._path, self._disk = directory / "described", disk

    def check(self, data: Workers, secret: Secret, rules: SiteRules) -> None:
        """Refuse where too few rows changed since any table was described; else remember these."""
        if data.streaming:
            return
        words = _all_digests(data, secret)
        whole, now = np.uint64(words.sum(dtype=np.uint64)), _by_bucket(words)
        wholes, before = np.empty(0, dtype=np.uint64), np.empty((0, BUCKETS), dtype=np.int32)
        if self._disk.read(self._path) is not None:
            known = load_checkpoint(self._path, self._disk)[0]
            wholes, before = known["wholes"], known["tables"]
        if whole in wholes:
            return
        for apart in np.abs(before - now).sum(axis=1).tolist():
            rules.check_change(max(1, apart))
        tables = {
            "wholes": np.append(wholes, whole)[-KEPT_TABLES:],
            "tables": np.concatenate([before, now[None]])[-KEPT_TABLES:],
        }
        save_checkpoint(self._path, tables, {}, self._disk)


BUCKETS, KEPT_TABLES = 1 << 12, 64
"""Counts that a table is remembered by, and tables that are: 16 kB each, 1 MB in all."""


def _by_bucket(words: NDArray[np.uint64]) -> NDArray[np.int32]:
    """How many digests fall into each bucket, by their first bits."""
    places = (words >> np.uint64(52)).astype(np.int64)
    return np.bincount(places, minlength=BUCKETS).astype(np.int32)


def _all_digests(data: Workers, secret: Secret) -> NDArray[np.uint64]:
    """One word for each row and its weight, sorted: a row whose weight changes is another row."""
    found = []
    for piece in data.pieces(_ME):
        words = _digests(piece.rows, secret)
        if data.row_weights is not None:
            own = data.row_weights[0][piece.first : piece.first + len(words)]
            words = words + _mixed(own[:, None], [secret.seed("weight") | 1])
        found.append(words)
    return np.sort(np.concatenate(found))


def digest_of_rows(data: Workers, secret: Secret) -> str:
    """What tells a site's rows from others, in whatever order; a stream has none."""
    if data.streaming:
        return ""
    return hashlib.sha256(_all_digests(data, secret).tobytes()).hexdigest()[:32]


def _digests(rows: Any, secret: Secret) -> NDArray[np.uint64]:
    """A sum of each row's words, times secret numbers: others collide once in 2^60 or so."""
    table = np.ascontiguousarray(to_numpy(rows), dtype=np.float64)
    table = table.reshape(table.shape[1], -1)
    return _mixed(table, [secret.seed(f"row {j}") | 1 for j in range(table.shape[1])])


def _mixed(table: FloatArray, keys: Sequence[int]) -> NDArray[np.uint64]:
    """One word for each row of a table."""
    words = np.ascontiguousarray(table).view(np.uint64)
    mixed = words * np.uint64(0x9E3779B97F4A7C15)
    mixed ^= mixed >> np.uint64(29)
    return np.asarray((mixed * np.array(keys, dtype=np.uint64)).sum(axis=1, dtype=np.uint64))
