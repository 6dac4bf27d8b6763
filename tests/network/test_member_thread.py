"""A member's thread: passes beside it, disks that fail, rows that cannot be used."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emfed.core.errors import DataError
from emfed.network.exchange import member_thread
from emfed.network.exchange.followed import Consent, Ended, MemberStore
from emfed.network.exchange.member import Follower
from emfed.network.exchange.member_thread import MemberThread, Watcher
from emfed.network.exchange.records import DiskTrouble, MemoryRecords, RecordFile
from emfed.network.exchange.relay import Relay
from tests.network.exchanges import READER, Federation, Toy

SECONDS = 60.0


class Silent(Watcher):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.troubles: list[str] = []
        self.ends: list[Ended] = []

    def said(self, follower: Follower, post: bytes) -> None: ...

    def moved(self, follower: Follower) -> None: ...

    def ended(self, end: Ended) -> None:
        self.ends.append(end)

    def troubled(self, words: str) -> None:
        self.troubles.append(words)


class Bad:
    """Rows of which one cannot be used."""

    total, count, squares = 20.0, 20, 20.0

    def sum(self, mean: Any, ragged: bool = False) -> Any:
        raise DataError("row 7 is not finite")


class Hub:
    """A relay that members reach without a network."""

    def __init__(self, folder: Path, sites: int, bad: str = "") -> None:
        self.federation = Federation(sites=sites, program=Toy(exchanges=12), options={"wait": 3.0})
        self._lock = threading.RLock()
        self._relay = Relay(self.federation.roster, MemoryRecords(), time.monotonic())
        self.watchers = {name: Silent() for name in (*self.federation.names, READER)}
        self.members = {
            name: MemberThread(folder / f"{name}.sqlite", self._make(name, bad), self._post, one)
            for name, one in self.watchers.items()
        }
        for member in self.members.values():
            member.start()

    def _make(self, name: str, bad: str) -> Callable[[MemberStore], Follower]:
        about = self.federation
        rows: Any = Bad() if name == bad else about.rows.get(name)
        commitment = bytes(32) if rows is None else np.random.default_rng(len(name)).bytes(32)

        def make(store: MemberStore) -> Follower:
            return Follower(
                about.keys[name],
                about.roster,
                store,
                Consent(lambda _: about.program),
                rows=rows,
                commitment=commitment,
                settings=about.settings if name == READER else None,
            )

        return make

    def _post(self, post: bytes) -> None:
        with self._lock:
            for name, data in self._relay.receive(post, time.monotonic()):
                self.members[name].received(data)

    def ends(self) -> dict[str, Ended]:
        end = time.monotonic() + SECONDS
        for member in self.members.values():
            assert member.over.wait(max(0.0, end - time.monotonic()))
            assert member.error is None
        return {name: member.end for name, member in self.members.items() if member.end}

    def close(self) -> None:
        for member in self.members.values():
            member.stop()


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[Callable[..., Hub]]:
    with contextlib.ExitStack() as stack:

        def make(sites: int = 3, bad: str = "") -> Hub:
            found = Hub(tmp_path, sites, bad)
            stack.callback(found.close)
            return found

        yield make


def test_a_fit_by_threads_is_that_of_one_process(hub: Callable[..., Hub]) -> None:
    found = hub()
    ends = found.ends()
    assert all(end.final for end in ends.values())
    (state,) = {end.state for end in ends.values()}
    assert np.abs(np.frombuffer(state) - found.federation.exact()).max() < 2e-4


def test_a_full_disk_is_told_and_the_fit_goes_on_when_there_is_room(
    hub: Callable[..., Hub], monkeypatch: pytest.MonkeyPatch
) -> None:
    write, left = RecordFile.sent, [7]

    def sent(file: RecordFile, context: bytes, message: bytes) -> None:
        left[0] -= 1
        if not left[0]:
            raise DiskTrouble("the disk is full")
        write(file, context, message)

    monkeypatch.setattr(RecordFile, "sent", sent)
    monkeypatch.setattr(member_thread, "DISK_PAUSE", 0.1)
    found = hub()
    assert all(end.final for end in found.ends().values())
    assert [one.troubles for one in found.watchers.values() if one.troubles] == [
        ["the disk is full"]
    ]


def test_a_site_whose_rows_cannot_be_used_leaves_and_tells_nobody_why(
    hub: Callable[..., Hub],
) -> None:
    found = hub(4, bad="dora")
    ends = found.ends()
    assert ends.pop("dora").words == "row 7 is not finite"
    assert all(end.final for end in ends.values())
    assert b"row 7" not in b"".join(found._relay.transcript.entries)
