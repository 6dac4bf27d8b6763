"""Runs of an operator: orders, ends, words, several runs, absences, refusals."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from emfed import fit, gaussian_mixture, load
from emfed.cli.main import main
from emfed.core.errors import ParticipationError, SettingsError
from emfed.deployment.joining import SiteOutcome
from emfed.deployment.orders import change_orders
from emfed.deployment.status import logging_to, read_status
from emfed.deployment.views import status_line
from emfed.network.owner_rules import SiteRules
from tests.deployment.deployed import Deployed, tables, until

LONG = "\n\n[fit]\ntol = 0.0\nrounds = 400\n"
"""A run that goes on until somebody ends it."""


def rounds(deployed: Deployed) -> int:
    return int(deployed.status.get("round", 0))


def test_a_masked_run_leaves_one_model_everywhere_and_tells_of_it(tmp_path: Path) -> None:
    with Deployed(tmp_path) as deployed:
        server, sites = deployed.serve(), deployed.join_all()
        server.wait()
        outcomes = deployed.outcomes(sites)
        model = load(tmp_path / "model" / "model.emfed")
        for name, outcome in outcomes.items():
            folder = tmp_path / f"site-{name}"
            for path in (folder / "model.emfed", folder / "models" / "run.emfed"):
                assert np.array_equal(load(path).statistics, model.statistics)
            assert outcome == SiteOutcome()
            assert "all sites have signed the model" in deployed.heard[name][-2]
        last = deployed.status
        assert (last["state"], last["confirmed"], last["untold"]) == ("finished", True, [])
        assert last["began"] == last["counted"] == {"sites": 3, "rows": 180}
        assert status_line(last).startswith("finished: converged after")
        assert "began" not in status_line(last), "all are in the model: that needs no word"
        early = [one for one in deployed.said if one.get("round", 0) < last["round"]]
        assert early
        assert not any(one.get("confirmed") for one in early)
        summary = json.loads((tmp_path / "model" / "summary.json").read_text())
        assert summary["seed"] == model.seed
        assert last["components"] == summary["parameters"]
        deployed.said.clear()
        deployed.serve().wait()  # nobody is to be told any more
        assert deployed.status["state"] == "finished"


def test_a_run_is_paused_extended_and_finished_by_the_operator(tmp_path: Path) -> None:
    with Deployed(tmp_path, "\n\n[fit]\ntol = 0.0\nrounds = 12\n") as deployed:
        folder = tmp_path / "run"
        folder.mkdir()
        change_orders(folder, paused=True)
        server, sites = deployed.serve(), deployed.join_all()
        until(lambda: deployed.status.get("state") == "paused")
        assert "`emfed control resume` goes on" in deployed.status["why"]
        change_orders(folder, paused=False, rounds=400)
        until(lambda: rounds(deployed) > 14)
        change_orders(folder, finish=True)
        server.wait()
        last = deployed.status
        assert 14 < last["round"] < 400
        assert status_line(last).startswith("finished: ended by the operator, round ")
        assert last["rounds"] == 400
        deployed.outcomes(sites)


def test_who_is_expelled_is_out_and_the_others_go_on(tmp_path: Path) -> None:
    rows = tables(4)
    with Deployed(tmp_path, LONG, rows) as deployed:
        server, sites = deployed.serve(), deployed.join_all()
        until(lambda: rounds(deployed) > 3)
        change_orders(tmp_path / "run", {"s3": "expelled by the operator: wrong units"})
        until(lambda: deployed.status["counted"]["sites"] == 3 and rounds(deployed) > 3)
        change_orders(tmp_path / "run", finish=True)
        server.wait()
        last = deployed.status
        assert last["began"] == {"sites": 4, "rows": 240}
        assert last["counted"] == {"sites": 3, "rows": 180}
        words = "3 sites with 180 rows are in the model, of 4 with 240 that began"
        assert words in status_line(last)
        assert "wrong units" in status_line(last)
        assert load(tmp_path / "model" / "model.emfed").samples == 180
        assert sites["s3"].wait().failed


def test_nobody_is_expelled_who_cannot_be_done_without(tmp_path: Path) -> None:
    """A masked sum of two sites is none: the order would have ended the run for good."""
    with Deployed(tmp_path, LONG) as deployed:
        server, _ = deployed.serve(), deployed.join_all()
        until(lambda: rounds(deployed) > 2)
        change_orders(tmp_path / "run", {"s1": "a slip"})
        until(lambda: "s1 is not expelled" in str(deployed.status.get("trouble")))
        change_orders(tmp_path / "run", finish=True)
        server.wait()
        assert deployed.status["counted"]["sites"] == 3


def test_runs_follow_each_other_and_sites_stay_for_them(tmp_path: Path) -> None:
    with Deployed(tmp_path) as deployed:
        second = deployed.write("second", model=THREE)
        server, sites = deployed.serve(deployed.config, second), deployed.join_all("s2")
        stays = deployed.join("s2", stay=True)
        server.wait()
        deployed.outcomes(sites)
        for name in deployed.tables:
            models = tmp_path / f"site-{name}" / "models"
            assert {path.name for path in models.iterdir()} == {"run.emfed", "second.emfed"}
        last = load(tmp_path / "site-s0" / "model.emfed")
        assert last.params.weights.shape == (3,)
        assert stays.thread.is_alive()


THREE = '[model]\nkind = "gaussian-mixture"\nn_components = 3\n'


def test_runs_at_once_share_sites_and_one_that_fails_leaves_the_others_alone(
    tmp_path: Path,
) -> None:
    with Deployed(tmp_path) as deployed:
        second = deployed.write("second", "give_up_refused = 1.0", model=OTHER)
        server, sites = deployed.serve(deployed.config, second, at_once=True), {}
        for name in deployed.tables:
            sites[name] = deployed.join(name, SiteRules(models=["gaussian-mixture"]))
        with pytest.raises(ParticipationError, match="s[012]: the owner allows the models"):
            server.wait()
        assert read_status(tmp_path / "run")["state"] == "finished"
        assert read_status(tmp_path / "run-second")["state"] == "failed"
        assert (tmp_path / "site-s1" / "models" / "run.emfed").exists()
        assert not (tmp_path / "site-s1" / "models" / "second.emfed").exists()
        for one in sites.values():
            one.end()


OTHER = '[model]\nkind = "factor-analysis"\nn_factors = 1\n'


def test_while_a_run_waits_for_a_site_everyone_sees_for_whom_until_when_and_what_then(
    tmp_path: Path,
) -> None:
    with Deployed(tmp_path, "wait_for = 15.0" + LONG, tables(4)) as deployed:
        server, sites = deployed.serve(), deployed.join_all()
        until(lambda: rounds(deployed) > 2)
        sites["s2"].end()
        until(lambda: deployed.status["state"] == "waiting")
        why = deployed.status["why"]
        assert "no word from s2; the others go on without at " in why
        assert "`emfed control expel` goes on at once" in why
        assert "[sites] wait_for = 15" in why
        until(lambda: deployed.status["counted"]["sites"] == 3)
        assert "away for more than 15 s" in deployed.status["refusals"]["s2"]
        change_orders(tmp_path / "run", finish=True)
        server.wait()


def test_a_run_whose_sites_refuse_ends_with_words_and_can_be_resumed(tmp_path: Path) -> None:
    with Deployed(tmp_path, "give_up_refused = 2.0") as deployed:
        careful = SiteRules(models=["hidden-markov"])
        server = deployed.serve()
        sites = {name: deployed.join(name, careful) for name in deployed.tables}
        with pytest.raises(ParticipationError, match="3 of 3 sites refuse, and the run needs 3"):
            server.wait()
        assert read_status(tmp_path / "run")["few"] is True
        for one in sites.values():
            assert one.end().refused
        again, ready = deployed.serve(), deployed.join_all()
        again.wait()
        deployed.outcomes(ready)
        assert deployed.status["state"] == "finished"


def test_owners_who_have_not_answered_are_waited_for(tmp_path: Path) -> None:
    from emfed.deployment.approval import answer_fit, pending_fits

    with Deployed(tmp_path) as deployed:
        server, _ = deployed.serve(), deployed.join_all("s1")
        deployed.join("s1", SiteRules(ask_first=True))
        folder = tmp_path / "site-s1"
        until(lambda: folder.exists() and pending_fits(folder))
        (waiting,) = pending_fits(folder)
        assert "gaussian-mixture" in waiting["words"]
        assert "n_components 2" in waiting["words"]
        assert "sums are masked" in waiting["words"]
        until(lambda: "not: s1 (connected)" in str(deployed.status.get("why")))
        assert not any("hello" in words for words in deployed.heard["s1"])
        answer_fit(folder, waiting["fit"], True)
        server.wait()
        assert not pending_fits(folder)


def test_a_server_that_waits_in_vain_ends_and_says_what_it_needs(tmp_path: Path) -> None:
    with Deployed(tmp_path, "give_up = 0.5\nwait = 0.0") as deployed:
        server, _ = deployed.serve(), deployed.join("s0")
        with pytest.raises(ParticipationError, match="1 sites are here; 3 are needed"):
            server.wait()


def test_an_operator_may_end_a_run_before_it_begins(tmp_path: Path) -> None:
    with Deployed(tmp_path) as deployed:
        (tmp_path / "run").mkdir()
        change_orders(tmp_path / "run", finish=True)
        with pytest.raises(ParticipationError, match="before it began"):
            deployed.serve().wait()


def test_orders_that_cannot_be_read_end_no_run(tmp_path: Path) -> None:
    with Deployed(tmp_path, LONG, tables(4)) as deployed:
        server, _ = deployed.serve(), deployed.join_all()
        until(lambda: rounds(deployed) > 2)
        change_orders(tmp_path / "run", {"s2": "wrong units"})
        until(lambda: deployed.status["counted"]["sites"] == 3)
        (tmp_path / "run" / "orders.json").write_text("{'paused': true}")
        until(lambda: "what was said before holds" in str(deployed.status.get("trouble")))
        assert "s2" in deployed.status["out"]
        (tmp_path / "run" / "orders.json").unlink()
        change_orders(tmp_path / "run", {"s2": "wrong units"}, finish=True)
        server.wait()


def test_seconds_are_the_analysts_clock(tmp_path: Path) -> None:
    with Deployed(tmp_path, LONG.replace("rounds = 400", "seconds = 2.0")) as deployed:
        server, _ = deployed.serve(), deployed.join_all()
        server.wait()
        assert deployed.status["stopped"] == "callback"
        program = json.loads((tmp_path / "run" / "configuration.json").read_text())
        assert "seconds" not in program["fit"], "no member but the analyst ends by it"


def test_a_folder_of_another_run_or_release_is_refused_in_words(tmp_path: Path) -> None:
    with Deployed(tmp_path) as deployed:
        stopped = deployed.serve()
        until(lambda: deployed.said)
        stopped.end()
        other = deployed.write("run", model=THREE)
        with pytest.raises(SettingsError, match="holds a run with another model than run.toml"):
            deployed.serve(other).wait()
        (tmp_path / "run-old" / "fit").mkdir(parents=True)
        old = deployed.write("old")
        with pytest.raises(SettingsError, match="a run of release 0.1"):
            deployed.serve(old).wait()


def test_unmasked_rules_are_needed_for_a_run_without_masks(tmp_path: Path) -> None:
    with Deployed(tmp_path, "give_up_refused = 0.5\n\n[privacy]\nmasks = false\n") as deployed:
        server, _ = deployed.serve(), deployed.join_all()
        with pytest.raises(ParticipationError, match="masked sums alone"):
            server.wait()


def test_a_site_is_warned_of_its_own_units_and_nobody_else(tmp_path: Path) -> None:
    rows = tables(4, 200)
    rows = {name: table.with_columns(x=pl.col("x") + 100) for name, table in rows.items()}
    rows["s1"] = rows["s1"].with_columns(x=pl.col("x") * 1000)
    with Deployed(tmp_path, rows=rows) as deployed:
        server, sites = deployed.serve(), deployed.join_all()
        server.wait()
        deployed.outcomes(sites)
        (said,) = [words for words in deployed.heard["s1"] if "look at your rows" in words]
        assert "column 'x'" in said
        assert "1,000 times too large" in said
        journal = (tmp_path / "site-s1" / "messages.jsonl").read_text().splitlines()
        assert [e["kind"] for e in map(json.loads, journal)].count("warning") == 1
        others = "".join(w for name in ("s0", "s2", "s3") for w in deployed.heard[name])
        assert "look at your rows" not in others


def test_two_sites_whose_owners_allow_it_end_where_one_process_ends(tmp_path: Path) -> None:
    """Of two, each knows the other's part: so there are no masks, and both must say yes."""
    with Deployed(tmp_path, "\n\n[fit]\nscores = false\n", tables(2)) as deployed:
        server = deployed.serve()
        sites = {name: deployed.join(name, SiteRules(unmasked=True)) for name in deployed.tables}
        server.wait()
        deployed.outcomes(sites)
        found = load(tmp_path / "model" / "model.emfed")
        here = fit(gaussian_mixture(2), deployed.tables, masks=False, seed=found.seed)
        np.testing.assert_allclose(found.statistics, here.statistics, rtol=1e-12)
        for name in deployed.tables:
            mine = load(tmp_path / f"site-{name}" / "model.emfed")
            assert np.array_equal(mine.statistics, found.statistics)


