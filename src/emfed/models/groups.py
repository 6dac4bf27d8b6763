"""Which statistics of columns are counts of rows: what the rule on small groups looks at."""

from __future__ import annotations

import numpy as np

from emfed.core.protocols import FloatArray, Summaries
from emfed.models.columns import Columns


def code_shares(
    columns: Columns, mass: FloatArray, moments: FloatArray, observed: FloatArray
) -> FloatArray:
    """The share of rows with each code of each column in each component, ``(..., groups)``."""
    found = [np.empty((*mass.shape[:-1], 0))]
    for _, group, masses, part in columns.pieces(mass, moments, observed):
        shares = group.family.code_shares(masses, part)
        if shares is not None:
            found.append(shares.reshape(*mass.shape[:-1], -1))
    return np.concatenate(found, axis=-1)


def seen_shares(columns: Columns, summary: Summaries) -> FloatArray:
    """The share of rows seen in each column, and with each of its codes, of one worker."""
    observed, found = summary["observed"], [summary["observed"]]
    bound = columns.fit_to(len(observed))
    for group, extra in bound.extras(summary):
        seen, mean = observed[group.columns], summary["mean"][group.columns]
        typical = group.family.typical(mean, extra, np.ones_like(mean))
        shares = group.family.code_shares(seen, seen[:, None] * typical)
        if shares is not None:
            found.append(shares.ravel())
    return np.concatenate(found)
