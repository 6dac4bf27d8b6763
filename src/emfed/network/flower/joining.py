"""``emfed join`` over Flower: a SuperNode and the site's program, kept alive until told to stop."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from emfed.core.errors import EmfedError
from emfed.deployment.joining import SiteSupervisor
from emfed.network.addresses import free_port
from emfed.network.flower.client import DRY_RUN, FOLDER
from emfed.network.flower.deployment import Node, secret_in
from emfed.network.flower.processes import Child, check_platform, stop_all
from emfed.network.site import StateReport

logger = logging.getLogger(__name__)
RETRY = (2.0, 15.0)
"""Seconds before a SuperNode that was refused is started again: at first, and at most."""
FROZEN_SECONDS = 120.0
"""Flower tries again after 20 s at most, and a message of ours takes seconds."""
LINGER_SECONDS = 8.0
"""At the end of a run, until the SuperNode has brought the last answer: it looks every three."""
_NUMBER = re.compile(r"SuperNode ID: (\d+)")


@final
@dataclass
class FlowerSiteSupervisor(SiteSupervisor):
    """A site under Flower."""

    variables: Mapping[str, str] = field(default_factory=dict)
    """More of the environment of the site's program."""
    _node: Node | None = field(default=None, init=False)
    _connected: bool | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        check_platform()
        super().__post_init__()

    def work(self, report: StateReport) -> None:
        """Keep a SuperNode and the site's program alive."""
        secret_in(self.folder, "exec.secret")
        children: list[Child] = []
        try:
            pause = RETRY[0]
            while True:
                children = self._start()
                began = time.monotonic()
                reason = self._watch(children, report)
                if reason is None:
                    return
                stop_all(children, 3.0)
                pause = RETRY[0] if time.monotonic() - began > 60 else pause
                report("state", f"{reason}; trying again in {pause:.0f} s")
                time.sleep(pause)
                pause = min(RETRY[1], 2 * pause)
        finally:
            stop_all(children)

    def _start(self) -> list[Child]:
        node = Node(
            self.address,
            self.folder,
            self.authority,
            self.key,
            free_port(),
            {
                FOLDER: str(self.folder),
                DRY_RUN: "1" if self.dry_run else "",
                **self.variables,
            },
        )
        node.release()
        self._node, self._connected = node, None
        children = [node.supernode(), node.site_process()]
        for child in children:
            child.start()
        return children

    def _watch(self, children: list[Child], report: StateReport) -> str | None:
        """Until the SuperNode ends; returns why, in words, or None if a dry run is over."""
        supernode, site_process = children
        leave = math.inf
        while supernode.alive and time.monotonic() < leave:
            over = self.dry_run and self.journal.exists()  # it comes as a whole
            self.tell(report)
            if over:
                return None
            if self._over and leave == math.inf:
                leave = time.monotonic() + LINGER_SECONDS
            if not site_process.alive:
                logger.warning("the site's program ended with code %s", site_process.code)
                site_process.start()
            self._hear(supernode.news(), report)
            if stands_still(supernode.tail(1), time.time() - supernode.log.stat().st_mtime):
                self.tell(report)
                return f"nothing came of a message or a call for {FROZEN_SECONDS:.0f} s"
            for child in children:
                child.trim()
            time.sleep(0.2)
        self.tell(report)
        if self._over:
            return None
        return explain(supernode.words(), supernode.code)

    def _hear(self, words: str, report: StateReport) -> None:
        """Tell when the connection comes and goes."""
        assert self._node is not None
        if found := _NUMBER.search(words):
            self._node.remember(int(found[1]))
        connected = max(words.rfind("SuperNode ID:"), words.rfind("Connection successful"))
        lost = words.rfind("Connection attempt failed")
        if connected != lost and (connected > lost) != self._connected:
            self._connected = connected > lost
            report(
                "state",
                f"connected to {self.address}"
                if self._connected
                else f"no answer from {self.address}; trying on",
            )


def stands_still(last: str, seconds: float) -> bool:
    """Whether a SuperNode hangs: its last word, so long ago, was that it receives or calls again.

    A crash of the server in the middle of a message leaves it waiting for an hour, and connections
    that are accepted and closed end its main thread, while the process lives on. An idle one has
    other last words.
    """
    begun = "Receiving:" in last or "Connection attempt failed" in last
    return begun and seconds > FROZEN_SECONDS


def explain(words: str, code: int | None) -> str:
    """What a SuperNode's last words mean; raises where trying again is of no use."""
    if "CERTIFICATE_VERIFY_FAILED" in words:
        raise EmfedError(
            "this is not the server that ca.pem stands for, or its certificate does not name the "
            "address you gave: ask for the right ca.pem and address."
        )
    if "[code: 2004]" in words:
        return (
            "the server does not know this site's key (send it NAME.pub), or it still waits for "
            "an earlier session of this site to end"
        )
    if "Unable to parse the private key" in words:
        raise EmfedError("the site's private key cannot be read.")
    return (
        f"the connection ended (code {code}); if it does so again and again, compare the clocks of "
        "both machines, which Flower wants within a few seconds of each other"
    )
