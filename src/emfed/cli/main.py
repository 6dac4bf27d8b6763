"""The ``emfed`` command. Heavy imports wait until a command needs them."""

from __future__ import annotations

import json
import re
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer

from emfed.cli import commands
from emfed.cli.control import control_app
from emfed.cli.federate import BETWEEN, add_commands
from emfed.cli.help import (
    EXIT_ERROR,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_TOO_FEW,
    EXIT_USAGE,
    OUTPUT,
    Command,
    CommandGroup,
    Options,
    examples,
    exit_codes,
    option,
    spoken,
    switch,
    with_settings,
)
from emfed.cli.keys import keys_app
from emfed.cli.owner import owner_app
from emfed.cli.tables import Decimal, Encoding, Separator
from emfed.core.settings.impute import HOW, INDEX, ImputeFields
from emfed.core.version import __version__

app = typer.Typer(
    name="emfed",
    cls=CommandGroup,
    help="Fit one model to the data of many owners, and leave the data where they are. Each owner "
    "(a worker or a site) sends sums over its rows, and a server makes the model from them: groups "
    "of similar rows, factors, or values for empty cells. The method is federated "
    "Expectation-Maximization (EM).",
    epilog=examples(
        "emfed fit wards.csv --groups hospital --n-components 2:8 -o wards.emfed",
        "emfed predict wards.emfed new.csv",
        "emfed report wards.emfed -o report.html",
        "emfed serve run.toml",
        "emfed join em.example.org:9400 --data rows.csv --key oslo.key",
    )
    + "\n\n"
    + exit_codes(),
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(show: bool) -> None:
    if show:
        typer.echo(f"emfed {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, switch("--version", "Print the version.", callback=_version, is_eager=True)
    ] = False,
    modules: Annotated[
        list[str] | None,
        option(
            "Import a Python module first, from this folder too: one that registers models of your "
            "own (docs/your-own-model.md). It may be given several times.",
            metavar="MODULE",
            names="--import",
        ),
    ] = None,
) -> None:
    from emfed.core.errors import SettingsError

    for name in modules or ():
        here = str(Path.cwd())
        sys.path[:0] = [] if here in sys.path else [here]
        try:
            import_module(name)
        except ImportError as error:
            raise SettingsError(f"--import {name}: {error}.") from None


commands.register(app)
OnlyJson = Annotated[bool, switch("--json", "Print the summary as JSON, and nothing else.")]
OneThread = Annotated[int, option("Threads of the linear algebra.", min=1)]
PAPER, WITH_MODEL = "The theory and the paper", "With a fitted model"
RECORDS, EBIRD = "Records of sites and times", "Records of eBird"
LEFT_OUT = ("jinja2", "matplotlib", "sklearn")
"""What emfed-site does not install (docs/decisions/009)."""
REPRODUCE = (
    "the paper's experiments are no longer installed: run them from a clone of the repository by "
    "`python -m paper NAME...` (docs/experiments.md)."
)


@app.command(
    cls=Command,
    rich_help_panel=PAPER,
    epilog=examples("emfed demo", "emfed demo --epochs 50 --seed 7 --out /tmp/demo --json"),
)
def demo(
    out: Annotated[Path, option("Folder for figure, tables and summary.")] = Path("demo"),
    epochs: Annotated[float, option("Passes over all data, for each algorithm.", min=0.1)] = 500.0,
    seed: Annotated[int, option("Seed of data and algorithms.", min=0)] = 0,
    split: Annotated[
        str, option("How rows are spread over workers: 'random' or 'sorted'.")
    ] = "random",
    threads: OneThread = 1,
    json_output: OnlyJson = False,
) -> None:
    """Run FedEM and VR-FedEM side by side on the paper's synthetic mixture.

    100 workers hold 100 rows each, drawn from two groups in the plane. In each round three quarters
    of them take part, and send each number as -1, 0 or 1 times a common scale.
    """
    from emfed.cli.demo import run_demo

    if run_demo(out, epochs, seed, split, threads, json_output):
        typer.echo(f"emfed: interrupted; what was reached is in {out}/", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)


