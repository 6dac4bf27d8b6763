"""Missing values filled in from a fitted mixture, with scikit-learn's face."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import OneToOneFeatureMixin, TransformerMixin

from fedem.estimators.base import FederatedEstimator
from fedem.models import gaussian_mixture, mixed_mixture
from fedem.protocols import FloatArray, Model
from fedem.results import Result


class FederatedImputer(OneToOneFeatureMixin, TransformerMixin, FederatedEstimator):
    """Replaces NaN by its posterior mean under a mixture of rows that stay with their workers.

    Parameters
    ----------
    n_components : number of components, or several to choose from: a range or ``"2:8"``.
    covariance_type : ``"full"`` or ``"diag"``; one component with full covariance is the Gaussian
        imputation of Little and Rubin.
    families : None for Gaussian columns; else those of `fedem.mixed_mixture`, given the component
        independent; categories are replaced by the likeliest.
    criterion, tol, max_iter, n_init, start, algorithm, follow_em, covariance_floor, warm_start,
        random_state : as in `FederatedGaussianMixture`.

    Attributes
    ----------
    n_components_, converged_, n_iter_, n_rounds_, lower_bound_, records_, bytes_, guard_hits_,
    result_ : as in `FederatedGaussianMixture`; ``result_`` also draws multiple imputations and
        intervals.
    """

    def __init__(
        self,
        n_components: Any = 1,
        *,
        covariance_type: str = "full",
        families: Any = None,
        criterion: str = "bic",
        tol: float | None = None,
        max_iter: int = 1000,
        n_init: int = 1,
        start: Any = "auto",
        algorithm: Any = "auto",
        follow_em: bool = False,
        covariance_floor: float = 1e-6,
        warm_start: bool = False,
        random_state: Any = None,
    ) -> None:
        self.n_components = n_components
        self.covariance_type = covariance_type
        self.families = families
        self.criterion = criterion
        self.tol = tol
        self.max_iter = max_iter
        self.n_init = n_init
        self.start = start
        self.algorithm = algorithm
        self.follow_em = follow_em
        self.covariance_floor = covariance_floor
        self.warm_start = warm_start
        self.random_state = random_state

    @property
    def _missing(self) -> bool:
        return True

    def _model(self, k: int) -> Model:
        if self.families is not None:
            return mixed_mixture(k, self.families)
        floor = self.covariance_floor
        return gaussian_mixture(k, self.covariance_type, missing=True, covariance_floor=floor)

    def _publish(self, result: Result) -> None:
        self.n_components_ = len(result.params.weights)

    def transform(self, X: Any) -> FloatArray:
        """Rows with NaN replaced; what was seen stays as it is."""
        return np.asarray(self._answer("impute", X))
