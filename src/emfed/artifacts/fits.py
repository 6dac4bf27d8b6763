"""The report of a fit: one page, from a result or its model file, without data."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from emfed.artifacts.disclosure import disclosure, least_rows, n_parts
from emfed.artifacts.facts import MASKED, Facts
from emfed.artifacts.figures import Figure, Panel, Series, drawn
from emfed.artifacts.model_card import in_words, size
from emfed.artifacts.page import Highlight, Page, Section, Table, render_page
from emfed.core.errors import SettingsError
from emfed.core.protocols import BoolArray, FloatArray, IntArray, ModelWords, plural
from emfed.core.storage import write_atomic
from emfed.models.component_summaries import (
    Portrait,
    portray,
    principal_plane,
    width_of,
)

if TYPE_CHECKING:
    from emfed.artifacts.result import Result

MOST_ROWS = 400
"""Rows of a table on the page."""
OPEN_ROWS = 15
"""Longer tables are folded."""
WIDEST = 1500
"""Columns up to which principal axes are computed."""
MOST_DRAWN = 20
"""Components that a reader can tell apart in one figure."""
BYTES = "kB per site, up and down"
MOST_LEVELS = 5
"""Categories of a column that the table of components names: the likeliest."""
MOST_NAMED = 40
"""Sites whose names stand beside a figure; of more, the table has them."""
_TURN = np.linspace(0, 2 * np.pi, 73)
MOST_POINTS = 1500
"""Points of a line in a figure: more would make the page larger and look the same."""


def fit_page(result: Result, title: str | None = None) -> Page:
    """Everything a reader who was not there needs to judge a fit."""
    sections = [*_components(result), _sites(result), *_shares(result), *_selection(result)]
    sections += [*_validation(result), *_errors(result), disclosure(result), _traffic(result)]
    sections += [_course(result), _participation(result)]
    sections += [_settings(result), Section("Words", terms=_glossary(result))]
    return Page(
        title or result.model.words().title,
        _summary(result),
        sections=sections,
        source=_source(result),
        highlights=_highlights(result),
        warnings=_warnings(result),
    )


def write_report(result: Result, path: str | Path, title: str | None = None) -> None:
    """The page of a fit as a file, whole or not at all."""
    write_atomic(Path(path), render_page(fit_page(result, title)).encode())


def plot(result: Result, what: str | None) -> Any:
    """One of the report's figures, as matplotlib's; the first that there is where none is named."""
    found: dict[str, Callable[[Result], Sequence[Section]]] = {
        "components": _components,
        "course": lambda result: [_course(result)],
        "sites": lambda result: [_sites(result)],
        "shares": _shares,
        "selection": _selection,
    }
    if what is not None and what not in found:
        raise SettingsError(f"what must be one of {', '.join(found)}; got {what!r}.")
    asked = found if what is None else [what]
    figures = (f for name in asked for section in found[name](result) for f in section.figures)
    if (figure := next(figures, None)) is None:
        raise SettingsError(f"this fit has nothing to draw for what={what!r}.")
    return drawn(figure)


def _thin(count: int) -> IntArray:
    """Which of so many points to draw: all, or evenly some, the first and the last among them."""
    picked = np.linspace(0, count - 1, min(count, MOST_POINTS)).round()
    return np.unique(picked.astype(np.int64))


def _summary(result: Result) -> list[str]:
    data, words = result.card["data"], result.model.words()
    width = f" of {plural(data['columns'], 'column')}" if data["columns"] else ""
    held = (
        f" on {plural(data['rows'], words.row)}{width}, held by {plural(data['workers'], 'site')}"
        if result.facts is not None
        else ""
    )
    article = "An" if words.name[:1] in "aeiou" else "A"
    told = f"{article} {words.name} was fitted{held}. {_ending(result)}"
    return [f"{told} {served(result)} {_held_out(result)} {least_rows(result)}".replace("  ", " ")]


def _held_out(result: Result) -> str:
    """What rows that were held out say, in a sentence; empty where nobody asked."""
    told = "" if result.validation is None else result.validation.remark("site")
    return told[:1].upper() + told[1:]


def served(result: Result) -> str:
    """Whether the common model serves the sites, in a sentence; empty where nobody asked."""
    facts = result.facts
    if facts is None or facts.well_served is None:
        return ""
    known = facts.by_worker
    if known is None and facts.well_served:
        return (
            "The model fits the rows of all sites together about as well as it claims to; how well "
            "it fits each site is known there alone."
        )
    bad, sites = [] if known is None else known.badly_served.tolist(), facts.workers
    if known is not None and not bad:
        return "The common model fits every site about as well as it claims to."
    if len(bad) == sites or known is None:
        whom = "all sites" if sites > 1 else "the data"
        whom = "the rows of all sites together" if known is None else whom
        return (
            f"The model fits {whom} clearly worse than it claims to: its family is wrong for these "
            f"columns. Try {'more' if n_parts(result) > 1 else 'several'} components, "
            f"{'other covariances, ' * ('covariance_type' in result.model.describe())}or other "
            "families of columns."
        )
    names = ", ".join(result.workers()["worker"][i] for i in bad[:5])
    return (
        f"The common model fits {len(bad)} site{'s' if len(bad) > 1 else ''} clearly worse than it "
        f"claims to ({names}{', …' if len(bad) > 5 else ''})."
    )


def _warnings(result: Result) -> list[str]:
    """What the fit warned of, and what else a reader must not overlook."""
    facts = result.facts
    told = [] if facts is None else [str(w) for w in facts.settings.get("remarks", [])]
    if result.privacy is not None and not result.privacy["private"]:
        told.insert(0, f"{result.privacy['words']}.")
    told = [f"{line[:1].upper()}{line[1:]}" for line in told]
    if not result.converged and not any("converge" in line for line in told):
        told.append("The fit did not converge: its numbers may still move.")
    if not_served(result):
        told.append(served(result))
    if (company := result.company) is not None and company.doubt:
        told.insert(0, f"{company.doubt[:1].upper()}{company.doubt[1:]}")
    return told


def not_served(result: Result) -> bool:
    """Whether the model is known to fit some site, or all rows together, clearly too badly."""
    facts = result.facts
    if facts is None:
        return False
    if facts.by_worker is None:
        return facts.well_served is not None and not facts.well_served
    return len(facts.by_worker.badly_served) > 0


def _highlights(result: Result) -> list[Highlight]:
    """The first screen: whether it converged, how many sites and rows, and what was sent."""
    facts, raw, words = result.facts, result.raw_bytes, result.model.words()
    total = result.bytes_up + result.bytes_down
    yes = result.converged
    rounds = plural(result.rounds, "round")
    found = [Highlight("converged", "yes" if yes else "no", rounds, yes)]
    if facts is not None:
        found.append(_sites_box(facts))
        width = width_of(result.model)
        wide = plural(width, "column") if width else ""
        found.append(Highlight(f"{words.row}s", f"{facts.rows:,}", wide))
    beside = ""
    if raw:
        times = total / raw
        told = f"{times:.2g} times" if times < 100 else f"{times:,.0f} times"
        beside = f"{told} the rows themselves, {size(raw)}"
    found.append(Highlight("bytes, both ways", size(total), beside))
    if facts is not None and facts.log_likelihood is not None:
        value = words.factor * facts.log_likelihood
        found.append(Highlight(words.score, _figures(value), words.per_row))
    count = len(_warnings(result))
    return [*found, Highlight("warnings", str(count) if count else "none", "", count == 0)]


def _sites_box(facts: Facts) -> Highlight:
    """How many sites, of how many, and their rows where single ones told them."""
    company, known, beside = facts.company, facts.by_worker, ""
    if company is not None and (company.gone or company.stayed < len(company.began)):
        beside = f"{company.stayed} of {len(company.began)} that began"
    elif facts.workers > 1:
        beside = "rows of each: " + MASKED if facts.settings.get("masks") else ""
        if known is not None:
            beside = f"{known.rows.min():,} to {known.rows.max():,} each"
    return Highlight("sites", f"{facts.workers:,}", beside, not (company and company.doubt))


def _figures(value: float) -> str:
    """A score with four decimals, and fewer where it is large."""
    return f"{value:,.4f}" if abs(value) < 1e4 else f"{value:,.0f}"


def _source(result: Result) -> str:
    """Where the rows were and what made the page, in a line."""
    facts = result.facts
    if facts is None:
        return "A report by emfed."
    files = facts.settings.get("source")
    rows = f"Rows of {', '.join(map(str, files))}" if files else "Rows of the sites named below"
    how = "simulated in one process" if facts.simulated else "fitted over a network"
    return (
        f"{rows}, {how} on {facts.created[:10]} by emfed {facts.software.get('emfed', '')}; "
        f"seed {result.seed}."
    )


def _ending(result: Result) -> str:
    if result.converged:
        return "The fit converged."
    return f"The fit did not converge: {result.ending}."


GLOSSARY = {
    "site": "a party that holds rows and answers questions about them; also called a worker",
    "statistics": "averages over rows, from which the model follows",
    "round": "one exchange: the server sends the model, sites answer with statistics",
    "nat": "the unit of log-likelihoods: 0.69 nats are a factor of two in probability",
    "|H|²": "how far the model still moves in a round; zero where it stands still",
    "BIC, AIC, ICL": "how well a model fits, charged for its parameters; smaller is better",
    "payload": "the part of a message that depends on data; the rest is its envelope",
    "raw rows": "all values as 8-byte numbers: what it would take to send the rows themselves",
}


def _glossary(result: Result) -> dict[str, str]:
    words = result.model.words()
    parts = n_parts(result)
    out: set[str] = set() if words.likelihood else {"nat"}
    out |= set() if words.likelihood and parts > 1 else {"BIC, AIC, ICL"}
    own = {words.score: words.meaning}
    if parts > 1:
        own = {words.part: "one of the groups of rows that the model consists of", **own}
    told: dict[str, str] = {}
    for word, meaning in GLOSSARY.items():
        told |= own if word == "nat" else {}
        told |= {} if word in out else {word: meaning}
    return told


# The course of the fit.


def _course(result: Result) -> Section:
    records, workers = result.records, result.ledger.counts.shape[-1]
    words = result.model.words()
    sent = np.cumsum(records.column("bytes_up") + records.column("bytes_down")) / workers / 1000
    round_ = records.column("round")
    squared = records.column("squared_H")
    figures = []
    x, y, before = _likelihood(result, round_, sent)
    if len(x) > 1:
        x, y, before = (values[_thin(len(x))] for values in (x, y, before))
        if result.converged:  # the last rounds try a bold step, which is taken back
            end = int(np.argmax(y[:-1])) + 1
            x, y, before = (np.append(values[:end], values[-1]) for values in (x, y, before))
        figures += _climb(x, y, before, words, " less penalty" if _penalty(result) else "")
    known = np.flatnonzero(np.isfinite(squared) & (squared > 0) & (round_ > 0))
    known = known[_thin(len(known))] if len(known) else known
    if len(known) > 1:
        label = "estimate of the squared mean field, $|H|^2$"
        panels = [
            Panel([Series(label, round_[known], squared[known])], "round", "$|H|^2$", whole="x"),
            Panel([Series(label, sent[known], squared[known])], BYTES, "$|H|^2$"),
        ]
        caption = "How far the model still moves: |H|² is zero where EM stands still."
        if any(record.round and not record.asked for record in result.records):
            caption += f" Where it jumps up, a {words.part} was moved to look for a better model."
        figures.append(Figure(caption, panels, apart=True))
    hits = result.guard_hits
    followed = "It was not followed."
    if len(x) > 1:
        looked = result.ledger.summary()["monitor"]["up"]["messages"]
        followed = (
            "It was computed for this report, in the simulation; sites did not send it."
            if looked
            else "It is one of the numbers of every sum."
        )
    text = [f"The {words.score} is {words.meaning}. {followed}"]
    if hits:
        text.append(
            f"{plural(hits, 'time')} a step had to be shortened to stay where the model is "
            f"defined; many of these mean too much noise or too many {words.part}s."
        )
    return Section("The course of the fit", text, figures)


def _climb(
    x: FloatArray, y: FloatArray, before: FloatArray, words: ModelWords, less: str
) -> list[Figure]:
    """The way up, as what was missing to the best: an axis of its own size at every stage."""
    best = float(y.max())
    short = abs(words.factor) * (best - y)
    some = best - y > 1e-12 * max(1.0, abs(best))
    if some.sum() < 2:
        return []
    side = "below" if words.factor > 0 else "above"
    label = f"mean {words.score}{less}, {side} its best"
    axis = f"{words.per_row} {side} the best"
    panels = [
        Panel([Series(label, x[some], short[some])], "round", axis, whole="x"),
        Panel([Series(label, before[some], short[some])], BYTES, axis),
    ]
    caption = (
        f"Mean {words.score} per {words.row}{less}, against rounds and bytes: how far it was "
        f"{side} the best that was reached, {words.factor * best:.8g}, on a logarithmic axis."
    )
    return [Figure(caption, panels, apart=True)]


def _penalty(result: Result) -> float:
    return float(result.model.penalty(result.model.maximize(result.statistics)))


def _likelihood(
    result: Result, round_: FloatArray, sent: FloatArray
) -> tuple[FloatArray, FloatArray, FloatArray]:
    """Rounds made, value, and bytes sent until then: a record tells of its beginning."""
    objective = result.records.column("objective")
    known = np.flatnonzero(np.isfinite(objective) & (round_ > 0))
    x, y = round_[known] - 1, -objective[known]
    before = sent[np.maximum(known - 1, 0)]
    last = None if result.facts is None else result.facts.log_likelihood
    if len(x) and last is not None:
        x, y = np.append(x, round_[-1]), np.append(y, last - _penalty(result))
        before = np.append(before, sent[-1])
    return x, y, before


# Sites.


def _sites(result: Result) -> Section:
    facts, table, words = result.facts, result.workers(), result.model.words()
    heading = "How well each site is served"
    if facts is None or facts.scores is None:
        missing = "The fit did not end by asking the sites how well the model fits them."
        return Section(heading, [missing + " fit(..., scores=True) and `emfed fit` do."])
    known = facts.by_worker
    if known is None or known.scores is None:
        return _together(result, heading)
    expected = known.expected
    if expected is None:
        return _unjudged(heading, table, words, n_parts(result) > 1)
    scores, hoped = known.scores[:, 0], expected[:, 0]
    away = scores - hoped
    order = np.argsort(away, kind="stable")
    order, silent = order[np.isfinite(away[order])], np.flatnonzero(~np.isfinite(away))
    whole = facts.log_likelihood
    several = result.model.words().part if n_parts(result) > 1 else ""
    alike = f"with as many of each {several} as the site has, and " if several else ""
    text = [
        (f"Over all rows the log-likelihood is {whole:.3f}. " if whole is not None else "")
        + "Beside the log-likelihood of a site stands what the model leads one to expect of it: "
        f"that of rows that the model draws itself, {alike}with the same values missing.",
        "A site is called badly served if its rows fall short of that by more than half the spread "
        "of single rows, and by more than three times what chance gives for its number of rows. "
        "Such a site may hold other people, other instruments or other units, and may need "
        f"{f'a {several} of its own, or ' if several else ''}a model of its own: emfed adapt makes "
        "one there, from this model and the site's rows.",
    ]
    rows = [
        (
            table["worker"][i],
            f"{table['rows'][i]:,}",
            f"{scores[i]:.3f}",
            f"{hoped[i]:.3f}",
            f"{away[i]:+.3f}",
            "badly served" if table["badly_served"][i] else "well served",
        )
        for i in order.tolist()
    ]
    rows += [
        (table["worker"][i], f"{table['rows'][i]:,}", "", "", "", "did not say")
        for i in silent.tolist()
    ]
    columns = ("site", "rows", "log-likelihood per row", "expected", "difference", "verdict")
    drawn = order[_thin(len(order))]
    names = [table["worker"][i] for i in drawn.tolist()]
    flagged = np.isin(drawn, known.badly_served)
    figure = _served(names, scores[drawn], hoped[drawn], flagged)
    section = Section(heading, text, [figure] if len(order) > 1 else [])
    return _folded(section, "Sites, those that fall shortest first", columns, rows)


def _together(result: Result, heading: str) -> Section:
    """Of sites that told sums alone: what these say, and where the rest is known."""
    facts, words = result.facts, result.model.words()
    assert facts is not None
    told = (
        "Sites told sums over all of them, so how well the model fits a single site is "
        f"{MASKED}. Each site can look at its own rows: `emfed report MODEL ROWS.csv` there makes "
        "a page of them, which nothing leaves."
    )
    figures = {
        f"{words.score} per {words.row}": facts.log_likelihood,
        "expected by the model": facts.expected,
        f"spread over {words.row}s": facts.row_spread,
    }
    rows = [(name, f"{words.factor * v:.3f}") for name, v in figures.items() if v is not None]
    tables = [Table("All sites together", ("figure", "value"), rows)] if rows else []
    return Section(heading, [told, served(result)], tables=tables)


def _validation(result: Result) -> list[Section]:
    """What rows that were held out say, if the fit asked for it."""
    found = result.validation
    if found is None:
        return []
    text = (
        "Mean log-likelihoods of rows that the models in question were not fitted to: each row is "
        "scored by fits to other rows. "
    )
    if found.by_worker is not None:
        text += (
            "Common: the model of all sites; adapted: the same fitted further to the site's rows; "
            "alone: fitted to them alone. A gain counts if it is three standard errors from none "
            "and at least 0.02 nats a row. "
        )
    text += _held_out(result)
    table = found.table
    known = [name for name in list(table)[2:-1] if any(v is not None for v in table[name])]
    numbers = [["" if v is None else f"{v:.4f}" for v in table[name]] for name in known]
    rows = list(
        zip(table["worker"], map(str, table["rows"]), *numbers, table["verdict"], strict=True)
    )
    heads = ("site", "rows", *known, "verdict")
    return [_folded(Section("Rows that were held out", [text]), "Sites", heads, rows)]


def _errors(result: Result) -> list[Section]:
    """Every parameter with its standard error, if the fit asked for it."""
    if result.uncertainty is None:
        return []
    rows = result.summary().cells()
    heads = ("parameter", "estimate", "standard error", "z", "2.5%", "97.5%")
    text = "Standard errors follow from the observed information: they hold where the model does."
    return [_folded(Section("Standard errors", [text]), "Parameters", heads, rows)]


def _unjudged(
    heading: str, table: dict[str, list[Any]], words: ModelWords, several: bool
) -> Section:
    """Sites under a model that claims nothing of them."""
    text = (
        "Sites are not judged: this model draws no rows, so there is nothing to hold theirs "
        "against."
    )
    if words.likelihood:
        text += f" Mind that log-likelihoods of sites do not compare{'.' * (not several)}"
    if words.likelihood and several:
        text += (
            f": {words.row}s of a rare or wide {words.part}, or longer ones, have a lower one "
            "however well they fit."
        )
    told = [table[name] for name in ("worker", "rows", words.key)]
    rows = [
        (name, f"{count:,}", "did not say" if value is None else f"{value:,.3f}")
        for name, count, value in zip(*told, strict=True)
    ]
    heads = ("site", f"{words.row}s", f"{words.score} per {words.row}")
    return _folded(Section(heading, [text]), "Sites", heads, rows)


def _served(
    names: Sequence[str], scores: FloatArray, expected: FloatArray, flagged: BoolArray
) -> Figure:
    """The sites' log-likelihood in the order of their table, each by its name."""
    place = np.arange(len(names), dtype=np.float64)
    dots: Any = {"points": True, "line": False}
    told: list[Series] = [Series("expected", expected, place, reference=True, **dots)]
    told.append(Series("site", scores[~flagged], place[~flagged], **dots))
    if flagged.any():
        told.append(Series("badly served", scores[flagged], place[flagged], **dots))
    return Figure(
        "Mean log-likelihood per row at each site, beside what the model leads one to expect.",
        [_by_site(told, names, "log-likelihood per row")],
    )


