"""Nothing is shown that is not known: masked fits of unlike workers, and all that tells of them."""

from __future__ import annotations

import html
import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.artifacts.fits import fit_page
from emfed.artifacts.model_card import card_markdown
from emfed.artifacts.page import render_page
from emfed.cli.fit import summarise
from emfed.cli.help import Options
from emfed.cli.inspect import run_inspect
from emfed.data import as_workers
from emfed.data.held import HeldWorkers
from emfed.data.summing import HeldRows
from emfed.fitting import FitSettings, in_process
from emfed.fitting.program import FitProgram
from tests.network.exchanges import READER, Federation

ROWS = {"anna": 1201, "bert": 389, "cleo": 127}
COLUMNS = ("age", "height")
MODEL = emfed.gaussian_mixture(2)


@cache
def tables() -> dict[str, Any]:
    """One worker has rows of the first component alone, one of the second, one of both."""
    rng, found = np.random.default_rng(0), {}
    for (name, count), share in zip(ROWS.items(), (1.0, 0.0, 0.5), strict=True):
        first = (np.arange(count) < share * count)[:, None]
        found[name] = np.where(first, [4.0, 0.0], [0.0, 4.0]) + rng.normal(size=(count, 2))
    return found


def settings(**more: Any) -> FitSettings:
    asked = {"scores": True, "validate": True, "errors": True, "columns": COLUMNS}
    return FitSettings(MODEL, **asked, **more)


def in_one_process(masks: bool) -> emfed.Result:
    import polars as pl

    frames = {name: pl.DataFrame(table, schema=COLUMNS) for name, table in tables().items()}
    return in_process.fit(settings(masks=masks), HeldWorkers(as_workers(frames))).result


def over_the_network() -> emfed.Result:
    network = Federation(sites=3, program=FitProgram(settings(masks=True)), tables=tables())
    network.run()
    assert network.ends[READER].final
    found: emfed.Result = network.ends[READER].result.fitted().result
    return found


MADE = {"one process": lambda: in_one_process(masks=True), "network": over_the_network}


@cache
def masked(where: str) -> emfed.Result:
    return MADE[where]()


def told(result: emfed.Result, folder: Path, capsys: pytest.CaptureFixture[str]) -> str:
    """All words and numbers that a person can read of a result."""
    path = folder / "model.emfed"
    result.save(path)
    again = emfed.load(path)
    options = Options(out="model.emfed", report=None)
    pages = []
    for one in (result, again):
        page = re.sub(r"<(style|script|svg)\b.*?</\1>", " ", render_page(fit_page(one)), flags=re.S)
        pages += [html.unescape(re.sub(r"<[^>]+>", " ", page)), card_markdown(one.card)]
        pages += [json.dumps(one.card), json.dumps(one.workers()), repr(one), str(one.validation)]
        pages += [json.dumps(summarise(one, options, [], []))]
        pages += [drawn(one)]
    run_inspect(str(path), None, as_json=True)
    run_inspect(str(path), str(folder / "workers.csv"), as_json=False)
    return "\n".join([*pages, capsys.readouterr().out, (folder / "workers.csv").read_text()])


def drawn(result: emfed.Result) -> str:
    """What stands in figures, but for the outlines of components."""
    sections = [s for s in fit_page(result).sections if s.heading != "The components"]
    panels = [p for s in sections for figure in s.figures for p in figure.panels]
    series = [one for panel in panels for one in panel.series]
    numbers = [f"{v:.4f}" for one in series for v in (*one.x, *one.y) if abs(v) > 1e-3]
    names = [name for panel in panels for name in panel.names]
    return " ".join([*(one.label for one in series), *names, *numbers])


