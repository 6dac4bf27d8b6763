"""``emfed fit`` and what reads its files, on real files, pipes and signals."""

from __future__ import annotations

import io
import json
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.core.registry import MODELS, STORED
from emfed.fitting.face import run
from emfed.fitting.fitted import Watch
from emfed.fitting.settings import FitSettings
from tests.cli.shell import START, Shell, wards

NUMBERS = ("--columns", "age,pressure,stays")
EXACT = ("--algorithm", "em", "--field-tol", 1e-10)


def test_the_command_fits_what_python_fits(emfed_shell: Shell) -> None:
    code, out, _ = emfed_shell(
        "fit", "wards.csv", "-g", "hospital", *NUMBERS, "-k", 2, "--json", *EXACT
    )
    assert code == 0
    told = json.loads(out)
    frame = pl.read_csv(emfed_shell.folder / "wards.csv")
    result = emfed.fit(
        emfed.gaussian_mixture(2),
        frame.select("hospital", "age", "pressure", "stays"),
        "em",
        groups="hospital",
        field_tol=1e-10,
    )
    loaded = emfed.load(emfed_shell.folder / "model.emfed")
    np.testing.assert_allclose(loaded.params.means, result.params.means, rtol=1e-9)
    last = loaded.records[-1].squared_H
    assert last is not None
    assert last <= 1e-10  # --field-tol decides, not the nats of the default
    assert loaded.columns == ("age", "pressure", "stays")
    assert set(loaded.workers()["worker"]) == {"north", "Sankt Anna", "007"}
    rows = frame.select("age", "pressure", "stays")
    assert told["log_likelihood"] == pytest.approx(loaded.log_likelihood(rows), abs=1e-9)
    assert told["rows"] == 185
    assert told["seed"] == 0
    assert told["converged"] is True


def test_a_summary_names_the_seed_and_the_files(emfed_shell: Shell) -> None:
    code, out, err = emfed_shell(
        "fit", "wards.csv", "-g", "hospital", *NUMBERS, "-o", "w.emfed", "--report", "w.html",
        "--seed", 11,
    )  # fmt: skip
    assert code == 0
    assert re.search(r"seed\s+│\s+11\b", out)
    assert "The model is w.emfed." in out
    assert "The report is w.html." in out
    assert err == ""  # progress is for terminals
    assert emfed.load(emfed_shell.folder / "w.emfed").seed == 11
    code, out, err = emfed_shell("fit", "wards.csv", *NUMBERS, "--quiet")
    assert (code, out, err) == (0, "", "")


def test_a_range_of_components_is_chosen_from(emfed_shell: Shell) -> None:
    common = ("-g", "hospital", *NUMBERS, "--algorithm", "em", "--json", "--report", "r.html")
    code, out, err = emfed_shell("fit", "wards.csv", "-k", "1:3", *common)
    assert code == 0, err
    told = json.loads(out)
    assert told["components"] == 2  # as many as there are
    assert [row["n_components"] for row in told["tried"]] == [1, 2, 3]
    result = emfed.load(emfed_shell.folder / "model.emfed")
    assert result.facts is not None
    assert result.facts.settings["selection"] == {"criterion": "bic", "tried": told["tried"]}
    rows = pl.read_csv(emfed_shell.folder / "wards.csv").select("age", "pressure", "stays")
    assert told["tried"][1]["bic"] == pytest.approx(result.bic(rows), rel=1e-6)
    assert b"How many components" in (emfed_shell.folder / "r.html").read_bytes()
    # The curve is that of the winner, and leads to where it ends; a bold step may show, too.
    curve = -result.records.column("objective")
    curve = curve[np.isfinite(curve)]
    assert len(curve) > 3
    assert curve.max() == pytest.approx(result.log_likelihood(rows), abs=1e-3)


def test_the_curve_is_what_a_monitor_would_have_told() -> None:
    data = emfed.data.synthetic_federation(seed=1, workers=5)
    model, algorithm = emfed.gaussian_mixture(2, weight_concentration=2.0), emfed.FedEM()
    common: dict[str, Any] = {"algorithm": algorithm, "rounds": 200, "tol": 0, "seed": 3}
    settings = FitSettings(model, **common)
    drawn = run(settings, emfed.network.StackedFederation(data), Watch(curve=True)).result
    told = drawn.records.column("objective")
    watched = emfed.fit(model, data, **common, monitor=emfed.fitting.Monitor(mean_field=False))
    np.testing.assert_array_equal(drawn.statistics, watched.statistics)
    known = np.flatnonzero(np.isfinite(told))
    assert 30 <= len(known) <= 64  # however long the run
    np.testing.assert_allclose(told[known], watched.records.column("objective")[known], rtol=1e-12)


