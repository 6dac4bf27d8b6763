"""Mixtures whose columns each have a family of their own: latent class analysis and its kin.

Given the component, columns are independent, each of a registered family. A value that is missing
(NaN) at random simply does not count, exactly. Statistics are ``mass``, ``moments`` (responsibility
times the statistics of each column) and ``observed`` (the mass of each column).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Self, final

import numpy as np
from array_api_compat import array_namespace, device

from emfed.core.errors import SettingsError, check_count, check_range, check_type, known
from emfed.core.protocols import (
    BoolArray,
    FloatArray,
    HeldUp,
    IntArray,
    Layout,
    ModelWords,
    Names,
    Summaries,
    plural,
)
from emfed.core.registry import register_model, stored
from emfed.core.streams import Purpose, normal_row
from emfed.models import emissions
from emfed.models.clusters import Clusters
from emfed.models.column_metric import ColumnMetric
from emfed.models.columns import ColumnParameters, Columns
from emfed.models.component_summaries import Portrait, column_portrait
from emfed.models.components import (
    SMALLEST_MASS,
    check_rows_suffice,
    keep_dying,
    normalised,
    split_leaning,
)
from emfed.models.devices import MOST_COMPONENTS, Features, Pass, Ragged, written
from emfed.models.imputing import (
    draw_columns,
    interval_columns,
    mean_columns,
    sample_columns,
)
from emfed.models.mixture import MixtureModel, to_numpy
from emfed.models.parameters import Frame
from emfed.models.rows import check_table

ALONG = 0.5
"""Standard deviations of a column from its mean at which components begin that had no rows, where
one had all of them. Not tuned: farther ones may leave all rows to one again."""


@final
@dataclass(frozen=True, init=False)
class MixedParameters(ColumnParameters):
    """The parameters of a mixture over columns of several families.

    Parameters
    ----------
    weights : array of shape (K,)
        The shares of the components.
    families : mapping of str to array
        The parameters of the columns of each family, under its name and in the order of the table:
        (K, c) where a family has one parameter, (K, c, 2) where it has two, such as mean and
        variance. ``categorical`` has the probabilities of one column after the other.
    **more : array
        The same by keywords.

    Examples
    --------
    >>> from emfed.models import MixedParameters
    >>> MixedParameters(weights=[0.4, 0.6], poisson=[[2.0], [7.0]]).poisson.shape
    (2, 1)
    """

    weights: FloatArray

    def __init__(
        self, weights: Any, families: Mapping[str, Any] | None = None, **more: Any
    ) -> None:
        super().__init__({**(families or {}), **more}, weights=weights)


@stored("mixed-mixture")
@final
@dataclass(frozen=True, eq=False)
class MixedMixture(MixtureModel):
    """A mixture over a table of mixed types.

    `emfed.mixed_mixture` makes one, and says what it takes.

    Examples
    --------
    >>> import emfed
    >>> emfed.mixed_mixture(2, "poisson").n_components
    2
    """

    n_components: int
    columns: Columns
    weight_concentration: float = 1.0
    prior_rows: float = 0.0
    samples: int | None = None

    def __post_init__(self) -> None:
        check_count("n_components", self.n_components)
        check_range("weight_concentration", self.weight_concentration, 1, np.inf, open_high=True)
        check_range("prior_rows", self.prior_rows, 0, np.inf, open_high=True)

    @property
    def allows_missing(self) -> bool:
        """NaN is a missing value, unless the user said that there is none."""
        return self.columns.missing

    @property
    def _known(self) -> int:
        return known(self.samples)

    @property
    def n_features(self) -> int:
        return self.columns.count

    @cached_property
    def layout(self) -> Layout:
        """``mass``, ``moments`` and, where values are missing, ``observed``."""
        self._known  # noqa: B018 (raises if unbound)
        k, (moments, masses) = self.n_components, self.columns.widths
        fields: list[tuple[str, tuple[int, ...]]] = [("mass", (k,)), ("moments", (k, moments))]
        return Layout((*fields, ("observed", (k, masses))) if masses else tuple(fields))

    def among(self, names: Sequence[str]) -> Self:
        """The model for a table with these columns, of which ``families`` may name the exceptions
        alone."""
        return dataclasses.replace(self, columns=self.columns.among(names))

    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        check_table(data, where, self.columns.width)
        self.columns.fit_to(data.shape[-1]).check(data, where, columns, first)

    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        return self.columns.fit_to(data.shape[-1]).summary(data, weights)

    def combine(self, summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
        return self.columns.fit_to(summaries["mean"].shape[-1]).combine(summaries, shares)

    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        """The frame of the columns, and the number of samples."""
        samples = check_rows_suffice(self.n_components, counts)
        columns = self.columns.fit_to(summaries["mean"].shape[-1]).bind(summaries, weights)
        return dataclasses.replace(self, columns=columns, samples=samples)

    # The E-step.

    @property
    def feature_count(self) -> int:
        return sum(self.columns.widths)

    def features(self, xp: Any, rows: Any) -> Any:
        """Statistics of each column, zero where it is missing; then what was seen."""
        return self.columns.features(xp, rows)

    def natural(self, params: MixedParameters) -> tuple[FloatArray, FloatArray]:
        intercept, slopes = self.columns.natural(params)
        return np.log(params.weights) + intercept, slopes

    def carrier(self, params: MixedParameters) -> Callable[[Any, Any], Any]:
        return lambda xp, features: 0.0

    def base(self, xp: Any, rows: Any) -> Any:
        return self.columns.base(xp, rows)

    # Rows on a GPU: the features of all columns are written down once, as a table.

    @property
    def sweeps(self) -> bool:
        return self.n_components <= MOST_COMPONENTS

    def as_pass(self, params: MixedParameters, whole: bool = False) -> Pass:
        c, slopes = self.natural(params)
        frame = np.zeros(self.feature_count), np.ones(self.feature_count)
        return Pass(Features(*frame, "none"), c, slopes)

    def tables(self, rows: Ragged) -> Iterator[Ragged]:
        key = ("features", *self.columns.key)
        return written(rows, key, self.feature_count, self.features)

    def _bases(self, rows: Ragged) -> Any:
        """`base` of every row of the tensor, where the rows are."""
        key = ("base", *self.columns.key)
        if key not in rows.memo:
            xp = array_namespace(rows.rows)
            nothing = xp.zeros(len(rows.rows), dtype=xp.float64, device=device(rows.rows))
            rows.memo[key] = nothing + self.base(xp, rows.rows)
        return rows.memo[key]

    def carried(self, params: MixedParameters, rows: Ragged) -> FloatArray:
        return rows.sums_of(self._bases(rows))

    def carried_whole(self, params: MixedParameters, rows: Ragged) -> FloatArray:
        return to_numpy(self._bases(rows))

    def assemble(self, mass: FloatArray, moments: FloatArray, extra: Any = None) -> FloatArray:
        """Mass, moments and observed masses."""
        width = self.columns.widths[0]
        parts = {"mass": mass, "moments": moments[..., :width], "observed": moments[..., width:]}
        return self.layout.join(parts)

    # The M-step.

    @property
    def _priors(self) -> tuple[float, float]:
        """What the priors add to each mass, and to each component's rows; over N."""
        return (self.weight_concentration - 1) / self._known, self.prior_rows / self._known

    def _split(self, statistics: FloatArray) -> tuple[FloatArray, FloatArray, FloatArray]:
        parts = self.layout.split(np.asarray(statistics, dtype=np.float64))
        mass = parts["mass"]
        return mass, parts["moments"], parts.get("observed", np.empty((*mass.shape, 0)))

    def group_shares(self, statistics: FloatArray) -> FloatArray:
        """Masses, what was seen of each column, and each code, by component."""
        mass, moments, observed = self._split(statistics)
        seen = observed.reshape(*mass.shape[:-1], -1)
        codes = emissions.code_shares(self.columns, mass, moments, observed)
        return np.concatenate([mass, seen, codes], axis=-1)

    def maximize(self, statistics: FloatArray) -> MixedParameters:
        """T(s): each column by itself."""
        pseudo, prior = self._priors
        mass, moments, observed = self._split(statistics)
        arrays = emissions.estimate(self.columns, mass, moments, observed, prior)
        return MixedParameters(weights=normalised(mass, pseudo), families=arrays)

    def surrogate(self, statistics: FloatArray, params: MixedParameters) -> FloatArray:
        mass, moments, observed = self._split(statistics)
        value = -(mass * np.log(params.weights)).sum(axis=-1)
        value = value + emissions.cross_entropy(self.columns, params, mass, moments, observed)
        return value + self.penalty(params)

    def penalty(self, params: MixedParameters) -> float:
        """Dirichlet on the weights, and the conjugate priors of the columns."""
        pseudo, prior = self._priors
        value = -pseudo * float(np.log(params.weights).sum()) if pseudo else 0.0
        return value + (emissions.penalty(self.columns, params, prior) if prior else 0.0)

    def inside(self, statistics: FloatArray) -> bool:
        """Positive masses, and moments that the families can have."""
        if not np.all(np.isfinite(statistics)):
            return False
        mass, moments, observed = self._split(statistics)
        if np.any(mass < SMALLEST_MASS):
            return False
        return emissions.defined(self.columns, mass, moments, observed, self._priors[1])

    def protect(self, before: FloatArray, after: FloatArray) -> FloatArray:
        """Components of less than one sample do not hold up the others, nor do impossible sums."""
        kept = keep_dying(self.layout, before, after, self._known)
        return emissions.possible(self.columns, self.layout, before, kept)

    def split(self, statistics: FloatArray, empty: BoolArray, attempt: int) -> FloatArray:
        """Halves that lean; where one component has all rows, components along a column of them.

        That is the column which varies most beside what its family allows, then the next.
        """
        if (~empty).sum() > 1:
            return split_leaning(self.layout, statistics, empty, attempt, self.inside)
        k, params = self.n_components, self.maximize(statistics)
        excess = emissions.excess(self.columns, params, int(np.argmin(empty)))
        column = np.argsort(-excess, kind="stable")[attempt % len(excess)]
        centres = np.zeros((k, len(excess)))
        centres[:, column] = np.linspace(-ALONG, ALONG, k)
        begun = self.start_at(np.full(k, 1 / k), centres, np.ones(len(excess)))
        return self.statistics_of(begun)

    def held_up(self, params: MixedParameters) -> tuple[HeldUp, ...]:
        return emissions.held_up(self.columns, params, params.weights)

    def statistics_of(self, params: MixedParameters) -> FloatArray:
        """pi times the expected statistics of each column, as much missing as in the data."""
        moments, observed = emissions.expected(self.columns, params, params.weights)
        parts = {"mass": params.weights, "moments": moments, "observed": observed}
        return self.layout.join(parts)

    def metric(self, params: MixedParameters) -> ColumnMetric:
        """Every statistic in units of its spread."""
        return ColumnMetric.at(
            self.columns, self.layout, params, params.weights, samples=self._known
        )

    # Starts and units.

    def start(self, seed: int) -> MixedParameters:
        """Around the parameters of all data; equal weights."""
        k = self.n_components
        size = k * self.columns.widths[0]
        draws = normal_row(seed, 0, Purpose.START, size)
        arrays = emissions.begin(self.columns, k, draws)
        return MixedParameters(weights=np.full(k, 1 / k), families=arrays)

    def clusters(self, count: int) -> Clusters | None:
        """All columns in standard deviations, NaN for the mean; None if all are categories."""
        known = self.columns.constants
        if all(group.family.nominal for group in self.columns.groups):
            return None
        scale = known.spread.copy()
        scale[[j for j, f in enumerate(self.columns.families) if isinstance(f, str)]] = np.inf
        frame = Frame(known.mean, scale)
        return dataclasses.replace(Clusters.within(frame, count, self._known), fill=True)

    def start_at(self, mass: FloatArray, centres: FloatArray, spread: FloatArray) -> Any:
        """Families at the clusters' centres."""
        return MixedParameters(
            weights=mass, families=emissions.begin_at(self.columns, centres, spread)
        )

    @property
    def moment_of_rows(self) -> FloatArray | None:
        return None

    def rows_at(self, points: FloatArray) -> FloatArray:
        """Values that the families can give, exposures those of a typical row."""
        known = self.columns.constants
        return self.columns.nearest(points * known.spread + known.mean)

    def to_user(self, params: MixedParameters) -> MixedParameters:
        return MixedParameters(
            weights=params.weights, families=emissions.to_user(self.columns, params)
        )

    def from_user(self, params: MixedParameters) -> MixedParameters:
        """Check parameters given in the user's units and bring them into the frame."""
        check_type("start", params, MixedParameters, "MixedParameters(weights=..., gaussian=...)")
        k, weights = self.n_components, params.weights
        good = weights.shape == (k,) and np.all(weights > 0)
        if not good or abs(float(weights.sum()) - 1) > 1e-6:
            raise SettingsError(f"start weights must be {k} positive numbers with sum 1.")
        arrays = emissions.from_user(self.columns, params, k)
        return MixedParameters(weights=weights, families=arrays)

    def by_column(self, params: MixedParameters) -> dict[str, Mapping[str, FloatArray]]:
        """A result's parameters by the name of the column, ``(K, ...)`` each."""
        return emissions.by_column(self.columns, params)

    def free_parameters(self) -> int:
        """Weights, and what each column's family has for each component."""
        return self.n_components - 1 + self.n_components * self.columns.free_parameters()

    def sample(self, params: MixedParameters, count: int, seed: int) -> tuple[FloatArray, IntArray]:
        """A component for each row, then each column; exposures are those of a typical row."""
        return sample_columns(self.columns, self.to_user(params), params.weights, count, seed)

    def portrait(self, params: MixedParameters, names: Sequence[str]) -> Portrait:
        return column_portrait(params.weights, self.columns, params, names)

    def words(self) -> ModelWords:
        families = self.columns.family_words()
        parts = plural(self.n_components, "component")
        if len(families) > 1:
            kind = "mixture" if self.n_components > 1 else "model"
            many = f" with {parts}" if self.n_components > 1 else ""
            listed = ", ".join(families) if len(families) < 4 else f"{len(families)} families"
            return ModelWords(f"{kind} of mixed columns ({listed}){many}")
        kind = f"mixture with {parts}" if self.n_components > 1 else "model of independent columns"
        return ModelWords(f"{families[0]} {kind}")

    def describe(self) -> dict[str, Any]:
        return {
            "model": "mixed-mixture",
            "n_components": self.n_components,
            "families": self.columns.describe(),
            "missing": self.columns.missing,
            "floor": self.columns.floor,
            "weight_concentration": self.weight_concentration,
            "prior_rows": self.prior_rows,
        }

    # Missing values.

    def impute(self, data: Any, params: MixedParameters) -> FloatArray:
        """Rows with missing values replaced by their posterior mean (categories: the likeliest)."""
        shares = self.responsibilities(data, params)
        return mean_columns(self.columns, self.to_user(params), to_numpy(data), shares)

    def draw(self, data: Any, params: MixedParameters, draws: int, seed: int) -> FloatArray:
        shares = self.responsibilities(data, params)
        user = self.to_user(params)
        return draw_columns(self.columns, user, to_numpy(data), shares, draws, seed)

    def intervals(
        self, data: Any, params: MixedParameters, level: float
    ) -> tuple[FloatArray, FloatArray]:
        """Ends of central intervals; of categories there are none, and NaN stays."""
        shares = self.responsibilities(data, params)
        user = self.to_user(params)
        return interval_columns(self.columns, user, to_numpy(data), shares, level)


