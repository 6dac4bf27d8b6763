"""Sums over sites: keys, masks that cancel, and the integers that carry them.

What is masked is rounded at steps, and worked out at parameters, that the server names. So masks
hide a site from a server that follows the protocol, and not from one that lies
(docs/what-the-server-learns.md).

Every two sites share a secret (X25519, one key a site and run, signed by the site's identity key,
whose public half the others pinned beforehand). What a site tells is a vector of integers modulo
2^b. It adds, for every other site of a set that the server names, a stream of ChaCha20 under a key
that both derive from their secret (HKDF): one of the two adds it, the other takes it off. The sum
over the whole set is the sum of what was told; any smaller sum is noise to whoever does not hold
the keys.

A sum takes two exchanges. First everyone who is asked works out its numbers, writes them down and
says that it is *ready*, with a fresh number. Then the server names the *set* of those who
are ready, with these numbers, and each of them answers masked. The key of a mask follows from all
of that (run, kind, round, request, set, fresh numbers), so

* a site that was told another set, or another request, has masks that do not cancel;
* no mask ever covers two plaintexts, even where an old disk was put back;
* a site decides once for which set its numbers count. It never answers the same request for a set
  that differs by fewer members than it wants a sum to have: the difference would be a sum, too.

So nobody's secrets are ever revealed, and there are no shares to keep. The price: a member that
vanishes must come back, or leave for good, and everybody counts how often that happens.

A fresh number need not be secret, only new. A process draws its first at random; after each set
that it answered it takes the one that follows from that set (`next_numbers`), once. Everybody who
knows the last set knows these, so that between members who stay neither the word that a site is
ready nor the set repeats them.
"""

from __future__ import annotations

import hashlib
import struct
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.utils import (
    decode_dss_signature,
    encode_dss_signature,
)
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from numpy.typing import NDArray

from emfed.core.errors import SettingsError, WireError
from emfed.core.privacy import Bits
from emfed.network.keys import (
    PrivateKey,
    PublicKey,
    make_private_key,
    read_private_key,
    sign,
    verify,
)
from emfed.network.roster import read_roster

Words = NDArray[Any]
"""Integers modulo 2^bits: machine words up to 64 bits, Python's integers beyond."""
SMALLEST_SET = 3
"""Sites in a sum, at least: of two, each knows the other's part."""
_SIGNED = b"emfed mask key 1\0"
SIGNATURE = 96
"""Bytes of a signature: two numbers of 384 bits."""
_ENTRY = struct.Struct("<IQ32s96sB")
_MEMBER = struct.Struct("<IQ")


@final
@dataclass(frozen=True, eq=False)
class SiteIdentity:
    """Who a site is among the others: its name and key, and the public keys that it pinned."""

    name: str
    key: PrivateKey
    roster: Mapping[str, PublicKey]

    @classmethod
    def read(cls, key: Path, roster: Path) -> SiteIdentity:
        """Read the site's NAME.key and a folder of the others' NAME.pub."""
        found = read_roster(roster)
        mine = read_private_key(key)
        known = found.get(key.stem)
        if known is not None and known != mine.public_key():
            raise SettingsError(
                f"{roster} holds another key of {key.stem} than {key}: after a new key was made, "
                f"say `emfed keys roster {key.stem}.pub --replace` here and at every other site."
            )
        if len(found) < SMALLEST_SET:
            raise SettingsError(
                f"{roster} holds {len(found)} public keys; a sum needs at least {SMALLEST_SET} "
                "sites: put everybody's NAME.pub there, each got by a way you trust."
            )
        return cls(key.stem, mine, found)

    @classmethod
    def everybody(cls, names: Iterable[str]) -> dict[str, SiteIdentity]:
        """New keys for all sites of a run in one process; everybody knows everybody's."""
        private = {name: make_private_key() for name in names}
        public = {name: key.public_key() for name, key in private.items()}
        return {name: cls(name, key, public) for name, key in private.items()}


@final
@dataclass(frozen=True)
class Announcement:
    """A site's key for one run, signed; ``name`` is that of its pinned identity."""

    name: str
    instance: int
    public: bytes
    signature: bytes

    def statement(self, run: int) -> bytes:
        """What the identity key signs."""
        front = _SIGNED + struct.pack("<QQ", run, self.instance)
        return front + self.public + self.name.encode()


def encode_roster(entries: Mapping[int, Announcement]) -> bytes:
    """Keys of a run by number of worker."""
    out = []
    for number, entry in sorted(entries.items()):
        name = entry.name.encode()
        fields = (number, entry.instance, entry.public, entry.signature, len(name))
        out.append(_ENTRY.pack(*fields) + name)
    return b"".join(out)


def decode_roster(body: bytes) -> dict[int, Announcement]:
    """The inverse of `encode_roster`; raises `WireError` for anything else."""
    found: dict[int, Announcement] = {}
    position = 0
    while position < len(body):
        if len(body) < position + _ENTRY.size:
            raise WireError("a roster ends inside an entry.")
        number, instance, public, signature, named = _ENTRY.unpack_from(body, position)
        start = position + _ENTRY.size
        position = start + named
        if len(body) < position:
            raise WireError("a roster ends inside an entry.")
        name = body[start:position].decode(errors="replace")
        found[number] = Announcement(name, instance, public, signature)
    return found


