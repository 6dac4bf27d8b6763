"""Numbers of captions."""

from __future__ import annotations

from paper.findings import in_words, over_seeds


def test_captions_print_powers_of_ten_as_such() -> None:
    assert [in_words(value) for value in (1e-7, 1e-6, 1e5)] == ["10⁻⁷", "10⁻⁶", "10⁵"]
    assert [in_words(value) for value in (0.01, 2e-6, 1.0)] == ["0.01", "2e-06", "1"]


def test_captions_speak_of_bands_only_where_there_are_some() -> None:
    assert over_seeds(5) == "medians and 90% bands over seeds"
    assert [over_seeds(count) for count in (1, 4)] == ["one seed", "a line for every seed"]
