"""The bar of a fit: rounds, then the stages beside them."""

from __future__ import annotations

import dataclasses
import os
import re
import signal
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.records import RoundRecord
from emfed.fitting.progress import FEWEST, ProgressBar, progress
from emfed.fitting.stopping import Stop
from tests.helpers import make_data


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


def record(number: int, **more: Any) -> RoundRecord:
    sent = {"bytes_up": 300, "bytes_down": 700}
    blank = RoundRecord(number, 0, 3, 3, 1e-3, 0.0, 0, 0, 0, 0, 0, 0, 0.0, 0.0)
    return dataclasses.replace(blank, **sent, **more)


def test_rounds_tell_nats_that_only_grow_and_what_is_left() -> None:
    told: list[str] = []
    bar = ProgressBar(told.append, 0.0, Stop(rounds=100, nats=1e-6))
    for number, objective in enumerate([5.0, 4.5, 4.7, 4.2], 1):
        bar(record(number, objective=objective, gain=0.1, left=0.25))
    gained = [words.split("  ")[1] for words in told]
    assert gained == [f"{v} nats a row gained" for v in ("0", "0.5", "0.5", "0.8")]
    assert all("about 0.2 left" in words and "|H|²" not in words for words in told)


def test_nobody_says_how_long_it_takes_before_it_is_known() -> None:
    told: list[str] = []
    bar = ProgressBar(told.append, 0.0, Stop(rounds=1000, nats=1e-6))
    for number in range(1, 21):
        bar(record(number, gain=0.1 * 0.5**number))
    early, late = told[: FEWEST - 1], told[FEWEST:]
    assert not any(" s" in words or "min" in words or "━" in words for words in early)
    assert all(re.search(r"about \d+ s$", words) for words in late)
    limited = list[str]()
    bar = ProgressBar(limited.append, 0.0, Stop(rounds=10))  # there is no other goal
    bar(record(1))
    assert "about" in limited[0]


def test_without_a_terminal_a_long_fit_writes_lines_and_a_short_one_none(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr("emfed.fitting.progress.time.monotonic", lambda: now[0])
    with progress(Stop(rounds=100)) as bar:
        for number in range(1, 13):
            now[0] += 1.0
            bar(record(number, gain=0.1))
    lines = capsys.readouterr().err.splitlines()
    assert ["round 5" in lines[0], "round 10" in lines[1]] == [True, True]
    assert len(lines) == 2
    now[0] = 0.0
    with progress(Stop(rounds=100)) as bar:
        bar.stage("choosing rank", 0.1)
        bar(record(1))
    assert capsys.readouterr().err == ""


def test_ctrl_c_leaves_an_estimator_with_what_was_reached(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    look = ProgressBar.__call__

    def interrupted(self: ProgressBar, told: RoundRecord) -> None:
        look(self, told)
        if told.round == 3:
            os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(ProgressBar, "__call__", interrupted)
    X = np.concatenate(make_data(0))
    estimator = emfed.FederatedGaussianMixture(3, verbose=True, tol=1e-12, max_iter=400)
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with pytest.raises(KeyboardInterrupt, match="holds what .* rounds have reached"):
            estimator.fit(X, groups=np.arange(len(X)) % 3)
    finally:
        signal.signal(signal.SIGINT, before)
    assert estimator.result_.stopped == "interrupted"
    assert 3 <= estimator.n_iter_ < 10
    assert estimator.predict(X).shape == (len(X),)
    assert not estimator.converged_
