"""A whole deployment on this machine: ``emfed serve`` and ``emfed join`` as processes, over TLS.

Used by the tests, by ``make chaos`` and by the benchmark of the network.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl

import emfed
from emfed.artifacts.result import Result
from emfed.data.held import HeldWorkers
from emfed.deployment.config import Config, read_config
from emfed.deployment.status import read_status
from emfed.fitting.in_process import fit
from emfed.network.addresses import free_port
from emfed.network.keys import add_site, make_server_keys, make_site_key
from emfed.network.roster import pin_keys

MIXTURE = '[model]\nkind = "gaussian-mixture"\nn_components = 2\n'
"""What a run.toml of a trial begins with."""
COMMAND = [sys.executable, "-c", "from emfed.cli.main import main; main()"]


class Deployment:
    """One server and some sites, in one folder; a context that leaves no process behind."""

    def __init__(self, folder: Path, tables: Mapping[str, pl.DataFrame], config: str) -> None:
        self.folder, self.tables = folder.resolve(), dict(tables)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = self.called = free_port()
        """Where the server listens, and where sites call: a door between them may be elsewhere."""
        self.keys = self.folder / "keys"
        make_server_keys(self.keys, ["127.0.0.1"])
        columns = json.dumps(list(next(iter(self.tables.values())).columns))
        place = f'port = {self.port}\nkeys = "{self.keys}"\nreport = false\n'
        text = config.replace("[sites]\n", f"[sites]\ncolumns = {columns}\n")
        (self.folder / "run.toml").write_text(f"{text}\n[server]\n{place}", encoding="utf-8")
        self.config: Config = read_config(self.folder / "run.toml")
        for name, table in self.tables.items():
            table.write_parquet(self.folder / f"{name}.parquet")
            _, public = make_site_key(self.folder, name)
            add_site(self.keys, public)
            pin_keys([public], self.folder / "roster")
        self._processes: dict[str, subprocess.Popen[bytes]] = {}

    def __enter__(self) -> Deployment:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(signal.SIGTERM)
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(20)
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def spawn(self, name: str, *arguments: str) -> subprocess.Popen[bytes]:
        """A command of ours, its output in NAME.out."""
        with (self.folder / f"{name}.out").open("ab") as out:
            process = subprocess.Popen(
                [*COMMAND, *arguments],
                cwd=self.folder,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={
                    **os.environ,
                    "PYTHONPATH": str(Path(emfed.__file__).parents[1]),
                    "EMFED_DEPLOYMENT": str(self.folder),
                    "OMP_NUM_THREADS": "1",
                },
            )
        self._processes[name] = process
        return process

    def serve(self) -> subprocess.Popen[bytes]:
        """Start the server."""
        return self.spawn("serve", "serve", "run.toml")

    def join(self, name: str, *more: str) -> subprocess.Popen[bytes]:
        """Start a site."""
        return self.spawn(
            name,
            *("join", f"127.0.0.1:{self.called}", "--data", f"{name}.parquet"),
            *("--ca", str(self.keys / "ca.pem"), "--key", f"{name}.key"),
            *more,
        )

    def start(self) -> None:
        """Start all of it."""
        self.serve()
        for name in self.tables:
            self.join(name)

    def output(self, name: str) -> str:
        """What a command of ours has said."""
        path = self.folder / f"{name}.out"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def pids(self) -> list[int]:
        """Processes of this deployment."""
        found, mark = [], b"EMFED_DEPLOYMENT=" + os.fsencode(self.folder) + b"\0"
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                with contextlib.suppress(OSError):
                    if mark in (entry / "environ").read_bytes():
                        found.append(int(entry.name))
        return found

    def process(self, who: str) -> subprocess.Popen[bytes]:
        """That of ``serve`` or ``join NAME``; started again if it has ended, as by an init system.

        A server that has finished stays so.
        """
        site = who.partition(" ")[2]
        process = self._processes[site or who]
        if process.poll() is None or (not site and process.returncode == 0):
            return process
        return self.join(site) if site else self.serve()

    def kill(self, who: str) -> bool:
        """kill -9 of ``serve`` or ``join NAME``, which is started again, as by an init system."""
        site = who.partition(" ")[2]
        process = self._processes[site or who]
        if process.poll() is not None:
            return False
        process.kill()
        process.wait()
        if site:
            self.join(site)
        else:
            self.serve()
        return True

    def stop(self, name: str) -> None:
        """Ask ``serve`` or a site to end, and wait for that."""
        process = self._processes[name]
        process.send_signal(signal.SIGTERM)
        process.wait(30)

    @property
    def status(self) -> dict[str, Any]:
        """What the server's program last said."""
        return read_status(self.config.place("folder"))

    def wait_for_round(self, number: int, seconds: float) -> None:
        """Until a round is over, or the run."""
        end = time.monotonic() + seconds
        while (self.status.get("round") or 0) < number and self.status.get("state") != "finished":
            self._check(end, f"round {number}")
            time.sleep(0.1)

    def wait(self, seconds: float, codes: tuple[int, ...] = (0,)) -> dict[str, Any]:
        """Until ``emfed serve`` ends well; its summary.

        Code 3 is a run that left a model and has doubts about it.
        """
        end = time.monotonic() + seconds
        while self._processes["serve"].poll() is None:
            self._check(end, "the end")
            time.sleep(0.1)
        assert self._processes["serve"].returncode in codes, self.output("serve")
        text = (self.config.place("output") / "summary.json").read_text(encoding="utf-8")
        return dict(json.loads(text))

    def _check(self, end: float, what: str) -> None:
        if time.monotonic() > end:
            said = {name: self.output(name)[-400:] for name in self._processes}
            known = {name: told for name, told in self.status.items() if name != "history"}
            raise TimeoutError(f"waited for {what}; {known}; {said}")

    def here(self, seed: int) -> Result:
        """The same fit in this process, from the seed that its members agreed on."""
        masks = self.config.masked()
        settings = self.config.settings.but(scores=False, seed=seed, masks=masks, seconds=None)
        return fit(settings, HeldWorkers(emfed.data.as_workers(self.tables))).result


def difference(summary: Mapping[str, Any], result: Result) -> float:
    """The largest difference of any parameter, relative to the largest of its kind."""
    worst = 0.0
    for name, values in result.params.arrays().items():
        there = np.asarray(summary["parameters"][name])
        worst = max(worst, float(np.abs(there - values).max() / max(1.0, np.abs(values).max())))
    return worst


def mixture_tables(sites: int, rows: int = 60, columns: int = 2) -> dict[str, pl.DataFrame]:
    """Sites that see a mixture of two, each from a place of its own."""
    names = [f"x{j}" for j in range(columns)]
    tables = {}
    for i in range(sites):
        source = np.random.Generator(np.random.Philox(key=17 + i))
        centre = np.where(source.random((rows, 1)) < 0.4, -2.0, 2.0)
        values = centre + source.standard_normal((rows, columns)) + 0.3 * i
        tables[f"s{i}"] = pl.DataFrame(values, schema=names)
    return tables
