"""Everything emfed raises on purpose.

::

    EmfedError
    ├── DataError            rows, columns or workers that cannot be used   (also ValueError)
    ├── SettingsError        an option out of its range or contradictory    (also ValueError)
    ├── NumericalError       an E- or M-step gave a number that is not finite
    ├── CheckpointError      a checkpoint that cannot be written, read or continued
    ├── ModelFileError       a model file that cannot be written or read
    ├── FederationError      processes of a federation that cannot be started, reached or kept
    ├── ContractError        a model that does not keep what a model promises
    ├── ParticipationError   too few workers answered; the run can be resumed
    ├── MembersChanged       who takes part changed, and what was under way is begun anew
    ├── ExtraError           an optional part that is not installed         (also ImportError)
    ├── ServerCrash          a simulated crash of the server, which a run survives
    └── WireError            bytes that are not an emfed message             (also ValueError)
        └── OtherRelease     a message in the format of another release

    EmfedWarning             (UserWarning) something works, but look at it

A message says what was expected, what came, and what to do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any, Self, TypeVar

from emfed.core.wording import UNSET, Face, Setting, Wording, name_of


class EmfedError(Exception):
    """Base of every error that emfed raises on purpose.

    Examples
    --------
    >>> import emfed
    >>> try:
    ...     emfed.gaussian_mixture(0)
    ... except emfed.EmfedError as error:
    ...     print(type(error).__name__)
    SettingsError
    """

    def on(self, face: Face) -> Self:
        """The same error with settings by the names that this face has for them."""
        self.args = (face(self.message), *self.args[1:])
        return self

    @property
    def message(self) -> str:
        """The message, a `Wording` if it mentions settings."""
        return self.args[0] if self.args else ""


class DataError(EmfedError, ValueError):
    """Rows, columns or workers cannot be used; it is also a `ValueError`.

    Examples
    --------
    >>> import emfed
    >>> try:
    ...     emfed.fit(emfed.gaussian_mixture(2), [[1.0], [float("nan")]])
    ... except emfed.DataError as error:
    ...     print("the rows cannot be used")
    the rows cannot be used
    """


class SettingsError(EmfedError, ValueError):
    """A setting is out of its range, or settings contradict each other; also a `ValueError`.

    It takes a message, or what one is made of. Each face (Python, estimators, the command line,
    ``run.toml``) prints the settings that it mentions by its own names.

    Parameters
    ----------
    message : str
        The message; a `Wording` where it mentions settings.
    setting : str or Setting
        The setting that is wrong.
    must : str
        What it must be or do, after "must".
    got : object
        The value that came.
    instead : str
        What to do.

    Examples
    --------
    >>> import emfed
    >>> try:
    ...     emfed.FedEM(step_size=3.0)
    ... except emfed.SettingsError as error:
    ...     print(error)
    step_size must lie in (0, 2); got 3.0. EM itself is step 1; ...
    """

    def __init__(
        self,
        message: str = "",
        *,
        setting: str | Setting | None = None,
        must: str = "",
        got: Any = UNSET,
        instead: str = "",
    ) -> None:
        if setting is not None:
            came = "" if got is UNSET else f"; got {got!r}"
            hint = Wording(" {}", instead) if instead else ""
            message = Wording("{} must {}{}.{}", name_of(setting), must, came, hint)
        super().__init__(message)
        self.setting, self.must, self.got, self.instead = setting, must, got, instead


class NumericalError(EmfedError):
    """An E- or M-step gave a number that is not finite.

    Examples
    --------
    >>> import emfed
    >>> issubclass(emfed.NumericalError, emfed.EmfedError)
    True
    """


class CheckpointError(EmfedError):
    """A checkpoint cannot be written, read or continued from.

    When a run stops because its checkpoint could not be written, ``result`` holds what the run
    had reached, so nothing computed is lost.

    Examples
    --------
    >>> import emfed
    >>> emfed.CheckpointError("the disk is full").result is None
    True
    """

    result: object | None = None


class ModelFileError(EmfedError):
    """A model file cannot be written, or is not a whole model file of this release.

    Examples
    --------
    >>> import emfed
    >>> try:
    ...     emfed.load("nothing.emfed")
    ... except emfed.ModelFileError as error:
    ...     print("there is no such file")
    there is no such file
    """


class FederationError(EmfedError):
    """Processes of a federation cannot be started, reached or kept alive.

    Examples
    --------
    >>> import emfed
    >>> issubclass(emfed.FederationError, emfed.EmfedError)
    True
    """


class ContractError(EmfedError):
    """A model does not keep the contract of `emfed.core.protocols.Model`; the message says how.

    Examples
    --------
    `emfed.testing.check_model` raises it:

    >>> import emfed
    >>> issubclass(emfed.ContractError, emfed.EmfedError)
    True
    """


class ParticipationError(EmfedError):
    """Too few workers joined or answered in time; a run with a checkpoint can be resumed.

    ``refused`` holds the workers of a network that will not take part, and why: waiting does not
    bring them. ``reached`` is what `emfed.fitting.serve` would return if it ended here.

    Examples
    --------
    >>> import emfed
    >>> dict(emfed.ParticipationError("two workers joined; the run needs three").refused)
    {}
    """

    refused: Mapping[str, str] = MappingProxyType({})
    reached: Any = None


class ExtraError(EmfedError, ImportError):
    """Something was asked for that needs an extra of the package; the message names it."""


class WireError(EmfedError, ValueError):
    """Bytes are not an emfed message, or not the one expected; it is also a `ValueError`.

    Examples
    --------
    >>> import emfed
    >>> issubclass(emfed.WireError, ValueError)
    True
    """


class EmfedWarning(UserWarning):
    """Something works but deserves a look.

    Examples
    --------
    >>> import warnings
    >>> import emfed
    >>> warnings.simplefilter("ignore", emfed.EmfedWarning)
    """


Told = TypeVar("Told")


def known(value: Told | None) -> Told:
    """What binding a model tells it, or words that it was not told."""
    if value is None:
        raise EmfedError("this model does not know its data yet: use emfed.fit, or bind().")
    return value


@contextmanager
def worded(face: Face) -> Iterator[None]:
    """Within, errors call settings by the names that this face has for them."""
    try:
        yield
    except EmfedError as error:
        error.on(face)
        raise


def check_type(name: str | Setting, value: object, kind: type, example: str) -> None:
    """Raise a `SettingsError` unless ``value`` is an instance of ``kind``."""
    if not isinstance(value, kind):
        got = f"the class {value.__name__}" if isinstance(value, type) else repr(value)[:80]
        message = Wording("{} must be something like {}; got {}.", name_of(name), example, got)
        raise SettingsError(message)


def check_choice(name: str | Setting, value: Any, choices: Iterable[str]) -> None:
    """Raise a `SettingsError` unless ``value`` is one of the words."""
    words = list(choices)
    if value not in words:
        raise SettingsError(setting=name, must=f"be one of {', '.join(words)}", got=value)


def check_range(
    name: str | Setting,
    value: float,
    low: float,
    high: float,
    *,
    open_low: bool = False,
    open_high: bool = False,
    hint: str = "",
) -> float:
    """Return ``float(value)``, or raise a `SettingsError` that states the allowed interval."""
    interval = f"{'(' if open_low else '['}{low:g}, {high:g}{')' if open_high else ']'}"
    try:
        number = float(value)
    except (TypeError, ValueError, OverflowError):
        raise SettingsError(setting=name, must=f"be a number in {interval}", got=value) from None
    above = number > low if open_low else number >= low
    below = number < high if open_high else number <= high
    if not (above and below):  # also catches NaN
        raise SettingsError(setting=name, must=f"lie in {interval}", got=value, instead=hint)
    return number


def check_count(name: str | Setting, value: int, low: int = 1) -> int:
    """Return ``int(value)``, or raise a `SettingsError` if it is no whole number >= ``low``."""
    import operator

    try:
        number = operator.index(value)
    except TypeError:
        number = low - 1
    if isinstance(value, bool) or number < low:
        raise SettingsError(setting=name, must=f"be a whole number >= {low}", got=value) from None
    return number
