"""The settings that travel as text, built by the same functions at every end and for prices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from emfed.core.errors import WireError
from emfed.core.privacy import Privacy
from emfed.core.protocols import Names, Phase
from emfed.core.registry import plain
from emfed.core.version import __version__
from emfed.core.wire import read_json

UNIFORM = "uniform"
"""Workers count alike, however many rows they have."""


def hello(
    description: Any,
    columns: Names,
    loss: float | None = None,
    masks: bool = False,
    privacy: Privacy | None = None,
    uniform: bool = False,
) -> dict[str, Any]:
    """What a server asks of a worker that it does not know yet; with a loss, to round.

    With masks it asks for no numbers, and says whether workers count alike or by their rows.
    """
    told = {"model": description, "columns": None if columns is None else list(columns)}
    told |= {"masks": True} if masks else {}
    told |= {"weights": UNIFORM} if masks and uniform else {}
    told |= {} if privacy is None else {"privacy": [privacy.epsilon, privacy.delta]}
    return told if loss is None else told | {"loss": loss}


def join_about(
    columns: Names,
    shapes: Mapping[str, Sequence[int]],
    weighted: bool,
) -> dict[str, Any]:
    """What a worker says of its data beside the numbers."""
    about: dict[str, Any] = {
        "columns": None if columns is None else list(columns),
        "shapes": {name: list(shape) for name, shape in shapes.items()},
        "software": f"emfed {__version__}",
    }
    return about | ({"weighted": True} if weighted else {})


def settings(phase: Phase) -> dict[str, Any]:
    """What a worker must know of a phase, whose number is in the envelope."""
    described = dict(phase.algorithm.describe())
    if "step_size" in described:  # the server's affair, and perhaps a function
        described["step_size"] = None
    told = {"algorithm": plain(described), "seed": phase.seed}
    told |= {"since": phase.since} if phase.since else {}
    return told | ({"view": view} if (view := phase.view.describe()) else {})


def privacy_of(content: Mapping[str, Any]) -> Privacy | None:
    """What a run's hello says that it may tell of any one row; None: it does not say."""
    told = content.get("privacy")
    if told is None:
        return None
    numbers = isinstance(told, list) and all(isinstance(x, float | int) for x in told)
    if not numbers or len(told) != 2:
        raise WireError("a private run gives its epsilon and delta.")
    return Privacy(float(told[0]), float(told[1]))


def is_uniform(settings: str) -> bool:
    """Whether workers of a masked run count alike, by its hello as a worker keeps it."""
    return read_json(settings).get("weights") == UNIFORM


def is_masked(settings: str) -> bool:
    """Whether a run's hello, as a worker keeps it, asked for masks."""
    return read_json(settings).get("masks") is True
