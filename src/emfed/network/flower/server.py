"""The server's program under Flower: `emfed.fitting.serving.serve` over a `GridTransport`."""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from emfed.core.errors import EmfedError, ParticipationError, SettingsError
from emfed.core.records import RoundRecord
from emfed.core.storage import remove_torn
from emfed.fitting.serving import Served, serve
from emfed.fitting.settings import ROUNDS
from emfed.network.flower.config import Config, read_config
from emfed.network.flower.transport import GridTransport

logger = logging.getLogger(__name__)
CONFIG = "EMFED_CONFIG"
MODEL = "model.emfed"
STATUS, LOCK, HOST_LOCK = "status.json", "server.lock", "host.lock"
HOST = "EMFED_HOST"
"""The environment variable that names the ``emfed serve`` that started us: see `orphaned`."""


def server_app(config: str | Path | None = None) -> ServerApp:
    """See `emfed.network.flower.make_server_app`."""

    def main(grid: Grid, context: Context) -> None:
        given = config or os.environ.get(CONFIG)
        if not given:
            raise SettingsError("which run? Give make_server_app the path of a configuration.")
        run_server(grid, read_config(given))

    app = ServerApp()
    app.main()(main)
    return app


KEPT = ("round", "up", "down", "refusals")
"""What a program that goes on takes over from the status of the one before."""


class Status:
    """Where the run stands, in a file that is always whole; ``emfed status`` reads it."""

    def __init__(self, folder: Path) -> None:
        self._path = folder / STATUS
        before = read_status(folder)
        self._content: dict[str, Any] = {"pid": os.getpid()}
        self._content |= {name: before[name] for name in KEPT if name in before}

    def __getitem__(self, name: str) -> Any:
        return self._content.get(name, 0)

    def say(self, state: str, **more: Any) -> None:
        """Write what changed."""
        self._content |= {"state": state, "time": time.time(), **more}
        beside = self._path.with_suffix(".new")
        beside.write_text(json.dumps(self._content) + "\n", encoding="utf-8")
        beside.replace(self._path)


def read_status(folder: Path) -> dict[str, Any]:
    """What the server's program last said; nothing if it never spoke."""
    try:
        content = json.loads((folder / STATUS).read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError):
        return {}
    return content if isinstance(content, dict) else {}


GLANCE = 1.0
"""Seconds: others hold a lock for a moment, to see whether we live."""


@contextlib.contextmanager
def alone(
    path: Path, patience: float = 0.0, waiting: Callable[[], None] | None = None
) -> Iterator[bool]:
    """Whether nobody else holds this lock, after so many seconds at most; if so, hold it.

    ``waiting`` is called once, if somebody holds it for more than a glance.
    """
    began = time.monotonic()
    with path.open("a") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                waited = time.monotonic() - began
                if waited >= patience:
                    yield False
                    return
                if waiting is not None and waited > GLANCE:
                    waiting()
                    waiting = None
                time.sleep(0.1)
        yield True


def orphaned(folder: Path, host: str) -> bool:
    """Whether the ``emfed serve`` of that name is gone, or another one has taken its place."""
    with alone(folder / HOST_LOCK) as gone:
        pass
    return gone or (folder / HOST_LOCK).read_text(encoding="utf-8") != host


def _end_with_host(folder: Path, host: str) -> None:
    """End at once when orphaned: we hold a lock that the next ``emfed serve`` waits for.

    What was reached is on disk. (A signal at our parent's death would not do: that is Flower's
    executor, which may be killed and come back while we go on.)
    """
    while not orphaned(folder, host):
        time.sleep(1.0)
    logger.warning("`emfed serve` is gone; the server's program ends with it")
    os._exit(1)


