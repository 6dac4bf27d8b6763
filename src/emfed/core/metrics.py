"""The metric in which compression acts."""

from __future__ import annotations

from abc import ABC, abstractmethod

from emfed.core.messages import FloatArray


class Metric(ABC):
    """An invertible linear map of R^q in which compression acts and omega is measured."""

    @abstractmethod
    def whiten(self, vectors: FloatArray) -> FloatArray:
        """``(..., q)`` into the metric's coordinates."""

    @abstractmethod
    def unwhiten(self, vectors: FloatArray) -> FloatArray:
        """The inverse of `whiten`."""

    @property
    def lightest(self) -> float:
        """How much lighter than the whole its most fragile part is, in (0, 1].

        Noise of variance v in every coordinate moves the parameters of that part by about
        sqrt(v / lightest) of their own spread.
        """
        return 1.0


class IdentityMetric(Metric):
    """The Euclidean metric of R^q, the one of the paper."""

    def whiten(self, vectors: FloatArray) -> FloatArray:
        """Return the vectors as they are."""
        return vectors

    unwhiten = whiten
