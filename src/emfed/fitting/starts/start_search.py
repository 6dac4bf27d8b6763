"""Finding where to begin: one or several starts, tried together, the worse ones dropped early."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from emfed.algorithms import EM, Everyone, FedEM, Schedule
from emfed.compressors import SubtractiveDithering
from emfed.core.errors import EmfedWarning, SettingsError
from emfed.core.protocols import (
    Algorithm,
    FloatArray,
    Participation,
    StartsFromClusters,
    View,
)
from emfed.core.streams import Purpose, uniforms
from emfed.core.wording import Setting, Wording
from emfed.fitting.rounds import Run
from emfed.fitting.selection import FLOORS
from emfed.fitting.session import Session
from emfed.fitting.starts.own import beside_of, own_sketch, points_of
from emfed.fitting.starts.sketch import NARROWEST, NARROWEST_OF_CLUSTERS, Sketch, drawn
from emfed.fitting.stopping import Stop
from emfed.models.clusters import BUCKETS_PER_COMPONENT, Clusters
from emfed.models.components import SMALLEST_COMPONENT
from emfed.network.inprocess import InProcessFederation
from emfed.network.own_clusters import SMALLEST

FIRST_HEAT, HEAT = 16, 8
"""Rounds before the worse half is dropped for the first time, and again. Earlier, the likelihood of
a start says little about where it leads."""
RACE_NOISE, RACE_BROADCAST = 0.05, 0.01
"""omega of the uploads and steps of competing starts."""
MANY_WORKERS = 100.0
"""Workers of equal weight from which on messages of buckets are as coarse as they get."""
BUCKET_NOISE = (0.002, 2.2)
"""omega of uploads of buckets: the least, and that of `MANY_WORKERS`, whose sum has a hundredth of
it. In between it goes with the square, as few workers have few bytes to save."""
BUCKET_BROADCAST = (0.02, 0.1)
"""omega of their steps, likewise. Where buckets stand need not be exact, only common."""
SETTLING = 2
"""Rounds of Lloyd's algorithm on all buckets."""
FEWEST_PER_COMPONENT = 4
"""Buckets for a component, at least."""
NUMBERS = 840
"""Statistics of buckets that are worth their bytes, unless components have too few buckets then."""
FEWEST = 32
ROWS_PER_BUCKET = 5
"""Buckets that are worth their bytes at any number of columns; and rows for a bucket, at least, on
average. Not tuned."""
MERGED, MOST_MERGED = 200, 1000
"""Clusters that all workers together tell of their own rows, at least, if a worker need not tell
more than sixteen for a component; and those of them that the sketch is drawn from."""
MERGE_FROM = 50.0
"""Workers of equal weight from which on "auto" merges, where everybody tells its clusters. With
fewer, sums of buckets are told finely, and one worker's clusters say more about it. EM on MNIST,
tied, 100 workers, medians of 4 seeds (`python -m benchmarks merged`): from merged clusters it ends
0.000 nats below the best after 66 rounds (by label 0.044 after 72), from buckets 0.063 after 119
(0.053 after 93)."""
PANEL, PANEL_ROWS = 1000, 50_000
"""Workers, and rows that they hold together, that are enough to find a start: of more workers a
sample is asked. A million that all took part would send 840 numbers each and keep as many: 18 GB in
a simulation. Not tuned."""
SKETCHED = ("merge", "k-means")
"""Starts that are tried on a sketch."""
_GOLDEN = 0x9E3779B97F4A7C15
"""An odd number without pattern (2^64 over the golden ratio): seeds of the searches differ."""


