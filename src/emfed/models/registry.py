"""Every class that a fitted model is made of, under the name it has in model files."""

from __future__ import annotations

import dataclasses
import importlib

from emfed.core.errors import SettingsError
from emfed.models.categories import Bernoulli, Categorical
from emfed.models.clusters import Clusters
from emfed.models.columns import ColumnBound, Columns
from emfed.models.covariances import Diagonal, Full, Known, Spherical, StreamedTied, Tied
from emfed.models.durations import Exponential, Gamma
from emfed.models.factors import FactorMixture
from emfed.models.families import Gaussian, Poisson
from emfed.models.gaussian import Bound
from emfed.models.linear import LinearGaussian
from emfed.models.markov import HiddenMarkov
from emfed.models.missing import MissingGaussianMixture
from emfed.models.mixed import MixedMixture
from emfed.models.parameters import Frame, InverseWishart
from emfed.models.regression import RegressionBound, RegressionMixture

CLASSES: dict[str, type] = {
    "gaussian-mixture/full": Full,
    "gaussian-mixture/diag": Diagonal,
    "gaussian-mixture/spherical": Spherical,
    "gaussian-mixture/tied": Tied,
    "gaussian-mixture/tied-streamed": StreamedTied,
    "gaussian-mixture/known": Known,
    "gaussian-mixture/missing": MissingGaussianMixture,
    "gaussian-mixture/bound": Bound,
    "mixed-mixture": MixedMixture,
    "hidden-markov": HiddenMarkov,
    "factor-mixture": FactorMixture,
    "regression-mixture": RegressionMixture,
    "regression-mixture/bound": RegressionBound,
    "linear-gaussian": LinearGaussian,
    "k-means": Clusters,
    "frame": Frame,
    "inverse-wishart": InverseWishart,
    "columns": Columns,
    "columns/bound": ColumnBound,
    **{
        f"family/{cls.name}": cls
        for cls in (Gaussian, Poisson, Bernoulli, Categorical, Exponential, Gamma)
    },
}
"""The names are part of the file format: they stay when classes are renamed."""

ELSEWHERE = {
    "row-owner": "emfed.imputation.row_owner",
    "site-owner": "emfed.imputation.site_owner",
}
"""Models above this folder, which their module makes savable when it is imported."""


def known_classes(name: object) -> dict[str, type]:
    """All classes, once the module of a model with this name has been imported."""
    if isinstance(name, str) and name in ELSEWHERE:
        importlib.import_module(ELSEWHERE[name])
    return CLASSES


def savable(cls: type, name: str | None = None) -> type:
    """Let model files hold ``cls``, a dataclass of numbers, text, arrays and the like.

    Call it for a model of your own, and for the dataclasses it is made of, before saving and
    before loading; it also works as a decorator. ``name`` is what the file says, by default the
    name of the class.
    """
    if not dataclasses.is_dataclass(cls):
        raise SettingsError(f"savable takes a dataclass; got {cls!r}.")
    name = cls.__name__ if name is None else name
    known = CLASSES.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (
        cls.__module__,
        cls.__qualname__,
    ):
        raise SettingsError(f"model files already call another class {name!r}: give a name.")
    CLASSES[name] = cls  # a module imported anew, in a notebook say, replaces its own class
    return cls
