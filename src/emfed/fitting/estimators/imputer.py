"""Missing values filled in from a fitted mixture or low-rank table, with scikit-learn's face."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
from sklearn.base import OneToOneFeatureMixin, TransformerMixin

from emfed.algorithms import FedEM, VRFedEM
from emfed.artifacts.result import Result
from emfed.compressors import SubtractiveDithering
from emfed.core.errors import SettingsError, check_range
from emfed.core.protocols import Algorithm, Model
from emfed.core.wording import Face
from emfed.fitting.estimators.base import EstimatorFace, FederatedEstimator
from emfed.fitting.estimators.intake import framed
from emfed.fitting.estimators.parameters import documented
from emfed.fitting.settings import FitSettings, read_range
from emfed.models import RowOwner, gaussian_mixture, mixed_mixture

_NOISE = SubtractiveDithering(0.05)
QUIET: dict[str, Algorithm] = {
    FedEM.name.lower(): FedEM(_NOISE, in_metric=True),
    VRFedEM.name.lower(): VRFedEM(_NOISE, in_metric=True, batch_size=64),
}
"""The named algorithms where there is a rank. They take less noise than with a mixture: a row's
factors follow the loadings, so noise comes back larger than from responsibilities. "auto" measures
that, and chooses by itself."""
PENALTY = 1.0
"""The penalty of the columns' factors, in rows, unless another is given. Not tuned: one row shrinks
a little and keeps loadings finite."""


@documented
class FederatedImputer(OneToOneFeatureMixin, TransformerMixin, FederatedEstimator):
    """Replace NaN by its posterior mean under a model of rows that stay with their workers.

    Parameters
    ----------
    {n_components}
    covariance_type : {"full", "diag"}
        The shape of the covariances; one component with full covariance is the Gaussian imputation
        of Little and Rubin.
    families : str, sequence, mapping or None
        None for Gaussian columns; else as in `FederatedMixture`, given the component independent.
        Categories are replaced by the likeliest.
    rank : int, str or None
        None for a mixture. A number, or several to choose from: the table is of this rank plus
        noise, its columns standardised. It is FedMissEM's mode "site-owner": each row has this many
        factors, which stay with its worker, and workers share those of the columns. Then
        n_components is 1, and covariance_type and families do not apply.
    penalty : float or None
        With ``rank``, the ridge on the factors of columns, in rows of weight one; None is 1. The
        factors of a row have penalty sigma^2, the noise of the fit, in ``transform`` too.
    criterion : {"bic", "icl", "aic", "held-out"} or None
        What chooses among several numbers. None is "bic", and with ``rank`` it is "held-out": all
        ranks are fitted without a tenth of the values, the one with the least squared error on
        them is chosen, and then it is fitted to all.
    {tol}
    {max_iter}
    {n_init}
    {moves}
    start : str or parameters
        Where the fit starts; with ``rank``, random loadings or given parameters.
    {algorithm}
    {follow_em}
    {participation}
    covariance_floor : float
        The smallest eigenvalue of a covariance, as a share of the columns' variances; with
        ``rank``, the least noise.
    {warm_start}
    {random_state}
    device : str or None
        "cuda" puts the rows on a GPU: passes over columns with ``families`` run there; patterns of
        other rows with missing values are sorted here.
    {precision}
    {verbose}

    Attributes
    ----------
    {n_components_}
    rank_ : int or None
        The rank; the loadings are then ``result_.params.loadings[0]``.
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
    >>> rows = np.sin(np.arange(60.0)).reshape(20, 3)
    >>> rows[3, 1] = np.nan
    >>> imputer = emfed.FederatedImputer(random_state=0).fit([rows[:10], rows[10:]])
    >>> bool(np.isfinite(imputer.transform(rows)).all())
    True
    """

    _REFUSED: ClassVar[dict[str, Any]] = {
        "n_components": 1,
        "covariance_type": "full",
        "families": None,
    }
    """What goes without a rank only, and the value that says nothing."""

    def __init__(
        self,
        n_components: Any = 1,
        *,
        covariance_type: str = "full",
        families: Any = None,
        rank: Any = None,
        penalty: float | None = None,
        criterion: str | None = None,
        tol: float | None = None,
        max_iter: int = 1000,
        n_init: int = 1,
        moves: int = 3,
        start: Any = "auto",
        algorithm: Any = "auto",
        follow_em: bool = False,
        participation: Any = None,
        covariance_floor: float = 1e-6,
        warm_start: bool = False,
        random_state: Any = None,
        device: Any = None,
        precision: Any = "double",
        verbose: bool = False,
    ) -> None:
        self.n_components = n_components
        self.covariance_type = covariance_type
        self.families = families
        self.rank = rank
        self.penalty = penalty
        self.criterion = criterion
        self.tol = tol
        self.max_iter = max_iter
        self.n_init = n_init
        self.moves = moves
        self.start = start
        self.algorithm = algorithm
        self.follow_em = follow_em
        self.participation = participation
        self.covariance_floor = covariance_floor
        self.warm_start = warm_start
        self.random_state = random_state
        self.device = device
        self.precision = precision
        self.verbose = verbose

    @property
    def _missing(self) -> bool:
        return True

    def _components(self) -> Any:
        """Ranks, where there are any, are compared as numbers of components are."""
        return self.n_components if self.rank is None else self.rank

    def _criterion(self) -> Any:
        return self.criterion or ("bic" if self.rank is None else "held-out")

    def _numbers(self) -> list[int]:
        return super()._numbers() if self.rank is None else read_range(self.rank, "rank")

    _renamed: ClassVar[Mapping[str, str]] = {
        **FederatedEstimator._renamed,
        "noise_floor": "covariance_floor",
        "floor": "covariance_floor",
    }

    @property
    def _face(self) -> Face:
        """Of low rank, ranks are compared as numbers of components are."""
        ranks = {} if self.rank is None else {"n_components": "rank"}
        return EstimatorFace({**self._renamed, **ranks}, families=True)

    def _fewer(self, parts: str) -> str:
        return super()._fewer(parts) if self.rank is None else "a lower rank"

    def _settings(self) -> FitSettings:
        """Checked; what would be ignored is refused."""
        if self.rank is None:
            if self.penalty is not None:
                raise SettingsError(
                    f"penalty={self.penalty!r} is that of low-rank imputation: give a rank too, "
                    "or leave it out."
                )
            return super()._settings()
        for name, silent in self._REFUSED.items():
            given = getattr(self, name)
            if not (given is silent or (isinstance(given, type(silent)) and given == silent)):
                raise SettingsError(
                    f"{name}={given!r} does not go with rank={self.rank!r}, which imputes from "
                    f"low rank plus noise: leave out {name}, or rank."
                )
        if isinstance(self.start, str) and self.start not in ("auto", "moments"):
            raise SettingsError(
                f"start={self.start!r} does not go with rank={self.rank!r}: a low-rank fit starts "
                "at random loadings ('auto' or 'moments'), or at given parameters."
            )
        if self.penalty is not None:
            check_range("penalty", self.penalty, 0, np.inf, open_high=True)
        check_range("covariance_floor", self.covariance_floor, 0, 1, open_high=True)
        settings = super()._settings()
        if isinstance(settings.algorithm, str):
            named = settings.algorithm
            return settings.but(algorithm=QUIET.get(named.lower(), named))
        return settings

    def _model(self, k: int) -> Model:
        floor = self.covariance_floor
        if self.rank is not None:
            return RowOwner(k, PENALTY if self.penalty is None else self.penalty, floor)
        if self.families is not None:
            return mixed_mixture(k, self._families(), floor=floor)
        return gaussian_mixture(k, self.covariance_type, missing=True, covariance_floor=floor)

    def _publish(self, result: Result) -> None:
        self.n_components_ = len(result.params.weights)
        self.rank_ = None if self.rank is None else int(result.model.rank)

    def transform(self, X: Any) -> Any:
        """Replace NaN; what was seen stays as it is.

        With ``rank`` a row's factors are fitted to what was seen of it, by the penalty of the fit;
        a row of which nothing was seen gets the fitted means of the columns.

        Parameters
        ----------
        X : table
            The rows.

        Returns
        -------
        array or data frame of shape (rows, columns)
            The rows, filled in; a data frame where X is one.
        """
        filled = np.asarray(self._answer("impute", X))
        return framed(self, X, filled, self.get_feature_names_out())
