"""What a server infers that only listens: who is a member, and rows that explain all it heard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy.optimize import least_squares

import emfed
from emfed.algorithms import steps
from emfed.core.protocols import WHOLE, Lattice, Request
from emfed.core.streams import Purpose, uniforms
from emfed.fitting.session import Session
from emfed.network import LocalTransport, RemoteFederation, Site, SiteRules
from tests.helpers import BARE, OPEN
from tests.network.masked import masked_sites

# Membership by likelihood ratio. The server knows how people are distributed and asks of each of
# some people whether they are among the rows of site a (Homer et al. 2008). What a site's moments
# tell of one row grows with the number of columns and falls with that of rows.

COLUMNS, ROWS, SITES = 40, 20, 10
RNG = np.random.default_rng(5)
PEOPLE = RNG.normal(size=(SITES * ROWS, COLUMNS))
STRANGERS = RNG.normal(size=(200, COLUMNS))
DIAGONAL = emfed.gaussian_mixture(1, "diag")


def heard(sites: dict[str, Site], masks: bool) -> tuple[int, dict[str, Any]]:
    """Rows and moments of the smallest group with site a that an opening tells of."""
    federation = RemoteFederation(LocalTransport(sites), attempts=1, pause=0.0)
    session = Session(DIAGONAL, federation, masks=masks)
    if masks:
        return session.samples, dict(session.summary)
    one = {name: values[0] for name, values in session.opening.summaries.items()}
    return int(session.counts[0]), one


def advantage(rows: int, told: dict[str, Any]) -> float:
    """How often a member of site a scores above a stranger: one half is a guess.

    The score is the log-likelihood ratio of the moments, with the person among the rows and with a
    stranger in its place; means and variances of n rows are about normal.
    """
    mean, second = told["mean"], told["scatter"] + told["mean"] ** 2

    def score(people: Any) -> Any:
        squares = people**2 - 1
        return (
            rows * (mean * people + (second - 1) * squares / 2).sum(axis=1)
            - (people**2 + squares**2 / 2).sum(axis=1) / 2
        )

    inside, outside = score(PEOPLE[:ROWS]), score(STRANGERS)
    return float((inside[:, None] > outside).mean())


def test_membership_is_told_by_a_sites_moments_and_hardly_by_those_of_all(tmp_path: Path) -> None:
    tables = {f"s{i}": PEOPLE[i * ROWS : (i + 1) * ROWS] for i in range(SITES)}
    bare = {name: Site(table, tmp_path / name, rules=OPEN) for name, table in tables.items()}
    alone = advantage(*heard(bare, False))
    assert alone > 0.9  # without protection
    refusing = {n: Site(t, tmp_path / f"{n}-rules", rules=BARE) for n, t in tables.items()}
    with pytest.raises(emfed.ParticipationError, match="81 statistics of so few rows"):
        heard(refusing, False)  # by the default rules nobody joins
    masked = masked_sites(tables, tmp_path / "masked", rules=SiteRules())
    among_all = advantage(*heard(masked, True))
    assert 0.5 < among_all < alone - 0.15  # a member of some site, and of a crowd: not nothing


# Reconstruction by optimisation: rows that, at the parameters of each round, have the statistics
# that were heard.

PAIRS = np.random.default_rng(9).normal(size=(3, 12, 2)) * [2.0, 1.0] + [
    [[0, 0]],
    [[3, 1]],
    [[-2, 4]],
]
MIXTURE = emfed.gaussian_mixture(3, "diag")


def rows_that_explain(sites: dict[str, Site], masks: bool, count: int, starts: int) -> Any:
    """The rows that a server finds, in the units of the data, from ten answers."""
    federation = RemoteFederation(LocalTransport(sites), attempts=1, pause=0.0)
    session = Session(MIXTURE, federation, masks=masks)
    model, rng = session.view(WHOLE), np.random.default_rng(1)
    frame = model.constants.frame
    asked = [model.start(seed) for seed in range(10)]
    answers = [session.ask("statistics", WHOLE, params) for params in asked]

    def each(flat: Any) -> Any:
        """What every row would say alone, question by question: ``(rows, all answers)``."""
        rows = flat.reshape(-1, 1, 2) * frame.scale + frame.origin
        return np.concatenate([model.expected_statistics(rows, p) for p in asked], axis=1)

    def wrong(flat: Any) -> Any:
        return each(flat).mean(axis=0) - np.concatenate(answers)

    def slope(flat: Any) -> Any:
        here, by = each(flat), []
        for step in ([1e-7, 0.0], [0.0, 1e-7]):
            by.append((each((flat.reshape(-1, 2) + step).ravel()) - here) / (1e-7 * count))
        return np.stack(by, axis=1).reshape(2 * count, -1).T

    best = min(
        (
            least_squares(wrong, rng.normal(size=2 * count), slope, max_nfev=80)
            for _ in range(starts)
        ),
        key=lambda found: float(found.cost),
    )
    return best.x.reshape(-1, 2) * frame.scale + frame.origin


def recovered(found: Any) -> int:
    """Rows of the first site that are among those that were found."""
    apart = np.abs(found[:, None] - PAIRS[0]).max(axis=-1)
    return int((apart.min(axis=0) < 1e-3).sum())


def test_rows_that_explain_a_sites_answers_are_its_rows(tmp_path: Path) -> None:
    one = {"a": Site(PAIRS[0], tmp_path / "a", rules=OPEN)}
    assert recovered(rows_that_explain(one, False, 12, 4)) >= 10
    with pytest.raises(emfed.ParticipationError, match="15 statistics of so few rows"):
        rows_that_explain({"a": Site(PAIRS[0], tmp_path / "b", rules=BARE)}, False, 12, 4)
    sites = masked_sites(dict(zip("abc", PAIRS, strict=True)), tmp_path, rules=SiteRules())
    assert recovered(rows_that_explain(sites, True, 36, 1)) <= 2


def test_roundings_with_a_known_dither_tell_of_single_sites() -> None:
    """What remains under masks: the server knows at which threshold each site was rounded.

    It asks at the same statistics 2,000 times. Where a site's dither is beyond the threshold that
    its number implies, the sum is one higher: the threshold that explains the sums best is it.
    """
    data = [np.random.default_rng(j).normal(size=(50, 2)) + j for j in range(4)]
    run = emfed.fitting.open_run(emfed.gaussian_mixture(1, "diag"), data, "em")
    model, q, everyone = run.model, len(run.statistics), np.arange(4)
    own = np.random.default_rng(9).random((4, q))  # w x / step of each site
    metric, weights = model.metric(run.params), np.full(4, 0.25)
    lattice = Lattice(1.0, 8, 0.0)
    sums, dithers = [], []
    for number in range(1, 2001):
        request = Request(
            number, 0, "round", run.statistics, run.params, everyone, everyone - 1,
            lattice=lattice, weights=weights,
        )  # fmt: skip
        sent = steps.to_lattice(model, 0, request, everyone, metric.unwhiten(own * 4))
        dithers.append(uniforms(0, number, Purpose.COMPRESSION, everyone, q)[:, 0])
        told = metric.whiten(weights @ sent.values)[0] + (dithers[-1] - 0.5).sum()
        sums.append(round(float(told)))  # the integers' sum: all that the server learns
    grid = np.linspace(0.02, 0.98, 97)
    for site, u in enumerate(np.array(dithers).T):
        fits = [abs(np.corrcoef(u > 1 - guess, sums)[0, 1]) for guess in grid]
        assert abs(grid[int(np.argmax(fits))] - own[site, 0]) < 0.05


def test_rows_and_their_squares_leave_few_sizes_of_three_sites(tmp_path: Path) -> None:
    """What remains under masks: an opening tells both sums, and sizes are whole numbers."""
    sizes = (45, 61, 110)
    tables = {name: RNG.normal(size=(n, 2)) for name, n in zip("abc", sizes, strict=True)}
    federation = RemoteFederation(LocalTransport(masked_sites(tables, tmp_path)), attempts=1)
    session = Session(DIAGONAL, federation, masks=True)
    rows, squares = session.samples, round(session.samples**2 / session.opening.effective)
    assert (rows, squares) == (sum(sizes), sum(n**2 for n in sizes))
    found = {
        tuple(sorted((a, b, rows - a - b)))
        for a in range(1, rows)
        for b in range(1, rows - a)
        if a**2 + b**2 + (rows - a - b) ** 2 == squares
    }
    assert sizes in found
    assert len(found) < 6
