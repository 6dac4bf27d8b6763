"""MNIST as a federation: images, labels and writers; principal components; who holds which rows.

Nothing is shipped. ``mnist.npz`` (arrays ``images``, uint8 of shape (70000, 784), and ``labels``)
and, if there, ``mnist_writers.npz`` (``writer``, from QMNIST) are read from the folder that the
environment variable ``EMFED_DATA`` names; without it, scikit-learn downloads images and labels from
OpenML.
"""

from __future__ import annotations

import io
import logging
import os
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from emfed.core.errors import DataError, SettingsError, check_count
from emfed.core.protocols import FloatArray, IntArray
from emfed.core.storage import write_atomic
from emfed.core.streams import Purpose, uniforms
from emfed.data.workers import WorkerData

VARIABLE = "EMFED_DATA"
"""The environment variable that names the folder of data files."""
NO_WRITERS = (
    f"the writers of MNIST's digits are not known: set {VARIABLE} to a folder with "
    "mnist_writers.npz (array `writer`, one number a row, from QMNIST)."
)
_log = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class Digits:
    """Rows (images or their components) with the label and, where known, the writer of each."""

    rows: NDArray[np.uint8] | FloatArray
    labels: IntArray
    writers: IntArray | None


def load_mnist() -> Digits:
    """All 70,000 images, training rows first; raises `DataError` where there is no way to them."""
    folder = os.environ.get(VARIABLE)
    if folder:
        return _read(Path(folder))
    from sklearn.datasets import fetch_openml

    _log.info("downloading MNIST from OpenML")
    try:
        with warnings.catch_warnings(action="ignore"):  # of retries
            images, labels = fetch_openml(
                "mnist_784", version=1, return_X_y=True, as_frame=False, parser="liac-arff"
            )
    except Exception as error:  # the fetcher raises whatever the network, the disk or the site does
        raise DataError(
            f"MNIST is not here and OpenML cannot be reached ({error}). Set {VARIABLE} to a folder "
            "with mnist.npz (arrays `images` and `labels`), or run this where there is a network."
        ) from error
    return Digits(images.astype(np.uint8), labels.astype(np.int64), None)


def _read(folder: Path) -> Digits:
    path = folder / "mnist.npz"
    if not path.is_file():
        raise DataError(f"{VARIABLE} is {str(folder)!r}, which has no mnist.npz.")
    images, labels = _arrays(path, "images", "labels")
    if images.ndim != 2 or images.dtype != np.uint8 or labels.shape != images.shape[:1]:
        raise DataError(
            f"{path}: expected images, uint8 of shape (rows, pixels), and one label a row; got "
            f"{images.dtype} of shape {images.shape} and labels of shape {labels.shape}."
        )
    writers: IntArray | None = None
    if (folder / "mnist_writers.npz").is_file():
        (found,) = _arrays(folder / "mnist_writers.npz", "writer")
        if found.shape != labels.shape:
            raise DataError(f"{folder / 'mnist_writers.npz'} is not of the rows of {path}.")
        writers = found.astype(np.int64)
    return Digits(images.astype(np.uint8, copy=False), labels.astype(np.int64), writers)


def _arrays(path: Path, *names: str) -> tuple[NDArray[np.generic], ...]:
    try:
        with np.load(path) as file:
            return tuple(file[name] for name in names)
    except (KeyError, ValueError, OSError, EOFError) as error:
        raise DataError(f"{path} has no usable arrays {', '.join(names)} ({error}).") from error


def principal_components(digits: Digits, count: int) -> Digits:
    """The first ``count`` principal components of the pixels that are ever non-zero, over 255."""
    from sklearn.decomposition import PCA

    check_count("count", count)
    pixels = digits.rows[:, digits.rows.any(axis=0)] / 255.0
    rows = PCA(count, svd_solver="covariance_eigh").fit_transform(pixels)
    return Digits(rows, digits.labels, digits.writers)


def save_digits(digits: Digits, path: Path) -> None:
    """Write an npz file, whole or not at all."""
    writers = np.empty(0, np.int64) if digits.writers is None else digits.writers
    buffer = io.BytesIO()
    np.savez(buffer, rows=digits.rows, labels=digits.labels, writers=writers)
    write_atomic(path, buffer.getvalue())


def read_digits(path: Path) -> Digits:
    """What `save_digits` wrote."""
    with np.load(path) as file:
        writers = file["writers"]
        return Digits(file["rows"], file["labels"], writers if len(writers) else None)


def deal(
    digits: Digits,
    seed: int,
    *,
    workers: int,
    rows: int,
    split: Literal["random", "sorted", "writer"] = "random",
    sizes: Literal["equal", "writers"] = "equal",
) -> WorkerData:
    """Rows dealt out to workers: at random, sorted by label, or each writer's to one worker.

    ``sizes="equal"`` gives each worker so many ``rows``; ``"writers"`` gives worker i as many as
    the i-th writer wrote, of the rows that the first ``workers`` writers wrote, so that splits
    differ in nothing but heterogeneity. A split by writer has the sizes of writers.
    """
    order = np.argsort(uniforms(seed, 2, Purpose.DATA, np.arange(len(digits.rows)), 1)[:, 0])
    if sizes == "writers" or split == "writer":
        if digits.writers is None:
            raise DataError(NO_WRITERS)
        present, which = np.unique(digits.writers, return_inverse=True)
        order = order[which[order] < workers]
        counts = np.bincount(which[order], minlength=min(workers, len(present)))
    else:
        counts = np.full(workers, rows)
        if workers * rows > len(order):
            raise SettingsError(
                f"{workers} workers with {rows} rows each are more than {len(order)} rows."
            )
        order = order[: workers * rows]
    if split != "random":
        key = digits.labels if split == "sorted" else digits.writers
        assert key is not None
        order = order[np.argsort(key[order], kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    return WorkerData(digits.rows[order], offsets)
