"""What a model says of the rows of one site: known there, and nowhere else where sums are masked.

Nothing is sent, and nothing of it is in a model file.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, final

import numpy as np

from emfed.artifacts.figures import Figure, Panel, Series
from emfed.artifacts.page import Highlight, Page, Section, Table, render_page
from emfed.artifacts.validation import WorkerGains
from emfed.core.protocols import FloatArray, ModelWords
from emfed.core.storage import write_atomic
from emfed.data.tables import Piece
from emfed.models.adapting import climb
from emfed.models.clusters import Clusters
from emfed.models.component_summaries import portray
from emfed.network.holding_out import MOST_ROWS, PARTS, own_gains, part_of
from emfed.network.scoring import SCORES, falls_short, scores_of

if TYPE_CHECKING:
    from emfed.artifacts.result import Result

FEWEST = 10
"""Rows below which a site's own model is not tried."""
SERVED = {
    True: "The model fits these rows about as well as it claims to.",
    False: (
        "The model fits these rows clearly worse than it claims to: they may hold other people, "
        "instruments or units. `emfed adapt` makes a model of them, from this one."
    ),
}


@final
@dataclass(frozen=True, eq=False)
class ColumnFit:
    """A column of the rows beside what the model expects of it, in its units.

    Parameters
    ----------
    name : str
        The column.
    mean : float
        Of the rows.
    expected : float
        Of rows of the model with as many of each component.
    spread : float
        The standard deviation of such rows.
    error : float
        What chance may do to the mean: its standard error under the model.
    """

    name: str
    mean: float
    expected: float
    spread: float
    error: float

    @property
    def away(self) -> float:
        """How far the mean is from what is expected."""
        return self.mean - self.expected


@final
@dataclass(frozen=True, eq=False)
class OwnRows:
    """How well a model fits rows of one site; prints as a table.

    Parameters
    ----------
    rows : int
        How many.
    scores : array
        Mean and spread of their log-likelihood, what the model expects of both, and the share of
        each component; NaN: the model tells nothing of it.
    shares_of_all : array, optional
        The share of each component in the rows of all sites.
    columns : sequence of ColumnFit
        Columns with a mean.
    gains : WorkerGains, optional
        What models of its own would gain the site, on rows that it has held out.
    words : ModelWords
        What the model calls its parts.
    """

    rows: int
    scores: FloatArray
    shares_of_all: FloatArray | None
    columns: Sequence[ColumnFit]
    gains: WorkerGains | None
    words: ModelWords

    @property
    def log_likelihood(self) -> float:
        """The mean over the rows."""
        return float(self.scores[0])

    @property
    def expected(self) -> float | None:
        """What the model leads one to expect of rows with as many of each component."""
        return None if np.isnan(self.scores[2]) else float(self.scores[2])

    @property
    def well_served(self) -> bool | None:
        """Whether the model fits the rows as well as it claims to; None: it claims nothing."""
        if self.expected is None:
            return None
        return not falls_short(self.scores[None], np.array([self.rows]))[0]

    @property
    def shares(self) -> FloatArray | None:
        """The share of each component in the rows."""
        return self.scores[SCORES:] if len(self.scores) > SCORES else None

    @property
    def table(self) -> dict[str, list[Any]]:
        """Figures by name, as they print."""
        words = self.words
        told: dict[str, Any] = {f"{words.row}s": self.rows}
        told[f"{words.score} per {words.row}"] = words.factor * self.log_likelihood
        if self.expected is not None:
            told["expected by the model"] = words.factor * self.expected
        if self.gains is not None:
            for name in ("common", "adapted", "alone"):
                told[f"held out, {name}"] = float(getattr(self.gains, name)[0])
            told["verdict of held-out rows"] = self.gains.verdicts[0]
        return {"figure": list(told), "value": list(told.values())}

    def __str__(self) -> str:
        lines = [
            f"{name}: {value:.4f}" if isinstance(value, float) else f"{name}: {value}"
            for name, value in zip(*self.table.values(), strict=True)
        ]
        served = [] if self.well_served is None else [SERVED[self.well_served]]
        return "\n".join([*served, *lines])

    __repr__ = __str__

    def report(self, path: str | Path, *, title: str | None = None) -> None:
        """Write a page about these rows.

        Parameters
        ----------
        path : str or Path
            Where it is written.
        title : str, optional
            The title of the page.
        """
        write_atomic(Path(path), render_page(_page(self, title)).encode())


