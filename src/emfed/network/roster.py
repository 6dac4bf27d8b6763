"""Whose keys are known: a site's pinned roster, and the members that a server has seen."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import final

from cryptography.hazmat.primitives.asymmetric import ec

from emfed.core.errors import SettingsError
from emfed.core.storage import write_atomic
from emfed.network.keys import (
    ANALYST,
    BACKUP,
    PublicKey,
    check_site_name,
    fingerprint,
    read_certificate,
    read_private_key,
    read_public_key,
    read_site_keys,
    site_keys,
    verify,
)


def read_roster(folder: Path) -> dict[str, PublicKey]:
    """The public keys of a folder, by name of the site."""
    return {check_site_name(p.stem): read_public_key(p) for p in sorted(folder.glob("*.pub"))}


def check_roster(key: Path, folder: Path) -> dict[str, PublicKey]:
    """The keys that a site pinned, its own among them."""
    found, mine = read_roster(folder), read_private_key(key)
    if found.setdefault(key.stem, mine.public_key()) != mine.public_key():
        raise SettingsError(
            f"{folder} holds another key of {key.stem} than {key}: after a new key was made, "
            f"say `emfed keys roster {key.stem}.pub --replace` here and at every other site."
        )
    return found


def pin_keys(
    public: Sequence[Path], folder: Path, digest: str | None = None, *, replace: bool = False
) -> dict[str, PublicKey]:
    """Add public keys to a site's roster; gives all that are pinned.

    Nothing is written if a site's key is another than the one pinned before (unless ``replace``
    says so), or if the whole has not the ``digest`` that another site read out.
    """
    found = read_roster(folder)
    for path in public:
        if path.suffix != ".pub":
            raise SettingsError(f"{path}: a public key is called NAME.pub, after its site.")
        name, key = check_site_name(path.stem), read_public_key(path)
        if not replace and found.get(name, key) != key:
            raise SettingsError(
                f"{folder} holds another key of {name} than {path}: ask {name} which is right, and "
                "say --replace if it made a new one."
            )
        found[name] = key
    if digest is not None and _letters(digest) != _letters(roster_digest(found)):
        raise SettingsError(
            f"these keys have the digest {roster_digest(found)}, not {digest}: some site's key is "
            "another here, or missing. Compare the fingerprints one by one."
        )
    folder.mkdir(parents=True, exist_ok=True)
    for path in public:
        write_atomic(folder / f"{path.stem}.pub", path.read_bytes())
    return found


def _letters(digest: str) -> str:
    """What people read to each other, whatever stands between."""
    return "".join(c for c in digest.lower() if c.isalnum())


def roster_digest(roster: Mapping[str, PublicKey]) -> str:
    """A digest of everybody's names and keys, for people to compare by a way they trust."""
    told = b"".join(
        name.encode() + b"\0" + fingerprint(key) for name, key in sorted(roster.items())
    )
    # 128 bits in eight groups: whoever wants other keys under one digest must find a preimage.
    read_out = hashlib.sha256(told).hexdigest()[:32]
    return "-".join(read_out[at : at + 4] for at in range(0, 32, 4))


@final
class SeenMembers:
    """The members of a server: sites come and go while it runs, and what they signed stays signed.

    Keys that were in the server's folder once are kept, so that the transcript of a run can be read
    after one of them was removed. Who may call now is another question (`KeyRing`).

    Parameters
    ----------
    keys : Path
        The server's folder of keys.
    folder : Path
        Where keys that were seen are kept.
    """

    def __init__(self, keys: Path, folder: Path) -> None:
        self._keys, self._folder = keys, folder
        authority = read_certificate(keys / "ca.pem").public_key()
        if not isinstance(authority, ec.EllipticCurvePublicKey):
            raise SettingsError(f"{keys / 'ca.pem'} has no elliptic-curve key: {BACKUP}")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._known: dict[str, tuple[PublicKey, ...]] = {}
        for path in sorted(folder.glob("*.pub")):
            self._add(path.stem.rpartition(".")[0], read_public_key(path))
        self._known[ANALYST] = (authority,)
        self._seen: list[tuple[str, int]] = []

    def _add(self, name: str, key: PublicKey) -> None:
        self._known[name] = (*self._known.get(name, ()), key)

    def _look(self) -> None:
        """See who is new, if anything changed."""
        found = site_keys(self._keys)
        seen = [(name, _changed(path)) for name, path in found.items()]
        if seen == self._seen:
            return
        for name, key in read_site_keys(self._keys)[0].items():
            if name != ANALYST and key not in self._known.get(name, ()):
                kept = self._folder / f"{name}.{fingerprint(key).hex()[:16]}.pub"
                write_atomic(kept, found[name].read_bytes())
                self._add(name, key)
        self._seen = seen

    def __contains__(self, name: str) -> bool:
        if name not in self._known:
            self._look()
        return name in self._known

    def verify(self, name: str, message: bytes, signature: bytes) -> bool:
        """Whether the member of this name signed the message, with any key that it has had."""
        if name in self and self._is_of(name, message, signature):
            return True
        self._look()
        return self._is_of(name, message, signature)

    def _is_of(self, name: str, message: bytes, signature: bytes) -> bool:
        return any(verify(key, signature, message) for key in self._known.get(name, ()))


def _changed(path: Path) -> int:
    """When a file last changed; 0: it is gone."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
