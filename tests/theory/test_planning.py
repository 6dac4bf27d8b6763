"""Plans: the theorems' numbers put together, and the command that prints them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import polars as pl
import pytest

import emfed
from emfed import theory
from emfed.aggregation.gathered import ENVELOPE_UP
from emfed.cli.main import main
from emfed.core.protocols import Layout
from emfed.core.wire import floats_size
from tests.helpers import plain_fit


def estimate(n: int = 100, variance: float = 1.0) -> theory.Estimate:
    problem = theory.Problem(n, 1.0, 1.0, 1.0, variance=0.0)
    layout = Layout((("s", (50,)),))
    return theory.Estimate(problem, np.full(n, variance), layout, samples=200)


def test_a_plan_holds_what_the_theorems_say() -> None:
    found, operator = estimate(), emfed.RandomSparsification(0.25)
    plan = theory.plan(found, operator, participation=0.5, batch_size=10, epsilon=1e-2)
    bounds = theory.FedEMBounds(found.with_batch(10), plan.omega, 0.5)
    assert plan.omega == pytest.approx(50 / 12 - 1)
    assert plan.omega_exact
    assert plan.fed_em.rounds == bounds.rounds(1e-2).needed
    bound = bounds.bound(plan.fed_em.step_size, plan.fed_em.rounds)
    assert bound <= 1e-2 * 1.001
    assert plan.fed_em.memory_rate == pytest.approx(12 / 50)
    vr = plan.vr_fed_em
    noise = theory.participating(plan.omega, 0.5)
    assert vr.inner_rounds == theory.vr_inner_rounds(200, noise)
    assert vr.batch_size == theory.VRBounds(found.problem, noise, vr.inner_rounds).batch_size
    assert any("p < 1" in note for note in plan.notes)
    assert json.dumps(plan.describe())


def test_bytes_of_a_plan_are_those_of_a_run() -> None:
    data = emfed.data.synthetic_federation(0)
    model = emfed.gaussian_mixture(2, "full")
    found = theory.estimate_problem(model, data, points=1)
    operator = emfed.Dithering(4)
    plan = theory.plan(found, operator, epsilon=1e-2)
    result = plain_fit(model, data, emfed.FedEM(operator, step_size=0.5), rounds=50)
    rounds = result.records[2:]  # the first one's messages carry the settings too
    measured = rounds.average("payload_up") / 100
    assert plan.message_bytes == pytest.approx(measured, rel=0.15)
    down = rounds.average("bytes_down") / 100
    assert plan.fed_em.bytes_down / plan.fed_em.rounds == pytest.approx(down, rel=0.02)


def test_memories_at_zero_cost_rounds_and_those_at_the_mean_field_bytes() -> None:
    found = dataclasses.replace(estimate(4), memory_error=3.0)
    operator = emfed.RandomSparsification(0.1)
    zero = theory.plan(found, operator, epsilon=1e-2)
    field = theory.plan(found, operator, epsilon=1e-2, memory_start="mean-field")
    assert zero.fed_em.rounds > field.fed_em.rounds
    assert zero.vr_fed_em.rounds > field.vr_fed_em.rounds
    for plan, error in ((zero, 3.0), (field, 0.0)):
        advice, problem = plan.fed_em, found.problem
        bounds = theory.FedEMBounds(problem, plan.omega)
        bound = bounds.bound(advice.step_size, advice.rounds, memory_error=error)
        assert bound <= 1e-2 * 1.001
        vr = plan.vr_fed_em
        outer = vr.rounds // vr.inner_rounds
        reduced = theory.VRBounds(problem, plan.omega, vr.inner_rounds, vr.batch_size)
        assert reduced.means(vr.step_size, outer, memory_error=error)[1] <= 1e-2 * 1.001
    extra = field.fed_em.bytes_up - field.fed_em.rounds * zero.fed_em.bytes_up / zero.fed_em.rounds
    assert extra == floats_size(50) + ENVELOPE_UP
    with pytest.raises(emfed.SettingsError, match="memory_start"):
        theory.plan(found, operator, memory_start="one")


def test_conditional_expectations_are_those_of_a_run() -> None:
    data = emfed.data.WorkerData(
        np.random.default_rng(0).normal(size=(2000, 2)), np.arange(0, 2001, 100)
    )
    for p, batch, inner in ((1.0, 20, 4), (0.1, 1, 50), (0.5, 20, 4)):
        algorithm = emfed.VRFedEM(batch_size=batch, inner_rounds=inner)
        result = plain_fit(
            emfed.models.LinearGaussian(),
            data,
            algorithm,
            rounds=500,
            participation=emfed.algorithms.Bernoulli(p),
        )
        spent = sum(record.evaluations for record in result.records[1:])
        bounds = theory.VRBounds(theory.Problem(20, 1.0, 1.0, 1.0), 0.0, inner, batch)
        assert bounds.evaluations(500, 100, p) == pytest.approx(spent, rel=0.02)


def test_at_the_optimum_nothing_is_slowed_down() -> None:
    found = estimate()
    at_rest = dataclasses.replace(found, problem=dataclasses.replace(found.problem, gap=0.0))
    plan = theory.plan(at_rest, emfed.Dithering(4))
    assert (plan.fed_em.rounds, plan.fed_em.slowdown) == (1, 1.0)


def test_many_workers_make_compression_free_and_few_do_not() -> None:
    operator = emfed.RandomSparsification(0.1)
    many = theory.plan(estimate(100_000), operator, epsilon=1e-2)
    few = theory.plan(estimate(2), operator, epsilon=1e-2)
    assert (many.fed_em.step_regime, many.fed_em.slowdown) == ("smoothness", 1)
    assert few.fed_em.step_regime == "compression"
    assert few.fed_em.slowdown > 10
    noisy = theory.plan(estimate(2, 1e6), operator, batch_size=1, epsilon=1e-4)
    assert noisy.fed_em.noise_regime == "high noise"


def test_bad_plans_are_refused() -> None:
    with pytest.raises(emfed.SettingsError, match="200 rows"):
        theory.plan(estimate(), emfed.Identity(), batch_size=201)
    with pytest.raises(emfed.SettingsError, match="estimate_problem"):
        theory.plan(None, emfed.Identity())  # a wrong type on purpose
    with pytest.raises(emfed.SettingsError, match="epsilon"):
        theory.plan(estimate(), emfed.Identity(), epsilon=0.0)


def test_the_command_plans_for_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rng = np.random.default_rng(0)
    frame = pl.DataFrame(
        {"a": rng.normal(size=300), "b": rng.normal(size=300), "ward": ["x", "y", "z"] * 100}
    )
    frame.write_csv(tmp_path / "wards.csv")
    frame.write_parquet(tmp_path / "wards.parquet")
    out = []
    for name in ("wards.csv", "wards.parquet"):
        arguments = ["plan", str(tmp_path / name), "--groups", "ward", "-k", "2", "--json"]
        with pytest.raises(SystemExit) as left:
            main([*arguments, "--compressor", "subtractive:0.1", "--metric"])
        assert not left.value.code
        out.append(json.loads(capsys.readouterr().out))
    assert out[0] == out[1]
    assert out[0]["plan"]["workers"] == 3
    assert out[0]["plan"]["norm"] == "metric"
    assert out[0]["constants"]["v_min"] > 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--groups", "ward"], "give DATA"),
        (["-k", "5"], "give DATA"),
        (["--seed", "99999999999999999999999"], "2**64"),
        (["--accuracy", "-1"], "epsilon"),
        (["--compressor", "zip"], "none, dithering"),
        (["--compressor", "dithering:x"], "not a number"),
        (["-p", "0"], "participation"),
        (["missing.csv"], "missing.csv"),
        (["table.ods"], "expected a .csv"),
    ],
)
def test_the_command_refuses_in_one_line(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        main(["plan", *arguments])
    assert left.value.code in (1, 2)
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


def test_the_command_explains_itself(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["plan", "-p", "0.75", "--batch-size", "20"])
    text = capsys.readouterr().out
    for word in ("step limited by", "VR-FedEM", "default step", "seed 0", "p < 1"):
        assert word in text
