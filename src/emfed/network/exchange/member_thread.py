"""A member's own thread: its state machine, its file, and passes over rows in another thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, final

from emfed.core.errors import EmfedError
from emfed.core.sums import FloatArray
from emfed.network.exchange.followed import Ended, MemberStore
from emfed.network.exchange.member import Follower
from emfed.network.exchange.records import RecordFile
from emfed.network.exchange.statements import LARGEST_MESSAGE
from emfed.network.exchange.transcript import Stage

logger = logging.getLogger(__name__)
TICK = 0.5
"""Seconds between two looks at the clock."""
MOST_WAITING = 16
"""Hand-outs that wait to be read: more are lost, as they may be, and are handed out again."""
DISK_PAUSE = 10.0
"""Seconds before a member that could not write tries again."""
FAREWELL = 15.0
"""Seconds for which a member that has its final model stays to help others: they say hello, and get
secrets from it."""


class Watcher(ABC):
    """Who looks on; all of it is called in the member's thread."""

    @abstractmethod
    def said(self, follower: Follower, post: bytes) -> None:
        """Called before a post leaves: what it is about is `Follower.following`."""

    @abstractmethod
    def moved(self, follower: Follower) -> None:
        """The transcript or the fit may have moved."""

    @abstractmethod
    def ended(self, end: Ended) -> None:
        """The fit has come to its end."""

    @abstractmethod
    def troubled(self, words: str) -> None:
        """Something must be mended here; it is tried again."""


@final
class MemberThread:
    """A member at work: give it what came (`received`), and it sends what is to be said.

    Parameters
    ----------
    path : Path
        The member's file.
    make : callable
        From what it keeps to its state machine; a disk that is full, or a second process, makes
        one begin again.
    send : callable
        Takes posts on their way to the relay; it must not wait.
    watcher : Watcher
        Who looks on.
    seal : bytes, optional
        A secret that encrypts the file.
    """

    def __init__(
        self,
        path: Path,
        make: Callable[[MemberStore], Follower],
        send: Callable[[bytes], None],
        watcher: Watcher,
        seal: bytes | None = None,
    ) -> None:
        self._path, self._make, self._send, self._watcher = path, make, send, watcher
        self._seal = seal
        self._inbox: queue.Queue[Callable[[Follower], list[bytes]]] = queue.Queue(MOST_WAITING)
        self._stop, self.over = threading.Event(), threading.Event()
        self.error: Exception | None = None
        """What ended the thread, if something did that is no end of the fit."""
        self.end: Ended | None = None
        self._job: Any = None
        self._passes = ThreadPoolExecutor(1, thread_name_prefix="emfed-pass")
        self._thread = threading.Thread(target=self._run, name="emfed-member", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End soon: what is on the disk is whole at any moment."""
        self._stop.set()
        self._lose(lambda follower: [])
        self._thread.join(5.0)

    def received(self, data: bytes) -> None:
        """A hand-out of the relay has come."""
        if len(data) > LARGEST_MESSAGE:
            logger.warning("a hand-out of %d bytes is not read", len(data))
            return
        self._lose(lambda follower: follower.receive(data, time.monotonic()))

    def connected(self) -> None:
        """There is a relay to speak to: say again what it may not have heard."""
        self._lose(lambda follower: follower.again(time.monotonic()))

    def order(self, word: str, argument: str = "") -> None:
        """Ask for an order to enter the transcript."""

        def say(follower: Follower) -> list[bytes]:
            follower.order(word, argument)
            return follower.tick(time.monotonic())

        self._inbox.put(say)

    def _lose(self, act: Callable[[Follower], list[bytes]]) -> None:
        try:
            self._inbox.put_nowait(act)
        except queue.Full:
            logger.info("a message is not read: others wait already")

    def _run(self) -> None:
        try:
            while not self._stop.is_set() and not self.over.is_set():
                try:
                    self._live()
                except OSError as error:  # its own file's, the journal's, the owner's counts'
                    logger.warning("%s", error)
                    self._watcher.troubled(str(error))
                    self._stop.wait(DISK_PAUSE)
        except Exception as error:
            if not isinstance(error, EmfedError):
                logger.exception("a member's thread ends")
            self.error = error
        finally:
            self._passes.shutdown(wait=False, cancel_futures=True)
            self.over.set()

    def _live(self) -> None:
        """One life of the state machine."""
        file, self._job, ended = RecordFile(self._path, self._seal), None, float("inf")
        try:
            follower = self._make(file)
            act: Callable[[Follower], list[bytes]]
            act = lambda one: one.tick(time.monotonic())  # noqa: E731
            while not self._stop.is_set():
                for post in act(follower):
                    self._watcher.said(follower, post)
                    self._send(post)
                self._compute(follower)
                self._watcher.moved(follower)
                if follower.ended is not None and self.end is None:
                    self._watcher.ended(follower.ended)
                    self.end, ended = follower.ended, time.monotonic()
                    for post in follower.again(ended):  # so that the relay knows that we know
                        self._send(post)
                if self.end is not None and self._is_free(follower, time.monotonic() - ended):
                    self.over.set()
                    return
                try:
                    act = self._inbox.get(timeout=TICK)
                except queue.Empty:
                    act = lambda one: one.tick(time.monotonic())  # noqa: E731
        finally:
            file.close()

    def _forget_job(self, follower: Follower) -> list[bytes]:
        self._job = None
        return follower.tick(time.monotonic())

    def _is_free(self, follower: Follower, since: float) -> bool:
        """Whether nobody needs this member any more."""
        if self.end is None or not self.end.final:
            return True
        final = follower.transcript.stage is Stage.FINAL
        return since > FAREWELL or (final and since > TICK and not follower.awaited)

    def _compute(self, follower: Follower) -> None:
        """Begin the pass over rows that is due, if one is."""
        job = follower.job()
        about = None if job is None else follower.following
        if job is None or about is self._job:
            return
        self._job = about

        def work() -> None:
            try:
                values: FloatArray = job()
            except OSError as error:  # what is counted could not be written: it is made again
                logger.warning("%s", error)
                self._watcher.troubled(str(error))
                self._stop.wait(DISK_PAUSE)
                self._inbox.put(self._forget_job)
                return
            except Exception as error:
                refusal = error
                self._inbox.put(lambda one: one.fail(str(refusal), time.monotonic()))
                if not isinstance(error, EmfedError):
                    logger.exception("a pass over the rows failed")
                return
            self._inbox.put(lambda one: one.done(job, values, time.monotonic()))

        self._passes.submit(work)
