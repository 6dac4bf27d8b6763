"""Every model over a network in memory, beside the same fit of a simulation.

Without masks roundings follow from the seed. Those of a masked sum nobody can know beforehand: the
simulation is given those that the network made, after a check that they are roundings.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import pytest
from numpy.typing import NDArray

from emfed.aggregation.lattice import Lattice
from emfed.aggregation.simulated import SimulatedSums
from emfed.artifacts.result import Result
from emfed.core.sums import Ask, Sum
from emfed.data import as_workers
from emfed.data.held import HeldWorkers
from emfed.data.summing import HeldRows
from emfed.fitting import FitSettings, in_process
from emfed.fitting.fitted import Fitted
from emfed.fitting.in_process import of_named_columns
from emfed.fitting.program import FitProgram, Reached
from tests.network.exchanges import NAMES, Federation
from tests.registry import REGISTRY

FloatArray = NDArray[np.float64]


@dataclass
class Recorded:
    """The sums that a member was sent, and the program that it followed."""

    sums: list[Sum] = field(default_factory=list)

    def told(self, ask: Ask, answer: Sum) -> None:
        self.sums.append(answer)


@final
class RepeatedSums:
    """The sums of a simulation with the roundings of a network."""

    def __init__(self, inner: SimulatedSums, known: list[Sum]) -> None:
        self.inner, self.known = inner, known
        self.farthest = 0.0
        """How far a sum was from that of the simulation, in steps of its lattice."""

    def __call__(self, ask: Ask) -> Sum:
        made, known = self.inner(ask), self.known.pop(0)
        exact = self.inner.rows.sum(ask)
        if ask.precision is not None:
            step = np.ldexp(1.0, Lattice.of(ask.precision, ask.size).exponents)
            self.farthest = max(self.farthest, float(np.abs((known.value - exact) / step).max()))
        else:
            np.testing.assert_allclose(known.value, exact, rtol=1e-12, atol=1e-12)
        assert known.rows == made.rows
        assert known.bytes == made.bytes
        return Sum(known.value, made.rows, made.noise, 0, made.bytes)

    def repeat(self, ask: Ask, known: Sum) -> Sum:
        return self.inner.repeat(ask, known)


def over_a_network(settings: FitSettings, tables: Mapping[str, Any]) -> tuple[Fitted, list[Sum]]:
    """The fit that sites and an analyst came to, and the sums that they saw."""
    seen: list[Recorded] = []

    def accept(agreement: Any) -> FitProgram:
        seen.append(Recorded())
        return FitProgram(settings, told=seen[-1].told)

    masked = bool(settings.masks)
    coded = {"coded": not masked}
    federation = Federation(len(tables), masked, accept=accept, options=coded)
    federation.rows = {n: HeldRows(as_workers([table])) for n, table in tables.items()}
    federation.run()
    ends = federation.ends
    assert {n: e.words for n, e in ends.items() if not e.final} == {}
    places = {e.result.conclusion.final.estimate.point.statistics.tobytes() for e in ends.values()}
    assert len(places) == 1
    reached = ends[NAMES[0]].result
    assert isinstance(reached, Reached)
    return reached.fitted(), seen[0].sums


def settings_of(name: str, masked: bool) -> FitSettings:
    entry = REGISTRY[name]
    columns = [f"x{j}" for j in range(np.asarray(entry.tables[0]).shape[-1])]
    asked = FitSettings(entry.make(), columns=columns, masks=masked, moves=1, rounds=20)
    return of_named_columns(asked, tuple(columns))


def same_fit(found: Result, want: Result) -> None:
    assert found.rounds == want.rounds
    for key, array in want.params.arrays().items():
        np.testing.assert_allclose(found.params.arrays()[key], array, rtol=1e-9, atol=1e-12)
    spent, same = (one.ledger.total("up") + one.ledger.total("down") for one in (found, want))
    assert spent == same


@pytest.mark.parametrize("name", REGISTRY)
def test_without_masks_a_network_comes_to_what_a_simulation_comes_to(name: str) -> None:
    entry, settings = REGISTRY[name], settings_of(name, masked=False)
    found, _ = over_a_network(settings, dict(zip(NAMES, entry.tables, strict=False)))
    workers = HeldWorkers(as_workers(entry.tables))
    same_fit(found.result, in_process.fit(settings.but(columns=None), workers).result)


@pytest.mark.parametrize("name", REGISTRY)
def test_with_masks_a_network_comes_to_what_a_simulation_comes_to(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    entry, settings = REGISTRY[name], settings_of(name, masked=True)
    found, sums = over_a_network(settings, dict(zip(NAMES, entry.tables, strict=False)))
    repeated: list[RepeatedSums] = []

    def simulated(*given: Any) -> RepeatedSums:
        repeated.append(RepeatedSums(SimulatedSums(*given), sums))
        return repeated[-1]

    monkeypatch.setattr(in_process, "SimulatedSums", simulated)
    workers = HeldWorkers(as_workers(entry.tables))
    same = in_process.fit(settings.but(columns=None, seed=found.result.seed), workers)
    assert sums == []
    assert repeated[0].farthest <= len(entry.tables) / 2
    assert repeated[0].farthest > 0 or found.result.rounds == 0
    # One sum more than its room would be asked for again with twice the bits; a fit ends at twenty.
    assert repeated[0].inner.attempts <= 2
    same_fit(found.result, same.result)
