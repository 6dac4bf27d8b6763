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
from emfed.fitting.estimators.parameters import documented
from emfed.models import k_means


@documented
class FederatedKMeans(
    ClassNamePrefixFeaturesOutMixin, TransformerMixin, ClusterMixin, FederatedEstimator
):
    """Find k-means of rows that stay with their workers: only cluster sums and counts leave them.

    Parameters
    ----------
    n_clusters : int
        The number of clusters: one number, since there is no likelihood to compare several by.
    standardised : bool
        Whether distances are in standard deviations of each column.
    tol : float
        The mean squared distance, in variances of the data, that may still be gained.
    {max_iter}
    {n_init}
    {moves}
    start : str or Centres
        "auto", "merge", "k-means", "moments" or centres.
    algorithm : str or Algorithm
        "em" (Lloyd's algorithm), "auto", "FedEM", "VR-FedEM" or an algorithm of emfed.
    {warm_start}
    {random_state}
    {device}
    {precision}
    {verbose}

    Attributes
    ----------
    cluster_centers_ : array of shape (clusters, columns)
        The centres.
    inertia_ : float
        The sum of squared distances to the nearest centre.
    labels_ : array or list of arrays
        The cluster of each row of X; a list where X is one table for each worker, None where the
        rows are elsewhere.
    {converged_}
    {n_iter_, n_rounds_}
    {bytes_, raw_bytes_}
    {records_}
    {guard_hits_}
    {result_}

    Examples
    --------
    >>> import emfed
    >>> from sklearn.datasets import load_iris
    >>> rows = load_iris().data
    >>> hospitals = {"north": rows[::2], "south": rows[1::2]}
    >>> clusters = emfed.FederatedKMeans(3, random_state=0).fit(hospitals)
    >>> clusters.cluster_centers_.shape
    (3, 4)
    """

    follow_em = False
    _number: ClassVar[str] = "n_clusters"
    _renamed: ClassVar[Mapping[str, str]] = {
        **FederatedEstimator._renamed,
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
        moves: int = 3,
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
        self.moves = moves
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
        if np.isfinite(self.lower_bound_):  # one batch tells nothing of all rows
            scale = result.model.frame.scale[0] ** 2 if not self.standardised else 1.0
            # rounding may leave a hair below zero where every row is a centre
            self.inertia_ = max(0.0, -self.lower_bound_ * result.samples * scale)

    _label, fit_predict = MixtureMethods._label, MixtureMethods.fit_predict

    def predict(self, X: Any) -> IntArray:
        """Find the nearest centre of each row.

        Parameters
        ----------
        X : table
            The rows.

        Returns
        -------
        array of shape (rows,)
            The clusters, counted from 0.
        """
        return np.asarray(self._answer("predict", X))

    def transform(self, X: Any) -> Any:
        """Compute the distance of each row to each centre.

        Parameters
        ----------
        X : table
            The rows.

        Returns
        -------
        array or data frame of shape (rows, clusters)
            The distances; a data frame where X is one.
        """
        return framed(self, X, self._distances(X), self.get_feature_names_out())

    def _distances(self, X: Any) -> FloatArray:
        rows, model = self._rows(X), self.result_.model
        distances = model.distances(rows, model.maximize(self.result_.statistics))
        return np.asarray(distances * (1.0 if self.standardised else model.frame.scale[0]))

    def score(self, X: Any, y: Any = None, sample_weight: Any | None = None) -> float:
        """Compute minus the weighted sum of squared distances to the nearest centre.

        Parameters
        ----------
        X : table
            The rows.
        y : None
            Ignored.
        sample_weight : array of shape (rows,), optional
            How much each row counts.

        Returns
        -------
        float
            Minus the inertia.
        """
        near = self._distances(X).min(axis=1) ** 2
        if sample_weight is None:
            return -float(near.sum())
        weights = check_row_weights(sample_weight, len(near), "sample_weight")
        return -float(weights @ near)
