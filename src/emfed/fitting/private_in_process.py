"""Drive a private fit in one process: noise from a key of this fit, and answers kept at once."""

from __future__ import annotations

from functools import partial
from typing import final

from emfed.aggregation.lattice import SMALLEST_SET
from emfed.aggregation.privacy import NoisyWorkers
from emfed.aggregation.simulated import SimulatedSums
from emfed.core.ledger import Ledger
from emfed.core.noise import NoiseKey
from emfed.core.protocols import Model
from emfed.core.records import RoundRecord
from emfed.core.sums import Ask, AskedWorkers, Finish, Sum, drive
from emfed.data.summing import check_plain, check_rows_held
from emfed.data.tables import Workers
from emfed.fitting.chronicle import INTERRUPTED
from emfed.fitting.fitted import NOBODY, Fitted, Watch
from emfed.fitting.in_process import of_named_columns
from emfed.fitting.interrupting import interrupts
from emfed.fitting.private import PrivateFit, PrivatePlan
from emfed.fitting.private_result import PrivateChronicle, fingerprint, private_fitted
from emfed.fitting.replay import KnownSums
from emfed.fitting.settings import FitSettings
from emfed.models.naming import columns_named


def private_fit(settings: FitSettings, workers: AskedWorkers, watch: Watch = NOBODY) -> Fitted:
    """Fit what the settings say to the rows of these workers, with their epsilon.

    Three workers or more tell masked sums unless ``masks`` is False. One or two have nobody to hide
    among. Without masks each adds all of the noise by itself, so that its rows are as private as
    the run says whatever others do; the sum has sqrt(n) times as much of it.

    Examples
    --------
    >>> import emfed
    >>> from emfed.data.held import HeldWorkers
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=2000)
    >>> settings = FitSettings(emfed.gaussian_mixture(2, "tied"), epsilon=5.0)
    >>> private_fit(settings, HeldWorkers(data)).result.privacy["private"]
    True
    """
    fit, course, width = begun(settings, workers, watch)
    with columns_named(course.settings.columns), interrupts() as interrupted:
        course.interrupted = interrupted
        try:
            drive(fit.follow(width), course.answer, course.refuses)
        except Finish as finish:
            if course.stopped == INTERRUPTED:
                raise KeyboardInterrupt from finish
            raise
    return private_fitted(course)


def begun(
    settings: FitSettings, workers: AskedWorkers, watch: Watch = NOBODY
) -> tuple[PrivateFit, PrivateCourse, int]:
    """A private fit that has asked for nothing yet, who answers it, and the number of columns."""
    workers = workers.view(None if settings.columns is None else tuple(settings.columns))
    settings = of_named_columns(settings, workers.columns).but(columns=workers.columns)
    models, n = settings.candidates(), len(workers.totals)
    masked = n >= SMALLEST_SET and settings.masks is not False
    plan = PrivatePlan.of(settings, n, masked, simulated=True)
    width = workers.everywhere(partial(_check, models[0]))[0]
    fit = PrivateFit(models, plan, settings.rounds, settings.seed)
    return fit, PrivateCourse(settings, workers, watch, fit), width


def _check(model: Model, data: Workers) -> int:
    """Refuse rows that cannot be used; tell how many columns they have."""
    check_plain(data)
    check_rows_held(model, data)
    return int(data.worker(0).shape[1])


@final
class PrivateCourse(PrivateChronicle):
    """The noisy sums of a private fit in this process.

    A process that goes on has another key of noise. So it asks for no sum that the checkpoint
    holds; and nothing has followed yet from one that it does not hold, since a sum is on disk
    before the fit is sent it.
    """

    def __init__(
        self, settings: FitSettings, workers: AskedWorkers, watch: Watch, fit: PrivateFit
    ) -> None:
        n = len(workers.totals)
        super().__init__(settings, Ledger(n, workers.names), watch.callbacks, fit)
        self._path = watch.checkpoint
        self.sums = SimulatedSums(
            NoisyWorkers(workers, NoiseKey(settings.noise_seed)), n, settings.seed, self.ledger
        )
        self.known_sums, self._place = KnownSums(fingerprint(fit)), 0
        if watch.goes_on and watch.checkpoint is not None:
            self.known_sums.load(watch.checkpoint)
        self._known = len(self.known_sums.entries)

    def answer(self, ask: Ask) -> Sum:
        """The sum over all workers with noise, or the one that a checkpoint has."""
        if self._place < self._known:
            found = self.sums.repeat(ask, self.known_sums.expect(self._place, ask).sum)
        else:
            found = self.sums(ask)
            self.known_sums.add(ask, found, 0.0)
            if self._path is not None:
                self.known_sums.save(self._path, len(self.records))
        self._place += 1
        self.note(ask, found, 0.0)
        return found

    def _show(self, record: RoundRecord) -> None:
        """Show what is new; a checkpoint has been shown before."""
        if self._place > self._known:
            super()._show(record)
