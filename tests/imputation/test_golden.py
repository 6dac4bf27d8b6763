"""Numbers that a change of the loop must not move."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import emfed
from emfed.imputation import Structure, impute
from tests.imputation.tables import small_table

FACTORS = Structure(rank=2, penalty=3.0, effects=False)
HALF = emfed.algorithms.Bernoulli(0.5)
RUNS: dict[str, tuple[dict[str, Any], tuple[float, float, int]]] = {
    "observed": (
        {"structure": Structure(rank=2, penalty=3.0), "rounds": 6},
        (13.098188792041634, 1.1660213679589901, 320),
    ),
    "observed, half of the workers": (
        {"structure": Structure(rank=1, penalty=3.0), "rounds": 6, "participation": HALF},
        (10.975833511689407, 35.017680425294, 238),
    ),
    "cell": (
        {"mode": "cell", "structure": FACTORS, "rounds": 12},
        (9.213617737973596, 61.45118021229023, 633),
    ),
    "cell, half of the workers": (
        {"mode": "cell", "structure": FACTORS, "rounds": 12, "participation": HALF},
        (12.458004882753272, 102.60463121202258, 317),
    ),
    "paper": (
        {"mode": "paper", "structure": Structure(2, effects=False), "rounds": 5, "batch_size": 30},
        (0.0, 1.1601561266909, 552),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_of_a_small_table_stand(name: str) -> None:
    """The norm of theta, the last |H|^2, and payload bytes of the uploads."""
    table = small_table()
    options, (theta, squared, up) = RUNS[name]
    result = impute(table, seed=3, **options)
    everywhere = np.indices(table.shape).reshape(2, -1)
    assert np.linalg.norm(result.params.theta(*everywhere)) == pytest.approx(theta, rel=1e-9)
    assert result.records[-1].squared_H == pytest.approx(squared, rel=1e-9)
    assert result.records.column("payload_up")[1:].sum() == up
