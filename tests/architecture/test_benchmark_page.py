"""The page of benchmarks is what was measured, and tells when."""

from __future__ import annotations

import copy
import json
from typing import Any

from benchmarks.page import HISTORY, LATEST, MAIN, PAGE, merged, page

MACHINE = {
    "date": "2026-11-16",
    "commit": "abc1234",
    "processor": "a processor",
    "cores": 2,
    "load": 0.5,
    "python": "3.11",
    "numpy": "2.1",
    "scipy": "1.14",
    "polars": "1.25",
    "scikit-learn": "1.6",
}
RUN: dict[str, Any] = {
    "machine": MACHINE,
    "seconds": {"startup": 3.0},
    "tables": {"startup": [{"title": "t", "headings": ["what", "s"], "rows": [["a|b", "0.1"]]}]},
    "startup": {"import emfed": {"processor": 0.12345}, "emfed --help": {"processor": 0.2}},
}


def test_the_page_is_what_the_command_makes_of_the_files() -> None:
    latest, history = (json.loads(path.read_text()) for path in (LATEST, HISTORY))
    text = PAGE.read_text(encoding="utf-8")
    assert page(text, latest, history) == text, "run `python -m benchmarks page`"
    assert len(MAIN) == 10


def test_a_run_replaces_its_own_sections_and_is_told_once() -> None:
    latest: dict[str, Any] = {"speed": {"tables": []}, "startup": {"tables": ["old"]}}
    history: list[Any] = []
    for _ in range(2):
        merged(copy.deepcopy(RUN), latest, history)
    assert latest["speed"] == {"tables": []}
    assert [entry["figures"] for entry in history] == [
        {"import emfed, s of a processor": 0.123, "`emfed --help`, s of a processor": 0.2}
    ]
    empty = "before <!-- benchmarks: startup --> old <!-- end of startup --> after"
    told = page(empty, latest, history)
    assert "2026-11-16, commit abc1234" in told
    assert "| a\\|b | 0.1 |" in told
    assert told.startswith("before ")
    assert told.endswith(" after")
    slower = copy.deepcopy(RUN)
    slower["startup"]["import emfed"]["processor"] = 0.9
    merged(slower | {"machine": MACHINE | {"commit": "def5678"}}, latest, history)
    shown = page("<!-- benchmarks: history --><!-- end of history -->", latest, history)
    line = next(line for line in shown.splitlines() if line.startswith("| import emfed"))
    assert "0.123 (2026-11-16, abc1234) | 0.9 (2026-11-16, def5678) |" in line
