"""What a site checks before it follows a fit, and before each pass over its rows.

All of it stands in two tables, `SETTINGS` and `PASSES`. Nothing that is refused says more of the
rows than that, and what is refused is said to the site's own people alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import re
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, final

import numpy as np

from emfed.aggregation.privacy import SiteNoise
from emfed.core.errors import DataError, FederationError, SettingsError
from emfed.core.noise import NoiseKey
from emfed.core.privacy import Privacy, epsilon_of, mu_squared_of
from emfed.core.protocols import Model
from emfed.core.sums import Ask, FloatArray, Mean, Pick, Rows
from emfed.data.sources import chunks
from emfed.data.summing import (
    HeldRows,
    check_plain,
    check_rows_held,
    plain_rows,
    rows_with_gaps,
)
from emfed.data.tables import Workers, apart
from emfed.data.workers import to_device, with_columns
from emfed.deployment.approval import Approve
from emfed.deployment.programs import program_of
from emfed.fitting.ascent import are_many
from emfed.fitting.asks import Joint, Statistics
from emfed.fitting.program import Told, settings_of
from emfed.fitting.settings import FitSettings
from emfed.fitting.stopping import Callback
from emfed.imputation.cells import check_cells
from emfed.imputation.program import KIND, SharedTable, asks_for_table
from emfed.models.bounded import check_private
from emfed.models.components import thin
from emfed.models.rows import mean_length
from emfed.models.site_owner import COLUMNS
from emfed.network.exchange.followed import Consent, PassPlace, Pledge, Program
from emfed.network.exchange.statements import Agreement
from emfed.network.exchange.transcript import Transcript
from emfed.network.own_clusters import SMALLEST
from emfed.network.owner_rules import ANY, SiteRules
from emfed.network.spending import SiteMemory

logger = logging.getLogger(__name__)
LARGEST_MODEL, PER_CELL = 1 << 22, 16
"""Numbers: 32 MB, or 16 times the data. Settings of 214 bytes (``times`` of 4e8) took 6.2 GB."""
MOST_NUMBERS = 10**30
"""More than any owner allows: products of counts are not worked out beyond, since thousands of
counts would take seconds, and floats end at 1e308."""
COVERED = 10.0
"""Epsilon of all private runs together up to which their noise hides a row that came between two
of them; at 10 that is a formality already."""
UNLIMITED = 1 << 30
"""Where an owner sets no limit."""


@final
class OfferedRows:
    """A site's rows: all columns are committed to, those of the fit are summed over.

    Parameters
    ----------
    data : Workers
        The rows, as one worker.
    device : optional
        Where passes over them run; None: here.
    """

    def __init__(self, data: Workers, device: Any | None = None) -> None:
        self.data, self._device = data, device
        self._held: HeldRows | None = None

    def commitment(self, salt: bytes) -> bytes:
        """A digest that others see, of which they learn nothing but whether it changes."""
        names = "\0".join(self.data.columns or ())
        digest = hmac.new(salt, names.encode(), hashlib.sha256)
        for _, block in chunks(self.data.worker(0)):
            rows = np.ascontiguousarray(block, dtype=np.float64)
            digest.update(str(rows.shape[1:]).encode())
            digest.update(rows.tobytes())
        return digest.digest()

    def choose(self, columns: Sequence[str] | None, check: Callable[[Workers], None]) -> None:
        """Take the columns that are asked for; ``check`` refuses rows that cannot be used."""
        data = with_columns(self.data, tuple(columns or ()))
        check(data)
        self._held = HeldRows(to_device(data, self._device))

    def blocks(self) -> Iterator[Iterator[FloatArray]]:
        """The rows without those that have gaps, some at a time; a word about them would tell."""
        yield plain_rows(self.chosen, 0, refuse=False)

    def summary(self, model: Model) -> dict[str, FloatArray]:
        """What a model says of the first rows of the site, as of one worker."""
        piece = next(iter(self._chosen.data.pieces(np.zeros(1, dtype=np.int64))))
        rows = next(iter(apart(piece))).rows
        return {name: values[:1] for name, values in model.summary(rows).items()}

    def bound(self, models: Sequence[Model]) -> list[Model]:
        """The models bound to some rows of this site alone, as far as these can have them.

        Others have rows, too: a model may have more components than there are rows here.
        """
        found = list[Model]()
        for model in models:
            with contextlib.suppress(DataError, SettingsError):
                found.append(model.bind(self.summary(model), np.array([UNLIMITED]), np.ones(1)))
        return found

    @property
    def held(self) -> HeldRows:
        """The columns that were chosen."""
        return self._chosen

    @property
    def _chosen(self) -> HeldRows:
        assert self._held is not None
        return self._held

    @property
    def chosen(self) -> Workers:
        """The rows of the columns that were taken."""
        return self._chosen.data

    @property
    def width(self) -> int:
        """How many columns the rows have."""
        return max(1, len(self.data.columns or ()))

    @property
    def total(self) -> float:
        """The sum of the rows' weights."""
        return self._chosen.total

    @property
    def count(self) -> int:
        """How many rows have a weight."""
        return self._chosen.count

    @property
    def squares(self) -> float:
        """The sum of the squared weights."""
        return self._chosen.squares

    def sum(self, mean: Mean, ragged: bool = False) -> FloatArray:
        """The weighted sum over all rows of a function that gives means over blocks of rows."""
        return self._chosen.sum(mean, ragged)

    def tables(self) -> Iterator[tuple[int, FloatArray]]:
        """The number of rows, and some of them."""
        return self._chosen.tables()

    def picked(self, pick: Pick) -> HeldRows:
        """Some of the rows."""
        return self._chosen.picked(pick)


