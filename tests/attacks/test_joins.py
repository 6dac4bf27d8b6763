"""What a site's yes or no tells of its rows, where a run calls itself private."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from emfed.aggregation.privacy import SiteNoise, WithoutNoise
from emfed.core.errors import EmfedError
from emfed.core.noise import NoiseKey
from emfed.core.sums import FloatArray
from emfed.fitting.private import PrivateAsk
from emfed.models.bounded import Asked
from emfed.network.owner_rules import SiteRules
from emfed.network.spending import Allowance
from tests.network.exchanges import NAMES
from tests.network.owners import MIXTURE, Owners, document

RNG = np.random.default_rng(5)
TABLES = {name: RNG.normal(size=(60, 2)) for name in NAMES[:3]}
PRIVATE: dict[str, Any] = {"epsilon": 0.1}


def said(where: Path, rows: FloatArray, rules: SiteRules | None = None, **program: Any) -> str:
    """Why a site with these rows does not follow; empty if it does."""
    owners = Owners(
        where, {**TABLES, "anna": rows}, document(**program), {"anna": rules or SiteRules()}
    )
    try:
        assert owners.terms("anna").accept(owners.federation.settings) is not None
    except EmfedError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("odd", [0.0, np.nan, np.inf, 1e160, -1e300])
def test_no_value_of_a_row_has_a_say_in_a_private_fit(odd: float, tmp_path: Path) -> None:
    """Without noise a no tells whether one value is missing, or too large to be squared."""
    rows = TABLES["anna"].copy()
    rows[7, 1] = odd
    assert bool(said(tmp_path / "plain", rows)) == (not np.isfinite(odd) or abs(odd) > 1e150)
    assert said(tmp_path / "private", rows, **PRIVATE) == ""
    owners = Owners(tmp_path, {**TABLES, "anna": rows}, document(**PRIVATE))
    terms = owners.terms("anna")
    terms.accept(owners.federation.settings)
    edges = PrivateAsk(Asked(0.5**30, 2, np.array([[-1.0, 0.0, 1.0]] * 2)), "opening", 0)
    layer = SiteNoise(terms.rows, NoiseKey(), bytes(32), lambda cost, name: True)
    assert np.isfinite(layer.noisy(edges)).all()


@pytest.mark.parametrize("rows", [1, 9, 10, 60])
def test_nor_has_the_number_of_rows(rows: int, tmp_path: Path) -> None:
    few = TABLES["anna"][:rows]
    assert bool(said(tmp_path / "plain", few)) == (rows < 10)
    assert said(tmp_path / "private", few, **PRIVATE) == ""
    strict = SiteRules(largest_epsilon=1.0, smallest_rows=50)
    assert said(tmp_path / "strict", few, strict, **PRIVATE) == ""


def test_a_private_fit_tells_no_largest_code(tmp_path: Path) -> None:
    """A model of which a yes would tell whether rows suit it is refused, whatever they are."""
    codes = np.column_stack([RNG.normal(size=60), np.arange(60) % 6])
    words = []
    for count in range(4, 9):
        families = {"age": "gaussian", "height": {"family": "categorical", "categories": count}}
        model = {"kind": "mixed-mixture", "n_components": 1, "families": families}
        words.append(said(tmp_path, codes, model=model))
        assert "epsilon goes with" in said(tmp_path, codes, model=model, **PRIVATE)
    assert [bool(one) for one in words] == [True, True, False, False, False]


def test_rows_with_a_missing_value_are_left_out_of_private_sums_one_by_one(tmp_path: Path) -> None:
    gaps = np.vstack([TABLES["anna"], [[np.nan, 1.0]]])
    ask = PrivateAsk(Asked(0.5**30, 2, np.array([[-1.0, 0.0, 1.0]] * 2)), "opening", 0)
    sums: list[FloatArray] = []
    for rows in (TABLES["anna"], gaps):
        owners = Owners(tmp_path, {**TABLES, "anna": rows}, document(**PRIVATE))
        terms = owners.terms("anna")
        terms.accept(owners.federation.settings)
        sums.append(WithoutNoise(ask).part(terms.rows))
    np.testing.assert_array_equal(sums[0], sums[1])


# Noise by name alone.


def settled(where: Path, epsilon: float, rules: SiteRules, runs: int = 1) -> None:
    """Runs that an owner has answered, of this epsilon each; the rows are remembered."""
    for number in range(runs):
        owners = Owners(
            where, TABLES, document(epsilon=epsilon), {"anna": rules}, run=f"before {number}"
        )
        terms = owners.terms("anna")
        terms.accept(owners.federation.settings)
        (charge,) = terms._charged
        assert terms.memory is not None
        assert terms.memory.allowance.charge(charge.run, charge.budget, None)


@pytest.mark.parametrize(
    ("epsilon", "runs", "told"), [(1.0, 1, False), (1e6, 1, True), (6.0, 3, True)]
)
def test_noise_by_name_alone_does_not_hide_a_patient_who_came(
    epsilon: float, runs: int, told: bool, tmp_path: Path
) -> None:
    """Runs that add up to no noise at all are held to the rule on few new rows."""
    settled(tmp_path, epsilon, SiteRules(), runs)
    later = np.vstack([TABLES["anna"], [[3.0, -2.0]]])
    words = said(tmp_path, later, epsilon=epsilon)
    assert ("a few of its rows are others" in words) == told


def test_an_owner_who_said_how_much_epsilon_is_asked_nothing_more(tmp_path: Path) -> None:
    """There the ledger is the bound, and a refusal would tell that a row is new."""
    rules = SiteRules(largest_epsilon=40.0)
    settled(tmp_path, 12.0, rules)
    later = np.vstack([TABLES["anna"], np.ones((1, 2))])
    assert said(tmp_path, later, rules, epsilon=12.0) == ""


def test_runs_that_were_only_proposed_count_against_nobody(tmp_path: Path) -> None:
    """An analyst that asks for a hundred runs spends no owner's budget by asking."""
    rules = SiteRules(largest_epsilon=1.0)
    for _ in range(20):
        assert said(tmp_path, TABLES["anna"], rules, epsilon=0.9) == ""
    assert Allowance(tmp_path / "anna").read()[0] == 0.0


def test_a_private_fit_takes_no_newcomers(tmp_path: Path) -> None:
    """Another set would need noise of another size, and answers about the same rows anew."""
    owners = Owners(tmp_path, TABLES, document(MIXTURE, **PRIVATE))
    about = replace(owners.federation.settings, newcomers=True)
    with pytest.raises(EmfedError, match="without newcomers"):
        owners.terms("anna").accept(about)