@app.command(
    cls=Command,
    rich_help_panel=PAPER,
    epilog=examples(
        "emfed plan",
        "emfed plan wards.csv --groups hospital --n-components 4 --covariance-type tied",
        "emfed plan wards.csv --groups hospital --compressor subtractive:0.1 --metric \\",
        "    --participation 0.5 --batch-size 50 --accuracy 1e-3 --json",
    ),
)
def plan(
    context: typer.Context,
    data: Annotated[
        Path | None,
        typer.Argument(help="CSV or Parquet; without it, the paper's synthetic mixture."),
    ] = None,
    groups: Annotated[
        str | None, option("The column that names the worker of a row.", names="--groups -g")
    ] = None,
    columns: Annotated[
        str | None, option("Columns to use, as in age,weight; all if left out.")
    ] = None,
    separator: Separator = None,
    decimal: Decimal = ".",
    encoding: Encoding = "utf-8",
    n_components: Annotated[
        int | None,
        option("Mixture components of DATA; 2 if left out.", min=1, names="--n-components -k"),
    ] = None,
    covariance_type: Annotated[
        str | None,
        option("Covariance type of DATA: full, diag, spherical or tied; full if left out."),
    ] = None,
    compressor: Annotated[
        str, option("none, dithering:LEVELS, block:SIZE, subtractive:NOISE or sparse:SHARE.")
    ] = "block:4",
    participation: Annotated[
        float,
        option("The probability that a worker takes part in a round.", names="--participation -p"),
    ] = 1.0,
    batch_size: Annotated[
        int | None, option("FedEM's mini-batch; all rows if left out.", min=1)
    ] = None,
    accuracy: Annotated[float, option("The mean |h|² to reach.")] = 1e-4,
    metric: Annotated[bool, switch("--metric", "Compress in the model's metric.")] = False,
    seed: Annotated[int, option("Seed of the start and the sample.", min=0)] = 0,
    threads: OneThread = 1,
    json_output: OnlyJson = False,
) -> None:
    """Say what the theory promises for a data set: steps, batches, rounds, bytes, regime.

    Measures the constants of the paper's theorems along EM's path on a sample of the rows.
    """
    from emfed.cli.plan import run_plan

    given = (groups, columns, n_components, covariance_type)
    if data is None and any(value is not None for value in given):
        raise typer.BadParameter(
            "--groups, --columns, --n-components and --covariance-type go with DATA: give DATA too."
        )
    run_plan(Options(**context.params))


