"""Exchanges that are not masked: sites are heard one by one, and an analyst adds.

Sites send parts that are coded (`emfed.aggregation.coded`), or answers that do not add up. The
first analyst follows the fit like everyone, so it knows what is asked; the relay hands it the
parts. It tells everyone what they come to, in an entry that it signs. So a site may be absent.

========== ============================================ ==========================================
who        event                                        next
========== ============================================ ==========================================
site       the fit asks it                              a pass; states and message written, sent
site       any other entry than what is told            the same message
site       an order to begin anew                       another pass, from the states of before
site       what is told of this exchange                the states of after; the next ask
site       its states are of another exchange           a message that says so
adder      all have answered that are awaited, or the   what it keeps is written with what it
           wait is over and half of all have            tells, and that is signed
adder      it has lost what it keeps                    orders all to begin anew
========== ============================================ ==========================================

A site that has missed an exchange is not waited for as long as the relay does not hear it. Whoever
comes back has the transcript, and so knows whom the adder counted when: memories are exact.
"""

from __future__ import annotations

import copy
import hashlib
import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np

from emfed.aggregation.coded import (
    DIGEST_BYTES,
    Adder,
    Books,
    CodedSum,
    Forgotten,
    decode_weight,
    encode_weight,
)
from emfed.aggregation.gathered import CodedGather
from emfed.aggregation.unmasked import goes_without
from emfed.core.errors import EmfedError, FederationError
from emfed.core.sums import ONCE_BITS, Finish, FloatArray, Gather, Gathers, IntArray, States
from emfed.data.held import HeldWorkers
from emfed.network.exchange.followed import (
    CodedProgram,
    Comings,
    Ended,
    FitInProgress,
    FollowedFit,
    Holder,
    KnownRows,
    PassPlace,
)
from emfed.network.exchange.statements import (
    Body,
    Confirmation,
    Entry,
    Fault,
    SetChange,
    SignedOrder,
    SignedPart,
    SignedSum,
    StatementKind,
    start_of,
)
from emfed.network.exchange.transcript import Stage, Transcript

RESULT, RECORD = b"result ", b"coded"
"""Names among the states that a member keeps: of a result, with its head, and of what it sent."""


@final
@dataclass(frozen=True)
class _Record:
    """What a member has sent in an exchange, and what it keeps: on disk before it is sent.

    Parameters
    ----------
    place : bytes
        The head where the epoch begins.
    exchange : int
        Which exchange of it.
    anew : int
        How often all had begun anew by then.
    digest : bytes
        What was asked.
    message : bytes
        What was sent.
    before, after : mapping of str to arrays
        What it kept before the exchange, and keeps after it, by memory and column.
    """

    place: bytes
    exchange: int
    anew: int
    digest: bytes
    message: bytes
    before: Mapping[str, States] = field(default_factory=dict)
    after: Mapping[str, States] = field(default_factory=dict)

    def encode(self) -> bytes:
        """One file of arrays."""
        arrays: dict[str, Any] = {
            "about": np.frombuffer(self.place + self.digest, np.uint8),
            "numbers": np.array([self.exchange, self.anew]),
            "message": np.frombuffer(self.message, np.uint8),
        }
        for when, kept in (("before", self.before), ("after", self.after)):
            for name, columns in kept.items():
                arrays |= {f"{when}/{name}/{column}": v for column, v in columns.items()}
        file = io.BytesIO()
        np.savez(file, **arrays)
        return file.getvalue()

    @classmethod
    def decode(cls, data: bytes) -> _Record:
        """The inverse of `encode`."""
        kept: dict[str, dict[str, States]] = {"before": {}, "after": {}}
        with np.load(io.BytesIO(data)) as arrays:
            about, numbers = arrays["about"].tobytes(), arrays["numbers"].tolist()
            message = arrays["message"].tobytes()
            for key in arrays.files:
                when, _, rest = key.partition("/")
                if rest:
                    name, column = rest.split("/")
                    kept[when].setdefault(name, {})[column] = arrays[key]
        exchange, anew = numbers
        return cls(about[:32], exchange, anew, about[32:], message, kept["before"], kept["after"])


