"""What relay and members keep: one SQLite file each, one transaction for what belongs together."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, final

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from emfed.core.errors import CheckpointError, FederationError, SettingsError

_TABLES = """
CREATE TABLE IF NOT EXISTS entries (place INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS sent (context BLOB PRIMARY KEY, digest BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS states (head BLOB PRIMARY KEY, state BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS confirmed (only INTEGER PRIMARY KEY CHECK (only = 0), length INTEGER);
"""


_SEALED = b"sealed"
"""The name of what shows with which secret a file is sealed."""


def _name(key: int | bytes) -> bytes:
    """What a value is bound to: one must not stand for another."""
    return b"entry %d" % key if isinstance(key, int) else key


class DiskTrouble(OSError):
    """What should be kept could not be written: the disk is full, say. Nothing is half written."""


@final
class RecordFile:
    """The file of a relay or of a member; use it from one thread.

    Every commit is on the disk when it returns (``synchronous = FULL``). Only its owner may read
    it. A file that is damaged is refused: the transcript is elsewhere, so it may be removed. Where
    nothing can be written, `DiskTrouble` says so; who has it must begin again from the file.

    Parameters
    ----------
    path : Path
        The file; it is made if it is not there.
    seal : bytes, optional
        32 bytes that encrypt entries and states, each by itself (AES-256-GCM). A file that was
        begun without is encrypted when it is opened.
    """

    def __init__(self, path: Path, seal: bytes | None = None) -> None:
        self._path, self._inside = path, False
        self._cipher = None if seal is None else AESGCM(seal)
        with self._open():
            os.close(os.open(path, os.O_RDWR | os.O_CREAT, 0o600))  # its journals get its rights
            self._file = sqlite3.connect(path, isolation_level=None)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = FULL")
            self._file.execute("PRAGMA secure_delete = ON")
            self._file.executescript(_TABLES)
        self._check_seal()

    # Encryption at rest.

    def _check_seal(self) -> None:
        """Refuse a file of another secret; encrypt one that has none yet."""
        found = self._read("SELECT state FROM states WHERE head = ?", (_SEALED,))
        if found:
            if self._cipher is None:
                raise SettingsError(f"{self._path} is sealed: give --seal with its secret.")
            self._opened(_SEALED, found[0][0])
        elif self._cipher is not None:
            with self.transaction():
                for table, name, value in (
                    ("entries", "place", "data"),
                    ("states", "head", "state"),
                ):
                    for key, data in self._read(f"SELECT {name}, {value} FROM {table}"):
                        change = f"UPDATE {table} SET {value} = ? WHERE {name} = ?"
                        self._write(change, (self._closed(_name(key), data), key))
                seal = self._closed(_SEALED, b"")
                self._write("INSERT INTO states VALUES (?, ?)", (_SEALED, seal))
            self._write("PRAGMA wal_checkpoint(TRUNCATE)")  # the old pages are in there

    def _closed(self, name: bytes, data: bytes) -> bytes:
        """As it is on the disk; bound to its place in the file."""
        if self._cipher is None:
            return data
        nonce = os.urandom(12)
        return nonce + self._cipher.encrypt(nonce, data, name)

    def _opened(self, name: bytes, data: bytes) -> bytes:
        """The inverse of `_closed`."""
        if self._cipher is None:
            return data
        try:
            return self._cipher.decrypt(data[:12], data[12:], name)
        except (InvalidTag, ValueError):
            raise SettingsError(
                f"{self._path} was not sealed with this secret, or was altered: give the right "
                "--seal."
            ) from None

    @contextlib.contextmanager
    def _open(self) -> Iterator[None]:
        """Tell what a failure means to whoever must mend it."""
        try:
            yield
        except (sqlite3.OperationalError, PermissionError) as error:
            raise DiskTrouble(
                f"{self._path} cannot be written ({error}): free space, or give back its rights; "
                "nothing is lost, and it is tried again."
            ) from error
        except sqlite3.DatabaseError as error:
            raise CheckpointError(
                f"{self._path} cannot be read ({error}): move it away. The fit's transcript comes "
                "back from the relay, or to the relay from the sites."
            ) from None

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """What is written inside is there as a whole, or not at all."""
        if self._inside:
            yield
            return
        self._write("BEGIN IMMEDIATE")
        self._inside = True
        try:
            yield
            self._write("COMMIT")
        finally:
            self._inside = False
            if self._file.in_transaction:  # a full disk may have rolled back by itself
                with contextlib.suppress(sqlite3.Error):
                    self._file.execute("ROLLBACK")

    def _write(self, statement: str, values: Sequence[Any] = ()) -> None:
        with self._open():
            self._file.execute(statement, values)

    def _read(self, statement: str, values: Sequence[Any] = ()) -> list[Any]:
        with self._open():
            return self._file.execute(statement, values).fetchall()

    def entries(self) -> list[bytes]:
        """All entries, in order."""
        found = self._read("SELECT place, data FROM entries ORDER BY place")
        return [self._opened(_name(place), data) for place, data in found]

    def write(self, first: int, entries: Sequence[bytes]) -> None:
        """Keep entries from this place on, in place of those that were there."""
        with self.transaction():
            self._write("DELETE FROM entries WHERE place >= ?", (first,))
            for place, entry in enumerate(entries, first):
                closed = self._closed(_name(place), entry)
                self._write("INSERT INTO entries VALUES (?, ?)", (place, closed))

    def sent(self, context: bytes, message: bytes) -> None:
        """Keep the digest of what leaves in a context; raises if another one left in it."""
        known = self._read("SELECT digest FROM sent WHERE context = ?", (context,))
        refuse_another(known[0][0] if known else None, message)
        if not known:
            self._write("INSERT INTO sent VALUES (?, ?)", (context, message))

    def states(self) -> dict[bytes, bytes]:
        """States at the beginning of epochs, by head."""
        found = self._read("SELECT head, state FROM states WHERE head != ?", (_SEALED,))
        return {head: self._opened(head, state) for head, state in found}

    def keep_state(self, head: bytes, state: bytes) -> None:
        """Keep the state at the beginning of an epoch."""
        closed = self._closed(head, state)
        self._write("INSERT OR REPLACE INTO states VALUES (?, ?)", (head, closed))

    def confirmed(self) -> int:
        """The length of the chain that was confirmed, 0 if none was."""
        return max((length for (length,) in self._read("SELECT length FROM confirmed")), default=0)

    def confirm(self, length: int) -> None:
        """Keep that a chain of this length was confirmed."""
        self._write("INSERT OR REPLACE INTO confirmed VALUES (0, ?)", (length,))


def refuse_another(known: bytes | None, message: bytes) -> None:
    """Refuse a second message where one was sent: no mask may cover two."""
    if known is not None and known != message:
        raise FederationError(
            "another part was sent at this place of the fit already, perhaps by a copy of this "
            "process: nothing more is sent. Start this site again."
        )


@final
class MemoryRecords:
    """The same in memory, with copies: for tests and simulations.

    Parameters
    ----------
    other : MemoryRecords, optional
        What to begin with.
    """

    def __init__(self, other: MemoryRecords | None = None) -> None:
        self._entries: list[bytes] = []
        self._sent: dict[bytes, bytes] = {}
        self._states: dict[bytes, bytes] = {}
        self._confirmed = 0
        if other is not None:
            self._entries, self._sent = [*other._entries], dict(other._sent)
            self._states, self._confirmed = dict(other._states), other._confirmed

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """What is written inside is there as a whole, or not at all."""
        before = MemoryRecords(self)
        try:
            yield
        except BaseException:
            vars(self).update(vars(before))
            raise

    def entries(self) -> list[bytes]:
        """All entries, in order."""
        return [*self._entries]

    def write(self, first: int, entries: Sequence[bytes]) -> None:
        """Keep entries from this place on, in place of those that were there."""
        self._entries[first:] = entries

    def sent(self, context: bytes, message: bytes) -> None:
        """Keep the digest of what leaves in a context; raises if another one left in it."""
        refuse_another(self._sent.get(context), message)
        self._sent[context] = message

    def states(self) -> dict[bytes, bytes]:
        """States at the beginning of epochs, by head."""
        return dict(self._states)

    def keep_state(self, head: bytes, state: bytes) -> None:
        """Keep the state at the beginning of an epoch."""
        self._states[head] = state

    def confirmed(self) -> int:
        """The length of the chain that was confirmed, 0 if none was."""
        return self._confirmed

    def confirm(self, length: int) -> None:
        """Keep that a chain of this length was confirmed."""
        self._confirmed = length
