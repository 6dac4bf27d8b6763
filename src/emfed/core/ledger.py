"""Every byte, by worker, direction and kind of message; payload and envelope apart.

Payload is every byte that depends on data, envelope everything else. Counts are what
`emfed.core.wire` produces, whether the bytes were made or, in a simulation, only measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from emfed.core.protocols import IntArray

KINDS = ("opening", "start", "round", "question", "closing", "monitor")
"""Hello, summaries and settings; all that finds the start; the rounds; what everyone is asked on
the way (candidates, the last check); how well the model fits each worker's rows; and what a
`Monitor` asks, which no total counts: it looks at a run and is no part of it."""
Direction = Literal["up", "down"]
DIRECTIONS: tuple[Direction, ...] = ("up", "down")
PARTS = ("messages", "payload", "envelope")


class Ledger:
    """Messages and bytes of each worker; workers that never spoke take no memory."""

    def __init__(self, workers: int, names: Sequence[str] | None = None) -> None:
        self._names = names
        self.counts: IntArray = np.zeros(
            (len(KINDS), len(DIRECTIONS), len(PARTS), workers), dtype=np.int64
        )
        self._totals = np.zeros((len(DIRECTIONS), len(PARTS)), dtype=np.int64)

    def add(
        self,
        kind: str,
        direction: Direction,
        workers: IntArray,
        payload: IntArray | int,
        envelope: IntArray | int,
    ) -> tuple[int, int]:
        """Count one message of each worker named (perhaps repeatedly); returns what was added."""
        if len(workers) == 0:
            return 0, 0
        page = self.counts[KINDS.index(kind), DIRECTIONS.index(direction)]
        payload, envelope = (np.broadcast_to(part, workers.shape) for part in (payload, envelope))
        np.add.at(page[0], workers, 1)
        np.add.at(page[1], workers, payload)
        np.add.at(page[2], workers, envelope)
        added = int(payload.sum()), int(envelope.sum())
        if kind != "monitor":
            self._totals[DIRECTIONS.index(direction)] += (len(workers), *added)
        return added

    def total(self, direction: Direction, part: str | None = None) -> int:
        """Bytes in a direction: payload and envelope, or one of ``PARTS`` alone."""
        row = self._totals[DIRECTIONS.index(direction)]
        return int(row[1] + row[2] if part is None else row[PARTS.index(part)])

    def restore(self, counts: IntArray) -> None:
        """Put back what a checkpoint held."""
        self.counts = np.zeros((len(KINDS), *counts.shape[1:]), dtype=np.int64)
        self.counts[: len(counts)] = counts  # older files knew fewer kinds
        self._totals = self.counts[: KINDS.index("monitor")].sum(axis=(0, 3))

    @property
    def names(self) -> Sequence[str] | None:
        """Names of the workers, where they have any."""
        return self._names

    def columns(self) -> dict[str, list[Any]]:
        """One row per worker, kind and direction that had messages."""
        kind, direction, worker = np.nonzero(self.counts[:, :, 0])
        picked = self.counts[kind, direction, :, worker]
        return {
            "worker": [w if self._names is None else self._names[w] for w in worker.tolist()],
            "kind": [KINDS[k] for k in kind],
            "direction": [DIRECTIONS[d] for d in direction],
            **{part: picked[:, j].tolist() for j, part in enumerate(PARTS)},
        }

    def to_frame(self) -> Any:
        """The rows of `columns` as a polars data frame."""
        import polars as pl

        return pl.DataFrame(self.columns())

    def summary(self) -> dict[str, dict[str, dict[str, int]]]:
        """Totals over workers: kind -> direction -> part -> count."""
        sums = self.counts.sum(axis=3)
        return {
            kind: {
                direction: {part: int(sums[k, d, j]) for j, part in enumerate(PARTS)}
                for d, direction in enumerate(DIRECTIONS)
            }
            for k, kind in enumerate(KINDS)
        }
