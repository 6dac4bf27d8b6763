"""Figures: what is drawn follows from the data, in a style that reads in grey."""

from __future__ import annotations

import colorsys
import re
from pathlib import Path

import numpy as np
import pytest

from emfed.artifacts import Figure, Panel, Series, aligned, band, draw, render, spread
from emfed.artifacts.figures import DASHES, MARKERS, PALETTE


def example(labels: int = 3) -> Figure:
    x = np.linspace(1, 9, 20)
    series = [
        Series(f"run {k}", x, np.exp(-k * x), 0.5 * np.exp(-k * x), np.exp(-k * x))
        for k in range(labels)
    ]
    return Figure(
        "A caption.", [Panel(series, "x (units)", "y"), Panel(series[:1], "x", "y", log="xy")]
    )


def test_both_formats_and_the_same_bytes_again(tmp_path: Path) -> None:
    draw(example(), tmp_path / "step-0.03")
    assert (tmp_path / "step-0.03.png").read_bytes()[:4] == b"\x89PNG"
    svg = (tmp_path / "step-0.03.svg").read_bytes()
    assert svg == render(example(), "svg")
    assert b"<svg" in svg


def test_looks_differ_without_colour() -> None:
    assert len(PALETTE) == len(DASHES) == len(MARKERS)
    looks = {((k // 7 + k) % 7, k % 7) for k in range(14)}
    assert len(looks) == 14
    assert len(set(map(str, DASHES))) == len(DASHES)
    lightness = [
        colorsys.rgb_to_hls(*(int(c[i : i + 2], 16) / 255 for i in (1, 3, 5)))[1] for c in PALETTE
    ]
    assert max(lightness) < 0.7  # none is lost on white


def test_a_band_is_the_median_and_range_of_what_is_in_its_slice() -> None:
    x = np.arange(100.0)
    curves = [(x, np.full(100, value)) for value in (1.0, 2.0, 9.0)]
    series = band("b", curves, points=10)
    np.testing.assert_allclose(series.y, 2)
    assert series.low is not None
    assert series.high is not None
    assert np.all(series.low < 1.9)
    assert np.all(series.high > 8)
    assert np.all(np.diff(series.x) > 0)
    missing = band("b", [(x, np.where(x % 10 == 0, 5.0, np.nan))], points=50)
    np.testing.assert_allclose(missing.y, 5)
    assert len(missing.y) == 10
    assert len(band("b", [(x, np.full(100, np.nan))]).x) == 0


def test_aligned_curves_and_spreads() -> None:
    x, y = np.arange(4.0), np.array([1.0, 2.0, np.nan, 4.0])
    series = aligned("a", [(x, y), (x + 2, 3 * y), (x + 1, 2 * y)])
    np.testing.assert_allclose(series.x, [1, 2, 4])
    np.testing.assert_allclose(series.y, [2, 4, 8])
    assert series.low is not None
    np.testing.assert_allclose(series.low, [1, 2, 4])
    points = spread("s", [1, 2, 3], [np.array([1.0, 3.0]), np.array([np.inf, 1.0]), np.ones(2)])
    np.testing.assert_allclose(points.x, [1, 3])  # a run that never got there has no place
    np.testing.assert_allclose(points.y, [2, 1])


@pytest.mark.parametrize("labels", [1, 7, 10])
def test_any_number_of_labels_is_drawn(labels: int) -> None:
    assert len(render(example(labels), "svg")) > 1000


def test_ticks_are_whole_where_axes_count_and_numbers_stand_in_full() -> None:
    x = np.array([1.0, 2.0, 3.0])
    counted = Panel([Series("a", x, -8.007 + 1e-5 * x)], "site", "y", log="", whole="x")
    told = re.findall(r"<!-- (.*?) -->", render(Figure("", [counted]), "svg").decode())
    assert [word for word in told if word in ("1", "2", "3")] == ["1", "2", "3"]
    assert not [word for word in told if re.fullmatch(r"[12]\.\d+", word)]
    assert "−8.0069900" in told
    assert not [word for word in told if "e−" in word]
