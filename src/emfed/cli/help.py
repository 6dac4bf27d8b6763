"""Plain help in groups: commands and options under headings, examples as they are typed.

Plain, because drawing boxes would import rich, which takes longer than everything else together.
"""

from __future__ import annotations

import inspect
import typing
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

EXIT_OK, EXIT_ERROR, EXIT_USAGE, EXIT_UNCONVERGED, EXIT_TOO_FEW = 0, 1, 2, 3, 4
EXIT_INTERRUPTED, EXIT_CLOSED_PIPE = 130, 141
"""Exit codes: the last two are those of a shell for Ctrl-C (128 + 2) and a closed pipe (128 +
13)."""
EXIT_CODES = {
    EXIT_OK: "done",
    EXIT_ERROR: "failed: data, a file, the disk or the numbers",
    EXIT_USAGE: "wrong usage: an option, or options that contradict each other",
    EXIT_UNCONVERGED: "fit: the model is written, but a limit came before convergence",
    EXIT_TOO_FEW: "serve: too few sites take part, or too many refuse; the same command goes on",
    EXIT_INTERRUPTED: "interrupted by Ctrl-C; what was reached is kept",
    EXIT_CLOSED_PIPE: "whoever read the output has gone",
}


Options = SimpleNamespace
"""What the command line and the configuration said, by the names of the options."""


def option(words: str, panel: str | None = None, metavar: str | None = None, **more: Any) -> Any:
    """Declare an option: its words, the heading it stands under, what its value is called."""
    names = more.pop("names", "").split()
    return typer.Option(*names, help=words, rich_help_panel=panel, metavar=metavar, **more)


def switch(names: str, words: str, panel: str | None = None, **more: Any) -> Any:
    """Declare an option without a value; it is off if left out."""
    return option(words, panel, names=names, **more)


def group(words: str, *lines: str) -> typer.Typer:
    """Make a command that has commands below it, with examples of them."""
    return typer.Typer(
        cls=CommandGroup,
        help=words,
        epilog=examples(*lines),
        no_args_is_help=True,
        rich_markup_mode=None,
    )


NAMES = {
    "covariance_type": ("full", "diag", "spherical", "tied"),
    "algorithm": ("auto", "em", "FedEM", "VR-FedEM"),
    "weights": ("samples", "uniform"),
    "start": ("auto", "merge", "k-means", "moments"),
}
"""Options that are one of a few words."""
OUTPUT, RUN = "Output", "Run"
Json = Annotated[bool, switch("--json", "Print the summary as JSON.", OUTPUT)]
Quiet = Annotated[bool, switch("--quiet -q", "Print nothing.", OUTPUT)]
Threads = Annotated[int | None, option("Threads of the linear algebra.", RUN, "N", min=1)]


def examples(*lines: str, before: str = "") -> str:
    """An epilog: a sentence if any, then examples one to a line, not wrapped."""
    typed = "\n".join(f"  {line}" for line in lines)
    return f"{before}\n\nExamples:\n\n\b\n{typed}" if before else f"Examples:\n\n\b\n{typed}"


SAME = (
    *("n_components", "covariance_type", "covariance_floor", "algorithm", "compressor"),
    *("batch_size", "follow_em", "participation", "weights", "start", "n_init", "moves", "rounds"),
    *("tol", "field_tol"),
    *("max_bytes", "seconds", "checkpoint", "resume", "missing", "groups", "columns", "seed"),
    *("threads", "device", "precision", "target", "epsilon", "delta", "noise_seed"),
    *("bins", "family", "penalty", "smoothing", "seasonality", "site_covariates"),
    *("time_covariates", "level", "since", "until", "coordinates", "spatial", "covariate_penalty"),
    "observer_effects",
)
OPTIONS = {name: name.replace("_", "-") for name in SAME} | {
    "n_factors": "factors",
    "families": "types",
    "noise_floor": "set noise_floor",
    "floor": "set floor",
}
"""Arguments of `emfed.fit` and of models that messages speak of, and the options they are here."""
ELSEWHERE = {
    "in_metric=True, ": "",
    "a smaller step_size, ": "",
    "say ColumnNames(observer=None)": "use --observer ''",
    "with ColumnNames(...)": "with --site, --date, --value, --observer and --worker",
    "bad_rows='skip'": "--skip-bad",
    "duplicates='keep'": "--keep-duplicates",
    "with species=": "with --species",
    "Categorical(n)": "categorical",
    "import the module that calls emfed.models.register_model on it, then load again": (
        "name the module that registers it, as in emfed --import MODULE"
    ),
}
"""Advice that only Python and run.toml can follow, and what is said here in its place."""


