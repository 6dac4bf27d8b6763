"""Many workers packed into a few Ray actors: simulations, and one organisation's cluster.

Ray is imported here and nowhere else, when a `RayFederation` is made. An actor is a process that
holds a shard: the rows of consecutive workers. Rows are put into Ray's object store
once, where actors read them without a copy; files are opened by the actors.

An actor that dies, or is silent for longer than the deadline, is replaced by a new one with the
same rows, which is asked again. What workers keep from round to round is with the process that
drives.

Decision: docs/decisions/023-federations-in-one-process.md
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import weakref
from collections.abc import Iterator
from typing import Any, final

import numpy as np

from emfed.core.errors import DataError, FederationError, SettingsError, check_count, check_range
from emfed.core.version import __version__
from emfed.data.workers import WorkerData
from emfed.network.inprocess import Federation
from emfed.network.shards import Portions, Shard, ShardCalls, ShardedWorkers, divide, told_by

RESTARTS = 3
"""How often in a row an actor may die over the same call."""
STORE_ROOM = 1 << 30
"""Room in the object store of a Ray that we start, beside the rows: for replies."""

_log = logging.getLogger(__name__)


def _ray() -> Any:
    """The library, or how to get it."""
    try:
        import ray
    except ImportError as error:
        raise SettingsError(f"a RayFederation needs Ray ({error}): pip install ray.") from None
    return ray


class _Connection:
    """Ray as this process uses it: shared by its federations, ended with the last of them."""

    def __init__(self) -> None:
        self._users: set[object] = set()
        self._ours = False
        self._there = ""
        self._address: str | None = None
        """None is a Ray that we started here."""
        self._lock = threading.RLock()

    def join(self, user: object, address: str | None, actors: int, room: int) -> bool:
        """Start or reach Ray, unless that is done; whether it is a Ray started here."""
        ray = _ray()
        with self._lock:
            started = not ray.is_initialized()
            if started:
                _start(ray, address, actors, room)
                self._users.clear()
                self._ours, self._address = True, address
            there = ray.get_runtime_context().gcs_address
            if there != self._there:  # whoever used another one lost it
                self._users.clear()
            if not self._users and not started:  # the user's own connection
                self._ours, self._address = False, "auto"
            self._there = there
            if address not in (None, "auto", there, self._address):
                raise SettingsError(
                    f"this process uses the Ray at {there} already: leave address={address!r} "
                    "out, or call ray.shutdown() first."
                )
            self._users.add(user)
            return self._address is None

    def leave(self, user: object, actors: list[Any]) -> None:
        """One federation less, with its actors; a Ray that the user connected to stays."""
        ray = _ray()
        with self._lock:
            known = user in self._users
            self._users.discard(user)
            if not known or not ray.is_initialized():
                return  # its Ray is gone, at exit or by another
            if ray.get_runtime_context().gcs_address != self._there:
                return
            for actor in actors:
                ray.kill(actor)
            if not self._users and self._ours:
                self._ours = False
                ray.shutdown()


_CONNECTION = _Connection()


def _start(ray: Any, address: str | None, actors: int, room: int) -> None:
    """A Ray of our own (no dashboard, nothing reported to anyone), or the one at this address."""
    options: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    if address is not None:
        _knock(address)
        try:
            ray.init(address=address, **options)
        except (ConnectionError, RuntimeError, ValueError) as error:
            says = _LOCKED if _asks_for_token(error) else _NOBODY
            raise FederationError(says.format(address, _first_line(error))) from error
        return
    # address="local" because None would join whatever Ray runs on this machine.
    options |= {"num_cpus": actors, "include_dashboard": False, "object_store_memory": room}
    with _environment(RAY_USAGE_STATS_ENABLED="0"):
        ray.init(address="local", **options)


_NOBODY = (
    "no Ray answers at address={!r} ({}). Start one with: ray start --head; or leave the address "
    "out for a Ray of this machine alone."
)

_LOCKED = (
    "the Ray at address={!r} asks for a token, and refused this process ({}). Set "
    "RAY_AUTH_MODE=token in the environment, and RAY_AUTH_TOKEN to what `ray get-auth-token` "
    "prints on the cluster's head."
)


def _asks_for_token(error: BaseException | None) -> bool:
    """Whether Ray refused by its authentication, which it tells in the text of a cause."""
    told = ""
    while error is not None:
        told += str(error)
        error = error.__cause__ or error.__context__
    return "AuthenticationError" in told


def _knock(address: str) -> None:
    """Whether somebody listens there: Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not host or not port.isdigit():
        return  # "auto" and the like
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=10).close()
    except (OSError, OverflowError) as error:
        raise FederationError(_NOBODY.format(address, error)) from None


