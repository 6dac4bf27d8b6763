"""Where messages travel: in this process, worker by worker or stacked, or in Ray's actors.

With or without faults.
"""

from fedem.federations.cluster import RayFederation
from fedem.federations.faulty import FaultPlan, FaultyFederation
from fedem.federations.inprocess import InProcessFederation
from fedem.federations.loop import LoopFederation
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
    "LoopFederation",
    "RayFederation",
    "StackedFederation",
]