def test_a_limit_before_convergence_has_an_exit_code(emfed_shell: Shell) -> None:
    code, _, err = emfed_shell("fit", "wards.csv", *NUMBERS, "--rounds", 1, "--quiet")
    assert code == 3
    assert "not converged; model.emfed" in err
    assert emfed.load(emfed_shell.folder / "model.emfed").rounds == 1


def test_several_files_are_several_workers(emfed_shell: Shell) -> None:
    frame = pl.read_csv(emfed_shell.folder / "wards.csv").select("hospital", "age", "pressure")
    for (name,), part in frame.group_by("hospital"):
        part.drop("hospital").write_csv(emfed_shell.folder / f"{name}.csv")
    files = ["north.csv", "Sankt Anna.csv", "007.csv"]
    assert emfed_shell("fit", *files, "-o", "files.emfed", "-q", *EXACT)[0] == 0
    columns = ("--columns", "age,pressure", *EXACT)
    assert emfed_shell("fit", "wards.csv", "-g", "hospital", *columns, "-q")[0] == 0
    one, other = (emfed.load(emfed_shell.folder / f) for f in ("model.emfed", "files.emfed"))
    assert sorted(other.workers()["worker"]) == sorted(one.workers()["worker"])
    np.testing.assert_allclose(np.sort(one.params.means, 0), np.sort(other.params.means, 0), 1e-4)
    code, _, err = emfed_shell("fit", *files, "-g", "hospital")
    assert code == 2
    assert "one worker each" in err
    assert emfed_shell("fit", "007.csv", "007.csv")[0] == 2


def test_csv_parquet_and_pipes_give_one_answer(emfed_shell: Shell) -> None:
    frame = pl.read_csv(emfed_shell.folder / "wards.csv")
    frame.sort("hospital").write_parquet(emfed_shell.folder / "wards.parquet")
    frame.sort("hospital").write_csv(emfed_shell.folder / "sorted.csv")
    common = ("-g", "hospital", *NUMBERS, "-q")
    assert emfed_shell("fit", "wards.parquet", *common, "-o", "a.emfed")[0] == 0
    assert emfed_shell("fit", "sorted.csv", *common, "-o", "b.emfed")[0] == 0
    made = {name: emfed.load(emfed_shell.folder / f"{name}.emfed").params for name in "ab"}
    np.testing.assert_allclose(made["a"].means, made["b"].means, rtol=1e-12)
    for name in ("sorted.csv", "wards.parquet"):
        with (emfed_shell.folder / name).open("rb") as file:
            process = emfed_shell.process("fit", "-", *common, "-o", "c.emfed", stdin=file)
            _, errors = process.communicate(timeout=60)
        assert process.returncode == 0, errors
        piped = emfed.load(emfed_shell.folder / "c.emfed").params
        np.testing.assert_allclose(piped.means, made["a"].means, rtol=1e-12)


def test_predictions_come_out_beside_the_rows(emfed_shell: Shell) -> None:
    assert emfed_shell("fit", "wards.csv", "-g", "hospital", *NUMBERS, "-q")[0] == 0
    result = emfed.load(emfed_shell.folder / "model.emfed")
    frame = pl.read_csv(emfed_shell.folder / "wards.csv", schema_overrides={"hospital": pl.String})
    rows = frame.select("age", "pressure", "stays")
    code, out, _ = emfed_shell("predict", "model.emfed", "wards.csv", "--proba")
    assert code == 0
    told = pl.read_csv(io.StringIO(out))
    assert told["component"].to_list() == result.predict(rows).tolist()
    probabilities = told.select("probability_0", "probability_1").to_numpy()
    np.testing.assert_allclose(probabilities, result.predict_proba(rows), rtol=1e-12)
    np.testing.assert_allclose(told["log_likelihood"], result.score_samples(rows), rtol=1e-12)
    out_file = ("--keep", "-o", "x.parquet")
    code, out, _ = emfed_shell("predict", "model.emfed", "wards.csv", *out_file, "--json")
    assert code == 0
    assert sum(json.loads(out)["components"]) == 185
    kept = pl.read_parquet(emfed_shell.folder / "x.parquet")
    assert kept["hospital"].to_list() == frame["hospital"].to_list()
    assert kept.columns[-3:] == ["component", "probability", "log_likelihood"]
    # Columns in another order, and others beside them, change nothing.
    frame.select("ward", "stays", "pressure", "age").write_csv(emfed_shell.folder / "turned.csv")
    _, turned, _ = emfed_shell("predict", "model.emfed", "turned.csv", "--proba")
    assert pl.read_csv(io.StringIO(turned)).equals(told)


