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
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from math import nan
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import numpy as np
import polars as pl
import pytest
from benchmarks.deployments import (
    COMMAND,
    FEDEM,
    MIXTURE,
    Deployment,
    difference,
    mixture_tables,
)
from benchmarks.hours import Operation, good

from emfed import fit, gaussian_mixture, load
from emfed.cli.federate import refusal_lines
from emfed.cli.main import main
from emfed.cli.tables import write_table
from emfed.core.errors import DataError, EmfedError, ParticipationError, SettingsError
from emfed.core.wire import Header, Kind, Reason, encode_refusal, kind_of, seal, seal_refusal
from emfed.data import as_workers, files, sources
from emfed.deployment import status as status_module
from emfed.deployment.approval import answer_fit, pending_fits
from emfed.deployment.config import read_config
from emfed.deployment.console import Console, health, page_address
from emfed.deployment.doctor import look_at_server, look_at_site
from emfed.deployment.hosting import (
    ServerSupervisor,
    WebSocketServerSupervisor,
    recognise,
)
from emfed.deployment.orders import (
    Orders,
    StandingOrders,
    change_orders,
    read_orders,
)
from emfed.deployment.serving import serve_run
from emfed.deployment.site import (
    erase_site,
    open_site,
    prepare,
    seal_files,
    write_site,
)
from emfed.deployment.status import Noted, Status, bearing_full_disks, logging_to
from emfed.deployment.views import SiteView, run_view, status_line
from emfed.fitting.driver import run_fit
from emfed.network import (
    LocalTransport,
    LoopFederation,
    RemoteFederation,
    Site,
    SiteRules,
    Transport,
    keys,
    listen,
)
from emfed.network.addresses import free_port
from emfed.network.flower.joining import stands_still
from emfed.network.journal import Journal, check_journal
from emfed.network.masking import pin_keys
from emfed.network.spending import Tally
from emfed.network.websocket.client import SiteConnection
from tests.artifacts.browser import Browser

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="these tests read /proc")
CONFIG = (
    MIXTURE
    + FEDEM
    + """
[fit]
tol = 0.0
rounds = {rounds}
seed = 3
[sites]
expected = {sites}
minimum = 2
deliver = true
farewell = 2.0
"""
)


def configured(rounds: int = 3, sites: int = 2, more: str = "") -> str:
    return CONFIG.format(rounds=rounds, sites=sites) + more


def test_after_the_last_run_sites_are_told_get_the_model_and_end(tmp_path: Path) -> None:
    with Deployment(tmp_path / "d", mixture_tables(3), configured(sites=3)) as deployment:
        place = f'port = {deployment.port}\nkeys = "{deployment.keys}"\n'
        place += 'folder = "run2"\noutput = "model2"\n'
        (deployment.folder / "second.toml").write_text(configured(2, 3, f"[server]\n{place}"))
        serve = deployment.spawn("serve", "serve", "run.toml", "second.toml")
        sites = {name: deployment.join(name) for name in ("s0", "s1")}
        stays = deployment.join("s2", "--stay")
        assert serve.wait(60) == 0, deployment.output("serve")
        model = (deployment.folder / "model2" / "model.emfed").read_bytes()
        for name, site in sites.items():
            assert site.wait(20) == 0, deployment.output(name)
            assert (deployment.folder / f"site-{name}" / "model.emfed").read_bytes() == model
            said = deployment.output(name)
            assert "the run ended after 3 rounds" in said
            assert "another run follows" in said
            after = said.partition("the run ended after 2 rounds")[2]
            assert "took its model" in after
            assert "nothing listens" not in after
        assert load(deployment.folder / "site-s0" / "model.emfed").params.weights.shape == (2,)
        assert json.loads((deployment.folder / "run2" / "status.json").read_text())["untold"] == []
        drawn = [(deployment.folder / n / "report.html").exists() for n in ("model", "model2")]
        assert drawn == [False, True]  # the first run's file says report = false
        lines = (deployment.folder / "site-s0" / "messages.jsonl").read_text().splitlines()
        rounds = [e["round"] for e in map(json.loads, lines) if e["round"] is not None]
        assert {1, 2, 3} <= {*rounds} <= {*range(9)}  # openings and questions belong to no round
        assert stays.poll() is None


