"""``python -m benchmarks.peers KIND PORT FOLDER NAME...``: sites of the benchmark of the network.

``websocket`` and ``grpc`` answer every question with a few bytes; ``site`` is a real `Site` on
FOLDER/NAME.parquet that notes how long each of its steps took; ``sites`` are many of them.
"""

from __future__ import annotations

import asyncio
import sys
import time
from pathlib import Path

import polars as pl

import emfed
from emfed.network import SiteRules
from emfed.network.addresses import terminated_as_interrupted
from emfed.network.masking import SiteIdentity
from emfed.network.websocket.client import SiteConnection

ANSWER = b"a" * 17


def connection(port: int, folder: Path, name: str) -> SiteConnection:
    """A site that answers with a few bytes."""
    return SiteConnection(
        f"127.0.0.1:{port}",
        lambda question: ANSWER,
        key=folder / f"{name}.key",
        authority=folder / "keys" / "ca.pem",
        proxy=None,
    )


async def crowd(port: int, folder: Path, names: list[str], real: bool = False) -> None:
    """Many sites in one event loop."""
    sites = [connection(port, folder, name) for name in names]
    for line, name in zip(sites, names, strict=True):
        if real:
            table = pl.read_parquet(folder / f"{name}.parquet").to_numpy()
            rules = SiteRules.loosest()
            line._step = emfed.network.Site(table, folder / f"site-{name}", rules=rules).step
    await asyncio.gather(*(site._stay(lambda kind, words: None) for site in sites))


def real(port: int, folder: Path, name: str) -> None:
    """One site that computes."""
    table, rules = pl.read_parquet(folder / f"{name}.parquet"), SiteRules.loosest()
    identity = SiteIdentity.read(folder / f"{name}.key", folder / "keys" / "sites")
    site = emfed.network.Site(table, folder / f"site-{name}", rules=rules, identity=identity)
    log = (folder / f"{name}.steps").open("a", encoding="utf-8", buffering=1)

    def step(question: bytes) -> bytes:
        began = time.perf_counter()
        answer = site.step(question)
        log.write(f"{time.perf_counter() - began:.6f}\n")
        return answer

    line = connection(port, folder, name)
    line._step = step
    line.run()


def main() -> None:
    """Answer until told to end."""
    kind, port, folder = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    names = sys.argv[4:]
    try:
        with terminated_as_interrupted():
            if kind == "site":
                real(port, folder, names[0])
            elif kind == "grpc":
                from benchmarks.grpc_peer import answer_all

                asyncio.run(answer_all(port, folder, names))
            else:
                asyncio.run(crowd(port, folder, names, kind == "sites"))
    except KeyboardInterrupt:
        pass


if __name__ == "__main__":
    main()
