"""Where messages travel: in this process, stacked or one by one, or as bytes to sites elsewhere."""

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
    "RemoteFederation",
    "Site",
    "SiteRules",
    "StackedFederation",
    "Transport",
]