def run_server(grid: Grid, config: Config) -> None:
    """Fit, from the beginning or from where an earlier process was killed."""
    folder = config.place("folder")
    folder.mkdir(parents=True, exist_ok=True)
    log_to(folder / "logs" / "server.log")

    def waiting() -> None:
        logger.warning("waiting for the other process that works in %s to end", folder)

    with alone(folder / LOCK, 3.0, waiting) as mine:
        if not mine:
            raise EmfedError(f"another server works in {folder}.")
        status = Status(folder)
        if host := os.environ.get(HOST):
            threading.Thread(target=_end_with_host, args=(folder, host), daemon=True).start()
        try:
            transport = GridTransport(grid)
            transport.refusals.update(status["refusals"] or {})
            served = _fit(transport, config, status)
            crossed = {"up": transport.received, "down": transport.sent}
            save_fit(config.place("output"), served, crossed)
            status.say(
                "finished",
                stopped=served.result.stopped,
                round=served.rounds,
                refusals={**transport.refusals, **served.refusals},
                stages=served.stage,
                up=served.bytes_up,
                down=served.bytes_down,
            )
        except EmfedError as error:
            logger.exception("the run cannot go on")
            status.say("failed", error=str(error))
            raise
        except Exception:  # of the network, say: whoever watches over us starts us again
            logger.exception("the server's program ends")
            raise


def log_to(path: Path) -> None:
    """What the library says goes to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    ours = logging.getLogger("emfed")
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)


def _fit(transport: GridTransport, config: Config, status: Status) -> Served:
    """`serve`, again and again while there are too few sites, for as long as the user said."""
    sites, settings = config.sites, config.settings
    began = time.monotonic()
    _gather(transport, config, status)
    status.say("running", rounds=settings.rounds or ROUNDS)

    def show(record: RoundRecord) -> None:
        nonlocal began
        began = time.monotonic()
        status.say(
            "running",
            round=record.round,
            squared_H=record.squared_H,
            answered=record.answered,
            asked=record.asked,
            seconds=record.seconds,
            refusals=dict(transport.refusals),
            up=status["up"] + record.bytes_up,
            down=status["down"] + record.bytes_down,
        )

    while True:
        try:
            return serve(
                settings,
                None,
                transport,
                config.place("folder") / "fit",
                minimum=sites.fewest,
                deadline=sites.deadline,
                attempts=sites.attempts,
                admit=sites.admit,
                callbacks=[show],
            )
        except ParticipationError as error:
            if time.monotonic() - began > sites.give_up:
                raise
            logger.warning("%s", error)
            status.say("waiting", why=str(error), refusals=dict(transport.refusals))
            time.sleep(min(5.0, sites.deadline))


def _gather(transport: GridTransport, config: Config, status: Status) -> None:
    """Wait until those expected are there, or long enough and there are enough."""
    sites, began = config.sites, time.monotonic()
    while True:
        here = transport.workers()
        status.say("waiting", online=here, why=f"{len(here)} of {sites.expected} sites are here")
        waited = time.monotonic() - began
        if len(here) >= sites.expected or (waited > sites.wait and len(here) >= sites.fewest):
            return
        if (config.place("folder") / "fit").exists() and len(here) >= sites.fewest:
            return  # a run that goes on knows its sites
        if waited > sites.give_up:
            raise ParticipationError(
                f"after {waited:.0f} s {len(here)} sites are here; {sites.fewest} are needed."
            )
        time.sleep(0.5)


def save_fit(folder: Path, served: Served, crossed: dict[str, int]) -> None:
    """Leave the model file, records and bytes where the user asked for them.

    ``crossed`` are the bytes that Flower was handed since this process started. Bytes up and down
    are those of all stages, ``bytes`` by kind those of the last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_torn(folder, (MODEL,))
    result = served.result
    result.save(folder / MODEL)
    result.records.to_csv(folder / "rounds.csv")
    summary = {
        "rounds": served.rounds,
        "stages": served.stage,
        "stopped": result.stopped,
        "refusals": dict(served.refusals),
        "squared_H": result.records[-1].squared_H,
        "bytes_up": served.bytes_up,
        "bytes_down": served.bytes_down,
        "bytes": result.ledger.summary(),
        "crossed": crossed,
        "parameters": {name: value.tolist() for name, value in result.params.arrays().items()},
    }
    text = json.dumps(summary, indent=1) + "\n"
    (folder / "summary.json").write_text(text, encoding="utf-8")
