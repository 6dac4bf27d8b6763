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
from collections.abc import Collection, Iterator, Set
from pathlib import Path

PACKAGE = "emfed"
MARKS = ("<!-- house -->", "<!-- end of house -->")
FIRST = "32c9187"
"""The first complete version."""
MOST_PARAMETERS, MOST_PATHS, SMALL = 8, 15, 125
"""Parameters of a function, its cyclomatic complexity, lines of a module that only one imports."""
HOSPITAL = ("theory", "testing", "experiments")
"""Rooms that a hospital does not need."""
NEW = {
    "rows on a GPU": """models/devices data/placing.py
        models/mixture.py:as_pass,sweeps,folded,tables,carried,_pass,_swept,_answers,_completed
        models/mixture.py:carried_whole
        models/gaussian.py:pass_features,sweeps,as_pass,carried,carried_whole,_second_moments
        models/factors.py:sweeps,as_pass,_swept models/clusters.py:sweeps,_swept
        models/mixed.py:sweeps,as_pass,tables,carried,carried_whole
        models/covariances.py:sweeps,as_pass,folded
        fitting/estimators/intake.py:on_device,_read_tensor""",
    "masked sums": """network/masking.py network/sums.py cli/keys.py:roster
        network/federation.py:MasksDiffer,_Asked,masks_by_default,_add_up_opening,open_again
        network/federation.py:_exchange_masked,_ask_all,_everyone,_add_up,_await_ready,_take_ready
        network/federation.py:_news_of,_take_masked
        network/site.py:_keys,_set,_ready,_opening,_share,_upload
        algorithms/steps.py:to_lattice,from_lattice,lattice_size,energy_of,next_lattice
        core/messages.py:Lattice fitting/rounds.py:gather_sum network/membership.py:announced""",
    "privacy of rows (epsilon)": """core/privacy.py fitting/private.py models/bounded.py
        network/site.py:_charge,_private,_check_open network/store.py:Allowance
        network/inprocess.py:open_private,release network/federation.py:open_private,release
        core/protocols.py:open_private,release fitting/driver.py:private_fit
        fitting/settings.py:_check_private,privacy network/rules.py:check_privacy,largest_cost""",
    "the WebSocket engine": """network/websocket
        network/deployment/hosting.py:WebSocketServerSupervisor
        network/deployment/joining.py:WebSocketSiteSupervisor""",
    "a page, health, orders, doctor, approval": """network/deployment/console.py cli/owner.py
        network/deployment/views.py network/deployment/orders.py network/deployment/doctor.py
        network/deployment/approval.py cli/control.py cli/federate.py:_watch,_tables,doctor
        network/deployment/site.py:erase_site,_overwrite,look_first""",
    "keys that rotate, files that are sealed": """cli/keys.py:rotate,seal
        network/keys.py:rotate_site_key,take_rotation,make_seal,read_seal,SealedDisk
        network/keys.py:check_certificate,days_left network/deployment/site.py:_sealed,_disk""",
    "owners' rules against single rows": """network/rules.py:GuardedRows,Journal,check_journal,link
        network/rules.py:gives_away,check_columns,check_statistics,check_spare,check_change
        network/rules.py:check_step,_head,_link_of,_small models/groups.py
        network/store.py:Tally,DescribedRows,_digests,Secret""",
    "mistakes in rows, and answers that no rows give": """network/self_check.py
        network/plausible.py network/site.py:_compare,_warn""",
    "sites that leave and come back": """fitting/session.py:Attendance,_open_again,attend,_changed
        fitting/session.py:rebind,restore fitting/rounds.py:_rebind network/membership.py:greet
        network/federation.py:_catch_up,greet,_note_changes fitting/serving.py:_Change,rehearse""",
    "standard errors": """artifacts/errors.py fitting/driver.py:with_errors,_exact
        artifacts/result.py:with_errors,errors_of,summary,_root artifacts/fits.py:_errors
        fitting/estimators/base.py:summary""",
    "validation across sites": """artifacts/validation.py network/validation.py
        fitting/validation.py artifacts/fits.py:_validation artifacts/result.py:validation
        fitting/estimators/base.py:validate""",
    "draws, indices and effort of field counts": """imputation/posterior.py imputation/index.py
        imputation/effort.py imputation/report.py models/occupancy.py
        imputation/families.py:NegativeBinomialCells,ZeroInflatedCells
        imputation/ebird.py:Checklists,_EffortOf imputation/intake.py:_effort,_with_effort""",
    "effects of observers, ties between neighbours": """models/observers.py imputation/skill.py
        imputation/space.py""",
    "masked sums of cells": "models/cells.py:PaddedCells,padded_cells",
    "lazy frames": "data/sources.py:LazyRows",
    "starts from sketches and sites' own clusters": """fitting/starts/sketch.py
        network/own_clusters.py models/clusters.py:BucketParameters,BucketMetric,Buckets
        fitting/starts/start_search.py:_own_sketch,sketches,merged,buckets
        fitting/session.py:own_clusters network/site.py:_own_clusters""",
    "a ledger of a simulation that is a network's": "network/prices.py network/texts.py",
    "few bytes in the opening": "core/wire/moments.py models/binding.py:rounded_opening",
    "steps that are verified, undone, or local": """algorithms/safeguards.py fitting/verifying.py
        algorithms/auto.py:_walk,_walks,_anchors,confirm,sure fitting/rounds.py:settle,_confirm""",
    "optima in closed form": """models/factor_solver.py models/factors.py:closed_form
        models/gaussian.py:closed_form models/regression.py:closed_form
        models/side_by_side.py:closed_form fitting/driver.py:settled""",
    "Excel, encodings, decimal commas, words": """data/files.py:TextForm,_read_sheet,_unpacked
        data/files.py:_decoded,_check_lengths,_marked,NotNumbers
        data/reading.py:levels,codes,in_words,_order""",
}
"""What came since the first complete version, and where it is: modules, or ``module:name`` for
functions, classes and methods of others. What a feature adds inside other functions stays with the
old ones, so these are bounded from below and what is left from above."""
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
    hospital = sum((lines[p] for p in installed), Counter[str]())
    new = sum(since(package, texts, trees).values(), Counter[str]())
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
        "lines that a hospital installs (no theory, experiments, testing)": hospital["all"],
        "of these for the features of 32c9187": hospital["all"] - new["all"],
        "of these for features since": new["all"],
        "lines of code that a hospital installs": hospital["code"],
        "of these code for the features of 32c9187": hospital["code"] - new["code"],
        "of these code for features since": new["code"],
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


