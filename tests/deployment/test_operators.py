"""What an operator lives with: ends that are told, keys, orders, pages, journals."""

from __future__ import annotations

import contextlib
import errno
import gzip
import http.client
import json
import logging
import os
import re
import resource
import socket
import struct
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Callable
from functools import partial
from math import nan
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import polars as pl
import pytest

from emfed import fit, gaussian_mixture
from emfed.cli.main import main
from emfed.cli.tables import write_table
from emfed.core.errors import DataError, EmfedError, SettingsError
from emfed.data import files, sources
from emfed.deployment.analyst import document_of, recognise, run_of
from emfed.deployment.approval import answer_fit, owners_word, pending_fits
from emfed.deployment.config import read_config
from emfed.deployment.console import Console, page_address
from emfed.deployment.doctor import look_at_server, look_at_site
from emfed.deployment.orders import Orders, StandingOrders, change_orders, read_orders
from emfed.deployment.site import (
    erase_site,
    prepare,
    read_about,
    read_rows,
    seal_files,
    site_memory,
    write_site,
)
from emfed.deployment.status import Status, bearing_full_disks, logging_to
from emfed.deployment.views import SiteView, run_view
from emfed.network import keys
from emfed.network.addresses import free_port
from emfed.network.exchange.identities import TrialMembers
from emfed.network.exchange.member_line import MemberLine
from emfed.network.exchange.records import RecordFile
from emfed.network.exchange.relay_server import RelayServer
from emfed.network.journal import Journal, check_journal
from emfed.network.owner_rules import SiteRules
from emfed.network.roster import pin_keys
from emfed.network.spending import Tally
from tests.artifacts.browser import Browser
from tests.deployment.deployed import Deployed, tables
from tests.deployment.deployed import until as waited_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these tests read /proc")
TOML = (
    '[model]\nkind = "gaussian-mixture"\nn_components = 2\n[sites]\nexpected = 2\ncolumns = ["x"]\n'
)


def relay(folder: Path, authority: Path | None, port: int = 0) -> RelayServer:
    """A relay that knows the sites of a folder of keys."""
    return RelayServer("127.0.0.1", port, authority, TrialMembers(), folder / "relay")


def test_a_server_that_never_read_its_orders_waits(tmp_path: Path) -> None:
    """Somebody may be expelled in there."""
    (tmp_path / "orders.json").write_bytes(b"{")
    orders = StandingOrders(tmp_path)
    assert orders.read() == Orders(paused=True)
    assert "Until then the run waits." in orders.trouble
    (tmp_path / "orders.json").unlink()
    assert orders.read() == Orders()
    assert not orders.trouble
    (tmp_path / "orders.json").mkdir()  # nothing that can be read, for whatever reason
    assert orders.read() == Orders()
    assert "what was said before holds" in orders.trouble


def asked(address: str, path: str = "", **headers: str) -> tuple[int, str]:
    """What the page at an address answers."""
    where = urlsplit(address)
    line = http.client.HTTPConnection("127.0.0.1", where.port or 0, timeout=10)
    line.request("GET", where.path + path, headers=headers)
    answer = line.getresponse()
    return answer.status, answer.read().decode()


STATUS = {
    "state": "running",
    "time": time.time(),
    "round": 7,
    "rounds": 40,
    "squared_H": 1e-4,
    "gain": 1e-3,
    "left": 4e-3,
    "rounds_left": 12.0,
    "epsilon": 1.25,
    "began": {"sites": 3, "rows": 900},
    "counted": {"sites": 2, "rows": 600},
    "history": [[n, 10.0**-n, None] for n in range(1, 8)],
    "components": {"weights": [0.25, 0.75], "means": [[0.0, 1.0], [2.0, 3.0]]},
    "sites": {
        "oslo": {
            "in": True,
            "connected": True,
            "last": time.time(),
            "refusal": "",
        },
        "bergen": {
            "in": False,
            "connected": True,
            "last": None,
            "refusal": "<b>the owner</b> describes no group as small as one here.",
        },
    },
}


