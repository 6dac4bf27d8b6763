"""A coverage-guided fuzzer of every decoder: ``make fuzz`` (atheris, a million inputs).

Whatever the bytes, a decoder returns a message that fits what was expected or raises `WireError`,
in bounded memory. The first bytes of an input choose the decoder and what it expects; the rest is
the message, sealed in a valid envelope half of the time so that the fuzzer gets past the checksum.
"""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path

import numpy as np

from emfed.core.errors import WireError
from emfed.core.protocols import Form, View
from emfed.core.wire import (
    Header,
    Kind,
    decode_bundle,
    decode_join,
    decode_payload,
    decode_question,
    decode_refusal,
    decode_reply,
    decode_request,
    decode_support,
    decode_table,
    decode_text,
    join_envelope,
    question_envelope,
    seal,
    unseal,
)

CONTROL = (
    lambda body, n: decode_text(body),
    lambda body, n: decode_join(body, n),
    lambda body, n: decode_refusal(body),
    lambda body, n: decode_bundle(body),
    lambda body, n: join_envelope(body),
    lambda body, n: _asked(body, n),
    lambda body, n: question_envelope(body),
)
BOUNDS = (0, 1, 4, 16, 300, 2**20, 2**30 - 1)


def _asked(body: bytes, n: int) -> None:
    """A question, and the view that it is about."""
    _, view, values = decode_question(body, n)
    assert values.shape == (n,)
    with contextlib.suppress(ValueError):  # what a site makes a refusal of
        View.read(view)


def one_input(data: bytes) -> None:
    """Feed one input to one decoder; raises if anything but `WireError` comes out of it."""
    if len(data) < 4:
        return
    choice, reals, n, rest = data[0], data[1] % 4, data[2] % 24, data[4:]
    bound = BOUNDS[data[3] % len(BOUNDS)]
    header = Header(Kind(1 + choice // 2 % len(Kind)), 1, 2 + data[3], 3, 4, reals)
    try:
        if choice % 2:
            rest = seal(header, rest)
        if choice >= 128:
            dither = np.linspace(-0.5, 0.49, n) if choice & 8 else None
            message = decode_payload(data[4:], Form(reals, n, bound), dither)
            assert message.reals.shape == (reals,)
            assert message.symbols.shape == (n,)
            assert np.abs(message.symbols.astype(np.int64)).max(initial=0) <= bound
            assert np.isfinite(message.reals).all()
        elif choice >= 64:
            CONTROL[choice % len(CONTROL)](data[4:], reals)
        elif header.kind == Kind.REQUEST:
            decode_request(rest, header)
        elif header.kind == Kind.REPLY:
            decode_reply(rest, header)
        elif header.kind == Kind.SUPPORT:
            support = decode_support(data[4:], 50 * n)
            assert np.all(np.diff(support) > 0)
        elif header.kind in (Kind.CONSTANTS, Kind.ANSWER):
            decode_table(rest, header)
        else:
            unseal(rest, header)
    except WireError:
        pass


def main() -> None:
    """Run atheris over the corpus beside this file."""
    import atheris

    atheris.instrument_all()
    atheris.Setup([*sys.argv, str(Path(__file__).parent / "corpus")], one_input)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
