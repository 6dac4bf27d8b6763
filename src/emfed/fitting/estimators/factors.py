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
from emfed.fitting.estimators.intake import framed
from emfed.models import factor_analysis, ppca


class FederatedFactorAnalysis(
    ClassNamePrefixFeaturesOutMixin, TransformerMixin, FederatedEstimator
):
    """Factor analysis, or probabilistic PCA, of rows that stay with their workers.

    Parameters
    ----------
    n_components : the number of factors, fewer than columns.
    isotropic : whether all columns have one noise variance: probabilistic PCA.
    tol, max_iter, algorithm, follow_em, participation, warm_start, random_state, device,
        precision, verbose : as in `FederatedGaussianMixture`; n_init and start likewise, of the
        first loadings.

    Attributes
    ----------
    components_ : loadings, ``(factors, columns)``, L^T psi^-1 L diagonal and falling.
    mean_, noise_variance_ : of each column.
    converged_, n_iter_, n_rounds_, lower_bound_, records_, bytes_, guard_hits_, result_ : as in
        `FederatedGaussianMixture`.
    """

    def __init__(
        self,
        n_components: int = 1,
        *,
        isotropic: bool = False,
        tol: float | None = None,
        max_iter: int = 1000,
        n_init: int = 1,
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
        self.tol = tol
        self.max_iter = max_iter
        self.n_init = n_init
        self.start = start
        self.algorithm = algorithm
        self.follow_em = follow_em
        self.participation = participation
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.precision = precision
        self.verbose = verbose

    _words: ClassVar[Mapping[str, str]] = {
        **FederatedEstimator._words,
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
        return make(factors)

    def _publish(self, result: Result) -> None:
        params = result.params
        self.components_ = params.loadings[0].T
        self.mean_, self.noise_variance_ = params.means[0], params.noise[0]
        self._n_features_out = len(self.components_)

    def transform(self, X: Any) -> Any:
        """The posterior mean of each row's factors; a data frame where X is one."""
        rows = self._rows(X)
        model, statistics = self.result_.model, self.result_.statistics
        found = np.asarray(model.factors(rows, model.maximize(statistics))[:, 0, :])
        return framed(self, X, found, self.get_feature_names_out())

    def get_covariance(self) -> FloatArray:
        """L L^T + psi."""
        check_is_fitted(self, "result_")
        return np.asarray(self.result_.params.covariances()[0])

    def score_samples(self, X: Any) -> FloatArray:
        """The log-likelihood of each row."""
        return np.asarray(self._answer("score_samples", X))

    def score(self, X: Any, y: Any = None, sample_weight: Any | None = None) -> float:
        """The mean log-likelihood of the rows, each counted with its weight."""
        return weighted_score(self, X, sample_weight)

    def sample(self, n_samples: int = 1) -> FloatArray:
        """Rows that the fitted model draws."""
        check_is_fitted(self, "result_")
        return self.result_.sample(n_samples, sample_seed(self.random_state))[0]
