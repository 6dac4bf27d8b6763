"""Who is in a run: the server's side of the opening, kept on disk, and who comes back to it."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, final

import numpy as np

from emfed.core.errors import ParticipationError, WireError
from emfed.core.privacy import Privacy
from emfed.core.protocols import FloatArray, IntArray, Opening
from emfed.core.storage import DISK, Disk, load_checkpoint, save_checkpoint
from emfed.core.wire import (
    Header,
    Join,
    Kind,
    as_json,
    decode_join,
    decode_moments,
    deflate,
    worker_loss,
)
from emfed.models.binding import Shapes, unflatten
from emfed.network import texts
from emfed.network.connection import Connection, logger
from emfed.network.masking import Announcement, decode_roster, encode_roster
from emfed.network.plausible import impossible_summary, oddities
from emfed.network.sums import FIRST_QUESTION


@final
@dataclass(eq=False)
class Members:
    """Workers by number, and what each said of itself; ``retired`` instances were replaced.

    It is written before anyone is told its number, and again when an instance changes.
    """

    run: int
    keys: list[str] = field(default_factory=list)
    settings: list[str] = field(default_factory=list)
    """The hello that each answered."""
    instances: list[int] = field(default_factory=list)
    retired: dict[str, list[int]] = field(default_factory=dict)
    counts: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    values: FloatArray = field(default_factory=lambda: np.empty((0, 0)))
    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    columns: tuple[str, ...] | None = None
    traffic: IntArray = field(default_factory=lambda: np.empty(0, dtype=np.int64))
    """The opening in the ledger's form."""
    description: Any = None
    """The model's."""
    totals: FloatArray | None = None
    """What each worker counts for, where rows have weights."""
    phase: int = 0
    """The last phase that anyone may have been told of."""
    roster: dict[int, Announcement] = field(default_factory=dict)
    """With masks: everybody's key of the run. Counts and values are then those of all, shared."""
    effective: float | None = None
    questions: int = FIRST_QUESTION
    """The last number of a question that anyone may have been asked: a lower one is old."""
    rosters: int = 0
    """How often the roster has changed: sites take none with a lower number."""

    @classmethod
    def of(cls, joins: Sequence[Join]) -> Members:
        """Make members, in this order, of what each said when it joined."""
        known = {number: announced(join) for number, join in enumerate(joins)}
        totals = [join.total for join in joins]
        return cls(
            0,
            instances=[join.instance for join in joins],
            counts=np.array([join.count for join in joins], dtype=np.int64),
            totals=None if totals[0] is None else np.array(totals, dtype=np.float64),
            columns=columns_of(joins[0]),
            roster={number: key for number, key in known.items() if key is not None},
        )

    @property
    def opening(self) -> Opening:
        """Counts and summaries, as an `Opening`."""
        parts = [unflatten(values, self.shapes) for values in self.values]
        summaries = {name: np.stack([part[name] for part in parts]) for name in self.shapes}
        return Opening(
            self.counts,
            summaries,
            self.columns,
            self.keys,
            self.totals,
            effective=self.effective,
            whole=parts[0] if self.roster else None,
        )

    def save(self, path: Path, disk: Disk = DISK) -> None:
        """Write, atomically."""
        about = {
            "run": f"{self.run:016x}",
            "keys": self.keys,
            "settings": self.settings,
            "instances": [f"{i:016x}" for i in self.instances],
            "retired": {k: [f"{i:016x}" for i in v] for k, v in self.retired.items()},
            "shapes": {name: list(shape) for name, shape in self.shapes.items()},
            "columns": None if self.columns is None else list(self.columns),
            "description": self.description,
            "phase": self.phase,
            "questions": self.questions,
            "rosters": self.rosters,
        }
        arrays = {"counts": self.counts, "values": self.values, "traffic": self.traffic}
        if self.totals is not None:
            arrays["totals"] = self.totals
        if self.roster:
            arrays["roster"] = np.frombuffer(encode_roster(self.roster), dtype=np.uint8)
            about["effective"] = self.effective
        save_checkpoint(path, arrays, about, disk)

    @classmethod
    def load(cls, path: Path, disk: Disk = DISK) -> Members:
        """Read what `save` wrote."""
        arrays, about = load_checkpoint(path, disk)
        return cls(
            int(about["run"], 16),
            about["keys"],
            about["settings"],
            [int(i, 16) for i in about["instances"]],
            {k: [int(i, 16) for i in v] for k, v in about["retired"].items()},
            arrays["counts"],
            arrays["values"],
            {name: tuple(shape) for name, shape in about["shapes"].items()},
            None if about["columns"] is None else tuple(about["columns"]),
            arrays["traffic"],
            about["description"],
            arrays.get("totals"),
            about["phase"],
            decode_roster(arrays["roster"].tobytes()) if "roster" in arrays else {},
            about.get("effective"),
            about.get("questions", FIRST_QUESTION),
            about.get("rosters", 0),
        )


