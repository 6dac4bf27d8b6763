"""`listen` and `connect`: an analyst in this process, at a relay that is here or elsewhere."""

from __future__ import annotations

import tempfile
import threading
import time
from abc import abstractmethod
from pathlib import Path
from typing import TypeVar, final

from emfed.core.errors import (
    CheckpointError,
    FederationError,
    ParticipationError,
    SettingsError,
    check_count,
)
from emfed.network.addresses import split_address
from emfed.network.conducting import Conductor
from emfed.network.exchange.followed import Consent, Ended, MemberStore
from emfed.network.exchange.frames import new_run
from emfed.network.exchange.identities import (
    KeySigner,
    KnownMembers,
    TrialMembers,
    TrialSigner,
)
from emfed.network.exchange.member import Follower
from emfed.network.exchange.member_line import MemberLine
from emfed.network.exchange.member_runs import MemberRuns, RunMember
from emfed.network.exchange.member_thread import Watcher
from emfed.network.exchange.records import RecordFile
from emfed.network.exchange.relay_server import RelayServer
from emfed.network.exchange.statements import Agreement, Document, Entry, Roster, Signer
from emfed.network.keys import ANALYST, read_site_keys
from emfed.network.live import AskedRun, LiveSites, OfferedColumns

Some = TypeVar("Some", bound="RemoteSites")
LOOK_SECONDS = 0.02
"""Between two looks at a thread: signals are heard between them."""
FAREWELL_SECONDS = 5.0
"""For which a relay that closes waits for sites to hear how the last run ended."""


@final
class _Onlooker(Watcher):
    """Lets a conductor see what the analyst's member sees."""

    def __init__(self, conductor: Conductor) -> None:
        self._conductor, self.over = conductor, threading.Event()

    def said(self, follower: Follower, post: bytes) -> None:
        """A post leaves."""

    def moved(self, follower: Follower) -> None:
        """Something may be due to be ordered."""
        self._conductor.look(follower)

    def ended(self, end: Ended) -> None:
        """The run has come to its end."""
        self.over.set()

    def troubled(self, words: str) -> None:
        """It is logged already."""


class RemoteSites(LiveSites):
    """Sites elsewhere, for an analyst of this process: what `listen` and `connect` return.

    Parameters
    ----------
    signer : Signer
        The analyst.
    roster : Roster
        Public keys of all members.
    columns : sequence of str or int, optional
        The columns of a fit that names none itself; a number: so many that have no names.
    """

    def __init__(self, signer: Signer, roster: Roster, columns: OfferedColumns = None) -> None:
        super().__init__(columns)
        self._signer, self._roster = signer, roster
        self._scratch = tempfile.TemporaryDirectory(prefix="emfed-")
        self._folder = Path(self._scratch.name)
        self._runs = self._connected()

    @abstractmethod
    def _connected(self) -> MemberRuns:
        """The runs of this analyst, over a connection to the relay."""

    def wait_for(self, expected: int, seconds: float | None = None) -> None:
        """Wait until so many sites are connected."""
        end = None if seconds is None else time.monotonic() + seconds
        while len(self.names) < expected:
            if end is not None and time.monotonic() > end:
                raise ParticipationError(
                    f"after {seconds:.0f} s {len(self.names)} of {expected} sites are connected "
                    f"({', '.join(self.names) or 'none'})."
                )
            time.sleep(LOOK_SECONDS)

    def follow(self, asked: AskedRun) -> tuple[Ended, Conductor]:
        conductor = Conductor(asked)
        watcher = _Onlooker(conductor)
        settings = _kept(asked) or asked.agreement(new_run(), self.names, self._signer.name)

        def make(store: MemberStore) -> Follower:
            consent = Consent(asked.make)
            return Follower(self._signer, self._roster, store, consent, settings=settings)

        path = asked.keep or self._folder / f"{settings.run}.sqlite"
        thread = self._runs.start(settings.run, RunMember(path, make, watcher))
        try:
            while not (watcher.over.is_set() or thread.over.is_set()):
                time.sleep(LOOK_SECONDS)
        except BaseException:
            thread.stop()
            raise
        if thread.error is not None:
            raise thread.error
        if thread.end is None:
            raise FederationError("the sites were closed before the fit had ended.")
        return thread.end, conductor

    def close(self) -> None:
        self._runs.stop()
        self._scratch.cleanup()


def _kept(asked: AskedRun) -> Agreement | None:
    """The settings of the run that a file goes on with."""
    if asked.keep is None or not asked.keep.exists():
        return None
    file = RecordFile(asked.keep)
    try:
        entries = file.entries()
    finally:
        file.close()
    if not entries:
        return None
    found = Agreement.read(Document.decode(Entry.decode(entries[0]).statements[0].body))
    if found.program != asked.document:
        raise CheckpointError(
            f"{asked.keep} belongs to another run, with other settings. Use those it was made "
            "with, or start anew."
        )
    return found


