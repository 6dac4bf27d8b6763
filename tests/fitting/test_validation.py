"""Rows that are held out: honest of all together, and of each worker where it is heard."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.artifacts.fits import fit_page
from emfed.core.sums import Finish, finished
from emfed.data import as_workers
from emfed.data.each import EachRows
from emfed.data.held import HeldWorkers
from emfed.data.summing import HeldRows
from emfed.fitting import FitSettings, in_process
from emfed.fitting.fitted import Fitted
from emfed.fitting.program import FitProgram
from emfed.network.holding_out import PARTS, HeldPart, part_of
from tests.network.exchanges import NAMES, READER, Federation


def site(rng: Any, rows: int, share: float, shift: float = 0.0) -> Any:
    labels = rng.random(rows) < share
    return np.where(labels[:, None], [3.0, 0.0], [0.0, 3.0]) + rng.normal(size=(rows, 2)) + shift


def sites(seed: int = 0, strange: float = 4.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "anna": site(rng, 200, 0.3),
        "bert": site(rng, 150, 0.7),
        "cleo": site(rng, 90, 0.5),
        "dora": site(rng, 120, 0.5, strange),
    }


def fitted(model: Any, data: Any, **settings: Any) -> Fitted:
    known = FitSettings(model, validate=True, **settings)
    return in_process.fit(known, HeldWorkers(as_workers(data)))


def validation(model: Any, data: Any, **settings: Any) -> Any:
    found = fitted(model, data, **settings).result.validation
    assert found is not None
    return found


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize(
    "model",
    [
        emfed.gaussian_mixture(2),
        emfed.gaussian_mixture(2, "tied"),
        emfed.gaussian_mixture(1),
        emfed.mixed_mixture(2, ["gaussian", "gaussian"]),
        emfed.factor_analysis(1),
        emfed.regression_mixture(1),
    ],
    ids=["full", "tied", "one", "mixed", "factors", "regression"],
)
def test_each_row_is_scored_by_a_fit_to_other_rows(model: Any, masks: bool) -> None:
    data = sites(strange=1.0)
    result = fitted(model, data, masks=masks).result
    found, count = 0.0, 0
    for part in range(PARTS):
        kept, held = list[Any](), list[Any]()
        for table in data.values():
            inside = part_of(np.arange(len(table)), result.seed) == part
            kept.append(table[~inside])
            held.append(table[inside])
        others = emfed.fit(model, kept, "em", start=result.params, tol=1e-9, rounds=2000)
        rows = np.concatenate(held)
        found += others.log_likelihood(rows) * len(rows)
        count += len(rows)
    told = result.validation
    assert told is not None
    assert told.rows == count
    assert told.held_out == pytest.approx(found / count, abs=2e-3)
    every = np.concatenate(list(data.values()))
    assert told.fitted == pytest.approx(result.log_likelihood(every), abs=1e-5)
    assert (told.by_worker is None) == masks


def test_workers_are_scored_by_the_same_fits() -> None:
    told = validation(emfed.gaussian_mixture(2), sites(strange=1.0))
    own = told.by_worker
    assert own.rows @ own.common / own.rows.sum() == pytest.approx(told.held_out, abs=1e-9)
    assert told.table["worker"] == ["anna", "bert", "cleo", "dora", "all together"]


def test_a_site_unlike_the_others_is_named_and_the_others_are_served() -> None:
    rng = np.random.default_rng(1)
    rows = site(rng, 900, 0.5)
    data = {"north": rows[:300], "south": rows[300:600], "east": rows[600:]}
    alike = validation(emfed.gaussian_mixture(2), data)
    assert not alike.by_worker.clear.any()
    assert alike.remark() == "held-out rows: the common model serves every worker."
    data["East"] = data.pop("east") * [1.0, 4.0]
    result = fitted(emfed.gaussian_mixture(2), data).result
    told = result.validation
    assert told is not None
    own = told.by_worker
    assert own is not None
    assert own.clear[2].any()
    assert "East" in told.remark()
    assert "sites would gain" in fit_page(result).text[0]
    assert "East): emfed adapt" in fit_page(result).text[0]
    assert own.verdicts[2].startswith("gains")
    assert own.common[2] < max(own.adapted[2], own.alone[2])


def test_held_out_scores_do_not_flatter_a_model_with_too_many_parameters() -> None:
    """Rows of a site with as many rows as its own model has parameters: alone loses."""
    rng = np.random.default_rng(2)
    data = {"small": rng.normal(size=(25, 4)), "large": rng.normal(size=(600, 4))}
    own = validation(emfed.gaussian_mixture(1), data).by_worker
    inside = emfed.fit(emfed.gaussian_mixture(1), data["small"]).log_likelihood(data["small"])
    assert own.alone[0] < own.common[0] < inside
    rows = rng.normal(size=(60, 5))
    few = validation(emfed.gaussian_mixture(3), rows)
    assert few.held_out < few.fitted - 0.5


def test_under_masks_the_sum_is_told_and_nothing_of_a_worker() -> None:
    told = validation(emfed.gaussian_mixture(2), sites(), masks=True)
    assert told.by_worker is None
    assert told.table["worker"] == ["all together"]
    assert "sums do not say whether the model serves each worker" in told.remark()
    assert told.held_out == pytest.approx(
        validation(emfed.gaussian_mixture(2), sites()).held_out, abs=5e-3
    )


@pytest.mark.parametrize("masked", [True, False])
def test_over_a_network_and_from_a_file_it_is_that_of_one_process(
    masked: bool, tmp_path: Path
) -> None:
    data = {name: table for name, table in sites(3, 1.0).items() if name in NAMES[:3]}
    model = emfed.gaussian_mixture(2, "diag")
    settings = FitSettings(model, masks=masked, validate=True, scores=True, columns=("x", "y"))
    network = Federation(
        sites=3,
        masked=masked,
        accept=lambda agreement: FitProgram(settings),
        tables=data,
        options={"coded": not masked},
    )
    network.run()
    end = network.ends[READER]
    assert end.final
    path = tmp_path / "model.emfed"
    path.write_bytes(end.state)
    there = emfed.load(path)
    assert there.validation is not None
    here = fitted(model, data, masks=True, scores=True, seed=there.seed).result
    assert here.validation is not None
    assert there.validation.held_out == pytest.approx(here.validation.held_out, abs=2e-3)
    assert there.facts is not None
    assert (there.validation.by_worker is None) == masked
    assert there.facts.log_likelihood == pytest.approx(there.validation.fitted, abs=1e-6)
    assert "Rows that were held out" in {section.heading for section in fit_page(there).sections}


def test_an_estimator_validates_what_it_has_fitted() -> None:
    data = sites(6)
    estimator = emfed.FederatedGaussianMixture("1:2").fit(data)
    told = estimator.validate(data)
    assert told.by_worker is not None
    assert list(told.by_worker.workers) == list(data)
    assert told.by_worker.clear[3].any()
    clusters = emfed.FederatedKMeans(2).fit(data)
    with pytest.warns(emfed.EmfedWarning, match="no likelihood"):
        assert clusters.validate(data) is None


def test_one_worker_is_told_how_well_rows_are_foretold() -> None:
    rows = site(np.random.default_rng(5), 100, 0.5)
    told = validation(emfed.gaussian_mixture(2), rows)
    assert told.by_worker is None
    assert "serves" not in told.remark()
    assert told.held_out < told.fitted


@pytest.mark.parametrize("weighted", [False, True])
def test_parts_are_of_the_rows_wherever_they_are(weighted: bool) -> None:
    """Tables in one array, and one table each; rows with weights, and workers with few rows."""
    rng = np.random.default_rng(7)
    tables = [rng.normal(size=(count, 2)) for count in (1, 3, 50, 7)]
    weights = [rng.random(len(t)) + 0.1 if weighted else np.ones(len(t)) for t in tables]
    given = as_workers(tables, sample_weight=weights) if weighted else as_workers(tables)

    def mean(block: Any, own: Any) -> Any:
        own = np.ones(block.shape[:2]) if own is None else own
        return (own[..., None] * block).sum(axis=1) / own.sum(axis=1)[:, None]

    for part in range(PARTS):
        pick = HeldPart(part, 3)
        inside = [pick(len(table)) for table in tables]
        want = sum(
            (w[i, None] * t[i]).sum(axis=0) for t, w, i in zip(tables, weights, inside, strict=True)
        )
        found = HeldRows(given).picked(pick)
        np.testing.assert_allclose(found.sum(mean), want, atol=1e-12)
        each = EachRows(given)
        alone = [each.one(worker).picked(pick) for worker in range(4)]
        assert sum(one.total for one in alone) == pytest.approx(found.total)
        some = sum(one.sum(mean) for one in alone if one.total > 0)
        np.testing.assert_allclose(some, want, atol=1e-12)


def test_a_fit_that_is_ended_meanwhile_keeps_its_model() -> None:
    begun = in_process.begin(
        FitSettings(emfed.gaussian_mixture(2), validate=True, scores=True),
        HeldWorkers(as_workers(sites())),
    )
    program, course = begun.program, begun.course
    ask = next(program)
    while ask.purpose != "closing":
        ask = program.send(course.answer(ask))
    outcome = finished(program, Finish("enough"))
    assert outcome.held_out is None
    assert outcome.scores is None
    assert outcome.final.estimate.converged


def test_the_table_prints_what_is_known() -> None:
    out = io.StringIO()
    print(validation(emfed.gaussian_mixture(2), sites(), masks=True), file=out)
    assert "nan" not in out.getvalue()
