"""Messages that mention settings, which every face prints with its own names.

A setting of a fit is ``n_init=5`` in Python, ``--n-init 5`` on the command line and ``n_init = 5``
in ``run.toml``. A message keeps what it mentions as objects; a `Face` writes them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any


class Unset(Enum):
    """The type of `UNSET`, of which there is one object, in copies, too."""

    UNSET = "UNSET"


UNSET = Unset.UNSET
"""No value: None is one."""


@dataclass(frozen=True)
class Setting:
    """A setting that a message mentions, with a value if it advises one."""

    name: str
    """The name in Python."""
    value: Any = UNSET
    """The value; `UNSET` mentions the name alone."""
    of: str = ""
    """The function that takes it, where that is another than the one that was called."""


@dataclass(frozen=True)
class ByFace:
    """A phrase that faces differ in by more than the name of a setting; "" leaves it out."""

    python: str
    """The phrase in Python; of the other faces None stands for it."""
    estimator: str | None = None
    toml: str | None = None
    command: str | None = None


class Face:
    """How one way of using emfed writes settings: this one is Python, the others change it."""

    name = "python"

    def setting(self, mentioned: Setting) -> str:
        """A setting by its name here, and with its value if it has one."""
        name = mentioned.name
        if mentioned.value is not UNSET:
            name = f"{name}={self.value(mentioned.value)}"
        return f"{mentioned.of}({name})" if mentioned.of else name

    def value(self, value: Any) -> str:
        """A value as it is typed here."""
        if isinstance(value, ByFace):
            return self.phrase(value)
        if isinstance(value, Mapping):
            return "{" + ", ".join(f"{k!r}: {self.value(v)}" for k, v in value.items()) + "}"
        return repr(value)

    def phrase(self, phrase: ByFace) -> str:
        """The words of this face."""
        here: str | None = getattr(phrase, self.name)
        return phrase.python if here is None else here

    def __call__(self, part: Any) -> Any:
        """A part of a message: what it mentions in the words of this face, the rest as it is."""
        if isinstance(part, Setting):
            return self.setting(part)
        if isinstance(part, ByFace):
            return self.phrase(part)
        if isinstance(part, Wording):
            return part.template.format(*map(self, part.parts))
        return part


PYTHON = Face()


class Wording(str):
    """A message in Python's words that keeps its parts, so that another face can word it.

    Parameters
    ----------
    template : str
        The message, with ``{}`` for each part, as in `str.format`.
    *parts : object
        A `Setting`, `ByFace` or `Wording`; anything else is printed as it is.

    Examples
    --------
    >>> message = Wording("{} goes with {}.", Setting("resume", True), Setting("checkpoint"))
    >>> message
    'resume=True goes with checkpoint.'
    """

    template: str
    parts: tuple[Any, ...]

    def __new__(cls, template: str, *parts: Any) -> Wording:
        """Write the message in Python's words."""
        made = super().__new__(cls, template.format(*map(PYTHON, parts)))
        made.template, made.parts = template, parts
        return made

    def __getnewargs__(self) -> Any:
        """What a copy is made from."""
        return (self.template, *self.parts)


def name_of(name: str | Setting) -> Setting:
    """A setting from its name."""
    return name if isinstance(name, Setting) else Setting(name)
