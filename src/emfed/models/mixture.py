"""The E-step that all mixtures share.

A mixture component is an exponential family: log p(y, z=k; theta) = c_k + <f(y), B_k> + carrier(y).
With features f, intercepts c and slopes B (together phi of the paper, eq. 2), the E-step of every
mixture is the same few lines: logits, softmax, and the mean of responsibility times features.

Rows are read in blocks of cache size, so memory does not grow with the number of samples, and on
the array namespace of the data, so they may live on another device. Inside, samples are the last
axis: features are ``(..., feature, sample)`` and logits ``(..., component, sample)``, so that every
reduction and product runs along contiguous memory.

Decision: docs/decisions/011-one-e-step.md
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import numpy as np
from array_api_compat import (
    array_namespace,
    device,
    is_cupy_array,
    is_numpy_array,
    is_torch_array,
)

from emfed.core.protocols import FloatArray, IntArray, Model
from emfed.models.devices import (
    MOST_COMPONENTS,
    Pass,
    Ragged,
    Sums,
    answers,
    block_elements,
    labels,
    ragged,
    sweep,
)

BLOCK_ELEMENTS = 1 << 16
"""Doubles in the features of one block: small enough for the cache, large enough for BLAS."""
BLOCK_ROWS = 1024
"""Rows of a block of wide features, at most."""
FEWEST_ROWS = 256
"""Rows of a block of wide features: as many as fit four times the elements above, within these."""

RowBlock = tuple[Any, Any | None]


def blocks(data: Any, weights: Any | None, width: int) -> Iterator[RowBlock]:
    """Cut ``(..., samples, features)`` along samples so that a block has a bounded size.

    Weights may come as numpy; they leave on the namespace and device of the data.
    """
    if weights is not None:
        weights = array_namespace(data).asarray(weights, device=device(data))
    samples = data.shape[-2]
    wide = max(min(BLOCK_ROWS, 4 * BLOCK_ELEMENTS // width), FEWEST_ROWS)
    total = max(block_elements(data, BLOCK_ELEMENTS) // width, wide)
    rows = max(1, total // max(1, prod(data.shape[:-2])))
    for start in range(0, samples, rows):
        part = slice(start, min(start + rows, samples))
        yield data[..., part, :], None if weights is None else weights[..., part]


def to_numpy(array: Any) -> FloatArray:
    """An array of any namespace and device as float64 numpy."""
    if is_torch_array(array):
        array = array.detach().cpu()
    elif is_cupy_array(array):
        array = array.get()
    if not is_numpy_array(array):
        array = np.from_dlpack(array)
    return np.asarray(array, dtype=np.float64)


def _count(data: Any, weights: Any | None) -> Any:
    """How many rows there are, or their weights' sum."""
    if isinstance(data, Ragged):
        return data.totals
    return data.shape[-2] if weights is None else to_numpy(weights).sum(axis=-1)


def _unstack(xp: Any, flat: Any, lead: tuple[int, ...], m: int) -> Any:
    """``(k, prod(lead) * m)`` as ``(*lead, k, m)``, a view where the namespace has views."""
    stacked = xp.reshape(flat, (flat.shape[0], *lead, m))
    return xp.permute_dims(stacked, (*range(1, len(lead) + 1), 0, len(lead) + 1))


def _draw(xp: Any, shares: Any, uniforms: Any) -> Any:
    """How often each component is drawn: ``(..., K, m)`` shares, ``(..., m, draws)`` uniforms."""
    below = xp.cumulative_sum(shares, axis=-2)[..., :-1, :]  # the last component takes the rest
    draws, reached = uniforms.shape[-1], 0.0
    for start in range(0, draws, 16):  # a few at a time: memory is flat in their number
        part = uniforms[..., None, :, start : min(start + 16, draws)]
        reached = reached + xp.sum(xp.astype(part < below[..., None], xp.float64), axis=-1)
    reached = reached / draws
    ends = xp.ones_like(shares[..., :1, :])
    return xp.diff(xp.concat([0 * ends, reached, ends], axis=-2), axis=-2)