def test_the_page_shows_a_run_live_in_a_real_browser(tmp_path: Path, browser: Browser) -> None:
    status = Status(tmp_path)
    status.say(**STATUS, part="cluster", per_row="per row")  # as k-means has it
    with Console(tmp_path, 0, lambda: run_view(tmp_path, "run.toml")):
        address = page_address(tmp_path)
        assert address is not None
        later = threading.Timer(1.0, status.say, ("running",), {"round": 8})
        later.start()
        live = 'document.getElementById("headline").innerText.includes("round 8 of 40")'
        seen = browser.look(address, 800, tmp_path / "page.png", until=live)
    for words in (
        "oslo",
        "2 of 3 sites that began are in the model, with 600 of 900 rows",
        "Unconfirmed",
        "<b>the owner</b> describes no group",
        "cluster 1",
        "A round gains 0.001 per row.",
        "0.75",
        "2, 3",
        "1.25",
    ):
        assert words in seen["text"], words
    assert seen["console"] == [], "the page keeps to its own policy"
    assert seen["page"] <= 800
    picture = os.environ.get("EMFED_SCREENSHOT")
    if picture:
        Path(picture).write_bytes((tmp_path / "page.png").read_bytes())


def test_the_page_answers_its_owner_on_this_machine_alone(tmp_path: Path) -> None:
    Status(tmp_path).say(**STATUS)
    with Console(tmp_path, 0, lambda: run_view(tmp_path)) as console:
        address = page_address(tmp_path)
        assert address is not None
        assert asked(address)[0] == 200
        assert asked(address, Host=f"evil.example:{console.port}")[0] == 421, "DNS rebinding"
        assert asked(f"http://127.0.0.1:{console.port}/", "state")[0] == 404
        assert asked(address, "../../etc/passwd")[0] == 404
        assert (tmp_path / "page.secret").stat().st_mode & 0o777 == 0o600
        code, text = asked(address, "metrics")
        assert code == 200
        for line in ("emfed_rows_counted 600", "emfed_round 7", "emfed_healthy 0"):
            assert line in text.splitlines()
        for line in text.splitlines():
            assert re.fullmatch(
                r'# (HELP|TYPE) .*|emfed_\w+(\{\w+="[^"]*"(,\w+="[^"]*")*\})? \S+', line
            )
        code, text = asked(address, "health")
        assert (code, json.loads(text)["reasons"][0]) == (503, "no server works on the run")
        page = asked(address)[1] + asked(address, "page.js")[1] + asked(address, "page.css")[1]
        assert not re.search(r"https?://|//[a-z]", page), "nothing from elsewhere"
        assert "innerHTML" not in page


