"""Commands that fit, use and show models, as the shell sees them; the work is done elsewhere."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any

import typer

from emfed.cli.config import read_config
from emfed.cli.help import EXIT_INTERRUPTED, EXIT_UNCONVERGED, Command, examples
from emfed.cli.tables import Decimal, Encoding, Separator

PANEL = "Fit and use models"
DATA, MODEL = "Data", "Model"
ALGORITHM, LIMITS, OUTPUT, RUN = "Algorithm", "Limits (the first one met)", "Output", "Run"
Json = Annotated[
    bool, typer.Option("--json", help="Print the summary as JSON.", rich_help_panel=OUTPUT)
]
Device = Annotated[
    str | None,
    typer.Option(metavar="NAME", help="Compute on a GPU: cuda.", rich_help_panel=RUN),
]
Threads = Annotated[
    int | None,
    typer.Option(metavar="N", min=1, help="Threads of the linear algebra.", rich_help_panel=RUN),
]


NAMES = {
    "model": ("gaussian-mixture", "mixed-mixture", "factor-analysis", "ppca", "regression-mixture"),
    "covariance_type": ("full", "diag", "spherical", "tied"),
    "algorithm": ("auto", "em", "FedEM", "VR-FedEM"),
    "weights": ("samples", "uniform"),
    "start": ("auto", "merge", "k-means", "moments"),
}
"""Options that are one of a few words."""


def _complete(option: str) -> Any:
    return lambda: list(NAMES[option])


def fit(
    context: typer.Context,
    data: Annotated[
        list[str],
        typer.Argument(
            metavar="DATA",
            help="CSV, TSV, Excel or Parquet, or - for a pipe; several files are one worker each.",
        ),
    ],
    out: Annotated[
        str,
        typer.Option("--out", "-o", metavar="FILE", help="The model file.", rich_help_panel=OUTPUT),
    ] = "model.emfed",
    report: Annotated[
        str | None,
        typer.Option(
            metavar="FILE", help="Also write the report here, .html.", rich_help_panel=OUTPUT
        ),
    ] = None,
    title: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Report title.", rich_help_panel=OUTPUT),
    ] = None,
    groups: Annotated[
        str | None,
        typer.Option(
            "--groups", "-g", metavar="COLUMN", help="The column of workers.", rich_help_panel=DATA
        ),
    ] = None,
    columns: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Columns to use, as in age,weight; all if left out.",
            rich_help_panel=DATA,
        ),
    ] = None,
    types: Annotated[
        str | None,
        typer.Option(
            metavar="LIST",
            help="Families of columns, as in stays=poisson:days,ward=categorical: gaussian, "
            "poisson (with an exposure), bernoulli, categorical, exponential, gamma.",
            rich_help_panel=DATA,
        ),
    ] = None,
    missing: Annotated[
        bool,
        typer.Option("--missing", help="Empty cells are missing at random.", rich_help_panel=DATA),
    ] = False,
    separator: Separator = None,
    decimal: Decimal = ".",
    encoding: Encoding = "utf-8",
    n_components: Annotated[
        str,
        typer.Option(
            "--n-components",
            "-k",
            metavar="K",
            help="A number, or a range like 2:8 to choose from by BIC.",
            rich_help_panel=MODEL,
        ),
    ] = "2",
    model: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="gaussian-mixture, mixed-mixture (columns of any type), factor-analysis, ppca or "
            "regression-mixture.",
            autocompletion=_complete("model"),
            rich_help_panel=MODEL,
        ),
    ] = "gaussian-mixture",
    covariance_type: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For gaussian-mixture: full (if left out), diag, spherical or tied.",
            autocompletion=_complete("covariance_type"),
            rich_help_panel=MODEL,
        ),
    ] = None,
    covariance_floor: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            help="For gaussian-mixture: the least variance in any direction, relative to that of "
            "the columns; 1e-6 if left out.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    factors: Annotated[
        int | None,
        typer.Option(
            metavar="R",
            min=1,
            help="For factor-analysis and ppca; 2 if left out.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    target: Annotated[
        str | None,
        typer.Option(
            metavar="COLUMN",
            help="For regression-mixture: the column to explain.",
            rich_help_panel=MODEL,
        ),
    ] = None,
    algorithm: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="auto, em, FedEM or VR-FedEM.",
            autocompletion=_complete("algorithm"),
            rich_help_panel=ALGORITHM,
        ),
    ] = "auto",
    follow_em: Annotated[
        bool,
        typer.Option(
            "--follow-em",
            help="For auto: take little noise and no momentum, to end where pooled EM ends.",
            rich_help_panel=ALGORITHM,
        ),
    ] = False,
    epsilon: Annotated[
        float | None,
        typer.Option(
            metavar="NUMBER",
            help="Fit privately: what the fit may tell of any one row (1 is strong, 10 is weak).",
            rich_help_panel=ALGORITHM,
        ),
    ] = None,
    delta: Annotated[
        float,
        typer.Option(
            metavar="P",
            help="With --epsilon: the probability with which the fit may tell more of a row.",
            rich_help_panel=ALGORITHM,
        ),
    ] = 1e-6,
    compressor: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="For FedEM and VR-FedEM: none, dithering:LEVELS, block:SIZE, subtractive:NOISE, "
            "sparse:SHARE.",
            rich_help_panel=ALGORITHM,
        ),
    ] = None,
    participation: Annotated[
        float,
        typer.Option(
            "--participation",
            "-p",
            metavar="P",
            min=0.0,
            max=1.0,
            help="The probability that a worker takes part in a round.",
            rich_help_panel=ALGORITHM,
        ),
    ] = 1.0,
    batch_size: Annotated[
        int | None,
        typer.Option(
            metavar="ROWS",
            min=1,
            help="Rows that a worker uses in a round, if not all; not for em.",
            rich_help_panel=ALGORITHM,
        ),
    ] = None,
    weights: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="samples (every row counts alike) or uniform (every worker).",
            autocompletion=_complete("weights"),
            rich_help_panel=ALGORITHM,
        ),
    ] = "samples",
    start: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="merge (clusters of each worker's own rows), k-means (cluster sums and counts), "
            "moments (the spread of all data), or auto: k-means where the model can, and merge "
            "beside it where several starts compete. None chooses rows.",
            autocompletion=_complete("start"),
            rich_help_panel=ALGORITHM,
        ),
    ] = "auto",
    n_init: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Number of starts that compete; the best goes on.",
            rich_help_panel=ALGORITHM,
        ),
    ] = 1,
    rounds: Annotated[
        int | None,
        typer.Option(metavar="N", min=0, help="At most; 1000 if left out.", rich_help_panel=LIMITS),
    ] = None,
    tol: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            help="Nats per row that may be left to gain when the fit has converged; 1e-6 if left "
            "out, of one worker alone 1e-4; 0 makes all rounds.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    field_tol: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            min=0.0,
            help="The same by |H|², in three rounds in a row.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    max_bytes: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Stop after this many bytes of all workers, up and down.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            metavar="S",
            min=0.0,
            help="Stop after this many seconds of computing.",
            rich_help_panel=LIMITS,
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Keep the state here, to go on later.", rich_help_panel=RUN
        ),
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume", help="Go on from the checkpoint.", rich_help_panel=RUN)
    ] = False,
    curve: Annotated[
        bool,
        typer.Option(
            help="Compute the log-likelihood along the way, for the report: up to 64 more passes.",
            rich_help_panel=RUN,
        ),
    ] = True,
    errors: Annotated[
        bool,
        typer.Option(
            "--errors",
            help="Work out standard errors, which `emfed inspect` shows: one more exchange.",
            rich_help_panel=RUN,
        ),
    ] = False,
    validate: Annotated[
        bool,
        typer.Option(
            "--validate",
            help="Hold rows out and leave workers out: does the model serve each worker?",
            rich_help_panel=RUN,
        ),
    ] = False,
    names: Annotated[
        bool, typer.Option(help="Keep the workers' names.", rich_help_panel=OUTPUT)
    ] = True,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Seed for the starting point and all random noise.",
            rich_help_panel=RUN,
        ),
    ] = 0,
    threads: Threads = None,
    device: Device = None,
    precision: Annotated[
        str,
        typer.Option(help="On a device: double, or fast (six digits).", rich_help_panel=RUN),
    ] = "double",
    config: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="A TOML file with any of these options; the command line has the last word.",
            exists=True,
            dir_okay=False,
            is_eager=True,
            callback=read_config,
            rich_help_panel=RUN,
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing.", rich_help_panel=OUTPUT)
    ] = False,
    json_output: Json = False,
) -> None:
    """Fit a model on the data of many workers and write a model file.

    Workers are the values of a column, or one file each. They are simulated in this process: what
    each would send is encoded, counted and reported. Ctrl-C keeps what was reached.
    """
    from emfed.cli.fit import run_fit

    interrupted, converged = run_fit(SimpleNamespace(**context.params))
    if interrupted:
        typer.echo(f"emfed: interrupted; what was reached is in {out}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    if not converged:
        typer.echo(f"emfed: not converged; {out} holds what was reached", err=True)
        raise typer.Exit(EXIT_UNCONVERGED)


def predict(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model file.")],
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="CSV, TSV, Excel or Parquet, or - for a pipe.")
    ],
    out: Annotated[
        str,
        typer.Option(
            "--out",
            "-o",
            metavar="FILE",
            help=".csv or .parquet; - prints CSV.",
            rich_help_panel=OUTPUT,
        ),
    ] = "-",
    keep: Annotated[
        bool,
        typer.Option("--keep", help="Put the input's columns before.", rich_help_panel=OUTPUT),
    ] = False,
    separator: Separator = None,
    decimal: Decimal = ".",
    encoding: Encoding = "utf-8",
    proba: Annotated[
        bool,
        typer.Option("--proba", help="Add the probability of each.", rich_help_panel=OUTPUT),
    ] = False,
    threads: Threads = None,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Print nothing but the table.", rich_help_panel=OUTPUT),
    ] = False,
    json_output: Json = False,
) -> None:
    """Tell the component of each row, its probability and the row's log-likelihood."""
    from emfed.cli.apply import run_predict
    from emfed.data.files import TextForm

    form = TextForm(separator, decimal, encoding)
    run_predict(model, data, out, keep, proba, threads, quiet, json_output, form)


