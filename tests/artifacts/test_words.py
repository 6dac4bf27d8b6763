"""Every registered model is told of in its own words: report, terminal, card and parameters."""

from __future__ import annotations

import re
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pandas as pd
import pytest

import emfed
from emfed.artifacts import fit_page
from emfed.artifacts.fits import features
from emfed.artifacts.model_card import card_markdown
from emfed.artifacts.page import Page, Table
from emfed.cli import fit as command
from emfed.core.errors import SettingsError
from emfed.core.protocols import ModelWords
from emfed.deployment.views import status_line
from emfed.fitting.estimators import FederatedGaussianMixture, FederatedMixture
from emfed.models.clusters import Clusters
from emfed.models.component_summaries import normal_portrait
from tests.contracts.test_one_registry import EXAMPLES

PLAIN = [name for name in EXAMPLES if "priors" not in name]


def cells(table: Table) -> list[str]:
    return [table.heading, *table.columns, *(cell for row in table.rows for cell in row)]


def lines(page: Page) -> list[str]:
    """What stands in a page, its figures' labels too, but for the list of settings."""
    told = [page.title, *page.text, page.source, *page.warnings]
    told += [word for h in page.highlights for word in (f"{h.name} {h.value} {h.note}",)]
    for section in page.sections:
        if section.heading != "Settings and versions":
            told += [section.heading, *section.text, *section.terms, *section.terms.values()]
            told += [c for t in (*section.tables, *section.details) for c in cells(t)]
            for figure in section.figures:
                told.append(figure.caption)
                for panel in figure.panels:
                    told += [panel.x, panel.y, *(series.label for series in panel.series)]
    return told


def fitted(name: str) -> tuple[emfed.Result, list[str]]:
    model, tables = EXAMPLES[name]
    options: dict[str, Any] = {"monitor": emfed.fitting.Monitor(mean_field=False), "scores": True}
    if name == "cells":  # the imputer fits them, and asks for neither
        options = {"algorithm": emfed.EM()}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        result = emfed.fit(model, tables, rounds=3, start="moments", **options)
    return result, [str(w.message) for w in warned]


def seen(result: emfed.Result, remarks: list[str], capsys: Any) -> str:
    """All that a reader of a fit sees."""
    options: Any = SimpleNamespace(out="m.emfed", report=None)
    capsys.readouterr()
    command._print(command.summarise(result, options, remarks, []), result.model.words())
    card = card_markdown({"convergence": result.card["convergence"]})
    told = [*lines(fit_page(result)), capsys.readouterr().out, card, *result.workers(), *remarks]
    told += [repr(result), *(word for row in features(result)[1] for word in row)]
    return re.sub(r"\s+", " ", " | ".join(told).replace("_", " "))


def strange(result: emfed.Result, text: str) -> list[str]:
    """ModelWords that do not apply to the model, with what stands before them."""
    words = result.model.words()
    out = ["k means", "[pP]pca", "[rR]ow owner", "mixed mixture", r"\b[aA] [aeio]", r"\bNone\b"]
    out += [r"\b1 (row|sequence|column|site|round|component|cluster|state)s\b"]
    if not words.likelihood:
        out += ["likelihood", r"\bnats?\b", "BIC", "probable"]
    if result.model.describe().get("n_components", 1) == 1:
        out += [f"[^l] {words.part}s?\\b"]  # "several components" is advice
    elif words.part != "component":
        out += [r"\bcomponents?\b"]
    if words.row != "row":
        out += ["nats (per|a) row", r"\d rows", "log-likelihood per row"]
    if not features(result)[2].startswith("mean ±"):
        out += ["±"]
    return [match.group() for word in out for match in re.finditer(f".{{0,40}}{word}", text)]


@pytest.mark.parametrize("name", PLAIN)
def test_a_model_is_told_of_in_its_own_words(name: str, capsys: Any) -> None:
    result, remarks = fitted(name)
    text = seen(result, remarks, capsys)
    assert not strange(result, text)
    words = result.model.words()
    assert words.title in text
    assert words.score in text