@final
@dataclass(frozen=True, eq=False)
class OwnerTerms:
    """What an owner agrees to, and what it is told.

    Parameters
    ----------
    name : str
        The site's.
    rules : SiteRules
        The owner's rules.
    known : collection of str or None
        The sites whose keys the owner pinned; None: whoever there is, in a trial without keys.
    rows : OfferedRows
        The rows.
    memory : SiteMemory, optional
        What was spent in other runs; None keeps nothing.
    listed : sequence of str, optional
        The columns that the owner lists for analysts to choose among.
    callbacks : tuple of callable
        Called with the record of each round.
    told : callable
        Called with each ask and its sum.
    approve : callable, optional
        Asks a person about a fit: True or False, or None as long as there is no answer.
    noise : NoiseKey, optional
        What the noise of private fits follows from; None: the site takes part in none.
    lock : Lock
        Held while rules are checked: those of all runs of a site share what was spent.
    """

    name: str
    rules: SiteRules
    known: Collection[str] | None
    rows: OfferedRows
    memory: SiteMemory | None = None
    listed: Sequence[str] | None = None
    callbacks: tuple[Callback, ...] = ()
    told: Told = lambda ask, answer: None
    approve: Approve | None = None
    noise: NoiseKey | None = None
    lock: AbstractContextManager[Any] = field(default_factory=threading.Lock)
    _sizes: list[int] = field(default_factory=list, init=False)
    """How many statistics the candidates of the fit have here."""
    _steps: list[float] = field(default_factory=lambda: [1.0], init=False)
    """How many steps a row has here, of sequences."""
    _charged: list[RunCharge] = field(default_factory=list, init=False)
    """What the fit costs, if it is private."""

    def consent(self) -> Consent:
        """What the site's program asks."""
        changes = self.rules.largest_changes
        limit = UNLIMITED if changes is None else changes
        return Consent(
            self.accept,
            self.rules.smallest_set,
            limit,
            spares=limit > 0,
            before_pass=self.before_pass,
            look=self.look,
            pledge=self.pledge,
        )

    def accept(self, agreement: Agreement) -> Program | None:
        """The program of settings that the rules allow; None while a person has not answered."""
        with self.lock:
            for words in self._refusals(agreement):
                if words is None:
                    return None
                if words:
                    raise FederationError(words)
        return program_of(agreement.program, agreement.masked, self.callbacks, self.told)

    def _refusals(self, agreement: Agreement) -> Iterator[str | None]:
        """What is wrong with the settings, one check after the other; None: not decided yet."""
        for check_document in DOCUMENT:
            yield check_document(self, agreement)
        if asks_for_table(agreement.program):
            yield from self._about_table(agreement)
            return
        settings = settings_of(agreement.program or {}, agreement.masked)
        asked = AskedSettings(self, agreement, settings, settings.candidates())
        for check_settings in SETTINGS:
            yield check_settings(asked)
        yield self._approved(approvable(asked))
        yield _counted(self)
        self._charged[:] = []
        if settings.privacy is not None:
            yield from self._about_private(asked, settings.privacy)
            return
        self.rows.choose(settings.columns, partial(check_rows_held, asked.models[0]))
        self._sizes[:] = [model.layout.size for model in self.rows.bound(asked.models)]
        self._steps[:] = [mean_length(self.rows.summary(asked.models[0]))]
        yield _has_rows(self)
        for check_rows in ROWS:
            yield check_rows(asked)
        yield _changed_enough(self)

    def _approved(self, about: Mapping[str, Any]) -> str | None:
        """What a person says, where one is asked."""
        answer = True if self.approve is None else self.approve(about)
        return None if answer is None else "" if answer else "the owner does not take part."

    def _about_private(self, asked: AskedSettings, privacy: Privacy) -> Iterator[str]:
        """What is wrong with a private fit: nothing that a single row has a say in.

        So rules on the number of rows do not count here, and noise takes their place.
        """
        charge = RunCharge.of(asked, privacy)
        for check_charge in PRIVATE:
            yield check_charge(self, charge)
        self.rows.choose(asked.settings.columns, check_plain)
        if not _covers(self, charge):
            yield _changed_enough(self)
        if missing := rows_with_gaps(self.rows.chosen):
            logger.warning("%d rows have a missing value and are left out", missing)
        self._charged[:] = [charge]

    def _about_table(self, agreement: Agreement) -> Iterator[str | None]:
        """What is wrong with a table that is to be filled together."""
        shared = SharedTable.read(agreement.program or {})
        for check_table in TABLE:
            yield check_table(self, shared)
        about = {name: (agreement.program or {})[name] for name in ("model", "grid", "columns")}
        yield self._approved(about | {"masks": agreement.masked, "privacy": None})
        yield _counted(self)
        self.rows.choose(COLUMNS, partial(check_cells, shared.grid.shape))
        self._sizes[:], self._steps[:] = [], [1.0]
        yield _has_rows(self)
        yield _changed_enough(self)

    def look(self, rows: Rows, ask: Ask, place: PassPlace) -> Rows:
        """What an ask is given of the rows: of a private fit, sums with noise alone."""
        if not self._charged:
            return rows
        assert self.noise is not None
        charge = partial(self._charge, place.exchange)
        return SiteNoise(self.rows, self.noise, place.digest(), charge)

    def _charge(self, before: int, cost: float, name: str) -> bool:
        """Charge an answer, with its run's whole budget where it is the first.

        So many sums came before, of which this site told its part: their answers are in the ledger
        unless somebody put back an older one.
        """
        (run,), memory = self._charged, self.memory
        assert memory is not None
        with self.lock:
            ledger, most = memory.allowance, self.rules.largest_cost
            if not ledger.charge(run.run, run.budget, most):
                return False
            if len(ledger.read()[1][run.run].answers) < before:
                raise FederationError(
                    "the ledger of what this site's rows have told is older than this fit: put "
                    "back the newest one."
                )
            return ledger.use(run.run, run.factor * cost, name)

    def pledge(self) -> Pledge:
        """What others are told of noise: key and ledger stay what they are in one fit."""
        if not self._charged or self.memory is None or self.noise is None:
            return Pledge()
        with self.lock:
            ledger, writes = self.memory.allowance.ledger()
        return Pledge(hashlib.sha256(self.noise.commitment() + ledger).digest(), writes)

    def before_pass(self, ask: Ask, rows: float, about: Transcript) -> None:
        """Refuse a pass over the rows, or count it; ``rows`` are those of all sites, if known."""
        asked = AskedPass(self, ask, rows, about)
        with self.lock:
            for check in PASSES:
                if words := check(asked):
                    raise FederationError(words)


