"""The relay on WebSockets: who may speak, for whom, and what it needs."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from emfed.core.errors import SettingsError
from emfed.network.exchange.frames import RunList, framed, unframed
from emfed.network.exchange.identities import KeySigner, KnownMembers
from emfed.network.exchange.member_line import MemberLine
from emfed.network.exchange.relay_server import RelayServer
from emfed.network.exchange.statements import (
    Agreement,
    HandOut,
    Post,
    Statement,
    StatementKind,
)
from emfed.network.keys import (
    ANALYST,
    make_server_keys,
    make_site_key,
    read_public_key,
    read_site_keys,
)
from emfed.network.websocket.greeting import EXPLANATIONS, MISUSE
from tests.network.processes import make_keys

SITES = ["bergen", "oslo"]
SOON = 10.0
"""Seconds."""
RUN, OTHER = "00000000000000a1", "00000000000000b2"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_keys(SITES, tmp_path)
    return tmp_path


def members(folder: Path) -> KnownMembers:
    return KnownMembers(read_site_keys(folder / "keys")[0], folder / "keys" / "ca.pem")


@pytest.fixture
def relay(folder: Path) -> Iterator[RelayServer]:
    place = folder / "runs"
    with RelayServer("127.0.0.1", 0, folder / "keys", members(folder), place) as server:
        yield server


class Caller:
    """A site that says what it likes."""

    def __init__(self, folder: Path, relay: RelayServer, name: str) -> None:
        self.came: list[bytes] = []
        self.news: list[str] = []
        self._stop, ready = threading.Event(), threading.Event()
        self.line = MemberLine(
            f"127.0.0.1:{relay.port}",
            self.came.append,
            ready.set,
            key=folder / f"{name}.key",
            authority=folder / "keys" / "ca.pem",
            name=name,
            stay=False,
        )
        self._thread = threading.Thread(
            target=self.line.run, args=(self._stop, lambda kind, words: self.news.append(words))
        )
        self._thread.start()
        assert ready.wait(SOON)

    def runs(self) -> list[str]:
        """The runs that it was told of last."""
        lists = [message for run, message in map(unframed, self.came) if not run]
        return [*RunList.decode(lists[-1]).runs] if lists else []

    def handed(self, run: str = RUN) -> list[HandOut]:
        """What was handed out to it of a run."""
        return handed(self.came, run)

    def close(self) -> None:
        self._stop.set()
        self._thread.join(SOON)


@pytest.fixture
def call(folder: Path, relay: RelayServer) -> Iterator[Any]:
    callers = []

    def make(name: str) -> Caller:
        callers.append(Caller(folder, relay, name))
        return callers[-1]

    yield make
    for caller in callers:
        caller.close()


def until(true: Any) -> None:
    end = time.monotonic() + SOON
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


def handed(came: list[bytes], run: str = RUN) -> list[HandOut]:
    return [HandOut.decode(message) for one, message in map(unframed, came) if one == run]


def fetch(name: str, length: int = 0, run: str = RUN) -> bytes:
    return framed(run, Post(name, length, bytes(8), StatementKind.FETCH, b"", b"").encode())


def settings(folder: Path, run: str = RUN, sites: tuple[str, ...] = tuple(SITES)) -> bytes:
    signer = KeySigner.of_analyst(folder / "keys")
    body = Agreement(sites, (ANALYST,), masked=False, run=run, program={}).document()
    signed = Statement.by(signer, body)
    post = Post(ANALYST, 0, bytes(8), body.KIND, signed.body, signed.signature)
    return framed(run, post.encode())


def test_a_relay_needs_no_model_code() -> None:
    code = (
        "import sys, emfed.network.exchange.relay_server; rooms = ('models', 'fitting', 'data',"
        " 'algorithms', 'artifacts', 'imputation'); print([m for m in sys.modules if"
        " m.startswith(tuple(f'emfed.{room}' for room in rooms))])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, check=True)
    assert found.stdout.strip() == b"[]"


def test_entries_reach_all_who_are_connected(folder: Path, relay: RelayServer, call: Any) -> None:
    """The analyst is in the relay's process; sites call."""
    came: list[bytes] = []
    say = relay.attach(ANALYST, came.append)
    oslo = call("oslo")
    say(settings(folder))
    until(lambda: handed(came))
    until(lambda: oslo.runs() == [RUN])
    oslo.line.send(fetch("oslo"))
    until(lambda: oslo.handed() and oslo.handed()[-1].entries)
    assert oslo.handed()[-1].entries == handed(came)[-1].entries


