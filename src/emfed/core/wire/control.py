"""Messages that open a run and keep it in order: settings, joining, refusals, bundles.

Like all messages they come in the envelope of `emfed.core.wire.messages`, and docs/wire-format.md
specifies them. Settings are JSON, bounded in size; nothing in them is ever executed.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from emfed.core.errors import WireError
from emfed.core.protocols import FloatArray
from emfed.core.wire.messages import ENVELOPE, Header, seal
from emfed.core.wire.payload import decode_floats, encode_floats, floats_size

LARGEST_TEXT = 1 << 24
LARGEST_REASON = 500
LARGEST_BUNDLE = 4
QUESTIONS = ("statistics", "values", "scores", "validation")
_JOIN = struct.Struct("<QIQ")
_LENGTH = struct.Struct("<I")
_INSTANCE = struct.Struct("<BQ")
JOIN_ENVELOPE = ENVELOPE + 12
QUESTION_ENVELOPE = ENVELOPE + _LENGTH.size
"""Bytes of a join and of a question that are neither text nor numbers."""
BUNDLE_FRAME = _LENGTH.size
"""Bytes around each message of a bundle: its length."""


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


def encode_text(header: Header, content: dict[str, Any]) -> bytes:
    """Settings, as JSON."""
    return seal(header, _json(content))


def _json(content: Any) -> bytes:
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


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


def encode_join(header: Header, join: Join) -> bytes:
    """The body of a join in its envelope."""
    text = _json(join.about)
    front = _JOIN.pack(join.instance, len(text), join.count)
    return seal(header, front + text + encode_floats(join.values) + join.cells)


def decode_join(body: bytes, dimension: int) -> Join:
    """The inverse of `encode_join`, for a body with so many numbers."""
    if len(body) < _JOIN.size:
        raise WireError(f"a join has at least {_JOIN.size} bytes; got {len(body)}.")
    instance, length, count = _JOIN.unpack_from(body)
    end = _JOIN.size + length
    if len(body) < end:
        raise WireError("a join ends inside its text.")
    about = decode_text(body[_JOIN.size : end])
    cells = body[end + floats_size(dimension) :] if about.get("cells") is True else b""
    values = decode_floats(body[end : len(body) - len(cells)], dimension)
    return Join(instance, about, count, values, cells)


def join_envelope(body: bytes) -> int:
    """Bytes of a join that are neither its number of rows nor its summary."""
    if len(body) < _JOIN.size:
        raise WireError(f"a join has at least {_JOIN.size} bytes; got {len(body)}.")
    return min(ENVELOPE + len(body), JOIN_ENVELOPE + int(_JOIN.unpack_from(body)[1]))


def encode_refusal(header: Header, reason: Reason, text: str, instance: int = 0) -> bytes:
    """Why not, for a program and for a person."""
    short = text.encode()[:LARGEST_REASON].decode(errors="ignore").encode()
    return seal(header, _INSTANCE.pack(reason, instance) + short)


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


def encode_question(header: Header, kind: str, view: dict[str, Any], values: FloatArray) -> bytes:
    """What is asked, of which model, and at which parameters."""
    text = _json({"kind": kind, **view})
    return seal(header, _LENGTH.pack(len(text)) + text + encode_floats(values))


def decode_question(body: bytes, dimension: int) -> tuple[Any, dict[str, Any], FloatArray]:
    """The inverse of `encode_question`, for a body with so many parameters."""
    size = _LENGTH.unpack_from(body)[0] if len(body) >= _LENGTH.size else len(body)
    end = _LENGTH.size + size
    if end > len(body):
        raise WireError("a question ends inside its text.")
    view = decode_text(body[_LENGTH.size : end])
    kind = view.pop("kind", None)
    if kind not in QUESTIONS:
        raise WireError(f"unknown kind of question {str(kind)[:40]!r}.")
    return kind, view, decode_floats(body[end:], dimension)


def question_envelope(body: bytes) -> int:
    """Bytes of a question that are not its parameters."""
    size = _LENGTH.unpack_from(body)[0] if len(body) >= _LENGTH.size else len(body)
    return ENVELOPE + min(len(body), _LENGTH.size + size)


def encode_bundle(header: Header, messages: list[bytes]) -> bytes:
    """Several messages that go together; the receiver answers the last."""
    return seal(header, b"".join(_LENGTH.pack(len(m)) + m for m in messages))


def decode_bundle(body: bytes) -> list[bytes]:
    """The inverse of `encode_bundle`."""
    messages: list[bytes] = []
    position = 0
    while position < len(body):
        if len(messages) == LARGEST_BUNDLE:
            raise WireError(f"a bundle holds at most {LARGEST_BUNDLE} messages.")
        end = position + _LENGTH.size
        size = _LENGTH.unpack_from(body, position)[0] if end <= len(body) else len(body)
        if end + size > len(body):
            raise WireError("a bundle ends inside a message.")
        messages.append(body[end : end + size])
        position = end + size
    if not messages:
        raise WireError("an empty bundle.")
    return messages
