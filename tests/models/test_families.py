"""A family is one class: what is registered works everywhere, and nothing is silently missing."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from scipy import optimize, stats

import emfed
from emfed.models import FAMILIES, Family, register_family
from tests.cli.shell import Shell
from tests.helpers import OPEN, plain_fit
from tests.models.negative_binomial import NegativeBinomial

DISPERSIONS = (0.2, 2.0)
MEANS = np.array([[3.0, 20.0], [25.0, 4.0]])


def counts(seed: int = 0, n: int = 900) -> tuple[np.ndarray, np.ndarray]:
    """Two columns of two components, of different dispersion, and labels."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(2, size=n)
    sizes = 1 / np.array(DISPERSIONS)
    means = MEANS[labels]
    return rng.negative_binomial(sizes, sizes / (sizes + means)).astype(float), labels


FAMILY = [NegativeBinomial(d) for d in DISPERSIONS]
ROWS, LABELS = counts()
TABLES = {"north": ROWS[:250], "south": ROWS[250:600], "west": ROWS[600:]}


@pytest.fixture(scope="module")
def fitted() -> emfed.Result:
    holes = ROWS.copy()
    holes[np.random.default_rng(1).random(ROWS.shape) < 0.1] = np.nan
    parts = {"north": holes[:250], "south": holes[250:600], "west": holes[600:]}
    return emfed.fit(emfed.mixed_mixture(2, FAMILY), parts, seed=0, errors=True)


def test_columns_of_one_family_with_different_settings_have_each_its_own(
    fitted: emfed.Result,
) -> None:
    assert [group.family for group in fitted.model.columns.groups] == FAMILY
    by = fitted.model.by_column(fitted.params)
    found = np.stack([by["0"]["mean"], by["1"]["mean"]], axis=-1)
    found = found[np.argsort(found[:, 0])]
    np.testing.assert_allclose(found, MEANS, rtol=0.2)
    mine = fitted.params.weights
    for c, d in enumerate(DISPERSIONS):
        mine = mine * stats.nbinom(1 / d, 1 / (1 + d * by[str(c)]["mean"])).pmf(7)
    assert np.exp(fitted.log_likelihood(np.array([[7.0, 7.0]]))) == pytest.approx(mine.sum())


def test_arrays_are_in_the_order_of_the_table_whatever_the_settings() -> None:
    mixed = [FAMILY[0], "gaussian", FAMILY[1], FAMILY[0]]
    rows = np.column_stack([ROWS[:, 0], ROWS[:, 1], ROWS[:, 1], ROWS[:, 0] + 50])
    result = plain_fit(emfed.mixed_mixture(1, mixed, missing=False), [rows], rounds=1)
    np.testing.assert_allclose(result.params.negative_binomial, [rows[:, [0, 2, 3]].mean(axis=0)])


def test_statistics_are_in_the_order_of_model_files_of_the_first_release() -> None:
    exposed, code = emfed.models.Poisson(exposure=4), emfed.models.Categorical(3)
    given = [code, FAMILY[1], "gamma", exposed, "exposure", "poisson", FAMILY[0], code, "gaussian"]
    groups = emfed.mixed_mixture(1, given).columns.groups
    order = [group.columns.tolist() for group in groups]
    assert order == [[8], [5], [3], [2], [0], [7], [1], [6]]


def test_federated_is_pooled(fitted: emfed.Result) -> None:
    model, start = emfed.mixed_mixture(2, FAMILY), fitted.params
    many, one = (
        plain_fit(model, data, emfed.EM(), start=start, rounds=5)
        for data in (TABLES, [np.concatenate(list(TABLES.values()))])
    )
    np.testing.assert_allclose(many.statistics, one.statistics, rtol=1e-9)