def forbidden(result: emfed.Result) -> dict[str, str]:
    """Numbers of one worker, and such as are made up of the sums, in the ways they are printed."""
    found: dict[str, str] = {}
    total = sum(ROWS.values())
    for name, count in ROWS.items():
        found |= {f"{count}": f"rows of {name}", f"{count:,}": f"rows of {name}"}
    for share in (total // 3, total // 3 + 1, f"{total / 3:.1f}", f"{total / 3:.2f}"):
        found[f"{share}"] = "equal shares of all rows"
    for name, table in tables().items():
        score = result.log_likelihood(table)
        found |= {f"{score:.{n}f}": f"log-likelihood of {name}" for n in (2, 3, 4, 6)}
        shares = result.predict_proba(table).mean(axis=0)
        found |= {f"{share:.1%}": f"shares of {name}" for share in shares.tolist()}
    return found


def shows(words: str, number: str) -> re.Match[str] | None:
    return re.search(rf"(?<![\w.,-]){re.escape(number)}(?![\w%]|[.,]\d)", words)


@pytest.mark.parametrize("where", MADE)
def test_no_number_of_a_worker_is_shown_of_a_masked_fit(
    where: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = masked(where)
    words = told(result, tmp_path, capsys)
    for number, what in forbidden(result).items():
        found = shows(words, number)
        assert found is None, f"{what}: ...{words[found.start() - 60 : found.end() + 40]}..."
    assert "well served" not in words
    assert "badly served" not in words
    assert "not known (masked)" in words


@pytest.mark.parametrize("where", MADE)
def test_what_is_known_of_all_together_is_there_and_right(where: str) -> None:
    result, facts = masked(where), masked(where).facts
    every = np.concatenate(list(tables().values()))
    assert facts is not None
    assert (facts.workers, facts.rows, facts.by_worker) == (3, len(every), None)
    assert result.worker_weights is None
    assert facts.log_likelihood == pytest.approx(result.log_likelihood(every), abs=1e-6)
    scores = result.score_samples(every)
    assert facts.row_spread == pytest.approx(scores.std(), rel=1e-5)
    assert facts.scores is not None
    shares = result.predict_proba(every).mean(axis=0)
    np.testing.assert_allclose(facts.scores[4:], shares, atol=1e-6)
    assert facts.well_served
    assert set(result.workers()) == {
        "worker",
        *(f"{what}_{way}" for what in ("messages", "bytes", "payload") for way in ("up", "down")),
    }


def test_without_masks_each_worker_has_told_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And so the search for numbers finds what is shown."""
    result = in_one_process(masks=False)
    assert result.workers()["rows"] == list(ROWS.values())
    words = told(result, tmp_path, capsys)
    shown = {what for number, what in forbidden(result).items() if shows(words, number)}
    kinds = ("rows", "log-likelihood", "shares")
    assert shown == {f"{kind} of {name}" for kind in kinds for name in ROWS}


def test_files_of_release_0_1_do_not_show_what_it_divided(tmp_path: Path) -> None:
    """Where sums were masked it wrote equal shares of them as rows and scores of each worker."""
    result = masked("one process")
    result.save(tmp_path / "now.emfed")
    from emfed.artifacts.modelfiles import SEAL
    from emfed.core.storage import load_sealed, save_sealed

    arrays, about = load_sealed(tmp_path / "now.emfed", SEAL)
    for name in ("rows", "workers", "company"):
        del about["facts"][name]
    whole = arrays.pop("scores")
    arrays.pop("held_out")
    arrays |= {"workers/rows": np.array([573, 572, 572]), "workers/scores": np.tile(whole, (3, 1))}
    save_sealed(tmp_path / "old.emfed", SEAL, arrays, about, "")
    facts = emfed.load(tmp_path / "old.emfed").facts
    assert facts is not None
    assert facts.by_worker is None
    assert facts.rows == 1717
    np.testing.assert_allclose(facts.scores, whole)


def test_sums_of_scores_are_those_of_the_rows_wherever_they_lie() -> None:
    """Rows that change places between workers change nothing that is told."""
    from emfed.network.scoring import ScoreSums

    result = masked("one process")
    rows = np.concatenate(list(tables().values()))
    ask = ScoreSums(result.model, result.model.maximize(result.statistics))
    parts = [HeldRows(as_workers([t])) for t in np.array_split(rows, 3)]
    own = [HeldRows(as_workers([t])) for t in tables().values()]
    here, there = (np.sum([ask.part(one) for one in several], axis=0) for several in (own, parts))
    np.testing.assert_allclose(here, there, rtol=1e-10)


def test_what_everybody_followed_says_who_learned_what() -> None:
    from emfed.artifacts.disclosure import protections

    said = protections(masked("network"))
    assert "the relay that added up has no key of the sums" in said
    assert "A server" not in said
    words = " ".join(text for s in fit_page(masked("network")).sections for text in s.text)
    assert "each of them computes the common model" in words
    assert "It is one of the numbers of every sum." in words
    assert "rounded to a common unit, and masked" in words
