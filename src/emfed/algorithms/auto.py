"""EM for few bytes and without knobs: every setting follows from what a worker sees.

The paper's algorithms take small steps so that their theorems hold. This one is meant for a
federation of organisations, where a full local pass is cheap and a message is dear; it stands
beside them, outside Theorem 1.

* *One scale.* Innovations are quantised in the model's metric, whitened by parameters that both
  ends know.
* *Noise that is chosen.* With subtractive dither E|Q(x) - x|^2 = omega |x|^2 is picked, not
  bounded. A worker takes as much as full steps stand. Noise in H moves S, which moves s-bar_i,
  which must be sent again: omega (1 + omega) = n / (`INVERSE_LOOP_GAIN` L^2) keeps the gain of
  that loop at 1 / `INVERSE_LOOP_GAIN` (Theorem 1's limit at step 1 has omega (1 + omega)^2), with
  L^2 the worker's own squared Lipschitz constant, measured from round to round. While innovations
  are large, the noise of H is at most `NOISE_NATS` besides, so that it cannot push EM into another
  basin.
* *Momentum when close.* Near an optimum EM is gradient descent at step 1 in the metric, its
  Hessian's eigenvalues in (0, 1]. Nesterov's momentum, restarted when it points the wrong way
  (O'Donoghue and Candes, 2015), then needs no constants. Far away plain steps keep EM's basin.
* *Local steps where workers are alike.* Far from an optimum a worker goes on by itself before it
  answers: Q <- s-bar_i(Q) + d_i, from Q = S. The drift d_i = S - c_i, with c_i what it saw last,
  corrects for how it differs from all, since S is the mean of all c_i; averaged over as many rounds
  as there are steps it cannot oscillate. Where nothing moves any more Q = S: the fixed points are
  EM's, whatever anyone's number of steps. That number falls as |d_i| grows in the metric, to one.
* *Bold with many, faithful with few.* The budget and the place where momentum begins shrink with
  the number of workers: few are organisations, whose bits are few anyway and whose answer should
  be the one that pooling gives.
* *Steps are broadcast*, quantised the same way.
* *Never worse, and not too early*: `emfed.algorithms.safeguards`.

With partial participation a memory follows s-bar_i and not h_i, and H sums the memories of all: a
worker that is away stands for itself with what it last said, as in the incremental EM of Neal and
Hinton (1998). No term is divided by p, so absence costs staleness and no noise, and the step stays
1. A worker's memory is kept relative to the S it was first asked at (its anchor); one that was
never heard has no say.

Decision: docs/decisions/017-local-steps-and-auto-em.md
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self, final

import numpy as np

from emfed.algorithms import memory, safeguards, spider, steps
from emfed.algorithms.base import MOST_SHARE
from emfed.algorithms.safeguards import Extras, Seen, number
from emfed.compressors import ChosenDithering
from emfed.core.errors import SettingsError, check_count, check_range, check_type
from emfed.core.messages import RequestKind
from emfed.core.protocols import (
    ALONE,
    Algorithm,
    BoolArray,
    Crowd,
    FloatArray,
    Heard,
    IntArray,
    Lattice,
    Layout,
    Model,
    Reduces,
    Replies,
    Request,
    ServerState,
    StateField,
    StepInfo,
    Task,
    WorkerStates,
)

# docs/automatic.md says what was tried. A constant without a figure beside it was not tuned: it was
# set once, and `python -m benchmarks answer` and `right` hold what all of them together reach.
INVERSE_LOOP_GAIN = 24.0
"""The inverse of the gain of the loop of noise described above. Gains of 1/12 to 1/3 were tried:
bytes a round fall, rounds grow, and the product is worse (docs/automatic.md)."""
MANY_WORKERS = 75.0
"""Workers from which on the next two are what they say; fewer are held closer to EM's own path."""
NOISE_NATS, LEAST_NOISE_NATS = 0.01, 1e-5
"""Nats per sample, about, that noise may cost a step while steps are large."""
MOMENTUM_BELOW, LEAST_MOMENTUM_BELOW = 0.1, 0.003
"""|H|^2 in the metric below which momentum is worth its risk."""
MOST_MOMENTUM = 0.8
"""The largest momentum. Not tuned: nearer to 1 a slow direction is faster and noise is carried on
for longer."""
CRAWLS_AFTER, CRAWLING_MOMENTUM = 60, 0.99
"""Rounds with momentum and without a restart after which EM crawls; and the largest momentum from
then on, where fine answers and steps leave it no noise to carry on. Rounds of mixtures of factor
analysers on three tables, `grunfeld` of statsmodels one of them: 1,000, 1,000 and 220 without, 150,
253 and 143 with it; from 40 on it is 107, 190 and 111, and more of the usual fits take it."""
LARGEST_DRIFT, DRIFT_TIMES_STEPS = 1.0, 2.0
"""The mean of |d_i|^2 in the metric from which on nobody goes on alone; and |d_i| times the local
steps after the first. Workers of 700 rows of MNIST at random have 0.7, sorted by label 60."""
FAR_MOVE, FAR_TIMES = 0.02, 1.5
"""|S - its last place|^2 in the metric above which local steps after the first are so many times as
many: S is far from an optimum, where workers' own maps agree well enough. Always as many (four
where there are three) reach 1e-2 nats sooner and then crawl. So do the twelve stations of Beijing
(`benchmarks figure`: 36 rounds to 1e-3, where 1.0 takes 14): few workers take less of it."""
LATE_SHARE, STALLED_SHARE = 0.01, 0.75
"""Momentum takes over from local steps where |H|^2 is below this share of the mean of |d_i|^2: the
less workers differ, the longer local steps are the better ones. And where |H|^2 is more than that
share of its running mean: it falls by less than a tenth a round."""
COARSEST_STEP = 0.1
"""The noise of the broadcast: one message serves all, so it may be fine. `benchmarks answer` on
MNIST tied, random, medians to 1e-3 nats: 0.02 takes 31 rounds and 2.7 kB down, 0.1 32 and 1.9 kB,
0.2 34 and 1.7 kB."""
MOST_STEPS = 100
"""Passes over the rows that one answer may take, at most: a site computes what a server names.
Twelve times the default; nothing was measured to choose it."""
LOCAL_NOISE_NATS, COARSEST_LOCAL_STEP = 0.001, 0.02
"""The same two in local rounds: noise in S is noise in everybody's drift, and each local step adds
it again. `benchmarks answer network` on MNIST tied, random, five seeds, rounds to 1e-3: 6 to 10
(median 8) with both and with `FAR_TIMES`, 7 to 11 (11) without the first, 8 to 13 (11) without all
three, for about as many bytes."""
LEAST_CURVATURE, MOST_CURVATURE = 0.3, 1e12
"""Bounds of L^2 as a worker measures it. Not tuned: a smaller first number allows more noise where
a worker hardly moves; the second stands for what is not finite."""
NOISE_AHEAD, LEAST_NOISE_AHEAD = 0.05, 1e-3
"""|noise of H|^2 in the metric of where a far step leads, beyond which S waits; so much for many
workers. Of 11 fits on columns with heavy tails or many zeros that ended below EM, from the same
start and by 0.002 to 0.36 nats, two did so with it; a tenth of both numbers is no better."""
_OPERATOR = ChosenDithering()
_FINE_OPERATOR = ChosenDithering(5e-4, finest=5e-4)
"""What workers answer fine requests with."""


