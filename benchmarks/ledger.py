"""MNIST to the pooled answer, in bytes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

import emfed
from benchmarks.messages import even, mnist_rows


def runs() -> dict[str, Any]:
    """Uncompressed, up only, and both ways."""
    common: dict[str, Any] = {"step_size": 0.8, "in_metric": True}
    single = emfed.Identity("float32")
    return {
        "float32 both ways": emfed.FedEM(single, step_size=1.0, broadcast=single),
        "4 levels up, float64 down": emfed.FedEM(emfed.Dithering(4), **common),
        "4 levels up, 16 levels down": emfed.FedEM(
            emfed.Dithering(4), broadcast=emfed.Dithering(16), **common
        ),
        "subtractive up and down": emfed.FedEM(
            emfed.SubtractiveDithering(0.1),
            step_size=1.0,
            in_metric=True,
            broadcast=emfed.SubtractiveDithering(0.005),
        ),
        "auto": emfed.AutoEM(),
        MASKED: emfed.AutoEM(),
    }


MASKED = "auto, masked sums"
"""The same where only sums are told: every symbol takes the bits that the sum of 100 needs."""


def bench_mnist(rounds: int = 150, figure: Path | None = None) -> list[dict[str, Any]]:
    """Bytes until the log-likelihood stays within 1e-3 nats of where pooled EM ends."""
    rows = mnist_rows()
    if rows is None:
        return []
    workers = even(rows, 100)
    model = emfed.gaussian_mixture(10, "tied")
    start = emfed.fit(model, workers, rounds=3, seed=0).params
    pooled = emfed.fit(model, workers, start=start, rounds=1500)
    target = -pooled.log_likelihood(rows)
    table, curves = [], {}
    for name, algorithm in runs().items():
        result = emfed.fit(
            model,
            workers,
            algorithm,
            start=start,
            rounds=rounds,
            masks=name == MASKED,
            monitor=emfed.fitting.Monitor(mean_field=False),
        )
        records = result.records[1:]
        gap = records.column("objective") - target
        up = np.cumsum(records.column("payload_up")) / 100
        down = np.cumsum(records.column("payload_down")) / 100
        far = np.flatnonzero(gap > 1e-3)
        first = int(far[-1]) + 1 if len(far) else 0
        reached = first < len(gap)
        opening = result.ledger.summary()["opening"]
        table.append(
            {
                "run": name,
                "rounds": first if reached else None,
                "payload_up_per_worker": float(up[first - 1]) if reached else None,
                "payload_down_per_worker": float(down[first - 1]) if reached else None,
                "opening_up_per_worker": opening["up"]["payload"] / 100,
                "gap_at_end": float(gap[-1]),
            }
        )
        curves[name] = (up, down, gap)
    if figure is not None:
        _draw(curves, figure)
    return table


def _draw(curves: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    from emfed.artifacts.figures import STYLE

    colours = ["#000000", "#E69F00", "#0072B2", "#009E73", "#CC79A7", "#56B4E9"]
    styles = ("-", "--", "-.", ":", (0, (1, 1)), (0, (3, 1, 1, 1)))
    with plt.rc_context(STYLE):
        figure, panels = plt.subplots(1, 2, figsize=(9.2, 3.6), sharey=True)
        for (name, (up, down, gap)), colour, style in zip(
            curves.items(), colours, styles, strict=True
        ):
            for panel, amount in zip(panels, (up, down), strict=True):
                shown = gap > 0
                panel.plot(amount[shown], gap[shown], style, color=colour, label=name)
        for panel, side in zip(panels, ("uploaded", "downloaded"), strict=True):
            panel.set_xscale("log")
            panel.set_yscale("log")
            panel.axhline(1e-3, color="grey", lw=0.8)
            panel.set_xlabel(f"bytes {side} per worker")
        panels[0].set_ylabel("nats per sample above pooled EM")
        panels[0].legend(frameon=False)
        figure.tight_layout()
        figure.savefig(path)
        plt.close(figure)


def bench_pays(
    sizes: tuple[int, ...] = (15, 150, 1500, 15_000), seeds: int = 3
) -> list[dict[str, Any]]:
    """All bytes of a default fit beside the rows themselves: ten sites, four columns, full."""
    out = []
    for rows in sizes:
        told: dict[str, Any] = {"rows": rows}
        for label, numbers, moves in (("3", 3, 3), ("1:6", "1:6", 3), ("3, moves=0", 3, 0)):
            sent = []
            for seed in range(seeds):
                rng = np.random.default_rng(seed)
                sites = {
                    str(j): rng.normal(rng.choice([-4, 0, 4], (rows, 1)), 1, (rows, 4))
                    for j in range(10)
                }
                model = emfed.gaussian_mixture(1, "full")
                fit = emfed.fit(model, sites, n_components=numbers, moves=moves, seed=seed)
                sent.append(fit.bytes_up + fit.bytes_down)
            told[label], told["raw"] = float(np.median(sent)), fit.raw_bytes
        out.append(told)
    return out
