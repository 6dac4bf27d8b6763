"""Rounds over statistics that live on each worker's own cells.

Worker c tracks a vector t_c on its support (the cells it observed): its sums in ``observed``, its
weighted residuals in ``cell``. It uploads Q(t_c - D_c), both sides move the memory D_c by alpha
times that, and the server's estimate of sum_c t_c is

    sum_c D_c + sum over active c of Q(t_c - D_c) / p_c.

This is Algorithm 1 with V_c = D_c minus what the server knows anyway. Weights are 1, not 1/n: cell
sums add up. Memories follow the transitions of `emfed.algorithms.memory`; workers with supports of
one size are driven together.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import final

import numpy as np

from emfed.algorithms import FedEM, memory
from emfed.core.errors import DataError
from emfed.core.ledger import Ledger
from emfed.core.protocols import (
    Compressed,
    Compressor,
    Crowd,
    FloatArray,
    Form,
    IntArray,
    Layout,
    Participation,
    Request,
    Rows,
)
from emfed.core.streams import Purpose, uniforms
from emfed.core.wire import (
    ENVELOPE,
    REPLY_ENVELOPE,
    REQUEST_ENVELOPE,
    floats_size,
    payload_sizes,
    support_size,
)
from emfed.imputation.lowrank import Cells
from emfed.imputation.table import FieldTable
from emfed.models.sides import add_up

_NOTHING = np.empty(0)
COUNT = 8
"""Bytes of a number of rows."""


@final
@dataclass(frozen=True, eq=False)
class Stack:
    """Workers whose supports have the same size."""

    workers: IntArray
    cells: IntArray
    """Where each worker's cells lie in the table's arrays, ``(workers, size)``."""


@final
class Supports:
    """Who observed what: told once, losslessly, in the opening."""

    def __init__(self, table: FieldTable) -> None:
        self.table = table
        keys, self.place = np.unique(table.keys, return_inverse=True)
        weights = add_up(self.place, table.weights, len(keys))
        columns = table.bins.count
        self.cells = Cells(
            keys // columns, keys % columns, weights, np.zeros(len(keys)), table.shape
        )
        counts = np.diff(table.offsets)
        self.stacks = [
            Stack(members, table.offsets[members][:, None] + np.arange(size))
            for size in np.unique(counts)
            for members in [np.flatnonzero(counts == size)]
        ]

    @property
    def workers(self) -> int:
        """How many."""
        return len(self.table.workers)

    def total(self, values: FloatArray) -> FloatArray:
        """Values of the workers' cells, added up over workers by cell of the union."""
        return add_up(self.place, values, self.cells.size)

    def charge(self, ledger: Ledger) -> None:
        """The opening: how many cells, which, and their weights."""
        table, (rows, columns) = self.table, self.table.shape
        for worker in range(self.workers):
            part = slice(int(table.offsets[worker]), int(table.offsets[worker + 1]))
            keys, weights = table.keys[part], table.weights[part]
            size = COUNT + support_size(keys, rows * columns)
            if table.counted:  # small integers, most of them 1
                symbols = (weights - 1).astype(np.int32)
                bound = max(1, int(weights.sum()))
                message = Compressed(np.empty((1, 0)), symbols[None])
                size += int(payload_sizes(message, Form(0, len(keys), bound))[0])
            else:
                size += floats_size(len(keys))
            ledger.add("opening", "up", np.array([worker]), size, ENVELOPE)


@final
@dataclass(frozen=True)
class Settings:
    """How uploads are made: what `FedEM` takes, and who takes part."""

    compressor: Compressor
    participation: Participation
    step_size: float | None = None
    memory_rate: float | None = None

    def resolve(self, size: int, crowd: Crowd) -> tuple[Compressor, float, float]:
        """The operator, alpha and gamma for a support of this size, by the rules of `FedEM`."""
        algorithm = FedEM(
            self.compressor, step_size=self.step_size, memory_rate=self.memory_rate
        ).resolve(Layout((("cells", (size,)),)), crowd)
        rate, step = algorithm.memory_rate, algorithm.step_size
        assert rate is not None
        assert isinstance(step, float)
        return algorithm.compressor, rate, step


