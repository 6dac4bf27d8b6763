"""Keys of a deployment: an authority of its own, the server's certificate, one key pair a site.

A folder of keys looks like this; a site needs ``ca.pem`` and its own ``NAME.key``, no more::

    ca.key  ca.pem            the authority, made once; ca.pem goes to every site
    server.key  server.pem    what the server shows; names its addresses
    sites/NAME.pub            public keys of the sites that may join
    removed/NAME.pub          keys that were removed, so that their sites can be told so

Private files are readable by their owner alone. A private key is made where it is used and stays
there: ``emfed keys site`` runs at the site, and only ``NAME.pub`` travels.
"""

from __future__ import annotations

import base64
import contextlib
import datetime
import hashlib
import ipaddress
import logging
import os
import re
import secrets
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TypeAlias, final

from cryptography import x509
from cryptography.exceptions import InvalidSignature, InvalidTag, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from emfed.core.errors import SettingsError
from emfed.core.storage import Disk, write_atomic

logger = logging.getLogger(__name__)
PrivateKey: TypeAlias = ec.EllipticCurvePrivateKey
PublicKey: TypeAlias = ec.EllipticCurvePublicKey
LOOPBACK = ("localhost", "127.0.0.1", "::1")
CA_DAYS, SERVER_DAYS = 3650, 825
"""Validity. 825 days is the most that common TLS libraries accept of a server."""
BACKUP = (
    "put it back from a backup. Without one, `emfed keys server` makes the server's certificate "
    "anew, or in another folder an authority whose ca.pem every site must then get."
)
ANALYST = "analyst"
"""The name of whoever signs settings, with the authority's key: no site may have it."""
WARNING_DAYS = 30
"""A certificate that ends sooner is worth a word at every start of the server."""
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


def check_site_name(name: str) -> str:
    """A site's name is a file's name, too."""
    if not _NAME.fullmatch(name):
        raise SettingsError(
            "a site's name has 1 to 64 letters, digits, dots, dashes or underscores and begins "
            f"with a letter or digit; got {name!r}."
        )
    return name


def make_private_key() -> PrivateKey:
    """A new key, from the system's randomness."""
    return ec.generate_private_key(ec.SECP384R1())


