"""Every public name has a docstring in numpydoc's style, and its example runs."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import inspect
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from numpydoc.validate import validate

import emfed

# Complaints of numpydoc that are not ours: layout (GL01, GL02, GL03), sections that we do not use
# (SA, YD; ES01: an extended summary is written where there is more to say), and verbs of summaries
# (SS05, which takes nouns that end in s for verbs). GL08, no docstring, is asserted by itself.
LAYOUT = {"GL01", "GL02", "GL03", "ES01", "SA01", "SS05", "YD01", "GL08"}
WITHOUT_EXAMPLE = {"EX01"}  # a method's example is that of its class
ERRORS = {"PR01", "PR02"}  # exceptions are raised by us and made by nobody else
# Functions make these, and say what goes in.
MADE = {
    f"emfed.models.{name}"
    for name in (
        *("Clusters", "FactorMixture", "GaussianMixture", "HiddenMarkov", "MixedMixture"),
        "RegressionMixture",
    )
}


def public() -> Iterator[tuple[str, Any]]:
    """Every public class and function once, by the name under which users import it."""
    rooms = [emfed, *(getattr(emfed, name) for name in dir(emfed))]
    seen = set()
    for room in filter(inspect.ismodule, rooms):
        for name in room.__all__:
            what = getattr(room, name)
            if callable(what) and id(what) not in seen:
                seen.add(id(what))
                yield f"{room.__name__}.{name}", what


PUBLIC = dict(public())
FACES = [name for name in PUBLIC if name.startswith("emfed.Federated") and "Error" not in name]
METHODS = [
    f"{name}.{method}"
    for name in [*FACES, "emfed.Result", "emfed.imputation.Imputation"]
    for method, function in inspect.getmembers(PUBLIC[name], inspect.isfunction)
    if not method.startswith("_") and function.__module__.startswith("emfed")
]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_says_what_goes_in_and_what_comes_out(name: str) -> None:
    what = PUBLIC[name]
    raised = inspect.isclass(what) and issubclass(what, Exception)
    elsewhere = raised or name in MADE or (dataclasses.is_dataclass(what) and described(what))
    ignored = LAYOUT | (ERRORS if elsewhere else set())
    assert complaints(name, ignored) == []


@pytest.mark.parametrize("name", METHODS)
def test_a_method_for_users_says_what_goes_in_and_what_comes_out(name: str) -> None:
    assert complaints(name, LAYOUT | WITHOUT_EXAMPLE) == []


def described(what: type) -> bool:
    """Whether a docstring follows every field of a dataclass, which users read and do not make."""
    (top,) = ast.parse(inspect.cleandoc(inspect.getsource(what))).body
    assert isinstance(top, ast.ClassDef)
    found = {
        field.target.id
        for field, text in itertools.pairwise(top.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }
    return found >= {field.name for field in dataclasses.fields(what) if field.init}


def complaints(name: str, ignored: set[str]) -> list[str]:
    found = validate(name)
    assert found["docstring"], f"{name} has no docstring"
    return [f"{code}: {text}" for code, text in found["errors"] if code not in ignored]


@pytest.mark.parametrize("name", PUBLIC)
def test_the_example_of_a_public_name_runs(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    finder = doctest.DocTestFinder(recurse=False)
    runner = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS)
    for example in finder.find(PUBLIC[name], name, globs={}):
        report: list[str] = []
        runner.run(example, out=report.append)
        assert not runner.failures, "".join(report)
    assert runner.tries, f"{name} has no example"
