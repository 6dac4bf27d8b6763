"""Arrays and a JSON description in one safetensors file, with a digest of both.

safetensors holds no code and checks its own offsets; the digest tells a damaged file from a whole
one. A reader first looks at how long the header says it is, so that a hostile file costs no more
memory than its own size.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from emfed.core.errors import EmfedError
from emfed.core.storage.disk import DISK, Disk, write_atomic

LONGEST_HEADER = 100_000_000
"""Bytes of names, shapes and description: what safetensors itself reads."""


@dataclass(frozen=True)
class Seal:
    """What kind of file this is, which version of it, and the error that speaks of it."""

    format: str
    version: str
    noun: str
    error: type[EmfedError]
    mend: str = ""
    """What to do about a damaged one."""


def _digest(arrays: dict[str, NDArray[Any]], description: str) -> str:
    digest = hashlib.blake2b(description.encode(), digest_size=16)
    for name in sorted(arrays):
        digest.update(f"{name}:{arrays[name].dtype.str}:{arrays[name].shape}".encode())
        digest.update(np.ascontiguousarray(arrays[name]).tobytes())
    return digest.hexdigest()


def save_sealed(
    path: str | Path,
    seal: Seal,
    arrays: dict[str, NDArray[Any]],
    description: dict[str, Any],
    advice: str,
    disk: Disk = DISK,
) -> None:
    """Write atomically; raise the seal's error if the disk refuses, with the old file intact."""
    from safetensors import SafetensorError
    from safetensors.numpy import save

    text = json.dumps(description, ensure_ascii=False)
    if len(text) > LONGEST_HEADER // 4:
        raise seal.error(
            f"{path}: the description takes {len(text)} characters, which is too long."
        )
    whole = {  # ascontiguousarray alone would give a single number an axis
        name: np.ascontiguousarray(array).reshape(array.shape) for name, array in arrays.items()
    }
    metadata = {
        "format": seal.format,
        "version": seal.version,
        "description": text,
        "digest": _digest(whole, text),
    }
    try:
        write_atomic(Path(path), save(whole, metadata=metadata), disk)
    except (OSError, SafetensorError) as error:
        reason = getattr(error, "strerror", None) or error
        raise seal.error(
            f"cannot write the {seal.noun} {path}: {reason}. The previous one, if any, is "
            f"untouched; {advice}"
        ) from error


def load_sealed(
    path: str | Path, seal: Seal, disk: Disk = DISK
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """Read and check; raise the seal's error for anything but a whole file of its kind."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise seal.error(f"{path} is a folder or a device, not a {seal.noun}.")
    try:
        if path.exists():
            _check_length(disk.first(path, 8), seal, path)
        data = disk.read(path)
    except OSError as error:
        raise seal.error(f"{path} cannot be read ({error}).") from error
    if data is None:
        raise seal.error(f"there is no {seal.noun} at {path}.")
    return unpack_sealed(data, seal, path)


def unpack_sealed(
    data: bytes, seal: Seal, where: str | Path
) -> tuple[dict[str, NDArray[Any]], dict[str, Any]]:
    """The arrays and the description of a file's content; the seal's error for anything else."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        length = _check_length(data[:8], seal, where)
        metadata = json.loads(data[8 : 8 + length]).get("__metadata__", {})
        _check_kind(where, seal, metadata)
        arrays = load(data)
        text = metadata["description"]
        description = json.loads(text)
    except (
        SafetensorError,
        ValueError,
        TypeError,
        LookupError,
        AttributeError,
        RecursionError,
    ) as error:
        raise seal.error(
            f"{where} is damaged, cut short, or not an emfed {seal.noun} ({error}).{seal.mend}"
        ) from error
    if _digest(arrays, text) != metadata.get("digest") or not isinstance(description, dict):
        raise seal.error(f"{where} is damaged: its digest does not match its content.{seal.mend}")
    return arrays, description


def _check_length(first: bytes, seal: Seal, where: str | Path) -> int:
    """Refuse a header that claims to be longer than any of ours, before anything reads it."""
    length = int.from_bytes(first, "little")
    if length > LONGEST_HEADER:
        raise seal.error(
            f"{where} is not an emfed {seal.noun}, or its first bytes are damaged.{seal.mend}"
        )
    return length


def _check_kind(where: str | Path, seal: Seal, metadata: dict[str, str]) -> None:
    if metadata.get("format") != seal.format:
        found = str(metadata.get("format", ""))
        tail = f": it is an {found.replace('-', ' ', 1)}" if found.startswith("emfed-") else ""
        raise seal.error(f"{where} is not an emfed {seal.noun}{tail}.")
    if metadata.get("version") != seal.version:
        raise seal.error(
            f"{where} has {seal.noun} version {metadata.get('version')}; this release reads "
            f"version {seal.version}."
        )
