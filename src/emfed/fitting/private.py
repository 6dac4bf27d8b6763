"""Fits whose every answer is private for each row: what a budget buys, and how it is spent.

A private fit asks for few sums (`emfed.core.noise.NoisyAsk`), each over all rows of a bounded
vector, with noise that the workers draw (`emfed.models.bounded`, `emfed.core.privacy`). What
becomes of the sums costs nothing more. They are:

1. *Columns.* How many rows of each column lie between powers of two, then in 64 bins of the range
   where they lie: a place and a scale for each column, whatever its unit.
2. *Moments.* The number of rows, the mean and the second moment, in that frame. They give a frame
   in which all rows together are white, and of tied covariances the constant of T.
3. *Start.* Rounds of EM with several times as many components and one common covariance. They are a
   sketch of all rows: rows are drawn from it and the model is fitted to them, in as many attempts
   as one likes, at no cost. One more question tells how much more log-density all rows
   have under each of the best attempts, of every number of components, than under one Gaussian.
4. *Rounds* of EM from there, as many as were chosen beforehand. The first half are full steps; of
   the others the statistics are averaged, which averages their noise.

`SHARES` says which part of the budget each gets. Factor analysis and probabilistic PCA need the
moments alone: they get all that the columns leave, and the model is fitted to them.

Between machines all members work out the same. Linear algebra is not the same on all machines to
the last bit, so what the next sum is about is cut to few bits (`agreed`).
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from emfed.core.errors import DataError
from emfed.core.noise import NoisyAsk
from emfed.core.privacy import (
    DEVIATION,
    Privacy,
    chi_quantile,
    kept_square,
    price_on,
    step_for,
)
from emfed.core.streams import Purpose, normals, uniforms
from emfed.core.sums import Finish, Fit, FloatArray, IntArray, LastSum, Stated, agreed_digest
from emfed.data.held import HeldWorkers
from emfed.data.workers import as_workers
from emfed.fitting.in_process import fit as fit_here
from emfed.fitting.settings import FitSettings
from emfed.models.bounded import (
    CENTRES,
    LARGEST_RADIUS,
    Asked,
    check_private,
    from_integers,
    needs_moments_alone,
    to_integers,
    whole_sums,
)
from emfed.models.factory import gaussian_mixture
from emfed.models.matrices import pack, raise_eigenvalues, unpack
from emfed.models.parameters import GaussianParameters
from emfed.models.sampling import covariance_parameters

logger = logging.getLogger(__name__)
SHARES = {"columns": 0.05, "moments": 0.12, "start": 0.31, "selection": 0.05, "rounds": 0.47}
"""Parts of the budget, from a few trials with single seeds on MNIST and Life Science."""
COMPARED_NATS = 6.0
"""Differences of log-densities of a row are clipped here: the noise of their sum is as large. Not
tuned."""
MOMENTS_ALONE = {"columns": 0.1, "moments": 0.9}
"""Parts of the budget of a model that needs no more than the moments of all rows. Not tuned."""
START_ROUNDS, ROUNDS = 8, 8
"""Fewer rounds are less noise each, and EM has come most of its way after so many."""
SKETCHED = 4
"""Components of the sketch for each of the model."""
UNSURE = 2.5
"""With fewer components of the sketch for each of the model a start may be bad. Five clusters in
four columns at epsilon 1: with 2.0 (3,000 rows) 10 of 16 fits ended 0.1 nats low or more, with 3.4
(6,000 rows) 1 of 16, of full and tied covariances with eight seeds each."""
TRIED = 8
"""Starts that rows choose among where the sketch has few components. Of MNIST at epsilon 0.3 (18
for 10) medians of eight seeds are 0.016 and 0.02 nats higher than with two, in two trials with
other attempts; the noise of the comparison is 0.01 nats."""
SKETCH_ROWS = 20_000
"""Rows of the sketch that starts are tried on: arithmetic of the server, which spends no budget.
Not tuned."""
OCTAVES = (-24, 40)
"""Powers of two between which columns are looked for, on both sides of zero."""
BINS = 64
"""Bins of the second look at the range of a column. Not tuned: more are finer and noisier."""
WIDE = 1.1
"""Where moments are taken, rows are clipped at so many times the radius that 99% of white Gaussian
rows lie within: real tails are heavier."""
SOUGHT = 0.003
"""The share of rows that may lie outside the range of a column on either side."""
LEAST = 1e-4
"""The smallest eigenvalue of a covariance, in a frame in which all rows together have 1."""
WORTH_TELLING = 0.3
"""Nats a row. Ten components of MNIST are worth 1.8 over one Gaussian."""
NOTHING = 0.003
"""Nats a row that are worth less than rows that are not clipped."""
FEW = 4.0
"""Deviations of the noise: a count below is taken for none."""
AGREED, AGREED_SCALAR = 20, 30
"""Bits of matrices and of single numbers that sums are about: roundings of linear algebra are
beyond."""


@final
@dataclass(frozen=True)
class PrivatePlan:
    """What a budget buys: how many numbers of which noise, in how many rounds."""

    privacy: Privacy
    shares: int
    """Draws of the noise that a row is protected by, in each answer."""
    draws: int
    """Draws of the noise that are in each answer."""
    alone: bool = False
    """Whether the model needs the moments of all rows alone."""
    masked: bool = False
    """Whether sums are masked."""
    noise_seed: int | None = None
    """What the noise follows from, if that is a number which somebody knows."""
    simulated: bool = True
    """Whether all workers are in one process."""

    @classmethod
    def of(cls, settings: FitSettings, workers: int, masked: bool, simulated: bool) -> PrivatePlan:
        """What settings buy with so many workers."""
        privacy = settings.privacy
        assert privacy is not None
        models = settings.candidates()
        for model in models:
            check_private(model)
        alone = needs_moments_alone(models[-1])
        shares = privacy.shares(workers, masked)
        return cls(privacy, shares, workers, alone, masked, settings.noise_seed, simulated)

    @property
    def noise(self) -> str:
        """What the noise follows from, in a few words."""
        if self.noise_seed is not None:
            return f"noise_seed {self.noise_seed}"
        return "a key of the operating system" if self.simulated else "each site's secret"

    def step(self, q: int, part: str, count: int) -> float:
        """The lattice of one of ``count`` answers of q numbers."""
        share = (MOMENTS_ALONE if self.alone else SHARES)[part]
        step = step_for(q, self.privacy.mu_squared * share / count, self.shares)
        return _cut(step, AGREED_SCALAR, np.ceil)

    def deviation(self, asked: Asked) -> FloatArray:
        """The deviation of the noise in each number of an answer, in its own units."""
        return DEVIATION * np.sqrt(self.draws) * asked.step / asked.scales


def _cut(value: float, bits: int, to_whole: Any = np.rint) -> float:
    """A positive number with so many bits."""
    fraction, power = np.frexp(value)
    return float(np.ldexp(to_whole(np.ldexp(fraction, bits)), power - bits))


def _cut_all(values: FloatArray) -> FloatArray:
    """Numbers on one grid, by the largest of them."""
    # To the nearest power of two: of a largest number 1, a little more or less changes nothing.
    power = int(np.rint(np.log2(np.abs(values).max())))
    return np.asarray(np.ldexp(np.rint(np.ldexp(values, AGREED - power)), power - AGREED))


def agreed(params: GaussianParameters, kind: str) -> GaussianParameters:
    """Parameters of so few bits that all members have the same.

    Covariances of several columns are products of such roots, which are exact in doubles.
    """
    weights = np.maximum(np.rint(np.ldexp(params.weights, AGREED)), 1.0)
    means, covariances = np.ldexp(np.rint(np.ldexp(params.means, AGREED)), -AGREED), None
    if kind in ("diag", "spherical"):
        fractions, powers = np.frexp(params.covariances)
        covariances = np.ldexp(np.rint(np.ldexp(fractions, AGREED)), powers - AGREED)
    else:
        roots = np.linalg.cholesky(params.covariances)
        several = roots if roots.ndim == 3 else roots[None]
        cut = np.stack([_cut_all(root) for root in several]).reshape(roots.shape)
        covariances = cut @ np.swapaxes(cut, -1, -2)
    return GaussianParameters(weights / weights.sum(), means, covariances)


@final
@dataclass(frozen=True, eq=False)
class PrivateAsk(NoisyAsk):
    """A sum over clipped rows, whose noise covers each of them.

    Parameters
    ----------
    asked : Asked
        What is summed, and on which lattice.
    purpose : str
        The kind of message in the ledger.
    number : int
        How many sums the fit was sent before.
    last : LastSum, optional
        What the last one said.
    """

    asked: Asked
    purpose: str
    number: int
    last: LastSum | None = None

    @property
    def size(self) -> int:
        """How many numbers."""
        return self.asked.size

    @property
    def cost(self) -> float:
        """Mu squared."""
        return price_on(self.asked.step, self.size, self.asked.shares)

    def whole(self, blocks: Iterable[FloatArray]) -> IntArray:
        """The sum over the rows of one worker, without noise."""
        return to_integers(self.asked, whole_sums(self.asked, blocks))

    def words(self) -> str:
        """In words."""
        return f"{self.size} sums over clipped rows, with noise"

    def about(self) -> tuple[Stated, ...]:
        """The question with its lattice, and its place: exactly, since noise follows from it."""
        told, numbers = self.asked.describe()
        return json.dumps([told, self.number], sort_keys=True).encode(), numbers.tobytes()


def too_few(rows: float, plan: PrivatePlan, needed: float) -> DataError:
    """A budget that buys nothing useful, in words."""
    privacy = plan.privacy
    return DataError(
        f"too few rows for this epsilon: there are about {max(rows, 0):.0f}, and epsilon "
        f"{privacy.epsilon:g} with delta {privacy.delta:g} needs about {needed:.0f} for this "
        "model. Use more rows, a larger epsilon, fewer columns, or fewer components."
    )


@final
@dataclass(frozen=True, eq=False)
class PrivateFrame:
    """(y - origin) matrix'."""

    origin: FloatArray
    matrix: FloatArray

    def back(self, params: GaussianParameters, kind: str) -> GaussianParameters:
        """Parameters in the units of the rows."""
        inverse = np.linalg.inv(self.matrix)
        means, covariances = params.means @ inverse.T + self.origin, params.covariances
        if kind in ("tied", "full"):
            covariances = inverse @ covariances @ inverse.T
        elif kind == "diag":
            covariances = covariances * np.diagonal(inverse) ** 2
        else:
            covariances = covariances * inverse[0, 0] ** 2
        return GaussianParameters(params.weights, means, covariances)


