"""What a site has spent of its owner's allowances, over all runs: small files in its folder.

They are read by later releases, so a site that is upgraded forgets nothing.
"""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from emfed.core.errors import SettingsError
from emfed.core.noise import KEY_BYTES, NoiseKey
from emfed.core.protocols import FloatArray
from emfed.core.storage import DISK, Disk, load_checkpoint, save_checkpoint
from emfed.data.tables import Workers
from emfed.models.mixture import to_numpy

_ME = np.zeros(1, dtype=np.int64)


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


@final
class Fits(SpentOnce):
    """How many fits the site took part in, and the names of the last ones."""

    FILE = "fits"

    def read(self) -> tuple[int, list[str]]:
        """How many, and the last names."""
        found = max(self._found(), key=lambda about: int(about["count"]), default=None)
        return (0, []) if found is None else (int(found["count"]), list(found["runs"]))

    def may(self, run: str, limit: int | None) -> bool:
        """Whether a fit is known, or not one too many."""
        count, runs = self.read()
        return run in runs or limit is None or count < limit

    def enter(self, run: str) -> None:
        """Count a fit, once."""
        count, runs = self.read()
        if run not in runs:
            self._keep({"count": count + 1, "runs": [*runs, run][-KEPT_LEDGER:]})


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

    def ledger(self) -> tuple[bytes, int]:
        """The ledger's own name, and how often it was written.

        The name is drawn when it is written first: whoever has lost it is a new site.
        """
        if not any(about.get("ledger") for about in self._found()):
            self._write(*self.read())
        found = max(self._found(), key=lambda about: int(about.get("writes", 0)))
        return bytes.fromhex(found["ledger"]), int(found["writes"])

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
        found = self._found()
        names = [about["ledger"] for about in found if about.get("ledger")]
        writes = max([0, *(int(about.get("writes", 0)) for about in found)])
        name = names[0] if names else os.urandom(16).hex()
        self._keep({"charged": total, "runs": kept, "ledger": name, "writes": writes + 1})

    def _settle(self) -> None:
        """What was written is on every disk, whatever was killed or put back meanwhile."""
        copies = {self._disk.read(path) for path in self._paths}
        if len(copies) > 1:
            self._write(*self.read())
            return
        for path in self._paths:
            self._disk.settle(path)

    def charge(self, run: str, mu_squared: float, most: float | None) -> bool:
        """Charge a run's whole budget, once; False, and nothing is charged, if it is too much."""
        total, runs = self.read()
        known = runs.pop(run, RunAllowance())
        more = max(0.0, mu_squared - known.budget)
        if most is not None and total + more > most * (1 + 1e-9):
            return False
        if known.budget and not more:
            self._settle()
            return True
        self._write(total + more, runs | {run: known._replace(budget=known.budget + more)})
        return True

    def use(self, run: str, mu_squared: float, name: str) -> bool:
        """Charge an answer to its run, once; False if the run's budget does not reach for it."""
        total, runs = self.read()
        known = runs.pop(run, RunAllowance())
        if name in known.answers:
            self._settle()
            return True
        if known.used + mu_squared > known.budget * (1 + 1e-9):
            return False
        told = (*known.answers, name)
        self._write(total, runs | {run: RunAllowance(known.budget, known.used + mu_squared, told)})
        return True


def noise_key(path: Path) -> NoiseKey:
    """The key that a site's noise follows from: a file beside its identity key, drawn once.

    It is no part of the site's folder, which people copy and put back. A site without it is a new
    one: it draws another.
    """
    if not path.exists():
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")  # its owner's
        with os.fdopen(handle, "w", encoding="ascii") as file:
            file.write(os.urandom(KEY_BYTES).hex() + "\n")
        DISK.sync(Path(name))
        DISK.replace(Path(name), path)
    DISK.settle(path)
    try:
        key = bytes.fromhex(path.read_text("ascii"))
    except (ValueError, UnicodeDecodeError):
        key = b""
    if len(key) != KEY_BYTES:
        raise SettingsError(
            f"{path} is damaged: put it back from a backup, or remove it to be a new site, which "
            "takes no part in the private fits that go on."
        )
    return NoiseKey.of(key)


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

    def fewest_changed(self, data: Workers, secret: Secret) -> int:
        """The fewest rows that changed since any table; 0: one of them is the same, or none is
        known."""
        whole, now = self._digests(data, secret)
        wholes, before = self._known()
        if data.streaming or whole in wholes or not len(before):
            return 0
        return max(1, int(np.abs(before - now).sum(axis=1).min()))

    def remember(self, data: Workers, secret: Secret) -> None:
        """Keep these rows among the tables."""
        whole, now = self._digests(data, secret)
        wholes, before = self._known()
        if data.streaming or whole in wholes:
            return
        tables = {
            "wholes": np.append(wholes, whole)[-KEPT_TABLES:],
            "tables": np.concatenate([before, now[None]])[-KEPT_TABLES:],
        }
        save_checkpoint(self._path, tables, {}, self._disk)

    @staticmethod
    def _digests(data: Workers, secret: Secret) -> tuple[np.uint64, NDArray[np.int32]]:
        """Of the whole, and how many rows fall into each bucket; a stream is not looked at."""
        words = np.empty(0, np.uint64) if data.streaming else _all_digests(data, secret)
        return np.uint64(words.sum(dtype=np.uint64)), _by_bucket(words)

    def _known(self) -> tuple[NDArray[np.uint64], NDArray[np.int32]]:
        if self._disk.read(self._path) is None:
            return np.empty(0, dtype=np.uint64), np.empty((0, BUCKETS), dtype=np.int32)
        known = load_checkpoint(self._path, self._disk)[0]
        return known["wholes"], known["tables"]


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


@final
class LastSet:
    """With which sites this one added up last, in any run, and how often that changed.

    Two sums over sets that differ by one site differ by that site's part. So every change counts,
    in one run or between two.
    """

    def __init__(self, directory: Path, disk: Disk = DISK) -> None:
        self._path, self._disk = directory / "company", disk

    def read(self) -> tuple[list[str], int]:
        """The sites of the last sum, and how many changes there were."""
        if self._disk.read(self._path) is None:
            return [], 0
        about = load_checkpoint(self._path, self._disk)[1]
        return list(about["names"]), int(about["changes"])

    def enter(self, names: Sequence[str], limit: int | None) -> str:
        """Keep that these add up now; where that is a change too many, who comes and goes."""
        known, changes = self.read()
        if [*names] == known:
            return ""
        changes += bool(known)
        if limit is not None and changes > limit:
            pairs = ((set(names) - set(known), "comes"), (set(known) - set(names), "goes"))
            return "; ".join(f"{', '.join(sorted(who))} {how}" for who, how in pairs if who)
        about = {"names": [*names], "changes": changes}
        save_checkpoint(self._path, {"none": np.empty(0)}, about, self._disk)
        return ""


@final
class SiteMemory:
    """All that a site must not forget between runs, in its folder.

    Parameters
    ----------
    directory : Path
        The folder.
    disk : Disk
        How it is written; a sealed one encrypts.
    copies : sequence of Path
        Folders that keep what was spent, too.
    """

    def __init__(self, directory: Path, disk: Disk = DISK, copies: Sequence[Path] = ()) -> None:
        self.tally = Tally(directory, disk, copies)
        self.fits = Fits(directory, disk, copies)
        self.allowance = Allowance(directory, disk, copies)
        self.secret = Secret(directory, disk)
        self.described = DescribedRows(directory, disk)
        self.company = LastSet(directory, disk)
