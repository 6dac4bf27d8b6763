"""``emfed serve`` over Flower: SuperLink, SuperExec and the run, kept alive to the end."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import time
from pathlib import Path
from typing import final

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey

from emfed.core.errors import EmfedError, ParticipationError
from emfed.deployment.config import Config
from emfed.deployment.console import SILENT_SECONDS
from emfed.deployment.hosting import ServerSupervisor
from emfed.deployment.status import LOCK, StatusReport, read_status
from emfed.network.addresses import alone, split_address
from emfed.network.flower.deployment import Link
from emfed.network.flower.processes import (
    Child,
    check_platform,
    port_open,
    stop_all,
    wait_until,
    without_proxy,
)
from emfed.network.flower.server import CONFIG, HOST, SECURE
from emfed.network.keys import read_site_keys

logger = logging.getLogger(__name__)
TEMPLATE = Path(__file__).parent / "app"
START = 45.0
"""Seconds that the server's program may take to begin."""
ATTEMPTS = 5
"""Times that a run is submitted before we believe that it cannot be."""
FRUITLESS = 5
"""Deaths of the server's program without a round between them, after which we give up."""


def write_app(folder: Path) -> None:
    """The app as ``flwr run`` wants it."""
    shutil.copytree(
        TEMPLATE, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("__pycache__")
    )


@final
class FlowerServerSupervisor(ServerSupervisor):
    """The server under Flower, through any number of crashes of Flower's processes."""

    def __init__(self, config: Config, *, insecure: bool = False) -> None:
        check_platform()
        super().__init__(config, insecure=insecure)
        server = config.server
        self.link = Link(server.host, server.port, self.keys, self.folder)
        self._registered: dict[str, EllipticCurvePublicKey] | None = None
        self._bad: dict[str, str] = {}
        self._children: list[Child] = []
        self._run, self._submitted, self._seen, self._up = 0, 0.0, 0.0, False
        self._deaths, self._last_round = 0, -1

    def work(self, report: StatusReport) -> None:
        """Start Flower's processes, and see to them until the run is over."""
        try:
            self._start()
            while not self._look(report):
                time.sleep(0.3)
        finally:
            stop_all(self._children)

    def _start(self) -> None:
        link = self.link
        host, port = split_address(link.local)
        os.environ.update(without_proxy(host))  # for our own calls; those of children have it
        if port_open(host, port):
            raise EmfedError(f"port {port} is in use: choose another, or stop what listens there.")
        superlink = link.superlink(**{CONFIG: str(self.config.path)})
        slowly = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "1"}  # it has one task in all
        ours = {CONFIG: str(self.config.path), HOST: self.name}
        ours[SECURE] = "0" if self.keys is None else "1"
        superexec = link.superexec(**ours, **slowly)
        self._children = [superlink, superexec]
        superlink.start()
        wait_until(lambda: port_open(host, port), [superlink], 60, "the SuperLink to listen")
        superexec.start()
        write_app(self.folder / "app")
        self._register()
        self._submit()

    def _register(self) -> None:
        """Let in those whose keys have come since we last looked, shut out those whose went."""
        if self.link.keys is None:
            return
        sites, bad = read_site_keys(self.link.keys)
        for name, words in bad.items():
            if self._bad.get(name) != words:
                logger.warning("site %s may not join: %s", name, words)
        self._bad = bad
        if sites != self._registered:
            new, gone = self.link.control.admit(sites)
            self._registered = sites
            for name in new:
                logger.info("site %s may join", name)
            for name in gone:
                logger.info("site %s is shut out", name)

    def _submit(self) -> None:
        """Start the run; an earlier one that died is told to end, so that Flower does not
        wait for it."""
        if self._run:
            with contextlib.suppress(EmfedError):
                self.link.control.stop_run(self._run)
        for left in reversed(range(ATTEMPTS)):
            try:
                self._run = self.link.control.start_run(self.folder / "app")
                break
            except EmfedError as error:  # the SuperLink may have died just now
                if left == 0:
                    raise
                logger.warning("%s", error)
                self._keep_alive()
                time.sleep(2)
        self._submitted, self._seen, self._up = time.time(), time.monotonic(), False

    def _keep_alive(self) -> None:
        for child in self._children:
            if not child.alive:
                logger.warning("%s ended with code %s; starting it again", child.name, child.code)
                child.start()
            child.trim()

    def _look(self, report: StatusReport) -> bool:
        """See to the processes once; True when the run is over."""
        self._keep_alive()
        status = read_status(self.folder)
        report(status)
        if status.get("state") == "finished" and status.get("told", True):
            return True
        if status.get("state") == "failed" and status.get("time", 0) > self._submitted:
            kind = ParticipationError if status.get("few") else EmfedError
            raise kind(str(status.get("error")))
        if status.get("round", -1) != self._last_round:
            self._last_round, self._deaths = status.get("round", -1), 0
        self._revive()
        try:
            self._register()
        except EmfedError as error:  # again at the next look
            logger.warning("%s", error)
        return False

    def _wake(self) -> None:
        """Submit the run again if its program lives and has said nothing for too long."""
        status, sites = read_status(self.folder), self.config.sites
        longest = SILENT_SECONDS + (sites.deadline + 30.0) * sites.attempts
        quiet = time.time() - max(float(status.get("time", 0.0)), self._submitted)
        if status.get("state") == "running" and quiet > longest:
            logger.warning(
                "the server's program has said nothing for %.0f s: starting it anew", quiet
            )
            self._submit()

    def _revive(self) -> None:
        """Submit the run again if its program is gone: it goes on from what it left."""
        with alone(self.folder / LOCK) as gone:
            pass
        now = time.monotonic()
        if not gone:
            self._seen, self._up = now, True
            self._wake()
        elif now - self._seen > (2 if self._up else START):
            self._deaths += 1
            if self._deaths > FRUITLESS:
                raise EmfedError(
                    f"the server's program ended {FRUITLESS} times without making a round; see "
                    f"{self.folder / 'logs'}."
                )
            logger.warning("the server's program is gone; it goes on from its last round")
            self._submit()