@final
@dataclass(frozen=True, eq=False)
class AskedSettings:
    """Settings that a site is asked to follow."""

    terms: OwnerTerms
    agreement: Agreement
    settings: FitSettings
    models: Sequence[Model]


@final
@dataclass(frozen=True)
class RunCharge:
    """What a private fit costs an owner.

    Parameters
    ----------
    run : str
        Its name in the ledger.
    budget : float
        Mu squared of all its answers.
    factor : float
        How much more than the fit says an answer costs here: an owner may count on fewer others.
    """

    run: str
    budget: float
    factor: float

    @classmethod
    def of(cls, asked: AskedSettings, privacy: Privacy) -> RunCharge:
        """Of the shares that the fit counts on, and of those that the owner does."""
        agreement, sites = asked.agreement, len(asked.agreement.sites)
        told = replace(privacy, colluders=asked.terms.rules.colluders)
        masked = agreement.masked
        factor = privacy.shares(sites, masked) / told.shares(sites, masked)
        return cls(run_in_ledgers(agreement), factor * privacy.mu_squared, factor)


@final
@dataclass(frozen=True, eq=False)
class AskedPass:
    """A pass over a site's rows that a fit has come to."""

    terms: OwnerTerms
    ask: Ask
    rows: float
    about: Transcript


