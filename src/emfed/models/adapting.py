"""A common model fitted to one worker's rows: MAP, with the common model as the prior.

The prior is conjugate: what ``worth`` rows drawn from the common model would add to the statistics.
With ``n`` rows of its own, a worker iterates

    s <- (n s-bar(T(s)) + worth s_0) / (n + worth),    s_0 = E[s(y, z)] under the common model,

which is EM for the likelihood of its own rows plus ``worth`` times the expected complete-data
log-likelihood under the common model. It holds for every model of the contract.

Decision: docs/decisions/027-judging-a-fit.md
"""

from __future__ import annotations

from typing import Any

import numpy as np

from emfed.core import series
from emfed.core.errors import DataError
from emfed.core.protocols import FloatArray, Model, Summaries

STEPS = 1000
"""EM steps at most."""
LEFT = 1e-6
"""Nats per row that may be left to gain."""


def adapt(
    model: Model,
    statistics: FloatArray,
    summary: Summaries,
    rows: Any,
    worth: float,
) -> tuple[Model, FloatArray]:
    """The model bound to these rows and the common ones, and its statistics at the optimum.

    ``model``, ``statistics`` and ``summary`` (of all rows, from the opening exchange) are those
    of the common fit.
    """
    n = len(rows)
    share = worth / (n + worth)
    user = model.to_user(model.maximize(statistics))
    here = model.summary(rows)
    if {n: np.shape(a) for n, a in here.items()} != {n: np.shape(a) for n, a in summary.items()}:
        raise DataError(
            "the summary of all rows that came with the model is not one of such rows: the model "
            "file was altered, or is of another release. Fit the model again."
        )
    both = {name: np.stack([here[name], summary[name]]) for name in here}
    counts, weights = np.array([n, int(np.ceil(worth))]), np.array([1 - share, share])
    own = model.bind(both, counts, weights)
    # A prior that does not know the number of rows is in T already: at S, T gives theta.
    common = statistics if own is model else own.statistics_of(own.from_user(user))
    return own, climb(own, common, rows, share)


def climb(
    model: Model,
    common: FloatArray,
    rows: Any,
    share: float,
    weights: Any | None = None,
    start: Any | None = None,
) -> FloatArray:
    """EM on rows and common statistics, which count for ``share``, until little is left to gain.

    It starts from the common model by default.
    """
    theta = model.maximize(common) if start is None else start
    statistics, gain = common, np.inf
    for _ in range(STEPS):
        own = model.expected_statistics(rows, theta, weights)
        statistics, before = (1 - share) * own + share * common, theta
        theta = model.maximize(statistics)
        last = gain
        gain = float(model.surrogate(statistics, before) - model.surrogate(statistics, theta))
        # Parameters that no rows have may lead to no number, and from there to none.
        if np.isnan(gain) or series.left(gain, gain / last) < LEFT:
            break
    return statistics
