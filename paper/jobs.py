"""One job: a fit with its records, and the file they are kept in."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

import numpy as np

from emfed.core.protocols import FloatArray, IntArray, Model, Summaries
from emfed.core.records import Records, RoundRecord
from emfed.core.streams import Purpose, choose_distinct, uniforms
from emfed.data.synthetic import START, TRUTH, linear_federation, synthetic_federation
from emfed.data.workers import WorkerData
from emfed.fitting import Run, open_run
from emfed.models import GaussianParameters, LinearGaussian, Location, gaussian_mixture
from emfed.models.covariances import Known
from emfed.models.parameters import Frame
from emfed.network.faulty import FaultPlan, FaultyFederation
from emfed.network.inprocess import StackedFederation
from paper.comparison import MethodSettings, run_method
from paper.config import Job
from paper.digits import (
    Digits,
    deal,
    load_mnist,
    principal_components,
    read_digits,
    save_digits,
)
from paper.settings import ExperimentSettings
from paper.single_worker import SIBLINGS, Move, naive_sum
from paper.tables import TableSettings, run_table
from paper.traces import trend_file, write_frame

COMPONENTS, DIMENSION = 10, 20
"""Components of the mixture on MNIST, and the principal components it is fitted on (section 4)."""
KAPPA = 0.5
"""The slope of the linear model: gamma_max without compression is then 1, EM's own step."""
DIVERGED = 1e12
"""A run whose |h|^2 is beyond this is over."""
CACHE = "mnist-components.npz"
ShareReport = Callable[[float], None]
"""Called with the share of a job that is done."""


def prepare_mnist(folder: Path) -> Digits:
    """MNIST's principal components, computed once and kept in the folder."""
    path = folder / CACHE
    if not path.exists():
        save_digits(principal_components(load_mnist(), DIMENSION), path)
    return _digits(path)


@lru_cache(maxsize=1)
def _digits(path: Path) -> Digits:
    return read_digits(path)


def problem(settings: ExperimentSettings, seed: int, folder: Path) -> tuple[Model, WorkerData, Any]:
    """Model, data and start. The start on MNIST is one for all seeds, as in the paper."""
    if settings.data == "linear":
        n, m, d = settings.workers, settings.rows, settings.dimension
        data = linear_federation(seed, workers=n, rows_per_worker=m, dimension=d)
        return LinearGaussian(KAPPA), data, Location(np.zeros(d))
    if settings.data == "synthetic":
        data = synthetic_federation(
            seed,
            workers=settings.workers,
            rows_per_worker=settings.rows,
            split="sorted" if settings.split == "sorted" else "random",
        )
        return synthetic_mixture(), data, START
    digits = prepare_mnist(folder)
    data = deal(
        digits,
        seed,
        workers=settings.workers,
        rows=settings.rows,
        split=settings.split,
        sizes=settings.sizes,
    )
    return gaussian_mixture(COMPONENTS, "tied"), data, start_from_rows(np.asarray(digits.rows), 0)


class _PaperUnits(Known):
    """A mixture whose statistics are in the units of the data, as the paper has them.

    The package compresses and measures in a frame, columns about their mean in units of their
    spread. |h|^2 and the compressed vectors are then other numbers than the paper's.
    """

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        bound = super().bind(summaries, counts, weights)
        d = bound.n_features
        return replace(bound, bound=replace(bound.constants, frame=Frame(np.zeros(d), np.ones(d))))


def synthetic_mixture() -> Model:
    """The paper's two components in the plane, in the paper's units."""
    return _PaperUnits(2, matrix=np.asarray(TRUTH.covariances))


def start_from_rows(rows: FloatArray, seed: int) -> GaussianParameters:
    """Uniform weights, rows at random as means, the covariance of all (section 4).

    It shows raw records to everyone, which a real federation would not do.
    """
    u = uniforms(seed, 0, Purpose.START, np.zeros(1, np.int64), COMPONENTS)
    chosen = choose_distinct(u, np.array([len(rows)]))[0]
    covariance = np.cov(rows, rowvar=False, bias=True)
    return GaussianParameters(np.full(COMPONENTS, 1 / COMPONENTS), rows[chosen], covariance)


