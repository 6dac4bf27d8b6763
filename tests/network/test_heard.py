"""Sites that are heard one by one: fits over a network in memory beside the same in one process."""

from __future__ import annotations

from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.core.ledger import DIRECTIONS
from emfed.data import as_workers
from emfed.data.held import HeldWorkers
from emfed.fitting.in_process import fit
from emfed.fitting.program import FitProgram
from emfed.fitting.settings import FitSettings
from emfed.network.exchange.statements import Entry, StatementKind
from emfed.network.exchange.virtual import RELAY
from tests.network.exchanges import NAMES, READER, Federation

SUMS = {
    "a mixture": {},
    "plain EM": {"algorithm": "em", "rounds": 12},
    "a range": {"n_components": "1:3", "moves": 0},
    "own clusters": {"start": "merge"},
    "FedEM": {"algorithm": "FedEM", "rounds": 15},
    "VR-FedEM": {"algorithm": emfed.VRFedEM(batch_size=7, inner_rounds=4), "rounds": 15},
    "some of them": {"algorithm": "FedEM", "participation": 0.6, "rounds": 15},
    "a broadcast": {
        "algorithm": emfed.FedEM(
            emfed.SubtractiveDithering(0.1), broadcast=emfed.SubtractiveDithering(0.05)
        ),
        "rounds": 15,
    },
}
"""Settings of fits that sites follow without masks."""


def tables(sites: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    found = {}
    for j, name in enumerate(NAMES[:sites]):
        shares = [(40 + 5 * j, (0, 0)), (30, (4, 1)), (20 + 3 * j, (0, 5))]
        found[name] = np.concatenate([rng.normal(size=(n, 2)) + at for n, at in shares])
    return found


def settings_of(about: dict[str, Any]) -> FitSettings:
    model = emfed.gaussian_mixture if "n_components" in about else emfed.gaussian_mixture(3)
    common = {"masks": False, "columns": ("0", "1"), "seed": 5, "moves": 0}
    return FitSettings(model, **(common | about))


def federation(about: dict[str, Any], sites: int = 3, **options: Any) -> Federation:
    """A federation whose analyst adds."""
    settings = settings_of(about)
    found = Federation(
        sites=sites,
        masked=False,
        tables=tables(sites),
        accept=lambda _: FitProgram(settings),
        **{"options": {"coded": True}} | options,
    )
    return found


def alone(about: dict[str, Any], sites: int = 3) -> emfed.Result:
    named = {name: pl.DataFrame(rows, ["0", "1"]) for name, rows in tables(sites).items()}
    return fit(settings_of(about), HeldWorkers(as_workers(named))).result


def reached(found: Federation, name: str = "anna") -> emfed.Result:
    assert {n: e.words for n, e in found.ends.items() if not e.final} == {}
    result: emfed.Result = found.ends[name].result.fitted().result
    return result


@pytest.mark.parametrize("kind", SUMS)
@pytest.mark.parametrize("sites", [2, 4])
def test_a_fit_is_that_of_one_process_and_so_is_its_ledger(kind: str, sites: int) -> None:
    about = SUMS[kind]
    found = federation(about, sites)
    assert found.run() < 600
    want = alone(about, sites)
    for name in (*NAMES[:sites], READER):
        got = reached(found, name)
        np.testing.assert_allclose(got.statistics, want.statistics, rtol=0, atol=1e-12)
        assert (got.rounds, got.stopped) == (want.rounds, want.stopped)
        for way in DIRECTIONS:
            assert got.ledger.total(way) == want.ledger.total(way)
            for kind_, told in got.ledger.summary().items():
                spent = want.ledger.summary()[kind_][way]
                both = sum(told[way][part] for part in ("payload", "envelope"))
                assert both == spent["payload"] + spent["envelope"]
        for mine, theirs in zip(got.records, want.records, strict=True):
            assert (mine.answered, mine.asked) == (theirs.answered, theirs.asked)
            assert mine.squared_H == pytest.approx(theirs.squared_H, abs=1e-12)
    assert found.plain == set()


def kinds(found: Federation) -> list[StatementKind]:
    machine = found.network.processes[RELAY].machine
    return [StatementKind(Entry.decode(data).kind) for data in machine.transcript.entries]


def test_every_sum_is_told_and_none_is_added_by_the_relay() -> None:
    found = federation({})
    found.run()
    reached(found)
    assert StatementKind.SUM not in kinds(found)
    assert StatementKind.SECRETS not in kinds(found)
    assert kinds(found).count(StatementKind.TOLD) > 5
