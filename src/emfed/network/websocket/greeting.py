"""The first words on a connection: who the server is, who the site is, and why not.

TLS shows the site that the server's certificate is signed by the authority of its ``ca.pem``. Then
three messages::

    server  "emfed", the version of this greeting, 32 random bytes
    site    digest of its public key (32), number of its process (8), signature
    server  "welcome", the name under which it knows the site

The signature is by the site's key over the random bytes, the digest of the certificate that TLS
showed and the process's number. So it is good for this connection to this server alone, no clock
takes part, and a site signs only for a server that it has checked. A client certificate would show
no more, took about 1 kB more each way in a trial, and can't be refused in words.
Without TLS the site says a name instead of the digest and the signature.

What ends a connection is a close code; `EXPLANATIONS` has the site's words for it.
"""

from __future__ import annotations

import hashlib
import os
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import final

from emfed.core.errors import SettingsError
from emfed.core.wire import LARGEST_PAYLOAD
from emfed.network.keys import PrivateKey, PublicKey, fingerprint, sign, verify

HELLO, WELCOME = b"emfed\x02", b"welcome "
"""The last byte of the first is the version of the greeting."""
NONCE_BYTES, DIGEST_BYTES, PROCESS_BYTES = 32, 32, 8
"""Bytes of the number that a proof answers, of a digest, and of the number of a process: parts of
the greeting."""
LARGEST_MESSAGE = LARGEST_PAYLOAD + (1 << 20)
"""Bytes: the largest payload of the protocol, and room for its envelope."""
LARGEST_GREETING = 512
"""Bytes that are read from somebody who has not yet shown a key; a proof has 176."""
GREETING_SECONDS = 20.0
"""A stranger's connection costs memory: who is not through by then is cut off. A thousand sites
that called at once were all connected after 9 and 24 s (python -m benchmarks network, two runs on
two shared cores); with 10 s here those that were cut off would have to begin again."""
SILENCE_SECONDS = 20.0
"""A line on which nothing came for so long is dead: with the watch's tick, noticed within 24 s.

Sites ping every 8 s, which also keeps the line in the tables of NAT routers.
"""
UNKNOWN, REMOVED, FORGED, IN_USE, MISUSE, REPLACED, OVER, KNOWN = range(4001, 4009)
"""Close codes; WebSockets leave 4000 to 4999 to applications."""
EXPLANATIONS = {
    UNKNOWN: "the server does not know this site's key: send its people NAME.pub, for `emfed keys "
    "add NAME.pub`",
    REMOVED: "the server's people have removed this site's key: ask them why",
    FORGED: "the server could not check this site's signature: --key is not the key that it has",
    IN_USE: "another process is connected with this site's key: stop it, or find out who has the "
    "key",
    MISUSE: "the server did not understand this site: compare the releases of emfed",
    REPLACED: "another connection with this site's key has taken the place of this one",
    OVER: "the server has ended its run",
    KNOWN: "the server knows this site's key",
    1001: "the server is going away",
    1009: "a message was larger than the other end takes",
}


@final
class Refused(Exception):
    """The server closes a connection, with a code and words for its own log."""

    def __init__(self, code: int, words: str) -> None:
        super().__init__(words)
        self.code, self.words = code, words


@final
@dataclass(frozen=True)
class Proof:
    """What a site says of itself."""

    claim: bytes
    """The digest of its key, or its name where there is no TLS."""
    process: bytes
    signature: bytes = b""


JUST_ASKING = bytes(PROCESS_BYTES)
"""The number of a caller that wants to know whether its key is known, and takes no site's place."""


def new_process() -> bytes:
    """A number for this process: a connection of the same process replaces its former one."""
    return os.urandom(PROCESS_BYTES)


def _statement(nonce: bytes, certificate: bytes, process: bytes) -> bytes:
    """What is signed; the first words keep the signature from meaning anything elsewhere."""
    return b"emfed site greeting\x00" + nonce + hashlib.sha256(certificate).digest() + process


def encode_proof(
    key: PrivateKey | None, name: str, nonce: bytes, certificate: bytes, process: bytes
) -> bytes:
    """The site's answer to the server's first message."""
    if key is None:
        return process + name.encode()
    signature = sign(key, _statement(nonce, certificate, process))
    return process + fingerprint(key.public_key()) + signature


def decode_proof(message: bytes | str, secure: bool) -> Proof:
    """Take a site's answer apart; it proves nothing yet."""
    least = PROCESS_BYTES + (DIGEST_BYTES if secure else 0)
    if not isinstance(message, bytes) or len(message) <= least:
        raise Refused(MISUSE, "sent no greeting of ours")
    process, rest = message[:PROCESS_BYTES], message[PROCESS_BYTES:]
    if not secure:
        return Proof(rest, process)
    return Proof(rest[:DIGEST_BYTES], process, rest[DIGEST_BYTES:])


def check_proof(proof: Proof, key: PublicKey, nonce: bytes, certificate: bytes) -> None:
    """Refuse a signature that is not by this key, or not for this connection."""
    if not verify(key, proof.signature, _statement(nonce, certificate, proof.process)):
        raise Refused(FORGED, "showed a signature that its key did not make")


def server_context(keys: Path) -> ssl.SSLContext:
    """TLS 1.3 with the server's certificate; no session tickets, which would go unused."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.num_tickets = 0
    for name in ("server.pem", "server.key"):  # OpenSSL does not say which file it may not read
        (keys / name).open("rb").close()
    try:
        context.load_cert_chain(keys / "server.pem", keys / "server.key")
    except ssl.SSLError as error:
        raise SettingsError(
            f"{keys}: server.pem and server.key do not belong together ({error.reason}): make them "
            "anew with `emfed keys server`."
        ) from None
    return context


def site_context(authority: Path) -> ssl.SSLContext:
    """TLS 1.3 that trusts the server's own authority and no other."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_verify_locations(authority)
    except ssl.SSLError:
        raise SettingsError(
            f"{authority} is no certificate: ask the server's people for ca.pem."
        ) from None
    return context
