"""``python -m benchmarks house``: the package in figures, at the first complete version and now.

It writes the table of CONTRIBUTING.md and lists what the figures are about. A figure is no verdict:
it says where to look.
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
import tempfile
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path

MARKS = ("<!-- house -->", "<!-- end of house -->")
FIRST = "32c9187"
"""The first complete version."""
MOST_PARAMETERS, MOST_PATHS, SMALL = 8, 15, 125
"""Parameters of a function, its cyclomatic complexity, lines of a module that only one imports."""
HOSPITAL = ("theory", "testing", "experiments")
"""Rooms that a hospital does not need."""
BY_NAME = {"cli", "estimators", "kernels"}
"""Whose functions are called by name alone: by options, by scikit-learn, by Triton's launcher."""
ROUND = """
import sys, numpy as np, {package} as package
from pathlib import Path
root = Path(package.__file__).parent
rows = np.random.Generator(np.random.Philox(key=1)).standard_normal((90, 2))
model = package.gaussian_mixture(2, "full")
opened = getattr(package, "open_run", None) or package.fitting.open_run
run = opened(model, {{name: rows[i::3] for i, name in enumerate("abc")}}, package.FedEM())
run.step()
folder = lambda frame: Path(frame.f_code.co_filename).parent
inside = lambda frame: frame is not None and root in Path(frame.f_code.co_filename).parents
seen = [set(), set(), 0]
def watch(frame, event, _):
    if event == "call" and inside(frame):
        seen[0].add((frame.f_code.co_filename, frame.f_code.co_firstlineno))
        seen[1].add(frame.f_code.co_filename)
        seen[2] += inside(frame.f_back) and folder(frame) != folder(frame.f_back)
sys.setprofile(watch)
run.step()
sys.setprofile(None)
print(len(seen[0]), len(seen[1]), seen[2])
"""
"""One round of three workers: functions called, their files, calls that change the folder."""


