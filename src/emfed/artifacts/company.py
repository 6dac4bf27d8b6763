"""Whose model it is: who took part to the end, of those who began."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, final

from emfed.core.protocols import plural

LEAST_SHARE = 0.9
"""The share of the rows that began, or of the sites where rows are not known, below which a model
carries a doubt, unless the operator sets another."""


@final
@dataclass(frozen=True)
class Company:
    """Sites and rows of a fit at its beginning and at its end.

    Parameters
    ----------
    began, here : tuple of str
        Who took part at the beginning, and at the end.
    rows : int
        Rows of all who are here, together.
    rows_began : int, optional
        The same at the beginning; None: the first set changed before it had told.
    gone : mapping from str to str
        Why sites left, or never came, by name.
    least_share : float
        The share below which the model carries a doubt.

    Examples
    --------
    >>> gone = {"oslo": "did not answer any more"}
    >>> whose = Company(("bergen", "oslo"), ("bergen",), 400, 529, gone)
    >>> whose.share
    0.7561436672967864
    >>> print(whose.words)
    1 of the 2 sites that began took part to the end, with 400 of 529 rows (76%). oslo did not \
answer any more.
    """

    began: tuple[str, ...]
    here: tuple[str, ...]
    rows: int
    rows_began: int | None = None
    gone: Mapping[str, str] = field(default_factory=dict)
    least_share: float = LEAST_SHARE

    @property
    def stayed(self) -> int:
        """How many of those who began are here."""
        return len(set(self.began) & set(self.here))

    @property
    def share(self) -> float:
        """How much of what began is in the model: of the rows, or of the sites if not known.

        Where others came meanwhile, nobody can tell their rows from those that left: then the
        smaller of the two.
        """
        sites = self.stayed / max(1, len(self.began))
        if not self.rows_began:
            return sites
        rows = min(1.0, self.rows / self.rows_began)
        return rows if set(self.here) <= set(self.began) else min(rows, sites)

    @property
    def words(self) -> str:
        """Of how many sites and rows it is, out of how many, and who left why."""
        began, rows = len(self.began), f"{self.rows:,} rows"
        if self.stayed == began:
            told = f"all {plural(began, 'site')} that began took part to the end, with {rows}."
        else:
            beside = ""
            if self.rows_began:
                rows = f"{self.rows:,} of {self.rows_began:,} rows"
                beside = f" ({self.rows / self.rows_began:.0%})"
            told = (
                f"{self.stayed} of the {began} sites that began took part to the end, with "
                f"{rows}{beside}."
            )
        if came := [name for name in self.here if name not in self.began]:
            told += f" {', '.join(came)} came later."
        return " ".join([told, *(f"{name} {why}." for name, why in self.gone.items())])

    @property
    def doubt(self) -> str:
        """Why this is not the model of those who began; empty if it is."""
        return self.words if self.share < self.least_share else ""

    def unnamed(self) -> Company:
        """The same with numbers in place of names."""
        names = list(dict.fromkeys((*self.began, *self.here, *self.gone)))
        called = {name: f"site {number}" for number, name in enumerate(names)}
        return replace(
            self,
            began=tuple(called[name] for name in self.began),
            here=tuple(called[name] for name in self.here),
            gone={called[name]: why for name, why in self.gone.items()},
        )

    def described(self) -> dict[str, Any]:
        """As plain JSON types."""
        return {
            "began": list(self.began),
            "here": list(self.here),
            "rows": self.rows,
            "rows_began": self.rows_began,
            "gone": dict(self.gone),
            "least_share": self.least_share,
        }

    @classmethod
    def read(cls, told: Mapping[str, Any] | None) -> Company | None:
        """What `described` gave."""
        if told is None:
            return None
        began, here = (tuple(map(str, told[name])) for name in ("began", "here"))
        gone = {str(name): str(why) for name, why in told["gone"].items()}
        rows_began = None if told["rows_began"] is None else int(told["rows_began"])
        return cls(began, here, int(told["rows"]), rows_began, gone, float(told["least_share"]))
