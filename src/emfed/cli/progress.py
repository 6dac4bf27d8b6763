"""Progress of a fit: rounds, |H|², bytes and time left, on a terminal and nowhere else."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from emfed.core import series
from emfed.core.records import RoundRecord
from emfed.fitting.settings import FitSettings

Show = Callable[[RoundRecord], None]
WINDOW = 20
"""Rounds from which the fall of |H|² is read."""


def rounds_left(
    values: Sequence[float],
    nats: float | None,
    tolerance: float | None,
    limit: int | None,
    done: int,
) -> float | None:
    """Rounds until the values reach their goal at their present rate of fall, or until the limit.

    The goal is ``tolerance``, or where all that is left to gain is ``nats``: what a round gains
    over one minus the rate. None where neither goal nor limit says anything yet.
    """
    left = None if limit is None else float(max(0, limit - done))
    recent = [v for v in values[-WINDOW:] if v > 0]
    if (nats or tolerance) and len(recent) >= 5 and (rate := series.rate(recent)) < 1 - 1e-12:
        goal = tolerance or (nats or 0.0) / series.left(1.0, rate, 1.0)
        fall = max(0.0, math.log(goal / recent[-1]) / math.log(rate))
        left = fall if left is None else min(left, fall)
    return left


def size(count: float) -> str:
    """Bytes in few characters."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


def duration(seconds: float) -> str:
    """Seconds in few characters."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


@contextlib.contextmanager
def progress(quiet: bool, settings: FitSettings) -> Iterator[Show]:
    """A function to call with each record; a line on stderr if that is a terminal."""
    from rich.console import Console

    console = Console(stderr=True)
    if quiet or not console.is_terminal:
        yield lambda record: None
        return
    stop = settings.stop(settings.method(2), 2)
    with console.status("opening") as status:
        yield _show(status, stop.nats, stop.tolerance, stop.rounds)


def _show(status: Any, nats: float | None, tolerance: float | None, limit: int | None) -> Show:
    began, shown = time.monotonic(), 0.0
    values: list[float] = []
    sent = 0

    def show(record: RoundRecord) -> None:
        nonlocal shown, sent
        sent += record.bytes_up + record.bytes_down
        watched = record.squared_H if tolerance else record.gain
        if watched is not None:
            values.append(watched)
        now = time.monotonic()
        if now - shown < 0.1:
            return
        shown = now
        left = rounds_left(values, nats, tolerance, limit, record.round)
        each = (now - began) / max(1, record.round)
        parts = [f"round {record.round}", f"|H|² {record.squared_H or 0:.1e}"]
        parts += [size(sent), "" if left is None else f"about {duration(left * each)} left"]
        status.update("  ".join(part for part in parts if part))

    return show
