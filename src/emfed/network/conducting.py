"""What an analyst orders in a run that it has asked for."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import final

from emfed.aggregation.lattice import SMALLEST_SET
from emfed.core.errors import FederationError, ParticipationError
from emfed.network.exchange.followed import Ended
from emfed.network.exchange.member import Follower
from emfed.network.exchange.transcript import Stage
from emfed.network.live import AskedRun


@final
@dataclass
class Conductor:
    """What an analyst orders in a run: to begin without sites that refuse, and to end early.

    Parameters
    ----------
    asked : AskedRun
        The run.
    """

    asked: AskedRun
    ended_by: str = ""
    """Why the run was ended early."""
    refusals: dict[str, str] = field(default_factory=dict)
    """Sites that take no part, and why."""
    _ordered: bool = False

    def look(self, follower: Follower) -> None:
        """See how far the analyst has got."""
        about = follower.transcript
        if about.stage is Stage.GATHERING:
            self._gather(follower)
        self.refusals.update(about.refusals)
        why = "" if self.ended_by else self.asked.ends()
        if why and about.stage in (Stage.GATHERING, Stage.RUNNING):
            self.ended_by = why
            follower.order("finish")

    def _gather(self, follower: Follower) -> None:
        about = follower.transcript
        agreed, refused = about.agreement, set(about.refusals)
        here = [name for name in agreed.sites if name in about.hellos]
        if self._ordered or not refused or {*here, *refused} != {*agreed.sites}:
            return
        self._ordered = True
        least = SMALLEST_SET if agreed.masked else 1
        enough = len(here) >= least and 2 * len(here) > len(agreed.sites)
        follower.order("begin" if enough else "finish")

    def check(self, ended: Ended) -> None:
        """Raise if no model is final."""
        said = "; ".join(f"{name}: {words}" for name, words in sorted(self.refusals.items()))
        if not ended.final and said:
            error = ParticipationError(f"too few sites take part. {said}")
            error.refused = dict(self.refusals)
            raise error
        if not ended.final:
            raise FederationError(f"no model is final: {ended.words}")