def test_a_file_brings_back_family_and_settings(fitted: emfed.Result, tmp_path: Path) -> None:
    fitted.save(tmp_path / "counts.emfed")
    again = emfed.load(tmp_path / "counts.emfed")
    assert again.model.columns.families == fitted.model.columns.families
    assert emfed.models.build_model(fitted.model.describe()).columns.families == tuple(FAMILY)
    np.testing.assert_array_equal(again.score_samples(ROWS), fitted.score_samples(ROWS))


def test_missing_values_are_filled_in_with_counts(fitted: emfed.Result) -> None:
    some = ROWS[:50].copy()
    some[::2, 1] = np.nan
    whole = fitted.impute(some)
    assert np.isfinite(whole).all()
    low, high = fitted.impute_intervals(some, 0.9)
    assert np.all((low <= whole) & (whole <= high))
    drawn = fitted.sample(4000, seed=1)[0]
    assert np.all(drawn == np.round(drawn))
    np.testing.assert_allclose(drawn.mean(axis=0), ROWS.mean(axis=0), rtol=0.15)


def test_standard_errors_and_bounds_are_those_of_a_positive_number(fitted: emfed.Result) -> None:
    table = fitted.summary()
    means = [j for j, name in enumerate(table.names) if name.startswith("mean")]
    assert {table.names[j] for j in means} == {f"mean[{k}, {c}]" for k in (0, 1) for c in (0, 1)}
    assert {table.kinds[j] for j in means} == {"positive"}
    low, high = (end[means] for end in table.bounds)
    estimates = table.estimates[means]
    np.testing.assert_allclose(low * high, estimates**2)
    # n rows whose labels are known would give sqrt(variance / n), and about a tenth is missing
    by_column = np.array([int(table.names[j][-2]) for j in means])
    variance = estimates + np.array(DISPERSIONS)[by_column] * estimates**2
    known = np.sqrt(variance / (0.9 * 450))
    assert np.all((table.errors[means] > 0.9 * known) & (table.errors[means] < 1.5 * known))


def test_moments_are_those_of_draws_for_every_family() -> None:
    u = (np.arange(20_000) + 0.5) / 20_000
    for name, cls in FAMILIES.items():
        params = np.array(cls.examples)
        make: Any = cls
        family = make(params.shape[1]) if cls.nominal else make()
        assert params.shape == (2, family.size)
        assert family.proper(params)
        for theta in params:
            drawn = family.draw(np.tile(theta, (len(u), 1)), np.ones(len(u)), u)
            found = [piece.mean() for piece in family.expand(np, drawn[None], None)]
            np.testing.assert_allclose(family.expected(theta), found, rtol=0.01)
            if not family.nominal:
                assert family.variance(theta) == pytest.approx(drawn.var(), rel=0.01), name
                assert family.mean(theta, np.ones(())) == pytest.approx(drawn.mean(), rel=0.01)
            assert family.allowed(np, drawn).all()


def test_reports_plots_and_titles(fitted: emfed.Result, tmp_path: Path) -> None:
    fitted.plot("components")
    portrait = fitted.model.portrait(fitted.params, ["a", "b"])
    assert portrait.covariances is not None
    fitted.report(tmp_path / "fit.html")
    page = (tmp_path / "fit.html").read_text()
    assert "Negative binomial mixture" in page
    assert "egative_binomial mixture" not in page


def test_states_of_a_chain_emit_it() -> None:
    rng = np.random.default_rng(3)
    stays = [np.repeat(rng.integers(2, size=6), 5) for _ in range(20)]
    sequences = [rng.negative_binomial(5, 5 / (5 + MEANS[0][s]))[:, None] * 1.0 for s in stays]
    data = emfed.data.pad_sequences([sequences[:8], sequences[8:]])
    result = emfed.fit(emfed.hidden_markov(2, FAMILY[0]), data, seed=0)
    np.testing.assert_allclose(np.sort(result.params.negative_binomial[:, 0]), MEANS[0], rtol=0.2)


