"""What every engine owes to those above it: one suite for sites here, WebSockets and Flower."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.network import LocalTransport, Site, Transport
from emfed.network.flower.transport import GridTransport, unwrap, wrap
from emfed.network.websocket import listen
from emfed.network.websocket.client import SiteConnection
from tests.helpers import OPEN

Step = Callable[[bytes], bytes]
NAMES = ("bergen", "oslo", "tromso")


class MemoryGrid:
    """Flower's grid as a server's program sees it, its nodes in this process.

    Nodes answer in threads of their own, when they have an answer; one that fails has an error for
    an answer, as a SuperNode's executor reports it.
    """

    def __init__(self, steps: dict[str, Step]) -> None:
        self.steps = dict(enumerate(steps.values(), 1))
        self.names = dict(enumerate(steps, 1))
        self.answers: dict[str, Any] = {}
        self._numbers = itertools.count()

    def get_nodes(self) -> list[Any]:
        return [SimpleNamespace(name=n, node_id=number) for number, n in self.names.items()]

    def push_messages(self, messages: list[Any]) -> list[str]:
        numbers = [f"message-{next(self._numbers)}" for _ in messages]
        for number, message in zip(numbers, messages, strict=True):
            threading.Thread(target=self._work, args=(number, message), daemon=True).start()
        return numbers

    def _work(self, number: str, message: Any) -> None:
        node, error, content = message.dst_node_id, None, None
        try:
            content = wrap(self.steps[node](unwrap(message.content)))
        except OSError as failed:
            error = SimpleNamespace(reason=str(failed))
        self.answer(number, node, content, error)

    def answer(self, number: str, node: int, content: Any, error: Any = None) -> None:
        """What a node says to a message; a liar may say it to another's."""
        self.answers[number] = SimpleNamespace(
            metadata=SimpleNamespace(reply_to_message_id=number, src_node_id=node),
            content=content,
            error=error,
            has_error=lambda: error is not None,
        )

    def pull_messages(self, numbers: list[str]) -> list[Any]:
        return [self.answers.pop(number) for number in numbers if number in self.answers]


