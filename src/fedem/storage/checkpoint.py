"""Checkpoints: arrays and a JSON description in one safetensors file, with a digest of both.

safetensors holds no code and checks its own offsets; the digest tells a damaged file from a whole
one.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedem.errors import CheckpointError
from fedem.storage.atomic import write_atomic

_FORMAT = "fedem-checkpoint"
_VERSION = "1"


def _digest(arrays: dict[str, NDArray[Any]], description: str) -> str:
    digest = hashlib.blake2b(description.encode(), digest_size=16)
    for name in sorted(arrays):
        digest.update(f"{name}:{arrays[name].dtype.str}:{arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def save_checkpoint(
    path: str | Path, arrays: dict[str, NDArray[Any]], description: dict[str, Any]
) -> None:
    """Write atomically; raise `CheckpointError` if the disk refuses, with the old file intact."""
    from safetensors import SafetensorError
    from safetensors.numpy import save

    text = json.dumps(description, allow_nan=True)
    whole = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "description": text,
        "digest": _digest(whole, text),
    }
    try:
        write_atomic(Path(path), save(whole, metadata=metadata))
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {reason}. The previous one, if "
            "any, is untouched; free space or choose another place, then resume."
        ) from error


def load_checkpoint(path: str | Path) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read and check; raise `CheckpointError` for anything but a whole fedem checkpoint."""
    from safetensors import SafetensorError, safe_open

    path = Path(path)
    if not path.is_file():
        raise CheckpointError(f"there is no checkpoint at {path}.")
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FORMAT:
                raise CheckpointError(f"{path} is not a fedem checkpoint.")
            if metadata.get("version") != _VERSION:
                raise CheckpointError(
                    f"{path} has checkpoint version {metadata.get('version')}; this release reads "
                    f"version {_VERSION}."
                )
            arrays = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{path} is damaged, cut short, or not a fedem checkpoint ({error})."
        ) from error
    description = metadata.get("description", "")
    if _digest(arrays, description) != metadata.get("digest"):
        raise CheckpointError(f"{path} is damaged: its digest does not match its content.")
    return arrays, json.loads(description)
