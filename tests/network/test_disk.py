"""What a site does with a disk that fails, and what it leaves on one."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emfed.core.storage import DISK, write_atomic
from emfed.core.wire import Kind, kind_of
from emfed.fitting import RoundRecord
from emfed.network import LocalTransport, RemoteFederation, Site
from emfed.network.store import KEPT_RUNS
from tests.helpers import OPEN, make_model
from tests.network.test_protocol import (
    KEYS,
    TABLES,
    fit,
    make_sites,
    requests_of,
    undisturbed,
)


def failing(number: int, directories: bool) -> Any:
    """An fsync that fails, of directories or of files."""
    real = os.fsync

    def fsync(handle: int) -> None:
        if stat.S_ISDIR(os.fstat(handle).st_mode) == directories:
            raise OSError(number, os.strerror(number))
        real(handle)

    return fsync


@pytest.mark.parametrize("directories", [True, False])
def test_a_sync_that_failed_is_an_error_and_one_that_cannot_be_is_not(
    directories: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"here")
    for number in (errno.EIO, errno.ENOSPC, errno.EDQUOT):
        monkeypatch.setattr(os, "fsync", failing(number, directories))
        with pytest.raises(OSError, match=os.strerror(number)):
            DISK.settle(path)
        monkeypatch.undo()
    for number in (errno.EINVAL, errno.ENOTSUP, errno.EACCES, errno.EPERM):
        monkeypatch.setattr(os, "fsync", failing(number, directories))
        DISK.settle(path)
        monkeypatch.undo()


def test_a_full_disk_says_which_file_had_no_room(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Path("/dev/full").open("wb", buffering=0) as full:
        monkeypatch.setattr(os, "fdopen", lambda handle, mode: os.close(handle) or full)
        monkeypatch.setattr(os, "fchmod", lambda handle, mode: None)
        with pytest.raises(OSError, match="No space left on device") as found:
            write_atomic(tmp_path / "report.html", b"page")
    assert found.value.filename == str(tmp_path / "report.html")
    assert list(tmp_path.iterdir()) == []


def test_no_reply_leaves_after_a_failed_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is answered from what was read is synced first; when the disk is well it goes."""
    last = requests_of(tmp_path)[-1]
    site = Site(TABLES[0], tmp_path / KEYS[0], rules=OPEN)
    whole = site.step(last)
    assert kind_of(whole) is Kind.REPLY
    monkeypatch.setattr(os, "fsync", failing(errno.EIO, directories=True))
    assert kind_of(site.step(last)) is Kind.REFUSAL
    monkeypatch.undo()
    assert site.step(last) == whole


def test_old_runs_are_removed_and_the_current_one_never(tmp_path: Path) -> None:
    """Runs one after the other; the oldest of all, still in use, is kept and remembers."""
    site = Site(TABLES[0], tmp_path / "a", rules=OPEN)
    first = RemoteFederation(LocalTransport({"a": site}))
    first.open(make_model("diag"))
    names = [f"{first.members.run:016x}"]
    for _ in range(KEPT_RUNS + 3):
        os.utime(tmp_path / "a" / names[0])  # a round of it
        other = RemoteFederation(LocalTransport({"a": site}))
        fit(other, rounds=1)
        names.append(f"{other.members.run:016x}")
    left = {path.name for path in (tmp_path / "a").iterdir() if path.is_dir()}
    assert left == {names[0], *names[-KEPT_RUNS + 1 :]}


def test_a_run_that_was_removed_begins_with_a_new_memory(tmp_path: Path) -> None:
    sites = make_sites(tmp_path)
    federation = RemoteFederation(LocalTransport(sites))

    def others(record: RoundRecord) -> None:
        if record.round == 4:
            for _ in range(KEPT_RUNS):
                fit(RemoteFederation(LocalTransport({KEYS[0]: sites[KEYS[0]]})), rounds=1)

    result = fit(federation, callbacks=[others], rounds=60)
    assert not federation.refusals
    clean = undisturbed(rounds=60)
    np.testing.assert_allclose(result.statistics, clean.statistics, rtol=0, atol=1e-6)


def test_torn_files_are_removed_and_others_left(tmp_path: Path) -> None:
    last = requests_of(tmp_path)[-1]
    folder = tmp_path / KEYS[0]
    run = next(path for path in folder.iterdir() if path.is_dir())
    torn = [run / ".state.abc.tmp", run / ".joined.x_1.tmp", folder / ".answered.q.tmp"]
    others = [run / "notes.tmp", folder / ".state", folder / ".mine.1.tmp"]
    for path in (*torn, *others):
        path.write_bytes(b"torn")
    assert kind_of(Site(TABLES[0], folder, rules=OPEN).step(last)) is Kind.REPLY
    assert not any(path.exists() for path in torn)
    assert all(path.exists() for path in others)
