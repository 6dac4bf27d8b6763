"""What keeps `AutoEM` from doing harm, and from stopping too early; all of it at the server.

*Never worse.* The messages tell how noisy H is. Where that is more than the parameters stand, here
or where H leads, S waits a round, in which workers send what was missing (finely, if a long step
leads to where the parameters stand little). And with H at both ends
of a step the server knows what the step did. U being `Model.surrogate` and s-bar = S + H, for any
theta and theta'

    U(s-bar, theta) - U(s-bar, theta')  <=  L(theta') - L(theta)
                                        <=  U(s-bar', theta) - U(s-bar', theta'),

the inequality of EM, read both ways. Where the right side is negative the step is undone, and those
that follow are cautious. Without noise this is EM itself, for which it never is.

*Not too early.* Where EM crawls, or rests near a saddle, its steps are short long before its end. A
few plain steps leave the slowest direction alone; one bold step along it, as long as would be
worth `worth` nats were the likelihood straight, then tells: the mean of both sides above is what it
gained, to third order. Where that is less than a quarter of its worth, less than a third of its
worth is left, and it is undone.

Regions (`Model.regions`) have nothing to do with each other: each is judged by itself. What must be
remembered is in `ServerState.extras`, which checkpoints hold.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from emfed.algorithms import steps
from emfed.compressors import ChosenDithering
from emfed.core.protocols import (
    BoolArray,
    FloatArray,
    Metric,
    Model,
    Replies,
    Request,
    ServerState,
)
from emfed.core.streams import Purpose, uniforms

Extras = dict[str, FloatArray]

# A constant without a figure beside it was not tuned; `python -m benchmarks right` holds that with
# all of them no fit ends below its start. Smaller numbers wait and undo more, and cost rounds.
STAND = 0.05
"""|noise of H|^2 in the metric beyond which S waits; `benchmarks answer` stays below."""
FRAGILE = 0.05
"""Noise in a coordinate, relative to `Metric.lightest`: a mean may move by a fifth of a spread."""
STILL, MOST_WAITS = 0.05, 4
"""The noise with which workers answer while S waits, and for how many rounds it does at most."""
FAR, PROBES = 0.02, 4
"""|H|^2 in the metric from which on `weight_ahead` is looked at, and the vectors of signs that tell
it. Neither is tuned: shorter steps hardly change a metric, and only the order of magnitude
matters."""
WORSE = 1e-3
"""Nats a sample that a step may seem to lose before it is undone."""
LEAP, LEAPS = 2.0, 100.0
"""|H|^2 in the metric, and so many times what it was on average, from which on no bound is needed
to see that the last step did harm: EM leaves saddles slowly."""
MOST_CAUTION, WARY = 6, 8
"""How often the noise that S stands is quartered; the good steps after which it grows again."""
PLAIN = 4
"""Steps that leave the slowest direction alone: on a plateau of storms they then differ by 1e-3."""
BOLD, JUDGE = PLAIN + 1, PLAIN + 2
"""The numbers of the bold step and of the round that judges it, counted from the first plain
step."""
MOST_PLAIN = 12
"""More of them at most, while H still turns: with four alone, fits of storms from two starts of
five missed .018 nats."""
SHRINKS = 0.7
"""|H|^2 beside that of the step before, below which EM does not crawl."""
PURE, PURE_FROM = 2e-3, PLAIN - 1
"""|noise|^2 / |H|^2 in the last plain steps and at the bold one, at most; `pure` says why."""
FINE = 2e-3
"""The noise of the broadcast on the way there."""
WORTH, MOST_WORTH = 10.0, 1e-3
"""What a bold step is worth, in units of the nats that may be left; at most, in nats."""
LONGEST = 0.5
"""The length of a bold step in the metric: beyond, nothing is straight."""
CUBIC = 1.7
"""A bold step of f times H is judged by the mean of two bounds. Their error is of third order, at
most about (f^2 |H|^2 / 2)^(3/2): that is what the step is worth, f |H|^2, at f = 1.7 / |H|^(1/2).
On a plateau of hastie (tied, seed 2 in test_default.py) a step of 5,780 times H gained 2e-5 nats
and seemed to lose 8e-4; EM gained 5e-3 more."""
LEAST_DUE = 1 / 64
"""What a bold step must be worth at least to count, in `worth`: less is lost in rounding."""


class Seen(NamedTuple):
    """What the server sees in a round."""

    model: Model
    state: ServerState
    request: Request
    metric: Metric
    mean_field: FloatArray
    noise: float
    """The variance of H's noise in each coordinate of the metric."""