@final
class PrivateFit:
    """A private fit in progress: all that it knows follows from the sums so far.

    Parameters
    ----------
    models : sequence of Model
        The model, or those of several numbers of components.
    plan : PrivatePlan
        What the budget buys.
    rounds : int, optional
        Rounds at most.
    seed : int
        What its start is drawn from.
    """

    def __init__(
        self, models: Sequence[Any], plan: PrivatePlan, rounds: int | None = None, seed: int = 0
    ) -> None:
        self.plan, self.seed = plan, seed
        self.rounds = 0 if plan.alone else min(ROUNDS, ROUNDS if rounds is None else rounds)
        self.models = sorted(models, key=lambda model: model.n_components)
        self.model = self.models[-1]
        self.kind = self.model.describe().get("covariance_type", "full")
        self.k = self.model.n_components
        self.compared: tuple[dict[str, float], ...] = ()
        """What each number of components gains over one Gaussian, where several were compared."""
        self.gain, self.gain_error = np.inf, 0.0
        """Nats a row that the start gains over one Gaussian, clipped, and the noise in them."""
        self.asked, self.round = 0, 0
        """How many sums it was sent, and how many rounds it has made."""
        self.last: LastSum | None = None
        """What the last round said."""
        self._heard = hashlib.sha256()

    def follow(self, columns: int) -> Fit[PrivateFit]:
        """The whole fit to rows of so many columns.

        One that is ended in its rounds gives what it has reached.
        """
        yield from self.open(columns)
        self._say()
        yield from self.start()
        try:
            while self.round < self.rounds:
                yield from self.step()
        except Finish:
            pass
        return self

    def digest(self) -> bytes:
        """32 bytes of all that it was told and has reached."""
        reached = () if self.plan.alone else self.params.arrays().values()
        told = agreed_digest(b"", self._heard.digest(), *reached)
        return hashlib.sha256(told).digest()

    def _say(self) -> None:
        """What the budget buys, before most of it is spent."""
        plan, privacy = self.plan, self.plan.privacy
        promised = f"private: epsilon {privacy.epsilon:g} and delta {privacy.delta:g}"
        if plan.noise_seed is not None:
            promised = f"not private: the noise of noise_seed {plan.noise_seed}"
        logger.info(
            "%s; %d rounds on about %d rows, and noise will cost about %.2g nats a row",
            *(promised, self.rounds, self.samples, self.noise_nats),
        )
        for remark in self.remarks():
            logger.warning("%s", remark)

    def _ask(self, about: Asked, part: str, count: int, purpose: str) -> Fit[FloatArray]:
        """The sums over all rows, with noise; the lattice follows from the budget."""
        step = self.plan.step(about.size, part, count)
        asked = replace(about, step=step, shares=self.plan.shares)
        answer = yield PrivateAsk(asked, purpose, self.asked, self.last)
        told = np.rint(answer.value).astype(np.int64)
        self._heard.update(told.tobytes())
        self.asked += 1
        self._last = asked
        return from_integers(asked, told)

    # Columns, and all rows together.

    def open(self, columns: int) -> Fit[None]:
        """The frame and the second moment of all rows."""
        powers = 2.0 ** np.arange(OCTAVES[0], OCTAVES[1] + 1)
        edges = np.concatenate([-powers[::-1], [0.0], powers])
        low, high = yield from self._ranges(np.tile(edges, (columns, 1)))
        fine = np.linspace(low, high, BINS + 1, axis=1)
        told = yield from self._ask(Asked(1.0, 1, fine), "columns", 2, "opening")
        noise = float(self.plan.deviation(self._last)[0])
        yield from self._moments(*_places(fine, told.reshape(columns, BINS), noise))

    def _ranges(self, edges: FloatArray) -> Fit[tuple[FloatArray, FloatArray]]:
        """Between which edges all but a few rows of each column lie."""
        counts = yield from self._counts(edges)
        low, high = [], []
        for column, own in enumerate(counts):
            below = np.cumsum(own) / own.sum()
            first = int(np.argmax(below > SOUGHT))
            last = int(np.argmax(below >= 1 - SOUGHT))
            low.append(edges[column, first])
            high.append(edges[column, last + 1])
        return np.array(low), np.array(high)

    def _counts(self, edges: FloatArray) -> Fit[FloatArray]:
        """Rows in each bin, without those that noise alone may have put there."""
        told = yield from self._ask(Asked(1.0, 1, edges), "columns", 2, "opening")
        noise = self.plan.deviation(self._last)
        counts = np.where(told < FEW * noise, 0.0, told).reshape(len(edges), -1)
        if not (counts.sum(axis=1) > 0).all():
            bins, limit = told.reshape(len(edges), -1), FEW * float(noise[0])
            rows = float(bins.sum(axis=1).mean())
            fullest = max(float(bins.max(axis=1).min()), 1.0)
            # So many that the fullest bin of every column stands out of the noise.
            raise too_few(rows, self.plan, max(10 * limit, rows * limit / fullest))
        return counts

    def _moments(self, place: FloatArray, scale: FloatArray) -> Fit[None]:
        """The number of rows, their mean and second moment; then a frame that makes them white."""
        d = len(place)
        one = GaussianParameters(np.ones(1), np.zeros((1, d)), np.eye(d)[None])
        first = PrivateFrame(place, np.diag(1 / scale))
        wide = _cut(WIDE * chi_quantile(0.99, d), AGREED_SCALAR)
        asked = Asked(1.0, 1, None, "full", one, *self._in(first, wide))
        told = self._last_split((yield from self._ask(asked, "moments", 1, "opening")))
        noise = self._last_split(self.plan.deviation(self._last))
        self.samples = max(1, round(float(told["mass"][0, 0])))
        error = 2 * float(noise["second"][0, 0]) * np.sqrt(d) / self.samples
        if self.samples < 20 * float(noise["mass"][0, 0]) or error > 1:
            needed = max(20 * float(noise["mass"][0, 0]), error * self.samples)
            raise too_few(self.samples, self.plan, needed)
        mean = told["first"][0] / self.samples
        second = unpack(told["second"][0], d) / self.samples / kept_square(self._last.radius, d)
        second = second - np.outer(mean, mean)
        second = raise_eigenvalues(second, max(error, 1e-3))
        inverse = np.diag(1 / np.sqrt(np.diagonal(second)))
        if self.kind in ("tied", "full"):
            inverse = np.linalg.inv(np.linalg.cholesky(second))
        elif self.kind == "spherical":
            inverse = np.eye(d) / np.sqrt(np.trace(second) / d)
        inverse = _cut_all(inverse)
        self.moment = inverse @ second @ inverse.T
        self.frame = PrivateFrame(place + scale * mean, inverse / scale)
        self._moment_noise = float((self.plan.deviation(self._last) ** 2).sum()) / self.samples**2
        self.radius = self._last.radius if self.plan.alone else self._radius(d)

    def _radius(self, d: int) -> float:
        """The less noise, the less is clipped: so many rows of a white Gaussian.

        Of MNIST (d = 20, 10 components, 70,000 rows) radius 5 is best at epsilon 0.3, 6.5 at 1 and
        7.6 at 3, by trials at delta 1e-6.
        """
        room = np.sqrt(self.plan.privacy.mu_squared) * self.samples / (self.k * d)
        share = float(np.clip(0.04 * (83 / room) ** 1.8, 0.001, 0.4))
        radius = 1.1 * chi_quantile(1 - share, d)
        # Real tails are heavier than a Gaussian's: where noise is nothing, less is clipped.
        while radius < LARGEST_RADIUS / 1.1 and self._noise_at(1.1 * radius) < NOTHING:
            radius *= 1.1
        return _cut(radius, AGREED_SCALAR)

    @staticmethod
    def _in(frame: PrivateFrame, radius: float) -> tuple[FloatArray, FloatArray, float]:
        return frame.origin, frame.matrix, float(radius)

    def _last_split(self, values: FloatArray) -> dict[str, FloatArray]:
        return self._last.split(values)

    # Start.

    def start(self) -> Fit[None]:
        """A sketch of all rows by many components, and the model that fits it best."""
        if self.plan.alone:
            return
        d, k = len(self.frame.origin), self.sketched
        draws = normals(self.seed, 0, Purpose.START, np.arange(k), d)
        # What k cells leave of the variance in d columns, about: components that overlap more would
        # hardly move in so few rounds (two clusters in two columns: 2 starts of 14 were bad).
        within = max(0.02, k ** (-2 / d))
        means = draws * np.sqrt(1 - within)
        params = GaussianParameters(np.full(k, 1 / k), means, self.moment * within)
        for left in reversed(range(START_ROUNDS)):
            told = yield from self._round(params, CENTRES, "start", START_ROUNDS)
            params, lost = self._maximize(told, CENTRES), np.flatnonzero(self._lost)
            if len(lost) < k and len(lost):
                params = self._without(params, lost) if left else _dropped(params, lost)
        params = agreed(params, CENTRES)
        tried = [
            (model, agreed(start, self.kind))
            for model in self.models
            for start in self._starts(params, model)
        ]
        self.model, start = tried[(yield from self._compare(tried))]
        self.start_at(start)

    def start_at(self, params: GaussianParameters) -> None:
        """Rounds begin at these parameters, in the frame."""
        self.k, self.params = self.model.n_components, params
        self.radius = self._radius(len(self.frame.origin))
        self._statistics: dict[str, FloatArray] | None = None

    def _without(self, params: GaussianParameters, lost: IntArray) -> GaussianParameters:
        """Components without rows take a half of the heaviest, somewhere within them."""
        weights, means = params.weights.copy(), params.means.copy()
        weights[lost] = 0.0
        root = np.linalg.cholesky(params.covariances)
        at = normals(self.seed, self.asked, Purpose.START, lost, means.shape[1]) @ root.T
        for j, off in zip(lost.tolist(), at, strict=True):
            heaviest = int(np.argmax(weights))
            weights[[j, heaviest]] = weights[heaviest] / 2
            means[j] = means[heaviest] + off
        return GaussianParameters(weights / weights.sum(), means, params.covariances)

    def _starts(self, sketch: GaussianParameters, model: Any) -> list[GaussianParameters]:
        """Fits to the sketch: of the model, and of one with a common covariance.

        The second has no covariance of its own for what is a lump of the sketch by chance. A sketch
        of few components is a bad judge of fits: then there are more of both, each from one start,
        and the rows choose among them.
        """
        tied = gaussian_mixture(model.n_components, "tied")
        several = self.unsure and len(self.models) == 1
        fits = []
        for attempt in range(0, TRIED if several else 2, 2):
            n_init = 1 if several else 4
            fits.append(self._from_sketch(sketch, model, attempt, n_init))
            common = self._from_sketch(sketch, tied, attempt + 1, n_init)
            fits.append(_as_kind(common, self.kind))
        return fits

    def _compare(self, tried: Sequence[tuple[Any, GaussianParameters]]) -> Fit[int]:
        """The best start; with several numbers of components, of the fewest that are enough.

        Enough are those than which no more are better by BIC by two deviations of the noise. What
        is asked for is the gain over one Gaussian.
        """
        d, place = len(self.frame.origin), self._in(self.frame, COMPARED_NATS)
        one = agreed(_as_kind(self._unit(1), self.kind), self.kind)
        asked = Asked(1.0, 1, None, self.kind, one, *place, tuple(start for _, start in tried))
        gains = (yield from self._ask(asked, "selection", 1, "question")) / self.samples
        self.gain_error = float(self.plan.deviation(self._last)[0]) / self.samples
        numbers = np.array([model.n_components for model, _ in tried])
        count = [k - 1 + k * d + covariance_parameters(self.kind, k, d) for k in numbers.tolist()]
        worth = gains - np.array(count) * np.log(self.samples) / (2 * self.samples)
        best = {k: int(np.argmax(np.where(numbers == k, worth, -np.inf))) for k in numbers.tolist()}
        if len(best) > 1:
            self.compared = tuple(
                {"n_components": k, "gain": float(gains[j]), "bic": -2 * self.samples * worth[j]}
                for k, j in best.items()
            )
        enough = worth.max() - 2 * 2**0.5 * self.gain_error
        chosen = next(j for j in best.values() if worth[j] >= enough)
        self.gain = float(gains[chosen])
        return chosen

    @property
    def unsure(self) -> bool:
        """Whether the sketch has few components for each of the model."""
        return self.k > 1 and self.sketched < UNSURE * self.k

    @property
    def sketched(self) -> int:
        """Components of the sketch: of these, so many as have rows enough to be told from noise."""
        return min(SKETCHED * self.models[-1].n_components, self._most_components())

    def _most_components(self) -> int:
        asked = Asked(1.0, 1, None, CENTRES, self._unit(1), *self._in(self.frame, self.radius))
        asked = replace(asked, step=self.plan.step(asked.size, "start", START_ROUNDS))
        noise = self.plan.deviation(asked)
        least = self.models[-1].n_components
        return max(least, int(self.samples / (2 * float(noise[-1]) * np.sqrt(len(noise)))))

    def _unit(self, k: int) -> GaussianParameters:
        d = len(self.frame.origin)
        return GaussianParameters(np.full(k, 1 / k), np.zeros((k, d)), self.moment)

    def _from_sketch(
        self, params: GaussianParameters, model: Any, attempt: int, n_init: int
    ) -> GaussianParameters:
        """An ordinary fit of the model to rows drawn from the sketch."""
        sketch = uniforms(self.seed, 1, Purpose.SKETCH, np.arange(SKETCH_ROWS), 1)[:, 0]
        which = np.searchsorted(np.cumsum(params.weights), sketch).clip(0, len(params.weights) - 1)
        d = params.means.shape[1]
        draws = normals(self.seed, 2, Purpose.SKETCH, np.arange(SKETCH_ROWS), d)
        rows = params.means[which] + draws @ np.linalg.cholesky(params.covariances).T
        settings = FitSettings(model, n_init=n_init, tol=1e-4, rounds=100, seed=self.seed + attempt)
        found = fit_here(settings, HeldWorkers(as_workers([rows]))).result.params
        return GaussianParameters(found.weights, found.means, found.covariances)

    # Rounds.

    def step(self) -> Fit[None]:
        """One round: a full step, or one that averages."""
        told = yield from self._round(self.params, self.kind, "rounds", self.rounds)
        before, late = self._statistics, self.round + 1 - (self.rounds + 1) // 2
        gamma = 1.0 if before is None or late < 1 else 1 / (late + 1)
        now = (
            told if before is None else {n: before[n] + gamma * (told[n] - before[n]) for n in told}
        )
        moved = sum(float(((now[n] - before[n]) ** 2).sum()) for n in now) if before else 0.0
        self._statistics = now
        self.params = agreed(self._maximize(now, self.kind), self.kind)
        self.round += 1
        self.last = LastSum(0, np.inf, squared=moved, step_size=gamma)

    def _round(
        self, params: GaussianParameters, kind: str, part: str, count: int
    ) -> Fit[dict[str, FloatArray]]:
        """Statistics per row at some parameters.

        Moments come about each component, in its own metric, and are carried into the frame; of
        tied covariances it is the one within components, which noise spoils least.
        """
        params = agreed(params, kind)
        asked = Asked(1.0, 1, None, kind, params, *self._in(self.frame, self.radius))
        told = yield from self._ask(asked, part, count, "start" if part == "start" else "round")
        noise = self._last_split(self.plan.deviation(self._last) / self.samples)
        found = self._last_split(told / self.samples)
        mass, roots, means = found["mass"], self._last.roots, params.means
        if kind != CENTRES:
            # Rows are clipped about components whose spread they gave: without this a component
            # would shrink from round to round (MNIST, epsilon 0.3: by a fifth, 1 nat a row).
            found["second"] = found["second"] / kept_square(self.radius, means.shape[1])
        self._lost = mass[:, 0] < 2 * float(noise["mass"].max())
        mass = np.maximum(mass, 2 * float(noise["mass"].max()))
        step = _shrunk(found["first"] / mass, float(noise["first"].max()) / mass[:, 0])
        moved = means + np.einsum("kij,kj->ki", roots, step)
        out = {"mass": mass[:, 0], "first": mass * moved}
        if kind == CENTRES:
            spurious = float((float(noise["first"].max()) ** 2 / mass).sum())
            out["second"] = spurious * (roots[0] @ roots[0].T)
            return out
        if kind == "tied":
            share, error = mass.sum(), float(noise["second"].max()) * np.ones(1)
            pooled = unpack(found["second"], means.shape[1]) - (mass * step).T @ step
            within = raise_eigenvalues(pooled[0] / share, _floors(error, means.shape[1])[0])
            out["second"] = share * (roots[0] @ within @ roots[0].T)
            return out
        error = float(noise["second"].max()) / mass[:, 0]
        own = _within(found["second"] / mass, step, error, kind)
        spread = roots @ own @ np.swapaxes(roots, 1, 2)
        out["second"] = mass[:, :, None] * (spread + moved[:, :, None] * moved[:, None, :])
        return out

    def _maximize(self, told: dict[str, FloatArray], kind: str) -> GaussianParameters:
        """T in the frame."""
        mass = told["mass"]
        weights, means = mass / mass.sum(), told["first"] / mass[:, None]
        if kind == CENTRES:
            # Without what noise adds to the spread of means, or it would be taken off that within
            # components, and little be left of it (MNIST, epsilon 0.3: a start 1.4 nats lower).
            between = (weights[:, None] * means).T @ means - told["second"] / mass.sum()
            within = self.moment - raise_eigenvalues(between, 0.0)
            return GaussianParameters(weights, means, raise_eigenvalues(within, 0.02))
        if kind == "tied":
            within = told["second"] / mass.sum()
            return GaussianParameters(weights, means, raise_eigenvalues(within, LEAST))
        spread = told["second"] / mass[:, None, None] - means[:, :, None] * means[:, None, :]
        if kind == "full":
            return GaussianParameters(weights, means, raise_eigenvalues(spread, LEAST))
        variances = np.maximum(np.diagonal(spread, axis1=1, axis2=2), LEAST)
        if kind == "diag":
            return GaussianParameters(weights, means, variances)
        return GaussianParameters(weights, means, variances.mean(axis=1))

    @property
    def noise_nats(self) -> float:
        """What the noise of the statistics costs a row, to second order, were all components alike.

        Half the squared error of the statistics in the metric of white components of equal mass;
        the rounds that are averaged count as so many.
        """
        return self._moment_noise / 2 if self.plan.alone else self._noise_at(self.radius)

    def remarks(self) -> list[str]:
        """What a user should know."""
        private = self.plan.noise_seed is None
        amount, less = ("epsilon", "a larger epsilon") if private else ("noise", "less noise")
        out, mend = [], f"Use more rows, {less}, fewer columns, or fewer components."
        if self.noise_nats > WORTH_TELLING:
            out.append(
                f"too few rows for this {amount}: the noise costs about {self.noise_nats:.2g} nats "
                f"a row, which may be more than the components are worth. {mend}"
            )
        if self.unsure:
            out.append(
                f"the start of this fit is not certain: at this {amount} about {self.sketched} "
                f"groups of rows stand out of the noise, which is few for {self.k} components. One "
                f"of them may be missing. {mend}"
            )
        if self.k > 1 and self.gain < 2 * self.gain_error:
            out.append(
                f"at this {amount} the components of the start cannot be told from one Gaussian: "
                f"they gain {self.gain:.2g} nats a row, give or take {self.gain_error:.2g}. {mend}"
            )
        return out

    def _noise_at(self, radius: float) -> float:
        averaged = self.rounds - (self.rounds + 1) // 2 + 1
        asked = Asked(1.0, 1, None, self.kind, self._unit(self.k), *self._in(self.frame, radius))
        asked = replace(asked, step=self.plan.step(asked.size, "rounds", self.rounds))
        noise = self.plan.deviation(asked) / self.samples
        return float((noise**2).sum()) * self.k / (2 * averaged)

    # What it came to.

    def bound(self) -> tuple[Any, FloatArray, Mapping[str, FloatArray]]:
        """The model bound to what the fit itself says of all rows, and its statistics."""
        if self.plan.alone:
            return self._from_moments()
        params = self.frame.back(self.params, self.kind)
        weights, means = params.weights, params.means
        d = means.shape[1]
        mean = weights @ means
        away = means - mean
        within = params.covariances
        if self.kind == "full":
            within = np.einsum("k,kij->ij", weights, within)
        elif self.kind == "diag":
            within = np.diag(weights @ within)
        elif self.kind == "spherical":
            within = np.eye(d) * float(weights @ within)
        whole = within + (weights[:, None] * away).T @ away
        products = self.kind == "tied" or (self.kind == "full" and self.k == 1)
        scatter = pack(whole) if products else np.diagonal(whole).copy()
        summary = {"mean": mean, "scatter": scatter}
        one = {name: values[None] for name, values in summary.items()}
        model = self.model.bind(one, np.array([max(self.samples, self.k)]), np.ones(1))
        return model, model.statistics_of(model.from_user(params)), summary

    def _from_moments(self) -> tuple[Any, FloatArray, Mapping[str, FloatArray]]:
        """An ordinary fit to rows that have the mean and the covariance that were told."""
        d, inverse = len(self.frame.origin), np.linalg.inv(self.frame.matrix)
        root = np.sqrt(d) * inverse @ np.linalg.cholesky(self.moment)
        rows = self.frame.origin + np.concatenate([root.T, -root.T])
        settings = FitSettings(self.model, algorithm="em", seed=self.seed)
        found = fit_here(settings, HeldWorkers(as_workers([rows]))).result
        assert found.pooled_summary is not None
        return found.model, found.statistics, found.pooled_summary


