"""Members whose owners have rules, a folder, and a key of noise, over a network in memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from numpy.typing import NDArray

from emfed.core.sums import Ask, Sum
from emfed.data import as_workers
from emfed.deployment.consent import OfferedRows, OwnerTerms
from emfed.deployment.programs import program_of
from emfed.network.exchange.followed import Program
from emfed.network.exchange.member import Follower
from emfed.network.exchange.records import MemoryRecords
from emfed.network.exchange.statements import Agreement
from emfed.network.owner_rules import SiteRules
from emfed.network.spending import SiteMemory, noise_key
from tests.network.exchanges import READER, Federation

FloatArray = NDArray[np.float64]
COLUMNS = ("age", "height")
MIXTURE = {"kind": "gaussian-mixture", "n_components": 2, "covariance_type": "full"}


def document(model: Mapping[str, Any] = MIXTURE, **fit: Any) -> dict[str, Any]:
    """Settings in words."""
    return {"model": dict(model), "algorithm": {}, "fit": fit, "columns": list(COLUMNS)}


@dataclass
class Owners:
    """Sites with folders of their own, as `emfed join` keeps them."""

    where: Path
    tables: Mapping[str, FloatArray]
    program: dict[str, Any]
    rules: Mapping[str, SiteRules] = field(default_factory=dict)
    masked: bool = True
    run: str = "run"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        options = {"newcomers": False, "run": self.run, **self.options}
        self.sums: list[tuple[Ask, Sum]] = []

        def accept(about: Agreement) -> Program:
            return program_of(about.program, about.masked, told=lambda *one: self.sums.append(one))

        self.federation = Federation(
            len(self.tables), self.masked, tables=self.tables, options=options, accept=accept
        )
        self.federation.settings = replace(self.federation.settings, program=self.program)
        for name in self.tables:
            self.give_terms(name)

    def give_terms(self, name: str) -> None:
        """Let every process of a site ask its owner."""
        process = self.federation.network.processes[name]
        make = process.make

        def owned(disk: MemoryRecords) -> Follower:
            found: Follower = make(disk)
            terms = self.terms(name)
            found._me.consent, found._me.rows = terms.consent(), terms.rows
            salt = self.federation.keys[name].secret(b"emfed rows")
            found._commitment = terms.rows.commitment(salt)
            return found

        process.make = owned

    def folder(self, name: str) -> Path:
        """The folder of a site."""
        return self.where / name

    def terms(self, name: str) -> OwnerTerms:
        """What a process of a site begins with: all that lasts is on its disk."""
        rules = self.rules.get(name, SiteRules())
        copies = [] if rules.second_ledger is None else [Path(rules.second_ledger)]
        self.where.mkdir(parents=True, exist_ok=True)
        rows = pl.DataFrame(self.tables[name], schema=list(COLUMNS))
        return OwnerTerms(
            name,
            rules,
            None,
            OfferedRows(as_workers([rows])),
            SiteMemory(self.folder(name), copies=copies),
            noise=noise_key(self.where / f"{name}.noise"),
        )

    def told(self) -> dict[str, str]:
        """How members ended, in words; empty of those whose model is final."""
        return {name: end.words for name, end in self.federation.ends.items()}

    def result(self) -> Any:
        """The result of the analyst."""
        return self.federation.ends[READER].result.fitted().result
