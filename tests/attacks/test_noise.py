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
from emfed.artifacts.model_card import Facts
from emfed.artifacts.modelfiles import SEAL
from emfed.core.noise import NoiseKey
from emfed.core.privacy import Bits, Privacy, discrete_gaussian
from emfed.core.storage import load_checkpoint, load_sealed
from emfed.data.summing import plain_rows
from emfed.data.workers import as_workers
from emfed.fitting.private import WIDE, PrivatePlan
from emfed.models import GaussianParameters
from emfed.models.bounded import Asked, from_integers, to_integers, whole_sums
from emfed.network import InProcessFederation, StackedFederation

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


def released_as_0_1(
    self: InProcessFederation, asked: Asked, purpose: str, number: int
) -> np.ndarray:
    total = np.zeros(asked.size, dtype=np.int64)
    for worker in range(self.size):
        exact = to_integers(asked, whole_sums(asked, plain_rows(self.data, worker)))
        total += exact + discrete_gaussian(asked.size, of_release_0_1(SEED, number, worker))
    return total


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
        arrays = load_checkpoint(kept)[0]
        return cls(emfed.load(model), [arrays[j] for j in sorted(arrays)])

    @property
    def asked(self) -> Asked:
        """The question about the moments: its lattice and scales follow from what is public."""
        told = self.result.privacy
        assert told is not None
        plan = PrivatePlan(Privacy(told["epsilon"], told["delta"]), told["shares"], 1)
        d = len(self.result.params.means[0])
        one = GaussianParameters(np.ones(1), np.zeros((1, d)), np.eye(d)[None])
        radius = WIDE * emfed.core.privacy.chi_quantile(0.99, d)
        asked = Asked(1.0, 1, None, "full", one, np.zeros(d), np.eye(d), radius)
        return replace(asked, step=plan.step(asked.size, "moments", 1), shares=told["shares"])

    def count(self, draw: Draw) -> float:
        """The number of rows, if the noise was what ``draw`` gives for the seed in the file."""
        sites = self.result.ledger.counts.shape[-1]
        noise = sum(
            discrete_gaussian(self.asked.size, draw(self.result.seed, MOMENTS, worker))
            for worker in range(sites)
        )
        clean = from_integers(self.asked, self.answers[MOMENTS] - noise)
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
    monkeypatch.setattr(InProcessFederation, "release", released_as_0_1)
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
    federation = StackedFederation(as_workers([table()]))
    kept, said = tmp_path / "checkpoint", []
    result = emfed.fit(MODEL, federation, epsilon=2.0, checkpoint=kept, callbacks=said.append)
    result.save(tmp_path / "model.emfed")
    result.report(tmp_path / "report.html")
    assert federation._noise is not None
    left = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    left |= {
        "pickles": pickle.dumps(result) + pickle.dumps(federation) + pickle.dumps(said),
        "printed": repr([result, federation._noise, vars(federation), said, result.card]).encode(),
        "log": caplog.text.encode(),
    }
    for name, found in left.items():
        assert not [told for told in encodings(key) if told in found], name


def test_a_copy_of_a_federation_draws_another_key() -> None:
    key = NoiseKey()
    again = pickle.loads(pickle.dumps(key))
    words = [one.words(b"answer")(4) for one in (key, key, again)]
    assert (words[0] == words[1]).all()
    assert (words[0] != words[2]).any()
    assert (
        NoiseKey(7).words(b"")(4) == pickle.loads(pickle.dumps(NoiseKey(7))).words(b"")(4)
    ).all()


def opened(rows: list[np.ndarray], noise_seed: int | None = 3) -> StackedFederation:
    federation = StackedFederation(as_workers(rows))
    federation.open_private(MODEL, None, Privacy(2.0), noise_seed=noise_seed)
    return federation


