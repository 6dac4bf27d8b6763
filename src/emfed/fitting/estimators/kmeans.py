"""k-means with scikit-learn's face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, ClusterMixin, TransformerMixin

from emfed.artifacts.result import Result
from emfed.core.protocols import FloatArray, IntArray, Model
from emfed.data.weights import check_row_weights
from emfed.fitting.estimators.base import FederatedEstimator, MixtureMethods
from emfed.fitting.estimators.intake import framed
from emfed.models import k_means


class FederatedKMeans(
    ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, FederatedEstimator
):
    """k-means of rows that stay with their workers: only cluster sums and counts leave them.

    Parameters
    ----------
    n_clusters : the number of clusters.
    standardised : whether distances are in standard deviations of each column.
    tol : mean squared distance, in variances of the data, that may still be gained.
    max_iter, n_init, start, algorithm, warm_start, random_state, device, precision, verbose : as in
        `FederatedGaussianMixture`; the start never takes raw points unless ``start="points"``.

    Attributes
    ----------
    cluster_centers_ : ``(clusters, columns)``; inertia_ : the sum of squared distances to them.
    labels_ : the cluster of each row of X (a list of arrays where X is one per worker).
    converged_, n_iter_, n_rounds_, records_, bytes_, result_ : as in `FederatedGaussianMixture`.
    """

    follow_em = False
    _number: ClassVar[str] = "n_clusters"
    _words: ClassVar[Mapping[str, str]] = {
        **FederatedEstimator._words,
        "n_components": "n_clusters",
    }

    def __init__(
        self,
        n_clusters: int = 8,
        *,
        standardised: bool = False,
        tol: float = 1e-6,
        max_iter: int = 300,
        n_init: int = 1,
        start: Any = "auto",
        algorithm: Any = "em",
        warm_start: bool = False,
        random_state: Any = None,
        device: Any = None,
        precision: Any = "double",
        verbose: bool = False,
    ) -> None:
        self.n_clusters = n_clusters
        self.standardised = standardised
        self.tol = tol
        self.max_iter = max_iter
        self.n_init = n_init
        self.start = start
        self.algorithm = algorithm
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.precision = precision
        self.verbose = verbose

    def _components(self) -> int:
        return self.n_clusters

    def _model(self, k: int) -> Model:
        return k_means(k, standardised=bool(self.standardised))

    def _publish(self, result: Result) -> None:
        self.cluster_centers_ = result.params.centres
        self._n_features_out = len(self.cluster_centers_)

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        groups: Any | None = None,
        sample_weight: Any | None = None,
    ) -> FederatedKMeans:
        """Find the centres, then the cluster of each row where it lies."""
        super().fit(X, y, groups=groups, sample_weight=sample_weight)
        scale = self.result_.model.frame.scale[0] ** 2 if not self.standardised else 1.0
        self.inertia_ = -self.lower_bound_ * self.result_.samples * scale
        return self

    _label, fit_predict = MixtureMethods._label, MixtureMethods.fit_predict

    def predict(self, X: Any) -> IntArray:
        """The nearest centre of each row."""
        return np.asarray(self._answer("predict", X))

    def transform(self, X: Any) -> Any:
        """The distance of each row to each centre; a data frame where X is one."""
        return framed(self, X, self._distances(X), self.get_feature_names_out())

    def _distances(self, X: Any) -> FloatArray:
        rows, model = self._rows(X), self.result_.model
        distances = model.distances(rows, model.maximize(self.result_.statistics))
        return np.asarray(distances * (1.0 if self.standardised else model.frame.scale[0]))

    def score(self, X: Any, y: Any = None, sample_weight: Any | None = None) -> float:
        """Minus the sum of squared distances to the nearest centre, each row with its weight."""
        near = self._distances(X).min(axis=1) ** 2
        if sample_weight is None:
            return -float(near.sum())
        weights = check_row_weights(sample_weight, len(near), "sample_weight")
        return -float(weights @ near)
