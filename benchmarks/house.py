"""``python -m benchmarks house``: the source in figures, dated, into the table of CONTRIBUTING.md.

Installed package and the paper's experiments are counted together. A figure is no verdict: it says
where to look, and the command lists the places.
"""

from __future__ import annotations

import ast
import io
import os
import subprocess
import sys
import tokenize
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARKS = ("<!-- house -->", "<!-- end of house -->")
MOST_PARAMETERS, MOST_PATHS = 8, 15
"""Parameters of a function; its cyclomatic complexity, with every branch counted."""
GOALS: dict[str, int | str] = {
    "lines": 52_000,
    "lines of code": 35_000,
    "files": "fewer",
    "functions called by a fit of iris": 350,
    "functions called by one round": 120,
    "numeric constants": 250,
    f"functions of complexity over {MOST_PATHS}": 0,
    f"functions of more than {MOST_PARAMETERS} parameters": 12,
    "lazy imports that break a cycle": 0,
}
"""What is counted, and the goal."""
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)
BRANCHES = (ast.If, ast.IfExp, ast.For, ast.AsyncFor, ast.While, ast.ExceptHandler, ast.Assert)
WALK = """
import sys, numpy as np, emfed
from pathlib import Path
{prepare}
root, seen = str(Path(emfed.__file__).parent), set()
def watch(frame, event, _):
    code = frame.f_code
    if event == "call" and code.co_filename.startswith(root):
        seen.add((code.co_filename, code.co_firstlineno))
sys.setprofile(watch)
{call}
sys.setprofile(None)
print(len(seen))
"""
"""Counts the functions of the package that a call walks through."""
FIT = {
    "prepare": "from sklearn.datasets import load_iris\n"
    "rows, groups = load_iris().data, np.arange(150) % 3\n"
    "mixture = emfed.FederatedGaussianMixture(2)",
    "call": "mixture.fit(rows, groups=groups)",
}
ONE_ROUND = {
    "prepare": "rows = np.random.Generator(np.random.Philox(key=1)).standard_normal((90, 2))\n"
    "sites = {name: rows[i::3] for i, name in enumerate('abc')}\n"
    "run = emfed.fitting.open_run(emfed.gaussian_mixture(2, 'full'), sites, emfed.FedEM(), tol=0)\n"
    "run.step()",
    "call": "run.step()",
}


def bench_house(root: Path = ROOT) -> dict[str, int]:
    """The figures of a working tree."""
    trees = parsed(root)
    texts = {path: path.read_text(encoding="utf-8") for path in trees}
    nodes = [node for tree in trees.values() for node in functions(tree)]
    found = (
        sum(text.count("\n") for text in texts.values()),
        sum(lines_of_code(text, trees[path]) for path, text in texts.items()),
        len(texts),
        walked(root, **FIT),
        walked(root, **ONE_ROUND),
        sum(len(constants(tree)) for tree in trees.values()),
        sum(paths(node) > MOST_PATHS for node in nodes),
        sum(parameters(node) > MOST_PARAMETERS for node in nodes),
        sum(1 for _ in lazy_cycles(root, trees)),
    )
    return dict(zip(GOALS, found, strict=True))


def parsed(root: Path) -> dict[Path, ast.Module]:
    """Every module of the package and of the paper's experiments."""
    files = sorted(path for room in ("src", "paper") for path in (root / room).rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}


