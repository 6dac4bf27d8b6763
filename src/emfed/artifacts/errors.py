"""Standard errors: how far parameters of other rows of the same kind would be from the fitted ones.

They follow from the observed information, the curvature of the log-likelihood at its maximum. EM
lives in expectation space, and so does the curvature. Let theta(t) = T(S + t B) be the parameters
along directions B of the statistics, G(theta) = sum w_i s-bar_i(theta) what everyone answers to a
question for statistics, and phi the natural parameters of the complete data. T(s) minimises the
surrogate, and Fisher's identity gives the gradient of the log-likelihood; together

    information per row = D phi^T (B - D G),    D = d/dt at t = 0,

that of complete data less what the latent variables take away: supplemented EM (Meng and Rubin
1991) with all columns of D G in one exchange. D G is one question for exact statistics at as many
parameters as the model has free ones, side by side. D phi is the server's own arithmetic: the
surrogate is affine in the statistics. So nothing here knows a model, and values that are missing,
priors and weights are accounted for.

What is kept is a root R with R^T R the covariance of the statistics, from which the error of any
function of the parameters follows (the delta method) without another message.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, final

import numpy as np

from emfed.core.errors import EmfedError, SettingsError
from emfed.core.protocols import BoolArray, FloatArray, Names, Parameters
from emfed.data.reading import Categories
from emfed.models.clusters import Clusters
from emfed.models.columns import ColumnParameters
from emfed.models.component_summaries import digits, fixed
from emfed.models.families import FAMILIES
from emfed.models.markov import HiddenMarkov

STEP = 1e-4
"""The step of central differences, in standard deviations of one complete row: the error is its
square."""
ASKED_STEP = 1e-5
"""The step of the parameters that everyone is asked about, one-sided: half as many questions, and
an error of about 1e-5 of the information."""
RANK = 1e-6
"""Singular values below this share of the largest are zero: over all registered models those that
count are above 2e-2 and the others below 1e-9."""
LEAST = 1e-8
"""Eigenvalues of the information, of 1 where nothing is latent, below which rows say nothing."""
ROOT_STEP = 1e-3
"""The step of the delta method, in standard errors."""


@final
@dataclass(frozen=True, eq=False)
class Chart:
    """Directions of the statistics, one for each free parameter, in which errors are worked out."""

    model: Any
    """The fitted model, with constants of the data that T uses among its statistics."""
    statistics: FloatArray
    basis: FloatArray
    """``(free, q)``; a row is one standard deviation of what one complete row says."""

    @classmethod
    def at(cls, model: Any, statistics: FloatArray, samples: float) -> Self:
        """At a fitted model; directions that would only move what lies on its bound are out."""
        if isinstance(model, Clusters):
            raise SettingsError(
                f"no standard errors: {type(model).__name__} has no likelihood. For k-means, "
                "fit gaussian_mixture(k, 'spherical'); imputation has intervals of its own."
            )
        model, statistics = model.streamed(statistics)
        flat = np.eye(len(statistics))
        basis = np.asarray(model.metric(model.maximize(statistics)).unwhiten(flat))
        kinds = quantities(model, user_at(model, statistics))
        values = flatten(user_at(model, statistics))
        edge = on_bound(kinds, values, _behind(model, kinds, samples))
        step = STEP**1.5  # of a metric that may be no more than the identity
        for _ in range(3):
            basis = _free(model, statistics, basis, step, edge)
            basis = _whitened(model, statistics, basis, step)
            step = STEP
        return cls(model, statistics, basis)

    @cached_property
    def _white(self) -> FloatArray:
        """The basis in the metric."""
        metric = self.model.metric(self.model.maximize(self.statistics))
        return np.asarray(metric.whiten(self.basis))

    def questions(self) -> list[Any]:
        """Parameters to ask everyone about: where the fit is, then steps within the basis.

        They go along the axes of the metric, as far as these lie within the space of the basis.
        The basis itself turns with roundings where directions are alike, and all members must ask
        the same.
        """
        orthonormal, _ = np.linalg.qr(self._white.T)
        metric = self.model.metric(self.model.maximize(self.statistics))
        steps = ASKED_STEP * np.asarray(metric.unwhiten(orthonormal @ orthonormal.T))
        return [self.model.maximize(at) for at in (self.statistics, *(self.statistics + steps))]

    def root(self, answers: FloatArray, samples: float) -> tuple[FloatArray, float]:
        """R, from everyone's statistics at `questions`; and the smallest share of information.

        The share is that of a complete row that the rows tell about the direction which they tell
        least about. It is positive where the fit is a maximum that the rows determine.
        """
        moved = np.zeros_like(self.basis)  # constants of the data do not follow the parameters
        along_axes = (answers[1:] - answers[0]) / ASKED_STEP
        moved[:, : answers.shape[1]] = self._white @ along_axes
        found = _slopes(self.model, self.statistics, self.basis, self.basis - moved, STEP)
        values, vectors = np.linalg.eigh((found + found.T) / 2)
        scale = 1 / np.sqrt(samples * np.maximum(values, LEAST))
        return scale[:, None] * (vectors.T @ self.basis), float(values[0])


def user_at(model: Any, statistics: FloatArray) -> Any:
    """Parameters in the user's units."""
    return model.to_user(model.maximize(statistics))


