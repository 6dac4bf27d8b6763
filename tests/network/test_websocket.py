"""The relay over real sockets: who gets in, who does not, and what bad lines do."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import emfed
from emfed.core.errors import DataError, EmfedError, ParticipationError, SettingsError
from emfed.network import join, listen
from emfed.network import keys as deployment_keys
from emfed.network.exchange.frames import framed
from emfed.network.exchange.identities import KnownMembers
from emfed.network.exchange.member_line import MemberLine
from emfed.network.exchange.relay_server import RelayServer
from emfed.network.exchange.statements import Post, StatementKind
from emfed.network.keys import read_site_keys
from emfed.network.websocket import background, greeting
from emfed.network.websocket.client import draw_pause
from emfed.network.websocket.greeting import FORGED, HELLO, MISUSE, UNKNOWN, encode_proof
from tests.network.doors import Door

SITES = ("bergen", "oslo", "tromso")
QUICK = 1.0
"""Seconds of silence after which a line is dead, in these tests."""


def wait_until(ready: Callable[[], bool], seconds: float = 60.0) -> float:
    """How long it took."""
    began = time.monotonic()
    while not ready():
        assert time.monotonic() - began < seconds, "waited in vain"
        time.sleep(0.005)
    return time.monotonic() - began


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Keys of a server, of three sites that it knows and of one that it doesn't."""
    folder = tmp_path_factory.mktemp("keys")
    deployment_keys.make_server_keys(folder / "keys", ["em.test"])
    deployment_keys.make_server_keys(folder / "other", [])
    for name in (*SITES, "stranger"):
        _, public = deployment_keys.make_site_key(folder, name)
        if name in SITES:
            deployment_keys.add_site(folder / "keys", public)
    return folder


@contextlib.contextmanager
def relay(folder: Path, keys: Path, port: int = 0, silence: float = QUICK) -> Iterator[RelayServer]:
    """A relay with the keys of a folder; its runs are in a folder of its own."""
    known = KnownMembers(read_site_keys(folder / "keys")[0], folder / "keys" / "ca.pem")
    with (
        TemporaryDirectory() as runs,
        RelayServer("127.0.0.1", port, keys, known, Path(runs), silence=silence) as found,
    ):
        yield found


@pytest.fixture
def server(folder: Path) -> Iterator[RelayServer]:
    with relay(folder, folder / "keys") as found:
        yield found


GREETING = bytes(8)
"""A message of no run, which a relay answers with the runs that there are."""


class Running:
    """A site in a thread: what it was told, what came, and what ended it."""

    def __init__(self, run: Callable[..., None], line: MemberLine | None = None) -> None:
        self.stop, self.line = threading.Event(), line
        self.words: list[str] = []
        self.came: list[bytes] = []
        self.error: Exception | None = None

        def work() -> None:
            try:
                run(stop=self.stop, report=self._hear)
            except Exception as error:
                self.error = error

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def _hear(self, kind: str, words: str) -> None:
        self.words.append(words)

    def heard(self, words: str) -> bool:
        return any(words in line for line in self.words)

    def talks(self, message: bytes = GREETING) -> bool:
        """Whether the relay answers it."""
        assert self.line is not None
        before = len(self.came)
        for _ in range(20):
            self.line.send(message)  # without a connection it is lost
            with contextlib.suppress(AssertionError):
                wait_until(lambda: len(self.came) > before, 1)
                return True
        return False

    def end(self) -> None:
        self.stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()


def calling(address: str, **options: Any) -> Running:
    """A site that keeps what the relay says."""
    came: list[bytes] = []
    line = MemberLine(address, came.append, lambda: None, **{"silence": QUICK, **options})
    running = Running(line.run, line)
    running.came = came
    return running


@pytest.fixture
def site(folder: Path, server: RelayServer) -> Iterator[Callable[..., Running]]:
    """Starts a site."""
    with contextlib.ExitStack() as ending:

        def start(
            name: str = "oslo",
            *,
            port: int | None = None,
            address: str | None = None,
            authority: str = "keys",
            **options: Any,
        ) -> Running:
            running = calling(
                address or f"127.0.0.1:{port or server.port}",
                key=folder / f"{name}.key",
                authority=folder / authority / "ca.pem",
                name=name,
                **options,
            )
            ending.callback(running.end)
            return running

        yield start


