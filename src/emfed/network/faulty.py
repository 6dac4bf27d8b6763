"""A network that misbehaves from a seeded plan, around the workers of any federation.

Requests and replies are lost, disks are wiped, workers are away for a while. Whatever is above must
not care: the tests run on it. What is late has missed its exchange, which is a loss; what is said
twice and a server that begins again change nothing, because states and transcripts say so.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, final

import numpy as np

from emfed.aggregation.unmasked import Presence, Present
from emfed.core.errors import check_count, check_range, check_type
from emfed.core.streams import Purpose, check_seed, uniforms
from emfed.core.sums import AskedWorkers
from emfed.network.inprocess import Federation


@final
@dataclass(frozen=True)
class FaultPlan:
    """What goes wrong in the rounds of a simulated network, and how often, from one seed.

    Parameters
    ----------
    seed : int
        The seed.
    lose_request : float
        The probability that a worker hears nothing of a round.
    lose_reply : float
        The probability that it hears of the round, and its reply is lost.
    lose_disk : float
        The probability that it has lost all that it kept, before the round.
    away : mapping from int to pairs
        Workers that are not there from one exchange of the whole fit (they count from 1) until
        another; with None they never come back.

    Examples
    --------
    >>> from emfed.network import FaultPlan
    >>> FaultPlan(seed=1, lose_reply=0.1).lose_reply
    0.1
    """

    seed: int = 0
    lose_request: float = 0.0
    lose_reply: float = 0.0
    lose_disk: float = 0.0
    away: Mapping[int, tuple[int, int | None]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for f in fields(self):
            if f.type == "float":
                check_range(f.name, getattr(self, f.name), 0, 1)
        for worker, (first, last) in self.away.items():
            check_count("away worker", worker, 0)
            check_count("away from exchange", first)
            if last is not None:
                check_count("away until exchange", last, first)

    def presence(self, workers: int) -> Presence:
        """Whose messages arrive, of so many workers.

        The opening waits for all of them. What else is no round lacks those that are away.
        """
        everyone = np.arange(workers, dtype=np.int64)

        def present(ask: Any, exchange: int) -> Present:
            deaf = np.zeros(workers, dtype=bool)
            for worker, (first, last) in self.away.items():
                deaf[worker] = first <= exchange and (last is None or exchange < last)
            if ask.purpose != "round":
                here = everyone if ask.purpose == "opening" else everyone[~deaf]
                return Present(here, here)
            u = uniforms(self.seed, exchange, Purpose.FAULTS, everyone, 3)
            deaf, mute = deaf | (u[:, 0] < self.lose_request), u[:, 1] < self.lose_reply
            return Present(
                np.flatnonzero(~deaf),
                np.flatnonzero(~(deaf | mute)),
                np.flatnonzero(u[:, 2] < self.lose_disk),
            )

        return present


@final
class FaultyFederation(Federation):
    """Another federation behind a faulty network.

    Parameters
    ----------
    inner : Federation
        The federation whose messages are lost.
    plan : FaultPlan
        What goes wrong, and how often.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> inner = emfed.network.StackedFederation(data)
    >>> faulty = emfed.network.FaultyFederation(inner, emfed.network.FaultPlan(lose_reply=0.2))
    >>> emfed.fit(model, faulty, "FedEM", rounds=20).rounds
    20
    """

    def __init__(self, inner: Federation, plan: FaultPlan) -> None:
        check_type("inner", inner, Federation, "StackedFederation(as_workers(data))")
        check_type("plan", plan, FaultPlan, "FaultPlan(lose_reply=0.1)")
        self.inner, self.plan = inner, plan

    @property
    def workers(self) -> AskedWorkers:
        return self.inner.workers

    @property
    def present(self) -> Presence:
        return self.plan.presence(self.size)

    def close(self) -> None:
        self.inner.close()