def _by_site(told: Sequence[Series], names: Sequence[str], x: str, **options: Any) -> Panel:
    """A panel with a line for each site: by name, or by place in the table where they are many."""
    if len(names) <= MOST_NAMED:
        return Panel(told, x, "", log="", names=names, **options)
    turned = [replace(s, x=s.y + 1, y=s.x) for s in told]
    return Panel(turned, "site, in the order of the table", x, log="", whole="x", **options)


def _shares(result: Result) -> list[Section]:
    """How much of each site's rows each component accounts for."""
    facts = result.facts
    shares = None if facts is None or facts.by_worker is None else facts.by_worker.shares
    if shares is None or shares.shape[1] < 2 or len(shares) < 2:
        return []
    names, words = result.workers()["worker"], result.model.words()
    heads = words.heads(shares.shape[1])
    rows = [
        (name, *("" if np.isnan(v) else f"{v:.1%}" for v in own))
        for name, own in zip(names, shares.tolist(), strict=True)
    ]
    figures = []
    told = np.flatnonzero(np.isfinite(shares).all(axis=1))
    if len(told) <= MOST_NAMED and shares.shape[1] <= MOST_DRAWN:
        ends = 100 * np.cumsum(shares[told], axis=1)
        place = np.arange(len(told), dtype=np.float64)
        series = [
            Series(head, ends[:, k], place, low=ends[:, k] - 100 * shares[told, k], bars=True)
            for k, head in enumerate(heads)
        ]
        panel = Panel(
            series, "% of the site's rows", "", log="", names=[names[i] for i in told], lowest=0.0
        )
        figures = [Figure(f"The {words.part}s of each site's rows.", [panel])]
    section = Section(f"The {words.part}s at each site", (), figures)
    return [_folded(section, "Shares of a site's rows", ("site", *heads), rows)]


