"""Several runs on one connection: each message begins with the 8 bytes of its run's name.

Zeros in their place stand before what a relay says of all runs (`RunList`).
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from typing import final

from emfed.core.errors import WireError
from emfed.network.exchange.statements import NameList, Packed, Small

_SIZE = 8
_NAME = re.compile(r"[0-9a-f]{16}")
_ALL = bytes(_SIZE)


def new_run() -> str:
    """A name that no other run has: 16 hexadecimal digits, drawn by the operating system."""
    return os.urandom(_SIZE).hex()


def is_run(name: str) -> bool:
    """Whether this can be a run's name; it is safe as a file's name, then."""
    return bool(_NAME.fullmatch(name)) and name != _ALL.hex()


@final
@dataclass(frozen=True)
class RunList(Packed):
    """What a relay says of its runs to one member."""

    more: Small
    """1 if other runs follow these, so that a member stays."""
    runs: NameList
    """The runs whose settings name the member."""
    here: NameList = ()
    """To an analyst alone: the sites that are connected."""


def framed(run: str, message: bytes) -> bytes:
    """A message of this run."""
    return bytes.fromhex(run) + message


def framed_list(runs: RunList) -> bytes:
    """What a relay says of its runs."""
    return _ALL + runs.encode()


def unframed(data: bytes) -> tuple[str, bytes]:
    """The run, empty where a message is of none, and the message."""
    if len(data) < _SIZE:
        raise WireError(f"a message of {len(data)} bytes, which names no run.")
    name = data[:_SIZE]
    return "" if name == _ALL else name.hex(), data[_SIZE:]