# What a document says, before a model is made of it.


def _takes_part(terms: OwnerTerms, agreement: Agreement) -> str:
    others = ", ".join(agreement.sites)
    return "" if terms.name in agreement.sites else f"this fit is one of {others} alone."


def _knows_all(terms: OwnerTerms, agreement: Agreement) -> str:
    strangers = [] if terms.known is None else sorted({*agreement.sites} - {*terms.known})
    if not strangers:
        return ""
    return (
        f"{', '.join(strangers)} take part, and the roster here has no key of theirs: put their "
        "NAME.pub there with `emfed keys roster`, if you know them."
    )


def _masks(terms: OwnerTerms, agreement: Agreement) -> str:
    if agreement.masked or terms.rules.unmasked:
        return ""
    return "the owner takes part in masked sums alone (unmasked in its rules)."


def _chooses_little(terms: OwnerTerms, agreement: Agreement) -> str:
    limit = terms.rules.largest_choices
    if limit is None or (chosen := choices_in(agreement.program or {})) <= limit:
        return ""
    return (
        f"an analyst chose {chosen} numbers in the settings, and the owner allows {limit} "
        "(largest_choices in its rules): ask with words alone."
    )


def _has_room(terms: OwnerTerms, agreement: Agreement) -> str:
    """The size of a model, before any memory is taken.

    Where sums are masked or have noise the limit does not grow with the rows, whose number a
    refusal would tell.
    """
    rows, limit = terms.rows, terms.rules.largest_model
    if limit is None:
        fit = (agreement.program or {}).get("fit")
        private = isinstance(fit, Mapping) and "epsilon" in fit
        cells = 0 if agreement.masked or private else int(rows.data.counts.sum()) * rows.width
        limit = max(LARGEST_MODEL, PER_CELL * cells)
    needed = counts_named((agreement.program or {}).get("model")) * rows.width
    if needed <= limit:
        return ""
    return (
        f"this needs about {needed:.2g} numbers here, and the owner allows {limit:.2g} "
        "(largest_model in its rules): ask for a smaller model."
    )


def _is_one_of_few(terms: OwnerTerms, agreement: Agreement) -> str:
    limit, memory = terms.rules.largest_fits, terms.memory
    if memory is None or memory.fits.may(run_in_ledgers(agreement), limit):
        return ""
    return f"the owner takes part in {limit} fits over all runs (largest_fits in its rules)."


def run_in_ledgers(agreement: Agreement) -> str:
    """What a site's ledgers call a run: it stands for all its settings and its name."""
    return hashlib.sha256(agreement.document().text).hexdigest()[:32]


DOCUMENT: tuple[Callable[[OwnerTerms, Agreement], str], ...] = (
    _takes_part,
    _knows_all,
    _masks,
    _chooses_little,
    _has_room,
    _is_one_of_few,
)
"""Checked first; each gives words where the owner refuses."""


