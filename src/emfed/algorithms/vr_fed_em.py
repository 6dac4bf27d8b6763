"""VR-FedEM, Algorithm 2 of the paper: SPIDER variance reduction, with partial participation.

The paper writes it for full participation and uses it with p = 0.75; `emfed.algorithms.paper` says
what a worker keeps while it is away.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from emfed.algorithms.base import CompressedEM
from emfed.core.errors import SettingsError, check_count


@final
@dataclass(frozen=True)
class VRFedEM(CompressedEM):
    """VR-FedEM, Algorithm 2 of the paper: FedEM with variance-reduced local estimates.

    The paper prints it for full participation and runs it with p = 0.75. A worker of ours that is
    away keeps its estimate and the parameters that it belongs to, and makes its full pass at its
    first active round of an outer loop.

    Parameters
    ----------
    compressor : Compressor
        The operator that compresses uploads.
    step_size : float, callable or None
        The step gamma, a number or a function of the round, which counts from 1. None chooses one
        from the compression, the participation and the number of workers: a rule of thumb that is
        far above the limits of Theorems 1 and 4.
    memory_rate : float or None
        The rate alpha of the memories V_i. None stands for 1 / (1 + omega); 0 switches memories
        off, which is the naive method that the paper warns of.
    memory_start : {"zero", "mean-field"}
        Where memories start: at zero, or at V_i = h_i(S_0) at the cost of one exact upload.
    batch_size : int
        The number of rows of a mini-batch.
    replacement : bool
        Whether a mini-batch is drawn with replacement.
    in_metric : bool
        Whether to compress in the metric that the model supplies, not in the Euclidean one.
    broadcast : Compressor or None
        The operator that compresses the server's steps too. Workers that were there in the last
        rounds are sent quantised steps, others the statistics in full.
    inner_rounds : int
        The number of inner rounds of an outer loop, k_in.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> algorithm = emfed.VRFedEM(step_size=0.5, batch_size=10, inner_rounds=5)
    >>> emfed.fit(model, data, algorithm, rounds=20).rounds
    20
    """

    batch_size: int | None = 1
    inner_rounds: int = 10

    name: ClassVar[str] = "VR-FedEM"

    def check_settings(self) -> None:
        """Mini-batches are the point."""
        check_count("inner_rounds", self.inner_rounds)
        if self.batch_size is None:
            raise SettingsError("VRFedEM needs a batch_size; with full local passes use FedEM.")