def _first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    """Environment variables for the processes that are started within."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def _room(portions: Portions) -> int:
    """Bytes of the object store for all rows in memory, and for replies."""
    tables: list[Any] = []
    for portion in portions.parts:
        if isinstance(portion.data, WorkerData):
            tables.append(portion.data.rows)
        else:
            tables.extend(getattr(portion.data, "tables", ()))
    return STORE_ROOM + int(1.1 * sum(getattr(table, "nbytes", 0) for table in tables))


def _release(user: object, actors: list[Any]) -> None:
    """End the actors, and Ray with the last federation."""
    _CONNECTION.leave(user, actors)
    actors.clear()


@final
class RayFederation(Federation):
    """Workers packed into Ray actors, each of which holds a shard.

    Close it, or use it as a context: then no process stays behind. ``fit(..., federation="ray")``
    does so by itself.

    Parameters
    ----------
    data : table, dict or list
        The rows, as in `fit`; of a list or dict of paths, and of a memory-mapped array, each actor
        opens its own files.
    groups : array or str, optional
        The worker of each row of one table, as in `fit`.
    sample_weight : array or sequence of arrays, optional
        How much each row counts, in the shape of the data.
    actors : int
        The number of processes, of one thread each.
    address : str, optional
        The address of a running cluster, as in ``ray.init``; None starts a Ray on this machine, or
        uses the one that this process is connected to.
    deadline : float, optional
        An actor that says nothing for so many seconds counts as dead; None waits for ever.
    start_timeout : float
        An actor that cannot be placed within so many seconds is an error.

    Raises
    ------
    FederationError
        If actors cannot be started or kept.

    Examples
    --------
    It starts processes, which takes seconds:

    >>> import numpy as np
    >>> import emfed
    >>> rows = [np.zeros((20, 2)), np.ones((20, 2))]
    >>> with emfed.network.RayFederation(rows) as federation:  # doctest: +SKIP
    ...     emfed.fit(emfed.gaussian_mixture(1), federation)
    >>> issubclass(emfed.network.RayFederation, emfed.network.Federation)
    True
    """

    def __init__(
        self,
        data: Any,
        groups: Any | None = None,
        *,
        sample_weight: Any | None = None,
        actors: int = 2,
        address: str | None = None,
        deadline: float | None = None,
        start_timeout: float = 120.0,
    ) -> None:
        ray = self._ray = _ray()
        check_count("actors", actors)
        if deadline is not None:
            check_range("deadline", deadline, 0, np.inf, open_low=True)
        check_range("start_timeout", start_timeout, 0, np.inf, open_low=True)
        self._deadline, self._start_timeout = deadline, start_timeout
        portions = divide(data, groups, actors, sample_weight)
        self._edges, self._names = portions.edges, portions.names
        self._columns: tuple[str, ...] | None = None
        self._actors: list[Any] = []
        self._processes = [0] * len(portions.parts)
        user = object()
        local = _CONNECTION.join(user, address, len(portions.parts), _room(portions))
        self._finalizer = weakref.finalize(self, _release, user, self._actors)
        # In a Ray of our own actors claim no processor, so that none waits for another's.
        self._make = ray.remote(Shard).options(
            num_cpus=0 if local else 1, max_restarts=0, scheduling_strategy="SPREAD"
        )
        try:
            # What is large lies in the object store, from where a second actor gets it too.
            self._portions = [(part.first, ray.put(part.data)) for part in portions.parts]
            del portions
            self._actors.extend(self._launch(shard) for shard in range(len(self._portions)))
            self._settle()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """End the actors, and the Ray that was started for them."""
        self._finalizer()

    @property
    def workers(self) -> ShardedWorkers:
        """The workers, as a fit asks them."""
        return ShardedWorkers(self._told, self._ask_shards)

    @property
    def processes(self) -> tuple[int, ...]:
        """The process of each actor, on whatever node it runs."""
        return tuple(self._processes)

    def _launch(self, shard: int) -> Any:
        return self._make.remote(*self._portions[shard])

    def _settle(self) -> None:
        """All actors are there, with one version and one order of columns."""
        words = [self._first_word(shard) for shard in range(len(self._actors))]
        self._columns = words[0]["columns"]
        for shard, word in enumerate(words):
            if (word["columns"] is None) != (self._columns is None):
                raise DataError("some workers name their columns, others do not.")
            if word["columns"] != self._columns:
                self._first_word(shard)
        self._told = told_by(words, self._edges, self._names)

    def _first_word(self, shard: int) -> dict[str, Any]:
        """Wait for a new actor and let it open its data."""
        ray, timeout = self._ray, self._start_timeout
        ref = self._actors[shard].ready.remote(self._columns)
        try:
            word: dict[str, Any] = ray.get(ref, timeout=timeout)
        except ray.exceptions.GetTimeoutError:
            free, all_ = (
                r.get("CPU", 0) for r in (ray.available_resources(), ray.cluster_resources())
            )
            raise FederationError(
                f"Ray did not start actor {shard} within {timeout:g} s; each takes one CPU, and "
                f"{free:g} of {all_:g} are free. Use fewer actors, end other programs, or "
                "raise start_timeout."
            ) from None
        except ray.exceptions.RayTaskError as error:
            raise self._cause(error, shard) from None
        except ray.exceptions.RayError as error:
            raise FederationError(f"actor {shard} died while it opened its data: {error}") from None
        if word["version"] != __version__:
            raise FederationError(
                f"actor {shard} runs emfed {word['version']}, this process {__version__}: install "
                "one version on all nodes."
            )
        self._processes[shard] = word["process"]
        return word

    def _cause(self, error: Any, shard: int) -> Exception:
        """The exception that an actor raised, as if it had been raised here."""
        cause = error.cause
        if not isinstance(cause, Exception):
            return FederationError(f"actor {shard} failed: {error}")
        cause.add_note(f"in Ray actor {shard}, workers {self._range(shard)}")
        return cause

    def _range(self, shard: int) -> str:
        return f"{self._edges[shard]} to {self._edges[shard + 1] - 1}"

    def _restart(self, shard: int, why: Exception) -> None:
        """A new actor in the place of one that is gone, with the same rows."""
        _log.warning(
            "Ray actor %d (workers %s) is lost; starting another. %s",
            shard,
            self._range(shard),
            _first_line(why),
        )
        with contextlib.suppress(self._ray.exceptions.RayError):
            self._ray.kill(self._actors[shard])  # silent ones are not dead yet
        self._actors[shard] = self._launch(shard)
        self._first_word(shard)

    def _send(self, shard: int, method: str, *arguments: Any) -> Any:
        return getattr(self._actors[shard], method).remote(*arguments)

    def _wait(self, ref: Any) -> Any:
        return self._ray.get(ref, timeout=self._deadline)

    def _ask_shards(self, method: str, calls: ShardCalls) -> list[Any]:
        """What the named shards answer, in order; the calls run at the same time."""
        if not self._actors:
            raise FederationError("this RayFederation is closed: make another.")
        sent = [(shard, given, self._send(shard, method, *given)) for shard, given in calls]
        return [self._answer(shard, method, given, ref) for shard, given, ref in sent]

    def _answer(self, shard: int, method: str, given: tuple[Any, ...], ref: Any) -> Any:
        """Wait for one answer; ask again where the actor had to be replaced."""
        errors = self._ray.exceptions
        for _ in range(RESTARTS):
            try:
                return self._wait(ref)
            except errors.RayTaskError as error:
                raise self._cause(error, shard) from None
            except errors.RayError as error:
                last = error
            with contextlib.suppress(errors.RayError):  # it may die again at once
                self._restart(shard, last)
            ref = self._send(shard, method, *given)
        raise FederationError(
            f"Ray actor {shard} (workers {self._range(shard)}) was lost {RESTARTS} times in a row "
            f"over the same call ({method}); perhaps it has too little memory, or the deadline is "
            f"too short. The last reason: {last}"
        )
