"""The readable twin: one worker after the other, as a network would run them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import final

import numpy as np

from emfed.core.protocols import IntArray
from emfed.data.tables import Piece, Workers
from emfed.network.inprocess import InProcessFederation


@final
class LoopFederation(InProcessFederation):
    """Drives workers one by one; slow, simple, and it names the worker that fails."""

    def batches(self, workers: IntArray) -> Iterator[IntArray]:
        """One at a time."""
        for position in range(len(workers)):
            yield np.array([position])

    def pieces(self, data: Workers, workers: IntArray) -> Iterator[Piece]:
        """One at a time."""
        return data.pieces(workers)
