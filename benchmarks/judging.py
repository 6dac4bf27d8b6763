"""How often confidence bounds cover the truth, and which mistakes of a site are named."""

from __future__ import annotations

import dataclasses
import itertools
import os
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import statsmodels.datasets
from sklearn import datasets

import emfed
from benchmarks.starts import every_table
from emfed.network.self_check import suspicions

REPEATS, ROWS, LEVEL = 200, 500, 0.95


def _draws(model: Any, reference: Any, rows: int = 4000) -> tuple[Any, Any]:
    """A truth that the model can have, and a function that draws tables from it."""
    fitted = emfed.fit(model, reference, tol=1e-8)
    return fitted.params, lambda seed: fitted.sample(ROWS, seed)[0]


def _worlds() -> Iterator[tuple[str, Any, Any, Callable[[int], Any]]]:
    rng = np.random.default_rng(0)
    labels = rng.random(4000) < 0.4
    pair = np.where(labels[:, None], [2.2, 0.0], [0.0, 0.0]) + rng.normal(size=(4000, 2))
    for kind in ("full", "tied", "diag"):
        model = emfed.gaussian_mixture(2, kind)
        yield f"two Gaussians, {kind}", model, *_draws(model, pair)
    holes = emfed.gaussian_mixture(2, "diag", missing=True)
    truth, draw = _draws(emfed.gaussian_mixture(2, "diag"), pair)

    def torn(seed: int) -> Any:
        rows, missing = draw(seed), np.random.default_rng(seed).random((ROWS, 2)) < 0.25
        return np.where(missing, np.nan, rows)

    yield "two Gaussians, a quarter missing", holes, truth, torn
    counts = rng.poisson(np.where(labels[:, None], [6, 1.5], [2, 4]))
    mixed = emfed.mixed_mixture(2, ["poisson", "poisson"])
    yield "two Poisson components", mixed, *_draws(mixed, counts.astype(float))
    z = rng.normal(size=(4000, 1)) @ rng.normal(size=(1, 5)) + 0.7 * rng.normal(size=(4000, 5))
    factors = emfed.factor_analysis(1)
    yield "one factor of five columns", factors, *_draws(factors, z)
    lines = emfed.models.RegressionParameters([0.6, 0.4], [0.0, 2.0], [[1.0], [-1.0]], [0.5, 0.5])

    def regressions(seed: int) -> Any:
        own = np.random.default_rng(seed)
        x, which = own.normal(size=ROWS), (own.random(ROWS) < 0.4).astype(int)
        mean = lines.intercepts[which] + lines.coefficients[which, 0] * x
        return np.column_stack([x, mean + np.sqrt(0.5) * own.normal(size=ROWS)])

    yield "two regressions", emfed.regression_mixture(2), lines, regressions
    three = np.column_stack(
        [
            rng.random(4000) < np.where(labels, 0.8, 0.25),
            (rng.random((4000, 1)) > np.where(labels[:, None], [0.6, 0.8], [0.1, 0.5])).sum(axis=1),
            rng.exponential(np.where(labels, 4.0, 1.0)),
        ]
    )
    words = ["bernoulli", emfed.models.Categorical(3), "exponential"]
    families = emfed.mixed_mixture(2, words)
    yield "bernoulli, categorical, exponential", families, *_draws(families, three)
    spread = np.where(labels, 5.0, 2.0)[:, None]
    waits = emfed.mixed_mixture(2, "gamma")
    yield "gamma", waits, *_draws(waits, rng.gamma(spread, 1.0, (4000, 2)))
    far = z + np.where(labels, 4.0, 0.0)[:, None]
    both = emfed.factor_analysis(1, n_components=2)
    yield "two factor analysers", both, *_draws(both, far)
    for name, family, emit in (
        ("chain, Gaussian", "gaussian", lambda own, state: own.normal(2.5 * state, 1.0)),
        ("chain, Poisson", "poisson", lambda own, state: own.poisson(2.0 + 4 * state)),
    ):
        yield name, *_chain(family, emit)


