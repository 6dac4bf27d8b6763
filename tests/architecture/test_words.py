"""One word, one meaning: what of the vocabulary can be counted."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from functools import cache
from pathlib import Path

import emfed

SOURCE = Path(emfed.__file__).parent
ROOT = Path(__file__).parents[2]
GIVEN_UP = {
    "worker_rows": "worker_states",
    "restore_rows": "restore_states",
    "Settings": "a name that says whose settings",
    "CAUTION": "a name that says the quantity",
    "MANY": "a name that says the quantity",
    "SEVERAL": "a name that says the quantity",
    "LASTING": "a name that says the quantity",
    "NEVER": "a name that says the quantity",
    "Host": "ServerSupervisor",
    "Guest": "SiteSupervisor",
}
"""Names that had two meanings or none, and what to write."""
MODULES = {"portraits", "durations", "spreads", "siblings", "cards", "contest", "resident", "tape"}
"""Modules whose names could not be guessed."""


@cache
def modules() -> dict[Path, ast.Module]:
    paths = (*SOURCE.rglob("*.py"), *(ROOT / "paper").rglob("*.py"))
    return {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_no_two_classes_or_types_have_one_name() -> None:
    where = defaultdict(list)
    for path, tree in modules().items():
        if "cli" in path.parts:  # types of options are those of a command alone
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                where[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
        for node in tree.body:
            if isinstance(node, ast.Assign) and not isinstance(node.value, ast.Call):
                for name in node.targets:
                    if isinstance(name, ast.Name) and re.match("[A-Z].*[a-z]", name.id):
                        where[name.id].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    assert {name: places for name, places in where.items() if len(places) > 1} == {}


def test_words_that_were_given_up_do_not_come_back() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{token.start[0]}: {token.string}, write {wanted}"
        for path in modules()
        for token in tokenize.generate_tokens(io.StringIO(path.read_text("utf-8")).readline)
        if token.type == tokenize.NAME and (wanted := GIVEN_UP.get(token.string))
    ]
    assert found == []
    assert not MODULES & {path.stem for path in modules()}


def test_every_constant_says_what_it_is() -> None:
    """Beside a number stands what it does, and what chose it or that nothing did."""
    bare = []
    for path, tree in modules().items():
        lines = path.read_text(encoding="utf-8").splitlines()
        for node, later in zip(tree.body, [*tree.body[1:], None], strict=True):
            if not (isinstance(node, ast.Assign) and numeric(node.value) and capital(node)):
                continue
            end = node.end_lineno or node.lineno
            above = lines[node.lineno - 2] if node.lineno > 1 else ""
            # One docstring may speak of several constants that stand together.
            beside = isinstance(later, (ast.Expr, ast.Assign)) and later.lineno == end + 1
            if not (beside or "#" in lines[end - 1] or above.startswith("#")):
                bare.append(f"{path.relative_to(ROOT)}:{node.lineno}: {lines[node.lineno - 1]}")
    assert bare == []


def capital(node: ast.Assign) -> bool:
    names = [n.id for n in ast.walk(node.targets[0]) if isinstance(n, ast.Name)]
    return bool(names) and all(name.strip("_").isupper() for name in names)


def numeric(node: ast.expr) -> bool:
    if isinstance(node, ast.Constant):
        return isinstance(node.value, (int, float)) and not isinstance(node.value, bool)
    if isinstance(node, (ast.Tuple, ast.List)):
        return any(map(numeric, node.elts))
    return isinstance(node, ast.BinOp) and (numeric(node.left) or numeric(node.right))


def test_the_paper_is_cited_as_printed() -> None:
    """Theorems share their numbers with corollaries and lemmas: 1, Corollary 2, 3, 4, Lemma 5."""
    allowed = {"Theorem": {"1", "3", "4"}, "Corollary": {"2", "9", "18"}, "Lemma": {"5", "6", "21"}}
    pages = [path for end in ("py", "md", "toml") for path in SOURCE.rglob(f"*.{end}")]
    pages += [path for end in ("py", "md", "toml") for path in (ROOT / "paper").rglob(f"*.{end}")]
    pages += [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs" / "decisions").glob("*.md")]
    pages += [ROOT / "ARCHITECTURE.md", ROOT / "README.md"]
    for path in pages:
        for what, number in re.findall(
            r"\b(Theorem|Corollary|Lemma) (\d+)\b", path.read_text(encoding="utf-8")
        ):
            assert number in allowed[what], f"{path}: the paper has no {what} {number}"


def test_the_vocabulary_is_short_and_names_each_word_once() -> None:
    text = (ROOT / "docs" / "vocabulary.md").read_text(encoding="utf-8")
    words = [
        word.strip()
        for row in re.findall(r"^\| \*\*(.+?)\*\* \|", text, re.MULTILINE)
        for word in row.split(",")
    ]
    assert 15 <= len(words) <= 25
    assert len(words) == len(set(words))
