"""The server's end of the wire: send, receive, charge every byte, and note who refuses."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, final

import numpy as np

from emfed.core.errors import WireError
from emfed.core.protocols import IntArray
from emfed.core.wire import (
    BUNDLE_FRAME,
    ENVELOPE,
    REPLY_ENVELOPE,
    REQUEST_ENVELOPE,
    Header,
    Kind,
    Reason,
    decode_bundle,
    decode_refusal,
    join_envelope,
    peek,
    question_envelope,
)
from emfed.network.transport import Transport

_ENVELOPES = {Kind.REQUEST: REQUEST_ENVELOPE, Kind.REPLY: REPLY_ENVELOPE}
_TEXTS = (Kind.HELLO, Kind.SETTINGS, Kind.REFUSAL)


def envelope(message: bytes) -> int:
    """The part of a message that does not depend on data; of what is no message, all of it.

    Settings, names of columns and reasons do not: they are envelope.
    """
    try:
        header, body = peek(message)
        if header.kind is Kind.JOIN:
            return join_envelope(body)
        if header.kind is Kind.QUESTION:
            return question_envelope(body)
    except WireError:
        return len(message)
    if header.kind in _TEXTS:
        return len(message)
    return min(_ENVELOPES.get(header.kind, ENVELOPE), len(message))


@final
class Traffic:
    """Charges a ledger, or keeps the charges until there is one.

    Bytes of workers that are not in the run (they were refused, or never joined) are counted in
    ``outside``: up, down.
    """

    def __init__(self) -> None:
        self.outside = {"up": 0, "down": 0}
        self._numbers: dict[str, int] | None = None
        self._held: list[tuple[str, str, str, int, int]] = []
        self._ledger: Any = None

    def sent(self, kind: str, key: str, message: bytes) -> None:
        """A message to a worker."""
        self._charge(kind, "down", key, message)

    def received(self, kind: str, key: str, message: bytes) -> None:
        """A message from a worker."""
        self._charge(kind, "up", key, message)

    def _charge(self, kind: str, direction: str, key: str, message: bytes) -> None:
        """What comes before the last message of a bundle belongs to the opening."""
        try:
            header, body = peek(message)
            parts = decode_bundle(body) if header.kind is Kind.BUNDLE else []
        except WireError:
            parts = []
        if parts:
            message = parts[-1]
            payload = sum(len(part) - envelope(part) for part in parts[:-1])
            around = ENVELOPE + sum(BUNDLE_FRAME + envelope(part) for part in parts[:-1])
            self._enter(KIND, direction, key, payload, around + BUNDLE_FRAME)
        around = envelope(message)
        self._enter(kind, direction, key, len(message) - around, around)

    def _enter(self, kind: str, direction: str, key: str, payload: int, around: int) -> None:
        if self._ledger is None or self._numbers is None:
            self._held.append((kind, direction, key, payload, around))
        elif key in self._numbers:
            who = np.array([self._numbers[key]])
            self._ledger.add(kind, direction, who, payload, around)
        else:
            self.outside[direction] += payload + around

    def open(self, keys: list[str], before: IntArray | None = None) -> IntArray:
        """Who is in the run; returns the opening so far, or takes that of before a crash."""
        self._numbers = {key: number for number, key in enumerate(keys)}
        if before is not None:
            codes = before.tolist()
            self._held = [
                (KIND, "up" if up else "down", keys[number], payload, around)
                for up, number, payload, around in codes
            ]
        rows = [
            (direction == "up", self._numbers[key], payload, around)
            for _, direction, key, payload, around in self._held
            if key in self._numbers
        ]
        return np.array(rows, dtype=np.int64).reshape(-1, 4)

    def attach(self, ledger: Any) -> None:
        """Charge this ledger from now on, and with what was held back."""
        self._ledger = ledger
        held, self._held = self._held, []
        for entry in held:
            self._enter(*entry)


KIND = "opening"
"""The kind of all that crosses before there is a ledger."""


logger = logging.getLogger(__name__)


@final
class Connection:
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
            logger.warning("%s sent a malformed refusal: %s", key, error)
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
