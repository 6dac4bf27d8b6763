"""Validation across workers: exact without them, honest about rows held out, alike everywhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.artifacts.fits import fit_page
from emfed.core.ledger import KINDS
from emfed.core.protocols import View
from tests.helpers import OPEN


def site(rng: Any, rows: int, share: float, shift: float = 0.0) -> Any:
    labels = rng.random(rows) < share
    return np.where(labels[:, None], [3.0, 0.0], [0.0, 3.0]) + rng.normal(size=(rows, 2)) + shift


def sites(seed: int = 0, strange: float = 4.0) -> dict[str, Any]:
    rng = np.random.default_rng(seed)
    return {
        "a": site(rng, 200, 0.3),
        "b": site(rng, 150, 0.7),
        "c": site(rng, 90, 0.5),
        "d": site(rng, 120, 0.5, strange),
    }


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
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
def test_a_model_without_a_worker_is_that_of_the_others(model: Any) -> None:
    data = sites(strange=1.0)
    result = emfed.fit(model, data, validate=True)
    assert result.validation is not None
    for place, (name, table) in enumerate(data.items()):
        others = {n: t for n, t in data.items() if n != name}
        alone = emfed.fit(model, others, "em", start=result.params, tol=1e-9, rounds=2000)
        expected = alone.log_likelihood(table)
        assert result.validation.without[place] == pytest.approx(expected, abs=2e-3, rel=1e-3)


def test_a_site_unlike_the_others_is_named_and_the_others_are_served() -> None:
    rng = np.random.default_rng(1)
    rows = site(rng, 900, 0.5)
    data = {"north": rows[:300], "south": rows[300:600], "east": rows[600:]}
    alike = emfed.fit(emfed.gaussian_mixture(2), data, validate=True).validation
    assert alike is not None
    assert not alike.clear.any()
    assert alike.remark() == "held-out rows: the common model serves every worker."
    data["east"] = data["east"] * [1.0, 4.0]
    data["East"] = data.pop("east")
    result = emfed.fit(emfed.gaussian_mixture(2), data, validate=True)
    told = result.validation
    assert told is not None
    assert told.clear[2].any()
    assert "East" in told.remark()
    assert "sites would gain" in fit_page(result).text[0]
    assert "East): emfed adapt" in fit_page(result).text[0]
    assert told.verdicts[2].startswith("gains")
    assert told.without[2] < told.common[2] < max(told.adapted[2], told.alone[2])


def test_held_out_scores_do_not_flatter_a_model_with_too_many_parameters() -> None:
    """Rows of a site with as many rows as its own model has parameters: alone loses."""
    rng = np.random.default_rng(2)
    data = {"small": rng.normal(size=(25, 4)), "large": rng.normal(size=(600, 4))}
    told = emfed.fit(emfed.gaussian_mixture(1), data, validate=True).validation
    assert told is not None
    inside = emfed.fit(emfed.gaussian_mixture(1), data["small"]).log_likelihood(data["small"])
    assert told.alone[0] < told.common[0] < inside


def test_over_a_network_and_from_a_file_it_is_that_of_one_process(tmp_path: Path) -> None:
    data = sites(3, strange=1.0)
    parties = {
        name: emfed.network.Site(table, tmp_path / name, rules=OPEN) for name, table in data.items()
    }
    federation = emfed.network.RemoteFederation(emfed.network.LocalTransport(parties), pause=0.0)
    model = emfed.gaussian_mixture(2, "diag")
    here, there = (emfed.fit(model, given, validate=True) for given in (data, federation))
    assert here.facts is not None
    assert there.facts is not None
    np.testing.assert_allclose(there.facts.validation, here.facts.validation, atol=1e-6)
    which = KINDS.index("closing")
    messages = [result.ledger.counts[which][:, 0] for result in (here, there)]
    np.testing.assert_allclose(*messages, atol=1)  # rounding may save a round
    there.save(tmp_path / "model.emfed")
    again = emfed.load(tmp_path / "model.emfed")
    assert again.validation is not None
    assert again.validation.table == there.validation.table
    assert "Rows that were held out" in {section.heading for section in fit_page(again).sections}


def test_more_workers_than_folds_are_left_out_in_groups() -> None:
    rng = np.random.default_rng(4)
    data = [site(rng, 30, 0.5) for _ in range(23)]
    told = emfed.fit(emfed.gaussian_mixture(2, "spherical"), data, validate=True).validation
    assert told is not None
    assert np.isfinite(told.without).all()
    assert len(told.verdicts) == 23


def test_an_estimator_validates_what_it_has_fitted() -> None:
    data = sites(6)
    estimator = emfed.FederatedGaussianMixture("1:2").fit(data)
    told = estimator.validate(data)
    assert list(told.workers) == ["a", "b", "c", "d"]
    assert told.clear[3].any()
    clusters = emfed.FederatedKMeans(2).fit(data)
    with pytest.warns(emfed.EmfedWarning, match="no likelihood"):
        assert clusters.validate(data) is None


def test_one_worker_has_nobody_to_leave_out() -> None:
    rows = site(np.random.default_rng(5), 100, 0.5)
    with pytest.warns(emfed.EmfedWarning, match="needs two"):
        result = emfed.fit(emfed.gaussian_mixture(2), rows, validate=True)
    assert result.validation is None


@pytest.mark.parametrize(
    "said", [{"folds": 1}, {"folds": True}, {"folds": True, "parts": [0, 0], "watched": True}]
)
def test_folds_of_nothing_are_no_view(said: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="folds"):
        View.read(said)
