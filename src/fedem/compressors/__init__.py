"""Unbiased compression operators: vectors to small discrete objects and back."""

from fedem.compressors.chosen import ChosenDithering
from fedem.compressors.dithering import Dithering, block_quantization
from fedem.compressors.identity import Identity
from fedem.compressors.sparsification import RandomSparsification
from fedem.compressors.subtractive import SubtractiveDithering
from fedem.protocols import Compressor

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
