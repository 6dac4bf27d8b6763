"""The numpy twin of the kernels, everywhere; the kernels themselves, where torch and triton are.

`make gpu-interpreted` runs the latter in Triton's interpreter, `make gpu` on a GPU.
"""

from __future__ import annotations

import dataclasses
import os
from typing import Any

import numpy as np
import pytest

from emfed.models.devices import Ragged, twin
from tests.models.devices.passes import CASES, Case, off, plain

BOUND = {"double": 1e-12, "fast": 1e-6}


def places() -> str | None:
    """Where kernels can run: on a GPU, in the interpreter, or nowhere."""
    try:
        import torch
        import triton  # noqa: F401
    except ImportError:
        return None
    if torch.cuda.is_available():
        return "cuda"
    return "cpu" if os.environ.get("TRITON_INTERPRET") == "1" else None


WHERE = places()
kernels = pytest.mark.skipif(
    WHERE is None, reason="kernels need torch and triton: run make gpu-interpreted, or make gpu"
)


def placed(rows: Ragged) -> Ragged:
    import torch

    weights = None if rows.weights is None else torch.as_tensor(rows.weights, device=WHERE)
    there = torch.as_tensor(rows.rows, device=WHERE)
    return dataclasses.replace(rows, rows=there, weights=weights, memo={})


@pytest.mark.parametrize("precision", ["double", "fast"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_the_twin_gives_the_sums_of_the_formulas(case: Case, precision: str) -> None:
    rows, given = case.make(precision)
    found = twin.sweep(rows, given, values=True)
    assert off(found, plain(rows, given), case.hard) < BOUND[precision]


@kernels
@pytest.mark.parametrize("precision", ["double", "fast"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_a_kernel_gives_the_sums_of_the_formulas(case: Case, precision: str) -> None:
    from emfed.models.devices import sweep

    rows, given = case.make(precision)
    there = placed(rows)
    found = sweep(there, given, values=True)
    assert off(found, plain(rows, given), case.hard) < BOUND[precision]
    again = sweep(there, given, values=True)
    assert all(np.array_equal(a, b) for a, b in zip(found, again, strict=True))


@kernels
@pytest.mark.parametrize("case", CASES[:8], ids=lambda case: case.name)
def test_rows_are_answered_for_one_by_one(case: Case) -> None:
    from emfed.models.devices import answers

    rows, given = case.make()
    parts = list(answers(placed(rows), given))
    shares = np.concatenate([part for part, _ in parts])
    mass, _, density, _ = plain(rows, given)
    assert np.allclose(shares.sum(axis=0), mass[0], rtol=1e-12)
    if not case.hard:
        assert np.isclose(sum(float(part.sum()) for _, part in parts), density[0], rtol=1e-12)


@kernels
def test_what_half_precision_cannot_hold_is_done_again_in_doubles() -> None:
    from emfed.models.devices import sweep

    rows, given = Case("outlier", 200, 3, 2, "squares").make("fast")
    rows.rows[5, 1] = 3e8
    assert not np.all(np.isfinite(twin.sweep(rows, given).moments))
    found: Any = sweep(placed(rows), given, values=True)
    assert off(found, plain(rows, given), False) < 1e-12
