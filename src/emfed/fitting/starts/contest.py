"""Finding where to begin: one or several starts, tried together, the worse ones dropped early."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any, final

import numpy as np

from emfed.algorithms import EM, FedEM
from emfed.compressors import SubtractiveDithering
from emfed.core.errors import EmfedWarning, SettingsError
from emfed.core.protocols import Algorithm, FloatArray, StartsFromClusters, View
from emfed.core.streams import Purpose, choose_distinct, uniforms
from emfed.fitting.rounds import Run
from emfed.fitting.session import Session
from emfed.fitting.starts.cells import grow_cells
from emfed.fitting.starts.seeding import best_partition
from emfed.fitting.stopping import Stop
from emfed.network.inprocess import InProcessFederation

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
class _Search:
    """Rounds that find where candidates begin; they are not yet those of the fit."""

    def __init__(self, session: Session, parts: Sequence[int]) -> None:
        self.session, self.parts, self.rounds = session, tuple(parts), 0
        self.alone = session.federation.size == 1
        self.models = [session.bound.part(j) for j in parts]

    def run(self, view: View, statistics: FloatArray, algorithm: Algorithm, rounds: int) -> Any:
        """The statistics after some rounds; each run has random numbers of its own."""
        seed = (self.session.seed + _GOLDEN * self.rounds) % 2**64
        run = Run(self.session, view, algorithm, statistics, purpose="start", seed=seed)
        if run.until(Stop(rounds=rounds)) == "interrupted":
            raise KeyboardInterrupt
        self.session.evaluations += sum(r.evaluations for r in run.records if r.round)
        self.rounds += rounds
        return run.state.statistics

    def ask(self, part: int, count: int, smallest: int, centres: FloatArray) -> tuple[Any, Any]:
        """One round of k-means, with short uploads where there is somebody to upload."""
        view = View((part,), clusters=count, smallest=smallest)
        clusters = self.session.view(view)
        statistics = clusters.statistics_of(clusters.start_at(None, centres, None))
        once = FedEM(SubtractiveDithering(CELL_NOISE), step_size=1.0, memory_rate=0.0)
        return clusters, self.run(view, statistics, EM() if self.alone else once, 1)

    def begin(self, view: View, statistics: FloatArray) -> FloatArray:
        """The exact statistics of one worker; with several, those that the parameters imply."""
        return np.asarray(self.run(view, statistics, EM(), 1)) if self.alone else statistics

    def heat(self, view: View, statistics: FloatArray, rounds: int) -> tuple[Any, FloatArray]:
        """Rounds of a race, compressed where there is somebody to upload, and what each is worth.

        Compressed messages carry no log-likelihoods: everyone is asked for those at the end.
        """
        if self.alone:
            after = np.asarray(self.run(view, statistics, EM(), rounds))
            together = self.session.view(view)
            return [after[cut] for cut in together.cuts], together.values(after)
        quiet = FedEM(
            SubtractiveDithering(RACE_NOISE),
            in_metric=True,
            broadcast=SubtractiveDithering(RACE_BROADCAST),
        )
        after = self.run(view, statistics, quiet, rounds)
        together = self.session.view(view)
        values = self.session.ask("values", view, together.maximize(after), "start")
        self.session.evaluations += self.session.samples
        self.rounds += 1
        return [after[cut] for cut in together.cuts], values


def search(
    session: Session, parts: Sequence[int], method: str = "auto", n_init: int = 1
) -> list[FloatArray]:
    """The statistics that each of these candidates starts from; all of them share the rounds.

    ``method`` is ``"k-means"`` (cells grown from aggregates, see `emfed.fitting.starts.cells`),
    ``"moments"`` (drawn around the mean with the spread of all data), ``"points"`` (rows of the
    data, which leave their workers: only by explicit choice) or ``"auto"``: k-means where the model
    has components that clusters can start. Of ``n_init`` starts, all run in the same rounds; the
    worse half is dropped every few rounds.
    """
    if not parts:
        return []
    looking = _Search(session, parts)
    free = [_resolve(model, method) == "moments" for model in looking.models]
    starts = _starts(looking, method, n_init)
    if n_init == 1 and all(free):  # what the parameters imply, at no cost
        pairs = zip(looking.models, starts, strict=True)
        return [_within(model, own[0]) for model, own in pairs]
    return _race(looking, starts)


def _resolve(model: Any, method: str) -> str:
    """What "auto" means for a model."""
    if method != "auto":
        return method
    return "k-means" if _able(model) and model.n_components > 1 else "moments"


def _able(model: Any) -> bool:
    return isinstance(model, StartsFromClusters) and model.clusters(1) is not None


def _starts(looking: _Search, method: str, n_init: int) -> list[list[Any]]:
    """``n_init`` starting parameters of each candidate, in its frame."""
    session = looking.session
    chosen = [_resolve(model, method) for model in looking.models]
    cells: tuple[FloatArray, FloatArray] | None = None
    for model, how in zip(looking.models, chosen, strict=True):
        if how == "k-means" and not _able(model):
            raise SettingsError(f"{type(model).__name__} has no clusters: use start='moments'.")
    if "k-means" in chosen:
        pairs = zip(looking.models, looking.parts, chosen, strict=True)
        able = [(model, part) for model, part, how in pairs if how == "k-means"]
        widest, part = max(able, key=lambda pair: pair[0].n_components)
        rows = None if looking.alone else session.samples / session.federation.size
        ask = partial(looking.ask, part)
        cells = grow_cells(
            widest.clusters(1).n_features, ask, widest.n_components, rows, session.seed
        )
    out = []
    for model, how in zip(looking.models, chosen, strict=True):
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


def _from_points(session: Session, model: Any, seed: int) -> Any:
    """Rows of the data as centres, the paper's start: they leave their workers."""
    network = session.federation
    data = network.data if isinstance(network, InProcessFederation) else None
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
    if session.prices is not None:
        session.ledger.add("start", "up", workers, 8 * d, 0)
    frame = model.clusters(1).frame
    centres = np.nan_to_num((rows - frame.origin) / frame.scale)
    return model.start_at(np.full(k, 1 / k), centres, np.ones(d))


