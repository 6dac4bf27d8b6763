"""Where messages travel: in this process, stacked or one by one; in Ray's actors; to sites.

With or without faults.
"""

from fedem.federations.cluster import RayFederation
from fedem.federations.faulty import FaultPlan, FaultyFederation
from fedem.federations.inprocess import InProcessFederation
from fedem.federations.loop import LoopFederation
from fedem.federations.remote import LocalTransport, RemoteFederation, Site, SiteRules, Transport
from fedem.federations.stacked import StackedFederation

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