@contextlib.contextmanager
def over_local(steps: dict[str, Step], monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
    yield LocalTransport({name: SimpleNamespace(step=step) for name, step in steps.items()})


@contextlib.contextmanager
def over_websocket(steps: dict[str, Step], monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
    stop = threading.Event()
    with listen("127.0.0.1:0", insecure=True) as server:
        where = f"127.0.0.1:{server.port}"
        sites = [
            threading.Thread(target=SiteConnection(where, step, name=name).run, args=(stop,))
            for name, step in steps.items()
        ]
        for site in sites:
            site.start()
        try:
            server.wait_for(len(steps), 10)
            yield server
        finally:
            stop.set()
            for site in sites:
                site.join(10)


@contextlib.contextmanager
def over_flower(steps: dict[str, Step], monkeypatch: pytest.MonkeyPatch) -> Iterator[Transport]:
    # Flower's own messages can be made in its processes alone.
    message = lambda content, **about: SimpleNamespace(content=content, **about)  # noqa: E731
    monkeypatch.setattr("emfed.network.flower.transport.Message", message)
    monkeypatch.setattr("emfed.network.flower.transport.PAUSE", 0.005)
    monkeypatch.setattr("emfed.network.flower.transport.ABSENT", 0.3)
    yield GridTransport(MemoryGrid(steps))


ENGINES = {"local": over_local, "websocket": over_websocket, "flower": over_flower}


@pytest.fixture(params=ENGINES)
def engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Opens a transport to sites that answer with these steps."""
    with contextlib.ExitStack() as ending:
        open_one = ENGINES[request.param]
        yield lambda steps: ending.enter_context(open_one(steps, monkeypatch))


@pytest.fixture(params=["websocket", "flower"])
def elsewhere(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The same of engines whose sites answer in their own time."""
    with contextlib.ExitStack() as ending:
        open_one = ENGINES[request.param]
        yield lambda steps: ending.enter_context(open_one(steps, monkeypatch))


def named(name: str) -> Step:
    return lambda question: name.encode() + question


def test_answers_come_with_whose_they_are_and_nobody_is_waited_for_after_the_last(
    engine: Any,
) -> None:
    transport = engine({name: named(name) for name in NAMES})
    assert transport.workers() == list(NAMES)
    began = time.monotonic()
    for number in range(3):
        asked = dict.fromkeys(NAMES[: number + 1], b"%d" % number)
        found = list(transport.deliver(asked, 30.0))
        assert dict(found) == {name: name.encode() + text for name, text in asked.items()}
        assert len(found) == len(asked)
    assert time.monotonic() - began < 20, "a delivery ends with its last answer"


def test_any_bytes_cross_unchanged(engine: Any) -> None:
    transport = engine({"oslo": bytes})
    for message in (b"\0", bytes(range(256)), np.random.default_rng(0).bytes(1_000_000)):
        assert dict(transport.deliver({"oslo": message}, 30.0)) == {"oslo": message}


def test_who_is_not_there_holds_up_no_one_beyond_the_deadline(engine: Any) -> None:
    transport = engine({"oslo": named("oslo")})
    began = time.monotonic()
    assert dict(transport.deliver({"oslo": b"?", "nobody": b"?"}, 1.0)) == {"oslo": b"oslo?"}
    assert list(transport.deliver({}, 1.0)) == []
    assert time.monotonic() - began < 10


def test_a_message_is_never_repeated(engine: Any) -> None:
    asked: list[bytes] = []

    def slow(question: bytes) -> bytes:
        asked.append(question)
        time.sleep(0.3)
        return question

    transport = engine({"oslo": slow, "bergen": bytes})
    for number in range(2):
        list(transport.deliver(dict.fromkeys(("bergen", "oslo"), b"%d" % number), 30.0))
    assert asked == [b"0", b"1"]


def test_bytes_of_messages_are_counted(elsewhere: Any) -> None:
    transport = elsewhere({name: lambda question: question * 3 for name in NAMES})
    assert len(dict(transport.deliver(dict.fromkeys(NAMES, b"12345"), 30.0))) == 3
    assert (transport.sent, transport.received) == (15, 45)


def test_a_site_that_cannot_answer_is_passed_over(elsewhere: Any) -> None:
    def fails(question: bytes) -> bytes:
        raise OSError("the disk is full")

    transport = elsewhere({"bergen": named("bergen"), "oslo": fails})
    began = time.monotonic()
    for _ in range(2):
        found = dict(transport.deliver({"bergen": b"?", "oslo": b"?"}, 30.0))
        assert {name: answer for name, answer in found.items() if answer} == {"bergen": b"bergen?"}
    assert time.monotonic() - began < 20


def test_a_late_answer_is_given_later_as_what_it_is_or_never(elsewhere: Any) -> None:
    ready = threading.Event()

    def slow(question: bytes) -> bytes:
        assert ready.wait(10)
        return b"late" + question

    transport = elsewhere({"bergen": named("bergen"), "oslo": slow})
    assert list(transport.deliver(dict.fromkeys(("bergen", "oslo"), b"1"), 0.5)) == [
        ("bergen", b"bergen1")
    ]
    ready.set()
    time.sleep(0.1)
    found = list(transport.deliver(dict.fromkeys(("bergen", "oslo"), b"2"), 10.0))
    assert [answer for name, answer in found if name == "bergen"] == [b"bergen2"]
    late = [answer for name, answer in found if name == "oslo"]
    assert late in ([b"late1", b"late2"], [b"late2"])


def test_who_stops_listening_may_ask_again(engine: Any) -> None:
    transport = engine({name: named(name) for name in NAMES})
    first = next(iter(transport.deliver(dict.fromkeys(NAMES, b"1"), 30.0)))
    assert first[1] == first[0].encode() + b"1"
    found = list(transport.deliver(dict.fromkeys(NAMES, b"2"), 30.0))
    assert {(name, name.encode() + b"2") for name in NAMES} <= set(found)
    assert {answer[-1:] for _, answer in found} <= {b"1", b"2"}


def test_a_fit_is_the_one_in_one_process_and_its_ledger_what_crossed(
    engine: Any, tmp_path: Any
) -> None:
    source = np.random.default_rng(0)
    tables = {name: source.standard_normal((40, 2)) + i % 2 for i, name in enumerate(NAMES)}
    steps = {name: Site(rows, tmp_path / name, rules=OPEN).step for name, rows in tables.items()}
    transport = engine(steps)
    model, settings = emfed.gaussian_mixture(2, "diag"), {"rounds": 4, "seed": 3, "tol": 0.0}
    federation = emfed.network.RemoteFederation(transport, minimum=3, pause=0.02, masks=False)
    found = emfed.fit(model, None, federation=federation, **settings)
    here = emfed.fit(model, tables, **settings)
    for name, values in here.params.arrays().items():
        np.testing.assert_allclose(found.params.arrays()[name], values, rtol=1e-9, atol=1e-9)
    assert found.ledger.summary() == here.ledger.summary()
    if not isinstance(transport, LocalTransport):  # it counts nothing
        assert (found.bytes_up, found.bytes_down) == (transport.received, transport.sent)


def test_over_flower_nobody_speaks_for_another(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with over_flower({"bergen": named("bergen"), "oslo": named("oslo")}, monkeypatch) as transport:
        grid = transport._grid
        plain = grid._work
        # oslo answers what bergen was asked, before bergen does.
        grid._work = lambda number, message: grid.answer(number, 2, wrap(b"bergen says so"))
        assert list(transport.deliver({"bergen": b"?"}, 0.3)) == []
        assert "oslo answered in the name of bergen" in caplog.text
        grid._work = plain
        assert dict(transport.deliver({"bergen": b"!"}, 5.0)) == {"bergen": b"bergen!"}


def test_over_flower_a_node_that_comes_back_under_another_number_is_the_same_site(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with over_flower({"oslo": named("oslo")}, monkeypatch) as transport:
        grid = transport._grid
        grid.names, grid.steps = {7: "oslo"}, {7: named("again")}
        assert dict(transport.deliver({"oslo": b"?"}, 5.0)) == {"oslo": b"again?"}
        assert transport.between_machines
        grid.names = {7: ""}
        assert transport.workers() == ["node-7"]
        assert not transport.between_machines
