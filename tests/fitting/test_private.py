"""Private fits in one process: how close they come, and what they refuse."""

from __future__ import annotations

import html
import json
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.artifacts.model_card import card_markdown
from emfed.core.errors import DataError, SettingsError
from emfed.fitting.private import PrivateFit


def rows(count: int = 9000) -> np.ndarray:
    rng = np.random.Generator(np.random.Philox(1))
    centres = ([0, 0, 1000], [6, 3, 1002], [-5, 8, 998])
    parts = [rng.normal(size=(count // 3, 3)) * [1, 2, 0.5] + c for c in centres]
    return rng.permutation(np.concatenate(parts))


@pytest.mark.parametrize("kind", ["full", "tied", "diag"])
def test_a_private_fit_of_clear_clusters_costs_a_hundredth_of_a_nat(kind: str) -> None:
    data = rows()
    made = emfed.FederatedGaussianMixture(3, covariance_type=kind, epsilon=1, noise_seed=0)
    private = made.fit(data)
    exact = emfed.FederatedGaussianMixture(3, covariance_type=kind).fit(data)
    assert exact.score(data) - 0.02 < private.score(data) <= exact.score(data) + 1e-6


@pytest.mark.parametrize(("most", "tried"), [(3, 8), (12, 2)])
def test_where_a_sketch_has_few_components_rows_choose_among_more_starts(
    most: int, tried: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such a sketch is a bad judge of the fits to it."""
    compared, inner = [], PrivateFit._compare
    monkeypatch.setattr(PrivateFit, "_most_components", lambda self: most)
    monkeypatch.setattr("emfed.fitting.private.SKETCH_ROWS", 300)

    def counted(self: PrivateFit, starts: Any) -> Any:
        compared.append(len(starts))
        return inner(self, starts)

    monkeypatch.setattr(PrivateFit, "_compare", counted)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", emfed.EmfedWarning)  # it says that it is not certain
        emfed.fit(emfed.gaussian_mixture(3, "tied"), rows(3000), epsilon=3, noise_seed=0)
    assert compared == [tried]


def test_masked_sites_need_less_noise_than_two_who_hide_alone() -> None:
    data = rows()
    told = [
        emfed.fit(emfed.gaussian_mixture(3), np.array_split(data, n), epsilon=1).privacy
        for n in (2, 4)
    ]
    assert [promise["shares"] for promise in told] == [1, 3]
    assert [promise["epsilon"] for promise in told] == pytest.approx([1.0, 1.0])


def test_too_few_rows_for_an_epsilon_are_told_before_the_rounds() -> None:
    with pytest.raises(DataError, match="too few rows for this epsilon"):
        emfed.FederatedGaussianMixture(3, epsilon=0.1).fit(rows(150))


def test_the_rows_that_an_epsilon_needs_are_more_than_there_are() -> None:
    """Columns without a peak need more rows than a rule of thumb says."""
    spread = np.random.default_rng(0).uniform(-8, 8, (3000, 2))
    with pytest.raises(DataError) as told:
        emfed.FederatedGaussianMixture(3, epsilon=0.3).fit(spread)
    there, needed = re.search(r"about (\d+), .* needs about (\d+)", str(told.value)).groups()
    assert int(needed) > int(there)


@pytest.mark.parametrize(
    ("options", "word"),
    [
        ({"n_components": "2:4", "criterion": "aic"}, "by BIC"),
        ({"start": "merge"}, "start"),
        ({"algorithm": "FedEM"}, "algorithm"),
        ({"delta": 2.0}, "delta"),
    ],
)
def test_what_a_private_fit_has_no_answer_to_is_refused(options: dict, word: str) -> None:
    settings = {"n_components": 3, "epsilon": 1.0, **options}
    with pytest.raises(SettingsError, match=word):
        emfed.FederatedGaussianMixture(**settings).fit(rows(300))


def test_a_private_fit_chooses_the_number_of_components_within_its_budget(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("emfed.fitting.private.SKETCH_ROWS", 3000)
    mixture = emfed.FederatedGaussianMixture("1:4", epsilon=1, noise_seed=0).fit(rows())
    assert mixture.n_components_ == 3
    gains = {row["n_components"]: row["gain"] for row in mixture.selection_.table}
    assert gains[3] > gains[2] + 0.1 > gains[1] + 0.2
    mixture.result_.report(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "gain over one Gaussian" in page
    assert "smallest BIC" not in page


def test_models_whose_rows_have_no_bounded_say_are_refused() -> None:
    with pytest.raises(SettingsError, match="epsilon goes with Gaussian mixtures"):
        emfed.fit(emfed.factor_analysis(1, 2), rows(300), epsilon=1.0)


@pytest.mark.parametrize("make", [emfed.factor_analysis, emfed.ppca])
def test_factors_of_private_moments_are_those_of_the_rows(make: Callable[..., Any]) -> None:
    rng = np.random.Generator(np.random.Philox(5))
    data = rng.normal(size=(9000, 2)) @ rng.normal(size=(2, 5)) + rng.normal(size=(9000, 5)) + 70
    private = emfed.fit(make(2), np.array_split(data, 3), epsilon=1.0, noise_seed=0)
    gap = emfed.fit(make(2), data).log_likelihood(data) - private.log_likelihood(data)
    assert -1e-6 < gap < 0.02
    assert private.ledger.total("up") > 0


SEEDED = "not private: its noise follows from noise_seed 7"


def test_noise_with_a_seed_is_repeated_and_called_not_private_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    options: dict[str, Any] = {"epsilon": 3, "noise_seed": 7, "verbose": True}
    one, same = (emfed.FederatedGaussianMixture(3, **options).fit(rows(3000)) for _ in range(2))
    np.testing.assert_array_equal(one.means_, same.means_)
    last = capsys.readouterr().err.splitlines()[-1]
    result = one.result_
    one.save(tmp_path / "model.emfed")
    again = emfed.load(tmp_path / "model.emfed")
    again.report(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    places = {
        "last line": last,
        "repr": repr(result),
        "promise": json.dumps(result.privacy),
        "card": json.dumps(result.card),
        "card as text": card_markdown(again.card),
        "file": (tmp_path / "model.emfed").read_bytes().decode("latin-1"),
        "file, read": repr(again),
        "report": html.unescape(page),
    }
    for name, told in places.items():
        assert SEEDED in told, name
        assert "epsilon" not in told, name
    assert result.privacy["private"] is False
    assert "private: epsilon" not in page


def test_a_seed_of_noise_that_has_no_noise_is_refused() -> None:
    with pytest.raises(SettingsError, match="leave noise_seed out, or give epsilon"):
        emfed.fit(emfed.gaussian_mixture(2), rows(300), noise_seed=1)
    for wrong in (-1, 2**64, 0.5, True):
        with pytest.raises(SettingsError, match="noise_seed must be"):
            emfed.fit(emfed.gaussian_mixture(2), rows(300), epsilon=1.0, noise_seed=wrong)


def test_what_has_seen_rows_without_noise_is_private_no_more() -> None:
    data = rows(3000)
    private = emfed.fit(emfed.gaussian_mixture(3, "diag"), data, epsilon=3.0)
    assert private.privacy["private"] is True
    assert private.privacy["noise"] == "a key of the operating system"
    for later, why in (
        (private.adapt(data[:40]), "not private: it was adapted to rows without noise"),
        (private.with_errors(data), "not private: its standard errors are those of the rows"),
    ):
        assert why in repr(later)
        assert "epsilon" not in json.dumps(later.card)
    seeded = emfed.fit(emfed.gaussian_mixture(3, "diag"), data, epsilon=3.0, noise_seed=7)
    assert SEEDED in repr(seeded.adapt(data[:40]))
    assert emfed.fit(emfed.gaussian_mixture(1), data).adapt(data[:40]).privacy is None
