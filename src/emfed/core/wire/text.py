"""Settings as JSON: the same bytes for equal content, bounded in values and depth."""

from __future__ import annotations

import json
from collections.abc import Mapping
from math import isfinite
from typing import Any

from emfed.core.errors import WireError

MOST_VALUES, DEEPEST = 1 << 20, 32
"""Values in a text, about, and how often lists and objects stand in each other. Four bytes of text
may be a hundred of memory; parameters of a large model are half a million, and descriptions of
models are six deep."""


def as_json(content: Mapping[str, Any]) -> str:
    """The shortest JSON, the same for equal content."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)


def read_json(text: str) -> dict[str, Any]:
    """A JSON object, bounded in depth and values; raises `WireError` for anything else.

    Its numbers are finite, and whole ones have 64 bits: what comes out can be sent on, compared and
    computed with. (Python would read NaN, 1e999, a number of a thousand digits, and halves of
    characters that cannot be written.)
    """
    if sum(map(text.count, ",:[{")) > MOST_VALUES:
        raise WireError(f"settings hold at most {MOST_VALUES} values.")
    try:
        content = json.loads(text, parse_int=_whole, parse_float=_finite, parse_constant=_finite)
        json.dumps(content, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise WireError(f"settings that are not JSON ({type(error).__name__}).") from None
    if not isinstance(content, dict):
        raise WireError("settings must be a JSON object.")
    if _is_deeper(content, DEEPEST):
        raise WireError(f"settings hold at most {DEEPEST} lists and objects in each other.")
    return content


def _whole(digits: str) -> int:
    number = int(digits)
    if not -(1 << 63) <= number < 1 << 64:
        raise ValueError("a number of more than 64 bits.")
    return number


def _finite(digits: str) -> float:
    number = float(digits)
    if not isfinite(number):
        raise ValueError("a number that is not finite.")
    return number


def _is_deeper(content: Any, depth: int) -> bool:
    """Whether lists and objects stand in each other more often than that; without recursion."""
    level = [content]
    for _ in range(depth):
        level = [
            value
            for each in level
            if isinstance(each, dict | list)
            for value in (each.values() if isinstance(each, dict) else each)
        ]
    return any(isinstance(each, dict | list) for each in level)