def _folded(
    section: Section, heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]
) -> Section:
    """The section with a table, which the reader opens if it is long."""
    more = len(rows) - MOST_ROWS
    if more > 0:
        heading += f" ({MOST_ROWS} of {len(rows):,}; `emfed inspect --workers` writes all)"
    table = Table(heading, columns, rows[:MOST_ROWS])
    fold = len(rows) > OPEN_ROWS
    return Section(
        section.heading,
        section.text,
        section.figures,
        section.tables if fold else [*section.tables, table],
        [table] if fold else (),
    )


def _traffic(result: Result) -> Section:
    table = result.workers()
    drawn = _thin(len(table["worker"]))
    up, down = (np.array(table[f"bytes_{d}"], float)[drawn] / 1000 for d in ("up", "down"))
    workers, raw = len(table["worker"]), result.raw_bytes
    text = [
        f"On average a site sent {size(result.bytes_up / workers)} and received "
        f"{size(result.bytes_down / workers)}, all messages and their envelopes included."
        + ("" if raw is None else f" The rows themselves are {size(raw)} in all."),
    ]
    if raw is not None and result.bytes_up + result.bytes_down > raw:
        text.append(
            "More was sent than the rows themselves would have taken. A federation pays where rows "
            "may not leave, or where there are many: what it sends does not grow with their number."
        )
    figures = []
    if workers > 1 and not all(_flat_line(values) for values in (up, down)):
        place = np.arange(len(drawn), dtype=np.float64)
        series = [
            Series("sent", up, place, points=True, line=False),
            Series("received", down, place, points=True, line=False),
        ]
        names = [table["worker"][i] for i in drawn.tolist()]
        panel = _by_site(series, names, "kB", lowest=0.0)
        figures = [Figure("Bytes that each site sent and received, in all.", [panel])]
    counted = ("messages_up", "bytes_up", "payload_up", "messages_down", "bytes_down")
    rows = [
        (name, *(f"{table[column][i]:,}" for column in counted))
        for i, name in enumerate(table["worker"])
    ]
    columns = ("site", "messages sent", "bytes sent", "of them payload", "messages received")
    section = Section("Bytes", text, figures)
    return _folded(section, "Bytes of each site", (*columns, "bytes received"), rows)


