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
    n_components : int, str or iterable of int
        The number of components, or several to choose from: a range or "2:8". They are fitted in
        the same rounds and the best by ``criterion`` is kept.
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
    criterion : {"bic", "icl", "aic"}
        What chooses among several numbers.
    tol : float or None
        The log-likelihood per row that a converged fit may still have to gain, in nats; by default
        1e-6.
    max_iter : int
        The largest number of rounds.
    n_init : int
        The number of starts that compete, of which the best goes on.
    moves : int
        How often in a row a component is moved in vain after the fit of fewer than 50 workers has
        converged: two are merged and another is split. 0: it ends where its start leads.
    start : str or parameters
        "auto", "merge", "k-means", "moments", "points" (rows of the data leave their workers), or
        parameters of the model.
    algorithm : str or Algorithm
        "auto", "em", "FedEM", "VR-FedEM" or an algorithm of emfed.
    follow_em : bool
        Whether a compressed run takes little noise and no momentum, to end where pooled EM ends
        even where optima lie close together.
    participation : float, Participation or None
        The probability that a worker takes part in a round, or a participation of emfed; None is
        everyone.
    warm_start : bool
        Whether a second fit goes on from the first.
    random_state : int, random state or None
        The seed; None is 0 for the fit, and other rows for each `sample`.
    device : str or None
        "cuda" puts the rows on a GPU; rows that are CUDA tensors are taken as they are.
    precision : {"double", "fast"}
        The precision of passes on a device; "fast" is six digits.
    verbose : bool
        Whether a bar on stderr shows rounds, bytes and time left, also of sites elsewhere.

    Attributes
    ----------
    weights_ : array of shape (K,)
        The shares of the components.
    n_components_ : int
        The number of components, chosen or given.
    selection_ : Selection or None
        The table that the number was chosen from.
    parameters_ : dict
        The parameters of each column, by its name or number.
    categories_ : dict
        The categories of each column that is "categorical", in the order of their probabilities in
        ``parameters_``.
    labels_ : array or list of arrays
        The component of each row of X; a list where X is one table for each worker, None where the
        rows are elsewhere.
    converged_ : bool
        Whether the fit ended because little was left to gain.
    n_iter_, n_rounds_ : int
        The number of rounds.
    lower_bound_ : float
        The mean log-likelihood of the rows of the fit.
    bytes_, raw_bytes_ : int
        The bytes that were sent, both ways, and the size of the rows themselves as doubles.
    records_ : Records
        What each round did.
    guard_hits_ : int
        How often a step was halved to stay inside the model's domain.
    result_ : Result
        The result of the fit.

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
