"""What README and pages show is run, where they point to is there, and every page can be found."""

from __future__ import annotations

import itertools
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import typer

from emfed.cli.main import app
from emfed.deployment.config import read_config
from emfed.deployment.site import read_rules

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def blocks(path: Path, *kinds: str) -> list[tuple[str, str]]:
    """Kind and text of the code blocks of these kinds, in the order of the page."""
    text = path.read_text(encoding="utf-8")
    found = re.findall(r"^```(\S*)[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)
    return [(kind, code) for kind, code in found if kind in (kinds or ("python",))]


SITE_PAGES = sorted(DOCS.glob("*.md"))
DECISIONS = sorted((DOCS / "decisions").glob("*.md"))
PAGES = [
    *sorted(ROOT.glob("*.md")),
    *SITE_PAGES,
    *DECISIONS,
    *sorted((DOCS / "templates").glob("*.md")),
]
LESSONS = [DOCS / "first-fit.md", DOCS / "first-imputation.md"]
"""Pages whose blocks go on from each other; elsewhere each block stands alone."""
EXAMPLES = [
    (page.name, code)
    for page in (ROOT / "README.md", *SITE_PAGES)
    if page not in LESSONS
    for _, code in blocks(page)
]


def test_there_are_examples() -> None:
    assert any(name == "README.md" for name, _ in EXAMPLES)


@pytest.mark.parametrize(("name", "code"), EXAMPLES)
def test_example_runs(
    name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


def play(page: Path, *kinds: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    shell = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    for kind, code in blocks(page, *kinds):
        if kind == "python":
            exec(compile(code, page.name, "exec"), names)
        else:
            subprocess.run(["bash", "-e", "-c", code], env=shell, check=True)


@pytest.mark.parametrize("page", LESSONS, ids=lambda page: page.stem)
def test_lesson_runs_from_its_beginning_to_its_end(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    play(page, "python")


@pytest.mark.long  # `make docs` runs them; commands that the suite runs anyway take seconds each
@pytest.mark.parametrize("page", LESSONS, ids=lambda page: page.stem)
def test_commands_of_a_lesson_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    play(page, "python", "sh")


def commands(page: Path) -> set[str]:
    """Lines of blocks, and code in text, that call `emfed`; not those that leave something out."""
    lines = [
        line.removeprefix("$ ").split("#")[0]
        for _, code in blocks(page, "sh", "text", "")
        for line in code.replace("\\\n", " ").splitlines()
    ]
    prose = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    lines += [" ".join(code.split()) for code in re.findall(r"`([^`]+)`", prose)]
    return {line.strip(" &") for line in lines if re.match(r"emfed [a-z](?!.*\.\.\.)", line)}


COMMANDS = sorted(
    (page.name, line)
    for page in PAGES
    if page.stem not in ("CHANGELOG", "wire-format")  # what was, and a string of bytes
    for line in commands(page)
)


@pytest.mark.parametrize(("page", "line"), COMMANDS)
def test_commands_and_their_options_exist(page: str, line: str) -> None:
    words = shlex.split(re.split(r" [|>] ", line)[0])[1:]
    command: Any = typer.main.get_command(app)
    while hasattr(command, "commands") and words:
        assert words[0] in command.commands, line
        command = command.commands[words.pop(0)]
    options = {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    given = {word.split("=")[0] for word in words if re.match(r"--?[a-z]", word)}
    assert given <= options | {"--help"}, line


def test_files_of_settings_are_understood(tmp_path: Path) -> None:
    path = tmp_path / "file.toml"
    model = '[model]\nkind = "gaussian-mixture"\nn_components = 3\n[sites]\nexpected = 3\n'
    texts = [text for page in (ROOT / "README.md", *SITE_PAGES) for _, text in blocks(page, "toml")]
    texts = [text for text in texts if "data = " not in text]  # options of `emfed fit`
    assert len(texts) >= 5
    for text in texts:
        path.write_text(model + text if text.startswith("[privacy]") else text)
        (read_config if "[" in text.split("=")[0] else read_rules)(path)


def anchors(path: Path) -> set[str]:
    """What links may name: headings as MyST and the usual hosts turn them into anchors."""
    text = path.read_text(encoding="utf-8")
    for name in re.findall(r"^```\{include\} (\S+)", text, re.MULTILINE):
        text += (path.parent / name).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    plain = [re.sub(r"\[(.*?)\]\(.*?\)", r"\1", heading).lower().strip() for heading in headings]
    return {re.sub(r"[^\w\- ]", "", heading).replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text)):
        name, _, anchor = link.partition("#")
        target = (page.parent / name) if name else page
        if re.match(r"[a-z]+:", link) or name.startswith("generated/"):
            continue  # Sphinx checks what it generates; nothing here needs a network
        if not target.exists() or (anchor and anchor not in anchors(target)):
            wrong.append(link)
    assert wrong == []


def test_pages_that_the_site_includes_link_to_its_own_pages_alone() -> None:
    wrong = []
    for page in SITE_PAGES:
        for name in re.findall(r"^```\{include\} (\.\.\S+)", page.read_text("utf-8"), re.M):
            text = (page.parent / name).read_text("utf-8")
            links = re.findall(r"\]\(([^)\s]+)\)", re.sub(r"`[^`\n]*`", "", text))
            wrong += [f"{name}: {x}" for x in links if not re.match(r"docs/|#|https?:", x)]
    assert wrong == []


def test_no_line_of_a_sentence_begins_a_list_by_chance() -> None:
    # "The medians are 2.2 and" with "1. With step 0.03" on the next line became a list of one item.
    wrong = []
    for page in [*PAGES, *sorted((ROOT / "paper").rglob("*.md"))]:
        text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
        for before, line in itertools.pairwise(text.splitlines()):
            prose = before.strip() and not re.match(r"\s|[-+*#|]|\d+[.)] ", before)
            if prose and re.match(r"([-+*]|1[.)]) ", line):
                wrong.append(f"{page.name}: {line}")
    assert wrong == []


def test_every_page_is_reached_from_the_index() -> None:
    reached, waiting = set(), ["index"]
    while waiting:
        name = waiting.pop()
        reached.add(name)
        path = DOCS / f"{name}.md"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        for block in re.findall(r"^```\{toctree\}\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
            inner = re.findall(r"^(?:[^:].* <)?([\w/.-]+)>?$", block, re.MULTILINE)
            waiting += [name for name in inner if name not in reached]
    assert {page.stem for page in SITE_PAGES} - reached == set()


def test_every_decision_is_listed_and_says_how_far_it_is_built() -> None:
    listed = (DOCS / "decisions" / "README.md").read_text(encoding="utf-8")
    for page in DECISIONS:
        if page.stem != "README":
            title, _, status = page.read_text(encoding="utf-8").splitlines()[:3]
            assert re.match(rf"# {page.stem[:3]}: \S", title), page.name
            assert re.match(r"\*\d.*20\d\d\. (Accepted|Proposed|Superseded)\b", status), page.name
            assert f"| [{page.stem[:3]}]({page.name}) |" in listed, page.name


def test_decisions_that_the_code_names_exist() -> None:
    names = [page.name for page in DECISIONS]
    for path in (ROOT / "src").rglob("*.py"):
        for cited in re.findall(r"docs/decisions/(\d[\w.-]*\w)", path.read_text(encoding="utf-8")):
            assert any(name.startswith(cited) for name in names), f"{path} names decision {cited}"


def test_the_map_of_the_house_fits_on_a_page() -> None:
    assert (ROOT / "ARCHITECTURE.md").stat().st_size <= 8192


def test_the_first_example_is_ten_lines() -> None:
    assert len(blocks(ROOT / "README.md")[0][1].strip().splitlines()) <= 10


def test_what_is_pasted_into_a_shell_has_no_comments() -> None:
    """A zsh that is typed into takes `#` for a word, and an apostrophe after it opens a string."""
    found = [
        f"{page.name}: {line}"
        for page in (ROOT / "README.md", *SITE_PAGES)
        for kind, text in blocks(page, "sh", "text")
        for line in text.splitlines()
        if re.search(r"(^|\s)#", line) and (kind == "sh" or line.startswith(("emfed ", "make ")))
    ]
    assert found == []


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z]+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_your_own_model_takes_less_than_sixty_lines() -> None:
    code = blocks(DOCS / "your-own-model.md")[0][1]
    model = code[: code.index("rng = ")]
    assert "class Lifetimes(Model)" in model
    assert len([line for line in model.splitlines() if line.strip()]) < 60
    assert len([line for line in model.splitlines() if line.strip()]) < 60
