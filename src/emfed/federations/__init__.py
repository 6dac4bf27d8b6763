"""Where messages travel: in this process, stacked or one by one; in Ray's actors; to sites.

With or without faults.
"""

from emfed.federations.cluster import RayFederation
from emfed.federations.faulty import FaultPlan, FaultyFederation
from emfed.federations.inprocess import InProcessFederation
from emfed.federations.loop import LoopFederation
from emfed.federations.remote import LocalTransport, RemoteFederation, Site, SiteRules, Transport
from emfed.federations.stacked import StackedFederation

FEDERATIONS: dict[str, type[InProcessFederation]] = {
    "loop": LoopFederation,
    "stacked": StackedFederation,
}
"""In-process federations by name."""

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
]
