"""Finding where to begin: one or several starts, tried together, the worse ones dropped early."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from emfed.algorithms import EM, Everyone, FedEM
from emfed.compressors import SubtractiveDithering
from emfed.core.errors import EmfedWarning, SettingsError, check_count
from emfed.core.ledger import Ledger
from emfed.core.protocols import Algorithm, Federation, FloatArray, Model, StartsFromClusters
from emfed.core.streams import Purpose, choose_distinct, uniforms
from emfed.core.wire import ENVELOPE, floats_size
from emfed.fitting.rounds import Run
from emfed.fitting.starts.cells import grow_cells
from emfed.fitting.starts.seeding import best_partition
from emfed.fitting.stopping import Stop
from emfed.models.several import VALUES, Several

Method = Literal["auto", "k-means", "moments", "points"]
METHODS = ("auto", "k-means", "moments", "points")
ATTEMPTS = 10
"""Partitions of the cells that the server tries for the first start. Further ones take the first
they find, or all would be alike: the best partition need not lead to the best mixture."""
FIRST_HEAT, HEAT = 16, 8
"""Rounds before the worse half is dropped for the first time, and again. Earlier, the likelihood of
a start says little about where it leads."""
RACE_NOISE, RACE_BROADCAST = 0.05, 0.01
"""omega of the uploads and steps of competing starts."""
HARDNESS = 0.2
"""First variances over those within clusters: rows then belong almost to the nearest centre."""
CELL_NOISE = 0.005
"""omega of the uploads of cells, where there are workers to keep bytes for."""
_GOLDEN = 0x9E3779B97F4A7C15


@final
@dataclass(frozen=True)
class Found:
    """The statistics that each model starts from, and what it cost to find them."""

    statistics: tuple[FloatArray, ...]
    ledger: Ledger
    """Of the messages so far."""
    rounds: int
    evaluations: int


class _Session:
    """Rounds with a federation that are not yet those of the fit."""

    def __init__(self, network: Federation, weights: FloatArray, samples: int, seed: int) -> None:
        self.network, self.weights, self.samples, self.seed = network, weights, samples, seed
        self.ledger = Ledger(network.size)
        self.rounds = self.evaluations = 0

    def run(self, model: Model, statistics: FloatArray, algorithm: Algorithm, rounds: int) -> Any:
        """The statistics after some rounds; each run has random numbers of its own."""
        run = Run(
            model,
            algorithm,
            self.network,
            statistics,
            weights=self.weights,
            participation=Everyone(),
            seed=(self.seed + _GOLDEN * self.rounds) % 2**64,
            samples=self.samples,
            ledger=self.ledger,
        )
        if run.until(Stop(rounds=rounds)) == "interrupted":
            raise KeyboardInterrupt
        self.evaluations += run.evaluations
        self.rounds += rounds
        return run.state.statistics

    def ask(self, model: Model, statistics: FloatArray) -> FloatArray:
        """The exact statistics of all workers: one round."""
        return np.asarray(self.run(model, statistics, EM(), 1))

    def begin(self, model: Model, statistics: FloatArray) -> FloatArray:
        """The exact statistics of one worker; with several, those that the parameters imply."""
        return self.ask(model, statistics) if self.network.size == 1 else statistics

    def ask_cells(self, model: Model, statistics: FloatArray) -> FloatArray:
        """The same with short uploads, where there is somebody to upload."""
        if self.network.size == 1:
            return self.ask(model, statistics)
        once = FedEM(SubtractiveDithering(CELL_NOISE), step_size=1.0, memory_rate=0.0)
        return np.asarray(self.run(model, statistics, once, 1))

    def heat(self, several: Several, statistics: FloatArray, rounds: int) -> FloatArray:
        """Rounds of a race, compressed where there is somebody to upload, and what each is worth.

        Compressed messages carry no log-likelihoods: everyone is asked for those at the end.
        """
        if self.network.size == 1:
            return np.asarray(self.run(several, statistics, EM(), rounds))
        plain = dataclasses.replace(several, watched=False)
        quiet = FedEM(
            SubtractiveDithering(RACE_NOISE),
            in_metric=True,
            broadcast=SubtractiveDithering(RACE_BROADCAST),
        )
        parts = plain.join([statistics[cut] for cut in several.cuts])
        after = self.run(plain, parts, quiet, rounds)
        known = self.network.mean_statistics(several, plain.maximize(after), self.weights)
        everyone = np.arange(self.network.size, dtype=np.int64)
        size = floats_size(VALUES * len(several.models))
        self.ledger.add("round", "down", everyone, 0, ENVELOPE)
        self.ledger.add("round", "up", everyone, size, ENVELOPE)
        self.evaluations += self.samples
        self.rounds += 1
        return several.join([after[cut] for cut in plain.cuts], several.values(known))


def search(
    models: Sequence[Any],
    network: Federation,
    weights: FloatArray,
    *,
    method: Method = "auto",
    n_init: int = 1,
    seed: int = 0,
    samples: int,
) -> Found:
    """Where each of these bound models should start; all of them share the rounds.

    ``method`` is ``"k-means"`` (cells grown from aggregates, see `emfed.fitting.starts.cells`),
    ``"moments"`` (drawn around the mean with the spread of all data), ``"points"`` (rows of the
    data, which leave their workers: only by explicit choice) or ``"auto"``: k-means where the model
    has components that clusters can start. Of ``n_init`` starts, all run in the same rounds; the
    worse half is dropped every few rounds.
    """
    check_count("n_init", n_init)
    if method not in METHODS:
        raise SettingsError(f"start must be parameters or one of {METHODS}; got {method!r}.")
    session = _Session(network, weights, samples, seed)
    free = [_resolve(model, method) == "moments" for model in models]
    if network.carries_bytes and not (n_init == 1 and all(free)):
        raise SettingsError(
            "over a network a start is parameters, or 'moments' with n_init=1: find a better one "
            "by a fit in one process, on data that may be there, and give its parameters."
        )
    starts = _starts(session, models, method, n_init)
    if n_init == 1 and all(free):  # what the parameters imply, at no cost
        found = [m.statistics_of(own[0]) for m, own in zip(models, starts, strict=True)]
    else:
        found = _race(session, models, starts)
    return Found(tuple(found), session.ledger, session.rounds, session.evaluations)


def _resolve(model: Any, method: Method) -> str:
    """What "auto" means for a model."""
    if method != "auto":
        return method
    return "k-means" if _able(model) and model.n_components > 1 else "moments"


def _able(model: Any) -> bool:
    """Whether k-means can start it."""
    return isinstance(model, StartsFromClusters) and model.clusters(1) is not None


def _starts(
    session: _Session, models: Sequence[Any], method: Method, n_init: int
) -> list[list[Any]]:
    """``n_init`` starting parameters of each model, in its frame."""
    chosen = [_resolve(model, method) for model in models]
    cells: tuple[FloatArray, FloatArray] | None = None
    for model, how in zip(models, chosen, strict=True):
        if how == "k-means" and not _able(model):
            raise SettingsError(f"{type(model).__name__} has no clusters: use start='moments'.")
    if "k-means" in chosen:
        widest = max(
            (m for m, c in zip(models, chosen, strict=True) if c == "k-means"),
            key=lambda m: m.n_components,
        )
        n = session.network.size
        rows = None if n == 1 else session.samples / n
        cells = grow_cells(widest, session.ask_cells, widest.n_components, rows, session.seed)
    out = []
    for model, how in zip(models, chosen, strict=True):
        seeds = [(session.seed + _GOLDEN * j) % 2**64 for j in range(n_init)]
        if how == "k-means" and cells is not None:
            out.append([_from_cells(model, *cells, session.seed, j) for j in range(n_init)])
        elif how == "points":
            out.append([_from_points(session, model, s) for s in seeds])
        else:
            out.append([model.start(s) for s in seeds])
    return out


def _from_cells(model: Any, mass: FloatArray, cells: FloatArray, seed: int, which: int) -> Any:
    """A start from the best of some partitions of the cells."""
    k = model.n_components
    if len(cells) < k:  # rows lie in fewer places than there are components
        short = k - len(cells)
        cells = np.concatenate([cells, np.repeat(cells[:1], short, axis=0) + 0.1])
        mass = np.concatenate([mass, np.full(short, mass.min())])
    attempts = range(ATTEMPTS) if which == 0 else range(ATTEMPTS + which, ATTEMPTS + which + 1)
    shares, centres = best_partition(mass, cells, k, seed, attempts)
    shares = np.maximum(shares, 0.1 / k)
    shares = shares / shares.sum()
    within = HARDNESS * np.maximum(1 - shares @ centres**2, 0.05)
    return model.start_at(shares, centres, within)


def _from_points(session: _Session, model: Any, seed: int) -> Any:
    """Rows of the data as centres, the paper's start: they leave their workers."""
    data = getattr(session.network, "data", None)
    if data is None or not _able(model):
        raise SettingsError(
            "start='points' needs data in this process and a model that centres can start: use "
            "start='k-means' or start='moments'."
        )
    warnings.warn(
        "start='points' takes rows of the data as first means: those records leave their workers. "
        "start='k-means' starts as well and reveals none.",
        EmfedWarning,
        stacklevel=6,
    )
    k, counts = model.n_components, data.counts
    u = uniforms(seed, 0, Purpose.POINTS, np.zeros(1, dtype=np.int64), k)
    picks = np.sort(choose_distinct(u, np.array([int(counts.sum())]))[0])
    workers = np.searchsorted(np.cumsum(counts), picks, side="right").astype(np.int64)
    local = picks - (np.cumsum(counts) - counts)[workers]
    rows = np.concatenate(
        [
            np.asarray(data.take(w[None], j[None, None]))[0]
            for w, j in zip(workers, local, strict=True)
        ]
    )
    d = rows.shape[1]
    session.ledger.add("start", "up", workers, 8 * d, 0)
    frame = model.clusters(1).frame
    centres = np.nan_to_num((rows - frame.origin) / frame.scale)
    return model.start_at(np.full(k, 1 / k), centres, np.ones(d))


