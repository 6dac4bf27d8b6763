"""Plain help in groups: commands and options under headings, examples as they are typed.

Plain, because drawing boxes would import rich, which takes longer than everything else together.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextvars import ContextVar
from inspect import Parameter
from types import SimpleNamespace
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from emfed.core.errors import worded
from emfed.core.settings.declaring import declared, kind_of
from emfed.core.settings.fit import RUN
from emfed.core.wording import PYTHON, UNSET, ByFace, Face, Setting

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


KEYWORD = Parameter.KEYWORD_ONLY
Options = SimpleNamespace
"""What the command line and the configuration said, by the names of the options."""


def option(words: str, panel: str | None = None, metavar: str | None = None, **more: Any) -> Any:
    """Declare an option: its words, the heading it stands under, what its value is called."""
    names = more.pop("names", "").split()
    return typer.Option(*names, help=words, rich_help_panel=panel, metavar=metavar, **more)


def switch(names: str, words: str, panel: str | None = None, **more: Any) -> Any:
    """Declare an option without a value; it is off if left out."""
    return option(words, panel, names=names, **more)


def completing(words: Sequence[str]) -> Callable[[], list[str]]:
    """What a shell completes an option by."""
    return lambda: list(words)


def with_settings(kind: type, before: str) -> Callable[[Any], Any]:
    """Give a command an option for each setting that is declared with a heading.

    The options stand before the parameter of that name, and reach the command by ``**settings``.
    """
    made = []
    for name, known in declared(kind).items():
        if known.panel:
            value, default = kind_of(kind, name), getattr(kind, name)
            shown = option(
                f"{known.help} {known.option_more}".strip(),
                known.panel,
                known.metavar or None,
                names=known.names or f"--{name.replace('_', '-')}",
                min=known.low if value in (int, float) else None,
                autocompletion=completing(known.option_words) if known.option_words else None,
            )
            takes: Any = value if default is not None else value | None
            typed = Annotated[takes, shown]
            made.append(Parameter(name, KEYWORD, default=default, annotation=typed))

    def add(command: Any) -> Any:
        given = inspect.signature(command, eval_str=True).parameters
        own = [
            part.replace(kind=KEYWORD) for part in given.values() if part.kind != part.VAR_KEYWORD
        ]
        at = list(given).index(before)
        command.__signature__ = inspect.Signature([*own[:at], *made, *own[at:]])
        command.__annotations__ = {p.name: p.annotation for p in (*own, *made)}
        return command

    return add


def group(words: str, *lines: str) -> typer.Typer:
    """Make a command that has commands below it, with examples of them."""
    return typer.Typer(
        cls=CommandGroup,
        help=words,
        epilog=examples(*lines),
        no_args_is_help=True,
        rich_markup_mode=None,
    )


OUTPUT = "Output"
Json = Annotated[bool, switch("--json", "Print the summary as JSON.", OUTPUT)]
Quiet = Annotated[bool, switch("--quiet -q", "Print nothing.", OUTPUT)]
Threads = Annotated[int | None, option("Threads of the linear algebra.", RUN, "N", min=1)]


def examples(*lines: str, before: str = "") -> str:
    """An epilog: a sentence if any, then examples one to a line, not wrapped."""
    typed = "\n".join(f"  {line}" for line in lines)
    return f"{before}\n\nExamples:\n\n\b\n{typed}" if before else f"Examples:\n\n\b\n{typed}"


SPELLED = {
    ("bad_rows", "skip"): "--skip-bad",
    ("duplicates", "keep"): "--keep-duplicates",
    ("observer", None): "--observer ''",
}
"""Settings with a value that an option of another name gives."""


class CommandFace(Face):
    """Settings as options of a command, the others by ``--set`` where it has that."""

    name = "command"

    def __init__(self, params: Iterable[Any]) -> None:
        named = {param.name: max(param.opts, key=len) for param in params}
        self.options = {name: said for name, said in named.items() if said[:2] == "--"}

    def setting(self, mentioned: Setting) -> str:
        """An option, and its value if there is one."""
        name, value = mentioned.name, mentioned.value
        if isinstance(value, Mapping):  # families of columns
            each = (f"{column}={self.value(family)}" for column, family in value.items())
            return f"--types {','.join(each)}"
        for (spelled, given), typed in SPELLED.items():
            if name == spelled and value == given:
                return typed
        if said := self.options.get(name):
            return said if value is UNSET or value is True else f"{said} {self.value(value)}"
        if value is UNSET or "more" not in self.options:
            return super().setting(Setting(name, value))
        return f"--set {name}={self.value(value)}"

    def value(self, value: Any) -> str:
        """A value as a shell takes it."""
        if isinstance(value, ByFace):
            return self.phrase(value)
        return str(value).lower() if isinstance(value, bool) else str(value)


FACE: ContextVar[Face] = ContextVar("FACE", default=PYTHON)
"""How the command that runs is typed."""


def spoken(message: str) -> str:
    """A message in the words of the command that runs."""
    return str(FACE.get()(message))


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

    def invoke(self, ctx: Any) -> Any:
        """Run it; its errors name settings by its options."""
        FACE.set(CommandFace(self.params))
        with worded(FACE.get()):
            return super().invoke(ctx)

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
