"""A site's folder: its rows in a form that is quick to open, its rules, and what it sent."""

from __future__ import annotations

import io
import json
import os
import tomllib
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import numpy as np

from emfed.core.configuration import check_keys
from emfed.core.errors import DataError, SettingsError
from emfed.core.protocols import FloatArray
from emfed.core.storage import DISK, Disk, read_json_file, write_atomic
from emfed.data import Column, ParquetRows, Schema, Source, WorkerData, read
from emfed.data.files import PLAIN, TextForm
from emfed.data.reader import open_tables
from emfed.data.workers import as_workers, of_file
from emfed.network.addresses import alone
from emfed.network.exchange.frames import is_run
from emfed.network.journal import Journal
from emfed.network.keys import SealedDisk, read_seal
from emfed.network.owner_rules import GONE, SiteRules
from emfed.network.spending import SiteMemory

MODEL, TABLE = "model.emfed", "table.emfed"
"""What a run leaves: a fitted model, or a table that members filled together."""
MEMORY, RUNS, JOURNAL = "memory", "runs", "messages.jsonl"
"""In a site's folder: what it has told and spent, the files of runs, every message that left."""
KEPT = ("answered", "secret", "spent", "company", "described", "fits")
"""The files of its memory."""


def read_rules(path: Path | None) -> SiteRules:
    """The owner's rules from a TOML file, where ``false`` is no limit; the defaults without one."""
    if path is None:
        return SiteRules()
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path}: not a TOML file ({error}).") from None
    known = ["preset", *GONE, *(field.name for field in fields(SiteRules))]
    check_keys(table, known, path.name)
    try:
        return SiteRules.read(table)
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


def disk_of(about: Mapping[str, Any]) -> Disk:
    """Where the site keeps what it must not lose, encrypted if the owner wants that."""
    return SealedDisk(read_seal(Path(about["seal"]))) if "seal" in about else DISK


def seal_files(folder: Path, seal: Path | None, rules: SiteRules) -> int:
    """Encrypt what a site kept before it had a secret; returns how many files that were.

    A folder that is sealed already is refused without its own secret, before any run meets it. (The
    files of runs are sealed as they are opened, see `RecordFile`.)
    """
    places = [folder / MEMORY]
    places += [] if rules.second_ledger is None else [Path(rules.second_ledger)]
    files = [place / name for place in places for name in KEPT if (place / name).is_file()]
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
    _forget_old_runs(folder)
    return done


def _forget_old_runs(folder: Path) -> int:
    """Remove what runs of release 0.1 left: nothing goes on from it."""
    old = [path for path in (folder / MEMORY).glob("*") if path.is_dir()]
    for run in old:
        for left in run.iterdir():
            _overwrite(left)
        run.rmdir()
    return len(old)


def site_memory(folder: Path, about: Mapping[str, Any], rules: SiteRules) -> SiteMemory:
    """What a site has told and spent, over all runs."""
    copies = [] if rules.second_ledger is None else [Path(rules.second_ledger)]
    disk = disk_of(about)
    disk.make_directory(folder / MEMORY)
    return SiteMemory(folder / MEMORY, disk, copies)


def write_site(
    folder: Path, data: Mapping[str, Any], rules: SiteRules, columns: list[str] | None
) -> None:
    """Leave what others of this machine read of a site: where its rows are, and its rules."""
    about = {"data": dict(data), "columns": columns, "rules": asdict(rules)}
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
        runs = [path for path in (folder / RUNS).glob("*.sqlite") if is_run(path.stem)]
        for path in (folder / RUNS).glob("*"):
            _overwrite(path)
        old = _forget_old_runs(folder)
        for name in ("rows.npy", ".rows.npy.new", "memory/described"):
            _overwrite(folder / name)
        words = f"the owner erased rows: what {len(runs) + old} runs left is gone"
        Journal(folder / JOURNAL).write(kind="erased", run="", round=None, bytes=0, content=words)
    return len(runs) + old


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
        sealed = disk_of(about).read(Path(about["rows"])) or b"" if "seal" in about else None
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


def describe(entry: Mapping[str, Any]) -> str:
    """A line of the journal in words."""
    return f"{entry['kind']}, {entry['bytes']} bytes: {entry['content']}"