def _places(edges: FloatArray, told: FloatArray, noise: float) -> tuple[FloatArray, FloatArray]:
    """Mean and deviation of each column from noisy counts of rows between edges.

    All bins where rows may be tell them together, also where no single bin stands out of the noise:
    only those that do would make the deviation too small (MNIST, epsilon 0.3: by a fifth). Where
    even together they do not tell it, it is that of rows all over these bins: rather too large.
    """
    middle, width = (edges[:, 1:] + edges[:, :-1]) / 2, edges[:, 1] - edges[:, 0]
    place, scale = np.empty(len(edges)), np.empty(len(edges))
    walk = noise * np.sqrt(np.arange(1, told.shape[1] + 1))  # the noise of a sum of so many bins
    for j, counts in enumerate(told):
        few = SOUGHT * max(float(counts.sum()), 0.0) + walk
        below, above = (np.flatnonzero(np.cumsum(c) <= few) for c in (counts, counts[::-1]))
        first = int(below[-1]) + 1 if len(below) else 0
        last = len(counts) - (int(above[-1]) + 1 if len(above) else 0)
        if last <= first:
            first, last = 0, len(counts)
        x, own = middle[j, first:last], counts[first:last]
        rows = max(float(own.sum()), 1.0)
        place[j] = np.clip(float(own @ x) / rows, x[0], x[-1])
        apart = (x - place[j]) ** 2
        spread, error = float(own @ apart) / rows, noise * float(np.sqrt(apart @ apart)) / rows
        if spread < 2 * error:
            place[j], spread = x.mean(), (x[-1] - x[0]) ** 2 / 12
        scale[j] = _cut(np.sqrt(spread + width[j] ** 2 / 12), AGREED)
        unit = np.ldexp(1.0, int(np.frexp(scale[j])[1]) - AGREED)
        place[j] = np.rint(place[j] / unit) * unit
    return place, scale


