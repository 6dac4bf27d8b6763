"""What ``emfed serve`` is told: a model, an algorithm, a run, its sites and the server, as TOML."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

from emfed.core.configuration import check_keys, read_settings
from emfed.core.errors import SettingsError, check_count, check_range
from emfed.core.noise import SITES_DRAW
from emfed.core.privacy import Privacy
from emfed.fitting.settings import FitSettings
from emfed.fitting.words import read_words
from emfed.network.masking import SMALLEST_SET


@final
@dataclass(frozen=True, kw_only=True)
class SiteSettings:
    """How many sites are expected, and how long they may take."""

    expected: int = 1
    """The run begins when so many are there, or after ``wait`` seconds with ``minimum``."""
    minimum: int | None = None
    """Answers that a round needs; half of those expected if left out. A masked sum needs three
    sites at least, whatever is said here (`Config.fewest`)."""
    deadline: float = 120.0
    """Seconds in which a message is answered or counts as lost."""
    attempts: int = 5
    wait: float = 600.0
    give_up: float = 86400.0
    """Seconds without enough sites after which the run ends, to be resumed."""
    give_up_refused: float = 300.0
    """The same where so many refuse that those who are left are too few."""
    admit: bool = True
    """Whether sites that come later are let in."""
    deliver: bool = False
    """Whether every site that took part gets the model file at the end."""
    farewell: float = 60.0
    """Seconds for which the server waits at the end for members that are away, to tell them."""

    def __post_init__(self) -> None:
        check_count("expected", self.expected)
        check_count("attempts", self.attempts)
        for name in ("deadline", "wait", "give_up", "give_up_refused", "farewell"):
            check_range(name, getattr(self, name), 0, 1e9, open_low=name == "deadline")
        if self.minimum is not None and not 1 <= self.minimum <= self.expected:
            raise SettingsError(
                f"minimum must lie between 1 and expected, {self.expected}; got {self.minimum}."
            )

    @property
    def fewest(self) -> int:
        """Answers that a round needs, by these settings alone."""
        return (self.expected + 1) // 2 if self.minimum is None else self.minimum


@final
@dataclass(frozen=True, kw_only=True)
class PrivacySettings:
    """``[privacy]``: masks, and noise."""

    masks: bool | None = None
    """Whether sites mask what they send; each needs a roster of the others' keys. Left out: so it
    is where sites have keys and three or more are expected. Without masks, every site must have
    allowed it in its rules. Masks protect against a server that follows the protocol."""
    epsilon: float | None = None
    """What the run may tell of any one row, at most. With three sites or more such a run has masks
    unless ``masks`` is false; without, each site adds all of the noise by itself."""
    delta: float = 1e-6

    def __post_init__(self) -> None:
        if self.masks is not None and type(self.masks) is not bool:
            raise SettingsError(f"masks must be true or false; got {self.masks!r}.")
        if self.epsilon is not None:
            Privacy(self.epsilon, self.delta)


PORT = 9400
"""The port that a server listens on if nothing is said."""


@final
@dataclass(frozen=True, kw_only=True)
class ServerSettings:
    """``[server]``: which engine, where it listens, and its folders, relative to the file."""

    engine: Literal["websocket", "flower"] = "websocket"
    """What carries messages; Flower is for consortia that run it already."""
    host: str = "127.0.0.1"
    port: int = PORT
    keys: str = "keys"
    folder: str = "run"
    output: str = "model"
    page: int = PORT + 1
    """The port of the page, on this machine's own address; another if it is taken."""
    report: bool = True
    """Whether the report of the fit, a page for people, is drawn beside the model at the end."""

    def __post_init__(self) -> None:
        for name, least in (("port", 1), ("page", 0)):
            if not least <= (port := getattr(self, name)) < 65536:
                raise SettingsError(f"{name} must lie between {least} and 65535; got {port}.")


@final
@dataclass(frozen=True)
class Config:
    """All of it."""

    path: Path
    settings: FitSettings
    sites: SiteSettings
    server: ServerSettings
    said: dict[str, Any]
    """The tables that must not change while a run goes on."""
    more: bool = False
    """Whether another run follows on the same server, so that sites stay."""

    def masked(self, secure: bool = True) -> bool:
        """Whether sites mask what they send; ``secure``: they are known by keys."""
        if self.settings.masks is not None:
            return self.settings.masks
        return secure and self.sites.expected >= SMALLEST_SET

    def fewest(self, secure: bool = True) -> int:
        """How many sites the run cannot do without: a masked sum has three or more."""
        least = SMALLEST_SET if self.masked(secure) else 1
        return max(self.sites.fewest, least)

    def place(self, name: str) -> Path:
        """A folder of the server's, by its key."""
        return self.path.parent / str(getattr(self.server, name))

    def fixed(self) -> dict[str, Any]:
        """What a run keeps from its beginning to its end; limits may change in between."""
        fit = {k: v for k, v in self.said["fit"].items() if k not in LIMITS}
        return {**self.said, "fit": fit}


LIMITS = ("rounds", "epochs", "max_bytes", "seconds", "tol", "field_tol")


def read_config(path: str | Path) -> Config:
    """Read and check a file, so that whatever is wrong with it is said at once."""
    path = Path(path).resolve()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not a TOML file ({error}).") from None
    where = path.name
    check_keys(table, ("model", "algorithm", "fit", "privacy", "sites", "server"), where)
    for name, part in table.items():
        if not isinstance(part, dict):
            raise SettingsError(f"{where}: {name} must be a table, [{name}]; got {part!r}.")
    sites = dict(table.get("sites", {}))
    columns = sites.pop("columns", None)
    if columns is not None and not (
        isinstance(columns, list) and columns and all(isinstance(c, str) for c in columns)
    ):
        raise SettingsError(f"{where}, [sites]: columns must be a list of names; got {columns!r}.")
    said = {name: table.get(name, {}) for name in ("model", "algorithm", "fit", "privacy")}
    for name in ("fit", "privacy"):
        if "noise_seed" in said[name]:
            raise SettingsError(f"{where}, [{name}]: {SITES_DRAW}")
    private = read_settings(said["privacy"], f"{where}, [privacy]", PrivacySettings)
    fit = {"scores": private.epsilon is None, **said["fit"], "masks": private.masks}
    if private.epsilon is not None:
        fit |= {"epsilon": private.epsilon, "delta": private.delta}
    settings = read_words(said["model"], said["algorithm"], fit, where, columns=columns)
    return Config(
        path,
        settings,
        read_settings(sites, f"{where}, [sites]", SiteSettings),
        read_settings(table.get("server", {}), f"{where}, [server]", ServerSettings),
        {**said, "columns": columns},
    )
