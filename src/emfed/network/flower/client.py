"""A site's end under Flower: one message, one `Site.step`."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.clientapp import ClientApp

from emfed.core.errors import SettingsError
from emfed.deployment.site import JOURNAL, look_first, open_site
from emfed.network import Site, SiteRules
from emfed.network.flower.transport import QUERY, unwrap, wrap

FOLDER = "EMFED_SITE_FOLDER"
"""The environment variable that tells the site's program where `write_site` wrote."""
DRY_RUN = "EMFED_DRY_RUN"


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
        # Nodes of Flower's have no roster, so no masks: only their owners can allow a run without.
        allowed = SiteRules(unmasked=context.node_config.get("unmasked") is True)
        site = Site(
            data_loader(context),
            Path(str(where)) / "memory",
            rules=rules or allowed,
            journal=Path(str(where)) / JOURNAL,
        )
        return Message(wrap(site.step(unwrap(message.content))), reply_to=message)

    return _app(answer)


def _app(answer: Callable[[Message, Context], Message]) -> ClientApp:
    app = ClientApp()
    app.query(QUERY)(answer)
    return app


def site_app() -> ClientApp:
    """The program of ``emfed join``."""
    folder = Path(os.environ[FOLDER])

    def answer(message: Message, context: Context) -> Message:
        given = unwrap(message.content)
        looking = bool(os.environ.get(DRY_RUN))
        reply = look_first(folder, given) if looking else open_site(folder).step(given)
        return Message(wrap(reply), reply_to=message)

    return _app(answer)
