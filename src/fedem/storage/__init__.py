"""Files that are whole or absent: atomic writes, checked reads, no pickle."""

from fedem.storage.atomic import remove_torn, write_atomic
from fedem.storage.checkpoint import load_checkpoint, save_checkpoint, unpack_checkpoint
from fedem.storage.disk import DISK, Disk
from fedem.storage.sealed import Seal, load_sealed, save_sealed
from fedem.storage.trees import decode, encode

__all__ = [
    "DISK",
    "Disk",
    "Seal",
    "decode",
    "encode",
    "load_checkpoint",
    "load_sealed",
    "remove_torn",
    "save_checkpoint",
    "save_sealed",
    "unpack_checkpoint",
    "write_atomic",
]