@final
class HeardSums(FollowedFit):
    """A fit whose exchanges are coded, as sites, their adder and others follow it."""

    def __init__(self, me: Holder, about: Transcript) -> None:
        super().__init__(me, about)
        self.followed: FitInProgress | None = None
        self._epoch = -1
        self._books = Books(1)
        self._coded: CodedSum | CodedGather | None = None
        """The exchange that is due."""
        self._drawn: set[int] = set()
        """Who takes part in it."""
        self._anew = 0
        self._record = _Record.decode(me.states[RECORD]) if RECORD in me.states else None
        self._adder: Adder | None = None
        """What the adder keeps; None: it is lost, or this is another member."""
        self._heard: dict[str, bytes] = {}
        self._since: float | None = None
        self._now = 0.0

    # Following.

    def begin(self) -> None:
        """Follow all epochs from the beginning: whoever has the entries has all that is told."""
        about = self.about
        if self.program is None or not about.epochs:
            return
        if not isinstance(self.program, CodedProgram):
            raise FederationError("these settings need every site in every sum, or masks.")
        self._begin_epoch(0, b"")
        for place in range(about.epochs[0][0], len(about)):
            entry = Entry.decode(about.entries[place])
            self.follow(StatementKind(entry.kind), entry, place)

    def entered(self, kind: StatementKind, entry: Entry, place: int) -> None:
        """Act on an entry that the transcript has at this place."""
        if self.followed is not None:
            super().entered(kind, entry, place)

    def _begin_epoch(self, epoch: int, state: bytes) -> None:
        assert self.program is not None
        place, members = self.about.epochs[epoch]
        self._epoch, self._books, self._anew = epoch, Books(len(members)), 0
        self._adder = Adder(np.zeros(len(members))) if self._adds else None
        self.program.extend(self.about.extended(place))
        first = tuple(name for name in self.about.agreement.sites if name in self.about.first)
        comings = Comings(first, self.about.gone)
        fit = self.program.begin(members, state, self._place, comings)
        self.followed = FitInProgress(fit)
        self.followed.begin()
        self._open()

    @property
    def _place(self) -> bytes:
        return self.about.heads[self.about.epochs[self._epoch][0]]

    @property
    def _members(self) -> tuple[str, ...]:
        return self.about.epochs[self._epoch][1]

    @property
    def _adds(self) -> bool:
        return self.me.name == self.about.agreement.adder

    def follow(self, kind: StatementKind, entry: Entry, place: int) -> None:
        """Act on an entry, or raise what the fit raises."""
        body = entry.statements[0].body
        if kind is StatementKind.TOLD:
            self._take(SignedSum.decode(body).told)
        elif kind is StatementKind.CHANGE:
            self._change_set()
        elif kind is StatementKind.ORDER:
            self._obey(entry.statements[0].author, SignedOrder.decode(body), place)

    def _obey(self, author: str, order: SignedOrder, place: int) -> None:
        assert self.followed is not None
        if order.word == "finish":
            self.followed.finish()
            self._coded = None
        elif order.word == "extend" and self.program is not None:
            self.program.extend(self.about.extended(place + 1))
        elif order.word == "anew":
            self._anew += 1
            self._books.begin_anew()
            self._books.weighed[:] = False
            self._adder = Adder(np.zeros(self._books.workers)) if self._adds else None
            self.followed.ask = copy.copy(self.followed.ask)  # another pass over the rows
            self._open()
        elif order.word in ("leave", "expel") and order.argument == self.me.name:
            self.me.leave("it left this fit, or was expelled from it.")
            self.end(f"this site has left: {self.me.leaving}")

    def _change_set(self) -> None:
        """Newcomers: the next epoch goes on from what this one has reached."""
        assert self.followed is not None
        assert self.program is not None
        try:
            self.followed.finish()
            reached = self.followed.result
        except Finish:
            reached = None
        self._begin_epoch(self._epoch + 1, self.program.state(reached))

    def _open(self) -> None:
        """The next exchange, if there is one."""
        assert self.followed is not None
        assert isinstance(self.program, CodedProgram)
        ask, self._coded, self._heard, self._since = self.followed.ask, None, {}, None
        if ask is None:
            return
        self._coded = coded_of(ask, self._books, self.program.seed)
        self._drawn = set(self.program.drawn(ask, self._books.workers).tolist())

    def _digest(self) -> bytes:
        assert self._coded is not None
        return bytes(self._coded.ask.digest(bits=ONCE_BITS)[:DIGEST_BYTES])

    def _take(self, told: bytes) -> None:
        """Send the fit what the adder tells."""
        followed, coded = self.followed, self._coded
        assert followed is not None
        if coded is None or told[:DIGEST_BYTES] != self._digest():
            raise FederationError("the analyst is at another place of the fit than this member.")
        found, news = coded.told(told[DIGEST_BYTES:])
        if self._adds:
            mine = self._mine
            live = mine is not None and mine.message == told
            self._adder = _adder_of(mine) if live and mine is not None else None
        self._books.close(coded.asked, news)
        followed.taken += 1
        followed.next(lambda: followed.fit.send(found))  # type: ignore[arg-type]
        self._open()

    @property
    def _mine(self) -> _Record | None:
        """What this member has sent in the exchange that is due, if it has."""
        record = self._record
        here = (self._place, self._books.exchange, self._anew)
        if record is None or (record.place, record.exchange, record.anew) != here:
            return None
        return record if record.digest == self._digest() else None

    def close(self) -> None:
        """The adder has signed the model: it is final, once this member has it."""
        followed, program, agreed = self.followed, self.program, self.about.confirmed[0]
        name = RESULT + agreed.head
        if followed is not None and followed.returned and program is not None:
            if program.digest(followed.result) != agreed.result:
                self.end("this member came to another model than the analyst has signed.")
                return
            self.me.keep(name, program.state(followed.result))
        if self.me.ended is None and name in self.me.states:
            self.me.ended = Ended(self.result, True, "", self.me.states[name])

    # A site's part.

    @property
    def _number(self) -> int | None:
        """Which worker this site is, if it is asked now."""
        if self._coded is None or not self.me.is_site or self.me.name not in self._members:
            return None
        number = self._members.index(self.me.name)
        return number if number in self._drawn and not self.me.leaving else None

    def job(self) -> Callable[[], _Record] | None:
        """A pass over the rows that is to be made, if one is."""
        number, followed = self._number, self.followed
        if number is None or followed is None or self._mine is not None or self.broken:
            return None
        assert self.me.rows is not None
        about, books = self.about, self._books
        mine = about.hellos[self.me.name].rows
        place = PassPlace(about.settings, mine, self._members, followed.taken, False, books.rows)
        assert isinstance(self.program, CodedProgram)
        coded = coded_of(followed.ask, books.copy(), self.program.seed)
        here = (self._place, books.exchange, self._anew, self._digest())
        return _CodedPass(
            followed.ask, coded, number, self.me, self.about, place, here, self._states()
        )

    def _states(self) -> Mapping[str, States]:
        """What this site keeps as the exchange that is due begins."""
        record, due = self._record, self._books.exchange
        if record is None or record.place != self._place or record.exchange > due:
            return {}
        if record.exchange < due:
            return record.after
        return record.before if record.digest == self._digest() else {}

    def done(self, job: Callable[[], Any], found: Any) -> None:
        """Take what a pass gave, unless the fit has gone on meanwhile."""
        here = (self._place, self._books.exchange, self._anew)
        if isinstance(found, _Record) and (found.place, found.exchange, found.anew) == here:
            self._keep(found)

    def _keep(self, record: _Record) -> None:
        self._record = record
        self.me.keep(RECORD, record.encode())

    # What is said.

    def due(self, now: float) -> Iterator[tuple[Body, bytes]]:
        """A part, or what the adder tells."""
        about, me, self._now = self.about, self.me, now
        if about.stage is not Stage.RUNNING or self.followed is None:
            return
        if self.broken and (self._adds or me.name in self._members):
            words = "its fit cannot go on from these sums."
            yield Fault(about.head, self.broken if self._adds else words), b""
        elif self._adds:
            yield from self._as_adder(now)
        elif self._number is not None and not about.paused and (mine := self._mine) is not None:
            digest = hashlib.sha256(mine.message).digest()
            state = start_of(mine.message)
            yield SignedPart(about.head, *about.due, state, digest), mine.message

    def _as_adder(self, now: float) -> Iterator[tuple[Body, bytes]]:
        about, followed = self.about, self.followed
        assert followed is not None
        if followed.returned:
            yield self._confirmation(followed), b""
            return
        coming = about.away if about.agreement.newcomers else ()
        if coming:
            leaving = tuple(name for name in about.members if name in about.leavers)
            yield SetChange(about.head, about.due[0], leaving, coming), b""
            return
        if self._adder is None and not self._remember():
            if not any(word == "anew" for word, _ in self.me.orders):
                self.me.orders.append(("anew", ""))
            return
        if self._mine is None and not about.paused and self._ready(now):
            try:
                self._tell()
            except EmfedError as error:
                self.broken = str(error)
        if self._mine is not None and not about.paused:
            yield SignedSum(about.head, about.due[0], self._mine.message), b""

    def _confirmation(self, followed: FitInProgress) -> Confirmation:
        about, me = self.about, self.me
        assert self.program is not None
        me.store.confirm(len(about))
        if RESULT + about.head not in me.states:
            me.keep(RESULT + about.head, self.program.state(followed.result))
        return Confirmation(about.head, about.due[0], self.program.digest(followed.result))

    # The adder.

    def _remember(self) -> bool:
        """Take up what the adder keeps after a restart, if its file has it."""
        record, due = self._record, self._books.exchange
        if record is None or (record.place, record.anew) != (self._place, self._anew):
            return False
        if record.exchange == due - 1 or self._mine is not None:
            self._adder = _adder_of(record)
            return True
        return False

    def heard(self, author: str, message: bytes) -> None:
        """Take the part of a site."""
        if self._adds and self._coded is not None:
            self._heard[author] = message

    @property
    def awaited(self) -> int | None:
        """How many parts the adder waits for."""
        if not self._adds or self._coded is None or self._mine is not None:
            return None
        return len(self._heard.keys() | self._waits())

    def _asked(self) -> set[str]:
        return {self._members[number] for number in self._drawn} - self.about.leavers

    def _waits(self) -> set[str]:
        """Who has not answered and is waited for: the absent are not, unless they are back."""
        missed = {
            name
            for name, count in zip(self._members, self._books.missed.tolist(), strict=True)
            if count and name in self.me.silent
        }
        return self._asked() - self._heard.keys() - missed

    def _ready(self, now: float) -> bool:
        self._since = now if self._since is None else self._since
        if self._waits() and now - self._since < self.about.agreement.wait:
            return False
        asked, here = self._asked(), len(self._heard)
        if isinstance(self._coded, CodedGather):
            return here > 0 or not asked or not {*self._members} <= self.me.silent.keys()
        return not asked or 2 * here >= len(asked)

    def _tell(self) -> None:
        """Make what everyone is told: on disk with what the adder keeps, before it leaves."""
        coded, adder = self._coded, copy.deepcopy(self._adder)
        assert coded is not None
        assert adder is not None
        messages, up = self._read(adder)
        arrived = np.array(sorted(messages), dtype=np.int64)
        try:
            if isinstance(coded, CodedGather):
                data, _ = coded.add(adder, arrived, coded.read(messages, adder.totals), up)
            else:
                data = self._added(coded, adder, messages, up)
        except Forgotten:
            self._adder = None
            return
        message = self._digest() + data
        memories = {name: {"memory": value} for name, value in adder.memories.items()}
        kept: Mapping[str, States] = {"adder": {"totals": adder.totals}, **memories}
        here = (self._place, self._books.exchange, self._anew, self._digest(), message)
        self._keep(_Record(*here, after=kept))

    def _added(
        self, coded: CodedSum, adder: Adder, messages: Mapping[int, bytes], up: int
    ) -> bytes:
        values, arrived, lost = list[FloatArray](), list[int](), 0
        for number, message in sorted(messages.items()):
            if not message:
                lost += 1
                continue
            values.append(coded.read(message, number))
            arrived.append(number)
        came: IntArray = np.array(arrived, dtype=np.int64)
        program = self.program
        assert isinstance(program, CodedProgram)
        anew = lost > 0 or goes_without(self._books, coded.names, came, program.patience)
        anew |= any(self._leaves(number, coded) for number in range(self._books.workers))
        stacked = np.reshape(values, (len(came), coded.ask.size))
        return coded.add(adder, came, stacked, up, anew)

    def _leaves(self, number: int, coded: CodedSum) -> bool:
        """Whether sums hold the memory of a site that has left for good."""
        gone = self._members[number] in self.about.leavers
        return gone and any(number in self._books.counted[n].heard for n in coded.names)

    def _read(self, adder: Adder) -> tuple[dict[int, bytes], int]:
        """What sites sent, without digest and weight, and the bytes of it all."""
        found, up = dict[int, bytes](), 0
        for name, message in [*self._heard.items()]:
            number = self._members.index(name)
            if message[:DIGEST_BYTES] != self._digest():
                raise FederationError(f"{name} computed another thing from the same sums.")
            at = DIGEST_BYTES
            if not self._books.weighed[number]:
                adder.totals[number], at = decode_weight(message, at)
            found[number] = message[at:]
            up += len(message)
        return found, up


