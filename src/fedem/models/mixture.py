"""The E-step that all mixtures share.

A mixture component is an exponential family: log p(y, z=k; theta) = c_k + <f(y), B_k> + carrier(y).
With features f, intercepts c and slopes B (together phi of the paper, eq. 2), the E-step of every
mixture is the same few lines: logits, softmax, and the mean of responsibility times features.

Rows are read in blocks of cache size, so memory does not grow with the number of samples, and on
the array namespace of the data, so they may live on another device. Components are the second
last axis throughout: reductions over them then run along contiguous memory.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array

from fedem.protocols import FloatArray, Model

BLOCK_ELEMENTS = 1 << 16
"""Doubles in the features of one block: small enough for the cache, large enough for BLAS."""

Block = tuple[Any, Any | None]


def blocks(data: Any, weights: Any | None, width: int) -> Iterator[Block]:
    """Cut ``(..., samples, features)`` along samples so that a block has a bounded size.

    Weights may come as numpy; they leave on the namespace and device of the data.
    """
    if weights is not None:
        weights = array_namespace(data).asarray(weights, device=device(data))
    samples = data.shape[-2]
    lead = max(1, prod(data.shape[:-2]))
    rows = max(1, BLOCK_ELEMENTS // (lead * width))
    for start in range(0, samples, rows):
        part = slice(start, min(start + rows, samples))
        yield data[..., part, :], None if weights is None else weights[..., part]


def to_numpy(array: Any) -> FloatArray:
    """An array of any namespace as float64 numpy."""
    if not is_numpy_array(array):
        array = np.from_dlpack(array) if hasattr(array, "__dlpack__") else np.asarray(array)
    return np.asarray(array, dtype=np.float64)


class MixtureModel(Model):
    """A finite mixture whose components are an exponential family with common features."""

    @property
    @abstractmethod
    def feature_count(self) -> int:
        """The length of f(y)."""

    @abstractmethod
    def features(self, xp: Any, rows: Any) -> Any:
        """f(y) of raw rows, ``(..., m, columns) -> (..., m, feature_count)``, float64."""

    @abstractmethod
    def natural(self, params: Any) -> tuple[FloatArray, FloatArray]:
        """Intercepts c ``(..., K)`` and slopes B ``(..., K, feature_count)``."""

    @abstractmethod
    def carrier(self, params: Any) -> Callable[[Any, Any], Any]:
        """The part of log p(y, z) that no component changes, as ``(xp, features) -> (..., m)``."""

    @abstractmethod
    def assemble(self, mass: FloatArray, moments: FloatArray) -> FloatArray:
        """Mean responsibilities ``(..., K)`` and moments ``(..., K, features)`` to R^q."""

    def _logits(self, xp: Any, data: Any, params: Any) -> Callable[[Any], tuple[Any, Any]]:
        """A function from raw rows to their features and log joint densities ``(..., K, m)``."""
        intercepts, slopes = self.natural(params)
        move = {"device": device(data)}
        c = xp.asarray(intercepts[..., None], **move)
        b = xp.asarray(slopes, **move)
        k = b.shape[-2]

        def evaluate(rows: Any) -> tuple[Any, Any]:
            features = self.features(xp, rows)
            lead, (m, width) = features.shape[:-2], features.shape[-2:]
            if b.ndim > 2 or not lead:
                return features, b @ xp.matrix_transpose(features) + c
            # Shared parameters: one product over all workers' rows, then components before rows.
            flat = b @ xp.matrix_transpose(xp.reshape(features, (-1, width))) + c
            stacked = xp.reshape(flat, (k, *lead, m))
            axes = (*range(1, len(lead) + 1), 0, len(lead) + 1)
            return features, xp.permute_dims(stacked, axes)

        return evaluate

    def expected_statistics(self, data: Any, params: Any, weights: Any | None = None) -> FloatArray:
        """s-bar(theta) of ``(..., samples, columns)``: the mean over samples, ``(..., q)``."""
        xp = array_namespace(data)
        logits = self._logits(xp, data, params)
        mass: Any = 0.0
        moments: Any = 0.0
        for rows, w in blocks(data, weights, self.feature_count):
            features, joint = logits(rows)
            shares = xp.exp(joint - xp.max(joint, axis=-2, keepdims=True))
            total = xp.sum(shares, axis=-2, keepdims=True)
            if w is None:
                shares /= total
            else:
                shares *= w[..., None, :] / total
            mass = mass + xp.sum(shares, axis=-1)
            moments = moments + shares @ features
        if weights is None:
            count: Any = data.shape[-2]
            return self.assemble(to_numpy(mass) / count, to_numpy(moments) / count)
        count = to_numpy(weights).sum(axis=-1)[..., None]
        return self.assemble(to_numpy(mass) / count, to_numpy(moments) / count[..., None])

    def responsibilities(self, data: Any, params: Any) -> FloatArray:
        """p(z = k | y; theta), ``(..., samples, K)``."""
        xp = array_namespace(data)
        logits = self._logits(xp, data, params)
        parts = []
        for rows, _ in blocks(data, None, self.feature_count):
            _, joint = logits(rows)
            shares = np.exp(to_numpy(joint - xp.max(joint, axis=-2, keepdims=True)))
            parts.append(np.swapaxes(shares / shares.sum(axis=-2, keepdims=True), -1, -2))
        return np.concatenate(parts, axis=-2)

    def _log_densities(self, data: Any, params: Any, weights: Any | None) -> Iterator[Block]:
        """log p(y; theta) of each row, block by block, beside the block's weights."""
        xp = array_namespace(data)
        logits = self._logits(xp, data, params)
        carrier = self.carrier(params)
        for rows, w in blocks(data, weights, self.feature_count):
            features, joint = logits(rows)
            top = xp.max(joint, axis=-2, keepdims=True)
            total = xp.log(xp.sum(xp.exp(joint - top), axis=-2)) + top[..., 0, :]
            yield total + carrier(xp, features), w

    def score_samples(self, data: Any, params: Any) -> FloatArray:
        """log p(y; theta) of each row, ``(..., samples)``, in the user's units."""
        parts = [to_numpy(density) for density, _ in self._log_densities(data, params, None)]
        return np.concatenate(parts, axis=-1)

    def log_likelihood(self, data: Any, params: Any, weights: Any | None = None) -> FloatArray:
        """The (weighted) mean of log p(y; theta) over samples, ``(...)``, in the user's units."""
        xp = array_namespace(data)
        total: Any = 0.0
        for density, w in self._log_densities(data, params, weights):
            total = total + xp.sum(density if w is None else density * w, axis=-1)
        count = data.shape[-2] if weights is None else to_numpy(weights).sum(axis=-1)
        return to_numpy(total) / count
