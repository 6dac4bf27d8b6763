"""From settings to a run: which algorithm, when it stops, and whether it converged."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, final

from emfed.algorithms import EM, AutoEM, Bernoulli, Everyone
from emfed.artifacts.result import Result
from emfed.core.errors import EmfedWarning, SettingsError, check_range
from emfed.core.protocols import Algorithm, Model, Participation
from emfed.data.tables import Workers
from emfed.fitting.candidates import Rivals
from emfed.fitting.driver import NATS, fit, result_of
from emfed.fitting.estimators.climbing import Climb
from emfed.fitting.opening import choose_algorithm, open_run
from emfed.fitting.selection import Selection, choose_among, part_of, within_rows
from emfed.fitting.stopping import Stop
from emfed.models.several import Several, SeveralParameters
from emfed.network import StackedFederation

TOLERANCE_OF_FIELD = 1e-4
"""|H|^2 for a tolerance of one nat: the gap is |H|^2 over the share that one step of EM closes."""


@final
@dataclass(frozen=True)
class Settings:
    """The options of an estimator's run."""

    algorithm: Any
    follow_em: bool
    start: Any
    n_init: int
    rounds: int
    tolerance: float | None
    """Nats per row that may be left; None: ``alone`` for one worker, `NATS` else."""
    alone: float
    seed: int
    criterion: Any
    participation: Participation


@final
@dataclass(frozen=True)
class Fitted:
    """What a run reached, whether it had converged, and the log-likelihood per row."""

    result: Result
    converged: bool
    likelihood: float
    selection: Selection | None = None


def read_participation(given: Any) -> Participation:
    """Who takes part in a round: None is everyone, a number the probability that a worker does."""
    if given is None:
        return Everyone()
    if isinstance(given, Participation):
        return given
    check_range("participation", given, 0, 1, open_low=True)
    return Everyone() if given == 1 else Bernoulli(float(given))


def run_fit(
    make: Callable[[int], Model],
    numbers: list[int],
    workers: Workers,
    settings: Settings,
    *,
    start: Any = None,
    accelerate: bool = True,
) -> Fitted:
    """Fit the model of each number of components, in the same rounds, and keep the best."""
    algorithm = choose_algorithm(settings.algorithm, workers.size, settings.follow_em)
    if settings.tolerance is None:
        default = settings.alone if workers.size == 1 else NATS
        settings = replace(settings, tolerance=default)
    assert settings.tolerance is not None
    if len(numbers) > 1:
        numbers = within_rows(make(numbers[0]), numbers, int(workers.counts.sum()))
    some = not isinstance(settings.participation, Everyone)
    if some and isinstance(algorithm, EM):
        raise SettingsError(
            "participation goes with several workers and a compressed algorithm: EM watches the "
            "log-likelihood of everyone. Use algorithm='auto', or leave participation out."
        )
    network = StackedFederation(workers)
    several = Several(tuple(make(k) for k in numbers), watched=isinstance(algorithm, EM))
    begin = settings.start if start is None else start
    if not isinstance(begin, str):
        begin = SeveralParameters((begin,))
    options: dict[str, Any] = {
        "federation": network,
        "start": begin,
        "n_init": settings.n_init if isinstance(begin, str) else 1,
        "seed": settings.seed,
        "participation": settings.participation,
    }
    if not isinstance(algorithm, EM):
        return _compressed(several, numbers, algorithm, network, settings, options)
    run = open_run(several, None, algorithm, **options)
    climb = Climb(run, settings.tolerance, accelerate)
    stopped = run.until(Stop(rounds=settings.rounds), [climb])
    if stopped == "interrupted":
        raise KeyboardInterrupt
    whole = result_of(run, "tolerance" if stopped == "callback" else stopped)
    converged = all(part.settled for part in climb.parts)
    return _finish(whole, network, numbers, settings, converged, climb.parts[0].likelihood)


def _compressed(
    several: Several,
    numbers: list[int],
    algorithm: Algorithm,
    network: StackedFederation,
    settings: Settings,
    options: dict[str, Any],
) -> Fitted:
    """A compressed run; its log-likelihood is asked for once, at the end."""
    assert settings.tolerance is not None
    limits: dict[str, Any]
    if isinstance(algorithm, AutoEM):
        limits = {"nats": settings.tolerance}
    else:
        limits = {"tolerance": TOLERANCE_OF_FIELD * settings.tolerance}
    rivals = Rivals(settings.criterion)
    limits |= {"rounds": settings.rounds, "callbacks": [rivals]}
    with warnings.catch_warnings():  # the estimator says in its own words what it has to say
        warnings.simplefilter("ignore", EmfedWarning)
        whole = fit(several, None, algorithm, **limits, **options)
    if whole.stopped == "interrupted":
        raise KeyboardInterrupt
    return _finish(whole, network, numbers, settings, whole.converged, None, rivals)


def _finish(
    whole: Result,
    network: StackedFederation,
    numbers: list[int],
    settings: Settings,
    converged: bool,
    likelihood: float | None,
    rivals: Rivals | None = None,
) -> Fitted:
    """The best, its likelihood, and remarks on it."""
    if likelihood is not None and len(numbers) == 1:
        chosen, selection = part_of(whole, 0), None
    else:
        selection = choose_among(whole, network, numbers, settings.criterion, rivals)
        chosen = selection.best
        row = selection.table[numbers.index(selection.n_components)]
        likelihood = row["log_likelihood"]
    for remark in chosen.model.remarks(chosen.model.maximize(chosen.statistics)):
        warnings.warn(remark, EmfedWarning, stacklevel=4)
    return Fitted(chosen, converged, likelihood, selection)
