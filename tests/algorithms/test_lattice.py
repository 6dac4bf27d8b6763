"""Where only sums are told: a common lattice has room for innovations of any shape."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.algorithms import steps
from emfed.core.messages import Replies, Request, ServerState
from emfed.network.masking import sum_words, to_words
from emfed.network.sums import decode_lattice, encode_lattice
from tests.helpers import make_data, make_model


def one_heavy_column(seed: int) -> list[np.ndarray]:
    """Tables of long tails with a narrow cluster inside: few statistics are most of a change."""
    rng = np.random.default_rng(seed)
    narrow = 0.05 * np.array([1.0, 3.0, 0.2])
    return [
        np.vstack(
            [rng.standard_t(2.5, size=(150, 3)), 4 + narrow * rng.standard_t(2.5, size=(60, 3))]
        )
        for _ in range(4)
    ]


def test_sums_alone_lead_where_the_uploads_themselves_lead() -> None:
    model, data = emfed.gaussian_mixture(3, "full"), one_heavy_column(4)
    start = emfed.fit(model, data, start="k-means", rounds=0, tol=0).params
    told: dict[str, Any] = {"start": start, "rounds": 25, "tol": 0, "seed": 1}
    plain, masked = (
        emfed.fit(model, data, emfed.AutoEM(follow_em=True), masks=masks, **told)
        for masks in (False, True)
    )
    rows = np.concatenate(data)
    assert masked.log_likelihood(rows) > plain.log_likelihood(rows) - 1e-3


@pytest.mark.parametrize("heavy", [0, 1])
@pytest.mark.parametrize("growth", [1.0, 30.0])
def test_a_sum_without_room_is_noticed_and_has_room_next_time(heavy: int, growth: float) -> None:
    """Whatever the shape. The words of all workers, added up, tell the same as the simulation."""
    run = emfed.fitting.open_run(make_model("full"), make_data(2, sizes=(60, 80, 50)), "auto")
    model, q, rng = run.model, len(run.statistics), np.random.default_rng(heavy)
    vectors = rng.normal(size=(3, q))
    vectors[0, :heavy] *= 300.0
    weights, metric = np.array([0.3, 0.5, 0.2]), model.metric(run.params)
    known = (weights[:, None] ** 2 * vectors**2).sum() / growth**2
    extras = {"innovation": np.array(known)}
    state, found = ServerState(3, 0, run.statistics, np.zeros(q), extras), []
    for trial in range(3):
        lattice = steps.next_lattice(state, 3, 0.1, 1e9, None)
        workers = np.arange(3)
        request = Request(
            3 + trial, 0, "round", state.statistics, run.params, workers, workers,
            lattice=lattice, weights=weights, encode=True,
        )  # fmt: skip
        sent = steps.to_lattice(model, 0, request, workers, metric.unwhiten(vectors))
        replies = Replies(
            workers, workers, sent.values, sent.rates, workers, workers, energies=sent.energies
        )
        heard = steps.held(model, 0, request, replies)
        words = np.frombuffer(sent.payload, dtype=np.int64).reshape(3, -1)
        assert sent.energies is not None
        told = [steps.split_upload(row) for row in words]
        assert [energy for _, energy, _ in told] == sent.energies.tolist()
        total = sum_words([to_words(row[:q], lattice.bits) for row in words], lattice.bits)
        check = sum(check for _, _, check in told) % (1 << steps.check_bits(lattice))
        wrapped = steps.wrap_check(total.tolist(), lattice) != check
        assert wrapped == bool(heard.overflow)
        white = np.zeros(q)
        if not wrapped:
            white = metric.whiten(weights @ sent.values)
            np.testing.assert_allclose(
                steps.from_lattice(model, 0, request, workers, total), weights @ sent.values
            )
            error = white - weights @ vectors
            assert error @ error / q <= 3 * steps.lattice_noise(request)
        found.append(bool(wrapped))
        told = steps.energy_of(request, heard, state, white)
        state = ServerState(4, 0, state.statistics, np.zeros(q), told)
    assert found == [growth > 1, False, False]


@pytest.mark.parametrize("size", [1.0, 2.0**62, -(2.0**64) - 2.0**20, 1e30])
def test_numbers_of_any_size_are_told_modulo_a_power_of_two(size: float) -> None:
    words = steps._modular(np.array([size]))
    assert (int(words[0]) - int(size)) % 2**64 == 0


@pytest.mark.parametrize("innovation", [1e-40, 1.0, 1e40])
@pytest.mark.parametrize("room", [5.0, 1e3, 1e12])
def test_a_lattice_is_one_that_sites_take(innovation: float, room: float) -> None:
    """However small the noise that is asked for, and however much room."""
    extras = {"innovation": np.array(innovation), "room": np.array(room)}
    state = ServerState(3, 0, np.zeros(9), np.zeros(9), extras)
    for noise in (1e-300, 1e-12, 0.1):
        lattice = steps.next_lattice(state, 5, noise, noise, None)
        assert decode_lattice(encode_lattice(lattice)) == (lattice, b"")


def alike(workers: int = 6) -> list[np.ndarray]:
    """Three clusters that overlap, in every worker."""
    rng = np.random.default_rng(4)
    centres = np.array([[-1.5, 0.0], [1.5, 0.0], [0.0, 2.0]])
    points = centres[rng.integers(3, size=workers * 200)] + rng.normal(size=(workers * 200, 2))
    return np.array_split(points, workers)


WIDE = np.array([[1.0, 1e-3, 1e3]])


@pytest.mark.parametrize("kind", ["full", "tied"])
@pytest.mark.parametrize("data", ["alike", "sorted", "heavy", "wide"])
def test_masked_fits_end_where_fits_without_masks_end(kind: str, data: str) -> None:
    tables = alike()
    if data == "sorted":
        rows = np.concatenate(tables)
        tables = np.array_split(rows[np.argsort(rows[:, 0])], 5)
    elif data in ("heavy", "wide"):
        tables = [t * WIDE if data == "wide" else t for t in one_heavy_column(4)]
    model, rows = emfed.gaussian_mixture(3, kind), np.concatenate(tables)
    start = emfed.fit(model, tables, start="k-means", rounds=0, tol=0, masks=False).params
    plain, masked = (
        emfed.fit(model, tables, masks=masks, start=start, seed=1) for masks in (False, True)
    )
    assert plain.converged
    assert masked.converged
    assert masked.log_likelihood(rows) == pytest.approx(plain.log_likelihood(rows), abs=2e-5)


@pytest.mark.parametrize("bits", [3, 10, 24, 25, 56, 62, 64])
def test_a_sum_that_wrapped_is_noticed_however_wraps_might_cancel(bits: int) -> None:
    """Of 62 bits two symbols that wrapped once each had passed, and half of memories was wrong."""
    lattice = steps.Lattice(1.0, bits, 1.0)
    half, modulus = 1 << (bits - 1), 1 << steps.check_bits(lattice)
    for wraps in product(range(-3, 4), repeat=4):
        sums = [(half - 1 - k) % half + wrap * 2 * half for k, wrap in enumerate(wraps)]
        parts = [[n // 3 for n in sums], [n - n // 3 for n in sums]]
        told = sum(steps.wrap_check(part, lattice) for part in parts) % modulus
        words = [np.array([n % (2 * half) for n in part], np.uint64) for part in parts]
        total = [int(n) for n in sum_words(words, bits)]
        assert (steps.wrap_check(total, lattice) == told) == (not any(wraps))
