"""A whole run of the real server's program in memory, in which one thing is lost at one message.

The program is `serve_run`, from the opening to the delivery of the model; its sites are the real
ones, with folders and keys; network and clock are simulated. A loss happens just before a given
message reaches whom it is addressed to, so all losses at all messages are all points of a run. Or
from that message on a site refuses for good: everything, or all messages that ask for the same.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final
from unittest import mock

from benchmarks.deployments import mixture_tables
from benchmarks.hours import Clock

from emfed import load
from emfed.core.errors import EmfedError
from emfed.core.storage import Disk, ScratchDisk
from emfed.core.wire import (
    Kind,
    Reason,
    decode_bundle,
    decode_question,
    encode_refusal,
    kind_of,
    seal_refusal,
)
from emfed.deployment.config import read_config
from emfed.deployment.serving import serve_run
from emfed.deployment.status import Status
from emfed.network import Site, SiteRules, Transport
from emfed.network.keys import make_private_key
from emfed.network.masking import SiteIdentity
from emfed.network.rules import Refusal
from tests.network.disks import Killed

CONFIG = """
[model]
kind = "gaussian-mixture"
n_components = {components}
{algorithm}
[fit]
seed = 5
rounds = 60
start = "{start}"
[privacy]
masks = {masks}
[sites]
expected = {sites}
minimum = 2
deadline = 20.0
deliver = true
farewell = 5.0
give_up = {give_up}
[server]
report = false
"""
VICTIM, GIVE_UP_SECONDS = "s1", 900.0
MESSAGE_SECONDS = 0.01
NO = "the owner has had enough."
"""What a site says that refuses for good."""
RESTARTS = 5
"""Of a server that was killed."""


@final
@dataclass(frozen=True)
class Ended:
    """How a run ended."""

    means: Any
    """Of the model that it left, None if none."""
    words: str
    """What the status says at the end, and what ended the run."""
    seconds: float
    """By the simulated clock."""
    messages: int
    told: str
    """All that the log said."""
    delivered: list[str]
    """Who has the model."""


@final
class Losing(Transport):
    """Sites in memory, one of which, or the server, loses something at one message."""

    def __init__(
        self,
        folder: Path,
        masks: bool,
        start: str = "k-means",
        *,
        components: str = "2",
        algorithm: str = "",
        sites: int = 4,
        more: str = "",
        epsilon: float | None = None,
    ) -> None:
        self.folder, self._masks, self.clock = folder, masks, Clock()
        self.tables = {n: t.to_numpy() for n, t in mixture_tables(sites, rows=40).items()}
        self._known = SiteIdentity.everybody(self.tables)
        text = CONFIG.format(
            components=components,
            algorithm=algorithm,
            masks=str(masks).lower(),
            sites=sites,
            start=start,
            give_up=GIVE_UP_SECONDS,
        )
        noise = "" if epsilon is None else f"epsilon = {epsilon}"
        text = text.replace("[privacy]", f"{more}\n[privacy]\n{noise}")
        (folder / "run.toml").write_text(text, encoding="utf-8")
        self.config = read_config(folder / "run.toml")
        self.config.place("folder").mkdir()
        self.sites = {name: self._site(name) for name in self.tables}
        self.messages = 0
        self.kinds: list[tuple[str, str]] = []
        """Whom each message was for, and of which kind it was."""
        self.asked: list[tuple[str, str]] = []
        """Whom each message was for, and what it asked for, a bundle by what comes last in it."""
        self.when, self.loss, self.kept_at = -1, "", -1
        self._refused: set[str] | None = set()
        """What the victim refuses; None: everything."""

    @property
    def between_machines(self) -> bool:
        return self._masks

    def workers(self) -> list[str]:
        return list(self.sites)

    def _site(self, name: str) -> Site:
        return Site(
            self.tables[name],
            self.folder / name,
            rules=SiteRules.loosest(),
            disk=ScratchDisk(),
            identity=self._known[name],
        )

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        for key, message in messages.items():
            self.messages += 1
            self.kinds.append((key, kind_of(message).name.lower()))
            self.asked.append((key, self._subject(key, message)))
            if self.messages == self.kept_at:
                self._keep()
            if self.messages == self.when:
                self._lose()
            self.clock.wait(MESSAGE_SECONDS)
            if key == VICTIM and (self._refused is None or self.asked[-1][1] in self._refused):
                yield key, seal_refusal(message, encode_refusal(Reason.REFUSED, NO))
            else:
                yield key, self.sites[key].step(message)

    def _subject(self, key: str, message: bytes) -> str:
        """What a message asks for; of a question, its kind."""
        try:
            header, body = self.sites[key].read(message)
        except Refusal:  # a short message about what this site has lost
            return "unknown"
        kind = header.kind
        if kind is Kind.BUNDLE:
            kind, body = decode_bundle(body)[-1]
        return str(decode_question(body)[0]) if kind is Kind.QUESTION else kind.name.lower()

    # What is lost.

    def _everything(self) -> None:
        """From now on the site refuses whatever it is asked."""
        self._refused = None

    def _this(self) -> None:
        """From now on it refuses what it is asked now, and answers all else."""
        assert self._refused is not None
        self._refused.add(self.asked[-1][1])

    def _keep(self) -> None:
        for place in (self.folder / VICTIM, self.config.place("folder") / "fit"):
            if place.exists():
                shutil.copytree(place, self.folder / "kept" / place.name)

    def _lose(self) -> None:
        getattr(self, f"_{self.loss}")()

    def again(self) -> None:
        """The site's process starts anew."""
        self.sites[VICTIM] = self._site(VICTIM)

    def _disk(self) -> None:
        shutil.rmtree(self.folder / VICTIM, ignore_errors=True)
        self.again()

    def _run(self) -> None:
        """What it knows of runs, and nothing else: a new instance under the secret of before."""
        for path in (self.folder / VICTIM).glob("*/"):
            shutil.rmtree(path)
        self.again()

    def _backup(self) -> None:
        shutil.rmtree(self.folder / VICTIM, ignore_errors=True)
        if (self.folder / "kept" / VICTIM).exists():
            shutil.copytree(self.folder / "kept" / VICTIM, self.folder / VICTIM)
        self.again()

    def _rows(self) -> None:
        self.tables[VICTIM] = self.tables[VICTIM] + 0.5
        self.again()

    def _rows_and_disk(self) -> None:
        self.tables[VICTIM] = self.tables[VICTIM][:-3] + 0.5
        self._disk()

    def _key(self) -> None:
        """Another key, which nobody else has pinned."""
        key = make_private_key()
        known = {name: each.key.public_key() for name, each in self._known.items()}
        self._known[VICTIM] = SiteIdentity(VICTIM, key, known | {VICTIM: key.public_key()})
        self.again()

    def _damage(self) -> None:
        """Every file of a run holds something else."""
        for path in (self.folder / VICTIM).glob("*/*"):
            if path.is_file():
                path.write_bytes(path.read_bytes()[:-7] + b"\0rubbish")
        self.again()

    def _roster(self) -> None:
        for path in (self.folder / VICTIM).glob("*/roster"):
            path.write_bytes(b"rubbish")
        self.again()

    def _answer_and_server(self) -> None:
        """The answer that waits for a set, while others may have told theirs for it."""
        for path in (self.folder / VICTIM).glob("*/ready"):
            path.unlink()
        self.again()
        raise Killed

    def _server_backup(self) -> None:
        fit = self.config.place("folder") / "fit"
        shutil.rmtree(fit, ignore_errors=True)
        if (self.folder / "kept" / "fit").exists():
            shutil.copytree(self.folder / "kept" / "fit", fit)
        raise Killed

    def _server_disk(self) -> None:
        shutil.rmtree(self.config.place("folder"))
        self.config.place("folder").mkdir()
        raise Killed

    # All of it.

    def go(self, loss: str = "", when: int = -1, kept_at: int = -1) -> Ended:
        """Serve, start again a server that was killed, and say how it ended."""
        self.loss, self.when, self.kept_at = loss, when, kept_at
        began, words = self.clock.now, ""
        status: dict[str, Any] = {}
        with (
            self.clock.everywhere(),
            mock.patch.object(Disk, "sync", ScratchDisk.sync),
            mock.patch.object(Status, "while_waiting", return_value=contextlib.nullcontext()),
            heard() as told,
        ):
            for _ in range(RESTARTS):
                try:
                    serve_run(self, self.config, Status(self.config.place("folder"), status.update))
                    break
                except Killed:
                    continue
                except EmfedError as error:
                    words = str(error)
                    break
        model = self.config.place("output") / "model.emfed"
        return Ended(
            load(model).params.means if model.exists() else None,
            f"{status.get('state')}: {status.get('why')} {status.get('refusals')} {words}",
            self.clock.now - began,
            self.messages,
            "\n".join(told),
            [n for n in self.sites if (self.folder / n / "model.emfed").exists()],
        )


@contextlib.contextmanager
def heard() -> Iterator[list[str]]:
    """All that the library logs within."""
    told: list[str] = []
    ours = logging.getLogger("emfed")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    handler = Handler()
    level = ours.level
    ours.addHandler(handler)
    ours.setLevel(logging.INFO)
    try:
        yield told
    finally:
        ours.removeHandler(handler)
        ours.setLevel(level)
