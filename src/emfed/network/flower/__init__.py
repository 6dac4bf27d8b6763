"""Federations over Flower: a transport, the two apps, and what ``emfed serve`` and ``join`` start.

Flower carries opaque bytes; everything else is `emfed.network`. Needs the extra
``emfed[flower]``.
"""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from emfed.core.errors import ExtraError
from emfed.network import SiteRules

if find_spec("flwr") is None:
    raise ExtraError(
        "a federation over a network needs Flower: pip install '.[flower]' where emfed's source is."
    )

__all__ = ["make_client_app", "make_server_app"]


def make_server_app(config: str | Path | None = None) -> Any:
    """A Flower ``ServerApp`` that fits what a configuration file describes.

    The file is that of ``emfed serve`` (docs/deployment.md). Without one it is found by the
    environment variable EMFED_CONFIG.
    """
    from emfed.network.flower.server import server_app

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

    A node has no keys of the others, so it cannot mask what it tells, and refuses every run unless
    its owner wrote ``unmasked=true`` into that configuration, or ``rules`` say so.
    """
    from emfed.network.flower.client import client_app

    return client_app(data_loader, folder=folder, rules=rules)
