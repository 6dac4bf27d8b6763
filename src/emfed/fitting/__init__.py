"""From data and settings to a fitted model."""

from emfed.core.records import Records, RoundRecord
from emfed.fitting.by_hand import Run, open_run
from emfed.fitting.face import fit, select_components
from emfed.fitting.selection import Selection
from emfed.fitting.settings import FitSettings
from emfed.fitting.stopping import Monitor, Stop

__all__ = [
    "FitSettings",
    "Monitor",
    "Records",
    "RoundRecord",
    "Run",
    "Selection",
    "Stop",
    "fit",
    "open_run",
    "select_components",
]