def tables() -> dict[str, Any]:
    made = {}
    for number, name in enumerate(SITES):
        source = np.random.Generator(np.random.Philox(key=number))
        centre = np.where(source.random((60, 1)) < 0.4, -2.0, 2.0)
        made[name] = centre + source.standard_normal((60, 2)) + 0.3 * number
    return made


MODEL = emfed.gaussian_mixture(2, "full")


@contextlib.contextmanager
def fitting_sites(folder: Path, where: Path, port: int) -> Iterator[list[Running]]:
    sites = [
        Running(
            partial(
                join,
                f"127.0.0.1:{port}",
                table,
                where / name,
                key=folder / f"{name}.key",
                ca=folder / "keys" / "ca.pem",
                roster=folder / "keys" / "sites",
            )
        )
        for name, table in tables().items()
    ]
    try:
        yield sites
    finally:
        for running in sites:
            running.end()


def ends_at_the_pooled_answer(found: Any) -> None:
    everything = np.concatenate([*tables().values()])
    alone = emfed.fit(MODEL, everything, seed=3)
    best = alone.log_likelihood(everything)
    assert found.log_likelihood(everything) == pytest.approx(best, abs=1e-5)


def test_listening_waits_for_sites_and_says_who_is_missing(folder: Path) -> None:
    with pytest.raises(ParticipationError, match=r"0 of 2 sites are connected \(none\)"):
        listen("127.0.0.1:0", keys=folder / "keys", expected=2, wait=0.1)
    with pytest.raises(SettingsError, match="one of the two"):
        listen("127.0.0.1:0")
    with (
        listen("127.0.0.1:0", insecure=True) as first,
        pytest.raises(EmfedError, match="cannot listen on .*stop what listens there"),
    ):
        listen(f"127.0.0.1:{first.port}", insecure=True)


def test_without_tls_only_this_machine(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="without TLS"):
        listen("0.0.0.0:0", insecure=True)
    with pytest.raises(SettingsError, match="without TLS"):
        calling("em.example.org:9400")
    with pytest.raises(SettingsError, match="needs both"):
        calling("em.example.org:9400", key=tmp_path / "x.key")
    with listen("127.0.0.1:0", insecure=True) as sites:
        running = calling(f"127.0.0.1:{sites.port}", name="trial-1")
        sites.wait_for(1, 5)
        assert sites.names == ("trial-1",)
        assert running.talks()
        running.end()
        wait_until(lambda: not sites.names, 2)


# Who gets in.


