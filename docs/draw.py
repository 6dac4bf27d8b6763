"""Draw the figures of the five pages on the paper: ``python docs/draw.py``, a few seconds each.

Every curve is a run of the package, small enough to be made whenever the site is built. The files
are in docs/figures; the same releases of numpy and matplotlib draw the same bytes.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import numpy as np
from matplotlib import pyplot as plt

import emfed
from emfed.data.synthetic import START, TRUTH

FOLDER = Path(__file__).parent / "figures"
BLUE, ORANGE, GREEN, GREY = "#1f5fa8", "#c8641e", "#2a7d4f", "#666666"
STYLE = {
    "svg.fonttype": "none",  # letters stay letters: a tenth of the size, and found by a search
    "svg.hashsalt": "emfed",  # the same names in every file, so that files can be compared
    "font.size": 11,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "legend.frameon": False,
    "figure.constrained_layout.use": True,
    "path.simplify_threshold": 0.5,
}
KNOWN = emfed.gaussian_mixture(2, "known", known_covariance=TRUTH.covariances)


def clusters(seed: int, per_site: int = 150) -> dict[str, Any]:
    """Three sites that share three groups of rows in unequal parts."""
    rng = np.random.default_rng(seed)
    centres = np.array([[-3.0, 0.0], [2.5, 2.0], [1.0, -3.0]])
    shares = {"Oslo": (0.8, 0.1, 0.1), "Bergen": (0.1, 0.8, 0.1), "Tromsø": (0.2, 0.2, 0.6)}
    return {
        name: centres[rng.choice(3, per_site, p=share)] + rng.normal(size=(per_site, 2))
        for name, share in shares.items()
    }


def h_of(result: Any) -> tuple[list[float], list[float]]:
    """Epochs and |h|² of the rounds in which it was measured."""
    kept = [record for record in result.records if record.squared_h is not None]
    return [record.epochs for record in kept], [record.squared_h for record in kept]


def expectation_space() -> Any:
    """Rows of three sites, and the path of EM from all rows and from their three averages."""
    sites = clusters(0)
    model = emfed.gaussian_mixture(3, "full")
    runs = {
        "all rows in one place": {"all": np.concatenate(list(sites.values()))},
        "three sites send averages": sites,
    }
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4))
    for (name, rows), mark, colour in zip(sites.items(), "o^s", (BLUE, ORANGE, GREEN), strict=True):
        left.scatter(*rows[::2].T, s=12, marker=mark, c=colour, alpha=0.6, label=name, lw=0)
    left.set(title="the rows, which stay where they are", xticks=[], yticks=[])
    left.legend(loc="lower left", fontsize=9, handletextpad=0.2)
    look = emfed.fitting.Monitor(mean_field=False)
    for (name, data), style in zip(runs.items(), ("-", "o"), strict=True):
        fitted = emfed.fit(
            model, data, emfed.EM(), start="moments", rounds=30, tol=0, seed=1, monitor=look
        )
        course = [-record.objective for record in fitted.records if record.objective is not None]
        right.plot(course, style, ms=5, color=BLUE if style == "-" else ORANGE, label=name)
    right.set(title="one model, round by round", xlabel="round", ylabel="log-likelihood of a row")
    right.legend(loc="lower right")
    return figure


def memories() -> Any:
    """What compression leaves behind where every site has one kind of row, with and without."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for rate, colour, name in ((0.0, ORANGE, "without memories"), (0.3, BLUE, "with memories")):
        result = emfed.fit(
            KNOWN,
            emfed.data.synthetic_federation(seed=0, workers=20, split="sorted"),
            emfed.FedEM(emfed.block_quantization(4), step_size=0.1, memory_rate=rate),
            start=START,
            rounds=300,
            tol=0,
            monitor=emfed.fitting.Monitor(every=5, objective=False),
        )
        axes.semilogy(*h_of(result), color=colour, label=name)
    axes.set(xlabel="rounds", ylabel="|h|²: distance from the answer")
    axes.legend()
    return figure


