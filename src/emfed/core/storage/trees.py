"""Dataclasses as JSON and arrays, and back, without a line of code in the file.

A tree is numbers, text, None, arrays, tuples, lists and frozen dataclasses of them. Only classes
that a reader knows by name are made again, only from their own fields, and every value must be of
the type that its field declares.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

import numpy as np
from numpy.typing import NDArray

from emfed.core.errors import ModelFileError
from emfed.core.wording import ByFace, Wording

Arrays = dict[str, NDArray[Any]]


def encode(value: Any, names: Mapping[type, str], path: str, arrays: Arrays) -> Any:
    """``value`` as JSON types; its arrays go to ``arrays`` under names that begin with ``path``."""
    if isinstance(value, np.generic):
        value = value.item()
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, np.ndarray):
        if value.dtype.kind not in "biuf":
            raise ModelFileError(f"{path} cannot be saved: it is an array of {value.dtype}.")
        arrays[path] = value
        return {"array": path}
    if isinstance(value, (tuple, list)):
        parts = [encode(v, names, f"{path}/{i}", arrays) for i, v in enumerate(value)]
        return {"tuple": parts} if isinstance(value, tuple) else parts
    if dataclasses.is_dataclass(value) and type(value) in names:
        fields = {
            f.name: encode(getattr(value, f.name), names, f"{path}/{f.name}", arrays)
            for f in dataclasses.fields(value)
        }
        return {"type": names[type(value)], "fields": fields}
    raise ModelFileError(
        f"{path} cannot be saved: model files do not know {type(value).__name__}. If it is a "
        "dataclass of numbers, text, arrays and the like, name it as one of the parts of "
        "emfed.models.register_model."
    )


def decode(tree: Any, classes: Mapping[str, type], arrays: Arrays) -> Any:
    """The inverse of `encode`; raises `ModelFileError` where the tree is none of ours."""
    if tree is None or isinstance(tree, (bool, int, float, str)):
        return tree
    if isinstance(tree, list):
        return [decode(part, classes, arrays) for part in tree]
    if isinstance(tree, dict):
        if set(tree) == {"type", "fields"}:
            return _make(tree["type"], tree["fields"], classes, arrays)
        if set(tree) == {"array"} and tree["array"] in arrays:
            return arrays[tree["array"]]
        if set(tree) == {"tuple"} and isinstance(tree["tuple"], list):
            return tuple(decode(part, classes, arrays) for part in tree["tuple"])
        if set(tree) == {"float"} and tree["float"] in ("inf", "-inf", "nan"):
            return float(tree["float"])
    raise ModelFileError(f"the description of the model makes no sense at {str(tree)[:60]!r}.")


def _make(name: Any, fields: Any, classes: Mapping[str, type], arrays: Arrays) -> Any:
    cls = classes.get(name) if isinstance(name, str) else None
    if cls is None:
        raise ModelFileError(
            Wording(
                "this file holds a {!r}, which is not known here. If it is a model of your own, "
                "{}.",
                str(name)[:60],
                ByFace(
                    "import the module that calls emfed.models.register_model on it, then load "
                    "again",
                    command="name the module that registers it, as in emfed --import MODULE",
                ),
            )
        )
    known = {f.name for f in dataclasses.fields(cls)}
    if not isinstance(fields, dict) or set(fields) != known:
        raise ModelFileError(f"{name} should have the fields {sorted(known)}; it has others.")
    values = {key: decode(part, classes, arrays) for key, part in fields.items()}
    for key, hint in get_type_hints(cls).items():
        if key in values and not fits(values[key], hint):
            raise ModelFileError(f"{name}.{key} is {str(values[key])[:60]!r}, not {hint}.")
    return cls(**values)


def fits(value: Any, hint: Any) -> bool:
    """Whether a decoded value is of the type that a field declares."""
    origin, inner = get_origin(hint), get_args(hint)
    if hint is Any or hint is object:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(value, one) for one in inner)
    if origin is Literal:
        return value in inner
    if origin is not None:
        return _fits_generic(value, origin, inner)
    if hint in (int, float) and isinstance(value, bool):
        return False
    if hint is float:
        return isinstance(value, (int, float))
    return value is None if hint in (None, type(None)) else isinstance(value, hint)


def _fits_generic(value: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    """Do the same for NDArray[...], tuple[...], and what else takes types in brackets."""
    if origin is np.ndarray:
        wanted = get_args(inner[1])[0]
        known = isinstance(value, np.ndarray)
        return known and (wanted is Any or np.issubdtype(value.dtype, wanted))
    if origin is not tuple:  # list[...], Sequence[...] and the like: what encode makes of them
        return isinstance(value, (tuple, list))
    if not isinstance(value, tuple):
        return False
    if len(inner) == 2 and inner[1] is Ellipsis:
        return all(fits(v, inner[0]) for v in value)
    return len(value) == len(inner) and all(map(fits, value, inner))