def number(extras: Extras, name: str) -> float:
    """A number that may not have been set yet."""
    return float(extras.get(name, 0.0))


def noise_of(metric: Metric, replies: Replies, weights: FloatArray) -> float:
    """The variance of H's noise in each coordinate of the metric, as the messages tell it.

    The rate of a message is 1 - noise / |Q|^2 (`ChosenDithering.rate`).
    """
    squared = (metric.whiten(replies.values) ** 2).sum(axis=-1)
    total = float((weights**2 * (1 - replies.rates)) @ squared)
    return total / max(1, replies.values.shape[-1])


def apart(seen: Seen, replies: Replies, weights: FloatArray, share: float) -> float:
    """The mean squared distance of workers from the mean of all, in the metric, without noise.

    First uploads alone tell it: they hold all that a worker sees, and not what is new. Infinite
    where few answered, or where distances have no unit. Where only sums are told, large workers
    count for more, and regions are not told apart: none is further than all of them together.
    ``share`` is then the sum of everybody's squared weights: single ones are nobody's to know.
    """
    total = float(weights.sum())
    if total < 0.5 or not seen.metric.in_nats:
        return np.inf
    if seen.request.lattice is not None:
        told = steps.energy_of(seen.request, replies, seen.state, seen.mean_field)
        if "innovation" not in told:  # no length was told, now or before: nothing is new to anyone
            return np.inf
        squared = float(told["innovation"])
        mean = seen.metric.whiten(seen.mean_field / total)
        return max(1e-3, squared / share - float(mean @ mean))
    white = seen.metric.whiten(replies.values) ** 2
    white -= ((1 - replies.rates) * white.mean(axis=1))[:, None]
    excess = weights @ white / total - seen.metric.whiten(seen.mean_field / total) ** 2
    return max(1e-3, *(float(excess[cut].sum()) for cut in seen.model.regions))


def stands(model: Model, metric: Metric) -> float:
    """How much noise in each coordinate the parameters stand."""
    widest = max(cut.stop - cut.start for cut in model.regions)
    return min(STAND / widest, FRAGILE * metric.lightest)


def weight_ahead(seen: Seen) -> float:
    """What noise of variance 1 in each coordinate weighs in the metric of where H leads.

    It is the sum over a region, and the largest one counts. Components that get narrow in one step,
    as on columns with one value in most rows, stand a thousandth of the noise, or less, that was
    small beside what they were. Infinite where H leads out of the domain.
    """
    model, here = seen.model, seen.state.statistics
    signs = np.sign(uniforms(0, 0, Purpose.PROBE, np.arange(PROBES), len(here)) - 0.5)
    with np.errstate(all="ignore"):  # noise may lead anywhere
        ahead = model.protect(here, here + seen.mean_field)
        if not model.inside(ahead):
            return np.inf
        metric = model.metric(model.maximize(ahead))
        white = (metric.whiten(seen.metric.unwhiten(signs)) ** 2).mean(axis=0)
        weight = max(float(white[cut].sum()) for cut in model.regions)
    return weight if np.isfinite(weight) else np.inf


