"""Tables made to go wrong: every model on columns of every kind, beside EM from the same start.

A seed makes a table, its workers and a model. The columns have heavy tails, zeros, few values,
offsets and units far from one, copies and constants; workers are unlike each other and may have one
row. No setting was chosen on these tables before 18 November 2026.
"""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

import emfed
from emfed.fitting import open_run

Draw = Callable[[np.random.Generator, int], np.ndarray]
REAL: dict[str, Draw] = {
    "normal": lambda rng, n: rng.normal(size=n),
    "two groups": lambda rng, n: rng.normal(6.0 * rng.integers(2, size=n)),
    "lognormal": lambda rng, n: rng.lognormal(0, 1.5, n),
    "student": lambda rng, n: rng.standard_t(1.5, n),
    "uniform": lambda rng, n: rng.random(n),
    "mostly one value": lambda rng, n: np.where(rng.random(n) < 0.83, 2.0, rng.normal(size=n)),
    "few values": lambda rng, n: rng.integers(5, size=n).astype(float),
    "rounded": lambda rng, n: rng.normal(size=n).round(1),
    "far away": lambda rng, n: 1e6 + rng.normal(size=n),
    "tiny": lambda rng, n: 1e-9 * rng.normal(size=n),
    "constant": lambda rng, n: np.full(n, 3.0),
}
COUNTS: dict[str, Draw] = {
    "counts": lambda rng, n: rng.poisson(4.0, n).astype(float),
    "bursts": lambda rng, n: rng.poisson(rng.gamma(0.25, 8, n)).astype(float),
    "zeros": lambda rng, n: rng.poisson(5.0 * (rng.random(n) < 0.2)).astype(float),
    "large counts": lambda rng, n: rng.poisson(1000.0, n).astype(float),
}
POSITIVE: dict[str, Draw] = {
    "gamma": lambda rng, n: rng.gamma(0.7, 3.0, n) + 1e-12,
    "waits": lambda rng, n: rng.exponential(rng.choice([0.1, 10.0], n)) + 1e-12,
    "nearly equal": lambda rng, n: rng.gamma(400.0, 0.1, n),
}
CODES: dict[str, Draw] = {
    "rare": lambda rng, n: (rng.random(n) < 0.02).astype(float),
    "even": lambda rng, n: (rng.random(n) < 0.5).astype(float),
}
PALETTES: dict[str, dict[str, Draw]] = {
    "gaussian": REAL,
    "poisson": COUNTS,
    "exponential": POSITIVE,
    "gamma": POSITIVE,
    "bernoulli": CODES,
}
KINDS = ("full", "tied", "diag", "spherical", "mixed", "factors", "ppca", "regression", "chain")


def case(seed: int, kind: str | None = None) -> tuple[str, str, Any, list[np.ndarray]]:
    """The kind of model, the columns in words, a model, and the rows of each worker."""
    rng = np.random.default_rng(seed)
    kind = KINDS[seed % len(KINDS)] if kind is None else kind
    n, d, k = int(rng.choice([60, 150, 400, 900])), int(rng.integers(2, 7)), int(rng.integers(2, 6))
    families = ["gaussian"] * d
    if kind in ("mixed", "chain"):
        families = [str(f) for f in rng.choice(list(PALETTES), d)]
    names, columns = [], []
    for family in families:
        name = str(rng.choice(list(PALETTES[family])))
        names.append(name)
        columns.append(PALETTES[family][name](rng, n))
    if families.count("gaussian") == d and rng.random() < 0.3:
        names[-1] = f"copy of {names[0]}"
        columns[-1] = columns[0] * (1 + 1e-3 * rng.normal(size=n))
    rows = np.column_stack(columns)
    if kind == "chain":  # sequences of ten steps
        rows = rows[: n // 10 * 10].reshape(-1, 10, d)
    return kind, ", ".join(names), _model(kind, d, k, families), _workers(rng, rows)


def _model(kind: str, d: int, k: int, families: list[str]) -> Any:
    if kind == "mixed":
        return emfed.mixed_mixture(k, families)
    if kind == "chain":
        return emfed.hidden_markov(min(k, 3), families)
    if kind in ("factors", "ppca"):
        make = emfed.factor_analysis if kind == "factors" else emfed.models.ppca
        return make(1 if d < 4 else 2, min(k, 3))
    if kind == "regression":
        return emfed.regression_mixture(min(k, 3))
    return emfed.gaussian_mixture(k, kind)


def _workers(rng: np.random.Generator, rows: np.ndarray) -> list[np.ndarray]:
    """Sorted by a column or not, cut at places that leave some workers a row or two."""
    if rng.random() < 0.5:
        key = rows.reshape(len(rows), -1)[:, 0]
        rows = rows[np.argsort(key, kind="stable")]
    workers = min(int(rng.integers(2, 13)), len(rows))
    places = np.sort(rng.choice(np.arange(1, len(rows)), workers - 1, replace=False))
    return np.split(rows, places)


def bench_hostile(
    seeds: int = 270, keep: Path | None = None, minutes: float = np.inf
) -> Iterator[dict[str, Any]]:
    """One row a table: how the default ended, beside EM from the same start.

    Cases that the file ``keep`` (JSON lines) has are not fitted again, and after some ``minutes``
    no new one begins.
    """
    lines = keep.read_text(encoding="utf-8").splitlines() if keep and keep.exists() else []
    known = {row["seed"]: row for row in map(json.loads, lines)}
    ends = time.monotonic() + 60 * minutes
    for seed in range(seeds):
        if (found := known.get(seed)) is None and time.monotonic() < ends:
            kind, columns, model, parts = case(seed)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = {"seed": seed, "model": kind, "columns": columns} | ended(
                    model, parts, seed
                )
            if keep is not None:
                with keep.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(found) + "\n")
        if found is not None:
            yield found


def ended(model: Any, parts: list[np.ndarray], seed: int) -> dict[str, Any]:
    """Nats below EM's end, above the start, and what 100 steps of EM gain from the end."""
    try:
        ours = emfed.fit(model, parts, "auto", seed=seed, moves=0)
        begun = open_run(model, parts, "auto", start="auto", seed=seed)
        start = begun.model.to_user(begun.params)
        exactly = {"start": start, "start_statistics": "parameters", "tol": 1e-8, "rounds": 3000}
        run = open_run(model, parts, "em", seed=seed, **exactly)
    except emfed.EmfedError as error:
        return {"refused": str(error)}
    except Exception as error:  # any, as a user would see it
        return {"crash": f"{type(error).__name__}: {error}"}
    rows = np.concatenate(parts)
    first = _objective(run.model, rows, run.params)
    for _ in run:
        pass
    exact = _objective(run.model, rows, run.params)
    bound, here = ours.model, ours.statistics
    end = _objective(bound, rows, bound.maximize(here))
    for _ in range(100):
        here = bound.protect(here, bound.expected_statistics(rows, bound.maximize(here)))
    more = _objective(bound, rows, bound.maximize(here)) - end
    return {
        "gap": exact - end,
        "gained": end - first,
        "more": more,
        "converged": ours.converged,
        "rounds": ours.rounds,
    }


def _objective(model: Any, rows: np.ndarray, params: Any) -> float:
    return float(model.log_likelihood(rows, params)) - float(model.penalty(params))