def look_at(result: Result, rows: Any) -> OwnRows:
    """What the model says of these rows, which took part in its fit."""
    model, params = result.model, result.model.maximize(result.statistics)
    scores = scores_of(model, params, [Piece(np.zeros(1, int), rows[None], None, 1.0, 0)], 1)[0]
    facts, shares = result.facts, None
    if len(scores) > SCORES:
        shares = model.component_shares(result.statistics)
        if facts is not None and facts.scores is not None and len(facts.scores) > SCORES:
            shares = facts.scores[SCORES:]
    return OwnRows(
        len(rows),
        scores,
        shares,
        _columns(result, rows, scores[SCORES:]),
        _gains(result, rows),
        model.words(),
    )


def _columns(result: Result, rows: Any, shares: FloatArray) -> list[ColumnFit]:
    """Means of columns, beside those of the model with these shares."""
    portrait = portray(result.model, result.params, result.columns)
    means, spreads = portrait.means, portrait.covariances
    if means is None or spreads is None or rows.ndim != 2 or not np.isfinite(means).all():
        return []
    weights = shares if len(shares) == len(means) else portrait.weights
    if spreads.ndim == 3:
        spreads = np.diagonal(spreads, axis1=1, axis2=2)
    expected = weights @ means
    variance = weights @ (spreads + means**2) - expected**2
    within = weights @ spreads
    names = result.columns or [f"column {j}" for j in range(rows.shape[1])]
    found = []
    for place, column in enumerate(portrait.columns.tolist()):
        seen = rows[:, column][np.isfinite(rows[:, column])]
        if len(seen):
            spread = float(np.sqrt(max(variance[place], 0.0)))
            error = float(np.sqrt(max(within[place], 0.0) / len(seen)))
            own = float(seen.mean()), float(expected[place])
            found.append(ColumnFit(names[column], *own, spread, error))
    return found


