"""Our app under Flower's own commands: a SuperLink, stock SuperNodes and ``flwr run``."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path

import emfed
from benchmarks.deployments import difference, mixture_tables
from benchmarks.flower import flower, stock_node
from emfed.deployment.config import read_config
from emfed.fitting.driver import run_fit
from emfed.network.flower.hosting import write_app
from emfed.network.flower.processes import stop_all

CONFIG = """
[model]
kind = "gaussian-mixture"
n_components = 2

[algorithm]
kind = "FedEM"
step_size = 0.5

[privacy]
masks = false

[fit]
tol = 0.0
start = "moments"
rounds = {rounds}

[sites]
expected = 3
minimum = 3

[server]
folder = "{folder}/run"
output = "{folder}/model"
"""


def run_stock(folder: Path, rounds: int = 4, seconds: float = 300) -> dict[str, float]:
    """The app that ``emfed serve --app`` writes, run unchanged; beside a run in one process."""
    app, tables = folder / "app", mixture_tables(3)
    write_app(app)
    (app / "emfed.toml").write_text(CONFIG.format(rounds=rounds, folder=folder), encoding="utf-8")
    children, began = [], time.monotonic()
    with flower(folder, len(tables)) as (link, counter):
        try:
            for number, (name, table) in enumerate(tables.items()):
                rows = folder / f"{name}.parquet"
                table.write_parquet(rows)
                own = f'data="{rows}" folder="{folder}/site-{name}" unmasked=true'
                children.append(stock_node(folder, number, counter.port, own))
                children[-1].start()
            link.control.start_run(app)
            summary = folder / "model" / "summary.json"
            while not summary.exists():
                assert time.monotonic() - began < seconds, "the run did not end"
                time.sleep(0.2)
        finally:
            stop_all(children)
    config = read_config(app / "emfed.toml")
    network = emfed.network.LoopFederation(emfed.data.as_workers(tables))
    here = run_fit(config.settings, network).result
    found = json.loads(summary.read_text(encoding="utf-8"))
    return {"seconds": time.monotonic() - began, "difference": difference(found, here)}


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="emfed-stock-") as name:
        print(json.dumps(run_stock(Path(name))))
