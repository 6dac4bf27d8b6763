"""Imports go one way, and each foreign library stays in its folder."""

from __future__ import annotations

import ast
import subprocess
import sys
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).parents[2] / "src" / "emfed"
FILES = sorted(SOURCE.rglob("*.py"))
PAPER = sorted((SOURCE.parents[1] / "paper").rglob("*.py"))
"""The paper's experiments, which are run from a clone and not installed."""

ORDER = (
    "core",
    "models.devices",
    "models",
    "compressors",
    "algorithms",
    "aggregation",
    "data",
    "network",
    "artifacts",
    "fitting",
    "imputation",
    "fitting.estimators",
    "deployment",
    "testing",
    "theory",
    "cli",
)
"""A room may import itself and the rooms before it. ARCHITECTURE.md gives the same order."""
STRANGERS = {("compressors", "models"), ("algorithms", "models")}
"""Pairs that never meet although their order would let them."""
FOREIGN: dict[str, set[str]] = {
    "numpy": set(ORDER),
    "scipy": {"core", "imputation", "models", "artifacts"},
    "array_api_compat": {"models.devices", "models", "data", "network", "testing"},
    "safetensors": {"core"},
    "polars": {"core", "data", "imputation", "cli", "fitting"},
    "sklearn": {"fitting.estimators"},
    "matplotlib": {"artifacts"},
    "jinja2": {"artifacts"},
    "typer": {"cli"},
    "rich": {"cli"},
    "ray": {"network"},
    "cryptography": {"aggregation", "network"},
    "websockets": {"network"},
    "torch": {"models.devices"},
    "triton": {"models.devices"},
    "threadpoolctl": {"cli", "fitting", "imputation"},
}
STANDARD = {
    *(
        "abc",
        "bisect",
        "collections",
        "concurrent",
        "contextlib",
        "contextvars",
        "copy",
        "csv",
        "dataclasses",
        "enum",
        "errno",
        "fractions",
        "functools",
        "gzip",
        "hmac",
        "itertools",
        "hashlib",
        "html",
        "stat",
        "http",
        "urllib",
        "zipfile",
        "email",
    ),
    *("json", "math", "operator", "os", "pathlib", "signal", "struct", "sys", "tempfile"),
    "textwrap",
    *("datetime", "decimal", "threading", "time", "typing", "warnings", "zlib"),
    *("base64", "difflib", "importlib", "io", "itertools", "logging", "multiprocessing"),
    *("asyncio", "concurrent", "queue", "ssl"),
    *(
        "fcntl",
        "msvcrt",
        "numbers",
        "platform",
        "re",
        "resource",
        "socket",
        "tomllib",
        "types",
        "weakref",
    ),
    *("heapq", "hmac", "sqlite3"),
    *("ctypes", "inspect", "ipaddress", "mmap", "secrets", "shlex", "shutil", "subprocess"),
}
FACADES = (SOURCE / "network" / "__init__.py",)
"""Files that only say where public names are, and import each when it is asked for."""
PROBES = ("hasattr", "getattr")


def room(module: str) -> str:
    """The room of a module by its dotted name without ``emfed.``: the longest that fits."""
    fitting = [name for name in ORDER if f"{module}.".startswith(f"{name}.")]
    return max(fitting, key=len, default="")


def dotted(path: Path) -> str:
    return ".".join(path.relative_to(SOURCE).with_suffix("").parts)


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


@cache
def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in nodes(path):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module or "")
            if node.module == "emfed":
                names |= {f"emfed.{alias.name}" for alias in node.names}
    return names - {"__future__", "emfed"}


def test_imports_go_one_way() -> None:
    for path in FILES:
        here = room(dotted(path))
        for name in imported(path):
            top, _, rest = name.partition(".")
            if top == "emfed" and here and path not in FACADES:
                there = room(rest)
                assert there in ORDER, f"{path}: {name} is in no room"
                early = ORDER.index(there) <= ORDER.index(here)
                assert early, f"{path}: {here} may not import {name}"
                assert (here, there) not in STRANGERS, f"{path}: {here} and {there} never meet"
            elif top not in STANDARD | {"emfed"}:
                assert top in FOREIGN, f"{path}: {name} is not among the dependencies"
                assert here in FOREIGN[top], f"{path}: {top} is not for {here}"


def test_what_a_hospital_does_not_need_stands_apart() -> None:
    """Theory and checks of models: the command line alone asks for them.

    It does so late: `test_heavy_imports_are_lazy`.
    """
    apart = ("theory", "testing")
    for path in FILES:
        if room(dotted(path)) not in (*apart, "cli"):
            asked = {room(name.removeprefix("emfed.")) for name in imported(path)}
            assert not asked & set(apart), path