def new_run() -> int:
    """64 bits that no run had before."""
    return int.from_bytes(os.urandom(8), "little")


def summary_of(join: Join) -> tuple[Shapes, FloatArray] | None:
    """A worker's summary and the shapes of its parts, None if they make no sense."""
    shapes = join.about.get("shapes")
    if not isinstance(shapes, dict):
        return None
    try:
        read = {str(name): tuple(int(n) for n in shape) for name, shape in shapes.items()}
        if any(n < 0 for shape in read.values() for n in shape):
            return None
        if join.about.get("private") is True:  # numbers come with noise
            return read, np.empty(0)
        if join.about.get("key") is True:  # numbers come as sums
            return None if announced(join) is None else (read, np.empty(0))
        return read, decode_moments(join.numbers, sum(map(prod, read.values())))
    except (TypeError, ValueError, WireError):
        return None


def announced(join: Join) -> Announcement | None:
    """The key for masks that a worker told with its join, None if that makes no sense."""
    if join.about.get("key") is not True:
        return None
    try:
        found = decode_roster(join.numbers)
    except WireError:
        return None
    own = found.get(0)
    return own if own is not None and own.instance == join.instance and len(found) == 1 else None


def columns_of(join: Join) -> tuple[str, ...] | None:
    """The names of a worker's columns."""
    columns = join.about.get("columns")
    return tuple(map(str, columns)) if isinstance(columns, list) else None


def most_common(values: list[Any]) -> Any:
    """The value that most have; of several the first."""
    return Counter(values).most_common(1)[0][0]


def impossible(join: Join, summary: tuple[Shapes, FloatArray]) -> str:
    """What no rows can say of themselves, in words; empty if rows could."""
    shapes, values = summary
    if not len(values):  # its numbers come with noise, or as part of a sum
        return ""
    return impossible_summary(join.count, unflatten(values, shapes), join.total)


