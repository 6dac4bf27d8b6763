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
    rows, hospital = here["rows"], np.array(here["hospital"])
    names = sorted(set(hospital))
    make_keys(names, tmp_path)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{free.getsockname()[1]}"
    first, second = FITS
    line = second.removeprefix("# ").replace("listen(", f'listen("{address}", wait=60, ')
    children = []
    try:
        for name in names:
            save_table(name, rows[hospital == name], tmp_path)
            children.append(start_site(name, address, tmp_path))
        there = played(SCRIPT.replace(second, "").replace(first, line))["mixture"].result_
    finally:
        for child in children:
            child.kill()
            child.wait()
    same = emfed.fit(emfed.gaussian_mixture(2), rows, groups=hospital, masks=True, seed=there.seed)
    assert there.converged
    assert there.columns == ("x1", "x2", "x3", "x4")
    # Roundings of masked sums are nobody's to repeat: the path is the same, and not its last bits.
    # Nobody chooses the seed of a masked fit, so which group comes first is chance.
    for other in (here["mixture"].result_, same):
        orders = [np.argsort(one.params.weights) for one in (there, other)]
        for key, array in other.params.arrays().items():
            mine = there.params.arrays()[key][orders[0]]
            np.testing.assert_allclose(mine, array[orders[1]], rtol=0.02, atol=0.02)