def pure(seen: Seen, worth: float) -> float:
    """How much noise in each coordinate leaves the direction of H.

    The bold step makes H `times` as long, and what points elsewhere with it, which costs half its
    square. That may be an eighth of what the step is worth.
    """
    white = seen.metric.whiten(seen.mean_field) ** 2
    regions = [white[cut] for cut in seen.model.regions if cut.stop > cut.start]
    shares = [_share(float(own.sum()), worth) * float(own.mean()) for own in regions]
    return max(min(shares), PURE * 1e-15)


def _share(squared: float, worth: float) -> float:
    """The part of H, squared, that may point elsewhere."""
    return min(PURE, 1 / (4 * times(squared, worth)))


def turns(seen: Seen, extras: Extras) -> bool:
    """Whether H is as long as at the last plain step, and still points elsewhere.

    Then EM may crawl, and the slowest direction is not alone yet.
    """
    if number(extras, "plain") >= MOST_PLAIN or not {"ahead", "good"} <= {*extras}:
        return False
    now = seen.metric.whiten(seen.mean_field)
    last = seen.metric.whiten(extras["ahead"] - extras["good"])
    for cut in seen.model.regions:
        squares = float(now[cut] @ now[cut]), float(last[cut] @ last[cut])
        if squares[0] > SHRINKS * squares[1] > 0:
            elsewhere = 1 - float(now[cut] @ last[cut]) ** 2 / (squares[0] * squares[1])
            noise = 2 * seen.noise * (cut.stop - cut.start) / min(squares)
            if elsewhere > noise + _share(squares[0], number(extras, "worth")):
                return True
    return False


def _bound(seen: Seen, other: FloatArray) -> FloatArray:
    """U(s-bar, theta of ``other``) - U(s-bar, theta) in each region, s-bar and theta at S."""
    now = seen.state.statistics + seen.mean_field
    with np.errstate(all="ignore"):  # a step may have led anywhere
        there = seen.model.surrogates(now, seen.model.maximize(other))
        return there - seen.model.surrogates(now, seen.request.params)


def worse(seen: Seen, extras: Extras, budget: float) -> BoolArray:
    """Which regions the last step, from ``good``, has made worse."""
    if "good" not in extras:
        return np.zeros(len(seen.model.regions), dtype=bool)
    good, model = extras["good"], seen.model
    with np.errstate(all="ignore"):
        way = seen.state.statistics - good
        before = model.metric(model.maximize(good))
        ends = [metric.whiten(way) ** 2 for metric in (before, seen.metric)]
        length = [min(float(end[cut].sum()) for end in ends) for cut in model.regions]
        slack = 3 * np.sqrt(seen.noise * np.array(length)) + max(WORSE, budget)
        return np.asarray(~(_bound(seen, good) >= -slack))


def leapt(seen: Seen, extras: Extras) -> BoolArray:
    """In which regions the last step led to a place that H points away from."""
    white, most = seen.metric.whiten(seen.mean_field) ** 2, np.inf
    if "good" in extras and "energy" in extras:
        most = max(LEAP, LEAPS * number(extras, "energy"))
    return np.array([not white[cut].sum() <= most for cut in seen.model.regions])


def undo(seen: Seen, bad: BoolArray, extras: Extras) -> tuple[steps.Moved, Extras]:
    """S before the last step, in the regions that it made worse, and more caution from now on."""
    gone = ("good", "ahead", "energy", "probe", "plain", "local", "crawls")
    kept = {n: a for n, a in extras.items() if n not in gone}
    caution = min(number(extras, "caution") + 1, MOST_CAUTION)
    kept |= {"caution": np.array(caution), "quiet": np.zeros(()), "age": np.zeros(())}
    statistics = _mixed(seen, extras["good"], bad)
    return steps.in_full(seen.model, statistics, seen.request, 0.0, 0), kept


def _mixed(seen: Seen, other: FloatArray, where: BoolArray) -> FloatArray:
    """S with ``other`` in some regions."""
    out = seen.state.statistics.copy()
    for cut, there in zip(seen.model.regions, where, strict=True):
        if there:
            out[cut] = other[cut]
    return out


