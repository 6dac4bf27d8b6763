"""From settings with an epsilon to the fit that all members follow, and to the model file."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import final

from emfed.artifacts.result import Result, load
from emfed.core.errors import FederationError
from emfed.core.ledger import Ledger
from emfed.core.sums import Fit
from emfed.fitting.fitted import Fitted
from emfed.fitting.private import PrivateFit, PrivatePlan
from emfed.fitting.private_result import PrivateChronicle, private_fitted
from emfed.fitting.program import Told, followed
from emfed.fitting.settings import FitSettings
from emfed.fitting.stopping import Callback
from emfed.network.exchange.followed import EVERYONE, Comings

UNREACHED = b"nothing"
"""The state of an epoch that ended before a private fit had come to anything."""


@final
@dataclass(frozen=True, eq=False)
class PrivateReached:
    """What a private fit came to.

    Parameters
    ----------
    result : Fitted
        The result with its remarks.
    digest : bytes
        Of all that it follows from.
    """

    result: Fitted
    digest: bytes

    def fitted(self) -> Fitted:
        """The result with its remarks."""
        return self.result


@final
class PrivateProgram:
    """The program of a private fit: the same at every member.

    Each site's share of the noise is sized for the sites of the beginning, so it has no epoch but
    the first: where a site leaves, the others keep what was reached and ask for nothing more. How
    many rounds there are is part of what the noise was sized for, and is not extended.

    Parameters
    ----------
    settings : FitSettings
        What the document says, with an epsilon.
    callbacks : tuple of callable
        Called with the record of each round.
    told : callable
        Called with each ask and its sum.
    """

    def __init__(
        self,
        settings: FitSettings,
        callbacks: tuple[Callback, ...] = (),
        told: Told = lambda ask, answer: None,
    ) -> None:
        self._settings, self._callbacks, self._told = settings, callbacks, told

    def plan(self, sites: int) -> PrivatePlan:
        """What the budget buys with so many sites."""
        return PrivatePlan.of(self._settings, sites, bool(self._settings.masks), simulated=False)

    def extend(self, rounds: int | None) -> None:
        """Nothing changes."""

    def begin(
        self, sites: tuple[str, ...], state: bytes, place: bytes, comings: Comings = EVERYONE
    ) -> Fit[PrivateReached]:
        """The fit over these sites; with a state, what it says and no more.

        The start follows from the settings' own seed, so that a fit which begins once more, from
        other hellos, asks for the same sums.
        """
        if state == UNREACHED:
            raise FederationError(
                "a site has left a private fit that had not come to its rounds: begin a new fit "
                "with those who stay. What this one was charged stays charged."
            )
        if state:
            return PrivateReached(Fitted(_read(state)), hashlib.sha256(state).digest())
        settings, plan = self._settings, self.plan(len(sites))
        fit = PrivateFit(settings.candidates(), plan, settings.rounds, settings.seed)
        course = PrivateChronicle(settings, Ledger(len(sites), sites), self._callbacks, fit)
        assert settings.columns is not None
        yield from followed(course, fit.follow(len(settings.columns)), self._told)
        return PrivateReached(private_fitted(course), fit.digest())

    def state(self, reached: PrivateReached | None) -> bytes:
        """The model file of what was reached."""
        if reached is None:
            return UNREACHED
        with tempfile.TemporaryDirectory(prefix="emfed-") as folder:
            path = Path(folder) / "state.emfed"
            reached.fitted().result.save(path)
            return path.read_bytes()

    def digest(self, reached: PrivateReached) -> bytes:
        """Of the sums and the parameters that they led to."""
        return reached.digest


def _read(state: bytes) -> Result:
    with tempfile.TemporaryDirectory(prefix="emfed-") as folder:
        path = Path(folder) / "state.emfed"
        path.write_bytes(state)
        return load(path)
