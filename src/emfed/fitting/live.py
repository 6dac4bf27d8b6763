"""A fit on live sites: its settings travel in words, and all members follow the same program."""

from __future__ import annotations

import json
import time
import warnings
from typing import Any

from emfed.core.errors import EmfedWarning, SettingsError
from emfed.core.records import RoundRecord
from emfed.fitting.chronicle import INTERRUPTED
from emfed.fitting.fitted import NOBODY, Fitted, Watch
from emfed.fitting.interrupting import interrupts
from emfed.fitting.private_program import PrivateProgram, PrivateReached
from emfed.fitting.program import FitProgram, Reached, settings_of
from emfed.fitting.settings import FitSettings
from emfed.fitting.words import say
from emfed.network.exchange.statements import Agreement
from emfed.network.live import AskedRun, LiveSites

NOT_TOLD = ("masks", "seconds", "patience")
"""Settings that are no words of the document: masks are agreed on apart, and the seconds are those
of the analyst's clock."""


def fit(settings: FitSettings, sites: LiveSites, watch: Watch = NOBODY) -> Fitted:
    """Fit what the settings say to the rows of sites elsewhere.

    Ctrl-C ends the fit at all sites, and gives what was reached. A second one leaves them alone
    with it: they finish by themselves.
    """
    document = document_of(settings, sites)
    if watch.monitor is not None:
        raise SettingsError("a monitor looks at the rows, which are elsewhere: leave it out.")
    ending, began = "", time.monotonic()
    seconds = settings.limits.seconds

    def show(record: RoundRecord) -> None:
        nonlocal ending
        # All members end at one place of the transcript, so none may end by itself.
        if [True for callback in watch.callbacks if callback(record) is True]:
            ending = ending or "callback"

    private = settings.epsilon is not None

    def make(agreement: Agreement) -> FitProgram | PrivateProgram:
        told = settings_of(document, agreement.masked)
        return (PrivateProgram if private else FitProgram)(told, (show,))

    with interrupts() as interrupted:

        def ends() -> str:
            late = seconds is not None and time.monotonic() - began >= seconds
            return INTERRUPTED if interrupted() else ending or "seconds" * late

        asked = AskedRun(document, make, settings.masks, ends, watch.checkpoint, not private)
        ended, conductor = sites.follow(asked)
        if conductor.ended_by == INTERRUPTED and not ended.final:
            raise KeyboardInterrupt
    conductor.check(ended)
    reached: Reached | PrivateReached = ended.result
    if isinstance(reached, Reached) and reached.chronicle.stopped == "callback":
        reached.chronicle.stopped = conductor.ended_by or "callback"
    for name, words in sorted(conductor.refusals.items()):
        warnings.warn(f"{name} takes no part: {words}", EmfedWarning, stacklevel=2)
    return reached.fitted()


def document_of(settings: FitSettings, sites: LiveSites) -> dict[str, Any]:
    """What all members are asked to follow, as JSON brings it back."""
    columns = settings.columns or sites.columns
    if not columns:
        raise SettingsError(
            "members without rows follow the fit, too, so it names its columns: give "
            "columns=['age', 'pulse'], to the fit or where you listen."
        )
    if not (isinstance(settings.weights, str) and settings.weights == "samples"):
        raise SettingsError("between machines all rows count alike: leave weights out.")
    said = say(settings)
    for name in NOT_TOLD:
        said["fit"].pop(name, None)
    document: dict[str, Any] = {**said, "columns": list(columns)}
    settings_of(document, False)
    found: dict[str, Any] = json.loads(json.dumps(document))
    return found
