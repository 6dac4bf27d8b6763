"""Messages: a payload in an envelope that says what it is and refuses to be taken for another.

A message is a `Header` and a body. The header travels in full, in a **long** form, until both ends
know it; then in a **short** one, which leaves out what the receiver knows, and whose checksum is
that of the long form. A receiver rebuilds the header from what it knows and compares checksums, so
a short message is bound to run, phase, round, generation, worker and instance as a long one is
(header compression as in RFC 3095). docs/wire-format.md specifies both. Everything in them is known
without looking at data, so the ledger counts it apart.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import IntEnum
from hashlib import blake2b

import numpy as np

from emfed.core.errors import OtherRelease, WireError
from emfed.core.messages import RequestKind
from emfed.core.protocols import BoolArray, FloatArray, IntArray
from emfed.core.wire.payload import decode_floats, encode_numbers

MAGIC = b"EMFD"
SAME_RELEASE = "install the same release of emfed at the server and at every site"
VERSION = 3
LARGEST_PAYLOAD = 1 << 28
"""The version of the message format, and the bytes of the largest message that is read: 256 MB."""
_HEADER = struct.Struct("<4sBBHQIIQI")
_CHECKSUM = struct.Struct("<I")
_SHORT, _WITH_GENERATION, _KINDS = 0x80, 0x40, 0x3F
"""Bits of the first byte of a short message; the magic's first byte has not the first of them."""


class Kind(IntEnum):
    """What a message is."""

    HELLO = 1
    JOIN = 2
    CONSTANTS = 3
    SETTINGS = 4
    QUESTION = 5
    ANSWER = 6
    REQUEST = 7
    REPLY = 8
    LOST_MEMORY = 9
    REFUSAL = 10
    BUNDLE = 11
    SUPPORT = 12
    ROSTER = 13
    READY = 14
    SET = 15
    MASKED = 16
    END = 17


@dataclass(frozen=True)
class Header:
    """Who speaks to whom about what: a receiver compares all of it with what it expects."""

    kind: Kind
    run: int
    """64 bits that tell runs apart."""
    round: int
    worker: int
    fingerprint: int
    """64 bits that tell models and instances of a worker apart."""
    generation: int = 0
    """The generation of memories."""
    phase: int = 0
    """16 bits: which phase of the run; a round is told from others by phase and round."""


Message = tuple[Header, bytes]
ENVELOPE = _HEADER.size + _CHECKSUM.size
ANSWER_ENVELOPE = 1 + _CHECKSUM.size
"""Bytes around a long message's body, and around that of a worker's answer."""
REQUEST_ENVELOPE = 4 + _CHECKSUM.size + 1
"""Bytes of a usual request besides its payload."""
REPLY_ENVELOPE = ANSWER_ENVELOPE + 1
"""Bytes of a request and of a reply besides the payload: of the usual ones, see
`request_envelopes` and `reply_envelopes`."""


# Counts: seven bits a byte, the lowest first; the high bit says that more follow (LEB128).

_COUNT_ENDS = 1 << 7 * np.arange(1, 9, dtype=np.int64)
"""Numbers from which on a count takes a byte more: seven bits each."""


def encode_count(number: int) -> bytes:
    """A number from 0, in as few bytes as it needs."""
    out = bytearray()
    while number > 0x7F:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    return bytes([*out, number])


def decode_count(data: bytes, position: int = 0) -> tuple[int, int]:
    """The inverse of `encode_count`, below 2**63; and where the next field begins."""
    number = 0
    for place, byte in enumerate(data[position : position + 9]):
        number |= (byte & 0x7F) << 7 * place
        if byte < 0x80:
            return number, position + place + 1
    raise WireError("a message ends inside a count, or a count has more than nine bytes.")


def count_sizes(numbers: IntArray) -> IntArray:
    """Bytes of `encode_count` for each."""
    return 1 + np.searchsorted(_COUNT_ENDS, numbers, side="right")


# The two forms.


def _front(header: Header) -> bytes:
    return _HEADER.pack(
        MAGIC,
        VERSION,
        header.kind,
        header.phase,
        header.run,
        header.round,
        header.worker,
        header.fingerprint,
        header.generation,
    )


def seal(header: Header, body: bytes) -> bytes:
    """The long form: header, body and a checksum of both."""
    front = _front(header) + body
    return front + _CHECKSUM.pack(zlib.crc32(front))


def checksum(header: Header, body: bytes) -> int:
    """The checksum of the long form, which both forms end with."""
    return zlib.crc32(_front(header) + body)


