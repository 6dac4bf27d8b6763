"""The algorithms of the paper as pure state machines for server and worker."""

from emfed.algorithms.auto import AutoEM
from emfed.algorithms.em import EM
from emfed.algorithms.fed_em import FedEM
from emfed.algorithms.participation import Bernoulli, Everyone, FixedSize, Schedule
from emfed.algorithms.steps import Decreasing
from emfed.algorithms.vr_fed_em import VRFedEM
from emfed.core.protocols import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {
    "em": EM,
    "FedEM": FedEM,
    "VR-FedEM": VRFedEM,
    "auto": AutoEM,
}
"""Every algorithm by name."""

__all__ = [
    "ALGORITHMS",
    "EM",
    "AutoEM",
    "Bernoulli",
    "Decreasing",
    "Everyone",
    "FedEM",
    "FixedSize",
    "Schedule",
    "VRFedEM",
]
