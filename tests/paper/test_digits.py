"""MNIST's files, components and splits; on made-up digits, and on the real ones where they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emfed.core.errors import DataError, SettingsError
from paper.digits import (
    Digits,
    deal,
    load_mnist,
    principal_components,
    read_digits,
    save_digits,
)


def make_digits(rows: int = 400) -> Digits:
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (rows, 30)).astype(np.uint8)
    images[:, 7] = 0
    return Digits(images, rng.integers(0, 10, rows), rng.integers(0, 20, rows))


def test_files_are_read_and_checked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMFED_DATA", str(tmp_path))
    with pytest.raises(DataError, match="has no mnist.npz"):
        load_mnist()
    digits = make_digits()
    (tmp_path / "mnist.npz").write_bytes(b"nothing")
    with pytest.raises(DataError, match="no usable arrays images, labels"):
        load_mnist()
    np.savez(tmp_path / "mnist.npz", images=digits.rows.astype(float), labels=digits.labels)
    with pytest.raises(DataError, match="expected images, uint8"):
        load_mnist()
    np.savez(tmp_path / "mnist.npz", images=digits.rows, labels=digits.labels)
    assert load_mnist().writers is None
    np.savez(tmp_path / "mnist_writers.npz", writer=np.arange(3))
    with pytest.raises(DataError, match="not of the rows"):
        load_mnist()
    np.savez(tmp_path / "mnist_writers.npz", writer=digits.writers)
    np.testing.assert_array_equal(load_mnist().writers, digits.writers)


def test_without_files_and_network_the_message_says_what_to_do(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import sklearn.datasets

    def refuse(*arguments: Any, **options: Any) -> None:
        raise OSError("no route to host")

    monkeypatch.delenv("EMFED_DATA", raising=False)
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", refuse)
    with pytest.raises(DataError, match="no route to host.*Set EMFED_DATA to a folder"):
        load_mnist()


def test_the_download_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    import sklearn.datasets

    digits = make_digits()
    answer = (digits.rows.astype(np.int64), digits.labels.astype(str).astype(object))
    monkeypatch.delenv("EMFED_DATA", raising=False)
    monkeypatch.setattr(sklearn.datasets, "fetch_openml", lambda *a, **o: answer)
    loaded = load_mnist()
    np.testing.assert_array_equal(loaded.rows, digits.rows)
    np.testing.assert_array_equal(loaded.labels, digits.labels)
    assert loaded.writers is None


def test_components_are_centred_uncorrelated_and_kept(tmp_path: Path) -> None:
    reduced = principal_components(make_digits(), 5)
    assert reduced.rows.shape == (400, 5)
    covariance = np.cov(reduced.rows, rowvar=False)
    np.testing.assert_allclose(covariance, np.diag(np.diag(covariance)), atol=1e-12)
    assert np.all(np.diff(np.diag(covariance)) <= 0)
    save_digits(reduced, tmp_path / "x.npz")
    again = read_digits(tmp_path / "x.npz")
    for name in ("rows", "labels", "writers"):
        np.testing.assert_array_equal(getattr(again, name), getattr(reduced, name))
    save_digits(Digits(reduced.rows, reduced.labels, None), tmp_path / "y.npz")
    assert read_digits(tmp_path / "y.npz").writers is None


@pytest.mark.parametrize("split", ["random", "sorted", "writer"])
def test_splits_of_writers_differ_in_nothing_but_who_has_what(split: Any) -> None:
    digits = make_digits()
    numbered = Digits(np.arange(400.0)[:, None], digits.labels, digits.writers)
    data = deal(numbered, 3, workers=8, rows=0, split=split, sizes="writers")
    assert digits.writers is not None
    np.testing.assert_array_equal(data.counts, np.bincount(digits.writers)[:8])
    order = data.rows[:, 0].astype(int)
    assert sorted(order) == sorted(np.flatnonzero(digits.writers < 8))
    if split == "sorted":
        assert np.all(np.diff(digits.labels[order]) >= 0)
    elif split == "writer":
        for k in range(8):
            assert set(digits.writers[data.worker(k)[:, 0].astype(int)]) == {k}
    else:
        other = deal(numbered, 4, workers=8, rows=0, split=split, sizes="writers")
        assert not np.array_equal(other.rows, data.rows)


def test_equal_sizes_and_what_is_refused() -> None:
    digits = make_digits()
    data = deal(digits, 0, workers=10, rows=30)
    assert set(data.counts) == {30}
    assert len(np.unique(data.rows, axis=0)) == 300
    with pytest.raises(SettingsError, match="10 workers with 50 rows each are more than 400"):
        deal(digits, 0, workers=10, rows=50)
    with pytest.raises(DataError, match="writers of MNIST's digits are not known"):
        deal(Digits(digits.rows, digits.labels, None), 0, workers=3, rows=1, sizes="writers")


def test_the_real_digits(data_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("EMFED_DATA", str(data_dir))
    digits = load_mnist()
    assert digits.rows.shape == (70_000, 784)
    assert digits.rows.any(axis=0).sum() == 719
    assert digits.writers is not None
    assert len(np.unique(digits.writers)) == 836
