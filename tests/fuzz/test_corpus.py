"""The fuzzer's corpus, and random inputs around it, run in every test."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.decoders import one_input

CORPUS = sorted((Path(__file__).parent / "corpus").iterdir())


@pytest.mark.parametrize("path", CORPUS, ids=lambda p: p.name)
def test_corpus(path: Path) -> None:
    one_input(path.read_bytes())


@settings(max_examples=3000)
@given(st.binary(min_size=4, max_size=100))
def test_random_inputs(data: bytes) -> None:
    one_input(data)
