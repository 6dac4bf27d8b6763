"""Objects to bytes and back: what the byte ledger counts is what this codec produces."""

from fedem.wire.packing import (
    decode_compressed,
    decode_floats,
    encode_compressed,
    encode_floats,
    encode_reply,
    encode_request,
    encoded_sizes,
    reply_sizes,
    request_size,
)

__all__ = [
    "decode_compressed",
    "decode_floats",
    "encode_compressed",
    "encode_floats",
    "encode_reply",
    "encode_request",
    "encoded_sizes",
    "reply_sizes",
    "request_size",
]
