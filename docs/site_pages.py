"""What the site has besides our Markdown: pages from the code, links to them, and formulas.

- A page for every public name and one for each subpackage, by autodoc.
- The command line as ``emfed --help`` prints it, by the very functions that print it.
- Names in text (`emfed.fit`, `FedEM`) become links where they are documented.
- Formulas are MathML, which browsers draw by themselves, and no page loads anything from elsewhere.
"""

from __future__ import annotations

import importlib
import inspect
import re
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from docutils import nodes
from docutils.utils.math import latex2mathml
from sphinx import addnodes
from sphinx.errors import ExtensionError
from sphinx.pycode import ModuleAnalyzer
from sphinx.util.nodes import make_refnode

ROOMS = (
    *("emfed", "emfed.models", "emfed.compressors", "emfed.algorithms", "emfed.fitting"),
    *("emfed.data", "emfed.network", "emfed.imputation", "emfed.theory", "emfed.testing"),
    "emfed.core.protocols",
)
"""Where users import from; what stands in two of them is documented in the first."""


def _catalogue() -> dict[str, list[str]]:
    """For each room the full names under which its public objects are documented."""
    home: dict[int, str] = {}
    rooms: dict[str, list[str]] = {}
    for room in ROOMS:
        module = importlib.import_module(room)
        rooms[room] = []
        for name in sorted(module.__all__, key=str.lower):
            thing = getattr(module, name)
            plain = isinstance(thing, str | int) or hasattr(
                thing, "__origin__"
            )  # versions, aliases
            if not name.startswith("__") and not plain:
                rooms[room].append(home.setdefault(id(thing), f"{room}.{name}"))
    return rooms


CATALOGUE = _catalogue()
PUBLIC = {name.rpartition(".")[2]: name for names in CATALOGUE.values() for name in names}


def _thing(name: str) -> Any:
    room, _, last = name.rpartition(".")
    return getattr(importlib.import_module(room), last)


def _members(cls: type) -> list[str]:
    """Public methods, properties and described fields of our own classes, not scikit-learn's."""
    ours = [base for base in cls.__mro__ if base.__module__.startswith("emfed")]
    kinds = (property, staticmethod, classmethod)
    found = {
        name
        for base in ours
        for name, value in vars(base).items()
        if not name.startswith("_") and (inspect.isfunction(value) or isinstance(value, kinds))
    }
    methods = sorted(name for name in found if inspect.getdoc(getattr(cls, name, None)))
    described = ModuleAnalyzer.for_module(cls.__module__).find_attr_docs()
    return [*(name for owner, name in described if owner == cls.__qualname__), *methods]


def _object_page(name: str) -> str:
    """The page of one public name, in reStructuredText."""
    thing = _thing(name)
    title = name.rpartition(".")[2]  # the signature below has the whole name
    lines = [title, "=" * len(title), ""]
    if inspect.isclass(thing):
        lines += [f".. autoclass:: {name}"]
        members = _members(thing)
        if members:
            lines += ["   :members: " + ", ".join(members)]
    elif callable(thing) and hasattr(thing, "__name__"):
        lines += [f".. autofunction:: {name}"]
    else:
        lines += [f".. autodata:: {name}", "   :no-value:"]
    return "\n".join(lines) + "\n"


def _room_page(room: str, names: list[str]) -> str:
    """A subpackage: its docstring, a table of its names, and their pages in the navigation."""
    own = [name for name in names if name.rpartition(".")[0] == room]
    table = "\n".join(f"   {name.removeprefix(room + '.')}" for name in names)
    pages = "\n".join(f"   {name.rpartition('.')[2]} <{name}>" for name in own)
    return (
        f"{room}\n{'=' * len(room)}\n\n.. automodule:: {room}\n   :no-members:\n\n"
        f".. autosummary::\n   :nosignatures:\n\n{table}\n\n.. toctree::\n   :hidden:\n\n{pages}\n"
    )


class _Recorder:
    """A formatter of click that keeps the sections of a help text instead of drawing them."""

    def __init__(self) -> None:
        self.sections: list[tuple[str, list[tuple[str, str]]]] = []
        self._heading = ""

    @contextmanager
    def section(self, heading: str) -> Iterator[None]:
        self._heading = heading
        yield

    def write_dl(self, rows: Any, *_: Any, **__: Any) -> None:
        self.sections.append((self._heading, list(rows)))


def _escaped(text: str) -> str:
    return re.sub(r"([|*_<>\[\]{}])", r"\\\1", " ".join(text.split()))


def _paragraphs(text: str) -> str:
    """Prose and examples of a help text; what stands after a ``\\b`` is shown as it is typed."""
    parts = []
    for part in re.split(r"\n\s*\n", inspect.cleandoc(text or "")):
        plain = part.strip("\n")
        if plain.startswith("\b"):
            shown = textwrap.dedent(plain.removeprefix("\b").strip("\n"))
            parts.append(f"```text\n{shown}\n```")
        else:
            parts.append(re.sub(r"docs/([\w-]+)\.md", r"[\1](../\1.md)", _escaped(plain)))
    return "\n\n".join(parts)


