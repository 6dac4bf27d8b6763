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
import queue
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import final

from websockets.exceptions import ConnectionClosed

from emfed.core.errors import EmfedError
from emfed.network.transport import Transport
from emfed.network.websocket.background import ServerLine
from emfed.network.websocket.greeting import MISUSE, SILENCE_SECONDS, Refused
from emfed.network.websocket.reception import Reception, SiteCall

logger = logging.getLogger(__name__)
ABSENT_SECONDS = 15.0
"""A question waits for a site that went away until it has been away so long: long enough for a
supervisor to start it again (10 s in examples/deploy), and paid once, not in every round."""


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
class _AskedLink(SiteCall):
    """One site's connection, and what it was asked."""

    def __init__(self, name: str, process: bytes, digest: bytes, line: ServerLine) -> None:
        super().__init__(name, process, digest, line)
        self.asked: _Question | None = None
        self.waiting: dict[RunChannel, _Question] = {}
        """What each run would ask next, in the order in which they came."""
        self.sending: asyncio.Task[None] | None = None

    @property
    def pinged(self) -> bool:
        return self.asked is not None


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
class WebSocketTransport(Reception[_AskedLink], Transport):
    """A `Transport` to the sites that are connected now.

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
        self._absent = absent
        self.sent = self.received = 0
        self._own = RunChannel(self)
        self._parked: dict[tuple[str, RunChannel], _Question] = {}
        self._left: dict[str, float] = {}
        """When sites went away; for those that never were here, see ``_began``."""
        self._numbers = itertools.count()
        self._began = time.monotonic()
        super().__init__(host, port, keys, silence=silence)

    # The transport's contract, called from other threads.

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

    def _ask(self, link: _AskedLink, question: _Question) -> None:
        if link.asked is not None:
            self._lose(link.waiting.get(question.channel))
            link.waiting[question.channel] = question
            return
        link.asked = question
        link.sending = asyncio.get_running_loop().create_task(self._send(link, question))

    async def _send(self, link: _AskedLink, question: _Question) -> None:
        with contextlib.suppress(ConnectionClosed):
            self.sent += len(question.message)
            question.channel.sent += len(question.message)
            await link.line.send(question.message)

    def _take(self, link: _AskedLink, answer: bytes | str) -> None:
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

    def _meet(self, name: str, process: bytes, digest: bytes, line: ServerLine) -> _AskedLink:
        return _AskedLink(name, process, digest, line)

    async def _converse(self, link: _AskedLink) -> None:
        """Ask what waits, and take answers until the end."""
        for place in [place for place in self._parked if place[0] == link.name]:
            self._ask(link, self._parked.pop(place))
        async for answer in link.line:
            if self._links.get(link.name) is not link:
                return  # it was dropped meanwhile: what it still says is no misuse
            self._take(link, answer)

    def _lost(self, link: _AskedLink) -> None:
        """What a site that is gone was asked is lost."""
        if link.name not in self._links:
            self._left[link.name] = asyncio.get_running_loop().time()
        for question in (link.asked, *link.waiting.values()):
            self._lose(question)
        link.asked, link.waiting = None, {}