def spoken(message: str) -> str:
    """A message of the library in the words of the command line: ``resume=True`` is --resume."""
    from emfed.core.configuration import reworded, with_family

    for words, here in ELSEWHERE.items():
        message = message.replace(words, here)

    def typed(name: str, value: str | None) -> str:
        flag = value is None or value == "True"
        joint = "=" if name.startswith("set ") else " "
        return f"--{name}" if flag else f"--{name}{joint}{value}".replace("'", "")

    def column(name: str, family: str) -> str:
        return f"--types {name}={family}".replace("'", "")

    return reworded(with_family(message, column), OPTIONS, typed)


def exit_codes() -> str:
    """The table for the end of ``emfed --help``."""
    rows = "\n".join(f"  {code:>3}  {words}" for code, words in EXIT_CODES.items())
    return f"Exit codes:\n\n\b\n{rows}"


def _argument(param: Any) -> str:
    return str(param.metavar or param.name).upper() + ("..." if param.nargs == -1 else "")


def _annotation(function: Any, name: str) -> Any:
    """A parameter's annotation: what typer and click keep of it differs between releases."""
    return typing.get_type_hints(inspect.unwrap(function), include_extras=True)[name]


def _declared(function: Any, name: str) -> str:
    """An argument's help as its annotation has it: some releases of click drop typer's."""
    return str(getattr(_annotation(function, name).__metadata__[0], "help", None) or "")


def _value(function: Any, name: str) -> str:
    """What an option's value is called; typer's own word is the name of a Python type."""
    kind = str(_annotation(function, name).__origin__)
    return {"int": "N", "flo": "X", "pat": "PATH"}.get(kind.removeprefix("<class '")[:3], "TEXT")


class Command(TyperCommand):
    """A command whose options stand under the headings they were given."""

    def collect_usage_pieces(self, ctx: Any) -> list[str]:
        """Arguments by their names, those that may be left out in brackets."""
        pieces = [self.options_metavar or ""]
        for param in self.get_params(ctx):
            if param.param_type_name == "argument":
                name = _argument(param)
                pieces.append(name if param.required else f"[{name}]")
        return pieces

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Arguments first, then each heading in the order of its first option."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for param in self.get_params(ctx):
            if param.param_type_name == "option" and not getattr(param, "is_flag", False):
                param.metavar = param.metavar or _value(self.callback, param.name)
            record = param.get_help_record(ctx)
            if record is None:
                continue
            heading = getattr(param, "rich_help_panel", None) or "Options"
            if param.param_type_name == "argument":
                words = getattr(param, "help", "") or _declared(self.callback, param.name)
                heading, record = "Arguments", (_argument(param), words)
            # typer escapes brackets for rich, which does not draw this
            words = record[1].replace("\\[", "[")
            if "FAMILIES" in words:  # imported here: no other help needs numpy
                from emfed.models.families import written

                words = words.replace("FAMILIES", ", ".join(written()))
            sections.setdefault(heading, []).append((record[0], words))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)


class CommandGroup(TyperGroup):
    """The commands under the headings they were given, each with its whole first sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        """One heading after the other."""
        sections: dict[str, list[tuple[str, str]]] = {}
        for name in self.list_commands(ctx):
            command: Any = self.get_command(ctx, name)
            if command is not None and not command.hidden:
                heading = getattr(command, "rich_help_panel", None) or "Commands"
                first = (command.help or "").strip().split("\n\n")[0].replace("\n", " ")
                sections.setdefault(heading, []).append((name, first))
        for heading, rows in sections.items():
            with formatter.section(heading):
                formatter.write_dl(rows)
