"""Files that are whole or absent: atomic writes, checked reads, no pickle."""

from fedem.storage.atomic import write_atomic
from fedem.storage.checkpoint import load_checkpoint, save_checkpoint

__all__ = ["load_checkpoint", "save_checkpoint", "write_atomic"]
