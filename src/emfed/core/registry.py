"""Names for what can be made: from a description or from words to an object, never to code.

A model, compressor or algorithm says by `describe` what was chosen, as plain JSON types. A
`Registry` is the way back. Nothing that is not registered can be made, an unknown name or setting
is refused in words, and what is made must describe itself as it was described, so that two
releases that mean different things by one word do not work together.

`register_model` is the one statement that makes a model known: to networks, which build it from
its description; to `emfed.models.make_model`, which the command line and TOML files go through; and
to model files, which hold its dataclass under the same name.

Decision: docs/decisions/022-registries-and-protocols.md
"""

from __future__ import annotations

import dataclasses
import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from emfed.core.configuration import check_keys, nearest
from emfed.core.errors import EmfedError, SettingsError
from emfed.core.protocols import Model

LONGEST_NAME = 80
"""Letters of a name; what is longer is no name, and errors repeat no more of it than this."""

UNSUITED = TypeError, ValueError, LookupError, AttributeError, ArithmeticError
"""What a function may raise that is given settings which are none of its own."""


class Described(Protocol):
    """Whatever tells what was chosen."""

    def describe(self) -> dict[str, Any]:
        """What was chosen, as plain JSON types."""


Made = TypeVar("Made", bound=Described)
Maker = TypeVar("Maker", bound=Callable[..., Any])


def plain(description: Any) -> Any:
    """A description as JSON would bring it back, numpy's numbers and arrays included."""

    def convert(value: Any) -> Any:
        return value.item() if isinstance(value, np.generic) else np.asarray(value).tolist()

    return json.loads(json.dumps(description, default=convert))


class Registry(Mapping[str, Callable[..., Made]], Generic[Made]):
    """Classes or functions by the name that what they make describes itself with.

    ``what`` they make is also the key of the name in a description; the other keys are arguments,
    which ``read`` turns from JSON types into those that the function takes.
    """

    def __init__(
        self,
        what: str,
        makers: Mapping[str, Callable[..., Made]] | None = None,
        read: Callable[[dict[str, Any]], dict[str, Any]] = dict,
    ) -> None:
        self.what, self._makers, self._read = what, dict(makers or {}), read

    def __getitem__(self, name: str) -> Callable[..., Made]:
        return self._makers[name]

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and name in self._makers  # words of others may be lists

    def __iter__(self) -> Iterator[str]:
        return iter(self._makers)

    def __len__(self) -> int:
        return len(self._makers)

    def register(self, name: str, maker: Callable[..., Made]) -> None:
        """Add one, unless another has its name."""
        _add(self._makers, name, maker, f"there is another {self.what} {name!r}")

    def build(self, description: Any) -> Made:
        """Make the object that describes itself so.

        Parameters
        ----------
        description : mapping
            What the object's ``describe`` gave: its name, and its settings as plain JSON types.

        Returns
        -------
        object
            The object.

        Raises
        ------
        SettingsError
            If the name or a setting is unknown, or what is made describes itself otherwise.

        Examples
        --------
        >>> import emfed
        >>> description = emfed.Dithering(levels=4).describe()
        >>> emfed.compressors.build_compressor(description) == emfed.Dithering(levels=4)
        True
        """
        if not isinstance(description, Mapping) or not isinstance(description.get(self.what), str):
            raise SettingsError(
                f"a description of a {self.what} names it under {self.what!r}; got none."
            )
        settings = dict(description)
        name = settings.pop(self.what)
        if name not in self:
            raise SettingsError(
                f"unknown {self.what} {name[:LONGEST_NAME]!r}; known here: "
                f"{', '.join(sorted(self))}. One of your own must be imported first."
            )
        what = f"the {self.what} {name!r}"
        try:
            made = self[name](**self._read(settings))
            same = plain(made.describe()) == plain(description)
        except SettingsError:
            raise
        except (*UNSUITED, EmfedError) as error:
            raise SettingsError(
                f"{what} cannot be made from these settings, perhaps of another release of emfed "
                f"({type(error).__name__}: {str(error)[:200]})."
            ) from None
        if not same:
            raise SettingsError(
                f"{what} made from these settings describes itself otherwise: the other side runs "
                "another release of emfed."
            )
        return made

    def make(self, name: str, options: Mapping[str, Any]) -> Made:
        """The object of this name with these options, as a person writes them: others by default.

        An option must be one that the object's description tells. Else it would get lost on the
        way to a site.
        """
        if name not in [*self]:  # what came from elsewhere may not even be hashable
            hint = nearest(str(name)[:LONGEST_NAME], sorted(self))
            raise SettingsError(f"unknown {self.what} {str(name)[:LONGEST_NAME]!r}; {hint}")
        known = inspect.signature(self[name]).parameters
        check_keys(options, list(known), name)
        bare = [key for key, option in known.items() if option.default is option.empty]
        if lacking := [key for key in bare if key not in options]:
            raise SettingsError(f"{name} needs {' and '.join(lacking)}.")
        try:
            made = self[name](**self._read(dict(options)))
        except EmfedError:
            raise
        except UNSUITED as error:
            words = f"{type(error).__name__}: {str(error)[:200]}"
            raise SettingsError(f"{name} cannot be made from these options ({words}).") from None
        told = made.describe()
        for key, value in options.items():
            if key not in told and not np.array_equal(value, known[key].default):
                raise SettingsError(f"{name}: {key} follows from the data and cannot be chosen.")
        return made


