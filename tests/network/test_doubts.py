"""Sites that doubt their units are counted before the rounds; which they are nobody learns."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.sums import drive
from emfed.data import as_workers
from emfed.data.held import HeldWorkers
from emfed.fitting import FitSettings
from emfed.fitting.doubts import Doubts, analyst_hears
from emfed.fitting.program import FitProgram
from emfed.network.exchange.statements import Agreement
from tests.network.exchanges import NAMES, READER, Federation

COLUMNS = ("weight", "height")


def tables(wrong: tuple[str, ...] = ("bert",)) -> dict[str, Any]:
    rng, found = np.random.default_rng(1), {}
    for name in NAMES[:3]:
        rows = np.array([75.0, 170.0]) + np.array([9.0, 8.0]) * rng.normal(size=(120, 2))
        found[name] = rows * ([1000.0, 1.0] if name in wrong else [1.0, 1.0])
    return found


def settings(**more: Any) -> FitSettings:
    return FitSettings(emfed.gaussian_mixture(1), masks=True, columns=COLUMNS, **more)


def federation(data: Any, said: list[str], **more: Any) -> Federation:
    def program(agreement: Agreement) -> FitProgram:
        tell = lambda ask, answer: analyst_hears(ask, answer, said.append)  # noqa: E731
        return FitProgram(settings(**more), told=tell)

    return Federation(sites=3, accept=program, tables=data)


def test_the_number_of_sites_that_doubt_is_told_before_the_rounds() -> None:
    said: list[str] = []
    made = federation(tables(), said)
    made.run()
    result = made.ends[READER].result.fitted().result
    words = (
        "1 of 3 sites doubts its units, codes or columns: the output of `emfed join` there says "
        "which and why."
    )
    assert set(said) == {words}
    assert result.facts.settings["remarks"] == [words]
    assert "bert" not in words


def test_nothing_is_said_where_nobody_doubts_and_nothing_asked_where_it_is_ignored() -> None:
    for data, more in ((tables(()), {}), (tables(), {"doubts": "ignore"})):
        said: list[str] = []
        made = federation(data, said, **more)
        made.run()
        assert made.ends[READER].final
        assert said == []
        assert "remarks" not in made.ends[READER].result.fitted().result.facts.settings


def test_a_fit_may_stop_before_its_rounds() -> None:
    made = federation(tables(), [], doubts="stop")
    made.run()
    assert not any(end.final for end in made.ends.values())
    for masks in (True, None):
        with pytest.raises(emfed.DataError, match="1 of 3 sites doubts"):
            emfed.fit(emfed.gaussian_mixture(1), tables(), doubts="stop", masks=masks)

    data = tables()
    held = HeldWorkers(as_workers(data))
    rows = {name: HeldWorkers(as_workers([table]))._rows for name, table in data.items()}
    asked: list[Doubts] = []
    from emfed.fitting import in_process

    begun = in_process.begin(settings().but(columns=None), held)

    def answer(ask: Any) -> Any:
        asked.extend([ask] if isinstance(ask, Doubts) else [])
        return begun.course.answer(ask)

    drive(begun.program, answer)
    (ask,) = asked
    said = {name: ask.words_of(own, COLUMNS)[0] for name, own in rows.items()}
    assert said["anna"] == said["cleo"] == []
    (words,) = said["bert"]
    assert words.startswith("column 'weight': it looks 1,000 times too large")
    assert "and its spread" in words
    assert ask.part(held._rows).tolist() == [1.0]
