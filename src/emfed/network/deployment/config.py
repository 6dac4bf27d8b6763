"""What ``emfed serve`` is told: a model, an algorithm, a run, its sites and the server, as TOML."""

from __future__ import annotations

import inspect
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from emfed.algorithms import ALGORITHMS, Bernoulli, Decreasing, Everyone
from emfed.compressors.words import parse_compressor
from emfed.core.configuration import check_keys, nearest, read_settings
from emfed.core.errors import EmfedError, SettingsError, check_count, check_range
from emfed.core.protocols import Algorithm, Model, Participation
from emfed.models import (
    factor_analysis,
    gaussian_mixture,
    hidden_markov,
    mixed_mixture,
    ppca,
    regression_mixture,
)
from emfed.network.deployment.settings import ServerSettings
from emfed.network.descriptions import plain

MODELS: dict[str, Callable[..., Model]] = {
    "gaussian-mixture": gaussian_mixture,
    "mixed-mixture": mixed_mixture,
    "hidden-markov": hidden_markov,
    "factor-analysis": factor_analysis,
    "ppca": ppca,
    "regression-mixture": regression_mixture,
}
"""Models a configuration can name; its other keys are arguments of the function."""


@final
@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """When a run ends, and what it weighs; ``seed`` decides all randomness."""

    rounds: int = 100
    tolerance: float | None = None
    weights: Literal["samples", "uniform"] = "samples"
    participation: float = 1.0
    seed: int = 0
    start_statistics: Literal["expected", "parameters"] = "parameters"

    def __post_init__(self) -> None:
        check_count("rounds", self.rounds)
        check_count("seed", self.seed, 0)
        check_range("participation", self.participation, 0, 1, open_low=True)

    def make_participation(self) -> Participation:
        """Everyone, or independent draws."""
        return Everyone() if self.participation == 1 else Bernoulli(self.participation)


@final
@dataclass(frozen=True, kw_only=True)
class SiteSettings:
    """How many sites are expected, and how long they may take."""

    expected: int = 1
    """The run begins when so many are there, or after ``wait`` seconds with ``minimum``."""
    minimum: int | None = None
    """Answers that a round needs; half of those expected if left out."""
    deadline: float = 120.0
    """Seconds in which a message is answered or counts as lost."""
    attempts: int = 5
    wait: float = 600.0
    give_up: float = 86400.0
    """Seconds without enough sites after which the run ends, to be resumed."""
    admit: bool = True
    """Whether sites that come later are let in."""

    def __post_init__(self) -> None:
        check_count("expected", self.expected)
        check_count("attempts", self.attempts)
        for name in ("deadline", "wait", "give_up"):
            check_range(name, getattr(self, name), 0, 1e9, open_low=name == "deadline")
        if self.minimum is not None and not 1 <= self.minimum <= self.expected:
            raise SettingsError(
                f"minimum must lie between 1 and expected, {self.expected}; got {self.minimum}."
            )

    @property
    def fewest(self) -> int:
        """Answers that a round needs."""
        return (self.expected + 1) // 2 if self.minimum is None else self.minimum


@final
@dataclass(frozen=True)
class Config:
    """All of it."""

    path: Path
    model: Model
    algorithm: Algorithm
    run: RunSettings
    sites: SiteSettings
    server: ServerSettings
    columns: tuple[str, ...] | None = None

    def place(self, name: str) -> Path:
        """A folder of the server's, by its key."""
        return self.path.parent / str(getattr(self.server, name))

    def fixed(self) -> dict[str, Any]:
        """What a run keeps from its beginning to its end; the rest may change in between."""
        run = {k: v for k, v in vars(self.run).items() if k not in ("rounds", "tolerance")}
        about = {
            "model": self.model.describe(),
            "algorithm": self.algorithm.describe(),
            "run": run,
            "columns": self.columns,
        }
        fixed: dict[str, Any] = json.loads(json.dumps(plain(about)))
        return fixed


def read_config(path: str | Path) -> Config:
    """Read and check a file, so that whatever is wrong with it is said at once."""
    path = Path(path).resolve()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not a TOML file ({error}).") from None
    where = path.name
    check_keys(table, ("model", "algorithm", "run", "sites", "server"), where)
    for name, part in table.items():
        if not isinstance(part, dict):
            raise SettingsError(f"{where}: {name} must be a table, [{name}]; got {part!r}.")
    sites = dict(table.get("sites", {}))
    columns = sites.pop("columns", None)
    if columns is not None and not (
        isinstance(columns, list) and columns and all(isinstance(c, str) for c in columns)
    ):
        raise SettingsError(f"{where}, [sites]: columns must be a list of names; got {columns!r}.")
    return Config(
        path,
        _model(table.get("model", {}), f"{where}, [model]"),
        _algorithm(table.get("algorithm", {}), f"{where}, [algorithm]"),
        read_settings(table.get("run", {}), f"{where}, [run]", RunSettings),
        read_settings(sites, f"{where}, [sites]", SiteSettings),
        read_settings(table.get("server", {}), f"{where}, [server]", ServerSettings),
        None if columns is None else tuple(columns),
    )


def _kind(table: Mapping[str, Any], where: str, known: list[str]) -> tuple[str, dict[str, Any]]:
    options = dict(table)
    kind = options.pop("kind", None)
    if kind not in known:
        said = "a kind is missing" if kind is None else f"unknown kind {kind!r}"
        raise SettingsError(f"{where}: {said}; {nearest(str(kind), known)}")
    return str(kind), options


def _call(make: Callable[..., Any], options: Mapping[str, Any], where: str) -> Any:
    """Call with keys as arguments; a wrong one is told with its place."""
    check_keys(options, list(inspect.signature(make).parameters), where)
    try:
        return make(**options)
    except (EmfedError, TypeError, ValueError) as error:
        raise SettingsError(f"{where}: {error}") from None


def _model(table: Mapping[str, Any], where: str) -> Model:
    kind, options = _kind(table, where, sorted([*MODELS, "site-owner"]))
    if kind == "site-owner":
        from emfed.imputation.site_owner import SiteOwner

        def site_owner(
            times: int,
            rank: int = 3,
            ridge: float = 1.0,
            smoothing: float = 0.0,
            seasonality: float = 0.0,
        ) -> Model:
            """What is chosen; the rest of it comes with the data."""
            return SiteOwner(times, rank, ridge, smoothing, seasonality)

        made: Model = _call(site_owner, options, where)
        return made
    found: Model = _call(MODELS[kind], options, where)
    return found


def _algorithm(table: Mapping[str, Any], where: str) -> Algorithm:
    """FedEM with dithering if nothing is said."""
    kind, options = _kind({"kind": "FedEM", **table}, where, sorted(ALGORITHMS))
    known = inspect.signature(ALGORITHMS[kind]).parameters
    for name in ("compressor", "broadcast"):
        text = options.get(name, "dithering:4" if name == "compressor" else None)
        if name in known and text is not None:
            options[name] = parse_compressor(str(text), f"{where}: {name}")
    step = options.get("step_size")
    if isinstance(step, dict):
        options["step_size"] = _call(Decreasing, step, f"{where}: step_size")
    made: Algorithm = _call(ALGORITHMS[kind], options, where)
    return made
