"""An experiment: its configuration, read from TOML and checked, and the jobs it asks for."""

from __future__ import annotations

import hashlib
import itertools
import json
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

from emfed.core.configuration import check_keys, read_settings
from emfed.core.errors import SettingsError, check_count
from emfed.core.version import __version__
from paper.comparison import MethodSettings
from paper.settings import ExperimentSettings, as_plain
from paper.tables import TableSettings

PAPER = ("synthetic", "mnist", "ebird")
"""The experiments of the paper: two on mixtures, one on a table of counts."""
ABLATIONS = (
    *("memories", "levels", "participation", "batches", "steps", "regimes", "one_worker"),
    *("parts", "claims"),
)
"""What the paper argues in words."""
NAMES = (*PAPER, *ABLATIONS, "methods")
AnySettings = ExperimentSettings | TableSettings | MethodSettings
KINDS: Mapping[str, type[AnySettings]] = {"ebird": TableSettings, "methods": MethodSettings}
"""The settings of those whose runs are not of EM on the paper's mixtures."""

_WORDS = ("title", "about", "shows")


def needs_mnist(settings: AnySettings) -> bool:
    """Whether a run is on MNIST itself."""
    stands_in = isinstance(settings, MethodSettings) and settings.stand_in
    return settings.data == "mnist" and not stands_in


@final
@dataclass(frozen=True)
class Experiment:
    """What is run, and in which words it is told."""

    name: str
    title: str
    about: str
    """What is run, in a few sentences."""
    shows: str
    """What the figure shows, in one sentence."""
    seeds: int
    runs: Mapping[str, AnySettings]
    quick: bool
    source: str | None = None
    """The file of a configuration of the user's own."""
    extra: tuple[str, ...] = ()
    """Its runs that the figures do not know of."""
    paper: Mapping[str, Any] = field(default_factory=dict)
    """What the paper prints of a setting; of what is no setting, that and ours."""

    @property
    def needs_mnist(self) -> bool:
        """Whether any run is on MNIST."""
        return any(needs_mnist(settings) for settings in self.runs.values())

    def jobs(self, seed: int) -> list[Job]:
        """Every run with every seed, from ``seed`` on."""
        return [
            Job(self.name, run, settings, s)
            for s in range(seed, seed + self.seeds)
            for run, settings in self.runs.items()
        ]


@final
@dataclass(frozen=True)
class Job:
    """A unit of work: one run with one seed. Its records are one file, whole or absent."""

    experiment: str
    run: str
    settings: AnySettings
    seed: int

    def to_json(self) -> str:
        """All of it, as text."""
        plain = {"experiment": self.experiment, "run": self.run, "seed": self.seed}
        return json.dumps({**plain, "settings": as_plain(self.settings)}, sort_keys=True)

    @classmethod
    def from_json(cls, text: str | bytes) -> Job:
        """What `to_json` wrote."""
        plain = json.loads(text)
        settings = KINDS.get(plain["experiment"], ExperimentSettings)(**plain["settings"])
        return cls(plain["experiment"], plain["run"], settings, plain["seed"])

    @property
    def file(self) -> str:
        """A name that no job with other settings, or of another release, has."""
        digest = hashlib.blake2b(f"{__version__} {self.to_json()}".encode(), digest_size=5)
        slug = re.sub(r"[^a-z0-9.]+", "-", self.run.lower()).strip("-")
        return f"{self.experiment}-{slug}-{self.seed}-{digest.hexdigest()}.parquet"


def load_experiment(name: str, quick: bool = False, config: Path | None = None) -> Experiment:
    """An experiment by its name; ``config`` is a file to read in place of the experiment's own."""
    if name not in NAMES:
        raise SettingsError(f"there is no experiment {name!r}; choose among {', '.join(NAMES)}.")
    own = read_config(packaged(name, "config.toml"), name, f"{name}/config.toml", quick)
    if config is None:
        return own
    try:
        text = config.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise SettingsError(f"{config} is not a text file.") from None
    other = read_config(text, name, str(config), quick)
    if name == "ebird":
        return replace(other, source=str(config), paper=own.paper)
    bases = {run.split(",")[0] for run in other.runs}  # what varies stands behind a comma
    missing = sorted({run.split(",")[0] for run in own.runs} - bases)
    if missing:  # figures and claims are about these
        raise SettingsError(
            f"{config}: {name} also needs the runs {', '.join(missing)}; you may change their "
            "settings, and add runs of your own."
        )
    known = {run.split(",")[0] for run in own.runs}
    extra = tuple(run for run in other.runs if run.split(",")[0] not in known)
    return replace(other, source=str(config), extra=extra, paper=own.paper)


def packaged(name: str, file: str) -> str:
    """The text of a file in an experiment's folder."""
    return (Path(__file__).parent / name / file).read_text(encoding="utf-8")


def read_config(text: str, name: str, where: str, quick: bool = False) -> Experiment:
    """Check a configuration; every message says where, and what was meant."""
    try:
        table = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(f"{where} is not TOML: {error}.") from None
    check_keys(table, (*_WORDS, "seeds", "settings", "runs", "vary", "quick", "paper"), where)
    for key in _WORDS:
        if not isinstance(table.get(key), str):
            raise SettingsError(f"{where}: {key} must be a text.")
    small = _table(table, "quick", where) if quick else {}
    # Each level may change what the one before said: all runs, one run, the quick version.
    changes = {k: v for k, v in small.items() if k not in ("seeds", "vary")}
    vary = {**_table(table, "vary", where), **_table(small, "vary", f"{where}, quick")}
    runs: dict[str, AnySettings] = {}
    kind = KINDS.get(name, ExperimentSettings)
    for run, own in _table(table, "runs", where).items():
        if not isinstance(own, dict):
            raise SettingsError(f"{where}: runs.{run} must be a table.")
        common = {**_table(table, "settings", where), **own}
        both = {**vary, **_table(common, "vary", f"{where}, {run}")}
        common.pop("vary", None)
        for label, varied in _grid(both, where):
            full_name = f"{run}, {label}" if label else run
            values = {**common, **changes, **varied}
            settings = read_settings(values, f"{where}, {run}", kind)
            if settings.available:
                runs[full_name] = settings
    if not runs:
        raise SettingsError(f"{where}: there are no runs.")
    seeds = check_count(f"{where}: seeds", small.get("seeds", table.get("seeds", 1)))
    title, about, shows = (" ".join(table[key].split()) for key in _WORDS)
    paper = _table(table, "paper", where)
    return Experiment(name, title, about, shows, seeds, runs, quick, paper=paper)


def _table(parent: Mapping[str, Any], key: str, where: str) -> dict[str, Any]:
    """A sub-table, empty if it is not there."""
    value = parent.get(key, {})
    if not isinstance(value, dict):
        raise SettingsError(f"{where}: {key} must be a table.")
    return value


def _grid(vary: Mapping[str, Any], where: str) -> list[tuple[str, dict[str, Any]]]:
    """Every combination of the values to vary, with a label; one empty one without any."""
    for key, values in vary.items():
        if not isinstance(values, list) or not values:
            raise SettingsError(f"{where}: vary.{key} must be a list of values; got {values!r}.")
    return [
        (
            ", ".join(f"{k} {v}" for k, v in zip(vary, c, strict=True)),
            dict(zip(vary, c, strict=True)),
        )
        for c in itertools.product(*vary.values())
    ]
