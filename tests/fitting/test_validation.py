"""Validation across workers: exact without them, honest about rows held out, alike everywhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import emfed
from emfed.artifacts.fits import fit_page


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


def test_a_site_unlike_the_others_is_named_and_the_others_are_served() -> None:
    rng = np.random.default_rng(1)
    rows = site(rng, 900, 0.5)
    data = {"north": rows[:300], "south": rows[300:600], "east": rows[600:]}
    alike = emfed.fit(emfed.gaussian_mixture(2), data, validate=True).validation
    assert alike is not None
    assert alike.by_worker is not None
    assert not alike.by_worker.clear.any()
    assert alike.remark() == "held-out rows: the common model serves every worker."
    data["east"] = data["east"] * [1.0, 4.0]
    data["East"] = data.pop("east")
    result = emfed.fit(emfed.gaussian_mixture(2), data, validate=True)
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
    told = emfed.fit(emfed.gaussian_mixture(1), data, validate=True).validation
    assert told is not None
    inside = emfed.fit(emfed.gaussian_mixture(1), data["small"]).log_likelihood(data["small"])
    own = told.by_worker
    assert own is not None
    assert own.alone[0] < own.common[0] < inside


def test_an_estimator_validates_what_it_has_fitted() -> None:
    data = sites(6)
    estimator = emfed.FederatedGaussianMixture("1:2").fit(data)
    told = estimator.validate(data)
    assert told.by_worker is not None
    assert list(told.by_worker.workers) == ["a", "b", "c", "d"]
    assert told.by_worker.clear[3].any()
    clusters = emfed.FederatedKMeans(2).fit(data)
    with pytest.warns(emfed.EmfedWarning, match="no likelihood"):
        assert clusters.validate(data) is None


def test_one_worker_has_nobody_to_leave_out() -> None:
    rows = site(np.random.default_rng(5), 100, 0.5)
    with pytest.warns(emfed.EmfedWarning, match="needs two"):
        result = emfed.fit(emfed.gaussian_mixture(2), rows, validate=True)
    assert result.validation is None
