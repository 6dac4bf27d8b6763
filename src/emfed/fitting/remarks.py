"""What a user should know of how a fit went, in words."""

from __future__ import annotations

from math import inf
from typing import Any

from emfed.algorithms.base import CompressedEM
from emfed.core.protocols import Algorithm
from emfed.core.records import Records
from emfed.core.wording import ByFace, Setting, Wording
from emfed.fitting.stopping import Stop

MANY_SHORT, SHARE_SHORT = 5, 0.02
"""Rounds with a shortened step, and the share of all, beyond which a fit may be thrown off."""
FEWER_COMPONENTS = "fewer components, or leave out columns that follow from others"


def remedy(algorithm: Algorithm) -> str:
    """What may keep steps from being shortened."""
    if not isinstance(algorithm, CompressedEM):  # others have none of these settings
        return FEWER_COMPONENTS
    metric = "" if algorithm.in_metric else "in_metric=True, "
    own = ByFace(f"{metric}a smaller step_size, ", command="")
    return Wording("{}a finer {}, or fewer components", own, Setting("compressor"))


def shortened(records: Records, remedy: str) -> str:
    """Words about steps that had to be shortened; empty unless there were many."""
    made = [record for record in records if record.round > 0]
    short = sum(record.guard_hits > 0 for record in made)
    if short <= max(MANY_SHORT, SHARE_SHORT * len(made)):
        return ""
    return Wording(
        "in {} of {} rounds the step was shortened to stay where the model is defined; the fit may "
        "have been thrown off. Use {}.",
        *(short, len(made), remedy),
    )


def unconverged(model: Any, stopped: str, stop: Stop, tolerance: float, left: float) -> str:
    """What a fit that met another limit lacks to convergence; ``left`` are nats a row."""
    if stopped not in ("rounds", "epochs", "bytes", "seconds"):
        return ""
    if stop.tolerance is not None:
        return Wording(
            "|H|^2 did not fall to {:g} before the limit on {}: allow more {}, or a larger {}.",
            *(stop.tolerance, stopped, stopped, Setting("tol")),
        )
    if not tolerance:
        return ""
    words = model.words()
    goal = about = ""
    if words.likelihood:
        goal = f" to {tolerance:g} nats a {words.row}"
        some = f"about {left:.1g} nats a {words.row} may be left"
        about = f" ({some if left < inf else 'much may be left'})"
    fewer = f"fewer {words.part}s, " if model.describe().get("n_components", 1) > 1 else ""
    return Wording(
        "the run met its limit on {} before it converged{}{}: allow more {}, {}or a larger {}.",
        *(stopped, goal, about, stopped, fewer, Setting("tol")),
    )
