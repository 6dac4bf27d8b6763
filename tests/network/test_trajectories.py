"""Workers reached by bytes give the trajectory of `stacked` and `loop`, and the bytes add up."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.algorithms import build_algorithm
from emfed.compressors import (
    Dithering,
    Identity,
    RandomSparsification,
    SubtractiveDithering,
    build_compressor,
)
from emfed.core.protocols import Opening
from emfed.core.registry import plain
from emfed.models import build_model
from emfed.models.binding import bind_constants, pack_constants
from emfed.network import (
    LocalTransport,
    RemoteFederation,
    Site,
    Transport,
)
from tests.helpers import KINDS, OPEN, first, make_data, make_model
from tests.registry import REGISTRY

TABLES = make_data(6, sizes=(24, 18, 30, 9, 22), spread=8.0)
ROUNDS = 20
COMPRESSORS = [
    example
    for kind in (Identity, Dithering, RandomSparsification, SubtractiveDithering)
    for example in kind.examples()
]


class Scales(Transport):
    """Weighs everything that crosses another transport."""

    def __init__(self, inner: Transport) -> None:
        self.inner, self.up, self.down = inner, 0, 0

    def workers(self) -> list[str]:
        return self.inner.workers()

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        self.down += sum(map(len, messages.values()))
        for key, reply in self.inner.deliver(messages, deadline):
            self.up += len(reply)
            yield key, reply


def sites(tables: list[Any], where: Path) -> dict[str, Site]:
    return {
        f"site {i}": Site(t, where / str(i), simulated=True, rules=OPEN)
        for i, t in enumerate(tables)
    }


def both(
    model: Any, tables: list[Any], algorithm: Any, where: Path, local: str = "loop", **options: Any
) -> tuple[emfed.Result, emfed.Result]:
    options = {"rounds": ROUNDS, "seed": 9, "start": "moments", "tol": 0} | options
    named = {f"site {i}": t for i, t in enumerate(tables)}
    here = emfed.fit(model, named, algorithm, federation=local, **options)
    network = RemoteFederation(LocalTransport(sites(tables, where)))
    return here, emfed.fit(model, None, algorithm, federation=network, **options)


def agree(here: emfed.Result, there: emfed.Result) -> None:
    np.testing.assert_allclose(there.statistics, here.statistics, rtol=0, atol=1e-9)
    for name, values in here.params.arrays().items():
        np.testing.assert_allclose(getattr(there.params, name), values, rtol=1e-9, atol=1e-9)
    assert [r.answered for r in there.records] == [r.answered for r in here.records]
    np.testing.assert_array_equal(here.ledger.counts, there.ledger.counts)


ALGORITHMS: dict[str, Any] = {
    "em": emfed.EM(),
    "FedEM": emfed.FedEM(Dithering(3, block="row"), step_size=0.3, batch_size=5),
    "mean field": emfed.FedEM(Dithering(3), step_size=0.3, memory_start="mean-field"),
    "simulated": emfed.FedEM(Dithering(3), step_size=0.3, simulations=2, batch_size=4),
    "vr": emfed.VRFedEM(Dithering(3), step_size=0.3, batch_size=4, inner_rounds=5),
    "vr, mean field": emfed.VRFedEM(
        SubtractiveDithering(0.3),
        step_size=emfed.algorithms.Decreasing(0.5),
        batch_size=4,
        inner_rounds=5,
        memory_start="mean-field",
        in_metric=True,
    ),
    "auto": emfed.AutoEM(),
    "auto, batches": emfed.AutoEM(batch_size=4),
    "function": emfed.FedEM(Dithering(2), step_size=lambda k: 0.5 / k),
}


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
@pytest.mark.parametrize("local", first(["stacked", "loop"]))
@pytest.mark.parametrize("name", list(ALGORITHMS))
def test_the_network_follows_the_loop_and_the_stack(name: str, local: str, tmp_path: Path) -> None:
    agree(
        *both(
            make_model("tied"),
            TABLES,
            ALGORITHMS[name],
            tmp_path,
            local,
            participation=emfed.algorithms.Bernoulli(0.7),
        )
    )


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
@pytest.mark.parametrize("compressor", COMPRESSORS, ids=repr)
def test_every_compressor_both_ways(compressor: Any, tmp_path: Path) -> None:
    """Uploads and quantised steps; workers that missed some get the statistics in full."""
    algorithm = emfed.FedEM(compressor, step_size=0.1, broadcast=compressor, in_metric=True)
    agree(
        *both(
            make_model("diag"),
            TABLES,
            algorithm,
            tmp_path,
            participation=emfed.algorithms.Bernoulli(0.6),
        )
    )


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
@pytest.mark.parametrize("name", list(REGISTRY))
def test_every_model(name: str, tmp_path: Path) -> None:
    entry = REGISTRY[name]
    algorithm = emfed.FedEM(Dithering(4), step_size=0.2)
    agree(*both(entry.make(**entry.priors), entry.tables, algorithm, tmp_path, rounds=5))


@pytest.mark.parametrize("kind", KINDS)
def test_a_given_start_and_a_monitor(kind: str, tmp_path: Path) -> None:
    model = make_model(kind, k=2)
    start = emfed.fit(model, TABLES, emfed.EM(), start="moments", rounds=3, seed=1).params
    here, there = both(
        model,
        TABLES,
        None,
        tmp_path,
        start=start,
        monitor=emfed.fitting.Monitor(every=5),
        weights="uniform",
    )
    agree(here, there)
    for column in ("squared_h", "objective"):
        np.testing.assert_allclose(
            there.records.column(column), here.records.column(column), rtol=1e-8, atol=1e-14
        )
    assert there.ledger.summary()["monitor"]["up"]["messages"] == 2 * 4 * len(TABLES)


def test_the_ledger_holds_every_byte_that_crosses(tmp_path: Path) -> None:
    scales = Scales(LocalTransport(sites(TABLES, tmp_path)))
    federation = RemoteFederation(scales)
    algorithm = emfed.FedEM(Dithering(3), memory_start="mean-field", broadcast=Identity("float32"))
    result = emfed.fit(
        make_model("tied"),
        None,
        algorithm,
        federation=federation,
        participation=emfed.algorithms.Bernoulli(0.6),
        monitor=emfed.fitting.Monitor(every=3),
        start="moments",
        rounds=12,
        seed=2,
    )
    all_bytes = result.ledger.counts[:, :, 1:].sum(axis=(0, 2, 3)).tolist()
    assert all_bytes == [scales.up, scales.down]
    assert result.bytes_up < scales.up  # a monitor looks at a run, and is no part of it
    assert federation.outside == {"up": 0, "down": 0}


@pytest.mark.parametrize("name", list(REGISTRY))
def test_binding_to_the_combined_summary_is_binding(name: str) -> None:
    """What `pack_constants` relies on."""
    entry = REGISTRY[name]
    model = entry.make(**entry.priors)
    parts = [model.summary(table) for table in entry.tables]
    summaries = {key: np.stack([part[key] for part in parts]) for key in parts[0]}
    counts = np.array([len(table) for table in entry.tables])
    weights = np.array([0.1, 0.2, 0.3, 0.4])
    whole = model.bind(summaries, counts, weights)
    shapes = {key: values.shape[1:] for key, values in summaries.items()}
    packed, _ = pack_constants(model, Opening(counts, summaries), weights)
    told = bind_constants(model, packed, shapes)
    s = whole.statistics_of(whole.start(3))
    np.testing.assert_allclose(told.statistics_of(told.start(3)), s, rtol=1e-12, atol=1e-12)
    for key, values in whole.maximize(s).arrays().items():
        np.testing.assert_allclose(getattr(told.maximize(s), key), values, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", list(REGISTRY))
def test_models_travel_as_descriptions(name: str) -> None:
    entry = REGISTRY[name]
    for options in ({}, entry.priors):
        model = entry.make(**options)
        assert plain(build_model(plain(model.describe())).describe()) == plain(model.describe())


@pytest.mark.parametrize(
    ("build", "description"),
    [
        (build_model, {"model": "of another release"}),
        (build_model, {"model": "gaussian-mixture", "covariance_type": "full", "n_components": 2}),
        (build_model, plain(make_model("full").describe()) | {"novelty": 3}),
        (build_model, plain(make_model("full").describe()) | {"n_components": "many"}),
        (build_model, None),
        (build_model, {"model": ["full"]}),
        (build_compressor, {"compressor": "identity", "precision": "int8"}),
        (build_algorithm, plain(ALGORITHMS["function"].describe())),
        (build_algorithm, plain(ALGORITHMS["FedEM"].describe()) | {"compressor": None}),
    ],
)
def test_what_cannot_be_made_is_refused_in_words(build: Any, description: Any) -> None:
    with pytest.raises(emfed.SettingsError):
        build(description)
