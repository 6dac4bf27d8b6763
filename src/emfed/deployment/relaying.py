"""``emfed relay``: a relay alone. It needs no model code."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from emfed.core.errors import EmfedError
from emfed.deployment.status import LOCK
from emfed.deployment.watchdog import Watchdog
from emfed.network.addresses import alone, join_address
from emfed.network.exchange.relay_server import RelayServer
from emfed.network.keys import check_certificate, site_keys
from emfed.network.mailbox import MailboxHost
from emfed.network.roster import SeenMembers

RUNS, SEEN = "runs", "seen-keys"
"""In a server's folder: the files of all runs, and keys that it has seen."""
LOOK_SECONDS = 0.1
HANDOVER_SECONDS = 5.0
"""Time that another relay in our folder has to end."""


@contextlib.contextmanager
def mailboxes_of(server: RelayServer, folder: Path | None, keys: Path | None) -> Iterator[None]:
    """Within, messages that another platform carries are taken."""
    if folder is None:
        yield
        return
    host = MailboxHost(server, folder, [] if keys is None else [*site_keys(keys)])
    try:
        yield
    finally:
        host.close()


def serve_relay(
    keys: Path,
    folder: Path,
    host: str,
    port: int,
    report: Callable[[str], None],
    mailboxes: Path | None = None,
) -> None:
    """A relay alone, for the runs of whoever has the authority's key, until it is stopped.

    It needs ``server.key``, ``server.pem``, ``ca.pem`` and the sites' public keys, no model code.
    """
    check_certificate(keys / "server.pem")
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)
    with alone(folder / LOCK, HANDOVER_SECONDS) as mine:
        if not mine:
            raise EmfedError(f"another relay works in {folder}.")
        roster = SeenMembers(keys, folder / SEEN)
        with RelayServer(host, port, keys, roster, folder / RUNS, more=True) as server:
            report(f"a relay listens on {join_address(host, server.port)}")
            with mailboxes_of(server, mailboxes, keys):
                trouble, alive = "", Watchdog()
                while True:
                    alive()
                    time.sleep(LOOK_SECONDS)
                    if server.trouble != trouble:
                        trouble = server.trouble
                        report(trouble or "the disk can be written again")
