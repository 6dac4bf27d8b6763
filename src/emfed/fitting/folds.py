"""Leave some workers out, hold some rows out, and ask: all in the rounds of one phase.

`emfed.network.validation` says how workers take part.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from emfed.algorithms import AutoEM
from emfed.artifacts.result import Result
from emfed.core.protocols import FloatArray, View
from emfed.fitting.rounds import Run
from emfed.fitting.session import Session
from emfed.fitting.stopping import Stop
from emfed.models.clusters import Clusters
from emfed.models.side_by_side import SideBySideParameters

MOST_FOLDS = 10
"""Models that leave workers out: where workers are more, each leaves out a tenth of them."""
MOST_ROUNDS = 300
"""Rounds of the folds, which begin where the fit began: as a rule they take as many rounds as it
did."""


def with_validation(
    result: Result,
    session: Session,
    part: int,
    start: FloatArray,
    tolerance: float,
    remarks: list[str],
) -> Result:
    """The result with what held-out rows say of it, worker by worker.

    Models without some workers start where the fit did. At its end a component may have become
    that of one worker's rows, and would be lost to the model without them.
    """
    assert result.facts is not None
    workers = session.federation.size
    if isinstance(result.model, Clusters):
        remarks.append("validation: this model has no likelihood to compare.")
        return result
    if workers < 2:
        remarks.append("validation across workers needs two of them or more; there is one.")
        return result
    common = result.model.maximize(result.statistics)
    if session.masks:
        remarks.append(
            "validation: with masks no model is fitted without single workers, whom its difference "
            "from the common one would tell of; adapted models are compared."
        )
        told = session.scores(
            View((part,) * 2), SideBySideParameters((common, common)), "validation"
        )
        return _kept(result, told, session)
    folds = min(workers, MOST_FOLDS)
    view = View((part,) * folds, folds=True)
    params = _closed(session, part, folds)
    if params is None:
        run = Run(session, view, AutoEM(), np.tile(start, folds), purpose="closing")
        stopped = run.until(Stop(MOST_ROUNDS, nats=tolerance))
        if stopped != "nats":
            remarks.append(
                f"validation: models without some workers had not converged after "
                f"{run.state.round - 1} rounds; their scores may be a little too low."
            )
        params = run.params
    asked = SideBySideParameters((*params.parts, common))
    told = session.scores(View((part,) * (folds + 1)), asked, "validation")
    return _kept(result, told, session)


def _kept(result: Result, told: FloatArray, session: Session) -> Result:
    facts = result.facts
    assert facts is not None
    whole = np.array([session.weights @ told[:, 1], facts.log_likelihood or np.nan])
    known = facts.by_worker
    known = None if known is None else replace(known, held_out=told[:, 1:])
    return replace(result, facts=replace(facts, held_out=whole, by_worker=known))


def _closed(session: Session, part: int, folds: int) -> SideBySideParameters | None:
    """Parameters without some workers, where what the others told in the opening says all."""
    common: Any = session.bound.part(part)
    if common.closed_form() is None:
        return None
    found, numbers = [], session.everyone
    for fold in range(folds):
        kept = numbers[numbers % folds != fold]
        shares = session.weights[kept] / session.weights[kept].sum()
        told = {name: values[kept] for name, values in session.opening.summaries.items()}
        model = session.bound.candidate(part).bind(told, session.counts[kept], shares)
        closed = model.closed_form()
        if closed is None or not model.inside(closed):
            return None
        found.append(common.from_user(model.to_user(model.maximize(closed))))
    return SideBySideParameters(tuple(found))