def flatten(params: Parameters) -> FloatArray:
    """All arrays of parameters as one vector."""
    return np.concatenate([np.ravel(array) for array in params.arrays().values()])


def _inside(model: Any, statistics: FloatArray, basis: FloatArray, step: float) -> float:
    """A step that stays, along every direction, where T is defined."""
    for _ in range(8):
        if all(model.inside(statistics + s * step * b) for b in basis for s in (1, -1)):
            return step
        step /= 10
    raise EmfedError(
        "no standard errors: the fitted statistics lie on the edge of where the model is defined. "
        "Use fewer components, or a larger floor."
    )


def _slope(f: Callable[[FloatArray], FloatArray], basis: FloatArray, step: float) -> FloatArray:
    """Derivatives of a function of a displacement, ``(directions, values)``."""
    return np.array([(f(step * b) - f(-step * b)) / (2 * step) for b in basis])


def _free(
    model: Any, statistics: FloatArray, basis: FloatArray, step: float, edge: BoolArray
) -> FloatArray:
    """Directions within the basis along which parameters in the user's units move."""
    step = _inside(model, statistics, basis, step)
    moves = _slope(lambda by: flatten(user_at(model, statistics + by)), basis, step)
    sizes = np.linalg.norm(moves, axis=0)
    moves = moves / np.where(sizes > 0, sizes, 1.0)  # columns may have any unit
    if edge.any():
        turned, values, _ = np.linalg.svd(moves[:, edge])
        rank = int((values > RANK * values.max(initial=0.0)).sum())
        basis, moves = turned[:, rank:].T @ basis, turned[:, rank:].T @ moves
    turned, values, _ = np.linalg.svd(moves, full_matrices=False)
    return np.asarray(turned[:, values > RANK * values.max(initial=0.0)].T @ basis)


def _slopes(
    model: Any, statistics: FloatArray, basis: FloatArray, vectors: FloatArray, step: float
) -> FloatArray:
    """<v, D phi_a> for each direction a and each of some vectors, ``(a, v)``."""
    step = _inside(model, statistics, basis, step)
    points = np.concatenate([statistics[None], statistics + vectors])

    def natural(by: FloatArray) -> FloatArray:
        told = np.asarray(model.surrogate(points, model.maximize(statistics + by)))
        return told[0] - told[1:]

    return _slope(natural, basis, step)


def _whitened(model: Any, statistics: FloatArray, basis: FloatArray, step: float) -> FloatArray:
    """The basis in which the information of complete rows is the identity."""
    found = _slopes(model, statistics, basis, basis, step)
    values, vectors = np.linalg.eigh((found + found.T) / 2)
    scale = 1 / np.sqrt(np.maximum(values, 1e-12 * values.max(initial=1e-300)))
    return np.asarray(scale[:, None] * (vectors.T @ basis))


# What parameters are called, and where they can lie.

AXES = {
    "weights": "k",
    "initial": "k",
    "transitions": "kk",
    "means": "kc",
    "loadings": "kcf",
    "intercepts": "k",
    "coefficients": "ki",
    "mean": "c",
}
"""What the axes of an array of parameters count: components, columns, factors, inputs."""
SINGULAR = {
    "weights": "weight",
    "transitions": "transition",
    "means": "mean",
    "loadings": "loading",
    "intercepts": "intercept",
    "coefficients": "coefficient",
    "covariances": "covariance",
    "probabilities": "probability",
}
FIRST = ("weight", "initial", "transition")
"""What a table begins with."""
SHARES = ("weights", "initial", "transitions")
POSITIVE = ("noise", "variance")


@final
@dataclass(frozen=True)
class Quantity:
    """One number of the parameters: its name, and whether it is a share, positive, or any."""

    name: str
    kind: str = "any"
    shown: bool = True
    """Not where another quantity says the same."""


