"""Every setting of an imputation."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from emfed.core.settings.declaring import setting
from emfed.core.settings.fit import PATIENCE, RUN

if TYPE_CHECKING:
    from emfed.core.protocols import Compressor, Participation

HOW, INDEX = "How the table is filled", "Index, trend and bounds"
Mode = Literal["observed", "paper", "site-owner"]
BatchKind = Literal["grid", "observations", "rescaled"]
BATCH = 100
"""Cells of a mini-batch of mode "paper", as printed."""


@dataclass(frozen=True, eq=False)
class ImputeFields:
    """The fields of `emfed.imputation.ImputeSettings`."""

    mode: Mode = setting(
        "observed",
        "How cells are fitted: observed (workers send the sums of their cells once; any family), "
        "paper (FedMissEM as printed, which hardly leaves its start; Gaussian), or site-owner "
        "(each site belongs to one worker, whose factors stay there, which tells the server less; "
        "Gaussian).",
        takes='{"observed", "paper", "site-owner"}',
        words=("observed", "paper", "site-owner"),
        panel=HOW,
    )
    structure: Any = setting(
        None,
        "The rank and the penalties. Without it they are chosen by cross-validation on what the "
        'server knows; "site-owner" takes a default, as its server knows no cells.',
        takes="Structure or None",
    )
    rank: int | None = setting(
        None,
        "The number of factors; chosen if left out.",
        takes="int or None",
        low=0,
        panel=HOW,
    )
    penalty: float | None = setting(
        None,
        "The penalty of the factors; chosen if left out.",
        takes="float or None",
        low=0,
        panel=HOW,
    )
    smoothing: float | None = setting(
        None,
        "The penalty of differences of neighbouring times; chosen if left out.",
        takes="float or None",
        low=0,
        panel=HOW,
    )
    seasonality: float | None = setting(
        None,
        "The penalty of differences of months a year apart; chosen if left out.",
        takes="float or None",
        low=0,
        panel=HOW,
    )
    spatial: float | None = setting(
        None,
        "The penalty of differences of neighbouring sites, where there are coordinates; chosen by "
        "held-out error if left out.",
        takes="float or None",
        low=0,
        panel=HOW,
    )
    covariate_penalty: float | None = setting(
        None,
        "The penalty of the coefficients of covariates; chosen by held-out error if left out.",
        takes="float or None",
        low=0,
        panel=HOW,
    )
    coordinates: Any = setting(
        None,
        "Where sites lie: a table with a column 'site', and longitude and latitude in degrees (or "
        "two columns on a map). It ties neighbouring sites to each other, and draws a map.",
        more="In Python a frame, or an array with two columns on a map in the order of the grid; "
        '"observed" only.',
        takes="data frame or array, optional",
        panel=HOW,
        kind=Path,
    )
    site_covariates: Any = setting(
        None,
        "What is known of sites: a table with a column 'site', and numbers.",
        more='In Python a frame, or an array in the order of the grid; "observed" only.',
        takes="data frame or array, optional",
        panel=HOW,
        kind=Path,
    )
    time_covariates: Any = setting(
        None,
        "What is known of times: a table with a column 'time', and numbers.",
        more='In Python a frame, or an array in the order of the grid; "observed" only.',
        takes="data frame or array, optional",
        panel=HOW,
        kind=Path,
    )
    compressor: Compressor | None = setting(
        None,
        "How uploads are compressed: none, dithering:LEVELS, block:SIZE, subtractive:NOISE, "
        "sparse:SHARE (paper, site-owner, as all settings of rounds).",
        more="In Python a `Compressor`.",
        takes="Compressor or None",
        panel=RUN,
    )
    participation: Participation | float | None = setting(
        None,
        "The share of workers in a round (site-owner); everyone if left out.",
        more="In Python also a `Participation`.",
        takes="Participation, float or None",
        panel=RUN,
        names="--participation -p",
    )
    step_size: float | None = setting(None, "The step.", takes="float or None")
    memory_rate: float | None = setting(None, "The rate of the memories.", takes="float or None")
    batch_size: int = setting(BATCH, 'The cells of a mini-batch of "paper".', takes="int")
    batch: BatchKind = setting(
        "grid",
        'Which cells a mini-batch of "paper" is drawn from: the whole grid as printed, the '
        "worker's own cells, or those rescaled to be unbiased.",
        takes='{"grid", "observations", "rescaled"}',
    )
    folds: int = setting(3, "The number of parts of the cross-validation.", takes="int", low=2)
    draws: int = setting(
        0,
        "How many draws of the parameters estimates and bounds rest on; 0 for 200, and fewer where "
        "the table is very large.",
        option_more="With --model, the number of random completions, one below the other.",
        takes="int",
        low=0,
        panel=INDEX,
    )
    rounds: int | None = setting(
        None,
        'The largest number of rounds. Without a limit, "site-owner" makes 100 rounds and "paper" '
        "150 epochs.",
        takes="int or None",
        low=0,
        panel=RUN,
    )
    epochs: float | None = setting(
        None,
        "The most conditional expectations, in units of all cells.",
        takes="float or None",
        low=0,
    )
    field_tol: float | None = setting(
        None, "A bound on |H|^2 in three rounds in a row.", takes="float or None", low=0
    )
    max_bytes: int | None = setting(
        None, "The most bytes that all workers send and are sent.", takes="int or None", low=0
    )
    seconds: float | None = setting(
        None, "The most seconds of computing.", takes="float or None", low=0
    )
    seed: int = setting(0, "The seed of all draws, and of groups.", takes="int", low=0, panel=RUN)
    patience: int | None = setting(
        PATIENCE,
        "After how many rounds in a row without an answer a worker is away: it no longer counts "
        "until it is back. None waits for ever, with its last answer.",
        takes="int or None",
        low=1,
    )
    masks: bool | None = setting(
        None,
        'Whether sums over workers alone are told ("observed"); '
        "None is what the federation says: masks between machines with three sites or "
        "more.",
        takes="bool or None",
    )
    observers: int = setting(
        1, "With masks, how many workers must have seen a cell before it counts.", takes="int"
    )
