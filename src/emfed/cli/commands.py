"""Commands that fit, use and show models, as the shell sees them; the work is done elsewhere."""

from __future__ import annotations

import difflib
import tomllib
from pathlib import Path
from typing import Annotated, Any

import typer

from emfed.cli.help import (
    EXIT_INTERRUPTED,
    EXIT_UNCONVERGED,
    OUTPUT,
    Command,
    Json,
    Options,
    Quiet,
    Threads,
    completing,
    examples,
    option,
    switch,
    with_settings,
)
from emfed.cli.tables import Decimal, Encoding, Separator
from emfed.core.errors import SettingsError
from emfed.core.settings.fit import ALGORITHM, RUN, FitFields

PANEL = "Fit and use models"
DATA, MODEL = "Data", "Model"
ModelFile = Annotated[str, typer.Argument(metavar="MODEL", help="A model file.")]
Title = Annotated[str | None, option("Report title.", OUTPUT, "TEXT")]


SHAPES = ("full", "diag", "spherical", "tied")
"""Covariance types of `emfed fit`."""


def _complete_model() -> list[str]:
    from emfed.models import MODELS

    return list(MODELS)


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """The callback of ``--config``: what the file says becomes the default of each option."""
    if path is None or context.resilient_parsing:
        return path
    try:
        options = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{path} is not TOML: {error}.") from None
    names = _names(context)
    found: dict[str, Any] = {}
    for key, value in options.items():
        name = names.get(key.replace("_", "-"))
        if name is None or isinstance(value, dict):
            near = difflib.get_close_matches(key.replace("_", "-"), names, 1, 0.5)
            hint = (
                f"did you mean {near[0]!r}?" if near else f"there are {', '.join(sorted(names))}."
            )
            raise SettingsError(f"{path}: there is no option {key!r}; {hint}")
        found[name] = value
    context.default_map = {**(context.default_map or {}), **found}
    return path


def _names(context: typer.Context) -> dict[str, str]:
    """Long options and arguments of the command, as a file writes them, to their parameters."""
    names: dict[str, str] = {}
    for param in context.command.params:
        if param.name in ("config", "help"):
            continue
        if param.param_type_name == "argument":
            names[param.name] = param.name
        for said in param.opts:
            if said.startswith("--"):
                names[said.removeprefix("--")] = param.name
    return names


