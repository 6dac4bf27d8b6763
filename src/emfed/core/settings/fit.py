"""Every setting of a fit. To add one, add a field: all faces follow (CONTRIBUTING.md)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING, Any, Literal

from emfed.core.settings.declaring import setting

if TYPE_CHECKING:
    from emfed.core.protocols import Algorithm, FloatArray, Model, Names, Participation

ALGORITHM, LIMITS, RUN = "Algorithm", "Limits (the first one met)", "Run"
Criterion = Literal["aic", "bic", "icl", "held-out"]
PATIENCE = 3
"""Rounds in a row that a worker may miss. The memory of an absent worker is a constant force: of
three sites one that left after round 3 ends the run at -19.6 nats a row in place of -3.69."""
STARTS = ("auto", "merge", "k-means", "moments")


@dataclass(frozen=True, eq=False)
class FitFields:
    """The fields of `emfed.fitting.FitSettings`: light, so that ``emfed --help`` can read them."""

    model: Model | Callable[[int], Model] = setting(
        MISSING,
        "A model, or a function from a number of components to one.",
        takes="Model or callable",
        toml=False,
    )
    n_components: Any = setting(
        None,
        'Numbers of components to compare: a number, a collection, or a range "2:8" with both '
        "ends. None stands for what the model says.",
        takes="str, int, iterable of int or None",
        toml=False,
    )
    criterion: Criterion = setting(
        "bic",
        "What chooses among several numbers of components.",
        more='"held-out" is for models that can hide values (row-owner): all are fitted without a '
        "tenth of the values, the one with the least squared error on them is chosen, and then it "
        "is fitted to all.",
        takes='{"bic", "aic", "icl", "held-out"}',
        words=("aic", "bic", "icl", "held-out"),
    )
    algorithm: Algorithm | str = setting(
        "auto",
        "What makes the rounds: auto (the pooled answer for few bytes; alone, EM with momentum), "
        "em, FedEM or VR-FedEM.",
        more="In Python also an `Algorithm`.",
        takes="str or Algorithm",
        panel=ALGORITHM,
        metavar="NAME",
        option_words=("auto", "em", "FedEM", "VR-FedEM"),
        toml=False,
    )
    follow_em: bool = setting(
        False,
        "For auto: take little noise and no momentum, to end where pooled EM ends.",
        takes="bool",
        panel=ALGORITHM,
    )
    start: Any = setting(
        "auto",
        "Where the fit starts: merge (clusters of each worker's own rows), k-means (cluster sums "
        "and counts), moments (the spread of all data), or auto: k-means where the model has "
        "clusters, else moments; without masks merge takes its place from 50 workers on.",
        more="In Python also parameters in the user's units.",
        takes="str or parameters",
        words=STARTS,
        panel=ALGORITHM,
        metavar="NAME",
        option_words=STARTS,
    )
    n_init: int = setting(
        1,
        "The number of starts that compete; the best goes on.",
        takes="int",
        low=1,
        panel=ALGORITHM,
        metavar="N",
    )
    moves: int = setting(
        3,
        "After the fit of fewer than 50 workers has converged, move a component (two are merged, "
        "another is split) until so many moves in a row gained nothing; 0 ends where the start "
        "leads.",
        takes="int",
        low=0,
        panel=ALGORITHM,
        metavar="N",
    )
    start_statistics: Literal["expected", "parameters"] | None = setting(
        None,
        "Whether S_0 is the expected statistics at given parameters (the paper), or what the "
        "parameters imply, which sends nothing.",
        takes='{"expected", "parameters"} or None',
        words=("expected", "parameters"),
    )
    participation: Participation | float | None = setting(
        None,
        "The probability that a worker takes part in a round; everyone takes part if left out.",
        more="In Python also a `Participation`. Masked sums over a network are those of everyone.",
        takes="float, Participation or None",
        panel=ALGORITHM,
        names="--participation -p",
        metavar="P",
    )
    weights: str | Sequence[float] | FloatArray = setting(
        "samples",
        "What workers count for: samples (every row alike, the pooled optimum) or uniform (every "
        "worker alike, the paper).",
        more="In Python also, without masks, one number for each.",
        takes='{"samples", "uniform"} or sequence of float',
        panel=ALGORITHM,
        metavar="NAME",
        option_words=("samples", "uniform"),
    )
    tol: float | None = setting(
        None,
        "The log-likelihood per row that a converged fit may still have to gain, in nats; 1e-6 if "
        "left out; 0 makes all rounds.",
        takes="float or None",
        low=0,
        panel=LIMITS,
        metavar="X",
    )
    field_tol: float | None = setting(
        None,
        "A bound on |H|^2, the squared step of EM, in three rounds in a row.",
        takes="float or None",
        low=0,
        panel=LIMITS,
        metavar="X",
    )
    rounds: int | None = setting(
        None,
        "The largest number of rounds; 1000 if there is no limit.",
        more="The first limit that is met ends the fit.",
        takes="int or None",
        low=0,
        panel=LIMITS,
        metavar="N",
    )
    epochs: float | None = setting(
        None,
        "The most conditional expectations, in units of all rows.",
        takes="float or None",
        low=0,
    )
    max_bytes: int | None = setting(
        None,
        "The most bytes of all workers, up and down.",
        takes="int or None",
        low=0,
        panel=LIMITS,
        metavar="N",
    )
    seconds: float | None = setting(
        None,
        "The most seconds of computing.",
        takes="float or None",
        low=0,
        panel=LIMITS,
        metavar="S",
    )
    seed: int = setting(
        0,
        "The seed of starts, compression, batches and participation; the noise of a private fit "
        "does not follow from it.",
        takes="int",
        panel=RUN,
        metavar="N",
        low=0,
    )
    columns: Names = setting(
        None,
        "The names of the columns to use, in this order; None stands for all.",
        takes="sequence of str or None",
        toml=False,
    )
    patience: int | None = setting(
        PATIENCE,
        "How often in a row a worker is asked in vain, while others answer, before it is away: the "
        "fit goes on with the rows of the others, and counts it again once it answers. With "
        "None the fit waits for it, with its last answer.",
        takes="int or None",
        low=1,
    )
    accelerate: bool = setting(
        True, "Whether EM that watches its log-likelihood takes momentum.", takes="bool"
    )
    drop: bool = setting(
        True, "Whether candidates that will hardly be chosen leave the run early.", takes="bool"
    )
    scores: bool = setting(
        False,
        "Whether workers say at the end how well the model fits their rows: each by itself, or "
        "where they are masked all together.",
        takes="bool",
    )
    doubts: str = setting(
        "tell",
        "What becomes of workers that doubt their units, codes or columns: tell of them, stop "
        "before the rounds, or ignore it and do not look.",
        takes='{"tell", "stop", "ignore"}',
        words=("tell", "stop", "ignore"),
    )
    errors: bool = setting(
        False,
        "Work out standard errors at the end: one more exchange.",
        more="Workers are asked for as many exact statistics as the model has free parameters.",
        takes="bool",
        panel=RUN,
    )
    validate: bool = setting(
        False,
        "Hold rows out: how well does the model fit what it has not seen, and whom does it serve?",
        more="`Result.validation` has the answer; of masked workers that of all together.",
        takes="bool",
        panel=RUN,
    )
    likelihood: bool = setting(
        False,
        "Whether everyone is asked at the end for the log-likelihood, if no round gave it.",
        takes="bool",
        toml=False,
    )
    masks: bool | None = setting(
        None,
        "Whether workers mask their numbers: each rounds to a common lattice and, between "
        "machines, adds masks that cancel in the sum, so that nobody learns one worker's "
        "(docs/what-the-server-learns.md).",
        more="With None it is so between machines with three sites or more, and nowhere else. In a "
        "private fit three workers or more mask unless it is False; without masks each adds all of "
        "the noise by itself.",
        takes="bool or None",
    )
    epsilon: float | None = setting(
        None,
        "Fit privately: what the fit may tell of any one row, at most (1 is strong, 10 is weak).",
        more="It is differential privacy, with one row more or less. With None sums are exact. See "
        "docs/private-runs.md.",
        takes="float or None",
        panel=ALGORITHM,
        metavar="NUMBER",
    )
    delta: float = setting(
        1e-6,
        "With epsilon: the probability with which the fit may tell more of a row.",
        more="It should be well below one in the number of rows.",
        takes="float",
        panel=ALGORITHM,
        metavar="P",
    )
    noise_seed: int | None = setting(
        None,
        "With epsilon, and all workers in this process: the number that the noise follows from, "
        'for simulations that must be repeatable; the result then says "not private".',
        more="Whoever knows the number can take the noise off, so there is no epsilon. With None "
        "noise follows from a key that the operating system draws and nothing shows, and is other "
        "noise in every fit.",
        takes="int or None",
        panel=ALGORITHM,
        metavar="N",
        low=0,
    )