def make_server_keys(folder: Path, hosts: Sequence[str]) -> list[Path]:
    """The authority, unless it is there, and a certificate for these names and addresses.

    Made again, the certificate is new and the authority stays, so that sites need not be told.
    The addresses of this machine to itself are always in it.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sites").mkdir(exist_ok=True)
    paths = {name: folder / name for name in ("ca.key", "ca.pem", "server.key", "server.pem")}
    made = []
    if paths["ca.key"].exists() != paths["ca.pem"].exists():
        raise SettingsError(
            f"{folder} holds one of ca.key and ca.pem without the other: put back the missing one, "
            "or use another folder."
        )
    if not paths["ca.key"].exists():
        authority = make_private_key()
        write_private(paths["ca.key"], _pem(authority))
        _public(paths["ca.pem"], _authority_certificate(authority))
        made += [paths["ca.key"], paths["ca.pem"]]
    key = make_private_key()
    certificate = _server_certificate(paths["ca.key"], paths["ca.pem"], key, hosts)
    write_private(paths["server.key"], _pem(key))
    _public(paths["server.pem"], certificate)
    return [*made, paths["server.key"], paths["server.pem"]]


def make_site_key(folder: Path, name: str) -> tuple[Path, Path]:
    """A key pair for one site; refuses to write over one that is there."""
    check_site_name(name)
    folder.mkdir(parents=True, exist_ok=True)
    private, public = folder / f"{name}.key", folder / f"{name}.pub"
    for path in (private, public):
        if path.exists():
            raise SettingsError(f"{path} is there already: remove it first, or take another name.")
    key = make_private_key()
    write_private(private, _openssh(key))
    _public(public, _public_line(key, name))
    return private, public


def _openssh(key: PrivateKey) -> bytes:
    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.OpenSSH)
    return key.private_bytes(*encoding, serialization.NoEncryption())


def _public_line(key: PrivateKey, name: str) -> bytes:
    line = key.public_key().public_bytes(
        serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH
    )
    return line + b" " + name.encode() + b"\n"


def add_site(folder: Path, public: Path, *, replace: bool = False) -> str:
    """Let the owner of this public key join; returns the site's name, that of the file.

    With ``replace`` the key takes the place of another of the same name, which is then removed.
    """
    if public.suffix != ".pub":
        raise SettingsError(f"{public}: a public key is called NAME.pub, after its site.")
    name = check_site_name(public.stem)
    line = public.read_bytes()
    sites = folder / "sites"
    if not sites.is_dir():
        raise SettingsError(f"{folder} holds no server's keys: run `emfed keys server` first.")
    mine, (others, _) = read_public_key(public), read_site_keys(folder)
    for other, known in others.items():
        if other != name and known == mine:
            raise SettingsError(f"{public} is the key of the site {other!r} already.")
    if name in others and others[name] != mine:
        if not replace:
            raise SettingsError(
                f"a site {name!r} with another key is there: if its key has changed, use --replace."
            )
        remove_site(folder, name)
    _public(sites / f"{name}.pub", line)
    for path in sorted((folder / "removed").glob("*.pub")):
        with contextlib.suppress(SettingsError, OSError):
            if read_public_key(path) == mine:  # it was removed once, and is back
                path.unlink()
    return name


NEXT = ".next"
"""Added to the name of a private key: the one that takes its place once the server knows it."""


def rotate_site_key(private: Path, now: bool = False) -> Path:
    """Make a site's next key; returns the file for the server, which the present key signs.

    The present key stays in use until the server has taken the next one (`Caller` then
    changes over by itself), so there is no moment without a key that the server knows. With ``now``
    the site changes over at once: other sites can then pin the new key before the next run.
    """
    present, name = read_private_key(private), check_site_name(private.stem)
    following = private.with_name(private.name + NEXT)
    if following.exists():
        key = read_private_key(following)
    else:
        key = make_private_key()
        write_private(following, _openssh(key))
    line = _public_line(key, name)
    told = private.with_suffix(".rotate")
    signature = base64.b64encode(sign(present, _ROTATION + line))
    write_atomic(told, line + signature + b"\n")
    if now:
        following.replace(private)
        write_public_key(private)
    return told


def write_public_key(private: Path) -> None:
    """Leave the public half beside a private key, as `make_site_key` does."""
    _public(private.with_suffix(".pub"), _public_line(read_private_key(private), private.stem))


_ROTATION = b"emfed next key\x00"


def take_rotation(folder: Path, told: Path) -> str:
    """Take a site's next key in the place of its present one, which must have signed it."""
    name = check_site_name(told.stem)
    known = site_keys(folder).get(name)
    if known is None:
        raise SettingsError(
            f"{folder} holds no key of a site {name!r}: add it with `emfed keys add`."
        )
    line, _, signature = told.read_bytes().partition(b"\n")
    try:
        good = verify(read_public_key(known), base64.b64decode(signature), _ROTATION + line + b"\n")
    except ValueError:
        good = False
    if not good:
        raise SettingsError(
            f"{told} is not signed by the key that {name} has now: if that key is lost or was seen "
            "by others, use `emfed keys add --replace` with a new one."
        )
    with tempfile.TemporaryDirectory() as place:
        public = Path(place) / f"{name}.pub"
        public.write_bytes(line + b"\n")
        return add_site(folder, public, replace=True)


def make_seal(path: Path) -> None:
    """A secret that encrypts a site's files at rest; refuses to write over one."""
    if path.exists():
        raise SettingsError(f"{path} is there already: what it sealed could not be read any more.")
    write_private(path, secrets.token_hex(32).encode() + b"\n")