@app.command(
    cls=Command,
    rich_help_panel=commands.PANEL,
    epilog=examples(
        "emfed impute new.csv --model wards.emfed --filled whole.csv",
        "emfed impute counts.csv",
        "emfed impute waders.csv --date year,month --observer '' --filled filled.parquet",
        "emfed impute ebd_FR.txt --ebird --sampling ebd_sampling_FR.txt --species Mallard \\",
        "    --groups 10",
    ),
)
@with_settings(ImputeFields, before="strata")
def impute(
    context: typer.Context,
    data: Annotated[
        str,
        typer.Argument(
            help="CSV, TSV or Parquet: with --model a table with empty cells (- for a pipe), "
            "else one row per record."
        ),
    ],
    model: Annotated[
        str | None, option("Fill the empty cells of DATA by this model file.", WITH_MODEL)
    ] = None,
    intervals: Annotated[
        bool, switch("--intervals", "Add the ends of predictive intervals, at --level.", WITH_MODEL)
    ] = False,
    threads: Annotated[
        int | None, option("Threads of the linear algebra.", WITH_MODEL, min=1)
    ] = None,
    separator: Separator = None,
    decimal: Decimal = ".",
    encoding: Encoding = "utf-8",
    out: Annotated[Path, option("Folder for trend, records and summary.", panel=OUTPUT)] = Path(
        "imputed"
    ),
    filled: Annotated[
        str | None,
        option(
            "Write every cell of the table here, .csv or .parquet: it may be large. With --model, "
            "- prints it, which is the default.",
            panel=OUTPUT,
        ),
    ] = None,
    site: Annotated[str, option("The column of sites.", panel=RECORDS)] = "site",
    date: Annotated[
        str, option("The column of dates, or two: 'year,month'.", panel=RECORDS)
    ] = "date",
    value: Annotated[str, option("The column of counts or values.", panel=RECORDS)] = "count",
    observer: Annotated[
        str, option("The column of observers; '' if none.", panel=RECORDS)
    ] = "observer",
    observer_effects: Annotated[
        bool,
        switch(
            "--observer-effects",
            "Fit a shrunken effect of each observer (counts): estimates are of an average one. "
            "Names and effects stay with the worker that has an observer's records.",
            panel=HOW,
        ),
    ] = False,
    worker: Annotated[
        str, option("The column of workers, if not the observer (or the site).", panel=RECORDS)
    ] = "",
    exposure: Annotated[str, option("The column of exposures (counts).", panel=RECORDS)] = "",
    effort: Annotated[
        str,
        option(
            "Columns of effort whose coefficients are fitted (counts, bernoulli): "
            "'log(minutes),km'. With "
            "--ebird some of duration, distance, observers, protocol, hour; 'none' for none.",
            panel=RECORDS,
        ),
    ] = "",
    ebird: Annotated[
        bool, switch("--ebird", "DATA is in the eBird Basic Dataset's format.", panel=EBIRD)
    ] = False,
    sampling: Annotated[
        Path | None, option("eBird's sampling events, for zeros.", panel=EBIRD)
    ] = None,
    species: Annotated[str | None, option("eBird: common or scientific name.", panel=EBIRD)] = None,
    region: Annotated[
        str | None, option("eBird: country or state, name or code.", panel=EBIRD)
    ] = None,
    max_minutes: Annotated[float, option("eBird: the longest checklist.", panel=EBIRD)] = 300.0,
    max_km: Annotated[float, option("eBird: the farthest checklist.", panel=EBIRD)] = 5.0,
    max_observers: Annotated[int, option("eBird: the largest party.", panel=EBIRD)] = 10,
    protocols: Annotated[
        str, option("eBird: protocols that count; '' for all.", panel=EBIRD)
    ] = "Stationary,Traveling",
    family: Annotated[
        str | None,
        option(
            "poisson (the default of mode observed), negative-binomial, zero-inflated, log1p (of "
            "the other modes), gaussian or bernoulli.",
            panel=HOW,
        ),
    ] = None,
    bins: Annotated[
        str, option("month, week, year, or index for times that are whole numbers.", panel=RECORDS)
    ] = "month",
    since: Annotated[str | None, option("The first day, like 2004-07-31.", panel=RECORDS)] = None,
    until: Annotated[str | None, option("The last day.", panel=RECORDS)] = None,
    groups: Annotated[
        int | None, option("Put the workers at random into so many groups.", min=1, panel=RECORDS)
    ] = None,
    skip_bad: Annotated[
        bool, switch("--skip-bad", "Leave bad rows out and count them.", panel=RECORDS)
    ] = False,
    keep_duplicates: Annotated[
        bool,
        switch("--keep-duplicates", "Take repeated keys as records of their own.", panel=RECORDS),
    ] = False,
    strata: Annotated[
        Path | None,
        option("CSV or Parquet: a column 'site' and its stratum, for the index.", panel=INDEX),
    ] = None,
    base: Annotated[
        str | None, option("The time whose index is 100; the first if left out.", panel=INDEX)
    ] = None,
    least: Annotated[
        int, option("Sites with fewer records are not in the index.", min=0, panel=INDEX)
    ] = 1,
    level: Annotated[
        float, option("Probability that an interval covers.", min=0.01, max=0.999, panel=INDEX)
    ] = 0.9,
    json_output: OnlyJson = False,
    **settings: Any,
) -> None:
    """Fill a table: empty cells by a fitted model, or sites x time from records of many observers.

    With --model, the cells that a table lacks are what the model expects given the others.
    Without, DATA holds records of sites and times; rank and penalties are chosen by
    cross-validation on what the server knows, and a trend is drawn.
    """
    options = Options(**context.params)
    if model is not None:
        from emfed.cli.apply import run_fill

        run_fill(options)
        return
    if intervals or threads or separator or (decimal, encoding) != (".", "utf-8"):
        raise typer.BadParameter(
            "--intervals, --threads, --separator, --decimal and --encoding go with --model."
        )
    from emfed.cli.impute import run_impute

    if run_impute(options):
        typer.echo(f"emfed: interrupted; what was reached is in {out}/", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)


