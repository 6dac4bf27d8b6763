"""Components of a fitted model in its own principal axes; no row is needed."""

from __future__ import annotations

import numpy as np

from emfed.artifacts.figures import Figure, Panel, Series
from emfed.core.protocols import FloatArray
from emfed.models.portraits import Portrait, principal_plane

WIDEST = 1500
"""Columns up to which principal axes are computed."""
MOST_DRAWN = 20
"""Components that a reader can tell apart in one figure."""
_TURN = np.linspace(0, 2 * np.pi, 73)


def plane_figure(portrait: Portrait, names: list[str]) -> Figure | None:
    """Ellipses in the first two principal axes; curves where there is one column."""
    if portrait.means is None or not 1 <= portrait.means.shape[1] <= WIDEST:
        return None
    if portrait.means.shape[1] == 1:
        return _curves(portrait, names[0])
    axes, shares, centres, spreads = principal_plane(portrait)
    drawn = np.argsort(-portrait.weights, kind="stable")[:MOST_DRAWN]
    series = []
    for k in np.sort(drawn).tolist():
        outline = _ellipse(centres[k], spreads[k])
        label = f"{portrait.noun} {k} ({portrait.weights[k]:.0%})"
        series.append(Series(label, outline[:, 0], outline[:, 1]))
    series.append(Series("centres", centres[drawn, 0], centres[drawn, 1], points=True, line=False))
    words = [_axis(axis, names) for axis in axes]
    more = "" if len(drawn) == len(centres) else f" The {len(drawn)} largest are drawn."
    return Figure(
        "Components in the first two principal axes of the fitted model, computed from its own "
        "means and covariances: no row was needed. Ellipses are one and two standard deviations; "
        f"columns are standardised.{more} First axis: {words[0]}. Second axis: {words[1]}.",
        [
            Panel(
                series,
                f"first axis, {shares[0]:.0%} of the variance",
                f"second axis, {shares[1]:.0%}",
                log="",
            )
        ],
    )


def _ellipse(centre: FloatArray, spread: FloatArray) -> FloatArray:
    """One and two standard deviations about a centre, parted by a gap."""
    values, vectors = np.linalg.eigh(spread)
    circle = np.stack([np.cos(_TURN), np.sin(_TURN)], axis=1)
    once = circle @ (vectors * np.sqrt(np.maximum(values, 0.0))).T
    return np.concatenate([centre + once, np.full((1, 2), np.nan), centre + 2 * once])


def _axis(axis: FloatArray, names: list[str]) -> str:
    """The columns that make up most of an axis."""
    largest = np.argsort(-np.abs(axis), kind="stable")[:4]
    return ", ".join(f"{axis[j]:+.2f} {names[j]}" for j in largest.tolist())


def _curves(portrait: Portrait, name: str) -> Figure:
    """Each component's share of the density, as a normal curve with its moments."""
    assert portrait.means is not None
    assert portrait.covariances is not None
    means = portrait.means[:, 0]
    sd = np.sqrt(portrait.covariances.reshape(len(means), -1)[:, 0])
    x = np.linspace((means - 3.5 * sd).min(), (means + 3.5 * sd).max(), 300)
    series = []
    for k, weight in enumerate(portrait.weights[:MOST_DRAWN].tolist()):
        y = weight * np.exp(-0.5 * ((x - means[k]) / sd[k]) ** 2) / (sd[k] * np.sqrt(2 * np.pi))
        series.append(Series(f"{portrait.noun} {k} ({weight:.0%})", x, y))
    panel = Panel(series, name, "density", log="")
    return Figure("Components as normal curves with their own mean and variance.", [panel])