@pytest.mark.parametrize(
    ("cell", "words"),
    [
        ("", "line 3, column 'b': the cell is empty: the model was fitted without missing values"),
        ("n/a", "line 3, column 'b': the cell is empty"),
        ("low", "line 3, column 'b': 'low' is no number: the model was fitted to"),
    ],
)
def test_cells_that_a_model_cannot_take_are_told_without_options_of_another_command(
    cell: str, words: str, emfed_shell: Shell
) -> None:
    table = "a,b\n" + "".join(f"{k % 7},{k % 5}\n" for k in range(40))
    assert emfed_shell("fit", emfed_shell.write("good.csv", table), "-q")[0] == 0
    bad = emfed_shell.write("bad.csv", f"a,b\n1,2\n3,{cell}\n4,5\n")
    code, _, err = emfed_shell("predict", "model.emfed", bad)
    assert code == 1
    assert words in err
    assert "--columns" not in err
    assert "--types" not in err


def test_one_word_among_numbers_is_taken_for_a_slip_and_not_for_categories(
    emfed_shell: Shell,
) -> None:
    rows = [f"{k % 7},{k % 5}" for k in range(40)]
    slip = emfed_shell.write("slip.csv", "\n".join(["a,b", *rows, "3,unknown"]) + "\n")
    code, _, err = emfed_shell("fit", slip)
    assert code == 1
    assert "leave it empty and say --missing" in err
    assert "categorical" not in err
    words = emfed_shell.write("words.csv", "a,b\n1,low\n2,high\n3,low\n")
    assert "--types b=categorical" in emfed_shell("fit", words)[2]


def test_a_warning_is_one_line_without_code(emfed_shell: Shell) -> None:
    emfed_shell.write("flat.csv", "a,b\n" + "".join(f"{k % 7},1\n" for k in range(40)))
    _, told = emfed_shell.process("fit", "flat.csv", "-q").communicate(timeout=60)
    errors = told.decode()
    lines = [line for line in errors.splitlines() if "one single value" in line]
    assert [line[:14] for line in lines] == ["emfed: column "]
    assert ".py" not in errors


def test_the_summary_tells_what_the_curve_of_the_report_took(emfed_shell: Shell) -> None:
    fitted = ("fit", "wards.csv", "-g", "hospital", *NUMBERS, "-k", "1:2", "--json")
    told = json.loads(emfed_shell(*fitted)[1])
    kept = emfed.load(emfed_shell.folder / "model.emfed").workers()
    assert told["bytes_up"] + told["bytes_down"] == sum(kept["bytes_up"]) + sum(kept["bytes_down"])
    assert told["curve_bytes"] > 0
    assert json.loads(emfed_shell(*fitted, "--no-curve")[1])["curve_bytes"] == 0


def test_predictions_in_a_file_are_told_of_unless_quiet(emfed_shell: Shell) -> None:
    assert emfed_shell("fit", "wards.csv", *NUMBERS, "-q")[0] == 0
    into = ("predict", "model.emfed", "wards.csv", "-o", "p.csv")
    assert emfed_shell(*into)[:2] == (0, "The components of 185 rows are in p.csv.\n")
    assert emfed_shell(*into, "-q")[:2] == (0, "")
    table = emfed_shell("predict", "model.emfed", "wards.csv", "-q")[1]
    assert table == (emfed_shell.folder / "p.csv").read_text()


