"""The journal of a member: of every part, what it was a part of."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from typer.testing import CliRunner

from emfed.cli.main import app
from emfed.network.exchange.journalled import journal_post
from emfed.network.exchange.statements import Post
from emfed.network.exchange.virtual import VirtualNetwork
from emfed.network.journal import Journal, audit, check_journal
from tests.network.exchanges import NAMES, Federation, Toy


def journalled(folder: Path, **options: Any) -> Federation:
    """A federation whose sites keep journals; a line is there before its message leaves."""
    federation = Federation(**options)
    journals = {name: Journal(folder / name / "messages.jsonl") for name in federation.names}
    network, carry = federation.network, VirtualNetwork._carry

    def carried(self: VirtualNetwork, sender: str, receiver: str, data: bytes) -> None:
        if sender in journals:
            journal_post(journals[sender], network.follower(sender), data)
        carry(self, sender, receiver, data)

    network._carry = carried.__get__(network)  # type: ignore[method-assign]
    return federation


def lines(folder: Path, name: str = "anna") -> list[dict[str, Any]]:
    text = (folder / name / "messages.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


def test_of_every_part_the_journal_says_what_it_was_a_part_of(tmp_path: Path) -> None:
    federation = journalled(tmp_path, program=Toy(exchanges=4, small=2))
    federation.run()
    made, parts = federation.made["anna"], [e for e in lines(tmp_path) if e["kind"] == "part"]
    assert [(e["exchange"], e["attempt"]) for e in parts] == [
        *[(0, 0), (1, 0), (2, 0), (3, 0), (3, 1), (4, 0)]
    ]
    # What the digest stands for is what the site computed.
    told = {(exchange, plain[-16:].hex()) for exchange, plain in made}
    assert {(e["exchange"], e["about"]) for e in parts} == told
    for entry in parts:
        assert entry["set"] == list(NAMES[:3])
        assert entry["masked"] is True
        assert entry["content"] == "cosines"
    sent = [data for name, data in federation.network.sent if name == "anna"]
    sizes = [len(data) for data in sent if Post.decode(data).kind == 5]
    assert [e["bytes"] for e in parts] == sizes


def test_a_change_of_the_set_is_in_the_lines_after_it(tmp_path: Path) -> None:
    federation = journalled(tmp_path, sites=4, program=Toy(exchanges=8))
    network = federation.network
    network.at(0.25, lambda: network.kill("dora"))
    federation.run(400, lambda: federation.over() or len(federation.ends) == 4)
    sets = [tuple(e["set"]) for e in lines(tmp_path) if e["kind"] == "part"]
    assert sets[0] == NAMES[:4]
    assert sets[-1] == NAMES[:3]
    assert any("dora left" in e["content"] for e in lines(tmp_path) if e["kind"] == "change")


def test_the_owner_reads_what_was_told_in_each_run(tmp_path: Path) -> None:
    federation = journalled(tmp_path, program=Toy(exchanges=4))
    federation.run()
    path = tmp_path / "anna" / "messages.jsonl"
    count, wrong = check_journal(path)
    assert (count, wrong) == (len(lines(tmp_path)), "")
    first, second = audit(path)
    assert first.startswith("run ")
    assert "in 5 sums" in first
    assert second == "  5 times cosines; masked, over anna, bert, cleo"
    shown = CliRunner().invoke(app, ["owner", "journal", str(tmp_path / "anna")])
    assert shown.exit_code == 0, shown.output
    assert second in shown.output
    path.write_text(path.read_text().replace('"exchange": 3', '"exchange": 2'))
    altered = CliRunner().invoke(app, ["owner", "journal", str(tmp_path / "anna")])
    assert altered.exit_code == 1


def test_journals_of_before_and_damaged_lines_are_no_runs(tmp_path: Path) -> None:
    path = tmp_path / "messages.jsonl"
    path.write_text('{"kind": "reply", "run": "1", "bytes": 3}\nnot json\n[1]\n')
    assert audit(path) == []
