"""The contracts: what a model, a compressor, an algorithm and a federation promise each other.

numpy only. Symbols follow the paper (Dieuleveut, Fort, Moulines, Robin, NeurIPS 2021), cited by
algorithm and equation; names in code are words: ``statistics`` for S-hat, ``memory`` for V,
``mean_field`` for h and H, ``innovation`` for Delta.

Arrays may carry leading axes: ``(..., samples, features) -> (..., q)``. One worker and a stack of
a thousand run the same code.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, Self, runtime_checkable

import numpy as np

from emfed.core.errors import SettingsError
from emfed.core.objects import (
    ALONE,
    BoolArray,
    Compressed,
    Crowd,
    FloatArray,
    Form,
    HeldUp,
    IntArray,
    Layout,
    Names,
    Parameters,
    Summaries,
    WorkerCells,
)

__all__ = [
    "ALONE",
    "Algorithm",
    "AssignsRows",
    "BoolArray",
    "Compressed",
    "Compressor",
    "CountsParameters",
    "Crowd",
    "DrawsRows",
    "FillsRows",
    "FloatArray",
    "Form",
    "HasColumns",
    "HeldUp",
    "IdentityMetric",
    "IntArray",
    "Latent",
    "Layout",
    "Metric",
    "Model",
    "MovesComponents",
    "Names",
    "Parameters",
    "Participation",
    "Reduces",
    "ScoresRows",
    "WorkerCells",
    "SimulatesLatents",
    "SplitsComponents",
    "StartsFromClusters",
    "Summaries",
    "ModelWords",
    "plural",
    "free_parameters",
]


class Metric(ABC):
    """An invertible linear map of R^q in which compression acts and omega is measured."""

    @abstractmethod
    def whiten(self, vectors: FloatArray) -> FloatArray:
        """``(..., q)`` into the metric's coordinates."""

    @abstractmethod
    def unwhiten(self, vectors: FloatArray) -> FloatArray:
        """The inverse of `whiten`."""

    @property
    def lightest(self) -> float:
        """How much lighter than the whole its most fragile part is, in (0, 1].

        Noise of variance v in every coordinate moves the parameters of that part by about
        sqrt(v / lightest) of their own spread.
        """
        return 1.0

    @property
    def in_nats(self) -> bool:
        """Whether |v|^2 / 2 is, to second order, what a move v is worth in nats a sample."""
        return True


class IdentityMetric(Metric):
    """The Euclidean metric of R^q, the one of the paper."""

    def whiten(self, vectors: FloatArray) -> FloatArray:
        """Return the vectors as they are."""
        return vectors

    unwhiten = whiten

    @property
    def in_nats(self) -> bool:
        """Lengths have the unit of the statistics."""
        return False


@dataclass(frozen=True)
class ModelWords:
    """What reports, summaries and model cards call a model, its parts, its rows and its score.

    Parameters
    ----------
    name : str
        The model, without an article: "Gaussian mixture with 3 components".
    part : str
        One of the groups of rows that the model consists of, if there are several.
    row : str
        What `Model.log_likelihood` is a mean over.
    score : str
        What that mean is.
    unit : str
        Its unit; empty: it has none.
    meaning : str
        What it says, and whether more of it is better.
    factor : float
        What makes the score of `Model.log_likelihood`, which must rise and may have other units.

    Examples
    --------
    >>> import emfed
    >>> emfed.k_means(3).words().name
    'k-means clustering with 3 clusters'
    """

    name: str
    part: str = "component"
    row: str = "row"
    score: str = "log-likelihood"
    unit: str = "nats"
    meaning: str = "how probable the rows are under the model; higher is better"
    factor: float = 1.0

    @property
    def title(self) -> str:
        """The name as it begins a sentence."""
        return f"{self.name[:1].upper()}{self.name[1:]}"

    @property
    def key(self) -> str:
        """The score's name in tables and JSON."""
        return re.sub(r"\W", "_", self.score)

    @property
    def likelihood(self) -> bool:
        """Whether the score is a log-likelihood, which criteria and standard errors need."""
        return self.unit == "nats"

    @property
    def per_row(self) -> str:
        """The score's unit with what it is of: "nats per row"."""
        return f"{self.unit} per {self.row}".strip()

    def heads(self, parts: int) -> list[str]:
        """A heading for each part: its number, or where there is one, that it is an estimate."""
        return [f"{self.part} {k}" for k in range(parts)] if parts > 1 else ["estimate"]


def plural(count: int, what: str) -> str:
    """A number of things, in words."""
    return f"{count:,} {what}{'s' if count != 1 else ''}"