def test_words_are_categories_in_fit_predict_and_impute(emfed_shell: Shell) -> None:
    types = ("--types", "ward=categorical,stays=poisson")
    assert emfed_shell("fit", "wards.csv", "-g", "hospital", *types, "-q")[0] == 0
    result = emfed.load(emfed_shell.folder / "model.emfed")
    assert result.facts is not None
    assert result.facts.settings["categories"] == {"ward": ["er", "icu"]}
    frame = pl.read_csv(emfed_shell.folder / "wards.csv", infer_schema=False)
    codes = frame.with_columns((pl.col("ward") == "icu").cast(pl.Float64))
    rows = codes.select(pl.col("age", "pressure", "stays", "ward").cast(pl.Float64))
    code, out, _ = emfed_shell("predict", "model.emfed", "wards.csv")
    assert code == 0
    told = pl.read_csv(io.StringIO(out))
    np.testing.assert_allclose(told["log_likelihood"], result.score_samples(rows), rtol=1e-12)
    # Empty cells come back filled, others as they were written.
    holes = frame.with_columns(
        pl.when(pl.int_range(pl.len()) % 3 == 0).then(None).otherwise(pl.col("ward")).alias("ward"),
        pl.when(pl.int_range(pl.len()) % 4 == 0).then(None).otherwise(pl.col("age")).alias("age"),
    )
    holes.write_csv(emfed_shell.folder / "holes.csv")
    code, out, _ = emfed_shell("impute", "holes.csv", "--model", "model.emfed")
    assert code == 0
    filled = pl.read_csv(io.StringIO(out), infer_schema=False)
    assert filled.columns == frame.columns
    assert set(filled["ward"]) == {"er", "icu"}
    assert filled.null_count().sum_horizontal().item() == 0
    seen = holes["age"].is_not_null()
    assert filled["age"].filter(seen).to_list() == frame["age"].filter(seen).to_list()
    assert (filled["ward"] == frame["ward"]).mean() > 0.8
    code, _, err = emfed_shell("predict", "model.emfed", emfed_shell.write("new.csv", NEW_WARD))
    assert code == 1
    assert "'surgery'" in err


NEW_WARD = "age,pressure,stays,ward\n50,120,3,surgery\n"


def test_imputation_by_a_fitted_model(emfed_shell: Shell) -> None:
    frame = pl.read_csv(emfed_shell.folder / "wards.csv").select("age", "pressure", "stays")
    rng = np.random.default_rng(0)
    rows = np.where(rng.random((frame.height, 3)) < 0.2, np.nan, frame.to_numpy())
    pl.DataFrame(rows, frame.columns, nan_to_null=True).write_csv(emfed_shell.folder / "torn.csv")
    code, _, err = emfed_shell("fit", "torn.csv")
    assert code == 2
    assert "--missing" in err
    assert ", column " in err
    assert "in line " in err
    assert emfed_shell("fit", "torn.csv", "--missing", "-q", "--rounds", 50)[0] in (0, 3)
    result = emfed.load(emfed_shell.folder / "model.emfed")
    made = ("impute", "torn.csv", "--model", "model.emfed", "--filled", "whole.parquet")
    assert emfed_shell(*made, "--intervals", "--level", 0.8, "--json")[0] == 0
    whole = pl.read_parquet(emfed_shell.folder / "whole.parquet")
    got = whole.select(pl.col("age", "pressure", "stays").cast(pl.Float64)).to_numpy()
    np.testing.assert_allclose(got, result.impute(rows), rtol=1e-12)
    low, high = result.impute_intervals(rows, 0.8)
    np.testing.assert_allclose(whole["age_low"], low[:, 0], rtol=1e-12)
    np.testing.assert_allclose(whole["stays_high"], high[:, 2], rtol=1e-12)
    assert emfed_shell(*made, "--draws", 3, "--seed", 5)[0] == 0
    several = pl.read_parquet(emfed_shell.folder / "whole.parquet")
    assert several["draw"].to_list() == np.repeat(range(3), len(rows)).tolist()
    third = several.filter(pl.col("draw") == 2)["pressure"].cast(pl.Float64)
    np.testing.assert_allclose(third, result.impute_draws(rows, 3, 5)[2][:, 1], rtol=1e-12)
    assert emfed_shell(*made, "--draws", 3, "--intervals")[0] == 2
    plain = ("fit", "wards.csv", *NUMBERS, "-o", "plain.emfed", "-q")
    assert emfed_shell(*plain)[0] == 0
    code, _, err = emfed_shell("impute", "torn.csv", "--model", "plain.emfed")
    assert code != 0
    assert "missing" in err


