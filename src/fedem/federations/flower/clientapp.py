"""The program that answers at a site: the site's own, never one that a server sent.

A SuperNode is given a bundle of code with every run and would execute it. ``fedem join`` puts this
module in the place of Flower's ``flwr-clientapp``: the same exchange with the SuperNode, but the
bundle is not unpacked, and what answers is `make_client_app` of the fedem installed here.
"""

from __future__ import annotations

import sys
from typing import Any


def main() -> None:
    """``flwr-clientapp`` with our client app; refuses to start where it cannot be put in."""
    from flwr.supernode.cli import flwr_clientapp
    from flwr.supernode.runtime import run_clientapp

    from fedem.federations.flower.client import site_app

    names = ("install_from_fab", "get_load_client_app_fn")
    if not all(callable(getattr(run_clientapp, name, None)) for name in names):
        sys.exit("fedem: this release of Flower cannot be guarded; see the extra fedem[flower].")

    def skip(*_: Any, **__: Any) -> None:
        """Unpack nothing."""

    def load(*_: Any, **__: Any) -> Any:
        return lambda *_: site_app()

    setattr(run_clientapp, names[0], skip)
    setattr(run_clientapp, names[1], load)
    flwr_clientapp()
