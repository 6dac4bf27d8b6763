"""A worker elsewhere: messages in, messages out, and a disk between.

`Site.step` is the whole of it. It keeps nothing in memory that matters: every step reads the disk
and writes it before it answers, so a process may be killed at any point, or be started anew for
each message. It never raises for what a message says: it answers with a refusal and a reason. The
reason names no value of any record; the full story is in the site's own log.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, final

import numpy as np

from emfed.core.errors import DataError, SettingsError, WireError
from emfed.core.protocols import Algorithm, FloatArray, Model, Request, Rows
from emfed.core.storage import DISK, Disk
from emfed.core.version import __version__
from emfed.core.wire import (
    LARGEST_PAYLOAD,
    Header,
    Join,
    Kind,
    Reason,
    decode_bundle,
    decode_floats,
    decode_request,
    decode_text,
    encode_join,
    encode_refusal,
    encode_reply,
    encode_table,
    fingerprint,
    peek,
    seal,
)
from emfed.data import Workers
from emfed.network.data import arrange, read_site
from emfed.network.descriptions import build_algorithm, build_model
from emfed.network.loop import LoopFederation
from emfed.network.opening import bind_constants, flatten, unflatten_params
from emfed.network.rules import GuardedRows, Journal, Refusal, SiteRules
from emfed.network.store import Joined, SiteStore, State, Tally, clear_old, clear_torn

logger = logging.getLogger(__name__)
NOBODY = Header(Kind.REFUSAL, 0, 0, 0, 0, 0)
LARGEST_STATISTICS = LARGEST_PAYLOAD // 8
"""A model with more could only be named to use up a site's memory."""
_ME = np.zeros(1, dtype=np.int64)
_ALONE = np.ones(1)


def mark(settings: str, instance: int) -> int:
    """The fingerprint of all messages to and from one instance of a worker in a run."""
    return fingerprint(settings.encode() + instance.to_bytes(8, "little"))


@lru_cache(maxsize=8)
def _model(
    settings: str, constants: bytes, shapes: tuple[tuple[str, tuple[int, ...]], ...]
) -> Model:
    """The model of a run, bound; the same for every message of it."""
    unbound = build_model(decode_text(settings.encode())["model"])
    bound = bind_constants(unbound, np.frombuffer(constants), dict(shapes))
    if bound.layout.size > LARGEST_STATISTICS:
        raise SettingsError(f"{bound.layout.size} statistics are more than a message can hold.")
    return bound


@lru_cache(maxsize=8)
def _algorithm(text: str) -> tuple[Algorithm, int]:
    content = decode_text(text.encode())
    return build_algorithm(content["algorithm"]), int(content["seed"])


