"""Files that are whole or absent: atomic writes, checked reads, no pickle."""

from emfed.core.storage.checkpoint import load_checkpoint, save_checkpoint
from emfed.core.storage.disk import (
    DISK,
    Disk,
    ScratchDisk,
    read_json_file,
    remove_torn,
    write_atomic,
)
from emfed.core.storage.sealed import Seal, load_sealed, save_sealed
from emfed.core.storage.trees import decode, encode

__all__ = [
    "DISK",
    "Disk",
    "ScratchDisk",
    "Seal",
    "decode",
    "encode",
    "load_checkpoint",
    "load_sealed",
    "read_json_file",
    "remove_torn",
    "save_checkpoint",
    "save_sealed",
    "write_atomic",
]
