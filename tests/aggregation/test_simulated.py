"""Sums of a simulation are those between machines: the same law, the same bytes, the same zeros."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from scipy import stats

from emfed.aggregation.lattice import Lattice
from emfed.aggregation.simulated import SimulatedSums
from emfed.core.errors import NumericalError
from emfed.core.sums import Ask, FloatArray, Precision
from tests.aggregation.sets import Sites, precision


@dataclass(frozen=True, eq=False)
class Given(Ask):
    """Parts that a test chooses, one row a site."""

    values: Any
    precision: Precision | None
    purpose: str = "round"

    @property
    def size(self) -> int:
        return self.values.shape[1]

    def part(self, rows: Any) -> FloatArray:
        return self.values.sum(axis=0)

    def words(self) -> str:
        return "numbers"

    def about(self) -> tuple[bytes]:
        return (b"given",)


class NoRows:
    totals = np.full(4, 2.5)

    def sum(self, ask: Ask) -> FloatArray:
        return ask.part(None)  # type: ignore[arg-type]


def sums_of(workers: int, seed: int = 1) -> SimulatedSums:
    """Sums after the first one, which has another lattice."""
    sums = SimulatedSums(NoRows(), workers, seed)  # type: ignore[arg-type]
    sums.exchanges = 1
    return sums


def simulated(ask: Ask, workers: int, seed: int = 1) -> Any:
    return sums_of(workers, seed)(ask)


@pytest.mark.parametrize("n", [3, 4, 12])
def test_roundings_have_the_same_law_as_masked_ones(n: int) -> None:
    """By the errors of 3,000 numbers that lie anywhere between two steps."""
    sites = Sites.of(n)
    values = np.random.default_rng(n).normal(size=(n, 3000)) * 1000
    about = precision(3000, 0.5, 20.0, np.rint(values.sum(axis=0)))
    found = simulated(Given(values, about), n)
    masked = sites.sum(values, Lattice.of(about, 3000))
    one, two = (each - values.sum(axis=0) for each in (found.value, masked))
    assert stats.ks_2samp(one, two).pvalue > 1e-4
    for error in (one, two):
        assert error.var() / 0.25 == pytest.approx(found.noise, rel=0.12)
        assert error.mean() == pytest.approx(0, abs=5 * np.sqrt(n / 12 / 3000) / 2)


@pytest.mark.parametrize("about", [None, precision(7), precision(7, 2.0**-40)])
def test_bytes_are_those_on_the_wire(about: Precision | None) -> None:
    values = np.ones((5, 7))
    parts = Sites.of(5).parts(values, Lattice.of(about, 7))
    wanted = sum(len(part.encode()) for part in parts.values())
    assert simulated(Given(values, about), 5).bytes == 2 * wanted


def test_a_sum_without_room_is_made_again_as_between_machines() -> None:
    about, values = precision(2, reach=5.0), np.full((4, 2), 1e4)
    sums = sums_of(4)
    found = sums(Given(values, about))
    sites = Sites.of(4)
    assert sites.sum(values, Lattice.of(about, 2)) is None
    assert sites.sum(values, Lattice.of(about, 2, 1)) is not None
    assert sums.attempts == 1
    assert found.bytes == 8 * sum(Lattice.of(about, 2, a).part_bytes for a in (0, 1))
    np.testing.assert_allclose(found.value, 4e4, atol=2)
    for bad in (1e40, np.nan):
        with pytest.raises(NumericalError, match="far from what was expected: numbers"):
            sums(Given(np.full((4, 2), bad), about))


def test_the_first_sum_tells_the_rows_and_is_exact() -> None:
    sums = SimulatedSums(NoRows(), 4)  # type: ignore[arg-type]
    found = sums(Given(np.full((4, 2), 0.375), precision(2)))
    np.testing.assert_array_equal(found.value, [1.5, 1.5])
    assert (found.rows, found.noise) == (10, 0)
    assert found.bytes == 8 * Lattice.of(None, 3).part_bytes


def test_counts_and_zeros_of_openings_are_exact_in_both() -> None:
    values = np.zeros((6, 3))
    values[:, 1], values[:3, 2], values[3:, 2] = 41.0, 0.125, -0.125
    found = simulated(Given(values, None), 6)
    np.testing.assert_array_equal(found.value, [0.0, 246.0, 0.0])
    np.testing.assert_array_equal(Sites.of(6).sum(values, Lattice.of(None, 3)), found.value)
    assert found.noise == 0
