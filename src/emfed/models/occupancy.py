"""Occupancy with repeat visits: who is there, and who is seen, apart.

    z ~ Bernoulli(expit(b . (1, x))),  y_v ~ Bernoulli(expit(a . (1, w_v))) where z = 1, else 0

A row is a place (a season of it): its visits y_1 ... y_V (0, 1, or missing), its
covariates of presence x, and for each covariate of detection its value at every visit. The latent
variables are presence z and, for each logit, a Polya-Gamma variable (Polson, Scott and Windle
2013): with it the complete data are normal in b and a. So the statistics are sums of omega x x^T
and kappa x (Scott and Sun 2013), T solves two linear systems, and EM is an ordinary federated one.
E omega is tanh(psi / 2) / (2 psi).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Self, final

import numpy as np

from emfed.core.errors import DataError, check_count, check_range, known
from emfed.core.protocols import (
    FloatArray,
    IntArray,
    Layout,
    Model,
    ModelWords,
    Names,
    Parameters,
    Summaries,
)
from emfed.core.registry import register_model
from emfed.core.streams import Purpose, normal_row
from emfed.models.matrices import is_positive_definite, outer, pack, unpack

_TINY = 1e-12
"""The least number that is divided by."""


@final
@dataclass(frozen=True)
class OccupancyParameters(Parameters):
    """The coefficients of presence and of detection, the intercept first.

    Parameters
    ----------
    presence : array of shape (1 + presence covariates,)
        The coefficients of the log-odds that a place is occupied.
    detection : array of shape (1 + detection covariates,)
        The coefficients of the log-odds that a visit to an occupied place sees it.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.models import OccupancyParameters
    >>> OccupancyParameters(np.zeros(1), np.zeros(1)).presence
    array([0.])
    """

    presence: FloatArray
    detection: FloatArray


@register_model("occupancy")
@final
@dataclass(frozen=True, eq=False)
class Occupancy(Model):
    """Presence and detection from repeat visits, with covariates on both.

    A row is a place: its visits (0, 1 or NaN), its covariates, and those of its visits.

    Parameters
    ----------
    visits : int
        The number of columns of visits, which come first.
    presence_covariates : int
        How many columns of covariates of the place follow.
    detection_covariates : int
        How many covariates of visits follow those, as many columns each as there are visits.
    ridge : float
        Half of it times the squared coefficients (but intercepts) is charged, in rows: it keeps
        coefficients finite where presence is certain.
    rows : float or None
        The number of rows, which binding fills in.
    products : array or None
        The means of the products of covariates, over places and over visits made; binding fills
        them in.
    rates : array or None
        The share of places where it was seen at all, of visits made, and of visits that saw it;
        binding fills them in.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> visits = np.array([[1.0, 0, 1], [0, 0, 0], [1, 1, 0], [0, 0, 0], [0, 1, 1], [0, 0, 0]])
    >>> result = emfed.fit(emfed.models.Occupancy(3), [visits[:3], visits[3:]], "em", rounds=20)
    >>> result.params.detection.shape
    (1,)
    """

    visits: int
    presence_covariates: int = 0
    detection_covariates: int = 0
    ridge: float = 0.1
    rows: float | None = None
    products: FloatArray | None = None
    rates: FloatArray | None = None

    def __post_init__(self) -> None:
        check_count("visits", self.visits)
        check_count("presence_covariates", self.presence_covariates, 0)
        check_count("detection_covariates", self.detection_covariates, 0)
        check_range("ridge", self.ridge, 0, np.inf, open_high=True)

    @property
    def n_features(self) -> int:
        return self.visits * (1 + self.detection_covariates) + self.presence_covariates

    @property
    def _widths(self) -> tuple[int, int]:
        return 1 + self.presence_covariates, 1 + self.detection_covariates

    @property
    def layout(self) -> Layout:
        p, d = self._widths
        return Layout(
            (
                ("presence_information", (p * (p + 1) // 2,)),
                ("presence_score", (p,)),
                ("detection_information", (d * (d + 1) // 2,)),
                ("detection_score", (d,)),
            )
        )

    @property
    def allows_missing(self) -> bool:
        return True

    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        """Visits are 0, 1 or missing, covariates finite or missing."""
        array = np.asarray(data, dtype=np.float64)
        if array.ndim != 2 or array.shape[1] != self.n_features:
            raise DataError(
                f"{where}: expected {self.n_features} columns ({self.visits} visits, "
                f"{self.presence_covariates} covariates of presence, {self.detection_covariates} "
                f"of detection with {self.visits} each); got shape {array.shape}."
            )
        seen = array[:, : self.visits]
        bad = ~(np.isnan(seen) | (seen == 0) | (seen == 1))
        if bad.any():
            row, column = np.argwhere(bad)[0]
            raise DataError(
                f"{where}, row {first + row}, visit {column}: expected 0, 1 or missing; got "
                f"{seen[row, column]!r}."
            )
        if np.isinf(array).any():
            row = int(np.argwhere(np.isinf(array))[0, 0])
            raise DataError(f"{where}, row {first + row}: a covariate is infinite.")

    def _parts(self, data: Any) -> tuple[Any, FloatArray, FloatArray]:
        """Which visits count, (1, x) of places, and (1, w) of visits (zeros where none counts).

        A visit counts where it was made and its covariates are known. A covariate of presence that
        is missing is taken as 0, its mean if the owner centred it.
        """
        array, v = np.asarray(data, dtype=np.float64), self.visits
        x = np.nan_to_num(array[..., v : v + self.presence_covariates])
        x = np.concatenate([np.ones((*x.shape[:-1], 1)), x], axis=-1)
        w = array[..., v + self.presence_covariates :]
        w = np.moveaxis(w.reshape(*w.shape[:-1], self.detection_covariates, v), -1, -2)
        made = np.isfinite(array[..., :v]) & np.isfinite(w).all(axis=-1)
        w = np.concatenate([np.ones((*w.shape[:-1], 1)), w], axis=-1)
        return made, x, np.where(made[..., None], w, 0.0)

    def _seen(self, data: Any) -> FloatArray:
        """1 where a visit that counts saw it."""
        seen = np.asarray(data, dtype=np.float64)[..., : self.visits]
        return np.where(self._parts(data)[0], np.nan_to_num(seen), 0.0)

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        made, x, w = self._parts(data)
        y = self._seen(data)
        rates = np.stack([y.max(axis=-1), made.mean(axis=-1), y.mean(axis=-1)], axis=-1)
        products = np.concatenate([pack(outer(x, x)), pack(outer(w, w).sum(axis=-3))], axis=-1)
        return {"products": _average(products, weights), "rates": _average(rates, weights)}

    def combine(self, summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
        return {name: shares @ values for name, values in summaries.items()}

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        return dataclasses.replace(
            self,
            rows=float(np.sum(counts)),
            products=weights @ summaries["products"],
            rates=weights @ summaries["rates"],
        )

    def _logits(self, data: Any, params: OccupancyParameters) -> tuple[FloatArray, FloatArray]:
        _, x, w = self._parts(data)
        presence = np.einsum("...ni,...i->...n", x, params.presence)
        return presence, np.einsum("...nvi,...i->...nv", w, params.detection)

    def presence(self, data: Any, params: OccupancyParameters) -> FloatArray:
        """The probability that it was there, given the visits."""
        return np.exp(self._terms(data, params)[0] - self.score_samples(data, params))

    def _terms(self, data: Any, params: OccupancyParameters) -> tuple[FloatArray, FloatArray]:
        """Log densities of the visits with presence, and with absence."""
        made, _, _ = self._parts(data)
        y, (psi, eta) = self._seen(data), self._logits(data, params)
        visits = np.where(made, y * eta - np.logaddexp(0.0, eta), 0.0).sum(axis=-1)
        absent = np.where(y.max(axis=-1) > 0, -np.inf, -np.logaddexp(0.0, psi))
        return -np.logaddexp(0.0, -psi) + visits, absent

    def expected_statistics(
        self, data: Any, params: OccupancyParameters, weights: Any | None = None
    ) -> FloatArray:
        made, x, w = self._parts(data)
        psi, eta = self._logits(data, params)
        there = self.presence(data, params)
        omega, visits = _omega(psi), there[..., None] * _omega(eta) * made
        kappa = there[..., None] * (self._seen(data) - 0.5) * made
        parts = [
            pack(omega[..., None, None] * outer(x, x)),
            (there - 0.5)[..., None] * x,
            pack((visits[..., None, None] * outer(w, w)).sum(axis=-3)),
            (kappa[..., None] * w).sum(axis=-2),
        ]
        return _average(np.concatenate(parts, axis=-1), weights)

    def _ridges(self) -> tuple[FloatArray, FloatArray]:
        """The ridge on each coefficient, a row's share."""
        size = self.ridge / known(self.rows)
        first, second = (np.full(width, size) for width in self._widths)
        first[0] = second[0] = 0.0
        return first, second

    def _systems(self, statistics: FloatArray) -> list[tuple[FloatArray, FloatArray]]:
        parts = self.layout.split(statistics)
        return [
            (
                unpack(parts[f"{name}_information"], width) + np.diag(ridge),
                parts[f"{name}_score"],
            )
            for name, width, ridge in zip(
                ("presence", "detection"), self._widths, self._ridges(), strict=True
            )
        ]

    def maximize(self, statistics: FloatArray) -> OccupancyParameters:
        presence, detection = (
            np.asarray(np.linalg.solve(information, score[..., None])[..., 0], dtype=np.float64)
            for information, score in self._systems(np.asarray(statistics, dtype=np.float64))
        )
        return OccupancyParameters(presence, detection)

    def surrogate(self, statistics: FloatArray, params: OccupancyParameters) -> FloatArray:
        total = np.zeros(np.shape(statistics)[:-1])
        pairs = zip(
            self._systems(np.asarray(statistics)), (params.presence, params.detection), strict=True
        )
        for (information, score), beta in pairs:
            total = total + 0.5 * np.einsum("...i,...ij,...j->...", beta, information, beta)
            total = total - (score * beta).sum(axis=-1)
        return np.asarray(total)

    def score_samples(self, data: Any, params: OccupancyParameters) -> FloatArray:
        return np.asarray(np.logaddexp(*self._terms(data, params)))

    def log_likelihood(
        self, data: Any, params: OccupancyParameters, weights: Any | None = None
    ) -> FloatArray:
        return _average(self.score_samples(data, params)[..., None], weights)[..., 0]

    def penalty(self, params: OccupancyParameters) -> float:
        pairs = zip(self._ridges(), (params.presence, params.detection), strict=True)
        return float(sum(0.5 * (ridge * beta**2).sum() for ridge, beta in pairs))

    def inside(self, statistics: FloatArray) -> bool:
        statistics = np.asarray(statistics, dtype=np.float64)
        if not np.isfinite(statistics).all():
            return False
        return all(is_positive_definite(system) for system, _ in self._systems(statistics))

    def start(self, seed: int) -> OccupancyParameters:
        """Presence where it was seen and a bit more, detection as visits tell; a little noise."""
        occupied, visited, detected = known(self.rates)
        p, d = self._widths
        z = 0.1 * normal_row(seed, 0, Purpose.START, p + d)
        first, second = z[:p], z[p:]
        first[0] += _logit(np.clip(0.5 * (1 + occupied) * 0.98, 0.02, 0.98))
        rate = detected / max(visited * max(0.5 * (1 + occupied), _TINY), _TINY)
        second[0] += _logit(np.clip(rate, 0.02, 0.98))
        return OccupancyParameters(first, second)

    def statistics_of(self, params: OccupancyParameters) -> FloatArray:
        """The statistics of the opening's products at a quarter, which T takes to these
        parameters."""
        p, d = self._widths
        both = np.split(known(self.products) / 4, [p * (p + 1) // 2])
        out = []
        for packed, width, ridge, beta in zip(
            both, (p, d), self._ridges(), (params.presence, params.detection), strict=True
        ):
            system = unpack(packed, width) + np.diag(ridge)
            out += [packed, np.einsum("ij,...j->...i", system, beta)]
        lead = np.shape(params.presence)[:-1]
        whole = [np.broadcast_to(part, (*lead, part.shape[-1])) for part in out]
        return np.concatenate(whole, axis=-1)

    def free_parameters(self) -> int:
        return sum(self._widths)

    def words(self) -> ModelWords:
        return ModelWords("occupancy model")

    def describe(self) -> dict[str, Any]:
        names = ("visits", "presence_covariates", "detection_covariates", "ridge")
        return {"model": "occupancy", **{name: getattr(self, name) for name in names}}


def _logit(share: Any) -> float:
    return float(np.log(share) - np.log1p(-share))


def _omega(psi: FloatArray) -> FloatArray:
    """The mean of PG(1, psi)."""
    small = np.abs(psi) < 1e-4
    safe = np.where(small, 1.0, psi)
    return np.where(small, 0.25 - psi**2 / 48, np.tanh(safe / 2) / (2 * safe))


def _average(values: FloatArray, weights: Any | None) -> FloatArray:
    """The mean over samples, ``(..., samples, q) -> (..., q)``."""
    if weights is None:
        return np.asarray(values.mean(axis=-2))
    shares = np.asarray(weights, dtype=np.float64)
    total = np.maximum(shares.sum(axis=-1, keepdims=True), _TINY)
    # A row of weight 0 is padding, and may hold anything.
    kept = np.where(shares[..., None] > 0, values, 0.0)
    return np.asarray((kept * shares[..., None]).sum(axis=-2) / total)
