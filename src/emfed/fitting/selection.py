"""How many components? All numbers are fitted side by side, and the best by a criterion is kept."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from typing import Any, final

import numpy as np

from emfed.artifacts.result import CRITERIA, Result, criterion
from emfed.core.protocols import BoolArray, FloatArray, HeldUp, Model
from emfed.core.wording import ByFace, Setting, Wording
from emfed.models import HiddenMarkov
from emfed.models.components import TRACE, as_copies, passed_on

ATOM_SHARE, ROWS_PER_PARAMETER = 0.2, 5.0
"""Rows at one value of a column are an atom of it if they are this share of all, and this many for
each column: so many do not agree by chance or by rounding. (Of iris, 19% have the petal width 0.2;
a component on them is chosen at a share of 0.05, and by nobody else.) Fewer are a collapse."""
NAMED = 3
"""Columns that a remark names."""
HIGHEST_FLOOR = 0.1
"""The highest floor that every model takes."""
CODES = ByFace(
    "Categorical(n)",
    estimator="'categorical'",
    toml='{family = "categorical", categories = n}',
    command="categorical",
)
"""The family of a column of codes."""
FLOORS = ("covariance_floor", "noise_floor", "floor")
"""What models call the least spread of a component."""


@final
@dataclass(frozen=True, eq=False)
class Selection:
    """The fit of every number of components, and the best by the criterion.

    Parameters
    ----------
    best : Result
        The fit that was chosen.
    n_components : int
        The number of components of the best.
    results : mapping from int to Result
        Every fit; they share records and ledger, as they shared the rounds.
    table : tuple of dict
        One row for each number of components: free parameters, log-likelihood per row, aic, bic,
        icl, and whether a component has ``collapsed`` onto few rows.
    criterion : str
        What chose among them: "bic", "aic" or "icl".

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> emfed.select_components(model, data, "1:2", seed=0).n_components
    2
    """

    best: Result
    n_components: int
    results: Mapping[int, Result]
    table: tuple[dict[str, float], ...]
    criterion: str

    def __repr__(self) -> str:
        tried = ", ".join(str(k) for k in self.results)
        told = f"<Selection of {self.n_components} components by {self.criterion} among {tried}"
        head = f"{told}: {self.best.outcome}>"
        return "\n".join([head, *(f"  {line}" for line in self._lines())])

    def _lines(self) -> list[str]:
        """The table as text, the number that was chosen marked."""
        if not self.table:
            return []
        cells = [[name.replace("_", " ") for name in self.table[0]]]
        cells += [[_cell(value) for value in row.values()] for row in self.table]
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        chosen = [row["n_components"] == self.n_components for row in self.table]
        marks = ["", *("  <- chosen" if yes else "" for yes in chosen)]
        return [
            "  ".join(cell.rjust(w) for cell, w in zip(line, widths, strict=True)) + mark
            for line, mark in zip(cells, marks, strict=True)
        ]

    def _repr_html_(self) -> str:
        return f"<pre>{escape(repr(self))}</pre>"

    def to_frame(self) -> Any:
        """The table as a polars data frame."""
        import polars as pl

        return pl.DataFrame(list(self.table))


def _cell(value: Any) -> str:
    """Whole numbers and words as they are, other numbers in equal digits."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def within_rows(
    models: Sequence[Model], numbers: Sequence[int], rows: int, remarks: list[str]
) -> tuple[int, ...]:
    """Positions of the candidates that so many rows can have; ``remarks`` name the others."""
    can = [j for j, k in enumerate(numbers) if k <= rows]
    if len(can) in (0, len(numbers)) or isinstance(
        models[0], HiddenMarkov
    ):  # states share sequences
        return tuple(range(len(numbers)))
    left = ", ".join(str(k) for k in numbers if k > rows)
    tried = ", ".join(str(numbers[j]) for j in can)
    remarks.append(f"{rows} rows cannot have {left} components: tried are {tried}.")
    return tuple(can)


def choose(
    results: Mapping[int, Result], values: Mapping[int, FloatArray], by: str, remarks: list[str]
) -> Selection:
    """The best of models that were fitted side by side, from log-likelihood and entropy of each."""
    numbers = list(results)
    table = tuple(_row(k, results[k], values[k], by) for k in numbers)
    best = _best(results, numbers, [row[by] for row in table], remarks)
    told = {"criterion": by, "tried": [dict(row) for row in table]}
    kept = {k: with_setting(result, "selection", told) for k, result in results.items()}
    return Selection(kept[numbers[best]], numbers[best], kept, table, by)