def test_the_check_can_fail(capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    result, remarks = fitted("k-means")
    wrong = seen(fitted("full")[0], remarks, capsys)
    found = " ".join(strange(result, wrong))
    for word in ("likelihood", "nats", "component", "±", "probable"):
        assert word in found
    monkeypatch.setattr(Clusters, "words", lambda self: ModelWords("k means"))
    assert strange(result, seen(result, remarks, capsys))


def test_criteria_and_scores_of_k_means_are_not_called_likelihoods() -> None:
    result, _ = fitted("k-means")
    rows = EXAMPLES["k-means"][1][0]
    for criterion in (result.aic, result.bic, result.icl):
        with pytest.raises(SettingsError, match="Compare the squared distance of rows"):
            criterion(rows)
    table = result.workers()
    assert min(table["squared_distance"]) > 0
    assert table["squared_distance"][0] == pytest.approx(-result.log_likelihood(rows))
    plain = emfed.fit(emfed.k_means(2), EXAMPLES["k-means"][1], scores=True)  # in units of the data
    nearest = ((rows[:, None] - plain.params.centres) ** 2).sum(axis=-1).min(axis=1)
    assert plain.workers()["squared_distance"][0] == pytest.approx(nearest.mean())
    assert "log_likelihood" not in result.card["convergence"]


def test_decimals_of_a_feature_are_alike() -> None:
    result, _ = fitted("mixed mixture")
    for feature, *own in features(result)[1]:
        found = {tuple(len(n) for n in re.findall(r"\.(\d+)", cell)) for cell in own}
        assert len(found) == 1, feature


def test_a_component_at_its_floor_does_not_lengthen_the_decimals_of_others() -> None:
    cells = normal_portrait(
        np.ones(2) / 2, np.array([[1.5], [-1e-9]]), np.array([[4.0], [1e-8]]), ["x"]
    ).cells
    assert cells == [["1.500 ± 2.000", "0.000 ± 0.000"]]


def test_categories_stand_in_the_words_of_the_data() -> None:
    rng = np.random.default_rng(0)
    table = {"dose": rng.normal(size=90), "ward": rng.choice(["north", "south"], 90, p=[0.8, 0.2])}
    mixture = FederatedMixture(1, families={"ward": "categorical"}).fit(pd.DataFrame(table))
    rows = {name: own for name, *own in features(mixture.result_)[1]}
    north = (table["ward"] == "north").mean()
    assert rows["ward"] == [f"north {north:.1%}, south {1 - north:.1%}"]


def test_every_summary_tells_the_size_of_the_rows_beside_the_bytes(tmp_path: Path) -> None:
    """33 rows of 2 columns are 528 bytes; `emfed fit` and `serve` have tests of their own."""
    rows = np.random.default_rng(0).normal(size=(33, 2))
    tables = {"a": rows[:20], "b": rows[20:]}
    result = emfed.fit(emfed.gaussian_mixture(1), tables, errors=True)
    fitted = FederatedGaussianMixture(1).fit(rows, groups=np.arange(33) % 2)
    fitted.report(tmp_path / "r.html")
    chosen = emfed.select_components(emfed.gaussian_mixture(1), tables, "1:2")
    status = {"state": "finished", "converged": True, "up": 1200, "down": 90, "raw": 528}
    assert fitted.bytes_ > fitted.raw_bytes_ == result.raw_bytes == 528
    for told, size in (
        (repr(result), "528 B"),
        (str(result.summary()), "528 B"),
        (str(fitted.summary(rows)), "528 B"),
        (repr(chosen), "528 B"),
        (card_markdown(result.card), "528 B"),
        ((tmp_path / "r.html").read_text(encoding="utf-8"), "528 B"),
        (status_line(status), "0.5 kB"),
    ):
        assert re.search(f"the rows themselves[ a-z,:]*{size}", told), told


def test_the_report_of_an_estimator_warns_in_its_words(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    table = pd.DataFrame({"x": np.where(rng.random(200) < 0.8, 0.0, rng.normal(size=200))})
    fitted = FederatedGaussianMixture(2, covariance_type="diag")
    with pytest.warns(emfed.EmfedWarning) as warned:
        fitted.fit(table)
    page = fit_page(fitted.result_).warnings
    for warning in warned:
        told = str(warning.message)
        assert f"{told[:1].upper()}{told[1:]}" in page
