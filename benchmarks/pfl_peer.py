"""pfl's federated EM (diagonal Gaussian mixture): one pass, and its private statistics by row.

pfl is Apple's framework for private federated learning simulations. `make bench` installs it; where
it is missing its line is left out.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import numpy as np

from benchmarks.privacy import VARIANCE_SCALE, pfl_sums, pfl_update


def same_as_pfl(rows: np.ndarray, params: Any, bound: float) -> float:
    """The largest difference between a private round of pfl without its noise and `by_splits`'."""
    from pfl.internal.distribution import DiagonalGaussian, Mixture
    from pfl.model.gaussian_mixture_model import GaussianMixtureModel, GMMHyperParams
    from pfl.privacy.gaussian_mechanism import GaussianMechanism

    settings = GMMHyperParams(variance_scale=VARIANCE_SCALE)
    old = params.weights, params.means, params.covariances
    components = [(float(w), DiagonalGaussian(m, v)) for w, m, v in zip(*old, strict=True)]
    model = GaussianMixtureModel(
        rows.shape[1], Mixture(components), cached_model_train_params=settings
    )
    mechanism, total = GaussianMechanism(bound, 1.0), None
    for row in rows:
        _, told = model.get_mixture_statistics([row], VARIANCE_SCALE, 1.0)
        clipped, _ = mechanism.constrain_sensitivity(told)
        total = clipped if total is None else total + clipped
    new, _ = model.apply_model_update(total)
    ours = pfl_update(pfl_sums(rows, *old, bound), len(rows), *old)
    theirs = [np.array([g.mean for _, g in new.components])]
    theirs += [np.array([g.variance for _, g in new.components])]
    gaps = [np.abs(a - b).max() for a, b in zip(ours[1:], theirs, strict=True)]
    shares = np.array([w for w, _ in new.components])
    return float(max(*gaps, np.abs(ours[0] / ours[0].sum() - shares / shares.sum()).max()))


def pfl_pass(rows: np.ndarray, params: Any, workers: int = 100) -> tuple[float, np.ndarray] | None:
    """Seconds of one pass with M-step, and the means it gives; None without pfl."""
    if importlib.util.find_spec("pfl") is None:
        return None
    from pfl.internal.distribution import DiagonalGaussian, Mixture
    from pfl.model.gaussian_mixture_model import GaussianMixtureModel, GMMHyperParams

    settings = GMMHyperParams(variance_floor_fraction=1e-9, minimum_component_weight=0.0)
    components = [
        (float(w), DiagonalGaussian(m, v))
        for w, m, v in zip(params.weights, params.means, params.covariances, strict=True)
    ]
    model = GaussianMixtureModel(
        rows.shape[1], Mixture(components), cached_model_train_params=settings
    )
    began = time.perf_counter()
    total = None
    for part in np.array_split(rows, workers):
        _, statistics = model.get_mixture_statistics(part, 1.0, 1.0)
        total = statistics if total is None else total + statistics
    new, _ = model.apply_model_update(total)
    seconds = time.perf_counter() - began
    return seconds, np.stack([gaussian.mean for _, gaussian in new.components])
