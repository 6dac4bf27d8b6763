"""A federation that was opened for one fit: what all phases of the fit share."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Self, TypeVar, final

import numpy as np

from emfed.algorithms.steps import rounded_statistics
from emfed.core.errors import MembersChanged, ParticipationError, SettingsError
from emfed.core.ledger import Ledger
from emfed.core.protocols import (
    BoolArray,
    Federation,
    FloatArray,
    IntArray,
    Model,
    Names,
    Phase,
    Question,
    Summaries,
    View,
)
from emfed.core.wire import encode_numbers, is_grid
from emfed.core.wording import Setting, Wording
from emfed.fitting.settings import worker_weights
from emfed.models.binding import Bound, of_columns
from emfed.models.components import thin
from emfed.models.naming import columns_named
from emfed.network.inprocess import answer_width
from emfed.network.masking import SMALLEST_SET
from emfed.network.prices import Prices
from emfed.network.sums import add_up_opening

logger = logging.getLogger(__name__)
T = TypeVar("T")
QUESTION_LOSS = 1e-12
"""Nats per row that rounding the parameters of a question may cost: entropies, which are no maximum
there, then keep eight digits."""
LOOK_AGAIN, MOST_DOUBLINGS, LEAVES_EVERY = 10, 5, 100
"""Exchanges after which a worker that left is asked again, how often they double at most as it
leaves again and again, and exchanges that make up for one time. Without the last two, sites that
came to harm a dozen times in six hours were kept out for good (`python -m benchmarks.hours`)."""
LOSSES, LOSSES_EVERY = 3, 100
"""Lost memories that a worker may report at once, and exchanges that earn it one more. Each costs
everyone their memories: a worker that reports more of them leaves."""


@final
@dataclass(frozen=True, eq=False)
class Attendance:
    """Who is here, by what came back over all exchanges so far; every change makes a new one."""

    here: BoolArray
    silences: IntArray
    """How often in a row each was asked in vain."""
    leaves: IntArray
    """How often each left."""
    again: IntArray
    """The exchange from which on one that is away is asked again."""
    losses: IntArray
    """How often each reported a lost memory."""
    clock: int = 0
    troubled: bool = False
    """Whether any of the above was ever other than at the beginning."""

    @classmethod
    def of(cls, n: int) -> Self:
        """Everyone is here."""
        nothing = np.zeros(n, dtype=np.int64)
        return cls(np.ones(n, dtype=np.bool_), nothing, nothing, nothing, nothing)

    @property
    def _pauses(self) -> IntArray:
        """Exchanges until each is asked again, should it be away."""
        often = self.leaves - self.clock // LEAVES_EVERY
        return LOOK_AGAIN * 2 ** np.clip(often, 0, MOST_DOUBLINGS)

    def asked(self, drawn: IntArray, look: bool) -> IntArray:
        """Pick who of the drawn are here or, if it is time to ``look``, may be back."""
        back = look & (self.clock >= self.again[drawn])
        return drawn[self.here[drawn] | back]

    def note(
        self,
        asked: IntArray,
        heard: IntArray,
        lost: IntArray,
        patience: int | None,
        gone: IntArray,
    ) -> Attendance:
        """After an exchange; ``lost`` reported a lost memory, ``gone`` refused for good.

        Where nobody answers, nothing is learnt about anyone. Somebody always stays.
        """
        clock, silences, losses = self.clock + 1, self.silences.copy(), self.losses.copy()
        again, here = self.again.copy(), self.here.copy()
        if len(heard):
            silent = np.setdiff1d(asked, heard)
            silences[silent] += 1
            silences[heard] = 0
            again[silent] = clock + self._pauses[silent]
        losses[lost] += 1
        if patience is not None:
            here[heard] = True
            here[silences >= patience] = False
            here[lost] &= losses[lost] <= LOSSES + clock // LOSSES_EVERY
        here[gone] = False
        again[gone] = clock + LOOK_AGAIN  # who is let back in is asked again by then
        now = replace(self, silences=silences, losses=losses, again=again, clock=clock)
        return replace(now, troubled=True).staying(here)

    def without(self, silent: IntArray) -> Attendance:
        """Do the same where these have not answered a question that needs everyone."""
        here = self.here.copy()
        here[silent] = False
        return self.staying(here)

    def for_good(self) -> Attendance:
        """Whoever is away is not asked again: sums with it and without it would tell of it."""
        return replace(self, again=np.where(self.here, self.again, np.iinfo(np.int64).max))

    def staying(self, here: BoolArray) -> Attendance:
        """Keep only these, unless there is none of them."""
        if not here.any():
            return self
        left = self.here & ~here
        again = np.where(left, np.maximum(self.again, self.clock + self._pauses), self.again)
        leaves = self.leaves + left
        return replace(self, here=here, leaves=leaves, again=again, troubled=True)

    def arrays(self) -> dict[str, Any]:
        """The arrays of a checkpoint."""
        return {name: np.asarray(value) for name, value in vars(self).items()}

    @classmethod
    def read(cls, arrays: Mapping[str, Any]) -> Self:
        """The inverse of `arrays`."""
        plain = {"clock": int(arrays["clock"]), "troubled": bool(arrays["troubled"])}
        return cls(**{**arrays, **plain})


@final
class Session:
    """The opening exchange, the ledger, who is here, and questions to everyone.

    Where a federation makes no bytes, every message is priced as a network would send it.

    A worker that was asked ``patience`` times in a row in vain, while others answered, is *away*:
    model and weights are bound anew to those who are here, and nothing of it is left in either. It
    is asked again now and then, and counts again once it answers. A worker that refused is away at
    once, and is not asked while that stands.
    """

    def __init__(
        self,
        model: Model,
        federation: Federation,
        *,
        weights: str | Sequence[float] | FloatArray = "samples",
        columns: Names = None,
        seed: int = 0,
        count_bytes: bool = True,
        masks: bool | None = None,
        rounded: bool = False,
        patience: int | None = None,
    ) -> None:
        self.federation, self.seed = federation, seed
        federation.masks = federation.masks_by_default if masks is None else masks
        federation.uniform = isinstance(weights, str) and weights == "uniform"
        own = not isinstance(weights, str)
        if federation.masks and own:
            raise SettingsError(
                Wording(
                    "with masks workers count by their rows ({}) or alike ('uniform'): weights of "
                    "your own would leave little of a sum but one site's part. Fit with {}, which "
                    "every site must allow in its rules.",
                    *(Setting("weights", "samples"), Setting("masks", False)),
                )
            )
        self._rounded = rounded and not federation.masks  # sums of integers are rounded already
        self.patience = patience
        opening = federation.open(model, columns, self._rounded)
        self.model = of_columns(model, opening.columns)
        self.masks = federation.masks
        """Whether workers round to a common lattice, and a network is told sums alone."""
        self._rounded = self._rounded and not self.masks  # a run that goes on keeps its own way
        if self.masks and opening.whole is None:  # a simulation adds up as a network does
            opening = add_up_opening(self.model, opening, federation.uniform)
        self.opening = self._first = opening
        self.counts, self._all = opening.counts, (opening.counts, opening.totals)
        self._totals = opening.counts if opening.totals is None else opening.totals
        self._shares = worker_weights(weights, self._totals)
        """w_i while everyone is here."""
        self.attendance = Attendance.of(federation.size)
        self.missed = 0
        """Answers to questions that never came."""
        self._adopted, self.prices = False, None
        self._bind()
        self.ledger = Ledger(federation.size, opening.names)
        self.count_bytes = count_bytes
        if federation.carries_bytes:
            federation.attach(self.ledger)
        elif count_bytes:
            self.prices = Prices(self.ledger, federation.size, self.masks)
            self.prices.open(model, opening, self.bound, columns, federation.uniform)
        self.phase = federation.last_phase
        self.evaluations = 0
        """Conditional expectations computed before the rounds of the fit."""

    @property
    def counts_components(self) -> bool:
        """Whether workers look at how many rows each component of a sum has, see `thin`.

        Where they count alike the sum does not tell that.
        """
        return self.masks and not self.federation.uniform

    @property
    def columns(self) -> tuple[str, ...] | None:
        """Names of the data's columns, where it has any."""
        return self.opening.columns

    @property
    def everyone(self) -> IntArray:
        """All workers."""
        return np.arange(self.federation.size, dtype=np.int64)

    def adopt(self, model: Model) -> None:
        """Go on with a model that knows other data already: nothing is bound anew."""
        self.bound, self._adopted = Bound.given(model), True
        self.federation.bind(self.bound)

    def _bind(self) -> None:
        """Weights, constants and the number of rows are those of who is here."""
        everyone = bool(self.attendance.here.all())
        self.federation.leave_out(np.flatnonzero(~self.attendance.here))
        if self.masks and not everyone:
            self._open_again()
        opening = self.opening
        here: Any = slice(None) if everyone else self.attendance.here
        shares = self._shares if everyone else self._shares * here
        self.weights = shares if everyone else shares / shares.sum()
        effective = opening.effective
        self.effective = 1 / float(self.weights @ self.weights) if effective is None else effective
        """How many workers of equal weight they are worth."""
        self.samples = int(self.counts[here].sum())
        self.total = float(self._totals[here].sum())
        """The sum of the rows' weights, their number where they have none."""
        told = {name: values[here] for name, values in opening.summaries.items()}
        self.summary: Summaries = (
            self.model.combine(told, self.weights[here]) if opening.whole is None else opening.whole
        )
        """What the opening exchange told of all rows together."""
        if not self._adopted:
            some = replace(opening, counts=self.counts[here], summaries=told)
            self.bound = Bound.told(self.model, some, self.weights[here], self._rounded)
        self.federation.bind(self.bound)

    def _open_again(self) -> None:
        """Under masks nobody's own summary is known: those who are here add theirs up anew."""
        here, opening = self.attendance.here, self.opening
        if self.federation.carries_bytes:
            self.opening = self.federation.open_again()
        else:
            told = {name: values[here] for name, values in opening.summaries.items()}
            counts, totals = self._all
            some = None if totals is None else totals[here]
            some_opening = replace(opening, counts=counts[here], totals=some, summaries=told)
            summed = add_up_opening(self.model, some_opening, self.federation.uniform)
            self.opening = replace(
                opening,
                counts=np.where(here, counts, 0),
                totals=None if totals is None else np.where(here, totals, 0.0),
                effective=summed.effective,
                whole=summed.whole,
            )
        self.counts, told_totals = self.opening.counts, self.opening.totals
        self._totals = self.counts if told_totals is None else told_totals

    # Who is here.

    def attend(self, asked: IntArray, heard: IntArray, lost: IntArray) -> bool:
        """Note who answered; True if who is here has changed, and the model with it."""
        gone, now = self.federation.gone, self.attendance
        complete = len(heard) == len(asked) and not (len(lost) or len(gone))
        if complete and not now.troubled:  # a million workers cost nothing while all is well
            self.attendance = replace(now, clock=now.clock + 1)
            return False
        if self.patience is None and not len(gone):
            return False
        # A masked round has been asked for as often as patience says: who is missing stays away.
        patience = 1 if self.masks and self.patience is not None else self.patience
        after = now.note(asked, heard, lost, patience, gone)
        return self._changed(after.for_good() if self.masks else after)

    @property
    def refusing(self) -> IntArray:
        """Who has refused for good and counts all the same: nobody knew it when it last counted."""
        gone = self.federation.gone
        return gone[self.attendance.here[gone]]

    def part_with_refusers(self) -> bool:
        """Go on at once without those who refused for good; True if there were any.

        Nobody waits for them: what they were asked is to be asked anew, of the others.
        """
        refusing = self.refusing
        if not len(refusing):
            return False
        after = self.attendance.without(refusing)
        return self._changed(after.for_good() if self.masks else after)

    def _changed(self, after: Attendance) -> bool:
        before, self.attendance = self.attendance, after
        if np.array_equal(before.here, after.here):
            return False
        if self.masks and after.here.sum() < SMALLEST_SET:
            left = ", ".join(map(self.name_of, np.flatnonzero(~after.here).tolist()))
            raise ParticipationError(
                f"{left} left, and {int(after.here.sum())} sites have no masked sum: wait for them "
                "and resume, let another site join, or run without masks, which every site must "
                "allow in its rules."
            )
        for worker in np.flatnonzero(before.here & ~after.here).tolist():
            ahead = int(after.again[worker]) - after.clock
            tail = "" if self.masks else f"; it is asked again after {ahead} rounds"
            logger.warning("%s left: the model is that of the others%s", self.name_of(worker), tail)
        for worker in np.flatnonzero(~before.here & after.here).tolist():
            logger.warning("%s is back, and counts again", self.name_of(worker))
        self.rebind()
        return True

    def announce_lost(self, workers: IntArray) -> None:
        """Log whose memory does not match what was accepted."""
        names = ", ".join(map(self.name_of, workers.tolist()))
        logger.warning(
            "%s lost its memory, or an old backup of it was put back: all memories start anew",
            names,
        )

    def name_of(self, worker: int) -> str:
        """A worker's name, or its number in words."""
        names = self.opening.names
        return f"worker {worker}" if names is None else str(names[worker])

    def rebind(self) -> None:
        """Bind to who is here, under a phase number that nobody was told yet."""
        try:
            self._bind()
        except ParticipationError:  # a masked sum, in which one more may refuse
            if not self.part_with_refusers():
                raise
            return  # it has bound to those who are left
        self.phase = max(self.phase + 1, self.federation.last_phase)
        if self.prices is not None:
            self.prices.rebind(self.bound, self.phase)

    def restore(self, attendance: Mapping[str, Any]) -> None:
        """Go on with who was here when a checkpoint was written; older ones do not say."""
        if attendance:
            self.attendance = Attendance.read(attendance)
        if not self.attendance.here.all():
            self.rebind()

    def view(self, view: View) -> Any:
        """The model that a view names; errors name its columns."""
        with columns_named(self.columns):
            return self.bound.view(view)

    def begin(self, phase: Phase) -> None:
        """Rounds of this phase follow."""
        self.federation.begin(phase)
        self.phase = max(self.phase, phase.number)
        if self.prices is not None:
            self.prices.begin(phase)

    def ask(
        self,
        kind: Literal["statistics", "values"],
        view: View,
        params: Any,
        purpose: str = "question",
        everyone: bool = False,
        informed: IntArray | None = None,
    ) -> FloatArray:
        """The weighted sum of everyone's answer; values come as ``(parts, 2)``.

        ``params`` may be statistics, of which they are T: these are told on a grid.
        """
        strict = everyone and self.patience is None
        told_all = None if self.masks else informed  # masks are for one message to all
        params, grid = self._on_grid(view, params)
        question = Question(kind, view, params, purpose, strict, told_all, grid)
        told = self.federation.ask(question, self.weights)
        silent = np.setdiff1d(self.federation.missed, np.flatnonzero(~self.attendance.here))
        self._priced(question, silent)
        self.missed += len(silent)
        if everyone and len(silent) and self._changed(self.attendance.without(silent)):
            raise MembersChanged("who is here has changed since the question was asked.")
        return told.reshape(-1, 2) if kind == "values" else told

    def _on_grid(self, view: View, params: Any) -> tuple[Any, FloatArray | None]:
        """Parameters, and the statistics on a grid that they are T of, where these are shorter."""
        if not isinstance(params, np.ndarray):
            return params, None
        model = self.view(view)
        coarse = rounded_statistics(model, params, QUESTION_LOSS)
        few = self.counts_components and thin(model.component_shares(coarse), self.samples).any()
        if is_grid(encode_numbers(coarse)) and not few:
            return model.maximize(coarse), coarse
        return model.maximize(params), None

    def _priced(self, question: Question, silent: IntArray, sizes: IntArray | None = None) -> None:
        if self.prices is not None:
            width = answer_width(question, self.view(question.view))
            asked = np.flatnonzero(self.attendance.here)
            self.prices.ask(question, width, asked, np.setdiff1d(asked, silent), sizes)

    def scores(
        self, view: View, params: Any, kind: Literal["scores", "validation"] = "scores"
    ) -> FloatArray:
        """How well the model fits each worker's rows, ``(workers, 4)``; or rows held out."""
        params, grid = self._on_grid(view, params)
        question = Question(kind, view, params, "closing", statistics=grid)
        told = self.federation.scores(question)
        if self.masks and not self.federation.carries_bytes:  # a network is told the mean alone
            told = np.tile(self.weights @ told, (len(told), 1))
        told[~self.attendance.here] = np.nan
        self._priced(question, self.federation.missed)
        return told

    def own_clusters(self, view: View) -> tuple[FloatArray, FloatArray] | None:
        """Shares of all rows and means of everybody's own clusters; None if somebody tells none.

        With masks nobody tells what it alone has.
        """
        if self.masks:
            return None
        question = Question("clusters", view, None, "start")
        told = self.federation.scores(question)
        sizes = np.nan_to_num(told[:, -1]).astype(np.int64)
        self._priced(question, self.federation.missed, sizes)
        if self.part_with_refusers():
            raise MembersChanged("who is here has changed since clusters were asked for.")
        told = told[self.attendance.here, :-1]
        if not np.isfinite(told).all():
            return None
        model = self.view(view)
        shares = np.maximum(told[:, : model.most], 1e-3)  # noise may lead below zero
        shares *= (self.weights[self.attendance.here] / shares.sum(axis=1))[:, None]
        return np.ravel(shares), told[:, model.most :].reshape(-1, model.n_features)

    def fingerprint(self) -> dict[str, Any]:
        """What tells this session from one with other data, weights or workers, whoever left."""
        first = self._first
        data = hashlib.blake2b(first.counts.tobytes(), digest_size=16)
        for name in sorted(first.summaries):
            data.update(np.ascontiguousarray(first.summaries[name]).data.cast("B"))
        names = first.names
        return {
            "model": self.model.describe(),
            "weights": digest(self._shares.tobytes()),
            "data": data.hexdigest(),
            "workers": None if names is None else digest("\0".join(names).encode()),
        }


def of_everyone(session: Session, ask: Callable[[], T]) -> T:
    """What everyone says: of some alone, likelihoods and statistics do not compare."""
    missed, told = session.missed, ask()
    if session.missed > missed:
        raise ParticipationError("somebody did not answer.")
    return told


def recast(before: Model, after: Model, statistics: FloatArray) -> FloatArray:
    """Statistics of one model that stand for the same parameters, in the user's units, of another.

    Both are the same model, bound to the rows of other workers.
    """
    params: Any = before.to_user(before.maximize(statistics))
    return after.statistics_of(after.from_user(params))


def digest(data: bytes) -> str:
    """32 hexadecimal digits that stand for bytes."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()