def peek(data: bytes) -> Message:
    """Header and body of a long message; raises `WireError`, saying why, for anything else."""
    if len(data) < ENVELOPE:
        raise WireError(f"expected at least {ENVELOPE} bytes; got {len(data)}.")
    magic, version, kind, phase, run, round_, worker, fingerprint, generation = _HEADER.unpack_from(
        data
    )
    if magic != MAGIC:
        raise WireError(f"not an emfed message: it begins {data[:4].hex()}.")
    if version != VERSION:
        raise OtherRelease(
            f"message format {version}; this release speaks format {VERSION}: {SAME_RELEASE}."
        )
    if len(data) > LARGEST_PAYLOAD + ENVELOPE:
        raise WireError(f"a message of {len(data)} bytes; at most {LARGEST_PAYLOAD} are read.")
    if _echo(data) != zlib.crc32(data[: -_CHECKSUM.size]):
        raise WireError("the checksum does not match: the message was damaged.")
    header = Header(_kind(kind), run, round_, worker, fingerprint, generation, phase)
    return header, data[_HEADER.size : -_CHECKSUM.size]


def _kind(number: int) -> Kind:
    if number not in set(Kind):
        raise WireError(f"unknown kind of message {number}.")
    return Kind(number)


def _echo(data: bytes) -> int:
    """The checksum that a message ends with."""
    return int(_CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)[0])


def is_short(data: bytes) -> bool:
    """Whether bytes may be a short message."""
    return len(data) > _CHECKSUM.size and data[0] >= _SHORT


def shorten(header: Header, body: bytes) -> bytes:
    """Make a message short for a worker that knows the run, its number in it and its own
    instance."""
    more = encode_count(header.generation) if header.generation else b""
    first = _SHORT | (_WITH_GENERATION if more else 0) | header.kind
    front = bytes([first, header.run & 0xFF])
    front += encode_count(header.phase) + encode_count(header.round) + more
    return front + body + _CHECKSUM.pack(checksum(header, body))


@dataclass(frozen=True)
class Short:
    """A short message from a server, before the receiver has found which run it belongs to."""

    run: int
    """The lowest eight bits of it."""
    header: Header
    """The header without run, worker and fingerprint."""
    body: bytes
    checksum: int

    def told_to(self, known: Iterable[tuple[int, int, int]]) -> Header | None:
        """The header, if a run, number and fingerprint that are known here agree with it."""
        for run, worker, fingerprint in known:
            header = replace(self.header, run=run, worker=worker, fingerprint=fingerprint)
            if run & 0xFF == self.run and checksum(header, self.body) == self.checksum:
                return header
        return None


def read_short(data: bytes) -> Short:
    """The inverse of `shorten` as far as bytes alone go."""
    end = len(data) - _CHECKSUM.size
    if end < 4 or len(data) > LARGEST_PAYLOAD or not is_short(data):
        raise WireError(f"a short message cannot have {len(data)} bytes.")
    phase, position = decode_count(data[:end], 2)
    round_, position = decode_count(data[:end], position)
    generation = 0
    if data[0] & _WITH_GENERATION:
        generation, position = decode_count(data[:end], position)
    if phase >= 1 << 16 or max(round_, generation) >= 1 << 32:
        raise WireError("a short message with a phase, round or generation that cannot be.")
    header = Header(_kind(data[0] & _KINDS), 0, round_, 0, 0, generation, phase)
    return Short(data[1], header, data[position:end], _echo(data))


def seal_answer(header: Header, body: bytes) -> bytes:
    """A worker's answer: its kind, body and checksum; the server knows what it asked."""
    return bytes([_SHORT | header.kind]) + body + _CHECKSUM.pack(checksum(header, body))


def seal_refusal(refused: bytes, body: bytes) -> bytes:
    """A refusal names what it refuses by the last four bytes of it, which may be all it knows."""
    front = bytes([_SHORT | Kind.REFUSAL]) + refused[-_CHECKSUM.size :].rjust(4, b"\0") + body
    return front + _CHECKSUM.pack(zlib.crc32(front))


def kind_of(data: bytes) -> Kind:
    """The kind of a message in either form."""
    return _kind(data[0] & _KINDS) if is_short(data) else peek(data)[0].kind


def open_refusal(data: bytes) -> tuple[int, bytes]:
    """The checksum of what is refused, and the body of the refusal."""
    first = data[:1] == bytes([_SHORT | Kind.REFUSAL])
    if not first or len(data) < 2 * _CHECKSUM.size + 1 or zlib.crc32(data[:-4]) != _echo(data):
        raise WireError("a refusal was damaged.")
    return _echo(data[:5]), data[5:-4]


