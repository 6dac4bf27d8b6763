"""The relay: knows who is who, adds, keeps the transcript and hands it out. It chooses nothing.

It has no key and no model code. What it appends was signed by members, or is the sum of their
parts. What it says of who is silent is a hint: members act by their own clocks.

A relay that starts appends nothing before it has heard from every site of the set, or the wait is
over: a member may have more of the transcript than the relay's disk. It takes that from the member.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol, final

from emfed.aggregation.masks import Part, PartsDiffer, add_parts
from emfed.core.errors import WireError
from emfed.network.exchange.statements import (
    Added,
    Body,
    Entry,
    HandOut,
    Hello,
    Offer,
    Post,
    Roster,
    SignedPart,
    Statement,
    StatementKind,
    Turn,
    start_of,
)
from emfed.network.exchange.transcript import Stage, Transcript

logger = logging.getLogger(__name__)
SILENT = 12.0
"""Seconds without a word after which a site is called silent: members speak every 5."""
GATHERS = 12.0
"""Seconds that a relay listens before a fit has begun: as above, but nobody has taken a sum yet."""
LARGEST_HAND_OUT = 1 << 20
"""Bytes of entries in one message; a member asks for the rest."""
MOST_ENTRIES = 1 << 12
"""Entries in one message."""
COLLECTED = (StatementKind.NOSUM, StatementKind.CHANGE, StatementKind.CONFIRM)
"""Statements that make an entry once all have signed the same."""
SINGLE = (
    StatementKind.SETTINGS,
    StatementKind.HELLO,
    StatementKind.SECRETS,
    StatementKind.ORDER,
    StatementKind.FAULT,
    StatementKind.TOLD,
)
"""Statements that are an entry of their own; so are those of the adder of coded sums."""


SUMS = {StatementKind.SUM, StatementKind.TOLD}
"""Entries that a fit goes on from: what stands after them would be nothing without."""


class EntryStore(Protocol):
    """Where entries are kept: durable when `write` returns."""

    def entries(self) -> list[bytes]:
        """All entries, in order."""

    def write(self, first: int, entries: Sequence[bytes]) -> None:
        """Keep entries from this place on, in place of those that were there."""


@final
@dataclass
class _Collected:
    """What members have signed about the end of the transcript; none of it outlives an entry."""

    statements: dict[StatementKind, dict[str, Statement]] = field(default_factory=dict)
    parts: dict[str, tuple[SignedPart, Statement, Part]] = field(default_factory=dict)
    coded: dict[str, bytes] = field(default_factory=dict)
    """Posts of parts that the adder reads."""
    wanted: int | None = None
    """How many of them it waits for; None: those of the whole set."""


class Relay:
    """A state machine without I/O: give it what members post, and send what it returns.

    Parameters
    ----------
    roster : Roster
        Public keys of all who may take part.
    store : EntryStore
        Where the transcript is kept.
    now : float
        Seconds of any clock that does not go back.
    """

    def __init__(self, roster: Roster, store: EntryStore, now: float) -> None:
        self._roster, self._store = roster, store
        self.transcript = Transcript(roster)
        for data in store.entries():
            self.transcript.append(data)
        self._heard: dict[str, float] = {}
        self._known: dict[str, int] = {}
        """How long each member's chain was when it spoke last, or is once it has got what left."""
        self._own: dict[str, int] = {}
        """How long it was by its own word."""
        self._started = now
        self._collected = _Collected()
        self._waiting: dict[str, Statement] = {}
        """Hellos that would disturb a sum that is under way."""

    # What comes in.

    def receive(self, data: bytes, now: float) -> list[tuple[str, bytes]]:
        """Take a post; gives messages and the members that they go to."""
        try:
            post = Post.decode(data)
            kind = StatementKind(post.kind)
            if post.author not in self._roster:
                raise WireError(f"a post of {post.author!r}, who is not known here.")
        except ValueError as error:
            logger.warning("a post was ignored: %s", error)
            return []
        self._heard[post.author] = now
        self._known[post.author] = self._own[post.author] = post.length
        before, again = len(self.transcript), post.author in self._collected.parts
        try:
            self._take(post, kind, now)
        except WireError as error:
            logger.info("%s: %s", post.author, error)
        self._settle(now)
        if len(self.transcript) > before:
            return [(name, self._hand_out(name, now)) for name in self._members_behind(post.author)]
        if kind is StatementKind.PART and post.author in self._collected.parts and not again:
            return []  # the sum follows, or the member says it again
        if kind is StatementKind.PART and post.author in self._collected.coded:
            return self._parts_handed(now) if self._has_enough else []
        if kind is StatementKind.FETCH and post.author == self.transcript.agreement.adder:
            return self._parts_handed(now)
        return [(post.author, self._hand_out(post.author, now))]

    def tick(self, now: float) -> list[tuple[str, bytes]]:
        """What follows from time alone."""
        before = len(self.transcript)
        self._settle(now)
        if len(self.transcript) == before:
            return []
        return [(name, self._hand_out(name, now)) for name in self._members_behind()]

    @property
    def _has_enough(self) -> bool:
        wanted, here = self._collected.wanted, len(self._collected.coded)
        return here >= (len(self.transcript.members) if wanted is None else wanted)

    def _parts_handed(self, now: float) -> list[tuple[str, bytes]]:
        """All coded parts, some at a time, for the adder."""
        chunks, size = [list[bytes]()], 0
        for post in self._collected.coded.values():
            if size > LARGEST_HAND_OUT:
                chunks.append([])
                size = 0
            chunks[-1].append(post)
            size += len(post)
        name = self.transcript.agreement.adder
        return [(name, self._hand_out(name, now, chunk)) for chunk in chunks]

    @property
    def untold(self) -> tuple[str, ...]:
        """Members of the last set that have not got all entries, by their own word."""
        about = self.transcript
        return tuple(one for one in about.members if self._own.get(one, 0) < len(about))

    def _members_behind(self, *more: str) -> list[str]:
        about = self.transcript
        names = [*about.agreement.sites, *about.agreement.analysts, *more]
        return [name for name in dict.fromkeys(names) if name in self._heard]

    def _hand_out(self, name: str, now: float, parts: Sequence[bytes] = ()) -> bytes:
        """Entries that a member lacks."""
        about, known = self.transcript, self._known.get(name, 0)
        first = min(known, len(about))
        entries, size = list[bytes](), 0
        for data in about.entries[first : first + MOST_ENTRIES]:
            size += len(data)
            if entries and size > LARGEST_HAND_OUT:
                break
            entries.append(data)
        silent = tuple(one for one in about.members if self._silent(one, now))
        self._known[name] = max(known, first + len(entries))
        message = HandOut(
            first,
            about.heads[first][:8],
            len(about),
            silent,
            int(known > len(about)),
            tuple(entries),
            tuple(parts),
        )
        return message.encode()

    def _silent(self, name: str, now: float) -> bool:
        return now - self._heard.get(name, self._started) > SILENT

    # What members sign.

    def _take(self, post: Post, kind: StatementKind, now: float) -> None:
        if kind is StatementKind.OFFER:
            about = self.transcript
            named = (about.members or about.agreement.sites) + about.agreement.analysts
            if about.stage is not Stage.EMPTY and post.author not in named:
                raise WireError("entries of a member that is not in the set.")
            self._restore(Offer.decode(post.body))
        elif kind is StatementKind.PART:
            self._take_part(post)
        elif kind is StatementKind.FETCH:
            if post.author == self.transcript.agreement.adder and post.body:
                self._collected.wanted = int.from_bytes(post.body[:4], "little")
        elif kind in SINGLE or (self.transcript.agreement.coded and kind in COLLECTED):
            statement = post.statement
            body = statement.read(self._roster)
            if isinstance(body, Hello):
                known = self.transcript.hellos.get(post.author)
                if known is not None and known.nonce == body.nonce:
                    return
                self.transcript.check_hello(post.author, body)
                self._waiting[post.author] = statement
            elif self._ready(now) or kind is StatementKind.SETTINGS:
                self._append(Entry.of(statement))
        elif kind in COLLECTED:
            body = post.statement.read(self._roster)
            if getattr(body, "head", b"") != self.transcript.head:
                raise WireError(f"a {kind.name} of another place than the last one.")
            if post.author not in self.transcript.members:
                raise WireError(f"a {kind.name} of a member that is not in the set.")
            self._collected.statements.setdefault(kind, {})[post.author] = post.statement

    def _take_part(self, post: Post) -> None:
        about = self.transcript
        turn, coded = Turn.decode(post.body), about.agreement.coded
        part = None if coded else Part.decode(post.payload)
        here = post.length == len(about) and post.head == about.head[:8]
        if not here or (turn.exchange, turn.attempt) != about.due:
            raise WireError("a part of another sum than the one that is due.")
        if post.author not in about.members:
            raise WireError("a part of a site that is not in the set.")
        digest = hashlib.sha256(post.payload).digest()
        state = start_of(post.payload) if part is None else part.state
        body = SignedPart(about.head, turn.exchange, turn.attempt, state, digest)
        statement = Statement(post.author, post.kind, body.encode(), post.signature)
        statement.read(self._roster)
        if part is None:
            self._collected.coded[post.author] = post.encode()
        else:
            self._collected.parts[post.author] = body, statement, part

    def _restore(self, offer: Offer) -> None:
        """Take what a member has more; entries without a sum give way to a longer list."""
        mine, first = self.transcript.entries, offer.first
        if first > len(mine):
            return
        same = 0
        while same < len(offer.entries) and mine[first + same : first + same + 1] == (
            [offer.entries[same]]
        ):
            same += 1
        place, rest = first + same, offer.entries[same:]
        if place < len(mine):
            kinds = {Entry.decode(data).kind for data in mine[place:]}
            if kinds & SUMS or place + len(rest) <= len(mine):
                return
            tried = Transcript(self._roster)
            for data in (*mine[:place], *rest):
                tried.append(data)
            logger.warning("%d entries give way to a member's list", len(mine) - place)
            self.transcript = tried
            self._store.write(place, rest)
            self._collected = _Collected()
            return
        for data in rest:
            self._append(Entry.decode(data))

    def _append(self, entry: Entry) -> None:
        data = entry.encode()
        place = len(self.transcript)
        self.transcript.append(data)
        self._store.write(place, [data])
        self._collected = _Collected()

    # What follows.

    def _ready(self, now: float) -> bool:
        """Whether no member can have more than this relay."""
        about = self.transcript
        waited = now - self._started
        if waited >= about.agreement.wait:
            return True
        if any(known > len(about) for known in self._known.values()):
            return False
        if about.members:
            return all(name in self._heard for name in about.members)
        named = about.agreement.sites + about.agreement.analysts
        return waited >= GATHERS or all(name in self._heard for name in named)

    def _settle(self, now: float) -> None:
        """Append what is whole, until nothing more is."""
        while self.transcript.stage is not Stage.ENDED and self._ready(now):
            entry = self._whole()
            if entry is None:
                return
            try:
                self._append(entry)
            except WireError as error:
                logger.info("what was signed cannot stand: %s", error)
                self._collected.statements.pop(StatementKind(entry.kind), None)
                if entry.kind in (StatementKind.SUM, StatementKind.DIFFER):
                    self._collected.parts.clear()

    def _whole(self) -> Entry | None:
        """The next entry, if one can be made now."""
        about, collected = self.transcript, self._collected
        if (greeting := self._greeting()) is not None:
            return Entry.of(greeting)
        changes = collected.statements.get(StatementKind.CHANGE, {})
        for body in {one.body for one in changes.values()}:
            signed = [changes[n] for n in about.members if n in changes and changes[n].body == body]
            stay = self._staying(signed[0].read(self._roster))
            if tuple(one.author for one in signed) == stay:
                return Entry.of(*signed)
        for kind in (StatementKind.NOSUM, StatementKind.CONFIRM):
            given = collected.statements.get(kind, {})
            if about.members and all(name in given for name in about.members):
                return Entry.of(*(given[name] for name in about.members))
        if about.members and all(name in collected.parts for name in about.members):
            return self._added()
        return None

    def _staying(self, body: Body) -> tuple[str, ...]:
        leaving = getattr(body, "leaving", ())
        return tuple(name for name in self.transcript.members if name not in leaving)

    def _greeting(self) -> Statement | None:
        """A hello that may enter: of a member at once, of others between two sums."""
        about = self.transcript
        for name, statement in [*self._waiting.items()]:
            under_way = self._collected.parts or self._collected.coded
            if under_way and name not in (*about.members, about.agreement.adder):
                continue
            del self._waiting[name]
            body = statement.read(self._roster)
            assert isinstance(body, Hello)
            try:
                about.check_hello(name, body)
            except WireError as error:
                logger.info("%s", error)
                continue
            return statement
        return None

    def _added(self) -> Entry:
        about, collected = self.transcript, self._collected
        parts = {name: collected.parts[name][2] for name in about.members}
        try:
            exchange, attempt = about.due
            return Entry.sum(Added(exchange, attempt, add_parts(parts).encode()))
        except PartsDiffer:
            statements = tuple(collected.parts[name][1] for name in about.members)
            return Entry(StatementKind.DIFFER, statements, b"")
