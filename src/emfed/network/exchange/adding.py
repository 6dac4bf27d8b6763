"""What a member makes of its secrets and of the transcript for one sum."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

from emfed.aggregation.keys import (
    Context,
    GroupSecrets,
    Member,
    MemberKeys,
    RunKey,
    seal,
    unseal,
)
from emfed.aggregation.lattice import Lattice
from emfed.aggregation.masks import Part
from emfed.core.errors import WireError
from emfed.core.sums import Ask, FloatArray
from emfed.network.exchange.statements import Hello, SealedSecrets, Signer
from emfed.network.exchange.transcript import Transcript

RELEASE = "0.2"
"""The protocol's, in every context: another one has other keys."""


@final
@dataclass(frozen=True)
class PlacedAsk:
    """An ask in its place of the fit, as the keys of its sum see it."""

    ask: Ask
    exchange: int
    attempt: int

    @property
    def lattice(self) -> Lattice:
        """How its numbers become integers."""
        return Lattice.placed(self.ask, self.exchange, self.attempt)


@final
@dataclass(frozen=True)
class EpochKeys:
    """All that a member keeps secret in one epoch.

    One site draws the group secrets from its identity key and the place where the epoch
    begins. So they are drawn anew in every epoch, and are there again after any crash: were they
    in memory alone, all members killed at once could read none of the sums so far.
    """

    name: str
    run: RunKey
    members: tuple[str, ...]
    """The set of the epoch."""
    group: GroupSecrets
    state: bytes = field(repr=False)
    """The fit's state at the beginning of the epoch."""

    @classmethod
    def drawn(cls, signer: Signer, run: RunKey, about: Transcript, state: bytes) -> EpochKeys:
        """Of the site that draws them (`Transcript.drawer`)."""
        place = about.heads[about.began]
        pad, tag = (signer.secret(b"emfed epoch " + what + place) for what in (b"pad", b"tag"))
        return cls(signer.name, run, about.members, GroupSecrets(pad, tag), state)

    def sealed(
        self, signer: Signer, place: bytes, to: Mapping[str, Hello], readers: set[str]
    ) -> tuple[tuple[str, bytes], ...]:
        """These secrets for each of these members; readers do not get that of the tags."""
        return tuple(
            (name, seal(self._pair(signer, hello, place), self._told(name in readers), place))
            for name, hello in to.items()
        )

    def _told(self, reader: bool) -> bytes:
        group = self.group.for_analyst() if reader else self.group
        return bytes([reader]) + group.encode() + self.state

    def _pair(self, signer: Signer, hello: Hello, place: bytes) -> bytes:
        if hello.key == self.run.public:
            return own_pair(signer, place)
        return self.run.pair(hello.key)

    @classmethod
    def opened(
        cls, signer: Signer, run: RunKey, about: Transcript, drawer: str, body: SealedSecrets
    ) -> EpochKeys | None:
        """Those that a site sealed to this process at the end of the transcript, if it did."""
        sealed = dict(body.sealed).get(signer.name)
        if sealed is None:
            return None
        place = about.heads[about.began]
        try:
            itself = drawer == signer.name
            pair = own_pair(signer, place) if itself else run.pair(about.hellos[drawer].key)
            told = unseal(pair, sealed, place)
            if bool(told[0]) != (signer.name in about.agreement.analysts):
                return None  # a site without the secret of tags would believe every sum
            size = 32 if told[0] else 64
            group = GroupSecrets.decode(told[1 : 1 + size])
        except (WireError, IndexError):
            return None
        return cls(signer.name, run, about.members, group, told[1 + size :])

    def kept(self, signer: Signer, place: bytes) -> bytes:
        """Those of an analyst for its own disk: sites may be gone when it comes back."""
        return seal(own_pair(signer, place), self._told(reader=True), place)

    @classmethod
    def of_disk(
        cls, signer: Signer, run: RunKey, about: Transcript, sealed: bytes
    ) -> EpochKeys | None:
        """The inverse of `kept`; None if another identity kept them."""
        place = about.heads[about.began]
        try:
            told = unseal(own_pair(signer, place), sealed, place)
        except WireError:
            return None
        group = GroupSecrets.decode(told[1:33])
        return cls(signer.name, run, about.members, group, told[33:])

    def part(self, about: Transcript, question: PlacedAsk, values: FloatArray) -> Part:
        """This site's part of a sum at the end of the transcript."""
        hellos = about.hellos_at(len(about))
        pairs = {n: self.run.pair(hellos[n].key) for n in self.members if n != self.name}
        keys = MemberKeys(self.name, self.group, pairs)
        make = keys.masking if about.agreement.masked else keys.plain
        return make(self._context(about, question, len(about)), question.lattice).part(values)

    def opened_sum(
        self, about: Transcript, question: PlacedAsk, place: int, part: Part
    ) -> FloatArray | None:
        """A sum that stands at this place; None if its tag is wrong."""
        keys, context = MemberKeys(self.name, self.group), self._context(about, question, place)
        if self.group.tag and part.state != keys.digest(context):
            return None  # of sites that are elsewhere in the fit
        return keys.opener(context, question.lattice, about.agreement.masked).open(part)

    def _context(self, about: Transcript, question: PlacedAsk, place: int) -> Context:
        hellos = about.hellos_at(place)
        return Context(
            about.settings,
            RELEASE,
            tuple(Member(n, hellos[n].nonce, hellos[n].rows) for n in self.members),
            question.exchange,
            question.attempt,
            about.heads[place],
            question.ask.digest(about.heads[place]),
        )


def own_pair(signer: Signer, place: bytes) -> bytes:
    """A secret of the first site with itself, so that it can read its own epoch after a crash."""
    return signer.secret(b"emfed own " + place)