def variance_reduction() -> Any:
    """Mini-batches alone, and mini-batches that correct a full pass."""
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    paper = {
        "compressor": emfed.block_quantization(4),
        "step_size": 1e-2,
        "memory_rate": 1e-2,
        "memory_start": "mean-field",
        "replacement": True,
    }
    for algorithm, colour in (
        (emfed.FedEM(batch_size=20, **paper), ORANGE),
        (emfed.VRFedEM(batch_size=5, inner_rounds=20, **paper), BLUE),
    ):
        result = emfed.fit(
            KNOWN,
            emfed.data.synthetic_federation(seed=0, workers=100, rows_per_worker=100),
            algorithm,
            start=START,
            weights="uniform",
            participation=emfed.algorithms.Bernoulli(0.75),
            epochs=150,
            tol=0,
            monitor=emfed.fitting.Monitor(every=20, objective=False),
        )
        axes.semilogy(*h_of(result), color=colour, label=algorithm.name)
    axes.set(xlabel="passes over all rows", ylabel="|h|²: distance from the answer")
    axes.legend()
    return figure


def compression() -> Any:
    """Nats above the pooled answer against the bytes that a site has sent."""
    rng = np.random.default_rng(3)
    centres = 1.2 * rng.normal(size=(6, 8))
    rows = [centres[rng.choice(6, 300)] + rng.normal(size=(300, 8)) for _ in range(20)]
    model = emfed.gaussian_mixture(6, "tied")
    settings = {"start": "moments", "tol": 0, "seed": 0}
    end = emfed.fit(model, rows, emfed.EM(), rounds=400, **settings)
    pooled = end.log_likelihood(np.concatenate(rows))
    figure, axes = plt.subplots(figsize=(6.4, 3.6))
    for name, algorithm, colour in (
        ("32-bit numbers", emfed.FedEM(emfed.Identity("float32"), step_size=1.0), GREY),
        ("4 levels, the model's metric", emfed.FedEM(emfed.Dithering(4), in_metric=True), ORANGE),
        ('"auto"', "auto", BLUE),
    ):
        monitor = emfed.fitting.Monitor(mean_field=False)
        result = emfed.fit(model, rows, algorithm, rounds=120, monitor=monitor, **settings)
        kept = [record for record in result.records if record.objective is not None]
        sent = np.cumsum([record.payload_up for record in kept]) / len(rows)
        gap = [pooled + record.objective for record in kept]
        axes.loglog(sent, np.maximum(gap, 1e-9), color=colour, label=name)
    axes.set(xlabel="bytes sent by a site", ylabel="nats a row below the pooled fit")
    axes.set_ylim(bottom=1e-6)
    axes.legend(loc="lower center", bbox_to_anchor=(0.5, 1.0), ncols=3)  # lines cross all of it
    return figure


def privacy() -> Any:
    """What a guess is worth at each epsilon, and what the noise costs."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(8.6, 3.4))
    epsilon = np.geomspace(0.1, 10, 100)
    left.semilogx(epsilon, 100 / (1 + np.exp(-epsilon)), color=BLUE)
    left.axhline(50, color=GREY, lw=1, ls=":")
    left.set(xlabel="epsilon", ylabel="right guesses in 100, at most", ylim=(45, 101))
    left.set_title("was this row there?")
    rng = np.random.default_rng(0)
    centres = np.array([[0.0, 0.0], [6.0, 3.0], [-5.0, 8.0]])
    for count, colour in ((10_000, ORANGE), (100_000, BLUE)):
        rows = centres[rng.choice(3, count)] + rng.normal(size=(count, 2))
        exact = emfed.FederatedGaussianMixture(3).fit(rows).score(rows)
        tried = (0.5, 1, 3, 10)
        noisy = [emfed.FederatedGaussianMixture(3, epsilon=e, noise_seed=0) for e in tried]
        lost = [exact - mixture.fit(rows).score(rows) for mixture in noisy]
        right.loglog(tried, lost, "o-", color=colour, label=f"{count:,} rows")
    right.set(xlabel="epsilon", ylabel="nats a row lost", title="what the noise costs")
    right.legend()
    return figure


FIGURES = (expectation_space, memories, variance_reduction, compression, privacy)


def main(names: list[str]) -> None:
    """Draw the figures of these names, or all."""
    with plt.rc_context(STYLE):
        for draw in FIGURES:
            if not names or draw.__name__ in names:
                path = FOLDER / f"{draw.__name__.replace('_', '-')}.svg"
                figure = draw()
                figure.savefig(path, metadata={"Date": None})
                plt.close(figure)


if __name__ == "__main__":
    main(sys.argv[1:])
