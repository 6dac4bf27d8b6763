"""Numbers that a change of the loop must not move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from emfed.imputation import Structure, impute
from tests.imputation.tables import small_table

FACTORS = Structure(rank=2, penalty=3.0, effects=False)
RUNS: dict[str, tuple[dict[str, Any], tuple[float, float, int]]] = {
    "observed": (
        {"structure": Structure(rank=2, penalty=3.0)},
        (13.28525698827225, -55.0914183808801, 1703),
    ),
    "factors alone": (
        {"structure": FACTORS},
        (10.476273409164113, -38.26976254534932, 1703),
    ),
    "paper": (
        {"mode": "paper", "structure": Structure(2, effects=False), "rounds": 5, "batch_size": 30},
        (0.0, 1.1601561266909, 552),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_of_a_small_table_stand(name: str) -> None:
    """The norm of theta, the last |H|^2 or the objective, and payload bytes of the uploads."""
    table = small_table()
    options, (theta, reached, up) = RUNS[name]
    result = impute(table, seed=3, **options)
    everywhere = np.indices(table.shape).reshape(2, -1)
    last = result.records[-1]
    assert np.linalg.norm(result.params.theta(*everywhere)) == pytest.approx(theta, rel=1e-9)
    assert (last.squared_H or last.objective) == pytest.approx(reached, rel=1e-9)
    assert sum(record.payload_up for record in result.records if record.round) == up