def _chain(family: str, emit: Any) -> tuple[Any, Any, Callable[[int], Any]]:
    """Fifty sequences of ten steps, of two states that last."""
    stay, model = np.array([0.8, 0.7]), emfed.hidden_markov(2, family)

    def draw(seed: int, sequences: int = ROWS // 10) -> Any:
        own = np.random.default_rng(seed)
        state = (own.random(sequences) < 0.5).astype(int)
        steps = []
        for _ in range(10):
            steps.append(emit(own, state))
            state = np.where(own.random(sequences) < stay[state], state, 1 - state)
        return np.stack(steps, axis=1)[..., None].astype(float)

    chain = {"initial": [0.5, 0.5], "transitions": [[0.8, 0.2], [0.3, 0.7]]}
    emitted = [[[0.0, 1.0]], [[2.5, 1.0]]] if family == "gaussian" else [[2.0], [6.0]]
    shape = emfed.fit(model, draw(0), rounds=1).params
    own = np.reshape(emitted, getattr(shape, family).shape)
    return model, dataclasses.replace(shape, **{**chain, family: own}), draw


def bench_coverage(repeats: int = REPEATS) -> Iterator[dict[str, Any]]:
    """Coverage of 95% bounds by kind of parameter, from starts at the truth."""
    for name, model, truth, draw in _worlds():
        inside: dict[str, list[bool]] = {}
        for seed in range(repeats):
            rows = draw(seed + 1)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                result = emfed.fit(model, rows, start=truth, tol=1e-7, errors=True)
            if result.uncertainty is None:
                continue
            values = np.concatenate([np.ravel(a) for a in truth.arrays().values()])
            summary = result.summary(LEVEL)
            told = emfed.artifacts.errors.quantities(result.model, result.params)
            true = {q.name: v for q, v in zip(told, values, strict=True)}
            low, high = summary.bounds
            for place, quantity in enumerate(summary.names):
                if np.isfinite(summary.errors[place]):
                    kind = quantity.partition("[")[0]
                    hit = bool(low[place] <= true[quantity] <= high[place])
                    inside.setdefault(kind, []).append(hit)
        rates = {kind: float(np.mean(hits)) for kind, hits in inside.items()}
        yield {"world": name, "repeats": repeats, "rows": ROWS, "coverage": rates}


TABLES = {
    "nmes1988": "region",
    "gapminder": "continent",
    "diamonds_fifth": "cut",
    "storms": "year",
    "penguins": "island",
    "wdbc6": "Diagnosis",
    "heart_disease_4hospitals": "hospital",
}
MISTAKES = {
    "times 1000": (1000.0, 0.0, "1,000 times too large"),
    "a thousandth": (0.001, 0.0, "1,000 times too small"),
    "times 10": (10.0, 0.0, "10 times too large"),
    "mg/dl for mmol/l": (18.018, 0.0, "times too large"),
    "a spreadsheet's days": (1.0, 25569.0, "dates"),
}


def bench_mistakes(most_groups: int = 4) -> Iterator[dict[str, Any]]:
    """Of columns of real groups, spoilt one at a time: warned of, and named rightly."""
    folder = Path(os.environ.get("EMFED_DATA") or "../shared/data")
    for name, key in TABLES.items():
        path = folder / f"{name}.csv.gz"
        frame = pl.read_csv(path, null_values=["NA", ""], infer_schema_length=None)
        kept = [c for c in frame.columns if c != key and frame[c].dtype.is_numeric()]
        rows = frame.select(kept).to_numpy().astype(float)
        groups = frame[key].to_numpy().astype(str)
        names = np.unique(groups)
        false = sum(len(_told(rows, groups == g, kept)) for g in names)
        found = {what: [0, 0, 0] for what in MISTAKES}
        for group in names[:most_groups]:
            mine = groups == group
            for column, said in enumerate(kept):
                if len(np.unique(rows[mine, column])) <= 10:
                    continue
                for what, (factor, offset, words) in MISTAKES.items():
                    spoilt = rows.copy()
                    spoilt[mine, column] = factor * spoilt[mine, column] + offset
                    told = [w for w in _told(spoilt, mine, kept) if repr(said) in w]
                    count = found[what]
                    count[0] += 1
                    count[1] += bool(told)
                    count[2] += any(words in w for w in told)
        columns = len(names) * len(kept)
        yield {"table": name, "columns": columns, "false": false, "found": found}


def bench_exchanges(tries: int = 60, sites: int = 5) -> Iterator[dict[str, Any]]:
    """Every open table, dealt out at random: warnings as it is, and with two columns exchanged."""
    digits = datasets.load_digits().data
    for name, rows in (*((n, r) for n, r, _ in every_table()), ("digits", digits)):
        rng, names = np.random.default_rng(1), [str(j) for j in range(rows.shape[1])]
        rows = rows[:: -(-len(rows) // 4000)]
        owner = rng.integers(sites, size=len(rows))
        false = sum(len(_told(rows, owner == site, names)) for site in range(sites))
        found = wrong = 0
        for _ in range(tries):
            pair, mine = rng.choice(len(names), 2, replace=False), owner == rng.integers(sites)
            spoilt = rows.copy()
            spoilt[np.ix_(mine, pair)] = rows[np.ix_(mine, pair[::-1])]
            said = [w for w in _told(spoilt, mine, names) if "exchanged" in w]
            right = [w for w in said if all(repr(names[j]) in w for j in pair)]
            found, wrong = found + bool(right), wrong + len(said) - len(right)
        yield {"table": name, "tries": tries, "false": false, "found": found, "wrong": wrong}


TRUE_ALARMS = {
    ("modechoice", "individual"): "it counts travellers",
    ("nz_seabirds_at_sea", "obs_id"): "it counts observations",
    ("nz_seabirds_at_sea", "count"): "99999 stands for a count that is not known",
    ("bbs_wood_thrush", "start_wind"): "9 stands for wind that is not known",
}
"""Columns of open tables of which a site is right to be warned."""
MOST_LEVELS, MOST_DESIGNS = 40, 60


def bench_doubts() -> Iterator[dict[str, Any]]:
    """Ordinary tables cut into sites by chance, by place and by each of their columns."""
    for name, rows, columns in _open_tables():
        designs, warned, words = 0, 0, list[str]()
        for design, owner in itertools.islice(_designs(rows, columns), MOST_DESIGNS):
            kept = [j for j, column in enumerate(columns) if column not in (design, f"by {column}")]
            names = [columns[j] for j in kept]
            told = list[str]()
            for site in np.unique(owner):
                mine = owner == site
                if 10 <= mine.sum() < len(mine):
                    told += _told(rows[:, kept], mine, names)
            right = [column for table, column in TRUE_ALARMS if table == name]
            false = [w for w in told if not any(repr(column) in w for column in right)]
            designs, warned = designs + 1, warned + bool(false)
            words += false
        yield {"table": name, "designs": designs, "warned": warned, "words": words[:5]}


def _open_tables() -> Iterator[tuple[str, np.ndarray, list[str]]]:
    for name in ("iris", "wine", "breast_cancer", "diabetes", "linnerud"):
        found = getattr(datasets, f"load_{name}")()
        yield name, found.data.astype(float), [str(column) for column in found.feature_names]
    for name in sorted(dir(statsmodels.datasets)):
        load = getattr(getattr(statsmodels.datasets, name), "load_pandas", None)
        if load is not None:
            frame = load().data.select_dtypes("number")
            if len(frame) >= 40 and len(frame.columns):
                yield name, frame.to_numpy(float), [str(column) for column in frame.columns]
    folder = Path(os.environ.get("EMFED_DATA") or "../shared/data")
    for path in sorted(folder.glob("*.csv.gz")):
        table = pl.read_csv(path, null_values=["NA", ""], infer_schema_length=None)
        numbers = table.select(c for c in table.columns if table[c].dtype.is_numeric())
        name = path.name.removesuffix(".csv.gz")
        yield name, numbers.to_numpy().astype(float)[:40_000], numbers.columns


def _designs(rows: np.ndarray, columns: list[str]) -> Iterator[tuple[str, np.ndarray]]:
    """Ways to cut a table into sites, and whose each row is then."""
    yield "by chance", np.random.default_rng(0).integers(4, size=len(rows))
    yield "by place", np.arange(len(rows)) * 4 // len(rows)
    for column, values in zip(columns, rows.T, strict=True):
        levels = np.unique(values)
        if not np.isfinite(values).all() or len(levels) < 2:
            continue
        if len(levels) <= MOST_LEVELS:
            yield f"by {column}", np.searchsorted(levels, values)
        else:
            yield (
                f"thirds of {column}",
                np.searchsorted(np.quantile(values, [1 / 3, 2 / 3]), values),
            )


def _told(rows: Any, mine: Any, columns: list[str]) -> list[str]:
    own, every = _summary(rows[mine]), _summary(rows)
    return suspicions(own, every, float(mine.mean()), rows[mine], columns)


def _summary(x: Any) -> dict[str, Any]:
    seen = np.isfinite(x)
    share = np.maximum(seen.mean(axis=0), 1e-12)
    mean = np.where(seen, x, 0.0).mean(axis=0) / share
    scatter = np.where(seen, (x - mean) ** 2, 0.0).mean(axis=0) / share
    return {"observed": seen.mean(axis=0), "mean": mean, "scatter": scatter}
