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

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar


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
    """An option is out of its range, or options contradict each other; it is also a `ValueError`.

    Examples
    --------
    >>> import emfed
    >>> try:
    ...     emfed.FedEM(step_size=3.0)
    ... except emfed.SettingsError as error:
    ...     print(error)
    step_size must lie in (0, 2); got 3.0. EM itself is step 1; ...
    """


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


class MembersChanged(EmfedError):
    """Who takes part has changed while everyone was needed: what was under way is begun anew."""


class ExtraError(EmfedError, ImportError):
    """Something was asked for that needs an extra of the package; the message names it."""


class ServerCrash(EmfedError):
    """The server died in the middle of a round: it comes back with what it had persisted."""


class WireError(EmfedError, ValueError):
    """Bytes are not an emfed message, or not the one expected; it is also a `ValueError`.

    Examples
    --------
    >>> import emfed
    >>> issubclass(emfed.WireError, ValueError)
    True
    """


class OtherRelease(WireError):
    """A message has the format of another release: the ends must run the same."""


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


def check_type(name: str, value: object, kind: type, example: str) -> None:
    """Raise a `SettingsError` unless ``value`` is an instance of ``kind``."""
    if not isinstance(value, kind):
        got = f"the class {value.__name__}" if isinstance(value, type) else repr(value)[:80]
        raise SettingsError(f"{name} must be something like {example}; got {got}.")


def check_range(
    name: str,
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
    except (TypeError, ValueError):
        raise SettingsError(f"{name} must be a number in {interval}; got {value!r}.") from None
    above = number > low if open_low else number >= low
    below = number < high if open_high else number <= high
    if not (above and below):  # also catches NaN
        tail = f" {hint}" if hint else ""
        raise SettingsError(f"{name} must lie in {interval}; got {value!r}.{tail}")
    return number


def check_count(name: str, value: int, low: int = 1) -> int:
    """Return ``int(value)``, or raise a `SettingsError` if it is no whole number >= ``low``."""
    import operator

    try:
        number = operator.index(value)
    except TypeError:
        raise SettingsError(f"{name} must be a whole number >= {low}; got {value!r}.") from None
    if isinstance(value, bool) or number < low:
        raise SettingsError(f"{name} must be a whole number >= {low}; got {value!r}.")
    return number
