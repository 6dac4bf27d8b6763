"""EM itself, distributed without compression: the reference for everything else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, final

from emfed.core.protocols import Algorithm


@final
@dataclass(frozen=True)
class EM(Algorithm):
    """EM itself, distributed without compression: S <- sum_i w_i s-bar_i(T(S)).

    A worker that does not answer leaves its share of S as it is.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> emfed.fit(model, data, emfed.EM()).converged
    True
    """

    name: ClassVar[str] = "em"

    @property
    def tells_gains(self) -> bool:
        """Sums are exact."""
        return True

    def describe(self) -> dict[str, Any]:
        return {"algorithm": self.name}
