"""Attacks on the noise of a private fit in one process, by whoever has its files and the source."""

from __future__ import annotations

import base64
import logging
import pickle
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.aggregation.privacy import NoisyWorkers, WithoutNoise
from emfed.artifacts.facts import Facts
from emfed.artifacts.modelfiles import SEAL
from emfed.core.noise import NoiseKey
from emfed.core.privacy import Bits, Privacy, discrete_gaussian
from emfed.core.storage import load_checkpoint, load_sealed
from emfed.core.sums import FloatArray
from emfed.data.held import HeldWorkers
from emfed.data.workers import as_workers
from emfed.fitting.private import WIDE, PrivateAsk, PrivatePlan, _cut
from emfed.fitting.replay import KnownSums
from emfed.models import GaussianParameters
from emfed.models.bounded import Asked, from_integers

MODEL = emfed.gaussian_mixture(2, "diag")
MOMENTS = 2
"""The number of the answer that tells how many rows there are."""
SEED = 11

Draw = Callable[[int, int, int], Bits]
"""Random words for a seed, an answer and a worker."""


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the server makes of answers tells nothing more, so it may be quick."""
    monkeypatch.setattr("emfed.fitting.private.SKETCH_ROWS", 300)


def table(rows: int = 3001, seed: int = 1) -> np.ndarray:
    rng = np.random.Generator(np.random.Philox(seed))
    return rng.normal(size=(rows, 2)) + rng.choice([0.0, 7.0], (rows, 1))


def of_release_0_1(seed: int, number: int, worker: int) -> Bits:
    """The draw of release 0.1, from the public seed alone."""
    key = np.array([seed, (46 << 48) + number], dtype=np.uint64)
    stream = np.random.Philox(key=key, counter=worker << 96)
    return lambda count: np.asarray(stream.random_raw(count))


def summed_as_0_1(self: NoisyWorkers, ask: PrivateAsk) -> FloatArray:
    total = self.workers.sum(WithoutNoise(ask))
    for worker in range(len(self.totals)):
        total = total + discrete_gaussian(ask.size, of_release_0_1(SEED, ask.number, worker))
    return total


def told_sums(checkpoint: Path) -> list[np.ndarray]:
    """The sums that a checkpoint holds."""
    arrays = load_checkpoint(checkpoint)[0]
    return np.split(arrays["values"], np.cumsum(arrays["sizes"])[:-1])


@dataclass(frozen=True)
class Loot:
    """What an attacker has of a fit: its model file and its checkpoint."""

    result: emfed.Result
    answers: list[np.ndarray]

    @classmethod
    def of(cls, rows: np.ndarray, folder: Path, name: str, sites: int = 1) -> Loot:
        model, kept = folder / f"{name}.emfed", folder / f"{name}.checkpoint"
        parts = np.array_split(rows, sites)
        emfed.fit(MODEL, parts, epsilon=2.0, seed=SEED, checkpoint=kept).save(model)
        return cls(emfed.load(model), told_sums(kept))

    @property
    def asked(self) -> Asked:
        """The question about the moments: its lattice and scales follow from what is public."""
        told = self.result.privacy
        assert told is not None
        plan = PrivatePlan(Privacy(told["epsilon"], told["delta"]), told["shares"], 1)
        d = len(self.result.params.means[0])
        one = GaussianParameters(np.ones(1), np.zeros((1, d)), np.eye(d)[None])
        radius = _cut(WIDE * emfed.core.privacy.chi_quantile(0.99, d), 30)
        asked = Asked(1.0, 1, None, "full", one, np.zeros(d), np.eye(d), radius)
        return replace(asked, step=plan.step(asked.size, "moments", 1), shares=told["shares"])

    def count(self, draw: Draw) -> float:
        """The number of rows, if the noise was what ``draw`` gives for the seed in the file."""
        sites = self.result.ledger.counts.shape[-1]
        noise = sum(
            discrete_gaussian(self.asked.size, draw(self.result.seed, MOMENTS, worker))
            for worker in range(sites)
        )
        clean = from_integers(self.asked, (self.answers[MOMENTS] - noise).astype(np.int64))
        return float(self.asked.split(clean)["mass"][0, 0])


def guesses(loot: Loot) -> list[float]:
    """Counts by all draws that the source suggests: of 0.1, and of keys from small seeds."""
    found = [loot.count(of_release_0_1)]
    about = b"".join(array.tobytes() for array in loot.answers[:MOMENTS])
    for seed in (SEED, 0, 1, 42):
        found.append(loot.count(lambda own, number, worker, s=seed: NoiseKey(s).words(about)))
    return found


@pytest.mark.parametrize("sites", [1, 3])
def test_the_noise_of_release_0_1_was_taken_off(
    sites: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack works: with the old draw the files tell the number of rows exactly."""
    monkeypatch.setattr(NoisyWorkers, "sum", summed_as_0_1)
    loot = Loot.of(table(), tmp_path, "old", sites)
    assert round(loot.result.samples) != 3001
    assert guesses(loot)[0] == pytest.approx(3001, abs=0.01)


