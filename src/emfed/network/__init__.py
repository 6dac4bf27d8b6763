"""Where the rows are: in this process, stacked or one by one; in Ray's actors; at sites.

With or without faults.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from emfed.deployment.live import LocalSites, join
    from emfed.network.cluster import RayFederation
    from emfed.network.faulty import FaultPlan, FaultyFederation
    from emfed.network.inprocess import (
        FEDERATIONS,
        Federation,
        InProcessFederation,
        LoopFederation,
        StackedFederation,
    )
    from emfed.network.listening import connect, listen
    from emfed.network.live import LiveSites
    from emfed.network.owner_rules import SiteRules

__all__ = [
    "FEDERATIONS",
    "FaultPlan",
    "FaultyFederation",
    "Federation",
    "InProcessFederation",
    "LiveSites",
    "LocalSites",
    "LoopFederation",
    "RayFederation",
    "SiteRules",
    "StackedFederation",
    "connect",
    "join",
    "listen",
]
_HOMES = {
    "emfed.network.cluster": ("RayFederation",),
    "emfed.network.faulty": ("FaultPlan", "FaultyFederation"),
    "emfed.network.inprocess": (
        "FEDERATIONS",
        "Federation",
        "InProcessFederation",
        "LoopFederation",
        "StackedFederation",
    ),
    "emfed.network.listening": ("connect", "listen"),
    "emfed.network.live": ("LiveSites",),
    "emfed.network.owner_rules": ("SiteRules",),
    "emfed.deployment.live": ("LocalSites", "join"),
}
"""Where the public names are. A relay imports no model; a site, which follows fits and has an
owner, is in a later room."""


def __getattr__(name: str) -> Any:
    """Import a public name when it is first asked for."""
    for home, names in _HOMES.items():
        if name in names:
            found = getattr(import_module(home), name)
            globals()[name] = found
            return found
    raise AttributeError(f"module 'emfed.network' has no attribute {name!r}")
