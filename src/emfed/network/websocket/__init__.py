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

from emfed.core.errors import EmfedError, SettingsError, check_count
from emfed.network.addresses import alone, split_address, terminated_as_interrupted
from emfed.network.masking import SiteIdentity
from emfed.network.rules import SiteRules
from emfed.network.site import Site

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
    from emfed.network.websocket.server import WebSocketTransport

    check_count("expected", expected, 0)
    if (keys is None) != insecure:
        raise SettingsError(
            "give the folder of the server's keys (made by `emfed keys server`), or insecure=True "
            "to try things out on this machine without any; one of the two."
        )
    place = split_address(address, smallest_port=0)
    transport = WebSocketTransport(*place, None if keys is None else Path(keys))
    try:
        transport.wait_for(expected, wait)
    except BaseException:
        transport.close()
        raise
    return transport


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
    from emfed.network.websocket.client import SiteConnection

    folder, private = Path(directory), None if key is None else Path(key)
    identity = None
    if roster is not None and private is not None:
        identity = SiteIdentity.read(private, Path(roster))
    chosen = SiteRules() if rules is None else rules
    chosen = chosen.on_this_machine() if ca is None else chosen
    site = Site(data, folder, rules=chosen, journal=journal, columns=columns, identity=identity)

    def answer(message: bytes) -> bytes:
        before = len(site.warnings)
        reply = site.step(message)
        for words in site.warnings[before:]:
            if report is not None:
                report("warning", words)
        return reply

    given = name or (folder.name if private is None else private.stem)
    authority = None if ca is None else Path(ca)
    connection = SiteConnection(address, answer, key=private, authority=authority, name=given)
    folder.mkdir(parents=True, exist_ok=True)
    with alone(folder / "join.lock") as mine, terminated_as_interrupted():
        if not mine:
            raise EmfedError(f"another process answers from {folder}: stop it first.")
        connection.run(stop, report)
