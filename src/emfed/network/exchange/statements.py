"""The wire format: what members sign, entries of the transcript, and the relay's hand-outs.

All integers are little-endian; ``hash`` is 32 bytes, ``blob`` a u32 length and so many bytes,
``name`` and ``text`` a u16 length and UTF-8, ``names`` a u16 count and names.

From a member to the relay, `Post`: name author | u32 length | 8 bytes of head | u8 kind | blob body
| blob signature | blob payload. ``length`` and ``head`` say how far the author's chain goes, so
that the relay answers with what is missing; the signature is over kind, author and body.

========== ============================================================ ===========================
kind       body                                                         who, when
========== ============================================================ ===========================
FETCH      (empty)                                                      anybody, every few seconds
OFFER      u32 first, u16 count, entries                                a member with more than the
                                                                        relay; not signed apart
SETTINGS   blob document (canonical JSON)                               an analyst, once
HELLO      hash settings, 16 nonce, 32 run key, hash rows, u32 length,  a process, first of all
           hash head, u8 spares, hash noise, u32 charges
SECRETS    hash head, u32 epoch, u16 count, (name, blob sealed)         a site that has them
PART       hash head, u32 exchange, u8 attempt, 8 state, hash part      a site, once a context
NOSUM      hash head, u32 exchange, u8 attempt                          a site whose sum's tag fails
CHANGE     hash head, u32 exchange, names leaving, names coming         those who stay
CONFIRM    hash head, u32 exchange, hash result                         a site whose fit returned
ORDER      hash settings, u32 number, text word, text argument          an analyst; "leave": a site
FAULT      hash head, text words                                        a member that cannot go on
TOLD       hash head, u32 exchange, blob told                           the adder of coded sums
========== ============================================================ ===========================

A PART's body is not sent: its post holds ``u32 exchange, u8 attempt`` and, as ``payload``, the part
itself (`emfed.aggregation.masks.Part`), from which the relay makes the body that was signed.

In the transcript, an entry: u8 kind | u16 count | statements (name author, u8 kind, blob body, blob
signature) | blob added. An entry holds one statement, or those of a whole set (NOSUM, CHANGE,
CONFIRM, and in a DIFFER the PARTs that cannot be added), or what the relay added up: u32 exchange,
u8 attempt, and the sum as a blob, in the form of a part. ``head(t + 1) = SHA-256(head(t),
contents)`` where contents are the entry without its signatures.

From the relay to a member, `HandOut`: u32 first | 8 bytes of head before it | u32 total | names
silent | u8 wants | u16 count | entries | u16 count | parts, which are the posts of sites as they
came, to the adder alone.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Callable, Mapping
from dataclasses import Field, dataclass, fields
from enum import IntEnum
from typing import Annotated, Any, ClassVar, Protocol, Self, final, get_type_hints

from emfed.core.errors import WireError
from emfed.core.wire.text import as_json, read_json

LARGEST_MESSAGE = 1 << 26
"""Bytes: a longer message is refused before it is read. 64 MiB are 4 million numbers of 128
bits."""
LONGEST_TEXT = 1 << 10
"""Bytes of a name, or of words for people, which are cut: others' terminals show them."""
START = bytes(32)
"""The head of an empty transcript."""
_SIGNED = b"emfed statement 2\0"


class StatementKind(IntEnum):
    """What a statement is; entries have the kind of the statements that they hold."""

    FETCH = 0
    OFFER = 1
    SETTINGS = 2
    HELLO = 3
    SECRETS = 4
    PART = 5
    NOSUM = 6
    CHANGE = 7
    CONFIRM = 8
    ORDER = 9
    FAULT = 10
    SUM = 11
    DIFFER = 12
    TOLD = 13


@final
class Reader:
    """Takes bytes from the front; every shortage is a `WireError`."""

    def __init__(self, data: bytes) -> None:
        if len(data) > LARGEST_MESSAGE:
            raise WireError(f"a message of {len(data)} bytes; at most {LARGEST_MESSAGE} are read.")
        self._data, self._at = data, 0

    def take(self, count: int) -> bytes:
        """So many bytes."""
        if count > len(self._data) - self._at:
            raise WireError(
                f"a message ends at byte {len(self._data)}, inside a field of {count} bytes."
            )
        self._at += count
        return self._data[self._at - count : self._at]

    def integer(self, size: int) -> int:
        """An unsigned integer of so many bytes."""
        return int.from_bytes(self.take(size), "little")

    def end(self) -> None:
        """Refuse what is left over."""
        if self._at != len(self._data):
            raise WireError(f"{len(self._data) - self._at} bytes too many at the end of a message.")


@dataclass(frozen=True)
class _Form:
    """How a field is written and read."""

    write: Callable[[Any], bytes]
    read: Callable[[Reader], Any]


