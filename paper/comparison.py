"""Runs that set methods side by side: their settings, the data, and one job of them."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, final, get_args

import numpy as np

from emfed.aggregation.gathered import ENVELOPE_DOWN, ENVELOPE_UP
from emfed.algorithms import AutoEM, FedEM, VRFedEM
from emfed.compressors import Identity, SubtractiveDithering
from emfed.core.errors import EmfedWarning, SettingsError, check_count, check_range
from emfed.core.ledger import Ledger
from emfed.core.protocols import Algorithm
from emfed.core.streams import Purpose, normals, uniforms
from emfed.data.held import HeldWorkers
from emfed.data.workers import WorkerData
from emfed.fitting import open_run
from emfed.fitting.private_in_process import begun
from emfed.fitting.settings import FitSettings
from emfed.models import gaussian_mixture
from paper.digits import VARIABLE, deal
from paper.peers import PeerRound, Tables, averaged_fits, averaging

OPENING = 2
"""Exchanges before the first round of who begins at the merged start: summaries and clusters."""
WORTH_STOPPING = 1e-9
"""Nats a row: pooled EM that gains less in a step has ended."""
BROADCAST = 0.05
"""omega of the server's steps on their way down, in the model's metric, as AutoEM's sums have it:
a comparison of bytes needs the same broadcast for all."""
LOCAL_PASSES = 50
"""EM steps of a local fit that is averaged."""
THIN = 20
"""Every twentieth hour of Beijing is taken, so that all methods and seeds take minutes."""
AIR = ("PM2.5", "PM10", "SO2", "NO2", "CO", "O3", "TEMP", "PRES", "DEWP", "WSPM")
STORM = ("lat", "long", "wind", "pressure")
MethodName = Literal[
    "pooled EM",
    "FedEM",
    "VR-FedEM",
    "AutoEM",
    "private AutoEM",
    "float32 EM",
    "FedAvg",
    "SCAFFOLD",
    "averaged local fits",
    "one-shot merge",
]
UNCOUNTED = ("private AutoEM", "averaged local fits", "one-shot merge")
"""Methods that have no limit of rounds: their own plan, or a single exchange, says how many."""


@final
@dataclass(frozen=True)
class ComparedData:
    """A set of data: its file, and the mixture that is fitted to it."""

    file: str
    title: str
    components: int
    kind: Literal["tied", "full"]
    columns: int
    workers: int
    """This and the columns are those of the stand-in, too."""


SOURCES = {
    "mnist": ComparedData("mnist.npz", "MNIST by label", 10, "tied", 20, 100),
    "beijing": ComparedData("beijing_air_quality.parquet", "Beijing stations", 5, "full", 10, 12),
    "storms": ComparedData("storms.csv.gz", "Atlantic storms by year", 4, "full", 4, 50),
    "simulated": ComparedData("", "simulated", 4, "full", 3, 12),
}


@final
@dataclass(frozen=True, kw_only=True)
class MethodSettings:
    """Everything that decides a run but the seed; the keys of ``config.toml``."""

    data: Literal["mnist", "beijing", "storms", "simulated"] = "simulated"
    method: MethodName = "AutoEM"
    memories: bool = True
    """Whether FedEM has memories."""
    step_size: float = 1.0
    """The step of FedEM, VR-FedEM, FedAvg and SCAFFOLD."""
    noise: float = 0.25
    """omega of FedEM and VR-FedEM, in the model's metric; the default is the package's own."""
    batch_size: int = 64
    inner_rounds: int = 10
    """Both are those of VR-FedEM."""
    local_steps: int = 5
    """Passes between two rounds of FedAvg and SCAFFOLD."""
    passes: int = 300
    """FedAvg and SCAFFOLD make no round that would take more passes in all."""
    epsilon: float = 1.0
    """The epsilon of private AutoEM."""
    rounds: int = 100
    rows: int | None = None
    """Rows of each worker, at most; all if left out."""
    stand_in: bool | None = None
    """Whether rows are simulated because the data are not here: found out if left out."""

    def __post_init__(self) -> None:
        """Refuse bad settings at once."""
        for name in ("batch_size", "inner_rounds", "local_steps", "passes", "rounds"):
            check_count(name, getattr(self, name))
        check_range("step_size", self.step_size, 0, np.inf, open_low=True, open_high=True)
        check_range("noise", self.noise, 0, np.inf, open_low=True, open_high=True)
        check_range("epsilon", self.epsilon, 0, np.inf, open_low=True, open_high=True)
        if self.data not in SOURCES:
            raise SettingsError(f"data must be one of {', '.join(SOURCES)}; got {self.data!r}.")
        if self.stand_in is None:
            object.__setattr__(self, "stand_in", not self.source_path.is_file())

    @property
    def source(self) -> ComparedData:
        """What is fitted to what."""
        return SOURCES[self.data]

    @property
    def source_path(self) -> Path:
        """Where its file would be."""
        return Path(os.environ.get(VARIABLE) or ".") / (self.source.file or "nowhere")

    @property
    def title(self) -> str:
        """The set in words."""
        simulated = self.stand_in and self.data != "simulated"
        return f"simulated, for {self.source.title}" if simulated else self.source.title

    @property
    def name(self) -> str:
        """The set in measures: claims on real rows are none on a stand-in."""
        return self.data if self.data == "simulated" or not self.stand_in else self.title

    @property
    def available(self) -> bool:
        """Whether it can be run: there is a stand-in for everything."""
        return True

    @property
    def cost(self) -> float:
        """Very roughly, the milliseconds it takes."""
        each = {"mnist": 35.0, "beijing": 25.0, "storms": 4.0, "simulated": 1.0}[self.data]
        if self.method in ("one-shot merge", "averaged local fits"):
            return each * 50
        local = self.method in ("FedAvg", "SCAFFOLD")
        return each * (min(self.passes, self.rounds * self.local_steps) if local else self.rounds)

    @property
    def used(self) -> dict[str, Any]:
        """The settings that play a role in this run."""
        of = {
            "memories": ("FedEM",),
            "step_size": ("FedEM", "VR-FedEM", "FedAvg", "SCAFFOLD"),
            "noise": ("FedEM", "VR-FedEM"),
            "batch_size": ("VR-FedEM",),
            "inner_rounds": ("VR-FedEM",),
            "local_steps": ("FedAvg", "SCAFFOLD"),
            "passes": ("FedAvg", "SCAFFOLD"),
            "epsilon": ("private AutoEM",),
            "rounds": tuple(m for m in get_args(MethodName) if m not in UNCOUNTED),
        }
        return {
            name: value
            for name, value in asdict(self).items()
            if self.method in of.get(name, (self.method,)) and value is not None
        }

    def make_algorithm(self) -> Algorithm:
        """The package's; of a peer it only opens the run."""
        up, down = SubtractiveDithering(self.noise), SubtractiveDithering(BROADCAST)
        rate = None if self.memories else 0.0
        if self.method == "FedEM":
            return FedEM(up, self.step_size, memory_rate=rate, in_metric=True, broadcast=down)
        if self.method == "VR-FedEM":
            return VRFedEM(
                up,
                self.step_size,
                batch_size=self.batch_size,
                inner_rounds=self.inner_rounds,
                in_metric=True,
                broadcast=down,
            )
        if self.method == "float32 EM":
            return FedEM(Identity("float32"), 1.0, broadcast=Identity("float32"))
        if self.method == "pooled EM":
            return FedEM(step_size=1.0, memory_rate=0.0)
        return AutoEM()


