"""A coverage-guided fuzzer of every decoder: ``make fuzz`` (atheris, a million inputs).

Whatever the bytes, a decoder returns a message that fits what was expected or raises `WireError`,
in bounded memory. The first bytes of an input choose the decoder and what it expects; the rest is
the message.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np

from emfed.aggregation import codes
from emfed.aggregation.coded import News, decode_weight
from emfed.aggregation.keys import GroupSecrets
from emfed.aggregation.masks import Part, add_parts
from emfed.core.errors import WireError
from emfed.core.protocols import Form
from emfed.core.wire import (
    decode_cells,
    decode_floats,
    decode_payload,
)
from emfed.network.exchange.frames import RunList, unframed
from emfed.network.exchange.statements import (
    BODIES,
    Added,
    Agreement,
    Document,
    Entry,
    HandOut,
    Offer,
    Packed,
    Post,
)

READERS = (
    lambda data, n: decode_floats(data, n),
    lambda data, n: decode_floats(data),
    lambda data, n: News.decode(data, np.arange(n), 100.0),
    lambda data, n: decode_weight(data),
    lambda data, n: _same(Post, data),
    lambda data, n: _same(HandOut, data),
    lambda data, n: _same(Entry, data),
    lambda data, n: _same(Offer, data),
    lambda data, n: _same(RunList, data),
    lambda data, n: _same(Added, data),
    lambda data, n: _same([*BODIES.values()][n % len(BODIES)], data),
    lambda data, n: _added(data),
    lambda data, n: Agreement.read(Document(data)),
    lambda data, n: unframed(data),
    lambda data, n: GroupSecrets.decode(data),
    lambda data, n: codes.decode(data, n, np.linspace(-0.5, 0.49, n)),
    lambda data, n: codes.decode_floats(data, n),
)
BOUNDS = (0, 1, 4, 16, 300, 2**20, 2**30 - 1)


def _same(kind: type[Packed], data: bytes) -> None:
    """What is read can be written in one way alone: signatures are over these bytes."""
    assert kind.decode(data).encode() == data


def _added(data: bytes) -> None:
    """A part, which a relay adds to another one of its kind."""
    part = Part.decode(data)
    assert Part.decode(add_parts({"a": part, "b": part}).encode()).shape == part.shape


def one_input(data: bytes) -> None:
    """Feed one input to one decoder; raises if anything but `WireError` comes out of it."""
    if len(data) < 4:
        return
    choice, reals, n, rest = data[0], data[1] % 4, data[2] % 24, data[4:]
    bound = BOUNDS[data[3] % len(BOUNDS)]
    try:
        if choice >= 128:
            dither = np.linspace(-0.5, 0.49, n) if choice & 8 else None
            message = decode_payload(rest, Form(reals, n, bound), dither)
            assert message.reals.shape == (reals,)
            assert message.symbols.shape == (n,)
            assert np.abs(message.symbols.astype(np.int64)).max(initial=0) <= bound
            assert np.isfinite(message.reals).all()
        elif choice >= 120:
            cells = decode_cells(rest, 50 * n)
            assert np.all(np.diff(cells.keys) > 0)
            assert np.all(cells.weights > 0)
        else:
            READERS[choice % len(READERS)](rest, n)
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
