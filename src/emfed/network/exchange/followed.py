"""What a member keeps and agrees to, and what it follows: all that both kinds of sums share."""

from __future__ import annotations

import hashlib
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, final, runtime_checkable

from emfed.core.errors import EmfedError
from emfed.core.sums import Ask, Finish, Fit, IntArray, Rows, finished
from emfed.data.summing import HeldRows
from emfed.network.exchange.relay import EntryStore
from emfed.network.exchange.statements import Agreement, Body, Entry, Signer, StatementKind
from emfed.network.exchange.transcript import Transcript

if TYPE_CHECKING:  # programs of fits know no keys
    from emfed.aggregation.keys import RunKey

logger = logging.getLogger(__name__)


UNREACHED = "the fit was ended before it had reached anything."


@final
@dataclass(frozen=True)
class Comings:
    """Who took part in a fit before the present epoch, and is not in it.

    Parameters
    ----------
    first : tuple of str
        The set of the first epoch.
    gone : mapping from str to str
        Why sites that settings name are not in the present set.
    """

    first: tuple[str, ...] = ()
    gone: Mapping[str, str] = field(default_factory=dict)


EVERYONE = Comings()
"""All are here."""


class Program(Protocol):
    """What members follow: made of settings that the owner's rules accepted."""

    def begin(
        self, sites: tuple[str, ...], state: bytes, place: bytes, comings: Comings = EVERYONE
    ) -> Fit[Any]:
        """The fit of an epoch over these sites; ``state`` is empty in the first one.

        ``place`` are 32 bytes that nobody chose alone: the head of the chain after all hellos.
        """

    def extend(self, rounds: int | None) -> None:
        """Another limit on rounds from now on; None: that of the settings."""

    def state(self, reached: Any) -> bytes:
        """What the next epoch begins with; ``reached`` is None if nothing was."""

    def digest(self, reached: Any) -> bytes:
        """32 bytes that members agree on of what a fit came to."""


@runtime_checkable
class KnownRows(Protocol):
    """Rows of a site that is heard by itself."""

    @property
    def held(self) -> HeldRows:
        """The rows."""


@runtime_checkable
class CodedProgram(Protocol):
    """A program whose exchanges may be coded."""

    @property
    def seed(self) -> int:
        """The seed of the dithers."""

    @property
    def patience(self) -> int | None:
        """How often in a row a site may be missing before sums go on without its rows."""

    def drawn(self, ask: Any, sites: int) -> IntArray:
        """Which of so many sites take part in an exchange."""


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
class Pledge:
    """What a site's hello says of the noise of a private fit.

    Parameters
    ----------
    noise : bytes
        A commitment to its noise key and to its ledger; zeros: the fit is not private.
    charges : int
        How often that ledger was written.
    """

    noise: bytes = bytes(32)
    charges: int = 0

    @property
    def needs_all(self) -> bool:
        """Whether nobody may go on without this site: each adds its share of the noise."""
        return any(self.noise)


@final
@dataclass(frozen=True)
class PassPlace:
    """Where a fit has come to, as a site's owner looks at a pass over its rows.

    Parameters
    ----------
    settings : bytes
        The digest of the settings.
    rows : bytes
        What the site's rows are committed to.
    members : tuple of str
        The sites that add up.
    exchange : int
        How many sums of the epoch came before.
    masked : bool
        Whether the sum is masked.
    weight : float
        The weight of the rows of all sites; 0 as long as it is not known.
    """

    settings: bytes
    rows: bytes
    members: tuple[str, ...]
    exchange: int
    masked: bool
    weight: float = 0.0

    def digest(self) -> bytes:
        """Of settings, rows, sites and exchange, which are all that noise depends on here."""
        fields = (self.settings, self.rows, *(name.encode() for name in self.members))
        found = hashlib.sha256(b"emfed place" + self.exchange.to_bytes(8, "little"))
        for field_ in fields:
            found.update(len(field_).to_bytes(8, "little") + field_)
        return found.digest()


Look = Callable[[Rows, Ask, PassPlace], Rows]