class Model(ABC):
    """A curved exponential family with latent variables, seen through its statistics.

    A model is immutable. `bind` returns the model that knows what the opening exchange told the
    server (dimensions, origin and scale, constants of T); a model that needs nothing of the kind
    returns itself.

    What is abstract here every model must have; the other methods have a default that fits most.
    What else a model may do is a protocol of its own (`ScoresRows` and the ones after it): a model
    has it by having the methods, and `isinstance` tells.
    """

    @property
    @abstractmethod
    def layout(self) -> Layout:
        """Names and shapes of the statistics."""

    @abstractmethod
    def check(self, data: Any, where: str, columns: Names = None, first: int = 0) -> None:
        """Raise `DataError` naming ``where`` if these rows, from number ``first``, are no good."""

    @property
    def allows_missing(self) -> bool:
        """Whether NaN means a value missing at random; if not, `check` refuses it."""
        return False

    @property
    def row_axes(self) -> int:
        """The axes of one row: columns alone, or 2 of a sequence, which has steps of columns."""
        return 1

    @abstractmethod
    def summary(self, data: Any, weights: Any | None = None) -> dict[str, FloatArray]:
        """What a worker tells once, in the opening exchange: averages over its samples."""

    def combine(self, summaries: Summaries, shares: FloatArray) -> dict[str, FloatArray]:
        """The summary of a union of rows from those of its parts, whose shares sum to one.

        Averages of a union are the parts' averages, weighted; other summaries override it.
        """
        return {name: shares @ values for name, values in summaries.items()}

    @abstractmethod
    def bind(self, summaries: Summaries, counts: IntArray, weights: FloatArray) -> Self:
        """The model with the constants that follow from all workers' summaries."""

    @abstractmethod
    def expected_statistics(self, data: Any, params: Any, weights: Any | None = None) -> FloatArray:
        """s-bar(theta): the (weighted) mean over samples of E[s(y, z) | y; theta]."""

    def group_shares(self, statistics: FloatArray) -> FloatArray:
        """The statistics that are shares of rows, ``(..., groups)``: none may be small."""
        return self.component_shares(statistics)

    def component_shares(self, statistics: FloatArray) -> FloatArray:
        """How much of a row each component has of an average row, ``(..., components)``.

        None where there are no components. Steps of sequences are rows here.
        """
        mass = self.layout.split(statistics).get("mass", statistics[..., :0])
        return mass.reshape(*statistics.shape[:-1], -1)

    @property
    def fixed_data(self) -> bool:
        """Whether T uses constants of the data, so that a stream cannot be fitted."""
        return False

    def streamed(self, statistics: FloatArray) -> tuple[Any, FloatArray]:
        """The model with such constants among its statistics, and these with them at the end."""
        return self, statistics

    @abstractmethod
    def maximize(self, statistics: FloatArray) -> Any:
        """T(s): the parameters that minimise psi + R - <s, phi>."""

    @abstractmethod
    def surrogate(self, statistics: FloatArray, params: Any) -> FloatArray:
        """psi(theta) + R(theta) - <s, phi(theta)>, which `maximize` minimises over theta."""

    @property
    def sweeps(self) -> bool:
        """Whether its pass over rows runs in kernels on a device, for many workers at once."""
        return False

    def origin(self) -> FloatArray | None:
        """Statistics that need not be told, since both ends can derive them; None: there are none.

        A phase that begins there sends no statistics in its first round.
        """
        return None

    def closed_form(self) -> FloatArray | None:
        """Statistics at the optimum, if what `bind` was told says all; None: EM must find them."""
        return None

    @abstractmethod
    def log_likelihood(self, data: Any, params: Any, weights: Any | None = None) -> FloatArray:
        """The (weighted) mean over samples of log p(y; theta), in the user's units."""

    def evaluate(
        self, data: Any, params: Any, weights: Any | None = None
    ) -> tuple[FloatArray, FloatArray, FloatArray]:
        """`expected_statistics`, `log_likelihood`, and the mean entropy of a row's component.

        Models that can do all in one pass override it; the entropy is 0 without components.
        """
        statistics = self.expected_statistics(data, params, weights)
        likelihood = np.asarray(self.log_likelihood(data, params, weights))
        return statistics, likelihood, np.zeros_like(likelihood)

    def penalty(self, params: Any) -> float:
        """R(theta), zero without a prior."""
        return 0.0

    @abstractmethod
    def inside(self, statistics: FloatArray) -> bool:
        """Whether T is defined at these statistics (at all of them, given leading axes)."""

    def protect(self, before: FloatArray, after: FloatArray) -> FloatArray:
        """Statistics to move to instead of ``after``, where a part of them can be saved alone."""
        return after

    def held_up(self, params: Any) -> tuple[HeldUp, ...]:
        """Which rows the model's floor holds up: there the likelihood would have no bound."""
        return ()

    @abstractmethod
    def start(self, seed: int) -> Any:
        """Starting parameters drawn from aggregates only: they reveal no record."""

    @abstractmethod
    def statistics_of(self, params: Any) -> FloatArray:
        """E[s(y, z)] when the model itself, at these parameters, draws y and z."""

    def metric(self, params: Any) -> Metric:
        """The metric to compress in at these parameters; Euclidean unless the model has one."""
        return IdentityMetric()

    def to_user(self, params: Any) -> Any:
        """Parameters in the user's units."""
        return params

    def from_user(self, params: Any) -> Any:
        """Parameters in the units of the statistics."""
        return params

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What was chosen, as plain JSON types; equal descriptions mean equal models."""

    def words(self) -> ModelWords:
        """What reports and summaries call the model: unless it says so itself, as it is known."""
        told = self.describe()
        parts = told.get("n_components", 1)
        many = f" with {plural(parts, 'component')}" if parts > 1 else ""
        name = str(told.get("model", type(self).__name__)).replace("-", " ")
        return ModelWords(name.replace("gaussian", "Gaussian") + many)


@runtime_checkable
class ScoresRows(Protocol):
    """A model that tells the log-likelihood of single rows."""

    def score_samples(self, data: Any, params: Any) -> FloatArray:
        """log p(y; theta) of each row, in the user's units, ``(..., samples)``."""


