"""``python -m benchmarks [SECTION ...] [--json FILE]``: every figure of the project, one thread.

docs/benchmarks.md says what each figure means; ``python -m benchmarks page`` writes into it what
was measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import polars
import scipy
import sklearn
from rich.console import Console
from rich.table import Table
from threadpoolctl import threadpool_info, threadpool_limits

import emfed
from benchmarks.ablation import bench_ablation
from benchmarks.answer import bench_answer, commit
from benchmarks.answer_network import bench_answer_network
from benchmarks.cluster import bench_cluster
from benchmarks.esteps import bench_esteps
from benchmarks.estimators import bench_pooled, bench_speed, bench_starts
from benchmarks.faults import bench_faults
from benchmarks.field_bounds import bench_field_bounds
from benchmarks.figure import EVERY, NATS, SET, bench_figure, bench_pairs
from benchmarks.files import bench_files
from benchmarks.gpu import bench_gpu
from benchmarks.hostile import bench_hostile
from benchmarks.house import GOALS, bench_house, places, write_table
from benchmarks.imputation import Kept, bench_imputation, bench_index, goals
from benchmarks.judging import bench_coverage, bench_doubts, bench_exchanges, bench_mistakes
from benchmarks.ledger import bench_mnist, bench_pays
from benchmarks.messages import bench_messages
from benchmarks.models import bench_models
from benchmarks.network import ANSWER, QUESTION, bench_network
from benchmarks.occupancy import bench_coverage_of_errors, bench_unmarked
from benchmarks.on_sums import bench_on_sums
from benchmarks.page import write_page
from benchmarks.privacy import EPSILONS, NONE, bench_audit, bench_privacy, bench_private_start
from benchmarks.processors import bench_processors
from benchmarks.right import bench_right
from benchmarks.rounds import bench_rounds
from benchmarks.scale import bench_scale
from benchmarks.sites import COLUMNS, ROUNDS, ROWS, bench_sites
from benchmarks.starts import (
    FEW_ROWS,
    bench_choice,
    bench_counts,
    bench_gaps,
    bench_k_means,
    bench_merged,
)
from benchmarks.startup import bench_startup
from benchmarks.theory import bench_theory

TABLES: list[dict[str, Any]] = []
"""What a section has shown, for the page."""


def show(console: Console, title: str, headings: Iterable[str], rows: Iterable[Any]) -> None:
    """A table; columns of words to the left, of numbers to the right."""
    headings, lines = list(headings), [[str(cell) for cell in row] for row in rows]
    TABLES.append({"title": title, "headings": headings, "rows": lines})
    table = Table(title=title)
    for position, heading in enumerate(headings):
        words = any(line[position][:1].isalpha() for line in lines)
        table.add_column(heading, justify="left" if words else "right")
    for line in lines:
        table.add_row(*line)
    console.print(table)


def startup(console: Console) -> dict[str, Any]:
    """New processes, until they have imported what they need."""
    found = bench_startup()
    lines = [(name, f"{one['wall']:.2f}", f"{one['processor']:.2f}") for name, one in found.items()]
    headings = ("what", "s", "s of a processor")
    show(console, "Seconds of a whole process, the best of several", headings, lines)
    return found


def speed(console: Console) -> dict[str, Any]:
    """Rounds beside the floor, full passes beside scikit-learn and pfl."""
    rounds, passes = bench_rounds(), bench_esteps()
    base = rounds["floor (numpy)"]
    lines = [
        (f"round, {name}", f"{1e3 * seconds:.2f}", f"{seconds / base:.2f}", "x the floor")
        for name, seconds in rounds.items()
    ]
    for kind, times in passes.items():
        ours = times["emfed"]
        for peer in (name for name in times if name != "emfed"):
            ratio = f"{times[peer] / ours:.2f}"
            lines.append((f"E+M pass, {kind}", f"{1e3 * ours:.1f}", ratio, f"x as fast as {peer}"))
    show(console, "Speed, best of many", ("what", "ms", "ratio", "to"), lines)
    return {"round_seconds": rounds, "pass_seconds": passes}


def scale(console: Console) -> list[dict[str, Any]]:
    """A million registered workers."""
    rows = bench_scale()
    base = rows[0]["round_seconds"]
    lines = [
        (
            f"{row['workers']:,}",
            f"{1e3 * row['round_seconds']:.1f}",
            f"{row['round_seconds'] / base:.2f}",
            f"{row['peak_bytes'] / 2**30:.2f}",
        )
        for row in rows
    ]
    headings = ("registered", "ms a round", "ratio", "peak GiB")
    show(console, "1,000 active workers of many", headings, lines)
    return rows


def cluster(console: Console) -> dict[str, Any]:
    """Two Ray actors beside one process."""
    found = bench_cluster()
    lines = [
        (
            name,
            f"{1e3 * row['median_seconds']:.0f}",
            f"{1e3 * row['best_seconds']:.0f}",
            f"{1e3 * row['processor_seconds']:.0f}",
            f"{row['peak_bytes'] / 2**20:.0f}",
            f"{row.get('own_bytes', 0) / 2**20:.0f}",
        )
        for name, row in ((name, found[name]) for name in ("stacked", "ray"))
    ]
    names = ("times", "best_seconds", "processor_seconds", "peak_bytes")
    lines.append(("ray / stacked", *(f"{found[f'ratio_of_{name}']:.2f}" for name in names), ""))
    headings = ("", "ms a round", "best", "processor ms", "peak MiB", "Ray's own")
    show(console, "10,000 workers: two Ray actors beside one process, stacked", headings, lines)
    return found


def files(console: Console) -> dict[str, Any]:
    """A file larger than the memory used."""
    row = bench_files(float(os.environ.get("EMFED_GIGABYTES", "10")))
    line = (
        f"{row['file_bytes'] / 1e9:.1f}",
        f"{row['rows']:,}",
        f"{row['pass_seconds']:.1f}",
        f"{row['seconds']:.0f}",
        f"{row['peak_bytes'] / 1e6:.0f}",
    )
    headings = ("GB", "rows", "s a round", "s in all", "peak MB")
    show(console, "A Parquet file, tied, K=10, 3 rounds", headings, [line])
    return row


def theory(console: Console) -> list[dict[str, Any]]:
    """Settled |h|^2 beside the formulas."""
    rows = bench_theory()
    lines = [
        (
            *(row[name] for name in ("step", "omega", "n", "p")),
            f"{row['measured']:.2e}",
            f"{row['to_formula']:.3f}",
            f"{row['to_exact']:.3f}",
        )
        for row in rows
    ]
    headings = ("gamma", "omega", "n", "p", "measured", "/ formula", "/ exact")
    show(console, "Where |h|² settles", headings, lines)
    return rows


def bytes_(console: Console) -> dict[str, Any]:
    """Encoded sizes, and MNIST to the pooled answer."""
    messages = bench_messages()
    lines: list[Any] = []
    for row in messages:
        numbers = (row["entropy"], row["entropy"] + row["scales"], row["encoded"], row["limit"])
        speeds = (row["encode_per_second"], row["decode_per_second"])
        lines.append(
            (
                row["run"],
                row["operator"],
                *(f"{value:.1f}" for value in numbers),
                *(f"{value:.0f}" for value in speeds),
            )
        )
    headings = ("run", "operator", "entropy", "+ scales", "encoded", "limit", "enc/s", "dec/s")
    show(console, "Bytes of a message: mean over each run", headings, lines)
    return {"messages": messages, "mnist": _mnist(console)}


def _mnist(console: Console) -> list[dict[str, Any]]:
    rows = bench_mnist(figure=Path("docs/mnist-bytes.png"))
    if not rows:
        console.print("No MNIST: set EMFED_DATA to a folder with mnist.npz (images, labels).")
    lines = []
    for row in rows:
        reached = row["rounds"] is not None
        lines.append(
            (
                row["run"],
                row["rounds"] if reached else "not reached",
                f"{row['payload_up_per_worker']:.0f}" if reached else "-",
                f"{row['payload_down_per_worker']:.0f}" if reached else "-",
                f"{row['gap_at_end']:.1e}",
            )
        )
    headings = ("run", "rounds", "bytes up", "bytes down", "gap at the end")
    show(console, "MNIST tied, 100 workers: to within 1e-3 nats of pooled EM", headings, lines)
    return rows


def imputation(
    console: Console, keep: Path | None = None, minutes: float = np.inf
) -> list[dict[str, Any]]:
    """Field counts beside additive GLM, softImpute and a low-rank Poisson fit; then the index."""
    rows, kept = [], Kept(keep, minutes)
    for row in bench_imputation(kept=kept):
        console.print(f"{row['table']}, {row['method']}: deviance {row['deviance']:.3f}")
        rows.append(row)
    names = ("rmse", "deviance", "totals", "cells", "trend")
    lines = [
        (
            row["table"],
            row["method"],
            *(f"{row[name]:.3f}" if name in row else "-" for name in names),
            f"{row['seconds']:.0f}" if "seconds" in row else "-",
            f"{row['bytes_up_per_worker'] / 1000:.2f}" if "seconds" in row else "-",
        )
        for row in rows
    ]
    headings = ("table", "method", "RMSE", "deviance", "totals", "cells", "trend", "s", "kB")
    title = "Held-out counts: errors, ratio of totals, coverage of 90% bounds"
    show(console, title, headings, lines)
    words = ("missed", "held")
    lines = [
        (
            goal["table"],
            f"{goal['deviance']:.3f} of {goal['best']}'s",
            f"{goal['totals']:.3f} ({goal['totals_error']:.3f})",
            f"{goal['cells']:.3f} ({goal['cells_error']:.3f})",
            ", ".join(words[held] for held in goal["holds"]),
        )
        for goal in goals(rows)
    ]
    title = (
        "Goals: deviance at most 1.03 of the best peer's, totals within 5%, cells within 3 points"
    )
    headings = ("table", "deviance", "totals", "cells", "in turn")
    show(console, f"{title}, beside two standard errors (in brackets: one)", headings, lines)
    if (Path(os.environ.get("EMFED_DATA", "")) / "bbs_wood_thrush.csv.gz").exists():
        index = list(bench_index(kept=kept))
        lines = []
        for masked in dict.fromkeys(row["masked"] for row in index):
            own = [row for row in index if row["masked"] == masked]
            means = (np.mean([row[k] for row in own]) for k in ("error", "additive", "covered"))
            covered = [row["covered"] for row in own]
            error = np.std(covered, ddof=1) / len(own) ** 0.5 if len(own) > 1 else np.nan
            lines.append((masked, len(own), *(f"{m:.3f}" for m in means), f"{error:.3f}"))
        headings = ("masked", "tables", "error", "additive", "covered", "its s.e.")
        show(console, "Yearly index of complete series, 60% masked; 90% bounds", headings, lines)
        rows += index
    return rows


def field_bounds(
    console: Console, keep: Path | None = None, minutes: float = np.inf, part: str = "1/1"
) -> list[dict[str, Any]]:
    """Coverage of bounds on simulated tables, every family: 500 tables each, hours in all."""
    rows = list(bench_field_bounds(keep=keep, minutes=minutes, part=part))
    levels = [name for name in rows[0] if name.endswith("%")] if rows else []
    lines = [
        (
            row["kind"],
            row["of"],
            row["tables"],
            *(f"{row[level]:.3f}" for level in levels),
            f"{row['error']:.3f}",
            "yes" if row["holds"] else "no",
        )
        for row in rows
    ]
    headings = ("table", "bounds of", "tables", *levels, "largest s.e.", "within 3 points + 2 s.e.")
    show(console, "How often bounds hold the true mean", headings, lines)
    return rows


def occupancy(console: Console) -> dict[str, Any]:
    """Presence and detection beside unmarked, where R is at hand, and known parameters."""
    beside, known = bench_unmarked(), bench_coverage_of_errors()
    if "left out" in beside:
        console.print(f"The comparison with unmarked is left out: {beside['left out']}.")
    else:
        mine, its = beside["log-likelihood"]
        title = f"Crossbills, {beside['places']} places: log-likelihood {mine:.4f}, "
        heads = ("name", "emfed", "error", "unmarked", "its error")
        lines = [(r["name"], *(f"{r[k]:.4f}" for k in heads[1:])) for r in beside["rows"]]
        show(console, f"{title}of unmarked {beside['unmarked']} {its:.4f}", heads, lines)
    heads = tuple(known[0])
    lines = [(r["name"], *(f"{r[k]:.3f}" for k in heads[1:])) for r in known]
    show(console, "Simulated, 200 tables of 400 places", heads, lines)
    return {"unmarked": beside, "known": known}


def models(console: Console) -> dict[str, Any]:
    """A full pass of each model beside its counterpart."""
    found = bench_models()
    lines = []
    for name, times in found.items():
        ours, other = times["emfed"], next(n for n in times if n != "emfed")
        lines.append(
            (
                name,
                f"{1e3 * ours:.1f}",
                other,
                f"{1e3 * times[other]:.1f}",
                f"{times[other] / ours:.2f}",
            )
        )
    headings = ("model", "emfed, ms", "counterpart", "its ms", "times as fast")
    show(console, "A full pass of each model, one thread", headings, lines)
    return found


def house(console: Console) -> dict[str, Any]:
    """The source in figures, into CONTRIBUTING.md; what they are about is listed."""
    found = bench_house()
    lines = [(name, value, GOALS[name]) for name, value in found.items()]
    show(console, "The house", ("what", "now", "goal"), lines)
    write_table(found)
    for line in places():
        console.print(line, highlight=False)
    return found


def privacy(console: Console, keep: Path | None = None, minutes: float = np.inf) -> dict[str, Any]:
    """Held-out nats against epsilon, beside two peers and no privacy; then an audit."""
    began = time.monotonic()
    rows = bench_privacy(keep=keep, minutes=minutes)
    left = minutes - (time.monotonic() - began) / 60
    found = {(row["data"], row["method"]): row for row in rows}
    lines = []
    for name, method in itertools.product(
        dict.fromkeys(row["data"] for row in rows), ("", "diag ", "DP-EM ", "pfl ")
    ):
        told = [found.get((name, f"{method}{epsilon:g}")) for epsilon in EPSILONS]
        shown = [*told, found.get((name, NONE))]
        cells = [
            "" if row is None or row["nats"] is None else f"{row['nats']:.3f} ({row['seeds']})"
            for row in shown
        ]
        lines.append((name, method.strip() or "private", *cells))
    headings = ("data", "fit", *(f"epsilon {epsilon:g}" for epsilon in EPSILONS), "none")
    show(console, "Held-out nats a row: median (seeds)", headings, lines)
    audit = bench_audit(keep=keep, minutes=left)
    words = (
        "{proven:.2f} of {promised:g} proven at delta {delta:g}, of {runs:g} runs; evidence of mu "
        "{mu_seen:.3f} of {mu_promised:.3f}"
    )
    console.print(f"audit, epsilon: {words.format(**audit) if 'proven' in audit else audit}")
    return {"nats": rows, "audit": audit}


def private_start(console: Console) -> list[dict[str, Any]]:
    """What a private fit loses in its start, and what in its rounds."""
    rows = []
    for row in bench_private_start(seeds=int(os.environ.get("EMFED_SEEDS", "3"))):
        rows.append(row)
        console.print(row)
    names = [name for name in rows[0] if name not in ("data", "seed")]
    medians = [(name, f"{float(np.median([row[name] for row in rows])):.3f}") for name in names]
    title = f"MNIST, tied, epsilon 0.3: held-out nats a row, medians of {len(rows)} seeds"
    show(console, title, ("where", "nats"), medians)
    return rows


def on_sums(console: Console) -> list[dict[str, Any]]:
    """How the fit on sums ends, beside the best of five starts of scikit-learn."""
    rows = list(bench_on_sums(seeds=int(os.environ.get("EMFED_SEEDS", "2"))))
    headings = ("table", "model", "moves", "nats", "scikit-learn", "rounds", "kB", "seconds")
    lines = [
        (
            row["table"],
            row["model"],
            row["moves"],
            f"{row['log_likelihood']:.3f}",
            f"{row['sklearn']:.3f}",
            f"{row['rounds']:g}",
            f"{row['kilobytes']:.1f}",
            f"{row['seconds']:.2f}",
        )
        for row in rows
    ]
    show(console, "The fit on sums, beside scikit-learn", headings, lines)
    return rows


def processors(console: Console) -> list[dict[str, Any]]:
    """Whether members with other linear algebra follow one fit."""
    rows = list(bench_processors())
    lines = [
        (
            r["processor"],
            r["fits"],
            r["sums"],
            r["compared_again"],
            ", ".join(r["parted"]) or "none",
        )
        for r in rows
    ]
    headings = ("kernels of", "fits", "sums", "compared again", "parted")
    show(console, "The sums of masked fits, followed by other processors", headings, lines)
    return rows


def right(console: Console) -> list[dict[str, Any]]:
    """How the default ends on tables that nobody tuned on, beside EM from the same start."""
    rows = []
    for row in bench_right(seeds=int(os.environ.get("EMFED_SEEDS", "5"))):
        rows.append(row)
        console.print(f"{row['table']} {row['model']}: {row['within_1e-3']} of {row['runs']}")
    headings = (
        "table",
        "model",
        "within 1e-3",
        "largest gap",
        "worse",
        "crashed",
        "false",
        "rounds",
    )
    lines = [
        (
            row["table"],
            row["model"],
            f"{row['within_1e-3']} of {row['runs']}",
            f"{row['largest_gap']:.1e}",
            row["worse_than_start"],
            row["crashed"],
            row["falsely_converged"],
            f"{row['rounds']:g}",
        )
        for row in rows
    ]
    done = sum(row["within_1e-3"] for row in rows), sum(row["runs"] for row in rows)
    title = f"The default beside EM from the same start, K=4: {done[0]} of {done[1]} within 1e-3"
    show(console, title, headings, lines)
    return rows


def hostile(
    console: Console, keep: Path | None = None, minutes: float = np.inf
) -> list[dict[str, Any]]:
    """How the default ends on tables made to go wrong, by model, beside EM from the same start."""
    rows = list(bench_hostile(keep=keep, minutes=minutes))
    fitted = [row for row in rows if "gap" in row]
    near, false = ([row for row in fitted if wanted(row)] for wanted in (_near, _false))
    worse = [row for row in fitted if row["gained"] < -1e-9]
    crashed = [row for row in rows if "crash" in row]
    lines = []
    for kind in dict.fromkeys(row["model"] for row in rows):
        own = [row for row in fitted if row["model"] == kind]
        rounds, gaps = ([row[name] for row in own] for name in ("rounds", "gap"))
        lines.append(
            (
                kind,
                len(own),
                sum(map(_near, own)),
                f"{max(gaps, default=np.nan):.1e}",
                sum(gap < -1e-3 for gap in gaps),
                sum(row["converged"] for row in own),
                f"{np.median(rounds) if rounds else np.nan:.0f}",
            )
        )
    title = (
        f"{len(near)} of {len(fitted)} fits on hostile tables within 1e-3 of EM; {len(crashed)} "
        f"crashes, {len(worse)} worse than the start, {len(false)} false claims, "
        f"{len(rows) - len(fitted) - len(crashed)} refused"
    )
    headings = ("model", "fits", "within 1e-3", "largest gap", "above EM", "converged", "rounds")
    show(console, title, headings, lines)
    for row in (r for r in rows if r not in near or r in false or r in worse):
        console.print(row)
    return rows


def _near(row: dict[str, Any]) -> bool:
    return bool(row["gap"] <= 1e-3)


def _false(row: dict[str, Any]) -> bool:
    return bool(row["converged"] and row["more"] > 1e-3)


def k_means(console: Console) -> list[dict[str, Any]]:
    """Inertia of k-means by workers beside scikit-learn's."""
    rows = list(bench_k_means())
    lines = [
        (
            row["data"],
            row["k"],
            " ".join(f"{ratio:.3f}" for ratio in row["ratios"]),
            f"{row['one start']:.3f}",
            f"{row['rounds']:.0f}",
            f"{row['bytes']:.1f}",
        )
        for row in rows
    ]
    every = [ratio for row in rows for ratio in row["ratios"]]
    title = (
        f"Inertia of {len(every)} k-means by workers over the best of five starts of scikit-learn: "
        f"median {np.median(every):.3f}, above 1.05 in {sum(r > 1.05 for r in every)}, at most "
        f"{max(every):.2f}"
    )
    headings = ("data", "K", "each seed", "sklearn, one start", "rounds", "x raw bytes")
    show(console, title, headings, lines)
    return rows