SetMembers = Mapping[int, int]
"""Who is in a sum, by number of worker, each with the fresh number that it was ready with."""


def encode_members(members: SetMembers) -> bytes:
    """The set that a server names."""
    return b"".join(_MEMBER.pack(number, fresh) for number, fresh in sorted(members.items()))


def decode_members(body: bytes) -> dict[int, int]:
    """The inverse of `encode_members`."""
    if len(body) % _MEMBER.size:
        raise WireError(f"a set of members cannot have {len(body)} bytes.")
    pairs = [_MEMBER.unpack_from(body, at) for at in range(0, len(body), _MEMBER.size)]
    if len({number for number, _ in pairs}) != len(pairs):
        raise WireError("a set names a member twice.")
    return dict(pairs)


_DIGEST = 4
"""Bytes by which a set that is named in short is known. A wrong guess has masks that do not cancel,
and nothing else."""
FOLLOWING_SET = _DIGEST
"""Bytes of a set that follows from the last one."""


def next_numbers(members: SetMembers) -> dict[int, int]:
    """The numbers with which the members of a set are ready next, if nobody's process ended."""
    told = b"emfed next numbers" + encode_members(members)
    whole = {n: hashlib.sha256(told + struct.pack("<I", n)).digest() for n in members}
    return {n: int.from_bytes(digest[:8], "little") for n, digest in whole.items()}


def encode_set(members: SetMembers, last: SetMembers | None = None) -> bytes:
    """A set for members who know the ``last``: who is ready with another number than the next."""
    if last is None or last.keys() != members.keys():
        return encode_members(members)
    due = next_numbers(last)
    return _set_digest(members) + encode_members({n: f for n, f in members.items() if due[n] != f})


def decode_set(body: bytes, told: Sequence[SetMembers], last: SetMembers) -> dict[int, int] | None:
    """The inverse of `encode_set`; None if it follows from another set than the ``last``.

    ``told`` are the sets for which this very answer was told: one of them may be named again.
    """
    if len(body) % _MEMBER.size != _DIGEST:
        return decode_members(body)
    digest, news = body[:_DIGEST], decode_members(body[_DIGEST:])
    known = [*map(dict, told), next_numbers(last) | news]
    return next((members for members in known if _set_digest(members) == digest), None)


def _set_digest(members: SetMembers) -> bytes:
    return hashlib.sha256(b"emfed set" + encode_members(members)).digest()[:_DIGEST]


@final
class RunKeys:
    """A site's key for one run, and its secrets with those of the others that it can verify.

    The key follows from the site's secret, the run and its instance there: it needs no file, and a
    site whose disk is gone has another.
    """

    def __init__(self, identity: SiteIdentity, secret: bytes, run: int, instance: int) -> None:
        self.identity, self._run = identity, run
        seed = _derive(secret, struct.pack("<QQ", run, instance), b"emfed run key")
        self._private = X25519PrivateKey.from_private_bytes(seed)
        public = self._private.public_key().public_bytes_raw()
        unsigned = Announcement(identity.name, instance, public, b"")
        signature = _fixed(sign(identity.key, unsigned.statement(run)))
        self.announcement = Announcement(identity.name, instance, public, signature)
        self._roster, self._peers = b"", dict[int, bytes]()
        self.names: dict[int, str] = {}
        """What the server calls the others: true of those whose keys were verified."""

    def learn(self, roster: bytes) -> None:
        """Take the keys of a run that the server passed on, as far as pinned keys signed them.

        A site counts once: under two numbers it would make a set look larger than it is, and with
        one key under two numbers its masks, added and taken off, would leave nothing masked.
        """
        if roster == self._roster:
            return
        peers, entries = {}, decode_roster(roster)
        self.names = {number: entry.name for number, entry in entries.items()}
        seen = Counter(told for e in entries.values() for told in (e.name, e.public))
        for number, entry in entries.items():
            pinned = self.identity.roster.get(entry.name)
            if entry.name == self.identity.name or pinned is None:
                continue
            if seen[entry.name] > 1 or seen[entry.public] > 1:
                continue
            if verify(pinned, _der(entry.signature), entry.statement(self._run)):
                known = X25519PublicKey.from_public_bytes(entry.public)
                peers[number] = self._private.exchange(known)
        self._roster, self._peers = roster, peers

    @property
    def sites(self) -> int:
        """This site and the others that it can verify: a server can't make them more."""
        return 1 + len(self._peers)

    def strangers(self, members: SetMembers, me: int) -> list[int]:
        """Members of a set other than this site that are no site that it knows, each one once."""
        return [number for number in members if number != me and number not in self._peers]

    def masked(
        self, words: Words, bits: int, me: int, members: SetMembers, context: bytes
    ) -> Words:
        """The words with the masks of this set, modulo 2^bits."""
        total = words.copy()
        for number in members:
            if number == me:
                continue
            pair = struct.pack("<II", *sorted((me, number)))
            key = _derive(self._peers[number], context, b"emfed mask" + pair)
            mask = _stream(key, len(words), bits)
            total = total + mask if me < number else total - mask
        return total & _ones(bits)


