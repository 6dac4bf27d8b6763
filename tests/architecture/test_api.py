"""The public API stands in a golden file, so that a change of it is a visible diff.

``python -m tests.architecture.test_api`` writes the file anew.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe
import pytest

import emfed

SOURCE = Path(emfed.__file__).parent
GOLDEN = Path(__file__).parent / "golden" / "api.txt"
ROOMS = [name for name in dir(emfed) if name not in emfed.__all__]


def lines() -> Iterator[str]:
    """Every public name with its parameters, room by room; classes with their own members, once."""
    seen = set()
    package = griffe.load("emfed", search_paths=[SOURCE.parent], resolve_aliases=True)
    for room in ("", *ROOMS):
        module = package[room] if room else package
        yield f"# emfed{'.' * bool(room)}{room}"
        for name in sorted(str(name) for name in module.exports or ()):
            found = module.members.get(name)
            what = found.final_target if found is not None and found.is_alias else found
            if what is None or what.canonical_path in seen:
                yield name
                continue
            seen.add(what.canonical_path)
            yield from described(what, "")
        yield ""


def described(what: Any, indent: str) -> Iterator[str]:
    if what.is_function:
        yield f"{indent}{what.name}({arguments(what.parameters)})"
    elif what.is_class:
        yield f"{indent}class {what.name}({arguments(what.parameters)})"
        own = {name: member for name, member in what.members.items() if not member.is_alias}
        members = {**declared_settings(what), **own}
        for name in sorted(members):
            if not name.startswith("_"):
                yield from described(members[name], indent + "    ")
    else:
        yield f"{indent}{what.name}"


def declared_settings(what: Any) -> dict[str, Any]:
    """Fields of a class of settings, which `emfed.core.settings` declares for all faces."""
    inherited = {name: member.final_target for name, member in what.inherited_members.items()}
    return {
        n: m for n, m in inherited.items() if m.canonical_path.startswith("emfed.core.settings.")
    }


def default_of(given: Any) -> str:
    """A default as it is called; of a declared setting or rule, the first argument."""
    if getattr(given, "canonical_path", "").endswith((".setting", "._rule")):
        given = given.arguments[0]
        given = None if str(given) == "MISSING" else given
    return "" if given is None else f"={given}"


def arguments(parameters: Any) -> str:
    """Names and defaults, a star before those that are given by name alone."""
    out, starred = [], False
    for parameter in parameters:
        kind = getattr(parameter.kind, "value", "")
        if parameter.name in ("self", "cls"):
            continue
        if kind == "variadic positional":
            starred = True
            out.append(f"*{parameter.name}")
            continue
        if kind == "variadic keyword":
            out.append(f"**{parameter.name}")
            continue
        if kind == "keyword-only" and not starred:
            starred = True
            out.append("*")
        out.append(f"{parameter.name}{default_of(parameter.default)}")
    return ", ".join(out)


def test_the_public_api_is_that_of_the_golden_file() -> None:
    found, known = list(lines()), GOLDEN.read_text(encoding="utf-8").splitlines()
    if found != known:
        gone = [line for line in known if line not in set(found)]
        new = [line for line in found if line not in set(known)]
        pytest.fail(
            f"the public API changed; gone: {gone[:5]}; new: {new[:5]}. If that is meant, run "
            "`python -m tests.architecture.test_api` and commit the file."
        )


def test_a_list_shows_the_public_names_and_nothing_else() -> None:
    script = "import emfed; print(*dir(emfed))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stdout.split() == sorted([*emfed.__all__, *ROOMS])
    assert set(ROOMS) <= {path.name for path in SOURCE.iterdir() if path.is_dir()}
    for room in ROOMS:
        module = getattr(emfed, room)
        assert all(hasattr(module, name) for name in module.__all__)


if __name__ == "__main__":
    GOLDEN.parent.mkdir(exist_ok=True)
    GOLDEN.write_text("\n".join(lines()) + "\n", encoding="utf-8")
