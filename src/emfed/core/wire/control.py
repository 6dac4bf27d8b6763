"""Bodies of messages that open a run and keep it in order: settings, joins, refusals, bundles.

docs/wire-format.md specifies them. Settings are JSON, bounded in size; nothing in them is ever
executed.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

import numpy as np

from emfed.core.errors import WireError
from emfed.core.protocols import FloatArray, IntArray
from emfed.core.wire.messages import Kind, count_sizes, decode_count, encode_count
from emfed.core.wire.moments import decode_moments
from emfed.core.wire.text import as_json, read_json

LARGEST_TEXT = 1 << 24
LARGEST_REASON = 500
"""Bytes of a text, unpacked, and of the words of a refusal: what hostile bytes can make a receiver
hold is bounded."""
NEWS = (Kind.CONSTANTS, Kind.SETTINGS, Kind.ROSTER)
LARGEST_BUNDLE = len(NEWS)
"""What goes before another message in a bundle, framed: and so what ends it is not."""
QUESTIONS = ("statistics", "values", "scores", "validation", "clusters", "opening", "private")
_WHO, _TOTAL = struct.Struct("<Q"), struct.Struct("<d")
_INSTANCE = struct.Struct("<BQ")


WORDS = (
    b'"dithering","identity","levels":4,"norm":2.0,"block":"row","scales":"float32","precision":'
    b'"float64","VR-FedEM","observed":["length":["hidden-markov","mixed-mixture","families":{'
    b'"categories","poisson","bernoulli","factor-analysis","n_factors":"row-owner","rank":'
    b'"regression","k-means","linear-gaussian","diag","spherical","full","missing":true'
    b'{"kind":"statistics"{"kind":"scores"{"kind":"values","parts":[0,1,2,3,4],"watched":true'
    b',"cells":true,"weighted":true{"columns":null,"shapes":{"mean":[20],"scatter":[210]},'
    b'"software":"emfed 0.1.0"}{"columns":null,"loss":0.0001,"model":{"covariance_floor":1e-06,'
    b'"covariance_prior":null,"covariance_type":"tied","model":"gaussian-mixture",'
    b'"n_components":10,"weight_concentration":1.0}}{"algorithm":{"algorithm":"EM","name":"EM"'
    b'{"algorithm":{"algorithm":"auto","batch_size":null,"follow_em":false,"incremental":false,'
    b'"inner_rounds":4,"name":"auto","share":0.01},"seed":0}{"algorithm":{"algorithm":"FedEM",'
    b'"batch_size":null,"broadcast":null,"compressor":{"compressor":"subtractive-dithering",'
    b'"noise":0.005},"in_metric":false,"memory_rate":0.0,"memory_start":"zero","name":"FedEM",'
    b'"replacement":false,"simulations":null,"step_size":null},"seed":1,"view":{"clusters":40,'
    b'"parts":[0],"smallest":2}}'
)
"""What texts usually say: a part of the format. The commonest is last, where it costs least."""


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
    """JSON, the same for equal content, deflated with `WORDS` as the dictionary."""
    return deflate(as_json(content))


def deflate(text: str) -> bytes:
    """Text in few bytes."""
    coder = zlib.compressobj(9, wbits=-15, memLevel=9, zdict=WORDS)
    return coder.compress(text.encode()) + coder.flush()


def inflate(body: bytes) -> str:
    """The inverse of `deflate`, bounded in size."""
    coder = zlib.decompressobj(wbits=-15, zdict=WORDS)
    try:
        text = coder.decompress(body, LARGEST_TEXT)
        if coder.unconsumed_tail or not coder.eof or coder.unused_data:
            raise WireError(f"a text that is cut short, or has more than {LARGEST_TEXT} bytes.")
        return text.decode()
    except (zlib.error, ValueError) as error:
        raise WireError(f"a text that cannot be read ({type(error).__name__}).") from None


def decode_text(body: bytes) -> dict[str, Any]:
    """A JSON object, bounded in size and depth; raises `WireError` for anything else."""
    return read_json(inflate(body))


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
    numbers: bytes
    """Its summary: `encode_moments` or `encode_floats`."""
    total: float | None = None
    """The sum of its rows' weights, where they have any."""
    cells: bytes = b""
    """Which statistics it has, where workers have their own: `encode_cells`."""


def encode_join(join: Join) -> bytes:
    """Who, the text, and what depends on data: rows, summary, cells."""
    total = b"" if join.total is None else _TOTAL.pack(join.total)
    front = _WHO.pack(join.instance) + _framed(encode_text(join.about))
    return front + encode_count(join.count) + total + _framed(join.numbers) + join.cells


def decode_join(body: bytes) -> Join:
    """The inverse of `encode_join`."""
    if len(body) < _WHO.size:
        raise WireError(f"a join has at least {_WHO.size} bytes; got {len(body)}.")
    text, position = _unframe(body, _WHO.size, "a join")
    count, position = decode_count(body, position)
    about, total = decode_text(text), None
    if about.get("weighted") is True:
        if len(body) < position + _TOTAL.size:
            raise WireError("a join ends inside the sum of its weights.")
        total = float(_TOTAL.unpack_from(body, position)[0])
        if not 0 < total < np.inf:
            raise WireError(f"weights of rows add up to {total}.")
        position += _TOTAL.size
    numbers, end = _unframe(body, position, "a join")
    return Join(int(_WHO.unpack_from(body)[0]), about, count, numbers, total, body[end:])


def join_size(
    about: Mapping[str, Any], counts: IntArray, numbers: IntArray
) -> tuple[int, IntArray]:
    """Bytes of joins with so many of a summary, without cells: besides payload, and payload."""
    text = len(encode_text(about))
    total = _TOTAL.size if about.get("weighted") else 0
    payload = count_sizes(counts) + total + count_sizes(numbers) + numbers
    return _WHO.size + int(count_sizes(np.array(text))) + text, payload


def encode_constants(rows: int, numbers: bytes) -> bytes:
    """The number of rows of all workers, and their combined summary."""
    return encode_count(rows) + numbers


def decode_constants(body: bytes, count: int) -> FloatArray:
    """The rows, and so many numbers of the combined summary."""
    rows, position = decode_count(body)
    return np.concatenate([[float(rows)], decode_moments(body[position:], count)])


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


def encode_question(kind: str, view: dict[str, Any], numbers: bytes) -> bytes:
    """What is asked, of which model, and at which parameters; none: those of the last round.

    Numbers that are multiples of a power of two are statistics, of which the parameters are T.
    """
    return _framed(encode_text({"kind": kind, **view})) + numbers


def decode_question(body: bytes) -> tuple[Any, dict[str, Any], bytes]:
    """The inverse of `encode_question`."""
    text, end = _unframe(body, 0, "a question")
    view = decode_text(text)
    kind = view.pop("kind", None)
    if kind not in QUESTIONS:
        raise WireError(f"unknown kind of question {str(kind)[:40]!r}.")
    return kind, view, body[end:]


def encode_end(about: Mapping[str, Any], model: bytes = b"") -> bytes:
    """How a run ended, and the model file where the run hands it out."""
    return _framed(encode_text(about)) + model


def decode_end(body: bytes) -> tuple[dict[str, Any], bytes]:
    """The inverse of `encode_end`."""
    text, end = _unframe(body, 0, "the end of a run")
    return decode_text(text), body[end:]


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
    return len(body) if kind in (Kind.CONSTANTS, Kind.ANSWER, Kind.MASKED) else 0
