"""`fit`: from data and settings to a fitted model, in one call."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from fedem.algorithms import EM, Everyone
from fedem.datasets.workers import as_workers, match_columns, read_table
from fedem.errors import SettingsError
from fedem.federations import FEDERATIONS
from fedem.ledger import Ledger
from fedem.protocols import (
    Algorithm,
    Federation,
    FloatArray,
    IntArray,
    Model,
    Opening,
    Participation,
)
from fedem.random import check_seed
from fedem.records import Records
from fedem.rounds import Callback, Monitor, Run, Stop
from fedem.wire import ENVELOPE, floats_size


@final
@dataclass(frozen=True, eq=False)
class Result:
    """What a run reached. ``params`` are in the user's units; ``model`` knows its data."""

    model: Any
    params: Any
    records: Records
    stopped: str
    """The limit that was met, ``callback`` or ``interrupted``."""
    seed: int
    statistics: FloatArray
    ledger: Ledger
    """Every byte by worker, direction and kind; payload and envelope apart."""
    columns: tuple[str, ...] | None = None
    """Names of the data's columns, where it had any."""

    @property
    def bytes_up(self) -> int:
        """All bytes that workers sent."""
        return self.ledger.total("up")

    @property
    def bytes_down(self) -> int:
        """All bytes that workers were sent."""
        return self.ledger.total("down")

    @property
    def guard_hits(self) -> int:
        """How often a step had to be halved to stay where T is defined."""
        return sum(record.guard_hits for record in self.records)

    def log_likelihood(self, data: Any) -> float:
        """The mean log-likelihood of rows, per sample, in the user's units."""
        return float(self.model.log_likelihood(*self._inner(data)))

    def predict_proba(self, data: Any) -> FloatArray:
        """p(component | row)."""
        return np.asarray(self.model.responsibilities(*self._inner(data)))

    def predict(self, data: Any) -> IntArray:
        """The most likely component of each row."""
        return np.argmax(self.predict_proba(data), axis=-1).astype(np.int64)

    def _inner(self, data: Any) -> tuple[Any, Any]:
        """Checked rows, and the parameters in the units of the statistics."""
        rows, columns = read_table(data, "the data")
        if columns is not None and self.columns is not None:
            rows = match_columns(rows, columns, self.columns, "the data")
        self.model.check(rows, "the data", self.columns or columns)
        return rows, self.model.maximize(self.statistics)


def _weights(weights: str | Sequence[float] | FloatArray, counts: IntArray) -> FloatArray:
    """w_i, summing to one."""
    if isinstance(weights, str):
        if weights == "samples":
            return counts / counts.sum()
        if weights == "uniform":
            return np.full(len(counts), 1 / len(counts))
        raise SettingsError(f"weights must be 'samples', 'uniform' or numbers; got {weights!r}.")
    values = np.asarray(weights, dtype=np.float64)
    if values.shape != counts.shape or not np.all(np.isfinite(values) & (values > 0)):
        raise SettingsError(
            f"weights must be {len(counts)} positive numbers, one per worker; "
            f"got shape {values.shape}."
        )
    return values / values.sum()


def _plain(value: Any) -> Any:
    """numpy's scalars and arrays as JSON types."""
    return value.item() if isinstance(value, np.generic) else np.asarray(value).tolist()


def _digest(opening: Opening) -> str:
    """Tells data sets apart by what the opening exchange said of them."""
    digest = hashlib.blake2b(opening.counts.tobytes(), digest_size=16)
    for name in sorted(opening.summaries):
        digest.update(opening.summaries[name].tobytes())
    return digest.hexdigest()


def open_run(
    model: Model,
    data: Any,
    algorithm: Algorithm | None = None,
    *,
    groups: Any | None = None,
    weights: str | Sequence[float] | FloatArray = "samples",
    participation: Participation | None = None,
    start: Any | None = None,
    start_statistics: Literal["expected", "parameters"] | None = None,
    federation: Literal["stacked", "loop"] | Federation = "stacked",
    seed: int = 0,
    monitor: Monitor | None = None,
    retries: int = 0,
    count_bytes: bool = True,
) -> Run:
    """The opening exchange and the start: a `Run` ready for its first round. See `fit`."""
    check_seed(seed)
    algorithm = EM() if algorithm is None else algorithm
    participation = Everyone() if participation is None else participation
    if isinstance(federation, str):
        if federation not in FEDERATIONS:
            raise SettingsError(
                f"federation must be one of {', '.join(FEDERATIONS)} or a Federation; "
                f"got {federation!r}."
            )
        network: Federation = FEDERATIONS[federation](as_workers(data, groups))
    elif data is not None or groups is not None:
        raise SettingsError("a Federation has its own data: give None, or name a federation.")
    else:
        network = federation
    opening = network.open(model)
    w = _weights(weights, opening.counts)
    bound = model.bind(opening.summaries, opening.counts, w)
    samples = int(opening.counts.sum())
    fingerprint = {
        "model": bound.describe(),
        "algorithm": algorithm.resolve(bound.layout).describe(),
        "participation": participation.describe(),
        "weights": hashlib.blake2b(w.tobytes(), digest_size=16).hexdigest(),
        "seed": seed,
        "data": _digest(opening),
    }
    ledger = Ledger(network.size)
    everyone = np.arange(network.size, dtype=np.int64)
    told = 1 + sum(int(np.prod(v.shape[1:])) for v in opening.summaries.values())
    constants = sum(v.size for v in bound.shared_constants().values())
    ledger.add("opening", "up", everyone, floats_size(told), ENVELOPE)
    ledger.add("opening", "down", everyone, floats_size(constants), ENVELOPE)
    statistics, exchanged = _start(bound, network, w, start, start_statistics, seed)
    if exchanged:
        numbers, q = exchanged, bound.layout.size
        ledger.add("opening", "down", everyone, floats_size(numbers), ENVELOPE)
        ledger.add("opening", "up", everyone, floats_size(q), ENVELOPE)
    fingerprint = json.loads(json.dumps(fingerprint, default=_plain))
    fingerprint["start"] = hashlib.blake2b(statistics.tobytes(), digest_size=16).hexdigest()
    return Run(
        bound,
        algorithm,
        network,
        statistics,
        weights=w,
        participation=participation,
        seed=seed,
        samples=samples,
        ledger=ledger,
        evaluations=samples if exchanged else 0,
        columns=opening.columns,
        fingerprint=fingerprint,
        retries=retries,
        monitor=monitor,
        count_bytes=count_bytes,
    )


