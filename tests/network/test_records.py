"""What relay and members keep is there as a whole or not at all, whatever happens to process or
disk."""

from __future__ import annotations

import os
import sqlite3
import stat
import sys
from pathlib import Path

import pytest

from emfed.network.exchange.records import DiskTrouble, RecordFile

ENTRY = b"entry " * 200
SECOND = [b"second " * 300, b"third " * 300]


def act(file: RecordFile) -> None:
    """What a member writes when a hand-out has come: in one transaction."""
    with file.transaction():
        file.write(1, SECOND)
        file.sent(b"context", b"digest")
        file.keep_state(b"head", b"state")
        file.confirm(3)


def content(path: Path) -> tuple[list[bytes], dict[bytes, bytes], int]:
    file = RecordFile(path)
    try:
        return file.entries(), file.states(), file.confirmed()
    finally:
        file.close()


def begin(path: Path) -> None:
    file = RecordFile(path)
    file.write(0, [ENTRY, ENTRY])
    file.close()


BEFORE = [ENTRY, ENTRY], {}, 0
AFTER = [ENTRY, *SECOND], {b"head": b"state"}, 3


@pytest.mark.skipif(sys.platform == "win32", reason="it has no fork")
def test_a_process_that_is_killed_between_two_statements_leaves_all_or_nothing(
    tmp_path: Path,
) -> None:
    seen = []
    for count in range(1, 20):
        path = tmp_path / f"{count}.sqlite"
        begin(path)
        child = os.fork()
        if child == 0:
            file, left = RecordFile(path), [count]

            def step(statement: str, left: list[int] = left) -> None:
                left[0] -= 1
                if not left[0]:
                    os._exit(9)  # as kill -9: nothing is tidied up

            file._file.set_trace_callback(step)
            act(file)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        seen.append(content(path))
        if os.waitstatus_to_exitcode(status) == 0:
            break
    assert len(seen) > 6
    assert seen[-1] == AFTER
    assert all(found == BEFORE for found in seen[:-1])


@pytest.mark.skipif(sys.platform == "win32", reason="it has no fork")
def test_what_was_committed_is_there_after_kill(tmp_path: Path) -> None:
    path = tmp_path / "member.sqlite"
    begin(path)
    child = os.fork()
    if child == 0:
        act(RecordFile(path))
        os._exit(9)
    os.waitpid(child, 0)
    assert content(path) == AFTER


def test_a_full_disk_says_so_and_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "member.sqlite"
    begin(path)
    file = RecordFile(path)
    (pages,) = file._file.execute("PRAGMA page_count").fetchone()
    file._file.execute(f"PRAGMA max_page_count = {pages}")
    with pytest.raises(DiskTrouble, match=r"member.sqlite cannot be written .*full.*free space"):
        act(file)
    file.close()
    assert content(path) == BEFORE
    file = RecordFile(path)
    act(file)
    file.close()
    assert content(path) == AFTER


def test_a_disk_that_fails_at_any_statement_leaves_all_or_nothing(tmp_path: Path) -> None:
    for count in range(1, 40):
        path = tmp_path / f"{count}.sqlite"
        begin(path)
        file, left = RecordFile(path), [count]

        def step(*_: object, left: list[int] = left) -> int:
            left[0] -= 1
            return sqlite3.SQLITE_OK if left[0] > 0 else sqlite3.SQLITE_DENY

        file._file.set_authorizer(step)
        try:
            act(file)
        except Exception:
            file._file.set_authorizer(None)
            file.close()
            assert content(path) == BEFORE
        else:
            file._file.set_authorizer(None)
            file.close()
            assert count > 6
            assert content(path) == AFTER
            return
    raise AssertionError("it never succeeded")


@pytest.mark.skipif(os.name != "posix", reason="rights are others there")
def test_only_the_owner_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "member.sqlite"
    file = RecordFile(path)
    act(file)
    found = {one.name: stat.S_IMODE(one.stat().st_mode) for one in tmp_path.iterdir()}
    file.close()
    assert set(found.values()) == {0o600}
    assert len(found) == 3  # with its journal and the journal's index
