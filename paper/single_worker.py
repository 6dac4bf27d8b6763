"""Variance-reduced EM for one worker and no compression, by the papers that ours compares with.

All move S by gamma H, with H an estimate of the mean field h(S) = s-bar(T(S)) - S. EM, online EM
(Cappé and Moulines 2009: FedEM with one worker, mini-batches and falling steps) and SPIDER-EM
(Fort, Moulines and Wai 2020: VR-FedEM with one worker) are in the package; here are two more.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from emfed.algorithms.steps import shorten
from emfed.core.protocols import Compressor, FloatArray, IntArray, Model, Participation
from emfed.core.streams import Purpose, choose_distinct, uniforms


@dataclass(frozen=True)
class Move:
    """Where a round led: S, the H it moved by, and the conditional expectations it computed."""

    statistics: FloatArray
    mean_field: FloatArray
    evaluations: int


Sibling = Callable[[Model, Any, FloatArray, float, int, int, int], Iterator[Move]]
"""Model, rows, S_0, gamma, batch size, rounds between full passes and seed to endless moves."""


def sem_vr(
    model: Model,
    rows: Any,
    statistics: FloatArray,
    step: float,
    batch: int,
    inner: int,
    seed: int,
) -> Iterator[Move]:
    """sEM-vr (Chen, Zhu, Teh, Zhang 2018), in the manner of SVRG.

    H = s-bar_B(T(S)) - s-bar_B(T(R)) + s-bar(T(R)) - S, where R is S as it was at the beginning of
    the outer loop: the same batch B at both.
    """
    k = 0
    while True:
        reference = model.maximize(statistics)
        whole = model.expected_statistics(rows, reference)
        for inner_round in range(inner):
            k += 1
            part = rows[_batch(seed, k, 0, len(rows), batch)]
            here = model.expected_statistics(part, model.maximize(statistics))
            field = here - model.expected_statistics(part, reference) + whole - statistics
            statistics = shorten(model, statistics, step * field)[0]
            yield Move(statistics, field, 2 * len(part) + (0 if inner_round else len(rows)))


def fiem(
    model: Model,
    rows: Any,
    statistics: FloatArray,
    step: float,
    batch: int,
    inner: int,
    seed: int,
) -> Iterator[Move]:
    """FIEM (Karimi et al. 2019; Fort, Gach, Moulines 2021), in the manner of SAGA.

    A table holds each row's s-bar_j as last computed, M is its mean. A batch I renews its rows; an
    independent batch J gives H = s-bar_J(T(S)) - table_J + M - S. ``inner`` plays no role: after
    the first round there is no full pass.
    """
    table = _each(model, rows, statistics)
    mean, spent, k = table.mean(axis=0), len(rows), 0
    while True:
        k += 1
        renewed, used = (_batch(seed, k, which, len(rows), batch) for which in (0, 1))
        fresh = _each(model, rows[renewed], statistics)
        mean = mean + (fresh - table[renewed]).sum(axis=0) / len(rows)
        table[renewed] = fresh
        here = _each(model, rows[used], statistics)
        field = (here - table[used]).mean(axis=0) + mean - statistics
        statistics = shorten(model, statistics, step * field)[0]
        yield Move(statistics, field, spent + len(renewed) + len(used))
        spent = 0


def naive_sum(
    model: Model,
    tables: FloatArray,
    statistics: FloatArray,
    step: float,
    operator: Compressor,
    participation: Participation,
    seed: int,
) -> Iterator[Move]:
    """FedEM with H = (np)^-1 sum over the active of (V_i + Q(Delta_i)).

    The paper warns of it (Appendix A). The server knows every V_i; they
    start at the mean field, and every worker makes full passes over its table.
    """
    n, q = len(tables), model.layout.size
    operator = operator.resolve(model.layout)
    rate = 1 / (1 + operator.omega(q))
    memories = model.expected_statistics(tables, model.maximize(statistics)) - statistics
    for k in itertools.count(1):
        active = participation.draw(seed, k, n)
        parameters = model.maximize(statistics)
        fields = model.expected_statistics(tables[active], parameters) - statistics
        u = uniforms(seed, k, Purpose.COMPRESSION, active, operator.draws(q))
        message = operator.compress(fields - memories[active], u)
        sent = operator.decompress(message, u, q)
        shares = 1 / (n * participation.probabilities(active, n))
        field = shares @ (memories[active] + sent)
        memories[active] += rate * sent
        statistics = shorten(model, statistics, step * field)[0]
        yield Move(statistics, field, len(active) * tables.shape[1])


SIBLINGS: dict[str, Sibling] = {"sem-vr": sem_vr, "fiem": fiem}


def _batch(seed: int, round_: int, which: int, count: int, size: int) -> IntArray:
    """Distinct rows, drawn at random."""
    u = uniforms(seed, round_, Purpose.BATCH, np.array([which]), min(size, count))
    return choose_distinct(u, np.array([count]))[0]


def _each(model: Model, rows: Any, statistics: FloatArray) -> FloatArray:
    """s-bar_j(T(S)) of every single row j, ``(rows, q)``."""
    return model.expected_statistics(rows[:, None, :], model.maximize(statistics))