def run_job(job: Job, folder: Path, report: ShareReport) -> dict[str, Any]:
    """Columns of the records, with the mixture's weights where |h|^2 is computed.

    Raises KeyboardInterrupt after Ctrl-C: a job is whole or absent.
    """
    settings = job.settings
    if isinstance(settings, TableSettings):
        columns, trend = run_table(settings, job.seed, report)
        store(trend, folder / trend_file(job))  # first: the job counts as done with the other
        return columns
    if isinstance(settings, MethodSettings):
        return run_method(settings, job.seed, lambda: prepare_mnist(folder), report)
    model, data, start = problem(settings, job.seed, folder)
    network: Any = data
    if settings.lose_uploads:
        faults = FaultPlan(job.seed, lose_reply=settings.lose_uploads)
        network = FaultyFederation(StackedFederation(data), faults)
    run = open_run(
        model,
        network,
        settings.make_algorithm(),
        start=start,
        weights=settings.weights,
        participation=settings.make_participation(),
        seed=job.seed,
        monitor=settings.make_monitor(),
        tol=0,
        rounds=settings.rounds,
        epochs=settings.epochs,
        patience=None,  # who is not heard stands for itself, as in the theorems
    )
    weights: list[FloatArray] = [_weights(run.params)]
    errors: list[float] = []
    total, told = 0.0, time.monotonic()

    def watch(record: RoundRecord, params: Any) -> bool:
        """Tell how far it is; True where nothing more is to be learnt."""
        nonlocal told, total
        if time.monotonic() - told > 0.1:
            told = time.monotonic()
            report(share_done(settings, record))
        if record.squared_h is None:
            return False
        weights.append(_weights(params))
        if settings.watch_memories:
            errors.append(memory_distance(run, data))
        total += record.squared_h
        reached = settings.target is not None and total <= settings.target * (len(weights) - 1)
        return reached or record.squared_h > DIVERGED

    moves = other_moves(settings, run, data, job.seed)
    if moves is not None:
        return with_weights(follow(moves, run, data.rows, settings, watch), weights)
    for record in run:
        if watch(record, run.params):
            break
    columns = with_weights(run.records, weights)
    if errors:
        columns["memory_error"] = np.full(len(run.records), np.nan)
        columns["memory_error"][np.isfinite(columns["squared_h"])] = errors
    return columns


def memory_distance(run: Run, data: WorkerData) -> float:
    """G, the mean over workers of |V_i - h_i(S)|^2; workers have equally many rows.

    V_i counts with the upload that the server has accepted and the worker does not know of yet.
    """
    tables = np.asarray(data.rows).reshape(data.size, -1, data.rows.shape[-1])
    fields = run.model.expected_statistics(tables, run.params) - run.statistics
    return float(((run.memories - fields) ** 2).sum(axis=1).mean())


def other_moves(
    settings: ExperimentSettings, opened: Run, data: WorkerData, seed: int
) -> Iterator[Move] | None:
    """The moves of an algorithm that is not the package's; None for those that are."""
    model, start = opened.model, opened.statistics
    if settings.algorithm == "naive-sum":
        operator, member = settings.make_compressor(), settings.make_participation()
        tables = np.asarray(data.rows).reshape(data.size, -1, data.rows.shape[-1])
        return naive_sum(model, tables, start, settings.step_size, operator, member, seed)
    sibling = SIBLINGS.get(settings.algorithm)
    if sibling is None:
        return None
    assert settings.batch_size is not None
    batch, inner = settings.batch_size, settings.inner_rounds
    return sibling(model, data.rows, start, settings.step_size, batch, inner, seed)


def follow(
    moves: Iterator[Move],
    opened: Run,
    rows: FloatArray,
    settings: ExperimentSettings,
    watch: Callable[[RoundRecord, Any], bool],
) -> Records:
    """Records of a sibling algorithm, from where the opening exchange of a run has led."""
    model, statistics = opened.model, opened.statistics
    records = Records(opened.records)
    params = model.maximize(statistics)
    over = False
    while not over and share_done(settings, records[-1]) < 1:
        before = records[-1]
        squared_h = None
        if before.round % settings.monitor == 0:
            field = model.expected_statistics(rows, params) - statistics
            squared_h = float(field @ field)
        began = time.perf_counter()
        move = next(moves)
        statistics, params = move.statistics, model.maximize(move.statistics)
        records.append(
            replace(
                before,
                round=before.round + 1,
                squared_H=float(move.mean_field @ move.mean_field),
                step_size=settings.step_size,
                bytes_up=0,
                bytes_down=0,
                payload_up=0,
                payload_down=0,
                evaluations=move.evaluations,
                epochs=before.epochs + move.evaluations / len(rows),
                seconds=time.perf_counter() - began,
                squared_h=squared_h,
            )
        )
        over = watch(records[-1], params)
    return records


def share_done(settings: ExperimentSettings, record: RoundRecord) -> float:
    """How much of the run is behind this record."""
    rounds = record.round / settings.rounds if settings.rounds else 0.0
    epochs = record.epochs / settings.epochs if settings.epochs else 0.0
    return min(1.0, max(rounds, epochs))


def with_weights(records: Records, weights: list[FloatArray]) -> dict[str, Any]:
    """Columns of the records and one for each weight of the mixture, from the start on."""
    columns: dict[str, Any] = dict(records.to_arrays())
    known = np.isfinite(columns["squared_h"])
    known[0] = True
    for k, values in enumerate(np.transpose(weights)):
        columns[f"weight_{k}"] = np.full(len(records), np.nan)
        columns[f"weight_{k}"][known] = values
    return columns


def _weights(params: Any) -> FloatArray:
    return np.asarray(getattr(params, "weights", np.empty(0)))


def store(columns: dict[str, Any], path: Path) -> None:
    """Write Parquet, atomically."""
    import polars as pl

    write_frame(pl.DataFrame(columns), path)