def functions(tree: ast.Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    return (node for node in ast.walk(tree) if isinstance(node, FUNCTIONS))


def lines_of_code(text: str, tree: ast.Module) -> int:
    """Lines that hold more than a comment or a docstring."""
    strings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(getattr(node.value, "value", None), str):
            strings |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    code: set[int] = set()
    dull = (tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in (*dull, tokenize.COMMENT, tokenize.ENDMARKER):
            code |= set(range(token.start[0], token.end[0] + 1))
    return len(code - strings)


def walked(root: Path, prepare: str, call: str) -> int:
    """How many functions of the package a call walks through."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", WALK.format(prepare=prepare, call=call)],
        env={**os.environ, "PYTHONPATH": str(root / "src"), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    return int(done.stdout.split()[-1])


def constants(tree: ast.Module) -> list[str]:
    """Names in capitals at the top of a module that stand for a number, or for several."""
    found = []
    for node in tree.body:
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            pairs: list[tuple[ast.expr, ast.expr]] = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for name, value in pairs:
                capital = isinstance(name, ast.Name) and name.id.strip("_").isupper()
                if capital and numeric(value):
                    found.append(ast.unparse(name))
    return found


def numeric(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
    if isinstance(node, (ast.Tuple, ast.List)):
        return any(map(numeric, node.elts))
    if isinstance(node, ast.UnaryOp):
        return numeric(node.operand)
    return isinstance(node, ast.BinOp) and (numeric(node.left) or numeric(node.right))


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


def lazy_cycles(root: Path, trees: dict[Path, ast.Module]) -> Iterator[str]:
    """Imports inside functions of what imports the module that they are in, at its top."""
    modules = {dotted(root, path): tree for path, tree in trees.items()}
    early: dict[str, set[str]] = {}
    late: dict[str, set[tuple[str, int]]] = {}
    for name, tree in modules.items():
        inside = {node for function in functions(tree) for node in ast.walk(function)}
        typing = (n for n in ast.walk(tree) if isinstance(n, ast.If) and named_type_checking(n))
        checked = {node for guard in typing for node in ast.walk(guard)}
        pairs = [(node, m) for node in ast.walk(tree) for m in imported(node, modules)]
        late[name] = {(m, node.lineno) for node, m in pairs if node in inside}
        early[name] = {m for node, m in pairs if node not in inside | checked}
    for name, targets in late.items():
        for target, line in sorted(targets, key=lambda one: one[1]):
            if name in reached(target, early):
                yield f"{name}:{line} imports {target}, which imports it"


def named_type_checking(node: ast.If) -> bool:
    return "TYPE_CHECKING" in ast.unparse(node.test)


def dotted(root: Path, path: Path) -> str:
    inside = path.relative_to(root)
    parts = inside.with_suffix("").parts[inside.parts[0] == "src" :]
    return ".".join(parts).removesuffix(".__init__")


def imported(node: ast.AST, modules: dict[str, ast.Module]) -> Iterator[str]:
    """The modules of ours that an import statement names."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules)
    elif isinstance(node, ast.ImportFrom) and node.module in modules:
        for alias in node.names:
            inner = f"{node.module}.{alias.name}"
            yield inner if inner in modules else node.module


def reached(start: str, early: dict[str, set[str]]) -> set[str]:
    """What an import of a module imports in turn."""
    seen, waiting = {start}, [start]
    while waiting:
        for name in early.get(waiting.pop(), set()) - seen:
            seen.add(name)
            waiting.append(name)
    return seen


def write_table(found: dict[str, int], date: str | None = None) -> None:
    """Put the figures into CONTRIBUTING.md, in the column of their date: today's, if left out."""
    date = datetime.now(UTC).date().isoformat() if date is None else date
    page = ROOT / "CONTRIBUTING.md"
    before, _, rest = page.read_text(encoding="utf-8").partition(MARKS[0])
    table, _, after = rest.partition(MARKS[1])
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in table.splitlines() if row]
    dates = [heading for heading in rows[0][1:-1] if heading != date] if rows else []
    known = {row[0]: dict(zip(rows[0][1:], row[1:], strict=True)) for row in rows[2:]}
    lines = [["", *dates, date, "goal"], ["---", *["---:"] * (len(dates) + 2)]]
    for name, goal in GOALS.items():
        old = [known.get(name, {}).get(heading, "") for heading in dates]
        aim = f"{goal:,}" if isinstance(goal, int) else goal
        lines.append([name, *old, f"{found[name]:,}", aim])
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    page.write_text(f"{before}{MARKS[0]}\n{text}\n{MARKS[1]}{after}", encoding="utf-8")


def places(root: Path = ROOT) -> Iterator[str]:
    """The functions, imports and modules of many constants that the figures are about."""
    trees = parsed(root)
    for path, tree in trees.items():
        for node in functions(tree):
            if parameters(node) > MOST_PARAMETERS or paths(node) > MOST_PATHS:
                found = f"{parameters(node)} parameters, complexity {paths(node)}"
                yield f"{dotted(root, path)}.{node.name}: {found}"
    yield from lazy_cycles(root, trees)
    counts = Counter({dotted(root, path): len(constants(tree)) for path, tree in trees.items()})
    for name, count in counts.most_common(10):
        yield f"{name}: {count} numeric constants"
