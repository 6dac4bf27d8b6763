"""A site's end under Flower: one message, one `Site.step`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedem.datasets import WorkerData
from fedem.errors import SettingsError
from fedem.federations.flower.transport import QUERY, unwrap, wrap
from fedem.federations.remote import Site, SiteRules

FOLDER = "FEDEM_SITE_FOLDER"
"""The environment variable that tells the site's program where `write_site` wrote."""
JOURNAL = "messages.jsonl"


def client_app(
    data_loader: Callable[[Context], Any],
    *,
    folder: str | Path | None = None,
    rules: SiteRules | None = None,
) -> ClientApp:
    """See `fedem.federations.flower.make_client_app`."""
    app = ClientApp()

    @app.query(QUERY)
    def answer(message: Message, context: Context) -> Message:
        where = folder or context.node_config.get("folder")
        if not where:
            raise SettingsError(
                "a site needs a folder of its own to keep its memory in: give it to "
                "make_client_app, or as --node-config 'folder=\"...\"'."
            )
        site = Site(
            data_loader(context),
            Path(str(where)) / "memory",
            rules=rules,
            journal=Path(str(where)) / JOURNAL,
        )
        return Message(wrap(site.step(unwrap(message.content))), reply_to=message)

    return app


def write_site(
    folder: Path, data: Mapping[str, Any], rules: SiteRules, columns: list[str] | None
) -> None:
    """Leave what the site's program needs, in a form that is quick to read for every message."""
    about = {
        "data": dict(data),
        "columns": columns,
        "rules": {
            "smallest_rows": rules.smallest_rows,
            "models": None if rules.models is None else list(rules.models),
            "largest_rounds": rules.largest_rounds,
            "smallest_group": rules.smallest_group,
        },
    }
    (folder / "site.json").write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")


def open_site(folder: Path, memory: str = "memory", journal: str = JOURNAL) -> Site:
    """The site that `write_site` described."""
    about = json.loads((folder / "site.json").read_text(encoding="utf-8"))
    return Site(
        read_rows(about["data"]),
        folder / memory,
        rules=SiteRules(**about["rules"]),
        journal=folder / journal,
        columns=about["columns"],
    )


def read_rows(about: Mapping[str, Any]) -> Any:
    """A Parquet file where it is, or rows that were prepared, memory-mapped."""
    if "parquet" in about:
        return about["parquet"]
    rows = np.load(about["rows"], mmap_mode="r", allow_pickle=False)
    columns = None if about["columns"] is None else tuple(about["columns"])
    return WorkerData(rows, np.array([0, len(rows)]), ["site"], columns)


def site_app() -> ClientApp:
    """The program of ``fedem join``."""
    folder = Path(os.environ[FOLDER])
    app = ClientApp()

    @app.query(QUERY)
    def answer(message: Message, context: Context) -> Message:
        reply = open_site(folder).step(unwrap(message.content))
        return Message(wrap(reply), reply_to=message)

    return app
