"""A member: it follows the fit, signs its parts, and believes nothing but the transcript.

========== ================================================ =======================================
state      event                                            next
========== ================================================ =======================================
arriving   settings that the owner's rules accept           says hello; greeted once it is an entry
greeted    in the set, with the epoch's secrets             the fit begins, or is replayed from the
                                                            sums so far, without a pass over rows
computing  the fit yields an ask                            a job, once: its numbers are kept
waiting    numbers are there, the head is the newest        writes its part, then posts it
waiting    any other entry than a sum                       the same numbers in the new context
waiting    a sum whose tag is right                         the fit is sent it: computing
waiting    a sum whose tag is wrong                         signs NOSUM
waiting    all signed NOSUM                                 the same numbers with twice the bits
waiting    a site is silent for the wait, or leaves         signs CHANGE
waiting    CHANGE                                           a new epoch, from the fit's state
finished   the fit returned                                 signs CONFIRM of the head, and never
                                                            a CHANGE again
ended      all confirmed; a fault; superseded; a fork       nothing more is posted
========== ================================================ =======================================

An analyst has no part and cannot check tags. It takes a sum when what follows shows that the sites
took it.

Where the relay's list goes on otherwise than a member's, the member drops the end of its own as far
as that holds no sum, or once in its life one, and nothing that it confirmed: the relay lost some
entries, or showed a sum to this member alone. Any other difference ends it: the relay showed it
another list before.
"""

from __future__ import annotations

import hashlib
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, final

import numpy as np

from emfed.aggregation.keys import RunKey
from emfed.aggregation.masks import Part
from emfed.core.errors import EmfedError, FederationError, WireError
from emfed.core.sums import Ask, Finish, Fit, FloatArray, Rows, Sum, finished
from emfed.network.exchange.adding import EpochKeys, PlacedAsk
from emfed.network.exchange.relay import SILENT, EntryStore
from emfed.network.exchange.statements import (
    Added,
    Agreement,
    Body,
    Confirmation,
    Entry,
    Fault,
    HandOut,
    Hello,
    NoSum,
    Offer,
    Post,
    Roster,
    SealedSecrets,
    SetChange,
    SignedOrder,
    SignedPart,
    Signer,
    Statement,
    StatementKind,
    Turn,
)
from emfed.network.exchange.transcript import Stage, Transcript

logger = logging.getLogger(__name__)
AGAIN = 5.0
"""Seconds after which a member says again what was not followed by an entry."""
PATIENCE = 15.0
"""Seconds that a relay may go on handing out a list that clashes with the member's own."""
RESULT = b"result "
"""With the head that was confirmed: the name of the result among the states that a member keeps."""
PATH = b"path"
"""The name, among them, of a digest for each epoch in which this member gave a part."""
LARGEST_OFFER = 1 << 20
"""Bytes of entries that a member sends to a relay that lacks them, in one message."""


class Program(Protocol):
    """What members follow: made of settings that the owner's rules accepted."""

    def begin(self, sites: tuple[str, ...], state: bytes, place: bytes) -> Fit[Any]:
        """The fit of an epoch over these sites; ``state`` is empty in the first one.

        ``place`` are 32 bytes that nobody chose alone: the head of the chain after all hellos.
        """

    def extend(self, rounds: int | None) -> None:
        """Another limit on rounds from now on; None: that of the settings."""

    def state(self, reached: Any) -> bytes:
        """What the next epoch begins with; ``reached`` is None if nothing was."""

    def digest(self, reached: Any) -> bytes:
        """32 bytes that members agree on of what a fit came to."""


class MemberStore(EntryStore, Protocol):
    """What a member keeps: all of it durable when the transaction ends."""

    def transaction(self) -> AbstractContextManager[None]:
        """What is written inside is there as a whole, or not at all."""

    def sent(self, context: bytes, message: bytes) -> None:
        """Keep the digest of what leaves in a context; raises if another one left in it."""

    def confirmed(self) -> int:
        """The length of the chain that was confirmed, 0 if none was."""

    def confirm(self, length: int) -> None:
        """Keep that a chain of this length was confirmed."""

    def states(self) -> dict[bytes, bytes]:
        """States at the beginning of epochs, by head."""

    def keep_state(self, head: bytes, state: bytes) -> None:
        """Keep the state at the beginning of an epoch."""


