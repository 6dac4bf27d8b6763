"""A server and sites in threads of the test's process, over TLS on this machine."""

from __future__ import annotations

import contextlib
import json
import random
import socket
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

from emfed.core.errors import EmfedError
from emfed.deployment.config import Config, read_config
from emfed.deployment.hosting import place_of, serve
from emfed.deployment.joining import Joining, SiteOutcome
from emfed.network.addresses import Terminated
from emfed.network.owner_rules import SiteRules
from emfed.network.roster import pin_keys
from tests.network.processes import make_keys

MIXTURE = '[model]\nkind = "gaussian-mixture"\nn_components = 2\n'
COLUMNS = ("x", "y")
SECONDS = 60.0
"""For whatever a test waits for, on a machine that does other things, too."""


def tables(sites: int = 3, rows: int = 60) -> dict[str, pl.DataFrame]:
    """Two groups of rows at every site."""
    rng = np.random.default_rng(4)
    found = {}
    for number in range(sites):
        centres = np.where(rng.random(rows)[:, None] < 0.4, [[-2.0, 0.0]], [[2.0, 1.0]])
        found[f"s{number}"] = pl.DataFrame(centres + rng.normal(size=(rows, 2)), schema=COLUMNS)
    return found


def until(true: Callable[[], Any], seconds: float = SECONDS) -> None:
    """Wait for something."""
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.02)


class InThread:
    """A function in a thread: what it returned, or raised."""

    def __init__(self, work: Callable[[threading.Event], Any]) -> None:
        self.stop, self.error, self.result = threading.Event(), None, None

        def run() -> None:
            try:
                self.result = work(self.stop)
            except (EmfedError, Terminated) as error:
                self.error = error

        self.error: BaseException | None
        self.result: Any
        self.thread = threading.Thread(target=run, daemon=True)
        self.thread.start()

    def end(self) -> Any:
        """Stop it, wait for it."""
        self.stop.set()
        return self.wait()

    def wait(self, seconds: float = SECONDS) -> Any:
        """What it returned; raises what it raised."""
        self.thread.join(seconds)
        assert not self.thread.is_alive(), "it goes on"
        if isinstance(self.error, EmfedError):
            raise self.error
        return self.result


def quiet_port() -> int:
    """A free port that no connection of another test is given by chance meanwhile."""
    for port in random.SystemRandom().sample(range(10_000, 30_000), 100):
        with contextlib.suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


class Deployed:
    """One folder with keys, rows and configurations; a context that leaves no thread behind."""

    def __init__(
        self, folder: Path, config: str = "", rows: Mapping[str, pl.DataFrame] | None = None
    ) -> None:
        self.folder, self.tables = folder, dict(tables() if rows is None else rows)
        self.port, self.said, self.heard = quiet_port(), [], {}
        self.said: list[dict[str, Any]]
        self.heard: dict[str, list[str]]
        self._going: list[InThread] = []
        make_keys([*self.tables], folder)
        pin_keys([folder / f"{name}.pub" for name in self.tables], folder / "roster")
        for name, table in self.tables.items():
            table.write_csv(folder / f"{name}.csv")
        self.config = self.write("run", config)

    def write(self, name: str, more: str = "", model: str = MIXTURE, **server: Any) -> Config:
        """A configuration; ``more`` begins with what belongs to ``[sites]``."""
        columns = list(next(iter(self.tables.values())).columns)
        place = {"port": self.port, "keys": "keys", "page": 0, "report": False, **server}
        place |= {} if name == "run" else {"folder": f"run-{name}", "output": f"model-{name}"}
        lines = [f"{key} = {json.dumps(value)}" for key, value in place.items()]
        sites, _, rest = more.partition("\n\n")
        wanted = {"expected": len(self.tables), "columns": columns, "farewell": 20.0}
        known = {line.partition(" =")[0] for line in sites.splitlines()}
        given = "".join(f"{k} = {json.dumps(v)}\n" for k, v in wanted.items() if k not in known)
        path = self.folder / f"{name}.toml"
        text = f"{model}[sites]\n{given}{sites}\n{rest}\n[server]\n" + "\n".join(lines)
        path.write_text(text)
        return read_config(path)

    def __enter__(self) -> Deployed:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._going:
            one.stop.set()
        for one in self._going:
            one.thread.join(20)

    def _start(self, work: Callable[[threading.Event], Any]) -> InThread:
        self._going.append(InThread(work))
        return self._going[-1]

    def serve(self, *configs: Config, **options: Any) -> InThread:
        """Begin to serve."""
        runs = configs or (self.config,)
        told = [(run, self.said.append) for run in runs]
        place = place_of(list(runs))
        return self._start(lambda stop: serve(told, place, stop=stop, **options))

    def joining(self, name: str, rules: SiteRules | None = None, **options: Any) -> Joining:
        """What a site is given."""
        place = self.folder
        given: dict[str, Any] = {
            "authority": place / "keys" / "ca.pem",
            "key": place / f"{name}.key",
            "roster": place / "roster",
            "rules": SiteRules() if rules is None else rules,
        }
        data = place / f"{name}.csv"
        address = f"127.0.0.1:{self.port}"
        return Joining(address, place / f"site-{name}", data, **{**given, **options})

    def join(self, name: str, rules: SiteRules | None = None, **options: Any) -> InThread:
        """Begin to take part."""
        heard = self.heard.setdefault(name, [])
        joining = self.joining(name, rules, **options)
        return self._start(
            lambda stop: joining.run(lambda kind, words: heard.append(f"{kind}: {words}"), stop)
        )

    def join_all(self, *but: str) -> dict[str, InThread]:
        """All sites but some."""
        return {name: self.join(name) for name in self.tables if name not in but}

    @property
    def status(self) -> dict[str, Any]:
        """What the server said last."""
        return self.said[-1] if self.said else {}

    def outcomes(self, sites: Mapping[str, InThread]) -> dict[str, SiteOutcome]:
        """How all of them ended."""
        return {name: one.wait() for name, one in sites.items()}


def replaced(config: Config, **sites: Any) -> Config:
    """A configuration with other settings of sites."""
    return replace(config, sites=replace(config.sites, **sites))