def quantities(
    model: Any, params: Any, columns: Names = None, categories: Categories | None = None
) -> list[Quantity]:
    """A name for every number of parameters in the user's units, in the order of `flatten`.

    Categories are called by their words where those are known, by their codes elsewhere.
    """
    found: list[Quantity] = []
    for name, array in params.arrays().items():
        if isinstance(params, ColumnParameters) and name in params.families:
            found += _of_columns(model.columns, name, array, columns, categories or {})
        else:
            found += _of_array(model, name, array, columns)
    return found


def _of_columns(
    layout: Any, name: str, array: FloatArray, columns: Names, categories: Categories
) -> list[Quantity]:
    """Numbers of the columns of one family, ``(K, columns, numbers)``."""
    names = columns or layout.names or [str(j) for j in range(layout.count)]
    labels: list[tuple[str, str, str]] = []
    for column, family in zip(names, layout.families, strict=True):
        if not isinstance(family, FAMILIES[name]):
            continue
        for what, kind in family.parameters.items():
            if family.nominal:
                said = categories.get(column, range(family.size))
                labels += [(SINGULAR.get(what, what), f"{column}={word}", kind) for word in said]
            else:
                labels.append((what, column, kind))
    assert len(labels) == int(np.prod(array.shape[1:]))
    return [
        Quantity(f"{what}[{k}, {column}]", kind)
        for k in range(len(array))
        for what, column, kind in labels
    ]


def _axes_of(model: Any, name: str, count: int) -> str:
    """Name each axis of an array by a letter: components, columns, inputs, or not known."""
    shared = model.describe().get("covariance_type") in ("tied", "known")
    axes = AXES.get(name, "")
    if name == "covariances":
        axes = {1: "k", 3: "kcc"}.get(count, "cc" if shared else "kc")
    elif name == "noise":
        axes = "kc" if count == 2 else "k"
    return axes if len(axes) == count else "?" * count


def _of_array(model: Any, name: str, array: FloatArray, columns: Names) -> list[Quantity]:
    """Numbers of one array by its axes; of a model that nobody knows, by position."""
    axes = _axes_of(model, name, array.ndim)
    inputs = None if columns is None else list(columns)
    if inputs is not None and "i" in axes:
        inputs.pop(model.target)
    words = {"c": columns, "i": inputs}
    square = axes.endswith("cc")
    found = []
    for index in np.ndindex(array.shape):
        places = [str((words.get(a) or range(i + 1))[i]) for a, i in zip(axes, index, strict=True)]
        diagonal = square and index[-1] == index[-2]
        what = SINGULAR.get(name, name)
        if diagonal or (name == "covariances" and not square):
            what, places = "variance", places[:-1] if square else places
        own = "share" if name in SHARES else "positive" if what in POSITIVE else "any"
        alone = name in SHARES and array.shape[-1] == 1
        shown = not alone and not (square and index[-1] < index[-2])
        found.append(Quantity(f"{what}[{', '.join(places)}]" if places else what, own, shown))
    return found


def _behind(model: Any, kinds: Sequence[Quantity], samples: float) -> FloatArray:
    """Rows behind each number. A sample of a Markov chain is a sequence, which begins once."""
    steps = model.length if isinstance(model, HiddenMarkov) else 1.0
    begins = np.array([q.name.startswith("initial[") for q in kinds])
    return np.where(begins, samples, samples * steps)


def on_bound(kinds: Sequence[Quantity], values: FloatArray, rows: FloatArray) -> BoolArray:
    """Shares that are 0 or 1 for lack of half a row: their errors are not those of a maximum."""
    shares = np.array([q.kind == "share" for q in kinds])
    edge = np.minimum(values, 1 - values) * rows < 0.5
    return np.asarray(shares & edge)


# What is told.