def _flat_line(values: FloatArray) -> bool:
    """Whether a plot of these would show one height: it is then left out."""
    return bool(np.ptp(values) <= 0.05 * np.abs(values).max())


def _participation(result: Result) -> Section:
    made = [record for record in result.records if record.round > 0 and record.asked]
    heading = "Participation"
    if not made:
        return Section(heading, ["No round was made."])
    asked, answered = (sum(getattr(r, n) for r in made) for n in ("asked", "answered"))
    workers = result.ledger.counts.shape[-1]
    whose = [] if result.company is None else [result.company.words]
    whose = [f"{words[:1].upper()}{words[1:]}" for words in whose]
    if asked == answered == workers * len(made):
        many = f"all {workers:,} sites" if workers > 1 else "the site"
        return Section(heading, [*whose, f"In each of {len(made):,} rounds {many} answered."])
    text = [
        *whose,
        f"In {len(made):,} rounds {asked:,} requests were sent, to {asked / len(made):.1f} of "
        f"{workers:,} sites a round, and {answered:,} answered ({answered / max(1, asked):.1%}).",
    ]
    some = [made[i] for i in _thin(len(made)).tolist()]
    rounds = np.array([float(r.round) for r in some])
    told = {n: np.array([float(getattr(r, n)) for r in some]) for n in ("asked", "answered")}
    if len(some) < 2 or all(_flat_line(values) for values in told.values()):
        return Section(heading, text)
    series = [Series(name, rounds, values) for name, values in told.items()]
    panel = Panel(series, "round", "sites", log="", lowest=0.0, whole="xy")
    return Section(heading, text, [Figure("Sites asked and heard in each round.", [panel])])


