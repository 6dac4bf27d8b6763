"""A relay with an analyst and three sites, each a process of its own, over TLS on this machine."""

from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.artifacts.result import load
from emfed.data import as_workers
from emfed.data.held import HeldWorkers
from emfed.deployment.config import read_config
from emfed.fitting.in_process import fit
from emfed.network.addresses import free_port
from emfed.network.exchange.statements import Entry, StatementKind
from tests.network.processes import make_keys

SITES = ("bergen", "oslo", "tromso")
SECONDS = 120.0
"""For everything, on a machine that does other things, too."""
SCRIPT = Path(__file__).with_name("exchange_process.py")
NAMES = ("size", "texture", "dents")


class Deployment:
    """A folder with keys, rows and settings, and the processes that work in it."""

    def __init__(self, folder: Path, components: int, more: str = "") -> None:
        self.folder, self.port = folder, free_port()
        make_keys(list(SITES), folder)
        rng = np.random.default_rng(5)
        centres = rng.normal(size=(4, 3)) * 2.5
        self.rows = {
            n: rng.normal(size=(150, 3)) + centres[rng.integers(4, size=150)] for n in SITES
        }
        for name, rows in self.rows.items():
            lines = [",".join(NAMES), *(",".join(map(repr, row)) for row in rows.tolist())]
            (folder / f"{name}.csv").write_text("\n".join(lines) + "\n")
        (folder / "run.toml").write_text(
            f'[model]\nkind = "gaussian-mixture"\nn_components = {components}\n{more}'
            f"[sites]\nexpected = 3\ncolumns = {list(NAMES)}\nfarewell = 20.0\n"
            f"[server]\nport = {self.port}\n"
        )
        self.processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, name: str, *rest: str) -> None:
        arguments = rest if name == "serve" else (str(self.port), *rest)
        log = (self.folder / f"{name}.log").open("a")
        self.processes[name] = subprocess.Popen(
            [sys.executable, str(SCRIPT), name, str(self.folder), *arguments],
            stdout=log,
            stderr=log,
            text=True,
        )

    def start_all(self, *serving: str) -> None:
        self.start("serve", *serving)
        for name in SITES:
            self.start(name)

    def kill(self, name: str) -> None:
        self.processes[name].kill()  # SIGKILL
        self.processes[name].wait()

    def kinds(self) -> list[StatementKind]:
        """The entries of the relay's transcript."""
        path = next((self.folder / "run" / "runs").glob("*.sqlite"), None)
        if path is None:
            return []
        with contextlib.suppress(sqlite3.OperationalError):  # it is not whole yet
            file = sqlite3.connect(f"file:{path}?mode=ro", uri=True)
            try:
                rows = file.execute("SELECT data FROM entries ORDER BY place").fetchall()
            finally:
                file.close()
            return [StatementKind(Entry.decode(data).kind) for (data,) in rows]
        return []

    def wait_for_sums(self, count: int) -> None:
        self.until(lambda: self.kinds().count(StatementKind.SUM) >= count)

    def until(self, true: Callable[[], bool]) -> None:
        end = time.monotonic() + SECONDS
        while not true():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.02)

    def ends(self) -> dict[str, int]:
        for process in self.processes.values():
            process.wait(SECONDS)
        return {name: process.returncode for name, process in self.processes.items()}

    def logs(self) -> str:
        return "\n".join(
            f"{path.stem}: {path.read_text()[-1500:]}" for path in self.folder.glob("*.log")
        )

    def statistics(self) -> emfed.Result:
        """The model, which is the same at all."""
        places = [self.folder / "model", *(self.folder / f"site-{name}" for name in SITES)]
        results = [load(place / "model.emfed") for place in places]
        for other in results[1:]:
            assert np.array_equal(results[0].statistics, other.statistics)
        return results[0]

    def simulated(self, seed: int) -> emfed.Result:
        """The same fit in one process, from the seed that the sites agreed on."""
        settings = read_config(self.folder / "run.toml").settings.but(scores=False, seed=seed)
        tables = {name: pl.DataFrame(self.rows[name], schema=list(NAMES)) for name in SITES}
        return fit(settings, HeldWorkers(as_workers(tables))).result


@pytest.fixture
def deployed(tmp_path: Path) -> Iterator[Callable[..., Deployment]]:
    made: list[Deployment] = []

    def make(components: int, more: str = "") -> Deployment:
        made.append(Deployment(tmp_path, components, more))
        return made[-1]

    yield make
    for one in made:
        for process in one.processes.values():
            with contextlib.suppress(OSError):
                process.kill()
            process.wait()


def likelihood(found: emfed.Result, deployment: Deployment) -> float:
    rows = np.concatenate(list(deployment.rows.values()))
    return found.log_likelihood(pl.DataFrame(rows, schema=list(NAMES)))


def test_masked_sites_write_the_model_of_the_simulation(
    deployed: Callable[..., Deployment],
) -> None:
    deployment = deployed(2)
    deployment.start_all()
    assert set(deployment.ends().values()) == {0}, deployment.logs()
    found = deployment.statistics()
    alone = deployment.simulated(found.seed)
    here, there = likelihood(found, deployment), likelihood(alone, deployment)
    assert here == pytest.approx(there, abs=2e-6)
    assert found.converged
    assert found.samples == 450
    assert found.ledger.total("up") == found.ledger.total("down") > 0
    log = (deployment.folder / "serve.log").read_text()
    assert "nats a row" in log
    journal = (deployment.folder / "site-oslo" / "messages.jsonl").read_text()
    assert "statistics of Gaussian mixture" in journal


def test_a_relay_and_a_site_that_are_killed_go_on_where_they_were(
    deployed: Callable[..., Deployment],
) -> None:
    deployment = deployed(4, "[fit]\ntol = 1e-8\n")
    deployment.start_all()
    deployment.wait_for_sums(8)
    deployment.kill("oslo")
    deployment.start("oslo")
    before = deployment.kinds().count(StatementKind.SUM)
    deployment.wait_for_sums(before + 3)
    deployment.kill("serve")
    length = len(deployment.kinds())
    deployment.start("serve")
    assert set(deployment.ends().values()) == {0}, deployment.logs()
    kinds = deployment.kinds()
    assert len(kinds) > length
    assert kinds.count(StatementKind.HELLO) >= 6
    assert StatementKind.CHANGE not in kinds
    found = deployment.statistics()
    alone = deployment.simulated(found.seed)
    here, there = likelihood(found, deployment), likelihood(alone, deployment)
    assert here == pytest.approx(there, abs=2e-6)


def test_a_relay_that_alters_sums_is_noticed_and_leaves_no_model(
    deployed: Callable[..., Deployment],
) -> None:
    deployment = deployed(2)
    deployment.start_all("lie")
    assert set(deployment.ends().values()) == {3}, deployment.logs()
    for name in SITES:
        assert "sums are forged" in (deployment.folder / f"{name}.log").read_text()
        assert not (deployment.folder / f"site-{name}" / "model.emfed").exists()
