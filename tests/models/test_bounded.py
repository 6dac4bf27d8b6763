"""No row has a say longer than one, whatever it holds, and sums do not depend on order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays
from scipy.stats import multivariate_normal as mvn

from emfed.core.errors import WireError
from emfed.models import GaussianParameters
from emfed.models.bounded import CENTRES, KINDS, Asked, whole_sums

WILD = st.one_of(
    st.floats(-10, 10), st.sampled_from([1e300, -1e300, 1e-300, 0.0]), st.floats(-1e9, 1e9)
)


def asked(kind: str, seed: int, radius: float = 3.0, k: int = 3, d: int = 4) -> Asked:
    rng = np.random.Generator(np.random.Philox(seed))
    root = rng.normal(size=(k, d, d))
    full = root @ root.swapaxes(1, 2) + 0.1 * np.eye(d)
    squares = np.diagonal(full, axis1=1, axis2=2)
    covariances = {"full": full, "tied": full[0], CENTRES: full[0], "diag": squares}
    given = covariances.get(kind, squares.mean(axis=1))
    params = GaussianParameters(np.full(k, 1 / k), rng.normal(size=(k, d)), given)
    return Asked(1e-3, 1, None, kind, params, np.zeros(d), np.eye(d), radius)


def compared(kind: str, seed: int) -> Asked:
    """Three mixtures of which the second has other components and the third fewer."""
    rivals = tuple(asked(kind, seed + j, k=k).params for j, k in ((1, 3), (2, 2)))
    return replace(asked(kind, seed), rivals=rivals)


@settings(max_examples=60, deadline=None)
@given(
    row=arrays(np.float64, (1, 4), elements=WILD),
    kind=st.sampled_from([*KINDS, CENTRES]),
    make=st.sampled_from([asked, compared]),
)
def test_no_row_moves_the_sums_by_more_than_one(
    row: np.ndarray, kind: str, make: Callable[[str, int], Asked]
) -> None:
    question = make(kind, 1)
    assert np.linalg.norm(whole_sums(question, [row]) * question.scales) <= 1.0


def test_no_row_moves_the_counts_of_columns_by_more_than_one() -> None:
    question = Asked(1e-3, 1, np.tile(np.arange(-3.0, 4.0), (4, 1)))
    for row in ([1e300, -1e300, 0, 0.5], [0, 0, 0, 0]):
        told = whole_sums(question, [np.array([row])]) * question.scales
        assert np.linalg.norm(told) <= 1 + 1e-12


@pytest.mark.parametrize("kind", [*KINDS, CENTRES, "compared"])
def test_one_row_more_moves_integers_by_that_row_alone(kind: str) -> None:
    """Sums are exact: no rounding error depends on the other rows."""
    rng = np.random.Generator(np.random.Philox(2))
    question = compared("full", 3) if kind == "compared" else asked(kind, 3)
    rows = rng.normal(size=(20_000, 4)) * 3
    whole, shuffled = (whole_sums(question, [r]) for r in (rows, rng.permutation(rows)))
    assert np.array_equal(whole, shuffled)
    others = whole_sums(question, [rows[:7], rows[8:]])
    assert np.array_equal(whole - others, whole_sums(question, [rows[7:8]]))


@pytest.mark.parametrize("kind", [*KINDS, CENTRES])
def test_rows_on_the_edges_of_the_grid_are_cut_alike_in_any_company(kind: str) -> None:
    """A product of matrices by a library rounds a row that is alone otherwise than two of it. Where
    the result is a multiple of the grid but for that (whole numbers in a frame of tenths), one row
    more would move the other by a step."""
    rng = np.random.Generator(np.random.Philox(7))
    shapes = {"full": np.eye(5)[None], "diag": np.ones((1, 5)), "spherical": np.ones(1)}
    one = GaussianParameters(np.ones(1), np.zeros((1, 5)), shapes.get(kind, np.eye(5)))
    for _ in range(100):
        frame = np.round(rng.normal(size=(5, 5)), 1)
        question = Asked(1e-3, 1, None, kind, one, np.zeros(5), frame, 16.0)
        row = rng.integers(-4, 4, size=(1, 5)).astype(np.float64)
        alone = whole_sums(question, [row])
        for count in (2, 7, 300):
            many = np.repeat(row, count, axis=0)
            assert np.array_equal(whole_sums(question, [many]), count * alone)


def test_a_question_about_many_components_takes_no_more_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """64 mixtures of 100,000 components would need gigabytes for every block of rows."""
    rows, question = np.random.Generator(np.random.Philox(9)).normal(size=(40, 4)), asked("full", 3)
    whole = whole_sums(question, [rows])
    monkeypatch.setattr("emfed.models.bounded.ROOM", 7)  # of three components: two rows at once
    assert np.array_equal(whole_sums(question, [rows]), whole)


@pytest.mark.parametrize("make", [asked, compared])
@pytest.mark.parametrize("kind", [*KINDS, CENTRES])
def test_a_question_survives_the_wire(kind: str, make: Callable[[str, int], Asked]) -> None:
    question = make(kind, 4)
    again = Asked.read(*question.describe())
    assert again.describe()[0] == question.describe()[0]
    np.testing.assert_array_equal(again.describe()[1], question.describe()[1])
    rows = np.random.Generator(np.random.Philox(6)).normal(size=(50, 4))
    np.testing.assert_array_equal(whole_sums(again, [rows]), whole_sums(question, [rows]))


def test_mixtures_are_compared_by_their_log_densities() -> None:
    """Where nothing is clipped, by those of scipy."""
    question = replace(compared("full", 7), radius=16.0)
    rows = np.random.Generator(np.random.Philox(8)).normal(size=(200, 4)) * 0.3
    mixtures = (question.params, *question.rivals)
    first, *others = (
        np.log(sum(w * mvn.pdf(rows, m, c) for w, m, c in zip(*p.arrays().values(), strict=True)))
        for p in mixtures
    )
    gains = np.stack(others, axis=1) - first[:, None]
    fine = np.linalg.norm(gains, axis=1) < 15.9
    told = whole_sums(question, [rows[fine]])
    np.testing.assert_allclose(told, gains[fine].sum(axis=0), atol=200 * 2**-16)


@pytest.mark.parametrize(
    "change",
    [
        *({"shares": 0}, {"covariance": "x"}, {"rivals": 3}, {"rivals": [0.5]}, {"rivals": [2]}),
        *({"columns": -1}, {"components": "3"}, {"rivals": [1] * 1000}),
    ],
)
def test_hostile_questions_are_refused(change: dict[str, object]) -> None:
    about, numbers = asked("full", 5).describe()
    with pytest.raises(WireError):
        Asked.read(about | change, numbers)
    with pytest.raises(WireError):
        Asked.read(about, numbers[:-1])
    # The lattice and the radius come first: neither may be anything.
    for place, value in ((0, 0.0), (0, 2.0), (1, 1e9), (1, -1.0), (3, np.nan)):
        with pytest.raises(WireError):
            Asked.read(about, np.where(np.arange(len(numbers)) == place, value, numbers))
