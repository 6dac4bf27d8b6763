"""The end that is called: who may come in, one connection a key, and a watch over all of them.

All state lives in one event loop in a thread of its own. What is said on a connection, once its
site has shown its key, is for subclasses: `WebSocketTransport` asks questions, `RelayServer` takes
posts and hands out entries.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import socket
import ssl
import sys
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import Any, Generic, Self, TypeVar, final

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from emfed.core.errors import EmfedError, ParticipationError, SettingsError
from emfed.network.addresses import check_insecure_server, join_address
from emfed.network.keys import KeyRing, check_certificate, check_site_name, show_fingerprint
from emfed.network.websocket.background import Background, ClockWatch, ServerLine, library_logger
from emfed.network.websocket.greeting import (
    GREETING_SECONDS,
    HELLO,
    IN_USE,
    JUST_ASKING,
    KNOWN,
    LARGEST_GREETING,
    MISUSE,
    NONCE_BYTES,
    OVER,
    REMOVED,
    REPLACED,
    SILENCE_SECONDS,
    UNKNOWN,
    WELCOME,
    Refused,
    check_proof,
    decode_proof,
    server_context,
)

logger = logging.getLogger(__name__)
PROBE_SECONDS = 5.0
"""Time for the holder of a key to show that it lives, when another connects with the same key."""
MOST_STRANGERS = 1000
"""Connections that have not yet shown a key. One more takes the place of the oldest: a site is
through in a second, so those who only hold a place lose it."""
MOST_LEAVING = 64
"""Connections that were ended to make room and are still to be closed: asyncio accepts a thousand
in one go, and each has a descriptor."""
REPEAT_SECONDS = 60.0
"""The same refusal is logged once in so long: a stranger must not fill the disk."""


def show_place(line: ServerConnection) -> str:
    """The address at the other end."""
    peer = line.remote_address
    return join_address(str(peer[0]), int(peer[1])) if peer else "an unknown address"


@final
class ListeningSocket(socket.socket):
    """A listening socket that lets in a bounded number of strangers, before TLS and all else.

    Each takes a descriptor and about 0.3 MB. Out of descriptors a server could not write its own
    files, so strangers have at most a half of them.
    """

    strangers: dict[int, socket.socket]
    """Those who have not shown a key, by descriptor; the oldest first."""
    leaving: list[socket.socket]
    """Those who made room, and whose transport has not closed them yet."""

    def accept(self) -> tuple[socket.socket, Any]:
        self.leaving = [old for old in self.leaving if old.fileno() >= 0]
        if len(self.leaving) >= MOST_LEAVING:
            raise BlockingIOError  # the loop comes back, and closes these first
        line, place = super().accept()
        self.known(line.fileno())  # the descriptor of one that is gone
        if len(self.strangers) >= most_strangers():
            gone = [number for number, old in self.strangers.items() if old.fileno() != number]
            for number in gone:
                del self.strangers[number]
        while len(self.strangers) >= most_strangers():
            oldest = self.strangers.pop(next(iter(self.strangers)))
            with contextlib.suppress(OSError):
                oldest.shutdown(socket.SHUT_RDWR)  # its transport hears of it, and closes it
            self.leaving.append(oldest)
        self.strangers[line.fileno()] = line
        return line, place

    def known(self, number: int) -> None:
        """Whoever has this descriptor is no stranger any more."""
        self.strangers.pop(number, None)


def most_strangers() -> int:
    """As many as there may be, with the descriptors that this process may have."""
    if sys.platform == "win32":
        return MOST_STRANGERS
    import resource

    return min(MOST_STRANGERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)


def open_doors(host: str, port: int) -> list[ListeningSocket]:
    """Listen on every address of a name."""
    doors: list[ListeningSocket] = []
    kind = socket.SOCK_STREAM
    found = socket.getaddrinfo(host, port, type=kind, flags=socket.AI_PASSIVE)
    try:
        for family, address in dict.fromkeys((entry[0], entry[4]) for entry in found):
            door = ListeningSocket(family, kind)
            door.strangers, door.leaving = {}, []
            doors.append(door)
            if os.name == "posix":
                door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                door.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            door.bind(address)
    except OSError:
        for door in doors:
            door.close()
        raise
    return doors


class SiteCall:
    """One site's connection."""

    def __init__(self, name: str, process: bytes, digest: bytes, line: ServerLine) -> None:
        self.name, self.process, self.digest, self.line = name, process, digest, line

    @property
    def place(self) -> str:
        """The address that the site calls from."""
        return show_place(self.line)

    @property
    def pinged(self) -> bool:
        """Whether the site must hear from here while it is silent: its answer may be long."""
        return True


