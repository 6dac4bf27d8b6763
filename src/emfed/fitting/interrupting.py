"""Ctrl-C, while a fit is under way."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator
from typing import Any, final


@contextlib.contextmanager
def interrupts() -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a flag, so that a round is never cut; the second one raises.

    Within another such block the flag is that block's, so that none is lost between rounds.
    """
    handle = _Interrupt()
    before = signal.getsignal(signal.SIGINT)
    here = threading.current_thread() is threading.main_thread()
    if not here or before is not signal.default_int_handler:
        outer = before if here and isinstance(before, _Interrupt) else handle
        yield outer.seen.is_set
        return
    signal.signal(signal.SIGINT, handle)
    try:
        yield handle.seen.is_set
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@final
class _Interrupt:
    """What Ctrl-C calls while a run makes rounds."""

    def __init__(self) -> None:
        self.seen = threading.Event()

    def __call__(self, number: int, frame: Any) -> None:
        if self.seen.is_set():
            raise KeyboardInterrupt
        self.seen.set()