# What the settings mean.


def _allows_model(asked: AskedSettings) -> str:
    allowed = asked.terms.rules.models
    names = [str(model.describe().get("model")) for model in asked.models]
    refused = [] if allowed is None or ANY in allowed else [n for n in names if n not in allowed]
    if not refused or allowed is None:
        return ""
    return f"the owner allows the models {', '.join(allowed) or 'none'}; not {refused[0]!r}."


def _allows_columns(asked: AskedSettings) -> str:
    terms = asked.terms
    known, wanted = terms.listed or terms.rows.data.columns, asked.settings.columns
    if terms.rules.any_columns or known is None or {*(wanted or ())} >= {*known}:
        return ""
    return (
        "the owner has not listed the columns that an analyst may choose among: it does so with "
        "--columns."
    )


def _makes_full_passes(asked: AskedSettings) -> str:
    method = asked.settings.method(len(asked.agreement.sites)).describe()
    if asked.terms.rules.mini_batches or not method.get("batch_size"):
        return ""
    return "the owner answers with full passes, not with mini-batches (mini_batches in its rules)."


def _keeps_clusters(asked: AskedSettings) -> str:
    by_itself = are_many(len(asked.agreement.sites), asked.agreement.masked)
    merges = asked.settings.start == "merge" or (asked.settings.start == "auto" and by_itself)
    rules = asked.terms.rules
    if not merges or (rules.own_clusters and rules.smallest_rows <= SMALLEST):
        return ""
    return "the owner tells no clusters of its own rows (own_clusters): ask for another start."


def _is_private(asked: AskedSettings) -> str:
    privacy, rules = asked.settings.privacy, asked.terms.rules
    if privacy is None and rules.largest_epsilon is not None:
        return "the owner takes part in private runs alone: give the run an epsilon."
    if privacy is None:
        return ""
    if privacy.delta > rules.delta:
        return f"the owner's rules allow a delta of {rules.delta:g} at most."
    if asked.agreement.coded:
        return "a private fit has sums with noise, which are not coded: ask without `coded`."
    if asked.agreement.newcomers:
        return "a private fit has the sites of its beginning: ask without newcomers."
    for model in asked.models:
        check_private(model)
    return ""


# What a private fit costs.


def _has_noise(terms: OwnerTerms, charge: RunCharge) -> str:
    if terms.noise is not None and terms.memory is not None:
        return ""
    return "this site keeps no key of noise and no ledger, so it takes part in no private fit."


def _can_afford(terms: OwnerTerms, charge: RunCharge) -> str:
    rules, memory = terms.rules, terms.memory
    if memory is None or rules.largest_cost is None or rules.largest_epsilon is None:
        return ""
    total, runs = memory.allowance.read()
    more = charge.budget - (runs[charge.run].budget if charge.run in runs else 0.0)
    if total + max(0.0, more) <= rules.largest_cost * (1 + 1e-9):
        return ""
    left = max(0.0, rules.largest_cost - total)
    words = f"{epsilon_of(left, rules.delta):.3g} of them are left: ask for less"
    return (
        f"the owner gives away epsilon {rules.largest_epsilon:g} over all runs, and about "
        f"{words if left > 0 else 'nothing is left'}."
    )


def _covers(terms: OwnerTerms, charge: RunCharge) -> bool:
    """Whether noise takes the place of rules on what small differences tell.

    An owner with a ``largest_epsilon`` said how much that may be. Else it is noise by name alone
    once all private runs together cost more than `COVERED`.
    """
    if terms.rules.largest_epsilon is not None or terms.memory is None:
        return True
    total, runs = terms.memory.allowance.read()
    mine = runs[charge.run].budget if charge.run in runs else 0.0
    return total - mine + charge.budget <= mu_squared_of(COVERED, terms.rules.delta)


PRIVATE: tuple[Callable[[OwnerTerms, RunCharge], str], ...] = (_has_noise, _can_afford)
"""Checked of a private fit, when the owner, and a person where it wants so, have agreed."""


# What a table asks for.