def adapt(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model file.")],
    data: Annotated[
        str,
        typer.Argument(metavar="DATA", help="One worker's rows: a file, or - for a pipe."),
    ],
    out: Annotated[
        str,
        typer.Option("--out", "-o", metavar="FILE", help="The new model.", rich_help_panel=OUTPUT),
    ] = "adapted.emfed",
    separator: Separator = None,
    decimal: Decimal = ".",
    encoding: Encoding = "utf-8",
    worth: Annotated[
        float,
        typer.Option(
            metavar="ROWS", help="How many rows the common model counts for.", rich_help_panel=MODEL
        ),
    ] = 50.0,
    threads: Threads = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Print nothing.", rich_help_panel=OUTPUT)
    ] = False,
    json_output: Json = False,
) -> None:
    """Fit the common model to the rows of one worker, where they are. Nothing is sent."""
    from emfed.cli.apply import run_adapt
    from emfed.data.files import TextForm

    form = TextForm(separator, decimal, encoding)
    run_adapt(model, data, out, worth, threads, quiet, json_output, form)


def inspect(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A model file or a checkpoint.")],
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Write the table of workers here, .csv or .parquet; - prints it alone.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    params: Annotated[
        bool,
        typer.Option(
            "--params",
            help="Print the fitted parameters: shares, and means of each column.",
            rich_help_panel=OUTPUT,
        ),
    ] = False,
    json_output: Json = False,
) -> None:
    """Show what a file holds: the model card, in Markdown, and what each worker sent.

    A model fitted with --errors also shows its parameters with their standard errors, one with
    --validate what rows that were held out say of it.
    """
    from emfed.cli.inspect import run_inspect

    run_inspect(file, workers, json_output, params)


