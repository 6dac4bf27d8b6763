"""Who signs, and whose signatures are known: the keys of a deployment (`emfed.network.keys`).

The analyst signs with the authority's key: every site has its public half in ``ca.pem``, which it
got by a way that it trusts, and a relay that runs alone needs no more than the server's own key.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import final

from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from emfed.core.errors import SettingsError
from emfed.network.keys import (
    ANALYST,
    BACKUP,
    PrivateKey,
    PublicKey,
    read_certificate,
    read_private_key,
    sign,
    verify,
)


@final
class KeySigner:
    """A member's identity: its name and its private key."""

    def __init__(self, name: str, key: PrivateKey) -> None:
        self._name, self._key = name, key

    @classmethod
    def of_site(cls, path: Path) -> KeySigner:
        """The site that ``NAME.key`` belongs to."""
        return cls(path.stem, read_private_key(path))

    @classmethod
    def of_analyst(cls, keys: Path) -> KeySigner:
        """The analyst whose folder of keys holds the authority's."""
        path = keys / "ca.key"
        try:
            key = serialization.load_pem_private_key(path.read_bytes(), None)
        except ValueError:
            raise SettingsError(f"{path} is damaged: {BACKUP}") from None
        if not isinstance(key, ec.EllipticCurvePrivateKey):
            raise SettingsError(f"{path} is no elliptic-curve key: {BACKUP}")
        return cls(ANALYST, key)

    @property
    def name(self) -> str:
        """The member's name."""
        return self._name

    def sign(self, message: bytes) -> bytes:
        """A signature by this member's identity key."""
        return sign(self._key, message)

    def secret(self, purpose: bytes) -> bytes:
        """32 bytes that follow from the key and that no one else can compute."""
        number = self._key.private_numbers().private_value
        seed = number.to_bytes(-(-self._key.key_size // 8), "big")
        return HKDF(hashes.SHA256(), 32, None, b"emfed identity\0" + purpose).derive(seed)


@final
class KnownMembers:
    """The public keys of sites, and the analyst's from ``ca.pem``."""

    def __init__(self, sites: Mapping[str, PublicKey], authority: Path) -> None:
        if ANALYST in sites:
            raise SettingsError(f"a site cannot be called {ANALYST!r}: give it another name.")
        key = read_certificate(authority).public_key()
        if not isinstance(key, ec.EllipticCurvePublicKey):
            raise SettingsError(f"{authority} has no elliptic-curve key: {BACKUP}")
        self._keys = {**sites, ANALYST: key}

    def __contains__(self, name: str) -> bool:
        return name in self._keys

    def verify(self, name: str, message: bytes, signature: bytes) -> bool:
        """Whether the member of this name signed the message."""
        return name in self._keys and verify(self._keys[name], signature, message)


@final
class TrialSigner:
    """Anybody's identity where there are no keys, which is on one machine: it shows nothing.

    Its key follows from the name, so that all members know all.
    """

    def __init__(self, name: str) -> None:
        self._name, self._key = name, _trial_key(name)

    @property
    def name(self) -> str:
        """The member's name."""
        return self._name

    def sign(self, message: bytes) -> bytes:
        """A signature that anybody can make."""
        return sign(self._key, message)

    def secret(self, purpose: bytes) -> bytes:
        """32 bytes that follow from the name."""
        seed = b"emfed trial " + self._name.encode()
        return HKDF(hashes.SHA256(), 32, None, b"emfed identity\0" + purpose).derive(seed)


@final
class TrialMembers:
    """Everybody, where there are no keys."""

    def __contains__(self, name: object) -> bool:
        return True

    def verify(self, name: str, message: bytes, signature: bytes) -> bool:
        """Whether somebody signed the message in this name."""
        return verify(_trial_key(name).public_key(), signature, message)


def _trial_key(name: str) -> PrivateKey:
    """A key that follows from a name."""
    seed = hashlib.sha256(b"emfed trial " + name.encode()).digest()
    return ec.derive_private_key(int.from_bytes(seed, "big") | 1, ec.SECP384R1())
