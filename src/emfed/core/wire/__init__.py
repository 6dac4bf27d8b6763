"""Objects to bytes and back: what the ledger counts is what this codec produces."""

from emfed.core.wire.cells import cells_size, decode_cells, encode_cells
from emfed.core.wire.counts import LARGEST_PAYLOAD, count_sizes, decode_count, encode_count
from emfed.core.wire.payload import (
    decode_floats,
    decode_payload,
    encode_floats,
    encode_numbers,
    encode_payload,
    floats_size,
    is_grid,
    payload_sizes,
)
from emfed.core.wire.text import as_json, read_json

__all__ = [
    "LARGEST_PAYLOAD",
    "as_json",
    "cells_size",
    "count_sizes",
    "decode_cells",
    "decode_count",
    "decode_floats",
    "decode_payload",
    "encode_cells",
    "encode_count",
    "encode_floats",
    "encode_numbers",
    "encode_payload",
    "floats_size",
    "is_grid",
    "payload_sizes",
    "read_json",
]