MODELS: Registry[Model] = Registry("model")
"""Every model by the name it describes itself with."""
STORED: dict[str, type] = {}
"""Every dataclass that model files may hold, by its name there, which outlives the class's own."""


def stored(name: str) -> Callable[[Maker], Maker]:
    """Let model files hold a dataclass of numbers, text, arrays and the like, under this name."""

    def add(cls: Maker) -> Maker:
        if not (isinstance(cls, type) and dataclasses.is_dataclass(cls)):
            raise SettingsError(f"{name!r} must be a dataclass to be in model files; got {cls!r}.")
        _add(STORED, name, cls, f"model files already call another class {name!r}")
        return cls

    return add


def register_model(name: str, *, parts: Sequence[type] = ()) -> Callable[[Maker], Maker]:
    """Make a model known by ``name``: in networks, files, reports, TOML and on the command line.

    Use it as a decorator of the model's class, a dataclass, or of a function that makes the model.
    Its arguments must be the keys of the model's description, apart from the name under
    ``"model"``. Every party must have imported the module that does this.

    Parameters
    ----------
    name : str
        The name under which the model describes itself.
    parts : sequence of type
        Other dataclasses that the model's fields hold.

    Returns
    -------
    callable
        The decorator.

    Raises
    ------
    SettingsError
        If another model has the name.

    Examples
    --------
    The example of docs/your-own-model.md begins so::

        @emfed.models.register_model("lifetimes")
        @dataclass(frozen=True)
        class Lifetimes(Model): ...

    `MODELS` holds what is registered:

    >>> import emfed
    >>> "gaussian-mixture" in emfed.models.MODELS
    True
    """

    def add(maker: Maker) -> Maker:
        if isinstance(maker, type):
            stored(name)(maker)
        for part in parts:
            stored(f"{name}/{part.__name__}")(part)
        MODELS.register(name, maker)
        return maker

    return add


def _add(table: dict[str, Any], name: str, made: Any, taken: str) -> None:
    """Put it under its name; a module imported anew, in a notebook say, replaces its own."""
    if not 0 < len(name) <= LONGEST_NAME:
        raise SettingsError(f"a name has 1 to {LONGEST_NAME} letters; got {name[:100]!r}.")
    there = table.get(name, made)
    if (there.__module__, there.__qualname__) != (made.__module__, made.__qualname__):
        raise SettingsError(f"{taken}: choose another name.")
    table[name] = made
