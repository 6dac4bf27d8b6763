"""``emfed adapt``: a common model for the rows of one worker."""

from __future__ import annotations

import json

import numpy as np

import emfed
from tests.cli.shell import Shell


def _wards(shell: Shell) -> None:
    rng = np.random.default_rng(0)
    lines = ["ward,age,pressure"]
    for ward in range(4):
        rows = rng.normal([50 + 4 * ward, 120 + 3 * ward], [8, 12], size=(60, 2))
        rows[rng.random(rows.shape) < 0.1] = np.nan
        cells = [[f"{x:.3f}" if np.isfinite(x) else "" for x in row] for row in rows.tolist()]
        lines += [f"{ward},{','.join(row)}" for row in cells]
    shell.write("wards.csv", "\n".join(lines) + "\n")
    mine = [line for line in lines if line.startswith(("ward", "3,"))]
    shell.write("north.csv", "\n".join(mine) + "\n")


def test_a_ward_adapts_the_model_of_all(emfed_shell: Shell) -> None:
    shell = emfed_shell
    _wards(shell)
    assert (
        shell("fit", "wards.csv", "-g", "ward", "-k", 1, "--missing", "-o", "w.emfed", "-q")[0] == 0
    )
    code, out, _ = shell("adapt", "w.emfed", "north.csv", "--worth", 20, "-o", "n.emfed", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["log_likelihood"] > told["log_likelihood_before"]
    assert told["rows"] == 60
    common, mine = emfed.load("w.emfed").params.means[0], emfed.load("n.emfed").params.means[0]
    assert np.all(mine > common)
    code, out, _ = shell("inspect", "n.emfed")
    assert code == 0
    assert "adapted" in out
    code, out, _ = shell("predict", "n.emfed", "north.csv")
    assert code == 0
    assert out.count("\n") == 61
    code, out, err = shell("adapt", "w.emfed", "north.csv", "-o", "n2.emfed", "-q")
    assert (code, out, err) == (0, "", "")


def test_bad_uses_are_told_in_one_line(emfed_shell: Shell) -> None:
    shell = emfed_shell
    _wards(shell)
    shell("fit", "wards.csv", "-g", "ward", "-k", 1, "--missing", "-o", "w.emfed", "-q")
    for arguments, words in (
        (("w.emfed", "north.csv", "--worth", 0), "worth"),
        (("w.emfed", "north.csv", "--worth", "nan"), "worth"),
        (("w.emfed", "north.csv", "-o", "w.emfed"), "would replace"),
        (("w.emfed", "north.csv", "-o", "-"), "file"),
        (("w.emfed", "none.csv"), "none.csv"),
        (("north.csv", "north.csv"), "model file"),
    ):
        code, _, err = shell("adapt", *arguments)
        assert code in (1, 2)
        assert words in err
    shell.write("other.csv", "age,height\n50,170\n")
    code, _, err = shell("adapt", "w.emfed", "other.csv")
    assert code == 1
    assert "pressure" in err
