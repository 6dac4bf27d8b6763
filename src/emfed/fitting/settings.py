"""All that a fit needs to know, in one place: `fit`, the estimators, the command line and
``run.toml`` translate into it, so one word means one thing everywhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from math import inf
from typing import Any, Literal, final

import numpy as np

from emfed.algorithms import EM, AutoEM, Bernoulli, Everyone, FedEM, VRFedEM
from emfed.artifacts.result import CRITERIA
from emfed.compressors import SubtractiveDithering
from emfed.core.errors import SettingsError, check_count, check_range, check_type
from emfed.core.privacy import Privacy
from emfed.core.protocols import (
    Algorithm,
    FloatArray,
    HidesValues,
    IntArray,
    Model,
    Names,
    Participation,
)
from emfed.core.registry import MODELS
from emfed.core.streams import check_seed
from emfed.fitting.stopping import Stop
from emfed.models.clusters import Clusters

Criterion = Literal["aic", "bic", "icl", "held-out"]
HELD_OUT = 0.1
"""The share of values that candidates do not see where they are chosen by their error on them. Not
tuned: the customary tenth."""
ROUNDS = 1000
"""At most, unless told otherwise."""
TOL = 1e-6
"""Nats per row that may be left to gain. Of one worker alone it was 1e-4 once: of 234 fits on ten
tables 14 then rested beside a saddle, by up to 0.055 nats; none did with 1e-6, and rounds were 1.4
times as many."""
FIELD_TOL = 1e-4
"""|H|^2 for a tolerance of one nat, where an algorithm's steps do not tell what they gain: the gap
is |H|^2 over the share of it that one step of EM closes."""
PATIENCE = 3
"""Rounds in a row that a worker may miss. The memory of an absent worker is a constant force: of
three sites one that left after round 3 ends the run at -19.6 nats a row in place of -3.69."""
STARTS = ("auto", "merge", "k-means", "moments", "points")


@final
@dataclass(frozen=True, eq=False)
class FitSettings:
    """What is fitted, from where, by what, until when: every setting of a fit with its default.

    Parameters
    ----------
    model : Model or callable
        A model, or a function from a number of components to one.
    n_components : str, int, iterable of int or None
        Numbers of components to compare: a number, a collection, or a range "2:8" with both ends.
        None stands for what the model says.
    criterion : {"bic", "aic", "icl", "held-out"}
        What chooses among them. "held-out" is for models that can hide values (row-owner): all are
        fitted without a tenth of the values, the one with the least squared error on them is
        chosen, and then it is fitted to all.
    algorithm : Algorithm or str
        "auto" (the pooled answer for few bytes; alone, EM with long steps), "em", "FedEM",
        "VR-FedEM", or an `Algorithm`.
    follow_em : bool
        Whether "auto" takes little noise and no momentum, and so ends where EM ends.
    start : str or parameters
        Parameters in the user's units, or how to find them: "merge" (workers' own clusters are
        merged), "k-means" (of all rows, by sums alone), "moments", "points" (rows leave their
        workers), or "auto": k-means where the model has clusters, else moments. Without masks,
        merged starts take its place from 50 workers on, and compete if ``n_init`` is above 1.
    n_init : int
        The number of starts that compete; the best is kept.
    moves : int
        How often in a row a component is moved in vain, after a fit by fewer than 50 workers with
        "auto" has converged: two that lose least as one are merged and another is split, and what
        gains is kept. With 0 a fit ends where its start leads.
    start_statistics : {"expected", "parameters"} or None
        Whether S_0 is the expected statistics at given parameters (the paper), or what the
        parameters imply, which sends nothing.
    participation : Participation, float or None
        Who takes part in a round: None is everyone, a number the probability of each. Masked sums
        over a network are those of everyone.
    weights : {"samples", "uniform"} or sequence of float
        What workers count for: their rows (the pooled optimum), all alike (the paper), or, without
        masks, one number for each.
    tol : float or None
        Nats per row that may be left to gain where a fit has converged. None stands for 1e-6;
        with 0 rounds are made until another limit is met.
    field_tol : float or None
        The same by |H|^2, in three rounds in a row.
    rounds : int or None
        The largest number of rounds; the first limit that is met ends the fit.
    epochs : float or None
        The most conditional expectations, in units of all rows.
    max_bytes : int or None
        The most bytes that all workers send and are sent.
    seconds : float or None
        The most seconds of computing.
    seed : int
        The seed of starts, compression, batches and participation. The noise of a private fit does
        not follow from it.
    columns : sequence of str or None
        The names of the columns to use, in this order; None stands for all.
    retries : int
        How often a worker that stays silent is asked again in a round.
    patience : int or None
        How often in a row a worker is asked in vain, while others answer, before it is away: the
        fit goes on with the rows of those who are here, and counts it again once it answers. With
        None the fit waits for it, with what it told last.
    accelerate : bool
        Whether EM that watches its log-likelihood takes long steps.
    drop : bool
        Whether candidates that will hardly be chosen leave the run early.
    scores : bool
        Whether every worker tells at the end how well the model fits its rows.
    errors : bool
        Whether everyone is asked at the end for what standard errors follow from: as many exact
        statistics as the model has free parameters.
    validate : bool
        Whether the fit ends with a validation: models without some of the workers, and rows that
        each worker holds out (`Result.validation`).
    likelihood : bool
        Whether everyone is asked at the end for the log-likelihood, if nobody told it.
    masks : bool or None
        Whether workers mask their numbers: each rounds to a common lattice and, between machines,
        adds masks that cancel in the sum. A server that follows the protocol then learns the sum
        alone; one that lies can still read rows (docs/what-the-server-learns.md). With None
        it is so between machines with three sites or more, and nowhere else. In a private fit three
        workers or more mask unless it is False; without masks each adds all of the noise by itself.
    epsilon : float or None
        What the whole fit may tell of any one row, at most (differential privacy, with one row
        more or less): 1 is strong, 10 is weak. With None sums are exact. See docs/private-runs.md.
    delta : float
        The probability with which it may tell more; well below one in the number of rows.
    noise_seed : int or None
        With ``epsilon``, and where all workers are in this process: the number that the noise
        follows from, so that the same fit has the same noise. Whoever knows it can take the noise
        off, so the result says "not private" and has no epsilon. With None noise follows from a key
        that the operating system draws and nothing shows.

    Raises
    ------
    SettingsError
        If a setting is out of its range, or settings contradict each other.

    Examples
    --------
    >>> import emfed
    >>> settings = emfed.fitting.FitSettings(emfed.gaussian_mixture(2), n_components="1:3")
    >>> settings.numbers, settings.but(rounds=5).rounds
    ((1, 2, 3), 5)
    """

    model: Model | Callable[[int], Model]
    n_components: Any = None
    criterion: Criterion = "bic"
    algorithm: Algorithm | str = "auto"
    follow_em: bool = False
    start: Any = "auto"
    n_init: int = 1
    moves: int = 3
    start_statistics: Literal["expected", "parameters"] | None = None
    participation: Participation | float | None = None
    weights: str | Sequence[float] | FloatArray = "samples"
    tol: float | None = None
    field_tol: float | None = None
    rounds: int | None = None
    epochs: float | None = None
    max_bytes: int | None = None
    seconds: float | None = None
    seed: int = 0
    columns: Names = None
    retries: int = 0
    patience: int | None = PATIENCE
    accelerate: bool = True
    drop: bool = True
    scores: bool = False
    errors: bool = False
    validate: bool = False
    likelihood: bool = False
    masks: bool | None = None
    epsilon: float | None = None
    delta: float = 1e-6
    noise_seed: int | None = None
    numbers: tuple[int, ...] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", int(check_seed(self.seed)))
        if self.start is None:
            object.__setattr__(self, "start", "auto")
        check_count("n_init", self.n_init)
        check_count("moves", self.moves, 0)
        check_count("retries", self.retries, 0)
        if self.patience is not None:
            check_count("patience", self.patience)
        if self.criterion not in (*CRITERIA, "held-out"):
            known = ", ".join((*CRITERIA, "held-out"))
            raise SettingsError(f"criterion must be one of {known}; got {self.criterion!r}.")
        if self.tol is not None:
            check_range("tol", self.tol, 0, inf, open_high=True)
        if self.start_statistics not in (None, "expected", "parameters"):
            raise SettingsError(
                f"start_statistics must be 'expected' or 'parameters'; got "
                f"{self.start_statistics!r}."
            )
        if isinstance(self.start, str) and self.start not in STARTS:
            raise SettingsError(f"start must be parameters or one of {STARTS}; got {self.start!r}.")
        if self.n_init > 1 and not isinstance(self.start, str):
            raise SettingsError("n_init > 1 needs a start by name, such as start='k-means'.")
        if self.n_components is not None:
            object.__setattr__(self, "numbers", tuple(read_range(self.n_components)))
        elif not isinstance(self.model, Model):
            check_type("model", self.model, Model, "gaussian_mixture(3)")
        if self.epsilon is not None:
            self._check_private()
        if self.noise_seed is not None:
            object.__setattr__(self, "noise_seed", check_seed(self.noise_seed, "noise_seed"))
            if self.epsilon is None:
                raise SettingsError(
                    "noise_seed is what the noise of a fit with epsilon follows from, and this fit "
                    "has none: leave noise_seed out, or give an epsilon."
                )
        check_type("participation", self.who(), Participation, "Bernoulli(0.5)")
        self.limits  # noqa: B018 (it checks the algorithm and the limits)

    def _check_private(self) -> None:
        """Refuse what a private fit has no answer to."""
        self.privacy  # noqa: B018 (it checks epsilon and delta)
        told = {
            "algorithm": self.algorithm == "auto",
            "start": self.start == "auto",
            "participation": isinstance(self.who(), Everyone),
            "weights": self.weights == "samples",
            "errors": not self.errors,
            "validate": not self.validate,
        }
        for name, fine in told.items():
            if not fine:
                raise SettingsError(
                    f"epsilon and {name} do not go together: a private fit spends its budget on "
                    f"rounds of its own. Leave {name} out, or epsilon."
                )
        if self.numbers is not None and len(self.numbers) > 1 and self.criterion != "bic":
            raise SettingsError(
                f"a private fit chooses the number of components by BIC; got {self.criterion!r}: "
                "leave criterion out."
            )

    @property
    def privacy(self) -> Privacy | None:
        """What the fit may tell of any one row; None: that is not bounded."""
        return None if self.epsilon is None else Privacy(float(self.epsilon), float(self.delta))

    # What the words mean.

    @property
    def held_out(self) -> bool:
        """Whether candidates are compared by their error on values that their fits do not see."""
        several = self.numbers is not None and len(self.numbers) > 1
        return several and self.criterion == "held-out"

    def candidates(self) -> tuple[Model, ...]:
        """The models that are compared: one, or one for each number of components.

        If some values are held out, the models that do not see them come first.
        """
        if self.numbers is None:
            assert isinstance(self.model, Model)
            made: tuple[Model, ...] = (self.model,)
        else:
            made = tuple(with_components(self.model, k) for k in self.numbers)
        check_type("model", made[0], Model, "gaussian_mixture(3)")
        if len(made) > 1 and isinstance(made[0], Clusters):  # distances only fall with the number
            raise SettingsError(
                "k-means has no likelihood to compare n_components by: give one number. A Gaussian "
                "mixture with covariance_type='spherical' takes a range."
            )
        if self.held_out:
            hiding = [model for model in made if isinstance(model, HidesValues)]
            if len(hiding) < len(made):
                raise SettingsError(
                    "criterion 'held-out' is for ranks of low-rank imputation (row-owner), whose "
                    f"fit can hide values; {type(made[0]).__name__} cannot: use 'bic'."
                )
            made = (*(model.hiding(HELD_OUT) for model in hiding), *made)
        return tuple(without_constants(model) for model in made) if self.validate else made

    def who(self) -> Participation:
        """Who takes part in a round."""
        return participants(self.participation)

    def method(self, workers: int) -> Algorithm:
        """The algorithm, for so many workers; the one meaning of ``"auto"``."""
        given = self.algorithm
        if self.follow_em and not self.is_auto:
            raise SettingsError(
                f"follow_em goes with algorithm 'auto'; got {given!r}: leave one of the two out "
                "(of an algorithm of your own, AutoEM(follow_em=True))."
            )
        if not isinstance(given, str):
            check_type("algorithm", given, Algorithm, "FedEM(Dithering(levels=4))")
            return given
        named: dict[str, Algorithm] = {
            "auto": AutoEM(follow_em=bool(self.follow_em)),
            "em": EM(),
            "FedEM": FedEM(SubtractiveDithering(0.25), in_metric=True),
            "VR-FedEM": VRFedEM(SubtractiveDithering(0.25), in_metric=True, batch_size=64),
        }
        found = {name.lower(): made for name, made in named.items()}.get(given.lower())
        if found is None:
            raise SettingsError(
                f"algorithm must be 'auto', 'em', 'FedEM', 'VR-FedEM' or an Algorithm; got "
                f"{given!r}."
            )
        # Alone there is nothing to compress; with absences there is.
        if self.is_auto and workers == 1 and isinstance(self.who(), Everyone):
            return EM()
        return found

    @property
    def is_auto(self) -> bool:
        """Whether the algorithm is chosen by ``"auto"``."""
        return isinstance(self.algorithm, str) and self.algorithm.lower() == "auto"

    @property
    def long_steps(self) -> bool:
        """Whether EM may take long steps: as ``"auto"`` alone, on models with a smooth E-step."""
        smooth = not any(isinstance(model, Clusters) for model in self.candidates())
        return self.accelerate and self.is_auto and smooth

    @property
    def leads_on(self) -> bool:
        """Whether a fit may go on elsewhere after it has converged: a given start is meant."""
        return self.moves > 0 and isinstance(self.start, str) and not self.held_out

    @property
    def tolerance(self) -> float:
        """Nats per row that may be left; 0 where |H|^2 alone decides."""
        if self.tol is None:
            return TOL if self.field_tol is None else 0.0
        return float(self.tol)

    def stop(self, algorithm: Algorithm) -> Stop:
        """When this algorithm is done."""
        nats, field_tol = self.tolerance, self.field_tol
        if nats and not algorithm.tells_gains:
            nats, field_tol = 0.0, FIELD_TOL * nats if field_tol is None else field_tol
        limits = (self.rounds, self.epochs, self.max_bytes, self.seconds)
        rounds = ROUNDS if all(limit is None for limit in limits) else self.rounds
        return Stop(rounds, self.epochs, field_tol, self.max_bytes, self.seconds, nats or None)

    @property
    def limits(self) -> Stop:
        """When a fit of several workers is done."""
        return self.stop(self.method(2))

    @classmethod
    def read(cls, model: Any, algorithm: Any = None, **options: Any) -> FitSettings:
        """Read keyword arguments; an unknown one is told."""
        known = [f.name for f in fields(cls) if f.init]
        for name in options:
            if name not in known:
                from emfed.core.configuration import nearest

                raise SettingsError(f"unknown setting {name!r}; {nearest(name, known)}")
        if algorithm is not None:
            options["algorithm"] = algorithm
        return cls(model, **options)

    def but(self, **changes: Any) -> FitSettings:
        """The same with some settings changed."""
        return replace(self, **changes)


def participants(given: Any) -> Participation:
    """Who takes part in a round, from None, a probability or a `Participation`."""
    if given is None or isinstance(given, Participation):
        return Everyone() if given is None else given
    check_range("participation", given, 0, 1, open_low=True)
    return Everyone() if given == 1 else Bernoulli(float(given))


def read_range(components: Any, name: str = "n_components") -> list[int]:
    """Numbers from a number, a collection of them, or a range ``"2:8"``; ``name`` is for errors."""
    if isinstance(components, str):
        ends = components.split(":")
        fine = len(ends) in (1, 2) and all(end.strip().isdigit() for end in ends)
        found: list[Any] = list(range(int(ends[0]), int(ends[-1]) + 1)) if fine else []
        if not found or found[0] < 1:
            raise SettingsError(
                f"{name} must be a positive number, or a range of them from low to high such as "
                f"'2:8'; got {components!r}."
            )
    elif isinstance(components, Iterable):
        found = list(components)
    else:
        found = [components]
    numbers = sorted({check_count(name, k) for k in found})
    if not numbers:
        raise SettingsError(f"{name}: {components!r} holds no number.")
    return numbers


def with_components(model: Any, k: int) -> Any:
    """The model with so many components."""
    if not isinstance(model, Model):
        return model(k)
    plain: Any = model
    own = [f.name for f in fields(plain)] if is_dataclass(plain) else []
    if "n_components" in own:
        return replace(plain, n_components=k)
    if "inner" in own:
        return replace(plain, inner=with_components(plain.inner, k))
    raise SettingsError(
        f"{type(model).__name__} has no number of components: give a function from it to a model."
    )


def without_constants(model: Model) -> Model:
    """The model with no constant of all data in T: a model without some workers has another."""
    if not model.fixed_data:
        return model
    return MODELS.build({**model.describe(), "second_moment": "statistic"})


def worker_weights(
    weights: str | Sequence[float] | FloatArray, counts: FloatArray | IntArray
) -> FloatArray:
    """w_i, summing to one."""
    if isinstance(weights, str):
        if weights == "samples":
            return counts / counts.sum()
        if weights == "uniform":
            return np.full(len(counts), 1 / len(counts))
        raise SettingsError(f"weights must be 'samples', 'uniform' or numbers; got {weights!r}.")
    values = np.asarray(weights, dtype=np.float64)
    if values.shape != counts.shape or not np.all(np.isfinite(values) & (values > 0)):
        raise SettingsError(
            f"weights must be {len(counts)} positive numbers, one per worker; "
            f"got shape {values.shape}."
        )
    return values / values.sum()
