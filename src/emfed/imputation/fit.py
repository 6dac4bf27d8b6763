"""`impute`: from records to a filled table, in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from math import inf
from typing import Any, Literal, final

import numpy as np

from emfed.algorithms import CellEM, Everyone, FedEM
from emfed.algorithms.cells import default_step
from emfed.compressors import Dithering
from emfed.core.errors import NumericalError, SettingsError, check_count, check_type
from emfed.core.protocols import WHOLE, Compressor, Crowd, Federation, Participation
from emfed.core.streams import check_seed
from emfed.data.workers import WorkerData
from emfed.fitting.driver import fit
from emfed.fitting.rounds import Run
from emfed.fitting.session import Session
from emfed.fitting.stopping import Callback, Stop
from emfed.imputation.cell import Proximal
from emfed.imputation.choice import Choice, choose
from emfed.imputation.covariates import read_covariates
from emfed.imputation.intake import read_records
from emfed.imputation.lowrank import Cells, Structure, TableParameters
from emfed.imputation.observed import Observed
from emfed.imputation.paper import ALPHA, BATCH, EPOCHS, GAMMA, QUANTISER, Batch, PaperRun
from emfed.imputation.result import Imputation
from emfed.imputation.site_owner import check_owners, table_parameters, worker_rows
from emfed.imputation.sweeps import Solver
from emfed.imputation.table import FieldTable, Grid, known_table
from emfed.models.cells import CellSums
from emfed.models.site_owner import COLUMNS, SiteOwner
from emfed.network.stacked import StackedFederation

Mode = Literal["observed", "cell", "paper", "site-owner"]
QUANTISER_OF_CELLS = Dithering(levels=3, norm=3, block=128, scales="bfloat16")
"""Three levels either side of zero, and two bytes of scale for 128 cells. The 3-norm of so many
cells, a third of which is one level, is about six standard deviations: 1.5 bits a cell."""
QUANTISER_OF_COUNTS = Dithering(levels=3, norm=2, block=32, scales="bfloat16")
"""Counts themselves have long tails: a scale for fewer of them."""
QUANTISER_OF_TIMES = Dithering(levels=3, norm=inf, block="row", scales="bfloat16")
ROUNDS = {"observed": 10, "cell": 200, "site-owner": 100}
_PILOT_ROUNDS = 5
_SWEEPS, _TOLERANCE = 500, 1e-7
"""How T(S) is finished."""


@final
@dataclass(frozen=True)
class _Job:
    """Everything `impute` was asked for."""

    table: FieldTable | None
    federation: Federation | None
    grid: Grid
    structure: Structure | None
    rank: int | None
    penalty: float | None
    site_covariates: Any
    time_covariates: Any
    compressor: Compressor | None
    participation: Participation
    step_size: float | None
    memory_rate: float | None
    batch_size: int
    batch: Batch
    folds: int
    stop: Stop
    callbacks: tuple[Callback, ...]
    seed: int

    @property
    def seasons(self) -> bool:
        """Whether lag 12 is a year."""
        return self.grid.bins.unit == "month"

    def here(self, mode: str) -> FieldTable:
        """The table, for a mode that needs all of it in this process."""
        if self.table is None:
            raise SettingsError(
                f"mode {mode!r} needs the table in this process: use mode 'observed' or 'cell' "
                "where sites elsewhere have their own records."
            )
        return self.table

    def open(self, centred: bool = False) -> tuple[Session, Cells]:
        """The opening exchange: who observed which cells, and how often."""
        federation = self.federation
        if federation is None:
            table = self.here("observed")
            workers = list(table.workers)
            rows = WorkerData(worker_rows(table), table.offsets, workers, COLUMNS)
            federation = StackedFederation(rows)
        sites, times = self.grid.shape
        model = CellSums(sites, times, centred)
        session = Session(model, federation, columns=COLUMNS, seed=self.seed)
        supports = session.supports
        assert supports is not None
        weights = supports.total(supports.weights)
        keys = supports.keys
        nothing = np.zeros(len(keys))
        return session, Cells(keys // times, keys % times, weights, nothing, self.grid.shape)

    def channel(self, session: Session) -> dict[str, Any]:
        """How cells travel."""
        counts = self.grid.family.name == "poisson"
        operator = self.compressor or (QUANTISER_OF_COUNTS if counts else QUANTISER_OF_CELLS)
        supports, n, step = session.supports, session.federation.size, self.step_size
        assert supports is not None
        if step is None:
            p = self.participation.probabilities(session.everyone, n)
            step = default_step(operator, supports.sizes, Crowd(float(n), float(p.min())))
        return {"compressor": operator, "step_size": step, "memory_rate": self.memory_rate}

    def run(self, session: Session, algorithm: CellEM, extras: Any = None) -> Run:
        """Rounds over cells, from zero."""
        assert session.supports is not None
        nothing = np.zeros(len(session.supports.keys))
        return Run(
            session,
            WHOLE,
            algorithm,
            nothing,
            participation=self.participation,
            extras=extras,
        )

    def refuse(self, mode: str, *names: str) -> None:
        """Settings that a mode has no use for."""
        standard = {"batch_size": BATCH, "batch": "grid"}
        for name in names:
            value = getattr(self, name)
            if (value is not None) if name not in standard else (value != standard[name]):
                raise SettingsError(f"mode {mode!r} takes no {name}.")


def impute(
    table: Any,
    *,
    mode: Mode = "observed",
    structure: Structure | None = None,
    rank: int | None = None,
    penalty: float | None = None,
    site_covariates: Any | None = None,
    time_covariates: Any | None = None,
    compressor: Compressor | None = None,
    participation: Participation | None = None,
    step_size: float | None = None,
    memory_rate: float | None = None,
    batch_size: int = BATCH,
    batch: Batch = "grid",
    folds: int = 3,
    rounds: int | None = None,
    epochs: float | None = None,
    tolerance: float | None = None,
    max_bytes: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    callbacks: Iterable[Callback] = (),
    threads: int = 1,
    grid: Grid | None = None,
) -> Imputation:
    """Fill a sites x time table from the records of many workers, without pooling them.

    ``table`` is a `FieldTable` (see `read_records`), or anything `read_records` takes; or an open
    federation, whose workers hold their own cells (`Grid.rows`), with the ``grid`` that all agree
    on; that goes with the first two modes. ``mode`` is

    * ``"observed"`` (default): cell sums by compressed innovations; any family;
    * ``"cell"``: the paper's statistic with a convergent step; Gaussian;
    * ``"paper"``: FedMissEM as printed, which hardly leaves its start; Gaussian;
    * ``"site-owner"``: each site belongs to one worker, whose factors stay there; Gaussian.

    docs/imputation.md says what the server learns in each. ``structure`` gives rank and penalties;
    without it they are chosen by cross-validation in ``folds`` on what the server knows (``rank``
    or ``penalty`` alone may be given); ``site-owner`` takes a default, as its server knows no
    cells. Covariates (``observed`` only) are frames with a column ``site`` or ``time``, or arrays.

    ``compressor``, ``participation``, ``step_size``, ``memory_rate``, the limits, ``seed`` and
    ``callbacks`` are those of `emfed.fit`; ``batch_size`` and ``batch`` (``"grid"`` as printed, or
    ``"observations"``) belong to ``paper``. Without limits, ``observed`` makes 10 rounds, ``cell``
    200, ``site-owner`` 100 and ``paper`` 150 epochs. ``threads`` limits those of the linear
    algebra, whose matrices are tall and thin: one is fastest.
    """
    modes: dict[str, Callable[[_Job], Imputation]] = {
        "observed": _observed,
        "cell": _cell,
        "paper": _paper,
        "site-owner": _site_owner,
    }
    if mode not in modes:
        raise SettingsError(f"mode must be one of {', '.join(modes)}; got {mode!r}.")
    check_seed(seed)
    check_count("folds", folds, 2)
    elsewhere = table if isinstance(table, Federation) else None
    if (elsewhere is None) != (grid is None):
        raise SettingsError(
            "a grid goes with a federation, and a federation needs one: "
            "Grid(sites, bins, family) says what the workers' cells are of."
        )
    data = None
    if elsewhere is None:
        data = table if isinstance(table, FieldTable) else read_records(table)
        data.warn()
        grid = data.grid
    assert grid is not None
    if all(limit is None for limit in (rounds, epochs, max_bytes, seconds)):
        rounds, epochs = (None, EPOCHS) if mode == "paper" else (ROUNDS[mode], None)
    if structure is not None:
        check_type("structure", structure, Structure, "Structure(rank=2, penalty=5)")
        if rank is not None or penalty is not None:
            raise SettingsError("give a structure, or rank and penalty, not both.")
    taking = Everyone() if participation is None else participation
    check_type("participation", taking, Participation, "Bernoulli(0.5)")
    if compressor is not None:
        check_type("compressor", compressor, Compressor, "Dithering(levels=3)")
    job = _Job(
        data,
        elsewhere,
        grid,
        structure,
        rank,
        penalty,
        site_covariates,
        time_covariates,
        compressor,
        taking,
        step_size,
        memory_rate,
        batch_size,
        batch,
        folds,
        Stop(rounds, epochs, tolerance, max_bytes, seconds),
        (callbacks,) if callable(callbacks) else tuple(callbacks),
        seed,
    )
    from threadpoolctl import threadpool_limits

    with threadpool_limits(check_count("threads", threads)):
        try:
            return modes[mode](job)
        except np.linalg.LinAlgError as error:
            raise NumericalError(
                f"the cells do not determine the fit ({error}): raise the penalties, or take a "
                "lower rank."
            ) from None


def _outcome(
    mode: Mode,
    job: _Job,
    run: Run,
    stopped: str,
    params: TableParameters,
    solver: Solver,
    cells: Cells,
    choice: Choice | None,
) -> Imputation:
    """What a run over cells came to."""
    table = job.table or known_table(job.grid, run.session.opening, cells)
    return Imputation(
        mode, params, solver, table, cells, run.records, run.ledger, stopped, job.seed, choice
    )


def _observed(job: _Job) -> Imputation:
    job.refuse("observed", "batch_size", "batch")
    grid, seed = job.grid, job.seed
    covariates = read_covariates(grid, job.site_covariates, job.time_covariates)
    structure = job.structure or Structure(rank=0)
    session, cells = job.open()
    pilot = Solver(grid.family, structure, covariates, seed=seed)
    algorithm = Observed(**job.channel(session), solver=pilot, cells=cells)
    run = job.run(session, algorithm)
    stopped = run.until(job.stop, job.callbacks)
    seen, choice = algorithm.seen(run.state), None
    if job.structure is None:
        choice = choose(
            seen,
            grid.family,
            covariates,
            rank=job.rank,
            penalty=job.penalty,
            seasons=job.seasons,
            folds=job.folds,
            seed=seed,
        )
        structure = choice.structure
    solver = Solver(
        grid.family, structure, covariates, sweeps=_SWEEPS, tolerance=_TOLERANCE, seed=seed
    )
    params = algorithm.finish(run.state, solver)
    return _outcome("observed", job, run, stopped, params, solver, seen, choice)


def _cell(job: _Job) -> Imputation:
    job.refuse("cell", "batch_size", "batch", "site_covariates", "time_covariates", "step_size")
    family, seed = job.grid.family, job.seed
    pilot = job.structure or Structure(
        rank=2 if job.rank is None else job.rank,
        penalty=1.0 if job.penalty is None else job.penalty,
        effects=False,
    )
    session, cells = job.open(centred=True)
    told = session.opening
    total = float(told.counts @ told.summaries["mean"][:, 0])
    offset = total / float(cells.weights.sum())
    solver, channel = Solver(family, pilot, seed=seed), job.channel(session)
    algorithm = Proximal(**channel, solver=solver, cells=cells, offset=offset)
    run = job.run(session, algorithm, algorithm.start())
    choice: Choice | None = None
    if job.structure is None and (job.rank is None or job.penalty is None):
        early = replace(job.stop, rounds=min(_PILOT_ROUNDS, job.stop.rounds or _PILOT_ROUNDS))
        run.until(early, job.callbacks)
        choice = choose(
            algorithm.seen(run.state),
            family,
            rank=job.rank,
            penalty=job.penalty,
            effects=False,
            folds=job.folds,
            seed=seed,
        )
        # Another rank or penalty, from zero: memories and what they hold stay.
        algorithm = replace(algorithm, solver=Solver(family, choice.structure, seed=seed))
        run.algorithm, run.state = algorithm, replace(run.state, extras=algorithm.start())
    stopped = run.until(job.stop, job.callbacks)
    params, seen = algorithm.params(run.state), algorithm.seen(run.state)
    return _outcome("cell", job, run, stopped, params, algorithm.solver, seen, choice)


def _paper(job: _Job) -> Imputation:
    job.refuse("paper", "site_covariates", "time_covariates")
    if not isinstance(job.participation, Everyone):
        raise SettingsError("mode 'paper' is printed for full participation.")
    table, seed = job.here("paper"), job.seed
    structure = job.structure or Structure(
        rank=2 if job.rank is None else job.rank, penalty=job.penalty or 0.0, effects=False
    )
    run = PaperRun(
        table,
        Solver(table.family, structure, seed=seed),
        seed,
        compressor=job.compressor or QUANTISER,
        step_size=GAMMA if job.step_size is None else job.step_size,
        memory_rate=ALPHA if job.memory_rate is None else job.memory_rate,
        batch_size=job.batch_size,
        batch=job.batch,
    )
    stopped = run.until(job.stop, job.callbacks)
    return Imputation(
        "paper", run.params, run.solver, table, table.pooled, run.records, run.ledger, stopped, seed
    )


def _site_owner(job: _Job) -> Imputation:
    job.refuse("site-owner", "batch_size", "batch", "site_covariates", "time_covariates")
    table, seed, stop = job.here("site-owner"), job.seed, job.stop
    if not table.family.quadratic:
        raise SettingsError("mode 'site-owner' is for the Gaussian family (or log1p).")
    check_owners(table)
    chosen = job.structure or Structure(
        rank=4 if job.rank is None else job.rank,
        penalty=3.0 if job.penalty is None else job.penalty,
        smoothing=10.0,
        seasonality=30.0 if job.seasons else 0.0,
    )
    if chosen.rank == 0:
        raise SettingsError(
            "mode 'site-owner' needs rank >= 1: a site's factors are what is latent."
        )
    model = SiteOwner(
        table.bins.count, chosen.rank, chosen.penalty, chosen.smoothing, chosen.seasonality
    )
    result = fit(
        model,
        WorkerData(worker_rows(table), table.offsets, list(table.workers), COLUMNS),
        FedEM(
            job.compressor or QUANTISER_OF_TIMES,
            step_size=job.step_size,
            memory_rate=job.memory_rate,
        ),
        participation=job.participation,
        rounds=stop.rounds,
        epochs=stop.epochs,
        field_tol=stop.tolerance,
        tol=0,
        start="moments",
        max_bytes=stop.bytes,
        seconds=stop.seconds,
        seed=seed,
        callbacks=job.callbacks,
        federation="loop",
    )
    loadings = result.model.maximize(result.statistics)
    # Rows of sites have precision sigma^2 in units of an observation's weight.
    prior = replace(chosen, rank=model.rank, penalty=float(loadings.variance[0]), site_penalty=1e9)
    return Imputation(
        "site-owner",
        table_parameters(result.model, table, loadings),
        Solver(table.family, prior, seed=seed),
        table,
        table.pooled,
        result.records,
        result.ledger,
        result.stopped,
        seed,
    )