def calm_down(extras: Extras) -> Extras:
    """Caution goes with good steps."""
    caution, quiet = number(extras, "caution"), number(extras, "quiet") + 1
    if caution and quiet >= WARY:
        caution, quiet = caution - 1, 0.0
    return {"caution": np.array(caution), "quiet": np.array(quiet)}


def ask(extras: Extras, nats: float) -> Extras:
    """Begin to find out whether no more than ``nats`` are left, unless that has begun."""
    if number(extras, "probe"):
        return extras
    worth = max(number(extras, "worth"), WORTH * nats)
    return extras | {"probe": np.ones(()), "worth": np.array(worth)}


def factor(white: FloatArray, worth: float) -> float:
    """How many times this step, in the metric, is worth ``worth`` nats where all is straight."""
    squared = float(white @ white)
    return max(1.0, min(worth / squared, LONGEST / np.sqrt(squared))) if squared > 0 else 1.0


def times(squared: float, worth: float) -> float:
    """How many times H, of this length squared, a bold step is: as long as it can be judged."""
    if not squared > 0:
        return 1.0
    return max(1.0, min(worth / squared, LONGEST / squared**0.5, CUBIC / squared**0.25))


def bold(seen: Seen, seed: int, extras: Extras) -> tuple[steps.Moved, Extras]:
    """A step along H in each region, of a length that would be worth ``worth`` nats."""
    white, move = seen.metric.whiten(seen.mean_field), seen.mean_field.copy()
    due, worth = np.empty(len(seen.model.regions)), number(extras, "worth")
    for place, cut in enumerate(seen.model.regions):
        squared = float(white[cut] @ white[cut])
        longer = times(squared, worth)
        move[cut] *= longer
        due[place] = np.clip(longer * squared, LEAST_DUE * worth, worth)
    moved = _finely(seen, seed, move, float(due.min()))
    left = -_bound(seen, moved.statistics)
    return moved, {n: a for n, a in extras.items() if n != "plain"} | {
        "good": seen.state.statistics,
        "left": left,
        "due": due,
        "probe": np.array(float(JUDGE)),
        "age": np.zeros(()),
    }


def judge(seen: Seen, seed: int, extras: Extras) -> tuple[steps.Moved, Extras]:
    """Keep the bold step where it gained what it was worth, or a quarter; go back elsewhere.

    Where no region gained that, the run is ``sure``: what is left is little.
    """
    worth, due, good = number(extras, "worth"), extras["due"], extras["good"]
    gone = ("good", "ahead", "energy", "left", "due")
    kept = {n: a for n, a in extras.items() if n not in gone}
    kept["probe"] = np.zeros(())
    right = _bound(seen, good)
    if len(right) != len(extras["left"]):  # candidates were dropped meanwhile: ask again
        return steps.Moved(seen.state.statistics, 0.0, 0), kept
    gained = (extras["left"] + right) / 2 >= due / 4
    if gained.any():
        kept["worth"] = np.array(max(worth, min(4 * float(due.max()), MOST_WORTH)))
    else:
        kept["sure"] = np.ones(())
    if gained.all():
        return steps.Moved(seen.state.statistics, 0.0, 0), kept
    back = _mixed(seen, good, ~gained) - seen.state.statistics
    return _finely(seen, seed, back, float(due.min())), kept


def _finely(seen: Seen, seed: int, move: FloatArray, worth: float) -> steps.Moved:
    """A move whose noise costs little against ``worth``: in full where the finest step costs more.

    Noise of variance v costs about v / 2.
    """
    white = seen.metric.whiten(move)
    finest = ChosenDithering.finest * float(white @ white)
    if finest / 2 > worth / 8:
        return steps.move_in_full(seen.model, seen.state, seen.request, move)
    channel = steps.Channel(ChosenDithering(ChosenDithering.finest), None, in_metric=True)
    return steps.move_by(seen.model, seed, seen.state, seen.request, move, channel)
