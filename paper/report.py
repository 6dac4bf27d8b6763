"""The report of a reproduction, as a page of plain text, tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from emfed.artifacts import Page, Section, Table
from paper.config import Experiment
from paper.findings import Findings
from paper.verdicts import Verdict

Done = tuple[Experiment, Findings, Sequence[Verdict]]

_LEAD = (
    "Experiments on Federated Expectation Maximization with heterogeneity mitigation and variance "
    "reduction (Dieuleveut, Fort, Moulines, Robin, NeurIPS 2021), run with the emfed package.",
    "|h|² is the squared mean field: how far the statistics at the server are from a fixed point "
    "of EM. |H|² is the server's estimate of it, from compressed mini-batches. An epoch is as many "
    "conditional expectations as there are rows. Lines are medians over seeds, and bands hold "
    "90% of seeds; fewer than five seeds are drawn one by one. Bands of single measures hold all "
    "seeds. In our runs a worker computes T(S) itself, from the S it is sent: the paper's M-step "
    "is the server's alone. The updates are the same. S takes fewer bytes than T(S), and workers "
    "learn the pooled second moment by it.",
)


def report_page(
    done: Sequence[Done], missing: Sequence[str], facts: Mapping[str, str], holds: bool
) -> Page:
    """All experiments on one page, the verdicts first; ``missing`` says what is not there."""
    verdicts = [verdict for _, _, these in done for verdict in these]
    good = sum(verdict.holds for verdict in verdicts)
    text = [*_LEAD, f"{good} of {len(verdicts)} claims hold, each for every seed."]
    text += missing
    if any(experiment.quick for experiment, _, _ in done):
        text.append("This is the quick version. The sentences below describe the full one.")
    for experiment, _, _ in done:
        if experiment.source:
            text.append(
                f"{experiment.name} was run with a configuration of your own, {experiment.source}; "
                "title, sentences and claims are those of the original."
            )
        if experiment.extra:
            text.append(f"In the records, but in no figure: {', '.join(experiment.extra)}.")
    if not holds:
        text.append("Not everything came as expected.")
    several = len(done) > 1
    table = Table(
        "Verdicts. The value is the one, over seeds, that comes nearest to breaking the claim.",
        ("verdict", *(("experiment",) if several else ()), "claim", "value", "expected"),
        [
            (
                "holds" if v.holds else "fails",
                *((v.experiment,) if several else ()),
                v.name,
                number(v.value),
                v.expected,
            )
            for v in sorted(verdicts, key=lambda v: v.holds)  # those that fail come first
        ],
    )
    title = done[0][0].title if len(done) == 1 else "Experiments"
    return Page(f"emfed: {title}", text, facts, (table,), [_section(e, f) for e, f, _ in done])


def _section(experiment: Experiment, findings: Findings) -> Section:
    """One experiment: what was run, what it shows, figures, and folded settings and measures."""
    measures = Table(
        "Measures, over seeds",
        ("measure", "median", "lowest", "highest"),
        [
            (name, *(number(float(f(values))) for f in (np.median, np.min, np.max)))
            for name, values in findings.measures.items()
        ],
    )
    ours = () if experiment.paper else ("The paper has no such run: all settings are ours.",)
    return Section(
        experiment.title,
        (experiment.about, experiment.shows, *ours),
        list(findings.figures.values()),
        (*findings.tables, *_printed(experiment)),
        (measures, *_settings(experiment)),
        explorers=findings.explorers,
    )


def _settings(experiment: Experiment) -> list[Table]:
    """What all runs share, and what tells them apart; nothing that plays no role."""
    used = {run: settings.used for run, settings in experiment.runs.items()}
    keys = list(dict.fromkeys(key for these in used.values() for key in these))
    told = {key: {_shown(these.get(key)) for these in used.values()} for key in keys}
    shared = [key for key in keys if len(told[key]) == 1]
    tables = [
        Table(
            "Settings of all runs",
            ("setting", "value"),
            [("seeds", str(experiment.seeds)), *((key, *told[key]) for key in shared)],
        )
    ]
    own = [key for key in keys if key not in shared]
    if own:
        rows = [
            (run, *(_shown(these[key]) if key in these else "" for key in own))
            for run, these in used.items()
        ]
        tables.append(Table("Settings of each run", ("run", *own), rows))
    return tables


def _printed(experiment: Experiment) -> list[Table]:
    """What the paper prints beside what we run: which of our settings are guesses."""
    if not experiment.paper:
        return []
    rows = []
    for key, told in experiment.paper.items():
        if not isinstance(told, str):
            rows.append((key, *told))
            continue
        ours: dict[str, list[str]] = {}
        for run, settings in experiment.runs.items():
            if key in settings.used:  # what varies stands behind a comma of the run's name
                ours.setdefault(run.split(",")[0], []).append(_shown(settings.used[key]))
        each = {run: ", ".join(dict.fromkeys(values)) for run, values in ours.items()}
        alike = len(set(each.values())) == 1
        words = (
            next(iter(each.values())) if alike else "; ".join(f"{r}: {v}" for r, v in each.items())
        )
        rows.append((key, told, words))
    return [Table("What the paper prints, and what we run", ("setting", "the paper", "ours"), rows)]


def _shown(value: Any) -> str:
    if value is None:
        return "by default"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else str(value)


def number(value: float) -> str:
    """Two or three digits, as a reader wants them."""
    if not np.isfinite(value):
        return "never" if value > 0 else "none"
    return f"{value:.2e}" if value and not 0.01 <= abs(value) < 10_000 else f"{value:.3g}"
