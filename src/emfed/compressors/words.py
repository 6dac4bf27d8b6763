"""Naming a compressor in one word."""

from __future__ import annotations

from emfed.compressors.dithering import Dithering, block_quantization
from emfed.compressors.identity import Identity
from emfed.compressors.sparsification import RandomSparsification
from emfed.compressors.subtractive import SubtractiveDithering
from emfed.core.errors import SettingsError
from emfed.core.protocols import Compressor

COMPRESSOR_HELP = (
    "none, dithering:LEVELS, block:SIZE, subtractive:NOISE or sparse:SHARE, as in dithering:4."
)


def parse_compressor(text: str, where: str = "--compressor") -> Compressor:
    """``dithering:4`` and its like; errors say ``where`` it was read."""
    name, _, value = text.partition(":")
    try:
        if name == "none" and not value:
            return Identity()
        if name == "dithering":
            return Dithering(int(value or 4))
        if name == "block":
            return block_quantization(int(value or 4))
        if name == "subtractive":
            return SubtractiveDithering(float(value or 0.25))
        if name == "sparse":
            return RandomSparsification(float(value or 0.25))
    except (ValueError, TypeError) as error:
        if isinstance(error, SettingsError):
            raise
        raise SettingsError(f"{where} {text!r}: {value!r} is not a number.") from None
    raise SettingsError(f"{where} must be {COMPRESSOR_HELP} Got {text!r}.")
