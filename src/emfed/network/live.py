"""Sites that follow one fit after the other, as whoever asks for the fits sees them.

An analyst in this process says what is to be followed, orders the beginning and an early end, and
reads what all sites have signed. What is fitted is opaque here (`emfed.fitting.live` knows it).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, final

from emfed.aggregation.lattice import SMALLEST_SET
from emfed.core.errors import ParticipationError, SettingsError

if TYPE_CHECKING:  # a fit in this process needs no keys
    from emfed.network.conducting import Conductor
    from emfed.network.exchange.followed import Ended, Program
    from emfed.network.exchange.statements import Agreement


@final
@dataclass(frozen=True, eq=False)
class AskedRun:
    """What an analyst wants sites to follow.

    Parameters
    ----------
    document : mapping
        The settings in words, as all members sign them.
    make : callable
        From what is agreed on to the program as the analyst follows it.
    masks : bool or None
        Whether sums are masked; None: with three sites or more.
    ends : callable
        Asked again and again: why the run is to end early; empty as long as it is not.
    keep : Path, optional
        A file from which the run goes on, if it is there.
    """

    document: Mapping[str, Any]
    make: Callable[[Agreement], Program]
    masks: bool | None = None
    ends: Callable[[], str] = str
    keep: Path | None = None
    newcomers: bool = True
    """Whether sites may come after the beginning."""

    def agreement(self, run: str, sites: Sequence[str], analyst: str) -> Agreement:
        """The settings that the analyst signs; raises `SettingsError` if nobody could follow."""
        from emfed.network.exchange.statements import Agreement, is_coded

        masked = len(sites) >= SMALLEST_SET if self.masks is None else self.masks
        if not sites:
            raise ParticipationError("no site is connected: start `emfed join` at the sites first.")
        if masked and len(sites) < SMALLEST_SET:
            raise SettingsError(
                f"masked sums take {SMALLEST_SET} sites or more, and {len(sites)} are connected: "
                "wait for more, or fit with masks=False if the owners of the sites allow that."
            )
        return Agreement(
            tuple(sorted(sites)),
            (analyst,),
            masked,
            newcomers=self.newcomers,
            run=run,
            program=self.document,
            coded=is_coded(masked, self.document),
        )


OfferedColumns = Sequence[str] | int | None


def numbered(width: int) -> tuple[str, ...]:
    """What columns are called that have no names."""
    return tuple(f"x{j}" for j in range(1, width + 1))


class LiveSites(ABC):
    """Sites that are there now, for any number of fits, one after the other.

    `emfed.fit`, `emfed.select_components`, estimators and `emfed.impute` take them in place of
    tables. Use them in a ``with``.

    Parameters
    ----------
    columns : sequence of str or int, optional
        The columns of a fit that names none itself; a number: so many that have no names.

    Examples
    --------
    `LocalSites` keeps them in this process, `listen` and `connect` reach others:

    >>> from emfed.network import LiveSites, LocalSites
    >>> issubclass(LocalSites, LiveSites)
    True
    """

    def __init__(self, columns: OfferedColumns = None) -> None:
        named = numbered(columns) if isinstance(columns, int) else columns
        self.columns = None if named is None else tuple(named)

    @property
    @abstractmethod
    def names(self) -> tuple[str, ...]:
        """Who is connected now."""

    @abstractmethod
    def follow(self, asked: AskedRun) -> tuple[Ended, Conductor]:
        """Let all follow a run to its end; `Conductor.check` says whether a model is final."""

    def close(self) -> None:  # noqa: B027 (some have nothing to give back)
        """Let the sites go; a second time does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
