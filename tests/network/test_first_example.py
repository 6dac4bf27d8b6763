"""README's first example: one script, in one process and over real processes."""

from __future__ import annotations

import re
import socket
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from tests.network.processes import make_keys, save_table, start_site

ROOT = Path(__file__).parents[2]
SCRIPT = (ROOT / "examples" / "quick_start.py").read_text()
FITS = [line for line in SCRIPT.splitlines() if ".fit(" in line]


def played(script: str) -> dict[str, Any]:
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(compile(script, "quick_start.py", "exec"), names)
    return names


def test_the_script_is_the_readme_s_first_example() -> None:
    shown = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[0]
    assert set(shown.splitlines()) <= set(SCRIPT.splitlines())


def test_one_line_takes_the_first_example_to_real_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    here = played(SCRIPT)
    monkeypatch.setattr(emfed.network.StackedFederation, "masks_by_default", True)
    same = played(SCRIPT)["mixture"].result_  # on the lattice of masked sums
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    rows = here["rows"]
    names = sorted(set(here["hospital"]))
    make_keys(names, tmp_path)
    (tmp_path / "masked").touch()  # sites have a roster: between machines sums are masked
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    first, second = FITS
    line = second.removeprefix("# ").replace("listen(", f'listen("{address}", ')
    children = []
    try:
        for name in names:
            save_table(name, rows[np.array(here["hospital"]) == name], tmp_path)
            children.append(start_site(name, address, tmp_path))
        there = played(SCRIPT.replace(second, "").replace(first, line))
    finally:
        for child in children:
            child.kill()
            child.wait()
    want, got = here["mixture"].result_, there["mixture"].result_
    assert there["mixture"].n_components_ == here["mixture"].n_components_
    assert (got.rounds, got.stopped, got.columns) == (same.rounds, same.stopped, want.columns)
    for key, array in want.params.arrays().items():
        np.testing.assert_allclose(got.params.arrays()[key], array, atol=0.02)
        exact = same.params.arrays()[key]
        np.testing.assert_allclose(got.params.arrays()[key], exact, rtol=1e-6, atol=1e-7)
    np.testing.assert_array_equal(got.ledger.counts, same.ledger.counts)