def read_seal(path: Path) -> bytes:
    """The secret of `make_seal`; refuses one that others may read."""
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise SettingsError(f"{path} can be read by others: run `chmod 600 {path}`.")
    try:
        key = bytes.fromhex(path.read_text(encoding="ascii"))
    except ValueError:
        key = b""
    if len(key) != 32:
        raise SettingsError(f"{path} holds no secret of `emfed keys seal`.")
    return key


@final
class SealedDisk(Disk):
    """The machine's disk, with files encrypted at rest (AES-256-GCM), each bound to its name."""

    def __init__(self, key: bytes) -> None:
        self._cipher = AESGCM(key)

    def read(self, path: Path) -> bytes | None:
        data = super().read(path)
        if data is None:
            return None
        try:
            return self._cipher.decrypt(data[:12], data[12:], _named(path))
        except (InvalidTag, ValueError):
            raise SettingsError(
                f"{path} was not sealed with this secret, or was altered: give the right --seal."
            ) from None

    def first(self, path: Path, count: int) -> bytes:
        return (self.read(path) or b"")[:count]

    def create(self, path: Path, data: bytes) -> Path:
        nonce = os.urandom(12)
        return super().create(path, nonce + self._cipher.encrypt(nonce, data, _named(path)))


def _named(path: Path) -> bytes:
    """What a sealed file is bound to: one must not stand for another of the same site."""
    return f"{path.parent.name}/{path.name}".encode()


def remove_site(folder: Path, name: str) -> Path:
    """Shut a site out; its key is kept aside, so that the site can be told what happened."""
    path, removed = folder / "sites" / f"{check_site_name(name)}.pub", folder / "removed"
    if not path.exists():
        known = ", ".join(site_keys(folder)) or "none"
        raise SettingsError(f"{folder} holds no key of a site {name!r}; its sites: {known}.")
    removed.mkdir(exist_ok=True)
    stamp = datetime.datetime.now(datetime.UTC).strftime("%Y%m%dT%H%M%S%f")
    target = removed / f"{name}.{stamp}.pub"
    path.replace(target)
    return target


def fingerprint(key: PublicKey) -> bytes:
    """The digest by which a key is known, that of ``ssh-keygen -l``."""
    line = key.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    return hashlib.sha256(base64.b64decode(line.split()[1])).digest()


def show_fingerprint(digest: bytes) -> str:
    """A fingerprint as ``ssh-keygen -l`` shows it."""
    return "SHA256:" + base64.b64encode(digest).decode().rstrip("=")


def sign(key: PrivateKey, statement: bytes) -> bytes:
    """A signature by a site's key."""
    return key.sign(statement, ec.ECDSA(hashes.SHA384()))


def verify(key: PublicKey, signature: bytes, statement: bytes) -> bool:
    """Whether a key's owner signed this."""
    try:
        key.verify(signature, statement, ec.ECDSA(hashes.SHA384()))
    except (InvalidSignature, ValueError):
        return False
    return True


