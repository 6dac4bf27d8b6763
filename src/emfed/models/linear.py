"""A latent model whose constants are all known: the yardstick for the theory.

    y = z + e,   z ~ N(theta, I),   e ~ N(0, (1 / kappa - 1) I)

The statistic is z itself, E[z | y; theta] = (1 - kappa) theta + kappa y, and T(s) = s. So the mean
field is affine, h(s) = kappa (mean of y - s), and in assumptions A4 to A6 of the paper
W(s) = kappa |s - mean of y|^2 / 2 + constant, B(s) = I, v_min = v_max = 1, L = L_i = L_W = kappa.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np
from array_api_compat import array_namespace

from emfed.core.errors import check_range, known
from emfed.core.protocols import FloatArray, IntArray, Layout, Model, Names, Parameters, Summaries
from emfed.core.registry import register_model
from emfed.core.streams import Purpose, normals
from emfed.models.component_summaries import Portrait, normal_portrait
from emfed.models.rows import check_rows, moments


@final
@dataclass(frozen=True)
class Location(Parameters):
    """The parameter theta of a `LinearGaussian`.

    Parameters
    ----------
    mean : array of shape (d,)
        The mean of the rows.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.models import Location
    >>> Location(np.zeros(2)).mean
    array([0., 0.])
    """

    mean: FloatArray


@register_model("linear-gaussian")
@final
@dataclass(frozen=True)
class LinearGaussian(Model):
    """The mean of rows seen through noise: a model whose constants are all known.

    The mean field is affine, so it is the yardstick of the theory.

    Parameters
    ----------
    kappa : float
        The share of signal in a row, in (0, 1].
    n_features : int or None
        The number of columns, which binding fills in.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> data = [np.array([[1.0], [3.0]]), np.array([[2.0], [4.0]])]
    >>> result = emfed.fit(emfed.models.LinearGaussian(0.5), data, "em")
    >>> result.params.mean.round(3)
    array([2.5])
    """

    kappa: float = 0.5
    n_features: int | None = None

    def __post_init__(self) -> None:
        check_range("kappa", self.kappa, 0, 1, open_low=True)

    @property
    def layout(self) -> Layout:
        return Layout((("mean", (known(self.n_features),)),))

    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        check_rows(data, where, columns, self.n_features, first)

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        """Nothing that T needs; the width of the mean is the dimension."""
        return {"mean": moments(data, weights, full=False)[0]}

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        return dataclasses.replace(self, n_features=summaries["mean"].shape[-1])

    def expected_statistics(
        self, data: Any, params: Location, weights: Any | None = None
    ) -> FloatArray:
        mean, _ = moments(data, weights, full=False)
        return (1 - self.kappa) * params.mean + self.kappa * mean

    def maximize(self, statistics: FloatArray) -> Location:
        return Location(np.asarray(statistics, dtype=np.float64))

    def surrogate(self, statistics: FloatArray, params: Location) -> FloatArray:
        return np.asarray((params.mean * (0.5 * params.mean - statistics)).sum(axis=-1))

    def log_likelihood(self, data: Any, params: Location, weights: Any | None = None) -> FloatArray:
        """y is N(theta, I / kappa)."""
        mean, scatter = moments(data, weights, full=False)
        distance = scatter.sum(axis=-1) + ((mean - params.mean) ** 2).sum(axis=-1)
        return -0.5 * (self.kappa * distance + mean.shape[-1] * np.log(2 * np.pi / self.kappa))

    def score_samples(self, data: Any, params: Location) -> FloatArray:
        rows = array_namespace(data).expand_dims(data, axis=-2)
        return self.log_likelihood(rows, params)

    def inside(self, statistics: FloatArray) -> bool:
        """T is defined everywhere."""
        return bool(np.all(np.isfinite(statistics)))

    def start(self, seed: int) -> Location:
        zero = np.zeros(1, dtype=np.int64)
        return Location(normals(seed, 0, Purpose.START, zero, self.layout.size)[0])

    def statistics_of(self, params: Location) -> FloatArray:
        return params.mean

    def free_parameters(self) -> int:
        return self.layout.size

    def portrait(self, params: Location, names: Sequence[str]) -> Portrait:
        return normal_portrait(np.ones(1), params.mean[None], np.ones((1, len(params.mean))), names)

    def describe(self) -> dict[str, Any]:
        return {"model": "linear-gaussian", "kappa": self.kappa}
