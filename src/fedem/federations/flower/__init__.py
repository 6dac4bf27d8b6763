"""Federations over Flower: a transport, the two apps, and what ``fedem serve`` and ``join`` start.

Flower carries opaque bytes; everything else is `fedem.federations.remote`. Needs the extra
``fedem[flower]``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from fedem.errors import ExtraError
from fedem.federations.remote import SiteRules

if find_spec("flwr") is None:
    raise ExtraError("a federation over a network needs Flower: pip install 'fedem[flower]'.")

__all__ = ["make_client_app", "make_server_app"]


def make_server_app(config: str | Path | None = None) -> Any:
    """A Flower ``ServerApp`` that fits what a configuration file describes.

    The file is that of ``fedem serve`` (docs/deployment.md). Without one it is found by the
    environment variable FEDEM_CONFIG.
    """
    from fedem.federations.flower.server import server_app

    return server_app(config)


def make_client_app(
    data_loader: Callable[[Any], Any],
    *,
    folder: str | Path | None = None,
    rules: SiteRules | None = None,
) -> Any:
    """A Flower ``ClientApp`` that answers for one site.

    ``data_loader`` gets Flower's ``Context`` and returns the site's table, frame, path of a Parquet
    file or source; it is called for every message, since Flower starts a process for each.
    ``folder`` is where the site keeps its memory and its log of messages; by default the node's
    configuration names it (``--node-config 'folder="..."'``).
    """
    from fedem.federations.flower.client import client_app

    return client_app(data_loader, folder=folder, rules=rules)
