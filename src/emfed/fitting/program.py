"""From one document of settings to the fit that all members follow, and to the model file."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar, final

import numpy as np

from emfed.aggregation.coded import DIGEST_BYTES
from emfed.aggregation.simulated import charge
from emfed.algorithms import Everyone
from emfed.artifacts.company import LEAST_SHARE, Company
from emfed.artifacts.facts import Facts
from emfed.artifacts.result import Result, load
from emfed.core.configuration import TOML
from emfed.core.errors import SettingsError
from emfed.core.ledger import DIRECTIONS, KINDS, Ledger
from emfed.core.noise import SITES_DRAW
from emfed.core.records import RoundRecord
from emfed.core.registry import plain
from emfed.core.sums import (
    Ask,
    Finish,
    Fit,
    Gather,
    Gathers,
    Heard,
    IntArray,
    LastSum,
    Sum,
    agreed_digest,
    finished,
)
from emfed.fitting.chronicle import Chronicle
from emfed.fitting.fitted import Fitted
from emfed.fitting.following import Conclusion, follow
from emfed.fitting.in_process import concluded, ending, of_named_columns
from emfed.fitting.selection import with_setting
from emfed.fitting.settings import FitSettings
from emfed.fitting.stopping import Callback
from emfed.fitting.words import read_words, size_of
from emfed.models.naming import columns_named
from emfed.network.exchange.followed import EVERYONE, Comings

PLACE = "the settings"
"""What errors call the document."""
Told = Callable[[Ask, Sum], None]
T = TypeVar("T")


def settings_of(program: Mapping[str, Any], masked: bool) -> FitSettings:
    """What a document says in words; the columns are named, since members without rows follow."""
    known = ("model", "algorithm", "fit", "columns")
    if set(program) != set(known):
        raise SettingsError(f"{PLACE} must hold {', '.join(known)}.")
    if not all(isinstance(program[table], Mapping) for table in known[:3]):
        raise SettingsError(f"{PLACE}: {', '.join(known[:3])} are tables of settings by name.")
    if None in program["fit"].values():
        raise SettingsError(f"{PLACE} leave out what is not set, in place of null.")
    columns = program["columns"]
    if not (isinstance(columns, list) and columns and all(isinstance(c, str) for c in columns)):
        raise SettingsError(f"{PLACE} name no columns: write them into [sites] columns.")
    settings = read_words(
        program["model"], program["algorithm"], program["fit"], PLACE, columns=tuple(columns)
    ).but(masks=masked)
    if settings.noise_seed is not None:
        raise SettingsError(SITES_DRAW)
    return of_named_columns(settings, tuple(columns))


@final
@dataclass(frozen=True)
class Beginning:
    """How a fit began, for whoever reads what it came to.

    Parameters
    ----------
    sites : tuple of str
        The set of the first epoch.
    rows : int or None
        Their rows together; None: the next epoch began before they were known.
    gone : mapping from str to str
        Why sites that settings name are not in the present set.
    least_share : float
        The share of it below which a model carries a doubt.
    """

    sites: tuple[str, ...]
    rows: int | None
    gone: Mapping[str, str]
    least_share: float

    def company(self, here: tuple[str, ...], rows: int) -> Company:
        """Who took part to the end."""
        began = rows if self.rows is None and set(here) == set(self.sites) else self.rows
        return Company(self.sites, here, rows, began, dict(self.gone), self.least_share)


@final
@dataclass(frozen=True, eq=False)
class Reached:
    """What a fit came to, and what was kept on the way."""

    conclusion: Conclusion
    chronicle: Chronicle
    sites: tuple[str, ...]
    beginning: Beginning

    def fitted(self) -> Fitted:
        """The result with its remarks."""
        course, outcome = self.chronicle, self.conclusion
        course.complete(LastSum(0, outcome.final.estimate.left))
        course.open_records()
        return concluded(course, outcome, self._base())

    def _base(self) -> Result:
        course, outcome, sites = self.chronicle, self.conclusion, len(self.sites)
        settings, final = course.settings, outcome.final
        statistics = final.estimate.point.statistics
        said = {
            "algorithm": settings.method(sites).describe(),
            "participation": settings.who().describe(),
            "limits": {name: v for name, v in vars(course.stop).items() if v is not None},
            "masks": bool(settings.masks),
        }
        return Result(
            model=final.model,
            params=final.model.to_user(final.model.maximize(statistics)),
            records=course.records,
            stopped=ending(course, outcome),
            seed=settings.seed,
            statistics=statistics,
            ledger=course.ledger,
            columns=None if settings.columns is None else tuple(settings.columns),
            samples=outcome.pooled.rows,
            facts=Facts(
                sites,
                outcome.pooled.count,
                plain(said),
                simulated=False,
                company=self.beginning.company(self.sites, outcome.pooled.count),
            ),
            pooled_summary=outcome.pooled.summary,
        )


@final
@dataclass
class Followed(Chronicle):
    """What a member keeps of the exchanges of a fit that it follows."""

    asked: int | None = None
    """How many sites the last sum was asked of; None: all."""

    def _record(self, ask: Ask, found: Sum, last: LastSum | None) -> RoundRecord:
        record = super()._record(ask, found, last)
        return record if self.asked is None else replace(record, asked=self.asked)


@final
class FitProgram:
    """The program of a document: the same at every member.

    Parameters
    ----------
    settings : FitSettings
        What the document says.
    callbacks : tuple of callable
        Called with the record of each round.
    told : callable
        Called with each ask and its sum.
    least_share : float
        The share of the rows that began below which the model carries a doubt.
    """

    def __init__(
        self,
        settings: FitSettings,
        callbacks: tuple[Callback, ...] = (),
        told: Told = lambda ask, answer: None,
        least_share: float = LEAST_SHARE,
    ) -> None:
        self._settings, self._callbacks, self._told = settings, callbacks, told
        self._least_share = least_share
        self._rounds: int | None = None
        self._course: Followed | None = None

    @property
    def seed(self) -> int:
        """The seed of the dithers, where sums are coded."""
        return self._settings.seed

    @property
    def patience(self) -> int | None:
        """How often in a row a site may be missing from coded sums that its rows are part of."""
        everyone = isinstance(self._settings.who(), Everyone)  # who is not drawn is not away
        return self._settings.patience if everyone else None

    def drawn(self, ask: Any, sites: int) -> IntArray:
        """Which sites take part in an exchange: in rounds on sums, those that are drawn."""
        if isinstance(ask, (Gather, Gathers)):
            return ask.workers
        if ask.purpose != "round" or self._course is None:
            return np.arange(sites, dtype=np.int64)
        made, settings = len(self._course.records), self._settings
        drawn = settings.who().draw(settings.seed, made, sites)
        self._course.asked = len(drawn)
        return drawn

    def extend(self, rounds: int | None) -> None:
        """Another limit on rounds from now on; None: that of the settings."""
        self._rounds = rounds
        if self._course is not None and rounds is not None:
            self._course.stop = replace(self._course.stop, rounds=rounds)

    def begin(
        self, sites: tuple[str, ...], state: bytes, place: bytes, comings: Comings = EVERYONE
    ) -> Fit[Reached]:
        """The fit of an epoch over these sites; under masks nobody chooses its seed alone."""
        before = _read(state) if state else None
        settings = self._settings if before is None else _going_on(self._settings, before)
        company = None if before is None else before.company
        beginning = Beginning(
            comings.first or sites,
            None if company is None else company.rows_began,
            comings.gone,
            self._least_share,
        )
        if settings.masks:
            word = hashlib.sha256(b"emfed seed\0" + place + str(settings.seed).encode())
            settings = settings.but(seed=int.from_bytes(word.digest()[:4], "little"))
        course = self._course = Followed(settings, Ledger(len(sites), sites), self._callbacks)
        self.extend(self._rounds)
        model = settings.candidates()[0]
        assert settings.columns is not None
        table = np.ones((1, 2, *[1] * (model.row_axes - 1), len(settings.columns)))
        shapes = {name: value.shape[1:] for name, value in model.summary(table).items()}
        fit = follow(settings, len(sites), shapes, masked=bool(settings.masks))
        return Reached((yield from followed(course, fit, self._told)), course, sites, beginning)

    def state(self, reached: Reached | None) -> bytes:
        """The model file of what was reached; empty if nothing was."""
        if reached is None:
            return b""
        with tempfile.TemporaryDirectory(prefix="emfed-") as folder:
            path = Path(folder) / "state.emfed"
            fitted = reached.fitted()
            remarks = [TOML(remark) for remark in fitted.remarks]
            kept = with_setting(fitted.result, "remarks", remarks) if remarks else fitted.result
            kept.save(path)
            return path.read_bytes()

    def digest(self, reached: Reached) -> bytes:
        """Of the model and its statistics."""
        final = reached.conclusion.final
        place = final.position.to_bytes(4, "little")
        told = agreed_digest(b"", place, final.estimate.point.statistics)
        return hashlib.sha256(told).digest()


def _read(state: bytes) -> Result:
    """What an epoch came to."""
    with tempfile.TemporaryDirectory(prefix="emfed-") as folder:
        path = Path(folder) / "state.emfed"
        path.write_bytes(state)
        return load(path)


def _going_on(settings: FitSettings, before: Result) -> FitSettings:
    """Settings of an epoch that goes on from the model of the one before."""
    about: dict[str, Any] = {"n_init": 1, "start_statistics": "expected", "start": before.params}
    if settings.numbers is not None:
        told = before.model.describe()
        about["n_components"] = told[size_of(told["model"])]
    return settings.but(**about)


def followed(course: Chronicle, fit: Fit[T], told: Told) -> Fit[T]:
    """A fit whose rounds are kept, and which ends at its limits: by what all members know."""
    try:
        with columns_named(course.settings.columns):
            ask = next(fit)
        while True:
            reason = course.refuses(ask)
            if reason is not None:
                with columns_named(course.settings.columns):
                    ask = fit.throw(Finish(reason))
                continue
            try:
                answer: Any = yield ask
            except Finish as finish:
                course.stopped = "callback"
                return finished(fit, finish)
            told(ask, answer if isinstance(answer, Sum) else _as_sum(answer, course))
            _keep(course, ask, answer)
            with columns_named(course.settings.columns):
                ask = fit.send(answer.told if isinstance(answer, Heard) else answer)
    except StopIteration as end:
        found: T = end.value
        return found


def _as_sum(answer: Heard, course: Chronicle) -> Sum:
    """What answers of single sites took, for whoever looks at sums."""
    return Sum(np.zeros(0), float(course.count), bytes=answer.bytes, up=answer.up)


def _keep(course: Chronicle, ask: Any, answer: Sum | Heard) -> None:
    """The bytes of an exchange, in equal shares of the sites, and its numbers."""
    sites = course.ledger.counts.shape[-1]
    if isinstance(answer, Sum):
        course.count = round(answer.rows)
    if answer.up is None:
        charge(course.ledger, ask.purpose, sites, answer.bytes)
    else:
        kind = ask.purpose if ask.purpose in KINDS else "question"
        taken = {"up": answer.up, "down": answer.bytes - answer.up}
        for direction in DIRECTIONS:
            shares = np.diff(np.arange(sites + 1) * taken[direction] // sites)
            around = np.minimum(shares, DIGEST_BYTES)
            course.ledger.add(kind, direction, np.arange(sites), shares - around, around)
    if isinstance(answer, Heard):
        course.note_heard(ask, answer, 0.0)
    else:
        course.note(ask, answer, 0.0)