@final
@dataclass(frozen=True)
class AutoEM(Algorithm):
    """EM for few bytes and without settings: noise, steps and rates follow from what workers see.

    It is what ``algorithm="auto"`` means wherever there are several workers. It leaves Theorem 1:
    its step is 1, and it has momentum. docs/automatic.md says what it does.

    Parameters
    ----------
    follow_em : bool
        Take little noise, no momentum and no local steps, so that the run ends where pooled EM
        ends even where optima lie close together: few or small workers, many components.
    batch_size : int or None
        The rows of mini-batches between full passes (SPIDER, as in VR-FedEM). None stands for full
        local passes; a quarter of the rows or more does as well as these.
    inner_rounds : int
        The rounds from one full pass to the next, with mini-batches.
    local_steps : int
        The most EM steps that a worker makes before it answers, up to 100; 1 switches local steps
        off.
    share : float or None
        The sum of w_i^2, the weight of one worker were all equal; `resolve` fills it in.
    incremental : bool or None
        Whether memories follow s-bar_i, for partial participation; `resolve` fills it in.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> emfed.fit(model, data, emfed.AutoEM()).converged
    True
    """

    follow_em: bool = False
    batch_size: int | None = None
    inner_rounds: int = 4
    local_steps: int = 8
    share: float | None = None
    incremental: bool | None = None

    name: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        check_count("inner_rounds", self.inner_rounds)
        check_range("local_steps", check_count("local_steps", self.local_steps), 1, MOST_STEPS)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)
        if self.share is not None:
            check_type("share", self.share, float, "0.1")
            check_range("share", self.share, 0, np.inf, open_low=True, open_high=True)

    @property
    def broadcasts_steps(self) -> bool:
        """Steps are always broadcast."""
        return True

    @property
    def rounds_opening(self) -> bool:
        """Summaries are rounded to a millionth of a nat, unless the run is to follow EM."""
        return not self.follow_em

    @property
    def revisits_rows(self) -> bool:
        """Mini-batches take differences on the same rows."""
        return self.batch_size is not None

    @property
    def tells_gains(self) -> bool:
        """Its noise is a small share of what is left."""
        return True

    @property
    def rows_at_once(self) -> int:
        """A mini-batch."""
        return self.batch_size or 0

    @property
    def needs_start_round(self) -> bool:
        """Memories start at zero: sending them as floats costs more than it saves."""
        return False

    def resolve(self, layout: Layout, crowd: Crowd = ALONE) -> Self:
        """What the crowd of workers says."""
        return replace(self, share=1 / crowd.effective, incremental=crowd.probability < 1)

    def lattice(self, state: ServerState, workers: int) -> Lattice:
        """A share of the last innovations, within the budget; waiting for a finer one halves it.

        Where only sums are told nobody knows the curvature of one worker, and the share is what the
        rule of `_up` comes to at a curvature of 1.
        """
        assert self.share is not None
        room = 4 / (INVERSE_LOOP_GAIN * self.share)
        noise = min(room / (2 * (np.sqrt(1 + room) + 1)), MOST_SHARE)
        if self.asks(state) == "fine":
            noise = min(noise, _FINE_OPERATOR.finest)
        noise *= 0.25 ** number(dict(state.extras), "waits")
        return steps.next_lattice(state, workers, noise, self._budget, None)

    def state_fields(self, q: int) -> dict[str, StateField]:
        """The memory's; where the worker was last asked, what it saw there, and L^2; d_i."""
        state_fields = memory.state_fields(q) | {
            "place": StateField((q,), np.float64),
            "seen": StateField((q,), np.float64),
            "curvature": StateField((), np.float64),
            "anchor": StateField((q,), np.float64),
            "drift": StateField((q,), np.float64),
            "walked": StateField((), np.int64, 1),
        }
        return state_fields if self.batch_size is None else state_fields | spider.state_fields(q)

    def worker_step(self, task: Task) -> tuple[WorkerStates, Replies]:
        """Evaluate, choose the noise, quantise, keep pending, send."""
        model, request = task.model, task.request
        received = memory.receive(task.states, request)
        states, fresh = received.states, received.fresh
        if len(fresh):
            states, estimates, cost = self._estimate(replace(task, states=states), fresh)
            anchors = self._anchors(states, request, fresh)
            targets = estimates - anchors
            curvature = _curvature(model, states, request, fresh, targets + anchors * self._follows)
            still = (states["place"][fresh] == request.statistics).all(axis=1)
            task, up = replace(task, states=states), self._up(model, request, curvature, still)
            states = steps.hold_upload(task, up, fresh, targets, cost)
            states = memory.update(
                states,
                fresh,
                {
                    "place": np.broadcast_to(request.statistics, targets.shape),
                    "seen": targets + anchors * self._follows,
                    "curvature": curvature,
                    "anchor": anchors,
                },
            )
        return states, memory.replies(states, request, received)

    @property
    def _follows(self) -> float:
        """1 where memories follow s-bar_i, 0 where they follow h_i."""
        return 1.0 if self.incremental else 0.0

    def _estimate(self, task: Task, fresh: IntArray) -> tuple[WorkerStates, FloatArray, IntArray]:
        if self.batch_size is None:
            seen = task.oracle.full(task.request.params, fresh)
            if not self._walks:
                return task.states, seen, task.oracle.counts[fresh]
            return self._walk(task, fresh, seen)
        loops = spider.Loops(self.batch_size, False, self.inner_rounds)
        return spider.estimate(task, fresh, loops)

    @property
    def _walks(self) -> bool:
        """Whether workers may ever go on alone."""
        return self._guarded and self.local_steps > 1 and not self.follow_em

    def _walk(
        self, task: Task, fresh: IntArray, seen: FloatArray
    ) -> tuple[WorkerStates, FloatArray, IntArray]:
        """What each sees at the end of its local steps, the first of which saw ``seen``."""
        model, states, request, oracle = task.model, task.states, task.request, task.oracle
        here, place = request.statistics, states["place"][fresh]
        drift, walked = states["drift"][fresh], states["walked"][fresh]
        still = (place == here).all(axis=1)  # S waits: the same again
        told = here - place - states["seen"][fresh]
        # After a plain round S is the mean of what all saw at one place, up to noise.
        drift = np.where((walked > 1)[:, None], drift, told)
        metric = model.metric(request.params)
        white = metric.whiten(drift) ** 2
        apart = np.max([white[:, cut].sum(axis=1) for cut in model.regions], axis=0)
        moved = (metric.whiten(here - place) ** 2).sum(axis=1)
        far = 1 + (FAR_TIMES - 1) * self._boldness
        most = DRIFT_TIMES_STEPS * np.where(moved > FAR_MOVE, far, 1.0)
        count = 1 + np.minimum(most / np.maximum(apart, 1e-12) ** 0.25, self.local_steps - 1)
        count = np.where(still, walked, count.astype(np.int64))
        # Who missed a round does not know what all saw in it; where S stayed there was nothing to
        # see, and a round that is made again is the same round.
        able = ((request.accepted[fresh] == request.round - 1) | still) & oracle.lasting
        count = np.where(able & (request.kind == "local"), count, 1)
        drift = np.where(still[:, None], drift, drift + (told - drift) / count[:, None])
        walked, seen = np.ones_like(count), seen.copy()
        for _ in range(1, self.local_steps):
            on = np.flatnonzero(count > walked)
            there = seen[on] + drift[on]
            if not model.inside(there):
                on = on[[model.inside(point) for point in there]]
                there = seen[on] + drift[on]
            if not len(on):
                break
            seen[on] = oracle.full(model.maximize(there), fresh[on], each=True)
            walked[on] += 1
        states = memory.update(states, fresh, {"drift": drift, "walked": walked})
        return states, seen, oracle.counts[fresh] * walked

    def _anchors(self, states: WorkerStates, request: Request, fresh: IntArray) -> FloatArray:
        """S itself; or what it was when the server first accepted something from a worker."""
        if not self.incremental:
            return np.broadcast_to(request.statistics, (len(fresh), len(request.statistics)))
        new = request.accepted[fresh] < 0
        return np.where(new[:, None], request.statistics, states["anchor"][fresh])

    def _up(
        self, model: Model, request: Request, curvature: FloatArray, still: BoolArray
    ) -> steps.Channel:
        """The loop's bound on the noise, the budget's, and half of what S would wait for.

        Where S is ``still`` where it was, it waits for a finer answer.
        """
        assert self.share is not None
        stands = safeguards.stands(model, model.metric(request.params))
        budget = min(self._budget, stands * len(request.statistics) / 2)
        if request.kind == "local":
            budget = min(budget, LOCAL_NOISE_NATS)
        room = 4 / (INVERSE_LOOP_GAIN * self.share * curvature)
        noise = room / (2 * (np.sqrt(1 + room) + 1))
        noise = np.where(still, np.minimum(noise, safeguards.STILL), noise)
        operator = ChosenDithering(noise, budget / self.share)
        if request.kind == "fine":
            operator = replace(_FINE_OPERATOR, budget=budget / self.share)
        return steps.Channel(operator, None, in_metric=True)

    @property
    def _budget(self) -> float:
        """The size of the noise of H."""
        return (
            LEAST_NOISE_NATS
            if self.follow_em
            else max(LEAST_NOISE_NATS, NOISE_NATS * self._boldness**2)
        )

    def _stands_ahead(self, seen: Seen, gain: float) -> float:
        """The variance of noise in each coordinate that a far step stands where it leads.

        Under masks S does not wait for it: a finer lattice would come in small steps.
        """
        if not self._guarded or 2 * gain <= safeguards.FAR or seen.request.lattice is not None:
            return np.inf
        return max(NOISE_AHEAD * self._boldness, LEAST_NOISE_AHEAD) / safeguards.weight_ahead(seen)

    @property
    def _boldness(self) -> float:
        """1 for many workers, less for few."""
        if self.share is None:  # as a server may leave it, and not only a caller
            raise SettingsError("AutoEM is not resolved: its share is not known.")
        return min(1.0, 1 / (MANY_WORKERS * self.share))

    def read_upload(
        self, model: Model, seed: int, request: Request, evaluations: int, payload: bytes
    ) -> Replies:
        """Decode: a message says all that its noise depends on."""
        operator = _FINE_OPERATOR if request.kind == "fine" else _OPERATOR
        channel = steps.Channel(operator, None, in_metric=True)
        return steps.read_upload(model, channel, seed, request, evaluations, payload)

    def follow(
        self, model: Model, seed: int, round_: int, statistics: FloatArray, step: bytes
    ) -> FloatArray:
        """The quantised step, as the server made it."""
        channel = steps.Channel(_OPERATOR, None, in_metric=True)
        return steps.follow(model, channel, seed, round_, statistics, step)

    def server_step(
        self, model: Model, seed: int, state: ServerState, heard: Heard
    ) -> tuple[ServerState, StepInfo]:
        """H, the momentum, and the step. If nobody answered, S stays."""
        request, replies, weights = heard.request, heard.replies, heard.weights
        extras = dict(state.extras) | {"missing": np.array(1 - float(weights.sum()))}
        mean_field = state.memory + weights @ replies.values
        if self.incremental:
            extras |= _hear(state, request, replies, weights)
            mean_field = mean_field + extras["anchors"] - extras["heard"] * state.statistics
        metric = model.metric(request.params)
        white = metric.whiten(mean_field)
        gain = float(white @ white) / 2
        moved = steps.Moved(state.statistics, 0.0, 0)
        if len(replies.workers):
            if request.lattice is None:
                noise = safeguards.noise_of(metric, replies, weights)
            else:
                noise = steps.lattice_noise(request)
            seen = safeguards.Seen(model, state, request, metric, mean_field, noise)
            complete = number(extras, "missing") < 1e-9
            if self._walks and (request.accepted < 0).all():
                assert self.share is not None
                apart = safeguards.apart(seen, replies, weights, self.share)
                extras |= {"local": np.array(apart if apart < LARGEST_DRIFT else 0.0)}
            moved, extras = self._advance(seen, seed, gain, complete, extras)
        extras |= steps.energy_of(request, replies, state, metric.whiten(mean_field - state.memory))
        if request.lattice is not None and len(replies.workers):
            assert self.share is not None
            extras |= steps.foreseen(model, state, moved, self.share, extras)
        new = ServerState(
            state.round + 1,
            state.generation,
            moved.statistics,
            state.memory + (weights * replies.rates) @ replies.values,
            extras,
        )
        if self.incremental:  # H tells of those who answered alone; the others' memories cancel
            gain /= max(float(weights.sum()), 1e-12) ** 2
        squared = float(mean_field @ mean_field)
        return new, StepInfo(squared, moved.factor, moved.hits, moved.sent, moved.wire, gain)

    @property
    def _guarded(self) -> bool:
        """Whether H is that of all workers at S: not of those who are away, nor of batches."""
        return not self.incremental and self.batch_size is None

    def _advance(
        self, seen: Seen, seed: int, gain: float, complete: bool, extras: Extras
    ) -> tuple[steps.Moved, Extras]:
        """Wait, go back, or take a step."""
        caution, waits = number(extras, "caution"), number(extras, "waits")
        limit = safeguards.stands(seen.model, seen.metric) / 4**caution
        phase = number(extras, "probe")
        if phase >= safeguards.PURE_FROM:
            limit = min(limit, safeguards.pure(seen, number(extras, "worth")))
        patient = self._guarded and waits < safeguards.MOST_WAITS
        waited = steps.Moved(seen.state.statistics, 0.0, 0), extras | {"waits": np.array(waits + 1)}
        if patient and seen.noise > limit:
            return waited
        extras = {name: extras[name] for name in extras if name not in ("waits", "sure", "sharp")}
        tells = self._guarded and complete and seen.request.kind != "local"
        if self._guarded and complete:
            if phase == safeguards.JUDGE:
                return safeguards.judge(seen, seed, extras)
            bad = safeguards.leapt(seen, extras)
            bad |= safeguards.worse(seen, extras, self._budget) & tells
            if bad.any() and "good" in extras:  # there is somewhere to go back to
                return safeguards.undo(seen, bad, extras)
            if phase == safeguards.BOLD:
                if not safeguards.turns(seen, extras):
                    return safeguards.bold(seen, seed, extras)
                phase, extras["plain"] = phase - 1, np.array(number(extras, "plain") + 1)
        elif phase > safeguards.PLAIN:  # somebody is missing: one more plain step
            phase -= 1
        ahead = self._stands_ahead(seen, gain)
        if patient and seen.noise > ahead:  # often far beyond: coarse answers would take for ever
            return waited[0], waited[1] | {"sharp": np.ones(())}
        move, extras = self._move(seen, gain, extras)
        fine = phase or number(extras, "crawls")
        coarsest = COARSEST_LOCAL_STEP if seen.request.kind == "local" else COARSEST_STEP
        # A zero is where no noise is stood at all: then the step is told in full.
        budget = min(self._budget, max(ahead * len(move), 1e-300))
        operator = ChosenDithering(safeguards.FINE if fine else coarsest, budget)
        if number(extras, "expanded"):  # long in the metric: its noise would be, too
            moved = steps.move_in_full(seen.model, seen.state, seen.request, move)
        else:
            moved = self._step(seen, seed, move, min(limit, ahead), operator)
        if moved.hits:  # momentum led out of the domain
            extras["age"] = np.zeros(())
        if phase:
            extras["probe"] = np.array(phase + 1)
        if tells or "good" not in extras:  # what was not looked at may yet be undone
            extras |= {"good": seen.state.statistics}
        return moved, extras | (safeguards.calm_down(extras) if self._guarded else {})

    def _step(
        self, seen: Seen, seed: int, move: FloatArray, limit: float, operator: ChosenDithering
    ) -> steps.Moved:
        """Broadcast a step; in full where it is so long that its noise would be too much.

        Or where noise leads out of the domain and the step itself does not: at its boundary (a
        common covariance of columns with few values) the guard would halve every step to nothing.
        """
        white = seen.metric.whiten(move)
        long = _OPERATOR.finest * float(white @ white) > limit * len(white)
        if self._guarded and long:
            return steps.move_in_full(seen.model, seen.state, seen.request, move)
        down = steps.Channel(operator, None, in_metric=True)
        moved = steps.move_by(seen.model, seed, seen.state, seen.request, move, down)
        if self._guarded and moved.hits and _inside(seen.model, seen.state.statistics, move):
            return steps.move_in_full(seen.model, seen.state, seen.request, move)
        return moved

    def _move(self, seen: Seen, gain: float, extras: Extras) -> tuple[FloatArray, Extras]:
        """H, and some of the way from the point that the last step led to, while it helps."""
        here, mean_field = seen.state.statistics, seen.mean_field
        if 2 * gain < MOMENTUM_BELOW:  # far from an optimum plain steps keep EM's basin
            mean_field = self._expanded(seen, extras)
        ahead = here + mean_field
        run = ahead - extras.get("ahead", ahead)
        local = seen.request.kind == "local"
        begins = local and not number(extras, "walking")  # H of several steps is longer than of one
        before = 4 * gain if begins else float(extras.get("energy", 2 * gain))
        energy = 0.7 * before + 0.3 * 2 * gain
        age = number(extras, "age")
        near = max(LEAST_MOMENTUM_BELOW, MOMENTUM_BELOW * self._boldness)
        calm = energy < near and not self.incremental and not self.follow_em
        if (
            (local and 2 * gain > STALLED_SHARE * energy)
            or energy < LATE_SHARE * number(extras, "local")
            or number(extras, "caution")
        ):
            extras = extras | {"local": np.zeros(())}
        calm = calm and not number(extras, "local")
        calm = calm and not number(extras, "caution") and not number(extras, "probe")
        calm = calm and float(seen.metric.whiten(run) @ seen.metric.whiten(mean_field)) > 0
        age = age + 1 if calm else 0.0
        if age >= CRAWLS_AFTER and self._guarded:  # noise of batches would be carried on, too
            extras = extras | {"crawls": np.ones(())}
        most = CRAWLING_MOMENTUM if number(extras, "crawls") else MOST_MOMENTUM
        move = mean_field + min(age / (age + 3), most) * run
        if age and not _inside(seen.model, here, move):
            age, move = 0.0, mean_field
        told = {"energy": energy, "age": age, "walking": float(local)}
        told["expanded"] = float(mean_field is not seen.mean_field)
        return move, extras | {"ahead": ahead} | {n: np.array(x) for n, x in told.items()}

    def _expanded(self, seen: Seen, extras: Extras) -> FloatArray:
        """H, or where parameter-expanded EM leads; local steps need S to be what all saw."""
        local = seen.request.kind == "local" or number(extras, "local")
        if local or not self._guarded or not isinstance(seen.model, Reduces):
            return seen.mean_field
        here = seen.state.statistics
        led = here + seen.mean_field
        if not seen.model.inside(led):
            return seen.mean_field
        there = seen.model.reduced(led)
        far = there is not led and seen.model.inside(there)
        return there - here if far else seen.mean_field

    def asks(self, state: ServerState) -> RequestKind:
        extras = dict(state.extras)
        sharp = number(extras, "probe") >= safeguards.PURE_FROM or number(extras, "sharp")
        if sharp or number(extras, "crawls"):
            return "fine"
        # where somebody was missing S is not the mean of what all saw
        alike = number(extras, "local") and number(extras, "missing") < 1e-9
        return "local" if alike else "round"

    def confirm(self, state: ServerState, nats: float) -> ServerState:
        """A few plain steps and a bold one, before the run may say that it has converged."""
        extras = safeguards.ask(dict(state.extras), nats)
        return replace(state, extras=extras | {"local": np.zeros(())})

    def sure(self, state: ServerState) -> bool | None:
        """Whether the bold step gained nothing; who sees a part of the data cannot tell."""
        return bool(number(dict(state.extras), "sure")) if self._guarded else None

    def forget(self, state: ServerState) -> ServerState:
        """The anchors go with the memories."""
        return replace(super().forget(state), extras={})

    def describe(self) -> dict[str, Any]:
        """All settings."""
        settings = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"algorithm": self.name} | settings


