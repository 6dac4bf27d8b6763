"""EM for few bytes and without knobs: what ``algorithm="auto"`` means.

The rounds are those of `emfed.fitting.ascent`, and with many workers first those of
`emfed.fitting.many`; workers that are heard one by one make those of FedEM or VR-FedEM.

Decisions: docs/decisions/007-the-fit-on-sums.md, 008-few-and-many.md
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from emfed.core.errors import check_count
from emfed.core.protocols import Algorithm


@final
@dataclass(frozen=True)
class AutoEM(Algorithm):
    """EM for few bytes and without settings: precision, steps and rates follow from the sums.

    It is what ``algorithm="auto"`` means wherever there are several workers. docs/automatic.md says
    what it does.

    Parameters
    ----------
    follow_em : bool
        Take EM's own steps and no others, so that the run ends where pooled EM ends even where
        optima lie close together: few or small workers, many components.
    batch_size : int or None
        The rows of mini-batches between full passes (SPIDER, as in VR-FedEM). None stands for full
        local passes; a quarter of the rows or more does as well as these.
    inner_rounds : int
        The rounds from one full pass to the next, with mini-batches.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> emfed.fit(model, data, emfed.AutoEM()).converged
    True
    """

    follow_em: bool = False
    batch_size: int | None = None
    inner_rounds: int = 4

    name: ClassVar[str] = "auto"

    def __post_init__(self) -> None:
        check_count("inner_rounds", self.inner_rounds)
        if self.batch_size is not None:
            check_count("batch_size", self.batch_size)

    @property
    def tells_gains(self) -> bool:
        """The noise of sums is a small share of what is left."""
        return True

    def describe(self) -> dict[str, Any]:
        settings = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {"algorithm": self.name} | settings
