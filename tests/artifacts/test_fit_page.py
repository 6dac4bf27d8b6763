"""The report of a fit: from the file alone, for every model, in a real browser."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.artifacts import fit_page, render_page
from tests.artifacts.browser import Browser
from tests.helpers import first, plain_fit
from tests.registry import REGISTRY


def sites(count: int = 6, seed: int = 0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    tables = {
        f"site {i}": rng.normal(rng.choice([-3, 3], (90, 1)), 1, (90, 3)) for i in range(count)
    }
    tables["<script>alert(1)</script> & co"] = 9 + 30 * rng.normal(size=(7, 3))
    return tables


def fitted(**options: Any) -> emfed.Result:
    settings: dict[str, Any] = {
        "participation": emfed.algorithms.Bernoulli(0.8),
        "monitor": emfed.fitting.Monitor(mean_field=False),
        "scores": True,
        "rounds": 25,
        "start": "k-means",
    }
    settings["algorithm"] = emfed.FedEM(emfed.SubtractiveDithering(0.2), in_metric=True)
    return plain_fit(emfed.gaussian_mixture(2), sites(), **(settings | options))


def text_of(html: str) -> str:
    return re.sub(r"\s+", " ", re.sub(r"<[^>]*>", " ", html))


def test_the_page_says_what_happened(tmp_path: Path) -> None:
    result = fitted()
    html = render_page(fit_page(result))
    result.save(tmp_path / "m.emfed")
    assert render_page(fit_page(emfed.load(tmp_path / "m.emfed"))) == html  # the file is enough
    assert "<script" not in html
    words = text_of(html)
    for sentence in (
        "A Gaussian mixture with 2 components was fitted on 547 rows of 3 columns, held by 7 sites",
        "The fit did not converge: it met its limit on rounds",
        "This fit was a simulation",
        "no guarantee of privacy",
        "1 site has fewer than 10 rows (&lt;script&gt;alert(1)&lt;/script&gt; &amp; co)",
        "no differential privacy",
        "counts of its rows in common clusters",
        "badly served",
    ):
        assert sentence in words
    up = result.ledger.summary()["round"]["up"]
    assert f"{(up['payload'] + up['envelope']) / 7:,.0f}" in words
    asked = sum(r.asked for r in result.records if r.round)
    assert f"{asked} requests were sent" in words


@pytest.mark.parametrize(
    ("rows", "words", "others"),
    [
        (90, "is 90 (site site 0).", "What no message holds of a site: "),
        (
            7,
            "is 7 (site small). That is few enough to say much",
            "What no message holds of a site: ",
        ),
        (2, "is 2 (site small). Averages over so few are the rows", "with more rows than two: "),
        (1, "is 1 (site small). Averages over so few are the rows", "with more rows than two: "),
    ],
)
def test_the_page_says_what_averages_over_few_rows_are(rows: int, words: str, others: str) -> None:
    tables = sites()
    tables.popitem()
    tables["small"] = tables["site 0"][:rows]
    page = fit_page(plain_fit(emfed.gaussian_mixture(1), tables, rounds=1))
    assert f"The least number of rows behind a number that left a site {words}" in page.text[0]
    text = " ".join(section_of(page, "What left each site").text)
    assert words in text
    assert others in text


def section_of(page: Any, heading: str) -> Any:
    return next(section for section in page.sections if section.heading == heading)


def test_the_least_number_of_rows_is_that_of_a_component_at_a_site() -> None:
    rng = np.random.default_rng(3)
    tables = {"left": rng.normal(-9, 1, (50, 2)), "mixed": rng.normal(9, 1, (60, 2))}
    tables["mixed"][:3] -= 18
    result = plain_fit(emfed.gaussian_mixture(2), tables, scores=True, start="k-means", rounds=60)
    assert result.facts is not None
    assert result.facts.by_worker.shares is not None
    np.testing.assert_allclose(result.facts.by_worker.shares.sum(axis=1), 1)
    behind = result.facts.by_worker.shares * result.facts.by_worker.rows[:, None]
    assert np.sort(behind.ravel())[1] == pytest.approx(3, abs=1e-3)
    told = fit_page(result).text[0]
    assert "behind a number that left a site is less than 0.1 (component" in told
    assert "at site left, at the end of the fit)" in told
    shares = section_of(fit_page(result), "The components at each site")
    cells = {row[0]: set(row[1:]) for row in shares.tables[0].rows}
    assert cells == {"left": {"0.0%", "100.0%"}, "mixed": {"5.0%", "95.0%"}}


def test_the_first_screen_tells_what_everybody_asks_first() -> None:
    page = fit_page(fitted(rounds=3, tol=1e-6), title="Wards of the north")
    assert page.title == "Wards of the north"
    told = {h.name: (h.value, h.good) for h in page.highlights}
    assert told["converged"] == ("no", False)
    assert told["sites"][0] == "7"
    assert told["rows"][0] == "547"
    beside = next(h.note for h in page.highlights if h.name == "bytes, both ways")
    assert beside.endswith("times the rows themselves, 13.1 kB")  # 547 x 3 doubles
    assert told["warnings"] == (str(len(page.warnings)), False)
    assert any("limit on rounds" in line for line in page.warnings)  # as the terminal warned
    assert any("clearly worse than it claims" in line for line in page.warnings)
    words = text_of(render_page(page))
    assert words.index("Look at this") < words.index("The components")


def test_a_family_that_is_wrong_everywhere_is_called_so() -> None:
    rng = np.random.default_rng(0)
    tables = {name: rng.negative_binomial(1, 0.05, (300, 2)) for name in "abc"}
    result = plain_fit(emfed.mixed_mixture(1, "poisson"), tables, scores=True, rounds=3)
    assert result.facts is not None
    assert len(result.facts.by_worker.badly_served) == 3
    assert any("its family is wrong" in line for line in fit_page(result).warnings)


def test_flat_plots_are_left_out_and_sites_stand_by_name() -> None:
    tables = sites()
    tables.popitem()
    result = plain_fit(emfed.gaussian_mixture(2), tables, scores=True, rounds=5)
    page = fit_page(result)
    assert not section_of(page, "Participation").figures  # everybody answered, always
    assert not section_of(page, "Bytes").figures  # and sent as much as everybody
    panel = section_of(page, "How well each site is served").figures[0].panels[0]
    assert sorted(panel.names) == sorted(tables)
    alone = fit_page(plain_fit(emfed.gaussian_mixture(2), [tables["site 0"]], scores=True))
    assert not section_of(alone, "How well each site is served").figures


def test_columns_of_numbers_have_equal_digits() -> None:
    page = fit_page(fitted())
    tables = [t for section in page.sections for t in (*section.tables, *section.details)]
    for table in (t for t in tables if t.heading != "The model card"):
        for cells, numeric in zip(zip(*table.rows, strict=True), table.numeric, strict=True):
            if numeric and "±" not in "".join(cells):
                assert len({len(cell.partition(".")[2]) for cell in cells if cell}) == 1, cells


def test_axes_that_count_have_whole_numbers_and_none_an_offset() -> None:
    page = fit_page(fitted(rounds=3))
    figures = [figure for section in page.sections for figure in section.figures]
    panels = [panel for figure in figures for panel in figure.panels]
    for panel in panels:
        counts = ("x" * panel.x.startswith("round")) + "y" * (panel.y == "sites")
        assert panel.whole == counts
    climb = next(p for p in panels if p.y == "nats per row below the best")
    assert climb.log == "y"
    assert np.all(climb.series[0].y > 0)


def test_a_good_fit_is_called_one() -> None:
    tables = sites()
    tables.popitem()
    result = plain_fit(emfed.gaussian_mixture(2), tables, field_tol=1e-10, scores=True)
    words = text_of(render_page(fit_page(result)))
    assert "The fit converged" in words
    assert "fits every site about as well as it claims to" in words
    assert "The statistics of a round were sent exactly." in words
    assert "It is one of the numbers of every sum" in words


@pytest.mark.parametrize(
    ("algorithm", "exact"),
    [
        (emfed.EM(), True),
        (emfed.FedEM(emfed.Identity()), True),
        (emfed.FedEM(emfed.Dithering(4)), False),
        (emfed.AutoEM(), False),
    ],
    ids=["em", "identity", "dithering", "auto"],
)
def test_only_what_was_exact_is_called_exact(algorithm: Any, exact: bool) -> None:
    page = fit_page(fitted(algorithm=algorithm, rounds=3))
    words = " ".join(section_of(page, "What left each site").text)
    assert ("were sent exactly" in words) == exact
    assert ("rounded at random" in words) != exact


def test_results_that_know_little_have_a_page() -> None:
    result = plain_fit(
        emfed.gaussian_mixture(1), np.random.default_rng(0).normal(size=(50, 1)), rounds=0
    )
    words = text_of(render_page(fit_page(result)))
    assert "did not end by asking the sites" in words
    assert "No round was made." in words


@pytest.mark.parametrize("judged", [True, False])
@pytest.mark.parametrize("silent", [1, 3])
def test_sites_that_left_before_they_said_how_they_are_served_are_in_the_page(
    silent: int, judged: bool
) -> None:
    """The report of a masked run that lost a site could not be drawn."""
    tables = {name: REGISTRY["full"].tables[i] for i, name in enumerate(("a", "b", "c"))}
    result = emfed.fit(REGISTRY["full"].make(), tables, rounds=3, scores=True)
    assert result.facts is not None
    known = result.facts.by_worker
    assert known is not None
    assert known.scores is not None
    scores = known.scores.copy()
    scores[:silent] = np.nan
    if not judged:
        scores[:, 2:4] = np.nan
    told = dataclasses.replace(known, scores=scores)
    left = dataclasses.replace(result, facts=dataclasses.replace(result.facts, by_worker=told))
    page = render_page(fit_page(left, "left"))
    assert page.count("did not say") == silent


@pytest.mark.parametrize("name", REGISTRY)
def test_every_model_has_a_page(name: str) -> None:
    entry = REGISTRY[name]
    result = plain_fit(entry.make(**entry.priors), entry.tables, rounds=4, scores=True)
    page = fit_page(result)
    headings = [section.heading for section in page.sections]
    assert any(heading.startswith("The ") and heading.endswith("s") for heading in headings)
    told = section_of(page, "What left each site").tables[1]
    assert sum(_numbers(row[2]) for row in told.rows) == result.model.layout.size


def _numbers(shape: str) -> int:
    return int(np.prod([int(n.replace(",", "")) for n in shape.split(" x ")]))


def test_a_range_of_components_is_in_the_page() -> None:
    tables = sites()
    tables.popitem()
    found = emfed.select_components(emfed.gaussian_mixture(1), tables, "1:3", rounds=30)
    from emfed.cli.fit import with_setting

    told = {"criterion": "bic", "tried": [dict(row) for row in found.table]}
    words = text_of(render_page(fit_page(with_setting(found.best, "selection", told))))
    assert "How many components" in words
    assert "smallest BIC" in words


def test_ten_thousand_sites_have_a_page_of_bounded_size() -> None:
    rng = np.random.default_rng(0)
    data = emfed.data.as_workers(rng.normal(size=(40_000, 2)), groups=np.arange(40_000) // 4)
    result = plain_fit(emfed.gaussian_mixture(2, "diag"), data, rounds=3, scores=True)
    html = render_page(fit_page(result))
    assert len(html) < 2_000_000
    assert "400 of 10,000" in html


@pytest.mark.parametrize("width", first([390, 1280, 820]))
def test_in_a_browser(width: int, browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "report.html").write_text(render_page(fit_page(fitted())), encoding="utf-8")
    seen = browser.look(tmp_path / "report.html", width)
    assert seen["images"] == 9  # two of the figures have a picture for each panel
    assert all(seen["widths"])
    assert seen["page"] <= width
    assert seen["console"] == []
