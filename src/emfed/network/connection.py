"""The server's end of the wire: send, receive, charge every byte, and note who refuses."""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, final

import numpy as np

from emfed.core.errors import OtherRelease, WireError
from emfed.core.protocols import IntArray
from emfed.core.wire import (
    Kind,
    Message,
    Reason,
    decode_bundle,
    decode_refusal,
    open_answer,
    payload_size,
    seal,
    shorten,
)
from emfed.network.transport import Transport


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

    def sent(self, kind: str, key: str, message: Message, wire: bytes) -> None:
        """A message to a worker, and its bytes; the news of a bundle belong to the opening."""
        (header, body), around = message, 0
        if header.kind is Kind.BUNDLE:
            *news, (last, rest) = decode_bundle(body)
            payload = sum(payload_size(*part) for part in news)
            around = len(body) - len(rest)
            self._enter(KIND, "down", key, payload, around - payload)
            header, body = replace(header, kind=last), rest
        payload = payload_size(header.kind, body)
        self._enter(kind, "down", key, payload, len(wire) - around - payload)

    def received(self, kind: str, key: str, message: Message | None, wire: bytes) -> None:
        """Bytes from a worker, and the message that they are, if they are one."""
        payload = 0 if message is None else payload_size(message[0].kind, message[1])
        self._enter(kind, "up", key, payload, len(wire) - payload)

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


LONGEST_PAUSE = 30.0
"""Seconds between two attempts, at most, whatever the deadline: a run that is silent for more than
a minute counts as stalled, and who is back should not wait."""


@final
class Connection:
    """The server's view of a transport in one run."""

    def __init__(self, transport: Transport, deadline: float, attempts: int, pause: float) -> None:
        self.transport, self.deadline, self.pause = transport, deadline, pause
        self.attempts = attempts
        self.traffic = Traffic()
        self.refusals: dict[str, str] = {}
        self.objections: dict[str, str] = {}
        """Why workers did not answer for now, in the words that each said last."""
        self.ahead: dict[str, int] = {}
        """Workers to which the last messages were old, and the last phase that each heard of."""

    def begin(self) -> Traffic:
        """A new run: its own traffic, and nobody has refused yet."""
        self.traffic, self.refusals = Traffic(), {}
        return self.traffic

    def tries(self) -> Iterator[int]:
        """Attempts, with pauses between them that double up to the deadline or half a minute."""
        longest = min(self.deadline, LONGEST_PAUSE)
        for attempt in range(self.attempts):
            if attempt and self.pause:
                time.sleep(min(longest, self.pause * 2.0 ** min(attempt - 1, 30)))
            yield attempt

    def deliver(
        self, kind: str, messages: Mapping[str, Message], known: Collection[str] = ()
    ) -> Iterator[tuple[str, Kind, bytes]]:
        """Send, give the kinds and bodies of answers to just these messages; charge everything.

        Workers that are ``known`` to know the run get the short form. An answer to an earlier
        message, a damaged one and one of another instance all have another checksum.
        """
        if not messages:
            return
        wires = {k: (shorten if k in known else seal)(*m) for k, m in messages.items()}
        for key, message in messages.items():
            self.traffic.sent(kind, key, message, wires[key])
        for key, data in self.transport.deliver(wires, self.deadline):
            answer = None
            if key in messages:
                try:
                    answer = open_answer(data, messages[key])
                except OtherRelease as error:  # it may be upgraded, or one byte was spoiled
                    logger.warning("%s: %s", key, error)
                    self.objections[key] = str(error)
                except WireError as error:
                    logger.info("%s sent what is not taken: %s", key, error)
            self.traffic.received(kind, key, answer, data)
            if answer is not None:
                yield key, answer[0].kind, answer[1]

    def heed(self, key: str, body: bytes) -> Reason | None:
        """Take a refusal; one for good takes the worker out of the run."""
        try:
            reason, text, number = decode_refusal(body)
        except WireError as error:
            logger.warning("%s sent a malformed refusal: %s", key, error)
            return None
        if reason is Reason.REFUSED:
            self.dismiss(key, text)
        elif reason is Reason.OLD:
            self.ahead[key] = number
        else:
            logger.info("%s does not answer: %s", key, text)
            self.objections[key] = text
        return reason

    def dismiss(self, key: str, text: str) -> None:
        """Out of the run, and why."""
        logger.warning("%s is out of the run: %s", key, text)
        self.refusals[key] = text