def _integer(size: int) -> _Form:
    return _Form(lambda value: value.to_bytes(size, "little"), lambda r: r.integer(size))


def _fixed(size: int) -> _Form:
    def write(value: bytes) -> bytes:
        if len(value) != size:
            raise WireError(f"a field of {size} bytes cannot hold {len(value)}.")
        return value

    return _Form(write, lambda r: r.take(size))


def _read_text(reader: Reader) -> str:
    try:
        text = reader.take(reader.integer(2)).decode()
    except UnicodeDecodeError:
        raise WireError("a text that is not UTF-8.") from None
    if text != as_text(text):
        raise WireError("a text that is too long, or has characters that no terminal should get.")
    return text


def as_text(value: str) -> str:
    """The words as they travel: without control characters, and cut to `LONGEST_TEXT`."""
    clean = "".join(c if c.isprintable() else " " for c in value[:LONGEST_TEXT])
    return clean.encode()[:LONGEST_TEXT].decode(errors="ignore")


def _write_text(value: str) -> bytes:
    data = as_text(value).encode()
    return len(data).to_bytes(2, "little") + data


_TEXT = _Form(_write_text, _read_text)
_BLOB = _Form(
    lambda value: len(value).to_bytes(4, "little") + value, lambda r: r.take(r.integer(4))
)


def _several(*forms: _Form) -> _Form:
    """A u16 count and so many tuples of these forms; a single form gives plain values."""

    def write(values: Any) -> bytes:
        rows = values if len(forms) > 1 else [(value,) for value in values]
        parts = [len(rows).to_bytes(2, "little")]
        parts += [form.write(v) for row in rows for form, v in zip(forms, row, strict=True)]
        return b"".join(parts)

    def read(reader: Reader) -> Any:
        rows = [tuple(form.read(reader) for form in forms) for _ in range(reader.integer(2))]
        return tuple(rows) if len(forms) > 1 else tuple(row[0] for row in rows)

    return _Form(write, read)


Hash = Annotated[bytes, _fixed(32)]
Nonce = Annotated[bytes, _fixed(16)]
HashStart = Annotated[bytes, _fixed(8)]
Blob = Annotated[bytes, _BLOB]
Text = Annotated[str, _TEXT]
Small = Annotated[int, _integer(1)]
Count = Annotated[int, _integer(4)]
NameList = Annotated[tuple[str, ...], _several(_TEXT)]
SealedTo = Annotated[tuple[tuple[str, bytes], ...], _several(_TEXT, _BLOB)]
Blobs = Annotated[tuple[bytes, ...], _several(_BLOB)]


_FORMS: dict[str, list[tuple[str, _Form]]] = {}


def _forms(kind: type[Packed]) -> list[tuple[str, _Form]]:
    """The names and forms of a dataclass's fields, in order."""
    if kind.__name__ not in _FORMS:
        hints = get_type_hints(kind, include_extras=True)
        names = [each.name for each in fields(kind)]
        _FORMS[kind.__name__] = [(name, hints[name].__metadata__[0]) for name in names]
    return _FORMS[kind.__name__]


class Packed:
    """A dataclass whose fields say how they are written."""

    __dataclass_fields__: ClassVar[dict[str, Field[Any]]]

    def encode(self) -> bytes:
        """The only bytes that decode to this."""
        return b"".join(form.write(getattr(self, name)) for name, form in _forms(type(self)))

    @classmethod
    def decode(cls, data: bytes) -> Self:
        """The inverse of `encode`; raises `WireError` for anything else."""
        reader = Reader(data)
        found = cls(**{name: form.read(reader) for name, form in _forms(cls)})
        reader.end()
        return found


@final
@dataclass(frozen=True)
class Document(Packed):
    """The settings that an analyst signs."""

    KIND: ClassVar = StatementKind.SETTINGS
    text: Blob


@final
@dataclass(frozen=True)
class Hello(Packed):
    """The first message of a process."""

    KIND: ClassVar = StatementKind.HELLO
    settings: Hash
    nonce: Nonce
    key: Hash
    """The run key, X25519, of this process."""
    rows: Hash
    """What the author's rows are committed to; zeros of an analyst."""
    length: Count
    head: Hash
    """The author's chain, whose last entries may be lost."""
    spares: Small
    """1 if its owner lets others go on without it."""
    noise: Hash
    """What the author's noise key and ledger are committed to, in a private fit; else zeros."""
    charges: Count
    """How often that ledger was written: never less than before."""


@final
@dataclass(frozen=True)
class SealedSecrets(Packed):
    """Secrets of an epoch, sealed to the processes that lack them."""

    KIND: ClassVar = StatementKind.SECRETS
    head: Hash
    epoch: Count
    sealed: SealedTo


