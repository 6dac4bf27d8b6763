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
from emfed.models import gaussian_mixture


class FederatedGaussianMixture(MixtureMethods, DensityMixin, FederatedEstimator):
    """A Gaussian mixture of rows that stay with their workers.

    Parameters
    ----------
    n_components : int, str or iterable of int
        The number of components, or several to choose from: a range or "2:8". They are fitted in
        the same rounds and the best by ``criterion`` is kept.
    covariance_type : {"full", "tied", "diag", "spherical"}
        The shape of the covariances.
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
    epsilon : float or None
        What the whole fit may tell of any one row (differential privacy): 1 is strong, 10 is weak;
        None means that sums are exact. See docs/private-runs.md.
    delta : float
        The probability with which it may tell more.
    noise_seed : int or None
        With ``epsilon``: the number that the noise follows from, for simulations that must be
        repeatable. The result then says "not private" and has no epsilon. By default noise follows
        from a key of the operating system's, and is other noise in every fit.
    covariance_floor : float
        The smallest eigenvalue of a covariance, as a share of the columns' variances.
    missing : bool
        Whether NaN is a value missing at random (full and diag).
    warm_start : bool
        Whether a second fit goes on from the first.
    random_state : int, random state or None
        The seed; None is 0 for the fit, and other rows for each `sample`. The noise of a private
        fit does not follow from it.
    device : str or None
        "cuda" puts the rows on a GPU; rows that are CUDA tensors are taken as they are.
    precision : {"double", "fast"}
        The precision of passes on a device; "fast" is six digits.
    verbose : bool
        Whether a bar on stderr shows rounds, bytes and time left, also of sites elsewhere.

    Attributes
    ----------
    weights_, means_, covariances_, precisions_, precisions_cholesky_ : arrays
        The parameters, as in scikit-learn.
    n_components_ : int
        The number of components, chosen or given.
    selection_ : Selection or None
        The table that the number was chosen from.
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