def _selection(result: Result) -> list[Section]:
    """The numbers of components that were compared, where there were several."""
    told = {} if result.facts is None else result.facts.settings.get("selection", {})
    tried = told.get("tried", []) if isinstance(told, dict) else []
    if not tried:
        return []
    by, words = str(told["criterion"]), result.model.words()
    many = f"{words.part}s"
    x, y = (np.array([float(row[name]) for row in tried]) for name in ("n_components", by))
    panel = Panel(
        [Series(by.upper(), x, y, points=True)], many, by.upper(), log="", ticks=x.tolist()
    )
    shown = {name: heading for name, heading in TRIED.items() if name in tried[0]}
    shown = {name: heading.replace("component", words.part) for name, heading in shown.items()}
    shown = {
        name: heading.replace("per row", f"per {words.row}") for name, heading in shown.items()
    }
    rows = [tuple(_selection_cell(row.get(name)) for name in shown) for row in tried]
    text = (
        f"These numbers of {many} ran side by side in the same rounds, so |H|² and bytes are "
        f"those of all of them together. The model is the one with the smallest {by.upper()}."
    )
    if any(record.round and not record.asked for record in result.records):
        text += " It was led on from other starts, and so were its neighbours."
    if result.privacy is not None:
        text = (
            "A part of the budget told how much more log-density all rows have under a start of "
            "each number than under one Gaussian. The model has the smallest number than which no "
            "other is better by BIC by more than the noise could make up."
        )
    figure = Figure(f"{by.upper()} of each number of {many}: smaller is better.", [panel])
    table = Table(f"Numbers of {many} that were tried", tuple(shown.values()), rows)
    figures = [figure] if len(tried) > 1 else []
    return [Section(f"How many {many}", [text], figures, [table])]


