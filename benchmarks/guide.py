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

from emfed.network.addresses import free_port

GUIDE = Path(__file__).parent.parent / "docs" / "between-machines.md"


def blocks(kind: str) -> list[str]:
    """Code blocks of one kind."""
    return re.findall(rf"```{kind}\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)


def follow_guide(folder: Path, seconds: float = 600) -> dict[str, float]:
    """What a newcomer types, in two shells; the port alone is another, in case 9400 is in use."""
    port = str(free_port())
    exec(blocks("python")[0].replace('f"{name}.csv"', f'r"{folder}/" + f"{{name}}.csv"'), {})
    config = blocks("toml")[0].replace("9400", port)
    (folder / "run.toml").write_text(config, encoding="utf-8")
    scripts = Path(sys.executable).parent  # where `emfed` was installed
    shell = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"}
    first, second = (text.replace("9400", port) for text in blocks("sh")[:2])
    began = time.monotonic()
    terminals = []
    for number, text in enumerate((first, second)):
        with (folder / f"terminal{number}.out").open("wb") as out:
            terminals.append(
                subprocess.Popen(
                    ["bash", "-c", text],
                    cwd=folder,
                    env=shell,
                    stdout=out,
                    stderr=out,
                    start_new_session=True,
                )
            )
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
