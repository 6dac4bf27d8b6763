"""``paper``: FedMissEM as printed (Algorithm 7, Appendix F.2), for the reproduction.

S and every V_c are tables of all cells; they start at zero and fill in where uploads are not zero,
so they are kept as those cells. The printed batch is a set of sites times a set of time stamps,
drawn from the whole table: a table of the paper's size has 5 million cells, of which a worker
observed a thousand, so such a batch of 100 meets an observation once in fifty rounds.
``batch="observations"`` draws it from the worker's own cells instead. Either way Delta is masked
and not rescaled, hence biased, and with gamma = 1e-4 the fit hardly leaves its start: this mode is
for comparison, not for use. ``batch="rescaled"`` makes the second one unbiased: Delta on b of the
worker's N_c cells times N_c / b, and alpha at most (b / N_c) / (1 + omega), so that memories do not
diverge.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from math import isqrt
from typing import final, get_args

import numpy as np
from scipy.sparse import csr_array

from emfed.aggregation.coded import DIGEST_BYTES
from emfed.compressors import block_quantization
from emfed.core.errors import SettingsError, check_choice, check_count, check_range
from emfed.core.ledger import DIRECTIONS, Ledger
from emfed.core.protocols import Compressor, FloatArray, IntArray
from emfed.core.records import Records, RoundRecord
from emfed.core.settings.impute import BATCH, BatchKind
from emfed.core.streams import Purpose, choose_distinct, uniforms
from emfed.core.wire import floats_size, payload_sizes
from emfed.core.wording import Setting, Wording
from emfed.fitting.interrupting import interrupts
from emfed.fitting.stopping import Callback, Stop
from emfed.imputation.lowrank import TableParameters
from emfed.imputation.sweeps import Solver, leading
from emfed.imputation.table import FieldTable

GAMMA, ALPHA, EPOCHS = 1e-4, 1e-3, 150
"""The settings of the paper (section 4)."""
QUANTISER = block_quantization(4)
"""Not given in the paper for this experiment: the one of its others, omega = 1."""


@final
class Growing:
    """A table of zeros, but for some cells: sorted keys and their values."""

    def __init__(self) -> None:
        self.keys: IntArray = np.empty(0, dtype=np.int64)
        self.values: FloatArray = np.empty(0)

    def at(self, keys: IntArray) -> FloatArray:
        """Values at sorted keys."""
        if len(self.keys) == 0:
            return np.zeros(len(keys))
        place = np.minimum(np.searchsorted(self.keys, keys), len(self.keys) - 1)
        return np.where(self.keys[place] == keys, self.values[place], 0.0)

    def widen(self, keys: IntArray) -> None:
        """Make room for sorted keys."""
        place = np.searchsorted(self.keys, keys)
        inside = np.minimum(place, max(0, len(self.keys) - 1))
        known = self.keys[inside] == keys if len(self.keys) else np.zeros(len(keys), np.bool_)
        if not known.all():
            new, where = keys[~known], place[~known]
            self.keys = np.insert(self.keys, where, new)
            self.values = np.insert(self.values, where, 0.0)

    def add(self, keys: IntArray, values: FloatArray) -> None:
        """Add to the cells at sorted keys, each once."""
        self.widen(keys)
        self.values[np.searchsorted(self.keys, keys)] += values


@final
class PaperRun:
    """The pseudo-code, cell by cell where it says so."""

    def __init__(
        self,
        table: FieldTable,
        solver: Solver,
        seed: int,
        *,
        compressor: Compressor = QUANTISER,
        step_size: float = GAMMA,
        memory_rate: float = ALPHA,
        batch_size: int = BATCH,
        batch: BatchKind = "grid",
    ) -> None:
        check_range("step_size", step_size, 0, 2, open_low=True, open_high=True)
        check_range("memory_rate", memory_rate, 0, 1)
        check_choice("batch", batch, get_args(BatchKind))
        if not solver.family.quadratic or solver.structure.effects or solver.structure.smooth:
            raise SettingsError(
                Wording(
                    "mode 'paper' is Gaussian ({} or 'log1p'), with factors alone.",
                    Setting("family", "gaussian"),
                )
            )
        self.ledger = Ledger(len(table.workers), table.workers)
        self.records, n = Records(), len(table.workers)
        self._spent: dict[str, int] = {}
        self._evaluations, self._seconds = 0, 0.0
        self.table, self.solver, self.seed = table, solver, seed
        self.compressor, self.gamma, self.alpha = compressor, step_size, memory_rate
        self.batch_size, self.batch = check_count("batch_size", batch_size), batch
        self.statistics, self.memory = Growing(), Growing()
        self.memories = [Growing() for _ in table.workers]
        rank, (rows, columns) = solver.structure.rank, table.shape
        self.params = TableParameters(
            0.0, np.zeros((rows, rank)), np.zeros((columns, rank)), effects=False
        )
        self._opening = RoundRecord(0, 0, n, n, None, 0.0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)
        self._record(self._opening)

    def until(self, stop: Stop, callbacks: Sequence[Callback] = ()) -> str:
        """Rounds until a limit is met, a callback says so, or Ctrl-C; returns which."""
        with interrupts() as interrupted:
            while not (reason := self._limit(stop)):
                record = self.step()
                ended = [callback(record) is True for callback in callbacks]
                if interrupted():
                    return "interrupted"
                if any(ended):
                    return "callback"
        return reason

    def _limit(self, stop: Stop) -> str:
        if stop.tolerance is not None and stop.settled(self.records, stop.tolerance):
            return "tolerance"
        spent = self.ledger.total("up") + self.ledger.total("down")
        return stop.limit(self.records[-1], spent, self._seconds)

    def _record(self, record: RoundRecord) -> RoundRecord:
        """Keep what a round came to, and what the ledger has gained."""
        totals = {
            f"{what}_{way}": self.ledger.total(way, part)
            for what, part in (("bytes", None), ("payload", "payload"))
            for way in DIRECTIONS
        }
        gained = {name: total - self._spent.get(name, 0) for name, total in totals.items()}
        self._spent, self._seconds = totals, self._seconds + record.seconds
        self._evaluations += record.evaluations
        record = replace(record, **gained, epochs=self._evaluations / len(self.table.site))
        self.records.append(record)
        return record

    def step(self) -> RoundRecord:
        """Workers in turn, then the controller."""
        n, round_, began = len(self.table.workers), len(self.records), time.perf_counter()
        uploads, remembered, evaluations = Growing(), Growing(), 0
        for worker in range(n):
            keys = self.draw(round_, worker)
            values, size = self.upload(round_, worker, keys)
            evaluations += len(keys)
            rate, kept = self.rate(worker, keys), values != 0
            # Delta is 0 where nothing was ever observed, in most of the table: that stays out.
            cells, values = keys[kept], values[kept]
            self.memories[worker].add(cells, rate * values)
            uploads.add(cells, values / n)
            remembered.add(cells, rate * values / n)
            one = np.array([worker])
            # S and theta on the batch, which both ends draw from the shared seed.
            self.ledger.add("round", "down", one, floats_size(2 * len(keys)), DIGEST_BYTES)
            self.ledger.add("round", "up", one, size, DIGEST_BYTES)
        for grown in (self.memory, self.statistics):
            grown.widen(uploads.keys)
        field = self.memory.values + uploads.at(self.memory.keys)
        self.statistics.values = self.statistics.values + self.gamma * field
        self.memory.add(remembered.keys, remembered.values)
        self.params = self.maximize()
        return self._record(
            replace(
                self._opening,
                round=round_,
                evaluations=evaluations,
                squared_H=float(field @ field),
                step_size=self.gamma,
                seconds=time.perf_counter() - began,
            )
        )

    def factor(self, worker: int, keys: IntArray) -> float:
        """What Delta on a batch is multiplied by."""
        own = int(self.table.offsets[worker + 1] - self.table.offsets[worker])
        return own / len(keys) if self.batch == "rescaled" else 1.0

    def rate(self, worker: int, keys: IntArray) -> float:
        """alpha, as far as the noise of a batch allows."""
        if self.batch != "rescaled":
            return self.alpha
        noise = 1 + self.compressor.omega(len(keys))
        return min(self.alpha, 1 / (self.factor(worker, keys) * noise))

    def draw(self, round_: int, worker: int) -> IntArray:
        """The batch's cells, sorted: sites times time stamps, or some of the worker's own."""
        table, (rows, columns) = self.table, self.table.shape
        one = np.array([worker], dtype=np.int64)
        if self.batch != "grid":
            first, last = int(table.offsets[worker]), int(table.offsets[worker + 1])
            if last - first <= self.batch_size:
                return table.keys[first:last]
            u = uniforms(self.seed, round_, Purpose.BATCH, one, self.batch_size)
            return table.keys[first + np.sort(choose_distinct(u, np.array([last - first]))[0])]
        high = min(rows, isqrt(self.batch_size) or 1)
        wide = min(columns, max(1, self.batch_size // high))
        u = uniforms(self.seed, round_, Purpose.BATCH, one, high + wide)
        sites = np.sort(choose_distinct(u[:, :high], np.array([rows]))[0])
        times = np.sort(choose_distinct(u[:, high:], np.array([columns]))[0])
        return np.asarray((sites[:, None] * columns + times).ravel())

    def upload(self, round_: int, worker: int, keys: IntArray) -> tuple[FloatArray, int]:
        """Q(Delta) on the batch: Delta = observed or theta, minus S, minus V_c."""
        table, columns = self.table, self.table.shape[1]
        part = slice(int(table.offsets[worker]), int(table.offsets[worker + 1]))
        filled = self.params.theta(keys // columns, keys % columns)
        own = table.keys[part]
        place = np.minimum(np.searchsorted(own, keys), len(own) - 1)
        seen = own[place] == keys
        # One virtual observer per worker: the mean of those who saw the cell.
        values = (table.values[part] / table.weights[part])[place]
        estimate = np.where(seen, values, filled)
        delta = estimate - self.statistics.at(keys) - self.memories[worker].at(keys)
        delta = self.factor(worker, keys) * delta
        one, q, operator = np.array([worker], dtype=np.int64), len(keys), self.compressor
        u = uniforms(self.seed, round_, Purpose.COMPRESSION, one, operator.draws(q))
        message = operator.compress(delta[None], u)
        size = payload_sizes(message, operator.form(q), operator.dither(u, q))
        return operator.decompress(message, u, q)[0], int(size[0])

    def maximize(self) -> TableParameters:
        """T(S): the leading factors of S, shrunk by the penalty."""
        (rows, columns), structure = self.table.shape, self.solver.structure
        keys, values = self.statistics.keys, self.statistics.values
        if structure.rank == 0 or not values.any():
            return self.params
        matrix = csr_array((values, (keys // columns, keys % columns)), shape=(rows, columns))
        left, sizes, right = leading(matrix, structure.rank, self.seed)
        root = np.sqrt(np.maximum(sizes - structure.penalty, 0.0))
        return replace(self.params, sites=left * root, times=right * root)