@runtime_checkable
class AssignsRows(Protocol):
    """A model with components, of which a row is of one."""

    def responsibilities(self, data: Any, params: Any) -> FloatArray:
        """p(component | row), ``(..., samples, components)``."""


@runtime_checkable
class DrawsRows(Protocol):
    """A model that draws rows of its own."""

    def sample(self, params: Any, count: int, seed: int) -> tuple[FloatArray, IntArray]:
        """Rows that the model draws, in the user's units, and the component of each."""


@runtime_checkable
class FillsRows(Protocol):
    """A model that tells what missing values may have been, in the user's units."""

    def impute(self, data: Any, params: Any) -> FloatArray:
        """Rows with missing values replaced by their posterior mean."""

    def draw(self, data: Any, params: Any, draws: int, seed: int) -> FloatArray:
        """Random completions from the posterior, ``(draws, rows, columns)``."""

    def intervals(self, data: Any, params: Any, level: float) -> tuple[FloatArray, FloatArray]:
        """Ends of central predictive intervals; where a value was seen, both ends are it."""


@runtime_checkable
class StartsFromClusters(Protocol):
    """A model that k-means can start."""

    @property
    def n_components(self) -> int:
        """The number of components."""

    def clusters(self, count: int) -> Any:
        """The k-means of so many clusters that can start this bound model; None: there is none."""

    def start_at(self, mass: FloatArray, centres: FloatArray, spread: FloatArray) -> Any:
        """Starting parameters from clusters: masses, centres, and the variances within them."""

    def rows_at(self, points: FloatArray) -> FloatArray:
        """Rows in the user's units, near points in the frame of its k-means."""

    @property
    def moment_of_rows(self) -> FloatArray | None:
        """The second moment of all rows in that frame, if the opening told it: ``(d, d)``.

        ``(d,)`` where it told those of columns alone.
        """


@runtime_checkable
class SplitsComponents(Protocol):
    """A model that can put a component without rows to use."""

    def split(self, statistics: FloatArray, empty: BoolArray, attempt: int) -> FloatArray:
        """Statistics whose ``empty`` components are halves of others, as wide together as before.

        Each ``attempt`` splits others than the last.
        """


@runtime_checkable
class Reduces(Protocol):
    """A model whose EM crawls in directions that the statistics tell beside the parameters."""

    def reduced(self, statistics: FloatArray) -> FloatArray:
        """Statistics that say the same rows, where T leads farther; itself at a fixed point."""


@runtime_checkable
class MovesComponents(Protocol):
    """A model whose fits may end far from the best, and can be led on from there."""

    def moved(self, statistics: FloatArray, attempt: int) -> FloatArray | None:
        """Statistics with one component elsewhere, where it may be worth more; None: there are
        too few. Each ``attempt`` tries another place."""

    def cost(self, statistics: FloatArray) -> float:
        """What a fit that ended here has not explained: less is better."""


@runtime_checkable
class SimulatesLatents(Protocol):
    """A model whose E-step can be a mean over draws of the latent variable."""

    @property
    def latent_size(self) -> int:
        """Uniforms that one draw of a row's z takes."""

    def simulated_statistics(
        self, data: Any, params: Any, uniforms: FloatArray, weights: Any | None = None
    ) -> FloatArray:
        """Like `expected_statistics`, E[s(y, z) | y] replaced by a mean over draws of z.

        ``uniforms`` are ``(..., samples, draws * latent_size)``.
        """