def test_a_minimiser_of_the_likelihood_finds_the_same_mean() -> None:
    result = plain_fit(emfed.mixed_mixture(1, FAMILY, missing=False), TABLES, rounds=2)
    for column, dispersion in enumerate(DISPERSIONS):

        def loss(mean: float, y: Any = ROWS[:, column], size: float = 1 / dispersion) -> float:
            return -float(stats.nbinom(size, size / (size + mean)).logpmf(y).sum())

        best = optimize.minimize_scalar(loss, (1.0, 20.0))
        assert result.params.negative_binomial[0, column] == pytest.approx(best.x, rel=1e-4)


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
@pytest.mark.parametrize("masks", [True, False])
def test_sites_between_machines_fit_it(masks: bool) -> None:
    """Masked roundings follow from the sites' own keys; others are those of one process."""
    model = emfed.mixed_mixture(2, FAMILY)
    with emfed.network.LocalSites(TABLES, rules=OPEN) as sites:
        here, there = (emfed.fit(model, data, masks=masks) for data in (TABLES, sites))
    found, wanted = (fit.log_likelihood(ROWS) for fit in (there, here))
    assert found == pytest.approx(wanted, abs=1e-4 if masks else 1e-9)


def test_units_of_the_frame_do_not_matter() -> None:
    """Statistics are in units of each column's mean; parameters come back in the user's."""
    result = plain_fit(emfed.mixed_mixture(2, FAMILY), TABLES, rounds=3)
    again = result.model.to_user(result.model.from_user(result.params))
    np.testing.assert_allclose(again.negative_binomial, result.params.negative_binomial)


def test_the_command_line_takes_it_with_its_settings(
    tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    shell = Shell(tmp_path, capsys, monkeypatch)
    lines = ["site,a,b,w", *(f"{j % 3},{a:.0f},{b:.0f},{'xyz'[j % 3]}"
                             for j, (a, b) in enumerate(ROWS[:300]))]  # fmt: skip
    shell.write("counts.csv", "\n".join(lines) + "\n")
    types = "a=negative_binomial:0.2,b=negative_binomial:2,w=categorical"
    code, *_ = shell(
        *("fit", "counts.csv", "--groups", "site", "--n-components", 2, "--types", types),
        *("--out", "m.emfed", "--quiet"),
    )
    assert code == 0
    families = emfed.load(tmp_path / "m.emfed").model.columns.families
    assert families == (*FAMILY, emfed.models.Categorical(3))
    code, _, said = shell("fit", "counts.csv", "--types", "a=negative_binomial:often")
    assert code == 2
    assert "dispersion of negative_binomial is a number; got 'often'" in said
    code, out, _ = shell("fit", "--help")
    told = " ".join(out.split())
    for name in FAMILIES:
        assert name in told
    assert "negative_binomial[:dispersion]" in told


def test_estimators_take_its_name_and_a_description() -> None:
    described = {"family": "negative_binomial", "dispersion": 2.0}
    mixture = emfed.FederatedMixture(2, families=["negative_binomial", described], random_state=0)
    mixture.fit(ROWS[:200])
    families = mixture.result_.model.columns.families
    assert families == (NegativeBinomial(), NegativeBinomial(2.0))


def test_a_class_that_lacks_something_is_not_registered() -> None:
    @dataclass(frozen=True)
    class Half(Family):
        name: ClassVar[str] = "half"

    with pytest.raises(emfed.SettingsError, match=r"Half.*allowed.*variance.*is missing"):
        register_family(Half)  # type: ignore[type-abstract]
    assert "half" not in FAMILIES

    @dataclass(frozen=True)
    class Poisson(NegativeBinomial):  # type: ignore[misc]
        name: ClassVar[str] = "poisson"

    with pytest.raises(emfed.SettingsError, match="another"):
        register_family(Poisson)


def test_the_guide_has_every_family() -> None:
    guide = Path("docs/models.md").read_text()
    for name, cls in FAMILIES.items():
        if cls.__module__.startswith("emfed."):
            row = f"| `{name}` | {cls.support} | {', '.join(cls.parameters)} |"
            assert row in guide, f"docs/models.md lacks the row {row}"
