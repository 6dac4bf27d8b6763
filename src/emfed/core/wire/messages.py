"""Messages: a payload in an envelope that says what it is and refuses to be taken for another.

The envelope is little-endian; docs/wire-format.md specifies it. Everything in it is known without
looking at data, so the ledger counts it apart.
"""

from __future__ import annotations

import struct
import zlib
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from emfed.core.errors import WireError
from emfed.core.protocols import FloatArray
from emfed.core.wire.payload import decode_floats, encode_floats

MAGIC = b"EMFD"
VERSION = 1
LARGEST_PAYLOAD = 1 << 28
_HEADER = struct.Struct("<4sBBHQIIQII")
_CHECKSUM = struct.Struct("<I")
_REQUEST = struct.Struct("<IqBBI")
_REPLY = struct.Struct("<IQ")


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


@dataclass(frozen=True)
class Header:
    """Who speaks to whom about what: a receiver compares all of it with what it expects."""

    kind: Kind
    run: int
    """64 bits that tell runs apart."""
    round: int
    worker: int
    fingerprint: int
    """64 bits that tell models and layouts apart."""
    dimension: int
    """q, or the number of floats."""
    phase: int = 0
    """16 bits: which phase of the run; a round is told from others by phase and round."""


ENVELOPE = _HEADER.size + _CHECKSUM.size
REQUEST_ENVELOPE = ENVELOPE + _REQUEST.size
REPLY_ENVELOPE = ENVELOPE + _REPLY.size
"""Bytes of an envelope; of a request's and a reply's with the fields they add."""


def seal(header: Header, body: bytes) -> bytes:
    """Header, body and a checksum of both."""
    front = _HEADER.pack(
        MAGIC,
        VERSION,
        header.kind,
        header.phase,
        header.run,
        header.round,
        header.worker,
        header.fingerprint,
        header.dimension,
        len(body),
    )
    return front + body + _CHECKSUM.pack(zlib.crc32(front + body))


def peek(data: bytes) -> tuple[Header, bytes]:
    """Header and body of a whole message; raises `WireError`, saying why, for anything else."""
    if len(data) < ENVELOPE:
        raise WireError(f"expected at least {ENVELOPE} bytes; got {len(data)}.")
    magic, version, kind, phase, run, round_, worker, fingerprint, dimension, size = (
        _HEADER.unpack_from(data)
    )
    if magic != MAGIC:
        raise WireError(f"not an emfed message: it begins {data[:4].hex()}.")
    if version != VERSION:
        raise WireError(f"message format {version}; this release speaks format {VERSION}.")
    if size > LARGEST_PAYLOAD or len(data) != ENVELOPE + size:
        raise WireError(f"the header announces {size} bytes; the message has {len(data)}.")
    if _CHECKSUM.unpack_from(data, len(data) - _CHECKSUM.size)[0] != zlib.crc32(data[:-4]):
        raise WireError("the checksum does not match: the message was damaged.")
    if kind not in set(Kind):
        raise WireError(f"unknown kind of message {kind}.")
    header = Header(Kind(kind), run, round_, worker, fingerprint, dimension, phase)
    return header, data[_HEADER.size : _HEADER.size + size]


def unseal(data: bytes, expected: Header) -> bytes:
    """The body of a message; raises `WireError`, with the reason, unless it is the one expected."""
    found, body = peek(data)
    for name in ("run", "fingerprint", "kind", "dimension", "worker", "phase", "round"):
        want, got = getattr(expected, name), getattr(found, name)
        if want != got:
            what = "model or layout" if name == "fingerprint" else name
            raise WireError(f"a message of another {what}: expected {want!r}, got {got!r}.")
    return body


@dataclass(frozen=True)
class RequestBody:
    """A round's request as it travels: statistics in full, or the steps since a round."""

    generation: int
    accepted: int
    start: bool
    statistics: FloatArray | None = None
    steps: tuple[bytes, ...] = ()
    """Payloads of the quantised steps that lead from the statistics of round ``since`` here."""
    since: int = 0


def encode_request(header: Header, body: RequestBody) -> bytes:
    """A server's message to one worker."""
    if body.statistics is not None:
        front = _REQUEST.pack(body.generation, body.accepted, body.start, 0, 0)
        told = encode_floats(body.statistics) if len(body.statistics) else b""
        return seal(header, front + told)
    front = _REQUEST.pack(body.generation, body.accepted, body.start, 1, body.since)
    steps = b"".join(struct.pack("<I", len(step)) + step for step in body.steps)
    return seal(header, front + steps)


def decode_request(data: bytes, expected: Header) -> RequestBody:
    """The inverse of `encode_request`."""
    body = unseal(data, expected)
    if len(body) < _REQUEST.size:
        raise WireError(f"a request has at least {_REQUEST.size} bytes; got {len(body)}.")
    generation, accepted, start, form, since = _REQUEST.unpack_from(body)
    rest = body[_REQUEST.size :]
    if start > 1 or form > 1:
        raise WireError(f"unknown flags {start}, {form} in a request.")
    if form == 0:
        none = not rest and expected.dimension == 0
        statistics = np.empty(0) if none else decode_floats(rest, expected.dimension)
        return RequestBody(generation, accepted, bool(start), statistics)
    steps, position = [], 0
    while position < len(rest):
        if len(rest) < position + 4:
            raise WireError("a request ends inside a step.")
        size = struct.unpack_from("<I", rest, position)[0]
        if len(rest) < position + 4 + size:
            raise WireError("a request ends inside a step.")
        steps.append(rest[position + 4 : position + 4 + size])
        position += 4 + size
    if len(steps) != expected.round - since:
        raise WireError(f"{len(steps)} steps cannot lead from round {since} to {expected.round}.")
    return RequestBody(generation, accepted, bool(start), None, tuple(steps), since)


STEP_FRAME = 4
"""Bytes around each step of a request: its length."""


def encode_reply(header: Header, generation: int, evaluations: int, payload: bytes) -> bytes:
    """A worker's upload."""
    return seal(header, _REPLY.pack(generation, evaluations) + payload)


def decode_reply(data: bytes, expected: Header) -> tuple[int, int, bytes]:
    """Generation, conditional expectations computed, and the payload."""
    body = unseal(data, expected)
    if len(body) < _REPLY.size:
        raise WireError(f"a reply has at least {_REPLY.size} bytes; got {len(body)}.")
    generation, evaluations = _REPLY.unpack_from(body)
    return generation, evaluations, body[_REPLY.size :]


def encode_table(header: Header, values: FloatArray) -> bytes:
    """Constants or an answer: floats in an envelope."""
    return seal(header, encode_floats(values))


def decode_table(data: bytes, expected: Header) -> FloatArray:
    """The inverse of `encode_table`."""
    return decode_floats(unseal(data, expected), expected.dimension)


def fingerprint(description: bytes) -> int:
    """64 bits of a model's description."""
    import hashlib

    return int(np.frombuffer(hashlib.blake2b(description, digest_size=8).digest(), "<u8")[0])
