"""The command line, as a shell sees it."""

from __future__ import annotations

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import chdir, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any

import polars as pl
import pytest
import typer

import emfed
from emfed.cli.main import app, main


def emfed_command(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    """The command line in this process: to start one takes a second."""
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err), chdir(cwd or "."):
        try:
            main(list(arguments))
        except SystemExit as end:
            code = end.code
    assert isinstance(code, int)
    return subprocess.CompletedProcess(arguments, code, out.getvalue(), err.getvalue())


def test_version_and_help() -> None:
    assert emfed_command("--version").stdout.strip() == f"emfed {emfed.__version__}"
    for arguments in (["--help"], ["-h"], []):
        done = emfed_command(*arguments)
        assert "demo" in done.stdout + done.stderr
    done = emfed_command("demo", "--help")
    assert done.returncode == 0
    assert "Examples:" in done.stdout
    assert "emfed demo --epochs 50" in done.stdout


def test_reproduce_says_where_it_went() -> None:
    done = emfed_command("reproduce", "mnist", "--quick")
    assert done.returncode == 2
    assert "run them from a clone of the repository by `python -m paper NAME...`" in done.stderr


def every_command(command: Any, *words: str) -> Iterator[tuple[str, ...]]:
    yield words
    for name, inner in getattr(command, "commands", {}).items():
        yield from every_command(inner, *words, name)


@pytest.mark.parametrize("words", list(every_command(typer.main.get_command(app))), ids=" ".join)
def test_every_help_has_an_example_and_no_name_of_a_type(words: tuple[str, ...]) -> None:
    """Some releases of typer call the value of an option ``<int range>`` or ``<list[str]>``."""
    said = emfed_command(*words, "--help").stdout
    _, example = said.split("Examples:")
    assert f"emfed {' '.join(words)}".strip() in example
    assert not re.search(r"<\w|\[str|INTEGER|FLOAT|RANGE|\.{4}", said)


def test_demo_writes_what_it_says(tmp_path: Path) -> None:
    done = emfed_command("demo", "--epochs", "6", "--seed", "3", "--out", "here", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "seed 3" in done.stdout
    assert "Warning" not in done.stdout + done.stderr
    out = tmp_path / "here"
    names = {p.name for p in out.iterdir()}
    assert names == {
        "FedEM.csv",
        "FedEM.parquet",
        "VR-FedEM.csv",
        "VR-FedEM.parquet",
        "summary.json",
        "trajectories.pdf",
        "trajectories.png",
        "trajectories.svg",
    }
    assert (out / "trajectories.png").read_bytes()[:4] == b"\x89PNG"
    summary = json.loads((out / "summary.json").read_text())
    frame = pl.read_parquet(out / "FedEM.parquet")
    assert frame["round"][-1] == summary["algorithms"]["FedEM"]["rounds"]
    assert frame["epochs"][-1] >= 6


def test_a_demo_that_ends_before_it_begins(tmp_path: Path) -> None:
    done = emfed_command("demo", "--epochs", "1", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr


def test_json_is_all_there_is_on_stdout(tmp_path: Path) -> None:
    outputs: list[Any] = []
    for _ in range(2):
        done = emfed_command("demo", "--epochs", "4", "--out", str(tmp_path), "--json")
        assert done.returncode == 0
        summary = json.loads(done.stdout)
        for row in summary["algorithms"].values():
            row.pop("seconds")
        outputs.append(summary)
    assert outputs[0] == outputs[1]  # same seed, same numbers
    assert set(outputs[0]["algorithms"]) == {"FedEM", "VR-FedEM"}


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["demo", "--split", "mixed"], 2, "must be 'random' or 'sorted'"),
        (["demo", "--epochs", "-1"], 2, "epochs"),
        (["demo", "--seed", "x"], 2, "seed"),
        (["nothing"], 2, "nothing"),
        (["demo", "--out", "/proc/nowhere"], 1, "/proc/nowhere"),
    ],
)
def test_errors_are_one_line_with_an_exit_code(
    arguments: list[str], code: int, message: str
) -> None:
    done = emfed_command(*arguments)
    assert done.returncode == code
    assert message in done.stderr
    assert "Traceback" not in done.stderr + done.stdout


def test_ctrl_c_keeps_what_was_reached(tmp_path: Path) -> None:
    process = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "from emfed.cli.main import main; main()",
            *("demo", "--epochs", "1000000", "--out", str(tmp_path / "out")),
        ],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
        # Tests may have been started in the background, where Ctrl-C is ignored by inheritance.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "out").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    time.sleep(1.5)
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "Traceback" not in errors
    assert "interrupted" in errors
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert summary["algorithms"]["FedEM"]["rounds"] > 0
    assert (tmp_path / "out" / "trajectories.png").exists()


@pytest.mark.parametrize(
    ("module", "word"),
    [("emfed.core.version", "--version"), ("typer", "--version"), ("numpy", "demo")],
)
def test_ctrl_c_during_imports_is_one_line(module: str, word: str) -> None:
    script = f"""
import os, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)

class Press:
    def find_spec(self, name, path=None, target=None):
        if name == {module!r}:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Press())
from emfed_command import main
main()
"""
    done = subprocess.run(
        [sys.executable, "-c", script, word], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "emfed: interrupted\n")
