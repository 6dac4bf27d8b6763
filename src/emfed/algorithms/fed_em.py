"""FedEM, Algorithm 1 of the paper, with partial participation."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, final

from emfed.algorithms.base import CompressedEM
from emfed.core.errors import check_count


@final
@dataclass(frozen=True)
class FedEM(CompressedEM):
    """FedEM, Algorithm 1 of the paper: compressed statistics, and memories that undo heterogeneity.

    Where the paper has 1/n, ours has the weight of each worker.

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
    batch_size : int or None
        The number of rows of a mini-batch; None stands for the full local pass.
    replacement : bool
        Whether a mini-batch is drawn with replacement.
    in_metric : bool
        Whether to compress in the metric that the model supplies, not in the Euclidean one.
    broadcast : Compressor or None
        The operator that compresses the server's steps too. Workers that were there in the last
        rounds are sent quantised steps, others the statistics in full.
    simulations : int or None
        How many draws of a row's latent variable replace the expectation over it: a Monte Carlo
        E-step, which A7 allows. None takes the expectation.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> model = emfed.gaussian_mixture(2, "tied")
    >>> algorithm = emfed.FedEM(emfed.Dithering(levels=4), step_size=0.5)
    >>> emfed.fit(model, data, algorithm, rounds=20).rounds
    20
    """

    simulations: int | None = None

    name: ClassVar[str] = "FedEM"

    def check_settings(self) -> None:
        """The number of draws."""
        if self.simulations is not None:
            check_count("simulations", self.simulations)