def _is_not_private(terms: OwnerTerms, shared: SharedTable) -> str:
    if terms.rules.largest_epsilon is None:
        return ""
    return "the owner takes part in private runs alone, and sums of cells are not private."


def _allows_tables(terms: OwnerTerms, shared: SharedTable) -> str:
    allowed = terms.rules.models
    if allowed is None or {ANY, KIND} & {*allowed}:
        return ""
    return f"the owner allows the models {', '.join(allowed) or 'none'}; not {KIND!r}."


def _wants_observers(terms: OwnerTerms, shared: SharedTable) -> str:
    """All members leave out what too few have seen, by the same sum."""
    least = terms.rules.smallest_observers
    if shared.observers >= least:
        return ""
    return (
        f"the owner is in sums of cells that at least {least} sites have seen, not "
        f"{shared.observers}: ask with observers = {least}, or the owner allows fewer "
        "(smallest_observers in its rules)."
    )


TABLE: tuple[Callable[[OwnerTerms, SharedTable], str], ...] = (
    _is_not_private,
    _allows_tables,
    _wants_observers,
)
"""Checked before a person is asked about a table."""


SETTINGS: tuple[Callable[[AskedSettings], str], ...] = (
    _is_private,
    _allows_model,
    _allows_columns,
    _makes_full_passes,
    _keeps_clusters,
)
"""Checked before a person is asked."""


# What they would be computed from.


def _has_rows(terms: OwnerTerms) -> str:
    enough = terms.rows.count >= terms.rules.smallest_rows
    return "" if enough else "the owner answers for more rows than there are here."


def _counts_rows(asked: AskedSettings) -> str:
    models = asked.terms.rows.bound(asked.models)
    counted = [model.group_shares(np.zeros(model.layout.size)).size > 0 for model in models]
    if asked.terms.rules.models is not None or all(counted):
        return ""
    return (
        "this model does not tell how many rows stand behind its numbers: an owner who allows it "
        "names it in `models`."
    )


def _spares_rows(asked: AskedSettings) -> str:
    """Without masks the site's own rows count; with masks those of all, see `PASSES`."""
    if asked.agreement.masked:
        return ""
    return _too_few(asked.terms, asked.terms.rows.count)


def _too_few(terms: OwnerTerms, rows: float) -> str:
    """Each step of a sequence counts as a row; others' sequences are about as long."""
    told, spare = sum(terms._sizes), terms.rules.spare_rows
    if spare is None or rows * terms._steps[0] >= told + spare:
        return ""
    return (
        f"{told} statistics of so few rows are equations that have the rows as their solution: ask "
        "for fewer components, or use secure sums over more rows."
    )


def _changed_enough(terms: OwnerTerms) -> str:
    """The difference of two runs would tell of a few rows that came or went between them."""
    memory, data = terms.memory, terms.rows.data
    if memory is None:
        return ""
    if 0 < memory.described.fewest_changed(data, memory.secret) < terms.rules.smallest_rows:
        return (
            "a few of its rows are others than when it took part last: the difference of two runs "
            "would tell of these. It joins when more have changed, or with the rows of before."
        )
    memory.described.remember(data, memory.secret)
    return ""


ROWS: tuple[Callable[[AskedSettings], str], ...] = (
    _counts_rows,
    _spares_rows,
)
"""Checked when the owner, and a person where it wants so, have agreed."""


# What a fit has come to.


def _adds_up_with(asked: AskedPass) -> str:
    """Two sums over sets that differ by one site differ by its part."""
    terms, members = asked.terms, asked.about.members
    if terms.memory is None or not asked.about.agreement.masked:
        return ""
    change = terms.memory.company.enter(members, terms.rules.largest_changes)
    if not change:
        return ""
    return (
        f"the sites that this one adds up with would change ({change}), more often than the owner "
        "allows (largest_changes in its rules)."
    )


def _enters(asked: AskedPass) -> str:
    """Count the fit where it comes to the rows: one that was only proposed costs nothing."""
    memory = asked.terms.memory
    words = _is_one_of_few(asked.terms, asked.about.agreement)
    if not words and memory is not None:
        memory.fits.enter(run_in_ledgers(asked.about.agreement))
    return words