def counts(console: Console, *given: Any) -> list[dict[str, Any]]:
    """Crashes, run-aways and false claims of convergence over every table, type and number."""
    rows, lines = list(bench_counts(*given)), []
    named = {(row["data"], row["covariance"]): row for row in rows}
    for name, kind in sorted(named):
        cases = [row for row in rows if (row["data"], row["covariance"]) == (name, kind)]
        fine = [row for row in cases if not row["crash"]]
        gaps, rounds, sizes = ([row[n] for row in fine] for n in ("gap", "rounds", "bytes"))
        lines.append(
            (
                name,
                kind,
                len(cases),
                len(cases) - len(fine),
                *(sum(row[n] for row in fine) for n in ("away", "false", "converged")),
                f"{np.median(gaps):+.3f}" if fine else "",
                f"{max(gaps):+.3f}" if fine else "",
                f"{np.median(rounds):.0f}" if fine else "",
                f"{np.median(sizes):.1f}" if fine else "",
            )
        )
    fine = [row for row in rows if not row["crash"]]
    crashed, away, false = ([row for row in rows if row.get(n)] for n in ("crash", "away", "false"))
    title = (
        f"{len(rows)} fits by workers: {len(crashed)} crashes, {len(away)} run-aways, {len(false)} "
        f"false claims; rounds {np.median([row['rounds'] for row in fine]):.0f}, bytes "
        f"{np.median([row['bytes'] for row in fine]):.1f} times the raw rows (medians)"
    )
    heads = ("data", "type", "fits", "crashes", "away", "false", "converged")
    show(console, title, (*heads, "gap", "largest", "rounds", "x raw bytes"), lines)
    show(console, "Nats a row below the best of five starts", GAP_HEADS, _gap_lines(fine))
    for row in (*crashed, *away, *false):
        console.print({name: row[name] for name in row if name != "rounds"})
    return rows


