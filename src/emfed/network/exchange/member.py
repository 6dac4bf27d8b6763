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
from typing import Any, final

from emfed.aggregation.keys import RunKey
from emfed.core.errors import DataError, EmfedError, FederationError, WireError
from emfed.core.sums import Ask, Finish, Rows
from emfed.network.exchange.everyone import EveryoneSums
from emfed.network.exchange.followed import (
    UNREACHED,
    Consent,
    Ended,
    FollowedFit,
    Holder,
    MemberStore,
    Program,
)
from emfed.network.exchange.heard import HeardSums
from emfed.network.exchange.relay import SILENT, SUMS
from emfed.network.exchange.statements import (
    Agreement,
    Body,
    Entry,
    HandOut,
    Hello,
    Offer,
    Post,
    Roster,
    SignedOrder,
    SignedPart,
    Signer,
    Statement,
    StatementKind,
    Turn,
    start_of,
)
from emfed.network.exchange.transcript import Stage, Transcript

logger = logging.getLogger(__name__)
AGAIN = 5.0
"""Seconds after which a member says again what was not followed by an entry."""
PATIENCE = 15.0
"""Seconds that a relay may go on handing out a list that clashes with the member's own."""
UNSUITED = "the rows or columns there do not suit this fit; the site's own program says why."
"""What others hear of rows that cannot be used."""
LARGEST_OFFER = 1 << 20
"""Bytes of entries that a member sends to a relay that lacks them, in one message."""


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
        self._me = Holder(signer, random(16), RunKey(), store, consent, rows)
        self._roster, self._store = roster, store
        self._commitment, self._settings = commitment, settings
        self.name = signer.name
        self.run = ""
        """The run that this is to be, by the relay's word; empty: any."""
        self.transcript = Transcript(roster)
        self.fit: FollowedFit = EveryoneSums(self._me, self.transcript)
        """The fit as this member follows it."""
        self._greeted = False
        self._orders = self._me.orders
        self._numbered: int | None = None
        """The number under which the first of them was said."""
        self._total = 0
        self._clashing: float | None = None
        self._searching = False
        """Whether the relay's list is not known to go on from this one: nothing is said to it."""
        self._back = 0
        """How many of its last entries this member leaves out when it asks, to find a clash."""
        self._dropped = 0
        """How many sums this process has dropped: one at most, or a relay could have any number of
        sums about one place."""
        self.refusal = ""
        """Why the owner takes no part in this fit, if so: others hear of it, and then this ends."""
        self._said: dict[bytes, float] = {}
        self._spoke = -AGAIN
        self._waits: tuple[bytes, int | None] = (b"", None)
        """How many parts the relay was told that this member waits for, and where."""
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
                self._hear(out.parts)
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
    def ended(self) -> Ended | None:
        """How this member ended, if it did."""
        return self._me.ended

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

    def job(self) -> Callable[[], Any] | None:
        """A pass over the rows that is to be made, if one is."""
        return None if self.ended else self.fit.job()

    def done(self, job: Callable[[], Any], found: Any, now: float) -> list[bytes]:
        """Take what a job gave; it is ignored where the fit has gone on meanwhile."""
        if self.ended is None:
            self.fit.done(job, found)
        return self.tick(now)

    def order(self, word: str, argument: str = "") -> None:
        """Ask for an order to enter the transcript; of a site "leave" alone is heard."""
        if self._me.is_site and word == "leave":
            self._me.leave("its owner wants so.")
        else:
            self._orders.append((word, argument))

    @property
    def ordering(self) -> bool:
        """Whether an order is on its way into the transcript."""
        return bool(self._orders)

    @property
    def silent(self) -> tuple[str, ...]:
        """Sites that the relay has not heard of lately."""
        return tuple(self._me.silent)

    @property
    def silent_since(self) -> dict[str, float]:
        """The same, with when each of them spoke last."""
        return dict(self._me.silent)

    @property
    def result(self) -> Any:
        """What the fit came to, if it returned; `Ended.final` says when it is final."""
        return self.fit.result

    @property
    def following(self) -> Ask | None:
        """The ask that the fit waits for."""
        return None if self.fit.followed is None else self.fit.followed.ask

    # The transcript.

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

    def _hear(self, parts: Sequence[bytes]) -> None:
        """Hand parts of the exchange that is due to the fit, if it is this member that adds."""
        about = self.transcript
        for data in parts:
            try:
                post = Post.decode(data)
                turn, digest = Turn.decode(post.body), hashlib.sha256(post.payload).digest()
                state = start_of(post.payload)
                body = SignedPart(about.head, turn.exchange, turn.attempt, state, digest)
                statement = Statement(
                    post.author, StatementKind.PART, body.encode(), post.signature
                )
                statement.read(self._roster)
            except WireError as error:
                logger.info("%s: the relay hands out: %s", self.name, error)
                continue
            if (turn.exchange, turn.attempt) == about.due and post.author in about.members:
                self.fit.heard(post.author, post.payload)

    def _drop(self, place: int, data: bytes) -> None:
        """Forget the entries from a place on, where this one may stand there instead."""
        entries = self.transcript.entries
        sums = sum(Entry.decode(each).kind in SUMS for each in entries[place:])
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
        program = self.fit.program if entries else None  # other settings are the owner's
        self.transcript = Transcript(self._roster)
        self.fit = EveryoneSums(self._me, self.transcript)
        self.fit.program = program
        self._greeted, self._back = False, 0
        for data in entries:
            self._append(data)

    def _append(self, data: bytes) -> None:
        """Take an entry, and act on it where the fit is being followed."""
        about, place = self.transcript, len(self.transcript)
        entry = about.append(data)
        kind = StatementKind(entry.kind)
        if kind is StatementKind.SETTINGS and about.agreement.coded:
            program, self.fit = self.fit.program, HeardSums(self._me, about)
            self.fit.program = program
        if kind is StatementKind.HELLO and entry.statements[0].author == self.name:
            mine = Hello.decode(entry.statements[0].body).nonce == self._me.nonce
            if self._greeted and not mine:
                raise FederationError(
                    "another process has taken this one's place: it has the same key."
                )
            self._greeted = mine
        self.fit.entered(kind, entry, place)
        if about.stage is Stage.ENDED and self.ended is None:
            self._end(self.fit.broken or about.words)
        if about.stage is Stage.FINAL and self.ended is None:
            self.fit.close()

    def _end(self, words: str) -> None:
        self._me.end(words, self.result)

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
            if self.fit.program is None:
                self.fit.program = self._accepted()
            running = about.stage in (Stage.RUNNING, Stage.FINAL)
            if running and self._greeted and self.fit.followed is None:
                self.fit.begin()
                if about.stage is Stage.FINAL and self.ended is None:
                    self.fit.close()
        except Finish:
            self.fit.broken = UNREACHED
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
            return self._me.consent.make(about.agreement)
        except EmfedError as error:
            if not self._me.is_site or self.name not in about.agreement.sites:
                raise
            self.refusal = str(error)
            # What is wrong with rows names them and their values: it is for their owner alone.
            told = UNSUITED if isinstance(error, DataError) else self.refusal
            self._orders.append(("refuse", told))
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
        waits = (self.transcript.head, self.fit.awaited)
        if waits[1] is not None and waits != self._waits:
            self._waits = waits
            posts.append(self._fetch(now))
        return posts

    def _post(self, body: Body, payload: bytes) -> bytes:
        signed = Statement.by(self._me.signer, body)
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
        awaited = self.fit.awaited
        body = b"" if awaited is None else awaited.to_bytes(4, "little")
        return self._bare(StatementKind.FETCH, body)

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
        if self.fit.program is None:
            if self.refusal and about.stage is not Stage.FINAL:
                yield from self._ordered()
            return
        if not self._greeted:
            if self.name in about.expelled:
                return  # it may be let in again
            hello = self._hello()
            try:
                about.check_hello(self.name, hello)
            except WireError as error:
                self._end(str(error))
                return
            yield hello, b""
            return
        yield from self._ordered()
        yield from self.fit.due(now)

    def _hello(self) -> Hello:
        about, consent = self.transcript, self._me.consent
        pledge = consent.pledge()
        return Hello(
            about.settings,
            self._me.nonce,
            self._me.run.public,
            self._commitment,
            len(about),
            about.head,
            int(consent.spares and not pledge.needs_all),
            pledge.noise,
            pledge.charges,
        )

    def _ordered(self) -> Iterator[tuple[Body, bytes]]:
        """The first order that is not in the transcript yet."""
        last = self.transcript.numbers.get(self.name, -1)
        if self._numbered is not None and last >= self._numbered:
            self._orders.pop(0)
            self._numbered = None
        leaves = self._me.leaving and self.name not in self.transcript.leavers
        if leaves and not self._orders and self.transcript.stage is Stage.RUNNING:
            self._orders.append(("leave", self.name))
        if self._orders:
            self._numbered = last + 1
            yield SignedOrder(self.transcript.settings, self._numbered, *self._orders[0]), b""

    def _watch(self, silent: Sequence[str], now: float) -> None:
        known = self._me.silent
        self._me.silent = {name: known.get(name, now - SILENT) for name in silent}
