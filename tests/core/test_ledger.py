"""Bytes are counted, not estimated: the ledger equals what the codec produces."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import emfed
from emfed.compressors import COMPRESSORS
from emfed.core.wire import decode_payload, encode_payload, floats_size
from tests.helpers import fit, make_data, make_model

TABLES = make_data(1)
N = len(TABLES)
OPERATORS: list[Any] = [
    *(e for cls in COMPRESSORS.values() for e in cls.examples()),
    emfed.Dithering(2, block="row"),
]


@pytest.mark.parametrize("operator", OPERATORS, ids=repr)
@pytest.mark.parametrize("in_metric", [False, True])
def test_every_upload_is_encoded_decoded_and_counted(
    operator: Any, in_metric: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Round by round, each upload goes through real bytes; the ledger has their number."""
    algorithm = emfed.FedEM(operator, step_size=0.2, batch_size=8, in_metric=in_metric)
    run = emfed.fitting.open_run(make_model("full"), TABLES, algorithm, seed=1, tol=0)
    layout = run.model.layout
    q, operator = layout.size, operator.resolve(layout)
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
                back = decode_payload(payload, form, mine)
                np.testing.assert_array_equal(back.symbols, message.symbols[i])
                np.testing.assert_array_equal(back.reals, message.reals[i])
                sent.append(payload)
        return message

    monkeypatch.setattr(type(operator), "compress", watch)
    for _ in range(5):
        sent.clear()
        record = run.step()
        assert len(sent) == N
        assert record.payload_up == sum(map(len, sent)) + N  # a byte for the rows of the batch
        assert record.bytes_up > record.payload_up


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


# The compressed broadcast.


def broadcasting(**options: Any) -> Any:
    common: dict[str, Any] = {
        "compressor": emfed.SubtractiveDithering(0.2),
        "broadcast": emfed.Dithering(8, np.inf, block="field"),
        "step_size": 0.5,
        "in_metric": True,
    }
    return emfed.FedEM(**{**common, **options})


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
    plan = emfed.network.FaultPlan(seed=2, lose_request=0.2, lose_reply=0.2, lose_disk=0.02)
    inner = emfed.network.StackedFederation(emfed.data.as_workers(TABLES))
    faulty = emfed.network.FaultyFederation(inner, plan)
    run = emfed.fitting.open_run(make_model("diag"), faulty, broadcasting(), seed=1, tol=0)
    for _ in range(60):
        record = run.step()
        assert 0 < record.payload_down <= floats_size(run.model.layout.size) * record.asked
        assert run.model.inside(run.statistics)
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