CHOOSERS = ("workers", "alone", "sklearn")
"""Who chooses a number of components, beside scikit-learn."""
GAP_HEADS = (
    "variance at the floor",
    "fits",
    "median",
    "above 0.05",
    "below -0.05",
    "largest",
    "where",
)


def _gap_lines(fine: list[dict[str, Any]]) -> list[Any]:
    """Gaps by who ended at the floor: there the likelihood is whatever the floor makes it."""
    lines = []
    ends = {
        "nobody's": ("", False),
        "nobody's; sklearn's has a component of 1 or 2 rows": ("", True),
        "ours": ("ours", None),
        "sklearn": ("sklearn", None),
        "both": ("both", None),
    }
    for name, (flat, thin) in ends.items():
        own = [row for row in fine if row["flat"] == flat and thin in (None, row["thin"])]
        if not own:
            continue
        gaps, worst = np.array([row["gap"] for row in own]), max(own, key=lambda row: row["gap"])
        lines.append(
            (
                name,
                len(own),
                f"{np.median(gaps):+.4f}",
                f"{(gaps > 0.05).mean():.0%}",
                f"{(gaps < -0.05).mean():.0%}",
                f"{worst['gap']:+.3f}",
                ", ".join(str(worst[n]) for n in ("data", "covariance", "k", "seed")),
            )
        )
    return lines