def context_of(about: bytes, members: SetMembers) -> bytes:
    """What the masks of one sum depend on: everything that was agreed about it, and who is in."""
    return hashlib.sha256(struct.pack("<I", len(about)) + about + encode_members(members)).digest()


def roster_size(names: Sequence[str]) -> int:
    """Bytes of `encode_roster` for workers of these names."""
    return sum(_ENTRY.size + len(name.encode()) for name in names)


MEMBER = _MEMBER.size
"""Bytes of each member in a set."""


def _fixed(der: bytes) -> bytes:
    """A signature in as many bytes as any other."""
    return b"".join(part.to_bytes(SIGNATURE // 2, "big") for part in decode_dss_signature(der))


def _der(signature: bytes) -> bytes:
    half = SIGNATURE // 2
    halves = (signature[:half], signature[half:])
    return encode_dss_signature(*(int.from_bytes(part, "big") for part in halves))


def _derive(secret: bytes, salt: bytes, purpose: bytes) -> bytes:
    return HKDF(hashes.SHA256(), 32, salt, purpose).derive(secret)


def _stream(key: bytes, count: int, bits: int) -> Words:
    """ChaCha20 under a key that is used once."""
    size = 8 if bits <= 64 else bits // 8
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return _read(cipher.update(bytes(size * count)), size)


def secret_words(key: bytes) -> Bits:
    """Random words that nobody can work out without the key: ChaCha20, word after word."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return lambda count: _read(cipher.update(bytes(8 * count)), 8)


def _read(data: bytes, size: int) -> Words:
    """Little-endian integers of so many bytes each."""
    if size == 8:
        return np.frombuffer(data, dtype="<u8").astype(np.uint64)
    starts = range(0, len(data), size)
    return np.array([int.from_bytes(data[at : at + size], "little") for at in starts], object)


def _ones(bits: int) -> Any:
    return np.uint64(2**bits - 1) if bits <= 64 else 2**bits - 1


def to_words(numbers: NDArray[Any], bits: int) -> Words:
    """Signed integers modulo 2^bits."""
    if bits > 64:
        return numbers & _ones(bits)
    return numbers.astype(np.int64).view(np.uint64) & _ones(bits)


def sum_words(parts: Sequence[Words], bits: int) -> NDArray[Any]:
    """The signed sum of what a whole set sent; it has less than 2^(bits - 1) in size."""
    total = sum(parts[1:], start=parts[0]) & _ones(bits)
    if bits > 64:
        return np.array([n - (n >> (bits - 1) << bits) for n in total.tolist()], object)
    shift = 64 - bits
    return (total << np.uint64(shift)).view(np.int64) >> np.int64(shift)


def packed_size(count: int, bits: int) -> int:
    """Bytes of so many words."""
    return -(-count * bits // 8)


def pack_words(words: Words, bits: int) -> bytes:
    """Words of so many bits each, one after the other, lowest bit first."""
    if bits > 64:
        return b"".join(int(word).to_bytes(bits // 8, "little") for word in words)
    bytes_ = words.astype("<u8").view(np.uint8).reshape(-1, 8)
    spread = np.unpackbits(bytes_, axis=1, count=bits, bitorder="little")
    return np.packbits(spread, bitorder="little").tobytes()


def unpack_words(data: bytes, count: int, bits: int) -> Words:
    """The inverse of `pack_words`."""
    if len(data) != packed_size(count, bits):
        raise WireError(
            f"{count} words of {bits} bits take {packed_size(count, bits)} bytes; got {len(data)}."
        )
    if bits > 64:
        return _read(data, bits // 8)
    flat = np.unpackbits(np.frombuffer(data, np.uint8), count=count * bits, bitorder="little")
    spread = np.zeros((count, 64), dtype=np.uint8)
    spread[:, :bits] = flat.reshape(count, bits)
    return _read(np.packbits(spread, bitorder="little").tobytes(), 8)


def check_set(members: SetMembers, smallest: int, before: Sequence[SetMembers]) -> str:
    """Why a site does not answer for this set, in words; empty if it does.

    ``before`` are the sets for which it has answered the same request: the same again is the same
    answer, and one other may differ by as many members as a sum must have.
    """
    if len(members) < smallest:
        return f"a sum that this site is in has at least {smallest} sites."
    if not before or any(dict(members) == dict(told) for told in before):
        return ""
    for told in before:
        apart = {n for n in {*members, *told} if members.get(n) != told.get(n)}
        if len(apart) < smallest:
            return "this was answered for a set that hardly differs: the difference would tell."
    return "" if len(before) == 1 else "this was answered for two sets already."