def test_the_paper_uses_what_others_could_use() -> None:
    """No name of the package that begins with an underscore, and no library beside its own."""
    allowed = {
        "argparse",
        "emfed",
        "numpy",
        "paper",
        "polars",
        "rich",
        "scipy",
        "skmisc",
        "sklearn",
    }
    for path in PAPER:
        tops = {name.partition(".")[0] for name in imported(path)}
        assert tops <= STANDARD | allowed | {"threadpoolctl"}, path
        for node in nodes(path):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("emfed"):
                names = f"{node.module}.{'.'.join(alias.name for alias in node.names)}".split(".")
                hidden = [n for n in names if n.startswith("_") and n != "__version__"]
                assert not hidden, f"{path} imports {hidden}"


def test_every_file_has_a_room() -> None:
    loose = {p.name for p in FILES if not room(dotted(p))}
    assert loose == {"__init__.py", "__main__.py"}
    rooms = {p.name for p in SOURCE.iterdir() if p.is_dir() and p.name != "__pycache__"}
    assert rooms == {name for name in ORDER if "." not in name}
    assert len(rooms) <= 14


def test_the_guide_gives_the_tested_order() -> None:
    guide = (SOURCE.parents[1] / "ARCHITECTURE.md").read_text(encoding="utf-8")
    tree = guide.split("```")[1]
    listed = [line.split()[0].strip("/") for line in tree.splitlines() if line[:2] == "  "]
    assert [name for name in listed if name in ORDER] == [n for n in ORDER if "." not in n]


def test_no_pickle_no_global_randomness_no_print() -> None:
    for path in (*FILES, *PAPER):
        text = path.read_text(encoding="utf-8").replace("no pickle", "")
        for word in ("pickle", "joblib", "default_rng", "RandomState(", "np.random.seed"):
            assert word not in text, f"{path} has {word}"
        calls = [n for n in nodes(path) if isinstance(n, ast.Call)]
        shown = [n.lineno for n in calls if getattr(n.func, "id", "") == "print"]
        prints = path.name == "__main__.py" if path in PAPER else room(dotted(path)) == "cli"
        assert not shown or prints, f"{path} prints at lines {shown}"


def test_a_relay_has_no_model_code() -> None:
    """It adds and hands out: nothing that it imports knows what is fitted."""
    seen, waiting = set(), ["network/exchange/relay.py"]
    while waiting:
        path = SOURCE / waiting.pop()
        for name in imported(path):
            if name.startswith("emfed."):
                asked = name.removeprefix("emfed.").replace(".", "/")
                found = next(
                    (f for f in (f"{asked}.py", f"{asked}/__init__.py") if (SOURCE / f).exists()),
                    None,
                )
                if found is not None and found not in seen:
                    seen.add(found)
                    waiting.append(found)
    rooms = {room(name.replace("/", ".").removesuffix(".py")) for name in seen}
    assert rooms <= {"core", "aggregation", "network"}


def test_a_fit_in_one_process_imports_no_keys_pages_or_engines() -> None:
    code = (
        "import sys, numpy as np, emfed, emfed.fitting, emfed.imputation, emfed.models\n"
        "for name in emfed.__all__: getattr(emfed, name)\n"
        "emfed.fit(emfed.gaussian_mixture(1), np.eye(4)[:, :2], rounds=1)\n"
        "heavy = ('cryptography', 'jinja2', 'matplotlib', 'typer', 'websockets')\n"
        "print([name for name in heavy if name in sys.modules])"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_ray_is_imported_in_one_file() -> None:
    assert [p.name for p in FILES if "ray" in imported(p)] == ["cluster.py"]


def test_nothing_looks_upward_by_importlib() -> None:
    """Resources and versions are read by it; modules only at the top, where a user names one
    (``emfed --import``), and by the network of its own, since a relay imports no model."""
    able = [SOURCE / "__init__.py", SOURCE / "cli" / "main.py", SOURCE / "network" / "__init__.py"]
    for path in FILES:
        if "importlib" in {name.partition(".")[0] for name in imported(path)}:
            if path in able:
                continue
            names = {n for n in imported(path) if n.startswith("importlib")}
            assert "import_module" not in path.read_text(encoding="utf-8"), path
            assert names <= {"importlib", "importlib.metadata", "importlib.util"}, path


def test_models_are_not_probed() -> None:
    """What a model can do is told by `isinstance` with a protocol, not by `hasattr`."""
    for path in FILES:
        for node in nodes(path):
            if isinstance(node, ast.Call) and getattr(node.func, "id", "") in PROBES:
                asked = ast.unparse(node.args[0])
                assert asked.rpartition(".")[2] not in ("model", "models"), f"{path}:{node.lineno}"
