"""Sums of everyone in the set, masked or not: their keys, tags, attempts and epochs.

An analyst has no part and cannot check tags. It takes a sum when what follows shows that the sites
took it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any, final

import numpy as np

from emfed.aggregation.masks import Part
from emfed.core.errors import EmfedError, FederationError, WireError
from emfed.core.sums import Ask, Finish, FloatArray, Rows, Sum, finished
from emfed.network.exchange.adding import EpochKeys, PlacedAsk
from emfed.network.exchange.followed import (
    UNREACHED,
    Comings,
    Ended,
    FitInProgress,
    FollowedFit,
    Holder,
    Look,
    PassPlace,
)
from emfed.network.exchange.statements import (
    BODIES,
    Added,
    Body,
    Confirmation,
    Entry,
    Fault,
    NoSum,
    SealedSecrets,
    SetChange,
    SignedOrder,
    SignedPart,
    StatementKind,
    Turn,
)
from emfed.network.exchange.transcript import LARGEST_TRANSCRIPT, Stage, Transcript

logger = logging.getLogger(__name__)
RESULT = b"result "
"""With the head that was confirmed: the name of the result among the states that a member keeps."""
SECRETS = b"secrets "
"""With the head where an epoch begins: what an analyst was sealed there, for itself."""
PATH = b"path"
"""The name, among them, of a digest for each epoch in which this member gave a part."""


@final
@dataclass
class _Summed(FitInProgress):
    """A fit in progress, and what the next part needs."""

    values: FloatArray | None = None
    rows: float = 0.0
    refused: tuple[int, int] | None = None
    spent: int = 0
    """Bytes of the attempts at the sum that is due, up and down, over all sites."""
    held: list[tuple[int, StatementKind, Entry]] = field(default_factory=list)
    """What an analyst has not acted on yet: it does not know whether the sites took a sum."""

    def next(self, step: Callable[[], Ask]) -> None:
        """Run to the next ask, whose numbers are not known yet."""
        self.values = None
        super().next(step)

    def send(self, value: FloatArray, noise: float) -> None:
        """Send the fit its sum."""
        if self.taken == 0 and self.ask.counted:
            value, self.rows = value[:-1], float(value[-1])
        self.taken += 1
        told = Sum(value, self.rows, noise, 0, self.spent)
        self.spent = 0
        self.next(lambda: self.fit.send(told))


@final
class EveryoneSums(FollowedFit):
    """A fit on sums of everyone in the set."""

    followed: _Summed | None

    def __init__(self, me: Holder, about: Transcript) -> None:
        super().__init__(me, about)
        self.keys: EpochKeys | None = None
        self._made: dict[tuple[bytes, int, int], tuple[Body, bytes]] = {}
        """What was made at the present head: a part, or sealed secrets."""
        self._marked = (b"", b"")
        """The head where an epoch begins, and its mark in the path."""
        self._epoch, self._began = about.epoch, about.heads[about.began]

    def entered(self, kind: StatementKind, entry: Entry, place: int) -> None:
        """Act on an entry that the transcript has at this place."""
        if kind is StatementKind.SECRETS:
            self._take_secrets(entry)
        if self.followed is not None:
            super().entered(kind, entry, place)
        if self.about.epoch != self._epoch:
            before = self._began if self._epoch >= 0 else None
            self._epoch, self._began = self.about.epoch, self.about.heads[self.about.began]
            self._begin_epoch(before)

    def _take_secrets(self, entry: Entry) -> None:
        only = entry.statements[0]
        body = SealedSecrets.decode(only.body)
        keys = EpochKeys.opened(self.me.signer, self.me.run, self.about, only.author, body)
        if keys is not None and (self.keys is None or self.followed is None):
            self.keys = keys
            if not self.me.is_site:
                place = self.about.heads[self.about.began]
                self.me.keep(SECRETS + place, keys.kept(self.me.signer, place))

    def _begin_epoch(self, before: bytes | None) -> None:
        """The first set, or another one: what the fit has reached is where it goes on.

        ``before`` is the head where the last epoch began.
        """
        about, followed = self.about, self.followed
        head = about.heads[about.began]
        self.keys, self.followed = None, None
        if before is None:
            self.me.states[head] = b""
        elif followed is None and before in self.me.states:  # no secrets: nothing was asked
            self.me.states.setdefault(head, self.me.states[before])
            self.me.keep(head, self.me.states[head])
        elif followed is not None and self.program is not None:
            reached = followed.result
            if not followed.returned:
                try:
                    reached = finished(followed.fit, Finish("the set has changed"))
                except Finish:
                    reached = None
            self.me.states[head] = self.program.state(reached)
            self.me.keep(head, self.me.states[head])
        if self.me.is_site and self.me.name in about.members:
            too_few = len(about.members) < self.me.consent.smallest_set
            if about.agreement.masked and too_few:
                self.me.leave(
                    f"its owner wants {self.me.consent.smallest_set} sites in a set, and there are "
                    f"{len(about.members)} (smallest_set in its rules)."
                )
            elif about.epoch > self.me.consent.largest_changes:
                self.me.leave(
                    f"its owner allows {self.me.consent.largest_changes} changes of the set "
                    "(largest_changes in its rules)."
                )
        elif self.me.leaving:
            self.end(f"this site has left: {self.me.leaving}")

    def close(self) -> None:
        """All sites have confirmed: the model is final, once this member has it."""
        about, followed, program = self.about, self.followed, self.program
        agreed = about.confirmed[0]
        name = RESULT + agreed.head
        if self.me.is_site and self.me.name not in about.members:
            self.end("this site was not in the last set, and the others have finished.")
        elif followed is not None and followed.returned and program is not None:
            assert self.keys is not None
            own = self.keys.group.hidden(program.digest(followed.result), agreed.head)
            if own != agreed.result:
                self.end("this member came to another model than all sites have signed.")
                return
            self.me.keep(name, program.state(followed.result))
        if self.me.ended is None and name in self.me.states:
            self.me.ended = Ended(self.result, True, "", self.me.states[name])

    def begin(self) -> None:
        """Follow the present epoch's fit from its beginning through all that is known of it."""
        about = self.about
        head = about.heads[about.began]
        if self.keys is None and about.drawer == self.me.name and head in self.me.states:
            self.keys = EpochKeys.drawn(self.me.signer, self.me.run, about, self.me.states[head])
        if self.keys is None and SECRETS + head in self.me.states:
            sealed = self.me.states[SECRETS + head]
            self.keys = EpochKeys.of_disk(self.me.signer, self.me.run, about, sealed)
        if self.keys is None or self.program is None:
            return
        if not self.me.is_site and self.me.name not in about.agreement.analysts:
            return
        if self.me.is_site and self.me.name not in about.members:
            return
        self.me.states[head] = self.keys.state
        self.program.extend(about.extended(about.began))
        first = tuple(name for name in about.agreement.sites if name in about.first)
        comings = Comings(first, about.gone)
        fit = self.program.begin(about.members, self.keys.state, head, comings)
        self.followed = _Summed(fit)
        try:
            self.followed.begin()
        except EmfedError as error:  # others may lack secrets to find out by themselves
            self.broken = str(error)
            return
        for place in range(about.began, len(about)):
            entry = Entry.decode(about.entries[place])
            self.follow(StatementKind(entry.kind), entry, place)

    def follow(self, kind: StatementKind, entry: Entry, place: int) -> None:
        """Act on an entry of this epoch."""
        followed = self.followed
        assert followed is not None
        if self.me.is_site:
            self._act(kind, entry, place)
            return
        # An analyst: what stands after a sum shows whether the sites took it.
        after = self._shown(kind, entry)
        if after is not None:
            held, followed.held = followed.held, []
            for at, what, about in held:
                if what is not StatementKind.SUM or after > followed.taken:
                    self._act(what, about, at)
                else:
                    self._count(about)
        if kind is StatementKind.ORDER and not followed.held:
            self._act(kind, entry, place)
        elif kind in (StatementKind.SUM, StatementKind.ORDER):
            followed.held.append((place, kind, entry))

    def _count(self, entry: Entry) -> None:
        """Count the bytes of a sum, taken or not."""
        assert self.followed is not None
        assert self.keys is not None
        part = Added.decode(entry.added).part
        self.followed.spent += 2 * len(self.keys.members) * len(part)

    @staticmethod
    def _shown(kind: StatementKind, entry: Entry) -> int | None:
        """How many sums of the epoch the sites had taken before this entry, if it shows that."""
        if kind is StatementKind.SUM:
            return Added.decode(entry.added).exchange
        if kind in (StatementKind.NOSUM, StatementKind.CHANGE, StatementKind.CONFIRM):
            body = BODIES[kind].decode(entry.statements[0].body)
            assert isinstance(body, NoSum | SetChange | Confirmation)
            return body.exchange
        if kind is StatementKind.DIFFER:
            return SignedPart.decode(entry.statements[0].body).exchange
        if kind is StatementKind.FAULT:  # all is over: what it found out tells people why
            return LARGEST_TRANSCRIPT
        return None

    def _act(self, kind: StatementKind, entry: Entry, place: int) -> None:
        followed, keys = self.followed, self.keys
        assert followed is not None
        assert keys is not None
        if kind is StatementKind.ORDER:
            word = SignedOrder.decode(entry.statements[0].body).word
            if word == "finish":
                followed.finish()
            elif word == "extend" and self.program is not None:
                self.program.extend(self.about.extended(place + 1))
        elif kind is StatementKind.NOSUM:
            followed.refused = None
        elif kind is StatementKind.SUM and followed.ask is not None:
            added = Added.decode(entry.added)
            question = PlacedAsk(followed.ask, added.exchange, added.attempt)
            self._count(entry)
            value = None
            if added.exchange == followed.taken:
                value = self._opened(question, place, added.part)
            if value is None:
                followed.refused = (added.exchange, added.attempt)
                return
            followed.refused = None
            sites = len(keys.members)
            ask = question.ask
            exact = (added.exchange == 0 and ask.counted) or ask.precision is None
            followed.send(value, (0.0 if exact else sites / 12) + sites * ask.noise)

    def _opened(self, question: PlacedAsk, place: int, data: bytes) -> FloatArray | None:
        assert self.keys is not None
        try:
            return self.keys.opened_sum(self.about, question, place, Part.decode(data))
        except WireError:
            return None

    def job(self) -> Callable[[], FloatArray] | None:
        """A pass over the rows that is to be made, if one is."""
        followed = self.followed
        if followed is None or self.me.rows is None or self.me.name not in self.about.members:
            return None
        if followed.ask is None or followed.values is not None:
            return None
        check = partial(self.me.consent.before_pass, followed.ask, followed.rows, self.about)
        about, mine = self.about, self.about.hellos[self.me.name].rows
        masked = about.agreement.masked
        place = PassPlace(
            about.settings, mine, about.members, followed.taken, masked, followed.rows
        )
        return _Pass(followed.ask, self.me.rows, self.me.consent.look, place, check)

    def done(self, job: Callable[[], Any], found: Any) -> None:
        """Take the numbers of a part."""
        followed = self.followed
        if isinstance(job, _Pass) and followed is not None and followed.ask is job.ask:
            followed.values = found

    # What is said.

    def due(self, now: float) -> Iterator[tuple[Body, bytes]]:
        """Secrets for those that lack them, changes of the set, and this member's turn."""
        about, me = self.about, self.me
        if about.lacking and self.keys is not None and me.name == self._sealer():
            yield self._once(-1, 0, self._sealed)
        if about.stage is not Stage.RUNNING or not me.is_site or me.name not in about.members:
            return
        if self.broken:
            known = self.broken == UNREACHED
            words = UNREACHED if known else "its fit cannot go on from these sums."
            yield Fault(about.head, words), b""
            return
        if (change := self._change(now)) is not None:
            yield change, b""
        if self.followed is not None and not me.leaving:
            yield from self._turn(self.followed)

    def _once(
        self, exchange: int, attempt: int, make: Callable[[], tuple[Body, bytes]]
    ) -> tuple[Body, bytes]:
        """What is made once at a head, and said again as it is."""
        key = (self.about.head, exchange, attempt)
        if any(head != key[0] for head, _, _ in self._made):
            self._made = {}
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _sealer(self) -> str:
        """Who seals secrets now: the first site, or another that has them where it is silent."""
        about = self.about
        able = [name for name in about.members if name in about.sealed]
        first = about.drawer
        return next((n for n in (first, *able) if n not in self.me.silent), first)

    def _sealed(self) -> tuple[Body, bytes]:
        about = self.about
        assert self.keys is not None
        to = {name: about.hellos[name] for name in about.lacking}
        place = about.heads[about.began]
        readers = set(about.agreement.analysts)
        sealed = self.keys.sealed(self.me.signer, place, to, readers)
        return SealedSecrets(about.head, about.epoch, sealed), b""

    def _turn(self, followed: _Summed) -> Iterator[tuple[Body, bytes]]:
        """A part, a refusal, or the end."""
        about = self.about
        if about.lacking:
            return  # their secrets change the head at once
        if followed.refused is not None:
            yield NoSum(about.head, *followed.refused), b""
        elif followed.returned:
            assert self.program is not None
            assert self.keys is not None
            self.me.store.confirm(len(about))
            if RESULT + about.head not in self.me.states:
                self.me.keep(RESULT + about.head, self.program.state(followed.result))
            digest = self.program.digest(followed.result)
            hidden = self.keys.group.hidden(digest, about.head)
            yield Confirmation(about.head, followed.taken, hidden), b""
        elif followed.values is not None and not about.paused and self.keys is not None:
            assert followed.ask is not None
            exchange, attempt = about.due
            if exchange != followed.taken:
                yield Fault(about.head, f"sum {followed.taken} is due here, not {exchange}."), b""
                return
            question = PlacedAsk(followed.ask, exchange, attempt)
            yield self._once(exchange, attempt, lambda: self.part(question))

    def part(self, question: PlacedAsk) -> tuple[Body, bytes]:
        """This site's part in the present context; kept before it leaves."""
        about, followed, keys = self.about, self.followed, self.keys
        assert followed is not None
        assert followed.values is not None
        assert keys is not None
        self._keep_to_path()
        part = keys.part(about, question, followed.values)
        payload = part.encode()
        digest = hashlib.sha256(payload).digest()
        body = SignedPart(about.head, question.exchange, question.attempt, part.state, digest)
        self.me.store.sent(about.head + Turn(body.exchange, body.attempt).encode(), digest)
        return body, payload

    # Who is in.

    def _keep_to_path(self) -> None:
        """Give parts in one set after another, however often a relay goes back.

        Entries without a sum may be dropped. So a relay could show each epoch with many sets, or
        go back behind a change and make it again later, and with an analyst read the differences.
        """
        about = self.about
        mark = self._mark()
        path, at = self.me.states.get(PATH, b""), len(mark) * about.epoch
        if path[at:] not in (b"", mark):
            raise FederationError(
                "the relay goes back to a set of sites that this site left behind, or shows it "
                "another one, or other rows of some site, in its place: no part is sent."
            )
        if len(path) <= at:
            self.me.keep(PATH, path.ljust(at, b"\0") + mark)

    def _mark(self) -> bytes:
        """Of the settings, the set with its rows, and the sums before it."""
        about = self.about
        head = about.heads[about.began]
        if self._marked[0] != head:
            found = hashlib.sha256(about.settings)
            for name in about.members:
                found.update(hashlib.sha256(name.encode()).digest() + about.hellos[name].rows)
            for data in about.entries[: about.began] if about.epoch else ():
                entry = Entry.decode(data)
                found.update(hashlib.sha256(entry.added).digest() if entry.added else b"")
            self._marked = head, found.digest()
        return self._marked[1]

    def _change(self, now: float) -> SetChange | None:
        """A change of the set, if one is due by this member's clock."""
        about, followed = self.about, self.followed
        wait = about.agreement.wait
        gone = {name for name, since in self.me.silent.items() if now - since >= wait}
        gone |= about.leavers
        leaving = tuple(name for name in self.about.members if name in gone)
        if followed is not None and followed.returned:
            # All may have signed this model, and a relay keep it back: another set would come to
            # another one.
            if leaving:
                raise FederationError(
                    f"{', '.join(leaving)} did not sign the model that the others have reached: "
                    "it is not final."
                )
            return None
        coming = about.away if about.agreement.newcomers else ()
        if self.me.name in leaving:
            return None
        for names in ((leaving, coming), (leaving, ()), ((), coming)):
            try:
                about.next_set(*names)
            except WireError as error:
                if any(names):
                    logger.info("%s: %s", self.me.name, error)
                continue
            taken = 0 if followed is None else followed.taken
            return SetChange(about.head, taken, *names)
        return None


@final
@dataclass(frozen=True, eq=False)
class _Pass:
    """A pass over the rows for one ask."""

    ask: Ask
    rows: Rows
    look: Look
    place: PassPlace
    check: Callable[[], None]
    """What the owner's rules say of it."""

    def __call__(self) -> FloatArray:
        self.check()
        seen = self.look(self.rows, self.ask, self.place)
        values = self.ask.part(seen)
        counted = self.place.exchange == 0 and self.ask.counted
        return np.append(values, seen.total) if counted else values
