"""Keys of masked sums: everything follows from a secret and the whole context of one sum.

A context names all that was agreed before a sum: settings, release, the members with their
processes and rows, the place in the fit, and every sum before. Another context has other keys, so
no mask ever covers two messages, and sites that were shown different things have masks that do not
cancel. Inside one context a site sends one message: what it sent is written before it leaves.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import final

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from emfed.aggregation.integers import Integers, add, high_bits, negative
from emfed.aggregation.lattice import DIGEST_BYTES, SMALLEST_SET, TAG_BYTES, Lattice
from emfed.aggregation.masks import MODULUS, Masking, Opener, TagKey
from emfed.core.errors import SettingsError, WireError

SECRET_BYTES = 32
"""Bytes of a secret, a public key and a key."""
_NONCE_BYTES = 12
"""Bytes of a nonce of ChaCha20-Poly1305."""


def _derive(secret: bytes, context: bytes, purpose: bytes) -> bytes:
    return HKDF(hashes.SHA256(), SECRET_BYTES, context, b"emfed 2 " + purpose).derive(secret)


def _fields(*fields: bytes) -> bytes:
    """Byte strings, each with its length: no two lists of them are the same bytes."""
    return b"".join(struct.pack("<Q", len(each)) + each for each in fields)


@final
@dataclass(frozen=True)
class Member:
    """One site of a set, as its newest hello and its opening describe it.

    Parameters
    ----------
    name : str
        Its name.
    nonce : bytes
        What its process drew when it started.
    rows : bytes
        The salted digest of its rows, from its signed opening.
    """

    name: str
    nonce: bytes
    rows: bytes


@final
@dataclass(frozen=True)
class Context:
    """All that keys of one sum depend on, besides secrets and the lattice; and its state.

    What is asked follows from the settings and the chain, so keys need no more. Sites compare what
    each has come to: their processors may round otherwise.

    Parameters
    ----------
    settings : bytes
        The digest of the settings that the analyst signed.
    release : str
        The release of the protocol.
    members : tuple of Member
        The sites of the set, by name. The first one adds the pad.
    exchange : int
        The number of the sum in the fit.
    attempt : int
        0, and one more each time that the sum is asked again with more bits.
    head : bytes
        The head of the chain of all sums and events so far.
    state : bytes
        The digest of what is asked (`Ask.digest`): no key depends on it.

    Examples
    --------
    >>> from dataclasses import replace
    >>> members = tuple(Member(name, bytes(16), bytes(32)) for name in ("a", "b", "c"))
    >>> context = Context(bytes(32), "0.2", members, 1, 0, bytes(32), bytes(16))
    >>> context.digest() == replace(context, attempt=1).digest()
    False
    """

    settings: bytes
    release: str
    members: tuple[Member, ...]
    exchange: int
    attempt: int
    head: bytes
    state: bytes

    def __post_init__(self) -> None:
        names = self.names
        if names != sorted(set(names)):
            raise WireError(f"a set names each site once, in order; got {', '.join(names)}.")

    @property
    def names(self) -> list[str]:
        """The sites of the set."""
        return [member.name for member in self.members]

    def digest(self) -> bytes:
        """The digest of all but the state."""
        members = [_fields(m.name.encode(), m.nonce, m.rows) for m in self.members]
        about = _fields(
            self.settings,
            self.release.encode(),
            _fields(*members),
            struct.pack("<QQ", self.exchange, self.attempt),
            self.head,
        )
        return hashlib.sha256(b"emfed 2 context" + about).digest()


@final
class RunKey:
    """The key of one process, drawn when it starts and kept in memory only."""

    def __init__(self, private: X25519PrivateKey | None = None) -> None:
        self._private = private or X25519PrivateKey.generate()
        self.public = self._private.public_key().public_bytes_raw()
        self._pairs: dict[bytes, bytes] = {}

    def pair(self, public: bytes) -> bytes:
        """The secret that this process shares with the one of another public key."""
        if public in self._pairs:
            return self._pairs[public]
        if public == self.public:
            raise WireError("another member shows this process's own run key.")
        try:
            shared = self._private.exchange(X25519PublicKey.from_public_bytes(public))
        except ValueError as error:
            raise WireError("a member's run key is no point of X25519 that can be used.") from error
        self._pairs[public] = _derive(shared, b"".join(sorted([self.public, public])), b"pair")
        return self._pairs[public]


def check_run_key(public: bytes) -> None:
    """Refuse a run key that gives the same secret with every other one."""
    RunKey(X25519PrivateKey.from_private_bytes(bytes([1] * SECRET_BYTES))).pair(public)


def seal(pair: bytes, message: bytes, about: bytes) -> bytes:
    """Seal a message to whoever shares the pair secret; ``about`` must be the same at both."""
    nonce = os.urandom(_NONCE_BYTES)
    return nonce + ChaCha20Poly1305(_derive(pair, about, b"seal")).encrypt(nonce, message, about)


def unseal(pair: bytes, sealed: bytes, about: bytes) -> bytes:
    """The inverse of `seal`; raises `WireError` for anything else."""
    nonce, body = sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:]
    try:
        return ChaCha20Poly1305(_derive(pair, about, b"seal")).decrypt(nonce, body, about)
    except (InvalidTag, ValueError) as error:
        raise WireError("a sealed message was not made by this member for this place.") from error


@final
@dataclass(frozen=True)
class GroupSecrets:
    """The secrets of one epoch, drawn by the first site of the set.

    Parameters
    ----------
    pad : bytes
        Known to sites and analysts: what hides sums from the relay.
    tag : bytes
        Known to sites alone: what shows forged sums. Empty at an analyst.
    """

    pad: bytes = field(repr=False)
    tag: bytes = field(repr=False)

    @classmethod
    def draw(cls) -> GroupSecrets:
        """New secrets."""
        return cls(os.urandom(SECRET_BYTES), os.urandom(SECRET_BYTES))

    def for_analyst(self) -> GroupSecrets:
        """The same without the secret of tags."""
        return GroupSecrets(self.pad, b"")

    def hidden(self, digest: bytes, place: bytes) -> bytes:
        """A digest that only those who have these secrets can compare with a guess."""
        return hmac.digest(_derive(self.pad, place, b"result"), digest, "sha256")

    def encode(self) -> bytes:
        """What is sealed to a member."""
        return self.pad + self.tag

    @classmethod
    def decode(cls, data: bytes) -> GroupSecrets:
        """The inverse of `encode`."""
        if len(data) not in (SECRET_BYTES, 2 * SECRET_BYTES):
            raise WireError(f"secrets of a set cannot have {len(data)} bytes.")
        return cls(data[:SECRET_BYTES], data[SECRET_BYTES:])


@final
@dataclass(frozen=True)
class MemberKeys:
    """The secrets of one member in one epoch, and all that follows from them.

    Parameters
    ----------
    name : str
        The member.
    group : GroupSecrets
        Those of the set.
    pairs : mapping of str to bytes
        The secret with each other site's process (`RunKey.pair`); of an analyst none is used.
    """

    name: str
    group: GroupSecrets
    pairs: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def opener(self, context: Context, lattice: Lattice, masked: bool = True) -> Opener:
        """What opens the sum, and checks it where this member is a site."""
        about = _about(context, lattice, masked)
        pad = np.zeros((lattice.size, lattice.words), dtype=np.uint64)
        if masked:
            pad = _stream(_derive(self.group.pad, about, b"pad"), lattice)[1]
            pad &= high_bits(lattice.words, lattice.bits)
        return Opener(lattice, pad, self._tag_key(about, lattice) if self.group.tag else None)

    def masking(self, context: Context, lattice: Lattice) -> Masking:
        """What masks this site's part of a sum over three sites or more."""
        if len(context.members) < SMALLEST_SET:
            raise SettingsError(
                f"a masked sum needs at least {SMALLEST_SET} sites; got {len(context.members)}."
            )
        return self._masking(context, lattice, masked=True)

    def plain(self, context: Context, lattice: Lattice) -> Masking:
        """The same without masks and pad, for two sites or where every owner allows it."""
        return self._masking(context, lattice, masked=False)

    def _masking(self, context: Context, lattice: Lattice, masked: bool) -> Masking:
        names = context.names
        unknown = [name for name in names if name != self.name and name not in self.pairs]
        if self.name not in names or unknown or not self.group.tag:
            raise WireError(f"{self.name} has no keys for the set {', '.join(names)}.")
        opener = self.opener(context, lattice, masked)
        about = _about(context, lattice, masked)
        taken, given = (np.zeros((lattice.size, lattice.words), np.uint64) for _ in range(2))
        first = self.name == names[0]
        blind = opener.tag.pad if first and opener.tag else 0
        for name in names:
            if name == self.name:
                continue
            pair = _fields(*sorted([name.encode(), self.name.encode()]))
            pad, words = _stream(_derive(self.pairs[name], about, b"mask" + pair), lattice)
            blind += pad if self.name < name else -pad
            if masked and self.name < name:
                taken = add(taken, words)
            elif masked:
                given = add(given, words)
        masks = add(taken, negative(given))
        return Masking(opener, masks, blind % MODULUS, masked and first, self.digest(context))

    def digest(self, context: Context) -> bytes:
        """Of the state, for sites to compare: the relay sees whether two are equal, and no more."""
        key = _derive(self.group.tag, context.digest(), b"state")
        return hmac.digest(key, context.state, "sha256")[:DIGEST_BYTES]

    def _tag_key(self, about: bytes, lattice: Lattice) -> TagKey:
        key = _derive(self.group.tag, about, b"tag")
        data = _chacha(key, TAG_BYTES * (1 + lattice.size))
        factors = np.frombuffer(data, dtype="<u8").astype(np.uint64).reshape(-1, 2)
        factors[:, 1] >>= np.uint64(1)  # 127 bits
        return TagKey(factors[1:], int(factors[0, 0]) | int(factors[0, 1]) << 64)


def _about(context: Context, lattice: Lattice, masked: bool) -> bytes:
    return hashlib.sha256(_fields(context.digest(), lattice.digest(), bytes([masked]))).digest()


def _stream(key: bytes, lattice: Lattice) -> tuple[int, Integers]:
    """A number modulo `MODULUS`, to a part in 2^126, and a random integer for each number."""
    data = _chacha(key, TAG_BYTES + 8 * lattice.words * lattice.size)
    words = np.frombuffer(data, dtype="<u8", offset=TAG_BYTES).astype(np.uint64)
    return int.from_bytes(data[:TAG_BYTES], "little") % MODULUS, words.reshape(-1, lattice.words)


def _chacha(key: bytes, size: int) -> bytes:
    """ChaCha20 under a key that is used once, which is why the nonce may be 0."""
    return Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor().update(bytes(size))