def _start(
    model: Model,
    network: Federation,
    weights: FloatArray,
    start: Any | None,
    mode: str | None,
    seed: int,
) -> tuple[FloatArray, int]:
    """S_0, and how many parameters were sent to get it by an exact upload of everyone (0: none)."""
    if mode not in (None, "expected", "parameters"):
        raise SettingsError(f"start_statistics must be 'expected' or 'parameters'; got {mode!r}.")
    params = model.start(seed) if start is None else model.from_user(start)
    if mode == "parameters" or (mode is None and start is None):
        statistics, sent = model.statistics_of(params), 0
    else:
        statistics = network.mean_statistics(model, params, weights)
        sent = sum(array.size for array in params.arrays().values())
    if not model.inside(statistics):
        raise SettingsError(
            "at this start some component has no mass or no positive definite covariance: "
            + (
                "some columns are combinations of others. Drop them, or set covariance_floor > 0."
                if start is None
                else "choose other starting parameters."
            )
        )
    return statistics, sent


def fit(
    model: Model,
    data: Any,
    algorithm: Algorithm | None = None,
    *,
    rounds: int | None = None,
    epochs: float | None = None,
    tolerance: float | None = None,
    max_bytes: int | None = None,
    seconds: float | None = None,
    callbacks: Iterable[Callback] = (),
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
    resume: bool = False,
    **options: Any,
) -> Result:
    """Fit ``model`` on the data of many workers, in this process.

    ``data`` is a dict or list of tables, one per worker, or one table with ``groups`` naming the
    worker of each row. ``algorithm`` is `EM` (the default), `FedEM` or `VRFedEM`.

    Stops at the first limit met of ``rounds`` (100 if no limit is given), ``epochs``,
    ``max_bytes``, ``seconds``, or when |H|^2 <= ``tolerance``; Ctrl-C ends after the current round
    and returns what was reached. An error in mid-run carries what was reached as ``error.result``.

    Other options: ``weights`` ``"samples"`` (the pooled optimum) or ``"uniform"`` (the paper);
    ``participation``, `Everyone` by default; ``start``, parameters in the user's units (by default
    drawn from aggregates, which reveal no record); ``start_statistics``, whether S_0 is the
    ``"expected"`` statistics at the start (the paper; a full pass and an exact upload, default for
    a given start) or what the start's ``"parameters"`` imply (free, default otherwise);
    ``federation`` ``"stacked"`` or ``"loop"``; ``seed``; ``monitor``; ``retries`` for workers that
    stay silent; ``count_bytes=False`` to skip the ledger. With ``checkpoint`` the state is written
    every ``checkpoint_every`` rounds, and ``resume=True`` continues from it if it is there.
    """
    limits = (rounds, epochs, max_bytes, seconds)
    if all(limit is None for limit in limits):
        rounds = 100
    stop = Stop(rounds, epochs, tolerance, max_bytes, seconds)
    if resume and checkpoint is None:
        raise SettingsError("resume=True needs the path of a checkpoint.")
    run = open_run(model, data, algorithm, **options)
    if resume and checkpoint is not None and Path(checkpoint).exists():
        run.restore(checkpoint)
    try:
        stopped = run.until(stop, tuple(callbacks), checkpoint, checkpoint_every)
    except Exception as error:
        setattr(error, "result", _result(run, "error"))  # noqa: B010 (any exception gets one)
        raise
    return _result(run, stopped)


def _result(run: Run, stopped: str) -> Result:
    return Result(
        model=run.model,
        params=run.model.to_user(run.params),
        records=run.records,
        stopped=stopped,
        seed=run.seed,
        statistics=run.state.statistics,
        ledger=run.ledger,
        columns=run.columns,
    )