def estimators(
    console: Console, keep: Path | None = None, minutes: float = np.inf
) -> dict[str, Any]:
    """The estimators beside scikit-learn: how fits end, speed from one start, starts, quality."""
    ends = counts(console, tuple(range(2, 9)), 5, FEW_ROWS, keep, minutes)
    if minutes < np.inf:  # the rest wants the whole of it
        return {"ends": ends}
    fits = bench_speed()
    lines: list[Any] = [
        (
            row["data"],
            row["covariance"],
            *(
                f"{row[name]['seconds']:.2f} ({row[name]['rounds']})"
                for name in ("sklearn", "emfed")
            ),
            f"{row['sklearn']['seconds'] / row['emfed']['seconds']:.2f}",
            f"{1e3 * (row['emfed']['log_likelihood'] - row['sklearn']['log_likelihood']):+.2f}",
        )
        for row in fits
    ]
    title = "One start, 70,000 x 20, K=10: seconds (rounds), and millinats above scikit-learn"
    headings = ("data", "type", "sklearn", "emfed", "times as fast", "above")
    show(console, title, headings, lines)
    starts = bench_starts()
    lines = [
        (
            row["data"],
            row["covariance"],
            row["n_init"],
            f"{row['sklearn']:.3f}",
            f"{1e3 * (row['alone'] - row['sklearn']):+.1f}",
            f"{1e3 * (row['8 workers'] - row['sklearn']):+.1f}",
        )
        for row in starts
    ]
    headings = ("data", "type", "n_init", "sklearn", "alone", "8 workers")
    show(console, "Where EM ends, median of 10: nats, and millinats above", headings, lines)
    pooled = bench_pooled()
    lines = [
        (
            row["data"] + (" *" if row["held_out"] else ""),
            row["covariance"],
            row["workers"],
            f"{row['within_1e-3']} of {row['runs']}",
            f"{row['largest_gap']:.4f}",
            row["rounds"],
        )
        for row in pooled
    ]
    headings = ("data", "type", "workers", "within 1e-3", "largest gap", "rounds")
    title = "The default beside pooled EM from the same start (*: on no table was a setting chosen)"
    show(console, title, headings, lines)
    return {"ends": ends, "speed": fits, "starts": starts, "pooled": pooled}