@final
@dataclass(frozen=True)
class SignedPart(Packed):
    """That a part is the author's."""

    KIND: ClassVar = StatementKind.PART
    head: Hash
    exchange: Count
    attempt: Small
    state: HashStart
    """What the part is about: a digest that the relay cannot compute."""
    part: Hash


@final
@dataclass(frozen=True)
class NoSum(Packed):
    """The author took no sum of this attempt."""

    KIND: ClassVar = StatementKind.NOSUM
    head: Hash
    exchange: Count
    attempt: Small


@final
@dataclass(frozen=True)
class SetChange(Packed):
    """Who leaves the set and who comes, signed by all who stay."""

    KIND: ClassVar = StatementKind.CHANGE
    head: Hash
    exchange: Count
    """How many sums of this epoch those who stay have taken."""
    leaving: NameList
    coming: NameList


@final
@dataclass(frozen=True)
class Confirmation(Packed):
    """The author's fit has returned with this chain."""

    KIND: ClassVar = StatementKind.CONFIRM
    head: Hash
    exchange: Count
    result: Hash


@final
@dataclass(frozen=True)
class SignedOrder(Packed):
    """What an analyst wants to happen at this place."""

    KIND: ClassVar = StatementKind.ORDER
    settings: Hash
    number: Count
    word: Text
    argument: Text


@final
@dataclass(frozen=True)
class Fault(Packed):
    """Why the author cannot go on; it ends the fit for all."""

    KIND: ClassVar = StatementKind.FAULT
    head: Hash
    words: Text


@final
@dataclass(frozen=True)
class SignedSum(Packed):
    """What the adder tells everyone of an exchange whose parts are coded."""

    KIND: ClassVar = StatementKind.TOLD
    head: Hash
    exchange: Count
    told: Blob


@final
@dataclass(frozen=True)
class Added(Packed):
    """What the relay added up."""

    exchange: Count
    attempt: Small
    part: Blob


@final
@dataclass(frozen=True)
class Turn(Packed):
    """What is sent of a `SignedPart`."""

    exchange: Count
    attempt: Small


Body = (
    Document
    | Hello
    | SealedSecrets
    | SignedPart
    | NoSum
    | SetChange
    | Confirmation
    | SignedOrder
    | Fault
    | SignedSum
)
BODIES: Mapping[StatementKind, type[Body]] = {
    kind.KIND: kind
    for kind in (
        *(Document, Hello, SealedSecrets, SignedPart, NoSum),
        *(SetChange, Confirmation, SignedOrder, Fault, SignedSum),
    )
}


class Signer(Protocol):
    """Who signs, and whose signatures are known."""

    @property
    def name(self) -> str:
        """The member's name."""

    def sign(self, message: bytes) -> bytes:
        """A signature by this member's identity key."""

    def secret(self, purpose: bytes) -> bytes:
        """32 bytes that follow from the identity key and that no one else can compute."""


class Roster(Protocol):
    """The members' public keys."""

    def verify(self, name: str, message: bytes, signature: bytes) -> bool:
        """Whether the member of this name signed the message."""

    def __contains__(self, name: str) -> bool: ...


@final
@dataclass(frozen=True)
class Statement(Packed):
    """A body with its author's signature."""

    author: Text
    kind: Small
    body: Blob
    signature: Blob

    @classmethod
    def by(cls, signer: Signer, body: Body) -> Statement:
        """Sign."""
        bare = cls(signer.name, body.KIND, body.encode(), b"")
        return cls(bare.author, bare.kind, bare.body, signer.sign(bare.message()))

    def message(self) -> bytes:
        """What is signed."""
        return _SIGNED + self.contents()

    def contents(self) -> bytes:
        """All but the signature."""
        return Statement(self.author, self.kind, self.body, b"").encode()

    def read(self, roster: Roster) -> Body:
        """The body, if its author signed it."""
        if self.kind not in BODIES:
            raise WireError(f"a statement of the unknown kind {self.kind}.")
        if self.author not in roster or not roster.verify(
            self.author, self.message(), self.signature
        ):
            raise WireError(f"a statement that {self.author!r} did not sign.")
        return BODIES[StatementKind(self.kind)].decode(self.body)


_statement = _Form(
    Statement.encode, lambda r: Statement(**{n: f.read(r) for n, f in _forms(Statement)})
)
Statements = Annotated[tuple[Statement, ...], _several(_statement)]


@final
@dataclass(frozen=True)
class Entry(Packed):
    """One entry of the transcript."""

    kind: Small
    statements: Statements
    added: Blob

    @classmethod
    def of(cls, *statements: Statement) -> Entry:
        """An entry of statements of one kind."""
        return cls(statements[0].kind, statements, b"")

    @classmethod
    def sum(cls, added: Added) -> Entry:
        """An entry of a sum."""
        return cls(StatementKind.SUM, (), added.encode())

    def after(self, head: bytes) -> bytes:
        """The head of the chain with this entry; signatures are not in it."""
        bare = b"".join(_BLOB.write(one.contents()) for one in self.statements)
        contents = struct.pack("<BH", self.kind, len(self.statements)) + bare + self.added
        return hashlib.sha256(b"emfed entry 2\0" + head + contents).digest()