def _inside(model: Model, statistics: FloatArray, move: FloatArray) -> bool:
    """Whether the whole move stays where T is defined."""
    with np.errstate(all="ignore"):  # outside, numbers may be anything
        return model.inside(model.protect(statistics, statistics + move))


def _hear(
    state: ServerState, request: Request, replies: Replies, weights: FloatArray
) -> dict[str, FloatArray]:
    """The weight of those ever heard, and the sum of their anchors."""
    asked = np.searchsorted(request.workers, replies.workers)
    new = float(weights[request.accepted[asked] < 0].sum())
    anchors = state.extras.get("anchors", np.zeros_like(state.statistics))
    return {
        "heard": np.array(float(state.extras.get("heard", 0.0)) + new),
        "anchors": anchors + new * state.statistics,
    }


def _curvature(
    model: Model, states: WorkerStates, request: Request, fresh: IntArray, seen: FloatArray
) -> FloatArray:
    """L^2 of each worker: |change of what it sees|^2 / |change of S|^2, a decaying maximum."""
    metric = model.metric(request.params)
    before = states["curvature"][fresh]
    known = before > 0
    moved = metric.whiten(request.statistics - states["place"][fresh])
    changed = metric.whiten(seen - states["seen"][fresh])
    length = (moved**2).sum(axis=1)
    usable = known & (length > 0)
    ratio = (changed**2).sum(axis=1) / np.where(usable, length, 1.0)
    before = np.where(known, before, 1.0)
    now = np.where(usable, np.maximum(ratio, 0.8 * before + 0.2 * ratio), before)
    return np.clip(np.nan_to_num(now, nan=MOST_CURVATURE), LEAST_CURVATURE, MOST_CURVATURE)
