"""The program ``emfed``: it stands outside of the package so that Ctrl-C is heard in its imports.

Importing numpy and the package takes half a second, in which Ctrl-C would end in a traceback (or,
from within a C extension, in an ImportError that blames the installation).
"""

from __future__ import annotations

import os
import signal
import sys
from typing import Any

COMPLETION = "_EMFED_COMPLETE"
"""Set where a shell asks for completions, which like help need no numpy."""


def main() -> None:
    """Import the command line, then run it."""

    def leave(*_: Any) -> None:
        os.write(2, b"emfed: interrupted\n")
        os._exit(130)  # nothing was begun that could be left half done

    heard = signal.getsignal(signal.SIGINT) is signal.default_int_handler
    if heard:
        signal.signal(signal.SIGINT, leave)
    from emfed.cli.main import main as command

    if not {"-h", "--help", "--version"}.intersection(sys.argv) and COMPLETION not in os.environ:
        import emfed.fitting  # noqa: F401 (what commands are about to import, numpy with it)

    if heard:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    command()