@final
class RollCall:
    """Hello to workers, and what follows from their answers."""

    def __init__(self, line: Connection) -> None:
        self.line, self.masks = line, False
        self.privacy: Privacy | None = None
        self.uniform = False
        self._number = new_run() >> 33
        """The number of this hello: a late answer to another one is not taken for its own."""

    def gather(
        self,
        run: int,
        description: Any,
        columns: tuple[str, ...] | None,
        minimum: int,
        model: Any = None,
        rounded: bool = False,
    ) -> Members:
        """Everyone who can be reached, joins, and fits the others."""
        line, keys = self.line, self.line.transport.workers()
        line.objections = {}
        loss = worker_loss(len(keys), model.fixed_data) if rounded else None
        content = texts.hello(description, columns, loss, self.masks, self.privacy, self.uniform)
        joins, told = self.hello(run, keys, content)
        if columns is None and joins:
            joins, said = self._in_common_columns(run, joins, content)
            told |= said
        ways = most_common([j.total is None for j in joins.values()]) if joins else True
        common, summaries = self._of_common_shapes(joins, ways, model)
        joins = {key: joins[key] for key in summaries}
        late = {*line.objections} - {*joins, *line.refusals} if line.transport.waits() else set()
        if late or len(joins) < minimum:
            said = line.objections | line.refusals
            why = reasons({key: text for key, text in said.items() if key not in joins})
            needed = f"waits for {', '.join(sorted(late))}" if late else f"needs {minimum}"
            raise ParticipationError(f"{len(joins)} workers joined; the run {needed}.{why}")
        # Numbers follow the transport's order: a run does not depend on who answered first.
        members = [key for key in keys if key in joins]
        gathered = Members.of([joins[key] for key in members])
        gathered.run, gathered.keys, gathered.description = run, members, description
        gathered.settings, gathered.shapes = [told[key] for key in members], common
        gathered.values = np.stack([summaries[key] for key in members])
        if gathered.values.size:
            opening = gathered.opening
            for key, words in oddities(members, opening.counts, opening.summaries).items():
                logger.warning("%s is odd: %s", key, words)
        return gathered

    def _in_common_columns(
        self, run: int, joins: dict[str, Join], content: dict[str, Any]
    ) -> tuple[dict[str, Join], dict[str, str]]:
        """Return who has the columns that most have once others were asked for these, and settings.

        Whoever does not have them is out.
        """
        told: dict[str, str] = {}
        columns = most_common([columns_of(join) for _, join in sorted(joins.items())])
        others = [key for key, join in joins.items() if columns_of(join) != columns]
        if columns is not None and others:
            again, told = self.hello(run, others, content | {"columns": list(columns)})
            joins = {k: j for k, j in joins.items() if k not in others} | again
        for key in [k for k, join in joins.items() if columns_of(join) != columns]:
            self.line.dismiss(key, f"its columns are not those of the others, {columns}.")
        return {k: j for k, j in joins.items() if columns_of(j) == columns}, told

    def _of_common_shapes(
        self, joins: Mapping[str, Join], weightless: bool, model: Any
    ) -> tuple[dict[str, tuple[int, ...]], dict[str, FloatArray]]:
        """Return the shapes that most summaries have, and the summaries of these shapes."""
        found = {key: summary_of(join) for key, join in joins.items()}
        known = [tuple(sorted(s[0].items())) for s in found.values() if s is not None]
        common, kept = dict(most_common(known)) if known else {}, {}
        for key, join in joins.items():
            summary, alike = found[key], (join.total is None) is weightless and not join.cells
            if summary is None or summary[0] != common or not alike:
                why = f"its summary has not the shapes of the others', {common}."
            else:
                why = impossible(join, summary)
            if summary is None or why:
                self.line.dismiss(key, why)
            else:
                kept[key] = summary[1]
        return common, kept

    def hello(
        self,
        run: int,
        keys: Sequence[str],
        content: Mapping[str, Any],
        once: bool = False,
    ) -> tuple[dict[str, Join], dict[str, str]]:
        """Who joins, of those named, and the settings each was told."""
        self._number += 1
        text = as_json(content)
        message = Header(Kind.HELLO, run, self._number, 0, 0), deflate(text)
        joins: dict[str, Join] = {}
        for _ in range(1) if once else self.line.tries():
            missing = {k for k in keys if k not in joins and k not in self.line.refusals}
            messages = {key: message for key in keys if key in missing}
            for key, kind, answer in self.line.deliver("opening", messages):
                if key not in missing:
                    continue
                if kind is Kind.REFUSAL and self.line.heed(key, answer) is not None:
                    missing.discard(key)
                elif kind is Kind.JOIN:
                    try:
                        joins[key] = decode_join(answer)
                        missing.discard(key)
                    except WireError as error:
                        logger.warning("%s joins with words that are none: %s", key, error)
                if not missing:
                    break
            if all(k in joins or k in self.line.refusals for k in keys):
                break  # before another try waits for its turn
        return joins, dict.fromkeys(keys, text)

    def greet(self, members: Members, keys: Sequence[str]) -> list[str]:
        """Who of these would join a run like this one: asked once, in the columns of its members.

        Those who refuse for good or fit nobody are noted; those who do not answer, or not now, may
        be asked again.
        """
        columns = None if members.columns is None else list(members.columns)
        content = json.loads(members.settings[0]) | {"columns": columns}
        joins, _ = self.hello(members.run, keys, content, once=True)
        for key, join in joins.items():
            summary = summary_of(join)
            alike = columns_of(join) == members.columns
            alike = alike and summary is not None and summary[0] == members.shapes
            if summary is None or not alike:
                self.line.dismiss(key, "its columns or its summary are not those of the others.")
            elif why := impossible(join, summary):
                self.line.dismiss(key, why)
        return [key for key in keys if key in joins and key not in self.line.refusals]

    def again(self, members: Members, numbers: Sequence[int]) -> IntArray:
        """Workers that know nothing of the run: hello again; those with a new instance lost all.

        An instance that was replaced and speaks again means that two hold one key: neither can be
        trusted to be the worker that the server's V counts, so the key is out.
        """
        lost = []
        for number in numbers:
            key, content = members.keys[number], json.loads(members.settings[number])
            # Once: who does not answer is asked again, and refuses again, with the round.
            joins, _ = self.hello(members.run, [key], content, once=True)
            join = joins.get(key)
            if join is None or join.instance == members.instances[number]:
                continue
            before = members.retired.setdefault(key, [])
            summary = summary_of(join)
            same = summary is not None and np.array_equal(summary[1], members.values[number])
            told = announced(join) if members.roster else None
            # With masks nobody but the worker itself knows its numbers: they are the site's affair.
            same = same or told is not None
            same = same
            if join.instance in before:
                self.line.dismiss(key, "two workers use this key, each with its own memory.")
            elif not same or (told is None and join.count != members.counts[number]):
                self.line.dismiss(key, "it came back with other data than it joined with.")
            else:
                before.append(members.instances[number])
                members.instances[number] = join.instance
                if told is not None:
                    members.roster[number] = told
                lost.append(number)
        return np.array(lost, dtype=np.int64)


def reasons(said: Mapping[str, str]) -> str:
    """What sites say, a line for each reason, with the names of all who give it."""
    named: dict[str, list[str]] = {}
    for key, text in sorted(said.items()):
        named.setdefault(text, []).append(key)
    return "".join(f"\n  {', '.join(keys)}: {text}" for text, keys in named.items())