def _dropped(params: GaussianParameters, lost: IntArray) -> GaussianParameters:
    """Without components that noise alone gives a mass: rows drawn from them would be nowhere."""
    weights = np.delete(params.weights, lost)
    return GaussianParameters(
        weights / weights.sum(), np.delete(params.means, lost, axis=0), params.covariances
    )


def _shrunk(steps: FloatArray, deviations: FloatArray) -> FloatArray:
    """Steps without that part of their squared length which is noise (James and Stein, 1961)."""
    error = deviations**2 * steps.shape[1]
    kept = 1 - error / np.maximum((steps**2).sum(axis=1), 1e-300)
    return steps * np.clip(kept, 0.0, 1.0)[:, None]


def _within(second: FloatArray, step: FloatArray, error: FloatArray, kind: str) -> FloatArray:
    """Covariances about the means reached, where components were white: none is made of noise.

    Noise of this deviation in every product spreads eigenvalues by sqrt(d) times as much: they
    are held that far above zero, and at a tenth of what they were at least.
    """
    d = step.shape[1]
    if kind == "full":
        raw = unpack(second, d)
    else:
        wide = second if kind == "diag" else np.repeat(second / d, d, axis=1)
        raw = wide[:, :, None] * np.eye(d)
    raw = raw - step[:, :, None] * step[:, None, :]
    lifted = zip(raw, _floors(error, d), strict=True)
    return np.stack([raise_eigenvalues(c, floor) for c, floor in lifted])


def _floors(error: FloatArray, d: int) -> FloatArray:
    """Eigenvalues that noise of this deviation in every product may be mistaken for."""
    return np.clip(np.sqrt(d) * error, 0.1, 0.9)


def _as_kind(tied: GaussianParameters, kind: str) -> GaussianParameters:
    """Components with one covariance as those of another type of covariances."""
    k, whole = len(tied.weights), tied.covariances
    squares = np.diagonal(whole)
    given: dict[str, FloatArray] = {
        "tied": whole,
        "full": np.tile(whole, (k, 1, 1)),
        "diag": np.tile(squares, (k, 1)),
        "spherical": np.full(k, squares.mean()),
    }
    return GaussianParameters(tied.weights, tied.means, given[kind])
