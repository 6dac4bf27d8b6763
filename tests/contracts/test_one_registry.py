"""One registration makes a model known everywhere; what a model cannot do is said in words."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.artifacts import fit_page, render_page
from emfed.core.protocols import (
    AssignsRows,
    CountsParameters,
    DrawsRows,
    FillsRows,
    Model,
    ScoresRows,
)
from emfed.core.registry import LONGEST_NAME, MODELS, STORED, plain
from emfed.models import SiteOwner, build_model, make_model
from tests.helpers import OPEN, bind, make_data
from tests.registry import REGISTRY

ROWS = make_data(0)
CELLS = np.column_stack(
    [np.repeat(np.arange(6), 5), np.tile(np.arange(5), 6), np.ones(30), np.arange(30) % 7]
).astype(float)
EXAMPLES: dict[str, tuple[Any, Any]] = {
    **{f"{name}{' with priors' * bool(o)}": (e.make(**o), e.tables)
       for name, e in REGISTRY.items() for o in ({}, e.priors)},
    "streamed": (emfed.gaussian_mixture(2, "tied", second_moment="statistic"), ROWS),
    "k-means": (emfed.k_means(3, standardised=True), ROWS),
    "linear": (emfed.models.LinearGaussian(0.4), ROWS),
    "occupancy": (
        emfed.models.Occupancy(2, 1),
        [np.column_stack([t > 0, t[:, 0]]).astype(float) for t in ROWS],
    ),
    "observers": (
        emfed.models.ObserverEffects(6, 5),
        [np.insert(part, 2, np.arange(15) % 3, axis=1) for part in (CELLS[:15], CELLS[15:])],
    ),
    "cells": (SiteOwner(5, 2, smoothing=1.0), [CELLS[:15], CELLS[15:]]),
}  # fmt: skip


def test_the_examples_are_all_models_there_are() -> None:
    known = {model.describe()["model"] for model, _ in EXAMPLES.values()}
    ours = {name for name, made in MODELS.items() if made.__module__.startswith("emfed.")}
    assert known == ours  # other tests register models of their own


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_model_comes_back_from_its_description_from_words_and_from_its_file(
    name: str, tmp_path: Path
) -> None:
    model, tables = EXAMPLES[name]
    told = plain(model.describe())
    assert plain(build_model(told).describe()) == told
    options = {key: value for key, value in told.items() if key != "model"}
    made = make_model(told["model"], options.pop("n_components", None), **options)
    assert plain(made.describe()) == told
    assert type(made) is type(build_model(told)) is type(model)
    result = emfed.fit(model, tables, emfed.EM(), rounds=2, start="moments")
    result.save(tmp_path / "m.emfed")
    again = emfed.load(tmp_path / "m.emfed")
    assert plain(again.model.describe()) == plain(result.model.describe())
    np.testing.assert_array_equal(again.statistics, result.statistics)


@pytest.mark.parametrize("name", EXAMPLES)
def test_what_a_model_cannot_do_is_said_in_words(name: str) -> None:
    model, tables = EXAMPLES[name]
    result = emfed.fit(model, tables, emfed.EM(), rounds=2, start="moments")
    rows = np.concatenate(tables)
    asked: dict[str, tuple[Any, Any]] = {
        "score_samples": (ScoresRows, lambda: result.score_samples(rows)),
        "predict": (AssignsRows, lambda: result.predict(rows)),
        "predict_proba": (AssignsRows, lambda: result.predict_proba(rows)),
        "sample": (DrawsRows, lambda: result.sample(2)),
        "impute": (FillsRows, lambda: result.impute(rows)),
        "impute_draws": (FillsRows, lambda: result.impute_draws(rows, 1)),
        "impute_intervals": (FillsRows, lambda: result.impute_intervals(rows)),
        "free_parameters": (CountsParameters, lambda: result.free_parameters),
        "aic": (CountsParameters, lambda: result.aic(rows)),
        "bic": (CountsParameters, lambda: result.bic(rows)),
        "icl": (CountsParameters, lambda: result.icl(rows)),
    }
    for what, (protocol, ask) in asked.items():
        if isinstance(result.model, protocol):
            ask()
            continue
        with pytest.raises(emfed.SettingsError) as caught:
            ask()
        assert len(str(caught.value).split()) > 8, what
        assert "log_likelihood" in str(caught.value) or "fit " in str(caught.value), what


def test_a_location_that_cannot_predict_says_what_to_use() -> None:
    result = emfed.fit(emfed.models.LinearGaussian(), ROWS, rounds=2)
    with pytest.raises(emfed.SettingsError, match="'linear-gaussian' cannot predict"):
        result.predict(ROWS[0])


@pytest.mark.parametrize(
    ("ask", "words"),
    [
        (lambda: make_model("gaussian-mixtur", 2), "did you mean 'gaussian-mixture'"),
        (lambda: make_model("x" * 5000), "choose among"),
        (lambda: make_model("gaussian-mixture", 2, covarianc_type="full"), "'covariance_type'"),
        (lambda: make_model("gaussian-mixture"), "gaussian-mixture needs n_components"),
        (lambda: make_model("factor-analysis", 2), "factor-analysis needs n_factors"),
        (lambda: make_model("gaussian-mixture", "two"), "n_components"),
        (lambda: make_model("linear-gaussian", 2), "unknown key 'n_components'"),
        (lambda: make_model("row-owner", rank=2, rows=3.0), "rows follows from the data"),
        (lambda: make_model("row-owner", rank=2, mass=np.ones(3)), "mass follows from the data"),
        (lambda: make_model("mixed-mixture", 2, families=5), "cannot be made from these options"),
        (lambda: make_model("ppca", 2, n_factors=1, noise_prior={}), "cannot be made"),
        (lambda: make_model("mixed-mixture", 2, families={"a": {"family": "gamm"}}), "family"),
        (
            lambda: make_model("gaussian-mixture", 2, covariance_prior={"dof": 3, "scal": 1}),
            "did you mean 'scale'",
        ),
    ],
)
def test_words_that_make_no_model_are_refused(ask: Any, words: str) -> None:
    with pytest.raises(emfed.SettingsError, match=words) as caught:
        ask()
    assert len(str(caught.value)) < 600


def test_words_of_a_file_make_priors_and_families() -> None:
    prior = make_model("gaussian-mixture", 2, covariance_prior={"dof": 4.0, "scale": 2.0})
    assert prior.describe() == emfed.gaussian_mixture(
        2, covariance_prior=emfed.models.InverseWishart(4.0, 2.0)
    ).describe()  # fmt: skip
    families = {"age": "gaussian", "ward": {"family": "categorical", "categories": 3}}
    mixed = make_model("mixed-mixture", 2, families=families)
    own = emfed.mixed_mixture(2, {"age": "gaussian", "ward": emfed.models.Categorical(3)})
    assert mixed.describe() == own.describe()


def test_clusters_in_the_frame_of_a_model_travel() -> None:
    for name in ("full", "mixed mixture, NaN"):
        bound = bind(REGISTRY[name].make(), REGISTRY[name].tables)
        clusters = dataclasses.replace(bound.clusters(4), smallest=2)
        again = build_model(plain(clusters.describe()))
        rows = REGISTRY[name].tables[0]
        there = again.bind({"mean": np.zeros((1, 1))}, np.array([9]), np.ones(1))
        centres = clusters.start(1)
        np.testing.assert_array_equal(
            there.expected_statistics(rows, centres), clusters.expected_statistics(rows, centres)
        )


@pytest.fixture
def unregistered() -> Iterator[None]:
    makers, stored = dict(MODELS._makers), dict(STORED)
    yield
    for table, before in ((MODELS._makers, makers), (STORED, stored)):
        table.clear()
        table.update(before)


@dataclass(frozen=True)
class Unit:
    name: str = "cm"


@dataclass(frozen=True)
class Measured(emfed.models.LinearGaussian):
    unit: Unit = Unit()

    def describe(self) -> dict[str, Any]:
        return {"model": "measured", "kappa": self.kappa}


@pytest.mark.usefixtures("unregistered")
def test_one_statement_serves_fits_networks_files_reports_and_words(tmp_path: Path) -> None:
    emfed.models.register_model("measured", parts=[Unit])(Measured)
    model = make_model("measured", kappa=0.7)
    options: dict[str, Any] = {"algorithm": "em", "rounds": 5, "masks": False}
    tables = {f"site{i}": rows for i, rows in enumerate(ROWS)}
    with emfed.network.LocalSites(tables, rules=OPEN) as sites:
        here, there = (emfed.fit(model, data, **options) for data in (tables, sites))
    np.testing.assert_allclose(here.params.mean, there.params.mean, rtol=1e-9)
    there.save(tmp_path / "m.emfed")
    assert emfed.load(tmp_path / "m.emfed").model.unit == Unit()
    assert "A measured was fitted" in render_page(fit_page(there))


class Plain(Model):
    pass


@pytest.mark.usefixtures("unregistered")
def test_a_name_stands_for_one_model() -> None:
    with pytest.raises(emfed.SettingsError, match="another class 'k-means'"):
        emfed.models.register_model("k-means")(Measured)
    with pytest.raises(emfed.SettingsError, match="another model 'ppca'"):
        emfed.models.register_model("ppca")(emfed.factor_analysis)
    for bad in ("", "x" * (LONGEST_NAME + 1)):
        with pytest.raises(emfed.SettingsError, match="letters"):
            emfed.models.register_model(bad)(Measured)
    with pytest.raises(emfed.SettingsError, match="must be a dataclass"):
        emfed.models.register_model("plain")(Plain)
    emfed.models.register_model("measured")(Measured)
    emfed.models.register_model("measured")(Measured)  # a cell of a notebook, run again
