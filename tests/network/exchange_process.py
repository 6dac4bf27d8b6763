"""A process of the exchange of sums: ``serve FOLDER`` or ``NAME FOLDER PORT``; a relay may lie."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import polars as pl

from emfed.aggregation.masks import Part
from emfed.core.errors import EmfedError
from emfed.data import as_workers
from emfed.deployment.config import read_config
from emfed.deployment.exchanging import follow_as_site, serve_fit
from emfed.network.exchange.relay import Relay
from emfed.network.exchange.statements import Added, Entry


class LyingRelay(Relay):  # type: ignore[misc]
    """Adds one to the first number of each sum after the fifth."""

    def _added(self) -> Entry:
        entry = super()._added()
        added = Added.decode(entry.added)
        if added.exchange < 5:
            return entry
        part = Part.decode(added.part)
        numbers = bytes([part.numbers[0] ^ 1]) + part.numbers[1:]
        return Entry.sum(replace(added, part=replace(part, numbers=numbers).encode()))


def say(kind: str, words: str) -> None:
    sys.stdout.write(f"{kind}: {words}\n")
    sys.stdout.flush()


def main(name: str, place: str, *rest: str) -> None:
    folder = Path(place)
    if name == "serve":
        make = LyingRelay if "lie" in rest else Relay
        end = serve_fit(read_config(folder / "run.toml"), say, make)
    else:
        end = follow_as_site(
            f"127.0.0.1:{rest[0]}",
            as_workers([pl.read_csv(folder / f"{name}.csv")]),
            folder / f"site-{name}",
            key=folder / f"{name}.key",
            authority=folder / "keys" / "ca.pem",
            roster=folder / "keys" / "sites",
            report=say,
        )
    sys.exit(0 if end.final else 3)


if __name__ == "__main__":
    try:
        main(*sys.argv[1:])
    except EmfedError as error:
        say("error", str(error))
        sys.exit(1)
