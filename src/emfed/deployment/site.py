"""A site's folder: its rows in a form that is quick to open, its rules, and what it sent."""

from __future__ import annotations

import io
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from emfed.algorithms import AutoEM
from emfed.core.configuration import check_keys
from emfed.core.errors import DataError, EmfedError, SettingsError
from emfed.core.protocols import FloatArray
from emfed.core.storage import DISK, Disk, read_json_file, write_atomic
from emfed.core.wire import (
    Kind,
    Reason,
    decode_text,
    encode_refusal,
    is_short,
    kind_of,
    peek,
    seal_refusal,
)
from emfed.data import Column, ParquetRows, Schema, Source, WorkerData, read
from emfed.data.files import PLAIN, TextForm
from emfed.data.reader import open_tables
from emfed.data.workers import as_workers, of_file
from emfed.deployment.approval import check_approved
from emfed.fitting.serving import rehearse
from emfed.models import build_model
from emfed.network import Site, SiteRules
from emfed.network.addresses import alone
from emfed.network.journal import Journal
from emfed.network.keys import SealedDisk, read_seal
from emfed.network.masking import SiteIdentity
from emfed.network.rules import Refusal
from emfed.network.site import check_ask
from emfed.network.store import FILES, runs_in
from emfed.network.sums import FIRST_QUESTION
from emfed.network.texts import privacy_of

MODEL, MEMORY = "model.emfed", "memory"
JOURNAL, REHEARSAL = "messages.jsonl", "dry-run.jsonl"
"""Every message that left the site; every kind of message that would."""


def read_rules(path: Path | None) -> SiteRules:
    """The owner's rules from a TOML file, where ``false`` is no limit; the defaults without one."""
    if path is None:
        return SiteRules()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not a TOML file ({error}).") from None
    check_keys(table, [field.name for field in fields(SiteRules)], path.name)
    optional = {f.name for f in fields(SiteRules) if "None" in str(f.type)}
    said: dict[str, Any] = {
        name: None if v is False and name in optional else v for name, v in table.items()
    }
    try:
        return SiteRules(**said)
    except (SettingsError, TypeError) as error:
        raise SettingsError(f"{path.name}: {error}") from None


def prepare(
    folder: Path,
    data: Path,
    columns: list[str] | None,
    form: TextForm = PLAIN,
    seal: Path | None = None,
) -> dict[str, Any]:
    """Look at the data once and leave them in a form that is quick to open; Parquet stays.

    Without ``columns``, those that hold no numbers are left out: no run may ask for them. Words
    that ``form`` lists become codes, whatever the kind of file. With the secret ``seal`` the site's
    copy is encrypted, and held in memory while it is used.
    """
    (file,) = open_tables(data, form, as_cells=bool(form.words)).values()
    wanted = columns or file.columns
    if absent := [name for name in form.words if name not in wanted]:
        raise SettingsError(f"--categories names {absent[0]!r}, which is no column that is used.")
    schema = Schema(
        [
            Column(name, "category" if name in form.words else "number", form.words.get(name))
            for name in wanted
        ],
        form=form,
        leave_out=columns is None,
        otherwise="leave it out of --columns",
        if_wrong="write it as a number, or leave it empty if it is not known",
    )
    table = read(file, schema)
    about = {"columns": list(table.columns or ()), "left_out": dict(table.left_out)}
    about |= {} if seal is None else {"seal": str(seal.resolve())}
    if isinstance(table.rows, Source):
        return {"parquet": str(data.resolve())} | about
    path = (folder / "rows.npy").resolve()
    _write_rows(path, table.rows, seal)
    return {"rows": str(path), "first_line": table.first_line} | about


def _write_rows(path: Path, rows: FloatArray, seal: Path | None) -> None:
    """Write the site's copy of its rows whole or not at all, encrypted where there is a secret."""
    if seal is not None:
        buffer = io.BytesIO()
        np.save(buffer, rows)
        write_atomic(path, buffer.getvalue(), SealedDisk(read_seal(seal)))
        return
    beside = path.with_name(".rows.npy.new")
    with beside.open("wb") as file:  # rows may be many: no second copy in memory
        if os.name == "posix":
            os.fchmod(file.fileno(), 0o600)
        np.save(file, rows)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


def _disk(about: Mapping[str, Any]) -> Disk:
    """Where the site keeps what it must not lose, encrypted if the owner wants that."""
    return SealedDisk(read_seal(Path(about["seal"]))) if "seal" in about else DISK


def seal_files(folder: Path, seal: Path | None, rules: SiteRules) -> int:
    """Encrypt what a site kept before it had a secret; returns how many files that were.

    A folder that is sealed already is refused without its own secret, before any run meets it.
    """
    places = [folder / MEMORY]
    places += [] if rules.second_ledger is None else [Path(rules.second_ledger)]
    files = [p for place in places for p in sorted(place.rglob("*")) if p.name in FILES]
    try:
        sealed = "seal" in read_about(folder)["data"]
    except (FileNotFoundError, SettingsError):  # what cannot be opened may be another secret's
        sealed = seal is not None
    if seal is None:
        if sealed and files:
            raise SettingsError(f"{folder} is sealed: give --seal with the secret that sealed it.")
        return 0
    disk, done = SealedDisk(read_seal(seal)), 0
    for path in files:
        try:
            disk.read(path)
        except SettingsError:
            if sealed:
                raise
            write_atomic(path, path.read_bytes(), disk)
            done += 1
    return done