def pays(console: Console) -> list[dict[str, Any]]:
    """What a fit sends beside the size of the rows."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", emfed.EmfedWarning)
        rows = bench_pays()
    names = ("3", "1:6", "3, moves=0")
    lines = [
        (
            row["rows"],
            f"{row['raw'] / 1e3:.1f} kB",
            *(f"{row[n] / 1e3:.0f} kB, {row[n] / row['raw']:.2g} times" for n in names),
        )
        for row in rows
    ]
    heads = ("rows of a site", "raw", *(f"n_components={name}" for name in names))
    show(console, "All bytes of ten sites, median of three seeds", heads, lines)
    return rows


def starts(console: Console) -> dict[str, Any]:
    """Where default starts lead, and which number of components a range chooses."""
    gaps = list(bench_gaps())
    lines: list[Any] = [
        (
            row["data"],
            row["covariance"],
            *(f"{row[name]:.4f}" for name in ("sklearn, one start", "alone", "workers", "fits")),
            f"{row['bytes up']:.0f} / {row['bytes down']:.0f}",
        )
        for row in gaps
    ]
    middle = {name: np.median([row[name] for row in gaps]) for name in ("alone", "workers", "fits")}
    title = (
        f"Nats below the best of five starts of scikit-learn, median of seeds; of tables "
        f"{middle['alone']:.4f} alone, {middle['workers']:.4f} by workers; whole fits by workers "
        f"{middle['fits']:.4f}"
    )
    headings = ("data", "type", "sklearn, one", "alone", "workers", "fits", "start: up / down")
    show(console, title, headings, lines)
    choices = list(bench_choice())
    names = [f"{who} {how}" for how in ("same", "as good") for who in CHOOSERS]
    lines = [
        (
            row["data"],
            row["covariance"],
            *(" ".join(map(str, row[name])) for name in ("ours", "sklearn")),
            "floor" if row["flat"] else "",
            *(f"{row[name]:.2f}" for name in names),
            *(f"{row[name]:+.1f}" for name in ("bic above", "alone above")),
            f"{row['bytes up']:.0f}",
        )
        for row in choices
    ]
    for rows in (choices, [row for row in choices if not row["flat"]]):
        means = [f"{np.mean([row[name] for row in rows]):.2f}" for name in names]
        above = [[row[name] for row in rows] for name in ("bic above", "alone above")]
        middle = [f"{np.mean(own):+.1f} ({np.median(own):+.1f})" for own in above]
        lines.append((f"{len(rows)} cases", "", "", "", "", *means, *middle, ""))
    title = (
        "K of 1:8 by BIC beside scikit-learn's: how often the same; the same, or BIC lower; BIC "
        "above its mean (last lines: all cases, and those without a variance at the floor; medians)"
    )
    headings = ("data", "type", "ours", "sklearn", "at the", *(2 * ["workers", "alone", "itself"]))
    show(console, title, (*headings, "BIC above", "alone", "up"), lines)
    return {"gaps": gaps, "choices": choices}


def merged(console: Console) -> list[dict[str, Any]]:
    """Merged starts beside those from buckets, where workers are many."""
    if not os.environ.get("EMFED_DATA"):
        console.print("Merged starts: set EMFED_DATA to the folder of real data.")
        return []
    chosen, rows = tuple(filter(None, os.environ.get("EMFED_SETS", "").split(";"))), []
    for row in bench_merged(chosen, int(os.environ.get("EMFED_SEEDS", "5"))):
        rows.append(row)
        console.print(row)
    lines = [
        (
            row["set"],
            row["start"],
            f"{row['median']:.4f}",
            " ".join(f"{gap:.3f}" for gap in row["below the best"]),
            *(f"{row[name]:.0f}" for name in ("rounds", "up", "down")),
        )
        for row in rows
    ]
    headings = ("set", "start", "median", "each seed", "EM rounds", "up", "down")
    show(console, "Nats below the best, where EM ends; bytes of the start", headings, lines)
    return rows


def answer(
    console: Console, keep: Path | None = None, minutes: float = np.inf
) -> list[dict[str, Any]]:
    """Bytes to the pooled answer, beside uncompressed federated EM."""
    if not os.environ.get("EMFED_DATA"):
        console.print("Bytes to the pooled answer: set EMFED_DATA to the folder of real data.")
        return []

    def told(found: dict[str, Any]) -> tuple[str, str]:
        if found["rounds"] is None:
            return "-", "-"
        return f"{found['rounds']:g}", f"{found['up']:,.0f} / {found['down']:,.0f}"

    rows, lines = [], []
    chosen = tuple(filter(None, os.environ.get("EMFED_SETS", "").split(";")))
    seeds = int(os.environ.get("EMFED_SEEDS", "5"))
    for row in bench_answer(chosen, seeds, keep, minutes):
        rows.append(row)
        for nats in ("0.001", "1e-05"):
            found = row[nats]
            lines.append(
                (
                    row["set"],
                    row["workers"],
                    nats,
                    *told(found["float32"]),
                    *told(found),
                    f"{found['runs']} of {row['seeds']}",
                    " ".join("-" if one is None else str(one) for one in found["each"]),
                    max(row["guard_hits"], default=0),
                    f"{row['opening']:,.0f} + {row['envelope']:.0f} a round",
                )
            )
        console.print(f"{row['set']}: done, commit {', '.join(row['commits'])}")
    ours = ("rounds", "auto", "runs", "each seed", "guard", "more")
    headings = ("set", "n", "nats", "rounds", "float32", *ours)
    title = "Bytes up / down a worker until the pooled answer is kept (medians of seeds)"
    show(console, title, headings, lines)
    return rows


def ablation(console: Console) -> list[dict[str, Any]]:
    """Many workers: every mechanism off in turn, beside FedEM at its best step."""
    rows = list(bench_ablation(seeds=int(os.environ.get("EMFED_SEEDS", "3"))))
    counts = ("rounds", "up", "down", "all", "all up", "all down")
    lines = [
        (row["table"], row["without"], *(f"{row[k]:,.0f}" for k in counts), f"{row['worst']:.4f}")
        for row in rows
    ]
    headings = ("table", "without", *counts, "worst below")
    show(console, "Rounds and bytes a worker to 1e-3 nats of the end, and in all", headings, lines)
    return rows


def answer_network(
    console: Console, keep: Path | None = None, minutes: float = np.inf
) -> list[dict[str, Any]]:
    """All bytes to the pooled answer over TLS, counted by a proxy."""
    if not os.environ.get("EMFED_DATA"):
        console.print("Bytes over the wire: set EMFED_DATA to the folder of real data.")
        return []
    chosen = tuple(filter(None, os.environ.get("EMFED_SETS", "").split(";")))
    rows = []
    seeds = int(os.environ.get("EMFED_SEEDS", "5"))
    for row in bench_answer_network(chosen, seeds, keep, minutes):
        rows.append(row)
        console.print(
            {k: round(v) if isinstance(v, float) and v > 1 else v for k, v in row.items()}
        )
    names = ("opening", "start", "rounds", "envelopes", "ledger", "transport", "wire")
    others = ("float32", "bound")
    headings = ("within", "way", "runs", "no.", *names, *others)

    def told(row: dict[str, Any], name: str) -> str:
        value = row.get({"within": "nats", "no.": "number"}.get(name, name))
        if value is None:
            return "-"
        return f"{value:,.0f}" if isinstance(value, float) and name != "within" else str(value)

    for chosen_set in dict.fromkeys(row["set"] for row in rows):
        own = [row for row in rows if row["set"] == chosen_set]
        lines = [tuple(told(row, name) for name in headings) for row in own]
        after = {row["nats"]: row["float32 rounds"] for row in own if row["float32 rounds"]}
        made = ", ".join(own[0]["commits"])
        title = f"{chosen_set}: bytes a worker, medians; float32 EM takes rounds {after} ({made})"
        show(console, title, headings, lines)
    return rows


def figure(
    console: Console, keep: Path | None = None, minutes: float = np.inf
) -> list[dict[str, Any]]:
    """README's figure: all bytes until the pooled answer, from knowing nothing."""
    began = time.monotonic()
    rows = bench_figure(keep, minutes)
    if not rows:
        console.print("README's figure: set EMFED_DATA to the folder of real data.")
    lines = [
        (
            row["run"],
            row["rounds"] or "-",
            *("-" if row[way] is None else f"{row[way]:,.0f}" for way in ("up", "down")),
            " ".join(str(one or "-") for one in row.get("each", ())),
        )
        for row in rows
    ]
    title = f"{SET}: bytes of a worker until within {NATS:g} nats of pooled EM, median of seeds"
    show(console, title, ("run", "rounds", "up", "down", "rounds of each seed"), lines)
    if pairs := bench_pairs(keep, minutes - (time.monotonic() - began) / 60):
        show_pairs(console, pairs)
    return rows


