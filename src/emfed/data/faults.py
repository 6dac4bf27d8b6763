"""All that is wrong with a table, in one report: file, line, column, value, what to do."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self, final

from emfed.core.errors import DataError
from emfed.core.wording import Face

SHOWN = 10
"""Faults that a message shows; a screen has some 25 lines. No measurement chose it."""
KEPT = 1000
"""Faults of one column or file that a report holds for machines, so that a file of any size has a
report of a few hundred kilobytes; the total counts all."""
WIDEST = 40
"""Characters of a cell that a message shows."""


@final
@dataclass(frozen=True)
class TableFault:
    """One thing that is wrong with a table, and what to do about it.

    Examples
    --------
    >>> from emfed.data import TableFault
    >>> print(TableFault("a.csv", "is no number", "write it as one", 3, None, "b", "four"))
    a.csv, line 3, column 'b': 'four' is no number: write it as one.
    """

    file: str
    """The file, or what the table is called."""
    problem: str
    """What is wrong; it follows the value where there is one, as in ``'four' is no number``."""
    hint: str
    """What to do."""
    line: int | None = None
    """The line of a text file as an editor counts it: the header is line 1."""
    row: int | None = None
    """Where there are no lines, the row, counted from 0."""
    column: str | int | None = None
    """The column; of an array its number, counted from 0."""
    value: str | None = None
    """The cell as it was written."""
    times: int = 1
    """How many cells of the column have this fault; the first is shown."""

    @property
    def place(self) -> str:
        """The line or the row, as messages say it."""
        if self.line is not None:
            return f"line {self.line}"
        return "" if self.row is None else f"row {self.row}"

    @property
    def words(self) -> str:
        """What is wrong and what to do, without the place."""
        cell = "" if self.value is None else f"{self.value[:WIDEST]!r} "
        more = f" ({self.times} cells)" if self.times > 1 else ""
        return f"{cell}{self.problem}{more}: {self.hint}"

    def __str__(self) -> str:
        column = "" if self.column is None else f"column {self.column!r}"
        where = ", ".join(part for part in (self.file, self.place, column) if part)
        return f"{where}: {self.words}."


@final
@dataclass(frozen=True)
class FaultReport:
    """All faults of one table or several, in the order of files and lines.

    Examples
    --------
    >>> from emfed.data import FaultReport, TableFault
    >>> report = FaultReport((TableFault("a.csv", "it is empty", "expected rows"),), 1)
    >>> report.as_json()["total"]
    1
    """

    faults: tuple[TableFault, ...]
    """The faults; of a column with very many, the first."""
    total: int
    """The number of all faults."""

    def __str__(self) -> str:
        if self.total == 1:
            return str(self.faults[0])
        files = {fault.file for fault in self.faults}
        head = ("table",) if len(files) > 1 else ()
        rows = [(*head, "where", "column", "what is wrong, and what to do")]
        for fault in self.faults[:SHOWN]:
            file = (fault.file,) if head else ()
            rows.append(
                (*file, fault.place, "" if fault.column is None else str(fault.column), fault.words)
            )
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        widths[-1] = 0
        lines = [
            "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            for row in rows
        ]
        # Names of columns are others' text, which might command a terminal.
        lines = ["".join(c if c.isprintable() else "?" for c in line) for line in lines]
        of = next(iter(files)) if not head else f"{len(files)} tables"
        if self.total > SHOWN:
            lines.append(f"  and {self.total - SHOWN} faults more")
        return "\n".join([f"{of}: {self.total} faults", *lines])

    def as_json(self) -> dict[str, Any]:
        """The report for machines: ``total``, and ``faults`` as a list of objects."""
        return {"total": self.total, "faults": [asdict(fault) for fault in self.faults]}


@final
class FaultyTable(DataError):
    """A table cannot be used; ``report`` has all that is wrong with it.

    Examples
    --------
    >>> import emfed
    >>> try:
    ...     emfed.data.read(b"a,b\\n1,2\\n3,four\\n")
    ... except emfed.data.FaultyTable as error:
    ...     print(error.report.faults[0].line, error.report.faults[0].value)
    3 four
    """

    def __init__(self, report: FaultReport) -> None:
        self.report = report
        super().__init__(str(report))

    def __reduce__(self) -> Any:
        return type(self), (self.report,)

    def on(self, face: Face) -> Self:
        """The same error with settings by the names that this face has for them."""
        faults = tuple(replace(fault, hint=face(fault.hint)) for fault in self.report.faults)
        self.report = replace(self.report, faults=faults)
        self.args = (str(self.report), *self.args[1:])
        return self


@final
@dataclass
class Faults:
    """Faults as they are found; `check` raises if there are any."""

    found: list[TableFault] = field(default_factory=list)
    total: int = 0

    def add(self, faults: Iterable[TableFault]) -> None:
        """Note faults of one column or of a file's form: the first of very many."""
        for number, fault in enumerate(faults):
            self.total += 1
            if number < KEPT:
                self.found.append(fault)

    @contextmanager
    def collecting(self) -> Iterator[None]:
        """Within, a table that cannot be read ends its own reading alone."""
        try:
            yield
        except FaultyTable as error:
            self.found += error.report.faults
            self.total += error.report.total

    def report(self) -> FaultReport:
        """What was found, file by file in the order of lines."""
        files = list(dict.fromkeys(fault.file for fault in self.found))
        found = sorted(self.found, key=lambda f: (files.index(f.file), f.line or f.row or 0))
        return FaultReport(tuple(found), self.total)

    def check(self) -> None:
        """Raise `FaultyTable` if anything was found."""
        if self.found:
            raise FaultyTable(self.report())


def repeated(
    cells: Iterable[tuple[int, str]],
    good: float,
    fault: Callable[[int, str, int, bool], TableFault],
) -> list[TableFault]:
    """The faults of a column's bad cells, each value once; one where ``good`` cells are fewer.

    ``fault`` is given the row, the cell, how many cells there are, and whether they are most.
    """
    rows: dict[str, list[int]] = {}
    for row, cell in cells:
        rows.setdefault(cell, []).append(row)
    count = sum(map(len, rows.values()))
    if good < count:
        cell, places = next(iter(rows.items()))
        return [fault(places[0], cell, count, True)]
    return [fault(places[0], cell, len(places), False) for cell, places in rows.items()]


def refuse(file: str, problem: str, hint: str, **place: Any) -> FaultyTable:
    """The error of a table with one fault."""
    return FaultyTable(FaultReport((TableFault(file, problem, hint, **place),), 1))