@final
class ListeningSites(RemoteSites):
    """A relay with an analyst in this process."""

    def __init__(self, place: tuple[str, int], keys: Path | None, columns: OfferedColumns) -> None:
        self._place, self._keys = place, keys
        super().__init__(*_identity(keys), columns)

    def _connected(self) -> MemberRuns:
        self._server = server = RelayServer(
            *self._place, self._keys, self._roster, self._folder / "relay", more=True
        )
        runs = MemberRuns(lambda message: say(message))
        say = server.attach(ANALYST, runs.received)
        return runs

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self._server.workers())

    @property
    def port(self) -> int:
        """Where sites call."""
        return self._server.port

    def close(self) -> None:
        """Stay until sites know how the last run ended, then end all connections."""
        runs = [(run, one.end) for run, one in self._runs.members.items()][-1:]
        # One that was left in its middle goes on with this process, or not at all.
        end, last = time.monotonic() + FAREWELL_SECONDS, [run for run, ended in runs if ended]
        while time.monotonic() < end and any(
            name in self.names for run in last for name in self._server.untold(run)
        ):
            time.sleep(LOOK_SECONDS)
        self._runs.stop()
        self._server.close(finished=True)
        super().close()


@final
class _Calling(RemoteSites):
    """An analyst at a relay that runs elsewhere."""

    def __init__(self, address: str, keys: Path | None, columns: OfferedColumns) -> None:
        self._leave, self._error = threading.Event(), list[Exception]()
        own = {} if keys is None else {"key": keys / "ca.key", "authority": keys / "ca.pem"}
        self._line = MemberLine(
            address,
            lambda message: self._runs.received(message),
            lambda: self._greet(),
            name=ANALYST,
            **own,
        )
        self._thread = threading.Thread(target=self._call, name="emfed-analyst", daemon=True)
        super().__init__(*_identity(keys), columns)
        self._thread.start()

    def _call(self) -> None:
        try:
            self._line.run(self._leave)
        except Exception as error:
            self._error.append(error)

    def _connected(self) -> MemberRuns:
        return MemberRuns(self._line.send)

    def _greet(self) -> None:
        self._runs.connected()

    @property
    def names(self) -> tuple[str, ...]:
        if self._error:
            raise self._error[0]
        return self._runs.here or ()

    def close(self) -> None:
        super().close()
        self._leave.set()
        self._thread.join()


def _identity(keys: Path | None) -> tuple[Signer, Roster]:
    """Who the analyst is, and whom it knows."""
    if keys is None:
        return TrialSigner(ANALYST), TrialMembers()
    return KeySigner.of_analyst(keys), KnownMembers(read_site_keys(keys)[0], keys / "ca.pem")


def listen(
    address: str = "127.0.0.1:9400",
    *,
    keys: str | Path | None = None,
    expected: int = 0,
    wait: float | None = None,
    columns: OfferedColumns = None,
    insecure: bool = False,
) -> ListeningSites:
    """Listen for sites, with a relay and an analyst in this process; use it in a ``with``.

    What it returns takes the place of tables in `emfed.fit`, `emfed.select_components`, the `fit`
    of estimators and `emfed.impute`: any number of fits run on the same sites, one after the other.

    Parameters
    ----------
    address : str
        Where to listen, ``host:port``; port 0 takes a free one (``sites.port``).
    keys : str or Path, optional
        The folder that ``emfed keys server`` made; its ``sites`` are let in.
    expected : int
        How many sites must be connected before it returns.
    wait : float, optional
        The seconds after which it gives up; None waits for ever.
    columns : sequence of str or int, optional
        The columns of a fit that names none itself; a number: so many that have no names.
    insecure : bool
        Whether there is no TLS and no keys: on this machine only, for trials.

    Returns
    -------
    ListeningSites
        The sites; ``port`` is where they call.

    Raises
    ------
    ParticipationError
        If too few sites connect in time.

    Examples
    --------
    >>> from emfed.network import listen
    >>> with listen("127.0.0.1:0", insecure=True) as sites:
    ...     sites.names
    ()
    """
    check_count("expected", expected, 0)
    if (keys is None) != insecure:
        raise SettingsError(
            "give the folder of the server's keys (made by `emfed keys server`), or insecure=True "
            "to try things out on this machine without any; one of the two."
        )
    place = split_address(address, smallest_port=0)
    return _waited(
        ListeningSites(place, None if keys is None else Path(keys), columns), expected, wait
    )


def connect(
    address: str,
    *,
    keys: str | Path | None = None,
    expected: int = 0,
    wait: float | None = None,
    columns: OfferedColumns = None,
    insecure: bool = False,
) -> RemoteSites:
    """Call a relay that runs elsewhere (``emfed relay``), as an analyst; use it in a ``with``.

    Parameters
    ----------
    address : str
        The address of the relay, like ``em.example.org:9400``.
    keys : str or Path, optional
        The folder with the authority's key, ``ca.key``, and the public keys of sites.
    expected : int
        How many sites must be connected before it returns.
    wait : float, optional
        The seconds after which it gives up; None waits for ever.
    columns : sequence of str or int, optional
        The columns of a fit that names none itself; a number: so many that have no names.
    insecure : bool
        Whether there is no TLS and no keys, as in `listen`.

    Returns
    -------
    RemoteSites
        The sites.

    Raises
    ------
    ParticipationError
        If too few sites connect in time.

    Examples
    --------
    Nobody is there yet, and it goes on calling:

    >>> from emfed.network import connect
    >>> with connect("127.0.0.1:9400", insecure=True) as sites:
    ...     sites.names
    ()
    """
    if (keys is None) != insecure:
        raise SettingsError(
            "give the folder with the authority's key, or insecure=True to try things out on this "
            "machine without any; one of the two."
        )
    return _waited(_Calling(address, None if keys is None else Path(keys), columns), expected, wait)


def _waited(sites: Some, expected: int, wait: float | None) -> Some:
    try:
        sites.wait_for(expected, wait)
    except BaseException:
        sites.close()
        raise
    return sites