def _gains(result: Result, rows: Any) -> WorkerGains | None:
    """What a model of its own would gain the site; the common one knows its rows to first order.

    The model without a part of the rows follows from what the others' rows told, which is the rest
    of the common statistics, and the site's other rows.
    """
    model: Any = result.model
    if isinstance(model, Clusters) or len(rows) < FEWEST:
        return None
    params = model.maximize(result.statistics)
    picked = np.arange(0, len(rows), -(-len(rows) // MOST_ROWS))
    some, weights = rows[picked], np.ones(len(picked))
    others = max(1.0, (result.samples - len(rows)) * len(picked) / len(rows))
    own = model.expected_statistics(some, params)
    rest = (result.statistics * (others + len(some)) - own * len(some)) / others
    rest = rest if model.inside(rest) else result.statistics
    parts, without = part_of(picked, result.seed), []
    for part in range(PARTS):
        kept = parts != part
        share = others / (others + kept.sum())
        with np.errstate(all="ignore"):
            found = climb(model, rest, some[kept], share, weights[kept], params)
        without.append(model.maximize(found) if model.inside(found) else params)
    told = own_gains(model, without, some, weights, parts)
    common, adapted, alone = told[:3, None]
    return WorkerGains(["here"], np.array([len(rows)]), common, adapted, alone, told[None, 3:])


# The page.


def _page(own: OwnRows, title: str | None) -> Page:
    words = own.words
    served = own.well_served
    boxes = [Highlight(f"{words.row}s", f"{own.rows:,}")]
    score = Highlight(words.score, f"{words.factor * own.log_likelihood:,.4f}", words.per_row)
    boxes.append(score)
    if own.expected is not None:
        told = f"{words.factor * own.expected:,.4f}"
        boxes.append(Highlight("expected", told, "by the model", served))
    text = (
        "This page is about the rows of one site. Its figures are known there alone, and nothing "
        "of it was sent: hand it on only as you would the rows' own averages."
    )
    said = "" if served is None else f" {SERVED[served]}"
    return Page(
        title or "A model and the rows of one site",
        [text + said],
        sections=[*_shares(own), *_fits(own), *_own_models(own)],
        source="A report by emfed.",
        highlights=boxes,
    )


def _shares(own: OwnRows) -> list[Section]:
    shares, every = own.shares, own.shares_of_all
    if shares is None or every is None or len(shares) < 2:
        return []
    heads = own.words.heads(len(shares))
    rows = [
        (head, f"{here:.1%}", f"{there:.1%}")
        for head, here, there in zip(heads, shares, every, strict=True)
    ]
    table = Table(
        f"Shares of the {own.words.part}s", (own.words.part, "these rows", "all sites"), rows
    )
    return [Section(f"The {own.words.part}s here", [], [], [table])]


def _fits(own: OwnRows) -> list[Section]:
    if not own.columns:
        return []
    text = (
        "The mean of each column beside that of rows which the model draws, with as many of each "
        f"{own.words.part} as these rows have. A distance of three standard errors is more than "
        "chance gives; one of many spreads is another unit, code or instrument."
    )
    order = sorted(own.columns, key=lambda one: -abs(one.away) / max(one.spread, 1e-300))
    rows = [
        (
            one.name,
            f"{one.mean:.4g}",
            f"{one.expected:.4g}",
            f"{one.away:+.3g}",
            f"{one.away / one.error:+.1f}" if one.error > 0 else "",
            f"{one.away / one.spread:+.2f}" if one.spread > 0 else "",
        )
        for one in order
    ]
    heads = ("column", "mean here", "expected", "difference", "in standard errors", "in spreads")
    return [Section("Columns", [text], _figure(order), [Table("Columns", heads, rows)])]


def _figure(columns: Sequence[ColumnFit]) -> list[Figure]:
    drawn = [one for one in columns if one.spread > 0][:40]
    if len(drawn) < 2:
        return []
    away = np.array([one.away / one.spread for one in drawn])
    error = np.array([3 * one.error / one.spread for one in drawn])
    place = np.arange(len(drawn), dtype=np.float64)
    series = [
        Series("what chance gives", error, place, low=-error, bars=True, reference=True),
        Series("difference", away, place, points=True, line=False),
    ]
    names = [one.name for one in drawn]
    panel = Panel(series, "difference, in spreads of the column", "", log="", names=names)
    return [Figure("Means of these rows, less those that the model expects.", [panel])]


def _own_models(own: OwnRows) -> list[Section]:
    gains = own.gains
    if gains is None:
        return []
    text = (
        "Mean log-likelihoods of these rows, each under a model that has not seen it. Common: that "
        "of all sites; adapted: the same fitted further to the other rows here, where it counts as "
        "50 of them; alone: fitted to them alone. A gain counts if it is three standard errors "
        "from none and at least 0.02 nats a row."
    )
    rows = [
        ("common", f"{gains.common[0]:.4f}", "", ""),
        *(
            (name, f"{gains.common[0] + gain:.4f}", f"{gain:+.4f}", f"{error:.4f}")
            for name, gain, error in zip(
                ("adapted", "alone"), gains.gains[0], gains.errors[0], strict=True
            )
        ),
    ]
    heads = ("model", "log-likelihood per row", "gain", "standard error")
    verdict = gains.verdicts[0]
    told = "This site is served by the common model." if verdict == "served" else ""
    told = told or f"This site {verdict}: `emfed adapt` makes a model of its own."
    return [Section("A model of one's own", [text, told], [], [Table("Models", heads, rows)])]