@pytest.mark.parametrize(
    "options",
    [
        ["--model", "factor-analysis", "--factors", 1],
        ["--model", "ppca", "--factors", 1, "-k", 1],
        ["--model", "regression-mixture", "--target", "pressure"],
        ["--model", "mixed-mixture"],
        ["--algorithm", "FedEM", "--compressor", "dithering:8", "-p", "0.8"],
        ["--algorithm", "VR-FedEM", "--batch-size", 20, "--compressor", "none"],
        ["--covariance-type", "tied", "--weights", "uniform"],
        pytest.param(["--batch-size", 20, "-p", "0.7"], marks=pytest.mark.long),
    ],
    ids=str,
)
def test_models_and_algorithms(options: Any, emfed_shell: Shell) -> None:
    common = ("-g", "hospital", *NUMBERS, "--rounds", 20, "--report", "r.html", "--json")
    code, out, err = emfed_shell("fit", "wards.csv", *common, *options)
    assert code in (0, 3), err
    assert json.loads(out)["log_likelihood"] < 0
    assert emfed_shell("predict", "model.emfed", "wards.csv")[0] == 0
    assert b"What left each site" in (emfed_shell.folder / "r.html").read_bytes()


def card_of(shell: Shell, model: str) -> str:
    """What `emfed inspect` says of a model file, for people and for programs."""
    code, text, err = shell("inspect", model)
    assert code == 0, err
    return str(text + shell("inspect", model, "--json")[1])


def test_a_private_fit_says_what_was_spent_and_claims_nothing_else(emfed_shell: Shell) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(rng.choice([-3.0, 3.0], (4000, 1)), 1, (4000, 2))
    lines = [f"{a:.4f},{b:.4f},{'nsw'[j % 3]}" for j, (a, b) in enumerate(rows)]
    emfed_shell.write("many.csv", "a,b,site\n" + "\n".join(lines))
    run = ("fit", "many.csv", "-g", "site", "-k", "1:2", "--epsilon", 2, "--report", "r.html")
    code, out, err = emfed_shell(*run)
    assert code == 0, err
    assert "epsilon, delta" in out
    assert "converged" not in out
    report = (emfed_shell.folder / "r.html").read_text()
    assert "Secure sums were on" in report
    assert "Every answer had noise, private: epsilon 2 and delta 1e-06" in report
    assert "2 components: BIC" in out
    assert "epsilon" in card_of(emfed_shell, "model.emfed")
    seeded = ("fit", "many.csv", "-g", "site", "-k", 2, "--epsilon", 2, "--noise-seed", 5, "--json")
    code, out, err = emfed_shell(*seeded)
    assert code == 0, err
    told = json.loads(out)
    again = json.loads(emfed_shell(*seeded)[1])
    assert told == again
    assert told["privacy"]["private"] is False
    assert "epsilon" not in out + card_of(emfed_shell, "model.emfed")
    code, out, _ = emfed_shell(*seeded[:-1])
    assert code == 0
    assert "not private: its noise follows from noise_seed 5" in " ".join(out.split())
    assert "epsilon" not in out
    code, _, err = emfed_shell("fit", "many.csv", "--noise-seed", 5)
    assert code == 2
    assert "leave --noise-seed out, or give --epsilon" in err
    code, _, err = emfed_shell("fit", "many.csv", "--epsilon", 2, "--start", "k-means")
    assert code == 2
    assert "--epsilon and --start do not go together" in err


def test_one_worker_runs_em_and_follow_em_reaches_the_algorithm(emfed_shell: Shell) -> None:
    def algorithm(*options: Any) -> Any:
        run = (*NUMBERS, "-q", "--rounds", 3, "-o", "a.emfed", *options)
        assert emfed_shell("fit", "wards.csv", *run)[0] in (0, 3)
        return emfed.load(emfed_shell.folder / "a.emfed").card["settings"]["algorithm"]

    assert algorithm() == {"algorithm": "em"}
    assert algorithm("--batch-size", 20)["batch_size"] == 20  # EM has no batches
    assert algorithm("-g", "hospital")["follow_em"] is False
    assert algorithm("-g", "hospital", "--follow-em")["follow_em"] is True
    emfed_shell.write("fit.toml", 'groups = "hospital"\nfollow_em = true\n')
    assert algorithm("--config", "fit.toml")["follow_em"] is True


