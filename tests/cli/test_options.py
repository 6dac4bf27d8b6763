"""Help, completion, configuration files and the estimate of what is left."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

import emfed
from emfed.cli.help import EXIT_CODES
from emfed.fitting.progress import rounds_left, size
from tests.cli.shell import Shell

PAGE = Path(__file__).parents[2] / "docs" / "command-line.md"
COMMANDS = ("fit", "predict", "impute", "inspect", "report")


HEADINGS = ("Fit and use models:", "The theory and the paper:", "A federation between machines:")


def test_help_is_grouped_and_ends_with_exit_codes(emfed_shell: Shell) -> None:
    code, out, _ = emfed_shell("--help")
    assert code == 0
    at = [out.index(words) for words in HEADINGS]
    assert at == sorted(at)
    assert "\nCommands:" not in out
    for number, words in EXIT_CODES.items():
        assert re.search(rf"^\s+{number}  {re.escape(words)}$", out, re.MULTILINE)
    _, out, _ = emfed_shell("fit", "--help")
    headings = ("Arguments:", "Output:", "Data:", "Model:", "Algorithm:", "Limits", "Run:")
    at = [out.index(words) for words in headings]
    assert at == sorted(at)
    assert "emfed fit wards.csv --groups hospital --n-components 2:8" in out
    assert "DATA..." in out.splitlines()[0]
    assert "  DATA...  CSV, TSV, Excel or Parquet, or - for a pipe" in out


def test_a_typo_is_answered_once(emfed_shell: Shell) -> None:
    code, _, err = emfed_shell("fitt")
    assert code == 2
    assert err == "emfed: No such command 'fitt'. Did you mean 'fit'? See emfed --help.\n"


def options_of(command: str, shell: Shell) -> set[str]:
    _, out, _ = shell(command, "--help")
    lines = [line for line in out.splitlines() if re.match(r"\s+-", line)]
    return {option for line in lines for option in re.findall(r"--[a-z][a-z-]+", line[:30])}


def test_a_plan_is_asked_for_in_the_words_of_a_fit(emfed_shell: Shell) -> None:
    more = options_of("plan", emfed_shell) - options_of("fit", emfed_shell)
    assert more == {"--accuracy", "--metric"}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_page_names_every_option_and_no_other(command: str, emfed_shell: Shell) -> None:
    real = options_of(command, emfed_shell)
    text = PAGE.read_text(encoding="utf-8")
    section = text.split(f"## emfed {command}\n")[1].split("\n## ")[0]
    told = set(re.findall(r"--[a-z][a-z-]+", section))
    assert real - told - {"--help"} == set()
    assert told - real - {"--help"} == set()


def test_the_page_has_the_exit_codes() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for number, words in EXIT_CODES.items():
        assert f"| {number} | {words} |" in text


def test_completion_in_a_shell(emfed_shell: Shell) -> None:
    def complete(*words: str) -> list[str]:
        environment = {
            "_EMFED_COMPLETE": "complete_bash",
            "COMP_WORDS": " ".join(words),
            "COMP_CWORD": str(len(words) - 1),
        }
        process = emfed_shell.process(env=environment)
        out, _ = process.communicate(timeout=60)
        return out.decode().split()

    assert set(complete("emfed", "re")) == {"relay", "report"}
    assert complete("emfed", "fit", "--cov") == ["--covariance-type", "--covariance-floor"]
    assert set(complete("emfed", "fit", "--algorithm", "")) == {"auto", "em", "FedEM", "VR-FedEM"}
    process = emfed_shell.process(env={"_EMFED_COMPLETE": "source_bash"})
    script, _ = process.communicate(timeout=60)
    checked = subprocess.run(["bash", "-n"], input=script, capture_output=True, check=False)
    assert checked.returncode == 0
    assert b"complete" in script


def test_a_file_holds_all_options(emfed_shell: Shell) -> None:
    emfed_shell.write(
        "fit.toml",
        'data = ["wards.csv"]\ngroups = "hospital"\ncolumns = "age,pressure"\nn_components = 3\n'
        'rounds = 4\nmax_bytes = 1000000\nout = "c.emfed"\nseed = 3\njson = true\nnames = false\n',
    )
    code, out, _ = emfed_shell("fit", "--config", "fit.toml")
    assert code == 3
    told = json.loads(out)
    assert (told["components"], told["rounds"], told["seed"]) == (3, 4, 3)
    result = emfed.load(emfed_shell.folder / "c.emfed")
    assert result.facts is not None
    assert result.facts.settings["limits"]["bytes"] == 1_000_000
    assert result.workers()["worker"] == ["0", "1", "2"]
    # The command line has the last word.
    code, out, _ = emfed_shell("fit", "--config", "fit.toml", "--seed", 9, "-k", 2)
    assert (json.loads(out)["components"], json.loads(out)["seed"]) == (2, 9)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("n_compnents = 3", "did you mean 'n-components'?"),
        ("max-byte = 3", "did you mean 'max-bytes'?"),
        ("zzz = 3", "there is no option 'zzz'; there are "),
        ("n_components = [", "is not TOML"),
        ("rounds = 'many'", "--rounds"),
        ("rounds = -3", "--rounds"),
        ("[fit]\nseed = 3", "no option 'fit'"),
        ("config = 'other.toml'", "no option 'config'"),
    ],
)
def test_mistakes_in_the_file_are_named(text: str, message: str, emfed_shell: Shell) -> None:
    emfed_shell.write("fit.toml", text + "\n")
    code, _, err = emfed_shell("fit", "wards.csv", "--config", "fit.toml")
    assert code == 2
    assert message in err
    assert emfed_shell("fit", "wards.csv", "--config", "nowhere.toml")[0] == 2


def test_rounds_that_are_left() -> None:
    falling = [10.0 * 0.5**k for k in range(30)]
    needed = rounds_left(falling, None, falling[-1] * 0.5**7, 1000, 30)
    assert needed == pytest.approx(7, abs=0.01)
    # Half of a gain is left after each round: all that follows a gain is as much again.
    assert rounds_left(falling, 2 * falling[-1] * 0.5**7, None, 1000, 30) == pytest.approx(7)
    assert rounds_left(falling, None, 1e-300, 40, 30) == 10
    assert rounds_left([1.0] * 30, None, 1e-8, None, 30) is None  # it does not fall: who knows
    assert rounds_left([1.0], 1e-4, None, 500, 1) == 499
    assert rounds_left(falling, None, 1.0, 500, 30) == 0
    told = [size(n) for n in (0, 999, 1500, 2.5e6, 3e9)]
    assert told == ["0 B", "999 B", "1.5 kB", "2.5 MB", "3.0 GB"]
