"""Random sparsification: k of the q coordinates, scaled by q / k, perhaps quantised too."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from emfed.compressors.dithering import Dithering
from emfed.compressors.identity import Identity
from emfed.compressors.subtractive import SubtractiveDithering
from emfed.core.errors import SettingsError, check_type
from emfed.core.protocols import Compressed, Compressor, FloatArray, Form, IntArray, Layout


@final
@dataclass(frozen=True)
class RandomSparsification(Compressor):
    """Keep some coordinates, chosen uniformly, and scale them so that there is no bias.

    The support follows from the shared uniforms, so it costs nothing on the wire. 1 + omega is the
    product of those of the choice and of ``then``.

    Parameters
    ----------
    keep : int or float
        How many coordinates are kept: a count, or a fraction below 1.
    then : Compressor
        What the kept coordinates go through: the identity or a quantiser.

    Examples
    --------
    >>> import emfed
    >>> emfed.RandomSparsification(5).omega(20)
    3.0
    """

    keep: int | float
    then: Compressor = field(default_factory=Identity)

    def __post_init__(self) -> None:
        whole = isinstance(self.keep, int) and not isinstance(self.keep, bool) and self.keep >= 1
        fraction = isinstance(self.keep, float) and 0 < self.keep < 1
        if not (whole or fraction):
            raise SettingsError(
                f"keep must be a count >= 1 or a fraction between 0 and 1; got {self.keep!r}."
            )

        check_type("then", self.then, Compressor, "Dithering(levels=4)")
        if isinstance(self.then, Dithering) and self.then.block in ("field", "row"):
            raise SettingsError(
                "after sparsification no block of the layout is left: give `then` a block size."
            )

    def resolve(self, layout: Layout) -> RandomSparsification:
        self.then.form(self.kept(layout.size))
        return self

    def kept(self, q: int) -> int:
        """How many of q coordinates are sent."""
        if isinstance(self.keep, int):
            if self.keep > q:
                raise SettingsError(f"keep={self.keep}, but the statistics have dimension {q}.")
            return self.keep
        return max(1, round(self.keep * q))

    def draws(self, q: int) -> int:
        """One uniform per coordinate for the support, then those of the quantiser."""
        return q + self.then.draws(self.kept(q))

    def _support(self, uniforms: FloatArray, q: int) -> IntArray:
        """Positions of the k smallest uniforms, in increasing order."""
        k = self.kept(q)
        if k == q:
            return np.broadcast_to(np.arange(q), (*uniforms.shape[:-1], q))
        return np.sort(np.argpartition(uniforms[..., :q], k - 1, axis=-1)[..., :k], axis=-1)

    def compress(self, vectors: FloatArray, uniforms: FloatArray) -> Compressed:
        """The kept coordinates, scaled, through the quantiser."""
        q = vectors.shape[-1]
        kept = np.take_along_axis(vectors, self._support(uniforms, q), axis=-1)
        return self.then.compress(kept * (q / self.kept(q)), uniforms[..., q:])

    def decompress(self, message: Compressed, uniforms: FloatArray, q: int) -> FloatArray:
        """Zeros, but for the support."""
        kept = self.then.decompress(message, uniforms[..., q:], self.kept(q))
        out = np.zeros((*kept.shape[:-1], q))
        np.put_along_axis(out, self._support(uniforms, q), kept, axis=-1)
        return out

    def form(self, q: int) -> Form:
        return self.then.form(self.kept(q))

    def dither(self, uniforms: FloatArray, q: int) -> FloatArray | None:
        return self.then.dither(uniforms[..., q:], self.kept(q))

    def omega(self, q: int) -> float:
        """(q / k) (1 + omega of the quantiser) - 1; exact for the support alone."""
        k = self.kept(q)
        return q / k * (1 + self.then.omega(k)) - 1

    def variance(self, vectors: FloatArray) -> FloatArray | None:
        """(q / k - 1) |x|^2 without a quantiser."""
        if self.then != Identity():
            return None
        q = vectors.shape[-1]
        return np.asarray((q / self.kept(q) - 1) * (vectors**2).sum(axis=-1))

    def describe(self) -> dict[str, Any]:
        """What is kept, and the quantiser."""
        return {
            "compressor": "random-sparsification",
            "keep": self.keep,
            "then": self.then.describe(),
        }

    @classmethod
    def examples(cls) -> Iterator[Compressor]:
        """Alone, by fraction, and before each kind of quantiser."""
        yield cls(1)
        yield cls(0.4)
        yield cls(0.5, Identity("bfloat16"))
        yield cls(0.5, Dithering(levels=2))
        yield cls(0.5, SubtractiveDithering(0.5))
