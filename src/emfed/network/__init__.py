"""Where messages travel: in this process, stacked or one by one; in Ray's actors; to sites.

With or without faults.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emfed.network.cluster import RayFederation
    from emfed.network.faulty import FaultPlan, FaultyFederation
    from emfed.network.federation import RemoteFederation
    from emfed.network.inprocess import (
        FEDERATIONS,
        InProcessFederation,
        LoopFederation,
        StackedFederation,
    )
    from emfed.network.rules import SiteRules
    from emfed.network.site import Site
    from emfed.network.transport import LocalTransport, Transport
    from emfed.network.websocket import join, listen

__all__ = [
    "FEDERATIONS",
    "FaultPlan",
    "FaultyFederation",
    "InProcessFederation",
    "LocalTransport",
    "LoopFederation",
    "RayFederation",
    "RemoteFederation",
    "Site",
    "SiteRules",
    "StackedFederation",
    "Transport",
    "join",
    "listen",
]
_HOMES = {
    "cluster": ("RayFederation",),
    "faulty": ("FaultPlan", "FaultyFederation"),
    "federation": ("RemoteFederation",),
    "inprocess": ("FEDERATIONS", "InProcessFederation", "LoopFederation", "StackedFederation"),
    "rules": ("SiteRules",),
    "site": ("Site",),
    "transport": ("LocalTransport", "Transport"),
    "websocket": ("join", "listen"),
}
"""Where the public names are: a relay imports no model."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    for home, names in _HOMES.items():
        if name in names:
            found = getattr(import_module(f"emfed.network.{home}"), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module 'emfed.network' has no attribute {name!r}")
