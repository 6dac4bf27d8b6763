"""One end of the wire: send, receive, charge, and note who refuses."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import final

from emfed.core.errors import WireError
from emfed.core.wire import Header, Reason, decode_refusal, peek
from emfed.network.traffic import Traffic
from emfed.network.transport import Transport

logger = logging.getLogger(__name__)


@final
class Line:
    """The server's view of a transport in one run."""

    def __init__(self, transport: Transport, deadline: float, attempts: int, pause: float) -> None:
        self.transport, self.deadline, self.pause = transport, deadline, pause
        self.attempts = attempts
        self.traffic = Traffic()
        self.refusals: dict[str, str] = {}

    def begin(self) -> Traffic:
        """A new run: its own traffic, and nobody has refused yet."""
        self.traffic, self.refusals = Traffic(), {}
        return self.traffic

    def tries(self) -> Iterator[int]:
        """Attempts, with pauses between them that double up to the deadline."""
        for attempt in range(self.attempts):
            if attempt and self.pause:
                time.sleep(min(self.deadline, self.pause * 2.0 ** (attempt - 1)))
            yield attempt

    def deliver(
        self, run: int, kind: str, messages: Mapping[str, bytes]
    ) -> Iterator[tuple[str, Header, bytes]]:
        """Send, and give what comes back and is whole and of this run; charge all of it."""
        if not messages:
            return
        for key, message in messages.items():
            self.traffic.sent(kind, key, message)
        for key, reply in self.transport.deliver(messages, self.deadline):
            self.traffic.received(kind, key, reply)
            try:
                header, body = peek(reply)
            except WireError as error:
                logger.warning("%s sent something that is no message: %s", key, error)
                continue
            if header.run == run:
                yield key, header, body

    def heed(self, key: str, body: bytes) -> Reason | None:
        """Take a refusal; one for good takes the worker out of the run."""
        try:
            reason, text, _ = decode_refusal(body)
        except WireError as error:
            logger.warning("%s sent a refusal that is none: %s", key, error)
            return None
        if reason is Reason.REFUSED:
            self.dismiss(key, text)
        elif reason is not Reason.OLD:
            logger.info("%s does not answer: %s", key, text)
        return reason

    def dismiss(self, key: str, text: str) -> None:
        """Out of the run, and why."""
        logger.warning("%s is out of the run: %s", key, text)
        self.refusals[key] = text
