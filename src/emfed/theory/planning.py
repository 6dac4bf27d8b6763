"""What the theory says of a run before it is made: steps, batches, rounds, bytes, regime."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import numpy as np

from emfed.aggregation.gathered import ENVELOPE_DOWN, ENVELOPE_UP
from emfed.algorithms import FedEM
from emfed.core.errors import SettingsError, check_count, check_range, check_type
from emfed.core.protocols import Compressor, Crowd
from emfed.core.streams import Purpose, normals, uniforms
from emfed.core.wire import floats_size, payload_sizes
from emfed.core.wording import Setting, Wording
from emfed.theory.bounds import FedEMBounds, VRBounds, memory_rate, vr_inner_rounds
from emfed.theory.estimates import Estimate
from emfed.theory.problem import omega_of, participating


@final
@dataclass(frozen=True)
class Advice:
    """The settings that the theory advises for one algorithm, and what it promises for them.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=25)
    >>> found = emfed.theory.estimate_problem(emfed.gaussian_mixture(2, "tied"), data)
    >>> emfed.theory.plan(found, emfed.Dithering(levels=4)).fed_em.algorithm
    'FedEM'
    """

    algorithm: str
    """The name of the algorithm."""
    step_size: float
    """The step gamma."""
    memory_rate: float
    """The rate alpha."""
    batch_size: int | None
    """The number of rows of a mini-batch; None for full local passes."""
    inner_rounds: int | None
    """The inner rounds of an outer loop of VR-FedEM; None for FedEM."""
    rounds: int
    """The number of rounds, a bound for the worst case."""
    evaluations: float
    """The conditional expectations that these rounds compute, over all workers."""
    bytes_up: float
    """The bytes that a worker sends, envelopes included."""
    bytes_down: float
    """The bytes that a worker receives, envelopes included, with statistics sent as doubles."""
    step_regime: str
    """What limits the step: "smoothness" (compression is free) or "compression" (it is not)."""
    noise_regime: str
    """Which term of K_opt dominates, "high noise" or "low noise"."""
    slowdown: float
    """The factor by which compression multiplies the rounds."""


@final
@dataclass(frozen=True)
class Plan:
    """The advice of the theory to reach E|h|^2 <= ``epsilon`` on the mean over rounds.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=25)
    >>> found = emfed.theory.estimate_problem(emfed.gaussian_mixture(2, "tied"), data)
    >>> plan = emfed.theory.plan(found, emfed.Dithering(levels=4))
    >>> plan.workers, plan.dimension
    (4, 6)
    """

    epsilon: float
    """The accuracy that is to be reached."""
    workers: int
    """The number of workers."""
    dimension: int
    """The number q of statistics."""
    participation: float
    """The smallest probability that a worker takes part in a round."""
    omega: float
    """The constant of the compression operator."""
    omega_exact: bool
    """Whether omega is exact, or only a bound."""
    norm: str
    """The norm of everything, "euclidean" or "metric"."""
    message_bytes: float
    """The payload of one upload, encoded, on average for a vector of normal numbers."""
    default_step: float
    """The step that FedEM takes by itself: a rule of thumb, far above the worst case."""
    memory_start: str
    """Where memories start, "zero" or "mean-field"."""
    fed_em: Advice
    """The advice for FedEM."""
    vr_fed_em: Advice
    """The advice for VR-FedEM."""
    notes: tuple[str, ...]
    """What the reader of the numbers should know."""

    def describe(self) -> dict[str, Any]:
        """Everything as plain JSON types."""
        return dataclasses.asdict(self)


def plan(
    estimate: Estimate,
    compressor: Compressor,
    *,
    participation: float = 1.0,
    batch_size: int | None = None,
    epsilon: float = 1e-4,
    memory_start: Literal["zero", "mean-field"] = "zero",
) -> Plan:
    """Plan a run of FedEM and of VR-FedEM by the theorems: settings, rounds and bytes.

    VR-FedEM's batch and inner rounds are those that the theory recommends.

    Parameters
    ----------
    estimate : Estimate
        The constants of the model on the data, from `estimate_problem`.
    compressor : Compressor
        The compression operator of the uploads.
    participation : float
        The smallest probability that a worker takes part in a round.
    batch_size : int or None
        The mini-batch of FedEM; None for full local passes.
    epsilon : float
        The accuracy: the mean over rounds of E|h|^2 that is to be reached.
    memory_start : {"zero", "mean-field"}
        Where memories start. Zero adds a term to the bounds; the mean field costs one exact
        upload of each worker.

    Returns
    -------
    Plan
        The advice for both algorithms.

    Raises
    ------
    SettingsError
        If a setting is out of range, or the batch is larger than a worker's rows.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=25)
    >>> found = emfed.theory.estimate_problem(emfed.gaussian_mixture(2, "tied"), data)
    >>> advice = emfed.theory.plan(found, emfed.Dithering(levels=4), epsilon=1e-2).fed_em
    >>> advice.rounds > 100
    True
    """
    check_type("estimate", estimate, Estimate, "estimate_problem(model, data)")
    check_type("compressor", compressor, Compressor, "Dithering(levels=4)")
    check_goal(participation, epsilon)
    if memory_start not in ("zero", "mean-field"):
        raise SettingsError(f"memory_start must be 'zero' or 'mean-field'; got {memory_start!r}.")
    if batch_size is not None and check_count("batch_size", batch_size) > estimate.samples:
        raise SettingsError(
            Wording(
                "{}, but a worker has about {} rows: leave it out for full local passes.",
                *(Setting("batch_size", batch_size), estimate.samples),
            )
        )
    problem, q = estimate.with_batch(batch_size), estimate.layout.size
    omega = omega_of(compressor, estimate.layout, problem.norm == "metric")
    size = _message_bytes(compressor.resolve(estimate.layout), q)
    traffic = _Traffic(
        participation * (size + ENVELOPE_UP),
        floats_size(q) + ENVELOPE_DOWN,
        0 if memory_start == "zero" else floats_size(q) + ENVELOPE_UP,
    )
    error = estimate.memory_error if memory_start == "zero" else 0.0
    crowd = Crowd(1 / float(problem.weights @ problem.weights), participation)
    default = FedEM(compressor).resolve(estimate.layout, crowd).step_size
    assert isinstance(default, float)  # left open, it is chosen as a number
    return Plan(
        epsilon=epsilon,
        workers=len(problem.weights),
        dimension=q,
        participation=participation,
        omega=omega.value,
        omega_exact=omega.exact,
        norm=omega.norm,
        message_bytes=size,
        default_step=default,
        memory_start=memory_start,
        fed_em=_fed_em(estimate, omega.value, participation, batch_size, epsilon, error, traffic),
        vr_fed_em=_vr_fed_em(estimate, omega.value, participation, epsilon, error, traffic),
        notes=_notes(estimate, participation, batch_size),
    )


class _Traffic(NamedTuple):
    """Bytes of a worker: up and down in a round, and up for the start of its memory."""

    up: float
    down: float
    start: float


def check_goal(participation: float, epsilon: float) -> None:
    """Refuse what is no probability and no accuracy."""
    check_range("epsilon", epsilon, 0, np.inf, open_low=True, open_high=True)
    check_range("participation", participation, 0, 1, open_low=True)


def _fed_em(
    estimate: Estimate,
    omega: float,
    p: float,
    batch: int | None,
    epsilon: float,
    error: float,
    traffic: _Traffic,
) -> Advice:
    bounds = FedEMBounds(estimate.with_batch(batch), omega, p).with_memories(error)
    rounds = bounds.rounds(epsilon)
    local = estimate.samples if batch is None else batch
    return Advice(
        algorithm="FedEM",
        step_size=bounds.step(rounds.needed),
        memory_rate=bounds.memory_rate,
        batch_size=batch,
        inner_rounds=None,
        rounds=rounds.needed,
        evaluations=bounds.evaluations(rounds.needed, local),
        bytes_up=traffic.start + rounds.needed * traffic.up,
        bytes_down=rounds.needed * traffic.down,
        step_regime=bounds.step_limit.regime,
        noise_regime=rounds.regime,
        slowdown=bounds.slowdown(epsilon),
    )


def _vr_fed_em(
    estimate: Estimate, omega: float, p: float, epsilon: float, error: float, traffic: _Traffic
) -> Advice:
    noise, silence = participating(omega, p), participating(0.0, p)
    inner = vr_inner_rounds(estimate.samples, noise)
    bounds = VRBounds(estimate.problem, noise, inner).with_memories(error)
    without = VRBounds(estimate.problem, silence, inner).with_memories(error)
    rounds = bounds.rounds(epsilon)
    return Advice(
        algorithm="VR-FedEM",
        step_size=bounds.step,
        memory_rate=memory_rate(omega),
        batch_size=bounds.batch_size,
        inner_rounds=inner,
        rounds=rounds,
        evaluations=bounds.evaluations(rounds, estimate.samples, p),
        bytes_up=traffic.start + rounds * traffic.up,
        bytes_down=rounds * traffic.down,
        step_regime=bounds.regime,
        noise_regime="low noise",
        slowdown=rounds / without.rounds(epsilon),
    )


def _message_bytes(compressor: Compressor, q: int, messages: int = 32) -> float:
    """The mean encoded payload of vectors of normal numbers."""
    streams = np.arange(messages, dtype=np.int64)
    vectors = normals(0, 3, Purpose.PILOT, streams, q)
    u = uniforms(0, 4, Purpose.PILOT, streams, compressor.draws(q))
    sizes = payload_sizes(
        compressor.compress(vectors, u), compressor.form(q), compressor.dither(u, q)
    )
    return float(sizes.mean())


def _notes(estimate: Estimate, p: float, batch: int | None) -> tuple[str, ...]:
    notes = [
        "The theorems bound the worst case; runs usually need far fewer rounds, and bear far "
        "larger steps. Use the numbers to compare settings, and start from the default step.",
    ]
    if estimate.points:
        notes.append(
            f"The constants were measured at {estimate.points} points of EM's path on "
            f"{estimate.rows} rows in {estimate.directions} directions: local values, which no "
            "theorem lets stand for the global ones."
        )
    if estimate.problem.norm == "metric":
        notes.append(
            "Everything is in the norm of the metric at the end of EM's path; the |h|² of records "
            "is Euclidean."
        )
    if p < 1:
        notes.append(
            "The paper has no theorem for VR-FedEM with p < 1; its numbers here take silence for "
            "compression, omega_p = (1 + omega) / p - 1."
        )
    if batch is None:
        notes.append("FedEM makes full local passes, so its oracle has no noise.")
    return tuple(notes)
