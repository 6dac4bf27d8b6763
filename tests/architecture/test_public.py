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


def loaded_by(script: str, *modules: str) -> str:
    """Which of the modules a new process has loaded after the script."""
    script = f"import sys; {script}; print([m for m in {modules} if m in sys.modules])"
    return subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    ).stdout.strip()


def test_import_and_help_load_nothing_heavy_and_fit_only_what_it_needs() -> None:
    heavy = ("scipy", "sklearn", "polars", "pandas", "matplotlib", "rich")
    heavy = (*heavy, "emfed.theory", "emfed.testing")
    told = loaded_by("import emfed, emfed.cli.main", "numpy", "cryptography", "websockets", *heavy)
    assert told == "[]"
    assert loaded_by("import emfed; emfed.fit", *heavy) == "[]"


def test_joining_loads_nothing_that_a_site_does_not_install() -> None:
    """No drawing and no estimators: what emfed-site leaves out (docs/decisions/009)."""
    rooms = "emfed.cli.main, emfed.deployment.joining, emfed.deployment.site"
    script = f"import {rooms}, emfed.network.websocket.client, emfed.deployment.doctor"
    assert loaded_by(script, "matplotlib", "jinja2", "sklearn", "polars") == "[]"


def test_every_room_can_be_the_first_that_is_imported() -> None:
    script = (
        "import importlib, sys, emfed\n"
        "for room in emfed._ROOMS:\n"
        "    importlib.import_module(f'emfed.{room}')\n"
        "    for name in [m for m in sys.modules if m.startswith('emfed')]: del sys.modules[name]"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