@pytest.mark.parametrize("sites", [1, 3])
def test_nobody_takes_off_noise_that_the_operating_system_drew(sites: int, tmp_path: Path) -> None:
    rows = table()
    missed = [
        [abs(found - len(rows)) > 0.01 for found in guesses(Loot.of(rows, tmp_path, name, sites))]
        for name in "ab"
    ]
    assert np.any(missed, axis=0).all()  # by chance a guess is right once in 2,000 times


def test_the_same_fit_twice_is_two_answers_whatever_its_seed(tmp_path: Path) -> None:
    one, two = (Loot.of(table(), tmp_path, name) for name in "ab")
    assert all((a != b).any() for a, b in zip(one.answers[:3], two.answers[:3], strict=True))


def encodings(key: bytes) -> list[bytes]:
    """The ways in which a key may be written."""
    numbers = [int.from_bytes(key, order) for order in ("little", "big")]
    words = np.frombuffer(key, np.uint8).tolist()
    texts = [key.hex(), base64.b64encode(key).decode(), repr(key)[2:-1], str(words)[1:-1]]
    return [key, *(str(text).encode() for text in (*texts, *numbers))]


def test_the_key_is_in_nothing_that_a_fit_leaves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    key = np.random.default_rng(0).bytes(32)
    monkeypatch.setattr("emfed.core.noise.os.urandom", lambda count: key[:count])
    caplog.set_level(logging.DEBUG, "emfed")
    kept, said, inner = tmp_path / "checkpoint", [], NoisyWorkers.sum
    layers: list[NoisyWorkers] = []

    def summed(self: NoisyWorkers, ask: PrivateAsk) -> FloatArray:
        layers.append(self)
        return inner(self, ask)

    monkeypatch.setattr(NoisyWorkers, "sum", summed)
    result = emfed.fit(MODEL, table(), epsilon=2.0, checkpoint=kept, callbacks=said.append)
    result.save(tmp_path / "model.emfed")
    result.report(tmp_path / "report.html")
    assert layers[0].key._key == key
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    left |= {
        "pickles": pickle.dumps(result) + pickle.dumps(layers[0]) + pickle.dumps(said),
        "printed": repr([result, layers[0].key, vars(layers[0]), said, result.card]).encode(),
        "log": caplog.text.encode(),
    }
    for name, found in left.items():
        assert not [told for told in encodings(key) if told in found], name


def test_a_copy_of_a_key_is_another_key() -> None:
    key = NoiseKey()
    again = pickle.loads(pickle.dumps(key))
    words = [one.words(b"answer")(4) for one in (key, key, again)]
    assert (words[0] == words[1]).all()
    assert (words[0] != words[2]).any()
    assert (
        NoiseKey(7).words(b"")(4) == pickle.loads(pickle.dumps(NoiseKey(7))).words(b"")(4)
    ).all()


def asking(number: int = 0, shares: int = 1, **more: Any) -> PrivateAsk:
    asked = Asked(0.5**30, shares, np.array([[-1.0, 0.0, 1.0]] * 2))
    return PrivateAsk(replace(asked, **more), "round", number)


def answered(ask: PrivateAsk, rows: list[np.ndarray], key: NoiseKey) -> FloatArray:
    return NoisyWorkers(HeldWorkers(as_workers(rows)), key).sum(ask)


def test_noise_is_a_function_of_all_that_an_answer_depends_on() -> None:
    """The same answer again tells nothing new; any other answer has other noise."""
    rows, key = [table(40), table(40)], NoiseKey(3)

    def noise(ask: PrivateAsk, rows: list[np.ndarray] = rows) -> np.ndarray:
        exact = HeldWorkers(as_workers(rows)).sum(WithoutNoise(ask))
        return answered(ask, rows, key) - exact

    first = noise(asking())
    assert (noise(asking()) == first).all()
    others = {
        "scale": noise(asking(step=0.5**31)),
        "shares": noise(asking(shares=2)),
        "exchange": noise(asking(1)),
        "place": noise(asking(edges=np.array([[-1.0, 0.5, 1.0]] * 2))),
        "a row": noise(asking(), rows=[table(41), rows[1]]),
    }
    for name, other in others.items():
        assert not (other == first).any(), name
    whole = noise(asking(), rows=[np.concatenate(rows)])  # one worker has one draw of noise
    assert not (first == 2 * whole).any()


def test_questions_that_processors_could_not_tell_apart_have_noise_of_their_own() -> None:
    """Members agree to 18 bits; two answers with one noise would tell the rows' difference."""
    rows, key = [np.random.default_rng(0).normal(size=(50, 2))], NoiseKey(7)
    edges = np.array([[-1.0, 0.0, 1.0]] * 2)
    one, other = asking(edges=edges), asking(edges=edges + np.array([[0, 1e-13, 0], [0, 0, 0]]))
    assert one.digest() != other.digest()
    assert (answered(one, rows, key) != answered(other, rows, key)).any()


