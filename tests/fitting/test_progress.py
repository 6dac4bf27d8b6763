"""The bar of a fit: rounds, then the stages beside them."""

from __future__ import annotations

from emfed.fitting.progress import ProgressBar
from emfed.fitting.stopping import Stop


def test_a_stage_tells_its_name_its_share_and_what_is_left() -> None:
    told: list[str] = []
    bar = ProgressBar(told.append, 0.0, Stop(rounds=3))
    bar.stage("choosing rank", 0.0)
    bar.stage("choosing rank", 0.5)
    bar.stage("drawing", 1.0)
    assert [words.split("  ")[1] for words in told] == ["choosing rank", "choosing rank", "drawing"]
    assert [words.count("━") for words in told] == [0, 8, 16]


def test_a_new_stage_is_told_at_once_and_the_rest_now_and_then() -> None:
    told: list[str] = []
    bar = ProgressBar(told.append, 1e9, Stop(rounds=3))
    for share in (0.1, 0.2):
        bar.stage("first", share)
    bar.stage("second", 0.1)
    assert [words.split("  ")[1] for words in told] == ["first", "second"]