def show_pairs(console: Console, pairs: list[dict[str, Any]]) -> None:
    """Rounds from one start with masks and without."""
    words = [
        (
            *(row["seed"], row["start"], f"{row['pooled']:.4f}", row["pooled rounds"]),
            *(found or "-" for found in (*row["plain"], *row["masked"])),
            *(f"{row[f'{name} ends']:+.4f}" for name in ("plain", "masked")),
        )
        for row in pairs
    ]
    rounds = ("1e-3", "1e-5", "masked 1e-3", "masked 1e-5")
    headings = ("seed", "start of", "pooled EM", "its rounds", *rounds, "ends", "masked ends")
    show(console, f"{SET}, every {EVERY}th row: rounds from the same start", headings, words)


def network(console: Console, quick: bool = False) -> dict[str, Any]:
    """The default engine: rounds, bytes, a thousand connections; beside gRPC."""
    found = bench_network(quick)
    headings = ("engine", "sites", "ms", "up", "down", "connecting up", "down")
    names = ("milliseconds", "up", "down", "opening_up", "opening_down")
    lines: list[Any] = [
        (row["engine"], row["sites"], *(f"{row[name]:.1f}" for name in names))
        for row in found["carrying"]
    ]
    title = f"Nothing computed; {QUESTION} bytes down and {ANSWER} up are on the wire as"
    show(console, title, headings, lines)
    names = ("milliseconds", "beside", "up", "wire_up", "down", "wire_down")
    headings = ("sites", "ms", "besides passes", "up", "on the wire", "down", "on the wire")
    lines = [
        (
            f"{row['sites']}{', masked' * row['masks']}"
            f"{', round trips of 100 ms' * bool(row['delay'])}",
            *(f"{row[name]:.1f}" for name in names),
            f"{row['ratio']:.2f}" if row["masks"] else "",
        )
        for row in found["fitting"]
    ]
    title = "A round of a fit, q=660; bytes of one site a round"
    show(console, title, (*headings, "times plain"), lines)
    names = ("mask and tag", "open and check", "a site", "relay adds")
    lines = [
        (row["sites"], row["numbers"], *(f"{row[name]:.2f}" for name in names), row["bytes"])
        for row in found["masks"]
    ]
    headings = ("sites", "numbers", *names, "bytes")
    show(console, "Masks and tags: ms of a processor a round", headings, lines)
    headings = ("engine", "sites", "MB", "connecting, s", "a round, ms")
    names = ("megabytes", "connecting", "milliseconds")
    lines = [
        (row["engine"], row["sites"], *(f"{row[name]:.1f}" for name in names))
        for row in found["crowd"]
    ]
    show(console, "Many connections: memory of the server", headings, lines)
    return found


