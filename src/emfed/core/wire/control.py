"""Bodies of messages that open a run and keep it in order: settings, joins, refusals, bundles.

docs/wire-format.md specifies them. Settings are JSON, bounded in size; nothing in them is ever
executed.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from emfed.core.errors import WireError
from emfed.core.protocols import FloatArray, IntArray
from emfed.core.wire.messages import Kind, count_sizes, decode_count, encode_count
from emfed.core.wire.payload import decode_floats, encode_floats, floats_size

LARGEST_TEXT = 1 << 24
LARGEST_REASON = 500
LARGEST_BUNDLE = 2
NEWS = (Kind.CONSTANTS, Kind.SETTINGS)
"""What goes before another message in a bundle, framed: and so what ends it is not."""
QUESTIONS = ("statistics", "values", "scores", "validation")
_WHO = struct.Struct("<Q")
_INSTANCE = struct.Struct("<BQ")


class Reason(IntEnum):
    """Why a worker does not do what it was asked, and what that means for the server."""

    DAMAGED = 1
    """The message could not be read: send it again."""
    UNKNOWN_RUN = 2
    """Nothing is known here of this run: say hello first."""
    OTHER_INSTANCE = 3
    """The message is for another holder of this key, or for one whose disk is gone."""
    OLD = 4
    """A request of a round that is over; nothing to do."""
    NOT_NOW = 5
    """Not in this round, perhaps in another."""
    FAILED = 6
    """Something went wrong here; perhaps not the next time."""
    REFUSED = 7
    """Not in this run: other model, schema or data, or the owner's rules."""


def encode_text(content: Mapping[str, Any]) -> bytes:
    """The shortest JSON, the same for equal content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return text.encode()


def decode_text(body: bytes) -> dict[str, Any]:
    """A JSON object, bounded in size and depth; raises `WireError` for anything else."""
    if len(body) > LARGEST_TEXT:
        raise WireError(f"settings of {len(body)} bytes; at most {LARGEST_TEXT} are read.")
    try:
        content = json.loads(body.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise WireError(f"settings that are not JSON ({type(error).__name__}).") from None
    if not isinstance(content, dict):
        raise WireError("settings must be a JSON object.")
    return content


def _framed(part: bytes) -> bytes:
    return encode_count(len(part)) + part


def _unframe(body: bytes, position: int, what: str) -> tuple[bytes, int]:
    """A part of a body that begins with its length, and where the next begins."""
    size, start = decode_count(body, position)
    if start + size > len(body):
        raise WireError(f"{what} ends inside a part of it.")
    return body[start : start + size], start + size


@dataclass(frozen=True)
class Join:
    """A worker's answer to hello: who it is, what it holds, and its summary."""

    instance: int
    """64 bits drawn when the worker first heard of the run, and kept on its disk."""
    about: dict[str, Any]
    """Its columns, the shapes of its summary, its release."""
    count: int
    values: FloatArray
    cells: bytes = b""
    """Which statistics it has, where workers have their own: `encode_cells`."""


def encode_join(join: Join) -> bytes:
    """Who, the text, and what depends on data: rows, summary, cells."""
    text, numbers = encode_text(join.about), encode_floats(join.values)
    return (
        _WHO.pack(join.instance)
        + _framed(text)
        + encode_count(join.count)
        + _framed(numbers)
        + join.cells
    )


def decode_join(body: bytes) -> Join:
    """The inverse of `encode_join`."""
    if len(body) < _WHO.size:
        raise WireError(f"a join has at least {_WHO.size} bytes; got {len(body)}.")
    text, position = _unframe(body, _WHO.size, "a join")
    count, position = decode_count(body, position)
    numbers, end = _unframe(body, position, "a join")
    instance = int(_WHO.unpack_from(body)[0])
    return Join(instance, decode_text(text), count, decode_floats(numbers), body[end:])


