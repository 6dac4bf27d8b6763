"""What a private fit leaves: its records, its promise and its result."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from emfed.artifacts.company import Company
from emfed.artifacts.facts import Facts
from emfed.artifacts.promises import NOISY, PRIVATE, not_private
from emfed.artifacts.result import Result
from emfed.core.ledger import Ledger
from emfed.core.noise import NoisyAsk
from emfed.core.privacy import epsilon_of
from emfed.core.records import RoundRecord
from emfed.core.registry import plain
from emfed.core.sums import Ask, LastSum, Sum
from emfed.fitting.chronicle import Chronicle
from emfed.fitting.fitted import Fitted
from emfed.fitting.private import PrivateFit, PrivatePlan
from emfed.fitting.selection import Selection, with_setting
from emfed.fitting.settings import FitSettings
from emfed.fitting.stopping import Callback


class PrivateChronicle(Chronicle):
    """The rounds of a private fit: no record holds more than its noisy sums say."""

    def __init__(
        self,
        settings: FitSettings,
        ledger: Ledger,
        callbacks: tuple[Callback, ...],
        fit: PrivateFit,
    ) -> None:
        super().__init__(settings, ledger, callbacks)
        self.fit = fit

    def note(self, ask: Ask, found: Sum, seconds: float) -> None:
        """Keep an exchange, without the time that it took: that follows from the rows."""
        self.count = self.fit.samples if ask.purpose == "round" else 0
        super().note(ask, found, 0.0)

    def refuses(self, ask: Ask) -> str | None:
        """Look back at the last exchange; tell why this one is not made, if it is not."""
        if isinstance(ask, NoisyAsk):
            self.complete(ask.last)
        return super().refuses(ask)

    def _record(self, ask: Ask, found: Sum, last: LastSum | None) -> RoundRecord:
        squared, step = (0.0, 1.0) if last is None else (last.squared or 0.0, last.step_size)
        self._evaluations += self.count
        return replace(self._before, squared_H=squared, step_size=step)


def promise_of(fit: PrivateFit) -> Mapping[str, Any]:
    """What the fit promises of each row; of seeded noise: that it promises nothing."""
    plan = fit.plan
    privacy, n, seed = plan.privacy, plan.draws, plan.noise_seed
    if seed is not None:
        why = f"its noise follows from noise_seed {seed}, and whoever knows that can take it off"
        return not_private(why, noise_seed=seed)
    spent = {
        "private": True,
        "noise": plan.noise,
        "epsilon": epsilon_of(privacy.mu_squared, privacy.delta),
        "delta": privacy.delta,
        "shares": plan.shares,
        "mu_squared": privacy.mu_squared,
        "neighbours": "one row more or less",
    }
    whom = f"any {n - plan.shares} of the others"
    if not plan.masked:
        whom = "all others: each site added all of the noise by itself"
    words = (
        f"private: epsilon {spent['epsilon']:.4g} and delta {privacy.delta:g} for each row of each "
        f"of {n} sites, against the server and {whom}; the noise costs about {fit.noise_nats:.2g} "
        "nats a row"
    )
    return spent | {"words": words}


def private_fitted(course: PrivateChronicle) -> Fitted:
    """What a private fit came to, with what a user should know."""
    fit = course.fit
    course.complete(fit.last)
    course.open_records()
    result, remarks = _result(fit, course), fit.remarks()
    told = with_setting(result, "remarks", remarks) if remarks else result
    if not fit.compared:
        return Fitted(told, remarks=tuple(remarks))
    kept = {"criterion": "bic", "tried": [dict(row) for row in fit.compared]}
    told = with_setting(told, "selection", kept)
    chosen = Selection(told, fit.k, {fit.k: told}, fit.compared, "bic")
    return Fitted(told, chosen, remarks=tuple(remarks))


def _result(fit: PrivateFit, course: PrivateChronicle) -> Result:
    model, statistics, summary = fit.bound()
    promise, n = promise_of(fit), fit.plan.draws
    told = {
        "algorithm": {
            "algorithm": PRIVATE if promise["private"] else NOISY,
            "rounds": fit.rounds,
        },
        "privacy": promise,
        "masks": fit.plan.masked,
    }
    columns = course.settings.columns
    return Result(
        model=model,
        params=model.to_user(model.maximize(statistics)),
        records=course.records,
        stopped=course.stopped or "budget",
        seed=fit.seed,
        statistics=statistics,
        ledger=course.ledger,
        columns=None if columns is None else tuple(columns),
        samples=fit.samples,
        facts=Facts(n, fit.samples, plain(told), fit.plan.simulated, company=_company(fit, course)),
        pooled_summary=summary,
        confirmed=True,
    )


def _company(fit: PrivateFit, course: PrivateChronicle) -> Company | None:
    """Who took part, between machines: the set of the beginning, whose noise was sized for it."""
    if fit.plan.simulated or course.ledger.names is None:
        return None
    sites = tuple(course.ledger.names)
    return Company(sites, sites, fit.samples, fit.samples)


def fingerprint(fit: PrivateFit) -> dict[str, Any]:
    """What tells a private fit from another, as plain JSON types."""
    plan: PrivatePlan = fit.plan
    privacy = plan.privacy
    told = [privacy.epsilon, privacy.delta, plan.shares, fit.rounds, fit.seed]
    about: dict[str, Any] = plain(
        {"model": [m.describe() for m in fit.models], "privacy": told, "noise": plan.noise}
    )
    return about
