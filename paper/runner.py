"""Jobs to files, in this process or in several; a job that has its file is not run again."""

from __future__ import annotations

import contextlib
import functools
import json
import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from pathlib import Path

import numpy as np

from emfed.core.errors import EmfedError
from paper.config import Job, needs_mnist
from paper.jobs import prepare_mnist, run_job, store

Notify = Callable[[Job, float], None]
"""Called with a job and the share of it that is done; 1 once its file is there."""


def run_jobs(jobs: Sequence[Job], folder: Path, processes: int, notify: Notify) -> None:
    """Run what has no file yet. Ctrl-C raises KeyboardInterrupt and leaves whole files only."""
    folder.mkdir(parents=True, exist_ok=True)
    missing = []
    for job in jobs:
        if (folder / job.file).exists():
            notify(job, 1.0)
        else:
            missing.append(job)
    if any(needs_mnist(job.settings) for job in missing):
        prepare_mnist(folder)
    if processes == 1 or len(missing) < 2:
        for job in missing:
            _run_and_store(job, folder, functools.partial(notify, job))
            notify(job, 1.0)
    else:
        _run_in_processes(missing, folder, min(processes, len(missing)), notify)


def _run_and_store(job: Job, folder: Path, report: Callable[[float], None]) -> None:
    from threadpoolctl import threadpool_limits

    began = time.process_time()
    with threadpool_limits(1):
        columns = run_job(job, folder, report)
    # Kept with the job, so that a reproduction in several calls can say what all of it took.
    columns["processor_seconds"] = np.full(len(columns["round"]), time.process_time() - began)
    store(columns, folder / job.file)


def _run_in_processes(jobs: Sequence[Job], folder: Path, processes: int, notify: Notify) -> None:
    """Hand jobs to worker processes, one at a time each, until all are done."""
    waiting = deque(jobs)
    with _workers(processes, folder) as links:
        busy: dict[Connection, Job] = {}
        for link in links:
            _hand(link, waiting, busy)
        while busy:
            for link in [link for link in wait(list(busy)) if isinstance(link, Connection)]:
                job = busy[link]
                try:
                    message = json.loads(link.recv_bytes())
                except (EOFError, ConnectionResetError):
                    raise EmfedError(f"the process of {_title(job)} died: out of memory?") from None
                if "error" in message:
                    raise EmfedError(f"{_title(job)}: {message['error']}")
                notify(job, message.get("share", 1.0))
                if "done" in message:
                    del busy[link]
                    _hand(link, waiting, busy)


def _title(job: Job) -> str:
    return f"{job.experiment}, {job.run}, seed {job.seed}"


def _hand(link: Connection, waiting: deque[Job], busy: dict[Connection, Job]) -> None:
    if waiting:
        busy[link] = waiting.popleft()
        link.send_bytes(busy[link].to_json().encode())


@contextlib.contextmanager
def _workers(count: int, folder: Path) -> Iterator[list[Connection]]:
    """Processes that serve jobs; whatever happens, none is left behind."""
    context = multiprocessing.get_context("spawn")
    links: list[Connection] = []
    processes: list[SpawnProcess] = []
    try:
        for _ in range(count):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(there, str(folder)), daemon=True)
            process.start()
            there.close()  # so that a dead worker shows as the end of its pipe
            links.append(here)
            processes.append(process)
        yield links
    finally:
        for started in processes:
            started.terminate()
        for started in processes:
            started.join()


def _serve(link: Connection, folder: str) -> None:
    """A worker process: jobs come as JSON, shares and errors go back; it ends with its parent."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent hears Ctrl-C and ends us

    def report(share: float) -> None:
        link.send_bytes(json.dumps({"share": share}).encode())

    with contextlib.suppress(EOFError, BrokenPipeError, ConnectionResetError):
        while True:
            job = Job.from_json(link.recv_bytes())
            try:
                _run_and_store(job, Path(folder), report)
                answer: dict[str, object] = {"done": True}
            except (BrokenPipeError, ConnectionResetError):  # the parent is gone
                return
            except Exception as error:
                known = isinstance(error, EmfedError)
                answer = {"error": str(error) if known else f"{type(error).__name__}: {error}"}
            link.send_bytes(json.dumps(answer).encode())
