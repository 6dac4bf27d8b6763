"""The algorithms of the paper as pure state machines for server and worker."""

from fedem.algorithms.auto import AutoEM
from fedem.algorithms.em import EM
from fedem.algorithms.fedem import FedEM
from fedem.algorithms.participation import Bernoulli, Everyone, FixedSize, Schedule
from fedem.algorithms.steps import Decreasing
from fedem.algorithms.vr_fedem import VRFedEM
from fedem.protocols import Algorithm

ALGORITHMS: dict[str, type[Algorithm]] = {
    "em": EM,
    "fedem": FedEM,
    "vr-fedem": VRFedEM,
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
