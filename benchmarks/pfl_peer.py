"""One pass of pfl's federated EM (diagonal Gaussian mixture) on the rows of the other peers.

pfl is Apple's framework for private federated learning simulations. `make bench` installs it; where
it is missing its line is left out.
"""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import numpy as np


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