def load(settings: MethodSettings, seed: int, digits: Callable[[], Any]) -> WorkerData:
    """The rows of a run; ``digits`` reads MNIST's principal components."""
    source = settings.source
    if settings.stand_in:
        return stand_in(source, seed, settings.rows or 200)
    if settings.data == "mnist":
        each = settings.rows or 700
        return deal(digits(), seed, workers=source.workers, rows=each, split="sorted")
    import polars as pl

    path = settings.source_path
    if settings.data == "beijing":
        frame = pl.read_parquet(path, columns=[*AIR, "station"]).drop_nulls().drop_nans(list(AIR))
        rows, groups = frame.select(AIR)[::THIN], frame["station"][::THIN]
    else:
        frame = pl.read_csv(path)
        rows, groups = frame.select(STORM), frame["year"]
    _, which = np.unique(groups.to_numpy().astype(str), return_inverse=True)
    order = np.argsort(which, kind="stable")
    if settings.rows is not None:
        place = np.arange(len(order)) - np.searchsorted(which[order], which[order])
        order = order[place < settings.rows]
    offsets = np.concatenate([[0], np.cumsum(np.bincount(which[order]))])
    return WorkerData(rows.to_numpy().astype(np.float64)[order], offsets)


def stand_in(source: ComparedData, seed: int, rows: int) -> WorkerData:
    """Rows of a mixture of the same size, of which most workers hold one component or two."""
    k, d, n = source.components, source.columns, source.workers
    means = 2.5 * normals(0, 5, Purpose.DATA, np.arange(k), d)
    labels = np.sort(
        (uniforms(seed, 6, Purpose.DATA, np.arange(n * rows), 1)[:, 0] * k).astype(int)
    )
    noise = normals(seed, 7, Purpose.DATA, np.arange(n * rows), d)
    tilt = np.tril(normals(0, 8, Purpose.DATA, np.arange(d), d), -1)
    whole = means[labels] + noise @ (np.eye(d) + 0.4 * tilt / np.sqrt(d)).T
    return WorkerData(whole, np.arange(0, n * rows + 1, rows, dtype=np.int64))


