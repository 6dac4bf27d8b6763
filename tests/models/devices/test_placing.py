"""Rows of memory-mapped files, read past the cache of the system where it does not have them."""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emfed.models.devices import placing


def pages(size: int) -> Any:
    """Memory as `placing._pages` has it, without a card."""
    room = np.empty(size + 3 * placing.PAGE, dtype=np.uint8)
    skip = -room.ctypes.data % placing.PAGE
    return room[skip : skip + size + 2 * placing.PAGE]


def read(rows: Any) -> Any:
    with ThreadPoolExecutor(2) as pool:
        return placing.read_file(pool, rows, pages(rows.nbytes))


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(placing, "CACHED_SHARE", 0.0)
    if not hasattr(os, "O_DIRECT"):
        pytest.skip("this system has no reads past its cache")
    out = tmp_path / "rows.npy"
    np.save(out, np.random.default_rng(0).normal(size=(5000, 7)))
    try:
        os.close(os.open(out, os.O_RDONLY | os.O_DIRECT))
    except OSError:
        pytest.skip("nor has this file system")
    return out


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("cut", [(0, 5000), (3, 3001), (4990, 5000), (1, 2)])
def test_rows_of_a_file_are_those_of_the_array(
    path: Path, cut: tuple[int, int], cached: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "PIECE_BYTES", 3 * placing.PAGE)
    whole = np.load(path)
    if not cached:
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)
    found = read(np.load(path, mmap_mode="r")[slice(*cut)])
    np.testing.assert_array_equal(found, whole[slice(*cut)])


def test_what_is_no_longer_the_file_is_not_read_from_it(path: Path) -> None:
    mapped = np.load(path, mmap_mode="r")
    assert read(mapped[10:20]) is not None
    np.save(path.with_name("other.npy"), np.zeros((5000, 7)))
    path.with_name("other.npy").replace(path)
    assert read(mapped[10:20]) is None
    np.save(path.with_name("short.npy"), np.asarray(mapped[:100]))
    path.with_name("short.npy").replace(path)
    assert read(mapped[50:3000]) is None
    path.unlink()
    assert read(mapped[10:20]) is None


def test_arrays_that_are_no_rows_of_a_file_are_copied_as_before(path: Path) -> None:
    mapped = np.load(path, mmap_mode="r")
    assert read(np.asarray(mapped)) is None
    assert read(mapped[:, :3]) is None
    assert read(mapped[::2]) is None
    assert read(np.load(path, mmap_mode="r+")[:10]) is None
    np.save(path.with_name("whole.npy"), np.arange(12).reshape(4, 3))
    assert read(np.load(path.with_name("whole.npy"), mmap_mode="r")) is None


def test_a_file_that_the_cache_can_hold_comes_from_there(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(placing, "CACHED_SHARE", 0.5)
    assert read(np.load(path, mmap_mode="r")[:10]) is None
