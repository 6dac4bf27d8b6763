"""Whose model it is, as the transcript knows: golden words for who left, why, and with how much."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.errors import FederationError
from emfed.fitting import FitSettings
from emfed.fitting.program import FitProgram
from emfed.network.exchange.statements import Agreement
from tests.network.exchanges import NAMES, READER, Federation

ROWS = {"anna": 300, "bert": 150, "cleo": 100, "dora": 450}
SETTINGS = FitSettings(emfed.gaussian_mixture(3), masks=True, columns=("x", "y"), tol=1e-6, moves=0)


def tables() -> dict[str, Any]:
    rng, found = np.random.default_rng(3), {}
    for name, count in ROWS.items():
        centres = np.array([[0.0, 0.0], [2.0, 1.0], [1.0, 3.0]])
        found[name] = centres[rng.integers(3, size=count)] + rng.normal(size=(count, 2))
    return found


def federation(
    accept: Callable[[Agreement], Any] | None = None, least_share: float = 0.9, **more: Any
) -> Federation:
    def program(agreement: Agreement) -> FitProgram:
        return FitProgram(SETTINGS, least_share=least_share)

    made = Federation(sites=4, accept=accept or program, tables=tables(), **more)
    made.network.computing = 0.5  # a short fit lasts
    return made


def ended(made: Federation, folder: Path, members: tuple[str, ...]) -> emfed.Result:
    """What the file that a site has at the end says."""

    def over() -> bool:
        made.over()
        return {*members, READER} <= set(made.ends)

    made.run(done=over)
    end = made.ends[members[-1]]
    assert end.final, end.words
    path = folder / "model.emfed"
    path.write_bytes(end.state)
    return emfed.load(path)


def test_of_all_who_stay_nothing_is_doubted(tmp_path: Path) -> None:
    result = ended(federation(), tmp_path, NAMES[:4])
    assert result.company is not None
    assert result.company.words == ("all 4 sites that began took part to the end, with 1,000 rows.")
    assert result.doubts == []


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("kill", "dora did not answer any more."),
        ("expel", "dora was expelled by the analyst."),
        ("leave", "dora left."),
    ],
)
def test_who_leaves_is_named_with_the_reason_and_the_rows(
    how: str, why: str, tmp_path: Path
) -> None:
    made = federation()
    network = made.network
    acts = {
        "kill": lambda: network.kill("dora"),
        "expel": lambda: network.follower(READER).order("expel", "dora"),
        "leave": lambda: network.follower("dora").order("leave", "dora"),
    }
    network.at(6.0, acts[how])
    result = ended(made, tmp_path, NAMES[:3])
    doubt = "3 of the 4 sites that began took part to the end, with 550 of 1,000 rows (55%). " + why
    assert result.converged
    assert result.doubts == [doubt]
    assert result.card["doubts"] == [doubt]
    assert result.company is not None
    assert result.company.share == pytest.approx(0.55)
    assert result.facts is not None
    assert (result.facts.workers, result.facts.rows) == (3, 550)


def test_the_operator_says_how_much_may_be_lost(tmp_path: Path) -> None:
    made = federation(least_share=0.5)
    made.network.at(6.0, lambda: made.network.kill("dora"))
    result = ended(made, tmp_path, ("anna",))
    assert result.company is not None
    assert result.company.share == pytest.approx(0.55)
    assert result.doubts == []


def test_who_never_came_is_named_and_began_nothing(tmp_path: Path) -> None:
    asked: list[Agreement] = []

    def accept(agreement: Agreement) -> FitProgram:
        asked.append(agreement)
        if len(asked) == 2:  # the analyst is the first
            raise FederationError("the owner wants no mixtures.")
        return FitProgram(SETTINGS)

    made = federation(accept)
    made.network.at(5.0, lambda: made.network.follower(READER).order("begin"))
    made.run(600.0)
    ends = [end for end in made.ends.values() if end.final]
    path = tmp_path / "model.emfed"
    path.write_bytes(ends[0].state)
    company = emfed.load(path).company
    assert company is not None
    assert len(company.began) == 3
    assert company.doubt == ""
    assert "refused: the owner wants no mixtures." in company.words


def test_a_newcomer_is_named_and_makes_up_for_nobody(tmp_path: Path) -> None:
    made = federation(late=("cleo",))
    network = made.network
    network.at(1.0, lambda: network.follower(READER).order("begin"))
    network.at(12.6, lambda: network.start("cleo"))
    result = ended(made, tmp_path, NAMES[:4])
    assert result.company is not None
    assert result.company.words == (
        "all 3 sites that began took part to the end, with 1,000 rows. cleo came later."
    )
    assert result.company.share == 1.0
    assert result.doubts == []
