"""The default engine: one WebSocket over TLS 1.3 that each site opens and keeps open.

The server pushes a question when it has one; the site answers. `listen` is the server's end and
gives a `Transport`; `join` is a site's end, around `Site`. docs/protocol.md says what a transport
promises, docs/decisions/024 why it is this one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emfed.core.errors import EmfedError, SettingsError, check_count
from emfed.network.addresses import alone, split_address, terminated_as_interrupted

if TYPE_CHECKING:
    from emfed.network.rules import SiteRules
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
    address : str
        Where to listen, ``host:port``; port 0 takes a free one (``transport.port``).
    keys : str or Path, optional
        The folder that ``emfed keys server`` made; its ``sites`` are let in.
    expected : int
        How many sites must be connected before it returns.
    wait : float, optional
        The seconds after which it gives up; None waits for ever.
    insecure : bool
        Whether there is no TLS and no keys: on this machine only, for trials.

    Returns
    -------
    WebSocketTransport
        The transport.

    Raises
    ------
    ParticipationError
        If too few sites connect in time.

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
    address : str
        The address of the server, like ``em.example.org:9400``. HTTPS_PROXY is heeded.
    data : table, str, Path, Source or Stream
        The rows, as in `Site`.
    directory : str or Path
        Where the site keeps what it must not lose, as in `Site`.
    key : str or Path, optional
        The site's ``NAME.key``. Without ``key`` and ``ca`` there is no TLS, and the server must be
        on this machine: for trials, in which there are no masks.
    ca : str or Path, optional
        The server's ``ca.pem``.
    rules : SiteRules, optional
        The owner's rules, as in `Site`.
    journal : str or Path, optional
        A file that gets a line for every message sent, as in `Site`.
    columns : sequence of str, optional
        The columns that servers may choose among, as in `Site`.
    name : str, optional
        How the site calls itself where it has no key.
    roster : str or Path, optional
        A folder of everybody's ``NAME.pub``, each got by a way that the owner trusts: the site
        masks what it tells. Without one it takes part in unmasked runs alone, and in these only if
        its rules say so.
    stop : threading.Event, optional
        An event to set, from another thread, to end.
    report : callable, optional
        A function that is called with "state" and words when the connection changes, and with
        "warning" and words where the site's rows look mistaken beside the others' (the server is
        not told).

    Examples
    --------
    >>> import threading
    >>> import numpy as np
    >>> from emfed.network import join, listen
    >>> stop = threading.Event()
    >>> with listen("127.0.0.1:0", insecure=True) as transport:
    ...     options = {"name": "north", "stop": stop}
    ...     place = f"127.0.0.1:{transport.port}", np.zeros((20, 2)), "north"
    ...     site = threading.Thread(target=join, args=place, kwargs=options)
    ...     site.start()
    ...     while not transport.workers():
    ...         _ = stop.wait(0.01)
    ...     print(transport.workers())
    ...     stop.set()
    ...     site.join()
    ['north']
    """
    from emfed.network.masking import SiteIdentity
    from emfed.network.rules import SiteRules
    from emfed.network.site import Site
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
