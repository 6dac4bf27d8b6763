"""Members whose processors round otherwise follow one fit; those who choose otherwise end it."""

from __future__ import annotations

import platform
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.sums import AGREED_BITS, agreed_digest
from emfed.network.exchange.statements import StatementKind
from tests.network.exchanges import NAMES, READER, Federation, Toy
from tests.network.processes import real_sites
from tests.network.test_exchange import all_final, kinds

UNIT = 2.0**-AGREED_BITS


def digest(values: Any, place: bytes = b"") -> bytes:
    return agreed_digest(place, np.asarray(values, dtype=np.float64))


def test_numbers_that_roundings_part_agree_at_nearly_every_place() -> None:
    values = np.random.default_rng(0).normal(size=50)
    there = values * (1 + 1e-13)
    parted = sum(digest(values, b"%d" % j) != digest(there, b"%d" % j) for j in range(300))
    assert parted == 0
    near = values + 0.02 * UNIT  # fifty numbers of 1.5 at most: every second place has a cut
    parted = sum(digest(values, b"%d" % j) != digest(near, b"%d" % j) for j in range(300))
    assert 60 < parted < 240


@pytest.mark.parametrize("other", [3 * UNIT, 1e-3, np.nan, np.inf, -np.inf])
def test_other_choices_never_agree(other: float) -> None:
    values = np.linspace(-1, 1, 7)
    there = np.where(np.arange(7) == 3, values + other, values)
    assert all(digest(values, b"%d" % j) != digest(there, b"%d" % j) for j in range(100))


def test_bytes_and_whole_numbers_agree_where_they_are_equal() -> None:
    whole = np.array([3, 1 << 40])
    assert agreed_digest(b"", b"ab", whole) == agreed_digest(b"", b"ab", whole.copy())
    assert agreed_digest(b"", b"ab", whole) != agreed_digest(b"", b"ab", whole + 1)
    assert agreed_digest(b"", b"ab", b"c") != agreed_digest(b"", b"a", b"bc")


def unlike(*programs: dict[str, Any], **options: Any) -> Federation:
    """Members whose arithmetic differs, an analyst and sites in the order of beginning."""
    members = count()
    return Federation(accept=lambda _: Toy(**programs[next(members)]), **options)


@pytest.mark.parametrize("masked", [False, True])
def test_members_that_round_otherwise_come_to_one_model(masked: bool) -> None:
    dust = ({"dust": own} for own in (0.0, 1e-13, -1e-13, 3e-13))
    federation = unlike(*dust, masked=masked)
    federation.run()
    state = np.frombuffer(all_final(federation))
    np.testing.assert_allclose(state, federation.exact(), atol=2e-4 if masked else 1e-9)
    assert StatementKind.DIFFER not in kinds(federation)


def test_a_sum_over_which_sites_differ_by_a_cut_is_compared_again() -> None:
    federation = unlike({}, {}, {"parted": 2}, {})
    federation.run()
    np.testing.assert_allclose(np.frombuffer(all_final(federation)), federation.exact(), atol=2e-4)
    assert kinds(federation).count(StatementKind.DIFFER) == 1


def test_sites_that_compute_other_things_end_the_fit_and_are_named() -> None:
    federation = unlike({}, {}, {"dust": 1e-3}, {})
    federation.run()
    assert {end.final for end in federation.ends.values()} == {False}
    words = federation.ends[READER].words
    assert "computed different things from the same sums" in words
    groups = {frozenset(one.strip().split(", ")) for one in words.partition(": ")[2].split(";")}
    assert sorted(map(len, groups)) == [1, 2]
    assert frozenset().union(*groups) == {*NAMES[:3]}


KERNELS = {
    "oslo": {"OPENBLAS_CORETYPE": "Prescott", "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3 AVX512F"},
    "bergen": {"OPENBLAS_CORETYPE": "Haswell"},
    "tromso": {"OPENBLAS_CORETYPE": "Sandybridge"},
}
"""Linear algebra as of other processors, which sums in another order."""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels of x86-64 are named")
def test_processes_with_other_linear_algebra_follow_one_fit(tmp_path: Path) -> None:
    from sklearn.datasets import load_breast_cancer

    rows = load_breast_cancer().data[:, :6]
    tables = {name: rows[j::3] for j, name in enumerate(KERNELS)}
    with real_sites(tables, tmp_path, environments=KERNELS) as sites:
        result = emfed.fit(emfed.gaussian_mixture(1), sites, n_components="2:4", errors=True)
    assert result.converged  # and all have signed this process's model, whose kernel is another one


@pytest.mark.skipif(platform.machine() != "x86_64", reason="kernels of x86-64 are named")
def test_they_do_without_masks(tmp_path: Path) -> None:
    """Two sites: parts are coded, and compared once."""
    rows = np.random.default_rng(1).normal(size=(300, 3)) + 4 * np.eye(3)[np.arange(300) % 3]
    tables = {name: rows[j::2] for j, name in enumerate(["oslo", "tromso"])}
    with real_sites(tables, tmp_path, environments=KERNELS) as sites:
        result = emfed.fit(emfed.gaussian_mixture(3), sites)
    assert result.converged
    here = emfed.fit(emfed.gaussian_mixture(3), rows)
    assert result.log_likelihood(rows) == pytest.approx(here.log_likelihood(rows), abs=1e-4)