def test_inspect_shows_the_card(emfed_shell: Shell) -> None:
    run = ("--checkpoint", "run.checkpoint", "--rounds", 2, "-q")
    assert emfed_shell("fit", "wards.csv", "-g", "hospital", *NUMBERS, *run)[0] == 3
    code, out, _ = emfed_shell("inspect", "model.emfed")
    assert code == 0
    for words in ("# Model card", "column names: age, pressure, stays", "| Sankt Anna | 45 |"):
        assert words in re.sub(" +", " ", out)
    text = emfed_shell("inspect", "run.checkpoint")[1]
    assert "- next round: 3\n- model\n  - model: gaussian-mixture\n" in text
    assert not set("{}[]'") & set(text)
    code, out, _ = emfed_shell("inspect", "model.emfed", "--json", "--workers", "w.csv")
    told = json.loads(out)
    assert told["card"] == emfed.load(emfed_shell.folder / "model.emfed").card
    assert pl.read_csv(emfed_shell.folder / "w.csv")["rows"].sum() == 185
    code, out, _ = emfed_shell("inspect", "run.checkpoint", "--json")
    assert code == 0
    assert json.loads(out)["round"] == 3
    resumed = (*NUMBERS, "--checkpoint", "run.checkpoint", "--resume", "-q")
    assert emfed_shell("fit", "wards.csv", "-g", "hospital", *resumed)[0] == 0
    for file in ("wards.csv", "nowhere"):
        code, _, err = emfed_shell("inspect", file)
        assert code == 1
        assert "model file" in err


def test_inspect_prints_no_python(emfed_shell: Shell) -> None:
    types = ("--types", "stays=poisson,ward=categorical", "-k", "1:2", "-q", "--rounds", 5)
    run = ("--checkpoint", "c.checkpoint", *types)
    assert emfed_shell("fit", "wards.csv", "-g", "hospital", *run)[0] == 3
    for file in ("model.emfed", "c.checkpoint"):
        code, out, _ = emfed_shell("inspect", file)
        assert code == 0
        assert "- ward: categorical (categories 2)" in out
        assert not set("{}[]'") & set(out)
    out = emfed_shell("inspect", "model.emfed")[1]
    assert "  - tried\n    - n components 1; free parameters 6; log likelihood -12.0" in out
    assert "| no |" in re.sub(" +", " ", out)  # nobody is badly served


def test_what_was_said_in_python_is_said_in_options(emfed_shell: Shell) -> None:
    run = ("fit", "wards.csv", *NUMBERS, "-q", "--rounds", 1, "--checkpoint", "c.checkpoint")
    assert emfed_shell(*run)[0] == 3
    code, _, err = emfed_shell(*run)
    assert code == 1
    assert "use --resume to continue it" in err
    code, _, err = emfed_shell("fit", "wards.csv", *NUMBERS, "--resume")
    assert code == 2
    assert "--resume needs --checkpoint" in err
    code, _, err = emfed_shell(
        "fit", "wards.csv", *NUMBERS, "-k", 2, "--model", "factor-analysis", "--start", "k-means"
    )
    assert code == 2
    assert "use --start moments" in err


# Signals, disks, pipes.


def test_ctrl_c_keeps_what_was_reached(emfed_shell: Shell) -> None:
    rng = np.random.default_rng(0)
    pl.DataFrame(rng.normal(size=(20_000, 4))).write_parquet(emfed_shell.folder / "big.parquet")
    process = emfed_shell.process(
        *("fit", "big.parquet", "-k", 8, "--tol", 0, "--rounds", 10**9, "--no-curve"),
        *("--checkpoint", "run.checkpoint", "--algorithm", "em"),
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (emfed_shell.folder / "run.checkpoint").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130, errors
    assert b"interrupted; what was reached is in model.emfed" in errors
    assert b"Traceback" not in errors
    result = emfed.load(emfed_shell.folder / "model.emfed")
    assert result.stopped == "interrupted"
    assert result.rounds >= 100
    assert emfed_shell("report", "model.emfed")[0] == 0


def test_a_full_disk_is_one_line_and_the_old_model_stands(emfed_shell: Shell) -> None:
    command = ("fit", "wards.csv", *NUMBERS, "--rounds", 1, "-q")
    assert emfed_shell(*command)[0] == 3
    before = (emfed_shell.folder / "model.emfed").read_bytes()

    def limit() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))

    process = emfed_shell.process(*command, "--seed", 1, preexec_fn=limit)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"cannot write the model file model.emfed: File too large" in errors
    assert errors.count(b"\n") == 1
    assert (emfed_shell.folder / "model.emfed").read_bytes() == before
    with open("/dev/full", "wb") as full:  # noqa: PTH123
        process = emfed_shell.process("predict", "model.emfed", "wards.csv", stdout=full)
        _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert b"No space left on device" in errors
    assert b"Traceback" not in errors
    code, _, err = emfed_shell("fit", "wards.csv", *NUMBERS, "-o", "/dev/full")
    assert code == 2
    assert "path of a file" in err