def sites(console: Console, number: int = 50) -> dict[str, Any]:
    """Real sites on this machine: time a round and memory of each."""
    found = bench_sites(number)
    lines = [
        (who, *(f"{found[key][what]:.3f}" for what in ("resident", "most", "share")))
        for who, key in (("largest site", "site"), ("median site", "median_site"))
    ]
    lines.append(("server", *(f"{found['server'][what]:.3f}" for what in found["server"])))
    title = f"{number} real sites, masked, {ROWS} rows of {COLUMNS} columns: memory in GB"
    show(console, title, ("process", "resident", "at most", "own share"), lines)
    told = (
        f"{found['round_seconds']:.2f}",
        f"{found['seconds']:.0f}",
        f"{found['ended_well']} of {number}",
        f"{found['difference']:.1e}",
    )
    headings = ("a round, s", "in all, s", "ended with code 0", "difference")
    show(console, f"{ROUNDS} rounds, from the first start of Python", headings, [told])
    return found


def faults(
    console: Console,
    plans: int,
    first: int = 0,
    masks: bool = False,
    keep: Path | None = None,
    minutes: float = np.inf,
) -> dict[str, Any]:
    """Random faults of network, processes and disks, without masks and with them."""
    found = {
        words: bench_faults(plans, first, words == "masked", keep, minutes)
        for words in (("masked",) if masks else ("plain", "masked"))
    }
    lines = [
        (
            name,
            *(
                f"{value:.3g}" if isinstance(value := one[name], float) else str(value or 0)
                for one in found.values()
            ),
        )
        for name in found["masked"]
    ]
    show(console, "Fault plans of whole fits, in virtual time", ("what", *found), lines)
    return found


def coverage(console: Console) -> list[dict[str, Any]]:
    """How often 95% bounds cover the truth."""
    rows = list(bench_coverage())
    lines = [
        (row["world"], ", ".join(f"{kind} {rate:.1%}" for kind, rate in row["coverage"].items()))
        for row in rows
    ]
    title = f"Coverage of 95% bounds, {rows[0]['repeats']} tables of {rows[0]['rows']} rows"
    show(console, title, ("model", "by kind of parameter"), lines)
    return rows


