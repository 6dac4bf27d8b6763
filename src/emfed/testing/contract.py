"""`check_model`: does a model keep the contract of `Model`, and if not, what is broken?"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from emfed.algorithms.steps import shorten
from emfed.core.errors import ContractError, DataError, check_type
from emfed.core.protocols import (
    AssignsRows,
    DrawsRows,
    FillsRows,
    Model,
    ScoresRows,
    SimulatesLatents,
    StartsFromClusters,
)
from emfed.core.registry import MODELS, plain
from emfed.testing.subject import Broken, Subject, apart, as_float32, blend, expect

TIGHT = 1e-9
"""Differences of rounding only."""
EM_STEPS = 400
"""EM steps towards a fixed point."""


def statistics_average(on: Subject) -> None:
    """Statistics of a union are the weighted mean of those of its parts."""
    whole = on.statistics
    expect(
        whole.shape == (on.model.layout.size,) and whole.dtype == np.float64,
        f"expected_statistics must give float64 of shape ({on.model.layout.size},), the size of "
        f"the layout; got {whole.dtype} of shape {whole.shape}",
    )
    expect(bool(np.isfinite(whole).all()), "expected_statistics are not finite at the start")
    cut = on.count // 3
    low, high = (on.model.expected_statistics(p, on.start) for p in (on.rows[:cut], on.rows[cut:]))
    union = (cut * low + (on.count - cut) * high) / on.count
    expect(
        apart(whole, union) < TIGHT,
        "expected_statistics of a union of rows are not the mean of those of its parts weighted "
        f"by their rows (off by {apart(whole, union):.1e}): they must be averages over samples, "
        "not sums or ratios of sums",
    )


def weights_repeat(on: Subject) -> None:
    """A row of weight two counts like the row twice, in statistics and likelihood."""
    rows = on.rows[:6]
    times = np.array([1, 0, 2, 1, 3, 1])
    again, weights = np.repeat(rows, times, axis=0), times.astype(np.float64)
    pairs = {
        "expected_statistics": on.model.expected_statistics,
        "log_likelihood": on.model.log_likelihood,
    }
    for name, function in pairs.items():
        gap = apart(function(again, on.params), function(rows, on.params, weights))
        expect(
            gap < TIGHT,
            f"{name} with weights is not the weighted mean: rows of weight 2 must count like the "
            f"row twice (off by {gap:.1e})",
        )


def axes_broadcast(on: Subject) -> None:
    """Rows and parameters with leading axes give what each gives alone."""
    size = on.count // 3
    stack = np.stack([on.rows[i * size : (i + 1) * size] for i in range(3)])
    together = on.model.expected_statistics(stack, on.start)
    alone = [on.model.expected_statistics(part, on.start) for part in stack]
    gap = apart(np.stack(alone), together)
    expect(
        gap < TIGHT,
        "expected_statistics of rows (workers, samples, ...) must be (workers, q), each worker as "
        f"if alone (off by {gap:.1e}): a leading axis does not broadcast",
    )
    statistics = np.stack([on.statistics, on.step(on.params), on.step(on.model.start(on.seed + 1))])
    own = on.model.maximize(statistics)
    for index in range(3):
        mine = on.model.maximize(statistics[index])
        gap = max(apart(v, own.take(index).arrays()[n]) for n, v in mine.arrays().items())
        expect(gap < TIGHT, f"maximize of statistics (workers, q) differs from one by one ({gap})")
    several = on.model.expected_statistics(stack, own)
    values = on.model.log_likelihood(stack, own)
    for index in range(3):
        params = own.take(index)
        gap = max(
            apart(on.model.expected_statistics(stack[index], params), several[index]),
            apart(on.model.log_likelihood(stack[index], params), values[index]),
        )
        expect(
            gap < TIGHT,
            "with parameters of a leading axis, each worker must use its own: expected_statistics "
            f"or log_likelihood do not broadcast over parameters (off by {gap:.1e})",
        )


def maximize_minimises(on: Subject) -> None:
    """T(s) minimises the surrogate: no direction along the constraints goes down."""
    model, s, best = on.model, on.statistics, on.params
    low = float(model.surrogate(s, best))
    expect(bool(np.isfinite(low)), "surrogate is not finite at T(s)")
    size = 1e-4
    for direction in on.directions(8):
        for sign in (1.0, -1.0):
            moved = s + sign * size * direction
            if not model.inside(moved):
                continue
            slope = (float(model.surrogate(s, model.maximize(moved))) - low) / size
            _expect_uphill(slope, low, "along T itself")
    for which in range(6):
        far = model.start(on.seed + 100 + which)
        slope = (float(model.surrogate(s, blend(best, far, size))) - low) / size
        _expect_uphill(slope, low, "towards other parameters")


def _expect_uphill(slope: float, low: float, where: str) -> None:
    """A slope may be of the order of the step, as at the bottom of a parabola, not below."""
    expect(
        slope > -1e-6 * (1 + abs(low)),
        "maximize does not minimise the surrogate psi + R - <s, phi>: its slope at T(s), "
        f"{where}, is {slope:.2e} and not >= 0. Either maximize or surrogate (or penalty in it) "
        "is wrong",
    )


def maximize_inverts(on: Subject) -> None:
    """T(statistics_of(theta)) is theta, and the start lies in the domain."""
    model = on.model
    expect(
        model.inside(model.statistics_of(on.start)),
        "statistics_of(start) lie outside the domain: a run could not begin",
    )
    once = model.maximize(model.statistics_of(on.params))
    again = model.maximize(model.statistics_of(once))
    gap = max(apart(v, again.arrays()[n]) for n, v in once.arrays().items())
    expect(
        gap < 1e-6 or model.penalty(once) != 0,
        f"maximize(statistics_of(theta)) is not theta (off by {gap:.1e}): statistics_of must be "
        "E[s(y, z)] when the model itself draws y and z",
    )


def em_descends(on: Subject) -> None:
    """EM never lowers the observed likelihood (penalised by R)."""
    for start in (on.start, on.model.start(on.seed + 1)):
        params = on.model.maximize(on.step(start))
        values = [on.objective(params)]
        for _ in range(12):
            params = on.model.maximize(on.step(params))
            values.append(on.objective(params))
        rises = np.diff(values)
        worst = int(np.argmax(rises))
        expect(
            bool(rises[worst] <= TIGHT * (1 + abs(values[0]))),
            f"an EM step lowered the observed likelihood less R by {rises[worst]:.2e} (step "
            f"{worst + 1}): expected_statistics, maximize and log_likelihood do not belong to one "
            "model",
        )


def fixed_points_are_stationary(on: Subject) -> None:
    """EM settles where h = 0, and there the observed likelihood is flat."""
    model, statistics = on.model, on.statistics
    first = np.linalg.norm(on.step(on.params) - statistics)
    for _ in range(EM_STEPS):
        after = on.step(model.maximize(statistics))
        field, statistics = after - statistics, after
        if np.linalg.norm(field) < 1e-9:
            break
    length = float(np.linalg.norm(on.step(model.maximize(statistics)) - statistics))
    expect(
        length <= max(1e-6, 0.2 * float(first)),
        f"EM does not settle: |h| was {first:.1e} at first and is {length:.1e} after {EM_STEPS} "
        "steps; is expected_statistics a function of data and parameters alone?",
    )
    params = model.maximize(statistics)
    bottom, size = on.objective(params), 1e-4
    for which in range(6):
        far = model.start(on.seed + 200 + which)
        slope = (on.objective(blend(params, far, size)) - bottom) / size
        expect(
            slope > -1e-3 * (1 + abs(bottom)) - 100 * length,
            f"at EM's fixed point the observed likelihood still rises (slope {-slope:.1e}): h = 0 "
            "must mean a stationary point",
        )


def guard_holds(on: Subject) -> None:
    """Steps of any size end inside the domain, where T is finite; outside is seen."""
    model, before = on.model, on.statistics
    expect(model.inside(before), "statistics of the data at the start are not inside")
    for which in range(9):
        size = (0.1, 3.0, 100.0)[which % 3]
        move = size * on.draws(300 + which, len(before))
        with np.errstate(all="ignore"):
            after, _, _ = shorten(model, before, move)
            expect(model.inside(after), "the guard ended outside the domain")
            params = model.maximize(after)
            arrays = {**params.arrays(), "log_likelihood": model.log_likelihood(on.rows, params)}
        bad = [name for name, value in arrays.items() if not np.isfinite(value).all()]
        expect(
            not bad,
            f"inside() accepts statistics at which maximize is not finite ({', '.join(bad)}): the "
            "domain must be where T is defined",
        )
    for value in (np.nan, np.inf):
        wrong = before.copy()
        wrong[0] = value
        expect(not model.inside(wrong), f"inside() accepts {value}: the guard would let it pass")


def float32_is_exact(on: Subject) -> None:
    """Single-precision rows give the answer of the same numbers in doubles."""
    single = as_float32(on.rows)
    on.model.check(single, "rows in single precision")
    double = single.astype(np.float64)
    got = on.model.expected_statistics(single, on.start)
    gap = apart(on.model.expected_statistics(double, on.start), got)
    expect(
        got.dtype == np.float64 and gap < TIGHT,
        f"float32 rows lose the answer (off by {gap:.1e}, {got.dtype}): bring rows to float64 "
        "before computing with them",
    )


def missing_is_as_said(on: Subject) -> None:
    """NaN is refused with a `DataError`, or is a missing value if the model allows that."""
    model, holes = on.model, on.with_holes()
    if not model.allows_missing:
        try:
            model.check(holes, "rows with NaN")
        except DataError:
            return
        raise Broken("allows_missing is False, but check() accepts NaN: refuse it with a DataError")
    try:
        model.check(holes[1:], "rows with NaN")
    except DataError as error:
        raise Broken(f"allows_missing is True, but check() refuses NaN: {error}") from None
    statistics = model.expected_statistics(holes, on.start)
    value = model.log_likelihood(holes, on.start)
    expect(
        bool(np.isfinite(statistics).all() and np.isfinite(value)),
        "allows_missing is True, but statistics or likelihood of rows with NaN are not finite",
    )
    empty = float(model.log_likelihood(holes[:1], on.start))
    expect(
        abs(empty) < TIGHT,
        f"a row of which nothing was seen must have log-likelihood 0; got {empty:.2e}",
    )


def simulation_is_unbiased(on: Subject) -> None:
    """Simulated statistics average to the expected ones, where the model has a simulation."""
    model = on.model
    if not isinstance(model, SimulatesLatents):
        return
    rows, repeats, draws = on.rows[:16], 24, 16
    u = on.uniform(500, repeats, len(rows), draws * model.latent_size)
    sample = np.stack([model.simulated_statistics(rows, on.params, part) for part in u])
    error = sample.mean(axis=0) - model.expected_statistics(rows, on.params)
    spread = sample.std(axis=0, ddof=1) / np.sqrt(repeats)
    worst = float(np.max(np.abs(error) / (6 * spread + 1e-3)))
    expect(
        worst < 1,
        f"simulated_statistics are off their expectation by {6 * worst:.0f} standard errors: draws "
        "of z must follow p(z | y; theta)",
    )


def rows_are_scored(on: Subject) -> None:
    """Scores of rows average to the likelihood, and shares of components sum to one."""
    model = on.model
    if isinstance(model, ScoresRows):
        gap = apart(model.log_likelihood(on.rows, on.params), _scores(model, on).mean())
        expect(gap < 1e-8, f"log_likelihood is not the mean of score_samples (off by {gap:.1e})")
    if isinstance(model, AssignsRows):
        shares = np.asarray(model.responsibilities(on.rows, on.params))
        total = shares.sum(axis=-1)
        gap = apart(total > 0.5, total)  # 0 for steps after the end of a sequence
        expect(
            shares.shape[0] == on.count and gap < 1e-8 and bool(np.all(shares >= 0)),
            f"responsibilities must be shares (rows, components) that sum to one (off by {gap})",
        )


def _scores(model: ScoresRows, on: Subject) -> Any:
    scores = np.asarray(model.score_samples(on.rows, on.params))
    expect(scores.shape[:1] == (on.count,), "score_samples must give one number for each row")
    return scores


def draws_are_rows(on: Subject) -> None:
    """Rows that the model draws are ones it accepts, and the seed alone decides them."""
    model = on.model
    if not isinstance(model, DrawsRows):
        return
    (rows, labels), (again, _) = (model.sample(on.params, 40, on.seed) for _ in range(2))
    model.check(rows, "rows that the model drew")
    expect(len(rows) == len(labels) == 40, "sample(params, 40, seed) must give 40 rows and labels")
    expect(bool(np.array_equal(rows, again)), "sample gives other rows with the same seed")


def holes_are_filled(on: Subject) -> None:
    """What was seen stays as it is, what was missing gets numbers, ends of intervals in order."""
    model, holes = on.model, on.with_holes()
    if not isinstance(model, FillsRows) or not model.allows_missing:
        return
    low, high = model.intervals(holes, on.params, 0.9)
    draws = model.draw(holes, on.params, 2, on.seed)
    for name, filled in (("impute", model.impute(holes, on.params)), ("draw", draws[1])):
        kept = bool(np.all((filled == holes) | np.isnan(holes)))
        expect(kept, f"{name} changes values that were seen")
        more = np.isfinite(filled).sum() > np.isfinite(holes).sum()  # an exposure stays missing
        expect(bool(more), f"{name} fills nothing in")
    expect(not np.any(low > high), "intervals have lower ends above their upper ends")


def clusters_start_it(on: Subject) -> None:
    """Parameters from clusters lie in the domain."""
    model = on.model
    if not isinstance(model, StartsFromClusters) or (one := model.clusters(1)) is None:
        return
    k, d = model.n_components, one.n_features
    centres = 0.1 * on.draws(600, k, d)
    params = model.start_at(np.full(k, 1 / k), centres, np.full(d, 0.5))
    expect(
        model.inside(model.statistics_of(params)), "start_at gives parameters outside the domain"
    )


def settings_travel(on: Subject) -> None:
    """A registered model is what its description builds; others stay in this process."""
    told = plain(on.model.describe())
    if told.get("model") in MODELS:
        made = plain(MODELS.build(told).describe())
        expect(made == told, "the model that its description builds describes itself otherwise")


def plain_things(on: Subject) -> None:
    """Units go there and back, descriptions are JSON, the metric is invertible."""
    model = on.model
    user = model.to_user(on.params)
    back = model.to_user(model.from_user(user))
    gap = max(apart(v, back.arrays()[n]) for n, v in user.arrays().items())
    expect(gap < 1e-7, f"from_user does not undo to_user (off by {gap:.1e})")
    try:
        json.dumps(model.describe())
    except (TypeError, ValueError) as error:
        raise Broken(f"describe() must hold plain JSON types: {error}") from None
    metric = model.metric(on.params)
    vectors = on.draws(400, 3, model.layout.size)
    gap = apart(vectors, metric.unwhiten(metric.whiten(vectors)))
    expect(gap < 1e-6, f"metric.unwhiten does not undo metric.whiten (off by {gap:.1e})")


CHECKS: dict[str, Callable[[Subject], None]] = {
    check.__name__.replace("_", " "): check
    for check in (
        statistics_average,
        weights_repeat,
        axes_broadcast,
        maximize_minimises,
        maximize_inverts,
        em_descends,
        fixed_points_are_stationary,
        guard_holds,
        float32_is_exact,
        missing_is_as_said,
        simulation_is_unbiased,
        rows_are_scored,
        draws_are_rows,
        holes_are_filled,
        clusters_start_it,
        settings_travel,
        plain_things,
    )
}
"""Every check by name; the first line of each says what it expects."""


@final
@dataclass(frozen=True)
class Report:
    """What `check_model` found.

    Examples
    --------
    >>> from emfed.testing import Report
    >>> print(Report(("settings_travel",), {}))
      ok      settings_travel
    """

    kept: tuple[str, ...]
    """The promises that are kept."""
    broken: dict[str, str]
    """The broken ones, in words."""

    def __str__(self) -> str:
        lines = [f"  ok      {name}" for name in self.kept]
        lines += [f"  BROKEN  {name}: {words}." for name, words in self.broken.items()]
        return "\n".join(lines)


def check_model(model: Any, data: Any, *, seed: int = 0, raises: bool = True) -> Report:
    """Check that a model keeps the contract of `emfed.core.protocols.Model` on these data.

    Parameters
    ----------
    model : Model
        The model.
    data : table, dict or list
        Whatever `emfed.fit` takes: a few dozen rows, of the kind that the model is for, do.
    seed : int
        The seed of starts and draws.
    raises : bool
        Whether a broken promise is raised; otherwise the report says it.

    Returns
    -------
    Report
        The promises kept, and the broken ones in words; each is one of `CHECKS`.

    Raises
    ------
    ContractError
        If a promise is broken; the message says how.

    Examples
    --------
    >>> import emfed
    >>> rows = emfed.data.synthetic_federation(workers=2, rows_per_worker=20)
    >>> report = emfed.testing.check_model(emfed.gaussian_mixture(2, "diag"), rows)
    >>> report.broken
    {}
    """
    check_type("model", model, Model, "gaussian_mixture(3)")
    on = Subject.open(model, data, seed)
    kept, broken = [], {}
    for name, check in CHECKS.items():
        try:
            check(on)
        except Broken as failure:
            broken[name] = str(failure)
        except Exception as error:
            broken[name] = f"{type(error).__name__}: {error}"
        else:
            kept.append(name)
    report = Report(tuple(kept), broken)
    if broken and raises:
        raise ContractError(f"{type(model).__name__} breaks its contract:\n{report}")
    return report
