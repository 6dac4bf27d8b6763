"""Which program a document of settings stands for: a fit, or a table that is filled together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from emfed.artifacts.company import LEAST_SHARE
from emfed.core.sums import Ask, Sum
from emfed.fitting.private_program import PrivateProgram
from emfed.fitting.program import FitProgram, Told, settings_of
from emfed.fitting.stopping import Callback
from emfed.imputation.program import SharedTable, TableProgram, asks_for_table
from emfed.network.exchange.followed import Program


def _untold(ask: Ask, answer: Sum) -> None:
    """Nobody looks at the sums."""


def program_of(
    document: Mapping[str, Any] | None,
    masked: bool,
    callbacks: tuple[Callback, ...] = (),
    told: Told = _untold,
    least_share: float = LEAST_SHARE,
) -> Program:
    """The program that members follow; raises `SettingsError` for what none could."""
    if asks_for_table(document):
        return TableProgram(SharedTable.read(document or {}), told)
    settings = settings_of(document or {}, masked)
    if settings.epsilon is not None:
        return PrivateProgram(settings, callbacks, told)
    return FitProgram(settings, callbacks, told, least_share)