def with_setting(result: Result, name: str, value: Any) -> Result:
    """The result with one more thing that its file tells."""
    assert result.facts is not None
    settings = {**result.facts.settings, name: value}
    return replace(result, facts=replace(result.facts, settings=settings))


def _best(
    results: Mapping[int, Result],
    numbers: Sequence[int],
    charged: list[float],
    remarks: list[str],
) -> int:
    """Where the criterion is least, once what candidates owe to the floor is taken back."""
    debts = [debt(r.model, r.model.maximize(r.statistics), r.samples) for r in results.values()]
    order = np.argsort(charged, kind="stable").tolist()
    best = int(np.argmin(np.array(charged) + 2 * np.array(debts)))
    if best != order[0]:
        better = order[: order.index(best)]
        out = ", ".join(str(numbers[j]) for j in better)
        remarks.append(
            f"components: {out} would be chosen for the sake of a component that has collapsed "
            f"onto few rows; left out. {floor_remarks(results[numbers[better[0]]])[0]}"
        )
    return best


def on_few_rows(held: HeldUp, rows: float, columns: int) -> bool:
    """Whether rows that the floor holds up are few: then it is chance, and no atom of a column."""
    rows = rows * held.rows_per_sample
    return held.share * rows < max(ATOM_SHARE * rows, ROWS_PER_PARAMETER * (columns + 1))


def debt(model: Any, params: Any, rows: float) -> float:
    """Nats of all rows that components on few rows owe to the floor.

    Without a floor their likelihood had no bound, which no criterion means. So they are judged as
    if their rows had the spread of all. What others gain from not having to explain those rows
    counts: a mixture that sets outliers apart may be chosen, one that found a coincidence is not.
    """
    few = [h for h in model.held_up(params) if on_few_rows(h, rows, model.n_features)]
    told = model.describe()
    floor = next((told[name] for name in FLOORS if told.get(name)), 1.0)
    held = sum(h.share * h.rows_per_sample for h in few)
    return float(rows * held * 0.5 * np.log(1 / floor))


def collapses(result: Result) -> bool:
    """Whether a component of a fit has collapsed onto few rows."""
    model = result.model
    held = model.held_up(model.maximize(result.statistics))
    return any(on_few_rows(h, result.samples, model.n_features) for h in held)


def empty_components(model: Any, statistics: FloatArray, rows: float) -> BoolArray:
    """Which components explain less than half a row, whatever the unit of weights is."""
    return np.asarray(model.component_shares(statistics) * rows < 0.5)


def without_empty(result: Result, rows: int, remarks: list[str]) -> Result:
    """The result with components that explain less than half a row as copies of the heaviest.

    ``remarks`` name them.
    """
    model = result.model
    empty = empty_components(model, result.statistics, rows)
    if not empty.any() or empty.all():
        return result
    statistics = empty_as_copies(model, result.statistics, rows)
    if statistics is not result.statistics:
        params = model.to_user(model.maximize(statistics))
        result = replace(result, statistics=statistics, params=params)
        empty = statistics[model.layout.slices["mass"]] <= TRACE * (1 + 1e-9)
    several = int(empty.sum()) > 1
    names = ", ".join(map(str, np.flatnonzero(empty).tolist()))
    remarks.append(
        Wording(
            "no row belongs to component{} {} (counting from 0): {} as a copy of another, without "
            "weight. Fewer components describe the rows as well, and another start ({}) may find a "
            "use for it.",
            *("s" * several, names, "they stand" if several else "it stands", Setting("n_init")),
        )
    )
    return result


def empty_as_copies(model: Any, statistics: FloatArray, rows: float) -> FloatArray:
    """Statistics in which components that explain less than half a row are copies of the heaviest.

    Nothing but noise says where such a component is, so its mean may lie outside all rows. A copy
    of another without weight changes no density, and EM from there gains nothing: at any other
    place it would begin to climb again, and the fit had not converged.
    """
    empty = empty_components(model, statistics, rows)
    if not empty.any() or empty.all():
        return statistics

    def loss(there: FloatArray) -> float:
        inside = model.inside(there)
        return float(model.surrogate(there, model.maximize(there))) if inside else np.inf

    kept = passed_on(model.layout, statistics, empty, loss)
    copies = as_copies(model.layout, kept, empty)
    return copies if model.inside(copies) else statistics


