"""What rows that were held out say of a model: of all rows together, and worker by worker."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import numpy as np

from emfed.core.protocols import FloatArray, IntArray

if TYPE_CHECKING:
    from emfed.artifacts.facts import Facts

CLEARLY = 3.0
"""Standard errors by which a gain must differ from none."""
WORTHWHILE = 0.02
"""Nats a row below which nobody would keep a model of their own: 2% in the likelihood of a row."""
NUMBERS = 5
"""What a worker tells: the mean log-likelihood of its rows under the common model, the adapted one
and its own, where fits have not seen the rows; and standard errors of what the last two gain."""
ALL = "all together"


@final
@dataclass(frozen=True, eq=False)
class WorkerGains:
    """Mean log-likelihoods of rows that models were not fitted to, by worker.

    ``common`` is the model of all, ``adapted`` the common model fitted further to the worker's rows
    (`Result.adapt`), ``alone`` fitted to them alone. NaN: the worker did not answer.
    """

    workers: Sequence[str]
    rows: IntArray
    common: FloatArray
    adapted: FloatArray
    alone: FloatArray
    errors: FloatArray
    """Standard errors of ``adapted - common`` and ``alone - common``, ``(workers, 2)``."""

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
        for gain, clear in zip(self.gains, self.clear, strict=True):
            if np.isnan(gain).any():
                words.append("did not answer")
            elif clear.any():
                best = int(np.argmax(np.where(clear, gain, -np.inf)))
                words.append(f"gains {gain[best]:.2g} {('adapted', 'alone')[best]}")
            else:
                words.append("served")
        return words


@final
@dataclass(frozen=True, eq=False)
class Validation:
    """How well the model fits rows that it has not seen; prints as a table.

    Parameters
    ----------
    rows : int
        The rows of all workers.
    held_out : float
        Their mean log-likelihood, each under a fit to other rows.
    fitted : float
        The same under the common model, which was fitted to all of them.
    workers : int
        How many workers there are.
    by_worker : WorkerGains, optional
        Whether the model serves each worker; None where workers told sums alone.
    """

    rows: int
    held_out: float
    fitted: float
    workers: int = 1
    by_worker: WorkerGains | None = None

    @classmethod
    def of(cls, facts: Facts, names: Sequence[str]) -> Validation | None:
        """Read what workers told; None: they were not asked."""
        if facts.held_out is None:
            return None
        own, known = None, facts.by_worker
        if known is not None and known.held_out is not None:
            common, adapted, alone = known.held_out[:, :3].T
            own = WorkerGains(names, known.rows, common, adapted, alone, known.held_out[:, 3:])
        held_out, fitted = facts.held_out.tolist()
        return cls(facts.rows, held_out, fitted, facts.workers, own)

    @property
    def table(self) -> dict[str, list[Any]]:
        """One row per worker where workers are known, and one for all; None: not known."""
        found: dict[str, list[Any]] = {"worker": [ALL], "rows": [self.rows]}
        found |= {"common": [self.held_out], "adapted": [None], "alone": [None]}
        found["verdict"] = [f"{self.fitted - self.held_out:.4f} above on rows that it has seen"]
        own = self.by_worker
        if own is None:
            return found
        told = {"worker": list(own.workers), "rows": own.rows.tolist()}
        for name in ("common", "adapted", "alone"):
            told[name] = [None if np.isnan(v) else v for v in getattr(own, name).tolist()]
        told["verdict"] = own.verdicts
        return {name: [*told[name], *found[name]] for name in found}

    def remark(self, who: str = "worker") -> str:
        """One sentence on all workers, by the word that the reader knows them by."""
        own = self.by_worker
        if own is None:
            serves = f"; sums do not say whether the model serves each {who}" * (self.workers > 1)
            return (
                f"held-out rows: {self.held_out:.4f} nats a row under fits that have not seen "
                f"them, {self.fitted:.4f} under the one that has{serves}."
            )
        better = [w for w, c in zip(own.workers, own.clear.any(axis=1), strict=True) if c]
        if not better:
            return f"held-out rows: the common model serves every {who}."
        named = ", ".join(better[:8]) + (", ..." if len(better) > 8 else "")
        return (
            f"held-out rows: {len(better)} of {len(own.workers)} {who}s would gain from a model "
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
