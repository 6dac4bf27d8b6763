"""10,000 workers in two Ray actors beside the same in this process, stacked, on one thread.

A tied mixture with K=10, d=20 (q = 210), 1,000 rows a worker in double precision (1.6 GB, a
memory-mapped file), everyone active, mini-batches of b=200. Both run at the same time, each in a
process of its own, and make rounds in turn, so that noise hits both alike. Processor seconds are
those of the longest path: of the driver, and of the busiest actor.

Memory is the proportional set size (PSS) of a process and all its children, pages of the file
included: shared pages are counted once. Its peak is looked for from the start on, but not in the
rounds that are timed, since looking takes a processor that the two actors need; some rounds more
follow for it.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np

N, ROWS, D, K, B, ACTORS = 10_000, 1000, 20, 10, 200, 2
LAST = 5
"""Rounds for memory alone."""


def family(process: int) -> list[int]:
    """A process and all its descendants."""
    parents: dict[int, int] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                status = (entry / "stat").read_text()
            except OSError:
                continue
            parents[int(entry.name)] = int(status.rpartition(")")[2].split()[1])
    found, more = {process}, {process}
    while more := {p for p, parent in parents.items() if parent in more} - found:
        found |= more
    return sorted(found)


def pss(process: int) -> int:
    """Bytes of a process; pages shared by n processes count for 1/n."""
    try:
        text = Path(f"/proc/{process}/smaps_rollup").read_text()
    except OSError:
        return 0
    line = next((x for x in text.splitlines() if x.startswith("Pss:")), "Pss: 0 kB")
    return int(line.split()[1]) * 1024


class Watch:
    """The largest PSS of a process with its children, and how it was made up then."""

    def __init__(self, process: int, every: float = 0.1) -> None:
        self.peak, self.parts = 0, dict[int, int]()
        self.looking = True
        self._process, self._every, self._over = process, every, threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._over.wait(self._every):
            if not self.looking:
                continue
            parts = {p: pss(p) for p in family(self._process)}
            if sum(parts.values()) > self.peak:
                self.peak, self.parts = sum(parts.values()), parts

    def end(self) -> None:
        self._over.set()
        self._thread.join()


def draw(path: Path) -> None:
    """The rows of all workers, into a file."""
    rng = np.random.default_rng(0)
    centres = 2 * rng.standard_normal((K, D))
    rows = np.lib.format.open_memmap(path, "w+", np.float64, (N * ROWS, D))
    for start in range(0, len(rows), 100_000):
        part = rng.standard_normal((min(100_000, len(rows) - start), D))
        rows[start : start + len(part)] = part + centres[rng.integers(K, size=len(part))]


def used(process: int) -> float:
    """Processor seconds of a process so far."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def serve(kind: str, path: str) -> None:
    """The process that is measured: makes a round for each line that it reads."""
    import emfed

    rows = np.load(path, mmap_mode="r")
    data = emfed.data.WorkerData(rows, np.arange(0, N * ROWS + 1, ROWS))
    if kind == "stacked":
        federation: Any = emfed.network.StackedFederation(data)
    else:
        federation = emfed.network.RayFederation(data, actors=ACTORS)
    run = emfed.fitting.open_run(
        emfed.gaussian_mixture(K, "tied"),
        federation,
        emfed.FedEM(emfed.Dithering(4), step_size=0.1, batch_size=B),
        tol=0,
    )
    actors = list(getattr(federation, "processes", ()))
    print(json.dumps({"actors": actors}), flush=True)
    for _ in sys.stdin:
        before = [used(p) for p in (os.getpid(), *actors)]
        began = time.perf_counter()
        run.step()
        told = {"seconds": time.perf_counter() - began, "sum": float(run.statistics.sum())}
        gained = [used(p) - b for p, b in zip((os.getpid(), *actors), before, strict=True)]
        told["processor"] = gained[0] + max(gained[1:], default=0.0)
        print(json.dumps(told), flush=True)
    federation.close()


class Program:
    """A process that makes rounds when it is told to."""

    def __init__(self, kind: str, path: Path) -> None:
        script = f"from benchmarks.cluster import serve; serve({kind!r}, {str(path)!r})"
        self.process = subprocess.Popen(
            [sys.executable, "-c", script],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=one_thread(),
        )
        self.watch = Watch(self.process.pid)
        self.times: list[float] = []
        self.processor: list[float] = []
        self.ends: list[float] = []
        self.actors: list[int] = self._read()["actors"]

    def _read(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        while line and not line.startswith("{"):  # what Ray prints
            line = self.process.stdout.readline()
        return json.loads(line)

    def round(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        told = self._read()
        self.times.append(told["seconds"])
        self.processor.append(told["processor"])
        self.ends.append(told["sum"])

    def end(self) -> None:
        assert self.process.stdin is not None
        self.watch.end()
        self.process.stdin.close()
        self.process.wait()


def one_thread() -> dict[str, str]:
    """An environment in which linear algebra has one thread; actors have one anyway."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    return os.environ | dict.fromkeys(names, "1")


def bench_cluster(rounds: int = 21) -> dict[str, Any]:
    """Rounds in turn; medians and minima of their times, and peaks of memory in others."""
    with tempfile.TemporaryDirectory() as folder:
        paths = {kind: Path(folder) / f"{kind}.npy" for kind in ("stacked", "ray")}
        draw(paths["stacked"])  # a file each: PSS halves what two programs share
        shutil.copyfile(paths["stacked"], paths["ray"])
        programs = {kind: Program(kind, path) for kind, path in paths.items()}
        try:
            for index in range(1 + rounds + LAST):
                for program in programs.values():
                    program.watch.looking = not 1 <= index <= rounds
                for program in programs.values():
                    program.round()
            return compare(programs["stacked"], programs["ray"], rounds)
        finally:
            for program in programs.values():
                program.end()


def compare(stacked: Program, ray: Program, rounds: int) -> dict[str, Any]:
    """Figures of both, and their ratios; the first round warms up."""
    out: dict[str, Any] = {}
    timed = slice(1, 1 + rounds)
    for name, program in (("stacked", stacked), ("ray", ray)):
        out[name] = {
            "median_seconds": float(np.median(program.times[timed])),
            "best_seconds": min(program.times[timed]),
            "processor_seconds": float(np.median(program.processor[timed])),
            "peak_bytes": program.watch.peak,
        }
    others = {p: size for p, size in ray.watch.parts.items() if p not in ray.actors}
    others.pop(ray.process.pid, None)
    out["ray"]["own_bytes"] = sum(others.values())
    ratios = np.array(ray.times[timed]) / np.array(stacked.times[timed])
    out["ratio_of_times"] = float(np.median(ratios))
    for name in ("best_seconds", "processor_seconds", "peak_bytes"):
        out[f"ratio_of_{name}"] = out["ray"][name] / out["stacked"][name]
    out["largest_difference"] = float(np.abs(np.subtract(ray.ends, stacked.ends)).max())
    return out
