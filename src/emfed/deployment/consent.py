"""What a site's owner agrees to, before its program follows a fit; and the rows that it offers."""

from __future__ import annotations

import contextlib
import hashlib
import hmac
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, final

import numpy as np

from emfed.core.errors import DataError, FederationError, SettingsError
from emfed.core.protocols import Model
from emfed.core.sums import FloatArray, Mean
from emfed.core.wire import Reason
from emfed.data.sources import chunks
from emfed.data.summing import HeldRows, check_rows_held
from emfed.data.tables import Workers, apart
from emfed.data.workers import with_columns
from emfed.fitting.program import FitProgram, settings_of
from emfed.fitting.settings import FitSettings
from emfed.fitting.stopping import Callback
from emfed.network.exchange.member import Consent, Program
from emfed.network.exchange.statements import Agreement
from emfed.network.rules import Refusal, SiteRules
from emfed.network.site import check_ask

CHOICES = 0
"""Numbers that an analyst may choose where the owner's rules say nothing of them."""


@final
class OfferedRows:
    """A site's rows: all columns are committed to, those of the fit are summed over.

    Parameters
    ----------
    data : Workers
        The rows, as one worker.
    """

    def __init__(self, data: Workers) -> None:
        self.data = data
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

    def choose(self, settings: FitSettings) -> None:
        """Take the columns of a fit, and refuse rows that its model cannot use."""
        columns = tuple(settings.columns or ())
        data = with_columns(self.data, columns)
        check_rows_held(settings.candidates()[0], data)
        self._held = HeldRows(data)

    def bound(self, models: Sequence[Model]) -> list[Model]:
        """The models bound to some rows of this site alone, as far as these can have them."""
        piece = next(iter(self._chosen.data.pieces(np.zeros(1, dtype=np.int64))))
        rows, found = next(iter(apart(piece))).rows, list[Model]()
        for model in models:
            with contextlib.suppress(DataError, SettingsError):
                summary = model.summary(rows)
                found.append(model.bind(summary, np.array([len(rows[0])]), np.ones(1)))
        return found

    @property
    def _chosen(self) -> HeldRows:
        assert self._held is not None
        return self._held

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


@final
@dataclass(frozen=True, eq=False)
class OwnerTerms:
    """What an owner agrees to, and what it was told.

    Parameters
    ----------
    name : str
        The site's.
    rules : SiteRules
        The owner's rules.
    known : collection of str
        The sites whose keys the owner pinned.
    rows : OfferedRows
        The rows.
    listed : sequence of str, optional
        The columns that the owner lists for analysts to choose among.
    callbacks : tuple of callable
        Called with the record of each round.
    approve : callable, optional
        Asks a person about a fit: it refuses with `Refusal`, for good or for now.
    """

    name: str
    rules: SiteRules
    known: Collection[str]
    rows: OfferedRows
    listed: Sequence[str] | None = None
    callbacks: tuple[Callback, ...] = ()
    approve: Callable[[Mapping[str, Any]], None] | None = None

    def consent(self) -> Consent:
        """What the site's program asks."""
        changes = self.rules.largest_changes
        return Consent(
            self.accept, self.rules.smallest_set, 1 << 30 if changes is None else changes
        )

    def accept(self, agreement: Agreement) -> Program | None:
        """The program of settings that the rules allow; None while a person has not answered."""
        try:
            return self._accept(agreement)
        except Refusal as refusal:
            if refusal.reason is Reason.NOT_NOW:
                return None
            raise FederationError(refusal.text) from None

    def _accept(self, agreement: Agreement) -> Program:
        about, rules, masked = dict(agreement.program or {}), self.rules, agreement.masked
        if self.name not in agreement.sites:
            raise FederationError(f"this fit is one of {', '.join(agreement.sites)} alone.")
        if strangers := sorted(set(agreement.sites) - set(self.known)):
            raise FederationError(
                f"{', '.join(strangers)} take part, and the roster here has no key of theirs: put "
                "their NAME.pub there with `emfed keys roster`, if you know them."
            )
        if not masked and not rules.unmasked:
            raise FederationError(
                "the owner takes part in masked sums alone (unmasked in its rules)."
            )
        if (chosen := choices_in(about)) > self._largest_choices:
            raise FederationError(
                f"an analyst chose {chosen} numbers in the settings, and the owner allows "
                f"{self._largest_choices} (largest_choices in its rules): ask with words alone."
            )
        settings = settings_of(about, masked)
        rules.check_privacy(settings.privacy)
        if settings.privacy is not None:
            raise FederationError("private fits do not run on this exchange yet.")
        data, models = self.rows.data, settings.candidates()
        for model in models:
            check_ask(rules, model.describe(), data, masked)
        rules.check_columns(settings.columns, self.listed or data.columns)
        if self.approve is not None:
            words = {"model": models[-1].describe(), "columns": list(settings.columns or ())}
            self.approve({**words, "masks": masked})
        self.rows.choose(settings)
        rules.check_opening(self.rows.count, np.empty(0))
        bound = self.rows.bound(models)
        rules.check_statistics(self.rows.count, bound, masked)

        def opened(rows: float) -> None:
            try:
                rules.check_spare(int(rows), sum(model.layout.size for model in bound))
            except Refusal as refusal:
                raise FederationError(refusal.text) from None

        return FitProgram(settings, self.callbacks, opened)

    @property
    def _largest_choices(self) -> int:
        chosen = self.rules.largest_choices
        return CHOICES if chosen == SiteRules().largest_choices or chosen is None else chosen


def choices_in(program: Mapping[str, Any]) -> int:
    """Numbers of a document that are a choice and no word: lists of them, and priors' own."""
    found = 0
    for table in ("model", "fit"):
        about = program.get(table)
        for name, value in about.items() if isinstance(about, Mapping) else ():
            if isinstance(value, list | Mapping) and name != "n_components":
                found += _numbers(value, priors=name.endswith("prior"))
    return found


def _numbers(value: Any, priors: bool) -> int:
    if isinstance(value, Mapping):
        return sum(
            _numbers(one, priors) for one in value.values() if priors or isinstance(one, list)
        )
    if isinstance(value, list):
        return sum(_numbers(one, priors=True) for one in value)
    return int(isinstance(value, int | float))
