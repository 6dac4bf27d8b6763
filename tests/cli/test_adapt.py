"""``fedem adapt``: a common model for the rows of one worker."""

from __future__ import annotations

import json

import numpy as np

import fedem
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


def test_a_ward_adapts_the_model_of_all(fedem_shell: Shell) -> None:
    shell = fedem_shell
    _wards(shell)
    assert (
        shell("fit", "wards.csv", "-g", "ward", "-k", 1, "--missing", "-o", "w.fedem", "-q")[0] == 0
    )
    code, out, _ = shell("adapt", "w.fedem", "north.csv", "--worth", 20, "-o", "n.fedem", "--json")
    told = json.loads(out)
    assert code == 0
    assert told["log_likelihood"] > told["log_likelihood_before"]
    assert told["rows"] == 60
    common, mine = fedem.load("w.fedem").params.means[0], fedem.load("n.fedem").params.means[0]
    assert np.all(mine > common)
    code, out, _ = shell("inspect", "n.fedem")
    assert code == 0
    assert "adapted" in out
    code, out, _ = shell("predict", "n.fedem", "north.csv")
    assert code == 0
    assert out.count("\n") == 61
    code, out, err = shell("adapt", "w.fedem", "north.csv", "-o", "n2.fedem", "-q")
    assert (code, out, err) == (0, "", "")


def test_bad_uses_are_told_in_one_line(fedem_shell: Shell) -> None:
    shell = fedem_shell
    _wards(shell)
    shell("fit", "wards.csv", "-g", "ward", "-k", 1, "--missing", "-o", "w.fedem", "-q")
    for arguments, words in (
        (("w.fedem", "north.csv", "--worth", 0), "worth"),
        (("w.fedem", "north.csv", "--worth", "nan"), "worth"),
        (("w.fedem", "north.csv", "-o", "w.fedem"), "would replace"),
        (("w.fedem", "north.csv", "-o", "-"), "file"),
        (("w.fedem", "none.csv"), "none.csv"),
        (("north.csv", "north.csv"), "model file"),
    ):
        code, _, err = shell("adapt", *arguments)
        assert code in (1, 2)
        assert words in err
    shell.write("other.csv", "age,height\n50,170\n")
    code, _, err = shell("adapt", "w.fedem", "other.csv")
    assert code == 1
    assert "pressure" in err
