"""systemd hears that a program is ready, and that its loop turns."""

from __future__ import annotations

import socket
import threading
from pathlib import Path

import pytest

from emfed.deployment import watchdog
from emfed.deployment.relaying import serve_relay
from emfed.network import keys


def test_a_relay_says_that_it_is_ready_and_that_its_loop_turns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys.make_server_keys(tmp_path / "keys", [])
    monkeypatch.setattr(watchdog, "LIVES_SECONDS", 0.0)
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "notify"))
        line.settimeout(30.0)
        place = (tmp_path / "keys", tmp_path / "relay", "127.0.0.1", 0, lambda words: None)
        threading.Thread(target=serve_relay, args=place, daemon=True).start()
        heard = [line.recv(100) for _ in range(3)]
    assert heard == [b"READY=1", b"WATCHDOG=1", b"WATCHDOG=1"]


def test_a_loop_that_stands_still_says_nothing_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
        line.bind(str(tmp_path / "notify"))
        line.settimeout(0.2)
        alive = watchdog.Watchdog()
        alive()
        alive()  # at once: nothing more is to be said
        assert [line.recv(100) for _ in range(2)] == [b"READY=1", b"WATCHDOG=1"]
        with pytest.raises(TimeoutError):
            line.recv(100)


def test_without_systemd_nothing_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    watchdog.Watchdog()()
    monkeypatch.setenv("NOTIFY_SOCKET", "/nowhere/at/all")
    watchdog.Watchdog()()  # whoever is to hear it is gone
