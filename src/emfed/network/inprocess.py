"""Federations: where the rows of a fit's workers are. Two are in this process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Self, final

from emfed.aggregation.unmasked import Presence
from emfed.core.sums import AskedWorkers
from emfed.data.held import HeldWorkers
from emfed.data.tables import Workers


class Federation(ABC):
    """Workers that one process drives: it asks them for sums and answers, and adds.

    Examples
    --------
    `StackedFederation`, `LoopFederation`, `FaultyFederation` and `RayFederation` are its kinds:

    >>> from emfed.network import FEDERATIONS, Federation
    >>> all(issubclass(kind, Federation) for kind in FEDERATIONS.values())
    True
    """

    @property
    @abstractmethod
    def workers(self) -> AskedWorkers:
        """Who is asked; `AskedWorkers.sum` is all that most fits need of them."""

    @property
    def present(self) -> Presence | None:
        """Whose messages arrive; None: everyone's."""
        return None

    @property
    @final
    def size(self) -> int:
        """The number of workers."""
        return len(self.workers.totals)

    def close(self) -> None:  # noqa: B027 (most have nothing to give back)
        """Give back processes and connections, where it has any; a second time does nothing."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


class InProcessFederation(Federation):
    """A federation whose workers' rows are all in this process.

    Parameters
    ----------
    data : Workers
        The rows of all workers.
    first : int
        The number of the first worker: a shard of a larger federation keeps its workers' numbers,
        and with them their random numbers.

    Examples
    --------
    `LoopFederation` and `StackedFederation` are its two kinds:

    >>> from emfed.network import FEDERATIONS, InProcessFederation
    >>> all(issubclass(kind, InProcessFederation) for kind in FEDERATIONS.values())
    True
    """

    stacked = True
    """Whether workers of equal size are asked together; if not, one after the other."""

    def __init__(self, data: Workers, first: int = 0) -> None:
        self.data, self.first = data, first

    @property
    @final
    def workers(self) -> HeldWorkers:
        return HeldWorkers(self.data, stacked=self.stacked, first=self.first)


@final
class LoopFederation(InProcessFederation):
    """A federation that drives one worker after the other, as a network would run them.

    It is slow and simple: the readable twin of `StackedFederation`.

    Parameters
    ----------
    data : Workers
        The rows of all workers.
    first : int
        The number of the first worker: a shard of a larger federation keeps its workers' numbers,
        and with them their random numbers.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> emfed.fit(model, emfed.network.LoopFederation(data), "em", rounds=2).rounds
    2
    """

    stacked = False


@final
class StackedFederation(InProcessFederation):
    """A federation that drives many workers at once, whatever their numbers of rows.

    Parameters
    ----------
    data : Workers
        The rows of all workers.
    first : int
        The number of the first worker: a shard of a larger federation keeps its workers' numbers,
        and with them their random numbers.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> emfed.fit(model, emfed.network.StackedFederation(data), "em", rounds=2).rounds
    2
    """


FEDERATIONS: dict[str, type[InProcessFederation]] = {
    "loop": LoopFederation,
    "stacked": StackedFederation,
}
"""In-process federations by name."""
