"""What is known of a fit, and of whom: the type of each number says where it comes from.

A number is a sum over all workers, and stands in `Facts`; or each worker told it by itself, and it
stands in `ByWorker`, which is not there where workers told sums alone; or it is not known: None.
"""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, final

import numpy as np

from emfed.artifacts.company import Company
from emfed.core.protocols import BoolArray, FloatArray, IntArray
from emfed.core.version import __version__
from emfed.network.scoring import SCORES, falls_short

MASKED = "not known (masked)"
"""What stands in place of a number of one worker, where sums alone were told."""


def software() -> dict[str, str]:
    """Versions of what computed the fit."""
    import scipy

    return {
        "emfed": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@final
@dataclass(frozen=True, eq=False)
class ByWorker:
    """What each worker told by itself.

    Parameters
    ----------
    rows : array of int
        Its rows.
    scores : array of shape (workers, 4 or more), optional
        Mean and spread of its rows' log-likelihood, what the model expects of both, given how many
        rows of each component the worker has, and the share of each component. NaN: it did not say.
    held_out : array of shape (workers, 5), optional
        What rows that it held out say: see `Validation`.
    """

    rows: IntArray
    scores: FloatArray | None = None
    held_out: FloatArray | None = None

    @property
    def expected(self) -> FloatArray | None:
        """Mean and spread of the log-likelihood to expect of each worker, ``(workers, 2)``.

        None where the fit did not ask, or the model draws no samples and so claims nothing.
        """
        if self.scores is None or not np.isfinite(self.scores[:, 2:SCORES]).any():
            return None
        return self.scores[:, 2:SCORES]

    @property
    def shares(self) -> FloatArray | None:
        """The share of each component in each worker's rows, ``(workers, K)``, where it is known.

        Rows of NaN are of workers that did not tell.
        """
        if self.scores is None or self.scores.shape[1] <= SCORES:
            return None
        found = self.scores[:, SCORES:]
        return found if np.isfinite(found).any() else None

    @property
    def badly_served(self) -> IntArray:
        """Workers whose rows the common model explains clearly worse than it claims to."""
        if self.expected is None or self.scores is None:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(falls_short(self.scores, self.rows))


@final
@dataclass(frozen=True, eq=False)
class Facts:
    """The circumstances of a fit, beside what it reached.

    Parameters
    ----------
    workers, rows : int
        How many workers, and how many rows they have together.
    settings : mapping
        Algorithm, participation and limits, as plain JSON types.
    simulated : bool
        Whether all workers were in one process: bytes were then measured, not sent.
    by_worker : ByWorker, optional
        What single workers told; None where they told sums alone.
    scores : array, optional
        Those of all rows together, as `ByWorker` has those of one worker's.
    held_out : array of shape (2,), optional
        Mean log-likelihood of all rows by fits that did not see them, and by the common one.
    company : Company, optional
        Who took part to the end; None: all, since they were in one process.
    """

    workers: int
    rows: int
    settings: Mapping[str, Any] = field(default_factory=dict)
    simulated: bool = True
    by_worker: ByWorker | None = None
    scores: FloatArray | None = None
    held_out: FloatArray | None = None
    company: Company | None = None
    created: str = field(default_factory=now)
    software: Mapping[str, str] = field(default_factory=software)

    @property
    def log_likelihood(self) -> float | None:
        """The mean over all rows, where it is known."""
        return self._score(0)

    @property
    def row_spread(self) -> float | None:
        """The standard deviation over all rows of their log-likelihood, where it is known."""
        return self._score(1)

    @property
    def expected(self) -> float | None:
        """The mean log-likelihood to expect of all rows, where the model claims one."""
        return self._score(2)

    @property
    def well_served(self) -> BoolArray | bool | None:
        """Whether the model fits all rows together as well as it claims to; None: not known."""
        if self.scores is None or self.expected is None:
            return None
        return not falls_short(self.scores[None], np.array([self.rows]))[0]

    def _score(self, place: int) -> float | None:
        if self.scores is None or len(self.scores) <= place:
            return None
        return None if np.isnan(self.scores[place]) else float(self.scores[place])
