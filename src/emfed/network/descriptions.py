"""From a description to the object it stands for: what lets settings travel, and code never.

A model, compressor or algorithm says by `describe` what was chosen, as plain JSON types. Here is
the way back: a table from names to the functions that make the object. Nothing else can be made,
an unknown name or setting is refused in words, and what is made must describe itself as it was
described, so that two releases that mean different things by one word do not work together.

    register_model("my-model", lambda settings: MyModel(**settings))

adds a model of one's own; every party must have done so.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Mapping
from math import inf
from typing import Any

import numpy as np

from emfed.algorithms import ALGORITHMS, Decreasing
from emfed.compressors import (
    ChosenDithering,
    Dithering,
    Identity,
    RandomSparsification,
    SubtractiveDithering,
)
from emfed.core.errors import EmfedError, SettingsError
from emfed.core.messages import MOST_PARTS
from emfed.core.protocols import Algorithm, Compressor, Model
from emfed.models import (
    Categorical,
    Clusters,
    InverseWishart,
    LinearGaussian,
    Poisson,
    factor_analysis,
    gaussian_mixture,
    hidden_markov,
    mixed_mixture,
    ppca,
    regression_mixture,
)
from emfed.models.several import Several

Settings = Mapping[str, Any]


def _prior(given: Any) -> InverseWishart | None:
    if given is None:
        return None
    if isinstance(given, Mapping):
        scale = given["scale"]
        return InverseWishart(given["dof"], np.array(scale) if isinstance(scale, list) else scale)
    dof, scale = given
    return InverseWishart(dof, scale)


def _gaussian(settings: Settings) -> Model:
    options = dict(settings) | {"covariance_prior": _prior(settings["covariance_prior"])}
    return gaussian_mixture(options.pop("n_components"), options.pop("covariance"), **options)


def _with_noise_prior(make: Callable[..., Model]) -> Callable[[Settings], Model]:
    return lambda settings: make(
        **dict(settings) | {"noise_prior": _prior(settings["noise_prior"])}
    )


def _family(given: Any) -> Any:
    if not isinstance(given, Mapping):
        return given
    kinds: dict[str, Any] = {Categorical.name: Categorical, Poisson.name: Poisson}
    options = dict(given)
    return kinds[options.pop("family")](**options)


def _families(given: Any) -> Any:
    if not isinstance(given, list):
        return _family(given)
    if given and isinstance(given[0], list):
        return {name: _family(f) for name, f in given}
    return [_family(f) for f in given]


def _with_families(make: Callable[..., Model]) -> Callable[[Settings], Model]:
    return lambda settings: make(**dict(settings) | {"families": _families(settings["families"])})


_MODELS: dict[str, Callable[[Settings], Model]] = {
    "gaussian-mixture": _gaussian,
    "mixed-mixture": _with_families(mixed_mixture),
    "hidden-markov": _with_families(hidden_markov),
    "factor-analysis": _with_noise_prior(factor_analysis),
    "ppca": _with_noise_prior(ppca),
    "regression-mixture": _with_noise_prior(regression_mixture),
    "k-means": lambda settings: Clusters(
        settings["n_clusters"], settings["standardised"], settings["fill"], settings["smallest"]
    ),
    "linear-gaussian": lambda settings: LinearGaussian(**settings),
    "several": lambda settings: Several(tuple(map(build_model, settings["models"][:MOST_PARTS]))),
}
"""Every model by the name it describes itself with."""


def register_model(name: str, make: Callable[[Settings], Model]) -> None:
    """Let descriptions name a model of one's own: ``make`` gets all of them but the name."""
    if _MODELS.get(name, make) is not make:
        raise SettingsError(f"there is a model {name!r} already: choose another name.")
    _MODELS[name] = make


_ELSEWHERE = {
    "site-owner": "emfed.imputation.site_owner",
    "row-owner": "emfed.imputation.row_owner",
}
"""Models whose module registers them itself, and is imported when they are first asked for."""


def known_models() -> list[str]:
    """The names of all models that can be made from a description."""
    return sorted({*_MODELS, *_ELSEWHERE})


def build_model(description: Any) -> Model:
    """The model, not bound to data, that describes itself so."""
    name, settings = _split(description, "model", dict.fromkeys(known_models()))
    if name not in _MODELS:
        importlib.import_module(_ELSEWHERE[name])
    return _made(lambda: _MODELS[name](settings), description, f"the model {name!r}")


def _dithering(settings: Settings) -> Compressor:
    options = dict(settings)
    norm, block = options["norm"], options["block"]
    options |= {"norm": inf if norm == "inf" else norm}
    return Dithering(**options | {"block": tuple(block) if isinstance(block, list) else block})


def _sparsification(settings: Settings) -> Compressor:
    return RandomSparsification(settings["keep"], build_compressor(settings["then"]))


_COMPRESSORS: dict[str, Callable[[Settings], Compressor]] = {
    "identity": lambda settings: Identity(**settings),
    "dithering": _dithering,
    "random-sparsification": _sparsification,
    "subtractive-dithering": lambda settings: SubtractiveDithering(**settings),
    "chosen-dithering": lambda settings: ChosenDithering(**settings),
}


def build_compressor(description: Any) -> Compressor:
    """The operator that describes itself so."""
    name, settings = _split(description, "compressor", _COMPRESSORS)
    make = _COMPRESSORS[name]
    return _made(lambda: make(settings), description, f"the compressor {name!r}")


def _algorithm(name: str, settings: Settings) -> Algorithm:
    options = {key: value for key, value in settings.items() if key != "name"}
    if "compressor" in options:
        options["compressor"] = build_compressor(options["compressor"])
    if options.get("broadcast") is not None:
        options["broadcast"] = build_compressor(options["broadcast"])
    step = options.get("step_size")
    if isinstance(step, Mapping):
        if "function" in step:
            raise SettingsError("a function of one's own as step_size cannot travel.")
        options["step_size"] = Decreasing(**step)
    make: Callable[..., Algorithm] = ALGORITHMS[name]
    return make(**options)


def build_algorithm(description: Any) -> Algorithm:
    """The algorithm that describes itself so."""
    name, settings = _split(description, "algorithm", ALGORITHMS)
    return _made(lambda: _algorithm(name, settings), description, f"the algorithm {name!r}")


def plain(description: Any) -> Any:
    """A description as JSON would bring it back, numpy's numbers and arrays included."""

    def convert(value: Any) -> Any:
        return value.item() if isinstance(value, np.generic) else np.asarray(value).tolist()

    return json.loads(json.dumps(description, default=convert))


def _split(description: Any, what: str, known: Mapping[str, Any]) -> tuple[str, Settings]:
    if not isinstance(description, Mapping) or not isinstance(description.get(what), str):
        raise SettingsError(f"a description of a {what} names it under {what!r}; got none.")
    name = description[what]
    if name not in known:
        raise SettingsError(
            f"unknown {what} {name[:80]!r}; known here: {', '.join(sorted(known))}."
        )
    return name, {key: value for key, value in description.items() if key != what}


def _made(make: Callable[[], Any], description: Any, what: str) -> Any:
    """The object, if it can be made and describes itself as asked for."""
    try:
        made = make()
        same = plain(made.describe()) == plain(description)
    except SettingsError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError, EmfedError) as error:
        raise SettingsError(
            f"{what} cannot be made from these settings, perhaps of another release of emfed "
            f"({type(error).__name__}: {str(error)[:200]})."
        ) from None
    if not same:
        raise SettingsError(
            f"{what} made from these settings describes itself otherwise: the other side runs "
            "another release of emfed."
        )
    return made
