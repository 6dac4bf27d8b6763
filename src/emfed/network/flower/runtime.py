"""Flower's own processes at the server, which show the owner's secret with every request.

Flower starts the server's program with a token on its command line. Every account of the machine
can read that in the list of processes, and with the token alone could end the run or start code
under the owner's account. So the SuperLink (`superlink.LocalOnly`) wants the owner's secret for the
runtime interface, too, and these two programs send it. They read it from a file that only the owner
may read.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from emfed.network.flower.registry import Showing
from emfed.network.flower.superlink import SECRET


def _show_secret() -> None:
    """Put the secret on every request of this process; refuse a Flower in which that fails."""
    from flwr.supercore.protobuf.client import ProtobufClient

    showing = Showing(Path(os.environ[SECRET]).read_text(encoding="utf-8"))
    before = ProtobufClient.__init__

    def with_secret(self: Any, *arguments: Any, interceptors: Any = (), **more: Any) -> None:
        before(self, *arguments, interceptors=(*interceptors, showing), **more)

    setattr(ProtobufClient, "__init__", with_secret)  # noqa: B010 (a method is no variable)
    if showing not in ProtobufClient("http://localhost")._interceptors:
        sys.exit("emfed: this release of Flower cannot be guarded; see the extra flower.")


def superexec() -> None:
    """``flower-superexec``, with the secret."""
    from flwr.supercore.cli import flower_superexec

    _show_secret()
    flower_superexec()


def serverapp() -> None:
    """``flwr-serverapp``, with the secret."""
    from flwr.superlink.cli import flwr_serverapp

    _show_secret()
    flwr_serverapp()