def test_a_page_whose_port_is_taken_says_so_and_listens_elsewhere(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A monitor that was told of the port looked at somebody else's page."""
    Status(tmp_path).say(**STATUS)
    other = tmp_path / "other"
    other.mkdir()
    with (
        Console(tmp_path, 0, lambda: run_view(tmp_path)) as first,
        Console(other, first.port, lambda: run_view(tmp_path)) as second,
    ):
        assert second.port != first.port
        assert f"the page cannot have port {first.port}: Address already in use" in caplog.text
        assert asked(str(page_address(other)))[0] == 200


def test_two_operators_who_expel_at_once_do_not_undo_each_other(tmp_path: Path) -> None:
    names = [f"s{i}" for i in range(8)]
    threads = [
        threading.Thread(target=change_orders, args=(tmp_path, {name: "wrong units"}))
        for name in names
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(read_orders(tmp_path).expelled) == names
    assert "s3" not in change_orders(tmp_path, {"s3": None}).expelled


def test_the_page_says_what_is_wrong_and_bears_rude_callers(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    wrong: list[Exception] = []

    def state() -> dict[str, Any]:
        if wrong:
            raise wrong[0]
        return {"title": "t", "line": "l", "reasons": [], "squared_H": float("inf"), "left": [nan]}

    with Console(tmp_path, 0, state, partial(answer_fit, tmp_path)) as console:
        address = page_address(tmp_path)
        assert address is not None
        # A fit that ran away: a browser takes no Infinity for JSON.
        told = json.loads(asked(address, "state")[1], parse_constant=pytest.fail)
        assert (told["squared_H"], told["left"]) == (None, [None])
        wrong.append(SettingsError("approvals.json is damaged: delete it."))
        assert asked(address, "state") == (500, "approvals.json is damaged: delete it.\n")
        wrong[0] = ValueError("of a programmer")
        with pytest.raises(http.client.RemoteDisconnected):
            asked(address, "state")
        request = urllib.request.Request(f"{address}answer", b"fit=none&answer=yes")
        request.add_header("Origin", f"http://127.0.0.1:{console.port}")
        with pytest.raises(urllib.error.HTTPError, match="400"):
            urllib.request.urlopen(request, timeout=10)
        wrong.clear()
        crowd = [socket.create_connection(("127.0.0.1", console.port)) for _ in range(300)]
        crowd[-1].settimeout(10)
        assert crowd[-1].recv(1) == b"", "one too many is closed unread"
        assert threading.active_count() < 300
        for caller in crowd:
            caller.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            caller.close()
        assert until(lambda: answers(address))
    assert capfd.readouterr() == ("", ""), "no traceback in the operator's terminal"


def answers(address: str) -> bool:
    with contextlib.suppress(OSError):
        return asked(address, "state")[0] == 200
    return False


def until(what: Callable[[], bool], seconds: float = 10.0) -> bool:
    end = time.monotonic() + seconds
    while not what() and time.monotonic() < end:
        time.sleep(0.05)
    return what()


@pytest.mark.parametrize("harm", ["alter", "cut", "drop", "insert"])
def test_a_journal_that_was_altered_or_cut_is_noticed(harm: str, tmp_path: Path) -> None:
    path = tmp_path / "messages.jsonl"
    for _ in range(2):  # a second process goes on with the chain
        journal = Journal(path)
        for number in range(3):
            journal.write(kind="reply", round=number, bytes=10, content='so "said"')
    with path.open("a") as file:
        file.write('{"time": "torn by a cra')
    Journal(path).write(kind="reply", round=9, bytes=1, content="after the crash")
    assert check_journal(path) == (7, "")
    assert path.stat().st_mode & 0o077 == 0
    lines = path.read_text().splitlines(keepends=True)
    if harm == "alter":
        lines[3] = lines[3].replace('"bytes": 10', '"bytes": 11')
    elif harm == "cut":
        del lines[-2:]
    elif harm == "drop":
        del lines[2]
    else:
        lines.insert(2, lines[1])
    path.write_text("".join(lines))
    assert check_journal(path)[1]


def test_a_key_is_rotated_without_a_moment_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = tmp_path / "keys"
    keys.make_server_keys(server, [])
    private, public = keys.make_site_key(tmp_path, "oslo")
    keys.add_site(server, public)
    heard: list[str] = []
    stop = threading.Event()
    with relay(tmp_path, server) as transport:
        line = MemberLine(
            f"127.0.0.1:{transport.port}",
            *(lambda data: None, lambda: None),
            key=private,
            authority=server / "ca.pem",
        )
        thread = threading.Thread(target=line.run, args=(stop, lambda k, w: heard.append(w)))
        thread.start()
        try:
            transport.wait_for(1, 20)
            told = keys.rotate_site_key(private)
            before = keys.read_private_key(private).public_key()
            forged = tmp_path / "other" / "oslo.rotate"
            forged.parent.mkdir()
            other, _ = keys.make_site_key(forged.parent, "oslo")
            with pytest.raises(SettingsError, match="not signed by the key that oslo has now"):
                keys.take_rotation(server, keys.rotate_site_key(other))
            assert keys.take_rotation(server, told) == "oslo"
            end = time.monotonic() + 40
            while not any("next key: it is in use now" in words for words in heard):
                assert time.monotonic() < end, heard
                time.sleep(0.05)
            assert "oslo has another key now" in caplog.text
            assert "shut out" not in caplog.text
            transport.wait_for(1, 20)
            now = keys.read_private_key(private).public_key()
            assert now != before
            for place in (server / "sites", tmp_path):
                assert now == keys.read_public_key(place / "oslo.pub")
            assert not private.with_name("oslo.key.next").exists()
        finally:
            stop.set()
            thread.join()


def test_a_key_that_others_pin_is_rotated_at_once(tmp_path: Path) -> None:
    """Between two runs no server listens to which the site could show its next key first."""
    server, roster = tmp_path / "keys", tmp_path / "roster"
    keys.make_server_keys(server, [])
    private, public = keys.make_site_key(tmp_path, "oslo")
    keys.add_site(server, public)
    pin_keys([public], roster)
    told = keys.rotate_site_key(private, now=True)
    assert keys.take_rotation(server, told) == "oslo"
    mine = keys.read_private_key(private).public_key()
    assert mine == keys.read_site_keys(server)[0]["oslo"]
    assert mine == pin_keys([public], roster, replace=True)["oslo"]
    copy = public.rename(tmp_path / "oslo.pub.new")
    for take in (partial(keys.add_site, server), lambda path: pin_keys([path], roster)):
        with pytest.raises(SettingsError, match=r"called NAME\.pub"):
            take(copy)


def test_an_order_that_changes_nothing_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    said = Status(tmp_path)
    said.say("running", sites={"oslo": {}})
    with pytest.raises(SystemExit, match="2"):
        main(["control", "expel", str(tmp_path), "bergen"])
    assert "no site 'bergen' was here; known are oslo" in capsys.readouterr().err
    assert not read_orders(tmp_path).expelled, "a slip of the pen is no order"
    said.say("finished")
    with pytest.raises(SystemExit, match="0"):
        main(["control", "pause", str(tmp_path)])
    assert "finished already" in capsys.readouterr().err
    Status(tmp_path).say("running", round=40)
    with pytest.raises(SystemExit, match="2"):
        main(["control", "extend", str(tmp_path), "40"])
    assert "has made 40 rounds" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="0"):
        main(["control", "expel", str(tmp_path), "oslo", "--why", "\x1b[31mred"])
    assert read_orders(tmp_path).expelled["oslo"] == "expelled by the operator: ?[31mred"


def test_the_doctor_says_what_is_wrong_and_how_to_mend_it(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(TOML)
    found = {finding.what.split(":")[0]: finding for finding in look_at_server(path)}
    assert not found["certificate"].good
    assert "keys server" in found["certificate"].mend
    assert not found["keys"].good
    assert found["disk"].good
    keys.make_server_keys(tmp_path / "keys", [])
    for name in ("oslo", "bergen"):
        keys.add_site(tmp_path / "keys", keys.make_site_key(tmp_path, name)[1])
    with relay(tmp_path, tmp_path / "keys") as transport:
        path.write_text(f"{TOML}[server]\nport = {transport.port}\n")
        found = {finding.what.split(":")[0]: finding for finding in look_at_server(path)}
        assert found["certificate"].good
        assert found["keys"].good
        assert "cannot listen" in found["port"].what
        address, ca = f"127.0.0.1:{transport.port}", tmp_path / "keys" / "ca.pem"
        site = list(look_at_site(address, ca, tmp_path / "oslo.key", tmp_path))
        assert all(finding.good for finding in site), site
        assert "knows this site's key" in site[-1].what
        keys.make_site_key(tmp_path, "moss")
        unknown = list(look_at_site(address, ca, tmp_path / "moss.key", tmp_path))[-1]
        assert (unknown.good, "keys add" in unknown.mend) == (False, True)
        keys.remove_site(tmp_path / "keys", "oslo")
        removed = list(look_at_site(address, ca, tmp_path / "oslo.key", tmp_path))[-1]
        assert (removed.good, "have removed this site's key" in removed.what) == (False, True)
        assert transport.workers() == []  # nobody's place was taken
        assert {"key", "name", "port", "TLS", "clock", "disk", "versions"} <= {
            finding.what.split(":")[0] for finding in site
        }
        absent = [f for f in look_at_site(address, ca, tmp_path / "no.key", tmp_path) if not f.good]
        assert absent[0].what.startswith(f"key: {tmp_path / 'no.key'}: there is no such file")
        (tmp_path / "keys" / "sites" / "torn.pub").write_text("half")
        (torn,) = [f for f in look_at_server(path) if f.what.startswith("keys")]
        assert (torn.good, "torn.pub holds no key" in torn.what) == (False, True)
        missing = list(look_at_site(address, tmp_path / "ca.pem", None, tmp_path))[-1]
        assert (missing.good, "--ca" in missing.mend) == (False, True)
        keys.make_server_keys(tmp_path / "other", [])
        wrong = list(look_at_site(address, tmp_path / "other" / "ca.pem", None, tmp_path))[-1]
        assert not wrong.good
        assert "right ca.pem" in wrong.mend
    nobody = list(look_at_site(address, ca, None, tmp_path))[-1]
    assert (nobody.good, "does not answer" in nobody.what) == (False, True)


def test_connections_that_are_accepted_and_closed_leave_a_site_trying(tmp_path: Path) -> None:
    """What a firewall or a balancer does for a while."""
    heard: list[str] = []
    stop, port = threading.Event(), free_port()
    line = MemberLine(f"127.0.0.1:{port}", lambda data: None, lambda: None, name="oslo")
    thread = threading.Thread(target=line.run, args=(stop, lambda k, w: heard.append(w)))
    with socket.create_server(("127.0.0.1", port)) as door:
        thread.start()
        for _ in range(2):
            door.accept()[0].close()
    try:
        with relay(tmp_path, None, port) as transport:
            transport.wait_for(1, 40)
    finally:
        stop.set()
        thread.join()
    assert any("trying again" in words for words in heard)


def test_files_that_unpack_to_more_than_the_memory_are_refused_unread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sources, "free_memory", lambda: 64 << 20)
    monkeypatch.setattr(files, "free_memory", lambda: 64 << 20)
    (tmp_path / "rows.csv.gz").write_bytes(gzip.compress(b"a,b\n" + b"0,0\n" * (8 << 20)))
    with pytest.raises(DataError, match="unpacks to"):
        files.open_file(tmp_path / "rows.csv.gz")
    pl.DataFrame({"a": np.zeros(10 << 20)}).write_parquet(tmp_path / "rows.parquet")
    assert (tmp_path / "rows.parquet").stat().st_size < 50_000
    with pytest.raises(DataError, match="unpacks to"):
        files.open_file(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="unpacks to"):
        _ = sources.ParquetRows(tmp_path / "rows.parquet").shape
    with zipfile.ZipFile(tmp_path / "rows.xlsx", "w", zipfile.ZIP_DEFLATED) as sheet:
        sheet.writestr("xl/worksheets/sheet1.xml", bytes(80 << 20))
    with pytest.raises(DataError, match="unpacks to"):
        files.open_file(tmp_path / "rows.xlsx")
    (tmp_path / "wide.csv").write_bytes(b"," * (3 << 20) + b"\n1\n")
    with pytest.raises(DataError, match="columns; at most"):
        files.open_file(tmp_path / "wide.csv")


def test_words_of_others_command_no_terminal_and_no_spreadsheet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = np.random.default_rng(0).normal(size=(60, 2))
    names = ("=cmd|' /C calc'!A1", "\x1b]0;owned\x07\x1b[31mred")
    tables = dict(zip(names, (rows[:30], rows[30:]), strict=True))
    fit(gaussian_mixture(1), tables, "em", rounds=1).save(tmp_path / "m.emfed")
    for more in ([], ["--workers", str(tmp_path / "w.csv")]):
        with pytest.raises(SystemExit):
            main(["inspect", str(tmp_path / "m.emfed"), *more])
        said = capsys.readouterr().out
        assert "\x1b" not in said
        assert "\x07" not in said
    cells = pl.read_csv(tmp_path / "w.csv")["worker"].to_list()
    assert cells[0].startswith("'=cmd")
    write_table({"a": ["-1.5", "+3", "-x"], "b": [-1.0, 2.0, -3.0]}, str(tmp_path / "n.csv"))
    kept = pl.read_csv(tmp_path / "n.csv", infer_schema=False)
    assert kept["a"].to_list() == ["-1.5", "+3", "'-x"]
    assert kept["b"].to_list() == ["-1.0", "2.0", "-3.0"]


GARBAGE = {
    "empty": b"",
    "null": b"null\n",
    "a list": b"[1]\n",
    "no text": bytes(range(128, 256)),
    "nested": b"[" * 100_000,
}


def test_a_full_disk_is_told_in_words_and_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with logging_to(tmp_path / "serve.log"):
        before = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # Python ignores SIGXFSZ
        try:
            for _ in range(3):
                logging.getLogger("emfed").warning("oslo is gone")
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        logging.getLogger("emfed").warning("oslo is back")
    *_, note, last = (tmp_path / "serve.log").read_text().splitlines()
    assert note.endswith("3 lines before this one could not be written: File too large")
    assert last.endswith("oslo is back")
    said = capsys.readouterr().err
    assert said.count("serve.log cannot be written: File too large. Make room") == 1
    assert "Traceback" not in said


def test_words_that_a_full_disk_cannot_take_end_no_command() -> None:
    """A site whose output went to the full disk ended with code 1; a closed pipe still ends it."""
    with bearing_full_disks():
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(BrokenPipeError), bearing_full_disks():
        raise BrokenPipeError(errno.EPIPE, "Broken pipe")


def test_logs_are_lines_of_json_on_request(tmp_path: Path) -> None:
    with logging_to(tmp_path / "logs" / "serve.log", as_json=True):
        logging.getLogger("emfed.trial").warning("oslo is %s", 'gone\n"away"')
    logging.getLogger("emfed.trial").warning("not here any more")
    (line,) = (tmp_path / "logs" / "serve.log").read_text().splitlines()
    said = json.loads(line)
    assert (said["level"], said["message"]) == ("WARNING", 'oslo is gone\n"away"')


def test_the_terminal_shows_what_the_page_shows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Status(tmp_path).say(**{**STATUS, "state": "finished"})
    with pytest.raises(SystemExit) as ended:
        main(["status", str(tmp_path), "--watch"])
    assert ended.value.code == 0
    said = capsys.readouterr().out
    for words in ("oslo", "describes no group", "0.75", "finished: round 7 of 40"):
        assert words in said, words


def test_a_watch_that_goes_into_a_pipe_shows_the_run_at_once_and_then_what_is_new(
    tmp_path: Path,
) -> None:
    """It said nothing before the run was over: what draws over a terminal waits elsewhere."""
    status = Status(tmp_path)
    status.say(**STATUS)
    command = [
        sys.executable,
        "-c",
        "from emfed.cli.main import main; main()",
        "status",
        str(tmp_path),
        "--watch",
    ]
    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as watch,
        contextlib.ExitStack() as ended,
    ):
        ended.callback(watch.kill)  # what fails here must not wait for a run without an end
        assert watch.stdout is not None
        assert "round 7 of 40" in watch.stdout.readline()
        status.say("running", round=8)
        assert any("round 8 of 40" in line for line in watch.stdout)
        status.say("finished", converged=True)
        assert "finished: converged after 8 rounds" in watch.stdout.read()
        assert watch.wait() == 0


NO = 'models = ["mixed-mixture"]\n'
YES = 'models = ["gaussian-mixture"]\n'


@pytest.mark.parametrize(
    ("expected", "privacy", "fewest"),
    [(3, "", 3), (4, "", 3), (8, "", 4), (4, "masks = false", 2), (2, "masks = true", 3)],
)
def test_the_doctor_knows_how_many_sites_a_run_needs(
    expected: int, privacy: str, fewest: int, tmp_path: Path
) -> None:
    text = TOML.replace("expected = 2", f"expected = {expected}")
    (tmp_path / "run.toml").write_text(f"{text}[privacy]\n{privacy}\n")
    keys.make_server_keys(tmp_path / "keys", [])
    for name in ("oslo", "bergen"):
        keys.add_site(tmp_path / "keys", keys.make_site_key(tmp_path, name)[1])
    (found,) = [f for f in look_at_server(tmp_path / "run.toml") if f.what.startswith("keys")]
    assert f"2 sites may join, {fewest} must" in found.what
    assert found.good is (fewest == 2)


def test_the_doctor_names_files_of_another_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after one command was run as root: it ended with "Permission denied" itself."""
    (tmp_path / "run.toml").write_text(TOML)
    keys.make_server_keys(tmp_path / "keys", [])
    (tmp_path / "run").mkdir()
    change_orders(tmp_path / "run", paused=True)
    monkeypatch.setattr(os, "access", lambda path, need: path.name != "orders.lock")
    *_, last = look_at_server(tmp_path / "run.toml")
    assert not last.good
    assert re.search(r"the one that asks may not use .*orders\.lock", last.what)
    assert "chown" in last.mend


def site_of(folder: Path, rows: Path, seal: Path | None = None) -> Path:
    """A site's folder, as `emfed join` leaves it."""
    folder.mkdir(exist_ok=True)
    write_site(folder, prepare(folder, rows, None, seal=seal), SiteRules(), None)
    return folder


def test_the_page_asks_an_owner_and_takes_the_answer_from_nowhere_else(tmp_path: Path) -> None:
    tables(1)["s0"].write_csv(tmp_path / "rows.csv")
    folder = site_of(tmp_path / "site-oslo", tmp_path / "rows.csv")
    asked_about = {"model": gaussian_mixture(2).describe(), "columns": ["x"], "masks": True}
    assert owners_word(folder, asked_about) is None
    (waiting,) = pending_fits(folder)
    assert [fit["fit"] for fit in SiteView(folder)()["pending"]] == [waiting["fit"]]
    with Console(folder, 0, SiteView(folder), partial(answer_fit, folder)) as console:
        address = page_address(folder)
        assert address is not None
        where, line = urlsplit(address), http.client.HTTPConnection("127.0.0.1", console.port)
        form = f"fit={waiting['fit']}&answer=yes"
        for origin, code in (
            ("http://evil.example", 403),
            (f"http://127.0.0.1:{console.port}", 303),
        ):
            line.request("POST", where.path + "answer", form, {"Origin": origin})
            answer = line.getresponse()
            assert (answer.status, answer.read() is None) == (code, False)
            line.close()
    assert owners_word(folder, asked_about) is True
    assert owners_word(folder, {**asked_about, "masks": False}) is None
    answer_fit(folder, pending_fits(folder)[0]["fit"], False)
    assert owners_word(folder, {**asked_about, "masks": False}) is False


GARBAGE = {
    "empty": b"",
    "null": b"null\n",
    "a list": b"[1]\n",
    "no text": bytes(range(128, 256)),
    "nested": b"[" * 100_000,
}


@pytest.mark.parametrize("content", GARBAGE.values(), ids=GARBAGE)
def test_damaged_files_are_named_with_what_to_do(content: bytes, tmp_path: Path) -> None:
    """Of a server, of a site and of keys: nothing that lies on a disk ends in a traceback."""
    (tmp_path / "run.toml").write_text(TOML)
    config, run, kept = read_config(tmp_path / "run.toml"), tmp_path / "run", tmp_path / "keys"
    run.mkdir()
    tables(1)["s0"].write_csv(tmp_path / "rows.csv")
    folder = site_of(tmp_path / "site-oslo", tmp_path / "rows.csv")
    keys.make_server_keys(kept, [])
    document = document_of(config)
    Journal(folder / "messages.jsonl").write(kind="hello", content="")
    reads: list[tuple[Path, Callable[[], object], str]] = [
        (run / "orders.json", lambda: read_orders(run), "say again with"),
        (run / "configuration.json", lambda: recognise(run, config, document), "backup"),
        (run / "run.name", lambda: run_of(run), "backup"),
        (folder / "approvals.json", lambda: pending_fits(folder), "answer again"),
        (folder / "rows.npy", lambda: read_rows(read_about(folder)["data"]), "makes it anew"),
        (folder / "site.json", lambda: read_about(folder), "writes it anew"),
        (kept / "server.pem", lambda: keys.check_certificate(kept / "server.pem"), "backup"),
        (kept / "ca.pem", lambda: keys.make_server_keys(kept, []), "backup"),
        (kept / "ca.key", lambda: keys.make_server_keys(kept, []), "backup"),
    ]
    for path, read, advice in reads:
        before = path.read_bytes() if path.exists() else None
        path.write_bytes(content)
        with pytest.raises(EmfedError, match=rf"{path.name} is damaged: .*{advice}"):
            read()
        path.unlink() if before is None else path.write_bytes(before)
    (folder / "messages.jsonl.head").write_bytes(content)
    assert "messages.jsonl.head is damaged" in check_journal(folder / "messages.jsonl")[1]
    (run / "status.json").write_bytes(content)
    assert run_view(run)["line"] == ""
    (folder / "site.json").write_bytes(content)
    assert SiteView(folder)()["rules"] == {}


def test_the_log_tells_what_a_killed_server_said_last(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that was killed leaves no word of its own."""
    caplog.set_level("INFO", "emfed")
    with Deployed(tmp_path) as deployed:
        (tmp_path / "run").mkdir()
        Status(tmp_path / "run").say("running", round=17, rounds=24)
        deployed.serve()
        said = r"the server before it said last, .*: round 17 of 24"
        waited_until(lambda: re.search(said, caplog.text))


def test_a_server_without_room_says_where_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "model/model.emfed")

    with Deployed(tmp_path, "farewell = 0.5\n") as deployed:
        monkeypatch.setattr("emfed.deployment.analyst.leave_result", full)
        server, _ = deployed.serve(), deployed.join_all()
        with pytest.raises(EmfedError, match="model.emfed cannot be written .* the same command"):
            server.wait()
        monkeypatch.undo()
        deployed.serve().wait()  # nobody need come back: all is in the transcript
        assert deployed.status["state"] == "finished"


def test_erasing_rows_leaves_nothing_that_was_computed_from_them(tmp_path: Path) -> None:
    with Deployed(tmp_path) as deployed:
        server, sites = deployed.serve(), deployed.join_all()
        server.wait()
        deployed.outcomes(sites)
        folder = tmp_path / "site-s0"
        (folder / "memory" / "0123456789abcdef").mkdir()  # of a run of release 0.1
        (folder / "memory" / "0123456789abcdef" / "state").write_bytes(b"sums of rows")
        spent = (folder / "memory" / "answered").read_bytes()
        assert erase_site(folder) == 2
        left = {path.name for path in folder.rglob("*") if path.is_file()}
        assert not left & {"rows.npy", "state", "described"}
        assert not list((folder / "runs").iterdir())
        assert (folder / "memory" / "answered").read_bytes() == spent
        assert check_journal(folder / "messages.jsonl")[1] == ""


def test_a_sealed_site_leaves_nothing_readable_and_goes_on(tmp_path: Path) -> None:
    keys.make_seal(tmp_path / "s0.seal")
    with Deployed(tmp_path) as deployed:
        server, sites = deployed.serve(), deployed.join_all("s0")
        sites["s0"] = deployed.join("s0", seal=tmp_path / "s0.seal")
        server.wait()
        deployed.outcomes(sites)
        folder, row = tmp_path / "site-s0", deployed.tables["s0"].to_numpy()[0].tobytes()
        models = [folder / "model.emfed", *(folder / "models").iterdir()]
        names = [path for path in folder.rglob("*") if path.is_file() and path not in models]
        assert {"rows.npy", "answered", "described"} <= {path.name for path in names}
        (run,) = (folder / "runs").glob("*.sqlite")
        assert run.stat().st_size > 10_000
        for path in names:
            content = path.read_bytes()
            assert row not in content
            assert b"NUMPY" not in content
            readable = path.name in ("site.json", "messages.jsonl", "join.log")
            assert b"gaussian-mixture" not in content or readable, path
        (tmp_path / "s0.seal").unlink()
        keys.make_seal(tmp_path / "s0.seal")
        with pytest.raises(SettingsError, match="was not sealed with this secret"):
            read_rows(read_about(folder)["data"])


def test_a_folder_that_was_begun_without_a_seal_is_sealed_and_keeps_its_counts(
    tmp_path: Path,
) -> None:
    folder, ledger = tmp_path / "site-oslo", tmp_path / "elsewhere"
    tables(1)["s0"].write_csv(tmp_path / "rows.csv")
    rules = SiteRules(largest_rounds=100, second_ledger=str(ledger))

    def take_part(seal: Path | None) -> int:
        many = seal_files(folder, seal, rules)
        site_of(folder, tmp_path / "rows.csv", seal)
        memory = site_memory(folder, read_about(folder)["data"], rules)
        assert memory.tally.spend({"answered": 100}) is None
        return many

    assert take_part(None) == 0
    kept = (folder / "memory" / "answered").read_bytes()
    seals = tmp_path / "oslo.seal", tmp_path / "other.seal"
    for path in seals:
        keys.make_seal(path)
    assert take_part(seals[0]) == 2
    assert take_part(seals[0]) == 0
    for place in (folder / "memory", ledger):
        tally = Tally(place, keys.SealedDisk(keys.read_seal(seals[0])))
        assert tally.read()["answered"] >= 3
        assert (place / "answered").read_bytes() != kept
    with pytest.raises(SettingsError, match="was not sealed with this secret"):
        seal_files(folder, seals[1], rules)
    with pytest.raises(SettingsError, match="give --seal"):
        seal_files(folder, None, rules)
    (folder / "site.json").write_text("rubbish")  # it is written anew, and nothing is sealed twice
    assert seal_files(folder, seals[0], rules) == 0
    with pytest.raises(SettingsError, match="was not sealed with this secret"):
        seal_files(folder, seals[1], rules)


def test_a_run_s_file_is_sealed_entry_by_entry(tmp_path: Path) -> None:
    path, secret, other = tmp_path / "run.sqlite", bytes(range(32)), bytes(32)
    plain = RecordFile(path)
    plain.write(0, [b"first entry", b"second entry"])
    plain.keep_state(b"head", b"a model")
    plain.close()
    sealed = RecordFile(path, secret)
    sealed.write(2, [b"third entry"])
    assert sealed.entries() == [b"first entry", b"second entry", b"third entry"]
    assert sealed.states() == {b"head": b"a model"}
    sealed.close()
    content = b"".join(found.read_bytes() for found in tmp_path.iterdir())
    assert not any(words in content for words in (b"entry", b"a model"))
    with pytest.raises(SettingsError, match="not sealed with this secret"):
        RecordFile(path, other)
    with pytest.raises(SettingsError, match="give --seal"):
        RecordFile(path)
    again = RecordFile(path, secret)
    assert len(again.entries()) == 3
    again.close()