def test_a_stranger_is_told_and_let_in_when_its_key_comes(
    folder: Path, server: RelayServer, site: Any, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        running = site("stranger")
        wait_until(lambda: running.heard("does not know this site's key"))
        assert not server.workers()
        assert "may not join, SHA256:" in caplog.text
    deployment_keys.add_site(folder / "keys", folder / "stranger.pub")
    try:
        wait_until(lambda: server.workers() == ["stranger"])
        deployment_keys.remove_site(folder / "keys", "stranger")
        wait_until(lambda: not server.workers(), 2)
        wait_until(lambda: running.heard("have removed this site's key"))
        deployment_keys.add_site(folder / "keys", folder / "stranger.pub")
        wait_until(lambda: server.workers() == ["stranger"])
    finally:
        (folder / "keys" / "sites" / "stranger.pub").unlink()
    wait_until(lambda: not server.workers(), 2)


def test_a_key_stands_for_its_own_site_whatever_its_file_is_called(
    folder: Path, server: RelayServer, tmp_path: Path
) -> None:
    renamed = tmp_path / "bergen.key"
    renamed.write_bytes((folder / "oslo.key").read_bytes())
    renamed.chmod(0o600)
    authority = folder / "keys" / "ca.pem"
    running = calling(f"127.0.0.1:{server.port}", key=renamed, authority=authority, name="bergen")
    server.wait_for(1, 5)
    assert server.workers() == ["oslo"]
    running.end()


def test_another_authority_ends_a_site_that_never_got_through(site: Any) -> None:
    running = site(authority="other")
    wait_until(lambda: running.error is not None)
    assert "not the server that ca.pem stands for" in str(running.error)


def test_a_certificate_for_another_name_is_refused(
    server: RelayServer, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{Door(server.port, proxy='200 OK').port}")
    running = site(address=f"else.test:{server.port}")
    wait_until(lambda: running.error is not None)
    assert "does not name the address you gave" in str(running.error)


def test_an_expired_certificate_is_told_and_tried_again(
    tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment_keys, "SERVER_DAYS", 2 / 86400)
    deployment_keys.make_server_keys(tmp_path, [])
    with relay(folder, tmp_path) as server:
        time.sleep(2.1)
        running = calling(
            f"127.0.0.1:{server.port}", key=folder / "oslo.key", authority=tmp_path / "ca.pem"
        )
        wait_until(lambda: running.heard("certificate has expired"))
        running.end()
    with (
        pytest.raises(SettingsError, match="no site accepts it: make a new one"),
        relay(folder, tmp_path),
    ):
        pass


class Raw:
    """Somebody who speaks TLS and WebSocket, and says what it likes."""

    def __init__(self, folder: Path, port: int) -> None:
        context = ssl.create_default_context(cafile=str(folder / "keys" / "ca.pem"))
        opening = connect(f"wss://127.0.0.1:{port}/", ssl=context, compression=None, proxy=None)
        self.line = opening.__enter__()  # the server is to end it
        first = self.line.recv()
        assert isinstance(first, bytes)
        self.nonce = first.removeprefix(HELLO)
        assert isinstance(self.line.socket, ssl.SSLSocket)
        self.certificate = self.line.socket.getpeercert(binary_form=True) or b""

    def proof(self, key: Path) -> bytes:
        private = deployment_keys.read_private_key(key)
        return encode_proof(private, "", self.nonce, self.certificate, os.urandom(8))

    def say(self, message: bytes | str) -> int:
        """Say something; the code with which the server ends the connection."""
        self.line.send(message)
        with contextlib.suppress(ConnectionClosed):
            for _ in self.line:
                pass
        assert self.line.close_code is not None
        return self.line.close_code


def test_no_key_a_wrong_key_and_a_stolen_proof(
    folder: Path, server: RelayServer, site: Any, caplog: pytest.LogCaptureFixture
) -> None:
    bergen = site("bergen")
    server.wait_for(1, 5)
    assert Raw(folder, server.port).say(b"") == MISUSE
    assert Raw(folder, server.port).say("text") == MISUSE
    assert Raw(folder, server.port).say(os.urandom(200)) == UNKNOWN
    raw = Raw(folder, server.port)
    mine, theirs = raw.proof(folder / "stranger.key"), raw.proof(folder / "oslo.key")
    assert raw.say(mine[:8] + theirs[8:40] + mine[40:]) == FORGED
    raw = Raw(folder, server.port)
    proof = raw.proof(folder / "oslo.key")
    for altered in (os.urandom(8) + proof[8:], proof[:-1], theirs):  # the last: another nonce's
        assert Raw(folder, server.port).say(altered) == FORGED
    assert "signature that its key did not make" in caplog.text
    assert server.workers() == ["bergen"]
    assert bergen.talks()


def test_hostile_bytes_leave_the_others_alone(
    folder: Path, server: RelayServer, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    bergen = site("bergen")
    server.wait_for(1, 5)
    source = np.random.Generator(np.random.Philox(key=5))
    for hostile in (b"GET / HTTP/1.1\r\n\r\n", source.bytes(5000), b"\x16\x03\x01\xff\xff", b""):
        with socket.create_connection(("127.0.0.1", server.port)) as line:
            line.sendall(hostile)
    context = ssl.create_default_context(cafile=str(folder / "keys" / "ca.pem"))
    for hostile in (b"GET / HTTP/1.1\r\n\r\n", b"x" * 70_000, source.bytes(3000)):
        with (
            socket.create_connection(("127.0.0.1", server.port)) as line,
            context.wrap_socket(line, server_hostname="127.0.0.1") as safe,
            contextlib.suppress(OSError),
        ):
            safe.sendall(hostile)
            assert b"101" not in safe.recv(12)
    raw = Raw(folder, server.port)
    assert raw.say(b"x" * (greeting.LARGEST_GREETING + 1)) == 1009
    assert bergen.talks()


def test_a_crowd_of_strangers_takes_no_descriptors_and_keeps_no_site_out(
    folder: Path, server: RelayServer, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand callers who never greeted left a server without a descriptor for its files."""
    monkeypatch.setattr("emfed.network.websocket.reception.MOST_STRANGERS", 40)
    bergen = site("bergen")
    server.wait_for(1, 5)
    before = len([*Path("/proc/self/fd").iterdir()])
    crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    crowd[0].settimeout(10)
    assert crowd[0].recv(1) == b"", "the oldest makes room"
    oslo = site("oslo")
    server.wait_for(2, 10)
    assert bergen.talks()
    assert oslo.talks()
    # Those of this test's own, those of strangers, and a few of sites and files.
    assert len([*Path("/proc/self/fd").iterdir()]) < before + len(crowd) + 40 + 20
    for line in crowd:
        line.close()


def test_who_does_not_greet_is_cut_off(
    folder: Path, server: RelayServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emfed.network.websocket.reception.GREETING_SECONDS", 0.3)
    raw = Raw(folder, server.port)
    with pytest.raises(ConnectionClosed):
        raw.line.recv(timeout=3)


def test_a_message_that_is_too_large_ends_the_connection_and_no_more(
    server: RelayServer, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "LARGEST_MESSAGE", 10_000)
    oslo, bergen = site("oslo"), site("bergen")
    server.wait_for(2, 5)
    assert oslo.talks()
    oslo.line.send(bytes(20_000))
    wait_until(lambda: oslo.heard("larger than the other end takes"))
    assert bergen.talks()
    wait_until(lambda: server.workers() == ["bergen", "oslo"])
    assert oslo.talks()


def test_two_holders_of_one_key(
    server: RelayServer, site: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = site("oslo")
    server.wait_for(1, 5)
    second = site("oslo")
    wait_until(lambda: second.heard("another process is connected with this site's key"))
    assert "the key of oslo, which is in use from 127.0.0.1:" in caplog.text
    assert first.talks()
    first.end()
    wait_until(lambda: second.heard("connected to"))
    assert second.talks()


# Bad lines.


def test_a_half_open_line_is_noticed_at_both_ends(
    server: RelayServer, site: Any, caplog: pytest.LogCaptureFixture
) -> None:
    assert 1.2 * greeting.SILENCE_SECONDS <= 30, "a fifth of it is the watch's tick"
    with Door(server.port) as door:
        running = site(port=door.port)
        server.wait_for(1, 5)
        time.sleep(1.5 * QUICK)
        assert server.workers() == ["oslo"], "pings keep a quiet line alive"
        door.stall()
        assert wait_until(lambda: not server.workers()) < 1.3 * QUICK + 0.3
        assert "oslo is silent" in caplog.text
        wait_until(lambda: running.heard("was lost"), 1.5 * QUICK + 2)
        door.flow()
        wait_until(lambda: server.workers() == ["oslo"])
        assert running.talks()


def test_a_peer_that_stops_reading_holds_up_nobody(folder: Path, site: Any) -> None:
    """Hand-outs to it wait, a few at most, and its connection is cut."""
    silence = 2.0
    with relay(folder, folder / "keys", silence=silence) as server, Door(server.port) as door:
        bergen = site("bergen", port=server.port, silence=silence)
        oslo = site(port=door.port, silence=silence)
        server.wait_for(2, 10)
        door.stall()
        link = server._links["oslo"]
        for number in range(200):  # 20 MB, which do not fit into the buffers of the line
            server._background.call(link.put, framed(f"{number:016x}", bytes(100_000)))
        assert bergen.talks()
        wait_until(lambda: server.workers() == ["bergen"], 60)
        assert bergen.talks()
        wait_until(lambda: oslo.heard("was lost"), 60)


def test_a_site_that_noticed_first_takes_its_own_place(folder: Path, site: Any) -> None:
    with relay(folder, folder / "keys", silence=20.0) as server, Door(server.port) as door:
        running = site(port=door.port, silence=0.5)
        wait_until(lambda: running.heard("connected to"))
        door.stall()
        wait_until(lambda: running.heard("was lost"))
        door._flowing = threading.Event()  # what was stalled stays so; new connections pass
        door._flowing.set()
        before = len(running.words)
        wait_until(lambda: any("connected to" in words for words in running.words[before:]), 10)
        assert running.talks()


@pytest.mark.long
def test_a_large_message_over_a_slow_line_is_no_silence(
    folder: Path, server: RelayServer, site: Any
) -> None:
    with Door(server.port, rate=100_000) as door:
        running = site(port=door.port)
        server.wait_for(1, 5)
        body = os.urandom(250_000)  # 2.5 s
        post = Post("oslo", 0, bytes(8), StatementKind.FETCH, body, b"").encode()
        running.line.send(framed("0" * 15 + "1", post))
        wait_until(lambda: server.received > 250_000, 15)
        assert door.connections == 1


@pytest.mark.parametrize("bad", ["cut", "slow"])
def test_a_fit_over_a_bad_line_ends_at_the_pooled_answer(
    bad: str, folder: Path, tmp_path: Path
) -> None:
    """Connections are cut in the middle of messages, or each byte takes its time."""
    with (
        listen("127.0.0.1:0", keys=folder / "keys", columns=2) as sites,
        Door(sites.port, delay=0.05 * (bad == "slow")) as door,
        fitting_sites(folder, tmp_path, door.port),
    ):
        sites.wait_for(3, 20)

        def cut_sometimes(record: Any) -> None:
            if bad == "cut" and record.round % 4 == 1:
                door.cut_after(100)

        found = emfed.fit(MODEL, sites, seed=3, moves=0, callbacks=cut_sometimes)
        assert bad == "slow" or door.connections > 3
    ends_at_the_pooled_answer(found)


def test_through_a_proxy(server: RelayServer, site: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with Door(server.port, proxy="200 OK") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        oslo = site(address=f"em.test:{server.port}")
        server.wait_for(1, 5)
        assert oslo.talks()
        assert proxy.asked == [f"CONNECT em.test:{server.port} HTTP/1.1"]
    with Door(server.port, proxy="407 Proxy Authentication Required") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        running = site("bergen", address=f"em.test:{server.port}")
        wait_until(lambda: running.heard("the proxy refused to connect"))


def test_pauses_between_calls_double_up_to_half_a_minute_and_differ_between_sites() -> None:
    for failures, longest in ((1, 0.5), (2, 1.0), (5, 8.0), (7, 30.0), (100_000, 30.0)):
        pauses = [draw_pause(failures) for _ in range(50)]
        assert longest / 2 <= min(pauses) < 0.6 * longest
        assert 0.9 * longest < max(pauses) <= longest


def test_a_relay_that_comes_back_finds_its_sites(folder: Path) -> None:
    with relay(folder, folder / "keys") as server:
        port = server.port
        running = calling(
            f"127.0.0.1:{port}", key=folder / "oslo.key", authority=folder / "keys" / "ca.pem"
        )
        server.wait_for(1, 5)
    wait_until(lambda: running.heard("nothing listens at"))
    # Something else answers there meanwhile: accepted and closed, as balancers do.
    with socket.create_server(("127.0.0.1", port)) as balancer:
        for _ in range(2):
            balancer.accept()[0].close()
    with relay(folder, folder / "keys", port) as server:
        server.wait_for(1, 15)
        assert running.talks()
        running.end()


def test_a_pass_that_takes_long_neither_cuts_the_line_nor_holds_up_the_end(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The passes of a site are in a thread of their own."""
    began, said = threading.Event(), list[str]()

    def slow(*_: Any) -> Any:
        began.set()
        time.sleep(15)
        raise DataError("nobody waits for this")

    monkeypatch.setattr("emfed.data.summing.HeldRows.sum", slow)
    with (
        listen("127.0.0.1:0", keys=folder / "keys", columns=2) as sites,
        fitting_sites(folder, tmp_path, sites.port) as running,
    ):
        sites.wait_for(3, 20)

        def fit() -> None:
            try:
                emfed.fit(MODEL, sites)
            except EmfedError as error:
                said.append(str(error))

        fitting = threading.Thread(target=fit, daemon=True)
        fitting.start()
        assert began.wait(20)
        time.sleep(1.0)
        assert len(sites.names) == 3
        before = time.monotonic()
        running[0].end()
        assert time.monotonic() - before < 8
        sites.close()
        fitting.join(10)
    assert said == ["the sites were closed before the fit had ended."]


def test_a_folder_answers_for_one_process(tmp_path: Path) -> None:
    with listen("127.0.0.1:0", insecure=True) as sites:
        where = f"127.0.0.1:{sites.port}"
        first = Running(partial(join, where, np.zeros((5, 2)), tmp_path / "site"))
        sites.wait_for(1, 5)
        with pytest.raises(EmfedError, match="another process works in"):
            join(where, np.zeros((5, 2)), tmp_path / "site")
        first.end()


def test_a_clock_that_was_set_is_told_and_one_that_drifts_is_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    watch, now = background.ClockWatch(), time.time()
    monkeypatch.setattr(time, "time", lambda: now + 2.0)
    watch.look()
    assert not caplog.records
    monkeypatch.setattr(time, "time", lambda: now - 7200.0)
    watch.look()
    watch.look()
    assert ["jumped by -720" in record.message for record in caplog.records] == [True]