def test_a_private_run_spends_what_owners_give_and_no_more(tmp_path: Path) -> None:
    private = "give_up_refused = 0.5\n\n[privacy]\nepsilon = 3.0\ndelta = 1e-5\n"
    with Deployed(tmp_path, private, tables(3, 400)) as deployed:
        second = deployed.write("second", private)
        rules = SiteRules(largest_epsilon=4.0)
        sites = {name: deployed.join(name, rules, stay=True) for name in deployed.tables}
        deployed.serve().wait()
        found = load(tmp_path / "model" / "model.emfed")
        assert found.privacy is not None
        assert found.privacy["private"]
        assert found.privacy["epsilon"] == pytest.approx(3.0)
        with pytest.raises(ParticipationError, match="epsilon 4 over all runs, and about 2.36"):
            deployed.serve(second).wait()
        for one in sites.values():
            assert "ask for less" in one.end().refused[0]


def test_who_is_expelled_is_not_waited_for_and_may_come_back_whatever_began_anew(
    tmp_path: Path,
) -> None:
    """A process that began while it was out ended, and its site never came back."""
    with Deployed(tmp_path, LONG.replace("400", "20_000"), tables(5)) as deployed:
        folder = tmp_path / "run"
        folder.mkdir()
        change_orders(folder, {"s4": "on holiday"})
        server, twice = deployed.serve(), SiteRules(largest_changes=2)
        sites = {name: deployed.join(name, twice) for name in deployed.tables}
        until(lambda: rounds(deployed) > 2)
        assert deployed.status["began"] == {"sites": 4, "rows": 240}
        change_orders(folder, {"s3": "wrong units"})
        until(lambda: deployed.status["counted"] == {"sites": 3, "rows": 180})
        sites["s3"].end()
        sites["s3"] = deployed.join("s3", twice)
        until(lambda: any("took this site out" in words for words in deployed.heard["s3"]))
        change_orders(folder, {"s3": None})
        until(lambda: deployed.status["counted"] == {"sites": 4, "rows": 240})
        change_orders(folder, finish=True)
        server.wait()
        assert not sites["s3"].wait().failed