def test_noise_is_a_function_of_all_that_an_answer_depends_on() -> None:
    """The same answer again tells nothing new; any other answer has other noise."""
    rows = [table(40), table(40)]
    asked = Asked(0.5**30, 1, np.array([[-1.0, 0.0, 1.0]] * 2))

    def noise(asked: Asked, number: int = 0, rows: list[np.ndarray] = rows) -> np.ndarray:
        told = opened(rows).release(asked, "round", number)
        sums = (to_integers(asked, whole_sums(asked, [own])) for own in rows)
        return np.asarray(told - sum(sums))

    first = noise(asked)
    assert (noise(asked) == first).all()
    others = {
        "scale": noise(replace(asked, step=0.5**31)),
        "shares": noise(replace(asked, shares=2)),
        "exchange": noise(asked, 1),
        "place": noise(replace(asked, edges=np.array([[-1.0, 0.5, 1.0]] * 2))),
        "a row": noise(asked, rows=[table(41), rows[1]]),
    }
    for name, other in others.items():
        assert not (other == first).any(), name
    alone = [noise(asked, rows=[own]) for own in rows]
    assert (alone[0] == alone[1]).all()
    assert not (first == 2 * alone[0]).any()  # two workers with the same rows have other noise


def test_two_fits_of_one_federation_have_two_keys() -> None:
    federation, asked = (
        opened([table(40)], None),
        Asked(0.5**30, 1, np.array([[-1.0, 0.0, 1.0]] * 2)),
    )
    first = federation.release(asked, "round", 0)
    assert (federation.release(asked, "round", 0) == first).all()
    federation.open_private(MODEL, None, Privacy(2.0))
    assert (federation.release(asked, "round", 0) != first).any()


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
    monkeypatch.setattr("emfed.fitting.private.Facts", once)
    caplog.set_level(logging.DEBUG, "emfed")
    answers: dict[int, np.ndarray] = {}
    inner, left = InProcessFederation.release, []

    def replayed(self: InProcessFederation, asked: Asked, purpose: str, number: int) -> np.ndarray:
        told = inner(self, asked, purpose, number)
        return answers.setdefault(number, told)

    monkeypatch.setattr(InProcessFederation, "release", replayed)
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
    inner, read = InProcessFederation.release, emfed.fitting.private.from_integers

    def counted(self: InProcessFederation, about: Asked, purpose: str, number: int) -> np.ndarray:
        asked.append(number)
        return inner(self, about, purpose, number)

    def seen(about: Asked, total: np.ndarray) -> np.ndarray:
        used.append(total)
        return read(about, total)

    def failing(*given: Any) -> None:
        if len(given[1]) == killed + 1:
            raise OSError("killed")
        save(*given)

    save = emfed.fitting.private.save_checkpoint
    monkeypatch.setattr(InProcessFederation, "release", counted)
    monkeypatch.setattr("emfed.fitting.private.from_integers", seen)
    monkeypatch.setattr("emfed.fitting.private.save_checkpoint", failing)
    with pytest.raises(OSError, match="killed"):
        emfed.fit(MODEL, table(), epsilon=2.0, checkpoint=kept)
    assert asked == list(range(killed + 1))
    before = list(used)
    assert len(before) == killed
    asked.clear()
    used.clear()
    monkeypatch.setattr("emfed.fitting.private.save_checkpoint", save)
    emfed.fit(MODEL, table(), epsilon=2.0, checkpoint=kept, resume=True)
    assert asked == list(range(killed, len(used)))
    assert all((a == b).all() for a, b in zip(before, used, strict=False))
    assert len(load_checkpoint(kept)[0]) == len(used)


def test_a_checkpoint_of_seeded_noise_is_none_of_a_private_fit(tmp_path: Path) -> None:
    kept, end = tmp_path / "checkpoint", lambda record: True
    settings: dict[str, Any] = {"epsilon": 2.0, "checkpoint": kept, "resume": True}
    emfed.fit(MODEL, table(), noise_seed=1, callbacks=end, **settings)
    for other in (None, 2):
        with pytest.raises(emfed.core.errors.CheckpointError, match="other settings"):
            emfed.fit(MODEL, table(), noise_seed=other, **settings)
