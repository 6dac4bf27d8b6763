"""The end that calls: find the server, show who this is, converse, and call again, for ever."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import secrets
import socket
import ssl
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Literal

from websockets.asyncio.client import connect
from websockets.exceptions import (
    ConnectionClosed,
    InvalidHandshake,
    InvalidProxyStatus,
    ProxyError,
    WebSocketException,
)

from emfed.core.errors import EmfedError, SettingsError
from emfed.network.addresses import (
    check_insecure_site,
    printable,
    split_address,
)
from emfed.network.keys import (
    NEXT,
    PrivateKey,
    check_site_name,
    fingerprint,
    read_private_key,
    show_fingerprint,
    write_public_key,
)
from emfed.network.websocket.background import (
    Background,
    ClockWatch,
    SiteLine,
    library_logger,
)
from emfed.network.websocket.greeting import (
    EXPLANATIONS,
    GREETING_SECONDS,
    HELLO,
    JUST_ASKING,
    KNOWN,
    NONCE_BYTES,
    OVER,
    REMOVED,
    SILENCE_SECONDS,
    UNKNOWN,
    WELCOME,
    encode_proof,
    new_process,
    site_context,
)

logger = logging.getLogger(__name__)
StateReport = Callable[[str, str], None]
"""Takes a kind of news, such as "state", and words."""
FIRST_PAUSE, LONGEST_PAUSE = 0.5, 30.0
"""Seconds between two calls; each pause is drawn from the upper half of one that doubles, so that
a thousand sites do not call in the same moment after a restart of the server."""
STEADY_SECONDS = 5.0
"""A connection that lasted so long counts as good: the next pause is a first one."""
OPENING_SECONDS = 30.0
"""Time for name, TCP, proxy, TLS and the WebSocket's opening together."""


class Caller(ABC):
    """A site that stays connected to a server; what is said is for subclasses.

    With ``key`` and ``authority`` both ends show who they are; without, there is no TLS, the server
    is on this machine, and the site calls itself ``name``. ``proxy`` is the address of an HTTP
    proxy, True for that of the environment (HTTPS_PROXY, NO_PROXY), None for none. Without ``stay``
    it ends when the server says that its runs are over.
    """

    def __init__(
        self,
        address: str,
        *,
        key: Path | None = None,
        authority: Path | None = None,
        name: str = "trial",
        proxy: str | Literal[True] | None = True,
        silence: float = SILENCE_SECONDS,
        stay: bool = True,
    ) -> None:
        split_address(address)
        self.address, self.name = address, check_site_name(name)
        self._proxy, self._silence, self._stays = proxy, silence, stay
        self.over = False
        """Set by a subclass, or by a server that ends for good: it is not called again."""
        self._key: PrivateKey | None = None
        self._context: ssl.SSLContext | None = None
        if key is None and authority is None:
            check_insecure_site(address)
            self._proxy = None
        elif key is None or authority is None:
            raise SettingsError(
                "a site needs both its own key and the server's ca.pem, or neither for a trial "
                "without TLS on one machine."
            )
        else:
            self._key, self._context = read_private_key(key), site_context(authority)
        self._key_file = key
        self._trying: Path | None = None
        """The next key, while it is shown to the server."""
        self._process = new_process()
        self._line: SiteLine | None = None
        self._ended = 0
        """The code with which the server ended the last connection; 0 without one."""
        self._leaving = False
        """Whether the connection ends because this end wants it so."""
        self._welcomed = False
        """Whether this server has let us in before: then nothing it does later makes us end."""

    def run(self, stop: threading.Event | None = None, report: StateReport | None = None) -> None:
        """Stay until ``stop`` is set; raises `EmfedError` for what trying again cannot mend."""
        background = Background("emfed-site")
        try:
            working = asyncio.run_coroutine_threadsafe(
                self._stay(report or (lambda kind, words: None)), background.loop
            )
            while stop is None or not stop.is_set():
                # Short waits: on every system, signals are heard between two of them.
                if wait([working], timeout=0.1).done:
                    working.result()
                    return
        finally:
            self._leaving = True
            with contextlib.suppress(TimeoutError):
                background.run(self._leave(), 3.0)
            background.stop()

    def ask_whether_known(self) -> tuple[bool, str]:
        """Whether the server would let this site in, and words; nobody's place is taken."""
        self._process = JUST_ASKING

        async def ask() -> tuple[bool, str]:
            words = await self._call(lambda kind, words: None)
            if self._trying is not None:  # the next key may be known already
                words = await self._call(lambda kind, words: None)
            return self._ended == KNOWN, words

        return asyncio.run(ask())

    async def _leave(self) -> None:
        if self._line is not None:
            await self._line.close(1001)

    @abstractmethod
    async def _converse(self, line: SiteLine, report: StateReport) -> None:
        """All that is said after the welcome, until the connection ends."""

    async def _stay(self, report: StateReport) -> None:
        loop, failures = asyncio.get_running_loop(), 0
        while True:
            began = loop.time()
            why = await self._call(report)
            if self.over:
                report("state", why)
            if self.over or self._leaving:
                return
            failures = 1 if loop.time() - began > STEADY_SECONDS else failures + 1
            pause = draw_pause(failures)
            report("state", f"{why}; trying again in {max(1, round(pause))} s")
            logger.info("%s", why)
            await asyncio.sleep(pause)

    async def _call(self, report: StateReport) -> str:
        """One connection, from its opening to its end; why it ended, in words."""
        scheme = "ws" if self._context is None else "wss"
        try:
            async with connect(
                f"{scheme}://{self.address}/",
                ssl=self._context,
                compression=None,
                user_agent_header=None,
                proxy=self._proxy,
                open_timeout=OPENING_SECONDS,
                close_timeout=2.0,
                ping_interval=None,  # `_watch` does that
                create_connection=SiteLine,
                logger=library_logger,
            ) as line:
                assert isinstance(line, SiteLine)
                async with asyncio.timeout(GREETING_SECONDS):
                    name = await self._greet(line)
                self._line, self._welcomed = line, True
                if self._trying is not None and self._key_file is not None:
                    self._trying.replace(self._key_file)
                    write_public_key(self._key_file)
                    self._trying = None
                    report("state", "the server has taken this site's next key: it is in use now")
                report("state", f"connected to {self.address} as {name}")
                logger.info("connected to %s as %s", self.address, name)
                watching = asyncio.create_task(self._watch(line))
                try:
                    await self._converse(line, report)
                finally:
                    self._line = None
                    watching.cancel()
                return "the run is over" if self.over else f"{self.address} ended the connection"
        except (OSError, WebSocketException, TimeoutError) as error:
            closed = error.rcvd if isinstance(error, ConnectionClosed) else None
            code = self._ended = 0 if closed is None else closed.code
            self.over |= code == OVER and not self._stays
            if code in (UNKNOWN, REMOVED) and self._key_file is not None:
                return self._other_key(code, self._key_file)
            return explain(error, self.address, fatal=not self._welcomed)

    def _other_key(self, code: int, path: Path) -> str:
        """Where the server does not take this key, try the next one, if there is one; and back."""
        following = path.with_name(path.name + NEXT)
        if following.exists():
            self._trying = None if self._trying else following
            self._key = read_private_key(self._trying or path)
            return "the server does not take this site's key: trying its other one"
        assert self._key is not None
        shown = show_fingerprint(fingerprint(self._key.public_key()))
        return f"{EXPLANATIONS[code]} (this site's key is {shown})"

    async def _greet(self, line: SiteLine) -> str:
        """Show who this is; the name under which the server knows us."""
        first = await line.recv()
        if not isinstance(first, bytes) or not first.startswith(HELLO[:-1]):
            raise InvalidHandshake
        if first[: len(HELLO)] != HELLO or len(first) != len(HELLO) + NONCE_BYTES:
            raise EmfedError(
                f"the server at {self.address} runs a release of emfed that greets in another way: "
                "install the same release here."
            )
        about = line.transport.get_extra_info("ssl_object")
        certificate = b"" if about is None else about.getpeercert(binary_form=True)
        nonce = first[len(HELLO) :]
        await line.send(encode_proof(self._key, self.name, nonce, certificate, self._process))
        line.trust()  # TLS has shown that this is our server; the first question may follow
        welcome = await line.recv()
        if not isinstance(welcome, bytes) or not welcome.startswith(WELCOME):
            raise InvalidHandshake
        return printable(welcome[len(WELCOME) :].decode(errors="replace"))

    async def _watch(self, line: SiteLine) -> None:
        """Keep a quiet line open, and cut one on which nothing comes any more."""
        clock = ClockWatch()
        for count in itertools.count(1):
            await asyncio.sleep(self._silence / 5)
            clock.look()
            if line.silent(self._silence):
                line.transport.abort()
                return
            if count % 2 == 0:
                with contextlib.suppress(ConnectionClosed):
                    await line.poke()


