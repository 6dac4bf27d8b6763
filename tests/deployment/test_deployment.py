"""Keys, the guard in front of the SuperLink, configurations, rehearsals, and orderly ends."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa

import emfed
from emfed.algorithms import ALGORITHMS
from emfed.cli.main import main
from emfed.core.errors import EmfedError, SettingsError
from emfed.core.registry import plain
from emfed.core.wire import (
    LARGEST_PAYLOAD,
    Header,
    Kind,
    Reason,
    encode_refusal,
    encode_text,
    seal,
    seal_answer,
    seal_refusal,
)
from emfed.data.files import TextForm
from emfed.deployment.config import read_config
from emfed.deployment.joining import SiteSupervisor
from emfed.deployment.serving import serve_run
from emfed.deployment.site import look_first, open_site, prepare, read_rules, write_site
from emfed.deployment.status import Noted, Status
from emfed.network import LocalTransport, RemoteFederation, SiteRules, Transport, keys
from emfed.network.addresses import alone, split_address
from emfed.network.flower.deployment import Link, Node
from emfed.network.flower.joining import explain
from emfed.network.flower.processes import Child
from emfed.network.flower.server import orphaned
from emfed.network.flower.superlink import HEADER, LocalOnly
from tests.helpers import BARE


class Command:
    """The command line, called in this process: a start of Python for each would take a minute."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        self._capture.readouterr()
        with pytest.raises(SystemExit) as ended:
            main(list(arguments))
        code = ended.value.code
        return (code if isinstance(code, int) else 0), *self._capture.readouterr()