@final
class Site:
    """One worker's end of any number of runs.

    ``data`` is a table, a frame, the path of a Parquet file, a `Source` or a `Stream`;
    ``directory`` is where the site keeps what it must not lose, and belongs to it alone;
    ``rules`` are the owner's; every message sent is a line of ``journal``.
    """

    def __init__(
        self,
        data: Any,
        directory: str | Path,
        *,
        rules: SiteRules | None = None,
        journal: str | Path | None = None,
        columns: Sequence[str] | None = None,
        disk: Disk = DISK,
        device: Any | None = None,
    ) -> None:
        self.rules = SiteRules() if rules is None else rules
        self.directory, self.disk = Path(directory), disk
        self._data = read_site(data, columns, device)
        self._tally = Tally(self.directory, disk)
        self._cleared = False
        self._journal = Journal(None if journal is None else Path(journal))

    def step(self, message: bytes) -> bytes:
        """Answer one message."""
        header, reply, note = NOBODY, b"", ""
        try:
            header, body = peek(message)
            self.disk.make_directory(self.directory)  # a lost disk may come back empty
            with self.disk.lock(self.directory / "lock"):
                if not self._cleared:
                    clear_torn(self.directory, self.disk)
                    self._cleared = True
                reply, note = self._answer(header, body, message)
        except Refusal as refusal:
            reply, note = self._refuse(header, refusal)
        except WireError as error:
            reply, note = self._refuse(header, Refusal(Reason.DAMAGED, str(error)))
        except SettingsError as error:
            logger.error("%s", error)
            reply, note = self._refuse(header, Refusal(Reason.REFUSED, str(error)))
        except DataError as error:
            logger.error("%s", error)
            # The error may name a value; rows of a stream may be better the next time.
            text = "its data cannot be used by this model; its log says why"
            reason = Reason.REFUSED if header.kind is Kind.HELLO else Reason.FAILED
            reply, note = self._refuse(header, Refusal(reason, text))
        except Exception as error:
            logger.exception("a message could not be answered")
            text = f"an error of type {type(error).__name__}; its log says more"
            reply, note = self._refuse(header, Refusal(Reason.FAILED, text))
        sent, _ = peek(reply)
        self._journal.write(
            run=f"{header.run:016x}",
            kind=sent.kind.name.lower(),
            round=header.round,
            bytes=len(reply),
            content=note,
        )
        return reply

    @staticmethod
    def _refuse(header: Header, refusal: Refusal) -> tuple[bytes, str]:
        head = replace(header, kind=Kind.REFUSAL, dimension=0)
        text = f"{refusal.reason.name.lower().replace('_', ' ')}: {refusal.text}"
        return encode_refusal(head, refusal.reason, refusal.text, refusal.instance), text

    def _store(self, run: int) -> SiteStore:
        return SiteStore(self.directory / f"{run:016x}", self.disk)

    def _answer(self, header: Header, body: bytes, message: bytes) -> tuple[bytes, str]:
        """The reply to a message, or to the last of a bundle, with what it holds in words."""
        messages = decode_bundle(body) if header.kind is Kind.BUNDLE else [message]
        for part in messages[:-1]:
            inner, content = peek(part)
            self._take(inner, content)
        header, body = peek(messages[-1])
        if header.kind is Kind.HELLO:
            return self._hello(header, body)
        if header.kind is Kind.REQUEST:
            return self._round(header, messages[-1])
        if header.kind in (Kind.START, Kind.EVALUATE):
            return self._evaluate(header, body)
        raise WireError(f"a worker has no answer to a {header.kind.name.lower()}.")

    # The opening.

    def _hello(self, header: Header, body: bytes) -> tuple[bytes, str]:
        """Say who this is and describe the data, or say why not."""
        content = decode_text(body)
        description = content.get("model")
        model = build_model(description)
        assert isinstance(description, Mapping)
        self.rules.check_model(str(description["model"]))
        wanted = content.get("columns")
        data = arrange(self._data, None if wanted is None else tuple(map(str, wanted)))
        opening = LoopFederation(data).open(model)
        count = int(opening.counts[0])
        summary = {name: values[0] for name, values in opening.summaries.items()}
        self.rules.check_opening(count, model.summary_shares(summary))
        store = self._store(header.run)
        joined = store.joined()
        settings = body.decode()
        if joined is not None and joined.number >= 0 and joined.settings != settings:
            raise Refusal(Reason.REFUSED, "this run began with other settings.")
        if joined is None:
            store.forget()  # what is left of another instance
        if joined is None or joined.settings != settings:
            instance = (
                int.from_bytes(os.urandom(8), "little") if joined is None else joined.instance
            )
            shapes = {name: values.shape for name, values in summary.items()}
            joined = Joined(settings, instance, count, shapes, data.columns)
            store.join(joined)
            clear_old(self.directory, store.directory, self.disk)
        elif joined.count != count:
            raise Refusal(Reason.REFUSED, "its data changed since the run began.")
        else:
            store.settle("joined")
        about = {
            "columns": None if data.columns is None else list(data.columns),
            "shapes": {name: list(shape) for name, shape in joined.shapes.items()},
            "software": f"emfed {__version__}",
        }
        values = flatten(summary)
        head = replace(header, kind=Kind.JOIN, dimension=len(values))
        note = f"{count} rows; {', '.join(sorted(summary))}: {len(values)} numbers over all of them"
        return encode_join(head, Join(joined.instance, about, count, values)), note

    def _known(self, header: Header) -> tuple[SiteStore, Joined]:
        """The run a message belongs to, if this is the instance it is meant for."""
        store = self._store(header.run)
        joined = store.joined()
        if joined is None:
            raise Refusal(Reason.UNKNOWN_RUN, "nothing is known here of this run: say hello.")
        if header.fingerprint != mark(joined.settings, joined.instance):
            raise Refusal(
                Reason.OTHER_INSTANCE, "this is for another holder of this key.", joined.instance
            )
        return store, joined

    def _take(self, header: Header, body: bytes) -> None:
        """Constants and settings: kept, if they are news."""
        store, joined = self._known(header)
        if header.kind is Kind.CONSTANTS:
            constants = decode_floats(body, header.dimension)
            told = replace(joined, constants=constants, number=header.worker)
            if joined.number >= 0 and (
                joined.number != told.number or not np.array_equal(joined.constants, constants)
            ):
                raise Refusal(Reason.REFUSED, "this run told other constants before.")
            _model(told.settings, constants.tobytes(), tuple(told.shapes.items()))
        elif header.kind is Kind.SETTINGS:
            told = replace(joined, algorithm=body.decode(errors="replace"))
            if joined.algorithm not in ("", told.algorithm):
                raise Refusal(Reason.REFUSED, "this run had other settings before.")
            _algorithm(told.algorithm)
        else:
            raise WireError(f"a {header.kind.name.lower()} cannot come first in a bundle.")
        if (joined.number, joined.algorithm) != (told.number, told.algorithm):
            store.join(told)

    def _local(self, joined: Joined) -> tuple[Model, LoopFederation]:
        """The bound model, and the data as one worker of a loop."""
        if joined.number < 0:
            raise Refusal(Reason.UNKNOWN_RUN, "the constants of this run never came: say hello.")
        model = _model(joined.settings, joined.constants.tobytes(), tuple(joined.shapes.items()))
        data: Workers = arrange(self._data, joined.columns)
        if int(data.counts[0]) != joined.count:
            raise Refusal(Reason.REFUSED, "its data changed since the run began.")
        return model, LoopFederation(data)

    def _evaluate(self, header: Header, body: bytes) -> tuple[bytes, str]:
        """Exact statistics, or the mean log-likelihood, at given parameters."""
        _, joined = self._known(header)
        model, local = self._local(joined)
        params = unflatten_params(decode_floats(body, header.dimension), model.start(0))
        self._may_answer()
        start, smallest = header.kind is Kind.START, self.rules.smallest_group
        values = np.empty(0)
        if start or smallest is not None:
            values = local.mean_statistics(model, params, _ALONE)
        if smallest is not None:
            GuardedRows.check(model, values[None], local.data.counts, smallest)
        if start:
            self._count_answer()
            head = replace(header, kind=Kind.STATISTICS, dimension=len(values))
            return encode_table(head, values), f"exact expected statistics: {len(values)} numbers"
        value = np.array([local.mean_log_likelihood(model, params, _ALONE)])
        self._count_answer()
        head = replace(header, kind=Kind.LIKELIHOOD, dimension=1)
        return encode_table(head, value), "the mean log-likelihood: 1 number"

    def _may_answer(self) -> None:
        """Refuse what would be one answer too many."""
        if self.rules.largest_rounds is not None:
            self.rules.check_answers(self._tally.read())

    def _count_answer(self) -> None:
        """Count an answer that is about to leave; without the rule nobody asks for the number."""
        if self.rules.largest_rounds is not None:
            self._tally.add()

    # Rounds.

    def _round(self, header: Header, message: bytes) -> tuple[bytes, str]:
        """One round of the algorithm, written before it is told."""
        store, joined = self._known(header)
        model, local = self._local(joined)
        if not joined.algorithm:
            raise Refusal(Reason.UNKNOWN_RUN, "the settings of this run never came: say hello.")
        algorithm, seed = _algorithm(joined.algorithm)
        q = model.layout.size
        expected = replace(header, kind=Kind.REQUEST, worker=joined.number, dimension=q)
        body = decode_request(message, expected)
        state = store.state() or _fresh(algorithm, q)
        lost = seal(replace(header, kind=Kind.LOST_MEMORY), b"")
        if header.round < state.round:
            raise Refusal(
                Reason.OLD, f"round {header.round} is over; round {state.round} was next."
            )
        statistics = body.statistics
        if statistics is None:
            if state.round < body.since:
                return lost, "memory lost: no content"
            steps = body.steps[state.round - body.since :]
            statistics = state.statistics
            for number, step in enumerate(steps, state.round):
                statistics = algorithm.follow(model, seed, number, statistics, step)
        request = Request(
            round=header.round,
            generation=body.generation,
            kind="start" if body.start else "round",
            statistics=statistics,
            params=model.maximize(statistics),
            workers=np.array([joined.number], dtype=np.int64),
            accepted=np.array([body.accepted], dtype=np.int64),
            encode=True,
        )
        new, replies = self._work(model, algorithm, seed, state, request, local)
        if len(replies.lost_memory):
            store.put(replace(new, round=state.round, statistics=state.statistics))
            return lost, "memory lost: no content"
        if not len(replies.workers):
            raise Refusal(Reason.OLD, "a request that was overtaken by another.")
        if new is not state:
            store.put(new)
        else:
            store.settle("state")
        payload = new.rows["payload"][0].tobytes()
        evaluations = int(replies.evaluations[0])
        head = replace(header, kind=Kind.REPLY, worker=joined.number)
        note = f"{len(payload)} bytes for {q} statistics over {evaluations} evaluated rows"
        return encode_reply(head, body.generation, evaluations, payload), note

    def _work(
        self,
        model: Model,
        algorithm: Algorithm,
        seed: int,
        state: State,
        request: Request,
        local: LoopFederation,
    ) -> tuple[State, Any]:
        """The algorithm's own worker step, for this worker alone."""
        again = bool(state.rows["pending_round"][0] == request.round)
        if not again:
            self._may_answer()
        local.begin(model, algorithm, seed)
        mine = replace(request, workers=_ME)
        oracle = local.oracle(mine, request.workers)
        if self.rules.smallest_group is not None:
            oracle = GuardedRows(oracle, model, request.params, self.rules.smallest_group)
        rows, replies = algorithm.worker_step(model, seed, state.rows, request, oracle)
        if again and len(replies.workers):
            return state, replies
        if len(replies.workers):
            self._count_answer()
        return State(rows, request.round, request.statistics), replies


def _fresh(algorithm: Algorithm, q: int) -> State:
    """A worker that has not been asked yet."""
    rows: Rows = {
        name: np.full((1, *column.shape), column.fill, dtype=column.dtype)
        for name, column in algorithm.columns(q).items()
    }
    nothing: FloatArray = np.zeros(q)
    return State(rows, -1, nothing)
