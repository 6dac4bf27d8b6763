"""What a site's people should look at in their own rows: nobody else is told.

Every member knows the summary of all rows together, which binds the model. A site takes its own
rows out of it and looks for a mistake that would make the others' columns of its own
(`emfed.network.self_check`).
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import final

from emfed.core.sums import Ask, Fit, Sum, drive
from emfed.deployment.consent import OfferedRows
from emfed.fitting.asks import SummaryAsk
from emfed.fitting.opening import Pooled, pool
from emfed.network.self_check import first_rows, suspicions

logger = logging.getLogger(__name__)


@final
class Hints:
    """Looks at the opening of a fit.

    Parameters
    ----------
    rows : OfferedRows
        The site's rows.
    tell : callable
        Takes words for the site's people.
    """

    def __init__(self, rows: OfferedRows, tell: Callable[[str], None]) -> None:
        self._rows, self._tell = rows, tell
        self._opening: Fit[Pooled] | None = None
        self._over = False

    def look(self, ask: Ask, answer: Sum) -> None:
        """Take a sum of everyone's; once the opening is whole, compare."""
        if not isinstance(ask, SummaryAsk) or self._over:
            return
        if self._opening is None:
            self._model, self._shapes = ask.model, ask.shapes
            self._opening = pool(ask.model, ask.shapes)
            next(self._opening)
        try:
            self._opening.send(answer)
        except StopIteration as end:
            self._over = True
            work = threading.Thread(target=self._compare, args=(end.value,), daemon=True)
            work.start()  # it passes over the rows

    def _compare(self, whole: Pooled) -> None:
        """It looks on: the run does not depend on it."""
        rows = self._rows
        try:
            own = drive(
                pool(self._model, self._shapes),
                lambda ask: Sum(ask.part(rows), rows.total, 0.0, 0, 0),
            )
            data, share = rows.chosen, own.rows / whole.rows
            first = first_rows(data, 0)
            for words in suspicions(own.summary, whole.summary, share, first, data.columns):
                self._tell(words)
        except Exception:
            logger.exception("rows could not be compared with the others'")
