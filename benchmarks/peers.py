"""``python -m benchmarks.peers KIND PORT FOLDER NAME...``: sites of the benchmark of the network.

``websocket`` and ``grpc`` answer every message with a few bytes; ``sites`` are real ones on
FOLDER/NAME.parquet, each in threads of its own, that note when their passes over rows began and
ended.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any
from unittest.mock import patch

import polars as pl

from emfed.network import SiteRules, join
from emfed.network.addresses import terminated_as_interrupted
from emfed.network.exchange import member_thread
from emfed.network.exchange.member_line import MemberLine

ANSWER = b"a" * 17


async def crowd(port: int, folder: Path, names: list[str]) -> None:
    """Many sites in one event loop, which answer with a few bytes."""

    def line(name: str) -> MemberLine:
        found = MemberLine(
            f"127.0.0.1:{port}",
            lambda question: found.send(ANSWER),
            lambda: None,
            key=folder / f"{name}.key",
            authority=folder / "keys" / "ca.pem",
            proxy=None,
        )
        return found

    await asyncio.gather(*(line(name)._stay(lambda kind, words: None) for name in names))


class TimedPasses(ThreadPoolExecutor):
    """Notes when each pass began and ended, on the clock of this machine."""

    def __init__(self, log: Path) -> None:
        super().__init__(1)
        self._log = log.open("a", encoding="utf-8", buffering=1)

    def submit(self, work: Callable[[], Any], *arguments: Any, **named: Any) -> Future[Any]:
        def timed() -> None:
            began = time.perf_counter()
            work()
            self._log.write(f"{began:.6f} {time.perf_counter():.6f}\n")

        return super().submit(timed)


def real(port: int, folder: Path, names: list[str]) -> None:
    """Sites that follow fits, until this process is told to end."""
    make, stop = member_thread.MemberThread.__init__, threading.Event()

    def timed(self: Any, path: Path, *more: Any) -> None:
        make(self, path, *more)
        name = path.parents[1].name.removeprefix("site-")
        self._passes = TimedPasses(folder / f"{name}.passes")

    def site(name: str) -> None:
        join(
            f"127.0.0.1:{port}",
            pl.read_parquet(folder / f"{name}.parquet"),
            folder / f"site-{name}",
            key=folder / f"{name}.key",
            ca=folder / "keys" / "ca.pem",
            roster=folder / "keys" / "sites",
            rules=SiteRules.trusting(spare_rows=None, smallest_component=None),
            stop=stop,
        )

    with patch.object(member_thread.MemberThread, "__init__", timed):
        threads = [threading.Thread(target=site, args=(name,)) for name in names]
        for thread in threads:
            thread.start()
        try:
            for thread in threads:
                thread.join()
        finally:
            stop.set()


def main() -> None:
    """Answer until told to end."""
    kind, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    names = sys.argv[4:]
    try:
        with terminated_as_interrupted():
            if kind == "sites":
                real(port, folder, names)
            elif kind == "grpc":
                from benchmarks.grpc_peer import answer_all

                asyncio.run(answer_all(port, folder, names))
            else:
                asyncio.run(crowd(port, folder, names))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
