"""`fit`: from data and settings to a fitted model, in one call."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Sequence
from math import inf
from pathlib import Path
from typing import Any, Literal

from emfed.algorithms import AutoEM
from emfed.artifacts.cards import Facts
from emfed.artifacts.result import Result
from emfed.compressors.precision import Precision
from emfed.core.errors import (
    CheckpointError,
    EmfedWarning,
    SettingsError,
    check_count,
)
from emfed.core.protocols import (
    Algorithm,
    Federation,
    FloatArray,
    Model,
    Participation,
)
from emfed.fitting.closing import with_scores
from emfed.fitting.opening import named_algorithm, open_run
from emfed.fitting.rounds import Run
from emfed.fitting.stopping import PATIENCE, Callback, Monitor, Stop, remaining
from emfed.models.devices import Precision as DevicePrecision
from emfed.network.descriptions import plain

NATS = 1e-6
"""What `AutoEM` leaves ungained, unless told otherwise."""
MOST_ROUNDS = 10_000


def fit(
    model: Model,
    data: Any,
    algorithm: Algorithm | str | None = None,
    *,
    groups: Any | None = None,
    sample_weight: Any | None = None,
    weights: str | Sequence[float] | FloatArray = "samples",
    participation: Participation | None = None,
    start: Any | None = None,
    n_init: int = 1,
    start_statistics: Literal["expected", "parameters"] | None = None,
    rounds: int | None = None,
    epochs: float | None = None,
    nats: float | None = None,
    tolerance: float | None = None,
    max_bytes: int | None = None,
    seconds: float | None = None,
    seed: int = 0,
    callbacks: Iterable[Callback] = (),
    monitor: Monitor | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
    resume: bool = False,
    federation: Literal["stacked", "loop", "ray"] | Federation = "stacked",
    retries: int = 0,
    count_bytes: bool = True,
    opening_precision: Precision = "float64",
    threads: int | None = None,
    closing: bool = False,
    device: Any | None = None,
    precision: DevicePrecision = "double",
) -> Result:
    """Fit ``model`` on the data of many workers, in this process or in those of a federation.

    ``data`` is a dict or list of tables, one per worker, or one table with ``groups`` naming the
    worker of each row (values, or a column of a data frame); one table alone is one worker.
    ``algorithm`` is `EM` (the default), `AutoEM`, `FedEM` or `VRFedEM`, or the name of one:
    ``"auto"`` gives the pooled answer for few bytes, without settings.

    ``weights`` are ``"samples"`` (the pooled optimum), ``"uniform"`` (the paper) or numbers;
    ``sample_weight`` says how much each row counts, in the shape of the data. ``participation`` is
    `Everyone` by default. ``start`` are parameters in the user's units, or the name of a way to
    find them: ``"moments"`` (the default: drawn from aggregates, which reveal no record),
    ``"k-means"`` (from cluster sums and counts, in a few rounds), ``"auto"`` (k-means where the
    model can) or ``"points"`` (rows of the data); of ``n_init`` such starts the best is kept.
    ``start_statistics`` says whether S_0 is the ``"expected"`` statistics at given parameters (the
    paper; a full pass and an exact upload, default for them) or what ``"parameters"`` imply (free).

    Stops at the first limit met of ``rounds``, ``epochs``, ``max_bytes`` (all workers, up and down,
    from the opening on, envelopes included), ``seconds``, or when it has converged: when at most
    ``nats`` of log-likelihood per sample are left to gain, as the last rounds tell (`EM` and
    `AutoEM`, and where steps are broadcast in the metric), or |H|^2 <= ``tolerance`` three rounds
    in a row without the guard. Without limits it makes 100 rounds; with one of these two alone at
    most 10,000, and `AutoEM` then has ``nats=1e-6``. Ctrl-C ends after the current round and
    returns what was reached; an error in mid-run carries that as ``error.result``. ``callbacks``
    get each `RoundRecord`; one that returns True ends the run.

    ``monitor`` records |h|^2 and the objective. With ``checkpoint`` the state is written every
    ``checkpoint_every`` rounds and at the end; ``resume=True`` continues from it if it is there.
    ``federation`` is ``"stacked"``, ``"loop"`` (one worker at a time), ``"ray"`` (two processes of
    this machine) or an object with its own data (then ``data`` is None). Workers that stay silent
    are asked ``retries`` times again.
    ``count_bytes=False`` skips the ledger; ``opening_precision`` may shorten the opening summaries
    to ``"float32"`` or ``"bfloat16"``, rounded at random; ``threads`` limits those of the linear
    algebra. ``closing=True`` ends with one more exchange, in which every worker tells how well the
    model fits its rows: mean and spread of their log-likelihood, as they are and as the model
    expects them: four numbers, in the ledger too. ``device="cuda"`` puts the rows on a GPU, or
    streams them to it where they do not fit: answers agree with numpy's to rounding, or, with
    ``precision="fast"``, to six digits.
    """
    algorithm = named_algorithm(algorithm)
    if isinstance(algorithm, AutoEM) and nats is None and tolerance is None and rounds is None:
        nats = NATS
    if all(limit is None for limit in (rounds, epochs, max_bytes, seconds)):
        rounds = 100 if tolerance is None and nats is None else MOST_ROUNDS
    stop = Stop(rounds, epochs, tolerance, max_bytes, seconds, nats)
    hooks = (callbacks,) if callable(callbacks) else tuple(callbacks)
    for hook in hooks:
        if not callable(hook):
            raise SettingsError(f"a callback must be a function of a RoundRecord; got {hook!r}.")
    _check_checkpoint(checkpoint, resume)
    with threads_of(threads):
        run = open_run(
            model,
            data,
            algorithm,
            groups=groups,
            sample_weight=sample_weight,
            n_init=n_init,
            weights=weights,
            participation=participation,
            start=start,
            start_statistics=start_statistics,
            federation=federation,
            seed=seed,
            monitor=monitor,
            retries=retries,
            count_bytes=count_bytes,
            opening_precision=opening_precision,
            device=device,
            precision=precision,
        )
        try:
            if resume and checkpoint is not None and Path(checkpoint).exists():
                run.restore(checkpoint)
            for hook in hooks:
                getattr(hook, "attach", lambda run: None)(run)
            stopped = _until(run, stop, hooks, checkpoint, checkpoint_every)
            result = result_of(run, stopped, stop)
            if closing:
                result = with_scores(result, run.federation, run.count_bytes)
        finally:
            if run.federation is not federation:
                run.federation.close()
    _warn(run, stopped, tolerance, nats)
    return result


def _until(
    run: Run,
    stop: Stop,
    hooks: Sequence[Callback],
    checkpoint: str | Path | None,
    checkpoint_every: int,
) -> str:
    """The rounds; an error carries what they had reached."""
    try:
        return run.until(stop, hooks, checkpoint, checkpoint_every)
    except Exception as error:
        setattr(error, "result", result_of(run, "error"))  # noqa: B010 (any exception gets one)
        raise


def _check_checkpoint(path: str | Path | None, resume: bool) -> None:
    """Never write over a file that the user did not ask to continue."""
    if path is None:
        if resume:
            raise SettingsError("resume=True needs the path of a checkpoint.")
    elif not str(path) or Path(path).is_dir():
        raise SettingsError(f"checkpoint must be the path of a file; got {str(path)!r}.")
    elif Path(path).exists() and not resume:
        raise CheckpointError(
            f"{path} is there already: use resume=True to continue it, or remove it first."
        )


def threads_of(count: int | None) -> Any:
    """A context in which the linear algebra uses so many threads."""
    if count is None:
        return contextlib.nullcontext()
    from threadpoolctl import threadpool_limits

    return threadpool_limits(check_count("threads", count))


def _warn(run: Run, stopped: str, tolerance: float | None, nats: float | None) -> None:
    """Tell what a user should know about a run that ended."""
    remarks = run.model.remarks(run.params)
    made = [record for record in run.records if record.round > 0]
    short = sum(record.guard_hits > 0 for record in made)
    if short > max(5, 0.02 * len(made)):
        already = getattr(run.algorithm, "in_metric", False)
        remarks.append(
            f"in {short} of {len(made)} rounds the step was shortened to stay where the model is "
            "defined; the fit may have been thrown off. Use "
            + ("" if already else "in_metric=True, ")
            + "a smaller step_size, a finer compressor, or fewer components."
        )
    if stopped == "bytes" and not made:
        spent = run.ledger.total("up") + run.ledger.total("down")
        remarks.append(
            f"the opening and the start took {spent} bytes, so max_bytes left none for a round: "
            "allow more, or use start='moments', which costs nothing."
        )
    if stopped == "silence":
        remarks.append(f"nobody answered for {PATIENCE} rounds; the run gave up.")
    if tolerance is not None and stopped in ("rounds", "epochs", "bytes", "seconds"):
        remarks.append(
            f"|H|^2 did not fall to the tolerance {tolerance:g} before the limit on {stopped}: "
            "allow more, or a larger tolerance."
        )
    if nats is not None and stopped in ("rounds", "epochs", "bytes", "seconds"):
        left = remaining(run.records)
        about = f"about {left:.1g} nats a sample may be left" if left < inf else "much may be left"
        remarks.append(
            f"the run met its limit on {stopped} before it converged to {nats:g} nats a sample "
            f"({about}): allow more {stopped}, fewer components, or a larger nats."
        )
    for remark in remarks:
        warnings.warn(remark, EmfedWarning, stacklevel=3)


def result_of(run: Run, stopped: str, stop: Stop | None = None) -> Result:
    """What a run has reached so far."""
    settings = {
        "algorithm": run.algorithm.describe(),
        "participation": run.participation.describe(),
        "limits": {} if stop is None else {k: v for k, v in vars(stop).items() if v is not None},
    }
    return Result(
        model=run.model,
        params=run.model.to_user(run.params),
        records=run.records,
        stopped=stopped,
        seed=run.seed,
        statistics=run.state.statistics,
        ledger=run.ledger,
        columns=run.columns,
        worker_weights=run.weights,
        samples=run.total,
        facts=Facts(run.rows, plain(settings), not run.federation.carries_bytes),
        summary=run.summary,
    )
