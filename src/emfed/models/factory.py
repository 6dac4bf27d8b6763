"""Gaussian mixtures by name."""

from __future__ import annotations

from typing import Literal

import numpy as np

from emfed.core.errors import SettingsError, check_choice
from emfed.core.protocols import FloatArray
from emfed.core.registry import register_model
from emfed.core.wording import Setting, Wording
from emfed.models.covariances import Diagonal, Full, Known, Spherical, StreamedTied, Tied
from emfed.models.gaussian import GaussianMixture
from emfed.models.missing import MissingDiagonal, MissingFull
from emfed.models.parameters import InverseWishart

COVARIANCES: dict[str, type[GaussianMixture]] = {
    cls.kind: cls for cls in (Full, Diagonal, Spherical, Tied, Known)
}
"""Every covariance type by name."""


@register_model("gaussian-mixture")
def gaussian_mixture(
    n_components: int,
    covariance_type: str = "full",
    *,
    known_covariance: FloatArray | None = None,
    covariance_floor: float = 1e-6,
    weight_concentration: float = 1.0,
    covariance_prior: InverseWishart | None = None,
    second_moment: Literal["constant", "statistic"] = "constant",
    missing: bool = False,
) -> GaussianMixture:
    """Make a Gaussian mixture with one of five types of covariance.

    Parameters
    ----------
    n_components : int
        The number of components.
    covariance_type : {"full", "diag", "spherical", "tied", "known"}
        The shape of the covariances.
    known_covariance : array of shape (d, d) or None
        The covariance of all components in the user's units; ``known`` needs it.
    covariance_floor : float
        No eigenvalue of a covariance falls below this share of the variance of the columns over all
        data; 0 switches that off.
    weight_concentration : float
        The concentration, at least 1, of a symmetric Dirichlet prior on the weights; 1 is none.
    covariance_prior : InverseWishart, dict or None
        A prior on the covariances, or a dict of its dof and scale.
    second_moment : {"constant", "statistic"}
        For ``tied``, whether the data's second moment is a constant of the opening exchange or a
        statistic of every message, which streams need.
    missing : bool
        Whether NaN is a value missing at random (``full`` and ``diag``). Fit, likelihood and
        responsibilities then use what was seen, exactly, and a result can `impute`.

    Returns
    -------
    GaussianMixture
        The model, not bound to data.

    Raises
    ------
    SettingsError
        If the covariance type is unknown, or options contradict each other.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> rows = np.array([[0.0, 1.0], [0.2, 0.8], [0.1, 1.1], [4.0, 5.2], [4.1, 5.0], [4.3, 4.9]])
    >>> result = emfed.fit(emfed.gaussian_mixture(2, "spherical"), [rows[::2], rows[1::2]], seed=0)
    >>> np.sort(result.params.means[:, 0]).round(1)
    array([0.1, 4.1])
    """
    covariance_prior = InverseWishart.read(covariance_prior)
    if missing:
        if covariance_type not in ("full", "diag"):
            raise SettingsError(
                Wording(
                    "{} goes with {} 'full' or 'diag'; got {!r}.",
                    *(Setting("missing", True), Setting("covariance_type"), covariance_type),
                )
            )
        kind = MissingFull if covariance_type == "full" else MissingDiagonal
        return kind(n_components, covariance_floor, weight_concentration, covariance_prior)
    check_choice("covariance_type", covariance_type, COVARIANCES)
    cls = COVARIANCES[covariance_type]
    common = (n_components, covariance_floor, weight_concentration, covariance_prior)
    if second_moment not in ("constant", "statistic") or (
        second_moment == "statistic" and cls is not Tied
    ):
        raise SettingsError(
            Wording(
                "{} must be 'constant', or 'statistic' for {}; got {!r} for {!r}.",
                *(Setting("second_moment"), Setting("covariance_type", "tied")),
                *(second_moment, covariance_type),
            )
        )
    if cls is Known:
        if known_covariance is None:
            known = Setting("covariance_type", "known")
            raise SettingsError(
                Wording("{} needs {}, a (d, d) matrix.", known, Setting("known_covariance"))
            )
        try:
            matrix = np.asarray(known_covariance, dtype=np.float64)
        except (TypeError, ValueError):
            raise SettingsError("known_covariance must be a (d, d) matrix of numbers.") from None
        return Known(*common, matrix=matrix)
    if known_covariance is not None:
        raise SettingsError(
            Wording(
                "{} goes with {}, not {!r}.",
                *(Setting("known_covariance"), Setting("covariance_type", "known")),
                covariance_type,
            )
        )
    return StreamedTied(*common) if second_moment == "statistic" else cls(*common)
