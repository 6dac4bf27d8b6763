"""Where default starts lead, and what a range of components chooses, beside scikit-learn."""

from __future__ import annotations

import itertools
import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import statsmodels.datasets
from sklearn import datasets
from sklearn.cluster import KMeans
from sklearn.mixture import GaussianMixture

import emfed
from benchmarks import estimators, right
from benchmarks.answer import sets
from benchmarks.estimators import KINDS
from emfed.fitting.ascent import FEWEST_OF_MANY

PEERS = 5
"""Starts of scikit-learn, the best of which is the mark."""
FEW_ROWS = 3000
"""Larger tables are thinned: scikit-learn takes long on them, not we."""
NUMBERS = range(1, 9)
FEW = 2.5
"""Rows of a component, of which one may have a part in another: its mean tells one or two rows."""
FLAT = 1e-4
"""A variance, in a table's own units, from which on a component lies on one value of a column (or
on a plane): both floors are 1e-6, and with a lower one the likelihood would be higher."""
STATSMODELS = {"fair": "rate_marriage", "anes96": "educ", "star98": None, "ccard": None}
"""Tables that come with statsmodels, and who holds which rows (None: four at random)."""


def tables() -> Iterator[tuple[str, np.ndarray, int, np.ndarray]]:
    """Every open table at hand, a number of components, and the worker of each row."""
    for name, rows, k in estimators.tables():
        order = np.argsort(np.argsort(rows[:, 0], kind="stable"))
        yield name, rows, k, order * 8 // len(rows)  # eight workers unlike each other
    for name, rows, groups in right.tables():
        every = -(-len(rows) // FEW_ROWS)
        yield name, rows[::every], 4, groups[::every]


def every_table() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
    """All of the above, and tables on which nothing was ever chosen."""
    for name, rows, _, groups in tables():
        yield name, rows, groups
    for name, rows, _, _, workers in (*estimators.looked_at(), *estimators.held_out()):
        yield name, rows, np.random.default_rng(0).integers(workers, size=len(rows))
    diabetes = datasets.load_diabetes()
    yield "diabetes", diabetes.data[:, :6], diabetes.target // 100
    for name, key in STATSMODELS.items():
        frame = getattr(statsmodels.datasets, name).load_pandas().data.dropna()
        columns = [c for c in frame.select_dtypes("number") if c != key][:12]
        at_random = np.random.default_rng(0).integers(4, size=len(frame))
        yield name, frame[columns].to_numpy(float), frame[key].to_numpy() if key else at_random


def unit_of(rows: np.ndarray, kind: str) -> np.ndarray:
    """What rows are divided by for scikit-learn: a spherical model has one unit for all columns."""
    spread = rows.std(axis=0)
    spread = np.where(spread > 0, spread, 1.0)
    return np.full_like(spread, np.sqrt((spread**2).mean())) if kind == "spherical" else spread


def peer(rows: np.ndarray, k: int, kind: str, seed: int, n_init: int = 1) -> Any:
    """scikit-learn's mixture of standardised rows, and what to add to its scores."""
    unit = unit_of(rows, kind)
    found = GaussianMixture(
        k, covariance_type=kind, n_init=n_init, tol=1e-5, max_iter=1000, random_state=seed
    )
    return found.fit(rows / unit), -float(np.log(unit).sum())


def bench_gaps(seeds: int = 5, kinds: tuple[str, ...] = ("full", "diag", "tied")) -> Iterator[Any]:
    """Nats that EM from our start, and whole fits, end below five starts of scikit-learn; bytes."""
    for name, rows, k, groups in tables():
        for kind in kinds:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield {"data": name, "covariance": kind, "k": k} | _gaps(
                    rows, k, kind, groups, seeds
                )


def _gaps(rows: np.ndarray, k: int, kind: str, groups: Any, seeds: int) -> dict[str, Any]:
    model = emfed.gaussian_mixture(k, kind)
    theirs = []
    for seed in range(PEERS):
        found, shift = peer(rows, k, kind, seed)
        theirs.append(found.score(rows / unit_of(rows, kind)) + shift)
    out: dict[str, Any] = {"sklearn, one start": float(max(theirs) - np.median(theirs))}
    for label, held in (("alone", None), ("workers", groups)):
        gaps = []
        for seed in range(seeds):
            run = emfed.fitting.open_run(model, rows, groups=held, start="auto", seed=seed)
            begun = run.model.to_user(run.params)
            options: dict[str, Any] = {"start_statistics": "parameters", "tol": 1e-6}
            ended = emfed.fit(model, rows, "em", groups=held, start=begun, rounds=500, **options)
            gaps.append(max(theirs) - ended.log_likelihood(rows))
            if held is not None:
                told, n = run.ledger.summary()["start"], len(run.weights)
                out |= {f"bytes {way}": told[way]["payload"] / n for way in ("up", "down")}
        out[label] = float(np.median(gaps))
    fits = [emfed.fit(model, rows, groups=groups, seed=seed) for seed in range(seeds)]
    out["fits"] = float(np.median([max(theirs) - fit.log_likelihood(rows) for fit in fits]))
    return out


def bench_k_means(
    numbers: tuple[int, ...] = (3, 8), seeds: int = 3, most: int = FEW_ROWS
) -> Iterator[dict[str, Any]]:
    """Inertia of k-means by workers over the best of five starts of scikit-learn, and its bytes."""
    for (name, rows, groups), k in itertools.product(every_table(), numbers):
        rows, groups = (each[:: -(-len(rows) // most)] for each in (rows, groups))
        theirs = [KMeans(k, n_init=1, random_state=seed).fit(rows) for seed in range(PEERS)]
        best, ours = min(peer.inertia_ for peer in theirs), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for seed in range(seeds):
                found = emfed.FederatedKMeans(k, random_state=seed).fit(rows, groups=groups)
                ours.append((found.inertia_ / best, found.n_iter_, found.bytes_ / found.raw_bytes_))
        ratios, rounds, sizes = zip(*ours, strict=True)
        yield {
            "data": name,
            "k": k,
            "ratios": [float(ratio) for ratio in ratios],
            "one start": float(np.median([peer.inertia_ for peer in theirs]) / best),
            "rounds": float(np.median(rounds)),
            "bytes": float(np.median(sizes)),
        }


def bench_merged(names: tuple[str, ...] = (), seeds: int = 5) -> Iterator[dict[str, Any]]:
    """Where EM ends from buckets and from merged clusters, on the sets of many workers."""
    for name, model, workers, *_ in sets():
        if workers.size < FEWEST_OF_MANY or (names and not any(part in name for part in names)):
            continue
        found: dict[str, list[Any]] = {}
        for start, seed in itertools.product(("k-means", "merge"), range(seeds)):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", emfed.EmfedWarning)
                begun = emfed.fit(model, workers, start=start, seed=seed, rounds=0)
                ended = emfed.fit(
                    model, workers, emfed.EM(), start=begun.params, tol=1e-5, rounds=500
                )
            told = begun.ledger.summary()["start"]
            found.setdefault(start, []).append(
                [ended.log_likelihood(workers.rows), ended.rounds]
                + [
                    (told[way]["payload"] + told[way]["envelope"]) / workers.size
                    for way in ("up", "down")
                ]
            )
        best = max(run[0] for runs in found.values() for run in runs)
        for start, runs in found.items():
            ends, *rest = zip(*runs, strict=True)
            yield {
                "set": name,
                "start": start,
                "below the best": [round(best - end, 4) for end in ends],
                "median": best - float(np.median(ends)),
                **{
                    key: float(np.median(own))
                    for key, own in zip(("rounds", "up", "down"), rest, strict=True)
                },
            }


def bench_counts(
    numbers: tuple[int, ...] = tuple(range(2, 9)),
    seeds: int = 5,
    most: int = FEW_ROWS,
    keep: Path | None = None,
    minutes: float = np.inf,
) -> Iterator[dict[str, Any]]:
    """Every fit by workers on every table: how it ended, beside five starts of scikit-learn.

    A component with rows whose mean lies outside the data has run away; a fit that says it has
    converged says so falsely if 100 steps of EM gain more than 1e-3 nats a row. Cases that the file
    ``keep`` (JSON lines) has are not fitted again, and after some ``minutes`` no new one begins.
    All tables, types and numbers come before the second seed, in an order that a part of it is a
    fair sample of. ``flat`` says which end (sklearn, ours, both) has a variance at the floor: its
    log-likelihood is whatever the floor makes it, and such a gap compares floors. ``thin`` says
    that scikit-learn's end has a component of one or two rows, which ours look for nowhere.
    """
    known = {} if keep is None else _known(keep)
    ends = time.monotonic() + 60 * minutes
    whole = [
        (name, rows[:: -(-len(rows) // most)], held[:: -(-len(rows) // most)])
        for name, rows, held in every_table()
    ]
    places = list(itertools.product(range(len(whole)), KINDS, numbers))
    order = np.random.default_rng(0).permutation(len(places)).tolist()
    for seed, place in itertools.product(range(seeds), order):
        at, kind, k = places[place]
        name, rows, groups = whole[at]
        case = {"data": name, "covariance": kind, "k": k, "seed": seed}
        if (found := known.get(_key(case))) is None and time.monotonic() < ends:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                mark = known.get((name, kind, k)) or _mark(rows, k, kind)
                best = {name: mark[name] for name in ("best", "best flat", "best thin")}
                found = case | best | _ended(rows, groups, kind, k, seed, best)
            known |= {(name, kind, k): found}
            if keep is not None:
                with keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
        if found is not None:
            yield found


def _key(row: dict[str, Any]) -> tuple[Any, ...]:
    return row["data"], row["covariance"], row["k"], row["seed"]


def _known(keep: Path) -> dict[tuple[Any, ...], dict[str, Any]]:
    """Rows of a file, by their case, and by their case without the seed."""
    lines = keep.read_text(encoding="utf-8").splitlines() if keep.exists() else []
    rows = [json.loads(line) for line in lines]
    return {_key(row)[:3]: row for row in rows} | {_key(row): row for row in rows}


def _mark(rows: np.ndarray, k: int, kind: str) -> dict[str, Any]:
    """Where the best of five starts of scikit-learn ends, and whether at the floor."""
    unit = unit_of(rows, kind)
    found = [peer(rows, k, kind, seed) for seed in range(PEERS)]
    scores = [float(p.score(rows / unit)) + shift for p, shift in found]
    best = int(np.argmax(scores))
    flat = _is_flat(found[best][0].covariances_, kind, np.ones_like(unit))
    fewest = len(rows) * float(found[best][0].weights_.min())
    return {"best": scores[best], "best flat": flat, "best thin": fewest < FEW}


def _is_flat(covariances: np.ndarray, kind: str, unit: np.ndarray) -> bool:
    """Whether some variance is at the floor, in units of the whole table."""
    if kind in ("full", "tied"):
        return bool(np.linalg.eigvalsh(covariances / np.outer(unit, unit)).min() < FLAT)
    squares = unit**2 if kind == "diag" else unit[0] ** 2
    return bool((covariances / squares).min() < FLAT)


def _ended(
    rows: np.ndarray, groups: Any, kind: str, k: int, seed: int, best: dict[str, Any]
) -> dict[str, Any]:
    """How one fit by workers ended."""
    ours = emfed.FederatedGaussianMixture(k, covariance_type=kind, random_state=seed)
    try:
        ours.fit(rows, groups=groups)
    except Exception as error:  # any, as a user would see it
        return {"crash": f"{type(error).__name__}: {error}"}
    model, here = ours.result_.model, ours.result_.statistics
    ended = ours.score(rows)
    for _ in range(100):
        here = model.protect(here, model.expected_statistics(rows, model.maximize(here)))
    more = float(model.log_likelihood(rows, model.maximize(here))) - ended
    low, high = rows.min(axis=0), rows.max(axis=0)
    slack = 0.01 * (high - low) + 1e-9
    outside = (ours.means_ < low - slack) | (ours.means_ > high + slack)
    flat = best["best flat"], _is_flat(ours.covariances_, kind, unit_of(rows, kind))
    return {
        "crash": "",
        "flat": {(0, 0): "", (1, 0): "sklearn", (0, 1): "ours", (1, 1): "both"}[flat],
        "converged": ours.converged_,
        "more": more,
        "thin": best["best thin"],
        "false": ours.converged_ and more > 1e-3,
        "away": bool(outside[ours.weights_ * len(rows) > 0.5].any()),
        "gap": best["best"] - ended,
        "rounds": ours.n_iter_,
        "bytes": ours.bytes_ / ours.raw_bytes_,
    }


def bench_choice(seeds: int = 3, kinds: tuple[str, ...] = ("full", "diag")) -> Iterator[Any]:
    """The number of components by BIC: ours, scikit-learn's with n_init=5, and from other seeds.

    ``flat`` says whether a fit that scikit-learn chose has a variance at the floor: its BIC is then
    whatever the floor makes it, and ours leaves such a component on few rows out. A fit is as good
    as another if its K is the same or its BIC is lower.
    """
    for name, rows, _, groups in tables():
        if len(rows) > FEW_ROWS // 2:
            continue
        for kind in kinds:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield {"data": name, "covariance": kind} | _choice(rows, kind, groups, seeds)


def _choice(rows: np.ndarray, kind: str, groups: Any, seeds: int) -> dict[str, Any]:
    unit, n = unit_of(rows, kind), len(rows)
    theirs, ours, alone, ledgers, flat = [], [], [], [], False
    for seed in range(seeds + 1):
        bics, at_floor = {}, {}
        for k in NUMBERS:
            found, shift = peer(rows, k, kind, seed, PEERS)
            bics[k] = float(found.bic(rows / unit)) - 2 * n * shift
            at_floor[k] = _is_flat(found.covariances_, kind, np.ones_like(unit))
        best = min(bics, key=lambda k: bics[k])
        theirs.append((best, bics[best]))
        flat |= at_floor[best]
    for seed in range(seeds):
        model = emfed.gaussian_mixture(1, kind)
        found = emfed.select_components(model, rows, NUMBERS, groups=groups, seed=seed)
        row = next(r for r in found.table if r["n_components"] == found.n_components)
        ours.append((found.n_components, row["bic"]))
        ledgers.append(found.best.bytes_up / len(found.best.worker_weights))
        here = emfed.select_components(model, rows, NUMBERS, seed=seed)
        alone.append((here.n_components, here.best.bic(rows)))
    return {
        "ours": [k for k, _ in ours],
        "sklearn": [k for k, _ in theirs],
        "flat": flat,
        **_agreement("workers", list(itertools.product(ours, theirs))),
        **_agreement("alone", list(itertools.product(alone, theirs))),
        **_agreement("sklearn", list(itertools.permutations(theirs, 2))),
        "bic above": float(np.mean([b for _, b in ours]) - np.mean([b for _, b in theirs])),
        "alone above": float(np.mean([b for _, b in alone]) - np.mean([b for _, b in theirs])),
        "bytes up": float(np.mean(ledgers)),
    }


def _agreement(who: str, pairs: list[Any]) -> dict[str, float]:
    """How often K is the same as another's; and how often it is that, or BIC is lower."""
    same = np.array([one[0] == other[0] for one, other in pairs])
    lower = np.array([one[1] < other[1] for one, other in pairs])
    return {f"{who} same": float(same.mean()), f"{who} as good": float((same | lower).mean())}