def test_runs_at_once_share_sites_and_rules_and_end_as_if_alone(tmp_path: Path) -> None:
    tables = mixture_tables(3)
    with Deployment(tmp_path / "d", tables, configured(200, 3)) as deployment:
        place = f'port = {deployment.port}\nkeys = "{deployment.keys}"\nreport = false\n'
        place += 'folder = "run2"\noutput = "model2"\n'
        second = deployment.folder / "second.toml"
        second.write_text(configured(3, 3, f"[server]\n{place}").replace("= 2", "= 1", 1))
        command = ("serve", "run.toml", "second.toml", "--at-once")
        joined = [deployment.join(name) for name in tables]
        deployment.spawn("serve", *command)
        deployment.wait_for_round(3, 60)
        deployment.stop("serve")
        assert "the same command goes on" in deployment.output("serve")
        change_orders(deployment.folder / "run", rounds=12)
        serve = deployment.spawn("serve", *command)
        assert serve.wait(60) == 0, deployment.output("serve")
        for run, output in ((read_config(second), "model2"), (deployment.config, "model")):
            settings = run.settings.but(rounds=12 if output == "model" else 3, masks=True)
            network = LoopFederation(as_workers(tables))
            alone = run_fit(settings, network).result
            found = json.loads((deployment.folder / output / "summary.json").read_text())
            assert difference(found, alone) < 1e-9
            for name in tables:
                mine = deployment.folder / f"site-{name}" / "models" / f"{run.path.stem}.emfed"
                theirs = deployment.folder / output / "model.emfed"
                assert mine.read_bytes() == theirs.read_bytes()
        assert [process.wait(20) for process in joined] == [0, 0, 0]
        said = deployment.output("s0")
        assert said.count("the run ended after") == 2
        assert said.count("another run follows") == 1
        logs = [deployment.folder / r / "logs" / "serve.log" for r in ("run", "run2")]
        assert all("s0 is connected" in path.read_text() for path in logs)


class Ordered:
    """A run in this process whose operator says things when a round is reached."""

    def __init__(self, folder: Path, orders: dict[int, Callable[[], object]]) -> None:
        (folder / "run.toml").write_text(configured(24, 3))
        self.config = read_config(folder / "run.toml")
        self.folder = self.config.place("folder")
        self.folder.mkdir()
        self.tables = {name: table.to_numpy() for name, table in mixture_tables(3).items()}
        rules = SiteRules.loosest()
        self.sites = {
            name: Site(table, folder / name, rules=rules) for name, table in self.tables.items()
        }
        self.said: list[dict[str, Any]] = []
        self._orders = orders

    def report(self, status: dict[str, Any]) -> None:
        self.said.append(status)
        if status["state"] == "running" and status.get("round") in self._orders:
            self._orders.pop(status["round"])()

    def run(self) -> dict[str, Any]:
        serve_run(LocalTransport(self.sites), self.config, Status(self.folder, self.report))
        return json.loads((self.config.place("output") / "summary.json").read_text())


def test_who_is_expelled_counts_no_longer_and_may_return(tmp_path: Path) -> None:
    def expel() -> None:
        change_orders(tmp_path / "run", expelled={"s2": "expelled by the operator"})

    run = Ordered(tmp_path, {5: expel})
    summary = run.run()
    assert "s2" in summary["refusals"]
    others = {name: run.tables[name] for name in ("s0", "s1")}
    pooled = fit(gaussian_mixture(2), others, "em", rounds=300, seed=3)
    found = load(run.config.place("output") / "model.emfed")
    close = np.allclose(np.sort(found.params.means, 0), np.sort(pooled.params.means, 0), atol=0.05)
    assert close, (found.params.means, pooled.params.means)
    assert run.said[-1]["sites"]["s2"]["refusal"] == "expelled by the operator"
    assert refusal_lines(run.said[-1]) == ["s2 is out: expelled by the operator"]

    (tmp_path / "again").mkdir()

    def readmit() -> None:
        change_orders(tmp_path / "again" / "run", expelled={})

    def expel_there() -> None:
        change_orders(tmp_path / "again" / "run", expelled={"s2": "for a while"})

    back = Ordered(tmp_path / "again", {5: expel_there, 9: readmit})
    assert "s2" not in back.run()["refusals"]
    answers = [s["answered"] for s in back.said if s["state"] == "running" and "answered" in s]
    assert min(answers[6:9]) == 2
    assert answers[-1] == 3


