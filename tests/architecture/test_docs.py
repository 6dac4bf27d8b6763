"""What the README shows is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def blocks(path: Path) -> list[str]:
    return re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), re.DOTALL)


PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
EXAMPLES = [(page.name, code) for page in PAGES for code in blocks(page)]


def test_there_are_examples() -> None:
    assert any(name == "README.md" for name, _ in EXAMPLES)


@pytest.mark.parametrize(("name", "code"), EXAMPLES)
def test_example_runs(
    name: str, code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    exec(compile(code, name, "exec"), {"__name__": "__main__"})


def test_the_first_example_is_ten_lines() -> None:
    assert len(blocks(ROOT / "README.md")[0].strip().splitlines()) <= 10


def test_make_targets_of_the_readme_exist() -> None:
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make ([a-z]+)", (ROOT / "README.md").read_text()):
        assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_your_own_model_takes_less_than_sixty_lines() -> None:
    code = blocks(ROOT / "docs" / "your-own-model.md")[0]
    model = code[: code.index("rng = ")]
    assert "class Lifetimes(Model)" in model
    assert len(model.strip().splitlines()) < 70
    assert len([line for line in model.splitlines() if line.strip()]) < 60
