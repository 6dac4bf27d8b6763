"""Imports go one way, and each foreign library stays in its folder."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "emfed"
FILES = sorted(SOURCE.rglob("*.py"))

# A part may import the parts named beside it, and itself.
ALLOWED: dict[str, set[str]] = {
    "_version": set(),
    "errors": set(),
    "configuration": {"errors"},
    "messages": set(),
    "metrics": {"messages"},
    "protocols": {"errors", "messages", "metrics"},
    "random": {"errors", "protocols"},
    "models": {"errors", "protocols", "random"},
    "compressors": {"errors", "messages", "protocols"},
    "wire": {"errors", "messages", "protocols"},
    "algorithms": {"errors", "protocols", "random", "compressors", "wire"},
    "records": {"errors", "protocols"},
    "ledger": {"protocols"},
    "storage": {"errors"},
    "limits": {"errors", "ledger", "protocols", "records"},
    "rounds": {
        "limits",
        "errors",
        "protocols",
        "algorithms",
        "ledger",
        "records",
        "storage",
        "wire",
    },
    "datasets": {"errors", "protocols", "random", "models"},
    "descriptions": {"errors", "protocols", "models", "compressors", "algorithms"},
    "federations": {
        "_version",
        "errors",
        "protocols",
        "random",
        "wire",
        "storage",
        "descriptions",
        "datasets",
    },
    "cards": {"_version", "ledger", "protocols", "records"},
    "modelfiles": {"cards", "errors", "ledger", "models", "protocols", "records", "storage"},
    "results": {
        "cards",
        "errors",
        "protocols",
        "random",
        "datasets",
        "ledger",
        "modelfiles",
        "models",
        "records",
    },
    "starts": {
        "algorithms",
        "compressors",
        "errors",
        "ledger",
        "limits",
        "models",
        "protocols",
        "random",
        "rounds",
        "wire",
    },
    "closing": {"protocols", "results", "wire"},
    "opening": {
        "algorithms",
        "compressors",
        "datasets",
        "descriptions",
        "errors",
        "federations",
        "ledger",
        "limits",
        "models",
        "protocols",
        "random",
        "rounds",
        "starts",
        "wire",
    },
    "fitting": {
        "algorithms",
        "cards",
        "closing",
        "compressors",
        "descriptions",
        "errors",
        "limits",
        "opening",
        "protocols",
        "results",
        "rounds",
    },
    "candidates": {"limits", "models", "protocols", "records", "results", "rounds", "wire"},
    "selection": {
        "algorithms",
        "candidates",
        "datasets",
        "errors",
        "federations",
        "fitting",
        "models",
        "opening",
        "protocols",
        "results",
        "wire",
    },
    "estimators": {
        "algorithms",
        "candidates",
        "compressors",
        "datasets",
        "errors",
        "federations",
        "opening",
        "fitting",
        "imputation",
        "ledger",
        "limits",
        "models",
        "protocols",
        "random",
        "records",
        "results",
        "rounds",
        "selection",
        "starts",
    },
    "serving": {
        "errors",
        "protocols",
        "algorithms",
        "descriptions",
        "federations",
        "opening",
        "fitting",
        "limits",
        "records",
        "results",
        "storage",
    },
    "reporting": {"ledger", "models", "protocols", "records", "results"},
    "imputation": {
        "descriptions",
        "errors",
        "protocols",
        "random",
        "algorithms",
        "compressors",
        "datasets",
        "fitting",
        "ledger",
        "limits",
        "models",
        "records",
        "rounds",
        "wire",
    },
    "flower": {
        "configuration",
        "descriptions",
        "errors",
        "protocols",
        "algorithms",
        "compressors",
        "datasets",
        "federations",
        "fitting",
        "imputation",
        "ledger",
        "limits",
        "models",
        "records",
        "results",
        "rounds",
        "serving",
        "storage",
        "wire",
    },
    "testing": {
        "errors",
        "protocols",
        "random",
        "models",
        "compressors",
        "algorithms",
        "storage",
        "rounds",
        "datasets",
        "federations",
        "opening",
        "fitting",
    },
    "theory": {
        "errors",
        "protocols",
        "random",
        "algorithms",
        "datasets",
        "federations",
        "opening",
        "fitting",
        "limits",
        "wire",
    },
    "experiments": {
        "_version",
        "configuration",
        "errors",
        "protocols",
        "random",
        "models",
        "compressors",
        "algorithms",
        "records",
        "storage",
        "limits",
        "rounds",
        "datasets",
        "opening",
        "fitting",
        "reporting",
        "theory",
        "imputation",
    },
}
FOREIGN: dict[str, set[str]] = {
    "numpy": set(ALLOWED) | {"cli"},
    "scipy": {"random", "wire", "imputation", "models", "cards"},
    "array_api_compat": {"models", "datasets", "federations", "testing"},
    "safetensors": {"storage"},
    "polars": {"records", "ledger", "datasets", "experiments", "imputation", "cli", "selection"},
    "sklearn": {"datasets", "estimators"},
    "matplotlib": {"reporting"},
    "jinja2": {"reporting"},
    "skmisc": {"experiments"},
    "typer": {"cli"},
    "rich": {"cli"},
    "ray": {"federations"},
    "flwr": {"flower"},
    "cryptography": {"flower"},
    "starlette": {"flower"},
    "threadpoolctl": {"cli", "experiments", "fitting", "imputation"},
}
ENGINES = {"flower"}
"""Folders of federations/ that nothing in federations/ imports."""
STANDARD = {
    *(
        "abc",
        "bisect",
        "collections",
        "contextlib",
        "contextvars",
        "copy",
        "csv",
        "dataclasses",
        "enum",
        "errno",
        "functools",
        "itertools",
        "hashlib",
    ),
    *("json", "math", "operator", "os", "pathlib", "signal", "struct", "sys", "tempfile"),
    *("datetime", "decimal", "threading", "time", "typing", "warnings", "zlib"),
    *("base64", "difflib", "importlib", "io", "itertools", "logging", "multiprocessing"),
    *("fcntl", "platform", "re", "socket", "tomllib", "types", "weakref"),
    *("ctypes", "inspect", "ipaddress", "secrets", "shlex", "shutil", "subprocess"),
}


def part_of(path: Path) -> str:
    """The folder, but for an engine: its folder stands above all that it drives."""
    first, *rest = path.relative_to(SOURCE).parts
    if first == "federations" and rest[0] in ENGINES:
        return rest[0]
    return first.removesuffix(".py")


def imported(path: Path) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: imports are absolute"
            names.add(node.module or "")
            if node.module == "emfed":
                names |= {f"emfed.{alias.name}" for alias in node.names}
    return names - {"__future__", "emfed"}


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_go_one_way(path: Path) -> None:
    part = part_of(path)
    if part == "__init__":
        return
    for name in imported(path):
        top, *rest = name.split(".")
        if top == "emfed":
            if part in ALLOWED:
                wanted = rest[1] if rest[1:] and rest[1] in ENGINES else rest[0]
                assert wanted in ALLOWED[part] | {part}, f"{part} may not import {name}"
        elif top not in STANDARD:
            assert top in FOREIGN, f"{name} is not among the dependencies"
            assert part in FOREIGN[top], f"{top} is not for {part}"


def test_files_stay_short() -> None:
    long = {str(p): n for p in FILES if (n := len(p.read_text().splitlines())) > 450}
    assert not long


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_pickle_no_global_randomness_no_print(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for word in ("pickle", "joblib", "default_rng", "RandomState", "np.random.seed"):
        assert word not in text.replace("no pickle", "")


def test_ray_is_imported_in_one_file() -> None:
    assert [p.name for p in FILES if "ray" in imported(p)] == ["cluster.py"]
