"""Figures: what is drawn follows from the data, in a style that reads in grey."""

from __future__ import annotations

import colorsys
import re
from pathlib import Path

import numpy as np
import pytest

from emfed.artifacts import Figure, Panel, Series, band, draw, render, spread
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


def test_all_formats_and_the_same_bytes_again(tmp_path: Path) -> None:
    draw(example(), tmp_path / "step-0.03")
    assert (tmp_path / "step-0.03.png").read_bytes()[:4] == b"\x89PNG"
    svg = (tmp_path / "step-0.03.svg").read_bytes()
    assert svg == render(example(), "svg", column=True)
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


def test_bands_are_over_seeds_and_never_over_time() -> None:
    """Five seeds that fall alike have a band of no width, however often each was looked at."""
    x = np.linspace(0, 100, 1001)
    fall = np.exp(-x / 10)
    ragged = [(x[k::3], fall[k::3]) for k in (0, 1, 2, 0, 1)]
    series = band("b", ragged)
    assert series.low is not None
    assert series.high is not None
    np.testing.assert_allclose(series.low, series.high, rtol=1e-3)
    assert np.all(np.diff(series.y) < 0)
    levels = band("b", [(x, np.full(1001, float(k))) for k in range(21)], points=10)
    assert levels.low is not None
    assert levels.high is not None
    np.testing.assert_allclose(
        [levels.low, levels.y, levels.high], np.outer([1, 10, 19], np.ones(10))
    )
    short = band("b", [(x[: 100 * k], fall[: 100 * k]) for k in range(1, 7)])
    assert short.x[-1] <= x[99]  # no quantile over fewer seeds than there are


def test_few_seeds_are_drawn_one_by_one() -> None:
    x = np.arange(100.0)
    series = band("b", [(x, np.full(100, value)) for value in (1.0, 2.0, 9.0)])
    assert series.low is series.high is None
    assert np.isnan(series.y).sum() == 2  # gaps between three lines
    assert [np.sum(series.y == value) for value in (1, 2, 9)] == [100, 100, 100]
    missing = band("b", [(x, np.where(x % 10 == 0, 5.0, np.nan))])
    np.testing.assert_allclose(missing.y, np.full(10, 5))
    assert len(band("b", [(x, np.full(100, np.nan))]).x) == 0


def test_spreads_leave_out_what_never_got_there() -> None:
    points = spread("s", [1, 2, 3], [np.array([1.0, 3.0]), np.array([np.inf, 1.0]), np.ones(2)])
    np.testing.assert_allclose(points.x, [1, 3])
    np.testing.assert_allclose(points.y, [2, 1])


def test_a_short_decade_has_numbers_between_powers_of_ten() -> None:
    x = np.arange(4.0)
    panel = Panel([Series("a", x, 0.006 + 0.001 * x)], "x", "y")
    told = re.findall(r"<!-- (.*?) -->", render(Figure("", [panel]), "svg").decode())
    assert sum(bool(re.fullmatch(r"0\.00\d+", word)) for word in told) >= 3


def test_a_column_of_a_paper_has_its_width_and_readable_text() -> None:
    panels = [
        Panel([Series("a rather long label", np.arange(3.0), np.arange(1, 4.0))], "x", "y")
    ] * 2
    svg = render(Figure("", panels), "svg", column=True).decode()
    assert 'width="234pt"' in svg  # 3.25 inches
    assert render(Figure("", panels), "pdf", column=True).startswith(b"%PDF")
    assert render(Figure("", panels), "pdf", True) == render(Figure("", panels), "pdf", True)


def test_a_label_longer_than_its_axis_takes_two_lines() -> None:
    panel = Panel(
        [Series("a", np.arange(3.0), np.ones(3))], "x", "nats a row from the optimum of all"
    )
    for column, lines in ((True, ["nats a row from the", "optimum of all"]), (False, [panel.y])):
        told = re.findall(r"<!-- (.*?) -->", render(Figure("", [panel]), "svg", column).decode())
        assert [word for word in told if len(word) > 1 and word in panel.y] == lines


def test_a_line_has_a_few_marks_and_points_without_a_line_are_all_drawn() -> None:
    x = np.arange(100.0)

    def marks(line: bool) -> int:
        panel = Panel([Series("a", x, x, points=True, line=line)], "x", "y", log="")
        svg = render(Figure("", [panel]), "svg").decode()
        return len(re.findall(r"<use [^>]*fill: #0072b2", svg))

    assert marks(line=False) == 100 + 1  # and the one in the legend
    assert 4 <= marks(line=True) <= 12


@pytest.mark.parametrize(("panels", "inches"), [(1, 5.6), (2, 9.2), (3, 13.8), (4, 9.2), (5, 13.8)])
def test_more_than_three_panels_stand_in_two_rows(panels: int, inches: float) -> None:
    x = np.arange(1.0, 4.0)
    figure = Figure("", [Panel([Series("a", x, x)], "x", "y", f"t{k}") for k in range(panels)])
    svg = render(figure, "svg").decode()
    assert f'width="{72 * inches:g}pt"' in svg
    assert all(f"<!-- t{k} -->" in svg for k in range(panels))


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
