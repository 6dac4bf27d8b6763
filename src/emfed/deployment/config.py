"""What ``emfed serve`` is told: a model, an algorithm, a run, its sites and the server, as TOML."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from emfed.aggregation.lattice import SMALLEST_SET
from emfed.core.configuration import check_keys, read_settings
from emfed.core.errors import SettingsError, check_count, check_range
from emfed.core.noise import SITES_DRAW
from emfed.core.privacy import Privacy
from emfed.fitting.settings import FitSettings
from emfed.fitting.words import read_words


@final
@dataclass(frozen=True, kw_only=True)
class SiteSettings:
    """How many sites are expected, and how long they may take."""

    expected: int = 1
    """The run begins when so many are there, or after ``wait`` seconds with ``minimum``."""
    minimum: int | None = None
    """Sites with which it begins then; half of those expected if left out. A masked sum needs three
    sites at least, whatever is said here (`Config.fewest`)."""
    wait: float = 600.0
    wait_for: float = 180.0
    """Seconds that the others wait for a site that is away before they go on without it."""
    give_up: float = 86400.0
    """Seconds without a sum after which the server ends, to be started again."""
    give_up_refused: float = 300.0
    """The same where so many refuse that those who are left are too few."""
    admit: bool = True
    """Whether sites that come later are let in."""
    farewell: float = 60.0
    """Seconds for which the server waits at the end for sites that are away, to tell them."""

    def __post_init__(self) -> None:
        check_count("expected", self.expected)
        for name in ("wait", "wait_for", "give_up", "give_up_refused", "farewell"):
            check_range(name, getattr(self, name), 0, 1e9)
        if self.minimum is not None and not 1 <= self.minimum <= self.expected:
            raise SettingsError(
                f"minimum must lie between 1 and expected, {self.expected}; got {self.minimum}."
            )

    @property
    def fewest(self) -> int:
        """Sites that the beginning needs, by these settings alone."""
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
    """``[server]``: where it listens, and its folders, relative to the file."""

    host: str = "127.0.0.1"
    port: int = PORT
    keys: str = "keys"
    folder: str = "run"
    output: str = "model"
    mailboxes: str = ""
    """A folder of mailboxes, for sites to which another platform carries messages."""
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


GONE = {
    "deliver": "every site comes to the model itself and writes it: delete this line",
    "deadline": (
        "nobody asks and answers any more: write wait_for, the seconds that a site may be away"
    ),
    "attempts": "nobody asks and answers any more: delete this line",
    "engine": (
        "sites call over WebSockets, and other platforms carry messages between mailboxes "
        "(docs/platforms.md): delete this line, and write mailboxes where a platform carries them"
    ),
}
"""Keys of release 0.1 that are refused, and what takes their place."""
AS_IT_IS = {"deliver": True, "engine": "websocket"}
"""Their values that ask for what every run does: these are passed over."""


def _still_known(table: Mapping[str, Any], where: str) -> dict[str, Any]:
    """A table without keys of release 0.1; raises `SettingsError` for one that asks for more."""
    for name in GONE.keys() & table.keys():
        if table[name] != AS_IT_IS.get(name, "nothing"):
            raise SettingsError(f"{where}: {name} is no setting any more: {GONE[name]}.")
    return {name: value for name, value in table.items() if name not in GONE}


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
    sites = _still_known(table.get("sites", {}), f"{where}, [sites]")
    server = _still_known(table.get("server", {}), f"{where}, [server]")
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
        read_settings(server, f"{where}, [server]", ServerSettings),
        {**said, "columns": columns},
    )
