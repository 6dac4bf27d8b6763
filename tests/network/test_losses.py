"""Whatever is lost, at any message of a run: it heals, or the run ends soon, and says why."""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import numpy as np
import pytest

from emfed import fit, gaussian_mixture
from emfed.core.registry import plain
from emfed.core.wire import (
    Header,
    Kind,
    as_json,
    decode_refusal,
    deflate,
    kind_of,
    open_refusal,
    seal,
)
from emfed.network import texts
from tests.network.losses import GIVE_UP_SECONDS, VICTIM, Ended, Losing

LONGEST_SECONDS = 600.0
"""A masked run waits for somebody for seven minutes."""
FARTHEST = 5e-3
"""Of a mean: runs end where a round gains little, on a lattice."""
HEALED = (
    *("disk", "run", "backup", "key", "roster"),
    *("answer_and_server", "server_backup", "server_disk"),
)
"""After these everybody counts, with the rows of before."""
LOSSES = (*HEALED, "rows", "rows_and_disk", "damage")
KINDS = ("hello", "bundle", "question", "request", "set", "end")


def answer(tables: dict[str, Any]) -> Any:
    return np.sort(fit(gaussian_mixture(2), tables, "em", rounds=300, seed=5).params.means, axis=0)


@lru_cache
def calm(masks: bool, start: str) -> tuple[tuple[str, str], ...]:
    """Whom the messages of a run are for where nothing is lost, and of which kinds they are."""
    with TemporaryDirectory() as folder:
        network = Losing(Path(folder), masks, start)
        ended = network.go()
        assert len(ended.delivered) == len(network.tables), ended
        assert np.abs(np.sort(ended.means, axis=0) - answer(network.tables)).max() < FARTHEST
        return tuple(network.kinds)


def judge(network: Losing, before: dict[str, Any], loss: str, ended: Ended) -> None:
    """One of the models that may come out, within the time, with words for what is not healed."""
    if loss == "key" and ended.means is None:  # from the first hello on: people must pin it
        assert ended.seconds < GIVE_UP_SECONDS + 60.0
        assert f"{VICTIM}. Put their NAME.pub into the roster" in ended.words
        return
    assert ended.seconds < LONGEST_SECONDS, ended.words
    assert ended.means is not None, ended.words
    found = np.sort(ended.means, axis=0)
    others = {name: rows for name, rows in before.items() if name != VICTIM}
    may_be = {"all": before} if loss in HEALED else {"all": before, "others": others}
    if "rows" in loss:  # before the first hello; or who lost all, and a sum tells nobody
        may_be["new"] = network.tables
    apart = {name: np.abs(found - answer(rows)).max() for name, rows in may_be.items()}
    assert min(apart.values()) < FARTHEST, (apart, ended)
    if apart["all"] > FARTHEST:
        assert VICTIM in ended.told
    else:
        assert {*ended.delivered} >= others.keys()


def points(masks: bool, start: str, kind: str, most: int) -> list[int]:
    """Messages of a kind to the one that is hit, the first, the last and some between."""
    found = [n for n, told in enumerate(calm(masks, start), 1) if told == (VICTIM, kind)]
    if not found:
        return []
    return sorted({found[int(n)] for n in np.linspace(0, len(found) - 1, most)})


def lose(masks: bool, start: str, loss: str, when: int, folder: Path) -> None:
    network = Losing(folder, masks, start)
    before = dict(network.tables)
    judge(network, before, loss, network.go(loss, when, kept_at=max(1, when - 25)))


@pytest.mark.parametrize("loss", ["disk", "backup", "roster", "answer_and_server"])
@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_what_is_lost_between_the_two_steps_of_a_masked_sum_heals_soon(
    loss: str, tmp_path: Path
) -> None:
    """A run stood still for all its attempts, since the answer that was ready never came; or for
    good, where others had told theirs."""
    (when,) = points(True, "moments", "set", 3)[1:2]
    network = Losing(tmp_path, True, "moments")
    before = dict(network.tables)
    ended = network.go(loss, when, kept_at=when - 25)
    judge(network, before, loss, ended)
    assert ended.seconds < 30.0


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_who_is_out_when_a_masked_model_is_looked_at_is_not_waited_for(tmp_path: Path) -> None:
    """A run waited a day for a word about a model that was there."""
    network = Losing(tmp_path, True, "moments")
    before = dict(network.tables)
    ended = network.go("rows", points(True, "moments", "question", 2)[-1])
    judge(network, before, "rows", ended)
    assert ended.seconds < 60.0
    summary = (tmp_path / "model" / "summary.json").read_text(encoding="utf-8")
    assert "the model is whole" in summary
    assert f"{VICTIM}: its data changed" in summary


@pytest.mark.long
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
def test_whatever_is_lost_at_any_message_heals_or_ends_with_words(
    masks: bool, loss: str, kind: str, tmp_path: Path
) -> None:
    for when in points(masks, "k-means", kind, 3):
        folder = tmp_path / str(when)
        folder.mkdir()
        lose(masks, "k-means", loss, when, folder)


@pytest.mark.parametrize("harm", ["damaged", "full"])
def test_a_site_tells_a_damaged_file_from_a_full_disk_without_a_traceback(
    harm: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To remove files is no advice for a full disk."""
    network = Losing(tmp_path, True, "moments")
    site = network.sites[VICTIM]
    content = texts.hello(plain(gaussian_mixture(2).describe()), None, masks=True)
    hello = Header(Kind.HELLO, 7, 1, 0, 0), deflate(as_json(content))
    assert kind_of(site.step(seal(*hello))) is Kind.JOIN
    if harm == "damaged":
        (tmp_path / VICTIM / "secret").write_bytes(b"rubbish")
        network.again()
    else:
        full = mock.Mock(side_effect=OSError(28, "No space left on device"))
        monkeypatch.setattr(site.disk, "create", full)
    message = seal(replace(hello[0], run=8), hello[1])
    caplog.clear()
    told = decode_refusal(open_refusal(network.sites[VICTIM].step(message))[1])[1]
    assert "Traceback" not in caplog.text
    assert ("is damaged" in told) is (harm == "damaged")
    assert ("lost its disk" in caplog.text) is (harm == "damaged")
    assert ("No space left" in caplog.text) is (harm == "full")
