"""``emfed join``: a SuperNode and the site's program, kept alive until told to stop."""

from __future__ import annotations

import json
import logging
import os
import re
import secrets
import time
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, final

import numpy as np

from emfed.core.configuration import check_keys
from emfed.core.errors import EmfedError, SettingsError
from emfed.data.files import read_frame
from emfed.data.reading import read_table
from emfed.data.sources import ParquetRows
from emfed.network import SiteRules
from emfed.network.flower.client import (
    DRY_RUN,
    FOLDER,
    JOURNAL,
    REHEARSAL,
    write_site,
)
from emfed.network.flower.deployment import Node, split_address
from emfed.network.flower.keys import read_private_key
from emfed.network.flower.processes import Child, free_port, stop_all
from emfed.network.flower.server import alone

logger = logging.getLogger(__name__)
RETRY = (2.0, 15.0)
"""Seconds before a SuperNode that was refused is started again: at first, and at most."""
_NUMBER = re.compile(r"SuperNode ID: (\d+)")
Report = Callable[[str, str], None]
"""Called with a kind (``state``, ``sent``) and words."""


def read_rules(path: Path | None) -> SiteRules:
    """The owner's rules from a TOML file; none without one."""
    if path is None:
        return SiteRules()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not a TOML file ({error}).") from None
    check_keys(table, [field.name for field in fields(SiteRules)], path.name)
    try:
        return SiteRules(**table)
    except (SettingsError, TypeError) as error:
        raise SettingsError(f"{path.name}: {error}") from None


def prepare(folder: Path, data: Path, columns: list[str] | None) -> dict[str, Any]:
    """Look at the data once and leave them in a form that is quick to open; Parquet stays."""
    if not data.exists():
        raise SettingsError(f"{data}: there is no such file.")
    if data.suffix.lower() == ".parquet":
        ParquetRows(data, columns)
        return {"parquet": str(data.resolve()), "columns": columns}
    frame = read_frame(data)
    if columns is not None:
        missing = [name for name in columns if name not in frame.columns]
        if missing:
            raise SettingsError(f"{data}: no column {missing[0]!r}; it has {frame.columns}.")
        frame = frame.select(columns)
    rows, names = read_table(frame, str(data))
    path, beside = folder / "rows.npy", folder / ".rows.npy.new"
    with beside.open("wb") as file:  # rows may be many: no second copy in memory
        os.fchmod(file.fileno(), 0o600)
        np.save(file, np.asarray(rows))
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)
    return {"rows": str(path.resolve()), "columns": None if names is None else list(names)}


