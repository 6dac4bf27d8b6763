"""What relay and members keep: one SQLite file each, one transaction for what belongs together."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import final

from emfed.core.errors import CheckpointError, FederationError

_TABLES = """
CREATE TABLE IF NOT EXISTS entries (place INTEGER PRIMARY KEY, data BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS sent (context BLOB PRIMARY KEY, digest BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS states (head BLOB PRIMARY KEY, state BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE IF NOT EXISTS confirmed (only INTEGER PRIMARY KEY CHECK (only = 0), length INTEGER);
"""


@final
class RecordFile:
    """The file of a relay or of a member; use it from one thread.

    Every commit is on the disk when it returns (``synchronous = FULL``). A file that is damaged is
    refused: the transcript is elsewhere, so it may be removed.

    Parameters
    ----------
    path : Path
        The file; it is made if it is not there.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._file = sqlite3.connect(path, isolation_level=None)
            self._file.execute("PRAGMA journal_mode = WAL")
            self._file.execute("PRAGMA synchronous = FULL")
            self._file.executescript(_TABLES)
        except sqlite3.DatabaseError as error:
            raise CheckpointError(
                f"{path} cannot be read ({error}): move it away. The fit's transcript comes back "
                "from the relay, or to the relay from the sites."
            ) from None
        self._inside = False

    def close(self) -> None:
        """Let go of the file."""
        self._file.close()

    @contextlib.contextmanager
    def transaction(self) -> Iterator[None]:
        """What is written inside is there as a whole, or not at all."""
        if self._inside:
            yield
            return
        self._file.execute("BEGIN IMMEDIATE")
        self._inside = True
        try:
            yield
        except BaseException:
            self._file.execute("ROLLBACK")
            raise
        else:
            self._file.execute("COMMIT")
        finally:
            self._inside = False

    def entries(self) -> list[bytes]:
        """All entries, in order."""
        return [data for (data,) in self._file.execute("SELECT data FROM entries ORDER BY place")]

    def write(self, first: int, entries: Sequence[bytes]) -> None:
        """Keep entries from this place on, in place of those that were there."""
        with self.transaction():
            self._file.execute("DELETE FROM entries WHERE place >= ?", (first,))
            self._file.executemany("INSERT INTO entries VALUES (?, ?)", enumerate(entries, first))

    def sent(self, context: bytes, message: bytes) -> None:
        """Keep the digest of what leaves in a context; raises if another one left in it."""
        found = self._file.execute("SELECT digest FROM sent WHERE context = ?", (context,))
        known = found.fetchone()
        refuse_another(None if known is None else known[0], message)
        if known is None:
            self._file.execute("INSERT INTO sent VALUES (?, ?)", (context, message))

    def states(self) -> dict[bytes, bytes]:
        """States at the beginning of epochs, by head."""
        return dict(self._file.execute("SELECT head, state FROM states"))

    def keep_state(self, head: bytes, state: bytes) -> None:
        """Keep the state at the beginning of an epoch."""
        self._file.execute("INSERT OR REPLACE INTO states VALUES (?, ?)", (head, state))

    def confirmed(self) -> int:
        """The length of the chain that was confirmed, 0 if none was."""
        found = self._file.execute("SELECT length FROM confirmed").fetchone()
        return 0 if found is None else found[0]

    def confirm(self, length: int) -> None:
        """Keep that a chain of this length was confirmed."""
        self._file.execute("INSERT OR REPLACE INTO confirmed VALUES (0, ?)", (length,))


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