def checkout(revision: str, folder: Path) -> Path:
    """``src`` as it was, in a folder."""
    packed = subprocess.run(["git", "archive", revision, "src"], capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def measure(source: Path) -> dict[str, int | str]:
    """Figures of the one package in a folder."""
    package = next(path.parent for path in source.glob("*/__init__.py"))
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    lines = {path: kinds(text, trees[path]) for path, text in texts.items()}
    total = sum(lines.values(), Counter[str]())
    installed = [p for p in texts if not set(p.relative_to(package).parts) & set(HOSPITAL)]
    functions = [n for tree in trees.values() for n in ast.walk(tree) if isinstance(n, FUNCTIONS)]
    classes = Counter(
        node.name
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    walked = subprocess.run(
        [sys.executable, "-c", ROUND.format(package=package.name)],
        env={"PYTHONPATH": str(source), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return {
        "files": len(texts),
        "lines": sum(text.count("\n") for text in texts.values()),
        "lines without theory, experiments and testing": sum(
            texts[path].count("\n") for path in installed
        ),
        "lines of code": total["code"],
        "lines of comments": total["comment"],
        "lines of docstrings": total["docstring"],
        "public names at the top": len(exported(trees[package / "__init__.py"])),
        "public names in all": len(
            {
                name
                for path, tree in trees.items()
                if public(package, path)
                for name in exported(tree)
            }
        ),
        f"functions with more than {MOST_PARAMETERS} parameters": sum(
            parameters(node) > MOST_PARAMETERS for node in functions
        ),
        "of these not commands, estimators or kernels": sum(
            parameters(node) > MOST_PARAMETERS
            for path, tree in trees.items()
            if not set(path.relative_to(package).with_suffix("").parts) & BY_NAME
            for node in ast.walk(tree)
            if isinstance(node, FUNCTIONS)
        ),
        f"functions of complexity over {MOST_PATHS}": sum(
            paths(node) > MOST_PATHS for node in functions
        ),
        f"modules under {SMALL} lines with one importer": len(lonely(package, texts, trees)),
        "names of several classes": sum(count > 1 for count in classes.values()),
        "functions, files of one round": " / ".join(walked[:2]),
        "calls of one round into another folder": int(walked[2]),
    }


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert)


def kinds(text: str, tree: ast.Module) -> Counter[str]:
    """How many lines are code, comments, docstrings; a line is what most of it is."""
    strings = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            strings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code, comments = set(), set()
    dull = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            comments.add(token.start[0])
        elif token.type not in dull:
            code |= set(range(token.start[0], token.end[0] + 1))
    code -= strings
    alone = len(comments - code)
    return Counter(code=len(code), comment=alone, docstring=len(strings))


def exported(tree: ast.Module) -> list[str]:
    """Names in ``__all__``, with those that a table there names."""
    for node in tree.body:
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return [n.value for n in ast.walk(node.value) if isinstance(n, ast.Constant)]
    return []


def public(package: Path, path: Path) -> bool:
    """Whether a file is a package that users import from, or the top."""
    return path.name == "__init__.py" and path.parent.parent in (package, package.parent)


def parameters(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Those that a caller gives."""
    given = node.args
    names = [a.arg for a in (*given.posonlyargs, *given.args, *given.kwonlyargs)]
    return len([name for name in names if name not in ("self", "cls")])


def paths(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Cyclomatic complexity with every condition: branches, loops, comprehensions, and / or."""
    count = 1
    for inner in ast.walk(node):
        count += isinstance(inner, BRANCHES)
        if isinstance(inner, ast.BoolOp):
            count += len(inner.values) - 1
        elif isinstance(inner, ast.comprehension):
            count += 1 + len(inner.ifs)
    return count


def lonely(package: Path, texts: dict[Path, str], trees: dict[Path, ast.Module]) -> dict[str, str]:
    """Small modules that only one other imports, and which."""
    names = {dotted(package, path): path for path in texts if path.name != "__init__.py"}
    importers = defaultdict(set)
    for path, tree in trees.items():
        for name in imported(tree):
            if name in names and path != names[name] and path.name != "__init__.py":
                importers[name].add(dotted(package, path))
    return {
        name: next(iter(importers[name]))
        for name, path in names.items()
        if len(importers[name]) == 1 and texts[path].count("\n") < SMALL
    }


def dotted(package: Path, path: Path) -> str:
    return ".".join(path.relative_to(package.parent).with_suffix("").parts)


def imported(tree: ast.Module) -> Iterator[str]:
    """Every dotted name that an import statement could mean."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def bench_house(before: str = FIRST) -> dict[str, dict[str, int | str]]:
    """Figures before and now."""
    with tempfile.TemporaryDirectory() as folder:
        first = measure(checkout(before, Path(folder)))
    return {before: first, "now": measure(Path(__file__).parents[1] / "src")}


def write_table(found: dict[str, dict[str, int | str]]) -> None:
    """Put the table into CONTRIBUTING.md, between its two marks."""
    first, now = found.values()
    rows = [("", *found), ("---", "---:", "---:")]
    for name, value in first.items():
        shown = (f"{v:,}" if isinstance(v, int) else v for v in (value, now[name]))
        rows.append((name, *shown))
    table = "\n".join(f"| {' | '.join(row)} |" for row in rows)
    page = Path(__file__).parents[1] / "CONTRIBUTING.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    after = rest.partition(MARKS[1])[2]
    page.write_text(f"{before}{MARKS[0]}\n{table}\n{MARKS[1]}{after}", encoding="utf-8")


def wordy(package: Path) -> Iterator[str]:
    """The functions and modules that the figures are about, for whoever mends them."""
    texts = {path: path.read_text(encoding="utf-8") for path in sorted(package.rglob("*.py"))}
    trees = {path: ast.parse(text) for path, text in texts.items()}
    for path, tree in trees.items():
        for node in (n for n in ast.walk(tree) if isinstance(n, FUNCTIONS)):
            if parameters(node) > MOST_PARAMETERS or paths(node) > MOST_PATHS:
                found = f"{parameters(node)} parameters, complexity {paths(node)}"
                yield f"{dotted(package, path)}.{node.name}: {found}"
    for name, importer in lonely(package, texts, trees).items():
        yield f"{name}: imported by {importer} alone"
