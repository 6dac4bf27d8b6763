"""``emfed doctor``: what is wrong at one end of a federation, and how to mend it."""

from __future__ import annotations

import itertools
import os
import platform
import shutil
import socket
import ssl
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from pathlib import Path
from typing import final

from emfed.core.errors import EmfedError
from emfed.core.version import __version__
from emfed.deployment.config import read_config
from emfed.deployment.status import LOCK
from emfed.network.addresses import alone, is_loopback, join_address, split_address
from emfed.network.keys import (
    NEXT,
    certificate_hosts,
    check_certificate,
    fingerprint,
    read_private_key,
    read_site_keys,
    show_fingerprint,
)

LEAST_DISK = 200_000_000
"""Free bytes below which a disk is called full: logs, a backup and one large model fit in."""
PATIENCE_SECONDS = 5.0
"""Time for a port to answer."""


@final
@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    good: bool
    what: str
    mend: str = ""
    """What to do, where it is not good."""


def look_at_server(path: Path) -> Iterator[Finding]:
    """The server's end, from its configuration."""
    try:
        config = read_config(path)
    except (EmfedError, OSError) as error:
        yield from _machine(path.parent)
        yield Finding(False, f"configuration: {error}", f"mend {path}")
        return
    keys, server, folder = config.place("keys"), config.server, config.place("folder")
    yield from _machine(folder if folder.exists() else path.parent)  # it may have its own disk
    yield Finding(True, f"configuration: {path} can be read")
    needed = [(keys / name, os.R_OK) for name in ("server.pem", "server.key", "sites")]
    closed = _closed_to_us((folder, os.R_OK | os.W_OK), *needed)
    if closed is not None:
        yield closed
        return
    try:
        days = check_certificate(keys / "server.pem")
        names = ", ".join(certificate_hosts(keys / "server.pem"))
        mend = "`emfed keys server` with the same --host, then start the server again"
        yield Finding(days >= 30, f"certificate: lasts {days} days, good for {names}", mend)
    except EmfedError as error:
        yield Finding(False, f"certificate: {error}", "`emfed keys server --host NAME`")
    good, bad = read_site_keys(keys)
    fewest = config.fewest()
    enough = len(good) >= fewest
    mend = "`emfed keys add NAME.pub` for each site, or mend the files in keys/sites"
    words = f"keys: {len(good)} sites may join, {fewest} must"
    words += " (fewer have no masked sum)" if config.masked() and not enough else ""
    words += "".join(f"; {name}.pub holds no key" for name in bad)
    yield Finding(enough and not bad, words, mend)
    with alone(folder / LOCK) if folder.exists() else alone(path) as idle:
        pass
    if idle:
        yield _can_listen(server.host, server.port)
    else:
        yield Finding(True, f"server: one works in {folder}")
    if is_loopback(server.host):
        words = f"address: {server.host} is reached from this machine alone; for others set host"
        yield Finding(True, words)


MOST_FILES = 1000
"""Files of a folder whose rights are looked at."""


def _closed_to_us(*places: tuple[Path, int]) -> Finding | None:
    """A file that this account may not use, as after one command was run as root."""
    closed = [
        path
        for place, need in places
        if place.exists()
        for path in itertools.islice((place, *place.rglob("*")), MOST_FILES)
        if not os.access(path, need)
    ]
    if not closed:
        return None
    more = f" and {len(closed) - 1} files more" if len(closed) > 1 else ""
    words = f"account: the one that asks may not use {closed[0]}{more}"
    return Finding(False, words, "run every command as one account, and chown -R all to it")


def _can_listen(host: str, port: int) -> Finding:
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            words = f"port: cannot listen on {join_address(host, port)} ({error.strerror})"
            return Finding(False, words, "another port in [server], or stop what listens there")
    return Finding(True, f"port: {join_address(host, port)} is free")


