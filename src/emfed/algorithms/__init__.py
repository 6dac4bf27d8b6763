"""The algorithms of the paper as pure state machines for server and worker."""

from collections.abc import Mapping
from typing import Any

from emfed.algorithms.auto import AutoEM
from emfed.algorithms.em import EM
from emfed.algorithms.fed_em import FedEM
from emfed.algorithms.participation import Bernoulli, Everyone, FixedSize, Schedule
from emfed.algorithms.steps import Decreasing
from emfed.algorithms.vr_fed_em import VRFedEM
from emfed.compressors import build_compressor
from emfed.core.errors import SettingsError
from emfed.core.protocols import Algorithm
from emfed.core.registry import Registry


def _read(settings: dict[str, Any]) -> dict[str, Any]:
    for name in ("compressor", "broadcast"):
        if isinstance(settings.get(name), Mapping):
            settings[name] = build_compressor(settings[name])
    step = settings.get("step_size")
    if isinstance(step, Mapping):
        if "function" in step:
            raise SettingsError("a function of one's own as step_size cannot travel.")
        settings["step_size"] = Decreasing(**step)
    settings.pop("name", None)  # a field of some, which is not to be chosen
    return settings


ALGORITHMS: Registry[Algorithm] = Registry(
    "algorithm", {cls.name: cls for cls in (EM, FedEM, VRFedEM, AutoEM)}, _read
)
"""Every algorithm by name."""
build_algorithm = ALGORITHMS.build

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
    "build_algorithm",
]
