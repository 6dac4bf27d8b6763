"""Factor analysis with scikit-learn's face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from sklearn.base import ClassNamePrefixFeaturesOutMixin, TransformerMixin
from sklearn.utils.validation import check_is_fitted

from emfed.artifacts.result import Result
from emfed.core.errors import DataError, check_count
from emfed.core.protocols import FloatArray, Model
from emfed.fitting.estimators.base import FederatedEstimator, sample_seed, weighted_score
from emfed.fitting.estimators.intake import as_frame, framed
from emfed.fitting.estimators.parameters import documented
from emfed.models import factor_analysis, ppca


@documented
class FederatedFactorAnalysis(
    ClassNamePrefixFeaturesOutMixin, TransformerMixin, FederatedEstimator
):
    """Factor analysis, or probabilistic PCA, of rows that stay with their workers.

    Parameters
    ----------
    n_components : int
        The number of factors, fewer than columns.
    isotropic : bool
        Whether all columns have one noise variance: probabilistic PCA.
    noise_floor : float
        The least noise variance, as a share of the variance of its column.
    {tol}
    {max_iter}
    {n_init}
    {moves}
    {start}
    {algorithm}
    {follow_em}
    {participation}
    {warm_start}
    {random_state}
    {device}
    {precision}
    {verbose}

    Attributes
    ----------
    components_ : array of shape (factors, columns)
        The loadings L^T, with L^T psi^-1 L diagonal and falling.
    mean_, noise_variance_ : array of shape (columns,)
        The mean and the noise variance of each column.
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
    >>> emfed.FederatedFactorAnalysis(2).fit(hospitals).transform(rows).shape
    (150, 2)
    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        isotropic: bool = False,
        noise_floor: float = 1e-6,
        tol: float | None = None,
        max_iter: int = 1000,
        n_init: int = 1,
        moves: int = 3,
        start: Any = "auto",
        algorithm: Any = "auto",
        follow_em: bool = False,
        participation: Any = None,
        warm_start: bool = False,
        random_state: Any = None,
        device: Any = None,
        precision: Any = "double",
        verbose: bool = False,
    ) -> None:
        self.n_components = n_components
        self.isotropic = isotropic
        self.noise_floor = noise_floor
        self.tol = tol
        self.max_iter = max_iter
        self.n_init = n_init
        self.moves = moves
        self.start = start
        self.algorithm = algorithm
        self.follow_em = follow_em
        self.participation = participation
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.precision = precision
        self.verbose = verbose

    _renamed: ClassVar[Mapping[str, str]] = {
        **FederatedEstimator._renamed,
        "n_factors": "n_components",
    }

    def _components(self) -> int:
        """One analyser, not a mixture of them."""
        return 1

    def _model(self, k: int) -> Model:
        factors = check_count("n_components", self.n_components)
        if factors >= getattr(self, "n_features_in_", np.inf):
            raise DataError(
                f"n_components={factors} factors need more columns than that; got "
                f"n_features={self.n_features_in_}."
            )
        make = ppca if self.isotropic else factor_analysis
        return make(factors, noise_floor=self.noise_floor)

    def _publish(self, result: Result) -> None:
        params = result.params
        self.components_ = params.loadings[0].T
        self.mean_, self.noise_variance_ = params.means[0], params.noise[0]
        self._n_features_out = len(self.components_)

    def transform(self, X: Any) -> Any:
        """Compute the posterior mean of each row's factors.

        Parameters
        ----------
        X : table
            The rows.

        Returns
        -------
        array or data frame of shape (rows, factors)
            The factors; a data frame where X is one.
        """
        rows = self._rows(X)
        model, statistics = self.result_.model, self.result_.statistics
        found = np.asarray(model.factors(rows, model.maximize(statistics))[:, 0, :])
        return framed(self, X, found, self.get_feature_names_out())

    def get_covariance(self) -> FloatArray:
        """Compute the covariance of the columns, L L^T + psi.

        Returns
        -------
        array of shape (columns, columns)
            The covariance.
        """
        check_is_fitted(self, "result_")
        return np.asarray(self.result_.params.covariances()[0])

    def score_samples(self, X: Any) -> FloatArray:
        """Compute the log-likelihood of each row.

        Parameters
        ----------
        X : table
            The rows.

        Returns
        -------
        array of shape (rows,)
            The log-likelihoods.
        """
        return np.asarray(self._answer("score_samples", X))

    def score(self, X: Any, y: Any = None, sample_weight: Any | None = None) -> float:
        """Compute the mean log-likelihood of the rows, each counted with its weight.

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
            The mean log-likelihood.
        """
        return weighted_score(self, X, sample_weight)

    def sample(self, n_samples: int = 1) -> Any:
        """Draw rows from the fitted model, as a data frame where it was fitted on one.

        Parameters
        ----------
        n_samples : int
            The number of rows.

        Returns
        -------
        array or data frame of shape (n_samples, columns)
            The rows.
        """
        check_is_fitted(self, "result_")
        rows, _ = self.result_.sample(n_samples, sample_seed(self.random_state))
        return as_frame(self, rows)