def report(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model file.")],
    out: Annotated[
        str,
        typer.Option(
            "--out", "-o", metavar="FILE", help="The page, .html.", rich_help_panel=OUTPUT
        ),
    ] = "report.html",
    title: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="Report title.", rich_help_panel=OUTPUT),
    ] = None,
    json_output: Json = False,
) -> None:
    """Draw the report of a fit: its course, its bytes, its workers, and what left each site.

    One page that needs no network and no data, for readers who were not there.
    """
    from emfed.cli.inspect import run_report

    run_report(model, out, json_output, title)


FIT_EXAMPLES = examples(
    "emfed fit wards.csv --groups hospital --n-components 2:8 -o wards.emfed --report wards.html",
    "emfed fit north.parquet south.parquet -k 4 --covariance-type tied --algorithm FedEM",
    "emfed fit stays.csv -g hospital --types stays=poisson:days,ward=categorical",
    "zcat wards.csv.gz | emfed fit - -g hospital --missing --json",
    "emfed fit --config fit.toml --seed 7",
)
PREDICT_EXAMPLES = examples(
    "emfed predict wards.emfed new.csv",
    "emfed predict wards.emfed new.parquet --keep -o with-components.parquet",
    "cut -d, -f2- new.csv | emfed predict wards.emfed - | sort | uniq -c",
)
ADAPT_EXAMPLES = examples(
    "emfed adapt wards.emfed north.csv -o north.emfed",
    "emfed adapt wards.emfed north.csv --worth 200 -o north.emfed && emfed inspect north.emfed",
)
INSPECT_EXAMPLES = examples(
    "emfed inspect wards.emfed",
    "emfed inspect wards.emfed --params",
    "emfed inspect wards.emfed --json | jq .card.convergence",
    "emfed inspect wards.emfed --workers workers.csv",
)
REPORT_EXAMPLES = examples("emfed report wards.emfed -o wards.html")


def register(app: typer.Typer) -> None:
    """Add the commands to the application, in the order in which they are used."""
    for function, epilog in (
        (fit, FIT_EXAMPLES),
        (predict, PREDICT_EXAMPLES),
        (adapt, ADAPT_EXAMPLES),
        (inspect, INSPECT_EXAMPLES),
        (report, REPORT_EXAMPLES),
    ):
        app.command(cls=Command, epilog=epilog, rich_help_panel=PANEL)(function)
