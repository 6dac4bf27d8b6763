"""Gaussian mixtures with scikit-learn's face."""

from __future__ import annotations

from typing import Any

import numpy as np
from sklearn.base import DensityMixin
from sklearn.utils.validation import check_is_fitted

from emfed.artifacts.result import Result
from emfed.core.errors import SettingsError
from emfed.core.protocols import FloatArray, Model
from emfed.fitting.estimators.base import FederatedEstimator, MixtureMethods
from emfed.fitting.estimators.parameters import documented
from emfed.models import gaussian_mixture


@documented
class FederatedGaussianMixture(MixtureMethods, DensityMixin, FederatedEstimator):
    """A Gaussian mixture of rows that stay with their workers.

    Parameters
    ----------
    {n_components}
    covariance_type : {"full", "tied", "diag", "spherical"}
        The shape of the covariances.
    {criterion}
    {tol}
    {max_iter}
    {n_init}
    {moves}
    {start}
    {algorithm}
    {follow_em}
    {participation}
    {epsilon}
    {delta}
    {noise_seed}
    covariance_floor : float
        The smallest eigenvalue of a covariance, as a share of the columns' variances.
    missing : bool
        Whether NaN is a value missing at random (full and diag).
    {warm_start}
    random_state : int, random state or None
        The seed; None is 0 for the fit, and other rows for each `sample`. The noise of a private
        fit does not follow from it.
    {device}
    {precision}
    {verbose}

    Attributes
    ----------
    weights_, means_, covariances_, precisions_, precisions_cholesky_ : arrays
        The parameters, as in scikit-learn.
    {n_components_}
    {selection_}
    {labels_}
    {converged_}
    {n_iter_, n_rounds_}
    {lower_bound_}
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
    >>> mixture = emfed.FederatedGaussianMixture(2, random_state=0).fit(hospitals)
    >>> mixture.means_.shape, mixture.predict(rows[:3]).shape
    ((2, 4), (3,))
    """

    def __init__(
        self,
        n_components: Any = 1,
        *,
        covariance_type: str = "full",
        criterion: str = "bic",
        tol: float | None = None,
        max_iter: int = 1000,
        n_init: int = 1,
        moves: int = 3,
        start: Any = "auto",
        algorithm: Any = "auto",
        follow_em: bool = False,
        participation: Any = None,
        epsilon: float | None = None,
        delta: float = 1e-6,
        noise_seed: int | None = None,
        covariance_floor: float = 1e-6,
        missing: bool = False,
        warm_start: bool = False,
        random_state: Any = None,
        device: Any = None,
        precision: Any = "double",
        verbose: bool = False,
    ) -> None:
        self.n_components = n_components
        self.covariance_type = covariance_type
        self.criterion = criterion
        self.tol = tol
        self.max_iter = max_iter
        self.n_init = n_init
        self.moves = moves
        self.start = start
        self.algorithm = algorithm
        self.follow_em = follow_em
        self.participation = participation
        self.epsilon = epsilon
        self.delta = delta
        self.noise_seed = noise_seed
        self.covariance_floor = covariance_floor
        self.missing = missing
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.precision = precision
        self.verbose = verbose

    @property
    def _missing(self) -> bool:
        return bool(self.missing)

    def _model(self, k: int) -> Model:
        if self.covariance_type == "known":
            raise SettingsError("covariance_type 'known' is not for this estimator: use emfed.fit.")
        return gaussian_mixture(
            k,
            self.covariance_type,
            covariance_floor=self.covariance_floor,
            missing=self._missing,
        )

    def _online_model(self, k: int) -> Model:
        """Batches differ in their second moment: for ``tied`` it is a statistic."""
        if self.covariance_type != "tied":
            return self._model(k)
        floor = self.covariance_floor
        return gaussian_mixture(k, "tied", covariance_floor=floor, second_moment="statistic")

    def _online(self, result: Result) -> tuple[Model, FloatArray]:
        """A tied fit on a whole table goes on with the second moment among its statistics."""
        model, statistics = result.model.streamed(result.statistics)
        return model, statistics

    def _publish(self, result: Result) -> None:
        params, kind = result.params, self.covariance_type
        self.weights_, self.means_ = params.weights, params.means
        self.covariances_ = params.covariances
        self.n_components_ = len(params.weights)
        if kind in ("full", "tied"):
            lower = np.linalg.cholesky(params.covariances)
            root = np.linalg.solve(lower, np.broadcast_to(np.eye(lower.shape[-1]), lower.shape))
            self.precisions_cholesky_ = np.swapaxes(root, -1, -2)
            self.precisions_ = self.precisions_cholesky_ @ root
        else:
            self.precisions_cholesky_ = 1 / np.sqrt(params.covariances)
            self.precisions_ = self.precisions_cholesky_**2

    def to_sklearn(self) -> Any:
        """Make a fitted `sklearn.mixture.GaussianMixture` with the same parameters and answers.

        Returns
        -------
        sklearn.mixture.GaussianMixture
            The mixture of scikit-learn.
        """
        from sklearn.mixture import GaussianMixture

        check_is_fitted(self, "result_")
        out = GaussianMixture(
            self.n_components_,
            covariance_type=self.covariance_type,
            weights_init=self.weights_,
            means_init=self.means_,
            precisions_init=self.precisions_,
        )
        copied = ("weights_", "means_", "covariances_", "precisions_", "precisions_cholesky_")
        for name in (*copied, "converged_", "n_iter_", "lower_bound_", "n_features_in_"):
            setattr(out, name, getattr(self, name))
        out.lower_bounds_ = [self.lower_bound_]
        if hasattr(self, "feature_names_in_"):
            out.feature_names_in_ = self.feature_names_in_
        return out
