"""Every script of the gallery runs, holds what it claims, and ends in a picture."""

from __future__ import annotations

import re
import runpy
from pathlib import Path

import matplotlib
import pytest

matplotlib.use("Agg")
import matplotlib.pyplot as plt

GALLERY = Path(__file__).parents[2] / "examples" / "gallery"
SCRIPTS = sorted(GALLERY.glob("*.py"))


@pytest.fixture(autouse=True)
def _no_figure_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> object:
    monkeypatch.chdir(tmp_path)
    yield
    plt.close("all")


@pytest.mark.filterwarnings("ignore:FigureCanvasAgg is non-interactive")
@pytest.mark.parametrize(
    "script",
    [p if p.stem != "private_run" else pytest.param(p, marks=pytest.mark.long) for p in SCRIPTS],
    ids=lambda path: path.stem,
)
def test_a_script_holds_what_it_claims_and_ends_in_a_picture(
    script: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("EMFED_DATA", raising=False)
    runpy.run_path(str(script), run_name="__main__")
    assert plt.get_fignums()


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_script_is_short_says_what_it_does_and_checks_it(script: Path) -> None:
    text = script.read_text(encoding="utf-8")
    lines = text.splitlines()
    if script.stem == "your_own_model":  # of sixty lines, without what a reader skips
        lines = [line for line in text.split('"""')[2].splitlines() if re.match(r" *[^# ]", line)]
    assert len(lines) < 60
    title, rule = text.splitlines()[1:3]
    assert rule == "=" * len(title), "sphinx-gallery wants a title"
    assert re.search(r"^assert |assert_allclose", text, re.MULTILINE)
    assert text.count("\n# %%\n") >= 2