@final
class KeyRing:
    """The keys that a folder lets in, read again when the folder changes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: list[tuple[str, int, int]] | None = None
        self._names: dict[bytes, tuple[str, PublicKey]] = {}
        self._removed: set[bytes] = set()
        self._bad: dict[str, str] = {}
        self.refresh()

    def refresh(self) -> None:
        """Look again, if anything changed. Files that hold no key are logged, once."""
        seen = []
        for path in sorted(self._folder.glob("sites/*.pub")) + sorted(
            self._folder.glob("removed/*.pub")
        ):
            with contextlib.suppress(OSError):
                about = path.stat()
                seen.append((str(path), about.st_mtime_ns, about.st_size))
        if seen == self._seen:
            return
        self._seen = seen
        keys, bad = read_site_keys(self._folder)
        for name, words in bad.items():
            if self._bad.get(name) != words:
                logger.warning("site %s may not join: %s", name, words)
        self._bad = bad
        self._names = {fingerprint(key): (name, key) for name, key in keys.items()}
        self._names |= self._analyst()
        self._removed = set()
        for path in sorted(self._folder.glob("removed/*.pub")):
            with contextlib.suppress(SettingsError, OSError):
                self._removed.add(fingerprint(read_public_key(path)))

    def _analyst(self) -> dict[bytes, tuple[str, PublicKey]]:
        """Whoever has the authority's key may call: the relay of a fit may be elsewhere."""
        path = self._folder / "ca.pem"
        key = read_certificate(path).public_key() if path.exists() else None
        return (
            {fingerprint(key): (ANALYST, key)} if isinstance(key, ec.EllipticCurvePublicKey) else {}
        )

    def find(self, digest: bytes) -> tuple[str, PublicKey] | None:
        """The member whose key has this fingerprint, if it may join."""
        return self._names.get(digest)

    def knows(self, name: str) -> bool:
        """Whether a site of this name may join, with whatever key."""
        return any(known == name for known, _ in self._names.values())

    def was_removed(self, digest: bytes) -> bool:
        """Whether this key was let in once and is no longer."""
        return digest in self._removed


def site_keys(folder: Path) -> dict[str, Path]:
    """Public keys of the sites that may join, by name."""
    return {path.stem: path for path in sorted((folder / "sites").glob("*.pub"))}


def read_site_keys(
    folder: Path,
) -> tuple[dict[str, PublicKey], dict[str, str]]:
    """Keys of the sites that may join, and what is wrong with the files that hold none.

    People copy files into the folder while the server runs: one may be half there, or just gone.
    """
    good: dict[str, PublicKey] = {}
    bad: dict[str, str] = {}
    for name, path in site_keys(folder).items():
        try:
            key = read_public_key(path)
            for other, known in good.items():
                if known == key:
                    raise SettingsError(f"{path} is the key of the site {other!r} already.")
            good[check_site_name(name)] = key
        except FileNotFoundError:
            continue
        except (SettingsError, OSError) as error:
            bad[name] = str(error)
    return good, bad


def read_public_key(path: Path) -> PublicKey:
    """A site's public key; the error says what is wrong with the file."""
    try:
        key = serialization.load_ssh_public_key(path.read_bytes())
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SettingsError(f"{path} is no public key in OpenSSH's format: {error}") from None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise SettingsError(f"{path} is no elliptic-curve key: make one with `emfed keys site`.")
    return key


def read_private_key(path: Path) -> PrivateKey:
    """A site's private key; refuses one that others may read."""
    if not path.exists():
        raise SettingsError(
            f"{path}: there is no such file; `emfed keys site NAME` makes NAME.key."
        )
    if path.read_bytes().startswith((b"ecdsa-", b"ssh-")):  # before any word about its rights
        raise SettingsError(f"{path} is a public key: give the private one, NAME.key.")
    if os.name == "posix" and path.stat().st_mode & 0o077:
        raise SettingsError(f"{path} can be read by others: run `chmod 600 {path}`.")
    pem = path.read_bytes().startswith(b"-----BEGIN PRIVATE KEY")  # the authority's
    load = serialization.load_pem_private_key if pem else serialization.load_ssh_private_key
    try:
        key = load(path.read_bytes(), None)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise SettingsError(f"{path} is no private key in OpenSSH's format: {error}") from None
    if not isinstance(key, ec.EllipticCurvePrivateKey):
        raise SettingsError(f"{path} is no elliptic-curve key: make one with `emfed keys site`.")
    return key


def certificate_hosts(path: Path) -> list[str]:
    """Names and addresses that a certificate is good for."""
    names = (
        x509.load_pem_x509_certificate(path.read_bytes())
        .extensions.get_extension_for_class(x509.SubjectAlternativeName)
        .value
    )
    return [str(name.value) for name in names]


