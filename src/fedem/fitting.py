"""`fit`: from data and settings to a fitted model, in one call."""

from __future__ import annotations

import contextlib
import hashlib
import json
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import Any, Literal

import numpy as np

from fedem.algorithms import EM, AutoEM, Everyone, FedEM, VRFedEM
from fedem.cards import Facts
from fedem.closing import with_scores
from fedem.compressors import SubtractiveDithering
from fedem.compressors.precision import Precision, check_precision, round_randomly
from fedem.datasets.workers import as_workers
from fedem.errors import (
    CheckpointError,
    FedemWarning,
    SettingsError,
    check_count,
    check_type,
)
from fedem.federations import FEDERATIONS, RayFederation
from fedem.federations.remote import bind_constants, pack_constants
from fedem.ledger import Ledger
from fedem.limits import PATIENCE, Callback, Monitor, Stop, remaining
from fedem.models.several import Several
from fedem.protocols import (
    Algorithm,
    Federation,
    FloatArray,
    IntArray,
    Model,
    Opening,
    Participation,
)
from fedem.random import Purpose, check_seed, uniforms
from fedem.results import Result
from fedem.rounds import Run
from fedem.starts import search
from fedem.wire import ENVELOPE, floats_size, summary_size

NATS = 1e-6
"""What `AutoEM` leaves ungained, unless told otherwise."""
MOST_ROUNDS = 10_000


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


def _round_summaries(opening: Opening, precision: Precision, seed: int) -> Opening:
    """Summaries as they arrive: in the precision chosen, rounded at random and so without bias."""
    check_precision("opening_precision", precision)
    if precision == "float64":
        return opening
    n = len(opening.counts)
    widths = [int(np.prod(v.shape[1:])) for v in opening.summaries.values()]
    everyone = np.arange(n, dtype=np.int64)
    u = np.split(
        uniforms(seed, 0, Purpose.OPENING, everyone, sum(widths)), np.cumsum(widths)[:-1], axis=1
    )
    rounded = {
        name: round_randomly(values, precision, part.reshape(values.shape))
        for (name, values), part in zip(opening.summaries.items(), u, strict=True)
    }
    return replace(opening, summaries=rounded)


def _plain(value: Any) -> Any:
    """numpy's scalars and arrays as JSON types."""
    return value.item() if isinstance(value, np.generic) else np.asarray(value).tolist()


def _digest(opening: Opening) -> str:
    """Tells data sets apart by what the opening exchange said of them."""
    digest = hashlib.blake2b(opening.counts.tobytes(), digest_size=16)
    for name in sorted(opening.summaries):
        digest.update(np.ascontiguousarray(opening.summaries[name]).data.cast("B"))
    return digest.hexdigest()


def open_run(
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
    federation: Literal["stacked", "loop", "ray"] | Federation = "stacked",
    seed: int = 0,
    monitor: Monitor | None = None,
    retries: int = 0,
    count_bytes: bool = True,
    opening_precision: Precision = "float64",
) -> Run:
    """The opening exchange and the start: a `Run` ready for its first round. See `fit`.

    ``run.federation.close()`` ends the processes of ``federation="ray"``.
    """
    check_seed(seed)
    algorithm = named_algorithm(algorithm)
    participation = Everyone() if participation is None else participation
    check_type("model", model, Model, "gaussian_mixture(3)")
    check_type("algorithm", algorithm, Algorithm, "FedEM(Dithering(levels=4))")
    check_type("participation", participation, Participation, "Bernoulli(0.5)")
    network = _federation(federation, data, groups, sample_weight)
    with contextlib.ExitStack() as on_error:
        if network is not federation:
            on_error.callback(network.close)
        run = _opened(
            model,
            network,
            algorithm,
            participation,
            weights=weights,
            start=start,
            n_init=n_init,
            start_statistics=start_statistics,
            seed=seed,
            monitor=monitor,
            retries=retries,
            count_bytes=count_bytes,
            opening_precision=opening_precision,
        )
        on_error.pop_all()
    return run


def _federation(
    federation: str | Federation, data: Any, groups: Any | None, sample_weight: Any | None
) -> Federation:
    """A federation by name over these data, or the one given."""
    if isinstance(federation, str) and federation in FEDERATIONS:
        return FEDERATIONS[federation](as_workers(data, groups, sample_weight))
    if isinstance(federation, str) and federation == "ray":
        if sample_weight is not None:
            raise SettingsError("federation='ray' takes no sample_weight yet: use 'stacked'.")
        return RayFederation(data, groups)
    if not isinstance(federation, Federation):
        raise SettingsError(
            f"federation must be one of {', '.join(FEDERATIONS)}, ray or a Federation; "
            f"got {federation!r}."
        )
    if not (data is None and groups is None and sample_weight is None):
        raise SettingsError("a Federation has its own data: give None, or name a federation.")
    return federation


