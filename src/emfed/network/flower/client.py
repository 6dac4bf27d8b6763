"""A site's end under Flower: one message, one `Site.step`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from emfed.algorithms import FedEM
from emfed.compressors import Dithering
from emfed.core.errors import DataError, SettingsError
from emfed.core.storage import write_atomic
from emfed.core.wire import Kind, Reason, decode_text, encode_refusal, peek
from emfed.data import ParquetRows, WorkerData
from emfed.fitting.serving import rehearse
from emfed.models import build_model
from emfed.network import Site, SiteRules
from emfed.network.flower.transport import QUERY, unwrap, wrap

FOLDER = "EMFED_SITE_FOLDER"
"""The environment variable that tells the site's program where `write_site` wrote."""
DRY_RUN = "EMFED_DRY_RUN"
JOURNAL, REHEARSAL = "messages.jsonl", "dry-run.jsonl"
"""Every message that left the site; every kind of message that would."""


def client_app(
    data_loader: Callable[[Context], Any],
    *,
    folder: str | Path | None = None,
    rules: SiteRules | None = None,
) -> ClientApp:
    """See `emfed.network.flower.make_client_app`."""

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

    return _app(answer)


def _app(answer: Callable[[Message, Context], Message]) -> ClientApp:
    app = ClientApp()
    app.query(QUERY)(answer)
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
    write_atomic(folder / "site.json", (json.dumps(about, indent=1) + "\n").encode())


def _about(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "site.json").read_text(encoding="utf-8")))


def open_site(folder: Path) -> Site:
    """The site that `write_site` described."""
    about = _about(folder)
    return Site(
        read_rows(about["data"]),
        folder / "memory",
        rules=SiteRules(**about["rules"]),
        journal=folder / JOURNAL,
        columns=about["columns"],
    )


def read_rows(about: Mapping[str, Any]) -> Any:
    """A Parquet file where it is, or rows that were prepared, memory-mapped."""
    if "parquet" in about:
        return ParquetRows(about["parquet"], about["columns"])
    rows = np.load(about["rows"], mmap_mode="r")
    columns = None if about["columns"] is None else tuple(about["columns"])
    return WorkerData(rows, np.array([0, len(rows)]), ["site"], columns)


def site_app() -> ClientApp:
    """The program of ``emfed join``."""
    folder = Path(os.environ[FOLDER])

    def answer(message: Message, context: Context) -> Message:
        given = unwrap(message.content)
        looking = bool(os.environ.get(DRY_RUN))
        reply = look_first(folder, given) if looking else open_site(folder).step(given)
        return Message(wrap(reply), reply_to=message)

    return _app(answer)


def look_first(folder: Path, message: bytes) -> bytes:
    """Answer nothing but "not now", and leave in ``dry-run.jsonl`` what would have been sent.

    The server's hello names the model and the columns; what follows is rehearsed here, with FedEM.
    """
    header, body = peek(message)
    refusal = replace(header, kind=Kind.REFUSAL, dimension=0)
    answer = encode_refusal(refusal, Reason.NOT_NOW, "the owner is looking first.", 0)
    if header.kind is not Kind.HELLO:
        return answer
    about, hello = _about(folder), decode_text(body)
    try:
        lines = rehearse(
            build_model(hello["model"]),
            FedEM(Dithering(4)),
            read_rows(about["data"]),
            rules=SiteRules(**about["rules"]),
            columns=hello.get("columns") or about["columns"],
            start_statistics="expected",
        )
    except DataError as error:  # other columns than the run's
        lines = [{"kind": "refusal", "bytes": 0, "content": str(error)}]
    text = "".join(json.dumps(line) + "\n" for line in lines)
    write_atomic(folder / REHEARSAL, text.encode())
    return answer