def write_site(
    folder: Path,
    data: Mapping[str, Any],
    rules: SiteRules,
    columns: list[str] | None,
    masks: tuple[Path, Path] | None = None,
) -> None:
    """Leave what the site's program needs, in a form that is quick to read for every message.

    ``masks`` are the site's private key and its folder of everybody's public keys.
    """
    about = {
        "masks": None if masks is None else [str(path.resolve()) for path in masks],
        "data": dict(data),
        "columns": columns,
        "rules": asdict(rules),
    }
    write_atomic(folder / "site.json", (json.dumps(about, indent=1) + "\n").encode())


def read_about(folder: Path) -> dict[str, Any]:
    """What `write_site` wrote."""
    path = folder / "site.json"
    try:
        about = dict(read_json_file(path))
        if not isinstance(about["data"], dict) or not isinstance(about["rules"], dict):
            raise TypeError
    except (ValueError, TypeError, KeyError):
        raise SettingsError(
            f"{path} is damaged: `emfed join` writes it anew when it is started."
        ) from None
    return about


def open_site(folder: Path) -> Site:
    """The site that `write_site` described."""
    about = read_about(folder)
    site = Site(
        read_rows(about["data"]),
        folder / MEMORY,
        rules=SiteRules(**about["rules"]),
        journal=folder / JOURNAL,
        columns=about["columns"],
        device=about["data"].get("device"),
        disk=_disk(about["data"]),
        identity=None
        if about.get("masks") is None
        else SiteIdentity.read(*map(Path, about["masks"])),
    )
    site.delivered = folder / MODEL
    if site.rules.ask_first:
        site.approve = partial(check_approved, folder)
    return site


def erase_site(folder: Path) -> int:
    """Remove the copy of the rows and all that follows from them; returns the number of runs.

    The journal, which holds no value of any row, stays, and so do the counts of what servers have
    spent and the site's secret: a site that erased rows is no new one to them.
    """
    if not (folder / "site.json").exists():
        raise SettingsError(f"{folder} is no site's folder.")
    with alone(folder / "join.lock") as mine:
        if not mine:
            raise SettingsError(f"`emfed join` works in {folder}: stop it first.")
        memory = folder / MEMORY
        runs = runs_in(memory)
        for path in runs:
            for left in path.iterdir():
                _overwrite(left)
            path.rmdir()
        for name in ("rows.npy", ".rows.npy.new", REHEARSAL, "memory/described"):
            _overwrite(folder / name)
        words = f"the owner erased rows: the memory of {len(runs)} runs is gone"
        Journal(folder / JOURNAL).write(kind="erased", run="", round=None, bytes=0, content=words)
    return len(runs)


def _overwrite(path: Path) -> None:
    """Remove a file, after its blocks were written over where the disk writes in place."""
    if path.is_file():
        with path.open("r+b") as file:
            for _ in range(0, path.stat().st_size, 1 << 20):
                file.write(bytes(1 << 20))
            file.flush()
            os.fsync(file.fileno())
        path.unlink()


def read_rows(about: Mapping[str, Any]) -> Any:
    """A Parquet file where it is, or rows that were prepared, memory-mapped."""
    if "parquet" in about:
        found = as_workers({"site": ParquetRows(about["parquet"], about["columns"])})
    else:
        sealed = _disk(about).read(Path(about["rows"])) or b"" if "seal" in about else None
        try:
            if sealed is None:
                rows = np.load(about["rows"], mmap_mode="r")
            else:
                rows = np.load(io.BytesIO(sealed))
        except (ValueError, EOFError):
            raise DataError(
                f"{about['rows']} is damaged: `emfed join` makes it anew when it is started."
            ) from None
        found = WorkerData(rows, np.array([0, len(rows)]), ["site"], tuple(about["columns"]))
    return of_file(found, about.get("first_line"), about.get("left_out"))


def look_first(folder: Path, message: bytes) -> bytes:
    """Answer nothing but "not now", and leave in ``dry-run.jsonl`` what would have been sent.

    The server's hello names the model and the columns; what follows is rehearsed here, as a fit
    with no settings.
    """
    refusal = encode_refusal(Reason.NOT_NOW, "the owner is looking first.")
    answer = seal_refusal(message, refusal)
    if is_short(message) or kind_of(message) is not Kind.HELLO:
        return answer
    about, hello = read_about(folder), decode_text(peek(message)[1])
    rules, rows = SiteRules(**about["rules"]), read_rows(about["data"])
    try:
        hidden = hello.get("masks") is True or privacy_of(hello) is not None
        check_ask(rules, hello.get("model"), rows, hidden)
        lines = rehearse(
            build_model(hello.get("model")),
            AutoEM(),
            rows,
            rules=rules,
            columns=hello.get("columns") or about["columns"],
            listed=about["columns"],
            scores=True,
        )
    except (EmfedError, Refusal) as error:  # other columns than the run's, or an impossible ask
        lines = [{"kind": "refusal", "bytes": 0, "content": str(error)}]
    words = "that was the rehearsal, and nothing but a refusal was sent"
    if hello.get("masks") is True:
        words += "; in this run such numbers leave masked, as parts of sums over all sites"
    lines.append({"kind": "end", "content": words})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_atomic(folder / REHEARSAL, text.encode())
    return answer


def describe(entry: Mapping[str, Any]) -> str:
    """A line of the journal in words; only replies belong to a round."""
    number = entry["round"]  # journals of older releases have one on every line
    in_round = entry["kind"] in ("reply", "masked") and (number or FIRST_QUESTION) < FIRST_QUESTION
    when = f", round {number}" if in_round else ""
    return f"{entry['kind']}{when}, {entry['bytes']} bytes: {entry['content']}"