@final
@dataclass
class Guest:
    """A site's side of a deployment."""

    address: str
    folder: Path
    data: Path
    authority: Path | None = None
    """ca.pem; None: without TLS, to this machine only."""
    key: Path | None = None
    columns: list[str] | None = None
    rules: SiteRules = field(default_factory=SiteRules)
    dry_run: bool = False
    variables: Mapping[str, str] = field(default_factory=dict)
    """More of the environment of the site's program."""
    _told: int = field(default=0, init=False)
    _node: Node | None = field(default=None, init=False)
    _connected: bool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.folder = self.folder.resolve()

    @property
    def journal(self) -> Path:
        """Where the site's program writes what it sends, or would."""
        return self.folder / (REHEARSAL if self.dry_run else JOURNAL)

    def check(self) -> None:
        """Check what was given; writes nothing, since another process may work in the folder."""
        split_address(self.address)
        if self.authority is not None:
            if not self.authority.exists():
                raise SettingsError(
                    f"{self.authority}: there is no such file; ask the server's people for ca.pem."
                )
            if self.key is None:
                raise SettingsError(
                    "a site shows who it is: give --key NAME.key, made by `emfed keys site NAME`."
                )
            read_private_key(self.key)
        if not self.data.exists():
            raise SettingsError(f"{self.data}: there is no such file.")

    def _prepare(self) -> None:
        """Leave in the folder what the site's program needs; the caller holds its lock."""
        write_site(
            self.folder, prepare(self.folder, self.data, self.columns), self.rules, self.columns
        )
        secret = self.folder / "exec.secret"
        if not secret.exists():
            secret.touch(0o600)
            secret.write_text(secrets.token_hex(32), encoding="utf-8")

    def run(self, report: Report) -> None:
        """Answer until interrupted; raises `EmfedError` for what trying again cannot mend."""
        self.check()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.folder.chmod(0o700)
        with alone(self.folder / "join.lock") as mine:
            if not mine:
                raise EmfedError(f"another `emfed join` works in {self.folder}.")
            self._prepare()
            journal = self.journal
            if self.dry_run:
                journal.unlink(missing_ok=True)
            self._told = journal.stat().st_size if journal.exists() else 0
            children: list[Child] = []
            try:
                pause = RETRY[0]
                while True:
                    children = self._start()
                    began = time.monotonic()
                    reason = self._watch(children, report)
                    if reason is None:
                        return
                    stop_all(children, 3.0)
                    pause = RETRY[0] if time.monotonic() - began > 60 else pause
                    report("state", f"{reason}; trying again in {pause:.0f} s")
                    time.sleep(pause)
                    pause = min(RETRY[1], 2 * pause)
            finally:
                stop_all(children)

    def _start(self) -> list[Child]:
        node = Node(
            self.address,
            self.folder,
            self.authority,
            self.key,
            free_port(),
            {
                FOLDER: str(self.folder),
                DRY_RUN: "1" if self.dry_run else "",
                **self.variables,
            },
        )
        node.release()
        self._node, self._connected = node, None
        children = [node.supernode(), node.resident()]
        for child in children:
            child.start()
        return children

    def _watch(self, children: list[Child], report: Report) -> str | None:
        """Until the SuperNode ends; returns why, in words, or None if a dry run is over."""
        supernode, resident = children
        greeting = "; the server greets when all sites that it expects are there"
        report("state", f"calling {self.address}{greeting if self.dry_run else ''}")
        while supernode.alive:
            over = self.dry_run and self.journal.exists()  # it comes as a whole
            self._tell(report)
            if over:
                return None
            if not resident.alive:
                logger.warning("the site's program ended with code %s", resident.code)
                resident.start()
            self._hear(supernode.news(), report)
            for child in children:
                child.trim()
            time.sleep(0.2)
        self._tell(report)
        return explain(supernode.words(), supernode.code)

    def _hear(self, words: str, report: Report) -> None:
        """Tell when the connection comes and goes."""
        assert self._node is not None
        if found := _NUMBER.search(words):
            self._node.remember(int(found[1]))
        connected = max(words.rfind("SuperNode ID:"), words.rfind("Connection successful"))
        lost = words.rfind("Connection attempt failed")
        if connected != lost and (connected > lost) != self._connected:
            self._connected = connected > lost
            report(
                "state",
                f"connected to {self.address}"
                if self._connected
                else f"no answer from {self.address}; trying on",
            )

    def _tell(self, report: Report) -> None:
        """Show lines that were added to the journal."""
        journal = self.journal
        if not journal.exists() or journal.stat().st_size <= self._told:
            return
        with journal.open("rb") as file:
            file.seek(self._told)
            new = file.read()
        whole = new.rfind(b"\n") + 1
        self._told += whole
        for line in new[:whole].decode(errors="replace").splitlines():
            try:
                report(
                    "would send" if self.dry_run else "sent",
                    describe(json.loads(line)),
                )
            except (json.JSONDecodeError, KeyError):
                continue


def describe(entry: Mapping[str, Any]) -> str:
    """A line of the journal in words; only replies belong to a round."""
    when = f", round {entry['round']}" if entry["kind"] == "reply" else ""
    return f"{entry['kind']}{when}, {entry['bytes']} bytes: {entry['content']}"


def explain(words: str, code: int | None) -> str:
    """What a SuperNode's last words mean; raises where trying again is of no use."""
    if "CERTIFICATE_VERIFY_FAILED" in words:
        raise EmfedError(
            "this is not the server that ca.pem stands for, or its certificate does not name the "
            "address you gave: ask for the right ca.pem and address."
        )
    if "[code: 2004]" in words:
        return (
            "the server does not know this site's key (send it NAME.pub), or it still waits for "
            "an earlier session of this site to end"
        )
    if "Unable to parse the private key" in words:
        raise EmfedError("the site's private key cannot be read.")
    return f"the connection ended (code {code})"
