"""What no rows can say is refused and named; what is odd is told; what is honest is neither."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.wire import Join, decode_floats, decode_moments, encode_floats
from emfed.network import LocalTransport, Site, Transport, site
from emfed.network.plausible import impossible_statistics, impossible_summary, impossible_upload
from tests.helpers import BARE, bind, first, make_data, make_model
from tests.registry import REGISTRY

TABLES = dict(zip("abcd", make_data(6, sizes=(24, 18, 30, 22), spread=8.0), strict=True))


@pytest.mark.parametrize("name", list(REGISTRY))
def test_no_rows_are_called_impossible(name: str) -> None:
    entry = REGISTRY[name]
    tables = [np.asarray(table) for table in entry.tables]
    model = bind(entry.make(), tables)
    for seed, table in enumerate(tables):
        summary = dict(model.summary(table))
        assert not impossible_summary(len(table), summary, None)
        statistics = model.expected_statistics(table, model.start(seed))
        assert not impossible_statistics(model, statistics)
        assert not impossible_upload(statistics[None], 0 * statistics, 1e-3)


class Lying(Transport):
    """A network on which one site says, in messages of a kind, what its rows would not give."""

    def __init__(self, where: Path, patch: pytest.MonkeyPatch, what: str, lie: Any) -> None:
        self._inner = LocalTransport({n: Site(t, where / n, rules=BARE) for n, t in TABLES.items()})
        honest, self._lies = getattr(site, what), False

        def encode(*told: Any) -> bytes:
            found: bytes = honest(*(lie(*told) if self._lies else told))
            return found

        patch.setattr(site, what, encode)

    def workers(self) -> list[str]:
        return self._inner.workers()

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        for key, message in messages.items():
            self._lies = key == "b"
            yield from self._inner.deliver({key: message}, deadline)


def joining(**changes: Any) -> Callable[[Join], tuple[Join]]:
    """A join with other numbers."""

    def lie(told: Join) -> tuple[Join]:
        size = sum(int(np.prod(shape)) for shape in told.about["shapes"].values())
        values = decode_moments(told.numbers, size).copy()
        for place, value in changes.get("values", {}).items():
            values[place] = value
        count = changes.get("count", told.count)
        return (replace(told, count=count, numbers=encode_floats(values)),)

    return lie


def answering(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Exact statistics that are others."""
    return lambda values: (change(values),)


def uploading(change: Callable[[Any], Any]) -> Callable[[int, int, bytes], Any]:
    """An upload of plain numbers that are others."""
    return lambda evaluations, rows, payload: (
        evaluations,
        rows,
        encode_floats(change(decode_floats(payload))),
    )


def shifted(place: int, by: float) -> Callable[[Any], Any]:
    return lambda values: values + by * (np.arange(len(values)) == place)


LIES: dict[str, tuple[str, Any, str]] = {
    "2^50 rows": ("encode_join", joining(count=1 << 50), "which no worker has"),
    "1e200 in a join": ("encode_join", joining(values={0: 1e200}), "holds a number above 1e+150"),
    "a negative variance": ("encode_join", joining(values={3: -1.0}), "negative variance"),
    "1e300": ("encode_reply", uploading(shifted(2, 1e300)), "which no rows give"),
    "a negative mass": ("encode_reply", uploading(shifted(0, -3.0)), "negative share of rows"),
    "masses above one": ("encode_reply", uploading(shifted(0, 0.5)), "and not to one"),
    "an answer of masses": ("encode_floats", answering(shifted(1, 0.5)), "and not to one"),
}


@pytest.mark.parametrize("lie", first(LIES, 3))
def test_what_no_rows_can_say_puts_its_sender_out_and_the_run_goes_on(
    lie: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    what, change, words = LIES[lie]
    lying = Lying(tmp_path, monkeypatch, what, change)
    federation = emfed.network.RemoteFederation(lying, attempts=2, pause=0)
    start = emfed.fit(make_model("diag", k=2), TABLES, rounds=2).params
    options: dict[str, Any] = {"rounds": 120, "start": start, "tol": 0}
    result = emfed.fit(make_model("diag", k=2), federation, emfed.EM(), **options)
    assert list(federation.refusals) == ["b"]
    assert words in federation.refusals["b"]
    others = {name: table for name, table in TABLES.items() if name != "b"}
    right = emfed.fit(make_model("diag", k=2), others, emfed.EM(), **options)
    np.testing.assert_allclose(result.params.means, right.params.means, atol=1e-6)


def test_an_upload_of_1e300_is_refused_under_compression_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lying = Lying(tmp_path, monkeypatch, "encode_reply", uploading(shifted(2, 1e300)))
    federation = emfed.network.RemoteFederation(lying, attempts=2, pause=0)
    options: dict[str, Any] = {"rounds": 30, "start": "moments", "tol": 0}
    emfed.fit(make_model("diag", k=2), federation, emfed.FedEM(step_size=0.5), **options)
    assert "which no rows give" in federation.refusals["b"]


def test_an_answer_of_1e300_to_any_question_puts_its_sender_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lie(values: Any) -> Any:
        return (values + 1e300 if len(values) < 10 else values,)  # scores, and no statistics

    federation = emfed.network.RemoteFederation(
        Lying(tmp_path, monkeypatch, "encode_floats", lie), attempts=2, pause=0
    )
    options: dict[str, Any] = {"rounds": 5, "start": "moments", "tol": 0, "scores": True}
    emfed.fit(make_model("diag", k=2), federation, "em", **options)
    assert federation.refusals["b"] == "its answer holds 1e+300, which no rows give."


def test_what_is_odd_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number, (change, words) in enumerate(
        (
            ({"count": 1 << 30}, "times as many rows as all others"),
            ({"values": {1: 1e6}}, "far from all others' (columns 1"),
        )
    ):
        transport = Lying(tmp_path / str(number), monkeypatch, "encode_join", joining(**change))
        federation = emfed.network.RemoteFederation(transport, attempts=1, pause=0)
        federation.open(make_model("diag", k=2))
        assert federation.size == 4
        assert f"b is odd: {'' if number else 'it says'}" in caplog.text
        assert words in caplog.text
