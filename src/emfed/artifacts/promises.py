"""What a fit with noise promises of each row, as results and model files say it.

It stands under "privacy" in the settings of a result. Its ``private`` is true or false and its
``words`` are a sentence. Only what is private has an epsilon.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

PRIVATE, NOISY = "private-em", "noisy-em"
"""The algorithm of a fit with noise, where it is private and where it is not."""


def not_private(why: str, **more: Any) -> dict[str, Any]:
    """Noise that protects nobody, and why."""
    return {"private": False, **more, "words": f"not private: {why}"}


def broken(settings: Mapping[str, Any], why: str) -> dict[str, Any]:
    """The settings of a result that has seen rows without noise since it was fitted."""
    promise = settings.get("privacy")
    kept = promise is None or not promise["private"]
    return dict(settings) if kept else _without(settings, why)


def _without(settings: Mapping[str, Any], why: str) -> dict[str, Any]:
    algorithm = {**settings.get("algorithm", {}), "algorithm": NOISY}
    return {**settings, "algorithm": algorithm, "privacy": not_private(why)}


def as_read(settings: Mapping[str, Any], simulated: bool, release: str) -> dict[str, Any]:
    """The settings in a model file; those of a release that did not say whether it was private.

    Such a release drew the noise of a fit in one process from the seed, which the file holds.
    Between machines each site drew its own noise from its secret.
    """
    promise = settings.get("privacy")
    if promise is None or "private" in promise:
        return dict(settings)
    if not simulated:
        known = {"private": True, "noise": "each site's secret", **promise}
        return {**settings, "privacy": known}
    why = (
        f"emfed {release} fitted it in one process, and drew its noise from the seed that this "
        "file holds, so the noise can be taken off. Fit it again with this release"
    )
    return _without(settings, why)
