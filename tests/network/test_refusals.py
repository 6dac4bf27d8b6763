"""A site that refuses for good, at any message of a run, has left at once: nobody waits for it."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest

from tests.network.losses import NO, VICTIM, Ended, Losing
from tests.network.test_losses import FARTHEST, answer

SOON_SECONDS = 60.0
"""Of the simulated clock, for a whole run, whose messages take a few seconds: `give_up` is 900, and
a masked run waits 420 for who does not answer."""
REFUSED_SECONDS = 300.0
"""What `give_up_refused` is unless said otherwise."""
FEDEM = '[algorithm]\nkind = "FedEM"\ncompressor = "dithering:4"\nstep_size = 0.5'
RUNS: dict[str, dict[str, Any]] = {
    "one model": {},
    "candidates": {"components": '"1:3"', "more": "n_init = 2"},
    "FedEM": {"algorithm": FEDEM, "start": "moments"},
    "validation": {"start": "moments", "more": "validate = true"},
}
SUBJECTS = (
    *("hello", "opening", "request", "set", "values", "statistics"),
    *("scores", "validation", "clusters", "end"),
)


@lru_cache
def calm(masks: bool, run: str) -> tuple[tuple[str, str], ...]:
    """Whom the messages of a run are for where nobody refuses, and what they ask for."""
    with TemporaryDirectory() as folder:
        network = Losing(Path(folder), masks, **RUNS[run])
        ended = network.go()
        assert len(ended.delivered) == len(network.tables), ended
        return tuple(network.asked)


def points(masks: bool, run: str, subject: str, most: int) -> list[int]:
    """Messages about a subject to the one that refuses: the first, the last and some between."""
    found = [n for n, told in enumerate(calm(masks, run), 1) if told == (VICTIM, subject)]
    return sorted({found[int(n)] for n in np.linspace(0, len(found) - 1, most)} if found else ())


def judge(tables: dict[str, Any], ended: Ended) -> None:
    """A model of all or of the others, soon, with words for why one is not in it."""
    assert ended.seconds < SOON_SECONDS, ended
    assert ended.means is not None, ended.words
    others = {name: rows for name, rows in tables.items() if name != VICTIM}
    found = np.sort(ended.means, axis=0)
    apart = [np.abs(found - answer(rows)).max() for rows in (tables, others)]
    assert min(apart) < FARTHEST, (apart, ended)
    if apart[0] > FARTHEST:
        assert f"{VICTIM} is out of the run: {NO}" in ended.told
    assert {*ended.delivered} >= others.keys()


@pytest.mark.parametrize(
    ("run", "subject", "place"),
    [
        ("candidates", "values", 0),  # starts that compete
        ("candidates", "values", -1),  # the choice at the end
        ("FedEM", "opening", 0),
        ("FedEM", "statistics", 0),  # whether it has converged
    ],
)
@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_who_refuses_a_question_of_a_masked_run_is_not_waited_for(
    run: str, subject: str, place: int, tmp_path: Path
) -> None:
    """A masked run waited for it until `give_up`, a day unless said otherwise."""
    when = points(True, run, subject, 2)[place]
    network = Losing(tmp_path, True, **RUNS[run])
    judge(dict(network.tables), network.go("this", when))


@pytest.mark.parametrize("what", ["everything", "this"])
@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_a_masked_run_that_a_refusal_leaves_with_two_sites_ends_and_says_so(
    what: str, tmp_path: Path
) -> None:
    network = Losing(tmp_path, True, "moments", components='"1:2"', sites=3)
    when = 3 * 4  # a round, early
    ended = network.go(what, when)
    assert ended.means is None
    assert ended.seconds < REFUSED_SECONDS + SOON_SECONDS, ended
    assert "1 of 3 sites refuse, and the run needs 3." in ended.words
    assert f"{VICTIM}: {NO}" in ended.words


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_a_private_run_that_somebody_refuses_ends_and_says_that_it_needs_all(
    tmp_path: Path,
) -> None:
    """Each site adds its share of the noise, so there is no going on without one."""
    network = Losing(tmp_path, True, "auto", epsilon=5.0)
    ended = network.go("this", 4 + 2)  # after the hellos
    assert ended.means is None
    assert ended.seconds < REFUSED_SECONDS + SOON_SECONDS, ended
    assert f"{VICTIM} refused, and a private run needs all who joined it." in ended.words


@pytest.mark.long
@pytest.mark.parametrize("subject", SUBJECTS)
@pytest.mark.parametrize("what", ["everything", "this"])
@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_who_refuses_at_any_message_is_not_waited_for(
    masks: bool, run: str, what: str, subject: str, tmp_path: Path
) -> None:
    for when in points(masks, run, subject, 3):
        folder = tmp_path / str(when)
        folder.mkdir()
        network = Losing(folder, masks, **RUNS[run])
        judge(dict(network.tables), network.go(what, when))