@final
@dataclass(frozen=True)
class Consent:
    """What an owner agreed to.

    Parameters
    ----------
    make : callable
        From settings to the program that is followed. It refuses by raising `FederationError`, and
        gives None while a person has not decided yet.
    smallest_set : int
        Sites in a set of masked sums, at least.
    largest_changes : int
        Changes of the set, at most.
    spares : bool
        Whether others may go on without this site.
    """

    make: Callable[[Agreement], Program | None]
    smallest_set: int = 1
    largest_changes: int = 3
    spares: bool = True


@final
@dataclass
class Ended:
    """How a member ended."""

    result: Any = None
    final: bool = False
    """Whether all sites signed the same chain."""
    words: str = ""
    state: bytes = b""
    """What `Program.state` makes of the result: it is kept on disk, too."""


@final
@dataclass
class _Followed:
    """A fit in progress, and what the next part needs."""

    fit: Fit[Any]
    taken: int = 0
    ask: Ask | None = None
    values: FloatArray | None = None
    rows: float = 0.0
    refused: tuple[int, int] | None = None
    held: list[tuple[int, StatementKind, Any]] = field(default_factory=list)
    """What an analyst has not acted on yet: it does not know whether the sites took a sum."""
    returned: bool = False
    result: Any = None

    def begin(self) -> None:
        """Run to the first ask."""
        self._next(lambda: next(self.fit))

    def send(self, value: FloatArray, noise: float, size: int) -> None:
        """Send the fit its sum."""
        if self.taken == 0:
            value, self.rows = value[:-1], float(value[-1])
        self.taken += 1
        self._next(lambda: self.fit.send(Sum(value, self.rows, noise, 0, size)))

    def finish(self) -> None:
        """Let the fit return what it has reached."""
        if not self.returned:
            self.result = finished(self.fit, Finish("an analyst ended the fit"))
            self.returned, self.ask, self.values = True, None, None

    def _next(self, step: Callable[[], Ask]) -> None:
        self.ask = self.values = None
        try:
            self.ask = step()
        except StopIteration as end:
            self.returned, self.result = True, end.value