def join_size(text: int, counts: IntArray, numbers: int) -> tuple[int, IntArray]:
    """Bytes of joins with texts of this length, without cells: besides payload, and payload."""
    sizes = count_sizes(np.array([text, floats_size(numbers)]))
    payload = count_sizes(counts) + int(sizes[1]) + floats_size(numbers)
    return _WHO.size + int(sizes[0]) + text, payload


def encode_refusal(reason: Reason, text: str, instance: int = 0) -> bytes:
    """Why not, for a program and for a person."""
    short = text.encode()[:LARGEST_REASON].decode(errors="ignore").encode()
    return _INSTANCE.pack(reason, instance) + short


def decode_refusal(body: bytes) -> tuple[Reason, str, int]:
    """The inverse of `encode_refusal`; control characters become spaces."""
    if len(body) < _INSTANCE.size or len(body) > _INSTANCE.size + LARGEST_REASON:
        raise WireError(f"a refusal cannot have {len(body)} bytes.")
    reason, instance = _INSTANCE.unpack_from(body)
    if reason not in set(Reason):
        raise WireError(f"unknown reason {reason} of a refusal.")
    text = body[_INSTANCE.size :].decode(errors="replace")
    shown = "".join(letter if letter.isprintable() else " " for letter in text)
    return Reason(reason), shown, instance


def encode_question(kind: str, view: dict[str, Any], values: FloatArray) -> bytes:
    """What is asked, of which model, and at which parameters."""
    return _framed(encode_text({"kind": kind, **view})) + encode_floats(values)


def decode_question(body: bytes) -> tuple[Any, dict[str, Any], FloatArray]:
    """The inverse of `encode_question`."""
    text, end = _unframe(body, 0, "a question")
    view = decode_text(text)
    kind = view.pop("kind", None)
    if kind not in QUESTIONS:
        raise WireError(f"unknown kind of question {str(kind)[:40]!r}.")
    return kind, view, decode_floats(body[end:])


def encode_constants(number: int, constants: FloatArray) -> bytes:
    """What binds the model; ``number`` grows whenever other constants are told."""
    return encode_count(number) + encode_floats(constants)


def decode_constants(body: bytes) -> tuple[int, FloatArray]:
    """The inverse of `encode_constants`."""
    number, start = decode_count(body)
    return number, decode_floats(body[start:])


def encode_bundle(parts: Sequence[tuple[Kind, bytes]]) -> bytes:
    """Several bodies that go together under one header; the receiver answers the last."""
    *first, (kind, body) = parts
    return b"".join([*(bytes([k]) + _framed(b) for k, b in first), bytes([kind]), body])


def decode_bundle(body: bytes) -> list[tuple[Kind, bytes]]:
    """The inverse of `encode_bundle`."""
    parts: list[tuple[Kind, bytes]] = []
    position = 0
    while True:
        if position >= len(body) or body[position] not in set(Kind):
            raise WireError("a bundle ends inside a message, or holds one of an unknown kind.")
        kind = Kind(body[position])
        if kind not in NEWS:
            return [*parts, (kind, body[position + 1 :])]
        if len(parts) == LARGEST_BUNDLE:
            raise WireError(f"a bundle holds at most {LARGEST_BUNDLE} pieces of news.")
        part, position = _unframe(body, position + 1, "a bundle")
        parts.append((kind, part))


def payload_size(kind: Kind, body: bytes) -> int:
    """The bytes of a body that depend on data; what cannot be read does not.

    Settings, names of columns and reasons do not: the ledger counts them as envelope.
    """
    try:
        if kind in (Kind.REQUEST, Kind.REPLY):
            return len(body) - decode_count(body)[1]
        if kind in (Kind.JOIN, Kind.QUESTION):
            start = _WHO.size if kind is Kind.JOIN else 0
            return len(body) - _unframe(body, start, "a message")[1]
    except WireError:
        return 0
    return len(body) if kind in (Kind.CONSTANTS, Kind.ANSWER) else 0