def _command_page(context: Any, level: int = 2) -> str:
    """A command, its options under their headings, and the commands below it."""
    command, path = context.command, context.command_path
    usage = command.get_usage(context).removeprefix("Usage:").strip()
    below = getattr(command, "commands", None)
    lines = [f"{'#' * level} {path}", "", f"```text\n{usage}\n```", ""]
    lines += [_paragraphs(command.help), ""]
    if not below:
        recorder = _Recorder()
        command.format_options(context, recorder)
        for heading, rows in recorder.sections:
            lines += [f"**{_escaped(heading)}**", "", "| name | meaning |", "| --- | --- |"]
            lines += [f"| `{term}` | {_escaped(words)} |" for term, words in rows] + [""]
    if command.epilog:
        lines += [_paragraphs(command.epilog), ""]
    for name in command.list_commands(context) if below else []:
        inner = command.get_command(context, name)
        if not inner.hidden:
            made = type(context)(inner, parent=context, info_name=name)
            lines += [_command_page(made, min(level + 1, 3) if level > 1 else 2)]
    return "\n".join(lines)


def _command_line_page() -> str:
    import typer

    from emfed.cli.main import app

    command = typer.main.get_command(app)
    context = command.make_context("emfed", [], resilient_parsing=True)
    return (
        "# All commands and options\n\nThis page is made from the code of the command line, at the "
        "release that you read about. [The command line](../command-line.md) explains the commands "
        "in words.\n\n" + _command_page(context)
    )


def write_pages(app: Any, config: Any) -> None:
    """Write what follows from the code; a page that did not change is left alone."""
    folder = Path(app.srcdir) / "generated"
    pages = {f"api/{room}.rst": _room_page(room, names) for room, names in CATALOGUE.items()}
    pages |= {
        f"api/{name}.rst": _object_page(name) for names in CATALOGUE.values() for name in names
    }
    pages["commands.md"] = _command_line_page()
    (folder / "api").mkdir(parents=True, exist_ok=True)
    for old in (folder / "api").iterdir():
        if f"api/{old.name}" not in pages:
            old.unlink()
    for name, text in pages.items():
        path = folder / name
        if not path.exists() or path.read_text(encoding="utf-8") != text:
            path.write_text(text, encoding="utf-8")


def escape_docstring(app: Any, what: str, name: str, thing: Any, options: Any, lines: Any) -> None:
    """Let |H|² and weights_ in docstrings mean themselves, and link the pages that they name."""
    literal = False
    for number, line in enumerate(lines):
        indented = line.startswith("    ")
        literal = (literal and (indented or not line)) or line.lstrip().startswith(">>>")
        if not literal:
            head = re.match(r"\s*[\w, ]+ : |", line)[0]  # a name that numpydoc reads
            parts = re.split(r"(`+[^`]*`+)", line.removeprefix(head))
            for k in range(0, len(parts), 2):
                parts[k] = re.sub(r"\||(?<=\w)_(?!\w)", lambda mark: "\\" + mark[0], parts[k])
                parts[k] = re.sub(r"\bdocs/([\w-]+)\.md", r":doc:`/\1`", parts[k])
            lines[number] = head + "".join(parts)
        literal = literal or line.endswith("::")


def link_names(app: Any, doctree: Any) -> None:
    """Turn code in text that is a public name, with or without a call, into a link to its page."""
    for node in list(doctree.findall(nodes.literal)):
        if isinstance(node.parent, nodes.reference | addnodes.pending_xref):
            continue
        found = re.fullmatch(r"(emfed\.[\w.]+|[A-Z]\w+)(\(.*\))?", node.astext())
        last = found[1].rpartition(".")[2] if found else ""
        if found and last in PUBLIC and app.env.docname != f"generated/api/{PUBLIC[last]}":
            link = addnodes.pending_xref(
                "", node.deepcopy(), refdomain="py", reftype="obj", reftarget=PUBLIC[last]
            )
            link["refdoc"] = app.env.docname
            node.replace_self(link)


def find_reference(app: Any, env: Any, node: Any, content: Any) -> Any:
    """Where a name leads that was not found: by its last part, if that is a public name.

    Annotations say where a class is written, not where it is imported from. Other names of
    docstrings (those of libraries, of private functions) stay code; in our pages they are errors.
    """
    if node.get("refdomain") != "py":
        return None
    objects = env.get_domain("py").objects
    target = PUBLIC.get(node["reftarget"].rpartition(".")[2])
    if target in objects:
        entry = objects[target]
        return make_refnode(
            app.builder, node["refdoc"], entry.docname, entry.node_id, content, target
        )
    return content if "generated/" in node["refdoc"] else None


FOREIGN = re.compile(
    r"""<(?:script|img|iframe|link|source)\b[^>]*?(?:src|href)="(?:https?:)?//[^"]*"""
    r"""|url\(['"]?https?://[^)]*"""
)
"""What would make a reader's browser call somebody else."""


def check_resources(app: Any, exception: Exception | None) -> None:
    """Refuse pages that load anything from elsewhere: they are read behind firewalls, too."""
    if exception is not None:
        return
    made = Path(app.outdir)
    for path in (*made.rglob("*.html"), *made.rglob("*.css")):
        found = FOREIGN.search(path.read_text(encoding="utf-8"))
        if found:
            raise ExtensionError(f"{path} loads from elsewhere: {found[0]}")


def _visit_math(self: Any, node: Any) -> None:
    self.body.append(latex2mathml.tex2mathml(node.astext()))
    raise nodes.SkipNode


def _visit_display(self: Any, node: Any) -> None:
    self.body.append(latex2mathml.tex2mathml(node.astext(), as_block=True))
    raise nodes.SkipNode


def setup(app: Any) -> dict[str, bool]:
    """Sphinx calls this."""
    app.add_html_math_renderer("mathml", (_visit_math, None), (_visit_display, None))
    app.connect("config-inited", write_pages)
    app.connect("autodoc-process-docstring", escape_docstring, priority=400)  # before numpydoc
    app.connect("doctree-read", link_names)
    app.connect("missing-reference", find_reference)
    app.connect("build-finished", check_resources)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