def floor_remarks(result: Result) -> list[str]:
    """What the floor holds up, in words: collapsed components, then atoms of columns."""
    model, rows = result.model, result.samples
    held = model.held_up(model.maximize(result.statistics))
    few = [h for h in held if on_few_rows(h, rows, model.n_features)]
    many = [h for h in held if h not in few]
    lines = [h for h in many if h.on_a_line]
    values = [h for h in many if not h.on_a_line]
    higher = _higher_floor(model)
    out: list[str] = []
    if few:
        out.append(
            Wording(
                "a component has collapsed onto few rows; the floor holds up its spread: {}. Fewer "
                "components, another start or {} may help; outliers and sentinel values are best "
                "treated first.",
                *(_places(few, result), higher),
            )
        )
    if values:
        out.append(
            Wording(
                "many rows have one value, or seem to beside the spread of the whole column, where "
                "the floor holds up the spread: {}. Treat outliers or sentinel values first, which "
                "widen a column. Without them the fit is sound, but log-likelihood and BIC depend "
                "on the floor there. Adding noise of the size of the rounding (jitter) {}avoids "
                "it; with {} it weighs less.",
                *(_places(values, result), _other_family(values, result), higher),
            )
        )
    if lines:
        out.append(
            "many rows lie on a line, where the floor holds up the noise: "
            f"{_places(lines, result)}. Their target is a combination of the other columns: leave "
            "out the column that it was computed from, or those rows."
        )
    return out


def _higher_floor(model: Any) -> str:
    """Advice with the setting's own name and a value, which each face writes as it is set there."""
    told = model.describe()
    name = next((name for name in FLOORS if name in told), "floor")
    now = told.get(name, 0.0)
    higher = min(max(100 * now, 1e-4), HIGHEST_FLOOR)
    if higher <= now:
        return "a higher floor"
    return Wording("a higher floor (say {})", Setting(name, float(f"{higher:g}")))


def _other_family(held: Sequence[HeldUp], result: Result) -> str:
    """Families that can take a column's values, as far as its one value tells; empty: none can."""
    told = result.model.describe()
    most = max(held, key=lambda h: h.share)
    if len(most.columns) > 1 or not ("covariance_type" in told or "families" in told):
        return ""
    place = most.columns[0]
    column = place if result.columns is None else result.columns[place]
    value = 0.0 if most.value is None else most.value
    near = round(value)  # means of rows at one value are rounded
    counts = near >= 0 and abs(value - near) < 1e-3 * max(1.0, abs(value))
    family = "poisson" if counts else CODES
    asked = Setting("families", {column: family}, of="mixed_mixture")
    if counts:
        return Wording(
            "or another family (for counts {}, for codes {} in its place) ", asked, CODES
        )
    return Wording("or another family (for codes {}) ", asked)


def _places(held: Sequence[HeldUp], result: Result) -> str:
    """The first of them, most rows first."""
    order = sorted(held, key=lambda h: -h.share)[:NAMED]
    return "; ".join(_place(h, result) for h in order)


def _place(held: HeldUp, result: Result) -> str:
    names = result.columns
    own = [str(j) if names is None else repr(names[j]) for j in held.columns]
    if held.on_a_line:
        where = f"column {own[0]} on the line of component {held.components[0]}"
    elif len(own) > 1:
        where = f"a combination of columns {', '.join(own)}"
    elif held.value is None:
        where = f"column {own[0]} (one value in each component)"
    else:
        where = f"column {own[0]} at {held.value:.6g}"
    what = "steps" if held.rows_per_sample != 1 else "rows"
    return f"{where} ({held.share:.1%} of {what})"


def _row(k: int, result: Result, values: FloatArray, by: str) -> dict[str, float]:
    """What the table says of one number of components."""
    likelihood, entropy = values.tolist()
    second = by if by == "held-out" else "entropy"  # the error of hidden values has its place
    free, rows = result.free_parameters, result.samples
    charged = {name: criterion(name, likelihood, entropy, rows, free) for name in CRITERIA}
    return {
        "n_components": k,
        "free_parameters": free,
        "log_likelihood": likelihood,
        second: entropy,
        **charged,
        "collapsed": collapses(result),
    }
