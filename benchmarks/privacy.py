"""Held-out nats against epsilon: private fits, two peers at equal epsilon, and none.

The second part is an audit: many private fits with and without one row, and the epsilon that an
attacker proves from what they told.
"""

from __future__ import annotations

import copy
import itertools
import json
import os
import time
import warnings
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any, final
from unittest.mock import patch

import numpy as np
from scipy.special import softmax
from scipy.stats import beta, norm
from sklearn.exceptions import ConvergenceWarning
from sklearn.mixture import GaussianMixture

import emfed
from benchmarks.answer import AIR, _digits, _table
from emfed.aggregation.privacy import NoisyWorkers
from emfed.core.errors import DataError
from emfed.core.noise import NoiseKey
from emfed.core.privacy import DEVIATION, Privacy, epsilon_of, mu_squared_of
from emfed.core.sums import Fit, Sum, drive
from emfed.data.held import HeldWorkers
from emfed.data.workers import as_workers
from emfed.fitting import private
from emfed.fitting.private import ROUNDS, PrivateAsk, PrivateFit, PrivatePlan
from emfed.models import GaussianParameters

EPSILONS = (0.3, 1.0, 3.0, 10.0)
SITES = 10
NONE = "none"
Table = tuple[str, np.ndarray, int, str, float]


@cache
def sets() -> list[Table]:
    """Name, rows, components, covariances and delta."""
    return list(_sets())


def _sets() -> Iterator[Table]:
    folder = Path(os.environ.get("EMFED_DATA", ""))
    if (folder / "lifesci.csv.gz").is_file():
        rows = np.loadtxt(folder / "lifesci.csv.gz", delimiter=",")
        # The units of Park et al.: no row is longer than one. Nats depend on them.
        yield "Life Science", rows / np.linalg.norm(rows, axis=1).max(), 3, "full", 1e-4
    if (folder / "mnist.npz").is_file():
        digits = _digits()[0]
        yield "MNIST tied", digits / digits.std(axis=0), 10, "tied", 1e-6
    if (folder / "beijing_air_quality.parquet").is_file():
        yield (
            "Beijing full",
            _table("beijing_air_quality.parquet", AIR, "station")[0],
            5,
            "full",
            1e-6,
        )


def published(
    rows: np.ndarray,
    k: int,
    epsilon: float,
    delta: float,
    seed: int,
    rounds: int = 10,
    standard: bool = True,
) -> Any:
    """DP-EM (Park, Foulds, Chaudhuri and Welling, 2017), pooled, with full covariances.

    Rows are scaled into the unit ball by the length of the longest, which is taken as public; with
    ``standard`` each column comes in units of its deviation from its mean, for nothing. Each round
    perturbs the weights, every mean and every covariance by a Gaussian mechanism of its own; all
    compose exactly here, which is kinder to it than the paper's accountant. Neighbours have one row
    more or less. The start is drawn from a Gaussian, as theirs.
    """
    rng, d = np.random.default_rng(seed), rows.shape[1]
    place, scale = (rows.mean(axis=0), rows.std(axis=0)) if standard else (0.0, np.ones(d))
    rows = (rows - place) / scale
    size = float(np.linalg.norm(rows, axis=1).max())
    y, (n, d) = rows / size, rows.shape
    multiplier = np.sqrt(rounds * (2 * k + 1) / mu_squared_of(epsilon, delta))
    weights, means = np.full(k, 1 / k), rng.normal(size=(k, d)) * 0.1
    covariances = np.tile(np.eye(d) * float((y**2).mean()), (k, 1, 1))
    model = emfed.gaussian_mixture(k, "full")
    unit = {"mean": np.zeros((1, d)), "scatter": np.ones((1, d))}
    bound = model.bind(unit, np.array([n]), np.ones(1))
    for _ in range(rounds):
        params = emfed.models.GaussianParameters(weights, means, covariances)
        r = bound.responsibilities(y[None], params)[0]
        mass = np.maximum(r.sum(axis=0) + multiplier * rng.normal(size=k), 10.0)
        weights = mass / mass.sum()
        means = (r.T @ y + multiplier * rng.normal(size=(k, d))) / mass[:, None]
        for j in range(k):
            noise = np.triu(multiplier * rng.normal(size=(d, d)))
            second = (r[:, j, None] * y).T @ y + noise + np.triu(noise, 1).T
            raw = second / mass[j] - np.outer(means[j], means[j])
            values, vectors = np.linalg.eigh(raw)
            covariances[j] = (vectors * np.maximum(values, 1e-3 / d)) @ vectors.T
    means, covariances = means * size * scale + place, covariances * size**2
    return GaussianParameters(weights, means, covariances * scale * scale[:, None])


