"""Rows for a device: what is told where there is none, how they are cut, and how they stream."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.errors import SettingsError
from emfed.data.tables import Piece, apart
from emfed.fitting.estimators import FederatedGaussianMixture
from emfed.models.devices import Ragged
from tests.cli.test_main import emfed_command
from tests.models.devices import twin
from tests.models.devices.passes import plain

ROWS = np.random.default_rng(0).normal(size=(60, 2))


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed here")
def test_without_torch_one_sentence_says_what_to_install() -> None:
    with pytest.raises(SettingsError, match=r"needs torch.*pip install torch"):
        emfed.fit(emfed.gaussian_mixture(2), ROWS, rounds=1, device="cuda")
    with pytest.raises(SettingsError, match="needs torch"):
        FederatedGaussianMixture(2, device="cuda").fit(ROWS)


@pytest.mark.skipif(find_spec("torch") is not None, reason="torch is installed here")
def test_join_says_what_a_device_needs(tmp_path: Path) -> None:
    """At once, before a folder is made or a server called."""
    data = tmp_path / "rows.csv"
    data.write_text("a,b\n1,2\n3,4\n")
    done = emfed_command(
        *("join", "127.0.0.1:9", "--data", str(data), "--insecure", "--device", "cuda"),
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert "--device cuda" in done.stderr
    assert "torch" in done.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["rows.csv"]


def test_fit_says_what_a_device_needs_before_it_reads_a_row(tmp_path: Path) -> None:
    """Without torch what to install; with it, where a GPU would be."""
    if find_spec("torch") is not None:
        import torch

        if torch.cuda.is_available():
            pytest.skip("there is a GPU here")
    done = emfed_command("fit", "not-there.parquet", "--device", "cuda", cwd=tmp_path)
    assert done.returncode == 2
    assert "--device cuda" in done.stderr
    said = "finds no GPU here" if find_spec("torch") is not None else "pip install torch"
    assert said in " ".join(done.stderr.split())


def test_fast_needs_a_device() -> None:
    with pytest.raises(SettingsError, match="give device='cuda' as well"):
        emfed.fit(emfed.gaussian_mixture(2), ROWS, rounds=1, precision="fast")


def test_precision_is_double_or_fast() -> None:
    wrong: Any = "single"
    with pytest.raises(SettingsError, match="double, fast; got 'single'"):
        emfed.data.as_workers(ROWS, precision=wrong)


@pytest.mark.parametrize(("most", "block"), [(1, 32), (7, 32), (64, 16), (1000, 32)])
def test_ranges_of_programs_cover_every_row_once(most: int, block: int) -> None:
    counts = np.array([1, 0, 333, 96, 31, 5000])
    rows = Ragged(np.zeros((counts.sum(), 1)), np.cumsum(counts) - counts, counts)
    table, ends = rows.ranges(most, block)
    seen = np.zeros(int(counts.sum()), dtype=int)
    for number, (start, stop, worker) in enumerate(table.tolist()):
        seen[start:stop] += 1
        assert ends[worker] <= number < ends[worker + 1]
        assert start >= rows.starts[worker]
        assert stop <= rows.starts[worker] + counts[worker]
    assert np.all(seen == 1)
    assert ends[-1] == len(table)


@pytest.mark.parametrize("kind", ["tied", "diag", "spherical", "full"])
def test_a_models_pass_gives_its_statistics(kind: str) -> None:
    model: Any = emfed.gaussian_mixture(3, kind)
    summary = model.summary(ROWS[None])
    model = model.bind(summary, np.array([len(ROWS)]), np.ones(1))
    params = model.start(0)
    rows = Ragged(ROWS, np.array([0]), np.array([len(ROWS)]))
    sums = twin.sweep(rows, model.as_pass(params), values=True)
    moments = model.folded(sums, params)[0] / len(ROWS)
    found = model.assemble(sums.mass[0] / len(ROWS), moments)
    assert np.allclose(found, model.expected_statistics(ROWS, params), rtol=1e-12, atol=1e-14)
    whole = plain(rows, model.as_pass(params, whole=True))
    likelihood = whole[2][0] / len(ROWS) + model.carried_whole(params, rows)
    assert np.isclose(likelihood, model.log_likelihood(ROWS, params), rtol=1e-12)


def test_pieces_that_are_arrays_stay_whole() -> None:
    piece = Piece(np.arange(2), ROWS.reshape(2, 30, 2), None, 1.0, 0)
    assert list(apart(piece)) == [piece]