def check_certificate(path: Path) -> int:
    """Days until a certificate ends; refuses one that has ended."""
    if not path.exists():
        raise SettingsError(
            f"{path.parent} holds no {path.name}: make keys with `emfed keys server --keys "
            f"{path.parent}`, or try things out on this machine with --insecure."
        )
    ends = read_certificate(path).not_valid_after_utc
    again = "make a new one with `emfed keys server`, with the same --host; sites keep their ca.pem"
    if (days := days_left(path)) < 0:
        raise SettingsError(f"{path} ended on {ends:%Y-%m-%d}, and no site accepts it: {again}.")
    if days < WARNING_DAYS:
        logger.warning("%s ends on %s: %s", path, f"{ends:%Y-%m-%d}", again)
    return days


def read_certificate(path: Path) -> x509.Certificate:
    """A certificate; refuses a file that holds none."""
    try:
        return x509.load_pem_x509_certificate(path.read_bytes())
    except ValueError:
        raise SettingsError(f"{path} is damaged: {BACKUP}") from None


def days_left(path: Path) -> int:
    """Whole days until a certificate ends, below 0 if it has."""
    ends = read_certificate(path).not_valid_after_utc
    return (ends - datetime.datetime.now(datetime.UTC)).days


def _authority_certificate(key: PrivateKey) -> bytes:
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "emfed federation authority")])
    usage = x509.KeyUsage(
        digital_signature=False,
        content_commitment=False,
        key_encipherment=False,
        data_encipherment=False,
        key_agreement=False,
        key_cert_sign=True,
        crl_sign=True,
        encipher_only=False,
        decipher_only=False,
    )
    builder = _builder(name, name, key.public_key(), CA_DAYS)
    builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
    builder = builder.add_extension(usage, critical=True)
    builder = builder.add_extension(
        x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False
    )
    return builder.sign(key, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def _server_certificate(
    authority_key: Path,
    authority: Path,
    key: PrivateKey,
    hosts: Sequence[str],
) -> bytes:
    try:
        signer = serialization.load_pem_private_key(authority_key.read_bytes(), None)
    except (ValueError, TypeError):
        raise SettingsError(f"{authority_key} is damaged: {BACKUP}") from None
    issuer = read_certificate(authority)
    if not isinstance(signer, ec.EllipticCurvePrivateKey):
        raise SettingsError(f"{authority_key} is not the authority that `emfed keys` made.")
    names = list(dict.fromkeys([*hosts, *LOOPBACK]))
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "emfed server")])
    builder = _builder(subject, issuer.subject, key.public_key(), SERVER_DAYS)
    for extension in (
        x509.SubjectAlternativeName([_general_name(host) for host in names]),
        x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]),
        x509.BasicConstraints(ca=False, path_length=None),
        x509.AuthorityKeyIdentifier.from_issuer_public_key(signer.public_key()),
    ):
        builder = builder.add_extension(extension, critical=False)
    return builder.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)


def _builder(
    subject: x509.Name, issuer: x509.Name, key: PublicKey, days: int
) -> x509.CertificateBuilder:
    now = datetime.datetime.now(datetime.UTC)
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key)
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(hours=1))  # clocks of sites differ
        .not_valid_after(now + datetime.timedelta(days=days))
    )


def _general_name(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        pass
    if not re.fullmatch(r"(\*\.)?[A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?", host):
        raise SettingsError(
            f"{host!r} is neither an IP address nor a DNS name: give the address sites will use, "
            "without port."
        )
    return x509.DNSName(host)


def _pem(key: PrivateKey) -> bytes:
    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    return key.private_bytes(*encoding, serialization.NoEncryption())


def write_private(path: Path, data: bytes) -> None:
    """Write so that the bytes are at no moment readable by others."""
    path.unlink(missing_ok=True)
    handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
    with os.fdopen(handle, "wb") as file:
        file.write(data)


def _public(path: Path, data: bytes) -> None:
    write_atomic(path, data)
