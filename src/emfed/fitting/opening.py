"""The opening exchange and the start: from data and settings to a `Run`."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from emfed.algorithms import EM, AutoEM, Everyone, FedEM, VRFedEM
from emfed.compressors import SubtractiveDithering
from emfed.compressors.precision import Precision, check_precision, round_randomly
from emfed.core.errors import (
    SettingsError,
    check_type,
)
from emfed.core.ledger import Ledger
from emfed.core.protocols import (
    Algorithm,
    Federation,
    FloatArray,
    IntArray,
    Model,
    Opening,
    Participation,
)
from emfed.core.streams import Purpose, check_seed, uniforms
from emfed.core.wire import ENVELOPE, floats_size, summary_size
from emfed.data.workers import as_workers
from emfed.fitting.rounds import Run
from emfed.fitting.starts import search
from emfed.fitting.stopping import Monitor
from emfed.models.devices import Precision as DevicePrecision
from emfed.models.naming import columns_named
from emfed.models.several import Several
from emfed.network import FEDERATIONS, RayFederation, bind_constants, pack_constants
from emfed.network.descriptions import plain


def named_algorithm(algorithm: Algorithm | str | None) -> Algorithm:
    """The algorithm behind a name, with the settings we would choose; EM where none is named."""
    named: dict[str, Algorithm] = {
        "em": EM(),
        "auto": AutoEM(),
        "FedEM": FedEM(SubtractiveDithering(0.25), in_metric=True),
        "VR-FedEM": VRFedEM(SubtractiveDithering(0.25), in_metric=True, batch_size=64),
    }
    if isinstance(algorithm, str):
        found = {name.lower(): name for name in named}.get(algorithm.lower())
        if found is None:
            names = ", ".join(repr(name) for name in named)
            raise SettingsError(f"algorithm must be {names} or an Algorithm; got {algorithm!r}.")
        return named[found]
    return named["em"] if algorithm is None else algorithm


def choose_algorithm(name: Any, workers: int, follow_em: bool = False) -> Algorithm:
    """`named_algorithm` for so many workers: alone there is nothing to compress, and auto is EM."""
    if name == "auto":
        return EM() if workers == 1 else AutoEM(follow_em=bool(follow_em))
    if follow_em:
        raise SettingsError(
            f"follow_em goes with algorithm 'auto'; got {name!r}: leave one of the two out (of an "
            "algorithm of your own, AutoEM(follow_em=True))."
        )
    return named_algorithm(name)


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
    device: Any | None = None,
    precision: DevicePrecision = "double",
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
    network = _federation(federation, data, groups, sample_weight, device, precision)
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
    federation: str | Federation,
    data: Any,
    groups: Any | None,
    sample_weight: Any | None,
    device: Any | None,
    precision: DevicePrecision,
) -> Federation:
    """A federation by name over these data, or the one given."""
    if isinstance(federation, str) and federation in FEDERATIONS:
        found = as_workers(data, groups, sample_weight, device=device, precision=precision)
        return FEDERATIONS[federation](found)
    if device is not None:
        raise SettingsError(
            "device goes with federation='stacked' or 'loop'; another federation has its own data: "
            "give it workers of as_workers(data, device='cuda')."
        )
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
        with columns_named(opening.columns):
            bound = bind_constants(model, constants, shapes)
    else:
        with columns_named(opening.columns):
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
    fingerprint = plain(fingerprint)
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
    run.summary = model.combine(opening.summaries, w)
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
