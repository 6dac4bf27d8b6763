"""Missing values filled in from a fitted mixture or low-rank table, with scikit-learn's face."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from sklearn.base import OneToOneFeatureMixin, TransformerMixin

from emfed.algorithms import FedEM, VRFedEM
from emfed.artifacts.result import Result
from emfed.compressors import SubtractiveDithering
from emfed.core.errors import SettingsError, check_range
from emfed.core.protocols import Algorithm, Model
from emfed.fitting.estimators.base import FederatedEstimator
from emfed.fitting.estimators.intake import framed
from emfed.fitting.settings import FitSettings, read_range
from emfed.models import RowOwner, gaussian_mixture, mixed_mixture

_NOISE = SubtractiveDithering(0.05)
QUIET: dict[str, Algorithm] = {
    FedEM.name.lower(): FedEM(_NOISE, in_metric=True),
    VRFedEM.name.lower(): VRFedEM(_NOISE, in_metric=True, batch_size=64),
}
"""With a rank these take less noise than with a mixture: a row's factors follow the loadings, so
noise comes back larger than from responsibilities. "auto" measures that, and chooses by itself."""
PENALTY = 1.0
"""On the columns' factors, in rows, unless another is given."""


class FederatedImputer(OneToOneFeatureMixin, TransformerMixin, FederatedEstimator):
    """Replaces NaN by its posterior mean under a model of rows that stay with their workers.

    Parameters
    ----------
    n_components : number of components, or several to choose from: a range or ``"2:8"``.
    covariance_type : ``"full"`` or ``"diag"``; one component with full covariance is the Gaussian
        imputation of Little and Rubin.
    families : None for Gaussian columns; else as in `FederatedMixture`, given the component
        independent; categories are replaced by the likeliest.
    rank : None for a mixture. A number, or several to choose from: the table is of this rank plus
        noise, its columns standardised. It is FedMissEM's mode ``site-owner``: each row has this
        many factors, which stay with its worker, and workers share those of the columns. Then
        n_components is 1, and covariance_type and families do not apply.
    penalty : with ``rank``, the ridge on the factors of columns, in rows of weight one; None is 1.
        The factors of a row have penalty sigma^2, the noise of the fit, in ``transform`` too.
    criterion, tol, max_iter, n_init, start, algorithm, follow_em, participation, covariance_floor,
        warm_start, random_state, device, precision, verbose : as in `FederatedGaussianMixture`;
        with ``rank``, starts are random loadings, and covariance_floor is the least noise. On a
        device run passes over columns with ``families``; patterns of other rows are sorted here.

    Attributes
    ----------
    n_components_, converged_, n_iter_, n_rounds_, lower_bound_, records_, bytes_, guard_hits_,
    result_ : as in `FederatedGaussianMixture`; ``result_`` also draws multiple imputations and
        intervals.
    rank_ : the rank, or None; the loadings are then ``result_.params.loadings[0]``.
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
        criterion: str = "bic",
        tol: float | None = None,
        max_iter: int = 1000,
        n_init: int = 1,
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

    def _numbers(self) -> list[int]:
        return super()._numbers() if self.rank is None else read_range(self.rank, "rank")

    def _in_words(self, message: str) -> str:
        told = super()._in_words(message)
        if self.rank is None or "rank" in told:  # it knows its words already
            return told
        return told.replace("n_components", "rank")

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
            return mixed_mixture(k, self._families())
        return gaussian_mixture(k, self.covariance_type, missing=True, covariance_floor=floor)

    def _publish(self, result: Result) -> None:
        self.n_components_ = len(result.params.weights)
        self.rank_ = None if self.rank is None else int(result.model.rank)

    def transform(self, X: Any) -> Any:
        """Rows with NaN replaced; what was seen stays as it is.

        With ``rank`` a row's factors are fitted to what was seen of it, by the penalty of the fit;
        a row of which nothing was seen gets the fitted means of the columns. A data frame comes
        back as one.
        """
        filled = np.asarray(self._answer("impute", X))
        return framed(self, X, filled, self.get_feature_names_out())
