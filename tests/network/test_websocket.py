"""The default engine over real sockets: who gets in, who does not, and what bad lines do."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from websockets.exceptions import ConnectionClosed
from websockets.sync.client import connect

import emfed
from emfed.core.errors import EmfedError, ParticipationError, SettingsError
from emfed.network import keys as deployment_keys
from emfed.network.websocket import background, greeting, join, listen
from emfed.network.websocket.client import SiteConnection, draw_pause
from emfed.network.websocket.greeting import FORGED, HELLO, MISUSE, UNKNOWN, encode_proof
from emfed.network.websocket.server import WebSocketTransport
from tests.helpers import OPEN
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


@pytest.fixture
def server(folder: Path) -> Iterator[WebSocketTransport]:
    with WebSocketTransport("127.0.0.1", 0, folder / "keys", silence=QUICK, absent=3.0) as found:
        yield found


class Running:
    """A site in a thread."""

    def __init__(self, run: Callable[..., None], *arguments: Any, **options: Any) -> None:
        self.stop = threading.Event()
        self.words: list[Any] = []
        self.error: Exception | None = None

        def work() -> None:
            try:
                run(*arguments, stop=self.stop, report=self._hear, **options)
            except Exception as error:
                self.error = error

        self._thread = threading.Thread(target=work, daemon=True)
        self._thread.start()

    def _hear(self, kind: str, words: str) -> None:
        self.words.append(words)

    def heard(self, words: str) -> bool:
        return any(words in line for line in self.words)

    def end(self) -> None:
        self.stop.set()
        self._thread.join(10)
        assert not self._thread.is_alive()


@pytest.fixture
def site(folder: Path, server: WebSocketTransport) -> Iterator[Callable[..., Running]]:
    """Starts a site that echoes, or answers with ``step``."""
    with contextlib.ExitStack() as ending:

        def start(
            name: str = "oslo",
            step: Callable[[bytes], bytes] = bytes,
            *,
            port: int | None = None,
            address: str | None = None,
            authority: str = "keys",
            **options: Any,
        ) -> Running:
            connection = SiteConnection(
                address or f"127.0.0.1:{port or server.port}",
                step,
                key=folder / f"{name}.key",
                authority=folder / authority / "ca.pem",
                **{"silence": QUICK, **options},
            )
            running = Running(connection.run)
            ending.callback(running.end)
            return running

        yield start


def ask(
    server: WebSocketTransport, message: bytes = b"?", seconds: float = 5.0
) -> dict[str, bytes]:
    return dict(server.deliver(dict.fromkeys(server.workers(), message), seconds))


def tables() -> dict[str, Any]:
    made = {}
    for number, name in enumerate(SITES):
        source = np.random.Generator(np.random.Philox(key=number))
        centre = np.where(source.random((60, 1)) < 0.4, -2.0, 2.0)
        made[name] = centre + source.standard_normal((60, 2)) + 0.3 * number
    return made


MODEL = emfed.gaussian_mixture(2, "full")
ALGORITHM = emfed.FedEM(emfed.Dithering(levels=4))


def fit_over(transport: emfed.network.Transport, rounds: int = 6, **options: Any) -> Any:
    federation = emfed.network.RemoteFederation(
        transport, **{"minimum": 3, "pause": 0.05, "masks": False, **options}
    )
    return emfed.fit(MODEL, None, ALGORITHM, federation=federation, rounds=rounds, seed=3)


def same_answer(found: Any, rounds: int = 6) -> None:
    alone = emfed.fit(MODEL, tables(), ALGORITHM, federation="loop", rounds=rounds, seed=3)
    for name, values in alone.params.arrays().items():
        np.testing.assert_allclose(found.params.arrays()[name], values, rtol=1e-12, atol=1e-12)


@contextlib.contextmanager
def fitting_sites(folder: Path, where: Path, port: int, **options: Any) -> Iterator[list[Running]]:
    sites = [
        Running(
            join,
            f"127.0.0.1:{port}",
            table,
            where / name,
            key=folder / f"{name}.key",
            ca=folder / "keys" / "ca.pem",
            **{"rules": OPEN, **options},
        )
        for name, table in tables().items()
    ]
    try:
        yield sites
    finally:
        for running in sites:
            running.end()


def test_three_sites_end_where_one_process_ends_and_fit_again(folder: Path, tmp_path: Path) -> None:
    with (
        listen("127.0.0.1:0", keys=folder / "keys") as transport,
        fitting_sites(folder, tmp_path, transport.port),
    ):
        transport.wait_for(3, 10)
        found = fit_over(transport)
        same_answer(found)
        sites = {
            name: emfed.network.Site(t, tmp_path / "local" / name, rules=OPEN)
            for name, t in tables().items()
        }
        local = fit_over(emfed.network.LocalTransport(sites))
        assert found.ledger.summary() == local.ledger.summary()
        assert (found.bytes_up, found.bytes_down) == (transport.received, transport.sent)
        same_answer(fit_over(transport, 4), 4)
        assert transport.workers() == list(SITES)


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
    with pytest.raises(EmfedError, match="closed"):
        list(first.deliver({"oslo": b"?"}, 5.0))


def test_without_tls_only_this_machine(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="without TLS"):
        listen("0.0.0.0:0", insecure=True)
    with pytest.raises(SettingsError, match="without TLS"):
        SiteConnection("em.example.org:9400", bytes)
    with pytest.raises(SettingsError, match="needs both"):
        SiteConnection("em.example.org:9400", bytes, key=tmp_path / "x.key")
    with listen("127.0.0.1:0", insecure=True) as transport:
        connection = SiteConnection(f"127.0.0.1:{transport.port}", bytes, name="trial-1")
        running = Running(connection.run)
        transport.wait_for(1, 5)
        assert ask(transport) == {"trial-1": b"?"}
        running.end()
        wait_until(lambda: not transport.workers(), 2)


# Who gets in.


def test_a_stranger_is_told_and_let_in_when_its_key_comes(
    folder: Path, server: WebSocketTransport, site: Any, caplog: pytest.LogCaptureFixture
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
    folder: Path, server: WebSocketTransport, tmp_path: Path
) -> None:
    renamed = tmp_path / "bergen.key"
    renamed.write_bytes((folder / "oslo.key").read_bytes())
    renamed.chmod(0o600)
    running = Running(
        join,
        f"127.0.0.1:{server.port}",
        np.zeros((5, 2)),
        tmp_path / "site",
        key=renamed,
        ca=folder / "keys" / "ca.pem",
        name="bergen",
    )
    server.wait_for(1, 5)
    assert server.workers() == ["oslo"]
    running.end()


def test_another_authority_ends_a_site_that_never_got_through(site: Any) -> None:
    running = site(authority="other")
    wait_until(lambda: running.error is not None)
    assert "not the server that ca.pem stands for" in str(running.error)


def test_a_certificate_for_another_name_is_refused(
    server: WebSocketTransport, site: Any, monkeypatch: pytest.MonkeyPatch
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
    with WebSocketTransport("127.0.0.1", 0, tmp_path) as server:
        time.sleep(2.1)
        connection = SiteConnection(
            f"127.0.0.1:{server.port}",
            bytes,
            key=folder / "oslo.key",
            authority=tmp_path / "ca.pem",
        )
        running = Running(connection.run)
        wait_until(lambda: running.heard("certificate has expired"))
        running.end()
    with pytest.raises(SettingsError, match="no site accepts it: make a new one"):
        WebSocketTransport("127.0.0.1", 0, tmp_path)


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
    folder: Path, server: WebSocketTransport, site: Any, caplog: pytest.LogCaptureFixture
) -> None:
    site("bergen")
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
    assert ask(server) == {"bergen": b"?"}


def test_hostile_bytes_leave_the_others_alone(
    folder: Path, server: WebSocketTransport, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    site("bergen")
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
    assert ask(server) == {"bergen": b"?"}


def test_a_crowd_of_strangers_takes_no_descriptors_and_keeps_no_site_out(
    folder: Path, server: WebSocketTransport, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thousand callers who never greeted left a server without a descriptor for its files."""
    monkeypatch.setattr("emfed.network.websocket.reception.MOST_STRANGERS", 40)
    site("bergen")
    server.wait_for(1, 5)
    before = len([*Path("/proc/self/fd").iterdir()])
    crowd = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(200)]
    crowd[0].settimeout(10)
    assert crowd[0].recv(1) == b"", "the oldest makes room"
    site("oslo")
    server.wait_for(2, 10)
    assert ask(server) == {"bergen": b"?", "oslo": b"?"}
    # Those of this test's own, those of strangers, and a few of sites and files.
    assert len([*Path("/proc/self/fd").iterdir()]) < before + len(crowd) + 40 + 20
    for line in crowd:
        line.close()


