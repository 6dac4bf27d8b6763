"""Rows on a GPU: a model says what a pass over them computes, and kernels run it.

`ragged` finds rows that are on a device; `sweep` makes a pass over them. torch and triton are
imported when there are such rows, and nowhere but in this folder.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_cupy_array, is_torch_array

from emfed.core.protocols import FloatArray, IntArray
from emfed.models.devices.passes import Features, Pass, Second, Sums
from emfed.models.devices.ragged import PassPrecision, Ragged

__all__ = [
    "Features",
    "Pass",
    "PassPrecision",
    "Ragged",
    "Second",
    "Sums",
    "answers",
    "as_tensor",
    "beside",
    "copies",
    "labels",
    "ragged",
    "sweep",
    "written",
]

MOST_COMPONENTS = 512
"""Logits of more for a block of rows do not fit the registers of one program."""


def is_here(data: Any) -> bool:
    """Whether an array is on a GPU, or in Triton's interpreter, and kernels can be compiled."""
    if is_cupy_array(data):
        return _compiles()
    if not is_torch_array(data):
        return False
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    return bool(data.is_cuda or interpreted) and _compiles()


def _compiles() -> bool:
    """Whether kernels have what they need; cupy comes without."""
    return find_spec("torch") is not None and find_spec("triton") is not None


def as_tensor(data: Any) -> Any:
    """An array of cupy as a tensor in the same memory, where kernels take it; others as they are.

    Without torch and triton cupy's own operations make the passes, block by block.
    """
    if not (is_cupy_array(data) and _compiles()):
        return data
    import torch

    return torch.from_dlpack(data)


def ragged(data: Any, weights: Any | None = None) -> Ragged | None:
    """Rows ``(rows, columns)`` or ``(workers, rows, columns)`` for a kernel; None for others."""
    if isinstance(data, Ragged):
        return data
    if not is_here(data) or data.ndim not in (2, 3) or 0 in data.shape:
        return None
    import torch

    data = as_tensor(data)
    if data.dtype not in (torch.float32, torch.float64):
        data = data.to(torch.float64)
    flat = data.reshape(-1, data.shape[-1]).contiguous()
    count = data.shape[0] if data.ndim == 3 else 1
    each = len(flat) // count
    own = None
    if weights is not None:
        own = torch.as_tensor(weights, dtype=torch.float64, device=flat.device)
        own = own.reshape(-1).contiguous()
    return Ragged(flat, np.arange(count) * each, np.full(count, each), own)


def beside(rows: FloatArray, like: Any) -> Any:
    """Rows on the GPU where ``like`` is, as that is stored if no digit is lost; None elsewhere."""
    if not is_here(like):
        return None
    xp = array_namespace(like)
    there = xp.asarray(rows, device=device(like))
    same = xp.astype(there, like.dtype)
    return same if bool(xp.all(xp.astype(same, there.dtype) == there)) else there


def copies(there: Any, weights: FloatArray | None, count: int) -> Ragged | None:
    """Rows on a GPU so many times, as workers that may have parameters of their own."""
    own = None if weights is None else np.tile(weights, (count, 1))
    return ragged(array_namespace(there).stack([there] * count), own)


def sweep(rows: Ragged, given: Pass, values: bool = False) -> Sums:
    """One pass: sums over the rows of each worker; see `emfed.models.devices.passes`."""
    from emfed.models.devices import sweeping

    return sweeping.sweep(rows, given, values)


def answers(rows: Ragged, given: Pass) -> Iterator[tuple[Any, Any]]:
    """Responsibilities and log sums of each row, part by part, as numpy arrays of doubles."""
    from emfed.models.devices import sweeping

    for shares, densities in sweeping.answers(rows, given):
        yield shares.double().cpu().numpy(), densities.cpu().numpy()


def labels(rows: Ragged, given: Pass) -> IntArray:
    """The component of the largest responsibility of each row, as one numpy array."""
    from emfed.models.devices import sweeping

    return sweeping.labels(rows, given)


def written(
    rows: Ragged, key: Any, width: int, features: Callable[[Any, Any], Any]
) -> Iterator[Ragged]:
    """Tables of features in place of the rows, part by part: for features that are no products.

    ``features(xp, rows)`` gives ``(width, m)`` of m rows. A table that fits the device's memory is
    kept under ``key`` beside the rows; a larger one is made anew in each pass, in parts that are
    always the same.
    """
    x = rows.rows
    if ("parts", key) not in rows.memo:  # once: free memory changes, and sums must not
        low, end = rows.span()
        whole = 8 * width * (end - low) <= _table_bytes(x)
        rows.memo["parts", key] = (
            end - low if whole else max(FEWEST_TABLE_ROWS, TABLE_BYTES // (8 * width))
        )
    for part in rows.parts(rows.memo["parts", key]):
        table = part.memo.get(key)
        if table is None:
            xp, (low, end) = array_namespace(x), part.span()
            kind = xp.float32 if rows.fast else xp.float64
            table = xp.empty((end - low, width), dtype=kind, device=device(x))
            step = max(1, GPU_BLOCK_ELEMENTS // width)
            for start in range(low, end, step):
                stop = min(start + step, end)
                table[start - low : stop - low] = features(xp, x[start:stop]).T
            if part is rows:
                part.memo[key] = table
        low = part.span()[0]
        weights = None if part.weights is None else part.weights[low : low + len(table)]
        yield dataclasses.replace(
            part, rows=table, starts=part.starts - low, weights=weights, memo=_own(part.memo, key)
        )


def _own(memo: dict[Any, Any], key: Any) -> dict[Any, Any]:
    """What was found out about a table that is kept under a key."""
    found: dict[Any, Any] = memo.setdefault(("of", key), {})
    return found


def _table_bytes(x: Any) -> int:
    """A third of the memory that the device has left; elsewhere, a gigabyte."""
    if not (is_torch_array(x) and x.is_cuda):
        return 1 << 30
    import torch

    return int(torch.cuda.mem_get_info(x.device)[0] // 3)


def block_elements(data: Any, usual: int) -> int:
    """Numbers in a block of rows: on a GPU many, where each operation is a launch."""
    gpu = "torch" in sys.modules and is_torch_array(data) and data.is_cuda
    return GPU_BLOCK_ELEMENTS if gpu or is_cupy_array(data) else usual


TABLE_BYTES = 1 << 30
"""A part of a table of features that does not fit the card as a whole."""
FEWEST_TABLE_ROWS = 1 << 16
"""Rows of a table of features at least: fewer would leave a card idle."""
GPU_BLOCK_ELEMENTS = 1 << 26
"""Half a gigabyte of doubles: launches of microseconds no longer show, and several fit the card."""