def test_a_reader_that_leaves_is_no_error(emfed_shell: Shell) -> None:
    assert emfed_shell("fit", "wards.csv", *NUMBERS, "--rounds", 1, "-q")[0] == 3
    process = emfed_shell.process("predict", "model.emfed", "wards.csv")
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    errors = process.stderr.read()
    assert process.wait(timeout=60) == 141
    assert errors == b""


def test_progress_is_shown_on_a_terminal(emfed_shell: Shell) -> None:
    if shutil.which("script") is None:
        pytest.skip("no script(1) to make a terminal with")
    command = shlex.join(
        [
            *(sys.executable, "-c", START, "fit", "wards.csv", *NUMBERS),
            *("--rounds", "400", "--field-tol", "1e-30", "-k", "5"),
        ]
    )
    done = subprocess.run(
        ["script", "-qec", command, "/dev/null"],
        capture_output=True,
        cwd=emfed_shell.folder,
        timeout=60,
        check=False,
    )
    shown = done.stdout.decode()
    assert "round" in shown
    assert "nats a row" in shown
    assert "|H|²" in shown  # what the user set a bound on
    assert "at most" not in shown


OWN_MODEL = """
from dataclasses import dataclass
import emfed

@emfed.models.register_model("measured-place")
@dataclass(frozen=True)
class Measured(emfed.models.LinearGaussian):
    unit: str = "cm"

    def describe(self):
        return {"model": "measured-place", "kappa": self.kappa, "unit": self.unit}
"""


def test_a_model_of_one_s_own_is_a_word_of_the_command_line(
    emfed_shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One registration: `fit`, its settings, model files and reports know it."""
    makers = {**MODELS._makers}
    monkeypatch.setattr(MODELS, "_makers", makers)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setitem(STORED, "measured-place", Any)
    del STORED["measured-place"]
    emfed_shell.write("own_words.py", OWN_MODEL)
    emfed_shell.write("rows.csv", "site,a,b\n" + "u,1,2\nv,3,5\n" * 20)
    own = ("--import", "own_words")
    asked = ("fit", "rows.csv", "-g", "site", "--model", "measured-place", "-q")
    code, _, err = emfed_shell(*own, *asked, "--set", "unit=m", "--report", "own.html")
    assert code == 0, err
    assert emfed.load(emfed_shell.folder / "model.emfed").model.unit == "m"
    assert "measured place" in (emfed_shell.folder / "own.html").read_text()
    code, _, err = emfed_shell(*asked, "-k", 2)
    assert code == 2
    assert "--n-components goes with --model" in err
    makers.pop("measured-place"), STORED.pop("measured-place")
    code, _, err = emfed_shell("inspect", "model.emfed")
    assert code == 1
    assert "as in emfed --import MODULE" in err
    assert emfed_shell("--import", "nobody_s", "inspect", "model.emfed")[0] == 2


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (("--set", "criterion=icl", "-k", "1:2"), ""),
        (("--model", "row-owner", "--set", "rank=1"), ""),
        (("--model", "regression-mixture", "--target", "age"), ""),
        (("--set", "rank"), "--set takes NAME=VALUE"),
        (("--set", "rounds=3"), "an option of its own"),
        (("--set", "rank=3"), "unknown key 'rank'"),
        (("--model", "regression-mixture", "--target", "height"), "not among the columns"),
    ],
)
def test_settings_without_an_option_are_set_by_name(
    more: tuple[str, ...], told: str, emfed_shell: Shell
) -> None:
    emfed_shell.write("wards.csv", wards())
    columns = ("--columns", "age,pressure,stays", "-g", "hospital")
    code, _, err = emfed_shell("fit", "wards.csv", *columns, "-q", "--no-curve", *more)
    assert code == (2 if told else 0), err
    assert told in err