def held_out(model: Any, params: Any, rows: np.ndarray) -> float:
    """Nats a row of parameters in the user's units."""
    d = rows.shape[1]
    products = model.kind == "tied"
    scatter = np.eye(d)[np.triu_indices(d)] if products else np.ones(d)
    unit = {"mean": np.zeros((1, d)), "scatter": scatter[None]}
    bound = model.bind(unit, np.array([len(rows)]), np.ones(1))
    return float(np.mean(bound.log_likelihood(rows[None], bound.from_user(params))))


def by_splits(
    rows: np.ndarray, k: int, epsilon: float, delta: float, seed: int, each: int = 4
) -> GaussianParameters:
    """What pfl 0.6 does with one row a user: diagonal EM, the Gaussian mechanism, split components.

    pfl looks at rows one by one in Python, a quarter of an hour a round of MNIST, so this is its
    arithmetic over arrays; `benchmarks.pfl_peer.same_as_pfl` holds the two equal where pfl is
    installed. The vector of a row (share, mean and variance of every component, relative to the old
    ones) is clipped as a whole; all rounds compose exactly. It begins with the mean and variance of
    all rows, which it gets for nothing here, and has the columns in these units: its vectors depend
    on where zero is. Every ``each`` rounds the heaviest components split.
    """
    place, scale = rows.mean(axis=0), rows.std(axis=0)
    rows = (rows - place) / scale
    rng, (n, d) = np.random.default_rng(seed), rows.shape
    splits = int(np.ceil(np.log2(k)))
    multiplier = np.sqrt(each * (splits + 1) / mu_squared_of(epsilon, delta))
    weights, means, variances = np.ones(1), rows.mean(axis=0)[None], rows.var(axis=0)[None]
    for round_ in range(each * (splits + 1)):
        if round_ and round_ % each == 0 and len(weights) < k:
            weights, means, variances = split_heaviest(k, weights, means, variances)
        told = pfl_sums(rows, weights, means, variances, np.sqrt(1.5 * d))
        noise = multiplier * np.sqrt(1.5 * d) * rng.normal(size=told.shape)
        weights, means, variances = pfl_update(told + noise, n, weights, means, variances)
    weights = weights / weights.sum()
    return GaussianParameters(weights, means * scale + place, variances * scale**2)


VARIANCE_SCALE = 0.5
"""pfl's factor before variances: with it their part of a row's vector is as long as the means'."""


