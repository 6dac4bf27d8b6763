"""Bytes are counted, not estimated: the ledger equals what the codec produces."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.compressors import COMPRESSORS
from emfed.core.protocols import Compressed
from emfed.core.streams import Purpose, uniforms
from emfed.core.wire import (
    ANSWER_ENVELOPE,
    REPLY_ENVELOPE,
    Header,
    Kind,
    RequestBody,
    decode_payload,
    decode_reply,
    decode_request,
    encode_payload,
    encode_reply,
    encode_request,
    floats_size,
    numbers_size,
    open_answer,
    seal_answer,
    shorten,
)
from tests.helpers import fit, make_data, make_model

TABLES = make_data(1)
N = len(TABLES)
OPERATORS: list[Any] = [
    *(e for cls in COMPRESSORS.values() for e in cls.examples()),
    emfed.Dithering(2, block="row"),
]


def opened(run: emfed.fitting.Run) -> Any:
    """Payload and envelopes of all that the server has sent to open the run."""
    down = run.ledger.summary()["opening"]["down"]
    return np.array([down["payload"], down["envelope"]])


@pytest.mark.parametrize("operator", OPERATORS, ids=repr)
@pytest.mark.parametrize("in_metric", [False, True])
def test_every_reply_is_encoded_decoded_and_counted(
    operator: Any, in_metric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round by round, each upload goes through real bytes; the ledger has their number."""
    algorithm = emfed.FedEM(operator, step_size=0.2, batch_size=8, in_metric=in_metric)
    run = emfed.fitting.open_run(make_model("full"), TABLES, algorithm, seed=1)
    q = run.model.layout.size
    operator = run.algorithm.compressor
    form = operator.form(q)
    sent: list[bytes] = []
    compress = type(operator).compress

    def watch(self: Any, vectors: Any, u: Any) -> Any:
        message = compress(self, vectors, u)
        if vectors.shape[-1] == q:
            dither = operator.dither(u, q)
            for i in range(len(vectors)):
                mine = None if dither is None else dither[i]
                payload = encode_payload(message.take(i), form, mine)
                asked = Header(Kind.REQUEST, 1, run.state.round, i, 2), b"request"
                header = dataclasses.replace(asked[0], kind=Kind.REPLY)
                data = seal_answer(header, encode_reply(8, 30, payload))
                evaluations, body = decode_reply(open_answer(data, asked)[1], 30)
                back = decode_payload(body, form, mine)
                np.testing.assert_array_equal(back.symbols, message.symbols[i])
                np.testing.assert_array_equal(back.reals, message.reals[i])
                assert evaluations == 8
                sent.append(data)
        return message

    monkeypatch.setattr(type(operator), "compress", watch)
    for round_ in range(5):
        sent.clear()
        before, request = opened(run), run.plan()
        record = run.step()
        news = opened(run) - before  # the settings travel with the first request
        assert (news.sum() > 0) == (round_ == 0)
        assert len(sent) == N
        assert record.bytes_up == sum(map(len, sent))
        assert record.payload_up == record.bytes_up - N * REPLY_ENVELOPE
        header = Header(Kind.REQUEST, 1, request.round, 0, 2, 0, run.phase)
        accepted = int(request.accepted[0])
        body = encode_request(request.round, RequestBody(accepted, "round", request.statistics))
        told = shorten(header, body)  # they know the run from its start
        assert record.bytes_down == N * len(told) + news.sum()
        assert record.payload_down == N * numbers_size(request.statistics) + news[0]


def test_ledger_by_worker_and_kind() -> None:
    algorithm = emfed.FedEM(emfed.Dithering(2), step_size=0.3, batch_size=5)
    result = fit(
        make_model("diag"),
        TABLES,
        algorithm,
        rounds=20,
        participation=emfed.algorithms.FixedSize(2),
    )
    named = fit(make_model("diag"), dict(zip("abcd", TABLES, strict=True)), rounds=1)
    assert set(named.ledger.to_frame()["worker"]) == set("abcd")
    frame = result.ledger.to_frame()
    assert set(frame["worker"]) == {0, 1, 2, 3}
    assert set(frame["kind"]) == {"opening", "start", "round"}
    rounds = frame.filter((frame["kind"] == "round") & (frame["direction"] == "up"))
    assert rounds["messages"].sum() == 40
    assert frame.filter(frame["direction"] == "up")["payload"].sum() == sum(
        r.payload_up for r in result.records
    )
    assert result.bytes_up == sum(r.bytes_up for r in result.records)
    assert result.bytes_down == sum(r.bytes_down for r in result.records)


