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
from fedem.storage.disk import DISK, Disk

_FORMAT = "fedem-checkpoint"
_VERSION = "1"


def _digest(arrays: dict[str, NDArray[Any]], description: str) -> str:
    digest = hashlib.blake2b(description.encode(), digest_size=16)
    for name in sorted(arrays):
        digest.update(f"{name}:{arrays[name].dtype.str}:{arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def pack_checkpoint(arrays: dict[str, NDArray[Any]], description: dict[str, Any]) -> bytes:
    """The content of a checkpoint file."""
    from safetensors.numpy import save

    text = json.dumps(description, allow_nan=True)
    # Not ascontiguousarray, which makes a vector of a number.
    whole = {name: np.asarray(array, order="C") for name, array in arrays.items()}
    metadata = {
        "format": _FORMAT,
        "version": _VERSION,
        "description": text,
        "digest": _digest(whole, text),
    }
    return bytes(save(whole, metadata=metadata))


def unpack_checkpoint(
    data: bytes, where: str | Path
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The inverse of `pack_checkpoint`; `CheckpointError` for anything else, naming ``where``."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        length = int.from_bytes(data[:8], "little")
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        return _checked(load(data), metadata, where)
    except (SafetensorError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{where} is damaged, cut short, or not a fedem checkpoint ({error})."
        ) from error


def _checked(
    arrays: dict[str, NDArray[Any]], metadata: dict[str, str], where: str | Path
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    if metadata.get("format") != _FORMAT:
        raise CheckpointError(f"{where} is not a fedem checkpoint.")
    if metadata.get("version") != _VERSION:
        raise CheckpointError(
            f"{where} has checkpoint version {metadata.get('version')}; this release reads "
            f"version {_VERSION}."
        )
    description = metadata.get("description", "")
    if _digest(arrays, description) != metadata.get("digest"):
        raise CheckpointError(f"{where} is damaged: its digest does not match its content.")
    return arrays, json.loads(description)


def save_checkpoint(
    path: str | Path,
    arrays: dict[str, NDArray[Any]],
    description: dict[str, Any],
    disk: Disk = DISK,
) -> None:
    """Write atomically; raise `CheckpointError` if the disk refuses, with the old file intact."""
    from safetensors import SafetensorError

    try:
        write_atomic(Path(path), pack_checkpoint(arrays, description), disk)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(
            f"cannot write the checkpoint {path}: {reason}. The previous one, if "
            "any, is untouched; free space or choose another place, then resume."
        ) from error


def load_checkpoint(
    path: str | Path, disk: Disk = DISK
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read and check; raise `CheckpointError` for anything but a whole fedem checkpoint."""
    try:
        data = disk.read(Path(path))
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read ({error}).") from error
    if data is None:
        raise CheckpointError(f"there is no checkpoint at {path}.")
    return unpack_checkpoint(data, path)