@final
class Follower:
    """A site or an analyst as a state machine without I/O.

    Give it what the relay hands out (`receive`) and the time (`tick`); send what they return. Where
    `job` gives work, run it wherever you like and give the result to `done`.

    Parameters
    ----------
    signer : Signer
        The member's identity.
    roster : Roster
        Public keys of all members.
    store : MemberStore
        The member's disk.
    consent : Consent
        What its owner agrees to.
    rows : Rows, optional
        The rows of a site; None: an analyst.
    commitment : bytes
        The salted digest of the rows, 32 bytes; zeros of an analyst.
    settings : Agreement, optional
        What an analyst wants to be fitted, if the transcript has no settings yet.
    random : callable
        Random bytes of the operating system.
    """

    def __init__(
        self,
        signer: Signer,
        roster: Roster,
        store: MemberStore,
        consent: Consent,
        *,
        rows: Rows | None = None,
        commitment: bytes = bytes(32),
        settings: Agreement | None = None,
        random: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._signer, self._roster, self._store, self._consent = signer, roster, store, consent
        self._rows, self._commitment, self._settings = rows, commitment, settings
        self._nonce, self._run = random(16), RunKey()
        self.name = signer.name
        self.run = ""
        """The run that this is to be, by the relay's word; empty: any."""
        self.transcript = Transcript(roster)
        self._program: Program | None = None
        self._greeted = False
        self._keys: EpochKeys | None = None
        self._followed: _Followed | None = None
        self._orders: list[tuple[str, str]] = []
        self._numbered: int | None = None
        """The number under which the first of them was said."""
        self._made: dict[tuple[bytes, int, int], tuple[Body, bytes]] = {}
        """What was made at the present head: a part, or sealed secrets."""
        self._silent: dict[str, float] = {}
        self._total = 0
        self._clashing: float | None = None
        self._searching = False
        """Whether the relay's list is not known to go on from this one: nothing is said to it."""
        self._back = 0
        """How many of its last entries this member leaves out when it asks, to find a clash."""
        self._dropped = 0
        """How many sums this process has dropped: one at most, or a relay could have any number of
        sums about one place."""
        self._leaving = ""
        """Why this site leaves, if it does: it gives no part any more."""
        self.refusal = ""
        """Why the owner takes no part in this fit, if so: it is said, and then this ends."""
        self._broken = ""
        """What the fit raised, in words that are for this member alone."""
        self._marked = (b"", b"")
        """The head where an epoch begins, and its mark in the path."""
        self._said: dict[bytes, float] = {}
        self._spoke = -AGAIN
        self._states = store.states()
        self.ended: Ended | None = None
        for data in store.entries():
            self._append(data)

    # What an engine calls.

    def receive(self, data: bytes, now: float) -> list[bytes]:
        """Take a hand-out of the relay; gives posts."""
        if self._stopped:
            return []
        try:
            out = HandOut.decode(data)
        except WireError as error:
            logger.warning("%s: a hand-out was ignored: %s", self.name, error)
            return []
        self._total = out.total
        before = len(self.transcript)
        with self._store.transaction():
            try:
                posts = self._take(out, now)
                self._watch(out.silent, now)
                self._settle()
                posts += self._posts(now)
            except EmfedError as error:
                self._end(str(error))
                return []
        behind = len(self.transcript) < out.total and len(self.transcript) > before
        return [*posts, *([self._fetch(now)] if behind and not posts else [])]

    def tick(self, now: float) -> list[bytes]:
        """What is to be said by now, again where nothing followed."""
        if self._stopped:
            return []
        with self._store.transaction():
            try:
                self._settle()
                posts = self._posts(now)
            except EmfedError as error:
                self._end(str(error))
                return []
        if not posts and now - self._spoke >= AGAIN:
            return [self._fetch(now)]
        return posts

    def again(self, now: float) -> list[bytes]:
        """Say all that is due once more, as to a relay that may have heard none of it."""
        self._said.clear()
        self._spoke = now - AGAIN
        return self.tick(now)

    def fail(self, words: str, now: float) -> list[bytes]:
        """End, because the rows cannot be used; others hear that this site leaves, not why."""
        if self.ended is not None:
            return []
        self._orders.insert(0, ("leave", self.name))
        posts = self.tick(now)
        self._end(words)
        return posts

    @property
    def _stopped(self) -> bool:
        """Ended for good; after a final model a member still helps those that were away."""
        return self.ended is not None and not self.ended.final

    @property
    def awaited(self) -> tuple[str, ...]:
        """Who still needs this member after its end: those without secrets or without a hello."""
        about = self.transcript
        if about.stage is not Stage.FINAL:
            return ()
        return (*about.lacking, *(n for n in about.agreement.analysts if n not in about.hellos))

    def job(self) -> Callable[[], FloatArray] | None:
        """A pass over the rows that is to be made, if one is."""
        followed = self._followed
        if self.ended or followed is None or self._rows is None or self.name not in self._set:
            return None
        if followed.ask is None or followed.values is not None:
            return None
        return _Pass(followed.ask, self._rows, followed.taken == 0)

    def done(self, job: Callable[[], FloatArray], values: FloatArray, now: float) -> list[bytes]:
        """Take what a job gave; it is ignored where the fit has gone on meanwhile."""
        followed = self._followed
        assert isinstance(job, _Pass)
        if self.ended is None and followed is not None and followed.ask is job.ask:
            followed.values = values
        return self.tick(now)

    def order(self, word: str, argument: str = "") -> None:
        """Ask for an order to enter the transcript; of a site "leave" alone is heard."""
        if self._is_site and word == "leave":
            self._leave("its owner wants so.")
        else:
            self._orders.append((word, argument))

    @property
    def result(self) -> Any:
        """What the fit came to, if it returned; `Ended.final` says when it is final."""
        return None if self._followed is None else self._followed.result

    @property
    def following(self) -> Ask | None:
        """The ask that the fit waits for."""
        return None if self._followed is None else self._followed.ask

    # The transcript.

    @property
    def _set(self) -> tuple[str, ...]:
        return self.transcript.members

    @property
    def _is_site(self) -> bool:
        return self._rows is not None

    def _take(self, out: HandOut, now: float) -> list[bytes]:
        """Append what is new; look for where a list parts from this one."""
        about = self.transcript
        if out.first > len(about):
            return []
        if about.heads[out.first][:8] != out.head:
            return self._step_back(now)
        for place, data in enumerate(out.entries, out.first):
            about = self.transcript
            try:
                if place < len(about):
                    if Entry.decode(data).after(about.heads[place]) == about.heads[place + 1]:
                        continue
                    self._drop(place, data)
                self._append(data)
            except WireError as error:
                logger.warning("%s: the relay handed out: %s", self.name, error)
                offer = self._offer(place, now) if place < len(about) else []
                self._clash(now)
                return offer
            self._store.write(place, [data])
        self._clashing, self._searching, self._back = None, False, 0
        return []

    def _drop(self, place: int, data: bytes) -> None:
        """Forget the entries from a place on, where this one may stand there instead."""
        entries = self.transcript.entries
        sums = [Entry.decode(each).kind for each in entries[place:]].count(StatementKind.SUM)
        if sums > 1 - self._dropped or place < self._store.confirmed():
            raise WireError("more is to be dropped than a relay can have lost.")
        tried = Transcript(self._roster)
        for each in (*entries[:place], data):
            tried.append(each)
        logger.warning("%s drops %d entries", self.name, len(entries) - place)
        self._dropped += sums
        self._rewind(entries[:place])

    def _step_back(self, now: float) -> list[bytes]:
        """Ask for more and more of the relay's list, to find where it parts from this one."""
        self._searching = True
        if self._back >= len(self.transcript):
            return []
        self._back = min(2 * self._back + 1, len(self.transcript))
        return [self._fetch(now)]

    def _clash(self, now: float) -> None:
        """Wait for the relay to hand out what goes on from this list, for a while."""
        self._searching = True
        self._clashing = now if self._clashing is None else self._clashing
        if now - self._clashing > PATIENCE:
            raise FederationError(
                "the relay hands out another list of sums than before: it lost its own, or shows "
                "different ones to different sites. Nothing of this fit is final."
            )

    def _rewind(self, entries: Sequence[bytes]) -> None:
        """Begin again with these entries; the fit is replayed."""
        if not entries:
            self._program = None  # other settings are the owner's to accept
        self.transcript, self._followed = Transcript(self._roster), None
        self._greeted, self._keys, self._back, self._broken = False, None, 0, ""
        for data in entries:
            self._append(data)

    def _append(self, data: bytes) -> None:
        """Take an entry, and act on it where the fit is being followed."""
        about, place = self.transcript, len(self.transcript)
        epoch, began = about.epoch, about.heads[about.began]
        entry = about.append(data)
        kind = StatementKind(entry.kind)
        if kind is StatementKind.HELLO and entry.statements[0].author == self.name:
            mine = Hello.decode(entry.statements[0].body).nonce == self._nonce
            if self._greeted and not mine:
                raise FederationError(
                    "another process has taken this one's place: it has the same key."
                )
            self._greeted = mine
        if kind is StatementKind.SECRETS:
            self._take_secrets(entry)
        if self._followed is not None:
            try:
                self._follow(kind, entry, place)
            except Finish:
                self._end("the fit was ended before it had reached anything.")
            except EmfedError as error:
                self._broken = str(error)
        if about.epoch != epoch:
            self._begin_epoch(began if epoch >= 0 else None)
        if about.stage is Stage.ENDED and self.ended is None:
            self._end(self._broken or about.words)
        if about.stage is Stage.FINAL and self.ended is None:
            self._close()

    def _take_secrets(self, entry: Entry) -> None:
        only = entry.statements[0]
        body = SealedSecrets.decode(only.body)
        keys = EpochKeys.opened(self._signer, self._run, self.transcript, only.author, body)
        if keys is not None and (self._keys is None or self._followed is None):
            self._keys = keys

    def _begin_epoch(self, before: bytes | None) -> None:
        """The first set, or another one: what the fit has reached is where it goes on.

        ``before`` is the head where the last epoch began.
        """
        about, followed = self.transcript, self._followed
        head = about.heads[about.began]
        self._keys, self._followed = None, None
        if before is None:
            self._states[head] = b""
        elif followed is None and before in self._states:  # nobody drew secrets: nothing was asked
            self._states.setdefault(head, self._states[before])
            self._store.keep_state(head, self._states[head])
        elif followed is not None and self._program is not None:
            reached = followed.result
            if not followed.returned:
                try:
                    reached = finished(followed.fit, Finish("the set has changed"))
                except Finish:
                    reached = None
            self._states[head] = self._program.state(reached)
            self._store.keep_state(head, self._states[head])
        if self._is_site and self.name in about.members:
            too_few = len(about.members) < self._consent.smallest_set
            if about.agreement.masked and too_few:
                self._leave(
                    f"its owner wants {self._consent.smallest_set} sites in a set, and there are "
                    f"{len(about.members)} (smallest_set in its rules)."
                )
            elif about.epoch > self._consent.largest_changes:
                self._leave(
                    f"its owner allows {self._consent.largest_changes} changes of the set "
                    "(largest_changes in its rules)."
                )
        elif self._leaving:
            self._end(f"this site has left: {self._leaving}")

    def _leave(self, words: str) -> None:
        """Give no part any more, whether or not others hear that this site leaves."""
        if not self._leaving:
            logger.warning("%s leaves: %s", self.name, words)
            self._leaving = words

    def _close(self) -> None:
        """All sites have confirmed: the model is final, once this member has it."""
        about, followed, program = self.transcript, self._followed, self._program
        agreed = about.confirmed[0]
        name = RESULT + agreed.head
        if self._is_site and self.name not in about.members:
            self._end("this site was not in the last set, and the others have finished.")
        elif followed is not None and followed.returned and program is not None:
            assert self._keys is not None
            own = self._keys.group.hidden(program.digest(followed.result), agreed.head)
            if own != agreed.result:
                self._end("this member came to another model than all sites have signed.")
                return
            self._keep(name, program.state(followed.result))
        if self.ended is None and name in self._states:
            self.ended = Ended(self.result, True, "", self._states[name])

    def _keep(self, name: bytes, state: bytes) -> None:
        self._states[name] = state
        self._store.keep_state(name, state)

    def _end(self, words: str) -> None:
        self.ended = Ended(self.result, False, words)

    # The fit.

    def _settle(self) -> None:
        """Accept settings, find the epoch's secrets, and begin to follow."""
        about = self.transcript
        if self._stopped or about.stage is Stage.EMPTY:
            return
        if self.run not in ("", about.agreement.run):
            self._end("the relay shows one run under the name of another.")
            return
        try:
            if self._program is None:
                self._program = self._accepted()
            running = about.stage in (Stage.RUNNING, Stage.FINAL)
            if running and self._greeted and self._followed is None:
                self._begin()
                if about.stage is Stage.FINAL and self.ended is None:
                    self._close()
        except Finish:
            self._end("the fit was ended before it had reached anything.")
        except EmfedError as error:
            self._end(str(error))

    def _accepted(self) -> Program | None:
        """The program, if the owner takes part; a site tells the others why not."""
        about = self.transcript
        if self.refusal:
            if self.name in about.refusals or about.stage is Stage.FINAL:
                self._end(self.refusal)
            return None
        try:
            return self._consent.make(about.agreement)
        except EmfedError as error:
            if not self._is_site or self.name not in about.agreement.sites:
                raise
            self.refusal = str(error)
            self._orders.append(("refuse", self.refusal))
            return None

    def _begin(self) -> None:
        """Follow the present epoch's fit from its beginning through all that is known of it."""
        about = self.transcript
        head = about.heads[about.began]
        if self._keys is None and about.drawer == self.name and head in self._states:
            self._keys = EpochKeys.drawn(self._signer, self._run, about, self._states[head])
        if self._keys is None or self._program is None:
            return
        if not self._is_site and self.name not in about.agreement.analysts:
            return
        if self._is_site and self.name not in about.members:
            return
        self._states[head] = self._keys.state
        self._program.extend(about.extended(about.began))
        fit = self._program.begin(about.members, self._keys.state, head)
        self._followed = _Followed(fit)
        self._followed.begin()
        for place in range(about.began, len(about)):
            entry = Entry.decode(about.entries[place])
            self._follow(StatementKind(entry.kind), entry, place)

    def _follow(self, kind: StatementKind, entry: Entry, place: int) -> None:
        """Act on an entry of this epoch."""
        followed = self._followed
        assert followed is not None
        if self._is_site:
            self._act(kind, entry, place)
            return
        # An analyst: what stands after a sum shows whether the sites took it.
        after = self._shown(kind, entry)
        if after is not None:
            held, followed.held = followed.held, []
            for at, what, about in held:
                if what is not StatementKind.SUM or after > followed.taken:
                    self._act(what, about, at)
        if kind in (StatementKind.SUM, StatementKind.ORDER):
            followed.held.append((place, kind, entry))

    @staticmethod
    def _shown(kind: StatementKind, entry: Entry) -> int | None:
        """How many sums of the epoch the sites had taken before this entry, if it shows that."""
        if kind is StatementKind.SUM:
            return Added.decode(entry.added).exchange
        if kind in (StatementKind.NOSUM, StatementKind.CHANGE, StatementKind.CONFIRM):
            only = entry.statements[0].body
            forms = {
                StatementKind.NOSUM: NoSum,
                StatementKind.CHANGE: SetChange,
                StatementKind.CONFIRM: Confirmation,
            }
            return forms[kind].decode(only).exchange  # type: ignore[attr-defined]
        return None

    def _act(self, kind: StatementKind, entry: Entry, place: int) -> None:
        followed, keys = self._followed, self._keys
        assert followed is not None
        assert keys is not None
        if kind is StatementKind.ORDER:
            word = SignedOrder.decode(entry.statements[0].body).word
            if word == "finish":
                followed.finish()
            elif word == "extend" and self._program is not None:
                self._program.extend(self.transcript.extended(place + 1))
        elif kind is StatementKind.NOSUM:
            followed.refused = None
        elif kind is StatementKind.SUM and followed.ask is not None:
            added = Added.decode(entry.added)
            question = PlacedAsk(followed.ask, added.exchange, added.attempt)
            value = None
            if added.exchange == followed.taken:
                value = self._opened(question, place, added.part)
            if value is None:
                followed.refused = (added.exchange, added.attempt)
                return
            followed.refused = None
            sites = len(keys.members)
            exact = added.exchange == 0 or question.ask.precision is None
            followed.send(value, 0.0 if exact else sites / 12, 2 * sites * len(added.part))

    def _opened(self, question: PlacedAsk, place: int, data: bytes) -> FloatArray | None:
        assert self._keys is not None
        try:
            return self._keys.opened_sum(self.transcript, question, place, Part.decode(data))
        except WireError:
            return None

    # What is said.

    def _posts(self, now: float) -> list[bytes]:
        """All that is due and was not said lately."""
        posts = []
        if self._stopped or self._searching:
            return []
        for body, payload in self._due(now):
            encoded = body.encode()
            what = hashlib.sha256(bytes([body.KIND]) + encoded).digest()
            if now - self._said.get(what, -AGAIN) < AGAIN:
                continue
            if len(self._said) > 64:
                self._said.clear()
            self._said[what] = now
            self._spoke = now
            posts.append(self._post(body, payload))
        if self._total < len(self.transcript):
            posts += self._offer(self._total, now)
        return posts

    def _post(self, body: Body, payload: bytes) -> bytes:
        signed = Statement.by(self._signer, body)
        sent = signed.body
        if isinstance(body, SignedPart):
            sent = Turn(body.exchange, body.attempt).encode()
        return self._bare(body.KIND, sent, signed.signature, payload)

    def _bare(
        self, kind: StatementKind, body: bytes, signature: bytes = b"", payload: bytes = b""
    ) -> bytes:
        length = len(self.transcript) - (self._back if kind is StatementKind.FETCH else 0)
        head = self.transcript.heads[length][:8]
        return Post(self.name, length, head, kind, body, signature, payload).encode()

    def _fetch(self, now: float) -> bytes:
        self._spoke = now
        return self._bare(StatementKind.FETCH, b"")

    def _offer(self, first: int, now: float) -> list[bytes]:
        """Entries from a place on, for a relay that may have lost them."""
        if now - self._said.get(b"offer", -AGAIN) < AGAIN:
            return []
        self._said[b"offer"] = now
        entries, size = list[bytes](), 0
        for data in self.transcript.entries[first:]:
            size += len(data)
            if entries and size > LARGEST_OFFER:
                break
            entries.append(data)
        return [self._bare(StatementKind.OFFER, Offer(first, tuple(entries)).encode())]

    def _due(self, now: float) -> Iterator[tuple[Body, bytes]]:
        """What this member has to say at the end of the transcript as it knows it."""
        about = self.transcript
        if about.stage is Stage.EMPTY:
            if self._settings is not None:
                yield self._settings.document(), b""
            return
        if about.stage is Stage.ENDED or len(about) < self._total:
            return
        if self._program is None:
            if self.refusal and about.stage is not Stage.FINAL:
                yield from self._ordered()
            return
        if not self._greeted:
            hello = self._hello()
            try:
                about.check_hello(self.name, hello)
            except WireError as error:
                self._end(str(error))
                return
            yield hello, b""
            return
        yield from self._ordered()
        if about.lacking and self._keys is not None and self.name == self._sealer():
            yield self._once(-1, 0, self._sealed)
        if about.stage is not Stage.RUNNING or not self._is_site or self.name not in self._set:
            return
        if self._broken:
            yield Fault(about.head, "its fit cannot go on from these sums."), b""
            return
        if (change := self._change(now)) is not None:
            yield change, b""
        if self._followed is not None and not self._leaving:
            yield from self._turn(self._followed)

    def _hello(self) -> Hello:
        about = self.transcript
        return Hello(
            about.settings,
            self._nonce,
            self._run.public,
            self._commitment,
            len(about),
            about.head,
            int(self._consent.spares),
        )

    def _ordered(self) -> Iterator[tuple[Body, bytes]]:
        """The first order that is not in the transcript yet."""
        last = self.transcript.numbers.get(self.name, -1)
        if self._numbered is not None and last >= self._numbered:
            self._orders.pop(0)
            self._numbered = None
        leaves = self._leaving and self.name not in self.transcript.leavers
        if leaves and not self._orders and self.transcript.stage is Stage.RUNNING:
            self._orders.append(("leave", self.name))
        if self._orders:
            self._numbered = last + 1
            yield SignedOrder(self.transcript.settings, self._numbered, *self._orders[0]), b""

    def _once(
        self, exchange: int, attempt: int, make: Callable[[], tuple[Body, bytes]]
    ) -> tuple[Body, bytes]:
        """What is made once at a head, and said again as it is."""
        key = (self.transcript.head, exchange, attempt)
        if any(head != key[0] for head, _, _ in self._made):
            self._made = {}
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _sealer(self) -> str:
        """Who seals secrets now: the first site, or another that has them where it is silent."""
        about = self.transcript
        able = [name for name in about.members if name in about.sealed]
        first = about.drawer
        return next((n for n in (first, *able) if n not in self._silent), first)

    def _sealed(self) -> tuple[Body, bytes]:
        about = self.transcript
        assert self._keys is not None
        to = {name: about.hellos[name] for name in about.lacking}
        place = about.heads[about.began]
        readers = set(about.agreement.analysts)
        sealed = self._keys.sealed(self._signer, place, to, readers)
        return SealedSecrets(about.head, about.epoch, sealed), b""

    def _turn(self, followed: _Followed) -> Iterator[tuple[Body, bytes]]:
        """A part, a refusal, or the end."""
        about = self.transcript
        if about.lacking:
            return  # their secrets change the head at once
        if followed.refused is not None:
            yield NoSum(about.head, *followed.refused), b""
        elif followed.returned:
            assert self._program is not None
            assert self._keys is not None
            self._store.confirm(len(about))
            if RESULT + about.head not in self._states:
                self._keep(RESULT + about.head, self._program.state(followed.result))
            digest = self._program.digest(followed.result)
            hidden = self._keys.group.hidden(digest, about.head)
            yield Confirmation(about.head, followed.taken, hidden), b""
        elif followed.values is not None and not about.paused and self._keys is not None:
            assert followed.ask is not None
            exchange, attempt = about.due
            if exchange != followed.taken:
                yield Fault(about.head, f"sum {followed.taken} is due here, not {exchange}."), b""
                return
            question = PlacedAsk(followed.ask, exchange, attempt)
            yield self._once(exchange, attempt, lambda: self._part(question))

    def _part(self, question: PlacedAsk) -> tuple[Body, bytes]:
        """This site's part in the present context; kept before it leaves."""
        about, followed, keys = self.transcript, self._followed, self._keys
        assert followed is not None
        assert followed.values is not None
        assert keys is not None
        self._keep_to_path()
        part = keys.part(about, question, followed.values)
        payload = part.encode()
        digest = hashlib.sha256(payload).digest()
        body = SignedPart(about.head, question.exchange, question.attempt, part.state, digest)
        self._store.sent(about.head + Turn(body.exchange, body.attempt).encode(), digest)
        return body, payload

    # Who is in.

    def _keep_to_path(self) -> None:
        """Give parts in one set after another, however often a relay goes back.

        Entries without a sum may be dropped. So a relay could show each epoch with many sets, or
        go back behind a change and make it again later, and with an analyst read the differences.
        """
        about = self.transcript
        mark = self._mark()
        path, at = self._states.get(PATH, b""), len(mark) * about.epoch
        if path[at:] not in (b"", mark):
            raise FederationError(
                "the relay goes back to a set of sites that this site left behind, or shows it "
                "another one, or other rows of some site, in its place: no part is sent."
            )
        if len(path) <= at:
            self._keep(PATH, path.ljust(at, b"\0") + mark)

    def _mark(self) -> bytes:
        """Of the settings, the set with its rows, and the sums before it."""
        about = self.transcript
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

    def _watch(self, silent: Sequence[str], now: float) -> None:
        self._silent = {name: self._silent.get(name, now - SILENT) for name in silent}

    def _change(self, now: float) -> SetChange | None:
        """A change of the set, if one is due by this member's clock."""
        about, followed = self.transcript, self._followed
        wait = about.agreement.wait
        gone = {name for name, since in self._silent.items() if now - since >= wait}
        gone |= about.leavers
        leaving = tuple(name for name in self._set if name in gone)
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
        if self.name in leaving:
            return None
        for names in ((leaving, coming), (leaving, ()), ((), coming)):
            try:
                about.next_set(*names)
            except WireError as error:
                if any(names):
                    logger.info("%s: %s", self.name, error)
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
    first: bool

    def __call__(self) -> FloatArray:
        values = self.ask.part(self.rows)
        return np.append(values, self.rows.total) if self.first else values
