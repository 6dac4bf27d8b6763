"""Sites in processes of their own, which reach a relay in this one over TLS."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from emfed.data import as_workers
from emfed.deployment.live import with_names
from emfed.network import keys, listen
from emfed.network.listening import ListeningSites

SITE = """
import sys
from pathlib import Path
import numpy as np
import polars as pl
from emfed.network import SiteRules, join
name, address, folder = sys.argv[1:]
data = np.load(f"{folder}/{name}.data.npy")
columns = Path(f"{folder}/{name}.data.columns").read_text().splitlines()
table = pl.DataFrame(data, schema=columns) if columns else data
places = {"key": f"{folder}/{name}.key", "ca": f"{folder}/keys/ca.pem"}
rules = SiteRules.trusting(spare_rows=None, smallest_component=None)
join(address, table, f"{folder}/site-{name}", roster=f"{folder}/keys/sites", rules=rules, **places)
"""


def start_site(
    name: str, address: str, folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.Popen[bytes]:
    """A site that follows what it is asked to, until it is killed."""
    return subprocess.Popen(
        [sys.executable, "-c", SITE, name, address, str(folder)],
        stderr=subprocess.DEVNULL,
        env=os.environ | dict(environment or {}),
    )


@contextlib.contextmanager
def real_sites(
    data: Mapping[str, Any],
    folder: Path,
    children: dict[str, Any] | None = None,
    environments: Mapping[str, Mapping[str, str]] | None = None,
) -> Iterator[ListeningSites]:
    """One process for each table, with keys and TLS, whose owners allow everything.

    ``children`` is filled with the processes.
    """
    make_keys(list(data), folder)
    for name, table in data.items():
        save_table(name, table, folder)
    columns = with_names(as_workers([next(iter(data.values()))]), None).columns
    children = {} if children is None else children
    with listen("127.0.0.1:0", keys=folder / "keys", columns=columns) as sites:
        for name in data:
            own = (environments or {}).get(name)
            children[name] = start_site(name, f"127.0.0.1:{sites.port}", folder, own)
        try:
            sites.wait_for(len(data), 60.0)
            yield sites
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