def test_bytes_of_workers_add_up_to_the_total_where_a_monitor_looks_on() -> None:
    """Reports have both; what a monitor asks is in neither."""
    rows = [np.random.default_rng(i).normal(size=(30, 2)) for i in range(3)]
    model, monitor = emfed.gaussian_mixture(2, "diag"), emfed.fitting.Monitor(every=1)
    result = emfed.fit(model, rows, rounds=3, tol=0, monitor=monitor)
    assert result.ledger.summary()["monitor"]["up"]["payload"] > 0
    told = result.workers()
    assert sum(told["bytes_up"]) == result.bytes_up
    assert sum(told["bytes_down"]) == result.bytes_down


def test_a_report_of_lost_memory_costs_an_envelope() -> None:
    inner = emfed.network.StackedFederation(emfed.data.as_workers(TABLES))
    network = emfed.network.FaultyFederation(inner, emfed.network.FaultPlan())
    algorithm = emfed.FedEM(emfed.Dithering(2), step_size=0.3)
    run = emfed.fitting.open_run(make_model("diag"), None, algorithm, federation=network)
    run.step()
    network.plan = emfed.network.FaultPlan(lose_disk=1.0)
    record = run.step()
    assert record.answered == 0
    assert (record.payload_up, record.bytes_up) == (0, N * ANSWER_ENVELOPE)
    assert run.state.generation == 1


def test_counting_can_be_left_out_and_changes_nothing_else() -> None:
    algorithm = emfed.FedEM(emfed.Dithering(2), step_size=0.3, batch_size=5)
    counted, free = (
        emfed.fitting.open_run(
            make_model("diag"), TABLES, algorithm, start="moments", count_bytes=count
        )
        for count in (True, False)
    )
    for _ in range(10):
        assert free.step().bytes_up == 0 < counted.step().bytes_up
    np.testing.assert_array_equal(counted.state.statistics, free.state.statistics)
    assert free.ledger.total("up") == free.ledger.total("down") == 0


# The compressed broadcast.


def broadcasting(**options: Any) -> Any:
    common: dict[str, Any] = {
        "compressor": emfed.SubtractiveDithering(0.2),
        "broadcast": emfed.Dithering(8, np.inf, block="field"),
        "step_size": 0.5,
        "in_metric": True,
    }
    return emfed.FedEM(**{**common, **options})


class Follower:
    """A worker's side of the broadcast: statistics from bytes alone."""

    def __init__(self, run: emfed.fitting.Run) -> None:
        self.run, self.q = run, run.model.layout.size
        self.operator = run.algorithm.broadcast
        self.form = self.operator.form(self.q)
        self.steps: dict[int, bytes] = {}

    def send(self, since: int, round_: int) -> bytes:
        """The request of a round to a worker that was there in round ``since``."""
        steps = tuple(self.steps[k] for k in range(since, round_))
        return encode_request(round_, RequestBody(since, "round", None, steps))

    def follow(self, statistics: Any, request: bytes, round_: int) -> Any:
        """Apply the steps of a request."""
        body = decode_request(request, round_, self.q)
        for k, step in zip(range(body.accepted, round_), body.steps, strict=True):
            halvings, payload = step[0], step[1:]
            message = decode_payload(payload, self.form)
            stack = Compressed(message.reals[None], message.symbols[None])
            params = self.run.model.maximize(statistics)
            u = uniforms(self.run.seed, k, Purpose.BROADCAST, np.zeros(1, np.int64), self.q)
            move = self.operator.decompress(stack, u, self.q)
            move = self.run.model.metric(params).unwhiten(move)[0]
            after = statistics + 0.5**halvings * move
            statistics = self.run.model.protect(statistics, after)
        return statistics


