"""The last exchange of a fit: how well the model fits each worker's rows."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from emfed.artifacts.result import Result
from emfed.core.protocols import Federation
from emfed.core.wire import ENVELOPE, floats_size


def with_scores(result: Result, federation: Federation, count_bytes: bool = True) -> Result:
    """The result with how well it fits each worker: S to everyone, four numbers back."""
    scores = federation.scores(result.model, result.model.maximize(result.statistics))
    told = np.flatnonzero(np.isfinite(scores[:, 0]))
    if count_bytes:
        q = result.model.layout.size
        result.ledger.add("closing", "down", told, floats_size(q), ENVELOPE)
        result.ledger.add("closing", "up", told, floats_size(scores.shape[1]), ENVELOPE)
    assert result.facts is not None
    return replace(result, facts=replace(result.facts, scores=scores))