def draw_pause(failures: int) -> float:
    """Seconds to wait after so many failures in a row."""
    longest = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(failures - 1, 30))
    return longest * (0.5 + 0.5 * secrets.randbelow(1 << 20) / (1 << 20))


def explain(error: Exception, address: str, fatal: bool = False) -> str:
    """Why there is no connection, in words; raises where a person must first mend something."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return _explain_certificate(error, fatal)
    if isinstance(error, ConnectionClosed):
        if error.rcvd is None:
            return f"the connection to {address} was lost"
        said = EXPLANATIONS.get(error.rcvd.code)
        return said or f"{address} ended the connection (code {error.rcvd.code})"
    if isinstance(error, InvalidProxyStatus):
        return f"the proxy refused to connect to {address} (status {error.response.status_code})"
    if isinstance(error, ProxyError):
        return f"the proxy does not connect to {address} ({printable(str(error))})"
    if isinstance(error, InvalidHandshake | ssl.SSLError):
        return f"what answers at {address} is no emfed server, or one with another setting of TLS"
    if isinstance(error, socket.gaierror):
        return f"the name in {address} is not known here ({error.strerror})"
    if isinstance(error, TimeoutError):
        return f"no answer from {address} in time"
    if isinstance(error, ConnectionRefusedError):
        return f"nothing listens at {address}"
    if isinstance(error, OSError):
        return f"no connection to {address} ({error.strerror or printable(str(error))})"
    return f"no connection to {address} ({type(error).__name__})"


EXPIRED, NOT_YET_VALID = 10, 9
"""Reasons of OpenSSL's for which a site's own files are not to blame."""


def _explain_certificate(error: ssl.SSLCertVerificationError, fatal: bool) -> str:
    if error.verify_code == EXPIRED:
        return (
            "the server's certificate has expired, or the clock here is wrong: tell the server's "
            "people, who renew it with `emfed keys server`"
        )
    if error.verify_code == NOT_YET_VALID:
        return "the server's certificate is not valid yet: compare the clocks of both machines"
    words = (
        "this is not the server that ca.pem stands for, or its certificate does not name the "
        "address you gave: ask for the right ca.pem and address"
    )
    if fatal:
        raise EmfedError(f"{words}.")
    return words
