"""A site's end under Flower: one message, one `Site.step`."""

from __future__ import annotations

import json
import logging
import os
import shutil
import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from fedem.algorithms import FedEM
from fedem.compressors import Dithering
from fedem.datasets import ParquetRows, WorkerData
from fedem.descriptions import build_model
from fedem.errors import FedemError, SettingsError
from fedem.federations.flower.transport import QUERY, unwrap, wrap
from fedem.federations.remote import LocalTransport, RemoteFederation, Site, SiteRules
from fedem.fitting import fit
from fedem.wire import Kind, Reason, decode_text, encode_refusal, peek

logger = logging.getLogger(__name__)

FOLDER = "FEDEM_SITE_FOLDER"
"""The environment variable that tells the site's program where `write_site` wrote."""
DRY_RUN = "FEDEM_DRY_RUN"
JOURNAL, REHEARSAL, REHEARSED = "messages.jsonl", "dry-run.jsonl", "dry-run.done"
"""Every message that left the site; every kind of message that would."""


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
        return ParquetRows(about["parquet"], about["columns"])
    rows = np.load(about["rows"], mmap_mode="r")
    columns = None if about["columns"] is None else tuple(about["columns"])
    return WorkerData(rows, np.array([0, len(rows)]), ["site"], columns)


def site_app() -> ClientApp:
    """The program of ``fedem join``."""
    folder = Path(os.environ[FOLDER])
    app = ClientApp()

    @app.query(QUERY)
    def answer(message: Message, context: Context) -> Message:
        given = unwrap(message.content)
        reply = (
            rehearse(folder, given) if os.environ.get(DRY_RUN) else open_site(folder).step(given)
        )
        return Message(wrap(reply), reply_to=message)

    return app


def rehearse(folder: Path, message: bytes) -> bytes:
    """Answer nothing but "not now", and leave in ``dry-run.jsonl`` what would have been sent.

    The server's hello names the model. What follows is played through here with this site alone:
    kinds and sizes of messages do not depend on the others, nor on more than two rounds.
    """
    header, body = peek(message)
    refusal = replace(header, kind=Kind.REFUSAL, dimension=0)
    answer = encode_refusal(refusal, Reason.NOT_NOW, "the owner is looking first.", 0)
    if header.kind is not Kind.HELLO:
        return answer
    memory = folder / "dry-run"
    shutil.rmtree(memory, ignore_errors=True)
    (folder / REHEARSAL).unlink(missing_ok=True)
    site = open_site(folder, memory.name, REHEARSAL)
    site.step(message)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fit(
                build_model(decode_text(body)["model"]),
                None,
                FedEM(Dithering(4)),
                federation=RemoteFederation(LocalTransport({"here": site}), attempts=1),
                start_statistics="expected",
                rounds=2,
            )
    except FedemError as error:
        logger.warning("the rehearsal ended: %s", error)
    shutil.rmtree(memory, ignore_errors=True)
    (folder / REHEARSED).touch()
    return answer
