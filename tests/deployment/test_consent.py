"""What an owner's rules accept of settings, before the site's program follows a fit."""

from __future__ import annotations

import tracemalloc
from typing import Any

import numpy as np
import polars as pl
import pytest

from emfed.core.errors import EmfedError
from emfed.data import as_workers
from emfed.deployment.consent import OfferedRows, OwnerTerms, choices_in
from emfed.network.exchange.statements import Agreement
from emfed.network.owner_rules import SiteRules

SITES = ("bergen", "oslo", "tromso")
PROGRAM: dict[str, Any] = {
    "model": {"kind": "gaussian-mixture", "n_components": 2},
    "algorithm": {},
    "fit": {},
    "columns": ["age", "height"],
}


def table(rows: int = 40) -> pl.DataFrame:
    return pl.DataFrame(np.random.default_rng(0).normal(size=(rows, 2)), schema=["age", "height"])


def terms(rules: SiteRules, known: Any = SITES, rows: int = 40, **more: Any) -> OwnerTerms:
    return OwnerTerms("oslo", rules, set(known), OfferedRows(as_workers([table(rows)])), **more)


def asked(
    masked: bool = True,
    sites: Any = SITES,
    newcomers: bool = True,
    coded: bool = False,
    **program: Any,
) -> Agreement:
    document, more = {**PROGRAM, **program}, {"newcomers": newcomers, "coded": coded}
    return Agreement(sites, ("analyst",), masked, **more, program=document)


def test_default_rules_accept_a_masked_mixture_in_words() -> None:
    own = terms(SiteRules())
    program = own.accept(asked())
    assert program is not None
    ask = next(program.begin(SITES, b"", bytes(32)))
    assert ask.words() == "the number of rows, means"
    assert ask.part(own.rows)[0] == 40


PRIOR = {"dof": 5.0, "scale": [[1.0, 0.0], [0.0, 1.0]]}


@pytest.mark.parametrize(
    ("settings", "rules", "words"),
    [
        (asked(masked=False), SiteRules(), "masked sums alone"),
        (asked(sites=("bergen", "tromso")), SiteRules(), "alone"),
        (asked(), SiteRules(models=["k-means"]), "allows the models"),
        (asked(), SiteRules(smallest_rows=100), "more rows"),
        (asked(columns=["age"]), SiteRules(), "not listed"),
        (asked(columns=["age", "weight"]), SiteRules(any_columns=True), "weight"),
        (asked(columns=None), SiteRules(), "name no columns"),
        (asked(model={"kind": "no-such"}), SiteRules(), "no-such"),
        (asked(model={**PROGRAM["model"], "covariance_prior": PRIOR}), SiteRules(), "chose 5 numb"),
        (asked(fit={"epsilon": 1.0}), SiteRules(), "without newcomers"),
        (asked(newcomers=False, fit={"epsilon": 1.0}), SiteRules(), "no key of noise"),
        (
            asked(False, newcomers=False, coded=True, fit={"epsilon": 1.0}),
            SiteRules(unmasked=True),
            "not coded",
        ),
        (asked(fit={"epsilon": 1.0, "delta": 1e-4}), SiteRules(), "a delta of 1e-05"),
        (asked(fit={"epsilon": 1.0, "noise_seed": 3}), SiteRules(), "every site draws its noise"),
        (asked(), SiteRules(largest_epsilon=1.0), "private runs alone"),
    ],
)
def test_what_the_rules_refuse(settings: Agreement, rules: SiteRules, words: str) -> None:
    with pytest.raises(EmfedError, match=words):
        terms(rules).accept(settings)


def test_a_stranger_among_the_sites_is_named() -> None:
    with pytest.raises(EmfedError, match=r"tromso take part, and the roster"):
        terms(SiteRules(), known=("bergen", "oslo")).accept(asked())


def test_owners_may_allow_numbers_and_sums_without_masks() -> None:
    prior = asked(False, model={**PROGRAM["model"], "covariance_prior": PRIOR})
    assert terms(SiteRules(unmasked=True, largest_choices=5)).accept(prior) is not None


def test_settings_wait_for_a_person() -> None:
    answer: list[bool | None] = [None]

    def approve(content: Any) -> bool | None:
        assert content["columns"] == ["age", "height"]
        return answer[0]

    own = terms(SiteRules(), approve=approve)
    assert own.accept(asked()) is None
    answer[0] = False
    with pytest.raises(EmfedError, match="does not take part"):
        own.accept(asked())
    answer[0] = True
    assert own.accept(asked()) is not None


def test_words_are_no_choices() -> None:
    families = {"age": "gaussian", "ward": {"family": "categorical", "categories": 3}}
    assert choices_in({"model": {"families": families, "n_components": [2, 3]}, "fit": {}}) == 0
    assert choices_in({"model": {"known_covariance": [[1.0, 0.0], [0.0, 1.0]]}, "fit": {}}) == 4


def test_a_commitment_follows_from_salt_columns_and_every_value() -> None:
    rows = table()
    values = rows.to_numpy().copy()
    values[-1, 0] += 1e-12
    other = pl.DataFrame(values, schema=rows.columns)
    tables = [rows, other, rows.rename({"age": "a"})]
    found = {OfferedRows(as_workers([one])).commitment(b"salt") for one in tables}
    found.add(OfferedRows(as_workers([rows])).commitment(b"another"))
    assert len(found) == 4
    again = OfferedRows(as_workers([table()])).commitment(b"salt")
    assert again in found


LARGE: dict[str, dict[str, Any]] = {
    "times": {"kind": "site-owner", "times": 400_000_000, "rank": 2},
    "components": {"kind": "gaussian-mixture", "n_components": 10_000_000},
    "categories": {
        "kind": "mixed-mixture",
        "n_components": 2,
        "families": ["categorical:400000000", "gaussian"],
    },
    "clusters": {"kind": "k-means", "n_components": 1 << 40},
    "states": {"kind": "hidden-markov", "n_components": 20_000_000, "families": "gaussian"},
    "candidates": {"kind": "gaussian-mixture", "n_components": [2, 9_000_000]},
}


@pytest.mark.parametrize("model", LARGE.values(), ids=LARGE)
def test_a_large_model_is_refused_before_any_memory_is_taken(model: dict[str, Any]) -> None:
    """In release 0.1 settings of 214 bytes made a site allocate 6.2 GB."""
    own, settings = terms(SiteRules()), asked(model=model)
    tracemalloc.start()
    with pytest.raises(EmfedError, match=r"and the owner allows 4.2e\+06"):
        own.accept(settings)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 3_000_000


def test_what_the_rows_can_support_is_not_too_large() -> None:
    """Without masks, where the number of rows is told anyway."""
    settings = asked(False, model={"kind": "k-means", "n_components": 4_000_000})
    rules = SiteRules(unmasked=True, spare_rows=None)
    with pytest.raises(EmfedError, match="smaller model"):
        terms(rules).accept(settings)
    assert terms(rules, rows=300_000).accept(settings) is not None
    with pytest.raises(EmfedError, match="the owner allows 3 "):
        terms(SiteRules(largest_model=3)).accept(asked())