def _adder_of(record: _Record) -> Adder:
    kept = {name: columns["memory"] for name, columns in record.after.items() if name != "adder"}
    return Adder(record.after["adder"]["totals"].copy(), kept)


def coded_of(ask: Any, books: Books, seed: int) -> CodedSum | CodedGather:
    """An exchange, by what is asked."""
    if isinstance(ask, (Gather, Gathers)):
        return CodedGather(ask, books)
    return CodedSum(ask, books, seed)


@final
@dataclass(frozen=True, eq=False)
class _CodedPass:
    """A pass over the rows for one exchange; the fit may go on meanwhile."""

    ask: Any
    coded: CodedSum | CodedGather
    number: int
    me: Holder
    about: Transcript
    place: PassPlace
    here: tuple[bytes, int, int, bytes]
    states: Mapping[str, States]

    def __call__(self) -> _Record:
        me, coded, number = self.me, self.coded, self.number
        assert isinstance(me.rows, KnownRows)
        me.consent.before_pass(self.ask, self.place.weight, self.about)
        rows, who = HeldWorkers.of(me.rows.held, number), np.array([number])
        before = coded.fresh(self.states, 1)
        after = copy.deepcopy(before)
        head = self.here[3]
        if not coded.books.weighed[number]:
            head += encode_weight(float(rows.totals[0]))
        message = b""
        if isinstance(coded, CodedGather):
            message = coded.message(rows, number, after)
        elif not coded.settle(who, after).any():
            message = coded.parts(rows, who, rows.totals, after).encode(0)
        return _Record(*self.here, head + message, before, after)
