"""Runs whose workers come and go, and whose server is killed."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.wire import Reason, encode_refusal, seal_refusal
from emfed.deployment.serving import save_fit
from emfed.fitting.serving import Served
from emfed.network import LocalTransport, Site, SiteRules, Transport
from tests.helpers import OPEN, make_data, make_model, plain_fit
from tests.network.test_trajectories import Scales

TABLES = make_data(6, sizes=(24, 18, 30, 22), spread=8.0)
KEYS = list("abcd")
SERVE = {"start": "moments", "tol": 0}


def serve(*arguments: Any, **options: Any) -> Served:
    """As many rounds as asked, from a start that costs no message."""
    return emfed.fitting.serve(*arguments, **SERVE | options)


ALGORITHM = emfed.FedEM(emfed.Dithering(3, block="row"), step_size=0.5, in_metric=True)


class Changing(Transport):
    """Workers that come and go with the round: ``who(round)`` can be reached."""

    def __init__(self, sites: Mapping[str, Site], who: Any) -> None:
        self.sites, self.who, self.round = dict(sites), who, 0

    def workers(self) -> list[str]:
        return [key for key in self.sites if key in self.who(self.round)]

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        for key in [k for k in messages if k in self.workers()]:
            yield key, self.sites[key].step(messages[key])

    def tick(self, record: emfed.fitting.RoundRecord) -> None:
        self.round += record.round > 0


def sites(where: Path, rules: SiteRules | None = None) -> dict[str, Site]:
    return {
        key: Site(table, where / key, rules=rules if key == "a" and rules else OPEN)
        for key, table in zip(KEYS, TABLES, strict=True)
    }


def optimum(tables: list[Any], kind: str, start: Any) -> Any:
    return plain_fit(make_model(kind, k=2), tables, rounds=400, start=start).params


@pytest.mark.parametrize("kind", ["tied", "diag"])
def test_newcomers_are_let_in_and_the_answer_is_that_of_all(kind: str, tmp_path: Path) -> None:
    """For tied covariances the second moment of all data must be told anew."""
    start = plain_fit(make_model(kind, k=2), TABLES, rounds=30, seed=4).params
    transport = Changing(sites(tmp_path), lambda k: KEYS if k >= 15 else KEYS[:3])
    served = serve(
        make_model(kind, k=2),
        emfed.EM(),
        transport,
        tmp_path / "server",
        start=start,
        rounds=90,
        callbacks=[transport.tick],
    )
    assert (served.stage, served.rounds) == (2, 90)
    assert not served.refusals
    for name, values in optimum(TABLES, kind, start).arrays().items():
        np.testing.assert_allclose(getattr(served.result.params, name), values, atol=1e-7)


def not_now(message: bytes) -> bytes:
    return seal_refusal(message, encode_refusal(Reason.NOT_NOW, "the owner looks first."))


class Hesitant(Changing):
    """Its last site can be reached once ``who`` says so, and joins from round ``ready`` on."""

    def __init__(self, sites: Mapping[str, Site], who: Any, ready: float) -> None:
        super().__init__(sites, who)
        self.ready, self.hellos = ready, 0

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        here = {k: m for k, m in messages.items() if k != "d" or self.round >= self.ready}
        yield from super().deliver(here, deadline)
        if "d" in messages and "d" not in here and "d" in self.workers():
            self.hellos += 1
            yield "d", not_now(messages["d"])


@pytest.mark.parametrize("first", [0, 3])
def test_who_only_looks_costs_nobody_a_stage(first: int, tmp_path: Path) -> None:
    """There at the opening or not: the run is that of the others, bit for bit."""
    options: dict[str, Any] = {"rounds": 35, "seed": 4, "pause": 0}
    model, where = make_model("diag", k=2), tmp_path / "with"
    transport = Hesitant(sites(where), lambda k: KEYS if k >= first else KEYS[:3], np.inf)
    served = serve(
        model, ALGORITHM, transport, where / "server", callbacks=[transport.tick], **options
    )
    assert (served.stage, served.rounds) == (1, 35)
    assert transport.hellos == (5 if first == 0 else 0) + 3
    alone = Changing(sites(tmp_path / "alone"), lambda k: KEYS[:3])
    clean = serve(model, ALGORITHM, alone, tmp_path / "alone" / "server", **options)
    np.testing.assert_array_equal(served.result.statistics, clean.result.statistics)


def test_who_looked_or_was_away_at_the_opening_is_let_in_later(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    transport = Hesitant(sites(tmp_path), lambda k: KEYS, ready=12)
    served = serve(
        make_model("diag", k=2),
        ALGORITHM,
        transport,
        tmp_path / "server",
        rounds=25,
        pause=0,
        callbacks=[transport.tick],
        seed=4,
    )
    assert (served.stage, served.rounds) == (2, 25)
    assert [record.asked for record in served.result.records][-1] == 4
    assert "d can be reached and does not join" in caplog.text


def test_a_newcomer_with_other_columns_is_refused_and_ends_no_stage(tmp_path: Path) -> None:
    who = sites(tmp_path)
    who["d"] = Site(TABLES[3][:, :1], tmp_path / "narrow", rules=OPEN)
    transport = Changing(who, lambda k: KEYS if k >= 3 else KEYS[:3])
    served = serve(
        make_model("diag", k=2),
        ALGORITHM,
        transport,
        tmp_path / "server",
        rounds=25,
        callbacks=[transport.tick],
        seed=4,
    )
    assert served.stage == 1
    assert "not those of the others" in served.refusals["d"]


def test_who_leaves_for_good_is_no_longer_counted(tmp_path: Path) -> None:
    start = plain_fit(make_model("tied", k=2), TABLES, rounds=30, seed=4).params
    transport = LocalTransport(sites(tmp_path, SiteRules.loosest(largest_rounds=7)))
    served = serve(
        make_model("tied", k=2), ALGORITHM, transport, tmp_path / "s", start=start, rounds=100
    )
    assert served.stage == 1
    assert "7 messages" in served.refusals["a"]
    assert "a left before the end" in served.fitted.remarks[0]
    right = optimum(TABLES[1:], "tied", start)
    for name, values in right.arrays().items():
        np.testing.assert_allclose(getattr(served.result.params, name), values, atol=1e-7)


def test_who_is_silent_for_too_long_is_left_out_and_may_come_back(tmp_path: Path) -> None:
    away = range(5, 40)
    transport = Changing(sites(tmp_path), lambda k: KEYS[1:] if k in away else KEYS)
    # Its key stays known to the engine; only its answers are missing.
    transport.workers = lambda: KEYS
    deliver = transport.deliver

    def lossy(messages: Mapping[str, bytes], deadline: float) -> Iterator[tuple[str, bytes]]:
        there = transport.who(transport.round)
        return deliver({k: m for k, m in messages.items() if k in there}, deadline)

    transport.deliver = lossy
    served = serve(
        make_model("diag", k=2),
        ALGORITHM,
        transport,
        tmp_path / "s",
        rounds=30,
        patience=4,
        attempts=1,
        callbacks=[transport.tick],
        seed=4,
    )
    assert served.stage == 1
    assert not served.refusals
    assert served.result.worker_weights[0] == 0
    assert served.result.records[-1].answered == 3


def test_who_is_back_is_asked_at_once_where_too_few_others_answer(tmp_path: Path) -> None:
    """The run waited for the one that had just gone, beside two who had left and were there."""
    here = {range(5): "abcd", range(5, 10): "abc", range(10, 15): "bc"}

    def who(k: int) -> list[str]:
        # From round 15 on c has gone for good, and a and d, who left before, are back.
        return list(next((names for rounds, names in here.items() if k in rounds), "abd"))

    transport = Changing(sites(tmp_path), who)
    served = serve(
        make_model("tied", k=2),
        ALGORITHM,
        transport,
        tmp_path / "s",
        rounds=90,
        minimum=2,
        patience=2,
        attempts=3,
        callbacks=[transport.tick],
    )
    assert not served.refusals
    stayed = [table for key, table in zip(KEYS, TABLES, strict=True) if key != "c"]
    found = served.result.params
    for name, values in optimum(stayed, "tied", found).arrays().items():  # EM does not leave it
        np.testing.assert_allclose(getattr(found, name), values, atol=1e-3)


def test_bytes_of_all_stages_are_those_that_crossed(tmp_path: Path) -> None:
    scales = Scales(LocalTransport(sites(tmp_path, SiteRules.loosest(largest_rounds=7))))
    totals = []
    for rounds in (3, 12, 20):  # in several calls, in the second of which one leaves
        served = serve(make_model("diag"), ALGORITHM, scales, tmp_path / "s", rounds=rounds, seed=4)
        totals.append((served.stage, served.rounds))
        assert (served.bytes_up, served.bytes_down) == (scales.up, scales.down)
    assert totals == [(1, 3), (1, 12), (1, 20)]
    save_fit(tmp_path / "model", served, {})
    told = json.loads((tmp_path / "model" / "summary.json").read_text())
    assert (told["bytes_up"], told["bytes_down"]) == (scales.up, scales.down)


def test_what_a_killed_server_was_writing_is_removed(tmp_path: Path) -> None:
    def served(rounds: int) -> Served:
        transport = LocalTransport(sites(tmp_path))
        return serve(make_model("diag"), ALGORITHM, transport, tmp_path / "s", rounds=rounds)

    served(2)
    torn = [".stage.x1.tmp", *(f"stage-0001/.{n}.x_2.tmp" for n in ("run.checkpoint", "members"))]
    others = ["notes.tmp", "stage-0001/.mine.tmp"]
    for name in (*torn, *others):
        (tmp_path / "s" / name).write_bytes(b"half a file")
    assert served(4).rounds == 4
    assert not [name for name in torn if (tmp_path / "s" / name).exists()]
    assert all((tmp_path / "s" / name).exists() for name in others)


def test_too_few_left_end_the_run(tmp_path: Path) -> None:
    transport = LocalTransport(sites(tmp_path, SiteRules.loosest(largest_rounds=4)))
    with pytest.raises(emfed.ParticipationError, match="3 workers answered, 4 are needed"):
        serve(
            make_model("diag"), ALGORITHM, transport, tmp_path / "s", rounds=20, minimum=4, pause=0
        )


def test_a_second_call_goes_on(tmp_path: Path) -> None:
    transport = LocalTransport(sites(tmp_path))
    options: dict[str, Any] = {"seed": 4}
    model = make_model("diag")
    first = serve(model, ALGORITHM, transport, tmp_path / "s", rounds=5, **options)
    second = serve(model, ALGORITHM, transport, tmp_path / "s", rounds=12, **options)
    assert (first.rounds, second.rounds) == (5, 12)
    whole = plain_fit(
        model, dict(zip(KEYS, TABLES, strict=True)), ALGORITHM, rounds=12, federation="loop", seed=4
    )
    np.testing.assert_allclose(second.result.statistics, whole.statistics, atol=1e-9)


def test_a_second_call_goes_on_without_who_left(tmp_path: Path) -> None:
    model, start = make_model("tied", k=2), None
    options: dict[str, Any] = {"seed": 4, "start": start}
    results = []
    for name, calls in (("once", (30,)), ("often", (5, 20, 30))):
        where = tmp_path / name
        for rounds in calls:
            transport = LocalTransport(sites(where, SiteRules.loosest(largest_rounds=7)))
            served = serve(model, ALGORITHM, transport, where / "s", rounds=rounds, **options)
        results.append(served)
    assert [r.result.worker_weights[0] for r in results] == [0, 0]
    np.testing.assert_array_equal(results[0].result.statistics, results[1].result.statistics)


# Real processes, and a signal that cannot be caught.


class Pipes(Transport):
    """Sites in processes of their own, each started anew when it is found dead."""

    def __init__(self, where: Path) -> None:
        self.where = where
        self.processes: dict[str, Any] = {}

    def workers(self) -> list[str]:
        return KEYS

    def _line(self, key: str) -> Any:
        process, line = self.processes.get(key, (None, None))
        if process is None or not process.is_alive():
            here, there = multiprocessing.get_context("fork").Pipe()
            process = multiprocessing.get_context("fork").Process(
                target=work, args=(key, self.where / key, there, os.getpid()), daemon=True
            )
            process.start()
            there.close()
            self.processes[key] = (process, here)
            line = here
        return line

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        lines = {}
        for key, message in messages.items():
            try:
                lines[key] = self._line(key)
                lines[key].send_bytes(message)
            except OSError:
                continue
        end = time.monotonic() + deadline
        for key, line in lines.items():
            try:
                if line.poll(max(0.0, end - time.monotonic())):
                    yield key, line.recv_bytes()
            except (OSError, EOFError):
                continue

    def kill(self, key: str) -> None:
        process, _ = self.processes[key]
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def close(self) -> None:
        for process, _ in self.processes.values():
            process.kill()
            process.join()


def work(key: str, where: Path, line: Any, parent: int) -> None:
    site = Site(TABLES[KEYS.index(key)], where, rules=OPEN)
    while os.getppid() == parent:  # a killed server takes its sites along
        if line.poll(0.1):
            try:
                line.send_bytes(site.step(line.recv_bytes()))
            except (EOFError, OSError):
                return


def serve_once(where: Path, rounds: int) -> None:
    """A server in a process of its own, with sites of its own to drive."""
    pipes = Pipes(where)
    served = serve(
        make_model("diag", k=2),
        ALGORITHM,
        pipes,
        where / "server",
        rounds=rounds,
        deadline=5,
        minimum=4,
        attempts=50,
        seed=4,
    )
    np.save(where / "answer.npy", served.result.statistics)
    pipes.close()


def test_kill_9_of_workers_and_of_the_server(tmp_path: Path) -> None:
    """At random moments, many times; with full local passes the answer is the undisturbed one."""
    rounds, rng, kills = 100, np.random.default_rng(3), 0
    clean = plain_fit(
        make_model("diag", k=2),
        dict(zip(KEYS, TABLES, strict=True)),
        ALGORITHM,
        rounds=rounds,
        federation="loop",
        seed=4,
    )
    context = multiprocessing.get_context("fork")
    while not (tmp_path / "answer.npy").exists():
        server = context.Process(target=serve_once, args=(tmp_path, rounds))
        server.start()
        server.join(timeout=None if kills >= 6 else float(rng.uniform(0.05, 0.25)))
        if server.is_alive():
            server.kill()
            server.join()
            kills += 1
    assert kills >= 3
    found = np.load(tmp_path / "answer.npy")
    np.testing.assert_allclose(found, clean.statistics, rtol=0, atol=1e-9)


def test_kill_9_of_workers(tmp_path: Path) -> None:
    pipes, rng, kills = Pipes(tmp_path), np.random.default_rng(4), [0]

    def kill(record: emfed.fitting.RoundRecord) -> None:
        if record.round % 2 and pipes.processes:
            pipes.kill(KEYS[int(rng.integers(4))])
            kills[0] += 1

    served = serve(
        make_model("diag", k=2),
        ALGORITHM,
        pipes,
        tmp_path / "server",
        rounds=24,
        minimum=4,
        callbacks=[kill],
        seed=4,
    )
    pipes.close()
    clean = plain_fit(
        make_model("diag", k=2),
        dict(zip(KEYS, TABLES, strict=True)),
        ALGORITHM,
        rounds=24,
        federation="loop",
        seed=4,
    )
    assert kills[0] >= 12
    np.testing.assert_allclose(served.result.statistics, clean.statistics, rtol=0, atol=1e-9)