def open_answer(data: bytes, asked: Message) -> Message:
    """Header and body of a worker's answer to a message; raises `WireError` if it is to another."""
    kind = kind_of(data)
    header = replace(asked[0], kind=kind)
    if kind is Kind.REFUSAL:
        echo, body = open_refusal(data)
        if echo != checksum(*asked):
            raise WireError("a refusal of another message.")
        return header, body
    body = data[1 : -_CHECKSUM.size]
    if data[0] != _SHORT | kind or _echo(data) != checksum(header, body):
        raise WireError("an answer to another message, or a damaged one.")
    return header, body


# Rounds.


@dataclass(frozen=True)
class RequestBody:
    """A round's request as it travels: statistics in full, or the steps since a round."""

    accepted: int
    """The last round of the worker that was accepted, -1 if none; steps lead from there."""
    kind: RequestKind
    statistics: FloatArray | None = None
    steps: tuple[bytes, ...] = ()
    """Payloads of the quantised steps that lead from the statistics of round ``accepted`` here."""


_KIND_BITS: dict[RequestKind, int] = {"round": 0, "start": 1, "local": 4, "fine": 5}
_KINDS_OF_BITS = {bits: kind for kind, bits in _KIND_BITS.items()}


def encode_request(round_: int, body: RequestBody) -> bytes:
    """The body of a server's message to one worker."""
    distance = round_ - body.accepted if body.accepted >= 0 else 0
    steps = body.statistics is None
    front = encode_count(8 * distance + 2 * steps + _KIND_BITS[body.kind])
    if body.statistics is not None:
        return front + (encode_numbers(body.statistics) if len(body.statistics) else b"")
    framed = [encode_count(len(step)) + step for step in body.steps[:-1]]
    return front + b"".join([*framed, *body.steps[-1:]])


def decode_request(body: bytes, round_: int, dimension: int) -> RequestBody:
    """The inverse of `encode_request`, of so many statistics."""
    front, position = decode_count(body)
    distance, kind = front >> 3, _KINDS_OF_BITS[front & 5]
    if distance > round_:
        raise WireError(f"round {round_} cannot come {distance} rounds after another.")
    accepted = round_ - distance if distance else -1
    if not front & 2:
        rest = body[position:]
        statistics = decode_floats(rest, dimension) if rest else np.empty(0)
        return RequestBody(accepted, kind, statistics)
    if not distance or distance > len(body):
        raise WireError(f"{distance} steps cannot be.")
    steps = []
    for _ in range(distance - 1):
        size, position = decode_count(body, position)
        steps.append(body[position : position + size])
        position += size
    if position > len(body):
        raise WireError("a request ends inside a step.")
    return RequestBody(accepted, kind, None, (*steps, body[position:]))


def steps_size(sizes: Iterable[int]) -> int:
    """Bytes of steps of these sizes in a request: the last has no frame."""
    told = np.array(list(sizes), dtype=np.int64)
    return int(told.sum() + count_sizes(told[:-1]).sum())


def envelopes(round_: int, phase: int, generation: int, known: BoolArray) -> IntArray:
    """Bytes around the body of messages to workers; ``known``: who is told in the short form."""
    numbers = np.array([round_, phase] + ([generation] if generation else []))
    return np.where(known, 2 + int(count_sizes(numbers).sum()) + _CHECKSUM.size, ENVELOPE)


def request_fronts(round_: int, accepted: IntArray) -> IntArray:
    """Bytes of the body of requests that are not payload."""
    return count_sizes(8 * np.where(accepted >= 0, round_ - accepted, 0))


def encode_reply(evaluations: int, rows: int, payload: bytes) -> bytes:
    """The body of a worker's upload; a pass over all of its rows is told by a zero."""
    return encode_count(0 if evaluations == rows else evaluations + 1) + payload


def decode_reply(body: bytes, rows: int) -> tuple[int, bytes]:
    """Conditional expectations computed, and the payload."""
    evaluations, position = decode_count(body)
    return (evaluations - 1 if evaluations else rows), body[position:]


def reply_envelopes(evaluations: IntArray, rows: IntArray) -> IntArray:
    """Bytes around the payload of replies."""
    return ANSWER_ENVELOPE + count_sizes(np.where(evaluations == rows, 0, evaluations + 1))


def fingerprint(description: bytes) -> int:
    """64 bits of a model's description."""
    return int(np.frombuffer(blake2b(description, digest_size=8).digest(), "<u8")[0])
