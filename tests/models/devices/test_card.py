"""A user's ways onto a GPU, each held to numpy; `make gpu` runs this."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emfed.fitting.estimators import (
    FederatedFactorAnalysis,
    FederatedGaussianMixture,
    FederatedImputer,
    FederatedKMeans,
    FederatedMixture,
    intake,
)
from tests.models.devices.test_twin import FAMILIES, WHERE, mixed_table

pytestmark = pytest.mark.skipif(WHERE != "cuda", reason="no GPU here: run make gpu where one is")
CENTRES = np.array([[0.0, 0, 0], [6, 1, 0], [0, 7, 3]])


def rows(n: int = 3000, dtype: Any = np.float64) -> Any:
    g = np.random.default_rng(5)
    spread = np.array([1.0, 1.5, 0.5])
    return (CENTRES[g.integers(0, 3, n)] + spread * g.normal(size=(n, 3)) + 40).astype(dtype)


ESTIMATORS = {
    "tied": FederatedGaussianMixture(3, covariance_type="tied", random_state=1),
    "diag": FederatedGaussianMixture(3, covariance_type="diag", random_state=1),
    "spherical": FederatedGaussianMixture(3, covariance_type="spherical", random_state=1),
    "full": FederatedGaussianMixture(3, random_state=1),
    "k-means": FederatedKMeans(3, random_state=1),
    "factors": FederatedFactorAnalysis(1, random_state=1),
}


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", ESTIMATORS)
def test_a_fit_on_the_card_ends_where_one_here_ends(name: str, dtype: Any) -> None:
    from sklearn.base import clone

    X = rows(dtype=dtype)
    here = clone(ESTIMATORS[name]).fit(X)
    there = clone(ESTIMATORS[name]).set_params(device="cuda").fit(X)
    assert there.score(X) == pytest.approx(here.score(X), rel=1e-8)


def test_arrays_of_cupy_and_tensors_are_taken_where_they_are() -> None:
    cupy = pytest.importorskip("cupy")
    import torch

    X = rows()
    want = FederatedGaussianMixture(3, covariance_type="diag", random_state=1).fit(X)
    for given in (cupy.asarray(X), torch.as_tensor(X, device="cuda")):
        found = FederatedGaussianMixture(3, covariance_type="diag", random_state=1).fit(given)
        assert found.score(given) == pytest.approx(want.score(X), rel=1e-8)
        np.testing.assert_array_equal(found.predict(given), want.predict(X))


@pytest.mark.parametrize("fit", [True, False])
def test_answers_stream_where_rows_do_not_fit(fit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    X = rows()
    mixture = FederatedGaussianMixture(3, random_state=1).fit(X)
    want = [getattr(mixture, name)(X) for name in ("predict", "predict_proba", "score_samples")]
    mixture.device = "cuda"
    if not fit:
        monkeypatch.setattr(intake, "fits", lambda size, device: False)
        monkeypatch.setattr("emfed.models.devices.placing.STREAM_BYTES", 10_000)
    for name, each in zip(("predict", "predict_proba", "score_samples"), want, strict=True):
        np.testing.assert_allclose(getattr(mixture, name)(X), each, rtol=1e-9, atol=1e-12)


def test_a_fit_streams_where_rows_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    X = rows()
    want = FederatedGaussianMixture(3, covariance_type="tied", random_state=1).fit(X).score(X)
    monkeypatch.setattr("emfed.data.workers.fits", lambda size, device: False)
    monkeypatch.setattr("emfed.models.devices.placing.STREAM_BYTES", 10_000)
    mixture = FederatedGaussianMixture(3, covariance_type="tied", random_state=1, device="cuda")
    assert mixture.fit(X).score(X) == pytest.approx(want, rel=1e-8)


def test_missing_values_are_filled_in_on_the_card() -> None:
    table = mixed_table(6, 0.1)
    options: dict[str, Any] = {"families": FAMILIES, "random_state": 1}
    here = FederatedImputer(2, **options).fit_transform(table)
    there = FederatedImputer(2, **options, device="cuda").fit_transform(table)
    np.testing.assert_allclose(there, here, rtol=1e-6)
    mixture = FederatedMixture(2, **options, device="cuda").fit(table)
    assert mixture.predict(table).shape == (len(table),)
    plain = rows(300)
    plain[::7, 1] = np.nan
    filled = [
        FederatedImputer(2, random_state=1, device=d).fit_transform(plain) for d in (None, "cuda")
    ]
    np.testing.assert_allclose(filled[1], filled[0], rtol=1e-6)


def test_the_command_line_fits_on_the_card(tmp_path: Path) -> None:
    pytest.importorskip("polars")
    from tests.cli.test_main import emfed_command

    np.savetxt(tmp_path / "rows.csv", rows(500), delimiter=",", header="a,b,c", comments="")
    said = [
        emfed_command("fit", "rows.csv", "--n-components", "3", "--seed", "1", *more, cwd=tmp_path)
        for more in ((), ("--device", "cuda"))
    ]
    assert [done.returncode for done in said] == [0, 0], said
    means = [
        [line for line in done.stdout.splitlines() if "log-likelihood" in line] for done in said
    ]
    assert means[0] == means[1]


@pytest.mark.skipif(find_spec("polars") is None, reason="sites' tables are Parquet files here")
def test_sites_that_join_with_a_card_end_where_sites_without_one_end(tmp_path: Path) -> None:
    """`emfed serve` and three `emfed join --device cuda` as processes, over TLS, masked."""
    from benchmarks.deployments import Deployment, difference, mixture_tables

    from tests.network.test_processes import CONFIG

    with Deployment(tmp_path / "deployment", mixture_tables(3), CONFIG.format(rounds=30)) as run:
        run.serve()
        for name in run.tables:
            run.join(name, "--device", "cuda")
        summary = run.wait(240)
        assert summary["rounds"] == 30
        assert difference(summary, run.here()) < 1e-9
        for name in run.tables:
            assert "Traceback" not in run.output(name)