def _opened(
    model: Model,
    network: Federation,
    algorithm: Algorithm,
    participation: Participation,
    *,
    weights: str | Sequence[float] | FloatArray,
    start: Any | None,
    n_init: int,
    start_statistics: Literal["expected", "parameters"] | None,
    seed: int,
    monitor: Monitor | None,
    retries: int,
    count_bytes: bool,
    opening_precision: Precision,
) -> Run:
    """The opening exchange, the start and its bytes."""
    if network.carries_bytes and opening_precision != "float64":
        raise SettingsError("over a network summaries travel in full: leave opening_precision out.")
    opening = _round_summaries(network.open(model), opening_precision, seed)
    w = worker_weights(weights, opening.counts if opening.totals is None else opening.totals)
    if network.carries_bytes:  # both ends bind from what is sent, and so to the last bit alike
        constants = pack_constants(model, opening, w)
        shapes = {name: values.shape[1:] for name, values in opening.summaries.items()}
        network.tell(constants)
        bound = bind_constants(model, constants, shapes)
    else:
        bound = model.bind(opening.summaries, opening.counts, w)
    samples = int(opening.counts.sum())
    fingerprint = {
        "model": bound.describe(),
        "algorithm": algorithm.describe(),
        "participation": participation.describe(),
        "weights": hashlib.blake2b(w.tobytes(), digest_size=16).hexdigest(),
        "seed": seed,
        "data": _digest(opening),
        "workers": None
        if opening.names is None
        else hashlib.blake2b("\0".join(opening.names).encode(), digest_size=16).hexdigest(),
    }
    ledger = Ledger(network.size, opening.names)
    everyone = np.arange(network.size, dtype=np.int64)
    told = sum(int(np.prod(v.shape[1:])) for v in opening.summaries.values())
    if network.carries_bytes:
        network.attach(ledger)
    else:
        ledger.add("opening", "up", everyone, summary_size(told, opening_precision), ENVELOPE)
        ledger.add("opening", "down", everyone, floats_size(1 + told), ENVELOPE)
    if isinstance(start, str) or (start is None and n_init != 1):
        how: Any = "auto" if start is None else start
        parts = bound.models if isinstance(bound, Several) else [bound]
        found = search(parts, network, w, method=how, n_init=n_init, seed=seed, samples=samples)
        ledger.absorb(found.ledger, "start")
        statistics, evaluations = found.statistics[0], found.evaluations
        if isinstance(bound, Several):
            statistics = bound.join(found.statistics)
    else:
        if n_init != 1:
            raise SettingsError("n_init > 1 needs a start by name, such as start='k-means'.")
        statistics, exchanged = _start(bound, network, w, start, start_statistics, seed)
        evaluations = samples if exchanged else 0
        if exchanged and not network.carries_bytes:
            numbers, q = exchanged, bound.layout.size
            ledger.add("opening", "down", everyone, floats_size(numbers), ENVELOPE)
            ledger.add("opening", "up", everyone, floats_size(q), ENVELOPE)
    fingerprint = json.loads(json.dumps(fingerprint, default=_plain))
    fingerprint["start"] = hashlib.blake2b(statistics.tobytes(), digest_size=16).hexdigest()
    run = Run(
        bound,
        algorithm,
        network,
        statistics,
        weights=w,
        participation=participation,
        seed=seed,
        samples=samples,
        ledger=ledger,
        evaluations=evaluations,
        columns=opening.columns,
        fingerprint=fingerprint,
        retries=retries,
        monitor=monitor,
        count_bytes=count_bytes,
        rows=opening.counts,
    )
    run.total = float(samples if opening.totals is None else opening.totals.sum())
    return run


def _start(
    model: Model,
    network: Federation,
    weights: FloatArray,
    start: Any | None,
    mode: str | None,
    seed: int,
) -> tuple[FloatArray, int]:
    """S_0, and how many parameters were sent to get it by an exact upload of everyone (0: none)."""
    if mode not in (None, "expected", "parameters"):
        raise SettingsError(f"start_statistics must be 'expected' or 'parameters'; got {mode!r}.")
    params = model.start(seed) if start is None else model.from_user(start)
    if mode == "parameters" or (mode is None and start is None):
        statistics, sent = model.statistics_of(params), 0
    else:
        statistics = network.mean_statistics(model, params, weights)
        sent = sum(array.size for array in params.arrays().values())
    if not model.inside(statistics):
        raise SettingsError(
            "at this start some component has no mass or no positive definite covariance: "
            + (
                "some columns are combinations of others. Drop them, or set covariance_floor > 0."
                if start is None
                else "choose other starting parameters."
            )
        )
    return statistics, sent


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
    envelopes included), ``seconds``, or when it has converged: when at most ``nats`` of
    log-likelihood per sample are left to gain, as the last rounds tell (`EM` and `AutoEM`, and
    where steps are broadcast in the metric), or |H|^2 <= ``tolerance`` three rounds in a row
    without the guard. Without limits it makes 100 rounds; with one of these two alone at most
    10,000, and `AutoEM` then has ``nats=1e-6``. Ctrl-C ends after the current round and
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
    expects them: four numbers, in the ledger too.
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
        )
        try:
            if resume and checkpoint is not None and Path(checkpoint).exists():
                run.restore(checkpoint)
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


def named_algorithm(algorithm: Algorithm | str | None) -> Algorithm:
    """The algorithm behind a name, with the settings we would choose; EM where none is named."""
    named: dict[str, Algorithm] = {
        "em": EM(),
        "auto": AutoEM(),
        "fedem": FedEM(SubtractiveDithering(0.25), in_metric=True),
        "vr-fedem": VRFedEM(SubtractiveDithering(0.25), in_metric=True, batch_size=64),
    }
    if isinstance(algorithm, str):
        if algorithm not in named:
            names = ", ".join(repr(name) for name in named)
            raise SettingsError(f"algorithm must be {names} or an Algorithm; got {algorithm!r}.")
        return named[algorithm]
    return named["em"] if algorithm is None else algorithm


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
        warnings.warn(remark, FedemWarning, stacklevel=3)


def result_of(run: Run, stopped: str, stop: Stop | None = None) -> Result:
    """What a run has reached so far."""
    settings = {
        "algorithm": run.algorithm.describe(),
        "participation": run.participation.describe(),
        "limits": {} if stop is None else {k: v for k, v in vars(stop).items() if v is not None},
    }
    plain = json.loads(json.dumps(settings, default=_plain))
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
        facts=Facts(run.rows, plain, not run.federation.carries_bytes),
    )