def test_members_are_told_of_the_runs_that_name_them(
    folder: Path, relay: RelayServer, call: Any
) -> None:
    say = relay.attach(ANALYST, lambda data: None)
    say(settings(folder))
    say(settings(folder, OTHER, ("bergen",)))
    oslo, bergen = call("oslo"), call("bergen")
    until(lambda: set(bergen.runs()) == {RUN, OTHER})
    until(lambda: oslo.runs() == [RUN])


def test_a_site_begins_no_run(relay: RelayServer, call: Any) -> None:
    oslo = call("oslo")
    until(lambda: oslo.came)
    oslo.line.send(fetch("oslo"))
    until(lambda: len(oslo.came) == 2)
    assert oslo.runs() == []


def test_an_analyst_may_call_from_elsewhere(folder: Path, relay: RelayServer, call: Any) -> None:
    """It shows the authority's key, which the relay need not have."""
    came: list[bytes] = []
    stop, ready = threading.Event(), threading.Event()
    line = MemberLine(
        f"127.0.0.1:{relay.port}",
        came.append,
        ready.set,
        key=folder / "keys" / "ca.key",
        authority=folder / "keys" / "ca.pem",
        name=ANALYST,
    )
    thread = threading.Thread(target=line.run, args=(stop,))
    thread.start()
    assert ready.wait(SOON)
    line.send(settings(folder))
    oslo = call("oslo")
    until(lambda: oslo.runs() == [RUN])
    stop.set()
    thread.join(SOON)


def test_who_speaks_for_another_is_cut_off(relay: RelayServer, call: Any) -> None:
    oslo = call("oslo")
    oslo.line.send(fetch("bergen"))
    until(lambda: any(EXPLANATIONS[MISUSE] in words for words in oslo.news))
    assert not oslo.handed()


@pytest.mark.parametrize("noise", [b"", b"\x00", b"x" * 1000])
def test_noise_is_cut_off_and_others_go_on(relay: RelayServer, call: Any, noise: bytes) -> None:
    oslo, bergen = call("oslo"), call("bergen")
    oslo.line.send(noise)
    until(lambda: oslo.news and any(EXPLANATIONS[MISUSE] in words for words in oslo.news))
    bergen.line.send(fetch("bergen"))
    until(lambda: bergen.came)


def test_a_flood_keeps_nobody_out(relay: RelayServer, call: Any) -> None:
    """Posts of the flooder's own name that mean nothing; another site is heard in between."""
    oslo, bergen = call("oslo"), call("bergen")
    post = Post("oslo", 0, bytes(8), StatementKind.HELLO, b"x" * 2000, b"y" * 96).encode()
    junk = framed(RUN, post)
    for _ in range(40):
        for _ in range(50):
            oslo.line.send(junk)
        began = len(bergen.came)
        bergen.line.send(fetch("bergen"))
        until(lambda began=began: len(bergen.came) > began)


def test_a_relay_goes_on_from_its_files(folder: Path) -> None:
    place, known = folder / "runs", members(folder)
    for again in range(2):
        came: list[bytes] = []
        with RelayServer("127.0.0.1", 0, folder / "keys", known, place) as relay:
            say = relay.attach(ANALYST, came.append)
            for run in (RUN, OTHER):
                say(fetch(ANALYST, run=run) if again else settings(folder, run))
                until(lambda came=came, run=run: handed(came, run))
        assert [handed(came, run)[-1].total for run in (RUN, OTHER)] == [1, 1]


def test_no_site_may_be_called_as_the_analyst(tmp_path: Path) -> None:
    make_server_keys(tmp_path / "keys", [])
    make_site_key(tmp_path, ANALYST)
    public = read_site_keys(tmp_path / "keys")[0]
    public[ANALYST] = read_public_key(tmp_path / f"{ANALYST}.pub")
    with pytest.raises(SettingsError, match="another name"):
        KnownMembers(public, tmp_path / "keys" / "ca.pem")