def _race(looking: _Search, starts: list[list[Any]]) -> list[FloatArray]:
    """Statistics at the best start of each candidate, all running in the same rounds.

    One worker alone evaluates them. Several do so in the first round of what follows, quantised: at
    a start that tells clusters apart, exact sums over the few rows that a worker has in one of them
    would come close to the rows.
    """
    alive = [part for part, own in zip(looking.parts, starts, strict=True) for _ in own]
    models = [model for model, own in zip(looking.models, starts, strict=True) for _ in own]
    params = [p for own in starts for p in own]
    found = [_within(model, p) for model, p in zip(models, params, strict=True)]
    view = View(tuple(alive), watched=looking.alone)
    together = looking.session.view(view)
    begun = looking.begin(view, together.join(found))
    found = [begun[cut] for cut in together.cuts]
    rounds = FIRST_HEAT
    while len(alive) > len(looking.parts):
        view = View(tuple(alive), watched=looking.alone)
        statistics = looking.session.view(view).join(found)
        found, values = looking.heat(view, statistics, rounds)
        kept, rounds = _better_half(alive, values[:, 0]), HEAT
        alive, found = [alive[i] for i in kept], [found[i] for i in kept]
    return found


def _within(model: Any, params: Any) -> FloatArray:
    """Statistics that say these parameters."""
    statistics = np.asarray(model.statistics_of(params))
    if not model.inside(statistics):
        raise SettingsError(NOT_INSIDE)
    return statistics


NOT_INSIDE = (
    "at this start some component has no mass or no positive definite covariance: some columns are "
    "combinations of others. Drop them, or set covariance_floor > 0."
)


def _better_half(alive: Sequence[int], likelihoods: FloatArray) -> list[int]:
    """Positions of the better half of the starts of each candidate."""
    kept: list[int] = []
    for part in sorted(set(alive)):
        own = [i for i, which in enumerate(alive) if which == part]
        own.sort(key=lambda i: (-likelihoods[i], i))
        kept += sorted(own[: max(1, len(own) // 2)])
    return kept
