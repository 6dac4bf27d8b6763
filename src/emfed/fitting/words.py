"""From the words of a configuration or a command line to `FitSettings`: one reader for both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from emfed.algorithms import ALGORITHMS, Decreasing
from emfed.compressors.words import parse_compressor
from emfed.core.configuration import TOML, at, check_keys, nearest
from emfed.core.errors import EmfedError, SettingsError
from emfed.core.protocols import Algorithm, Model
from emfed.core.settings.declaring import declared
from emfed.fitting.settings import FitSettings, read_range
from emfed.models import MODELS, make_model

WORDS = [name for name, known in declared(FitSettings).items() if known.toml]
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
        if where:
            error.on(TOML)
        raise error if str(error).startswith(where) else at(where, error) from None


def _at(where: str, table: str) -> str:
    return f"{where}, [{table}]" if where else table


def _model(table: Mapping[str, Any], where: str) -> tuple[Any, Any]:
    """A function from a number of components to the model, and the numbers; or the model itself."""
    options = dict(table)
    kind = options.pop("kind", None)
    if kind is None:
        raise SettingsError(f"{where}: a kind is missing; choose among {', '.join(MODELS)}.")
    numbers = options.pop("n_components", None)
    if numbers is None:
        return make_from(kind, options, where), None
    given = read_range(numbers, f"{where}: n_components")
    made = partial(make_from, kind, options, where)
    made(given[0])  # whatever is wrong with the words is said here
    return made, given


def make_from(kind: str, options: Mapping[str, Any], where: str, k: int | None = None) -> Model:
    """The model of these words; a wrong one is told with its place."""
    try:
        return make_model(kind, k, **options)
    except EmfedError as error:
        raise at(where, error) from None


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


def call(make: Callable[..., Any], options: Mapping[str, Any], where: str) -> Any:
    """Call with words as arguments; a wrong one is told with its place."""
    check_keys(options, list(inspect.signature(make).parameters), where)
    try:
        return make(**options)
    except (EmfedError, TypeError, ValueError) as error:
        raise at(where, error) from None
