"""Observers' skill: one effect for each observer, shrunken, that enters a fit as exposure.

`emfed.models.ObserverEffects` is fitted first, to records by site, time and observer: it is an
ordinary federated model, so it runs over every network, and its statistics are sums by site and by
time. Each worker then works out the effects of its own observers and multiplies the exposure of
their records by them. All records of an observer are with one worker, so no name, number or effect
of an observer leaves it. Estimates are of an observer of average skill.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from emfed.algorithms import EM
from emfed.artifacts.result import Result
from emfed.core.errors import DataError, check_type
from emfed.core.protocols import FloatArray, IntArray
from emfed.data.workers import WorkerData
from emfed.fitting.face import fit
from emfed.models.observers import COLUMNS, ObserverEffects

_ROUNDS, _TOLERANCE = 400, 1e-8
"""Rounds at most, and the nats per row that end them. Skill and trend are nearly one direction
where observers stay for short: of a trend of skill of 10% a year 1% was left after 100 rounds, 0.3%
after 400 (the table of tests/imputation/test_skill.py, seed 0)."""


@final
@dataclass(frozen=True, eq=False)
class ObserverSkill:
    """What all workers agree on about skill: the fit that observers are compared by.

    Workers that read their own records hand the same one to `read_records`, like the grid.

    Examples
    --------
    >>> import polars as pl
    >>> from emfed.imputation import read_records
    >>> frame = pl.DataFrame(
    ...     {
    ...         "observer": ["ann", "bob", "ann", "bob"],
    ...         "site": ["pond", "pond", "lake", "lake"],
    ...         "date": ["2004-07-31", "2004-07-02", "2004-08-09", "2004-08-10"],
    ...         "count": [30, 11, 52, 18],
    ...     }
    ... )
    >>> table = read_records(frame, observer_effects=True)
    >>> table.skill.spread > 0.2
    True
    """

    result: Result
    """The fit of `emfed.models.ObserverEffects`."""
    sites: Sequence[str]
    """The names of the sites, in the order of the fit."""
    unit: str
    """The unit of the time bins."""
    first: int
    """The number of the first time bin."""

    def __post_init__(self) -> None:
        check_type("result.model", self.result.model, ObserverEffects, "ObserverEffects(...)")

    @classmethod
    def fit(cls, grid: Any, data: Any, **settings: Any) -> Self:
        """Fit the skill of observers to the rows of many workers.

        Parameters
        ----------
        grid : Grid
            What all workers agree on.
        data : WorkerData, federation or None
            The workers, or where they are: anything that `emfed.fit` takes, with rows as
            `observer_rows` makes them.
        **settings : object
            Other settings of `emfed.fit`.

        Returns
        -------
        ObserverSkill
            The fit, with its ledger in ``result``.
        """
        given = {
            "algorithm": EM(),  # noise of compressed steps would hide that direction
            "start": "moments",
            "rounds": _ROUNDS,
            "tol": _TOLERANCE,
            "columns": COLUMNS,
            **settings,
        }
        result = fit(ObserverEffects(*grid.shape), data, **given)
        return cls(result, tuple(grid.sites), grid.bins.unit, grid.bins.first)

    @property
    def spread(self) -> float:
        """The standard deviation of skill among observers, whose mean is 1."""
        return float(self.result.params.shape[0] ** -0.5)

    def describe(self) -> dict[str, Any]:
        """Plain types."""
        return {"spread": self.spread, "rounds": self.result.rounds}

    def effects(
        self, worker: IntArray, observer: IntArray, site: Any, time: IntArray, values: FloatArray
    ) -> FloatArray:
        """The skill of each row's observer, worker by worker, from that worker's rows alone.

        ``site`` are names, ``time`` numbers of bins, ``values`` weights and totals of the rows.
        """
        places = {name: number for number, name in enumerate(self.sites)}
        unknown = [name for name in site if name not in places]
        model: Any = self.result.model
        when = time - self.first
        if unknown or when.min() < 0 or when.max() >= model.times:
            what = f"site {unknown[0]!r}" if unknown else "a date"
            raise DataError(f"{what} is not among those that skill was fitted to: fit it anew.")
        where = np.array([places[name] for name in site])
        rows = np.column_stack([where, when, observer, values]).astype(np.float64)
        out = np.empty(len(rows))
        for one in np.unique(worker):
            own = np.flatnonzero(worker == one)
            place = np.unique(observer[own], return_inverse=True)[1]
            out[own] = model.effects(rows[own], self.result.params)[place]
        return out


def as_workers(names: Sequence[str], worker: IntArray, rows: FloatArray) -> WorkerData:
    """Rows of `emfed.models.observers.COLUMNS` as workers of a federation."""
    order = np.lexsort((*rows[:, 2::-1].T, worker))
    offsets = np.searchsorted(worker[order], np.arange(len(names) + 1))
    return WorkerData(rows[order], offsets, list(names), COLUMNS)
