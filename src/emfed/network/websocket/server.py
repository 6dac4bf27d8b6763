"""The server's end: a `Transport` over the connections that sites keep open.

All state lives in one event loop in a thread of its own. `deliver` is called from another thread:
it hands questions over and takes what became of each, an answer or nothing, from a queue. A site
answers in the order in which it was asked and is asked one question at a time, so messages need no
numbers on the wire. A question to a site that is still busy with an older one waits here, and a
newer one of the same run takes its place: a site that was stopped for a minute is not flooded
afterwards. Several runs share the connections by a `RunChannel` each; their questions to a site
wait in the order in which they came.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import queue
import socket
import ssl
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed

from emfed.core.errors import EmfedError, ParticipationError, SettingsError
from emfed.network.addresses import check_insecure_server, join_address
from emfed.network.keys import KeyRing, check_certificate, check_site_name, show_fingerprint
from emfed.network.transport import Transport
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
ABSENT_SECONDS = 15.0
"""A question waits for a site that went away until it has been away so long: long enough for a
supervisor to start it again (10 s in examples/deploy), and paid once, not in every round."""
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


@final
@dataclass(frozen=True)
class _Question:
    """A message on its way to a site, until ``end`` (in the loop's time, which is monotonic)."""

    number: int
    site: str
    message: bytes
    end: float
    channel: RunChannel


@final
class _Link:
    """One site's connection, and what it was asked."""

    def __init__(self, name: str, process: bytes, digest: bytes, line: ServerLine) -> None:
        self.name, self.process, self.digest, self.line = name, process, digest, line
        self.asked: _Question | None = None
        self.waiting: dict[RunChannel, _Question] = {}
        """What each run would ask next, in the order in which they came."""
        self.sending: asyncio.Task[None] | None = None

    @property
    def place(self) -> str:
        """The address that the site calls from."""
        return show_place(self.line)


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


@final
class RunChannel(Transport):
    """One run's share of a server's connections: its questions, its answers and its bytes."""

    def __init__(self, server: WebSocketTransport) -> None:
        self._server = server
        self.outcomes: queue.SimpleQueue[tuple[int, str, bytes | None]] = queue.SimpleQueue()
        """What became of questions: number, site, and the answer if there was one."""

    @property
    def between_machines(self) -> bool:
        return self._server.between_machines

    def workers(self) -> list[str]:
        return self._server.workers()

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        return self._server.deliver_for(self, messages, deadline)


@final
class WebSocketTransport(Transport):
    """Sites that are connected now, known by the names of their keys.

    ``keys`` is the server's folder of keys, or None to let anybody of this machine in, without TLS.
    ``sent`` and ``received`` count the bytes of messages.
    """

    @property
    def between_machines(self) -> bool:
        """Whether sites show keys; without, all is on this machine."""
        return self._ring is not None

    def __init__(
        self,
        host: str,
        port: int,
        keys: Path | None,
        *,
        silence: float = SILENCE_SECONDS,
        absent: float = ABSENT_SECONDS,
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
        self._silence, self._absent = silence, absent
        self.sent = self.received = 0
        self._own = RunChannel(self)
        self._links: dict[str, _Link] = {}
        self._parked: dict[tuple[str, RunChannel], _Question] = {}
        self._left: dict[str, float] = {}
        """When sites went away; for those that never were here, see ``_began``."""
        self._said: dict[str, float] = {}
        self._numbers = itertools.count()
        self._background = Background("emfed-server")
        self._began = self._background.loop.time()
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

    # The transport's contract, called from other threads.

    def workers(self) -> list[str]:
        """Names of the sites that are connected now, in order."""
        return sorted(self._links)

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        """Ask each site named; give answers as they come, those to earlier questions, too.

        A site that is away is waited for, for as long as it was to be expected back.
        """
        return self.deliver_for(self._own, messages, deadline)

    def channel(self) -> RunChannel:
        """The share of a run among several at once."""
        return RunChannel(self)

    def deliver_for(
        self, channel: RunChannel, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        """`deliver` for one of several runs."""
        end = time.monotonic() + deadline
        asked = [_Question(next(self._numbers), *item, end, channel) for item in messages.items()]
        open_numbers = {question.number for question in asked}
        self._background.call(self._ask_all, asked)
        try:
            while open_numbers and (left := end - time.monotonic()) > 0:
                if not self._background.alive:
                    if channel is not self._own:  # Ctrl-C at the command: the run goes on later
                        raise KeyboardInterrupt
                    raise EmfedError("this transport is closed.")
                try:
                    number, site, answer = channel.outcomes.get(timeout=min(left, 1.0))
                except queue.Empty:
                    continue
                open_numbers.discard(number)
                if answer is not None:
                    yield site, answer
        finally:
            self._background.call(self._withdraw, open_numbers)

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

    def __enter__(self) -> WebSocketTransport:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self.close(finished=kind is None)

    # Questions and answers, in the loop.

    def _ask_all(self, questions: Iterable[_Question]) -> None:
        for question in questions:
            link = self._links.get(question.site)
            if link is not None:
                self._ask(link, question)
            else:
                self._park(question)

    def _park(self, question: _Question) -> None:
        """Keep a question for a site that may be back soon."""
        loop = self._background.loop
        place = question.site, question.channel
        self._lose(self._parked.get(place))
        self._parked[place] = question
        end = min(question.end, self._left.get(question.site, self._began) + self._absent)
        loop.call_at(max(end, loop.time()), self._withdraw, {question.number})

    def _withdraw(self, numbers: set[int]) -> None:
        """Nobody waits any longer for these: those that were not sent are not to be."""
        for place in [key for key, asked in self._parked.items() if asked.number in numbers]:
            self._lose(self._parked.pop(place))
        for link in self._links.values():
            for run in [key for key, asked in link.waiting.items() if asked.number in numbers]:
                self._lose(link.waiting.pop(run))

    def _ask(self, link: _Link, question: _Question) -> None:
        if link.asked is not None:
            self._lose(link.waiting.get(question.channel))
            link.waiting[question.channel] = question
            return
        link.asked = question
        link.sending = asyncio.get_running_loop().create_task(self._send(link, question))

    async def _send(self, link: _Link, question: _Question) -> None:
        with contextlib.suppress(ConnectionClosed):
            self.sent += len(question.message)
            question.channel.sent += len(question.message)
            await link.line.send(question.message)

    def _take(self, link: _Link, answer: bytes | str) -> None:
        """An answer, to the only question that it can belong to."""
        question, link.asked = link.asked, None
        if question is None or isinstance(answer, str):
            raise Refused(MISUSE, "spoke without being asked")
        self.received += len(answer)
        question.channel.received += len(answer)
        # Empty: the site could not answer, and its log says why.
        question.channel.outcomes.put((question.number, link.name, answer or None))
        if link.waiting:
            self._ask(link, link.waiting.pop(next(iter(link.waiting))))

    def _lose(self, question: _Question | None) -> None:
        if question is not None:
            question.channel.outcomes.put((question.number, question.site, None))

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
        link: _Link | None = None
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

    async def _admit(self, line: ServerLine) -> _Link:
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
        link = _Link(name, proof.process, proof.claim, line)
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

    async def _take_place(self, link: _Link) -> None:
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

    async def _lives(self, link: _Link) -> bool:
        """Whether a connection's other end answers."""
        before = link.line.heard
        with contextlib.suppress(TimeoutError, ConnectionClosed):
            async with asyncio.timeout(min(PROBE_SECONDS, self._silence)):
                await (await link.line.ping())
                return True
        return link.line.heard > before

    async def _listen(self, link: _Link) -> None:
        """Say welcome, ask what waits, and take answers until the end."""
        link.line.trust()
        await link.line.send(WELCOME + link.name.encode())
        logger.info("%s is connected from %s", link.name, link.place)
        for place in [place for place in self._parked if place[0] == link.name]:
            self._ask(link, self._parked.pop(place))
        async for answer in link.line:
            if self._links.get(link.name) is not link:
                return  # it was dropped meanwhile: what it still says is no misuse
            self._take(link, answer)

    def _drop(self, link: _Link) -> None:
        """A site is gone: what it was asked is lost."""
        if self._links.get(link.name) is link:
            del self._links[link.name]
            self._left[link.name] = asyncio.get_running_loop().time()
            logger.info("%s is gone", link.name)
        for question in (link.asked, *link.waiting.values()):
            self._lose(question)
        link.asked, link.waiting = None, {}

    def _close(self, link: _Link, code: int) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(link.line.close(code))

    async def _watch(self) -> None:
        """Cut lines that have gone silent, shut out sites whose key is gone, for ever.

        Sites ping, which keeps a quiet line open with two frames. The server pings only sites that
        are to answer: one that sends a large answer over a slow line must hear something, too.
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

    async def _look_at(self, link: _Link, ping: bool) -> None:
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
        elif link.asked is not None and ping:
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