def as_they_are(rows: Rows, ask: Ask, place: PassPlace) -> Rows:
    """Any ask may be of the rows themselves."""
    return rows


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
    before_pass : callable
        Called with an ask, the rows of all sites as far as they are known, and the transcript,
        before each pass over the rows. It refuses by raising `FederationError`.
    look : callable
        What an ask at a place of the fit is given of the rows.
    pledge : callable
        What is said of noise, once settings are accepted.
    """

    make: Callable[[Agreement], Program | None]
    smallest_set: int = 1
    largest_changes: int = 3
    spares: bool = True
    before_pass: Callable[[Ask, float, Transcript], None] = lambda ask, rows, about: None
    look: Look = as_they_are
    pledge: Callable[[], Pledge] = Pledge


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
class Holder:
    """A member: what it is, what it keeps, and what has become of it.

    Parameters
    ----------
    signer : Signer
        Its identity.
    nonce, run : bytes, RunKey
        Of this process alone.
    store : MemberStore
        Its disk.
    consent : Consent
        What its owner agrees to.
    rows : Rows, optional
        The rows of a site; None: an analyst.
    """

    signer: Signer
    nonce: bytes
    run: RunKey
    store: MemberStore
    consent: Consent
    rows: Rows | None
    states: dict[bytes, bytes] = field(default_factory=dict)
    """What it keeps by name, as the disk has it."""
    silent: dict[str, float] = field(default_factory=dict)
    """Sites that the relay has not heard of lately, and since when."""
    leaving: str = ""
    """Why this site leaves, if it does: it gives no part any more."""
    orders: list[tuple[str, str]] = field(default_factory=list)
    """What is to enter the transcript in its name, in order."""
    ended: Ended | None = None

    def __post_init__(self) -> None:
        self.states = self.states or self.store.states()

    @property
    def name(self) -> str:
        """Its name."""
        return self.signer.name

    @property
    def is_site(self) -> bool:
        """Whether it has rows."""
        return self.rows is not None

    def keep(self, name: bytes, state: bytes) -> None:
        """Keep something under a name, durable when the transaction ends."""
        self.states[name] = state
        self.store.keep_state(name, state)

    def leave(self, words: str) -> None:
        """Give no part any more, whether or not others hear that this site leaves."""
        if not self.leaving:
            logger.warning("%s leaves: %s", self.name, words)
            self.leaving = words

    def end(self, words: str, result: Any = None) -> None:
        """End, and not well."""
        self.ended = Ended(result, False, words)


@dataclass
class FitInProgress:
    """A fit in progress."""

    fit: Fit[Any]
    taken: int = 0
    """How many sums it was sent."""
    ask: Any = None
    returned: bool = False
    result: Any = None

    def begin(self) -> None:
        """Run to the first ask."""
        self.next(lambda: next(self.fit))

    def finish(self) -> None:
        """Let the fit return what it has reached."""
        if not self.returned:
            self.result = finished(self.fit, Finish("an analyst ended the fit"))
            self.returned, self.ask = True, None

    def next(self, step: Callable[[], Ask]) -> None:
        """Run to the next ask, or to the end."""
        self.ask = None
        try:
            self.ask = step()
        except StopIteration as end:
            self.returned, self.result = True, end.value


class FollowedFit(ABC):
    """One fit as a member follows it: what its sums are made of, and what is said of them.

    It hears each entry that the transcript has taken (`entered`), and says what is due.
    """

    followed: FitInProgress | None
    program: Program | None

    def __init__(self, me: Holder, about: Transcript) -> None:
        self.me, self.about = me, about
        self.program, self.followed = None, None
        self.broken = ""
        """What the fit raised, in words that are for this member alone."""

    @property
    def result(self) -> Any:
        """What the fit came to, if it returned."""
        return None if self.followed is None else self.followed.result

    def entered(self, kind: StatementKind, entry: Entry, place: int) -> None:
        """Act on an entry that the transcript has at this place."""
        try:
            self.follow(kind, entry, place)
        except Finish:
            self.broken = UNREACHED
        except EmfedError as error:
            self.broken = str(error)

    def end(self, words: str) -> None:
        """End, and not well."""
        self.me.end(words, self.result)

    @abstractmethod
    def follow(self, kind: StatementKind, entry: Entry, place: int) -> None:
        """Act on an entry, or raise what the fit raises."""

    @abstractmethod
    def begin(self) -> None:
        """Begin to follow, where all is there that it takes."""

    @abstractmethod
    def close(self) -> None:
        """The model is final, once this member has it."""

    @abstractmethod
    def job(self) -> Callable[[], Any] | None:
        """A pass over the rows that is to be made, if one is."""

    @abstractmethod
    def done(self, job: Callable[[], Any], found: Any) -> None:
        """Take what a job gave; it is ignored where the fit has gone on meanwhile."""

    def heard(self, author: str, message: bytes) -> None:
        """Take the part of a site, where this member is the adder."""
        return

    @property
    def awaited(self) -> int | None:
        """How many parts this member waits for, where it is the adder; None: not its business."""
        return None

    @abstractmethod
    def due(self, now: float) -> Iterator[tuple[Body, bytes]]:
        """What this member has to say about sums, and what goes along."""