def _race(session: _Session, models: Sequence[Any], starts: list[list[Any]]) -> list[FloatArray]:
    """Statistics at the best start of each model, all running in the same rounds.

    One worker alone evaluates them. Several do so in the first round of what follows, quantised: at
    a start that tells clusters apart, exact sums over the few rows that a worker has in one of them
    would come close to the rows.
    """
    alive = [(j, model) for j, model in enumerate(models) for _ in starts[j]]
    params = [p for own in starts for p in own]
    if len(alive) == 1:
        model = models[0]
        return [session.begin(model, _within(model, params[0]))]
    several = Several(tuple(model for _, model in alive))
    parts = [_within(model, p) for (_, model), p in zip(alive, params, strict=True)]
    statistics = session.begin(several, several.join(parts))
    rounds = FIRST_HEAT
    while len(alive) > len(models):
        statistics, rounds = session.heat(several, statistics, rounds), HEAT
        alive, several, statistics = _drop(alive, several, statistics)
    return [statistics[cut] for cut in several.cuts]


def _within(model: Any, params: Any) -> FloatArray:
    """Statistics that say these parameters."""
    statistics = np.asarray(model.statistics_of(params))
    if not model.inside(statistics):
        raise SettingsError(
            "at this start some component has no mass or no positive definite covariance: some "
            "columns are combinations of others. Drop them, or set covariance_floor > 0."
        )
    return statistics


def _drop(
    alive: list[tuple[int, Any]], several: Several, statistics: FloatArray
) -> tuple[list[tuple[int, Any]], Several, FloatArray]:
    """The better half of the starts of each model."""
    values = several.values(statistics)
    kept: list[int] = []
    for j in sorted({which for which, _ in alive}):
        own = [i for i, (which, _) in enumerate(alive) if which == j]
        own.sort(key=lambda i: (-values[i, 0], i))
        kept += sorted(own[: max(1, len(own) // 2)])
    parts = [statistics[several.cuts[i]] for i in kept]
    remaining = [alive[i] for i in kept]
    fewer = Several(tuple(model for _, model in remaining))
    return remaining, fewer, fewer.join(parts, values[kept])