@final
@dataclass(frozen=True, eq=False)
class Place:
    """Where a method is, and what came before."""

    exchanges: int
    bytes_up: float
    bytes_down: float
    """Whole messages, the opening and envelopes included, of all workers together."""
    epochs: float
    model: Any
    params: Any
    """None: there is no way on, for the method has diverged."""


def run_method(
    settings: MethodSettings, seed: int, digits: Callable[[], Any], report: Callable[[float], None]
) -> dict[str, Any]:
    """Columns: exchanges, bytes up and down a worker, passes, log-likelihood a row; all so far."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmfedWarning)  # remarks on data that are what they are
        data = load(settings, seed, digits)
        found: list[tuple[float, ...]] = []
        for place in _told(_places(settings, data, seed)):
            value = -np.inf
            if place.params is not None:
                value = float(place.model.log_likelihood(data.rows, place.params))
            steps = place.exchanges - found[-1][0] if found else 0
            gained = value - found[-1][-1] if found else np.inf
            sent = (place.bytes_up / data.size, place.bytes_down / data.size)
            found.append((place.exchanges, *sent, place.epochs, value))
            report(min(1.0, place.exchanges / settings.rounds))
            ended = settings.method == "pooled EM" and gained < WORTH_STOPPING * steps
            if ended or not np.isfinite(value):
                break
    names = ("round", "bytes_up", "bytes_down", "epochs", "log_likelihood")
    return dict(zip(names, np.transpose(found), strict=True))


def _told(places: Iterator[Place]) -> Iterator[Place]:
    """The first, the last, and fewer and fewer between: a likelihood takes a pass over all rows."""
    told, last = 0, None
    for place in places:
        last = place
        if place.exchanges - told >= max(1, place.exchanges // 12):
            told, last = place.exchanges, None
            yield place
    if last is not None:
        yield last


def _places(settings: MethodSettings, data: WorkerData, seed: int) -> Iterator[Place]:
    """From where a method begins; all but the private one begin at the merged start."""
    model = gaussian_mixture(settings.source.components, settings.source.kind)
    if settings.method == "private AutoEM":
        noisy = FitSettings(model, epsilon=settings.epsilon, seed=seed, noise_seed=seed)
        yield from _private(noisy, HeldWorkers(data))
        return
    algorithm, rounds = settings.make_algorithm(), settings.rounds
    run = open_run(model, data, algorithm, start="merge", seed=seed, tol=0, rounds=rounds)
    begun = Place(OPENING, *_sent(run.ledger), run.records[0].epochs, run.model, run.params)
    yield begun
    if settings.method == "one-shot merge":
        return
    if settings.method in ("averaged local fits", "FedAvg", "SCAFFOLD"):
        yield from _peer(settings, begun, data)
        return
    for record in run:
        so_far = (*_sent(run.ledger), record.epochs)
        yield Place(OPENING + record.round, *so_far, run.model, run.params)


def _sent(ledger: Ledger) -> tuple[int, int]:
    """Bytes up and down so far."""
    return ledger.total("up"), ledger.total("down")


def _peer(settings: MethodSettings, begun: Place, data: WorkerData) -> Iterator[Place]:
    """Rounds of a method that is not the package's."""
    tables, start, rounds = Tables.of(begun.model, data), begun.params, 1
    if settings.method == "averaged local fits":
        points: Iterator[PeerRound] = iter([averaged_fits(tables, start, LOCAL_PASSES)])
    else:
        corrected = settings.method == "SCAFFOLD"
        rounds = min(settings.rounds, settings.passes // settings.local_steps)
        points = averaging(tables, start, settings.step_size, settings.local_steps, corrected)
    up, down, epochs = begun.bytes_up, begun.bytes_down, begun.epochs
    number = 0
    for number, point in zip(range(1, rounds + 1), points, strict=False):
        up += data.size * (ENVELOPE_UP + point.vector_bytes)
        down += data.size * (ENVELOPE_DOWN + point.vector_bytes)
        epochs += point.epochs
        yield Place(OPENING + number, up, down, epochs, begun.model, point.params)
    if number < rounds:  # it has diverged
        yield Place(OPENING + number + 1, up, down, epochs, begun.model, None)


def _private(settings: FitSettings, workers: HeldWorkers) -> Iterator[Place]:
    """Every answer of a private fit is an exchange, and a pass over all rows."""
    fit, course, width = begun(settings, workers)

    def place() -> Place:
        model, statistics, _ = fit.bound()
        sent = _sent(course.ledger)
        return Place(fit.asked, *sent, fit.asked, model, model.maximize(statistics))

    asks = fit.follow(width)
    with contextlib.suppress(StopIteration):
        ask = next(asks)
        while True:
            if ask.purpose == "round":
                yield place()
            ask = asks.send(course.answer(ask))
    yield place()
