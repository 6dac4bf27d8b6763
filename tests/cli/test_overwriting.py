"""No command replaces what it reads, or one of its outputs by another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from emfed.cli.main import main


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = np.random.default_rng(0).normal(size=(60, 2)) + np.arange(60)[:, None] % 2 * 5
    lines = ["x,y,site", *(f"{x},{y},{j % 3}" for j, (x, y) in enumerate(rows.tolist()))]
    path = tmp_path / "table.csv"
    path.write_text("\n".join(lines) + "\n")
    return path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> None:
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert end.value.code == 2
    assert "would replace" in capsys.readouterr().err


def test_outputs_never_replace_inputs(table: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = table.read_bytes()
    fit = ("fit", "table.csv", "-g", "site", "-k", "2")
    refused(capsys, *fit, "-o", "table.csv")
    refused(capsys, *fit, "-o", "./table.csv")
    refused(capsys, *fit, "-o", "page.html", "--report", "page.html")
    assert table.read_bytes() == before
    with pytest.raises(SystemExit) as end:
        main([*fit, "-o", "model.html", "-q"])
    assert end.value.code in (0, None)
    refused(capsys, "report", "model.html", "-o", "model.html")
    refused(capsys, "predict", "model.html", "table.csv", "-o", "table.csv")
    assert table.read_bytes() == before