@final
@dataclass(frozen=True, eq=False)
class Summary:
    """Estimates with their standard errors: prints as a table, and `table` holds the columns."""

    title: str
    names: tuple[str, ...]
    estimates: FloatArray
    errors: FloatArray
    """NaN for what is fixed, or lies on the bound of what it can be."""
    kinds: tuple[str, ...]
    level: float
    notes: tuple[str, ...] = ()

    @property
    def bounds(self) -> tuple[FloatArray, FloatArray]:
        """Ends of confidence intervals: of log-odds for shares, of logs for positive values."""
        from scipy.special import expit, logit, ndtri

        reach = float(ndtri(0.5 + self.level / 2)) * self.errors
        v, kinds = self.estimates, np.array(self.kinds)
        with np.errstate(all="ignore"):
            ends = []
            for sign in (-1, 1):
                share = expit(logit(v) + sign * reach / (v * (1 - v)))
                positive = v * np.exp(sign * reach / v)
                ends.append(np.select([kinds == "share", kinds == "positive"], [share, positive]))
                plain = kinds == "any"
                ends[-1][plain] = (v + sign * reach)[plain]
        return ends[0], ends[1]

    @property
    def z(self) -> FloatArray:
        """Estimates in standard errors, of what can be 0 in the middle of where it lies."""
        plain = np.array(self.kinds) == "any"
        with np.errstate(all="ignore"):
            return np.where(plain & (self.errors > 0), self.estimates / self.errors, np.nan)

    @property
    def table(self) -> dict[str, list[Any]]:
        """Columns by name; None for what there is not."""
        low, high = self.bounds
        numbers = {
            "estimate": self.estimates,
            "std_err": self.errors,
            "z": self.z,
            "lower": low,
            "upper": high,
        }
        told: dict[str, list[Any]] = {"name": list(self.names)}
        for name, values in numbers.items():
            told[name] = [v if np.isfinite(v) else None for v in values.tolist()]
        return told

    def cells(self) -> list[list[str]]:
        """The rows of the table as text, with the decimals that each error deserves."""
        name, *numbers = self.table.values()
        return [
            [own, *_cells(row)] for own, row in zip(name, zip(*numbers, strict=True), strict=True)
        ]

    def __str__(self) -> str:
        half = 100 * (1 - self.level) / 2
        heads = ["", "coef", "std err", "z", f"[{half:g}%", f"{100 - half:g}%]"]
        columns = [list(column) for column in zip(heads, *self.cells(), strict=True)]
        widths = [max(map(len, column)) for column in columns]
        first = [f"{cell:<{widths[0]}}" for cell in columns[0]]
        rest = [[f"{c:>{w}}" for c in col] for col, w in zip(columns[1:], widths[1:], strict=True)]
        rows = ["  ".join(row) for row in zip(first, *rest, strict=True)]
        line = "=" * len(rows[0])
        return "\n".join([self.title, line, rows[0], "-" * len(line), *rows[1:], line, *self.notes])

    __repr__ = __str__


def _cells(numbers: Sequence[float | None]) -> list[str]:
    """Estimate, error, z and bounds as text."""
    error = numbers[1]
    known = error is not None and 1e-7 < error < 1e7
    decimals = digits(np.array([error])) if known else 0
    told = []
    for place, value in enumerate(numbers):
        if value is None:
            told.append("")
        elif place == 2:
            told.append(f"{value:.2f}")
        else:
            told.append(fixed(value, decimals) if known else f"{value:.4g}")
    return told


def summarise(result: Any, root: FloatArray, level: float) -> Summary:
    """The table of a fitted model."""
    values, moves = spread(result.model, result.statistics, root, flatten)
    known = {} if result.facts is None else result.facts.settings.get("categories", {})
    kinds = quantities(result.model, result.params, result.columns, known)
    found = np.sqrt((moves**2).sum(axis=0))
    behind = _behind(result.model, kinds, result.samples)
    free = (found > 1e-9 * np.abs(values)) & ~on_bound(kinds, values, behind)
    places = np.flatnonzero([q.shown for q in kinds]).tolist()
    shown = sorted(places, key=lambda j: not kinds[j].name.startswith(FIRST))  # stable
    words = result.model.words()
    notes = [
        result.outcome[:1].upper() + result.outcome[1:] + ".",
        "Standard errors follow from the observed information of all rows.",
    ]
    if not free[shown].all():
        notes.append("Without an error: what is fixed, or lies on the bound of what it can be.")
    return Summary(
        f"{words.title}: {result.samples:,.10g} {words.row}s, {len(root)} free parameters",
        tuple(kinds[j].name for j in shown),
        values[shown],
        np.where(free, found, np.nan)[shown],
        tuple(kinds[j].kind for j in shown),
        level,
        tuple(notes),
    )


def spread(
    model: Any, statistics: FloatArray, root: FloatArray, function: Callable[[Any], Any]
) -> tuple[FloatArray, FloatArray]:
    """A function of the user's parameters, flat, and the root of its covariance, by columns."""
    model, statistics = model.streamed(statistics)

    def at(by: FloatArray) -> FloatArray:
        return np.ravel(np.asarray(function(user_at(model, statistics + by)), dtype=np.float64))

    step = _inside(model, statistics, root, ROOT_STEP)
    return at(np.zeros_like(statistics)), _slope(at, root, step)
