"""One fit, wherever the rows are: the same words give the same parameters, rounds and bytes.

Every face makes the same settings of the same words, and every place makes the same fit of the same
settings: a loop, stacked arrays and Ray in one process, members and a relay in memory, and sites
that call over TLS. Masked sums are rounded as those of the simulation are: sites take masks that
follow from its draws (`tests.network.streams`). ``make parity`` fits every task in every place.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.cli.main import main
from emfed.core.registry import plain
from emfed.core.settings.declaring import declared
from emfed.data import as_workers
from emfed.data.held import HeldWorkers
from emfed.data.summing import HeldRows
from emfed.deployment.config import read_config
from emfed.deployment.live import with_names
from emfed.fitting import face, in_process
from emfed.fitting.settings import FitSettings
from emfed.fitting.words import read_words
from emfed.network.owner_rules import SiteRules
from tests.network.processes import make_keys
from tests.network.streams import rounded_as_simulated
from tests.network.test_live import joined

SITES = ("north", "south", "west")
SEED = 5
NAMES = ("height", "weight", "age")
WHOLE = bool(os.environ.get("EMFED_PARITY"))


def rows(holes: bool = False, counts: bool = False) -> dict[str, pl.DataFrame]:
    rng = np.random.default_rng(3)
    out = {}
    for j, name in enumerate(SITES):
        n = 40 + 7 * j
        z = rng.integers(2, size=n)
        x = rng.normal(4.0 * z[:, None] + 0.2 * j, 1, (n, 3))
        if counts:
            x[:, 2] = rng.poisson(1 + 4 * z)
        if holes:
            x[rng.random(x.shape) < 0.1] = np.nan
        out[name] = pl.DataFrame(x, schema=list(NAMES))
    return out


def sequences() -> dict[str, Any]:
    rng = np.random.default_rng(3)
    level = 2 * (np.arange(12) // 4 % 2)
    return {name: rng.normal(level[:, None], 1, (4, 12, 1)) for name in SITES}


@dataclass(frozen=True)
class Task:
    """What is fitted, in words; ``estimator`` and ``options`` say the same on other faces."""

    model: dict[str, Any]
    fit: dict[str, Any] = field(default_factory=dict)
    data: Callable[[], dict[str, Any]] = rows
    python: Callable[[], Any] | None = None
    estimator: Callable[[], Any] | None = None
    options: tuple[str, ...] | None = None


MIXTURE = {"kind": "gaussian-mixture", "n_components": 2}
MIXED = {"kind": "mixed-mixture", "n_components": 2, "families": {"age": "poisson"}}
TASKS = {
    "k-means start": Task(
        MIXTURE,
        python=lambda: emfed.gaussian_mixture(2),
        estimator=lambda: emfed.FederatedGaussianMixture(2),
        options=("-k", "2"),
    ),
    "tied, three starts": Task(
        MIXTURE | {"covariance_type": "tied"},
        {"n_init": 3},
        python=lambda: emfed.gaussian_mixture(2, "tied"),
        estimator=lambda: emfed.FederatedGaussianMixture(2, covariance_type="tied", n_init=3),
        options=("-k", "2", "--n-init", "3", "--covariance-type", "tied"),
    ),
    "range of components": Task(
        {"kind": "gaussian-mixture", "n_components": "1:3"},
        estimator=lambda: emfed.FederatedGaussianMixture("1:3"),
        options=("-k", "1:3"),
    ),
    "EM's own path": Task(
        MIXTURE,
        {"follow_em": True},
        python=lambda: emfed.gaussian_mixture(2),
        estimator=lambda: emfed.FederatedGaussianMixture(2, follow_em=True),
        options=("-k", "2", "--follow-em"),
    ),
    "mixed columns with missing values": Task(
        MIXED,
        data=lambda: rows(holes=True, counts=True),
        python=lambda: emfed.mixed_mixture(2, {"age": "poisson"}),
        estimator=lambda: emfed.FederatedMixture(2, families=MIXED["families"]),
        options=("-k", "2", "--types", "age=poisson"),
    ),
    "regression on a named column": Task(
        {"kind": "regression-mixture", "n_components": 2, "target": "age"},
        python=lambda: emfed.regression_mixture(2, target="age"),
        options=("--model", "regression-mixture", "-k", "2", "--target", "age"),
    ),
    "hidden Markov model": Task(
        {"kind": "hidden-markov", "n_components": 2},
        {"rounds": 12},
        data=sequences,
        python=lambda: emfed.hidden_markov(2),
    ),
    "factor analysis": Task(
        {"kind": "factor-analysis", "n_factors": 1},
        python=lambda: emfed.factor_analysis(1),
        estimator=lambda: emfed.FederatedFactorAnalysis(1),
        options=("--model", "factor-analysis", "-k", "1", "--factors", "1"),
    ),
    "low-rank imputation": Task(
        {"kind": "row-owner", "rank": 1},
        data=lambda: rows(holes=True),
        estimator=lambda: emfed.FederatedImputer(rank=1),
        options=("--model", "row-owner", "--set", "rank=1"),
    ),
}


# Faces.


class Seen(Exception):
    """Carries the settings that a face has come to."""


def by_python(task: Task, folder: Path) -> FitSettings:
    assert task.python is not None
    return FitSettings.read(task.python(), seed=SEED, **task.fit)


def by_estimator(task: Task, folder: Path) -> FitSettings:
    assert task.estimator is not None
    with (
        patch("emfed.fitting.estimators.base.run", see),
        pytest.raises(Seen) as seen,
        emfed.network.LocalSites(task.data()) as sites,
    ):
        task.estimator().set_params(random_state=SEED).fit(sites)
    found: FitSettings = seen.value.args[0]
    return found


def by_command(task: Task, folder: Path) -> FitSettings:
    frames = [table.with_columns(pl.lit(name).alias("site")) for name, table in task.data().items()]
    pl.concat(frames).fill_nan(None).write_csv(folder / "all.csv")
    words = ["fit", str(folder / "all.csv"), "-g", "site", "-o", str(folder / "m.emfed"), "-q"]
    with patch.object(face, "run", see), pytest.raises(Seen) as seen:
        main([*words, "--no-curve", "--seed", str(SEED), *(task.options or ())])
    found: FitSettings = seen.value.args[0]
    return found


def see(settings: FitSettings, *_: Any) -> Any:
    raise Seen(settings)


def by_file(task: Task, folder: Path) -> FitSettings:
    def table(values: dict[str, Any]) -> str:
        written = (f"{k} = {toml(v)}\n" for k, v in values.items())
        return "".join(written)

    def toml(value: Any) -> str:
        if isinstance(value, dict):
            return "{" + ", ".join(f"{k} = {toml(v)}" for k, v in value.items()) + "}"
        return str(value).lower() if isinstance(value, bool) else repr(value)

    columns = list(NAMES) if task.data is not sequences else ["x1"]
    path = folder / "run.toml"
    path.write_text(
        f"[model]\n{table(task.model)}[fit]\n{table({'seed': SEED, **task.fit})}"
        f"[sites]\nexpected = 3\ncolumns = {columns}\n"
    )
    return read_config(path).settings


FACES = {"python": by_python, "estimator": by_estimator, "command": by_command, "toml": by_file}
ASKED = {"scores", "likelihood", "errors", "columns", "masks"}
"""Settings that say nothing of how a model is fitted."""
MADE = {"model", "n_components", "algorithm", "rounds", "tol", "criterion"}
"""Settings that are compared by what they mean."""


def has(task: Task, name: str) -> bool:
    """Whether a face can say this."""
    given = {"python": task.python, "estimator": task.estimator, "command": task.options}
    return given.get(name, True) is not None


@pytest.mark.parametrize("name", TASKS)
def test_every_face_says_the_same(name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    want = settings_of(task)
    for called, make in FACES.items():
        if not has(task, called):
            continue
        found = make(task, tmp_path)
        for setting in {*declared(FitSettings)} - ASKED - MADE:
            assert getattr(found, setting) == getattr(want, setting), (called, setting)
        ours, theirs = (
            [model.describe() for model in in_process.of_named_columns(one, NAMES).candidates()]
            for one in (want, found)
        )
        assert plain(ours) == plain(theirs), called
        assert found.method(3).describe() == want.method(3).describe(), called
        assert found.limits == want.limits, called
        if len(ours) > 1:
            assert found.criterion == want.criterion, called


# Places.


def settings_of(task: Task) -> FitSettings:
    return read_words(task.model, fit={"seed": SEED, **task.fit})


@contextmanager
def place(name: str, data: dict[str, Any], folder: Path) -> Iterator[Any]:
    """Live sites with these rows."""
    columns = with_names(as_workers([data["north"]]), None).columns
    rules = SiteRules.trusting(spare_rows=None, smallest_component=None)
    if name == "memory":
        with emfed.network.LocalSites(data, rules=rules) as here:
            yield here
        return
    make_keys([*data], folder)
    options: dict[str, Any] = {"keys": folder / "keys", "columns": columns}
    with (
        emfed.network.listen("127.0.0.1:0", **options) as sites,
        joined(sites.port, folder, data, keys=True, rules=rules),
    ):
        sites.wait_for(3, 60)
        yield sites


CELLS = [("memory", name) for name in TASKS] + [("sockets", "range of components")]
if WHOLE:
    CELLS = [(where, name) for where in ("memory", "sockets") for name in TASKS]


@pytest.mark.parametrize(("where", "name"), CELLS)
def test_masked_fits_are_those_of_a_simulation(where: str, name: str, tmp_path: Path) -> None:
    task = TASKS[name]
    settings, data = settings_of(task), task.data()
    held = {site: HeldRows(as_workers([table])) for site, table in data.items()}
    with place(where, data, tmp_path) as sites, rounded_as_simulated(held, SEED):
        got = face.run(settings, sites).result
    alone = settings.but(masks=True, seed=got.seed)
    want = in_process.fit(alone, HeldWorkers(as_workers(data))).result
    same_fit(got, want)
    np.testing.assert_array_equal(got.ledger.counts, want.ledger.counts)


UNMASKED: dict[str, dict[str, Any]] = {
    "k-means start": {},
    "range of components": {},
    "hidden Markov model": {},
    "FedEM, some sites a round": {"participation": 0.6, "rounds": 20},
}


@pytest.mark.parametrize("name", UNMASKED)
def test_unmasked_fits_are_those_of_a_simulation(name: str, tmp_path: Path) -> None:
    """Their roundings follow from the seed, which sites do not draw."""
    task = TASKS.get(name, TASKS["k-means start"])
    settings, data = settings_of(task).but(**UNMASKED[name], masks=False), task.data()
    if name not in TASKS:
        settings = settings.but(algorithm="FedEM")
    with place("memory", data, tmp_path) as sites:
        got = face.run(settings, sites).result
    want = in_process.fit(settings, HeldWorkers(as_workers(data))).result
    same_fit(got, want)
    ours, theirs = (one.ledger.counts.sum(axis=-1) for one in (got, want))
    if "participation" in UNMASKED[name]:  # the sum of all bytes tells not who sent them
        ours, theirs = (counts[..., 1:].sum(axis=-1) for counts in (ours, theirs))
    np.testing.assert_array_equal(ours, theirs)


def same_fit(got: emfed.Result, want: emfed.Result) -> None:
    assert (got.rounds, got.stopped) == (want.rounds, want.stopped)
    for key, array in want.params.arrays().items():
        np.testing.assert_allclose(got.params.arrays()[key], array, rtol=1e-8, atol=1e-9)
