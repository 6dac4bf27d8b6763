"""Sites in processes of their own, which reach a server in this one over TLS."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from emfed.network import keys
from emfed.network.websocket import listen

SITE = """
import sys
from pathlib import Path
import numpy as np
import polars as pl
from emfed.network import SiteRules
from emfed.network.websocket import join
name, address, folder = sys.argv[1:]
path = f"{folder}/{name}.data"
data = np.load(path + ".npy")
columns = open(path + ".columns").read().splitlines()
table = pl.DataFrame(data, schema=columns) if columns else data
key, ca = f"{folder}/{name}.key", f"{folder}/keys/ca.pem"
masked = Path(f"{folder}/masked").exists()  # by default rules, and masks
rules, roster = (None, f"{folder}/keys/sites") if masked else (SiteRules.loosest(), None)
join(address, table, f"{folder}/state-{name}", key=key, ca=ca, rules=rules, roster=roster)
"""


def start_site(name: str, address: str, folder: Path) -> subprocess.Popen[bytes]:
    """A site that answers until it is killed."""
    return subprocess.Popen(
        [sys.executable, "-c", SITE, name, address, str(folder)], stderr=subprocess.DEVNULL
    )


@contextlib.contextmanager
def real_sites(
    data: Mapping[str, Any],
    folder: Path,
    children: dict[str, Any] | None = None,
    masked: bool = False,
) -> Iterator[Any]:
    """The transport that reaches one process for each table, with keys and TLS.

    ``children`` is filled with the processes. Those that are ``masked`` have a roster and no rules
    of their own; others answer everything.
    """
    make_keys(list(data), folder)
    if masked:
        (folder / "masked").touch()
    for name, table in data.items():
        save_table(name, table, folder)
    with listen("127.0.0.1:0", keys=folder / "keys") as transport:
        children = {} if children is None else children
        for name in data:
            children[name] = start_site(name, f"127.0.0.1:{transport.port}", folder)
        try:
            transport.wait_for(len(data), 60.0)
            yield transport
        finally:
            for child in children.values():
                child.kill()
            for child in children.values():
                child.wait()


def save_table(name: str, table: Any, folder: Path) -> None:
    """The rows of a site where its process finds them."""
    np.save(folder / f"{name}.data.npy", np.asarray(table))
    columns = map(str, getattr(table, "columns", ()))
    (folder / f"{name}.data.columns").write_text("\n".join(columns))


def make_keys(names: list[str], folder: Path) -> None:
    """A server's keys, and one for each site."""
    keys.make_server_keys(folder / "keys", [])
    for name in names:
        _, public = keys.make_site_key(folder, name)
        keys.add_site(folder / "keys", public)