@final
@dataclass(frozen=True)
class Post(Packed):
    """What a member sends to the relay."""

    author: Text
    length: Count
    head: HashStart
    kind: Small
    body: Blob
    signature: Blob
    payload: Blob = b""

    @property
    def statement(self) -> Statement:
        """What is signed in it."""
        return Statement(self.author, self.kind, self.body, self.signature)


def is_post_of(name: str, data: bytes) -> bool:
    """Whether a message begins as a post of this member does."""
    return data.startswith(_write_text(name))


@final
@dataclass(frozen=True)
class Offer(Packed):
    """Entries that a relay lacks."""

    first: Count
    entries: Blobs


@final
@dataclass(frozen=True)
class HandOut(Packed):
    """What the relay sends to a member."""

    first: Count
    head: HashStart
    """Of the chain before the first entry: 8 bytes, which is enough to notice another list."""
    total: Count
    silent: NameList
    """Sites of the set that the relay has not heard of lately."""
    wants: Small
    """1 if the relay has less than the member said that it has."""
    entries: Blobs
    parts: Blobs = ()


@final
@dataclass(frozen=True)
class Agreement:
    """What all members agree on: the settings, as far as this exchange needs to know them.

    Parameters
    ----------
    sites, analysts : tuple of str
        NameList; sites in the order of the set.
    masked : bool
        Whether parts are masked; needs three sites.
    wait : float
        Seconds that others wait for a site that is away.
    newcomers : bool
        Whether sites may come after the beginning.
    run : str
        A name that no other run has, of the analyst's choice: what is signed for one fit is
        nothing in another one of equal settings.
    program : mapping
        What is fitted, in words: opaque here.
    title : str
        What the analyst calls the run, for people and names of files.
    coded : bool
        Whether the first analyst adds what sites send coded, heard one by one; not under masks.
    """

    sites: tuple[str, ...]
    analysts: tuple[str, ...]
    masked: bool = True
    wait: float = 180.0
    newcomers: bool = True
    run: str = ""
    program: Mapping[str, Any] | None = None
    title: str = ""
    coded: bool = False

    @property
    def adder(self) -> str:
        """Who adds coded parts."""
        return self.analysts[0] if self.coded and self.analysts else ""

    def document(self) -> Document:
        """Canonical JSON."""
        about = {
            "release": 2,
            "sites": self.sites,
            "analysts": self.analysts,
            "masked": self.masked,
            "wait": self.wait,
            "newcomers": self.newcomers,
            "run": self.run,
            "program": self.program,
            "title": self.title,
            "coded": self.coded,
        }
        return Document(as_json(about).encode())

    @classmethod
    def read(cls, document: Document) -> Agreement:
        """The inverse of `document`; refuses other JSON, and other ways to write it."""
        try:
            about = read_json(document.text.decode())
            if about.pop("release") != 2:
                raise WireError("settings of another release of emfed: all must run the same one.")
            sites, analysts = (tuple(map(str, about.pop(n))) for n in ("sites", "analysts"))
            found = cls(sites, analysts, **about)
            good = found.document() == document and _has_kinds(vars(found))
        except (ValueError, KeyError, TypeError) as error:
            if isinstance(error, WireError):
                raise
            raise WireError(f"settings that cannot be read: {error}") from None
        everyone = found.sites + found.analysts
        if not good or len(set(everyone)) < len(everyone) or not found.sites:
            raise WireError("settings that are not as emfed writes them, or name a member twice.")
        if list(found.sites) != sorted(found.sites):
            raise WireError("settings name sites in alphabetical order: it is that of the set.")
        return found


def start_of(message: bytes) -> bytes:
    """What stands for the state in the signature of a coded part."""
    return message[:8].ljust(8, b"\0")


def is_coded(masked: bool, program: Mapping[str, Any]) -> bool:
    """Whether sites of such a fit are heard one by one: those without masks and noise are.

    A table of cells is one exact sum, and needs no memories.
    """
    fit = program.get("fit")
    return not masked and isinstance(fit, Mapping) and "epsilon" not in fit


def _has_kinds(about: Mapping[str, Any]) -> bool:
    """Whether settings that another member wrote have values of the right kinds."""
    truths = all(isinstance(about[name], bool) for name in ("masked", "newcomers", "coded"))
    wait, program = about["wait"], about["program"]
    words = all(isinstance(about[name], str) for name in ("run", "title"))
    words &= program is None or isinstance(program, dict)
    return truths and words and type(wait) in (int, float) and wait >= 0
