"""Messages as files: what couriers of other platforms carry, and what they may do to it."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from emfed.data import as_workers
from emfed.data.summing import HeldRows
from emfed.network.exchange.followed import Consent, Ended, MemberStore
from emfed.network.exchange.frames import new_run
from emfed.network.exchange.identities import TrialMembers, TrialSigner
from emfed.network.exchange.member import Follower
from emfed.network.exchange.member_runs import MemberRuns, RunMember
from emfed.network.exchange.member_thread import Watcher
from emfed.network.exchange.relay_server import RelayServer
from emfed.network.exchange.statements import LARGEST_MESSAGE, Agreement
from emfed.network.keys import ANALYST
from emfed.network.mailbox import (
    DOWN,
    MOST_WAITING,
    UP,
    Courier,
    Letters,
    MailboxHost,
    MailboxLine,
)
from tests.network.exchanges import Toy

EXAMPLES = Path(__file__).parents[2] / "examples"
SITES = ("bergen", "oslo", "tromso")
SECONDS = 60.0


def test_letters_come_in_order_each_once_and_whole(tmp_path: Path) -> None:
    letters = Letters(tmp_path / "box")
    letters.put([b"a", b"", bytes(1000)])
    (tmp_path / "box" / "half.new").write_bytes(b"half")
    assert letters.take() == [b"a", b"", bytes(1000)]
    assert letters.take() == []
    letters.put([bytes([k]) for k in range(MOST_WAITING + 5)])
    assert letters.take() == [bytes([k]) for k in range(5, MOST_WAITING + 5)]


def test_a_mailbox_gives_nothing_of_other_files(tmp_path: Path) -> None:
    """A courier that leaves links, folders, pipes or huge files learns nothing and stops nobody."""
    secret, box = tmp_path / "rows.csv", tmp_path / "box"
    secret.write_text("1,2")
    letters = Letters(box)
    (box / "1.message").symlink_to(secret)
    os.mkfifo(box / "2.message")
    with (box / "3.message").open("wb") as file:
        file.truncate(LARGEST_MESSAGE + 1)
    letters.put([b"good"])
    assert letters.take() == [b"good"]
    assert secret.read_text() == "1,2"
    assert not list(box.iterdir())


class Quiet(Watcher):
    """Keeps how a member ended."""

    def __init__(self) -> None:
        self.end: Ended | None = None

    def said(self, follower: Follower, post: bytes) -> None: ...

    def moved(self, follower: Follower) -> None: ...

    def ended(self, end: Ended) -> None:
        self.end = end

    def troubled(self, words: str) -> None:
        raise AssertionError(words)


class Deployed:
    """A relay with an analyst, three sites, and mailboxes between them."""

    def __init__(self, folder: Path) -> None:
        self.boxes, self.sites = folder / "server", {n: folder / n / "box" for n in SITES}
        self.watchers = {name: Quiet() for name in (*SITES, ANALYST)}
        rng, self._leave = np.random.default_rng(3), threading.Event()
        self.rows = {name: rng.normal(size=(20, 2)) for name in SITES}
        members = TrialMembers()
        self.server = RelayServer("127.0.0.1", 0, None, members, folder / "runs").__enter__()
        self.host = MailboxHost(self.server, self.boxes, SITES)
        self._members: list[MemberRuns] = []
        for name, box in self.sites.items():
            self._join(name, folder / name, box, members)
        run = new_run()
        settings = Agreement(SITES, (ANALYST,), True, run=run, program={"toy": 1})

        def analyst(store: MemberStore) -> Follower:
            consent = Consent(lambda _: Toy())
            return Follower(TrialSigner(ANALYST), members, store, consent, settings=settings)

        runs: MemberRuns
        runs = MemberRuns(self.server.attach(ANALYST, lambda message: runs.received(message)))
        runs.start(run, RunMember(folder / "analyst.sqlite", analyst, self.watchers[ANALYST]))
        self._members.append(runs)

    def _join(self, name: str, folder: Path, box: Path, members: TrialMembers) -> None:
        rows = HeldRows(as_workers([self.rows[name]]))
        commitment = hashlib.sha256(name.encode()).digest()

        def make(store: MemberStore) -> Follower:
            consent = Consent(lambda _: Toy())
            signer = TrialSigner(name)
            return Follower(signer, members, store, consent, rows=rows, commitment=commitment)

        def begin(run: str) -> RunMember:
            return RunMember(folder / f"{run}.sqlite", make, self.watchers[name])

        runs: MemberRuns
        line = MailboxLine(box, lambda message: runs.received(message), lambda: runs.connected())
        runs = MemberRuns(line.send, begin)
        threading.Thread(target=line.run, args=(self._leave, print), daemon=True).start()
        self._members.append(runs)

    def run(self, carry: Callable[[], None]) -> dict[str, Any]:
        """What all members came to, while somebody carries."""
        end = time.monotonic() + SECONDS
        while any(one.end is None for one in self.watchers.values()):
            assert time.monotonic() < end, {n: one.end for n, one in self.watchers.items()}
            carry()
            time.sleep(0.01)
        assert all(one.end is not None and one.end.final for one in self.watchers.values())
        return {name: one.end.result for name, one in self.watchers.items() if one.end is not None}

    def close(self) -> None:
        self._leave.set()
        for runs in self._members:
            runs.stop()
        self.host.close()
        self.server.__exit__(None, None, None)


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Deployed]:
    found = Deployed(tmp_path)
    yield found
    found.close()


def test_members_come_to_one_result_though_letters_are_lost_and_repeated(
    deployed: Deployed,
) -> None:
    lost = [5, 40]

    def carry() -> None:
        for name, box in deployed.sites.items():
            there = deployed.boxes / name
            for source, target in ((box / UP, there / UP), (there / DOWN, box / DOWN)):
                for letter in Letters(source).take():
                    lost[:] = [count - 1 for count in lost]
                    Letters(target).put([] if 0 in lost else [letter, letter])

    results = deployed.run(carry)
    assert all(np.array_equal(one, results[ANALYST]) for one in results.values())


def example(name: str) -> ModuleType:
    """A module of the examples."""
    path = EXAMPLES / name
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    spec.loader.exec_module(module)
    return module


class FakeGrid:
    """Nodes of Flower's in this process, one of which is no site; one message is lost."""

    def __init__(self, flower: ModuleType, boxes: dict[str, Path]) -> None:
        self._flower, self._count, self._answers = flower, 0, dict[str, Any]()
        self._boxes = dict(enumerate(boxes.items(), start=11))

    def get_nodes(self) -> list[Any]:
        named = [SimpleNamespace(node_id=n, name=name) for n, (name, _) in self._boxes.items()]
        named[0].name = ""  # it says its name itself
        return [*named, SimpleNamespace(node_id=99, name="stranger")]

    def push_messages(self, messages: list[Any]) -> list[str]:
        numbers = []
        for message in messages:
            self._count += 1
            numbers.append(str(self._count))
            node = message.about["dst_node_id"]
            if node == 99 or self._count == 5:
                assert node != 99 or self._flower.unpacked(message)[0] == []
                continue
            name, box = self._boxes[node]
            context = SimpleNamespace(node_config={"mailbox": str(box), "site": name})
            asked = SimpleNamespace(
                metadata=SimpleNamespace(message_type=message.about["message_type"]),
                content=message.content,
                has_error=lambda: False,
            )
            answer = self._flower.client(asked, context)
            answer.metadata = SimpleNamespace(src_node_id=node, reply_to_message_id=numbers[-1])
            self._answers[numbers[-1]] = answer
        return numbers

    def pull_messages(self, numbers: list[str]) -> list[Any]:
        return [self._answers.pop(number) for number in numbers if number in self._answers]


