"""One fit, wherever the rows are: the same words give the same parameters, rounds and bytes.

A cell of the table is a face (fit, estimator, command line, run.toml), a place (loop, stacked, Ray,
a network in memory, real processes) and a task. Each is compared with `fit` in a loop. The tests
take a cross-section that touches every row and column; ``make parity`` takes the whole table.
"""

from __future__ import annotations

import contextlib
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.cli.main import main
from emfed.fitting.driver import run_fit
from emfed.fitting.settings import FitSettings
from emfed.fitting.words import read_words
from emfed.network import LoopFederation, StackedFederation
from tests.helpers import OPEN
from tests.network.processes import real_sites

SITES = ("north", "south", "west")
PLACES = ("loop", "stacked", "ray", "memory", "processes")
FACES = ("fit", "estimator", "command line", "run.toml")


def rows(seed: int, holes: bool = False, counts: bool = False) -> dict[str, pl.DataFrame]:
    rng = np.random.default_rng(seed)
    out = {}
    for j, name in enumerate(SITES):
        n = 40 + 7 * j
        z = rng.integers(2, size=n)
        x = rng.normal(4.0 * z[:, None] + 0.2 * j, 1, (n, 3))
        if counts:
            x[:, 2] = rng.poisson(1 + 4 * z)
        if holes:
            x[rng.random(x.shape) < 0.1] = np.nan
        out[name] = pl.DataFrame(x, schema=["height", "weight", "age"])
    return out