def _has_spare_rows(asked: AskedPass) -> str:
    masked = asked.about.agreement.masked
    return _too_few(asked.terms, asked.rows) if masked and asked.rows else ""


def _has_no_thin_component(asked: AskedPass) -> str:
    """By what the sums said: all sites judge alike, so a refusal is no word about any one site."""
    least = asked.terms.rules.smallest_component
    if least is None or not asked.rows or not asked.about.agreement.masked:
        return ""
    for model, statistics in _places(asked.ask):
        if thin(model.component_shares(statistics), asked.rows, least).any():
            return (
                f"a component of the sum of all sites has fewer than {least} rows, and the owner "
                "does not go on from there (smallest_component in its rules): ask for fewer "
                "components."
            )
    return ""


def _places(ask: Ask) -> Iterator[tuple[Model, FloatArray]]:
    """The models and statistics at which an ask looks at the rows."""
    if isinstance(ask, Joint):
        for one in ask.asks:
            yield from _places(one)
    elif isinstance(ask, Statistics):
        yield ask.model, ask.statistics


def _is_counted(asked: AskedPass) -> str:
    """The last check, since it spends: refusals and repeats after a restart count, too."""
    return _counted(asked.terms)


def _counted(terms: OwnerTerms) -> str:
    """Count a look at the rows; whether they suit some settings tells of them, too."""
    if terms.memory is None:
        return ""
    limits = {"answered": terms.rules.largest_rounds}
    if terms.memory.tally.spend(limits) is None:
        return ""
    return (
        f"the owner's rules allow {terms.rules.largest_rounds} exchanges about the rows, over all "
        "runs (largest_rounds), and they are used up."
    )


PASSES: tuple[Callable[[AskedPass], str], ...] = (
    _enters,
    _adds_up_with,
    _has_spare_rows,
    _has_no_thin_component,
    _is_counted,
)
"""Checked before each pass over the rows."""


def approvable(asked: AskedSettings) -> dict[str, Any]:
    """What a person agrees to: an answer holds for all later runs of the same fit."""
    privacy = asked.settings.privacy
    return {
        "model": asked.models[-1].describe(),
        "columns": list(asked.settings.columns or ()),
        "masks": asked.agreement.masked,
        "privacy": None if privacy is None else [privacy.epsilon, privacy.delta],
    }


COUNTS = ("n_components", "categories")
"""Numbers of parts, which are no choice of where a fit looks."""


def choices_in(program: Mapping[str, Any]) -> int:
    """Numbers of a document that are a choice and no word: lists of them, and priors' own."""
    found = 0
    for table in ("model", "fit"):
        about = program.get(table)
        for name, value in about.items() if isinstance(about, Mapping) else ():
            if isinstance(value, list | Mapping) and name not in COUNTS:
                found += _numbers(value, priors=name.endswith("prior"))
    return found


def _numbers(value: Any, priors: bool) -> int:
    if isinstance(value, Mapping):
        told = {name: one for name, one in value.items() if name not in COUNTS}
        return sum(
            _numbers(one, priors) for one in told.values() if priors or isinstance(one, list)
        )
    if isinstance(value, list):
        return sum(_numbers(one, priors=True) for one in value)
    return int(isinstance(value, int | float))


def counts_named(description: Any) -> int:
    """About how many numbers settings make necessary: counts multiply, what is listed adds up."""
    if isinstance(description, Mapping):
        return _product(v for name, v in description.items() if name != "samples")
    if isinstance(description, list | tuple):
        return sum(max(1, counts_named(value)) for value in description)
    if isinstance(description, str):  # a family in words, such as "categorical:5"
        return _product(int(digits) for digits in re.findall("[0-9]{1,18}", description))
    return min(abs(description), MOST_NUMBERS) if type(description) is int else 1


def _product(counts: Iterable[Any]) -> int:
    """The numbers that counts make necessary together, or `MOST_NUMBERS`."""
    found = 1
    for count in counts:
        found = min(found * max(1, counts_named(count)), MOST_NUMBERS)
    return found
