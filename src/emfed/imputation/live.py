"""Cells of sites elsewhere: the sums over all of them, as every member has them at the end."""

from __future__ import annotations

from emfed.aggregation.simulated import charge
from emfed.core.ledger import Ledger
from emfed.core.sums import Ask, Sum
from emfed.fitting.interrupting import interrupts
from emfed.imputation.program import SharedTable, TableProgram
from emfed.imputation.sums import Gathered, table_of_sums
from emfed.imputation.table import Grid
from emfed.network.exchange.statements import Agreement
from emfed.network.live import AskedRun, LiveSites


def gathered_at(sites: LiveSites, grid: Grid, masks: bool | None, observers: int) -> Gathered:
    """The sums of cells of sites elsewhere, which all of them have signed."""
    shared = SharedTable(grid, observers)
    ledgers = list[Ledger]()

    def make(agreement: Agreement) -> TableProgram:
        ledger = Ledger(len(agreement.sites), agreement.sites)
        ledgers[:] = [ledger]

        def told(ask: Ask, answer: Sum) -> None:
            charge(ledger, ask.purpose, len(agreement.sites), answer.bytes)

        return TableProgram(shared, told)

    with interrupts() as interrupted:

        def ends() -> str:
            return "interrupted" * interrupted()

        ended, conductor = sites.follow(AskedRun(shared.document(), make, masks, ends))
        if conductor.ended_by and not ended.final:
            raise KeyboardInterrupt
    conductor.check(ended)
    return Gathered(table_of_sums(grid, ended.result), ledgers[0])
