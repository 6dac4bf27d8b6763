"""Unbiased compression operators: vectors to small discrete objects and back."""

from emfed.compressors.chosen import ChosenDithering
from emfed.compressors.dithering import Dithering, block_quantization
from emfed.compressors.identity import Identity
from emfed.compressors.sparsification import RandomSparsification
from emfed.compressors.subtractive import SubtractiveDithering
from emfed.core.protocols import Compressor

COMPRESSORS: dict[str, type[Compressor]] = {
    "identity": Identity,
    "dithering": Dithering,
    "random-sparsification": RandomSparsification,
    "subtractive-dithering": SubtractiveDithering,
    "chosen-dithering": ChosenDithering,
}
"""Every operator by name; the contract tests try the examples of each."""

__all__ = [
    "COMPRESSORS",
    "ChosenDithering",
    "Dithering",
    "Identity",
    "RandomSparsification",
    "SubtractiveDithering",
    "block_quantization",
]