@pytest.fixture
def command(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Command:
    monkeypatch.chdir(tmp_path)
    return Command(capsys)


def certificate(path: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate(path.read_bytes())


def test_keys_of_a_server(tmp_path: Path) -> None:
    keys.make_server_keys(tmp_path, ["10.0.0.5", "em.example.org", "2001:db8::1"])
    authority, server = certificate(tmp_path / "ca.pem"), certificate(tmp_path / "server.pem")
    server.verify_directly_issued_by(authority)
    hosts = keys.certificate_hosts(tmp_path / "server.pem")
    assert set(hosts) >= {"10.0.0.5", "em.example.org", "2001:db8::1", "localhost", "127.0.0.1"}
    for name in ("ca.key", "server.key"):
        assert (tmp_path / name).stat().st_mode & 0o777 == 0o600
    made = {"ca.key", "ca.pem", "server.key", "server.pem", "sites"}
    assert {path.name for path in tmp_path.iterdir()} == made  # and no secret that nobody uses
    keys.make_server_keys(tmp_path, ["other.example.org"])
    assert certificate(tmp_path / "ca.pem") == authority, "sites need not be told of a renewal"
    assert certificate(tmp_path / "server.pem") != server


@pytest.mark.parametrize("host", ["em.example.org:9400", "a b", "", "http://x", "-x"])
def test_a_certificate_names_addresses(tmp_path: Path, host: str) -> None:
    with pytest.raises(SettingsError, match="neither an IP address nor a DNS name"):
        keys.make_server_keys(tmp_path, [host])


@pytest.mark.parametrize("name", ["../x", "", "a b", ".hidden", "x" * 65, "a/b"])
def test_a_site_has_a_name_for_files(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match="a site's name"):
        keys.make_site_key(tmp_path, name)


def test_keys_of_sites(tmp_path: Path) -> None:
    server = tmp_path / "server"
    private, public = keys.make_site_key(tmp_path, "oslo")
    assert private.stat().st_mode & 0o777 == 0o600
    key = keys.read_private_key(private).public_key()
    assert key.public_numbers() == keys.read_public_key(public).public_numbers()
    with pytest.raises(SettingsError, match="is there already"):
        keys.make_site_key(tmp_path, "oslo")
    with pytest.raises(SettingsError, match="holds no server's keys"):
        keys.add_site(server, public)
    keys.make_server_keys(server, [])
    assert keys.add_site(server, public) == "oslo"
    assert keys.add_site(server, public) == "oslo", "twice does no harm"
    (tmp_path / "bergen.pub").write_bytes(public.read_bytes())
    with pytest.raises(SettingsError, match="is the key of the site 'oslo' already"):
        keys.add_site(server, tmp_path / "bergen.pub")
    _, other = keys.make_site_key(tmp_path / "elsewhere", "oslo")
    with pytest.raises(SettingsError, match="with another key"):
        keys.add_site(server, other)
    assert list(keys.site_keys(server)) == ["oslo"]


def test_keys_are_replaced_removed_and_listed(command: Command, tmp_path: Path) -> None:
    command("keys", "server")
    command("keys", "site", "oslo")
    command("keys", "add", "oslo.pub")
    shown = command("keys", "list")[1]
    digest = keys.show_fingerprint(keys.fingerprint(keys.read_public_key(tmp_path / "oslo.pub")))
    assert f"oslo\t{digest}" in shown
    assert "certificate lasts 824 days" in shown
    assert "fingerprint SHA256:" in command("keys", "site", "oslo", "--out", "new")[1]
    code, _, said = command("keys", "add", "new/oslo.pub")
    assert (code, "use --replace" in said) == (2, True)
    assert command("keys", "add", "new/oslo.pub", "--replace")[0] == 0
    ring = keys.KeyRing(tmp_path / "keys")
    old, new = (
        keys.fingerprint(keys.read_public_key(tmp_path / name))
        for name in ("oslo.pub", "new/oslo.pub")
    )
    assert ring.find(old) is None
    assert ring.was_removed(old)
    assert ring.find(new) is not None
    assert command("keys", "remove", "oslo")[0] == 0
    ring.refresh()
    assert ring.find(new) is None
    code, _, said = command("keys", "remove", "oslo")
    assert (code, "holds no key of a site 'oslo'; its sites: none" in said) == (2, True)


def test_without_flower_serve_and_join_work(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(GOOD)
    script = (
        "import sys; sys.modules['flwr'] = None; from emfed.cli.main import main; "
        "import emfed.deployment.joining, emfed.network.websocket.server; "
        "main(['serve', 'run.toml', '--check'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert (done.returncode, '"engine": "websocket"' in done.stdout) == (0, True), done.stderr
    (tmp_path / "run.toml").write_text(GOOD + '[server]\nengine = "flower"\n')
    script = script.replace("'--check'", "'--insecure'")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=tmp_path
    )
    assert done.returncode == 1
    assert "pip install '.[flower]'" in done.stderr
    assert "Traceback" not in done.stderr


def test_bad_keys_among_good_ones(tmp_path: Path) -> None:
    keys.make_server_keys(tmp_path, [])
    _, public = keys.make_site_key(tmp_path, "oslo")
    keys.add_site(tmp_path, public)
    sites = tmp_path / "sites"
    (sites / "half.pub").write_bytes(public.read_bytes()[:40])
    (sites / "empty.pub").touch()
    (sites / "gone.pub").symlink_to(tmp_path / "nowhere")
    (sites / "folder.pub").mkdir()
    (sites / "a b.pub").write_bytes(keys.make_site_key(tmp_path, "spaced")[1].read_bytes())
    (sites / "twice.pub").write_bytes(public.read_bytes())
    good, bad = keys.read_site_keys(tmp_path)
    assert list(good) == ["oslo"]
    assert set(bad) == {"half", "empty", "folder", "a b", "twice"}
    assert keys.add_site(tmp_path, keys.make_site_key(tmp_path, "bergen")[1]) == "bergen"


def test_keys_that_are_none(tmp_path: Path) -> None:
    path = tmp_path / "x.pub"
    path.write_text("not a key")
    with pytest.raises(SettingsError, match="no public key in OpenSSH's format"):
        keys.read_public_key(path)
    other = rsa.generate_private_key(public_exponent=65537, key_size=2048).public_key()
    path.write_bytes(
        other.public_bytes(serialization.Encoding.OpenSSH, serialization.PublicFormat.OpenSSH)
    )
    with pytest.raises(SettingsError, match="no elliptic-curve key"):
        keys.read_public_key(path)
    private, _ = keys.make_site_key(tmp_path, "open")
    private.chmod(0o644)
    with pytest.raises(SettingsError, match="can be read by others"):
        keys.read_private_key(private)
    with pytest.raises(SettingsError, match="is a public key: give the private one"):
        keys.read_private_key(private.with_suffix(".pub"))
    with pytest.raises(SettingsError, match="there is no such file"):
        keys.read_private_key(tmp_path / "nobody.key")


FLEET, CONTROL = "/v1/fleet/pull-messages", "/v1/control/start-run"


@pytest.mark.parametrize(
    ("path", "peer", "expected"),
    [
        (FLEET, "192.0.2.7", True),
        ("/health", "192.0.2.7", True),
        (CONTROL, "192.0.2.7", False),
        (CONTROL, "2001:db8::1", False),
        (CONTROL, "::ffff:192.0.2.7", False),
        (CONTROL, "127.0.0.1", True),
        (CONTROL, "::ffff:127.0.0.1", True),
        (CONTROL, "::1", True),
        (CONTROL, "192.0.2.2", True),  # the address that the server was called at
        (CONTROL, None, False),
        (CONTROL, "nonsense", False),
        ("/v1/runtime/acquire-task", "192.0.2.7", False),
        ("/v1/fleet/../control/start-run", "192.0.2.7", False),
        ("/v1/fleetcontrol", "192.0.2.7", False),
        ("/docs", "192.0.2.7", False),
    ],
)
def test_only_this_machine_controls_the_superlink(
    path: str, peer: str | None, expected: bool
) -> None:
    assert ask(path, peer, {HEADER: "right"}) == ("passed" if expected else 403)


@pytest.mark.parametrize("shown", [{}, {HEADER: ""}, {HEADER: "wrong"}, {HEADER: "righ"}])
def test_other_accounts_of_the_machine_do_not_control_the_superlink(shown: dict[str, str]) -> None:
    runtime = ("/v1/runtime/acquire-task", "/v1/runtime/start-automation", "/v1/runtimecontrol")
    for path in (CONTROL, "/docs", *runtime):
        assert ask(path, "127.0.0.1", shown) == 403
    assert ask(FLEET, "127.0.0.1", shown) == "passed"
    with pytest.raises(ValueError, match="empty"):
        LocalOnly(None, "")


@pytest.mark.parametrize(
    ("path", "headers", "expected"),
    [
        (FLEET, {"content-length": "1000"}, "passed"),
        (FLEET, {"content-length": str(1 << 21)}, 413),
        (FLEET, {"content-length": "-1"}, 413),
        (FLEET, {"transfer-encoding": "chunked"}, 413),
        ("/v1/fleet/push-object", {"content-length": str(LARGEST_PAYLOAD + 1000)}, "passed"),
        ("/v1/fleet/push-object", {"content-length": str(2 * LARGEST_PAYLOAD)}, 413),
    ],
)
def test_no_memory_is_taken_for_what_nobody_sends(
    path: str, headers: dict[str, str], expected: str | int
) -> None:
    assert ask(path, "192.0.2.7", headers) == expected


def ask(path: str, peer: str | None, headers: Mapping[str, str]) -> Any:
    """What a peer is answered."""
    scope = {
        "type": "http",
        "path": path,
        "client": None if peer is None else (peer, 5),
        "server": ("192.0.2.2", 9400),
        "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
    }
    answers: list[Any] = []

    async def inner(*_: Any) -> None:
        answers.append("passed")

    async def send(message: Any) -> None:
        answers.append(message.get("status"))

    asyncio.run(LocalOnly(inner, "right")(scope, None, send))
    return answers[0]


def test_our_own_calls_go_where_the_server_listens(tmp_path: Path) -> None:
    for host, local in (("0.0.0.0", "127.0.0.1"), ("::", "::1"), ("192.0.2.2", "192.0.2.2")):
        link = Link(host, 9400, tmp_path, tmp_path / "run")
        assert split_address(link.local) == (local, 9400)
        assert local in link.environment({})["NO_PROXY"].split(",")
        assert link.secret.stat().st_mode & 0o777 == 0o600
        assert link.secret.read_text() == link.secret.read_text()


def test_without_tls_only_this_machine(tmp_path: Path) -> None:
    Link("127.0.0.1", 9400, None, tmp_path)
    for host in ("0.0.0.0", "::", "10.0.0.1", "em.example.org"):
        with pytest.raises(SettingsError, match="without TLS"):
            Link(host, 9400, None, tmp_path)
        with pytest.raises(SettingsError, match="without TLS"):
            Node(f"[{host}]:9400", tmp_path, None, None, 1, {})


@pytest.mark.parametrize("address", ["em.example.org", ":9400", "x:port", "x:0", "x:70000"])
def test_addresses(address: str) -> None:
    with pytest.raises(SettingsError, match="an address looks like"):
        split_address(address)
    assert split_address("[::1]:9400") == ("::1", 9400)


GOOD = '[model]\nkind = "gaussian-mixture"\nn_components = 2\n'


def test_a_configuration(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(
        GOOD + '[algorithm]\nkind = "VR-FedEM"\ncompressor = "sparse:0.5"\n[fit]\nrounds = 7\n'
        '[sites]\nexpected = 5\ncolumns = ["a", "b"]\n[server]\nport = 9500\n'
    )
    config = read_config(path)
    assert isinstance(config.settings.algorithm, emfed.VRFedEM)
    assert (config.settings.rounds, config.sites.fewest, config.server.port) == (7, 3, 9500)
    assert config.settings.columns == ["a", "b"]
    assert config.place("output") == tmp_path / "model"


@pytest.mark.parametrize("kind", ["auto", "em", "FedEM", "VR-FedEM"])
def test_every_algorithm_can_be_named(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(GOOD + f'[algorithm]\nkind = "{kind}"\n')
    assert isinstance(read_config(path).settings.method(3), ALGORITHMS[kind])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x =", "not a TOML file"),
        ("", "a kind is missing"),
        ('[model]\nkind = "gaussian-mixtures"', "did you mean 'gaussian-mixture'"),
        ("model = 3", "must be a table"),
        (GOOD + "covarianse = 'full'", "did you mean 'covariance_type'"),
        (GOOD + "[fits]\nrounds = 3", "did you mean 'fit'"),
        (GOOD + "[fit]\nround = 3", "did you mean 'rounds'"),
        (GOOD + "[fit]\nrounds = -1", "rounds must be a whole number"),
        (GOOD + "[fit]\nrounds = 'many'", "rounds must be a whole number"),
        (GOOD + "[algorithm]\nkind = 'sgd'", "unknown kind 'sgd'"),
        (
            GOOD + "[algorithm]\nkind = 'FedEM'\ncompressor = 'zip'",
            "compressor must be none, dithering",
        ),
        (GOOD + "[algorithm]\nstep_size = -1.0", "step_size"),
        (GOOD + "[sites]\nexpected = 2\nminimum = 3", "minimum must lie between 1 and expected"),
        (GOOD + "[sites]\ncolumns = 'a'", "columns must be a list of names"),
        (GOOD + "[server]\nport = 99999", "port must lie between"),
        ('[model]\nkind = "site-owner"\nmass = 3', "unknown key 'mass'"),
    ],
)
def test_configurations_that_are_wrong(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=words):
        read_config(path)


def test_rules_of_an_owner(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text('smallest_rows = 20\nmodels = ["gaussian-mixture"]\nsmallest_group = 5\n')
    rules = read_rules(path)
    assert (rules.smallest_rows, rules.models) == (20, ("gaussian-mixture",))
    path.write_text("smallest_row = 20\n")
    with pytest.raises(SettingsError, match="did you mean 'smallest_rows'"):
        read_rules(path)
    path.write_text("smallest_rows = -1\n")
    with pytest.raises(SettingsError, match="rules.toml: smallest_rows"):
        read_rules(path)


TABLE = pl.DataFrame({"a": [0.0, 1.0, 4.0, 5.0, 9.0], "b": [1.0, 0.0, 2.0, 7.0, 5.0]})


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_data_are_looked_at_before_anyone_is_called(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    frame = TABLE.with_columns(name=pl.lit("x"))
    frame.write_csv(path) if suffix == "csv" else frame.write_parquet(path)
    with pytest.raises(EmfedError, match="column 'name': .* no number.*leave it out of --columns"):
        prepare(tmp_path, path, ["a", "name"])
    with pytest.raises(EmfedError, match="there is no column 'c'"):
        prepare(tmp_path, path, ["a", "c"])
    write_site(tmp_path, prepare(tmp_path, path, ["b", "a"]), SiteRules(), ["b", "a"])
    site = open_site(tmp_path)
    rows = np.asarray(site._data.worker(0))
    np.testing.assert_array_equal(rows, TABLE.select("b", "a").to_numpy())


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_text_column_that_no_run_uses_is_no_obstacle(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    frame = TABLE.with_columns(ward=pl.lit("icu"))
    frame.write_csv(path) if suffix == "csv" else frame.write_parquet(path)
    about = prepare(tmp_path, path, None)
    assert about["columns"] == ["a", "b"]
    write_site(tmp_path, about, SiteRules.loosest(), None)

    def answer(columns: list[str]) -> str:
        told = {"model": plain(emfed.gaussian_mixture(1).describe()), "columns": columns}
        open_site(tmp_path).step(seal(Header(Kind.HELLO, 1, 1, 0, 0), encode_text(told)))
        return (tmp_path / "messages.jsonl").read_text().splitlines()[-1]

    assert json.loads(answer(["a", "b"]))["kind"] == "join"
    assert "column 'ward' holds" in answer(["a", "ward"])  # and the server is told why


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_words_are_categories_at_sites_as_in_one_process(tmp_path: Path, suffix: str) -> None:
    """Every site turns its words into the codes that were agreed on: the fit is the same."""
    rng = np.random.default_rng(0)
    ward = np.where(np.arange(120) % 3 == 0, "surgery", np.where(np.arange(120) % 4, "icu", "home"))
    age = rng.normal(40, 9, 120) + 20 * (ward == "icu")
    frame = pl.DataFrame({"age": age, "ward": ward})
    form, sites, tables = TextForm(categories="ward=home|icu|surgery"), {}, {}
    for name, table in (("north", frame[:50]), ("south", frame[50:])):
        folder = tmp_path / name
        folder.mkdir()
        path = folder / f"rows.{suffix}"
        table.write_csv(path) if suffix == "csv" else table.write_parquet(path)
        about = prepare(folder, path, None, form)
        assert about["columns"] == ["age", "ward"]
        write_site(folder, about, SiteRules.loosest(), None)
        sites[name], tables[name] = open_site(folder), table
    network = emfed.network.RemoteFederation(emfed.network.LocalTransport(sites))
    families = {"ward": emfed.models.Categorical(3)}
    model = emfed.mixed_mixture(2, families)
    there = emfed.fit(model, network, columns=["age", "ward"], rounds=5, tol=0)
    here = emfed.FederatedMixture(2, families={"ward": "categorical"}, max_iter=5, tol=1e-300)
    with pytest.warns(emfed.EmfedWarning):
        here.fit(tables)
    assert list(here.categories_["ward"]) == ["home", "icu", "surgery"]
    np.testing.assert_allclose(there.params.categorical, here.result_.params.categorical, rtol=1e-6)


@pytest.mark.parametrize("said", ["ward", "ward=icu", "ward=icu|icu", "=a|b", "ward=a||b"])
def test_categories_that_are_none_are_refused(said: str) -> None:
    with pytest.raises(EmfedError, match=r"such as ward=icu\|surgery,sex=f\|m; got"):
        TextForm(categories=said)


def test_categories_of_a_column_that_is_not_there_are_refused(tmp_path: Path) -> None:
    TABLE.write_csv(tmp_path / "rows.csv")
    with pytest.raises(EmfedError, match="--categories names 'ward', which is no column"):
        prepare(tmp_path, tmp_path / "rows.csv", None, TextForm(categories="ward=a|b"))


def test_a_rehearsal_sends_a_refusal_and_shows_the_rest(tmp_path: Path) -> None:
    rows = tmp_path / "rows.csv"
    source = np.random.Generator(np.random.Philox(key=1))
    pl.DataFrame(source.standard_normal((50, 2)), schema=["a", "b"]).write_csv(rows)
    write_site(tmp_path, prepare(tmp_path, rows, None), SiteRules(), None)
    sent: list[bytes] = []

    class Rehearsing(Transport):
        def workers(self) -> list[str]:
            return ["site"]

        def deliver(
            self, messages: Mapping[str, bytes], deadline: float
        ) -> Iterator[tuple[str, bytes]]:
            for key, message in messages.items():
                sent.append(look_first(tmp_path, message))
                yield key, sent[-1]

    with pytest.raises(EmfedError, match="0 workers joined"):
        RemoteFederation(Rehearsing(), attempts=1).open(emfed.gaussian_mixture(2))
    lines = [json.loads(x) for x in (tmp_path / "dry-run.jsonl").read_text().splitlines()]
    kinds = [line["kind"] for line in lines]
    assert kinds[0] == "join"
    assert {"answer", "reply"} <= set(kinds)
    assert "50 rows" in lines[0]["content"]
    assert not (tmp_path / "messages.jsonl").exists()
    assert not (tmp_path / "memory").exists()
    assert all(b"looking first" in message and len(message) < 120 for message in sent)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({"model": "gaussian-mixture", "n_components": 10_000_000}, "numbers here"),
        (plain(emfed.gaussian_mixture(2).describe()) | {"n_components": "x"}, "n_components"),
        ({"model": "of another release"}, "unknown model"),
        (None, "names it under 'model'"),
    ],
)
def test_a_rehearsal_of_what_no_site_takes_part_in_ends(
    model: Any, words: str, tmp_path: Path
) -> None:
    """It built whatever was asked for, and went on waiting where that failed."""
    source = np.random.Generator(np.random.Philox(key=1))
    pl.DataFrame(source.standard_normal((50, 2)), schema=["a", "b"]).write_csv(tmp_path / "r.csv")
    write_site(tmp_path, prepare(tmp_path, tmp_path / "r.csv", None), SiteRules(), None)
    look_first(tmp_path, seal(Header(Kind.HELLO, 1, 1, 0, 0), encode_text({"model": model})))
    refusal, end = map(json.loads, (tmp_path / "dry-run.jsonl").read_text().splitlines())
    assert refusal["kind"] == "refusal"
    assert words in refusal["content"]
    assert "nothing but a refusal was sent" in end["content"]


def test_a_second_join_leaves_the_first_ones_files_alone(command: Command, tmp_path: Path) -> None:
    folder = tmp_path / "site-other"
    folder.mkdir()
    TABLE.write_csv(tmp_path / "rows.csv")
    write_site(folder, prepare(folder, tmp_path / "rows.csv", None), SiteRules(), None)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    TABLE.select("b").head(2).write_csv(tmp_path / "other.csv")
    join = ["join", "127.0.0.1:1", "--data", "other.csv", "--insecure", "--columns", "b"]
    with alone(folder / "join.lock") as mine:
        assert mine
        code, _, said = command(*join)
    assert (code, "another `emfed join` works in" in said) == (1, True)
    assert {name: (folder / name).read_bytes() for name in before} == before


def test_a_rehearsal_has_a_folder_of_its_own(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[SiteSupervisor] = []

    def stopped(guest: SiteSupervisor, report: Any) -> None:
        seen.append(guest)
        raise KeyboardInterrupt

    monkeypatch.setattr(SiteSupervisor, "run", stopped)
    TABLE.write_csv(tmp_path / "rows.csv")
    join = ["join", "127.0.0.1:1", "--data", "rows.csv", "--insecure"]
    assert "messages.jsonl" in command(*join)[2]
    code, _, said = command(*join, "--dry-run")
    assert (code, "nothing but refusals was sent" in said) == (130, True)
    assert [guest.folder.name for guest in seen] == ["site-rows", "dry-run"]


@pytest.mark.parametrize(
    ("names", "chosen", "content"),
    [
        (["age", "height", "weight"], True, "4 numbers"),
        (["age", "height", "weight"], False, "has not listed the columns"),
        (["a", "b"], True, "missing ['height', 'weight']"),
    ],
)
def test_a_rehearsal_takes_the_columns_that_the_run_names(
    tmp_path: Path, names: list[str], chosen: bool, content: str
) -> None:
    rules = SiteRules(any_columns=chosen, unmasked=True)
    source = np.random.Generator(np.random.Philox(key=1))
    pl.DataFrame(source.standard_normal((50, len(names))), schema=names).write_csv(
        tmp_path / "rows.csv"
    )
    write_site(tmp_path, prepare(tmp_path, tmp_path / "rows.csv", None), rules, None)
    about = {
        "model": plain(emfed.gaussian_mixture(2).describe()),
        "columns": ["height", "weight"],
    }
    hello = seal(Header(Kind.HELLO, 1, 1, 0, 0), encode_text(about))
    look_first(tmp_path, hello)
    first = json.loads((tmp_path / "dry-run.jsonl").read_text().splitlines()[0])
    assert content in first["content"]
    open_site(tmp_path).step(hello)
    sent = json.loads((tmp_path / "messages.jsonl").read_text().splitlines()[-1])
    assert first["kind"] == sent["kind"]
    if sent["kind"] == "join":
        assert first["content"] == sent["content"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["serve", "no.toml"], "No such file"),
        (["serve", "run.toml"], "holds no server.pem"),
        (["serve", "run.toml", "--insecure", "--host", "0.0.0.0"], "without TLS"),
        (["join", "nowhere", "--data", "rows.csv", "--insecure"], "an address looks like"),
        (["join", "a.example:1", "--data", "rows.csv", "--insecure"], "without TLS"),
        (["join", "a.example:1", "--data", "rows.csv"], "ask the server's people for ca.pem"),
        (["join", "127.0.0.1:1", "--data", "no.csv", "--insecure"], "there is no such file"),
        (["keys", "add", "no.pub"], "No such file"),
        (["status", "nowhere"], "holds no run"),
    ],
)
def test_commands_fail_in_one_line(
    command: Command, tmp_path: Path, arguments: list[str], words: str
) -> None:
    (tmp_path / "run.toml").write_text(GOOD)
    TABLE.write_csv(tmp_path / "rows.csv")
    code, _, said = command(*arguments)
    assert code in (1, 2)
    assert words in said
    assert len(said.strip().splitlines()) == 1, said
    assert not (tmp_path / "run").exists()


def test_what_a_supernode_said() -> None:
    with pytest.raises(EmfedError, match=r"not the server that ca\.pem stands for"):
        explain("[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed", 1)
    assert "does not know this site's key" in explain("[code: 2004] Failed", 1)
    assert "code 7" in explain("", 7)


def test_without_flower_the_extra_is_named() -> None:
    script = "import sys; sys.modules['flwr'] = None; import emfed.network.flower"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert "pip install '.[flower]'" in done.stderr


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no such signal")
def test_children_go_with_a_parent_that_was_killed(tmp_path: Path) -> None:
    script = (
        "import os, sys, time; from pathlib import Path; "
        "from emfed.network.flower.processes import Child; "
        "c = Child('x', [sys.executable, '-c', 'import time; time.sleep(60)'], os.environ, "
        f"Path({str(tmp_path / 'log')!r})); c.start(); print(c.process.pid, flush=True); "
        "time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        child = int(parent.stdout.readline())
        os.kill(parent.pid, signal.SIGKILL)
    end = time.monotonic() + 10
    while Path(f"/proc/{child}").exists() and time.monotonic() < end:
        if Path(f"/proc/{child}/stat").read_text().split()[2] == "Z":
            break
        time.sleep(0.05)
    else:
        assert not Path(f"/proc/{child}").exists()


def test_a_program_knows_when_its_host_is_gone(tmp_path: Path) -> None:
    lock = tmp_path / "host.lock"
    lock.write_text("first")
    with alone(lock):
        assert not orphaned(tmp_path, "first")
        assert orphaned(tmp_path, "second"), "another has taken its place"
    assert orphaned(tmp_path, "first")


def test_an_orphan_lets_go_of_its_lock(tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(GOOD)
    script = (
        "import sys, time; from pathlib import Path; from emfed.network.flower import server; "
        "server.GridTransport = lambda grid: time.sleep(60); "
        f"server.run_server(None, server.read_config({str(tmp_path / 'run.toml')!r}))"
    )
    (tmp_path / "run").mkdir()
    lock = tmp_path / "run" / "host.lock"
    lock.write_text("first")
    variables = {**os.environ, "EMFED_HOST": "first"}
    with alone(lock), subprocess.Popen([sys.executable, "-c", script], env=variables) as orphan:
        server = tmp_path / "run" / "logs" / "server.log"
        end = time.monotonic() + 60
        while not server.exists() and orphan.poll() is None and time.monotonic() < end:
            time.sleep(0.05)
        with alone(tmp_path / "run" / "server.lock") as free:
            assert not free
        lock.write_text("second")
        assert orphan.wait(20) == 1


def test_commands_that_start_nothing(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(GOOD)
    assert json.loads(command("serve", "run.toml", "--check")[1])["model"]["n_components"] == 2
    assert command("serve", "run.toml", "--app", "app")[0] == 0
    written = {str(path.relative_to(tmp_path / "app")) for path in (tmp_path / "app").rglob("*.*")}
    assert {"emfed.toml", "pyproject.toml", "emfed_app/server.py"} <= written
    for arguments in (
        ["server", "--host", "em.example.org"],
        ["site", "oslo"],
        ["add", "oslo.pub"],
    ):
        assert command("keys", *arguments)[0] == 0
    assert command("keys", "list")[1].startswith("oslo\t")


def test_a_folder_belongs_to_one_run(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(GOOD)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "status.json").write_text('{"state": "finished", "round": 9, "rounds": 9}')
    serve = ["serve", "run.toml", "--insecure"]
    assert command(*serve)[0] == 0
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    for text in ("[fit]\nrounds = 500\ntol = 1e-3\n", "[sites]\ndeadline = 9.0\n"):
        (tmp_path / "run.toml").write_text(GOOD + text)
        assert command(*serve)[0] == 0
    for text, part in (
        (GOOD.replace("2", "3"), "model"),
        (GOOD + "[algorithm]\nkind = 'em'\n", "algorithm"),
        (GOOD + "[fit]\nseed = 5\n", "fit"),
        (GOOD + "[sites]\ncolumns = ['a']\n", "columns"),
    ):
        (tmp_path / "run.toml").write_text(text)
        code, _, said = command(*serve)
        assert (code, f"holds a run with another {part} than run.toml says" in said) == (2, True)


def test_a_second_server_waits_for_the_first_and_says_so(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emfed.deployment.hosting.HANDOVER_SECONDS", 1.5)
    (tmp_path / "run.toml").write_text(GOOD)
    (tmp_path / "run").mkdir()
    with alone(tmp_path / "run" / "host.lock") as mine:
        assert mine
        code, said, error = command("serve", "run.toml", "--insecure")
    assert code == 1
    assert "waiting: another `emfed serve` works in" in said
    assert "stop it, or give this run a folder" in error
    finished = {"state": "finished", "round": 9, "rounds": 9, "up": 1500, "down": 0, "stages": 3}
    (tmp_path / "run" / "status.json").write_text(json.dumps(finished))
    (tmp_path / "run" / ".configuration.json.x.tmp").write_text("half")
    code, said, _ = command("serve", "run.toml", "--insecure")
    assert "finished: round 9 of 9, 1.5 kB up, 0.0 kB down, in 3 stages" in said
    assert not (tmp_path / "run" / ".configuration.json.x.tmp").exists()


def test_refusals_are_kept_with_their_reason() -> None:
    transport = Noted(LocalTransport({}))
    for reason, words in ((Reason.REFUSED, "too few rows."), (Reason.OLD, "old.")):
        transport.note(reason.name, seal_refusal(b"what", encode_refusal(reason, words)))
    transport.note("damaged", b"nonsense")
    assert transport.refusals == {"REFUSED": "too few rows."}
    transport.note("REFUSED", seal_answer(Header(Kind.JOIN, 1, 1, 0, 0), b""))
    assert transport.refusals == {}


def test_status_of_both_sides(command: Command, tmp_path: Path) -> None:
    server, site = tmp_path / "run", tmp_path / "site-oslo"
    for folder in (server, site):
        folder.mkdir()
    content = {"state": "running", "round": 3, "rounds": 9, "squared_H": 0.25, "up": 1500}
    (server / "status.json").write_text(json.dumps(content))
    _, said, _ = command("status", "run")
    for words in ("round 3 of 9", "1.5 kB up", "no server works on it now"):
        assert words in said
    assert "sites answered" not in said, "a run that goes on has asked nobody yet"
    more = {"asked": 3, "answered": 2, "refusals": {"oslo": "missing ['weight']."}}
    (server / "status.json").write_text(json.dumps(content | more))
    _, said, _ = command("status", "run")
    assert "2 of 3 sites answered" in said
    assert "oslo refuses: missing ['weight']." in said
    (site / "site.json").write_text("{}")
    assert "nothing was sent" in command("status", "site-oslo")[1]
    entry = {"time": "t", "kind": "reply", "round": 4, "bytes": 65, "content": "9 bytes"}
    (site / "messages.jsonl").write_text(2 * (json.dumps(entry) + "\n"))
    found = json.loads(command("status", "site-oslo", "--json")[1])
    assert found["sent"] == {"reply": {"messages": 2, "bytes": 130}}
    assert "reply, round 4, 65 bytes" in command("status", "site-oslo")[1]
    (server / "status.json").write_text(json.dumps({"state": "failed", "error": "because"}))
    code, said, _ = command("status", "run")
    assert (code, "because" in said) == (1, True)


def test_logs_are_told_in_parts_and_kept_short(tmp_path: Path) -> None:
    command = [sys.executable, "-c", "print('one'); print('two' * 50)"]
    child = Child("x", command, os.environ, tmp_path / "x.log")
    child.start()
    assert child.process is not None
    child.process.wait()
    assert child.news().startswith("one\n")
    assert child.news() == ""
    child.start()
    child.process.wait()
    assert child.words().count("one") == 1
    child.trim(most=10)
    assert (child.words(), child.tail()) == ("", "")
    assert "one" in (tmp_path / "x.old").read_text()


def serve_here(folder: Path, fit: str, tables: Mapping[str, Any], **sites: Any) -> Path:
    """What `emfed serve` does, with sites in this process; the path of its configuration."""
    text = f'[model]\nkind = "gaussian-mixture"\nn_components = 2\n[fit]\nseed = 1\n{fit}\n'
    told = {"expected": len(tables), **sites}
    text += "[sites]\n" + "".join(f"{name} = {value}\n" for name, value in told.items())
    path = folder / "run.toml"
    path.write_text(text)
    config = read_config(path)
    config.place("folder").mkdir(exist_ok=True)
    transport = LocalTransport(
        {n: emfed.network.Site(t, folder / n, rules=BARE) for n, t in tables.items()}
    )
    serve_run(transport, config, Status(config.place("folder")))
    return path


def test_a_run_that_did_not_end_well_says_so_everywhere(command: Command, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    tables = {n: rng.normal(rng.choice([-1, 1], (80, 1)), 1, (80, 2)) for n in ("a", "b")}
    path = serve_here(tmp_path, "rounds = 3", tables)
    code, said, errors = command("status", str(path))
    assert code == 3
    assert "finished, but not well" in said
    assert "DID NOT END WELL: the run met its limit on rounds" in errors
    summary = json.loads((tmp_path / "model" / "summary.json").read_text())
    assert not summary["converged"]
    assert "limit on rounds" in summary["doubts"][0]
    assert "limit on rounds" in command("inspect", str(tmp_path / "model" / "model.emfed"))[1]
    report = str(tmp_path / "page.html")
    command("report", str(tmp_path / "model" / "model.emfed"), "--out", report)
    assert "limit on rounds" in Path(report).read_text()
    code, _, errors = command("serve", str(path), "--insecure")  # it is finished already
    assert (code, "DID NOT END WELL" in errors) == (3, True)
    (tmp_path / "good").mkdir()
    good = serve_here(tmp_path / "good", "rounds = 300\ntol = 1e-3", tables)
    assert command("status", str(good))[0] == 0