@register_model("mixed-mixture")
def mixed_mixture(
    n_components: int,
    families: Mapping[str, Any] | Sequence[Any] | str,
    *,
    missing: bool = True,
    floor: float = 1e-6,
    weight_concentration: float = 1.0,
    prior_rows: float = 0.0,
) -> MixedMixture:
    """Make a mixture over columns that each have a family of their own; NaN is a missing value.

    Parameters
    ----------
    n_components : int
        The number of components.
    families : str, sequence or mapping
        One family for all columns, a list with one for each column, or a dict that names the
        columns which are not Gaussian. A family is a name in `emfed.models.FAMILIES` or, where it
        has settings, its class: ``Categorical(n)`` (codes 0 to n - 1), ``Poisson(exposure=column)``
        with "exposure" for that column.
    missing : bool
        Whether NaN is a missing value; otherwise it is refused, and the mass of each column need
        not travel.
    floor : float
        What keeps variances, rates and probabilities off zero, as a share of those of all data.
    weight_concentration : float
        The concentration, at least 1, of a symmetric Dirichlet prior on the weights; 1 is none.
    prior_rows : float
        Rows with the average statistics of all data that are added to every component: the
        conjugate prior.

    Returns
    -------
    MixedMixture
        The model, not bound to data.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> rows = np.array([[1.0, 0], [1.2, 0], [0.9, 1], [7.0, 1], [7.1, 1], [6.8, np.nan]])
    >>> model = emfed.mixed_mixture(2, ["gaussian", "bernoulli"], prior_rows=1)
    >>> result = emfed.fit(model, [rows[::2], rows[1::2]], "em", seed=0, rounds=20)
    >>> result.params.weights.shape
    (2,)
    """
    check_range("floor", floor, 0, 0.1)
    columns = Columns.of(families, floor, missing)
    return MixedMixture(n_components, columns, weight_concentration, prior_rows)