@final
class _Search:
    """Rounds that find where candidates begin; they are not yet those of the fit."""

    def __init__(self, session: Session, parts: Sequence[int]) -> None:
        self.session, self.parts, self.rounds = session, tuple(parts), 0
        self.alone = session.federation.size == 1
        self.models = [session.bound.part(j) for j in parts]
        self.who = _panel(session)

    def run(self, view: View, statistics: FloatArray, algorithm: Algorithm, rounds: int) -> Any:
        """The statistics after some rounds; each run has random numbers of its own."""
        seed = (self.session.seed + _GOLDEN * self.rounds) % 2**64
        run = Run(
            self.session,
            view,
            algorithm,
            statistics,
            participation=self.who,
            purpose="start",
            seed=seed,
        )
        stopped = run.until(Stop(rounds=rounds))
        if lost := sum(not r.answered for r in run.records):  # masked sums that had no room
            stopped = run.until(Stop(rounds=rounds + lost))
        if stopped == "interrupted":
            raise KeyboardInterrupt
        self.session.evaluations += sum(r.evaluations for r in run.records if r.round)
        self.rounds += rounds
        return run.state.statistics

    def buckets(self, part: int) -> tuple[FloatArray, FloatArray]:
        """Shares and means of buckets of all rows, found in one phase of short messages.

        There are so few that each holds several of a worker's rows, if that leaves some for every
        component; a worker is silent about one with a single row, or with masks with so few that
        owners tell of no component like it.
        """
        session, model = self.session, self.session.bound.part(part)
        k, d = model.n_components, model.clusters(1).n_features
        rows = session.samples / session.federation.size
        most = min(
            BUCKETS_PER_COMPONENT * k, max(FEWEST, NUMBERS // (d + 1)), int(rows) // ROWS_PER_BUCKET
        )
        most = max(most, FEWEST_PER_COMPONENT * k, 2)
        least = SMALLEST_COMPONENT if session.masks else 2
        view = View((part,), clusters=most, smallest=least, seed=session.seed % 2**16)
        growing = session.view(view)
        crowd = session.effective
        bold = min(1.0, crowd / MANY_WORKERS)
        algorithm = FedEM(
            SubtractiveDithering(max(BUCKET_NOISE[0], bold**2 * BUCKET_NOISE[1])),
            step_size=1.0,
            memory_rate=0.0,
            in_metric=True,
            broadcast=SubtractiveDithering(max(BUCKET_BROADCAST[0], bold * BUCKET_BROADCAST[1])),
        )
        found = self.run(view, growing.origin(), algorithm, growing.rounds + SETTLING)
        mass, means, _ = growing.held(found)
        return mass, means

    def merged(self, part: int) -> tuple[FloatArray, FloatArray] | None:
        """Shares and means of everybody's own clusters, told once; None if somebody tells none."""
        session, model = self.session, self.session.bound.part(part)
        each = -(-MERGED // session.federation.size)
        most = max(model.n_components, min(each, BUCKETS_PER_COMPONENT * model.n_components))
        view = View((part,), clusters=most, smallest=SMALLEST, seed=session.seed % 2**16)
        found = session.own_clusters(view)
        self.session.evaluations += self.session.samples
        if found is None or len(found[0]) <= MOST_MERGED:
            return found
        below = np.cumsum(found[0])  # one of each stretch of equal share
        at = (np.arange(MOST_MERGED) + 0.5) / MOST_MERGED
        picks = np.searchsorted(below[:-1], at * below[-1], side="right")
        return np.full(MOST_MERGED, 1 / MOST_MERGED), found[1][picks]

    def _merges(self, method: str, n_init: int) -> bool:
        """Whether workers are asked for their own clusters."""
        session = self.session
        many = session.effective >= MERGE_FROM and session.federation.size <= MOST_MERGED
        wanted = method == "auto" and not session.masks and (n_init > 1 or many)
        return (method == "merge" or wanted) and not self.alone

    def sketches(self, model: Any, part: int, method: str, n_init: int) -> list[Sketch]:
        """Rows on which starts are tried: those of several sketches compete."""
        network = self.session.federation
        data = network.data if isinstance(network, InProcessFederation) else None
        if self.alone and data is not None and not data.streaming:
            return [own_sketch(data, model, self.session.seed)]
        told = []
        if self._merges(method, n_init):
            merged = self.merged(part)
            if merged is None and method == "merge":
                raise SettingsError(
                    Wording(
                        "{} needs a run without masks in which every worker tells clusters of its "
                        "own rows: use {}.",
                        *(Setting("start", "merge"), Setting("start", "k-means")),
                    )
                )
            told += [] if merged is None else [(*merged, True)]
        if not told or (method == "auto" and n_init > 1):
            told.append((*self.buckets(part), False))
        out, whole = [], model.moment_of_rows
        narrowest = NARROWEST_OF_CLUSTERS if isinstance(model, Clusters) else NARROWEST
        holder = None if data is None or data.streaming else data
        for mass, means, matched in told:
            # With a common covariance chance has no room: it is what is left of the known moment.
            matched = matched or model.fixed_data
            points, weights = drawn(mass, means, whole, self.session.seed, matched, narrowest)
            rows = model.rows_at(points)
            out.append(Sketch(points, rows, weights, beside_of(holder, rows)))
        return out

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
            step_size=1.0,
            # V counts all workers; of a sample, whose noise averages out, memories would be a part.
            memory_rate=None if isinstance(self.who, Everyone) else 0.0,
            in_metric=True,
            broadcast=SubtractiveDithering(RACE_BROADCAST),
        )
        after = self.run(view, statistics, quiet, rounds)
        together = self.session.view(view)
        values = self.session.ask("values", view, after, "start")
        self.session.evaluations += self.session.samples
        self.rounds += 1
        return [after[cut] for cut in together.cuts], values


def _panel(session: Session) -> Participation:
    """Who takes part in the search: everyone, or a sample where workers are very many.

    The same workers are asked in every round. They are drawn by weight, evenly over all, and p_i
    is the probability of that; so their w_i / p_i add up to 1, and large workers are all there.
    """
    shares, n = session.weights, session.federation.size
    count = max(PANEL, int(PANEL_ROWS * n / max(session.samples, 1)))
    if session.masks or np.count_nonzero(shares) <= count:
        return Everyone()
    p = _inclusion(shares, count)
    own = np.zeros(1, dtype=np.int64)
    at = np.arange(count) + uniforms(session.seed, 0, Purpose.PARTICIPATION, own, 1)[0, 0]
    below = np.cumsum(p)
    picks = np.unique(np.searchsorted(below[:-1], at * (below[-1] / count), side="right"))
    return Schedule([picks.tolist()], np.where(p > 0, p, 1.0))


def _inclusion(shares: FloatArray, count: int) -> FloatArray:
    """Probabilities in proportion to the shares, at most 1, that add up to ``count``."""
    p = count * shares / shares.sum()
    while (p > 1).any():
        certain = p >= 1
        rest = np.where(certain, 0.0, shares)
        p = np.where(certain, 1.0, (count - certain.sum()) * rest / rest.sum())
    return p


def search(
    session: Session, parts: Sequence[int], method: str = "auto", n_init: int = 1
) -> list[FloatArray]:
    """The statistics that each of these candidates starts from; all of them share the rounds.

    ``method`` is ``"merge"`` (on a sketch of all rows, drawn from workers' own clusters, see
    `emfed.fitting.starts.sketch`), ``"k-means"`` (on one that is drawn from buckets of all rows),
    ``"moments"`` (drawn around the mean with the spread of all data), ``"points"`` (rows of the
    data, which leave their workers: only by explicit choice) or ``"auto"``: k-means where the model
    has components that clusters can start; merged, if many workers all tell their clusters. Of
    ``n_init`` starts, all run in the same rounds; the worse half is dropped every few rounds. With
    ``"auto"`` they come from both sketches by turns: so merged starts compete with the others.
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
    for model, how in zip(looking.models, chosen, strict=True):
        if how in SKETCHED and not _able(model):
            raise SettingsError(
                Wording(
                    "{} has no clusters: use {}.",
                    *(type(model).__name__, Setting("start", "moments")),
                )
            )
    sketched: dict[int, list[Any]] = {}
    places = [j for j, how in enumerate(chosen) if how in SKETCHED]
    if places:
        models = [looking.models[j] for j in places]
        widest = max(places, key=lambda j: looking.models[j].n_components)
        drawn_from = looking.models[widest], looking.parts[widest]
        sketches = looking.sketches(*drawn_from, method, n_init)
        each = -(-n_init // len(sketches))
        tried = [sketch.starts(models, each, session.seed) for sketch in sketches]
        for j, *own in zip(places, *tried, strict=True):
            sketched[j] = [start for turn in zip(*own, strict=True) for start in turn][:n_init]
    seeds = [(session.seed + _GOLDEN * j) % 2**64 for j in range(n_init)]
    out = []
    for j, (model, how) in enumerate(zip(looking.models, chosen, strict=True)):
        if how in SKETCHED:
            out.append(sketched[j])
        elif how == "points":
            out.append([_from_points(session, model, s) for s in seeds])
        else:
            out.append([model.start(s) for s in seeds])
    return out


def _from_points(session: Session, model: Any, seed: int) -> Any:
    """Rows of the data as centres, the paper's start: they leave their workers."""
    network = session.federation
    data = network.data if isinstance(network, InProcessFederation) else None
    if data is None or not _able(model):
        others = Setting("start", "k-means"), Setting("start", "moments")
        raise SettingsError(
            Wording(
                "{} needs data in this process and a model that centres can start: use {} or {}.",
                *(Setting("start", "points"), *others),
            )
        )
    warnings.warn(
        Wording(
            "{} takes rows of the data as first means: those records leave their workers. {} "
            "starts as well and reveals none.",
            *(Setting("start", "points"), Setting("start", "k-means")),
        ),
        EmfedWarning,
        stacklevel=6,
    )
    k = model.n_components
    workers, rows = points_of(k, seed, data)
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
        told = model.describe()
        floor = next((name for name in FLOORS if name in told), "floor")
        remedy = "ridge" if "ridge" in told else floor
        raise SettingsError(
            f"{NOT_INSIDE}: some columns are combinations of others. Drop them, or set "
            f"{remedy} > 0."
        )
    return statistics


NOT_INSIDE = "at this start some component has no mass or no positive definite covariance"


def _better_half(alive: Sequence[int], likelihoods: FloatArray) -> list[int]:
    """Positions of the better half of the starts of each candidate."""
    kept: list[int] = []
    for part in sorted(set(alive)):
        own = [i for i, which in enumerate(alive) if which == part]
        own.sort(key=lambda i: (-likelihoods[i], i))
        kept += sorted(own[: max(1, len(own) // 2)])
    return kept
