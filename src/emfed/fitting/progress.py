"""Progress of a fit, wherever its rows are: rounds, nats gained and left, bytes and time.

Work beside the rounds has stages, each with a name and the share of it that is done.
"""

from __future__ import annotations

import contextlib
import math
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import final

from emfed.artifacts.model_card import size
from emfed.core import series
from emfed.core.records import RoundRecord
from emfed.fitting.stopping import Stop

WINDOW = 20
"""Rounds from which the fall of what is left is read."""
FEWEST = 8
"""Rounds before which nobody knows how many there will be."""
BAR = 16
"""Characters of the bar."""
REDRAW_SECONDS, LINE_SECONDS = 0.1, 5.0
"""Between two looks of a bar that is drawn over itself, and between two lines of a log."""


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
    if (nats or tolerance) and len(recent) >= FEWEST and (rate := series.rate(recent)) < 1 - 1e-12:
        goal = tolerance or (nats or 0.0) / series.left(1.0, rate, 1.0)
        fall = max(0.0, math.log(goal / recent[-1]) / math.log(rate))
        left = fall if left is None else min(left, fall)
    return left


def duration(seconds: float) -> str:
    """Seconds in few characters."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def round_words(record: RoundRecord, gained: float | None = None) -> list[str]:
    """What a round came to: nats a row that were gained so far, or that EM gains, and what is left.

    Where a fit does not know nats, how far the model still moves.
    """
    said = [f"round {record.round}"]
    if gained is not None:
        said.append(f"{gained:.4g} nats a row gained")
    elif record.gain is not None:
        said.append(f"EM gains {record.gain:.2g} nats a row")
    elif record.squared_H is not None:
        said.append(f"|H|² {record.squared_H:.1e}")
    if record.left is not None:
        said.append(f"about {record.left:.1g} left")
    return said


@contextlib.contextmanager
def progress(
    stop: Stop, title: str = "", always: bool = False, then: str = ""
) -> Iterator[ProgressBar]:
    """A function to call with each record: a bar on stderr, drawn over itself.

    Where stderr is neither a terminal nor a notebook it writes a line every few seconds: with
    ``always`` from the beginning, else if the fit takes longer. ``then`` is what comes after the
    rounds.
    """
    stream = sys.stderr
    over = stream.isatty() or "ipykernel" in sys.modules
    tell = _tell(over, title)
    if over or always:
        tell("opening")
    pause = REDRAW_SECONDS if over else LINE_SECONDS
    try:
        yield ProgressBar(tell, pause, stop, then, at_once=over or always)
    finally:
        if over:
            tell("")


def _tell(over: bool, title: str) -> Callable[[str], None]:
    """Write a line, over the last one where that can be; an empty one wipes it."""

    def tell(words: str) -> None:
        line = f"{title}: {words}" if title and words else words
        if over:
            width = shutil.get_terminal_size().columns - 1
            line = f"\r{line[:width].ljust(width)}" + ("" if words else "\r")
        else:
            line += "\n"
        sys.stderr.write(line)
        sys.stderr.flush()

    return tell


@final
class ProgressBar:
    """Called with each record of a round; `stage` tells of work beside the rounds."""

    def __init__(
        self,
        tell: Callable[[str], None],
        pause: float,
        stop: Stop,
        then: str = "",
        at_once: bool = True,
    ) -> None:
        self._tell, self._pause, self._stop, self._then = tell, pause, stop, then
        self._began = time.monotonic()
        self._shown = self._began - pause * at_once
        self._at_once = at_once
        self._values: list[float] = []
        self._objectives: tuple[float, float] | None = None
        """The one of the first round, and the best one so far."""
        self._sent, self._stage = 0, ""

    def __call__(self, record: RoundRecord) -> None:
        stop, values = self._stop, self._values
        self._sent += record.bytes_up + record.bytes_down
        watched = record.squared_H if stop.tolerance else record.gain
        if watched is not None:
            values.append(watched)
        gained = self._gained(record)
        if (now := self._due()) is None:
            return
        each = (now - self._began) / max(1, record.round)
        parts = [*round_words(record, gained), size(self._sent)]
        if stop.tolerance:
            parts.insert(1, f"|H|² {record.squared_H or 0:.1e}")
        known = rounds_left(values, stop.nats, stop.tolerance, None, record.round)
        if known is not None or not (stop.nats or stop.tolerance):  # else the limit says nothing
            left = rounds_left(values, stop.nats, stop.tolerance, stop.rounds, record.round)
            if left is not None:
                parts.insert(0, _bar(record.round / max(1.0, record.round + left)))
                parts.append(f"about {duration(left * each)}")
        self._tell("  ".join([*parts, self._then] if self._then else parts))

    def _gained(self, record: RoundRecord) -> float | None:
        """Nats a row since the first round, where the course of the fit is known."""
        if record.objective is not None:
            first, best = self._objectives or (record.objective, math.inf)
            self._objectives = first, min(best, record.objective)
        return None if self._objectives is None else self._objectives[0] - self._objectives[1]

    def stage(self, name: str, share: float) -> None:
        """So much of what ``name`` says is done."""
        if name != self._stage:
            self._stage, self._began = name, time.monotonic()
            self._shown = -math.inf if self._at_once else self._shown
        if (now := self._due()) is None:
            return
        left = (now - self._began) / share * (1 - share) if share > 0 else 0.0
        told = f"  about {duration(left)} left" if left >= 1 else ""
        self._tell(f"{_bar(share)}  {name}{told}")

    def _due(self) -> float | None:
        """The time, if it is time to show something again."""
        now = time.monotonic()
        if now - self._shown < self._pause:
            return None
        self._shown = now
        return now


def _bar(share: float) -> str:
    done = round(BAR * min(1.0, share))
    return "━" * done + "─" * (BAR - done)