@final
class Exchange:
    """The workers' memories and the server's sum of them, round by round."""

    def __init__(self, supports: Supports, settings: Settings, seed: int, ledger: Ledger) -> None:
        self.supports, self.settings, self.seed, self.ledger = supports, settings, seed, ledger
        n = supports.workers
        everyone = np.arange(n, dtype=np.int64)
        self.probabilities = settings.participation.probabilities(everyone, n)
        self.crowd = Crowd(float(n), float(self.probabilities.min()))
        self.control = np.zeros(supports.cells.size)
        self.accepted: IntArray = np.full(n, -1, dtype=np.int64)
        self._rows: list[Rows] = [_fresh(stack) for stack in supports.stacks]
        resolved = [settings.resolve(s.cells.shape[1], self.crowd) for s in supports.stacks]
        self._operators = [(operator, rate) for operator, rate, _ in resolved]
        self._streams = _streams(supports.stacks, [operator for operator, _, _ in resolved])
        self.step_size = min(step for _, _, step in resolved)
        supports.charge(ledger)

    def gather(
        self, round_: int, targets: FloatArray, payload_down: IntArray | int = 0
    ) -> tuple[FloatArray, int]:
        """The estimate of the sum of all targets, by cell of the union, and how many took part.

        ``targets`` are t_c on every worker's cells, ``payload_down`` the bytes each worker must be
        told to compute its own.
        """
        n = self.supports.workers
        active = self.settings.participation.draw(self.seed, round_, n)
        asked = np.zeros(n, dtype=np.bool_)
        asked[active] = True
        down = np.broadcast_to(payload_down, (n,))[active]
        self.ledger.add("round", "down", active, down, REQUEST_ENVELOPE)
        uploads, moves = np.zeros(len(targets)), np.zeros(len(targets))
        for index, stack in enumerate(self.supports.stacks):
            here = np.flatnonzero(asked[stack.workers])
            if len(here) == 0:
                continue
            workers, cells = stack.workers[here], stack.cells[here]
            values, rates = self._drive(index, here, workers, round_, targets[cells])
            uploads[cells] = values / self.probabilities[workers][:, None]
            moves[cells] = rates[:, None] * values
        estimate = self.control + self.supports.total(uploads)
        self.control = self.control + self.supports.total(moves)
        self.accepted[active] = round_
        return estimate, len(active)

    def _drive(
        self, index: int, here: IntArray, workers: IntArray, round_: int, targets: FloatArray
    ) -> tuple[FloatArray, FloatArray]:
        """One round of workers of one stack: settle, subtract, compress, keep pending, send."""
        operator, rate = self._operators[index]
        store, size = self._rows[index], targets.shape[1]
        rows = {name: column[here] for name, column in store.items()}
        request = Request(round_, 0, "round", _NOTHING, None, workers, self.accepted[workers])
        received = memory.receive(rows, request)
        if len(received.fresh) != len(workers):
            raise DataError("a worker's memory does not match what was accepted from it.")
        rows = received.rows
        innovation = targets - rows["control"]
        streams = self._streams[index][here]
        u = uniforms(self.seed, round_, Purpose.COMPRESSION, streams, operator.draws(size))
        message = operator.compress(innovation, u)
        values = operator.decompress(message, u, size)
        sizes = payload_sizes(message, operator.form(size), operator.dither(u, size))
        rates, told = np.full(len(workers), rate), 0
        if self.settings.memory_rate is None:
            rates, told = own_rates(operator, innovation, rate)
        cost = np.full(len(workers), size)
        rows = memory.stage(rows, received.fresh, round_, values, rates, cost, sizes + told)
        for name, column in store.items():
            column[here] = rows[name]
        replies = memory.replies(rows, request, received)
        self.ledger.add("round", "up", replies.workers, replies.bytes_up, REPLY_ENVELOPE)
        return replies.values, replies.rates

    def memory_gap(self) -> float:
        """The relative violation of control = sum of D_c and accepted pending ones."""
        total, size = np.zeros_like(self.control), 0.0
        cells = np.zeros(len(self.supports.place))
        for stack, rows in zip(self.supports.stacks, self._rows, strict=True):
            waiting = (rows["pending_round"] >= 0) & (
                rows["committed_round"] != rows["pending_round"]
            )
            gain = np.where(waiting, rows["pending_rate"], 0.0)[:, None]
            cells[stack.cells] = rows["control"] + gain * rows["pending"]
        total = self.supports.total(cells)
        size = float(np.linalg.norm(self.control) + np.linalg.norm(cells))
        return float(np.linalg.norm(self.control - total)) / size if size else 0.0


def own_rates(
    operator: Compressor, innovations: FloatArray, bound: float
) -> tuple[FloatArray, int]:
    """alpha = 1 / (1 + omega) with the noise of each innovation itself, and the bytes to tell it.

    The theorems take the worst vector's omega, several times what most vectors meet. Any rate that
    is a function of the innovation, and not of the dither, keeps memories unbiased, and this one
    contracts them fastest; it never lies below the worst vector's. It travels in one byte, as
    sixty-fourths.
    """
    noise = operator.variance(innovations)
    if noise is None:
        return np.full(len(innovations), bound), 0
    square = (innovations**2).sum(axis=1)
    own = noise / np.where(square > 0, square, 1.0)
    return np.maximum(np.floor(64 / (1 + own)) / 64, 1 / 64), 1


def _fresh(stack: Stack) -> Rows:
    """Memories at zero."""
    n = len(stack.workers)
    return {
        name: np.full((n, *column.shape), column.fill, dtype=column.dtype)
        for name, column in memory.columns(stack.cells.shape[1]).items()
    }


def _streams(stacks: list[Stack], operators: list[Compressor]) -> list[IntArray]:
    """Addresses of random streams that do not overlap, though workers draw unequal amounts."""
    out, end = [], 0  # a stream of b blocks at address a covers a * b to (a + 1) * b
    for stack, operator in zip(stacks, operators, strict=True):
        blocks = max(1, -(-operator.draws(stack.cells.shape[1]) // 4))
        first = -(-end // blocks)
        out.append(first + np.arange(len(stack.workers), dtype=np.int64))
        end = (first + len(stack.workers)) * blocks
    return out
