"""From the words of a configuration or a command line to `FitSettings`: one reader for both."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from emfed.algorithms import ALGORITHMS, Bernoulli, Decreasing, Everyone
from emfed.compressors import build_compressor
from emfed.compressors.words import parse_compressor
from emfed.core.configuration import TOML, at, check_keys, nearest
from emfed.core.errors import EmfedError, SettingsError
from emfed.core.protocols import Algorithm, Model
from emfed.core.registry import plain
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
    size = size_of(kind)
    numbers = options.pop(size, None)
    if numbers is None:
        return make_from(kind, options, where), None
    given = read_range(numbers, f"{where}: {size}")
    made = partial(make_from, kind, options, where)
    made(given[0])  # whatever is wrong with the words is said here
    return made, given


def size_of(kind: str) -> str:
    """What candidates differ by: the number of components, or the rank of a low-rank table."""
    known = inspect.signature(MODELS[kind]).parameters if kind in MODELS else {}
    return "rank" if "rank" in known else "n_components"


def make_from(kind: str, options: Mapping[str, Any], where: str, k: int | None = None) -> Model:
    """The model of these words; a wrong one is told with its place."""
    try:
        return make_model(kind, **options, **({} if k is None else {size_of(kind): k}))
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
            told, place = options[name], f"{where}: {name}"
            described = isinstance(told, Mapping)
            options[name] = (
                build_compressor(told) if described else parse_compressor(str(told), place)
            )
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


# And back: what others are told of settings that Python gave.


def say(settings: FitSettings) -> dict[str, dict[str, Any]]:
    """The tables from which `read_words` makes these settings.

    Raises
    ------
    SettingsError
        If something of them has no words: members agree on words alone.

    Examples
    --------
    >>> import emfed
    >>> said = say(FitSettings(emfed.gaussian_mixture(2), n_components="1:3", rounds=9))
    >>> said["model"], said["fit"]
    ({'kind': 'gaussian-mixture', 'n_components': [1, 2, 3]}, {'rounds': 9})
    """
    said = {
        "model": _said_model(settings),
        "algorithm": _said_algorithm(settings.algorithm),
        "fit": _said_fit(settings),
    }
    again = read_words(said["model"], said["algorithm"], said["fit"])
    for what, ours, theirs in (
        ("the model", _described(settings), _described(again)),
        ("the algorithm", settings.method(2).describe(), again.method(2).describe()),
    ):
        if plain(ours) != plain(theirs):
            raise SettingsError(
                f"{what} has settings that no words say, and members of a federation agree on "
                "words: `describe()` must hold all of them, and `register_model` what makes it."
            )
    return said


def _described(settings: FitSettings) -> list[dict[str, Any]]:
    return [model.describe() for model in settings.candidates()]


def _said_model(settings: FitSettings) -> dict[str, Any]:
    description = plain(settings.but(validate=False).candidates()[-1].describe())
    kind = description.pop("model")
    if kind not in MODELS:
        raise SettingsError(
            f"the model {kind!r} is known here alone: register it (`register_model`) in a module "
            "that sites import, too."
        )
    known = inspect.signature(MODELS[kind]).parameters
    said = {n: v for n, v in description.items() if n not in known or v != known[n].default}
    if settings.numbers is not None:
        said[size_of(kind)] = list(settings.numbers)
    return {"kind": kind} | {name: _without_null(value) for name, value in said.items()}


def _without_null(value: Any) -> Any:
    """TOML has no null, and what is left out has its default."""
    if isinstance(value, Mapping):
        return {name: _without_null(each) for name, each in value.items() if each is not None}
    return [_without_null(each) for each in value] if isinstance(value, list) else value


def _said_algorithm(given: Algorithm | str) -> dict[str, Any]:
    if isinstance(given, str):
        return {"kind": given}
    description = plain(given.describe())
    kind = description.pop("algorithm")
    if kind not in ALGORITHMS:
        raise SettingsError(
            f"the algorithm {kind!r} is known here alone: sites have no word for it."
        )
    known = inspect.signature(ALGORITHMS[kind]).parameters
    said = {n: v for n, v in description.items() if n in known and v != known[n].default}
    return {"kind": kind} | said


def _said_fit(settings: FitSettings) -> dict[str, Any]:
    said = dict[str, Any]()
    defaults = FitSettings(settings.model, n_components=settings.n_components)
    for name in WORDS:
        value = getattr(settings, name)
        if name == "participation":
            value = _said_participation(settings.who())
        if value is None or (isinstance(value, type(d := getattr(defaults, name))) and value == d):
            continue
        if not isinstance(value, str | bool | int | float):
            raise SettingsError(
                f"{name} given as {type(value).__name__} has no words, and members of a federation "
                "agree on words: give it by name, or leave it out."
            )
        said[name] = value
    return said


def _said_participation(who: Any) -> float | None:
    if isinstance(who, Everyone):
        return None
    if isinstance(who, Bernoulli) and isinstance(who.p, float):
        return who.p
    raise SettingsError("participation travels as one probability: give a number, such as 0.5.")