def test_codes_of_the_commands_say_how_a_run_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def code(*arguments: str) -> int:
        with pytest.raises(SystemExit) as ended:
            main([*arguments])
        assert isinstance(ended.value.code, int)
        return ended.value.code

    short = "give_up_refused = 0.5\n\n[fit]\nrounds = 2\n"
    monkeypatch.chdir(tmp_path)
    with Deployed(tmp_path, short) as deployed:
        join = ("join", f"127.0.0.1:{deployed.port}", "--data", "s0.csv", "--key", "s0.key")
        join = (*join, "--ca", "keys/ca.pem")
        server, _ = deployed.serve(), deployed.join_all("s0")
        assert code(*join) == 3, "its limit, before its tolerance"
        server.wait()
        assert code("serve", "run.toml") == 3
        assert code("status", "run.toml") == 3
        slow = short.replace("0.5", "10.0")  # the third refusal must come in time
        second = deployed.write("second", slow)
        others = {n: deployed.join(n, SiteRules(models=["k-means"])) for n in ("s1", "s2")}
        server = deployed.serve(second)
        (tmp_path / "rules.toml").write_text('models = ["k-means"]\n')
        assert code(*join, "--rules", "rules.toml") == 4
        with pytest.raises(ParticipationError):
            server.wait()
        deployed.outcomes(others)
        assert code("status", "second.toml") == 4


def test_a_log_begins_anew_before_it_grows_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("emfed.deployment.status.LONGEST_LOG", 200)
    with logging_to(tmp_path / "serve.log"):
        for number in range(40):
            logging.getLogger("emfed").warning("round %d is over", number)
    parts = sorted(path.name for path in tmp_path.iterdir())
    assert parts == ["serve.log", "serve.log.1", "serve.log.2", "serve.log.3"]
    assert all(path.stat().st_size <= 200 for path in tmp_path.iterdir())
    assert "round 39 is over" in (tmp_path / "serve.log").read_text()
