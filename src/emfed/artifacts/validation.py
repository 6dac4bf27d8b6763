"""Whether the common model serves each worker: what rows that were held out say."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from emfed.core.protocols import FloatArray, IntArray

CLEARLY = 3.0
"""Standard errors by which a gain must differ from none."""
WORTHWHILE = 0.02
"""Nats a row below which nobody would keep a model of their own: 2% in the likelihood of a row."""


@final
@dataclass(frozen=True, eq=False)
class Validation:
    """Mean log-likelihoods of rows that models were not fitted to, by worker; prints as a table.

    ``without`` is the common model fitted without the worker (where workers are many, without a
    tenth of them; NaN with masks, under which nobody is left out); ``common`` is that of all,
    ``adapted`` the common model fitted further to the worker's rows (`Result.adapt`), ``alone``
    fitted to them alone; of these three each row's score is that of a fit to the worker's other
    rows. NaN: the worker did not answer.
    """

    workers: Sequence[str]
    rows: IntArray
    without: FloatArray
    common: FloatArray
    adapted: FloatArray
    alone: FloatArray
    errors: FloatArray
    """Standard errors of ``adapted - common`` and ``alone - common``, ``(workers, 2)``."""

    @classmethod
    def of(cls, workers: Sequence[str], rows: IntArray, told: FloatArray) -> Validation:
        """Read what workers told."""
        without, common, adapted, alone = told[:, :4].T
        return cls(workers, rows, without, common, adapted, alone, told[:, 4:])

    @property
    def gains(self) -> FloatArray:
        """What adapting, and a model of its own, would gain a worker, in nats a row."""
        return np.stack([self.adapted, self.alone], axis=1) - self.common[:, None]

    @property
    def clear(self) -> Any:
        """Which gains are worthwhile and no accident, ``(workers, 2)``."""
        gains = self.gains
        return (gains > WORTHWHILE) & (gains > CLEARLY * self.errors)

    @property
    def verdicts(self) -> list[str]:
        """Say it in words, for each worker."""
        words = []
        for gain, clear, strange in zip(
            self.gains, self.clear, self.common - self.without, strict=True
        ):
            if np.isnan(gain).any():
                words.append("did not answer")
            elif clear.any():
                best = int(np.argmax(np.where(clear, gain, -np.inf)))
                words.append(f"gains {gain[best]:.2g} {('adapted', 'alone')[best]}")
            elif strange > 10 * WORTHWHILE:
                words.append("served, but only as it takes part")
            else:
                words.append("served")
        return words

    @property
    def table(self) -> dict[str, list[Any]]:
        """One row per worker; None for what is not known."""
        columns = {n: getattr(self, n) for n in ("without", "common", "adapted", "alone")}
        told = {n: [None if np.isnan(v) else v for v in c.tolist()] for n, c in columns.items()}
        verdicts = self.verdicts
        return (
            {"worker": list(self.workers), "rows": self.rows.tolist()}
            | told
            | {"verdict": verdicts}
        )

    def remark(self, who: str = "worker") -> str:
        """One sentence on all workers, by the word that the reader knows them by."""
        better = [w for w, c in zip(self.workers, self.clear.any(axis=1), strict=True) if c]
        if not better:
            return f"held-out rows: the common model serves every {who}."
        named = ", ".join(better[:8]) + (", ..." if len(better) > 8 else "")
        return (
            f"held-out rows: {len(better)} of {len(self.workers)} {who}s would gain from a model "
            f"of their own ({named}): emfed adapt, or Result.adapt in Python, makes one."
        )

    def __str__(self) -> str:
        columns = [[name, *map(_text, column)] for name, column in self.table.items()]
        widths = [max(map(len, column)) for column in columns]
        padded = [[f"{c:<{w}}" for c in col] for col, w in zip(columns, widths, strict=True)]
        rows = ["  ".join(row).rstrip() for row in zip(*padded, strict=True)]
        return "\n".join([*rows, self.remark()])

    __repr__ = __str__


def _text(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4f}" if isinstance(value, float) else str(value)
