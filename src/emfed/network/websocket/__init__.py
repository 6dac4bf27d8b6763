"""The default engine: one WebSocket over TLS 1.3 that each site opens and keeps open.

The server pushes a question when it has one; the site answers. `listen` is the server's end and
gives a `Transport`; `join` is a site's end, around `Site`. docs/protocol.md says what a transport
promises, ARCHITECTURE.md why it is this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emfed.network.rules import SiteRules

if TYPE_CHECKING:
    from emfed.network.websocket.server import WebSocketTransport

__all__ = ["join", "listen"]


def listen(
    address: str = "127.0.0.1:9400",
    *,
    keys: str | Path | None = None,
    expected: int = 0,
    wait: float | None = None,
    insecure: bool = False,
) -> WebSocketTransport:
    """Listen for sites, and return the transport that reaches them; use it in a ``with``.

    The transport serves any number of fits, one after the other, over the same connections.

    Parameters
    ----------
    address
        Where to listen, ``host:port``; port 0 takes a free one (``transport.port``).
    keys
        The folder that ``emfed keys server`` made; its ``sites`` are let in.
    expected
        Wait until so many sites are connected.
    wait
        Give up after so many seconds with a `ParticipationError`; None waits for ever.
    insecure
        Without TLS and keys, on this machine only, for trials.

    Examples
    --------
    >>> from emfed.network import listen
    >>> with listen("127.0.0.1:0", insecure=True) as transport:
    ...     transport.workers()
    []
    """
    from emfed.network.websocket.server import open_transport

    return open_transport(address, keys, insecure, expected, wait)


def join(
    address: str,
    data: Any,
    directory: str | Path,
    *,
    key: str | Path | None = None,
    ca: str | Path | None = None,
    rules: SiteRules | None = None,
    journal: str | Path | None = None,
    columns: Sequence[str] | None = None,
    name: str | None = None,
    roster: str | Path | None = None,
    stop: threading.Event | None = None,
    report: Callable[[str, str], None] | None = None,
) -> None:
    """Answer for one site until told to stop: call the server, stay connected, answer.

    It calls again by itself whenever the connection is lost, and never ends because of the network.
    It returns soon after ``stop`` is set. Ctrl-C, and SIGTERM in the main thread, close the
    connection and raise `KeyboardInterrupt`.

    Parameters
    ----------
    address
        The server's, like ``em.example.org:9400``. HTTPS_PROXY is heeded.
    data, directory, rules, journal, columns
        Those of `Site`.
    key, ca
        The site's ``NAME.key`` and the server's ``ca.pem``. Without both there is no TLS, and the
        server must be on this machine: for trials, in which there are no masks.
    name
        How the site calls itself where it has no key.
    roster
        A folder of everybody's ``NAME.pub``, each got by a way that the owner trusts: the site
        masks what it tells. Without one it takes part in unmasked runs alone, and in these only if
        its rules say so.
    stop
        Set it, from another thread, to end.
    report
        Called with ``"state"`` and words when the connection changes, and with ``"warning"`` and
        words where the site's rows look mistaken beside the others' (the server is not told).
    """
    from emfed.network.websocket.client import join_server

    join_server(
        address,
        data,
        Path(directory),
        key=None if key is None else Path(key),
        ca=None if ca is None else Path(ca),
        rules=rules,
        journal=journal,
        columns=columns,
        name=name,
        roster=None if roster is None else Path(roster),
        stop=stop,
        report=report,
    )
