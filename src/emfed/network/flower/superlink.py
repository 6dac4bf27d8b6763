"""The SuperLink as ``emfed serve`` starts it: sites reach what sites need, and nothing else.

Flower's open edition serves three interfaces on one port: *fleet* for the nodes, which node keys
protect, *control* (start a run, register a node) and *runtime* (take a task), which nothing
protects. Whoever reaches the port could register a key or start a program of their own at every
site. So this module starts the very same SuperLink with one layer in front: only peers on this
machine who show a secret of the server's owner get past ``/v1/fleet/`` and ``/health``, since
starting a run executes a program under the owner's account. (Flower protects *runtime* by a token
that stands in the list of processes; `runtime.py` shows the secret with it.) Requests larger than
any of ours are refused unread: Flower reads a request before it looks who sent it.
"""

from __future__ import annotations

import ipaddress
import os
import secrets
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from starlette.middleware import Middleware

from emfed.core.wire import LARGEST_PAYLOAD

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FLEET, HEALTH = "/v1/fleet/", "/health"
"""What a site may ask for. Everything under fleet is checked against the node's key."""
RUNTIME = "/v1/runtime/"
"""What the server's own processes ask for; Flower gives each task a token."""
SECRET, HEADER = "EMFED_CONTROL_SECRET", "x-emfed-secret"
"""The environment variable that names the file of the secret; where a request shows it."""
LARGEST, LARGEST_MESSAGE = 1 << 20, LARGEST_PAYLOAD + (1 << 20)
"""Bytes of a request; of one that may carry a message of ours."""


class LocalOnly:
    """An ASGI layer that answers 403 to those who may not ask, and 413 to those who send much."""

    def __init__(self, app: App, secret: str) -> None:
        if not secret:
            raise ValueError("the secret is empty: everyone would show it.")
        self.app, self._secret = app, secret

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif not allowed(scope, self._secret):
            await _refuse(send, 403, b"for the server's owner on this machine only\n")
        elif not bearable(scope):
            await _refuse(send, 413, b"too large, or of a length not told\n")
        else:
            await self.app(scope, receive, send)


async def _refuse(send: Send, status: int, words: bytes) -> None:
    headers = [(b"content-type", b"text/plain"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": words})


def allowed(scope: Scope, secret: str) -> bool:
    """Whether a peer may have this path; a peer without an address may have only what sites may."""
    path = str(scope.get("path", ""))
    if path == HEALTH or (path.startswith(FLEET) and ".." not in path):
        return True
    if not is_here(scope):
        return False
    return secrets.compare_digest(_header(scope, HEADER), secret.encode())


def is_here(scope: Scope) -> bool:
    """Whether the peer is this machine: its own address to itself, or the one it was called at."""
    try:
        peer = ipaddress.ip_address(scope["client"][0])
    except (TypeError, KeyError, ValueError):
        return False
    if bool((getattr(peer, "ipv4_mapped", None) or peer).is_loopback):
        return True
    server = scope.get("server")
    return server is not None and scope["client"][0] == server[0]


def bearable(scope: Scope) -> bool:
    """Whether a request says how long it is, and is no longer than ours are."""
    length = _header(scope, "content-length")
    if not length:
        return not _header(scope, "transfer-encoding")
    path = str(scope.get("path", ""))
    message = path.startswith(RUNTIME) or path.endswith(("/push-object", "/push-messages"))
    return length.isdigit() and int(length) <= (LARGEST_MESSAGE if message else LARGEST)


def _header(scope: Scope, name: str) -> bytes:
    return next((bytes(v) for k, v in scope.get("headers", ()) if k == name.encode()), b"")


def main() -> None:
    """``flower-superlink`` with the layer; refuses to start where it cannot be put in."""
    from flwr.superlink import extensions
    from flwr.superlink import main as superlink
    from flwr.superlink.cli import flower_superlink

    before, secret = extensions.get_middleware, Path(os.environ[SECRET]).read_text(encoding="utf-8")
    extensions.get_middleware = lambda: (Middleware(LocalOnly, secret=secret), *before())
    outermost: Any = superlink._get_middleware()[0]
    if outermost.cls is not LocalOnly:
        sys.exit("emfed: this release of Flower cannot be guarded; see the extra flower.")
    flower_superlink()


if __name__ == "__main__":
    main()
