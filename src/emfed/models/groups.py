"""Which statistics of columns are counts of rows: what the rule on small groups looks at."""

from __future__ import annotations

import numpy as np

from emfed.core.protocols import FloatArray, Summaries
from emfed.models.categories import BernoulliColumn, Categorical
from emfed.models.columns import Columns

ROUNDING = 1e-12
"""A share that a difference may leave of nothing."""


def code_shares(
    columns: Columns, mass: FloatArray, moments: FloatArray, observed: FloatArray
) -> FloatArray:
    """The share of rows with each code of each column in each component, ``(..., groups)``."""
    found = [np.empty((*mass.shape[:-1], 0))]
    for _, group, masses, part in columns.pieces(mass, moments, observed):
        if isinstance(group.family, Categorical):
            found.append(part.reshape(*mass.shape[:-1], -1))
        elif isinstance(group.family, BernoulliColumn):
            both = np.concatenate([part, _rest(masses[..., None], part)], axis=-1)
            found.append(both.reshape(*mass.shape[:-1], -1))
    return np.concatenate(found, axis=-1)


def seen_shares(columns: Columns, summary: Summaries) -> FloatArray:
    """The share of rows seen in each column, and with each of its codes, of one worker."""
    observed, mean, done = summary["observed"], summary["mean"], 0
    found = [observed]
    for group in columns.fit_to(len(observed)).groups:
        seen = observed[group.columns]
        if isinstance(group.family, Categorical):
            found.append(seen * summary["extra"][done : done + group.width])
            done += group.width
        elif isinstance(group.family, BernoulliColumn):
            ones = seen * mean[group.columns]
            found += [ones, _rest(seen, ones)]
        elif group.family.name == "gamma":
            done += len(group.columns)
    return np.concatenate(found)


def _rest(whole: FloatArray, part: FloatArray) -> FloatArray:
    rest = whole - part
    return np.where(np.abs(rest) < ROUNDING, 0.0, rest)