def mistakes(console: Console) -> list[dict[str, Any]]:
    """Which mistakes a site is warned of."""
    rows = list(bench_mistakes())
    lines = [(row["table"], row["columns"], row["false"]) for row in rows]
    show(console, "Warnings without a mistake", ("table", "columns", "warnings"), lines)
    total = {
        what: np.sum([row["found"][what] for row in rows], axis=0) for what in rows[0]["found"]
    }
    found = [
        (what, n, f"{warned / n:.0%}", f"{right / n:.0%}")
        for what, (n, warned, right) in total.items()
    ]
    show(console, "Columns spoilt, one at a time", ("mistake", "columns", "warned", "named"), found)
    exchanges = list(bench_exchanges())
    heads = ("table", "tries", "false", "found", "wrong")
    lines = [tuple(row[name] for name in heads) for row in exchanges]
    total = tuple(sum(row[name] for row in exchanges) for name in heads[1:])
    show(console, "Two columns exchanged at one of five sites", heads, [*lines, ("all", *total)])
    return rows + exchanges


def doubts(console: Console) -> list[dict[str, Any]]:
    """False alarms of sites about ordinary tables."""
    rows = list(bench_doubts())
    lines = [(row["table"], row["designs"], row["warned"]) for row in rows]
    total = ("all", *(sum(row[name] for row in rows) for name in ("designs", "warned")))
    heads = ("table", "ways to cut it into sites", "with a false alarm")
    show(console, "Sites that doubt without a reason", heads, [*lines, total])
    return rows


SECTIONS: dict[str, Callable[[Console], Any]] = {
    "startup": startup,
    "speed": speed,
    "models": models,
    "bytes": bytes_,
    "scale": scale,
    "cluster": cluster,
    "files": files,
    "theory": theory,
    "imputation": imputation,
    "field-bounds": field_bounds,
    "occupancy": occupancy,
    "estimators": estimators,
    "ends": lambda console: counts(console, (2, 4, 8), 1, 1000),
    "on-sums": on_sums,
    "processors": processors,
    "right": right,
    "ablation": ablation,
    "hostile": hostile,
    "k-means": k_means,
    "privacy": privacy,
    "private-start": private_start,
    "starts": starts,
    "pays": pays,
    "merged": merged,
    "coverage": coverage,
    "mistakes": mistakes,
    "doubts": doubts,
    "house": house,
    "figure": figure,
    "answer": answer,
    "answer-network": answer_network,
    "network": network,
    "sites": sites,
    "faults": partial(faults, plans=1000),
    "gpu": lambda console: bench_gpu(),
}


def machine() -> dict[str, Any]:
    """What the figures were measured on."""
    model = platform.processor() or platform.machine()
    described = Path("/proc/cpuinfo")
    if described.exists():
        names = [x for x in described.read_text().splitlines() if x.startswith("model name")]
        model = names[0].split(":", 1)[1].strip() if names else model
    blas = {pool["internal_api"]: pool.get("version") for pool in threadpool_info()}
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit(),
        "load": round(os.getloadavg()[0], 1),
        "processor": model,
        "cores": os.cpu_count(),
        "system": platform.platform(),
        "python": platform.python_version(),
        "emfed": emfed.__version__,
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "polars": polars.__version__,
        "scikit-learn": sklearn.__version__,
        "blas": blas,
        "threads": 1,
    }


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    words = f"{', '.join(SECTIONS)}; all if none; or page"
    parser.add_argument("section", nargs="*", help=words)
    parser.add_argument("--json", type=Path, help="write the figures to this file too")
    parser.add_argument("--plans", type=int, default=1000, help="fault plans to try")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first fault plan")
    parser.add_argument("--masks", action="store_true", help="fault plans of masked runs alone")
    parser.add_argument("--sites", type=int, default=50, help="real sites to start")
    parser.add_argument("--keep", type=Path, help="a file of what was run, to go on from")
    parser.add_argument("--minutes", type=float, default=np.inf, help="begin no run later")
    parser.add_argument("--quick", action="store_true", help="see whether `network` runs")
    parser.add_argument("--part", default="1/1", help="1/2: the first half of tables of two")
    arguments = parser.parse_args()
    if arguments.section == ["page"]:
        return write_page(arguments.json or Path("build/benchmarks.json"))
    if arguments.section == ["answer", "network"]:
        arguments.section = ["answer-network"]
    unknown = set(arguments.section) - set(SECTIONS)
    if unknown:
        parser.error(f"no section {', '.join(sorted(unknown))}; there are {', '.join(SECTIONS)}")
    sections = SECTIONS | {
        "faults": partial(
            faults,
            plans=arguments.plans,
            first=arguments.first,
            masks=arguments.masks,
            keep=arguments.keep,
            minutes=arguments.minutes,
        ),
        "network": partial(network, quick=arguments.quick),
        "sites": partial(sites, number=arguments.sites),
        "estimators": partial(estimators, keep=arguments.keep, minutes=arguments.minutes),
        "hostile": partial(hostile, keep=arguments.keep, minutes=arguments.minutes),
        "privacy": partial(privacy, keep=arguments.keep, minutes=arguments.minutes),
        "figure": partial(figure, keep=arguments.keep, minutes=arguments.minutes),
        "answer": partial(answer, keep=arguments.keep, minutes=arguments.minutes),
        "answer-network": partial(answer_network, keep=arguments.keep, minutes=arguments.minutes),
        "imputation": partial(imputation, keep=arguments.keep, minutes=arguments.minutes),
        "field-bounds": partial(
            field_bounds, keep=arguments.keep, minutes=arguments.minutes, part=arguments.part
        ),
    }
    console = Console(width=110)
    figures: dict[str, Any] = {"machine": machine(), "tables": {}, "seconds": {}}
    console.print(", ".join(f"{k} {v}" for k, v in figures["machine"].items() if k != "blas"))
    with threadpool_limits(1):
        for name, bench in sections.items():
            if name in (arguments.section or sections):
                TABLES.clear()
                began = time.perf_counter()
                figures[name] = bench(console)
                figures["seconds"][name] = round(time.perf_counter() - began, 1)
                figures["tables"][name] = list(TABLES)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(figures, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
