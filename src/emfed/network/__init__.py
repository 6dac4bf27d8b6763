"""Where messages travel: in this process, stacked or one by one; in Ray's actors; to sites.

With or without faults.
"""

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