add_commands(app)
app.add_typer(keys_app, name="keys", rich_help_panel=BETWEEN)
app.add_typer(owner_app, name="owner", rich_help_panel=BETWEEN)
app.add_typer(control_app, name="control", rich_help_panel=BETWEEN)
_python_warning = warnings.formatwarning
_UsageError: Any = typer.BadParameter.__base__  # of click, which typer may carry under its own name


def main(arguments: list[str] | None = None) -> None:
    """Run the command line; errors are one line on stderr and an exit code."""
    from emfed.core.errors import EmfedError, ParticipationError, SettingsError

    given = sys.argv[1:] if arguments is None else arguments
    warnings.formatwarning = _plain_warning
    if given[:1] == ["reproduce"]:
        _fail(REPRODUCE, EXIT_USAGE)
    try:
        code = app(arguments, prog_name="emfed", standalone_mode=False)
    except _UsageError as error:
        _complain_of_usage(error)
    except SettingsError as error:
        _fail(str(error), EXIT_USAGE)
    except ParticipationError as error:
        _fail(str(error), EXIT_TOO_FEW)
    except EmfedError as error:
        if (report := getattr(error, "report", None)) is not None:
            _tell_faults(report, "--json" in given)
        _fail(str(error), EXIT_ERROR)
    except OSError as error:
        where = f": {error.filename}" if error.filename else ""
        _fail(f"{error.strerror or error}{where}", EXIT_ERROR)
    except ModuleNotFoundError as error:
        if error.name not in LEFT_OUT:
            raise
        _fail(f"this needs {error.name}: install emfed in place of emfed-site.", EXIT_ERROR)
    except (KeyboardInterrupt, typer.Abort):
        _fail("interrupted", EXIT_INTERRUPTED)
    sys.exit(code if isinstance(code, int) else EXIT_OK)


def _plain_warning(message: Any, category: type[Warning], *where: Any, **more: Any) -> str:
    """A warning of ours in one line, without the place in the code; others as Python has them."""
    from emfed.core.errors import EmfedWarning

    if issubclass(category, EmfedWarning):
        said = spoken(message.args[0] if isinstance(message, Warning) else message)
        return f"emfed: {' '.join(said.split())}\n"
    return _python_warning(message, category, *where, **more)


def _complain_of_usage(error: Any) -> NoReturn:
    """What click has to say, in our one line; a bare ``emfed`` shows its help."""
    if type(error).__name__ == "NoArgsIsHelpError":
        typer.echo(error.ctx.get_help(), err=True)
        sys.exit(EXIT_USAGE)
    path = error.ctx.command_path if error.ctx is not None else "emfed"
    # click and typer both suggest what was meant, in the same words
    sentences = dict.fromkeys(re.split(r"(?<=[.?!])\s+", error.format_message().strip()))
    words = " ".join(sentences)
    _fail(f"{words}{'' if words.endswith(('.', '?', '!')) else '.'} See {path} --help.", EXIT_USAGE)


def _tell_faults(report: Any, as_json: bool) -> NoReturn:
    """All faults of the tables: a table on stderr, or JSON on stdout."""
    if as_json:
        typer.echo(json.dumps({"error": "faults", **report.as_json()}))
    lines = str(report).split("\n")
    for number, line in enumerate(lines):
        typer.echo(f"{'' if number else 'emfed: '}{line}", err=True)
    sys.exit(EXIT_ERROR)


def _fail(message: str, code: int) -> NoReturn:
    typer.echo("emfed: " + " ".join(message.split()), err=True)
    sys.exit(code)