def test_workers_follow_the_broadcast_from_bytes_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Present or away for a while, a worker has the server's statistics, bit for bit."""
    run = emfed.fitting.open_run(
        make_model("full"),
        TABLES,
        broadcasting(),
        seed=3,
        participation=emfed.algorithms.FixedSize(3),
    )
    follower = Follower(run)
    compress = emfed.Dithering.compress
    sent: list[Compressed] = []

    def watch(self: Any, vectors: Any, u: Any) -> Any:
        sent.append(compress(self, vectors, u))
        return sent[-1]

    monkeypatch.setattr(emfed.Dithering, "compress", watch)
    here: dict[int, Any] = {}  # the statistics each worker had when it last answered
    when: dict[int, int] = {}
    resent = 0
    for _ in range(40):
        request = run.plan()
        expected = 0
        for worker in request.workers.tolist():
            full = floats_size(follower.q)
            if worker in when:
                data = follower.send(when[worker], request.round)
                mine = follower.follow(here[worker], data, request.round)
                np.testing.assert_array_equal(mine, request.statistics)
                expected += min(full, len(data) - 1)
                resent += len(data) - 1 > full
            else:
                expected += full
            here[worker], when[worker] = request.statistics, request.round
        record = run.step()
        assert record.payload_down == expected
        payload = encode_payload(sent[-1].take(0), follower.form)
        halvings = round(-np.log2(record.step_size / 0.5))
        follower.steps[request.round] = bytes([halvings]) + payload
    assert len(when) == N


def test_the_broadcast_converges_and_shrinks() -> None:
    """Both ways compressed: the pooled optimum, at a fraction of the downlink."""
    tables = make_data(3, sizes=(40, 25, 60, 33), k=4, d=5, spread=6.0)
    start = fit(make_model("tied", k=4, d=5), tables, rounds=20, seed=1).params
    common: dict[str, Any] = {"start": start, "rounds": 300}
    pooled = fit(make_model("tied", k=4, d=5), tables, **common)
    oneway = fit(make_model("tied", k=4, d=5), tables, broadcasting(broadcast=None), **common)
    both = fit(make_model("tied", k=4, d=5), tables, broadcasting(), **common)
    rows = np.concatenate(tables)
    assert both.log_likelihood(rows) == pytest.approx(pooled.log_likelihood(rows), abs=1e-6)
    down = [sum(r.payload_down for r in run.records[1:]) for run in (oneway, both)]
    assert down[1] < 0.25 * down[0]


def test_the_broadcast_survives_faults_and_checkpoints(tmp_path: Any) -> None:
    plan = emfed.network.FaultPlan(
        seed=2, lose_request=0.2, lose_reply=0.2, lose_disk=0.02, reorder=True
    )
    inner = emfed.network.StackedFederation(emfed.data.as_workers(TABLES))
    run = emfed.fitting.open_run(
        make_model("diag"),
        None,
        broadcasting(),
        federation=emfed.network.FaultyFederation(inner, plan),
        seed=1,
    )
    for _ in range(60):
        before = opened(run)
        record = run.step()
        full = floats_size(run.model.layout.size) * record.asked
        assert 0 < record.payload_down - (opened(run) - before)[0] <= full
        assert run.model.inside(run.state.statistics)
    options: dict[str, Any] = {"participation": emfed.algorithms.Bernoulli(0.7), "seed": 4}
    path = tmp_path / "run"
    whole = fit(make_model("full"), TABLES, broadcasting(), rounds=20, **options)
    fit(make_model("full"), TABLES, broadcasting(), rounds=7, checkpoint=path, **options)
    resumed = fit(
        make_model("full"),
        TABLES,
        broadcasting(),
        rounds=20,
        checkpoint=path,
        resume=True,
        **options,
    )
    np.testing.assert_array_equal(resumed.statistics, whole.statistics)
    np.testing.assert_array_equal(resumed.ledger.counts, whole.ledger.counts)
    assert [r.payload_down for r in resumed.records] == [r.payload_down for r in whole.records]
