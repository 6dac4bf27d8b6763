"""``python -m benchmarks page``: what was measured last, in docs/benchmarks.md, and its history.

``build/benchmarks.json`` is what the last run wrote (``--json``). Its tables take the place of
those in ``benchmarks/latest.json``, section by section, and its main figures are added to
``benchmarks/history.json``. The page holds a block for each section, between marks; all else in it
is written by hand.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
PAGE = HERE.parent / "docs" / "benchmarks.md"
LATEST, HISTORY = HERE / "latest.json", HERE / "history.json"
COLUMNS = 4
"""Runs that the page's table of history shows; the file has them all."""


def _named(rows: Any, **wanted: Any) -> Any:
    return next(row for row in rows if all(row[name] == value for name, value in wanted.items()))


def _both(row: Any) -> float | None:
    """All bytes of a run; None where it did not arrive in the rounds that it had."""
    return None if row["up"] is None else row["up"] + row["down"]


MAIN: dict[str, tuple[str, Callable[[Any], float | None]]] = {
    "import emfed, s of a processor": ("startup", lambda f: f["import emfed"]["processor"]),
    "`emfed --help`, s of a processor": ("startup", lambda f: f["emfed --help"]["processor"]),
    "a round beside its floor in numpy, times": (
        "speed",
        lambda f: f["round_seconds"]["stacked"] / f["round_seconds"]["floor (numpy)"],
    ),
    "a full pass beside scikit-learn, tied, times as fast": (
        "speed",
        lambda f: f["pass_seconds"]["tied"]["scikit-learn"] / f["pass_seconds"]["tied"]["emfed"],
    ),
    "the same, full": (
        "speed",
        lambda f: f["pass_seconds"]["full"]["scikit-learn"] / f["pass_seconds"]["full"]["emfed"],
    ),
    "air quality to the pooled answer, bytes of a station": (
        "figure",
        lambda f: _both(_named(f, run="emfed")),
    ),
    "the same with masked sums, bytes": (
        "figure",
        lambda f: _both(_named(f, run="emfed, masked sums")),
    ),
    "a masked round of 3 sites over TLS besides their passes, ms": (
        "network",
        lambda f: _named(f["fitting"], sites=3, masks=True)["beside"],
    ),
    "the default within 1e-3 nats of EM, share of fits": (
        "right",
        lambda f: sum(row["within_1e-3"] for row in f) / sum(row["runs"] for row in f),
    ),
    "fault plans that broke a promise": (
        "faults",
        lambda f: float(sum(len(one["failed"]) for one in f.values())),
    ),
}
"""The main ten figures: the section that measures each, and where it stands there."""


def merged(run: dict[str, Any], latest: dict[str, Any], history: list[Any]) -> None:
    """Put what a run found into the two files' contents; the same run twice is told once."""
    machine = run["machine"]
    about = {name: machine[name] for name in ("date", "commit", "processor", "cores", "load")}
    about["versions"] = {
        name: machine[name] for name in ("python", "numpy", "scipy", "polars", "scikit-learn")
    }
    for name, tables in run["tables"].items():
        latest[name] = about | {"seconds": run["seconds"][name], "tables": tables}
    found = {
        name: float(f"{figure:.3g}")
        for name, (section, value) in MAIN.items()
        if run.get(section) and (figure := value(run[section])) is not None
    }
    entry = {"date": about["date"], "commit": about["commit"], "figures": found}
    if found and entry not in history:
        history.append(entry)


def _cells(values: Any) -> str:
    return "| " + " | ".join(str(value).replace("|", "\\|") for value in values) + " |"


def table(headings: Any, rows: Any, title: str = "") -> str:
    """A table in Markdown."""
    lines = [_cells(headings), _cells("---" for _ in headings), *map(_cells, rows)]
    return (f"{title}:\n\n" if title else "") + "\n".join(lines)


def block(name: str, latest: dict[str, Any]) -> str:
    """What a section printed when it was run last."""
    if name not in latest:
        return (
            f"*`python -m benchmarks {name}` has not been run for this page yet; figures in this "
            "section are older.*"
        )
    found = latest[name]
    versions = ", ".join(f"{what} {version}" for what, version in found["versions"].items())
    return "\n\n".join(
        [
            f"*`python -m benchmarks {name}`: {found['date']}, commit {found['commit']}, "
            f"{found['processor']}, {found['cores']} cores (load {found['load']} when it began), "
            f"{versions}; it took {found['seconds']:.0f} s.*",
            *(table(t["headings"], t["rows"], t["title"]) for t in found["tables"]),
        ]
    )


def history_table(history: list[Any]) -> str:
    """The main figures, a row each; the newest runs to the right."""
    rows = []
    for name in MAIN:
        known = [entry for entry in history if name in entry["figures"]][-COLUMNS:]
        told = [f"{e['figures'][name]:g} ({e['date']}, {e['commit']})" for e in known]
        rows.append([name, *[""] * (COLUMNS - len(told)), *told])
    first = min(COLUMNS, min(sum(not cell for cell in row[1:]) for row in rows) + 1)
    headings = ["figure", *["before"] * (COLUMNS - first), "last"]
    return table(headings, [[row[0], *row[first:]] for row in rows])


def page(text: str, latest: dict[str, Any], history: list[Any]) -> str:
    """The page with every block between marks written anew."""

    def filled(match: re.Match[str]) -> str:
        name = match[1]
        made = history_table(history) if name == "history" else block(name, latest)
        return f"<!-- benchmarks: {name} -->\n\n{made}\n\n<!-- end of {name} -->"

    return re.sub(r"<!-- benchmarks: (\S+) -->.*?<!-- end of \1 -->", filled, text, flags=re.DOTALL)


def _read(path: Path, default: Any) -> Any:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else default


def write_page(run: Path) -> None:
    """Merge the figures of a run, if there are any, and write the page."""
    latest, history = _read(LATEST, {}), _read(HISTORY, [])
    if run.exists():
        merged(_read(run, {}), latest, history)
    LATEST.write_text(json.dumps(latest, indent=1) + "\n", encoding="utf-8")
    HISTORY.write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")
    text = page(PAGE.read_text(encoding="utf-8"), latest, history)
    PAGE.write_text(text, encoding="utf-8")
