"""What members leave on a disk that fails, or whose power is cut between any two writes."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from pathlib import Path
from random import Random
from typing import Any

import pytest

from emfed.core.storage import DISK, Disk, write_atomic
from emfed.network.spending import SiteMemory
from tests.network.disks import Killed, SimulatedDisk


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


def spend(memory: SiteMemory, given: list[str]) -> None:
    """Take what an owner allows, until the process dies; note what was given for it."""
    for run in ("first", "second", "third"):
        memory.fits.enter(run)
        given.append("fit")
        assert memory.allowance.charge(run, 1.0, None)
        for name in "ab":
            assert memory.allowance.use(run, 0.25, name)
            given.append("answer")
        assert memory.tally.spend({"answered": 1000}) is None
        given.append("look")


def remembered(disk: Disk, folders: list[Path]) -> dict[str, int]:
    memory = SiteMemory(folders[0], disk, folders[1:])
    used = sum(round(run.used / 0.25) for run in memory.allowance.read()[1].values())
    looks = memory.tally.read()["answered"]
    return {"fit": memory.fits.read()[0], "answer": used, "look": looks}


@pytest.mark.parametrize("power", [True, False])
def test_whenever_a_site_dies_nothing_is_forgotten_that_it_gave_away(power: bool) -> None:
    """Nothing is given before it is counted, in the site's folder and in the copy."""
    folders = [Path("site"), Path("copy")]
    whole = SimulatedDisk(Random(0).random)
    spend(SiteMemory(folders[0], whole, folders[1:]), [])
    assert whole.calls > 60
    for fuse in range(whole.calls):
        disk, given = SimulatedDisk(Random(fuse).random), list[str]()
        disk.fuse = fuse
        with pytest.raises(Killed):
            spend(SiteMemory(folders[0], disk, folders[1:]), given)
        disk.crash(power)
        for only in (folders, folders[:1]):
            known = remembered(disk, only)
            assert all(known[what] >= given.count(what) for what in known)


# The simulated disk is as bad as it claims, and not worse.


def test_a_power_cut_leaves_the_old_file_or_the_new_one() -> None:
    path, seen = Path("d/f"), set()
    for seed in range(200):
        disk = SimulatedDisk(Random(seed).random)
        write_atomic(path, b"old" * 5, disk)
        disk.fuse = seed % 5
        with contextlib.suppress(Killed):
            write_atomic(path, b"new" * 5, disk)
        disk.crash(power=True)
        seen.add(disk.read(path))
        assert disk.read(path) in (b"old" * 5, b"new" * 5)
    assert len(seen) == 2


def test_a_power_cut_takes_what_was_not_synced() -> None:
    seen = set()
    for seed in range(100):
        disk = SimulatedDisk(Random(seed).random)
        disk.replace(disk.create(Path("d/f"), b"abcdefgh"), Path("d/f"))
        disk.crash(power=True)
        seen.add(disk.read(Path("d/f")))
    assert None in seen
    assert any(data is not None and data != b"abcdefgh" for data in seen)


def test_a_kill_leaves_all_that_was_written() -> None:
    disk = SimulatedDisk(Random(1).random)
    disk.replace(disk.create(Path("d/f"), b"abc"), Path("d/f"))
    disk.crash(power=False)
    assert disk.read(Path("d/f")) == b"abc"