class _Tally:
    """Sums over rows of log densities and of the entropies of their responsibilities."""

    def __init__(self, carrier: Callable[[Any, Any], Any]) -> None:
        self.carrier = carrier
        self.density: Any = 0.0
        self.entropy: Any = 0.0

    def add(self, xp: Any, density: Any, entropy: Any, weights: Any | None) -> None:
        """A block of rows."""
        if weights is not None:
            density, entropy = density * weights, entropy * weights
        self.density = self.density + xp.sum(density, axis=-1)
        self.entropy = self.entropy + xp.sum(entropy, axis=-1)


class MixtureEStep(Model):
    """The E-step of a mixture, given the logits of rows and sums over them."""

    @property
    @abstractmethod
    def row_width(self) -> int:
        """About how many numbers `logits` keeps of a row."""

    @abstractmethod
    def logits(self, xp: Any, data: Any, params: Any) -> Callable[[Any], tuple[Any, Any]]:
        """A function from raw rows to their features and the logits ``(..., K, m)``."""

    @abstractmethod
    def moments(self, xp: Any, shares: Any, features: Any) -> Any:
        """Sums of responsibility times functions of the features, ``(..., K, numbers)``."""

    @abstractmethod
    def carrier(self, params: Any) -> Callable[[Any, Any], Any]:
        """The part of log p(y, z) that no component changes, as a function of (xp, features)."""

    @abstractmethod
    def assemble(self, mass: FloatArray, moments: FloatArray, extra: Any = None) -> FloatArray:
        """Mean responsibilities ``(..., K)`` and moments ``(..., K, features)`` to R^q.

        ``extra`` is the mean of what `common` gives.
        """

    def common(self, xp: Any, features: Any, weights: Any) -> Any:
        """Sums over the samples of ``(..., f, m)`` features that no component changes, or None."""
        return None

    def base(self, xp: Any, rows: Any) -> Any:
        """The part of log p(y) of raw rows that no parameter changes, ``(m, columns) -> (m,)``."""
        return 0.0

    # Rows on a GPU.

    def as_pass(self, params: Any, whole: bool = False) -> Pass | None:
        """The E-step as a pass of kernels, if there is one for it.

        ``whole`` logits are all of log p(y, z) but a constant, so that rows can be compared.
        """
        return None

    @property
    def sweeps(self) -> bool:
        return False

    def folded(self, sums: Sums, params: Any) -> FloatArray:
        """Moments of the features of the pass as those that `moments` gives."""
        return sums.moments

    def tables(self, rows: Ragged) -> Iterator[Ragged]:
        """The tables that the pass reads: the rows, unless features are written down."""
        yield rows

    def carried(self, params: Any, rows: Ragged) -> FloatArray:
        """Sums of the carrier over each worker's rows, ``(workers,)``."""
        return np.asarray(self.carrier(params)(np, None) * rows.totals)

    def _pass(
        self, data: Any, params: Any, weights: Any | None, whole: bool = False
    ) -> tuple[Ragged, Pass] | None:
        """Rows and pass, where there is a kernel for both."""
        rows = ragged(data, weights)
        given = None if rows is None else self.as_pass(params, whole)
        if rows is None or given is None or given.components > MOST_COMPONENTS:
            return None
        return rows, given

    def _swept(self, data: Any, params: Any, weights: Any | None, tally: Any) -> Any:
        """Statistics by a kernel, or None where there is none."""
        found = self._pass(data, params, weights)
        if found is None:
            return None
        rows, given = found
        parts = [sweep(table, given, tally is not None) for table in self.tables(rows)]
        sums = Sums(*(sum(values) for values in zip(*parts, strict=True)))
        first: Any = slice(None) if data.ndim == 3 else 0
        if tally is not None:
            tally.density = (sums.density + self.carried(params, rows))[first]
            tally.entropy = sums.entropy[first]
        total = rows.totals[:, None]
        moments = self.folded(sums, params) / total[..., None]
        return self.assemble((sums.mass / total)[first], moments[first])

    def _answers(self, data: Any, params: Any) -> Iterator[tuple[FloatArray, FloatArray]] | None:
        """Responsibilities and log densities of rows, by a kernel, or None."""
        found = self._pass(data, params, None, whole=True)
        if found is None:
            return None
        rows, given = found
        rest = np.broadcast_to(self.carried_whole(params, rows), len(rows.rows))
        return self._completed((answers(table, given) for table in self.tables(rows)), rest)

    @staticmethod
    def _completed(
        tables: Iterator[Iterator[tuple[Any, Any]]], rest: FloatArray
    ) -> Iterator[tuple[FloatArray, FloatArray]]:
        """Answers, with what the logits lack added to the densities."""
        done = 0
        for shares, density in (answer for table in tables for answer in table):
            yield shares, density + rest[done : done + len(density)]
            done += len(density)

    def carried_whole(self, params: Any, rows: Ragged) -> FloatArray | float:
        """What ``whole`` logits lack: one number, or one for each row."""
        return float(self.carrier(params)(np, None))

    # The E-step itself.

    def expected_statistics(self, data: Any, params: Any, weights: Any | None = None) -> FloatArray:
        """s-bar(theta) of ``(..., samples, columns)``: the mean over samples, ``(..., q)``."""
        return self._statistics(data, params, weights, None)

    @property
    def latent_size(self) -> int:
        """One uniform picks a component."""
        return 1

    def simulated_statistics(
        self, data: Any, params: Any, uniforms: FloatArray, weights: Any | None = None
    ) -> FloatArray:
        """Components drawn from their responsibilities instead of averaged over."""
        return self._statistics(data, params, weights, uniforms)

    def evaluate(
        self, data: Any, params: Any, weights: Any | None = None
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """Statistics, log-likelihood and entropy of the responsibilities, in one pass."""
        tally = _Tally(self.carrier(params))
        statistics = self._statistics(data, params, weights, None, tally)
        count = _count(data, weights)
        return statistics, to_numpy(tally.density) / count, to_numpy(tally.entropy) / count

    def _statistics(
        self,
        data: Any,
        params: Any,
        weights: Any | None,
        uniforms: FloatArray | None,
        tally: _Tally | None = None,
    ) -> FloatArray:
        swept = None if uniforms is not None else self._swept(data, params, weights, tally)
        if swept is not None:
            return swept
        xp = array_namespace(data)
        logits = self.logits(xp, data, params)
        mass, moments, extra, done = 0.0, 0.0, None, 0
        for rows, w in blocks(data, weights, self.row_width):
            features, joint = logits(rows)
            top = xp.max(joint, axis=-2, keepdims=True)
            shares = xp.exp(joint - top)
            total = xp.sum(shares, axis=-2, keepdims=True)
            if tally is not None:
                whole = (xp.log(total) + top)[..., 0, :]
                base = self.base(xp, xp.reshape(rows, (-1, rows.shape[-1])))
                base = base if isinstance(base, float) else xp.reshape(base, rows.shape[:-1])
                spread = whole - xp.sum(shares * joint, axis=-2) / total[..., 0, :]
                tally.add(xp, whole + tally.carrier(xp, features) + base, spread, w)
            if uniforms is not None:
                part = uniforms[..., done : done + rows.shape[-2], :]
                shares = _draw(xp, shares / total, xp.asarray(part, device=device(data)))
                total = 1.0
                done += rows.shape[-2]
            if w is None:
                shares /= total
            else:
                shares *= w[..., None, :] / total
            mass = mass + xp.sum(shares, axis=-1)
            moments = moments + self.moments(xp, shares, features)
            added = self.common(xp, features, w)
            extra = added if extra is None else extra + added
        if weights is None:
            count: Any = data.shape[-2]
        else:
            count = to_numpy(weights).sum(axis=-1)[..., None]
        return self.assemble(
            to_numpy(mass) / count,
            to_numpy(moments) / (count if weights is None else count[..., None]),
            None if extra is None else to_numpy(extra) / count,
        )

    def labels(self, data: Any, params: Any) -> IntArray:
        """The component of the largest responsibility of each row, ``(..., samples)``."""
        found = self._pass(data, params, None)  # what all components share does not matter
        if found is None:
            return self.responsibilities(data, params).argmax(axis=-1)
        rows, given = found
        parts = [labels(table, given) for table in self.tables(rows)]
        whole = parts[0] if len(parts) == 1 else np.concatenate(parts)
        return whole.reshape(data.shape[:-1])

    def responsibilities(self, data: Any, params: Any) -> FloatArray:
        """p(z = k | y; theta), ``(..., samples, K)``."""
        swept = self._answers(data, params)
        if swept is not None:
            whole = np.concatenate([shares for shares, _ in swept])
            return whole.reshape(*data.shape[:-1], -1)
        xp = array_namespace(data)
        logits = self.logits(xp, data, params)
        parts = []
        for rows, _ in blocks(data, None, self.row_width):
            _, joint = logits(rows)
            shares = np.exp(to_numpy(joint - xp.max(joint, axis=-2, keepdims=True)))
            parts.append(np.swapaxes(shares / shares.sum(axis=-2, keepdims=True), -1, -2))
        return np.concatenate(parts, axis=-2)

    def _log_densities(self, data: Any, params: Any, weights: Any | None) -> Iterator[RowBlock]:
        """log p(y; theta) of each row, block by block, beside the block's weights."""
        xp = array_namespace(data)
        logits = self.logits(xp, data, params)
        carrier = self.carrier(params)
        for rows, w in blocks(data, weights, self.row_width):
            features, joint = logits(rows)
            top = xp.max(joint, axis=-2, keepdims=True)
            total = xp.log(xp.sum(xp.exp(joint - top), axis=-2)) + top[..., 0, :]
            base = self.base(xp, xp.reshape(rows, (-1, rows.shape[-1])))
            if not isinstance(base, float):
                base = xp.reshape(base, rows.shape[:-1])
            yield total + carrier(xp, features) + base, w

    def score_samples(self, data: Any, params: Any) -> FloatArray:
        """log p(y; theta) of each row, ``(..., samples)``, in the user's units."""
        swept = self._answers(data, params)
        if swept is not None:
            return np.concatenate([density for _, density in swept]).reshape(data.shape[:-1])
        parts = [to_numpy(density) for density, _ in self._log_densities(data, params, None)]
        return np.concatenate(parts, axis=-1)

    def log_likelihood(self, data: Any, params: Any, weights: Any | None = None) -> FloatArray:
        """The (weighted) mean of log p(y; theta) over samples, ``(...)``, in the user's units."""
        if self._pass(data, params, weights) is not None:
            return self.evaluate(data, params, weights)[1]
        xp = array_namespace(data)
        total: Any = 0.0
        for density, w in self._log_densities(data, params, weights):
            total = total + xp.sum(density if w is None else density * w, axis=-1)
        count = data.shape[-2] if weights is None else to_numpy(weights).sum(axis=-1)
        return to_numpy(total) / count


class MixtureModel(MixtureEStep):
    """A finite mixture whose components are an exponential family with common features."""

    @property
    @abstractmethod
    def feature_count(self) -> int:
        """The length of f(y)."""

    @abstractmethod
    def features(self, xp: Any, rows: Any) -> Any:
        """f(y) of raw rows, ``(m, columns) -> (feature_count, m)``, float64."""

    @abstractmethod
    def natural(self, params: Any) -> tuple[FloatArray, FloatArray]:
        """Intercepts c ``(..., K)`` and slopes B ``(..., K, feature_count)``."""

    @property
    def row_width(self) -> int:
        """How many numbers `features` keeps of a row: all f(y), unless `beyond` does the rest."""
        return self.feature_count

    def beyond(self, xp: Any, params: Any, where: Any) -> Callable[[Any], Any] | None:
        """The part of the logits that the kept features do not carry, as a function of them."""
        return None

    def moments(self, xp: Any, shares: Any, features: Any) -> Any:
        """Sums of responsibility times f(y), ``(..., K, feature_count)``."""
        return shares @ xp.matrix_transpose(features)

    def logits(self, xp: Any, data: Any, params: Any) -> Callable[[Any], tuple[Any, Any]]:
        """A function from raw rows to features ``(..., f, m)`` and logits ``(..., K, m)``."""
        intercepts, slopes = self.natural(params)
        c = xp.asarray(intercepts[..., None], device=device(data))
        b = xp.asarray(slopes[..., : self.row_width], device=device(data))
        beyond = self.beyond(xp, params, device(data))

        def joint(rows: Any) -> tuple[Any, Any]:
            lead, m = rows.shape[:-2], rows.shape[-2]
            flat = self.features(xp, xp.reshape(rows, (-1, rows.shape[-1])))
            if not lead:
                return flat, b @ flat + c
            features = _unstack(xp, flat, lead, m)
            if b.ndim > 2:  # each worker has its own parameters
                return features, b @ features + c
            return features, _unstack(xp, b @ flat + c, lead, m)  # one product for all workers

        def evaluate(rows: Any) -> tuple[Any, Any]:
            features, logits = joint(rows)
            return features, logits if beyond is None else logits + beyond(features)

        return evaluate