def test_two_fits_of_the_same_rows_have_two_keys() -> None:
    rows, keys = [table(40)], (NoiseKey(), NoiseKey())
    told = [answered(asking(), rows, key) for key in (keys[0], *keys)]
    assert (told[0] == told[1]).all()
    assert (told[0] != told[2]).any()


def test_nothing_is_told_without_noise_where_a_fit_is_private() -> None:
    layer = NoisyWorkers(HeldWorkers(as_workers([table(40)])), NoiseKey())
    assert layer.totals.tolist() == [0.0]
    with pytest.raises(emfed.core.errors.FederationError, match="every answer in it has noise"):
        layer.sum(WithoutNoise(asking()))
    with pytest.raises(AssertionError):
        HeldWorkers(as_workers([table(40)])).sum(asking())


def contents(arrays: dict[str, np.ndarray], description: Any) -> Any:
    """All that a sealed file holds."""
    return {name: array.tobytes() for name, array in arrays.items()}, description


@pytest.mark.parametrize("model", [MODEL, emfed.ppca(1)])
def test_all_that_a_fit_leaves_follows_from_its_noisy_answers(
    model: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Other rows, as many workers, the same answers: files, records and logs are equal.

    So none of them holds a count, a digest, a score or a time that is not an answer.
    """
    once = partial(Facts, created="2026-11-18T00:00:00Z")
    monkeypatch.setattr("emfed.fitting.private_result.Facts", once)
    caplog.set_level(logging.DEBUG, "emfed")
    answers: dict[int, np.ndarray] = {}
    inner, left = NoisyWorkers.sum, []

    def replayed(self: NoisyWorkers, ask: PrivateAsk) -> FloatArray:
        return answers.setdefault(ask.number, inner(self, ask))

    monkeypatch.setattr(NoisyWorkers, "sum", replayed)
    for name, rows in (("a", table(3000)), ("b", 3 * table(2345, 2) - 1)):
        folder, seen = tmp_path / name, []
        folder.mkdir()
        caplog.clear()
        result = emfed.fit(
            model,
            np.array_split(rows, [100, 1500]),
            epsilon=4.0,
            checkpoint=folder / "checkpoint",
            callbacks=seen.append,
        )
        result.save(folder / "model.emfed")
        result.report(folder / "report.html")
        left.append(
            {
                "model": contents(*load_sealed(folder / "model.emfed", SEAL)),
                "checkpoint": contents(*load_checkpoint(folder / "checkpoint")),
                "report": (folder / "report.html").read_text(encoding="utf-8"),
                "log": caplog.text,
                "records": seen,
                "line": repr(result),
            }
        )
    for name in left[0]:
        assert left[0][name] == left[1][name], name


@pytest.mark.parametrize("killed", [0, 3, 12])
def test_a_resumed_fit_tells_no_answer_in_two_versions(
    killed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An answer is used once it is on disk, and what is there is not asked for again.

    So a process that was killed has shown nothing of the answer that its checkpoint lacks.
    """
    kept, asked, used = tmp_path / "checkpoint", list[int](), list[np.ndarray]()
    inner, read = NoisyWorkers.sum, emfed.fitting.private.from_integers

    def counted(self: NoisyWorkers, ask: PrivateAsk) -> FloatArray:
        asked.append(ask.number)
        return inner(self, ask)

    def seen(about: Asked, total: np.ndarray) -> np.ndarray:
        used.append(total)
        return read(about, total)

    def failing(self: KnownSums, path: Path, next_round: int) -> None:
        if len(self.entries) == killed + 1:
            raise OSError("killed")
        save(self, path, next_round)

    save = KnownSums.save
    monkeypatch.setattr(NoisyWorkers, "sum", counted)
    monkeypatch.setattr("emfed.fitting.private.from_integers", seen)
    monkeypatch.setattr(KnownSums, "save", failing)
    with pytest.raises(OSError, match="killed"):
        emfed.fit(MODEL, table(), epsilon=2.0, checkpoint=kept)
    assert asked == list(range(killed + 1))
    before = list(used)
    assert len(before) == killed
    asked.clear()
    used.clear()
    monkeypatch.setattr(KnownSums, "save", save)
    emfed.fit(MODEL, table(), epsilon=2.0, checkpoint=kept, resume=True)
    assert asked == list(range(killed, len(used)))
    assert all((a == b).all() for a, b in zip(before, used, strict=False))
    assert len(told_sums(kept)) == len(used)


def test_a_checkpoint_of_seeded_noise_is_none_of_a_private_fit(tmp_path: Path) -> None:
    kept, end = tmp_path / "checkpoint", lambda record: True
    settings: dict[str, Any] = {"epsilon": 2.0, "checkpoint": kept, "resume": True}
    emfed.fit(MODEL, table(), noise_seed=1, callbacks=end, **settings)
    for other in (None, 2):
        with pytest.raises(emfed.core.errors.CheckpointError, match="other noise"):
            emfed.fit(MODEL, table(), noise_seed=other, **settings)
