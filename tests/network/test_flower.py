"""Real processes on this machine, TLS on: the answer of a run in one process, through a crash."""

from __future__ import annotations

import http.client
import json
import ssl
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest
from benchmarks.deployments import FEDEM, MIXTURE, Deployment, difference, mixture_tables

import emfed
from emfed.core.errors import EmfedError
from emfed.network import RemoteFederation, Transport
from emfed.network.flower import make_client_app
from emfed.network.keys import make_server_keys, make_site_key

CONFIG = (
    MIXTURE
    + FEDEM
    + """
[fit]
tol = 0.0
start = "moments"
rounds = 8
seed = 3

[sites]
expected = 3
minimum = 3
deadline = 60.0
"""
)


def status_of(deployment: Deployment, path: str, **headers: str) -> int:
    """How the SuperLink answers a request for a path."""
    context = ssl.create_default_context(cafile=str(deployment.keys / "ca.pem"))
    line = http.client.HTTPSConnection("127.0.0.1", deployment.port, context=context, timeout=10)
    line.request("GET", path, headers={k.replace("_", "-"): v for k, v in headers.items()})
    status = line.getresponse().status
    line.close()
    return status


class Nodes(Transport):
    """Nodes of Flower's in this process: their app answers each message, as under `flwr run`."""

    def __init__(self, folder: Path, **own: bool) -> None:
        for name, table in mixture_tables(3).items():
            table.write_parquet(folder / f"{name}.parquet")
        self.own = {
            name: {"data": str(folder / f"{name}.parquet"), "folder": str(folder / name), **own}
            for name in mixture_tables(3)
        }
        self.app = make_client_app(lambda context: str(context.node_config["data"]))

    def workers(self) -> list[str]:
        return list(self.own)

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        from emfed.network.flower.transport import MESSAGE_TYPE, unwrap, wrap

        about = SimpleNamespace(message_type=MESSAGE_TYPE)
        for site, message in messages.items():
            asked = SimpleNamespace(content=wrap(message), metadata=about)
            answer = self.app(asked, SimpleNamespace(node_config=self.own[site]))
            yield site, unwrap(answer.content)


def test_stock_nodes_answer_only_where_their_owners_allow_a_run_without_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Flower's own messages can be made in its processes alone.
    message = lambda content, reply_to: SimpleNamespace(content=content)  # noqa: E731
    monkeypatch.setattr("emfed.network.flower.client.Message", message)
    # They have no roster, so the page's command was refused by every site and never ended.
    model, settings = emfed.gaussian_mixture(2), {"rounds": 3, "masks": False, "start": "moments"}
    with pytest.raises(EmfedError, match="unmasked"):
        emfed.fit(model, RemoteFederation(Nodes(tmp_path)), **settings)
    result = emfed.fit(model, RemoteFederation(Nodes(tmp_path, unmasked=True)), **settings)
    here = emfed.fit(model, mixture_tables(3), **settings)
    assert (result.rounds, result.bytes_up) == (here.rounds, here.bytes_up)


@pytest.mark.long
def test_three_sites_over_tls_through_a_kill(tmp_path: Path) -> None:
    """One run for all that is asked of it: a minute of real processes is dear."""
    with Deployment(tmp_path / "deployment", mixture_tables(3), CONFIG, "flower") as deployment:
        folder = deployment.folder
        make_server_keys(folder / "other", ["127.0.0.1"])
        for name in ("stranger", "misled"):
            make_site_key(folder, name)
            deployment.tables["s0"].write_parquet(folder / f"{name}.parquet")
        deployment.start()
        deployment.wait_for_round(1, 120)
        secret = {"x_emfed_secret": (folder / "run" / "control.secret").read_text()}
        elsewhere = {"X_Forwarded_For": "192.0.2.7"}
        for path in ("/docs", "/v1/control/list-nodes", "/v1/runtime/acquire-task"):
            assert status_of(deployment, path, **secret, **elsewhere) == 403
            assert status_of(deployment, path, **secret) != 403
        assert status_of(deployment, "/v1/control/list-nodes") == 403, "another account's"
        assert status_of(deployment, "/health", **elsewhere) == 200
        deployment.join("stranger")
        misled = deployment.join("misled", "--ca", str(folder / "other" / "ca.pem"))
        deployment.wait_for_round(3, 60)
        assert deployment.kill("site_process s1")
        summary = deployment.wait(150)
        assert misled.wait(60) == 1

        # The answer is that of one process, and memories are exact.
        assert summary["rounds"] == 8
        assert difference(summary, deployment.here()) < 1e-9
        assert deployment.memory_gap() < 1e-12

        # The ledger holds what Flower was handed; the site's log, what it sent.
        assert summary["bytes_up"] == summary["crossed"]["up"]
        assert summary["bytes_down"] == summary["crossed"]["down"]
        lines = (folder / "site-s0" / "messages.jsonl").read_text().splitlines()
        entries = [json.loads(line) for line in lines]
        assert entries[0]["kind"] == "join"
        assert sum(entry["kind"] == "masked" for entry in entries) == 10  # opening, rounds, scores
        assert all(entry["bytes"] > 0 and entry["content"] for entry in entries)

        # A key that was not registered and a certificate of another authority are refused.
        assert "does not know this site's key" in deployment.output("stranger")
        assert "not the server that ca.pem stands for" in deployment.output("misled")
        for name in ("stranger", "misled"):
            assert not (folder / f"site-{name}" / "messages.jsonl").exists()
    end = time.monotonic() + 10
    while (left := deployment.pids()) and time.monotonic() < end:
        time.sleep(0.2)
    assert not left, "processes outlived their deployment"