def test_who_does_not_greet_is_cut_off(
    folder: Path, server: WebSocketTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emfed.network.websocket.reception.GREETING_SECONDS", 0.3)
    raw = Raw(folder, server.port)
    with pytest.raises(ConnectionClosed):
        raw.line.recv(timeout=3)


def test_a_message_that_is_too_large_ends_the_connection_and_no_more(
    server: WebSocketTransport, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(background, "LARGEST_MESSAGE", 10_000)
    running = site("oslo", lambda question: question * 10)
    site("bergen")
    server.wait_for(2, 5)
    assert ask(server, b"x" * 2000) == {"bergen": b"x" * 2000}
    wait_until(lambda: running.heard("larger than the other end takes"))
    wait_until(lambda: server.workers() == ["bergen", "oslo"])
    assert set(ask(server)) == {"bergen", "oslo"}


def test_a_site_speaks_when_it_is_asked(
    folder: Path, server: WebSocketTransport, caplog: pytest.LogCaptureFixture
) -> None:
    raw = Raw(folder, server.port)
    raw.line.send(raw.proof(folder / "oslo.key"))
    assert raw.line.recv() == b"welcome oslo"
    assert raw.say(b"I have an idea") == MISUSE
    assert "spoke without being asked" in caplog.text


def test_an_answer_that_crosses_the_servers_farewell_is_no_misuse(
    server: WebSocketTransport, site: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """As when its key was rotated while it worked: three times in 112 events it was blamed."""

    def late(question: bytes) -> bytes:
        server._background.run(drop())
        return question

    async def drop() -> None:
        server._drop(server._links["oslo"])

    site(step=late)
    server.wait_for(1, 5)
    assert ask(server) == {}
    wait_until(lambda: server.workers() == ["oslo"], 10)  # it calls again
    assert "without being asked" not in caplog.text


def test_two_holders_of_one_key(
    server: WebSocketTransport, site: Any, caplog: pytest.LogCaptureFixture
) -> None:
    first = site("oslo", lambda _: b"first")
    server.wait_for(1, 5)
    second = site("oslo", lambda _: b"second")
    wait_until(lambda: second.heard("another process is connected with this site's key"))
    assert "the key of oslo, which is in use from 127.0.0.1:" in caplog.text
    assert ask(server) == {"oslo": b"first"}
    first.end()
    wait_until(lambda: ask(server) == {"oslo": b"second"})


# Bad lines.


def test_a_half_open_line_is_noticed_at_both_ends(
    server: WebSocketTransport, site: Any, caplog: pytest.LogCaptureFixture
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
        assert ask(server) == {"oslo": b"?"}


def test_a_peer_that_stops_reading_holds_up_nobody(folder: Path, site: Any) -> None:
    silence = 3.0  # sites and server share this process, and 20 MB keep it busy for a while
    with (
        WebSocketTransport("127.0.0.1", 0, folder / "keys", silence=silence, absent=3.0) as server,
        Door(server.port) as door,
    ):
        site("bergen", port=server.port, silence=silence)
        site(port=door.port, silence=silence)
        server.wait_for(2, 10)
        time.sleep(0.1)
        door.stall()
        began = time.monotonic()
        # Nobody reads at the other end of oslo's line: 20 MB do not fit in its buffers.
        assert set(ask(server, b"x" * 20_000_000, 120.0)) == {"bergen"}
        assert time.monotonic() - began < 60, "not until the deadline"
        assert server.workers() == ["bergen"]


def test_a_site_that_noticed_first_takes_its_own_place(folder: Path, site: Any) -> None:
    with (
        WebSocketTransport("127.0.0.1", 0, folder / "keys", silence=20.0) as server,
        Door(server.port) as door,
    ):
        running = site(port=door.port, silence=0.5)
        wait_until(lambda: running.heard("connected to"))
        door.stall()
        wait_until(lambda: running.heard("was lost"))
        door._flowing = threading.Event()  # what was stalled stays so; new connections pass
        door._flowing.set()
        wait_until(lambda: ask(server, seconds=0.5) == {"oslo": b"?"}, 5)


@pytest.mark.long
def test_a_large_message_over_a_slow_line_is_no_silence(
    server: WebSocketTransport, site: Any
) -> None:
    with Door(server.port, rate=100_000) as door:
        site(port=door.port)
        server.wait_for(1, 5)
        large = os.urandom(250_000)  # 2.5 s each way
        assert ask(server, large, 15.0) == {"oslo": large}
        assert door.connections == 1


def test_a_connection_cut_in_mid_message_loses_nothing(folder: Path, tmp_path: Path) -> None:
    with (
        WebSocketTransport("127.0.0.1", 0, folder / "keys") as server,
        Door(server.port) as door,
        fitting_sites(folder, tmp_path, door.port),
    ):
        server.wait_for(3, 5)

        def cut_sometimes(record: Any) -> None:
            if record.round % 3 == 1:
                door.cut_after(100)

        federation = emfed.network.RemoteFederation(
            server, minimum=3, pause=0.05, attempts=20, masks=False
        )
        found = emfed.fit(
            MODEL,
            None,
            ALGORITHM,
            federation=federation,
            rounds=9,
            seed=3,
            callbacks=[cut_sometimes],
        )
        assert door.connections >= 6
    same_answer(found, 9)


def test_a_slow_line_changes_nothing(folder: Path, tmp_path: Path) -> None:
    with (
        WebSocketTransport("127.0.0.1", 0, folder / "keys") as server,
        Door(server.port, delay=0.1) as door,
        fitting_sites(folder, tmp_path, door.port),
    ):
        server.wait_for(3, 20)
        same_answer(fit_over(server, 3), 3)


def test_through_a_proxy(
    server: WebSocketTransport, site: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Door(server.port, proxy="200 OK") as proxy:
        monkeypatch.setenv("HTTPS_PROXY", f"http://127.0.0.1:{proxy.port}")
        site(address=f"em.test:{server.port}")
        server.wait_for(1, 5)
        assert ask(server) == {"oslo": b"?"}
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


def test_a_server_that_comes_back_finds_its_sites(folder: Path, tmp_path: Path) -> None:
    with WebSocketTransport("127.0.0.1", 0, folder / "keys") as server:
        port = server.port
        connection = SiteConnection(
            f"127.0.0.1:{port}",
            bytes,
            key=folder / "oslo.key",
            authority=folder / "keys" / "ca.pem",
        )
        running = Running(connection.run)
        server.wait_for(1, 5)
    wait_until(lambda: running.heard("nothing listens at"))
    # Something else answers there meanwhile: accepted and closed, as balancers do.
    with socket.create_server(("127.0.0.1", port)) as balancer:
        for _ in range(2):
            balancer.accept()[0].close()
    with WebSocketTransport("127.0.0.1", port, folder / "keys") as server:
        server.wait_for(1, 15)
        assert ask(server) == {"oslo": b"?"}
        running.end()


# Questions and answers.


def test_a_site_at_work_stays_connected(server: WebSocketTransport, site: Any) -> None:
    def slow(question: bytes) -> bytes:
        time.sleep(2.5 * QUICK)
        return question

    running = site(step=slow)
    server.wait_for(1, 5)
    assert ask(server, b"1", 10.0) == {"oslo": b"1"}
    assert len([line for line in running.words if "connected" in line]) == 1


def test_only_the_newest_question_waits_for_a_busy_site(
    server: WebSocketTransport, site: Any
) -> None:
    asked: list[bytes] = []
    ready = threading.Event()

    def slow(question: bytes) -> bytes:
        asked.append(question)
        ready.wait(5)
        return question

    site(step=slow)
    server.wait_for(1, 5)
    for number in range(4):
        assert list(server.deliver({"oslo": b"%d" % number}, 0.1)) == []
    threading.Timer(0.2, ready.set).start()
    # The answer to the first question comes late, and the last question is still put.
    assert list(server.deliver({"oslo": b"last"}, 5.0)) == [("oslo", b"0"), ("oslo", b"last")]
    assert asked == [b"0", b"last"]


def test_a_question_waits_for_a_site_that_may_be_back(
    server: WebSocketTransport, site: Any
) -> None:
    first = site()
    server.wait_for(1, 5)
    first.end()
    wait_until(lambda: not server.workers())
    threading.Timer(0.3, site).start()
    assert dict(server.deliver({"oslo": b"?"}, 10.0)) == {"oslo": b"?"}
    began = time.monotonic()
    assert dict(server.deliver({"bergen": b"?", "oslo": b"?"}, 10.0)) == {"oslo": b"?"}
    time.sleep(max(0.0, 3.0 - (time.monotonic() - began)))
    began = time.monotonic()
    assert dict(server.deliver({"bergen": b"?", "oslo": b"?"}, 10.0)) == {"oslo": b"?"}
    assert time.monotonic() - began < 0.5, "who has been away for long is not waited for"


def test_a_site_that_fails_is_not_waited_for(server: WebSocketTransport, site: Any) -> None:
    def fails(question: bytes) -> bytes:
        raise OSError("the disk is full")

    site(step=fails)
    server.wait_for(1, 5)
    began = time.monotonic()
    assert ask(server) == {}
    assert time.monotonic() - began < 2


def test_told_to_stop_a_site_ends_at_once_even_at_work(
    server: WebSocketTransport, site: Any
) -> None:
    began = threading.Event()

    def slow(question: bytes) -> bytes:
        began.set()
        time.sleep(20)
        return question

    running = site(step=slow)
    server.wait_for(1, 5)
    assert list(server.deliver({"oslo": b"?"}, 0.2)) == []
    assert began.is_set()
    before = time.monotonic()
    running.end()
    assert time.monotonic() - before < 3
    wait_until(lambda: not server.workers(), 2)


def test_a_folder_answers_for_one_process(folder: Path, tmp_path: Path) -> None:
    with listen("127.0.0.1:0", insecure=True) as transport:
        where = f"127.0.0.1:{transport.port}"
        first = Running(join, where, np.zeros((5, 2)), tmp_path / "site")
        transport.wait_for(1, 5)
        with pytest.raises(EmfedError, match="another process answers from"):
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