def sequences(seed: int) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        name: emfed.data.pad_sequences(
            [rng.normal(2 * (np.arange(12) // 4 % 2), 1, (12,))[:, None]] * 4
        )
        + rng.normal(0, 0.3, (4, 12, 1))
        for name in SITES
    }


@dataclass(frozen=True)
class Task:
    """What is fitted, in words; ``estimator`` and ``options`` say the same on other faces."""

    model: dict[str, Any]
    fit: dict[str, Any] = field(default_factory=dict)
    data: Any = rows
    estimator: Any = None
    options: tuple[str, ...] | None = None


MIXTURE = {"kind": "gaussian-mixture", "n_components": 2}
MIXED = {
    "kind": "mixed-mixture",
    "n_components": 2,
    "families": {"age": "poisson"},  # the others are Gaussian
}


def wide_rows(seed: int) -> dict[str, pl.DataFrame]:
    """So many columns that their means and products are rounded."""
    mixed = np.random.default_rng(1).normal(size=(3, 8))
    return {
        name: pl.DataFrame(
            table.to_numpy() @ mixed + np.random.default_rng(seed).normal(size=(len(table), 8)),
            schema=[f"x{j}" for j in range(8)],
        )
        for name, table in rows(seed).items()
    }


TASKS = {
    "rounded opening": Task(
        MIXTURE | {"covariance_type": "tied"},
        data=wide_rows,
        estimator=lambda: emfed.FederatedGaussianMixture(2, covariance_type="tied"),
        options=("-k", "2", "--covariance-type", "tied"),
    ),
    "k-means start": Task(
        MIXTURE,
        estimator=lambda: emfed.FederatedGaussianMixture(2),
        options=("-k", "2"),
    ),
    "three starts": Task(
        MIXTURE,
        {"n_init": 3},
        estimator=lambda: emfed.FederatedGaussianMixture(2, n_init=3),
        options=("-k", "2", "--n-init", "3"),
    ),
    "range of components": Task(
        {"kind": "gaussian-mixture", "n_components": "1:3"},
        estimator=lambda: emfed.FederatedGaussianMixture("1:3"),
        options=("-k", "1:3"),
    ),
    "follow_em": Task(
        MIXTURE,
        {"follow_em": True},
        estimator=lambda: emfed.FederatedGaussianMixture(2, follow_em=True),
        options=("-k", "2", "--follow-em"),
    ),
    "partial participation": Task(
        MIXTURE,
        {"participation": 0.6},
        estimator=lambda: emfed.FederatedGaussianMixture(2, participation=0.6),
        options=("-k", "2", "-p", "0.6"),
    ),
    "mixed columns with missing values": Task(
        MIXED,
        data=lambda seed: rows(seed, holes=True, counts=True),
        estimator=lambda: emfed.FederatedMixture(2, families=MIXED["families"]),
        options=("-k", "2", "--types", "age=poisson"),
    ),
    "regression on a named column": Task(
        {"kind": "regression-mixture", "n_components": 2, "target": "age"},
        options=("--model", "regression-mixture", "-k", "2", "--target", "age"),
    ),
    "HMM": Task({"kind": "hidden-markov", "n_components": 2}, {"rounds": 12}, data=sequences),
    "factor analysis": Task(
        {"kind": "factor-analysis", "n_factors": 1},
        estimator=lambda: emfed.FederatedFactorAnalysis(1),
        options=("--model", "factor-analysis", "-k", "1", "--factors", "1"),
    ),
    "low-rank imputation": Task(
        {"kind": "row-owner", "rank": 1},
        data=lambda seed: rows(seed, holes=True),
        estimator=lambda: emfed.FederatedImputer(rank=1),
        options=("--model", "row-owner", "--set", "rank=1"),
    ),
}


def does_not_apply(face: str, place: str, task: str) -> str:
    """Why a cell of the table is empty; "" where it is not."""
    if face == "command line" and place != "stacked":
        return "`emfed fit` reads files in one process; between machines it is `emfed serve`"
    if face == "run.toml" and place not in ("memory", "processes"):
        return "run.toml describes sites elsewhere"
    if face == "estimator" and TASKS[task].estimator is None:
        return "scikit-learn has no estimator of this model, and neither have we"
    if face == "command line" and TASKS[task].options is None:
        return "`emfed fit` reads tables of rows and has no option for this model"
    if face == "run.toml" and place == "processes" and task == "HMM":
        return "`emfed join` reads tables of rows, not sequences"
    return ""


CELLS = [cell for cell in itertools.product(FACES, PLACES, TASKS) if not does_not_apply(*cell)]
WHOLE = bool(os.environ.get("EMFED_PARITY"))
EMPTY = [
    pytest.param(*cell, marks=pytest.mark.skip(reason=reason))
    for cell in itertools.product(FACES, PLACES, TASKS)
    if (reason := does_not_apply(*cell))
]
"""Cells that the whole table shows as skipped, with the reason."""


def cross_section() -> list[tuple[str, str, str]]:
    """Every task in memory, by `fit` and by estimators in turn; every other row and column once."""
    in_memory = [c for c in CELLS if c[1] == "memory" and c[0] != "run.toml"]
    turns = [[c for c in in_memory if c[2] == task] for task in TASKS]
    chosen = [cells[j % len(cells)] for j, cells in enumerate(turns) if cells]
    chosen += [c for c in CELLS if c[0] == "command line"]
    chosen += [("fit", "stacked", "range of components"), ("run.toml", "memory", "k-means start")]
    chosen += [("estimator", "ray", "three starts")]
    chosen += [("run.toml", "processes", "range of components")]
    return list(dict.fromkeys(chosen))


@contextlib.contextmanager
def federation(place: str, data: dict[str, Any], folder: Path) -> Iterator[emfed.Federation]:
    if place == "ray":
        pytest.importorskip("ray", reason="no Ray for this Python")
        with emfed.network.RayFederation(data) as cluster:
            yield cluster
    elif place == "memory":
        sites = {
            name: emfed.network.Site(table, folder / name, rules=OPEN)
            for name, table in data.items()
        }
        yield emfed.network.RemoteFederation(emfed.network.LocalTransport(sites))
    elif place == "processes":
        with real_sites(data, folder) as transport:
            yield emfed.network.RemoteFederation(transport, masks=False)
    else:
        made = {"loop": LoopFederation, "stacked": StackedFederation}[place]
        yield made(emfed.data.as_workers(data))


def settings_of(task: Task, face: str) -> FitSettings:
    """The settings of a face; estimators and the command line ask one more question at the end."""
    ask = {"scores": True}
    more = {"estimator": {"likelihood": True, **ask}, "command line": ask}.get(face, {})
    return read_words(task.model, fit={"seed": 5, **task.fit}).but(**more)


def by_face(face: str, place: str, task: Task, folder: Path) -> emfed.Result:
    data = task.data(3)
    if face == "command line":
        return by_command(task, data, folder)
    if face == "run.toml":
        return by_file(place, task, data, folder)
    with federation(place, data, folder) as network:
        if face == "fit":
            return run_fit(settings_of(task, face), network).result
        made = task.estimator().set_params(random_state=5)
        return made.fit(network).result_


def by_command(task: Task, data: dict[str, Any], folder: Path) -> emfed.Result:
    frames = [table.with_columns(pl.lit(name).alias("site")) for name, table in data.items()]
    pl.concat(frames).fill_nan(None).write_csv(folder / "all.csv")
    out = folder / "model.emfed"
    words = ["fit", str(folder / "all.csv"), "-g", "site", "-o", str(out), "--seed", "5", "-q"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--no-curve", *(task.options or ())])
    assert ended.value.code in (0, None)
    return emfed.load(out)


def by_file(place: str, task: Task, data: dict[str, Any], folder: Path) -> emfed.Result:
    settings = settings_of(task, "run.toml")
    if place == "memory":
        sites = {
            name: emfed.network.Site(table, folder / name, rules=OPEN)
            for name, table in data.items()
        }
        return emfed.fitting.serve(
            settings, None, emfed.network.LocalTransport(sites), folder / "run"
        ).result
    with real_sites(data, folder) as transport:
        bare = settings.but(masks=False)
        return emfed.fitting.serve(bare, None, transport, folder / "run", admit=False).result


@pytest.fixture(scope="module")
def expected() -> Any:
    known: dict[tuple[str, str], emfed.Result] = {}

    def of(name: str, face: str) -> emfed.Result:
        if (name, face) not in known:
            task = TASKS[name]
            workers = LoopFederation(emfed.data.as_workers(task.data(3)))
            known[name, face] = run_fit(settings_of(task, face), workers).result
        return known[name, face]

    return of


@pytest.mark.parametrize(("face", "place", "task"), [*CELLS, *EMPTY] if WHOLE else cross_section())
def test_the_same_words_give_the_same_fit(
    face: str, place: str, task: str, expected: Any, tmp_path: Path
) -> None:
    want, got = expected(task, face), by_face(face, place, TASKS[task], tmp_path)
    assert (got.rounds, got.stopped) == (want.rounds, want.stopped)
    for name, array in want.params.arrays().items():
        np.testing.assert_allclose(got.params.arrays()[name], array, rtol=1e-8, atol=1e-9)
    np.testing.assert_array_equal(got.ledger.counts, want.ledger.counts)


def test_every_row_and_column_of_the_table_is_touched() -> None:
    taken = cross_section()
    assert {face for face, _, _ in taken} == set(FACES)
    assert {place for _, place, _ in taken} | {"loop"} == set(PLACES)
    assert {task for _, _, task in taken} == set(TASKS)