@with_settings(FitFields, before="compressor")
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
        str, option("The model file.", OUTPUT, "FILE", names="--out -o")
    ] = "model.emfed",
    report: Annotated[
        str | None, option("Also write the report here, .html.", OUTPUT, "FILE")
    ] = None,
    title: Title = None,
    groups: Annotated[
        str | None, option("The column of workers.", DATA, "COLUMN", names="--groups -g")
    ] = None,
    columns: Annotated[
        str | None, option("Columns to use, as in age,weight; all if left out.", DATA, "LIST")
    ] = None,
    types: Annotated[
        str | None,
        option(
            "Families of columns, as in stays=poisson:days,ward=categorical: FAMILIES.",
            DATA,
            "LIST",
        ),
    ] = None,
    missing: Annotated[
        bool, switch("--missing", "Empty cells are missing at random.", DATA)
    ] = False,
    separator: Separator = None,
    decimal: Decimal = ".",
    encoding: Encoding = "utf-8",
    n_components: Annotated[
        str | None,
        option(
            "A number, or a range like 2:8 to choose from by BIC; 2 if left out, 1 for "
            "factor-analysis and ppca.",
            MODEL,
            "K",
            names="--n-components -k",
        ),
    ] = None,
    model: Annotated[
        str,
        option(
            "gaussian-mixture, mixed-mixture (columns of any type), factor-analysis, ppca, "
            "regression-mixture, k-means, row-owner (low rank), or one that was registered by what "
            "`emfed --import` names.",
            MODEL,
            "NAME",
            autocompletion=_complete_model,
        ),
    ] = "gaussian-mixture",
    more: Annotated[
        list[str] | None,
        option(
            "Any other setting of the model or of the fit, as in rank=2 or criterion=icl; it may "
            "be given several times.",
            MODEL,
            "NAME=VALUE",
            names="--set",
        ),
    ] = None,
    covariance_type: Annotated[
        str | None,
        option(
            "For gaussian-mixture: full (if left out), diag, spherical or tied.",
            MODEL,
            "NAME",
            autocompletion=completing(SHAPES),
        ),
    ] = None,
    covariance_floor: Annotated[
        float | None,
        option(
            "For gaussian-mixture: the least variance in any direction, relative to that of the "
            "columns; 1e-6 if left out.",
            MODEL,
            "X",
            min=0.0,
        ),
    ] = None,
    n_factors: Annotated[
        int | None,
        option(
            "For factor-analysis and ppca; 2 if left out.", MODEL, "R", names="--factors", min=1
        ),
    ] = None,
    target: Annotated[
        str | None, option("For regression-mixture: the column to explain.", MODEL, "COLUMN")
    ] = None,
    compressor: Annotated[
        str | None,
        option(
            "For FedEM and VR-FedEM: none, dithering:LEVELS, block:SIZE, subtractive:NOISE, "
            "sparse:SHARE.",
            ALGORITHM,
            "NAME",
        ),
    ] = None,
    batch_size: Annotated[
        int | None,
        option(
            "Rows that a worker uses in a round, if not all; not for em.", ALGORITHM, "ROWS", min=1
        ),
    ] = None,
    checkpoint: Annotated[
        Path | None, option("Keep the state here, to go on later.", RUN, "FILE")
    ] = None,
    resume: Annotated[bool, switch("--resume", "Go on from the checkpoint.", RUN)] = False,
    curve: Annotated[
        bool,
        option(
            "Compute the log-likelihood along the way, for the report: up to 64 more passes.", RUN
        ),
    ] = True,
    names: Annotated[bool, option("Keep the workers' names.", OUTPUT)] = True,
    threads: Threads = None,
    device: Annotated[str | None, option("Compute on a GPU: cuda.", RUN, "NAME")] = None,
    precision: Annotated[str, option("On a device: double, or fast (six digits).", RUN)] = "double",
    config: Annotated[
        Path | None,
        option(
            "A TOML file with any of these options; the command line has the last word.",
            RUN,
            "FILE",
            exists=True,
            dir_okay=False,
            is_eager=True,
            callback=_read_config,
        ),
    ] = None,
    quiet: Quiet = False,
    json_output: Json = False,
    **settings: Any,
) -> None:
    """Fit a model on the data of many workers and write a model file.

    Workers are the values of a column, or one file each. They are simulated in this process: what
    each would send is encoded, counted and reported. Ctrl-C keeps what was reached.
    """
    from emfed.cli.fit import run_fit

    interrupted, converged = run_fit(Options(**context.params))
    if interrupted:
        typer.echo(f"emfed: interrupted; what was reached is in {out}", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    if not converged:
        typer.echo(f"emfed: not converged; {out} holds what was reached", err=True)
        raise typer.Exit(EXIT_UNCONVERGED)


def predict(
    context: typer.Context,
    model: ModelFile,
    data: Annotated[
        str, typer.Argument(metavar="DATA", help="CSV, TSV, Excel or Parquet, or - for a pipe.")
    ],
    out: Annotated[
        str, option(".csv or .parquet; - prints CSV.", OUTPUT, "FILE", names="--out -o")
    ] = "-",
    keep: Annotated[bool, switch("--keep", "Put the input's columns before.", OUTPUT)] = False,
    separator: Separator = None,
    decimal: Decimal = ".",
    encoding: Encoding = "utf-8",
    proba: Annotated[bool, switch("--proba", "Add the probability of each.", OUTPUT)] = False,
    threads: Threads = None,
    quiet: Annotated[bool, switch("--quiet -q", "Print nothing but the table.", OUTPUT)] = False,
    json_output: Json = False,
) -> None:
    """Tell the component of each row, its probability and the row's log-likelihood."""
    from emfed.cli.apply import run_predict

    run_predict(Options(**context.params))


def adapt(
    context: typer.Context,
    model: ModelFile,
    data: Annotated[
        str,
        typer.Argument(metavar="DATA", help="One worker's rows: a file, or - for a pipe."),
    ],
    out: Annotated[
        str, option("The new model.", OUTPUT, "FILE", names="--out -o")
    ] = "adapted.emfed",
    separator: Separator = None,
    decimal: Decimal = ".",
    encoding: Encoding = "utf-8",
    worth: Annotated[
        float, option("How many rows the common model counts for.", MODEL, "ROWS")
    ] = 50.0,
    threads: Threads = None,
    quiet: Quiet = False,
    json_output: Json = False,
) -> None:
    """Fit the common model to the rows of one worker, where they are. Nothing is sent."""
    from emfed.cli.apply import run_adapt

    run_adapt(Options(**context.params))


def inspect(
    file: Annotated[str, typer.Argument(metavar="FILE", help="A model file or a checkpoint.")],
    workers: Annotated[
        str | None,
        option(
            "Write the table of workers here, .csv or .parquet; - prints it alone.", OUTPUT, "FILE"
        ),
    ] = None,
    params: Annotated[
        bool,
        switch(
            "--params", "Print the fitted parameters: shares, and means of each column.", OUTPUT
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
    context: typer.Context,
    model: ModelFile,
    data: Annotated[
        str | None,
        typer.Argument(metavar="[DATA]", help="Rows of one site that took part: a page of these."),
    ] = None,
    out: Annotated[
        str, option("The page, .html.", OUTPUT, "FILE", names="--out -o")
    ] = "report.html",
    title: Title = None,
    separator: Separator = None,
    decimal: Decimal = ".",
    encoding: Encoding = "utf-8",
    json_output: Json = False,
) -> None:
    """Draw the report of a fit: its course, its bytes, its workers, and what left each site.

    One page that needs no network and no data, for readers who were not there. With DATA, the rows
    of a site that took part, the page is about these: what masks hide from everybody else.
    """
    from emfed.cli.inspect import run_own_report, run_report

    if data is None:
        run_report(model, out, json_output, title)
    else:
        run_own_report(Options(**context.params))


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
REPORT_EXAMPLES = examples(
    "emfed report wards.emfed -o wards.html",
    "emfed report wards.emfed north.csv -o north.html",
)


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
