"""What an engine supplies: a way to bring bytes to workers and their answers back.

Decision: docs/decisions/024-engines-are-transports.md
"""

from __future__ import annotations

import shutil
import tempfile
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

from emfed.core.storage import DISK, ScratchDisk

if TYPE_CHECKING:
    from emfed.network.rules import SiteRules
    from emfed.network.site import Site


class Transport(ABC):
    """What brings messages to workers elsewhere, and their answers back.

    It knows workers by their keys, and nothing else. It may lose, delay, repeat and reorder, and
    give back answers to what was sent long ago: above it nothing cares. What it must do is say who
    an answer is from, and not let one worker speak for another.

    Examples
    --------
    >>> from emfed.network import LocalTransport, Transport
    >>> isinstance(LocalTransport({}), Transport)
    True
    """

    sent: int = 0
    received: int = 0
    """Bytes of messages that crossed, where an engine counts them."""

    @property
    def between_machines(self) -> bool:
        """Whether sites have keys of their own: then sums over three or more are masked unless a
        run says otherwise."""
        return False

    @abstractmethod
    def workers(self) -> list[str]:
        """Keys of the workers that can be reached now."""

    @abstractmethod
    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        """Send a message to each worker named; give answers, with whose they are, as they come.

        Ends when nothing more is to be expected, or after ``deadline`` seconds. Whoever iterates
        may stop before: what comes later may be given by a later call, or never.
        """

    def shut_out(self) -> Mapping[str, str]:
        """Workers that whoever runs the server keeps out for now, and why; they may be let back."""
        return {}

    def waits(self) -> bool:
        """Whether an opening waits for workers that answer "not now", or begins without them."""
        return False

    def close(self) -> None:  # noqa: B027 (some have nothing to give back)
        """Close the connections, where there are any; a second time does nothing."""


@final
class LocalTransport(Transport):
    """Sites in this process, one after the other: for tests, and to try a run out.

    Parameters
    ----------
    sites : mapping from str to Site
        The sites by their keys.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.network import LocalTransport, Site
    >>> LocalTransport({"north": Site(np.zeros((20, 2)), "north")}).workers()
    ['north']
    """

    def __init__(self, sites: Mapping[str, Site]) -> None:
        self.sites = dict(sites)
        self._keyed = False

    @classmethod
    def of(
        cls,
        tables: Mapping[str, Any],
        directory: str | Path | None = None,
        *,
        rules: SiteRules | None = None,
    ) -> LocalTransport:
        """One site for each table, each with a key and everybody's public keys.

        The run is the one between machines, in one process: three sites or more mask what they
        tell, the owners' rules hold, and every site keeps its state on disk.

        Parameters
        ----------
        tables
            The rows of each site, by the site's name.
        directory
            Where sites keep their state, in a folder each; None: in a folder that is removed
            together with the transport.
        rules
            The rules of every owner; None: the default ones.

        Examples
        --------
        >>> import numpy as np, emfed
        >>> from emfed.network import LocalTransport, RemoteFederation
        >>> rows = np.arange(180.0).reshape(3, 30, 2) % 7
        >>> transport = LocalTransport.of(dict(zip(["north", "south", "west"], rows)))
        >>> result = emfed.fit(emfed.gaussian_mixture(1, "diag"), RemoteFederation(transport))
        >>> result.params.means.round(1)
        array([[3., 3.]])
        """
        from emfed.network.keys import check_site_name
        from emfed.network.masking import SiteIdentity
        from emfed.network.site import Site

        where = Path(tempfile.mkdtemp(prefix="emfed-") if directory is None else directory)
        disk = ScratchDisk() if directory is None else DISK
        known = SiteIdentity.everybody(map(check_site_name, tables))
        transport = cls(
            {
                name: Site(table, where / name, rules=rules, disk=disk, identity=known[name])
                for name, table in tables.items()
            }
        )
        transport._keyed = True
        if directory is None:
            weakref.finalize(transport, shutil.rmtree, where, ignore_errors=True)
        return transport

    @property
    def between_machines(self) -> bool:
        return self._keyed

    def workers(self) -> list[str]:
        """All of them."""
        return list(self.sites)

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        """Each answers at once."""
        for key, message in messages.items():
            if key in self.sites:
                yield key, self.sites[key].step(message)
