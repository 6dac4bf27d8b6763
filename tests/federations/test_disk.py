"""What a site does with a disk that fails, and what it leaves on one."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from fedem import Site
from fedem.storage import DISK
from fedem.wire import Kind, peek
from tests.federations.test_protocol import KEYS, TABLES, requests_of


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


def test_no_reply_leaves_after_a_failed_sync(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One that is answered from what was read is synced first; when the disk is well it goes."""
    last = requests_of(tmp_path)[-1]
    site = Site(TABLES[0], tmp_path / KEYS[0])
    whole = site.step(last)
    assert peek(whole)[0].kind is Kind.REPLY
    monkeypatch.setattr(os, "fsync", failing(errno.EIO, directories=True))
    assert peek(site.step(last))[0].kind is Kind.REFUSAL
    monkeypatch.undo()
    assert site.step(last) == whole
