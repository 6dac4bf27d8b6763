"""The transcript, and what follows from it: one file owns every transition.

========== =========== ============================================ =============================
stage      entry       holds if                                     then
========== =========== ============================================ =============================
EMPTY      SETTINGS    an analyst that they name signed them        GATHERING
GATHERING  HELLO       named, newest chain, rows as committed       RUNNING once all are here
GATHERING  ORDER       by an analyst; "begin" with more than half   RUNNING if "begin", ENDED if
                       of the sites                                 "finish"
RUNNING    HELLO       as above                                     every context changes
RUNNING    SECRETS     by the first site that stayed, or another    those named have the secrets
                       that has them, at this head
RUNNING    SUM         of the exchange and attempt that are due     the next exchange is due
RUNNING    TOLD        coded, by the adder, of the exchange due     the next exchange is due
RUNNING    DIFFER      all of the set signed parts, of two states   the same sum is due, compared at
                                                                    another place; ENDED after too
                                                                    many
RUNNING    NOSUM       all of the set signed it of the last sum     its next attempt is due; ENDED
                                                                    after too many
RUNNING    ORDER       by an analyst; "leave" and "refuse" by the   members act at this place
                       site itself
RUNNING    CHANGE      all who stay signed it; they are more than   a new epoch with a new set
                       half of the first set; leavers spare them
RUNNING    CONFIRM     all of the set signed this head              FINAL: so is the model
FINAL      HELLO       as above: a member that was away reads on    FINAL
FINAL      SECRETS     as above                                     FINAL
others       FAULT       by a member                                  ENDED for all
========== =========== ============================================ =============================

Everything else is refused, and leaves the transcript as it was. Where sums are coded the adder
signs TOLD, CHANGE and CONFIRM alone, there are no secrets, and whoever leaves stays in the set.

More than half of the sites that settings name must be there at the beginning, and more than half
of the *first* set must stay, always: else a relay that splits the sites could lead two groups to
two final models. Any two first sets share a site, which gives parts in one of them; any two sets
after one beginning share a site of it, which confirms one head.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Sequence
from enum import Enum, auto
from typing import final

from emfed.aggregation.lattice import SMALLEST_SET
from emfed.core.errors import WireError
from emfed.network.exchange.statements import (
    START,
    Added,
    Agreement,
    Body,
    Confirmation,
    Document,
    Entry,
    Fault,
    Hello,
    NoSum,
    Roster,
    SealedSecrets,
    SetChange,
    SignedOrder,
    SignedPart,
    SignedSum,
    StatementKind,
)

MOST_ATTEMPTS, MOST_ATTEMPTS_OF_A_FIT = 2, 20
"""Further attempts of one exchange, and of all of a fit, before it ends: each tells those who see
sums a little about roundings, and a relay that forges sums must not get more of them."""
MOST_HELLOS = 1000
"""Processes of one member in a fit: each takes room on every disk, and changes every context."""
ORDERS = (
    "begin",
    "pause",
    "resume",
    "extend",
    "finish",
    "expel",
    "readmit",
    "leave",
    "refuse",
    "anew",
)
LARGEST_TRANSCRIPT = 1 << 20
"""Entries: a fit of a thousand rounds has some thousands."""


class Stage(Enum):
    """Where a transcript is."""

    EMPTY = auto()
    GATHERING = auto()
    RUNNING = auto()
    FINAL = auto()
    ENDED = auto()


@final
class Transcript:
    """The chain of entries and the state that follows from it.

    Parameters
    ----------
    roster : Roster
        Public keys of all who may sign.
    """

    def __init__(self, roster: Roster) -> None:
        self._roster = roster
        self.entries: list[bytes] = []
        self.heads = [START]
        self.stage = Stage.EMPTY
        self.agreement = Agreement(("",), ())
        self.settings = bytes(32)
        """The digest of the settings."""
        self.hellos: dict[str, Hello] = {}
        self.hello_places: dict[str, int] = {}
        self._greetings: list[tuple[int, str, Hello]] = []
        self.members: tuple[str, ...] = ()
        """The set, in the order of the settings."""
        self.drawer = ""
        """Who draws the secrets of the epoch: the first site that has the fit's state."""
        self.first: frozenset[str] = frozenset()
        """The set of the first epoch."""
        self.epoch, self.began = -1, 0
        """Which epoch, and the place of its first entry."""
        self.due = (0, 0)
        """Exchange and attempt of the next sum."""
        self.open: tuple[int, int] | None = None
        """Those of the last sum, while it may still be refused."""
        self.differences, self.failures = 0, 0
        """How often sites differed over the sum that is due; how often sums of the fit failed."""
        self.sealed: set[str] = set()
        """Members whose newest process has the secrets of this epoch."""
        self.paused = False
        self.leavers: set[str] = set()
        """Sites that said that they leave, or that an analyst expelled."""
        self.expelled: set[str] = set()
        self.refusals: dict[str, str] = {}
        """Why sites that have not said hello take no part, in their own words."""
        self.extensions: list[tuple[int, int]] = []
        """Places of orders that gave the fit another limit on rounds, and the limits."""
        self.epochs: list[tuple[int, tuple[str, ...]]] = []
        """The places where epochs begin, and their sets."""
        self._left: dict[str, int] = {}
        """Where sites were left behind."""
        self._reasons: dict[str, str] = {}
        """Why sites leave, by name."""
        self.numbers: dict[str, int] = {}
        """The number of the last order of each author."""
        self.words = ""
        """Why the fit ended, if it did not end well."""
        self.confirmed: tuple[Confirmation, ...] = ()

    def __len__(self) -> int:
        return len(self.entries)

    @property
    def head(self) -> bytes:
        """The digest of the whole chain."""
        return self.heads[-1]

    @property
    def away(self) -> tuple[str, ...]:
        """Sites that are not in the set, and said hello since they were."""
        if self.stage is not Stage.RUNNING:
            return ()
        named = [s for s in self.agreement.sites if s not in self.members]
        places = {s: self.hello_places.get(s, -1) for s in named if s not in self.leavers}
        return tuple(s for s, place in places.items() if place > self._left.get(s, -1))

    @property
    def gone(self) -> dict[str, str]:
        """Why sites that the settings name are not in the set."""
        if self.epoch < 0:
            return {}
        others = [name for name in self.agreement.sites if name not in self.members]
        return {name: self._why(name) for name in others}

    def _why(self, name: str) -> str:
        if name in self.refusals:
            return f"refused: {self.refusals[name]}".rstrip(".")
        never = "never came" if name not in self.hellos else "came too late"
        return self._reasons.get(name, never)

    def hellos_at(self, place: int) -> dict[str, Hello]:
        """The newest hello of each member before this place."""
        return {name: hello for at, name, hello in self._greetings if at < place}

    def extended(self, place: int) -> int | None:
        """The limit on rounds by the last order before this place, if there was one."""
        return next((n for at, n in reversed(self.extensions) if at < place), None)

    @property
    def lacking(self) -> tuple[str, ...]:
        """Members whose newest process has no secrets yet."""
        if self.stage not in (Stage.RUNNING, Stage.FINAL) or self.agreement.coded:
            return ()
        readers = [name for name in self.agreement.analysts if name in self.hellos]
        return tuple(name for name in (*self.members, *readers) if name not in self.sealed)

    def append(self, data: bytes) -> Entry:
        """Take the next entry, or raise `WireError` and change nothing."""
        if len(self.entries) >= LARGEST_TRANSCRIPT:
            raise WireError(f"a transcript of more than {LARGEST_TRANSCRIPT} entries.")
        entry = Entry.decode(data)
        handler = self._handler(entry)
        handler(entry)
        self.entries.append(data)
        self.heads.append(entry.after(self.head))
        if entry.kind == StatementKind.SETTINGS:
            self.settings = hashlib.sha256(entry.statements[0].body).digest()
        return entry

    def _handler(self, entry: Entry) -> Callable[[Entry], None]:
        table: dict[tuple[Stage, StatementKind], Callable[[Entry], None]] = {
            (Stage.EMPTY, StatementKind.SETTINGS): self._settle,
            (Stage.GATHERING, StatementKind.HELLO): self._greet,
            (Stage.GATHERING, StatementKind.ORDER): self._order,
            (Stage.GATHERING, StatementKind.FAULT): self._fault,
            (Stage.RUNNING, StatementKind.HELLO): self._greet,
            (Stage.RUNNING, StatementKind.ORDER): self._order,
            (Stage.RUNNING, StatementKind.CHANGE): self._change,
            (Stage.RUNNING, StatementKind.CONFIRM): self._confirm,
            (Stage.RUNNING, StatementKind.FAULT): self._fault,
            (Stage.FINAL, StatementKind.HELLO): self._greet,
        }
        if self.agreement.coded:
            table[Stage.RUNNING, StatementKind.TOLD] = self._tell
        else:
            table |= {
                (Stage.RUNNING, StatementKind.SECRETS): self._share,
                (Stage.RUNNING, StatementKind.SUM): self._sum,
                (Stage.RUNNING, StatementKind.NOSUM): self._fail,
                (Stage.RUNNING, StatementKind.DIFFER): self._differ,
                (Stage.FINAL, StatementKind.SECRETS): self._share,
            }
        kinds = set(StatementKind)
        known = StatementKind(entry.kind) if entry.kind in kinds else None
        handler = None if known is None else table.get((self.stage, known))
        if handler is None:
            raise WireError(f"no entry of kind {entry.kind} may follow while {self.stage.name}.")
        wanted = StatementKind.PART if known is StatementKind.DIFFER else known
        if any(one.kind != wanted for one in entry.statements):
            raise WireError("an entry holds statements of other kinds than its own.")
        if (entry.kind == StatementKind.SUM) != bool(entry.added):
            raise WireError("an entry holds a sum that is none, or none where one belongs.")
        return handler

    def _one(self, entry: Entry) -> tuple[str, Body]:
        """The author and body of an entry of one statement."""
        if len(entry.statements) != 1:
            raise WireError(f"an entry with {len(entry.statements)} statements in place of one.")
        only = entry.statements[0]
        return only.author, only.read(self._roster)

    def _all(self, entry: Entry, authors: Sequence[str] | None = None) -> tuple[Body, ...]:
        """The bodies of an entry that all of these signed, in the order of the set."""
        signed = tuple(one.author for one in entry.statements)
        if authors is not None and signed != tuple(authors):
            raise WireError(f"signed by {', '.join(signed)} and not by {', '.join(authors)}.")
        return tuple(one.read(self._roster) for one in entry.statements)

    def _settle(self, entry: Entry) -> None:
        author, body = self._one(entry)
        assert isinstance(body, Document)
        agreement = Agreement.read(body)
        if author not in agreement.analysts:
            raise WireError(f"settings that {author} signed, who is no analyst in them.")
        if agreement.coded and (agreement.masked or not agreement.analysts):
            raise WireError("coded sums need an analyst who adds, and go without masks.")
        if agreement.masked and len(agreement.sites) < SMALLEST_SET:
            raise WireError(
                f"masked sums of {len(agreement.sites)} sites: of two, each knows the other's part."
            )
        self.agreement, self.stage = agreement, Stage.GATHERING

    def check_hello(self, author: str, hello: Hello) -> None:
        """Refuse a hello that cannot stand at the end of this chain."""
        about = self.agreement
        if author not in about.sites + about.analysts:
            raise WireError(f"{author} is not named in the settings.")
        if author in self.expelled:
            raise WireError(f"{author} was expelled from this fit.")
        if hello.settings != self.settings:
            raise WireError(f"{author} accepted other settings than these.")
        known = self.hellos.get(author)
        if known is not None and known.rows != hello.rows:
            raise WireError(
                f"{author} has other rows than those that it committed to at the opening: it is "
                "out of this fit; start a new one for other rows."
            )
        if known is not None and (known.noise != hello.noise or known.charges > hello.charges):
            raise WireError(
                f"{author} has another key of noise, or another or an older ledger of what its "
                "rows have told, than before: it is out of this fit. Put back what is newest."
            )
        if hello.length <= self.hello_places.get(author, -1):
            raise WireError(f"{author} said hello before its newest process did.")
        if hello.length > len(self) or self.heads[hello.length] != hello.head:
            raise WireError(f"{author} has another transcript than this one.")
        if any(hello.key == other.key for name, other in self.hellos.items() if name != author):
            raise WireError(f"{author} uses the run key of another member.")
        from emfed.aggregation.keys import check_run_key  # who only reads this table has no keys

        try:
            check_run_key(hello.key)
        except WireError as error:
            raise WireError(f"{author}: {error}") from None
        if sum(name == author for _, name, _ in self._greetings) >= MOST_HELLOS:
            raise WireError(f"{author} began {MOST_HELLOS} times in this fit: it is out.")

    def _greet(self, entry: Entry) -> None:
        author, hello = self._one(entry)
        assert isinstance(hello, Hello)
        self.check_hello(author, hello)
        self.hellos[author], self.hello_places[author] = hello, len(self)
        self._greetings.append((len(self), author, hello))
        self.sealed.discard(author)
        self.leavers.discard(author)
        self.refusals.pop(author, None)
        if self.stage is Stage.GATHERING and all(s in self.hellos for s in self.agreement.sites):
            self._begin(self.agreement.sites, self.agreement.sites)

    def _begin(self, members: tuple[str, ...], stay: tuple[str, ...]) -> None:
        if not self.first:
            self.first = frozenset(members)
        self.drawer = stay[0]
        self.members, self.epoch, self.began = members, self.epoch + 1, len(self) + 1
        self.due, self.open, self.sealed = (0, 0), None, set()
        self.differences = 0
        self.stage = Stage.RUNNING
        self.epochs.append((self.began, members))

    def _share(self, entry: Entry) -> None:
        author, body = self._one(entry)
        assert isinstance(body, SealedSecrets)
        able = author == self.drawer or (author in self.members and author in self.sealed)
        if not able or (body.head, body.epoch) != (self.head, self.epoch):
            raise WireError(f"secrets from {author}, or of another place than this one.")
        names = [name for name, _ in body.sealed]
        if not set(names) <= set(self.lacking) or len(set(names)) < len(names):
            raise WireError("secrets for members that have them, or are none.")
        self.sealed |= set(names)

    def _sum(self, entry: Entry) -> None:
        added = Added.decode(entry.added)
        if (added.exchange, added.attempt) != self.due or entry.statements:
            raise WireError(f"a sum of {added.exchange, added.attempt}; {self.due} is due.")
        self.open, self.due, self.differences = self.due, (self.due[0] + 1, 0), 0

    def _by_adder(self, entry: Entry) -> Body:
        """The body of a statement that the adder of coded sums makes alone, at this place."""
        author, body = self._one(entry)
        if author != self.agreement.adder or getattr(body, "head", b"") != self.head:
            raise WireError(f"a word of {author}, or of another place, where the adder's belongs.")
        return body

    def _tell(self, entry: Entry) -> None:
        body = self._by_adder(entry)
        assert isinstance(body, SignedSum)
        if body.exchange != self.due[0] or self.paused:
            raise WireError(f"a sum of {body.exchange}; {self.due[0]} is due.")
        self.due = (self.due[0] + 1, 0)

    def _fail(self, entry: Entry) -> None:
        for body in self._all(entry, self.members):
            assert isinstance(body, NoSum)
            if body.head != self.head or (body.exchange, body.attempt) != self.open:
                raise WireError("a refusal of another sum than the last one.")
        assert self.open is not None
        exchange, attempt = self.open
        self.due, self.open = (exchange, attempt + 1), None
        self.failures += 1
        if attempt + 1 > MOST_ATTEMPTS or self.failures > MOST_ATTEMPTS_OF_A_FIT:
            self.stage = Stage.ENDED
            self.words = (
                f"the sum of exchange {exchange} was wrong {attempt + 1} times: sums are forged, "
                "some site sends other numbers than its own, or sites were shown different lists."
            )

    def _differ(self, entry: Entry) -> None:
        groups: dict[bytes, list[str]] = {}
        for name, body in zip(self.members, self._all(entry, self.members), strict=True):
            assert isinstance(body, SignedPart)
            if (body.head, (body.exchange, body.attempt)) != (self.head, self.due):
                raise WireError("parts of other places than this one.")
            groups.setdefault(body.state, []).append(name)
        if len(groups) < 2:
            raise WireError("parts that are of one state.")
        self.open = None
        self.differences, self.failures = self.differences + 1, self.failures + 1
        if self.differences > MOST_ATTEMPTS or self.failures > MOST_ATTEMPTS_OF_A_FIT:
            self.stage = Stage.ENDED
            self.words = "sites computed different things from the same sums: " + "; ".join(
                ", ".join(names) for names in groups.values()
            )

    def _order(self, entry: Entry) -> None:
        author, body = self._one(entry)
        assert isinstance(body, SignedOrder)
        itself = body.word == "leave" and body.argument == author in self.agreement.sites
        itself |= body.word == "refuse" and author in self.agreement.sites
        if body.settings != self.settings:
            raise WireError(f"an order of {author} in another fit.")
        if body.word not in ORDERS or not (itself or author in self.agreement.analysts):
            raise WireError(f"an order {body.word!r} that {author} cannot give.")
        if body.number <= self.numbers.get(author, -1):
            raise WireError(f"an order of {author} that stands in the transcript already.")
        here = tuple(s for s in self.agreement.sites if s in self.hellos)
        if body.word == "begin":
            least = SMALLEST_SET if self.agreement.masked else 1
            few = len(here) < least or 2 * len(here) <= len(self.agreement.sites)
            if self.stage is not Stage.GATHERING or few:
                raise WireError(
                    f"a fit cannot begin now, with {len(here)} sites: it takes more than half of "
                    f"the {len(self.agreement.sites)} that are named."
                )
            self._begin(here, here)
        elif body.word in ("leave", "expel"):
            self.leavers.add(body.argument)
            self.expelled |= {body.argument} if body.word == "expel" else set()
            word = "was expelled by the analyst" if body.word == "expel" else "left"
            self._reasons[body.argument] = word
            self._part_with(body.argument)
        elif body.word in ("pause", "resume"):
            self.paused = body.word == "pause"
        elif body.word == "readmit":
            self.leavers.discard(body.argument)
            self.expelled.discard(body.argument)
            self._left.pop(body.argument, None)
        elif body.word == "refuse":
            self.refusals[author] = body.argument
        elif body.word == "extend":
            if not re.fullmatch("[0-9]{1,9}", body.argument):
                raise WireError("a limit on rounds that is no number.")
            self.extensions.append((len(self), int(body.argument)))
        elif body.word == "finish" and self.stage is Stage.GATHERING:
            self.stage, self.words = Stage.ENDED, "the fit was ended before it began."
        self.numbers[author] = body.number

    def _part_with(self, name: str) -> None:
        """End where the fit cannot go on without a site that leaves."""
        if self.agreement.coded:
            if {*self.members} <= self.leavers:
                self.stage, self.words = Stage.ENDED, f"{name} leaves, and nobody is left."
            return
        leaving = [one for one in self.members if one in self.leavers]
        try:
            if leaving:
                self.next_set(leaving, ())
        except WireError as error:
            self.stage, self.words = Stage.ENDED, f"{name} leaves, and {error}"

    def next_set(self, leaving: Sequence[str], coming: Sequence[str]) -> tuple[str, ...]:
        """The set after a change; raises `WireError` where there can be none."""
        stay = [name for name in self.members if name not in leaving]
        if not set(leaving) <= set(self.members) or not set(coming) <= set(self.away):
            raise WireError("a change names leavers that are not in the set, or strangers.")
        if not (leaving or coming):
            raise WireError("a change that changes nothing.")
        if self.agreement.coded:
            return tuple(s for s in self.agreement.sites if s in (*stay, *coming))
        if 2 * len(self.first.intersection(stay)) <= len(self.first):
            raise WireError(
                f"{', '.join(leaving)} cannot be left behind: more than half of the "
                f"{len(self.first)} sites of the beginning must stay."
            )
        for name in leaving:
            if not (self.hellos[name].spares or name in self.leavers - self.expelled):
                raise WireError(f"the owner of {name} does not let others go on without it.")
        found = tuple(s for s in self.agreement.sites if s in (*stay, *coming))
        if self.agreement.masked and len(found) < SMALLEST_SET:
            raise WireError(f"a masked sum of {len(found)} sites: of two, each knows the other's.")
        return found

    def _change(self, entry: Entry) -> None:
        bodies = self._all(entry)
        change = bodies[0]
        assert isinstance(change, SetChange)
        members = self.next_set(change.leaving, change.coming)
        stay = tuple(name for name in self.members if name not in change.leaving)
        self._all(entry, (self.agreement.adder,) if self.agreement.coded else stay)
        if any(body != change for body in bodies) or change.head != self.head:
            raise WireError("a change of the set at another place, or several in one entry.")
        if change.exchange not in self._taken():
            raise WireError(f"a change after {change.exchange} sums, which was not then.")
        for name in change.leaving:
            self._left[name] = len(self)
            self._reasons.setdefault(name, "did not answer any more")
        for name in change.coming:
            self._reasons.pop(name, None)
        self._begin(members, stay)

    def _taken(self) -> tuple[int, ...]:
        """How many sums of this epoch members may have taken."""
        return (self.due[0],) if self.open is None else (self.open[0], self.open[0] + 1)

    def _confirm(self, entry: Entry) -> None:
        found = []
        signers = (self.agreement.adder,) if self.agreement.coded else self.members
        for body in self._all(entry, signers):
            assert isinstance(body, Confirmation)
            if body.head != self.head or body.exchange not in self._taken():
                raise WireError("a confirmation of another chain than this one.")
            found.append(body)
        self.confirmed, self.stage = tuple(found), Stage.FINAL
        if len(set(found)) > 1:
            self.stage = Stage.ENDED
            names = [m for m, b in zip(self.members, found, strict=True) if b != found[0]]
            self.words = f"{', '.join(names)} and {self.members[0]} came to different models."

    def _fault(self, entry: Entry) -> None:
        author, body = self._one(entry)
        assert isinstance(body, Fault)
        if author not in self.hellos or body.head not in self.heads:
            raise WireError(f"{author} takes no part in this fit.")
        self.stage, self.words = Stage.ENDED, f"{author}: {body.words}"