def pfl_sums(
    rows: np.ndarray, weights: np.ndarray, means: np.ndarray, variances: np.ndarray, bound: float
) -> np.ndarray:
    """The sum of clipped vectors, ``(components, 1 + 2 d)``.

    The vector of a row at a component is its share times (1, u, v) with u = (y - m) / s and
    v = (y^2 - m^2 - s^2) / 2 s^2. Lengths and sums follow from powers of y by products of matrices:
    ten times as fast as vector by vector.
    """
    d, centre = rows.shape[1], means**2 + variances
    ones = np.ones((len(weights), d))
    logits = _polynomial(means**2 / variances, -2 * means / variances, 1 / variances, 0 * ones)
    logits = -0.5 * logits
    logits[0] += np.log(weights) - 0.5 * np.log(variances).sum(axis=1)
    squares = (VARIANCE_SCALE / variances) ** 2
    length = _polynomial(
        1 / d + means**2 / variances + squares * centre**2,
        -2 * means / variances,
        1 / variances - 2 * squares * centre,
        squares,
    )
    told = np.zeros((len(weights), 1 + 2 * d))
    for block in np.array_split(rows, max(1, len(rows) // 4096)):
        powers = np.concatenate([np.ones((len(block), 1)), block, block**2, block**4], axis=1)
        share = softmax(powers @ logits, axis=1)
        norm2 = (share**2 * np.maximum(powers @ length, 1.0)).sum(axis=1, keepdims=True)
        share *= np.minimum(1, bound / np.sqrt(norm2))
        told += share.T @ powers[:, : 1 + 2 * d]
    mass, first, second = told[:, :1], told[:, 1 : d + 1], told[:, d + 1 :]
    off = (first - mass * means) / np.sqrt(variances)
    return np.concatenate(
        [mass, off, VARIANCE_SCALE * (second - mass * centre) / variances], axis=1
    )


def _polynomial(*coefficients: np.ndarray) -> np.ndarray:
    """Sums over columns of c0 + c1 y + c2 y^2 + c4 y^4, as a map from all powers."""
    constant, *others = coefficients
    return np.concatenate([constant.sum(axis=1)[None], *(c.T for c in others)])


def pfl_update(
    told: np.ndarray, n: int, weights: np.ndarray, means: np.ndarray, variances: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """pfl's M-step: variances have a floor, a hundredth of all rows'; weights below 1% go."""
    d = means.shape[1]
    whole = weights @ means / weights.sum()
    floor = 0.01 * (weights @ (variances + (means - whole) ** 2)) / weights.sum()
    mass = told[:, :1]
    new = told[:, 1 : d + 1] / mass * np.sqrt(variances) + means
    second = told[:, d + 1 :] / VARIANCE_SCALE / mass * variances + means**2 + variances
    kept = mass[:, 0] / n >= 0.01
    if not kept.any():
        return weights, means, variances
    return (mass[:, 0] / n)[kept], new[kept], np.maximum(floor, second - new**2)[kept]


def split_heaviest(
    k: int, weights: np.ndarray, means: np.ndarray, variances: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each of the heaviest becomes two, half a deviation apart from it along its widest column."""
    order = np.argsort(-weights)
    some, rest = order[: k - len(weights)], order[k - len(weights) :]
    widest = np.argmax(variances[some], axis=1)
    offset = np.zeros_like(means[some])
    offset[np.arange(len(some)), widest] = 0.5 * np.sqrt(variances[some, widest])
    return (
        np.concatenate([weights[some] / 2, weights[some] / 2, weights[rest]]),
        np.concatenate([means[some] + offset, means[some] - offset, means[rest]]),
        np.concatenate([variances[some], variances[some], variances[rest]]),
    )


def pooled(rows: np.ndarray, k: int, kind: str, seed: int) -> Any:
    """EM without noise from one k-means start, by scikit-learn."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)
        made = GaussianMixture(k, covariance_type=kind, tol=1e-5, max_iter=400, random_state=seed)
        return made.fit(rows)


def ours(
    rows: np.ndarray, k: int, kind: str, epsilon: float, delta: float, seed: int
) -> GaussianParameters:
    """A private fit of ten sites that tell masked sums."""
    parts, model = np.array_split(rows, SITES), emfed.gaussian_mixture(k, kind)
    return emfed.fit(model, parts, epsilon=epsilon, delta=delta, seed=seed, noise_seed=seed).params


def _methods(
    name: str, k: int, kind: str, delta: float
) -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Name, covariances and function of rows and seed, of everything that is compared."""
    standard = name != "Life Science"  # which comes in the units of the paper
    for epsilon in EPSILONS:
        yield f"{epsilon:g}", kind, partial(ours, k=k, kind=kind, epsilon=epsilon, delta=delta)
    for epsilon in EPSILONS:
        told = {"k": k, "epsilon": epsilon, "delta": delta}
        yield f"diag {epsilon:g}", "diag", partial(ours, kind="diag", **told)
        yield f"DP-EM {epsilon:g}", "full", partial(published, standard=standard, **told)
        yield f"pfl {epsilon:g}", "diag", partial(by_splits, **told)


def bench_privacy(
    seeds: int = 10, keep: Path | None = None, minutes: float = np.inf
) -> list[dict[str, Any]]:
    """Medians over seeds; a tenth of the rows is held out, another one for each seed.

    Fits that the file ``keep`` (JSON lines) has are not made again, and after some ``minutes`` no
    new one begins: then medians are of the seeds that ran, and "seeds" says how many.
    ``EMFED_METHODS="DP-EM,pfl"`` takes the peers alone, ``EMFED_SETS=MNIST`` one table.
    """
    here = os.environ.get("EMFED_SETS", "")
    some = tuple(filter(None, os.environ.get("EMFED_METHODS", "").split(","))) or ("",)
    lines = keep.read_text(encoding="utf-8").splitlines() if keep and keep.exists() else []
    known = [row for row in map(json.loads, lines) if row["data"] != "audit"]
    done = {(row["data"], row["method"], row["seed"]) for row in known}
    ends = time.monotonic() + 60 * minutes
    for seed, (name, rows, k, kind, delta) in itertools.product(range(seeds), sets()):
        order = np.random.default_rng(seed).permutation(len(rows))
        test, train = rows[order[: len(rows) // 10]], rows[order[len(rows) // 10 :]]
        plain = (NONE, kind, partial(pooled, k=k, kind=kind))
        for method, covariance, fit in (plain, *_methods(name, k, kind, delta)):
            if (name, method, seed) in done or time.monotonic() > ends:
                continue
            if not (method.startswith(some) and name.startswith(here)):
                continue
            try:
                found = fit(train, seed=seed)
                model = emfed.gaussian_mixture(k, covariance)
                if method != NONE:
                    model = emfed.gaussian_mixture(len(found.weights), covariance)
                nats = found.score(test) if method == NONE else held_out(model, found, test)
            except DataError:  # too few rows for this epsilon, and it says so
                nats = None
            known.append({"data": name, "method": method, "seed": seed, "nats": nats})
            if keep is not None:
                with keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[-1]) + "\n")
    return list(_medians(known))


def _medians(known: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """One row a table and method: the median and how many seeds it is of."""
    for name, method in dict.fromkeys((row["data"], row["method"]) for row in known):
        told = [r["nats"] for r in known if (r["data"], r["method"]) == (name, method)]
        some = [nats for nats in told if nats is not None]
        median = float(np.median(some)) if some else None
        yield {"data": name, "method": method, "nats": median, "seeds": len(told)}


# Where the nats go.


def bench_private_start(
    seeds: int = 3, epsilon: float = 0.3, lengths: tuple[int, ...] = (8, 32)
) -> Iterator[dict[str, Any]]:
    """Held-out nats of MNIST, tied: of the private start, of rounds from it, and of rounds from the
    end of pooled EM, which get the budget of the start as well.

    So what the start costs is told from what the noise of the rounds does.
    """
    for seed, (name, rows, k, kind, delta) in itertools.product(range(seeds), sets()):
        if kind != "tied":
            continue
        order = np.random.default_rng(seed).permutation(len(rows))
        test, train = rows[order[: len(rows) // 10]], rows[order[len(rows) // 10 :]]
        known = pooled(train, k, kind, seed)
        model, privacy = emfed.gaussian_mixture(k, kind), Privacy(epsilon, delta)
        parts = NoisyWorkers(HeldWorkers(as_workers(np.array_split(train, SITES))), NoiseKey(seed))
        plan = PrivatePlan(privacy, privacy.shares(SITES, True), SITES, masked=True)
        row: dict[str, Any] = {"data": name, "seed": seed, "pooled": float(known.score(test))}
        for start in ("private", "known"):
            fit = PrivateFit([model], plan, ROUNDS, seed)
            _told(fit.open(train.shape[1]), parts)
            shares = dict(private.SHARES)
            if start == "private":
                _told(fit.start(), parts)
            else:
                shares["rounds"] += shares["start"] + shares["selection"]
                fit.start_at(_in_frame(fit.frame, known))
            row[start] = held_out(model, fit.frame.back(fit.params, kind), test)
            with patch.dict(private.SHARES, shares):
                for rounds in lengths:
                    again = copy.copy(fit)
                    again.rounds = rounds
                    for _ in range(rounds):
                        _told(again.step(), parts)
                    row[f"{start}, {rounds} rounds"] = held_out(
                        model, again.frame.back(again.params, kind), test
                    )
        yield row


def _told(part: Fit[None], workers: Any) -> None:
    """A part of a private fit, with the sums of these workers."""
    drive(part, lambda ask: Sum(workers.sum(ask), 0.0))


def _in_frame(frame: private.PrivateFrame, known: GaussianMixture) -> GaussianParameters:
    """Parameters of scikit-learn, tied, in the frame of a private fit."""
    means = (known.means_ - frame.origin) @ frame.matrix.T
    within = frame.matrix @ known.covariances_ @ frame.matrix.T
    return GaussianParameters(known.weights_, means, within)


# The audit.

AUDITED = {"epsilon": 4.0, "delta": 1e-5}


@final
class Overheard:
    """Workers of a private run whose server knows all rows but one, and looks for that one.

    Of every answer it knows the sum over the other rows and what the canary would add. The noise is
    Gaussian to it, so their product with what was told, in units of the noise, is the likelihood
    ratio: no test is better.
    """

    def __init__(
        self, rows: np.ndarray, canary: np.ndarray, present: bool, noise_seed: int
    ) -> None:
        there = np.concatenate([rows, canary]) if present else rows
        held = HeldWorkers(as_workers([there]))
        self._workers, self._rows, self._canary = (
            NoisyWorkers(held, NoiseKey(noise_seed)),
            rows,
            canary,
        )
        self.evidence = 0.0

    def sum(self, ask: PrivateAsk) -> np.ndarray:
        """The answer, which the attacker looks at."""
        told = self._workers.sum(ask)
        known, more = (ask.whole([part]).astype(float) for part in (self._rows, self._canary))
        self.evidence += float((told - known - more / 2) @ more) / DEVIATION**2
        return told


def _heaviest(
    fit: PrivateFit, sketch: GaussianParameters, model: Any, attempt: int, n_init: int
) -> GaussianParameters:
    """The heaviest components of a sketch, in the place of a fit to rows that are drawn from it."""
    some = np.argsort(-sketch.weights)[: model.n_components]
    tied = GaussianParameters(
        sketch.weights[some] / sketch.weights[some].sum(), sketch.means[some], sketch.covariances
    )
    return private._as_kind(tied, model.describe()["covariance_type"])


def evidence(present: bool, seed: int, rows: int = 1500) -> float:
    """The likelihood ratio of one private fit, with or without the canary: a row far outside."""
    others = np.random.default_rng(0).normal(size=(rows, 1))
    noise_seed = 2 * seed + present
    workers: Any = Overheard(others, np.array([[1e6]]), present, noise_seed)
    plan = PrivatePlan(Privacy(**AUDITED), 1, 1)
    models = [emfed.gaussian_mixture(2)]
    fit = PrivateFit(models, plan, ROUNDS, noise_seed)
    # What is made of answers tells nothing more, so it may be quick.
    with patch.object(PrivateFit, "_from_sketch", _heaviest):
        drive(fit.follow(1), lambda ask: Sum(workers.sum(ask), 0.0))
    return float(workers.evidence)


def proven_mu(with_row: np.ndarray, without: np.ndarray, confidence: float = 0.95) -> float:
    """Mu that an attacker proves from runs of both kinds: half choose a threshold, half judge it.

    Errors are bounded by Clopper and Pearson (1934); an attacker with these errors shows that the
    run is no better than mu-GDP (Nasr et al., 2023).
    """
    half, miss = len(with_row) // 2, (1 - confidence) / 2

    def worth(cut: float, part: slice) -> float:
        a, b = with_row[part], without[part]
        missed, alarms, n = int((a <= cut).sum()), int((b > cut).sum()), len(a)
        errors = [float(beta.ppf(1 - miss, x + 1, n - x)) if x < n else 1 for x in (missed, alarms)]
        return float(-norm.ppf(errors[0]) - norm.ppf(errors[1]))

    cuts = np.quantile(np.concatenate([with_row[:half], without[:half]]), np.linspace(0, 1, 41))
    best = max(cuts.tolist(), key=lambda cut: worth(cut, slice(0, half)))
    return max(0.0, worth(best, slice(half, None)))


def bench_audit(
    runs: int = 500, keep: Path | None = None, minutes: float = np.inf
) -> dict[str, float]:
    """Private fits with and without a canary: epsilon promised, and proven with 95% confidence."""
    lines = keep.read_text(encoding="utf-8").splitlines() if keep and keep.exists() else []
    known = [row for row in map(json.loads, lines) if row.get("data") == "audit"]
    ends, scores = time.monotonic() + 60 * minutes, {True: dict[int, float](), False: {}}
    for row in known:
        scores[row["method"] == "with"][row["seed"]] = row["nats"]
    for seed, present in itertools.product(range(runs), (True, False)):
        if seed in scores[present] or time.monotonic() > ends:
            continue
        found = scores[present][seed] = evidence(present, seed)
        if keep is not None:
            told = {"data": "audit", "method": "with" if present else "without", "seed": seed}
            with keep.open("a", encoding="utf-8") as file:
                file.write(json.dumps(told | {"nats": found}) + "\n")
    n = min(map(len, scores.values()))
    if n < 20:
        return {"runs": 2 * n}
    told = [np.array([scores[p][s] for s in range(n)]) for p in (True, False)]
    mu = proven_mu(*told)
    return {
        "runs": 2 * n,
        # Likelihood ratios of mu-GDP differ by mu squared in their means: no bound, and less noisy.
        "mu_seen": float(np.sqrt(max(0.0, told[0].mean() - told[1].mean()))),
        "mu_promised": float(np.sqrt(mu_squared_of(**AUDITED))),
        "promised": AUDITED["epsilon"],
        "proven": epsilon_of(mu**2, AUDITED["delta"]),
        "delta": AUDITED["delta"],
    }
