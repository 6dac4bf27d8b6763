"""`impute`: from records to a filled table, in one call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from functools import partial
from math import inf
from pathlib import Path
from typing import Any, final

import numpy as np

from emfed.algorithms import Everyone, FedEM
from emfed.artifacts.result import Result
from emfed.compressors import Dithering
from emfed.core.configuration import check_keys
from emfed.core.errors import DataError, NumericalError, SettingsError, check_type
from emfed.core.protocols import Compressor, FloatArray, Participation
from emfed.core.records import Records, RoundRecord
from emfed.core.settings.declaring import check_declared, documented
from emfed.core.settings.impute import ImputeFields, Mode
from emfed.core.streams import check_seed
from emfed.core.sums import AskedWorkers
from emfed.core.wording import Setting, Wording
from emfed.data.held import HeldWorkers
from emfed.data.workers import WorkerData
from emfed.fitting.face import run, threads_of
from emfed.fitting.fitted import Watch
from emfed.fitting.progress import progress as progress_bar
from emfed.fitting.settings import FitSettings, participants
from emfed.fitting.stopping import Callback, Stop
from emfed.imputation.choice import Choice, Search
from emfed.imputation.families import CellFamily, NegativeBinomialCells, ZeroInflatedCells
from emfed.imputation.intake import read_records
from emfed.imputation.lowrank import Cells, Covariates, Structure, TableParameters
from emfed.imputation.paper import ALPHA, EPOCHS, GAMMA, QUANTISER, PaperRun
from emfed.imputation.result import Imputation
from emfed.imputation.space import neighbours, places_of
from emfed.imputation.sums import Gathered, gathered
from emfed.imputation.sweeps import Solver
from emfed.imputation.table import FieldTable, Grid, known_table
from emfed.models.owners import Loadings
from emfed.models.site_owner import COLUMNS, SiteOwner
from emfed.network import Federation, LiveSites, LoopFederation

ProgressFunction = Callable[[str, float], None]
QUANTISER_OF_TIMES = Dithering(levels=3, norm=inf, block="row", scales="bfloat16")
OWNERS_ROUNDS = 100
"""Rounds of mode "site-owner" where no limit is given."""
THEN = "then the bounds"
"""What bars say that comes after the rounds."""
_SWEEPS, _TOLERANCE = 500, 1e-7
"""Sweeps of T(S) at most, and the relative fall of the objective at which they end."""
_ROUGH_SWEEPS = 3
"""Sweeps after Ctrl-C."""


@documented
@final
@dataclass(frozen=True, eq=False)
class ImputeSettings(ImputeFields):
    """What `impute` fits, by what, until when.

    Parameters
    ----------
    {settings}

    Raises
    ------
    SettingsError
        If a setting is out of its range, or the mode has no use for it.

    Examples
    --------
    >>> from emfed.imputation import ImputeSettings
    >>> ImputeSettings("site-owner", rank=2).stop.rounds
    100
    """

    def __post_init__(self) -> None:
        check_declared(self)
        self._check_mode()
        check_seed(self.seed)
        if self.structure is not None:
            check_type("structure", self.structure, Structure, "Structure(rank=2, penalty=5)")
            if any(value is not None for value in self.fixed.values()):
                raise SettingsError("give a structure, or rank and penalty, not both.")
        spatial = self.spatial if self.structure is None else self.structure.spatial
        if spatial and self.coordinates is None:
            raise SettingsError(
                Wording(
                    "{} ties neighbouring sites: give their {}.",
                    *(Setting("spatial"), Setting("coordinates")),
                )
            )
        check_type("participation", self.who, Participation, "Bernoulli(0.5)")
        if self.mode == "paper" and not isinstance(self.who, Everyone):
            raise SettingsError("mode 'paper' is printed for full participation.")
        if self.compressor is not None:
            check_type("compressor", self.compressor, Compressor, "Dithering(levels=3)")

    def _check_mode(self) -> None:
        """Refuse settings that the mode has no use for."""
        for field in fields(self):
            value = getattr(self, field.name)
            given = value is not None if field.default is None else value != field.default
            if given and field.name in UNUSED[self.mode]:
                once = self.mode == "observed" and field.name in _OF_ROUNDS
                why = ": its workers send their sums once" if once else ""
                raise SettingsError(
                    Wording("mode {!r} takes no {}{}.", self.mode, Setting(field.name), why)
                )

    @property
    def fixed(self) -> dict[str, Any]:
        """What of the structure is given."""
        names = ("rank", "penalty", "smoothing", "seasonality", "spatial", "covariate_penalty")
        return {name: getattr(self, name) for name in names}

    @property
    def who(self) -> Participation:
        """Who takes part in a round."""
        return participants(self.participation)

    @property
    def stop(self) -> Stop:
        """The limits, with those of the mode where none was given; one exchange of sums."""
        rounds, epochs = self.rounds, self.epochs
        if all(limit is None for limit in (rounds, epochs, self.max_bytes, self.seconds)):
            rounds, epochs = {"paper": (None, EPOCHS), "site-owner": (OWNERS_ROUNDS, None)}.get(
                self.mode, (1, None)
            )
        return Stop(rounds, epochs, self.field_tol, self.max_bytes, self.seconds)

    def shape(self, rank: int, penalty: float, **others: Any) -> Structure:
        """The structure, or one from the rank and penalty given, or these."""
        asked = {name: value for name, value in self.fixed.items() if value is not None}
        return self.structure or Structure(**{"rank": rank, "penalty": penalty, **others, **asked})


_OF_ROUNDS = {
    *("compressor", "participation", "step_size", "memory_rate", "patience"),
    *("rounds", "epochs", "field_tol", "max_bytes", "seconds"),
}
"""Settings of exchanges that are made again and again."""
UNUSED: dict[str, set[str]] = {
    "observed": {"batch_size", "batch", *_OF_ROUNDS},
    "paper": {
        *("patience", "spatial", "covariate_penalty", "coordinates"),
        *("site_covariates", "time_covariates", "smoothing", "seasonality", "masks", "observers"),
    },
    "site-owner": {
        *("batch_size", "batch", "site_covariates", "time_covariates", "masks", "observers"),
        *("spatial", "covariate_penalty", "coordinates"),
    },
}
"""Settings that a mode has no use for."""


def impute(
    table: Any,
    mode: Mode = "observed",
    *,
    grid: Grid | None = None,
    callbacks: Iterable[Callback] | Callback = (),
    checkpoint: str | Path | None = None,
    resume: bool = False,
    threads: int = 1,
    verbose: bool = False,
    progress: ProgressFunction | None = None,
    **settings: Any,
) -> Imputation:
    """Fill a sites x time table from the records of many workers, without pooling them.

    Parameters
    ----------
    table : FieldTable, str, data frame, Federation or LiveSites
        A `FieldTable`, or anything that `read_records` takes; or an open federation or sites
        elsewhere, which hold their own cells (`Grid.rows`).
    mode : {"observed", "paper", "site-owner"}
        How cells are fitted. In the first two the server ends with every worker's sum of every
        cell: the record, where a cell has one; docs/imputation.md says what it learns in each.
        "paper" needs the table in this process.
    grid : Grid, optional
        With a federation, what its workers agree on: sites, time bins and family.
    callbacks : callable or iterable of callables
        Functions of each `RoundRecord`; one that returns True ends the rounds.
    checkpoint : str or Path, optional
        A file that the state is written to (mode "site-owner").
    resume : bool
        Whether the fit goes on from the checkpoint, if it is there.
    threads : int
        The threads of the linear algebra, whose matrices are tall and thin: one is fastest.
    verbose : bool
        Whether a bar on stderr shows rounds, bytes, the stage and the time that may be left.
    progress : callable, optional
        A function of what is done after the rounds, in words, and the share that is done; with it
        the bar shows rounds alone.
    **settings : object
        All other fields of `ImputeSettings`: ``rank``, ``penalty``, ``structure``,
        ``participation``, ``rounds``, ``seed``, ...

    Returns
    -------
    Imputation
        Estimates, intervals, draws and the trend. With mode "site-owner" and a federation the
        server knows no cell: each owner carries the fit to its own table with ``transform``.

    Raises
    ------
    NumericalError
        If the cells do not determine the fit.

    Examples
    --------
    >>> from emfed.imputation import impute, simulate_table
    >>> table = simulate_table(900, observers=60, sites=20, months=24, groups=4, seed=0)
    >>> impute(table, rank=1, penalty=3.0).rounds
    1
    """
    check_keys(settings, (f.name for f in fields(ImputeSettings)), "impute")
    given = ImputeSettings(mode, **settings)
    if isinstance(table, Federation | LiveSites) != (grid is not None):
        raise SettingsError(
            "a grid goes with a federation, and a federation needs one: "
            "Grid(sites, bins, family) says what the workers' cells are of."
        )
    watch = Watch(
        (callbacks,) if callable(callbacks) else tuple(callbacks),
        checkpoint=None if checkpoint is None else Path(checkpoint),
        resume=resume,
    )
    if not isinstance(table, (Federation, LiveSites, FieldTable)):
        table = read_records(table)
    if isinstance(table, FieldTable):
        table.warn()
        check_varied(table.family, table.pooled)
    bar_of = progress_bar(given.stop, "impute", True, THEN) if verbose else nullcontext()
    with threads_of(threads), bar_of as bar:
        if bar is not None:
            if mode != "observed":
                watch = replace(watch, callbacks=(bar, *watch.callbacks))
            progress = progress or bar.stage
        try:
            found = _imputed(given, table, grid, watch, progress)
            return replace(found, draw_count=given.draws)
        except np.linalg.LinAlgError as error:
            raise NumericalError(
                f"the cells do not determine the fit ({error}): raise the penalties, or take a "
                "lower rank."
            ) from None


def _imputed(
    given: ImputeSettings,
    table: Federation | LiveSites | FieldTable,
    grid: Grid | None,
    watch: Watch,
    progress: ProgressFunction | None,
) -> Imputation:
    """Fit by the mode, on a table here or a federation."""
    if isinstance(table, Federation | LiveSites):
        assert grid is not None
        if given.mode == "paper":
            raise SettingsError(
                "mode 'paper' needs the table in this process (docs/decisions/020 says why). Use "
                "mode 'observed' where sites elsewhere have their own records."
            )
        if given.mode == "observed":
            if isinstance(table, LiveSites):
                from emfed.imputation.live import gathered_at  # with keys, for sites alone

                tell = partial(gathered_at, table, grid, given.masks, given.observers)
            else:
                tell = partial(_told_by, given, _workers_of(table), grid)
            return _of_sums(given, tell, grid, watch, progress)
        return _site_owner(given, table, known_table(grid), watch)
    if given.mode == "paper":
        return _paper(given, table, watch)
    workers = WorkerData(table.rows, table.offsets, list(table.workers), COLUMNS)
    if given.mode == "observed":
        held = HeldWorkers(workers, stacked=False)
        tell = partial(_told_by, given, held, table.grid)
        return replace(_of_sums(given, tell, table.grid, watch, progress), table=table)
    check_owners(table)
    return _site_owner(given, LoopFederation(workers), table, watch)


def _workers_of(network: Any) -> AskedWorkers:
    """The workers of a federation that answers asks."""
    asked: AskedWorkers | None = getattr(network, "workers", None)
    if asked is None:
        raise SettingsError(
            "this federation has no workers of this process or of a cluster: sites elsewhere are "
            "those of emfed.network.listen."
        )
    return asked


def _told_by(given: ImputeSettings, workers: AskedWorkers, grid: Grid) -> Gathered:
    """What workers of this process or of a cluster tell."""
    return gathered(workers, grid, bool(given.masks), given.seed, given.observers)


def _of_sums(
    given: ImputeSettings,
    tell: Callable[[], Gathered],
    grid: Grid,
    watch: Watch,
    progress: ProgressFunction | None,
) -> Imputation:
    """Every worker sends the sums of its cells once, and T(S) is fitted to them here."""
    if watch.checkpoint is not None:
        raise SettingsError("mode 'observed' sends cells once and leaves no checkpoint.")
    began = time.perf_counter()
    told = tell()
    cells, ledger = told.table.pooled, told.ledger
    check_varied(grid.family, cells)
    solver, choice, interrupted = _solver(given, grid, cells, progress)
    params = solver.fit(cells)
    n = told.ledger.counts.shape[-1]
    record = RoundRecord(
        round=1,
        generation=0,
        asked=n,
        answered=n,
        squared_H=None,
        step_size=0.0,
        guard_hits=0,
        objective=solver.objective(cells, params),
        bytes_up=ledger.total("up"),
        bytes_down=ledger.total("down"),
        payload_up=ledger.total("up", "payload"),
        payload_down=ledger.total("down", "payload"),
        evaluations=len(told.table.keys),
        epochs=1.0,
        seconds=time.perf_counter() - began,
    )
    for callback in watch.callbacks:
        callback(record)
    records, stopped = Records(), "interrupted" if interrupted else "fitted"
    records.append(record)
    return Imputation(
        given.mode,
        params,
        solver,
        told.table,
        cells,
        records,
        ledger,
        stopped,
        given.seed,
        choice,
    )


def _solver(
    given: ImputeSettings, grid: Grid, cells: Cells, progress: ProgressFunction | None
) -> tuple[Solver, Choice | None, bool]:
    """T with the structure that was given or is chosen here, and whether Ctrl-C cut the choice."""
    covariates = grid.covariates(given.site_covariates, given.time_covariates)
    if given.coordinates is not None:
        graph = neighbours(*places_of(given.coordinates, grid.sites))
        covariates = replace(covariates, graph=graph)
    structure, choice, interrupted = given.structure, None, False
    # A spread of counts that the family's likelihood knows is found out before structures compete.
    pilot = Solver(grid.family, structure or Structure(rank=0), covariates, seed=given.seed)
    family = fitted_spread(pilot, cells)
    if structure is None:
        choice, interrupted = _choice(given, grid, cells, family, covariates, progress)
        structure = choice.structure
    sweeps, tolerance = (_ROUGH_SWEEPS, 0.0) if interrupted else (_SWEEPS, _TOLERANCE)
    solver = Solver(
        family, structure, covariates, sweeps=sweeps, tolerance=tolerance, seed=given.seed
    )
    return solver, choice, interrupted


def _choice(
    given: ImputeSettings,
    grid: Grid,
    cells: Cells,
    family: CellFamily,
    covariates: Covariates,
    progress: ProgressFunction | None,
) -> tuple[Choice, bool]:
    """The structure with the least held-out deviance, and whether Ctrl-C cut the search."""
    options: dict[str, Any] = {**given.fixed, "seasons": grid.bins.unit == "month"}  # lag 12

    def search(some: Covariates) -> Search:
        return Search(cells, family, some, folds=given.folds, seed=given.seed, report=progress)

    if covariates.count:  # a search with covariates goes on from the best without
        first = search(Covariates())
        hints = (first.choose(**options).structure,)
        if not first.interrupted:
            options["hints"] = hints
    found = search(covariates)
    choice = found.choose(**options)
    return choice, found.interrupted


def check_varied(family: CellFamily, cells: Cells) -> None:
    """Refuse zeros alone, and rates that are all 1: the likeliest theta is infinite."""
    some = cells.weights > 0
    if family.quadratic or not some.any():
        return
    if not np.any(cells.sums[some] > 0):
        raise DataError("every record is 0: there is nothing to estimate a total or a trend from.")
    # Effort makes weights and sums fractions, which rounding may part.
    if family.name == "bernoulli" and np.all(cells.sums[some] >= (1 - 1e-9) * cells.weights[some]):
        raise DataError(
            "every record reports the species: without visits that found none there is no "
            "reporting rate. Add them with a count of 0."
        )


def fitted_spread(solver: Solver, cells: Cells) -> CellFamily:
    """The family with the likeliest spread of a first fit, where its likelihood has one."""
    family = solver.family
    if not isinstance(family, (NegativeBinomialCells, ZeroInflatedCells)):
        return family
    for _ in range(2):
        some = Solver(family, solver.structure, solver.covariates, seed=solver.seed)
        theta = some.fit(cells).theta(cells.sites, cells.times)
        family = family.likeliest(theta, cells.sums, cells.weights)
    return family


def _paper(given: ImputeSettings, table: FieldTable, watch: Watch) -> Imputation:
    if watch.checkpoint is not None:
        raise SettingsError("mode 'paper' is for comparison and leaves no checkpoint.")
    structure = given.shape(2, 0.0, effects=False)
    run = PaperRun(
        table,
        Solver(table.family, structure, seed=given.seed),
        given.seed,
        compressor=given.compressor or QUANTISER,
        step_size=GAMMA if given.step_size is None else given.step_size,
        memory_rate=ALPHA if given.memory_rate is None else given.memory_rate,
        batch_size=given.batch_size,
        batch=given.batch,
    )
    stopped, cells = run.until(given.stop, watch.callbacks), table.pooled
    outcome = (run.records, run.ledger, stopped, given.seed)
    return Imputation("paper", run.params, run.solver, table, cells, *outcome)


def check_owners(table: FieldTable) -> None:
    """Refuse a site that two workers have records of."""
    owner = np.repeat(np.arange(len(table.workers)), np.diff(table.offsets))
    pairs = np.unique(np.stack([table.site, owner], axis=1), axis=0)
    twice = np.flatnonzero(np.diff(pairs[:, 0]) == 0)
    if len(twice):
        site, first = pairs[twice[0]]
        second = pairs[twice[0] + 1, 1]
        raise DataError(
            f"mode 'site-owner' needs each site in one worker; {table.sites[site]!r} is in "
            f"{table.workers[first]!r} and {table.workers[second]!r} (of {len(twice)} like it). "
            "Let the workers be those who own sites, or use mode 'observed'."
        )


def _site_owner(
    given: ImputeSettings, network: Federation | LiveSites, table: FieldTable, watch: Watch
) -> Imputation:
    """The fit of `SiteOwner`, which any federation runs; ``table`` is what is known here."""
    if not table.family.quadratic:
        raise SettingsError(
            Wording(
                "mode 'site-owner' is for the Gaussian family (or log1p): read with {}.",
                Setting("family", "log1p"),
            )
        )
    seasons = 30.0 if table.bins.unit == "month" else 0.0
    chosen = given.shape(4, 3.0, smoothing=10.0, seasonality=seasons)
    if chosen.rank == 0:
        raise SettingsError(
            "mode 'site-owner' needs rank >= 1: a site's factors are what is latent."
        )
    stop, operator = given.stop, given.compressor or QUANTISER_OF_TIMES
    settings = FitSettings(
        SiteOwner(
            table.bins.count, chosen.rank, chosen.penalty, chosen.smoothing, chosen.seasonality
        ),
        algorithm=FedEM(operator, step_size=given.step_size, memory_rate=given.memory_rate),
        participation=given.who,
        start="moments",
        tol=0,
        rounds=stop.rounds,
        epochs=stop.epochs,
        field_tol=stop.tolerance,
        max_bytes=stop.bytes,
        seconds=stop.seconds,
        columns=COLUMNS,
        seed=given.seed,
        patience=given.patience,
    )
    return from_result(run(settings, network, watch).result, table)


def from_result(result: Result, table: FieldTable | Grid) -> Imputation:
    """Make the table of a fit of mode "site-owner", as far as its records are here.

    The owner of some sites loads the fit (`emfed.load`) and gives its own table; sites without a
    record have the mean of all.

    Parameters
    ----------
    result : Result
        The fit.
    table : FieldTable or Grid
        The owner's records, or the grid where there are none.

    Returns
    -------
    Imputation
        The fitted table.

    Examples
    --------
    >>> import emfed
    >>> from emfed.imputation import ColumnNames, from_result, read_records, simulate_table
    >>> table = simulate_table(600, observers=1, sites=12, months=24, groups=1, seed=0)
    >>> fit = emfed.impute(table, "site-owner", rank=1, rounds=3)
    >>> from_result(fit.result, table).params.shape
    (12, 24)
    """
    known = known_table(table) if isinstance(table, Grid) else table
    model = result.model
    check_type("result.model", model, SiteOwner, "that of impute(..., mode='site-owner').result")
    loadings = model.maximize(result.statistics)
    # Rows of sites have precision sigma^2 in units of an observation's weight.
    prior = Structure(
        rank=model.rank,
        penalty=float(loadings.variance[0]),
        site_penalty=1e9,
        smoothing=model.smoothing,
        seasonality=model.seasonality,
    )
    return Imputation(
        "site-owner",
        table_parameters(model, known, loadings),
        Solver(known.family, prior, seed=result.seed),
        known,
        known.pooled,
        result.records,
        result.ledger,
        result.stopped,
        result.seed,
        result=result,
    )


def table_parameters(model: SiteOwner, table: FieldTable, params: Loadings) -> TableParameters:
    """theta of the whole table: each owner works out its own sites' factors."""
    rows: FloatArray = table.rows
    value = (rows[:, 3] - rows[:, 2] * model.centre) / model.spread
    mean, _ = model.posterior(
        np.append(table.site, len(table.sites) - 1),  # sites without a record keep the prior mean
        np.append(table.time, 0),
        np.append(rows[:, 2], 0.0),
        np.append(value, 0.0),
        params,
    )
    k = model.rank
    return TableParameters(
        model.centre,
        np.concatenate([model.spread * mean, np.zeros((len(mean), 1))], axis=1),
        np.concatenate([params.loadings[:, :k], model.spread * params.loadings[:, k:]], axis=1),
        effects=True,
    )
