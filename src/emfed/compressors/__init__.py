"""Unbiased compression operators: vectors to small discrete objects and back."""

from math import inf
from typing import Any

from emfed.compressors.chosen import ChosenDithering
from emfed.compressors.dithering import Dithering, block_quantization
from emfed.compressors.identity import Identity
from emfed.compressors.sparsification import RandomSparsification
from emfed.compressors.subtractive import SubtractiveDithering
from emfed.core.protocols import Compressor
from emfed.core.registry import Registry


def _read(settings: dict[str, Any]) -> dict[str, Any]:
    if settings.get("norm") == "inf":
        settings["norm"] = inf
    if isinstance(settings.get("block"), list):
        settings["block"] = tuple(settings["block"])
    if "then" in settings:
        settings["then"] = build_compressor(settings["then"])
    return settings


COMPRESSORS: Registry[Compressor] = Registry(
    "compressor",
    {
        "identity": Identity,
        "dithering": Dithering,
        "random-sparsification": RandomSparsification,
        "subtractive-dithering": SubtractiveDithering,
        "chosen-dithering": ChosenDithering,
    },
    _read,
)
"""Every operator by name; the contract tests try the examples of each."""
build_compressor = COMPRESSORS.build

__all__ = [
    "COMPRESSORS",
    "ChosenDithering",
    "Dithering",
    "Identity",
    "RandomSparsification",
    "SubtractiveDithering",
    "block_quantization",
    "build_compressor",
]