def look_at_site(address: str, ca: Path, key: Path | None, folder: Path) -> Iterator[Finding]:
    """A site's end: from its files to the server's word on whether it knows the key."""
    yield from _machine(folder if folder.exists() else Path())
    closed = _closed_to_us((folder, os.R_OK | os.W_OK))
    if closed is not None:
        yield closed
    host, port = split_address(address)
    if key is not None:
        try:
            shown = show_fingerprint(fingerprint(read_private_key(key).public_key()))
            yield Finding(
                True, f"key: {key}, {shown}; compare it with `emfed keys list` at the server"
            )
        except FileNotFoundError:
            mend = "say with --key where it is, or make one with `emfed keys site NAME`"
            yield Finding(False, f"key: there is no file {key}", mend)
        except (EmfedError, OSError) as error:
            yield Finding(False, f"key: {error}", "`emfed keys site NAME`, or chmod 600")
        if key.with_name(key.name + NEXT).exists():
            words = f"key: a next one waits; send {key.with_suffix('.rotate').name} to the server"
            yield Finding(True, words)
    try:
        places = sorted({str(found[4][0]) for found in socket.getaddrinfo(host, port)})
        yield Finding(True, f"name: {host} is {', '.join(places)}")
    except OSError as error:
        yield Finding(
            False, f"name: {host} is not known here ({error.strerror})", "compare the address"
        )
        return
    if os.environ.get("HTTPS_PROXY") or os.environ.get("https_proxy"):
        yield Finding(True, "proxy: HTTPS_PROXY is set; the port is tried without it here")
    try:
        socket.create_connection((host, port), PATIENCE_SECONDS).close()
        yield Finding(True, f"port: {address} answers")
    except OSError as error:
        mend = "is the server running? Does its firewall, or yours, let this port through?"
        yield Finding(False, f"port: {address} does not answer ({error})", mend)
        return
    last = Finding(False, "")
    for last in _greeting(host, port, ca):
        yield last
    if key is not None and key.exists() and ca.exists() and last.what.startswith("clock"):
        yield _known(address, ca, key)


def _known(address: str, ca: Path, key: Path) -> Finding:
    """Whether the server would let this key in; asking takes nobody's place."""
    from emfed.network.exchange.member_line import MemberLine

    try:
        options = {"key": key, "authority": ca, "name": key.stem}
        line = MemberLine(address, lambda data: None, lambda: None, **options)
        known, words = line.ask_whether_known()
    except EmfedError as error:
        known, words = False, str(error)
    mend = "send NAME.pub to the server's people, who say `emfed keys add NAME.pub`"
    return Finding(known, f"key: {words}", mend)


def _greeting(host: str, port: int, ca: Path) -> Iterator[Finding]:
    """TLS with the server, and its clock, by the Date of its answer to a plain request."""
    from emfed.network.websocket.client import explain
    from emfed.network.websocket.greeting import site_context

    if not ca.exists():
        mend = "ask the server's people for it, and say with --ca where it is"
        yield Finding(False, f"TLS: there is no file {ca}", mend)
        return
    try:
        raw = socket.create_connection((host, port), PATIENCE_SECONDS)
        with raw, site_context(ca).wrap_socket(raw, server_hostname=host) as line:
            yield Finding(True, f"TLS: {line.version()}, the server of {ca}")
            line.sendall(f"GET / HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
            answer = line.recv(4096).decode(errors="replace")
    except (OSError, EmfedError) as error:
        words = explain(error, join_address(host, port)) if isinstance(error, OSError) else error
        yield Finding(False, f"TLS: {words}", "ask the server's people for the right ca.pem")
        return
    dates = [line[5:].strip() for line in answer.splitlines() if line.lower().startswith("date:")]
    if dates:
        apart = abs((datetime.now(UTC) - parsedate_to_datetime(dates[0])).total_seconds())
        mend = "set the clock of the machine that is wrong (NTP); TLS needs it to the day"
        yield Finding(apart < 120, f"clock: {apart:.0f} s from the server's", mend)


def _machine(folder: Path) -> Iterator[Finding]:
    new = sys.version_info >= (3, 11)
    words = (
        f"versions: emfed {__version__}, Python {platform.python_version()}, {ssl.OPENSSL_VERSION}"
    )
    yield Finding(new and ssl.HAS_TLSv1_3, words, "Python 3.11 with TLS 1.3")
    free = shutil.disk_usage(folder if folder.exists() else Path()).free
    yield Finding(free > LEAST_DISK, f"disk: {free / 1e9:.1f} GB free", "make room, before the run")
    year = datetime.now(UTC).year
    yield Finding(2025 <= year < 2100, f"clock: the year is {year}", "set the clock (NTP)")
    try:
        probe = folder / f".emfed-doctor-{os.getpid()}"
        probe.write_bytes(b"")
        probe.unlink()
        yield Finding(True, f"folder: {folder.resolve()} can be written")
    except OSError as error:
        yield Finding(False, f"folder: {folder} cannot be written ({error.strerror})", "its rights")
