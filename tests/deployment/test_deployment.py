"""Keys, configurations, rows, rehearsals, commands, and who takes part from where."""

from __future__ import annotations

import json
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
from emfed.data.files import TextForm
from emfed.deployment.config import read_config
from emfed.deployment.consent import OfferedRows
from emfed.deployment.joining import Joining
from emfed.deployment.rehearsal import rehearse
from emfed.deployment.site import prepare, read_about, read_rows, read_rules, write_site
from emfed.network import keys
from emfed.network.addresses import alone, split_address
from emfed.network.owner_rules import SiteRules
from tests.deployment.deployed import Deployed, until


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
        (GOOD + "[sites]\ndeadline = 3.0", "deadline is no setting any more: .* wait_for"),
        (GOOD + "[sites]\ndeliver = false", "deliver is no setting any more: every site comes"),
        (GOOD + "[server]\nengine = 'flower'", "engine is no setting any more: .* mailboxes"),
    ],
)
def test_configurations_that_are_wrong(tmp_path: Path, text: str, words: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(SettingsError, match=words):
        read_config(path)


def test_what_every_run_does_may_still_be_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text(f'{GOOD}[sites]\ndeliver = true\n[server]\nengine = "websocket"\n')
    assert read_config(path).sites == read_config(path).sites


def test_rules_of_an_owner(tmp_path: Path) -> None:
    path = tmp_path / "rules.toml"
    path.write_text('smallest_rows = 20\nmodels = ["gaussian-mixture"]\nlargest_rounds = false\n')
    rules = read_rules(path)
    assert (rules.smallest_rows, rules.models) == (20, ("gaussian-mixture",))
    assert rules.largest_rounds is None
    path.write_text('preset = "trusting"\n')
    assert read_rules(path) == SiteRules.trusting()
    for text, words in (
        ("smallest_row = 20", "did you mean 'smallest_rows'"),
        ("smallest_rows = -1", "rules.toml: smallest_rows"),
        ("largest_step = 3", "largest_step is no rule any more"),
    ):
        path.write_text(text)
        with pytest.raises(SettingsError, match=words):
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
    rows = np.asarray(read_rows(read_about(tmp_path)["data"]).worker(0))
    np.testing.assert_array_equal(rows, TABLE.select("b", "a").to_numpy())


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_a_text_column_that_no_run_uses_is_no_obstacle(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"rows.{suffix}"
    frame = TABLE.with_columns(ward=pl.lit("icu"))
    frame.write_csv(path) if suffix == "csv" else frame.write_parquet(path)
    about = prepare(tmp_path, path, None)
    assert about["columns"] == ["a", "b"]
    rows = OfferedRows(read_rows(about))
    rows.choose(["b", "a"], lambda data: None)
    with pytest.raises(EmfedError, match="column 'ward' holds"):  # its owner is told why
        rows.choose(["a", "ward"], lambda data: None)


@pytest.mark.parametrize("suffix", ["csv", "parquet"])
def test_words_are_categories_at_sites_as_in_one_process(tmp_path: Path, suffix: str) -> None:
    """Every site turns its words into the codes that were agreed on."""
    frame = pl.DataFrame({"age": [40.0, 50.0, 60.0], "ward": ["surgery", "icu", "home"]})
    path = tmp_path / f"rows.{suffix}"
    frame.write_csv(path) if suffix == "csv" else frame.write_parquet(path)
    about = prepare(tmp_path, path, None, TextForm(categories="ward=home|icu|surgery"))
    assert about["columns"] == ["age", "ward"]
    rows = np.asarray(read_rows(about).worker(0))
    np.testing.assert_array_equal(rows, [[40, 2], [50, 1], [60, 0]])


@pytest.mark.parametrize("said", ["ward", "ward=icu", "ward=icu|icu", "=a|b", "ward=a||b"])
def test_categories_that_are_none_are_refused(said: str) -> None:
    with pytest.raises(EmfedError, match=r"such as ward=icu\|surgery,sex=f\|m; got"):
        TextForm(categories=said)


def test_categories_of_a_column_that_is_not_there_are_refused(tmp_path: Path) -> None:
    TABLE.write_csv(tmp_path / "rows.csv")
    with pytest.raises(EmfedError, match="--categories names 'ward', which is no column"):
        prepare(tmp_path, tmp_path / "rows.csv", None, TextForm(categories="ward=a|b"))


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
    seen: list[Joining] = []

    def stopped(guest: Joining, *_: Any) -> None:
        seen.append(guest)
        raise KeyboardInterrupt

    monkeypatch.setattr(Joining, "run", stopped)
    monkeypatch.setattr("emfed.deployment.rehearsal.rehearse", stopped)
    TABLE.write_csv(tmp_path / "rows.csv")
    join = ["join", "127.0.0.1:1", "--data", "rows.csv", "--insecure"]
    assert "messages.jsonl" in command(*join)[2]
    code, _, said = command(*join, "--dry-run")
    assert (code, "nothing about the rows was sent" in said) == (130, True)
    assert [guest.folder.name for guest in seen] == ["site-rows", "dry-run"]


def test_a_rehearsal_shows_what_would_be_sent_and_sends_nothing(tmp_path: Path) -> None:
    """What it says of sizes and kinds is what the site's journal says in the run."""
    with Deployed(tmp_path) as deployed:
        server, sites = deployed.serve(), deployed.join_all("s0")
        told: list[tuple[str, str]] = []
        guest = deployed.joining("s0", SiteRules())
        guest.folder = tmp_path / "site-s0" / "dry-run"
        rehearse(guest, lambda kind, words: told.append((kind, words)))
        shown = [words for kind, words in told if kind == "would send"]
        assert "masked: the number of rows, means" in shown[0]
        assert "statistics of Gaussian mixture" in " ".join(shown)
        assert shown[-1].startswith("in all about ")
        assert told[-1] == ("state", "that was the rehearsal: nothing about the rows was sent")
        assert not (guest.folder / "messages.jsonl").exists()
        assert not (guest.folder / "memory").exists()
        until(lambda: "not: s0" in str(deployed.status.get("why")))
        sites["s0"] = deployed.join("s0")
        server.wait()
        deployed.outcomes(sites)
        lines = (tmp_path / "site-s0" / "messages.jsonl").read_text().splitlines()
        parts = [entry for entry in map(json.loads, lines) if entry["kind"] == "part"]
        said = {words.partition(": ")[2]: int(words.split()[1]) for words in shown[:-1]}
        for entry in parts:
            shown_size = said.get(entry["content"], entry["bytes"])
            assert abs(shown_size - entry["bytes"]) < 40
        assert {entry["content"] for entry in parts} & {*said}


def test_a_rehearsal_says_what_the_rules_would_refuse(tmp_path: Path) -> None:
    with Deployed(tmp_path) as deployed:
        deployed.serve()
        deployed.join_all("s0")
        told: list[tuple[str, str]] = []
        guest = deployed.joining("s0", SiteRules(models=["hidden-markov"]))
        rehearse(guest, lambda kind, words: told.append((kind, words)))
        (refusal,) = [words for kind, words in told if kind == "would refuse"]
        assert "the owner allows the models hidden-markov" in refusal


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


def test_commands_that_start_nothing(command: Command, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(GOOD)
    assert json.loads(command("serve", "run.toml", "--check")[1])["model"]["n_components"] == 2
    for arguments in (
        ["server", "--host", "em.example.org"],
        ["site", "oslo"],
        ["add", "oslo.pub"],
    ):
        assert command("keys", *arguments)[0] == 0
    assert command("keys", "list")[1].startswith("oslo\t")


def test_a_second_server_waits_for_the_first_and_says_so(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emfed.deployment.hosting.HANDOVER_SECONDS", 1.5)
    (tmp_path / "run.toml").write_text(GOOD + '[sites]\ncolumns = ["a"]\n')
    (tmp_path / "run").mkdir()
    with alone(tmp_path / "run" / "server.lock") as mine:
        assert mine
        code, said, error = command("serve", "run.toml", "--insecure")
    assert code == 1
    assert "waiting: another `emfed serve` works in" in said
    assert "stop it, or give this run a folder" in error
    finished = {"state": "finished", "round": 9, "rounds": 9, "up": 1500, "down": 0}
    (tmp_path / "run" / "status.json").write_text(json.dumps(finished))
    code, said, _ = command("serve", "run.toml", "--insecure")
    assert "finished: round 9 of 9, 1.5 kB up, 0.0 kB down" in said
    assert (tmp_path / "run").stat().st_mode & 0o777 == 0o700
    assert command("serve", "run.toml", "--insecure")[0] == 0


def test_status_of_both_sides(command: Command, tmp_path: Path) -> None:
    server, site = tmp_path / "run", tmp_path / "site-oslo"
    for folder in (server, site):
        folder.mkdir()
    content = {"state": "running", "round": 3, "rounds": 9, "gain": 0.25, "up": 1500}
    (server / "status.json").write_text(json.dumps(content))
    _, said, _ = command("status", "run")
    for words in ("round 3 of 9, EM gains 0.25", "1.5 kB up", "no server works on it now"):
        assert words in said
    more = {"refusals": {"oslo": "missing ['weight']."}}
    (server / "status.json").write_text(json.dumps(content | more))
    assert "oslo takes no part: missing ['weight']." in command("status", "run")[1]
    (site / "site.json").write_text("{}")
    assert "nothing was sent" in command("status", "site-oslo")[1]
    entry = {"time": "t", "kind": "part", "run": "r", "bytes": 65, "content": "of a sum"}
    old = {"time": "t", "kind": "reply", "round": 4, "bytes": 65, "content": "of release 0.1"}
    (site / "messages.jsonl").write_text(json.dumps(old) + "\n" + 2 * (json.dumps(entry) + "\n"))
    found = json.loads(command("status", "site-oslo", "--json")[1])
    assert found["sent"]["part"] == {"messages": 2, "bytes": 130}
    assert found["sent"]["reply"] == {"messages": 1, "bytes": 65}
    assert "part, 65 bytes: of a sum" in command("status", "site-oslo")[1]
    for error, few, expected in (("because", False, 1), ("they refuse", True, 4)):
        failed = {"state": "failed", "error": error, "few": few}
        (server / "status.json").write_text(json.dumps(failed))
        code, said, _ = command("status", "run")
        assert (code, error in said) == (expected, True)


def test_a_run_that_did_not_end_well_says_so_everywhere(command: Command, tmp_path: Path) -> None:
    with Deployed(tmp_path, "\n\n[fit]\nrounds = 3\n") as deployed:
        server, sites = deployed.serve(), deployed.join_all()
        server.wait()
        outcomes = deployed.outcomes(sites)
        assert "the run met its limit on rounds" in outcomes["s1"].doubts[0]
    code, said, errors = command("status", "run.toml")
    assert code == 3
    assert "finished, but not well: round 3 of 3" in said
    assert "DID NOT END WELL: the run met its limit on rounds" in errors
    summary = json.loads((tmp_path / "model" / "summary.json").read_text())
    assert not summary["converged"]
    assert "limit on rounds" in summary["doubts"][0]
    assert "limit on rounds" in command("inspect", "model/model.emfed")[1]
    assert "limit on rounds" in command("inspect", "site-s0/model.emfed")[1]
    code, _, errors = command("serve", "run.toml")  # it is finished already
    assert (code, "DID NOT END WELL" in errors) == (3, True)
