"""Questions outside rounds tell what the parameters follow from, where that is shorter."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import emfed
from emfed.core.protocols import WHOLE, Question
from emfed.core.wire import decode_floats, decode_question, encode_question, is_grid
from emfed.data import as_workers
from emfed.fitting.session import Session
from emfed.models.binding import flatten_params, told_parameters
from emfed.network import LocalTransport, RemoteFederation, Site, StackedFederation
from tests.helpers import OPEN, make_data

TABLES = make_data(6, sizes=(60, 40), spread=8.0)


@pytest.mark.parametrize("kind", ["tied", "full", "diag"])
def test_statistics_on_a_grid_are_shorter_and_say_the_same(tmp_path: Path, kind: str) -> None:
    model = emfed.gaussian_mixture(2, kind)
    data = dict(zip("ab", TABLES, strict=True))
    here = Session(model, StackedFederation(as_workers(data)), seed=3)
    sites = {key: Site(table, tmp_path / key, rules=OPEN) for key, table in data.items()}
    there = Session(model, RemoteFederation(LocalTransport(sites)), seed=3)
    bound = here.view(WHOLE)
    params = bound.start(1)
    for _ in range(30):
        statistics = here.ask("statistics", WHOLE, params)
        params = bound.maximize(statistics)
    before = [session.ledger.summary()["question"]["down"]["payload"] for session in (here, there)]
    exact = here.ask("values", WHOLE, params)
    middle = here.ledger.summary()["question"]["down"]["payload"]
    told = [session.ask("values", WHOLE, statistics) for session in (here, there)]
    np.testing.assert_allclose(told[0], told[1], rtol=1e-12)
    np.testing.assert_allclose(told[0][:, 0], exact[:, 0], atol=1e-7)
    after = [session.ledger.summary()["question"]["down"]["payload"] for session in (here, there)]
    assert after[0] - middle == after[1] - before[1]
    assert after[0] - middle < 0.8 * (middle - before[0])


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(-(2**14), 2**14), min_size=1, max_size=30), st.booleans())
def test_a_question_is_read_as_it_was_told(whole: list[int], grid: bool) -> None:
    numbers = np.array(whole) / 64
    params = emfed.models.clusters.Centres(numbers[:, None] + 1 / 3)
    question = Question("values", WHOLE, params, statistics=numbers if grid else None)
    kind, view, told = decode_question(encode_question("values", {}, told_parameters(question)))
    assert (kind, view) == ("values", {})
    wanted = numbers if is_grid(told) or grid else flatten_params(params)
    np.testing.assert_array_equal(decode_floats(told, len(numbers)), wanted)
