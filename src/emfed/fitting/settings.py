"""All that a fit needs to know, in one place: `fit`, the estimators, the command line and
``run.toml`` translate into it, so one word means one thing everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, final

import numpy as np

from emfed.algorithms import EM, AutoEM, Bernoulli, Everyone, FedEM, VRFedEM
from emfed.compressors import SubtractiveDithering
from emfed.core.configuration import nearest
from emfed.core.errors import SettingsError, check_count, check_range, check_type
from emfed.core.objects import Parameters
from emfed.core.privacy import Privacy
from emfed.core.protocols import (
    Algorithm,
    FloatArray,
    HidesValues,
    IntArray,
    Model,
    Participation,
)
from emfed.core.registry import MODELS
from emfed.core.settings.declaring import check_declared, documented
from emfed.core.settings.fit import FitFields
from emfed.core.streams import check_seed
from emfed.core.wording import ByFace, Setting, Wording
from emfed.fitting.stopping import Stop
from emfed.models.clusters import Clusters

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


@documented
@final
@dataclass(frozen=True, eq=False)
class FitSettings(FitFields):
    """What is fitted, from where, by what, until when: every setting of a fit with its default.

    Parameters
    ----------
    {settings}

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

    numbers: tuple[int, ...] | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        object.__setattr__(self, "seed", int(check_seed(self.seed)))
        if self.start is None:
            object.__setattr__(self, "start", "auto")
        check_declared(self)
        if self.n_init > 1 and not isinstance(self.start, str):
            raise SettingsError(
                Wording(
                    "{} > 1 needs a start by name, such as {}.",
                    Setting("n_init"),
                    Setting("start", "k-means"),
                )
            )
        if not isinstance(self.start, str):
            check_type("start", self.start, Parameters, "'k-means', or parameters of the model")
        if self.n_components is not None:
            object.__setattr__(self, "numbers", tuple(read_range(self.n_components)))
        elif not isinstance(self.model, Model):
            check_type("model", self.model, Model, "gaussian_mixture(3)")
        if self.epsilon is not None:
            self._check_private()
        if self.noise_seed is not None:
            object.__setattr__(self, "noise_seed", check_seed(self.noise_seed, "noise_seed"))
            if self.epsilon is None:
                seed, epsilon = Setting("noise_seed"), Setting("epsilon")
                raise SettingsError(
                    Wording(
                        "{} is what the noise of a fit with {} follows from, and this fit has "
                        "none: leave {} out, or give {}.",
                        *(seed, epsilon, seed, epsilon),
                    )
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
                epsilon, other = Setting("epsilon"), Setting(name)
                raise SettingsError(
                    Wording(
                        "{} and {} do not go together: a private fit spends its budget on rounds "
                        "of its own. Leave {} out, or {}.",
                        *(epsilon, other, other, epsilon),
                    )
                )
        if self.numbers is not None and len(self.numbers) > 1 and self.criterion != "bic":
            raise SettingsError(
                setting="criterion",
                must="be 'bic' in a private fit, which chooses the number of components by BIC",
                got=self.criterion,
            )

    @property
    def privacy(self) -> Privacy | None:
        """What the fit may tell of any one row; None: that is not bounded."""
        if self.epsilon is None:
            return None
        epsilon, delta = (
            check_range(name, value, -np.inf, np.inf)
            for name, value in (("epsilon", self.epsilon), ("delta", self.delta))
        )
        return Privacy(epsilon, delta)

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
                Wording(
                    "k-means has no likelihood to compare {} by: give one number. A Gaussian "
                    "mixture with {} takes a range.",
                    *(Setting("n_components"), Setting("covariance_type", "spherical")),
                )
            )
        if self.held_out:
            hiding = [model for model in made if isinstance(model, HidesValues)]
            if len(hiding) < len(made):
                raise SettingsError(
                    Wording(
                        "{} is for ranks of low-rank imputation (row-owner), whose fit can hide "
                        "values; {} cannot: use {}.",
                        Setting("criterion", "held-out"),
                        type(made[0]).__name__,
                        Setting("criterion", "bic"),
                    )
                )
            made = (*(model.hiding(HELD_OUT) for model in hiding), *made)
        return made

    def who(self) -> Participation:
        """Who takes part in a round."""
        return participants(self.participation)

    def method(self, workers: int) -> Algorithm:
        """The algorithm, for so many workers; the one meaning of ``"auto"``."""
        given = self.algorithm
        if self.follow_em and not self.is_auto:
            raise SettingsError(
                Wording(
                    "{} goes with {}; got {!r}: leave one of the two out{}.",
                    Setting("follow_em"),
                    Setting("algorithm", "auto"),
                    given,
                    ByFace(" (of an algorithm of your own, AutoEM(follow_em=True))", command=""),
                )
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
            known = "be 'auto', 'em', 'FedEM', 'VR-FedEM' or an Algorithm"
            raise SettingsError(setting="algorithm", must=known, got=given)
        # Alone there is nothing to compress; with absences there is.
        if self.is_auto and workers == 1 and isinstance(self.who(), Everyone):
            return EM()
        return found

    @property
    def is_auto(self) -> bool:
        """Whether the algorithm is chosen by ``"auto"``."""
        return isinstance(self.algorithm, str) and self.algorithm.lower() == "auto"

    @property
    def faithful(self) -> bool:
        """Whether the fit is to take EM's own path, step by step."""
        algorithm = self.method(2)
        return isinstance(algorithm, EM) or bool(getattr(algorithm, "follow_em", False))

    @property
    def fine(self) -> bool:
        """Whether sums are as fine as the statistics themselves: "em" compresses nothing."""
        return isinstance(self.method(2), EM)

    @property
    def on_sums(self) -> bool:
        """Whether rounds ask for sums, and no worker is heard by itself."""
        algorithm = self.method(2)
        return isinstance(algorithm, (EM, AutoEM)) and not getattr(algorithm, "batch_size", None)

    @property
    def long_steps(self) -> bool:
        """Whether EM may take momentum: as ``"auto"`` alone, on models with a smooth E-step."""
        smooth = not any(isinstance(model, Clusters) for model in self.candidates())
        auto = isinstance(self.method(2), AutoEM) and not self.faithful
        return self.accelerate and auto and smooth

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
        tells = algorithm.tells_gains and (isinstance(algorithm, AutoEM) or self.on_sums)
        if nats and not tells:
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
            numbers = "be a positive number, or a range of them from low to high such as '2:8'"
            raise SettingsError(setting=name, must=numbers, got=components)
    elif isinstance(components, Iterable):
        found = list(components)
    else:
        found = [components]
    chosen = sorted({check_count(name, k) for k in found})
    if not chosen:
        raise SettingsError(setting=name, must="hold a number", got=components)
    return chosen


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
        raise SettingsError(
            setting="weights", must="be 'samples', 'uniform' or numbers", got=weights
        )
    values = np.asarray(weights, dtype=np.float64)
    if values.shape != counts.shape or not np.all(np.isfinite(values) & (values > 0)):
        must = f"be {len(counts)} positive numbers, one per worker, not of shape {values.shape}"
        raise SettingsError(setting="weights", must=must)
    return values / values.sum()