CallT = TypeVar("CallT", bound=SiteCall)


class Reception(ABC, Generic[CallT]):
    """Sites that are connected now, known by the names of their keys.

    ``keys`` is the server's folder of keys, or None to let anybody of this machine in, without TLS.
    """

    def __init__(
        self, host: str, port: int, keys: Path | None, *, silence: float = SILENCE_SECONDS
    ) -> None:
        self._ring: KeyRing | None = None
        self._certificate = b""
        context: ssl.SSLContext | None = None
        if keys is None:
            check_insecure_server(host)
        else:
            check_certificate(keys / "server.pem")
            context = server_context(keys)
            self._ring = KeyRing(keys)
            text = (keys / "server.pem").read_text(encoding="ascii")
            self._certificate = ssl.PEM_cert_to_DER_cert(text)
        self._silence = silence
        self._links: dict[str, CallT] = {}
        self._said: dict[str, float] = {}
        self._background = Background("emfed-server")
        try:
            self._doors = open_doors(host, port)
            self._servers = self._background.run(self._open(context))
        except OSError as error:
            self._background.stop()
            raise EmfedError(
                f"cannot listen on {join_address(host, port)}: {error.strerror or error}. Choose "
                "another address or port, or stop what listens there."
            ) from None
        self.host, self.port = host, int(self._doors[0].getsockname()[1])

    # What subclasses say.

    @abstractmethod
    def _meet(self, name: str, process: bytes, digest: bytes, line: ServerLine) -> CallT:
        """The link of a site that has shown its key."""

    @abstractmethod
    async def _converse(self, link: CallT) -> None:
        """All that is said after the welcome, until the connection ends."""

    def _lost(self, link: CallT) -> None:
        """A site is gone, and its link with it."""

    # Called from other threads.

    def workers(self) -> list[str]:
        """Names of the sites that are connected now, in order."""
        return sorted(self._links)

    def wait_for(self, expected: int, seconds: float | None = None) -> None:
        """Wait until so many sites are connected."""
        end = None if seconds is None else time.monotonic() + seconds
        while len(self._links) < expected:
            if end is not None and time.monotonic() > end:
                here = ", ".join(self.workers()) or "none"
                raise ParticipationError(
                    f"after {seconds:.0f} s {len(self._links)} of {expected} sites are connected "
                    f"({here})."
                )
            time.sleep(0.02)

    def close(self, finished: bool = False) -> None:
        """Close all connections; with ``finished`` sites are told that the run is over."""
        if self._background.alive:
            with contextlib.suppress(TimeoutError):
                self._background.run(self._shut(OVER if finished else 1001), 10.0)
            self._background.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finished=kind is None)

    # Connections, in the loop.

    async def _open(self, context: ssl.SSLContext | None) -> list[Server]:
        servers = [await self._listen_at(door, context) for door in self._doors]
        self._watching = asyncio.get_running_loop().create_task(self._watch())
        return servers

    async def _listen_at(self, door: ListeningSocket, context: ssl.SSLContext | None) -> Server:
        return await serve(
            self._attend,
            sock=door,
            ssl=context,
            compression=None,
            server_header=None,
            max_size=LARGEST_GREETING,
            open_timeout=GREETING_SECONDS,
            close_timeout=2.0,
            ping_interval=None,  # `_watch` does that
            create_connection=ServerLine,
            logger=library_logger,
            backlog=1024,  # all sites call at once after a restart
            ssl_handshake_timeout=None if context is None else GREETING_SECONDS,
        )

    async def _attend(self, line: ServerConnection) -> None:
        """A connection, from its first word to its last."""
        assert isinstance(line, ServerLine)
        place = show_place(line)
        link: CallT | None = None
        try:
            link = await self._admit(line)
            await self._listen(link)
        except Refused as refused:
            who = place if link is None else f"{link.name} ({place})"
            self._warn(f"{who.rpartition(':')[0]}{refused}", f"{who}: {refused.words}")
            await line.close(refused.code)
        except (ConnectionClosed, TimeoutError):
            pass
        finally:
            if link is not None:
                self._drop(link)

    async def _admit(self, line: ServerLine) -> CallT:
        """Find out who calls; the place of a site is taken when this returns."""
        async with asyncio.timeout(GREETING_SECONDS):
            nonce = os.urandom(NONCE_BYTES)
            await line.send(HELLO + nonce)
            proof = decode_proof(await line.recv(), self._ring is not None)
        if self._ring is not None and proof.process == JUST_ASKING:
            self._ring.refresh()  # what is asked is how it stands now
        name = self._identify(proof.claim)
        if self._ring is not None:
            found = self._ring.find(proof.claim)
            assert found is not None
            check_proof(proof, found[1], nonce, self._certificate)
        for door in self._doors:
            door.known(line.transport.get_extra_info("socket").fileno())
        if proof.process == JUST_ASKING:
            raise Refused(KNOWN, f"asked whether its key is known; it is that of {name}")
        link = self._meet(name, proof.process, proof.claim, line)
        await self._take_place(link)
        return link

    def _identify(self, claim: bytes) -> str:
        """The name of the site that calls, if it may join."""
        if self._ring is None:
            try:
                return check_site_name(claim.decode())
            except (SettingsError, UnicodeDecodeError):
                raise Refused(MISUSE, "gave a name that is none") from None
        if self._ring.find(claim) is None:
            self._ring.refresh()  # it may have come a moment ago
        found = self._ring.find(claim)
        if found is not None:
            return found[0]
        shown = show_fingerprint(claim)
        if self._ring.was_removed(claim):
            raise Refused(REMOVED, f"called with a key that was removed, {shown}")
        raise Refused(UNKNOWN, f"called with a key that may not join, {shown}")

    async def _take_place(self, link: CallT) -> None:
        """One connection a key: a second one replaces a dead one, and only that."""
        old = self._links.get(link.name)
        if old is not None and old.process != link.process and await self._lives(old):
            raise Refused(
                IN_USE, f"called with the key of {link.name}, which is in use from {old.place}"
            )
        if self._links.get(link.name) is not old:
            raise Refused(IN_USE, f"called with the key of {link.name} while another did, too")
        if old is not None:
            logger.info("%s called again from %s", link.name, link.place)
            self._drop(old)
            self._close(old, REPLACED)
        self._links[link.name] = link

    async def _lives(self, link: CallT) -> bool:
        """Whether a connection's other end answers."""
        before = link.line.heard
        with contextlib.suppress(TimeoutError, ConnectionClosed):
            async with asyncio.timeout(min(PROBE_SECONDS, self._silence)):
                await (await link.line.ping())
                return True
        return link.line.heard > before

    async def _listen(self, link: CallT) -> None:
        """Say welcome, and converse until the end."""
        link.line.trust()
        await link.line.send(WELCOME + link.name.encode())
        logger.info("%s is connected from %s", link.name, link.place)
        await self._converse(link)

    def _drop(self, link: CallT) -> None:
        if self._links.get(link.name) is link:
            del self._links[link.name]
            logger.info("%s is gone", link.name)
        self._lost(link)

    def _close(self, link: CallT, code: int) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(link.line.close(code))

    async def _watch(self) -> None:
        """Cut lines that have gone silent, shut out sites whose key is gone, for ever.

        Sites ping, which keeps a quiet line open with two frames. One that sends a large answer
        over a slow line must hear something, too.
        """
        tick, clock = self._silence / 5, ClockWatch()
        for count in itertools.count():
            await asyncio.sleep(tick)
            try:
                clock.look()
                if self._ring is not None:
                    self._ring.refresh()
                for link in list(self._links.values()):
                    await self._look_at(link, ping=count % 2 == 1)
            except Exception:  # a disk that fails for a moment must not end the watch
                logger.exception("the watch over connections goes on")

    async def _look_at(self, link: CallT, ping: bool) -> None:
        if link.line.silent(self._silence):
            logger.warning("%s is silent; its connection is cut", link.name)
            link.line.transport.abort()
            self._drop(link)
        elif self._ring is not None and self._ring.find(link.digest) is None:
            if self._ring.knows(link.name):
                logger.warning("%s has another key now: it is to show that one", link.name)
            else:
                logger.warning("%s is shut out: its key is gone", link.name)
            self._drop(link)
            self._close(link, REMOVED)
        elif link.pinged and ping:
            with contextlib.suppress(ConnectionClosed):
                await link.line.poke()

    async def _shut(self, code: int) -> None:
        self._watching.cancel()
        await asyncio.gather(
            *(self._close(link, code) for link in self._links.values()), return_exceptions=True
        )
        for server in self._servers:
            server.close()
            await server.wait_closed()

    def _warn(self, kind: str, words: str) -> None:
        """Log a refusal, the same one not too often."""
        now = time.monotonic()
        self._said = {k: t for k, t in self._said.items() if now - t < REPEAT_SECONDS}
        if kind not in self._said and len(self._said) < MOST_STRANGERS:
            self._said[kind] = now
            logger.warning("%s", words)
