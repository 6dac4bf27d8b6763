"""An owner's rules: two presets, overrides, and rules of before that are refused in words."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from emfed.core.errors import SettingsError
from emfed.network.owner_rules import GONE, SiteRules, rules_table

RELEASE_0_1 = {
    *("smallest_rows", "spare_rows", "models", "any_columns", "mini_batches", "largest_rounds"),
    *("largest_choices", "largest_step", "smallest_group", "largest_model", "unmasked"),
    *("smallest_set", "largest_changes", "smallest_observers", "smallest_component"),
    *("smallest_cluster", "ask_first", "own_clusters", "largest_epsilon", "delta", "colluders"),
    "second_ledger",
}


def test_every_rule_of_release_0_1_is_known_or_refused_with_what_takes_its_place() -> None:
    now = {known.name for known in dataclasses.fields(SiteRules)}
    assert RELEASE_0_1 - now == set(GONE)
    for name in GONE:
        with pytest.raises(SettingsError, match=f"{name} is no rule any more: .{{30}}"):
            SiteRules.read({name: 5})
        with pytest.raises(SettingsError, match="no rule any more"):
            SiteRules.read({name: False, "preset": "trusting"})


@pytest.mark.parametrize(
    ("table", "words"),
    [
        ({"preset": "open"}, "preset"),
        ({"largest_round": 3}, "did you mean 'largest_rounds'"),
        ({"smallest_set": 2}, "smallest_set"),
        ({"largest_choices": -1}, "largest_choices"),
        ({"unmasked": 1}, "true or false"),
        ({"models": "gaussian-mixture"}, "list of names"),
        ({"models": 3}, "owner's rules"),
        ({"largest_epsilon": 0}, "largest_epsilon"),
        ({"delta": 0.9}, "delta"),
    ],
)
def test_a_rule_that_is_none_is_refused_and_never_ignored(table: Any, words: str) -> None:
    with pytest.raises(SettingsError, match=words):
        SiteRules.read(table)


def test_what_is_written_beside_a_preset_overrides_it() -> None:
    rules = SiteRules.read({"preset": "trusting", "smallest_rows": 20, "largest_fits": 3})
    assert rules.smallest_rows == 20
    assert rules.largest_fits == 3
    assert rules.unmasked
    assert SiteRules.read({"largest_rounds": False}).largest_rounds is None
    assert SiteRules.read({}) == SiteRules.read({"preset": "careful"}) == SiteRules()


def test_the_table_has_every_rule_with_its_value_in_both_presets() -> None:
    lines = rules_table().splitlines()
    assert len(lines) == 2 + len(dataclasses.fields(SiteRules))
    rows = {line.split("|")[1].strip(): line.split("|")[2:4] for line in lines[2:]}
    assert [value.strip() for value in rows["`largest_choices`"]] == ["0", "false"]
    assert [value.strip() for value in rows["`largest_rounds`"]] == ["10,000", "false"]
    assert [value.strip() for value in rows["`unmasked`"]] == ["false", "true"]
    assert [value.strip() for value in rows["`largest_epsilon`"]] == ["false", "false"]


def test_what_rules_give_away_comes_first_and_follows_from_them() -> None:
    first = SiteRules().gives_away()
    assert "learns who takes part, when, and how many bytes" in first[0]
    assert "sums over the sites that take part, and the model" in first[1]
    assert "lies together with the server" in first[2]
    assert SiteRules.trusting().gives_away()[:3] == first
    (private,) = SiteRules(largest_epsilon=2).gives_away()
    assert "epsilon 2 allows over all runs, whoever lies" in private
    for looser in (
        {"largest_fits": None},
        {"largest_changes": 2},
        {"largest_choices": 5},
        {"any_columns": True},
        {"mini_batches": True},
        {"smallest_observers": 1},
        {"smallest_component": None},
        {"models": ["*"]},
    ):
        assert len(SiteRules(**looser).gives_away()) == len(first) + 1, looser


def test_the_protocol_page_has_the_table_and_what_is_gone() -> None:
    page = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text(encoding="utf-8")
    assert rules_table().strip() in page
    assert all(f"- `{name}`: {words}." in page for name, words in GONE.items())
