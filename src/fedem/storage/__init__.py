"""Files that are whole or absent: atomic writes, checked reads, no pickle."""

from fedem.storage.atomic import write_atomic
from fedem.storage.checkpoint import load_checkpoint, save_checkpoint, unpack_checkpoint
from fedem.storage.disk import DISK, Disk

__all__ = [
    "DISK",
    "Disk",
    "load_checkpoint",
    "save_checkpoint",
    "unpack_checkpoint",
    "write_atomic",
]
