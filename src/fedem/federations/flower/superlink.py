"""The SuperLink as ``fedem serve`` starts it: sites reach what sites need, and nothing else.

Flower's open edition serves three interfaces on one port: *fleet* for the nodes, which node keys
protect, *control* (start a run, register a node) and *runtime* (take a task), which nothing
protects. Whoever reaches the port could register a key or start a program of their own at every
site. So this module starts the very same SuperLink with one layer in front: only peers on this
machine get past ``/v1/fleet/`` and ``/health``.
"""

from __future__ import annotations

import ipaddress
import sys
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from starlette.middleware import Middleware

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

FLEET, HEALTH = "/v1/fleet/", "/health"
"""What a site may ask for. Everything under fleet is checked against the node's key."""


class LocalOnly:
    """An ASGI layer that answers 403 to peers elsewhere, unless the path is open to them."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on, or refuse it."""
        if scope["type"] == "lifespan" or allowed(scope):
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            headers = [(b"content-type", b"text/plain")]
            await send({"type": "http.response.start", "status": 403, "headers": headers})
            await send({"type": "http.response.body", "body": b"for this machine only\n"})
        else:
            await send({"type": "websocket.close", "code": 1008})


def allowed(scope: Scope) -> bool:
    """Whether a peer may have this path; a peer without an address may not."""
    path = str(scope.get("path", ""))
    if path == HEALTH or (path.startswith(FLEET) and ".." not in path):
        return True
    try:
        peer = ipaddress.ip_address(scope["client"][0])
    except (TypeError, KeyError, ValueError):
        return False
    mapped = getattr(peer, "ipv4_mapped", None)
    return bool((mapped or peer).is_loopback)


def main() -> None:
    """``flower-superlink`` with the layer; refuses to start where it cannot be put in."""
    from flwr.superlink import extensions
    from flwr.superlink import main as superlink
    from flwr.superlink.cli import flower_superlink

    before = extensions.get_middleware
    extensions.get_middleware = lambda: (Middleware(LocalOnly), *before())
    outermost: Any = superlink._get_middleware()[0]
    if outermost.cls is not LocalOnly:
        sys.exit("fedem: this release of Flower cannot be guarded; see the extra fedem[flower].")
    flower_superlink()


if __name__ == "__main__":
    main()
