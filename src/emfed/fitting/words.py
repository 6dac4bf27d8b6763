"""From the words of a configuration or a command line to `FitSettings`: one reader for both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import fields
from functools import partial
from typing import Any

from emfed.algorithms import ALGORITHMS, Decreasing
from emfed.compressors.words import parse_compressor
from emfed.core.configuration import check_keys, nearest
from emfed.core.errors import EmfedError, SettingsError
from emfed.core.protocols import Algorithm, Model
from emfed.fitting.settings import FitSettings, read_range
from emfed.models import (
    factor_analysis,
    gaussian_mixture,
    hidden_markov,
    mixed_mixture,
    ppca,
    regression_mixture,
)

MODELS: dict[str, Callable[..., Model]] = {
    "gaussian-mixture": gaussian_mixture,
    "mixed-mixture": mixed_mixture,
    "hidden-markov": hidden_markov,
    "factor-analysis": factor_analysis,
    "ppca": ppca,
    "regression-mixture": regression_mixture,
}
"""Models that words can name; their other words are arguments of the function."""
WORDS = [
    f.name
    for f in fields(FitSettings)
    if f.init and f.name not in ("model", "n_components", "algorithm", "columns", "likelihood")
]
"""Settings that words can give, beside the model and the algorithm."""


def read_words(
    model: Mapping[str, Any],
    algorithm: Mapping[str, Any] | None = None,
    fit: Mapping[str, Any] | None = None,
    where: str = "",
    **more: Any,
) -> FitSettings:
    """Settings from tables ``[model]``, ``[algorithm]`` and ``[fit]``; errors name the place."""
    make, numbers = _model(model, _at(where, "model"))
    options = dict(fit or {})
    check_keys(options, WORDS, _at(where, "fit"))
    try:
        chosen = _algorithm(algorithm or {}, _at(where, "algorithm"))
        return FitSettings(make, n_components=numbers, algorithm=chosen, **options, **more)
    except SettingsError as error:
        raise SettingsError(f"{where}: {error}" if where else str(error)) from None


def _at(where: str, table: str) -> str:
    return f"{where}, [{table}]" if where else table


def _model(table: Mapping[str, Any], where: str) -> tuple[Any, Any]:
    """A function from a number of components to the model, and the numbers."""
    kind, options = _kind(table, where, sorted([*MODELS, "site-owner"]))
    if kind == "site-owner":
        from emfed.imputation.site_owner import SiteOwner

        def planned(
            times: int,
            rank: int = 3,
            ridge: float = 1.0,
            smoothing: float = 0.0,
            seasonality: float = 0.0,
        ) -> Model:
            """What is chosen; the rest of it comes with the data."""
            return SiteOwner(times, rank, ridge, smoothing, seasonality)

        return call(planned, options, where), None
    numbers = read_range(options.pop("n_components", 1), f"{where}: n_components")
    if kind == "hidden-markov":
        return partial(_with, MODELS[kind], "n_states", options, where), numbers
    made = partial(_with, MODELS[kind], "n_components", options, where)
    made(numbers[0])  # whatever is wrong with the words is said here
    return made, numbers


def _with(
    make: Callable[..., Model], name: str, options: Mapping[str, Any], where: str, k: int
) -> Any:
    return call(make, {**options, name: k}, where)


def _algorithm(table: Mapping[str, Any], where: str) -> Algorithm | str:
    """A name alone means what it means everywhere; with settings it is one's own algorithm."""
    known = {name.lower(): name for name in ALGORITHMS}
    options = dict(table)
    word = str(options.pop("kind", "auto")).lower()
    if word not in known:
        raise SettingsError(f"{where}: unknown kind {word!r}; {nearest(word, list(ALGORITHMS))}")
    if not options:
        return known[word]
    make = ALGORITHMS[known[word]]
    takes = inspect.signature(make).parameters
    for name in ("compressor", "broadcast"):
        if name in takes and name in options:
            options[name] = parse_compressor(str(options[name]), f"{where}: {name}")
    step = options.get("step_size")
    if isinstance(step, dict):
        options["step_size"] = call(Decreasing, step, f"{where}: step_size")
    made: Algorithm = call(make, options, where)
    return made


def _kind(table: Mapping[str, Any], where: str, known: list[str]) -> tuple[str, dict[str, Any]]:
    options = dict(table)
    kind = options.pop("kind", None)
    if kind not in known:
        said = "a kind is missing" if kind is None else f"unknown kind {kind!r}"
        raise SettingsError(f"{where}: {said}; {nearest(str(kind), known)}")
    return str(kind), options


def call(make: Callable[..., Any], options: Mapping[str, Any], where: str) -> Any:
    """Call with words as arguments; a wrong one is told with its place."""
    check_keys(options, list(inspect.signature(make).parameters), where)
    try:
        return make(**options)
    except (EmfedError, TypeError, ValueError) as error:
        raise SettingsError(f"{where}: {error}") from None
