"""Mixtures of columns of any family with scikit-learn's face."""

from __future__ import annotations

from typing import Any

from sklearn.base import DensityMixin

from emfed.artifacts.result import Result
from emfed.core.protocols import Model
from emfed.fitting.estimators.base import FederatedEstimator, MixtureMethods
from emfed.fitting.estimators.parameters import documented
from emfed.models import mixed_mixture


@documented
class FederatedMixture(MixtureMethods, DensityMixin, FederatedEstimator):
    """A mixture whose columns are each Gaussian, Poisson, Bernoulli, categorical and so on.

    Parameters
    ----------
    {n_components}
    families : str, sequence or mapping
        One for all columns, a list of one for each column, or a dict that names the columns which
        are not Gaussian (by number where X has no names); see `emfed.mixed_mixture`. The categories
        of a column that is "categorical", words or numbers, are read off X.
    missing : bool
        Whether NaN is a value missing at random.
    prior_rows : float
        Rows with the average statistics of all data that are added to each component.
    floor : float
        The least variance of a Gaussian column, and the least mean of a positive one, relative to
        that of the whole column.
    {criterion}
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
    weights_ : array of shape (K,)
        The shares of the components.
    {n_components_}
    {selection_}
    parameters_ : dict
        The parameters of each column, by its name or number.
    categories_ : dict
        The categories of each column that is "categorical", in the order of their probabilities in
        ``parameters_``.
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
    >>> import numpy as np
    >>> import emfed
    >>> rows = np.array([[0, 1.0], [0, 1.2], [0, 0.9], [3, 7.0], [4, 7.1], [3, 6.8]])
    >>> mixture = emfed.FederatedMixture(2, families=["poisson", "gaussian"], random_state=0)
    >>> mixture.fit([rows[::2], rows[1::2]]).predict(rows).shape
    (6,)
    """

    def __init__(
        self,
        n_components: Any = 1,
        *,
        families: Any = "gaussian",
        missing: bool = True,
        prior_rows: float = 0.0,
        floor: float = 1e-6,
        criterion: str = "bic",
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
        self.families = families
        self.missing = missing
        self.prior_rows = prior_rows
        self.floor = floor
        self.criterion = criterion
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

    @property
    def _missing(self) -> bool:
        return bool(self.missing)

    def _model(self, k: int) -> Model:
        options = {"prior_rows": self.prior_rows, "floor": self.floor}
        return mixed_mixture(k, self._families(), missing=bool(self.missing), **options)

    def _publish(self, result: Result) -> None:
        self.weights_ = result.params.weights
        self.n_components_ = len(self.weights_)
        told = result.model.by_column(result.params)
        names = result.columns
        if result.model.columns.names is None and names is not None:
            told = {names[int(column)]: arrays for column, arrays in told.items()}
        self.parameters_ = told
