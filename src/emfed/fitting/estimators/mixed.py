"""Mixtures of columns of any family with scikit-learn's face."""

from __future__ import annotations

from typing import Any

from sklearn.base import DensityMixin

from emfed.artifacts.result import Result
from emfed.core.protocols import Model
from emfed.fitting.estimators.base import FederatedEstimator, MixtureMethods
from emfed.models import mixed_mixture


class FederatedMixture(MixtureMethods, DensityMixin, FederatedEstimator):
    """A mixture whose columns are each Gaussian, Poisson, Bernoulli, categorical and so on.

    Parameters
    ----------
    n_components : number of components, or several to choose from: a range or ``"2:8"``.
    families : one for all columns, a list of one per column, or a dict that names the columns which
        are not Gaussian (by number where X has no names); see `emfed.mixed_mixture`. Of a column
        that is ``"categorical"`` the categories, words or numbers, are read off X.
    missing : whether NaN is a value missing at random.
    prior_rows : rows with the average statistics of all data that are added to each component.
    criterion, tol, max_iter, n_init, start, algorithm, follow_em, participation, warm_start,
        random_state, device, precision, verbose : as in `FederatedGaussianMixture`.

    Attributes
    ----------
    weights_, n_components_ : of the components.
    parameters_ : of each column, by its name (or number); categories_ : of each column that is
        ``"categorical"``, in the order of their probabilities in ``parameters_``.
    labels_ : the component of each row of X.
    converged_, n_iter_, n_rounds_, lower_bound_, selection_ : how the fit ended.
    records_, bytes_, raw_bytes_, guard_hits_, result_ : what the run did, and its `emfed.Result`.
    """

    def __init__(
        self,
        n_components: Any = 1,
        *,
        families: Any = "gaussian",
        missing: bool = True,
        prior_rows: float = 0.0,
        criterion: str = "bic",
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
        self.families = families
        self.missing = missing
        self.prior_rows = prior_rows
        self.criterion = criterion
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

    @property
    def _missing(self) -> bool:
        return bool(self.missing)

    def _model(self, k: int) -> Model:
        return mixed_mixture(
            k, self._families(), missing=bool(self.missing), prior_rows=self.prior_rows
        )

    def _publish(self, result: Result) -> None:
        self.weights_ = result.params.weights
        self.n_components_ = len(self.weights_)
        told = result.model.by_column(result.params)
        names = result.columns
        if result.model.columns.names is None and names is not None:
            told = {names[int(column)]: arrays for column, arrays in told.items()}
        self.parameters_ = told