class FakeMessage:
    """Flower's own messages can be made in its processes alone."""

    def __init__(self, content: Any, **about: Any) -> None:
        self.content, self.about = content, about

    def has_error(self) -> bool:
        return False


def agree(results: dict[str, Any]) -> None:
    assert set(results) == {*SITES, ANALYST}
    assert all(np.array_equal(one, results[ANALYST]) for one in results.values())


def test_flower_carries_a_masked_fit(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("flwr")
    flower = example("flower/emfed_flower.py")
    monkeypatch.setattr(flower, "Message", FakeMessage)
    monkeypatch.setattr("emfed.network.mailbox.ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(flower, "LIFETIME", 1.0)
    nodes = flower.Nodes(FakeGrid(flower, deployed.sites), Courier(deployed.boxes))
    agree(deployed.run(nodes.look))
    assert nodes.courier.sites == list(SITES)


def stubbed(monkeypatch: pytest.MonkeyPatch, **classes: Any) -> None:
    """Modules of a platform that is not installed, with these names in each."""
    for path, names in classes.items():
        module: Any = ModuleType(path.replace("__", "."))
        for name, value in names.items():
            setattr(module, name, value)
        monkeypatch.setitem(sys.modules, path.replace("__", "."), module)


class FakeController:
    """NVFlare's, with executors in this process: one client does not answer the first time."""

    def __init__(self) -> None:
        self.lost = 1

    def broadcast(self, task: Any, context: Any, targets: list[str], min_responses: int) -> None:
        self.lost -= 1
        if self.lost == 0:
            return
        (name,) = targets
        place = SimpleNamespace(get_identity_name=lambda: name)
        result = context.executor.execute(task.name, task.data, place, None)
        client = SimpleNamespace(name=name)
        task.received(SimpleNamespace(client=client, result=result), context)


class FakeTask:
    def __init__(self, name: str, data: Any, timeout: int, result_received_cb: Any) -> None:
        self.name, self.data, self.received = name, data, result_received_cb


def test_nvflare_carries_a_masked_fit(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    stubbed(
        monkeypatch,
        nvflare__apis__controller_spec={"Task": FakeTask},
        nvflare__apis__executor={"Executor": object},
        nvflare__apis__impl__controller={"Controller": FakeController},
        nvflare__apis__shareable={"Shareable": dict},
        nvflare__job_config__api={"FedJob": object},
        nvflare__recipe__spec={"Recipe": object},
    )
    nvflare = example("nvflare/emfed_nvflare.py")
    monkeypatch.setattr("emfed.network.mailbox.ANSWER_SECONDS", 0.05)
    monkeypatch.setattr(nvflare, "LIFETIME", 1)
    clients = [SimpleNamespace(name=name) for name in SITES]
    context = SimpleNamespace(
        executor=nvflare.EmfedExecutor(str(deployed.boxes.parent / "SITE" / "box")),
        get_engine=lambda: SimpleNamespace(get_clients=lambda: clients),
    )
    controller = nvflare.EmfedController(str(deployed.boxes))
    ends = threading.Event()
    signal = SimpleNamespace(triggered=False)
    work = threading.Thread(target=lambda: (controller.control_flow(signal, context), ends.set()))
    work.start()
    agree(deployed.run(lambda: None))
    deployed.host.close()
    assert ends.wait(SECONDS), "the controller goes on though all is over"


class FakeClient:
    """vantage6's, with nodes in this process: a container for every message."""

    def __init__(self, vantage6: ModuleType, boxes: list[Path]) -> None:
        self._vantage6, self._boxes, self._results = vantage6, boxes, list[Any]()
        self.task = self

    def create(self, input_: Any, organizations: list[int], name: str) -> dict[str, int]:
        with pytest.MonkeyPatch.context() as node:
            node.setenv("EMFED_MAILBOX", str(self._boxes[organizations[0]]))
            found = getattr(self._vantage6, input_["method"])(
                **json.loads(json.dumps(input_["kwargs"]))
            )
        self._results.append(found)
        return {"id": len(self._results) - 1}

    def wait_for_results(self, task_id: int, interval: float) -> list[Any]:
        return [self._results[task_id]]


def test_vantage6_carries_a_masked_fit(deployed: Deployed, monkeypatch: pytest.MonkeyPatch) -> None:
    stubbed(
        monkeypatch,
        vantage6__algorithm__tools__decorators={"algorithm_client": lambda function: function},
    )
    vantage6 = example("vantage6/emfed_vantage6.py")
    monkeypatch.setattr("emfed.network.mailbox.ANSWER_SECONDS", 0.05)
    client = FakeClient(vantage6, list(deployed.sites.values()))
    monkeypatch.setenv("EMFED_MAILBOXES", str(deployed.boxes))
    sites, carried = {name: number for number, name in enumerate(SITES)}, list[Any]()
    work = threading.Thread(target=lambda: carried.append(vantage6.carry(client, sites)))
    work.start()
    agree(deployed.run(lambda: None))
    deployed.host.close()
    work.join(SECONDS)
    assert carried[0]["messages"] > 20