TRIED = {
    "n_components": "components",
    "free_parameters": "free parameters",
    "gain": "gain over one Gaussian per row",
    "log_likelihood": "log-likelihood per row",
    "aic": "AIC",
    "bic": "BIC",
    "icl": "ICL",
    "collapsed": "collapsed",
}
"""Columns of the table of candidates."""


def _selection_cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:,.3f}" if abs(value) < 1000 else f"{value:,.1f}"
    return "" if value is None else str(value)


def _plane_figure(portrait: Portrait, names: list[str], words: ModelWords) -> Figure | None:
    """Ellipses in the first two principal axes; curves where there is one column."""
    if portrait.means is None or not 1 <= portrait.means.shape[1] <= WIDEST:
        return None
    if portrait.means.shape[1] == 1:
        return _curves(portrait, names[0], words)
    axes, shares, centres, spreads = principal_plane(portrait)
    drawn = np.argsort(-portrait.weights, kind="stable")[:MOST_DRAWN]
    heads, series = _shared(portrait, words), []
    for k in np.sort(drawn).tolist():
        outline = _ellipse(centres[k], spreads[k])
        series.append(Series(heads[k], outline[:, 0], outline[:, 1]))
    series.append(Series("centres", centres[drawn, 0], centres[drawn, 1], points=True, line=False))
    told = [_axis(axis, names) for axis in axes]
    whose = f"The {words.part}s in the model's" if len(centres) > 1 else "The distribution in its"
    more = "" if len(drawn) == len(centres) else f" The {len(drawn)} largest are drawn."
    return Figure(
        f"{whose} first two principal axes, computed from its own "
        "means and covariances: no row was needed. Ellipses are one and two standard deviations; "
        f"columns are standardised.{more} First axis: {told[0]}. Second axis: {told[1]}.",
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


def _shared(portrait: Portrait, words: ModelWords) -> list[str]:
    """A label for each part of the model, with its share where there are several."""
    shares = portrait.weights.tolist()
    heads = words.heads(len(shares))
    return [f"{h} ({w:.0%})" for h, w in zip(heads, shares, strict=True)] if heads[1:] else heads


def _curves(portrait: Portrait, name: str, words: ModelWords) -> Figure:
    """Each component's share of the density, as a normal curve with its moments."""
    assert portrait.means is not None
    assert portrait.covariances is not None
    means = portrait.means[:, 0]
    sd = np.sqrt(portrait.covariances.reshape(len(means), -1)[:, 0])
    x = np.linspace((means - 3.5 * sd).min(), (means + 3.5 * sd).max(), 300)
    heads, series = _shared(portrait, words), []
    for k, weight in enumerate(portrait.weights[:MOST_DRAWN].tolist()):
        y = weight * np.exp(-0.5 * ((x - means[k]) / sd[k]) ** 2) / (sd[k] * np.sqrt(2 * np.pi))
        series.append(Series(heads[k], x, y))
    whose = f"The {words.part}s as normal curves, each" if heads[1:] else "A normal curve"
    panel = Panel(series, name, "density", log="")
    return Figure(f"{whose} with its own mean and variance.", [panel])


def features(result: Result) -> tuple[list[str], list[list[str]], str]:
    """Headings and rows of the table of a model's parts, and what its numbers are."""
    portrait = portray(result.model, result.params, result.columns)
    known = {} if result.facts is None else result.facts.settings.get("categories", {})
    told = dict(zip(portrait.features, portrait.cells, strict=True))
    told |= {f: _levels(portrait.levels[f], known[f]) for f in portrait.levels if f in known}
    rows = [[feature, *cells] for feature, cells in told.items()]
    shares = portrait.weights
    if not np.isfinite(shares).all():  # parameters do not tell them: statistics may
        shares = result.model.component_shares(result.statistics)
    if len(shares) > 1:
        rows.insert(0, ["share", *(f"{w:.1%}" for w in shares.tolist())])
    return result.model.words().heads(len(portrait.weights)), rows, portrait.legend


def _levels(shares: FloatArray, names: Sequence[str]) -> list[str]:
    """The likeliest categories of each component, by the words that stood in the data."""
    order = np.argsort(-shares, axis=1, kind="stable")[:, :MOST_LEVELS]
    told = [
        ", ".join(f"{names[j]} {own[j]:.1%}" for j in places)
        for own, places in zip(shares, order.tolist(), strict=True)
    ]
    return [line + ", …" * (len(names) > MOST_LEVELS) for line in told]


def _components(result: Result) -> list[Section]:
    portrait, words = portray(result.model, result.params, result.columns), result.model.words()
    every = result.columns or [f"column {j}" for j in range(width_of(result.model) or 0)]
    names = [every[j] for j in portrait.columns.tolist()]
    figure = _plane_figure(portrait, names, words)
    heads, rows, legend = features(result)
    heading = f"The {words.part}s" if heads[1:] else "The estimates"
    section = Section(heading, (), [] if figure is None else [figure])
    whose = f"Features of each {words.part}" if heads[1:] else "Estimates"
    told = f"{whose}, in the units of the data{f' ({legend})' if legend else ''}"
    return [_folded(section, told, ("feature", *heads), rows)]


def _settings(result: Result) -> Section:
    card = {name: part for name, part in result.card.items() if name != "bytes"}  # told above
    return Section(
        "Settings and versions",
        ["Everything that was chosen, as the model file holds it."],
        details=[Table("The model card", ("name", "value"), _flat(card))],
    )


def _flat(card: Any, prefix: str = "") -> list[tuple[str, str]]:
    rows: list[tuple[str, str]] = []
    for name, value in card.items():
        key = f"{prefix}{name}".replace("_", " ")
        if isinstance(value, dict):
            rows += _flat(value, f"{key} / ")
        elif name != "tried":  # told above
            rows.append((key, in_words(value)[:300]))
    return rows
