"""The default in a federation beside pooled EM, on tables of other shapes than AutoEM's own.

The settings of starts were chosen on some of these tables, so they are no held-out data for them.
"""

from __future__ import annotations

import warnings

import numpy as np
import pytest
from sklearn import datasets
from sklearn.decomposition import PCA

import fedem
from fedem.protocols import FloatArray


def moons() -> FloatArray:
    return datasets.make_moons(800, noise=0.08, random_state=0)[0]


def digits() -> FloatArray:
    return PCA(6, random_state=0).fit_transform(datasets.load_digits().data[:900])


TABLES = {
    "iris": (datasets.load_iris().data, 3, "full"),
    "wine": (datasets.load_wine().data, 3, "diag"),
    "moons": (moons(), 5, "full"),
    "digits": (digits(), 8, "tied"),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_default_ends_where_pooled_em_ends(name: str) -> None:
    """No worse than 1e-3 nats below it in 9 of 10 runs, from the same start."""
    rows, k, kind = TABLES[name]
    good = 0
    for seed in range(10):
        rng = np.random.default_rng(seed)
        groups = rng.integers(5, size=len(rows))
        if seed % 2:  # unlike each other
            groups = np.argsort(np.argsort(rows[:, 0])) * 5 // len(rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            ours = fedem.FederatedGaussianMixture(k, covariance_type=kind, random_state=seed)
            ours.fit(rows, groups=groups)
            run = fedem.open_run(
                fedem.gaussian_mixture(k, kind), rows, groups=groups, start="auto", seed=seed
            )
            pooled = fedem.FederatedGaussianMixture(
                k,
                covariance_type=kind,
                start=run.model.to_user(run.params),
                tol=1e-7,
                max_iter=5000,
            ).fit(rows)
        good += ours.score(rows) >= pooled.score(rows) - 1e-3
    assert good >= 9
