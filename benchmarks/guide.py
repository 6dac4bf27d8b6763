"""The lesson docs/between-machines.md, done as it says, by the letter."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from emfed.network.addresses import free_port

GUIDE = Path(__file__).parent.parent / "docs" / "between-machines.md"


def blocks(kind: str, page: Path = GUIDE) -> list[str]:
    """Code blocks of one kind."""
    return re.findall(rf"```{kind}\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)


def shell(text: str, folder: Path, out: Any = subprocess.PIPE) -> subprocess.Popen[str]:
    """Lines pasted into a shell of their own, in which `emfed` is the one installed here."""
    scripts = Path(sys.executable).parent
    return subprocess.Popen(
        ["bash", "-c", text],
        cwd=folder,
        env={**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"},
        stdout=out,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )


def follow_guide(folder: Path, seconds: float = 600) -> dict[str, float]:
    """What a newcomer types, in two shells; the port alone is another, in case 9400 is in use."""
    port = str(free_port())
    exec(blocks("python")[0].replace('f"{name}.csv"', f'r"{folder}/" + f"{{name}}.csv"'), {})
    config = blocks("toml")[0].replace('host = "0.0.0.0"', 'host = "127.0.0.1"')
    (folder / "run.toml").write_text(config.replace("9400", port), encoding="utf-8")
    first, second = (text.replace("9400", port) for text in blocks("sh")[:2])
    began = time.monotonic()
    terminals = []
    for number, text in enumerate((first, second)):
        with (folder / f"terminal{number}.out").open("wb") as out:
            terminals.append(shell(text, folder, out))
        if number == 0:
            while not (folder / "keys" / "sites" / "tromso.pub").exists():
                time.sleep(0.2)
    try:
        code = terminals[0].wait(seconds)
        said = (folder / "terminal0.out").read_text(encoding="utf-8")
        assert code == 0, said
        assert "the model is in" in said, said
        terminals[1].wait(60)
    finally:
        for terminal in terminals:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(terminal.pid, signal.SIGTERM)
            terminal.wait(30)
    summary = json.loads((folder / "model" / "summary.json").read_text(encoding="utf-8"))
    return {
        "seconds": time.monotonic() - began,
        "rounds": summary["rounds"],
        "converged": summary["converged"],
        "components": len(summary["parameters"]["weights"]),
    }


if __name__ == "__main__":
    with tempfile.TemporaryDirectory(prefix="emfed-guide-") as name:
        print(json.dumps(follow_guide(Path(name))))