@runtime_checkable
class CountsParameters(Protocol):
    """A model that AIC, BIC and ICL can judge."""

    def free_parameters(self) -> int:
        """How many numbers of theta can be chosen freely."""
        ...


@runtime_checkable
class HasColumns(Protocol):
    """A model of rows with a fixed number of columns."""

    @property
    def n_features(self) -> int:
        """The number of columns, once it is bound."""
        ...


@runtime_checkable
class HoldsSequences(Protocol):
    """A model whose samples are sequences of rows."""

    @property
    def length(self) -> float:
        """The mean number of rows in a sequence, once it is bound."""
        ...


@runtime_checkable
class NamesColumns(Protocol):
    """A model that may name some columns of a table, and learns of the others."""

    def among(self, names: Sequence[str]) -> Any:
        """The model for a table with these columns."""
        ...


@runtime_checkable
class HidesValues(Protocol):
    """A model that can be fitted without some values, and judged by them.

    Hidden, its ``evaluate`` tells their mean squared error in place of an entropy.
    """

    def hiding(self, share: float) -> Any:
        """The model whose fit does not see a share of the values."""
        ...


def free_parameters(model: Any) -> int:
    """What AIC, BIC and ICL charge a model for, or words that it does not say."""
    if isinstance(model, CountsParameters):
        return model.free_parameters()
    raise SettingsError(
        f"no AIC, BIC or ICL: {type(model).__name__} has no free_parameters(). Compare the "
        f"{model.words().score} of rows that were left out of the fit, by log_likelihood()."
    )


class Compressor(ABC):
    """An unbiased random operator on R^q with E|Q(x) - x|^2 <= omega |x|^2 (assumption A6).

    Pure and vectorised: randomness comes in as uniforms on [0, 1), so both ends of a link can
    derive it from the shared seed.
    """

    @abstractmethod
    def draws(self, q: int) -> int:
        """How many uniforms one vector of dimension q needs."""

    @abstractmethod
    def compress(self, vectors: FloatArray, uniforms: FloatArray) -> Compressed:
        """``(..., q)`` and ``(..., draws(q))`` to a small discrete object."""

    @abstractmethod
    def decompress(self, message: Compressed, uniforms: FloatArray, q: int) -> FloatArray:
        """The vectors Q(x), ``(..., q)``."""

    @abstractmethod
    def form(self, q: int) -> Form:
        """How many reals and symbols a message of dimension q has, and how large symbols get."""

    def dither(self, uniforms: FloatArray, q: int) -> FloatArray | None:
        """The dither u in [-1/2, 1/2) of each symbol, where the receiver knows it; else None.

        A symbol is then about round(x + u) for some x that is small and symmetric about zero.
        """
        return None

    @abstractmethod
    def omega(self, q: int) -> float:
        """The variance constant, exact or the tightest bound known for every x in R^q."""

    def rate(self, message: Compressed, uniforms: FloatArray, q: int) -> FloatArray:
        """The memory rate alpha that goes with each message, as both ends know it."""
        return np.full(message.reals.shape[:-1], 1 / (1 + self.omega(q)))

    def variance(self, vectors: FloatArray) -> FloatArray | None:
        """E|Q(x) - x|^2 exactly, for each vector, where it has a closed form."""
        return None

    def resolve(self, layout: Layout) -> Compressor:
        """The operator with blocks named by the layout turned into sizes."""
        return self

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What was chosen, as plain JSON types."""

    @classmethod
    @abstractmethod
    def examples(cls) -> Iterator[Compressor]:
        """Instances that the contract tests try."""


Latent = Callable[[IntArray, int, int], FloatArray]
"""(workers, first row, rows) to the uniforms of a simulated E-step, ``(workers, rows, ...)``."""


class Algorithm(ABC):
    """What makes the rounds of a fit, as plain settings."""

    @property
    def tells_gains(self) -> bool:
        """Whether a round tells, free of noise that matters, what an EM step from there gains."""
        return False

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What was chosen, as plain JSON types."""


class Participation(ABC):
    """Who is asked in a round, and with which probability each worker is included."""

    @abstractmethod
    def draw(self, seed: int, round_: int, n: int) -> IntArray:
        """Sorted worker indices of this round."""

    @abstractmethod
    def probabilities(self, workers: IntArray, n: int) -> FloatArray:
        """p_i of these workers."""

    @abstractmethod
    def describe(self) -> dict[str, Any]:
        """What was chosen, as plain JSON types."""