def kinds(text: str, tree: ast.Module, among: Set[int] | None = None) -> Counter[str]:
    """How many lines are code, comments, docstrings, of all or of these; a line is one of them."""
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
    some = set(range(1, text.count("\n") + 1)) if among is None else among
    found = {"all": some, "code": code, "comment": comments - code, "docstring": strings}
    return Counter({kind: len(numbers & some) for kind, numbers in found.items()})


def since(
    package: Path, texts: dict[Path, str], trees: dict[Path, ast.Module]
) -> dict[str, Counter[str]]:
    """Lines of each feature of `NEW`; in the first version, of none."""
    if package.name != PACKAGE:
        return {}
    found = {}
    for feature, places in NEW.items():
        total = Counter[str]()
        for place in places.split():
            where, _, names = place.partition(":")
            for path in (p for p in texts if (package / where) in (p, *p.parents)):
                some = spans(trees[path], names.split(",")) if names else None
                total += kinds(texts[path], trees[path], some)
        found[feature] = total
    return found


def spans(tree: ast.Module, names: Collection[str]) -> set[int]:
    """The lines of functions, methods and classes of these names, with their decorators."""
    numbers: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, (*FUNCTIONS, ast.ClassDef)) and node.name in names:
            first = min([node.lineno, *(d.lineno for d in node.decorator_list)])
            numbers |= set(range(first, (node.end_lineno or first) + 1))
    return numbers


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
    for place in " ".join(
        NEW.values()
    ).split():  # what was renamed counts as old until it is mended
        where, _, names = place.partition(":")
        tree = trees.get(package / where)
        if tree is None and (names or not (package / where).is_dir()):
            yield f"NEW in benchmarks/house.py: there is no {where}"
        for name in names.split(",") if tree is not None and names else ():
            if not spans(tree, [name]):
                yield f"NEW in benchmarks/house.py: {where} has no {name}"
