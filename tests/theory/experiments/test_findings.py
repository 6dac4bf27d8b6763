"""Numbers of captions."""

from __future__ import annotations

from emfed.theory.experiments.findings import in_words


def test_captions_print_powers_of_ten_as_such() -> None:
    assert [in_words(value) for value in (1e-7, 1e-6, 1e5)] == ["10⁻⁷", "10⁻⁶", "10⁵"]
    assert [in_words(value) for value in (0.01, 2e-6, 1.0)] == ["0.01", "2e-06", "1"]