def test_a_run_is_paused_extended_and_finished_by_the_operator(tmp_path: Path) -> None:
    folder = tmp_path / "run"

    def pause() -> None:
        change_orders(folder, paused=True)
        threading.Timer(0.5, change_orders, (folder,), {"paused": False}).start()

    run = Ordered(
        tmp_path,
        {
            5: pause,
            10: lambda: change_orders(folder, rounds=60),
            30: lambda: change_orders(folder, finish=True),
        },
    )
    summary = run.run()
    assert any(status["state"] == "paused" for status in run.said)
    assert summary["rounds"] == 30
    assert run.said[-1]["state"] == "finished"
    assert "finished: ended by the operator, round 30" in status_line(run.said[-1])
    assert "(the rows themselves are " in status_line(run.said[-1])
    told = [s for s in run.said if "per_row" in s]
    assert {(s["part"], s["per_row"]) for s in told} == {("component", "nats per row")}
    assert {s["why"] for s in run.said if s["state"] == "running" and "round" in s} == {""}


class Idle(ServerSupervisor):
    """Notes whether a server would be started."""

    started = False

    def work(self, report: Callable[[dict[str, Any]], None]) -> None:
        self.started = True


@pytest.mark.parametrize(
    ("converged", "finish", "goes_on"),
    [(False, False, True), (True, False, False), (False, True, False)],
)
def test_a_run_that_was_extended_and_then_ended_does_not_begin_again(
    converged: bool, finish: bool, goes_on: bool, tmp_path: Path
) -> None:
    """Started again it asked its sites, who had gone home, for a round more, for a day."""
    run = Ordered(tmp_path, {})
    recognise(run.folder, run.config)
    ended = {"round": 40, "rounds": 500, "converged": converged, "untold": []}
    Status(run.folder).say("finished", **ended)
    change_orders(run.folder, rounds=500, finish=finish)
    server = Idle(replace(run.config, server=replace(run.config.server, page=0)), insecure=True)
    server.run(lambda status: None)
    assert server.started is goes_on


def test_who_is_expelled_before_the_first_round_is_not_waited_for(tmp_path: Path) -> None:
    run = Ordered(tmp_path, {})
    change_orders(run.folder, expelled={"s2": "away", "a typing error": ""})
    run.run()
    waited = [status["why"] for status in run.said if status["state"] == "waiting"]
    assert waited[-1] == "2 of 2 sites are here"


