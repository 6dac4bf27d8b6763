"""What users import is there, documented, and told apart from what they should not."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

import emfed
from emfed.core import errors

PUBLIC = [
    pytest.param(getattr(module, name), id=f"{module.__name__}.{name}")
    for module in (emfed, *(getattr(emfed, room) for room in dir(emfed)))
    if inspect.ismodule(module)
    for name in module.__all__
]


@pytest.mark.parametrize("what", [p for p in PUBLIC if callable(p.values[0])])
def test_exported_names_are_documented(what: object) -> None:
    assert inspect.getdoc(what)


def test_the_exception_tree_is_the_one_drawn() -> None:
    assert errors.__doc__ is not None
    for name, value in vars(errors).items():
        if inspect.isclass(value) and issubclass(value, (Exception, Warning)):
            assert name in errors.__doc__
            if value is not emfed.EmfedError and not issubclass(value, Warning):
                assert issubclass(value, emfed.EmfedError)
    assert issubclass(errors.DataError, ValueError)
    assert issubclass(errors.SettingsError, ValueError)


def test_heavy_imports_are_lazy() -> None:
    script = (
        "import sys, emfed, emfed.cli.main; "
        "print([m for m in ('scipy', 'sklearn', 'polars', 'pandas', 'matplotlib', 'rich', "
        "'emfed.theory', 'emfed.testing') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