def test_orders_that_cannot_be_read_end_no_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A hand's slip in orders.json ended the run with code 2. What was said before holds."""
    caplog.set_level("INFO", "emfed")
    file = tmp_path / "run" / "orders.json"

    def slip() -> None:
        change_orders(tmp_path / "run", expelled={"s2": "wrong units"})

    run = Ordered(tmp_path, {5: slip, 8: lambda: file.write_text("{'paused': true}") and None})
    assert run.run()["rounds"] == 24
    last = run.said[-1]
    assert "wrong units" in last["sites"]["s2"]["refusal"]
    assert "orders.json is damaged" in last["trouble"]
    assert "what was said before holds" in " ".join(health(last)[1])
    assert caplog.text.count("orders.json is damaged") == 1
    assert "s2 is out: wrong units" in caplog.text


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
    "answered": 2,
    "asked": 3,
    "history": [[n, 10.0**-n, None] for n in range(1, 8)],
    "components": {"weights": [0.25, 0.75], "means": [[0.0, 1.0], [2.0, 3.0]]},
    "traffic": {"up": {"reply": [14, 900]}, "down": {"request": [14, 4000]}},
    "sites": {
        "oslo": {
            "in": True,
            "connected": True,
            "rows": 300,
            "last": time.time(),
            "seconds": 0.012,
            "refusal": "",
        },
        "bergen": {
            "in": False,
            "connected": True,
            "rows": None,
            "last": None,
            "seconds": None,
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
        "300",
        "<b>the owner</b> describes no group",
        "cluster 1",
        "A round gains 0.001 per row.",
        "0.75",
        "2, 3",
        "900 B",
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
        for line in ('emfed_site_rows{site="oslo"} 300', "emfed_round 7", "emfed_healthy 0"):
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


def test_an_owner_who_asks_first_is_asked_once_for_each_fit(tmp_path: Path) -> None:
    table = mixture_tables(2)["s0"]
    table.write_csv(tmp_path / "rows.csv")
    rules = SiteRules.loosest(ask_first=True)
    folder = tmp_path / "site-oslo"
    folder.mkdir()
    write_site(folder, prepare(folder, tmp_path / "rows.csv", None), rules, None)
    sites = {"oslo": open_site(folder)}

    def try_fit(components: int) -> Any:
        federation = RemoteFederation(LocalTransport(sites), attempts=1)
        return fit(gaussian_mixture(components), None, "em", federation=federation, rounds=2)

    with pytest.raises(ParticipationError):
        try_fit(2)
    with pytest.raises(ParticipationError):
        try_fit(2)
    (waiting,) = pending_fits(folder)
    assert "gaussian-mixture" in waiting["words"]
    assert "n_components 2" in waiting["words"]
    view = SiteView(folder)()
    assert [fit["fit"] for fit in view["pending"]] == [waiting["fit"]]
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
    try_fit(2)
    with pytest.raises(ParticipationError):
        try_fit(3)
    answer_fit(folder, pending_fits(folder)[0]["fit"], False)
    with pytest.raises(ParticipationError, match="does not take part"):
        try_fit(3)


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


def test_erasing_rows_leaves_nothing_that_was_computed_from_them(tmp_path: Path) -> None:
    mixture_tables(2)["s0"].write_csv(tmp_path / "rows.csv")
    folder = tmp_path / "site-oslo"
    folder.mkdir()
    write_site(folder, prepare(folder, tmp_path / "rows.csv", None), SiteRules.loosest(), None)
    federation = RemoteFederation(LocalTransport({"oslo": open_site(folder)}))
    fit(gaussian_mixture(2), None, "em", federation=federation, rounds=2)
    spent = (folder / "memory" / "answered").exists()
    assert erase_site(folder) == 1
    left = {path.name for path in folder.rglob("*") if path.is_file()}
    assert not left & {"rows.npy", "joined", "state"}
    assert (folder / "memory" / "answered").exists() is spent
    assert check_journal(folder / "messages.jsonl")[1] == ""


def test_a_key_is_rotated_without_a_moment_without_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    server = tmp_path / "keys"
    keys.make_server_keys(server, [])
    private, public = keys.make_site_key(tmp_path, "oslo")
    keys.add_site(server, public)
    heard: list[str] = []
    stop = threading.Event()
    with listen("127.0.0.1:0", keys=server) as transport:
        line = SiteConnection(
            f"127.0.0.1:{transport.port}", lambda m: m, key=private, authority=server / "ca.pem"
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
    path.write_text(configured())
    found = {finding.what.split(":")[0]: finding for finding in look_at_server(path)}
    assert not found["certificate"].good
    assert "keys server" in found["certificate"].mend
    assert not found["keys"].good
    assert found["disk"].good
    keys.make_server_keys(tmp_path / "keys", [])
    for name in ("oslo", "bergen"):
        keys.add_site(tmp_path / "keys", keys.make_site_key(tmp_path, name)[1])
    with listen("127.0.0.1:0", keys=tmp_path / "keys") as transport:
        path.write_text(configured(more=f"[server]\nport = {transport.port}\n"))
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


class Known(Transport):
    """Two sites that are known by keys, are there, and are never asked."""

    between_machines = True

    def workers(self) -> list[str]:
        return ["bergen", "oslo"]

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        raise AssertionError("a run began with too few sites")


@pytest.mark.parametrize(
    ("expected", "privacy", "fewest"),
    [(3, "", 3), (4, "", 3), (8, "", 4), (4, "masks = false", 2), (2, "masks = true", 3)],
)
def test_everybody_says_alike_how_many_sites_a_run_needs(
    expected: int, privacy: str, fewest: int, tmp_path: Path
) -> None:
    """The doctor took two for enough where a masked sum has three; so did a server that waited,
    which began, failed and waited again."""
    more = f"wait = 0.0\ngive_up = 0.0\n[privacy]\n{privacy}\n"
    text = configured(sites=expected, more=more).replace("minimum = 2\n", "")
    (tmp_path / "run.toml").write_text(text)
    keys.make_server_keys(tmp_path / "keys", [])
    for name in ("oslo", "bergen"):
        keys.add_site(tmp_path / "keys", keys.make_site_key(tmp_path, name)[1])
    (found,) = [f for f in look_at_server(tmp_path / "run.toml") if f.what.startswith("keys")]
    assert f"2 sites may join, {fewest} must" in found.what
    assert found.good is (fewest == 2)
    if fewest > 2:
        (tmp_path / "run").mkdir()
        config = read_config(tmp_path / "run.toml")
        with pytest.raises(ParticipationError, match=f"2 sites are here; {fewest} are needed"):
            serve_run(Known(), config, Status(tmp_path / "run"))


def test_the_doctor_names_files_of_another_account(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after one command was run as root: it ended with "Permission denied" itself."""
    run = Ordered(tmp_path, {})
    keys.make_server_keys(tmp_path / "keys", [])
    change_orders(run.folder, paused=True)
    monkeypatch.setattr(os, "access", lambda path, need: path.name != "orders.lock")
    *_, last = look_at_server(tmp_path / "run.toml")
    assert not last.good
    assert re.search(r"the one that asks may not use .*orders\.lock", last.what)
    assert "chown" in last.mend


def test_connections_that_are_accepted_and_closed_leave_a_site_trying(tmp_path: Path) -> None:
    """What a firewall or a balancer does for a while."""
    heard: list[str] = []
    stop, port = threading.Event(), free_port()
    line = SiteConnection(f"127.0.0.1:{port}", lambda m: m, name="oslo")
    thread = threading.Thread(target=line.run, args=(stop, lambda k, w: heard.append(w)))
    with socket.create_server(("127.0.0.1", port)) as door:
        thread.start()
        for _ in range(2):
            door.accept()[0].close()
    try:
        with listen(f"127.0.0.1:{port}", insecure=True) as transport:
            transport.wait_for(1, 40)
    finally:
        stop.set()
        thread.join()
    assert any("trying again" in words for words in heard)


@pytest.mark.parametrize(
    ("last", "seconds", "hangs"),
    [
        ("INFO: Receiving: query.emfed message", 300.0, True),
        ("WARNING: Connection attempt failed, retrying in 4.1 seconds", 300.0, True),
        ("INFO: Received successfully", 3600.0, False),
        ("INFO: Sent successfully", 3600.0, False),
        ("INFO: Receiving: query.emfed message", 10.0, False),
    ],
)
def test_a_supernode_that_hangs_is_told_from_an_idle_one(
    last: str, seconds: float, hangs: bool
) -> None:
    assert stands_still(last, seconds) is hangs


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


@pytest.mark.long
@pytest.mark.parametrize("masks", [False, True])
def test_an_hour_of_harm_on_a_network_in_memory(masks: bool, tmp_path: Path) -> None:
    found = Operation(tmp_path, 3, masks).go(1.0)
    assert good(found), found


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
    run, folder, kept = Ordered(tmp_path, {}), tmp_path / "site-oslo", tmp_path / "keys"
    mixture_tables(1)["s0"].write_csv(tmp_path / "rows.csv")
    folder.mkdir()
    write_site(folder, prepare(folder, tmp_path / "rows.csv", None), SiteRules(), None)
    keys.make_server_keys(kept, [])
    Journal(folder / "messages.jsonl").write(kind="join", content="")
    reads: list[tuple[Path, Callable[[], object], str]] = [
        (run.folder / "orders.json", lambda: read_orders(run.folder), "say again with"),
        (run.folder / "configuration.json", lambda: recognise(run.folder, run.config), "backup"),
        (folder / "approvals.json", lambda: pending_fits(folder), "answer again"),
        (folder / "rows.npy", lambda: open_site(folder), "makes it anew"),
        (folder / "site.json", lambda: open_site(folder), "writes it anew"),
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
    (run.folder / "status.json").write_bytes(content)
    assert run_view(run.folder)["line"] == ""
    (folder / "site.json").write_bytes(content)
    assert SiteView(folder)()["rules"] == {}


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


def test_the_log_tells_what_a_killed_server_said_last(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A server that was killed leaves no word of its own."""
    caplog.set_level("INFO", "emfed")
    run = Ordered(tmp_path, {})
    Status(run.folder).say("running", round=17, rounds=24)
    monkeypatch.setattr("emfed.deployment.hosting.serve_run", lambda *_: None)
    config = replace(run.config, server=replace(run.config.server, port=free_port(), page=0))
    WebSocketServerSupervisor(config, insecure=True).run(lambda status: None)
    assert re.search(r"the server before it said last, .*: round 17 of 24", caplog.text)


def test_a_server_without_room_says_where_and_how_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Ordered(tmp_path, {})

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("emfed.deployment.hosting.serve_run", full)
    config = replace(run.config, server=replace(run.config.server, port=free_port(), page=0))
    with pytest.raises(EmfedError, match="has no room .* the same command goes on"):
        WebSocketServerSupervisor(config, insecure=True).run(lambda status: None)


def test_a_site_whose_disk_is_full_says_so_once(tmp_path: Path) -> None:
    heard: list[str] = []

    def full(message: bytes) -> bytes:
        if message == b"room":
            return message
        raise OSError(errno.ENOSPC, "No space left on device")

    stop = threading.Event()
    with listen("127.0.0.1:0", insecure=True) as transport:
        line = SiteConnection(f"127.0.0.1:{transport.port}", full, name="oslo")
        thread = threading.Thread(target=line.run, args=(stop, lambda k, w: heard.append(w)))
        thread.start()
        transport.wait_for(1, 10)
        for _ in range(3):
            assert not [*transport.deliver({"oslo": b"?"}, 5.0)]
        assert [*transport.deliver({"oslo": b"room"}, 5.0)]
        stop.set()
        thread.join()
    assert sum("No space left" in words for words in heard) == 1
    assert heard[-1] == "questions are answered again"


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
    for words in ("oslo", "300", "describes no group", "0.75", "reply", "finished: round 7 of 40"):
        assert words in said, words


def test_a_watch_that_goes_into_a_pipe_shows_the_run_at_once_and_then_what_is_new(
    tmp_path: Path,
) -> None:
    """It said nothing before the run was over: what draws over a terminal waits elsewhere."""
    status = Status(tmp_path)
    status.say(**STATUS)
    command = [*COMMAND, "status", str(tmp_path), "--watch"]
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


class Older(Transport):
    """Sites of a release that does not know how a run ends."""

    def __init__(self, sites: dict[str, Site]) -> None:
        self._inner = LocalTransport(sites)

    def workers(self) -> list[str]:
        return self._inner.workers()

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        for key, message in messages.items():
            if kind_of(message) is Kind.END:
                words = encode_refusal(Reason.DAMAGED, "unknown kind of message 17.")
                yield key, seal_refusal(message, words)
            else:
                yield from self._inner.deliver({key: message}, deadline)


class Rehearsing(LocalTransport):
    """One site's owner looks first: it answers "not now", goes away, and then takes part."""

    absent = -1
    """How often it was looked for since it went away."""

    def workers(self) -> list[str]:
        self.absent += self.absent >= 0
        return [key for key in self.sites if key != "s2" or not 0 <= self.absent < 5]

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        messages = dict(messages)
        if self.absent < 0:
            self.absent, words = 0, encode_refusal(Reason.NOT_NOW, "the owner is looking first.")
            yield "s2", seal_refusal(messages.pop("s2"), words)
        yield from super().deliver(messages, deadline)


def test_a_run_waits_for_a_site_whose_owner_looks_first(tmp_path: Path) -> None:
    """Two of three would be enough for a round: they do not begin while ``wait`` lasts."""
    run = Ordered(tmp_path, {3: lambda: change_orders(tmp_path / "run", finish=True)})
    sites = replace(run.config.sites, attempts=1, deadline=0.1)
    config = replace(run.config, sites=sites)
    serve_run(Rehearsing(run.sites), config, Status(run.folder, run.report))
    assert any("the run waits for s2" in str(status.get("why")) for status in run.said)
    assert len(load(tmp_path / "model" / "model.emfed").worker_weights) == 3


class Deserted(LocalTransport):
    """Nobody answers after some rounds."""

    rounds = 0

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        self.rounds += any(kind_of(message) is Kind.REQUEST for message in messages.values())
        return super().deliver({} if self.rounds > 8 else messages, deadline)


def test_the_operator_ends_a_run_that_waits_for_sites(tmp_path: Path) -> None:
    run = Ordered(tmp_path, {})
    said = run.report

    def report(status: dict[str, Any]) -> None:
        said(status)
        if status["state"] == "waiting" and status.get("round"):
            change_orders(run.folder, finish=True)

    sites = replace(run.config.sites, attempts=1, deadline=0.1, farewell=0.0)
    config = replace(run.config, sites=sites)
    serve_run(Deserted(run.sites), config, Status(run.folder, report))
    assert run.said[-1]["state"] == "finished"
    assert run.said[-1]["doubts"] == ["it was ended while too few sites answered."]
    assert load(tmp_path / "model" / "model.emfed").params.weights.shape == (2,)

    (tmp_path / "early").mkdir()
    early = Ordered(tmp_path / "early", {})
    change_orders(early.folder, finish=True)
    with pytest.raises(ParticipationError, match="ended the run before its first round"):
        serve_run(LocalTransport({}), early.config, Status(early.folder, early.report))


NO = 'models = ["mixed-mixture"]\n'
YES = 'models = ["gaussian-mixture"]\n'


def test_a_run_whose_sites_refuse_ends_with_a_code_of_its_own_and_can_be_resumed(
    tmp_path: Path,
) -> None:
    text = configured(2, 3, "give_up_refused = 2.0\n")
    with Deployment(tmp_path / "d", mixture_tables(3), text) as deployment:
        rules, names = deployment.folder / "rules.toml", list(deployment.tables)
        rules.write_text(NO)
        serve = deployment.serve()
        for name in names:
            deployment.join(name, "--rules", "rules.toml")
        assert serve.wait(60) == 4, deployment.output("serve")
        said = deployment.output("serve")
        assert "3 of 3 sites refuse, and the run needs 3. The run ends in 2 s" in said
        assert "s0 refuses: the owner allows the models" in said
        assert "`emfed serve`, started again, goes on" in said.splitlines()[-1]
        with pytest.raises(SystemExit) as ended:
            main(["status", str(deployment.folder / "run")])
        assert ended.value.code == 4
        rules.write_text(YES)  # the owners change their minds
        for name in names:
            deployment.stop(name)
            deployment.join(name, "--rules", "rules.toml")
        deployment.serve()
        assert deployment.wait(60)["rounds"] == 2


class Undecided(LocalTransport):
    """Both owners are asked, and answer only after some time."""

    asked = 0

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        self.asked += 1
        if self.asked > 3:
            yield from super().deliver(messages, deadline)
            return
        words = encode_refusal(Reason.NOT_NOW, "the owner has been asked, and has not answered.")
        for key, message in messages.items():
            yield key, seal_refusal(message, words)


def test_owners_who_have_not_answered_are_waited_for(tmp_path: Path) -> None:
    run = Ordered(tmp_path, {3: lambda: change_orders(tmp_path / "run", finish=True)})
    sites = replace(run.config.sites, attempts=1, deadline=0.1, wait=0.0, give_up_refused=0.0)
    serve_run(
        Undecided(run.sites), replace(run.config, sites=sites), Status(run.folder, run.report)
    )
    assert run.said[-1]["state"] == "finished"


class Silent(LocalTransport):
    """One site says nothing from its second round on."""

    heard = 0

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        self.heard += any(kind_of(message) is Kind.REQUEST for message in messages.values())
        gone = {"s2"} if self.heard > 1 else set()
        return super().deliver({k: m for k, m in messages.items() if k not in gone}, deadline)


def test_while_a_run_waits_for_a_site_everyone_sees_for_whom(tmp_path: Path) -> None:
    run = Ordered(tmp_path, {3: lambda: change_orders(tmp_path / "run", finish=True)})
    config = replace(run.config, sites=replace(run.config.sites, farewell=0.0))
    serve_run(Silent(run.sites), config, Status(run.folder, run.report))
    waiting = [s for s in run.said if s.get("why") == "no answer from s2"]
    assert waiting, "without masks nobody is told to expel it"
    assert "waiting" in {s["state"] for s in waiting}
    assert (run.said[-1]["state"], run.said[-1]["untold"]) == ("finished", ["s2"])
    lines = [status_line(s) for s in run.said]
    assert any("waiting up to 0 s for s2, to say that it is over" in line for line in lines)
    assert "not told that it is over: s2" in lines[-1]


class Slow(LocalTransport):
    """One site computes for long in one round."""

    left = 1

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        for key, answer in super().deliver(messages, deadline):
            if key == "s2" and kind_of(messages[key]) is Kind.REQUEST and self.left:
                self.left -= 1
                time.sleep(0.5)
            yield key, answer


def test_a_site_that_answers_with_nothing_but_excuses_is_named(tmp_path: Path) -> None:
    """Without a word, forty attempts stood still for 14 simulated minutes."""
    site, silent = Site(np.zeros((20, 2)), tmp_path / "a"), list[str]()
    noted = Noted(LocalTransport({"oslo": site}))
    noted.on_silence = silent.extend
    answers = noted.deliver({"oslo": seal(Header(Kind.REQUEST, 7, 1, 0, 0), b"")}, 1.0)
    next(answers)
    answers.close()  # all have answered: nobody waits for more
    assert silent == ["oslo"]
    assert "say hello" in noted.objections["oslo"]


def test_a_round_that_takes_long_says_whom_it_waits_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(status_module, "BEAT_SECONDS", 0.1)
    monkeypatch.setattr(status_module, "LATE_SECONDS", 0.1)
    run = Ordered(tmp_path, {3: lambda: change_orders(tmp_path / "run", finish=True)})
    serve_run(Slow(run.sites), run.config, Status(run.folder, run.report))
    late = [status_line(s) for s in run.said if s["late"]]
    assert any(line.endswith("no answer for 0 s from s2") for line in late), late
    assert not run.said[-1]["late"]


def test_a_newer_server_ends_well_with_older_sites(tmp_path: Path) -> None:
    run = Ordered(tmp_path, {3: lambda: change_orders(tmp_path / "run", finish=True)})
    serve_run(Older(run.sites), run.config, Status(run.folder, run.report))
    assert (run.said[-1]["state"], run.said[-1]["untold"]) == ("finished", [])


def test_a_sealed_site_leaves_nothing_readable_and_goes_on(tmp_path: Path) -> None:
    table = mixture_tables(2)["s0"]
    table.write_csv(tmp_path / "rows.csv")
    keys.make_seal(tmp_path / "oslo.seal")
    folder = tmp_path / "site-oslo"
    folder.mkdir()
    about = prepare(folder, tmp_path / "rows.csv", None, seal=tmp_path / "oslo.seal")
    write_site(folder, about, SiteRules.loosest(), None)

    class Reopened(Transport):
        def workers(self) -> list[str]:
            return ["oslo"]

        def deliver(
            self, messages: Mapping[str, bytes], deadline: float
        ) -> Iterator[tuple[str, bytes]]:
            for key, message in messages.items():
                yield key, open_site(folder).step(message)

    model, settings = gaussian_mixture(2), {"rounds": 3, "seed": 1, "start": "moments"}
    there = fit(model, None, "em", federation=RemoteFederation(Reopened()), **settings)
    here = fit(model, {"oslo": table}, "em", federation="loop", **settings)
    np.testing.assert_allclose(there.statistics, here.statistics, rtol=1e-9)
    row = table.to_numpy()[0].tobytes()
    names = [path for path in folder.rglob("*") if path.is_file() and path.suffix != ".jsonl"]
    assert {"rows.npy", "state", "joined"} <= {path.name for path in names}
    for path in names:
        content = path.read_bytes()
        assert row not in content
        assert b"NUMPY" not in content
        assert b"gaussian-mixture" not in content or path.name == "site.json"
    (tmp_path / "oslo.seal").unlink()
    keys.make_seal(tmp_path / "oslo.seal")
    with pytest.raises(SettingsError, match="was not sealed with this secret"):
        open_site(folder)


def test_a_folder_that_was_begun_without_a_seal_is_sealed_and_keeps_its_counts(
    tmp_path: Path,
) -> None:
    """The site refused every run for good, in the midst of it, and ended with code 0."""
    folder, ledger = tmp_path / "site-oslo", tmp_path / "elsewhere"
    folder.mkdir()
    mixture_tables(2)["s0"].write_csv(tmp_path / "rows.csv")
    rules = SiteRules.loosest(largest_rounds=100, second_ledger=str(ledger))
    model, settings = gaussian_mixture(2), {"rounds": 3, "seed": 1, "start": "moments"}

    def take_part(seal: Path | None) -> int:
        many = seal_files(folder, seal, rules)
        write_site(folder, prepare(folder, tmp_path / "rows.csv", None, seal=seal), rules, None)
        transport = LocalTransport({"oslo": open_site(folder)})
        fit(model, None, "em", federation=RemoteFederation(transport), **settings)
        return many

    assert take_part(None) == 0
    kept = (folder / "memory" / "answered").read_bytes()
    seals = tmp_path / "oslo.seal", tmp_path / "other.seal"
    for path in seals:
        keys.make_seal(path)
    assert take_part(seals[0]) >= 3
    assert take_part(seals[0]) == 0
    for place in (folder / "memory", ledger):
        taken = Tally(place, keys.SealedDisk(keys.read_seal(seals[0]))).read()["answered"]
        assert taken >= 3 * settings["rounds"]
        assert (place / "answered").read_bytes() != kept
    with pytest.raises(SettingsError, match="was not sealed with this secret"):
        seal_files(folder, seals[1], rules)
    with pytest.raises(SettingsError, match="give --seal"):
        seal_files(folder, None, rules)
    (folder / "site.json").write_text("rubbish")  # it is written anew, and nothing is sealed twice
    assert seal_files(folder, seals[0], rules) == 0
    with pytest.raises(SettingsError, match="was not sealed with this secret"):
        seal_files(folder, seals[1], rules)
