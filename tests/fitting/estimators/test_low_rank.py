"""`FederatedImputer(rank=...)`: low-rank imputation by the owners of rows."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import polars as pl
import pytest
from sklearn.base import clone
from sklearn.impute import SimpleImputer
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline

import emfed
from emfed import FederatedImputer


class Table:
    """A table of low rank, with noise and holes, in columns of very different units.

    Workers differ in where their rows lie and how far they scatter.
    """

    def __init__(
        self, rows: int, seed: int = 0, *, rank: int = 2, columns: int = 30, workers: int = 6
    ) -> None:
        rng = np.random.default_rng(seed)
        self.groups = np.sort(rng.integers(0, workers, rows))
        centre, spread = rng.normal(size=(workers, rank)), rng.uniform(0.5, 1.5, workers)
        factors = rng.normal(size=(rows, rank)) * spread[self.groups, None] + centre[self.groups]
        signal = factors @ rng.normal(size=(rank, columns))
        signal = signal / signal.std(axis=0)
        self.units = 10.0 ** rng.uniform(-3, 3, columns)
        noisy = signal + 0.3 * rng.normal(size=signal.shape)
        self.whole = (noisy + 5 * rng.normal(size=columns)) * self.units
        self.holes = rng.random(signal.shape) < 0.3
        self.given = np.where(self.holes, np.nan, self.whole)

    def error(self, filled: Any) -> float:
        """Root mean square over the holes, in standard deviations of the signal."""
        away = (np.asarray(filled) - self.whole) / self.units
        return float(np.sqrt(np.mean(away[self.holes] ** 2)))


@pytest.mark.filterwarnings("ignore::sklearn.exceptions.ConvergenceWarning")
def test_with_as_many_rows_as_columns_low_rank_beats_means_and_the_gaussian() -> None:
    for seed in range(1):
        table = Table(40, seed)
        low = FederatedImputer(rank=2).fit(table.given, groups=table.groups)
        assert low.converged_
        error = table.error(low.transform(table.given))
        assert error < 0.45  # of which 0.3 is the noise of the values themselves
        assert error < 0.4 * table.error(SimpleImputer().fit_transform(table.given))
        for rounds in (10, 60):  # at its best, and where it leads
            gaussian = FederatedImputer(max_iter=rounds).fit(table.given)
            assert error < 0.85 * table.error(gaussian.transform(table.given))


@pytest.mark.long
def test_a_federation_ends_where_one_worker_ends() -> None:
    """Filled values differ by less than a fiftieth of a standard deviation; few bytes."""
    table = Table(250, 3, rank=3)
    pooled = FederatedImputer(rank=3, tol=1e-7).fit(table.given)
    # Long steps are judged by what EM raises, the penalty included.
    assert pooled.n_rounds_ < 100
    reference, scale = pooled.transform(table.given), table.units
    assert table.error(reference) < 0.36
    assert table.error(reference) < 0.4 * table.error(SimpleImputer().fit_transform(table.given))
    bytes_ = {}
    limits = {"auto": (1e-6, 5e-3), "em": (1e-6, 5e-3), "FedEM": (1e-3, 2e-2)}
    for algorithm, (tol, within) in (limits | {"VR-FedEM": (1e-3, 2e-2)}).items():
        imputer = FederatedImputer(rank=3, tol=tol, algorithm=algorithm)
        filled = imputer.fit(table.given, groups=table.groups).transform(table.given)
        assert imputer.converged_
        assert np.abs((filled - reference) / scale).max() < within
        assert table.error(filled) == pytest.approx(table.error(reference), rel=1e-3)
        assert imputer.lower_bound_ == pytest.approx(pooled.lower_bound_, abs=1e-3)
        bytes_[algorithm] = imputer.bytes_
    assert bytes_["auto"] < 0.5 * bytes_["em"]


def test_every_byte_is_counted() -> None:
    """Standardising costs two opening messages each way: 3 numbers a column, and a few."""
    table = Table(100, 1)
    imputer = FederatedImputer(rank=2).fit(table.given, groups=table.groups)
    ledger = imputer.result_.ledger
    workers = len(np.unique(table.groups))
    opening = ledger.summary()["opening"]
    assert opening["up"]["messages"] == 2 * workers
    assert opening["up"]["payload"] >= workers * 8 * (3 * 30 + 1)
    assert imputer.bytes_ == ledger.total("up") + ledger.total("down")
    told = [sum(getattr(r, f"bytes_{way}") for r in imputer.records_) for way in ("up", "down")]
    assert 0 < sum(told) <= imputer.bytes_
    assert imputer.n_rounds_ == imputer.n_iter_ == imputer.records_[-1].round > 5
    assert imputer.result_.rounds == imputer.n_rounds_
    coarse = FederatedImputer(rank=2, tol=1e-2).fit(table.given, groups=table.groups)
    assert coarse.bytes_ < imputer.bytes_


def by_hand(imputer: Any, rows: Any) -> Any:
    """Row by row: the ridge regression of what was seen on the loadings, in the user's units."""
    params = imputer.result_.params
    loadings, means, noise = params.loadings[0], params.means[0], params.noise[0]
    out = rows.copy()
    for row in out:
        seen = ~np.isnan(row)
        design = loadings[seen] / np.sqrt(noise[seen, None])
        target = (row[seen] - means[seen]) / np.sqrt(noise[seen])
        system = design.T @ design + np.eye(loadings.shape[1])
        factors = np.linalg.solve(system, design.T @ target)
        row[~seen] = (means + loadings @ factors)[~seen]
    return out


def test_transform_solves_a_ridge_regression_for_each_row() -> None:
    """For rows of the fit, new rows, and patterns that the fit never saw; what was seen stays."""
    table, other = Table(120, 2), Table(50, 2, workers=2)
    imputer = FederatedImputer(rank=2).fit(table.given, groups=table.groups)
    new = np.concatenate(
        [table.given, other.given, np.where(np.eye(30) > 0, other.whole[:30], np.nan)]
    )
    filled = imputer.transform(new)
    np.testing.assert_allclose(
        filled / table.units.max(), by_hand(imputer, new) / table.units.max(), rtol=1e-7, atol=1e-12
    )
    np.testing.assert_array_equal(filled[~np.isnan(new)], new[~np.isnan(new)])
    np.testing.assert_array_equal(filled[::7], imputer.transform(new[::7]))
    np.testing.assert_array_equal(imputer.transform(table.whole), table.whole)


def test_a_row_without_values_gets_the_means_of_the_columns() -> None:
    table = Table(150, 4)
    rows = table.given.copy()
    rows[10] = np.nan
    imputer = FederatedImputer(rank=2).fit(rows, groups=table.groups)
    means = imputer.result_.params.means[0]
    np.testing.assert_allclose(imputer.transform(rows)[10], means, rtol=1e-12)
    assert np.abs((means - np.nanmean(rows, axis=0)) / table.units).max() < 0.2
    without = FederatedImputer(rank=2).fit(
        np.delete(rows, 10, axis=0), groups=np.delete(table.groups, 10)
    )
    gap = (without.transform(table.given) - imputer.transform(table.given)) / table.units
    assert np.abs(gap).max() < 0.02  # such a row says nothing


def test_numpy_pandas_and_polars_give_the_same_answer() -> None:
    table = Table(80, 5, columns=6)
    names = [f"c{j}" for j in range(6)]
    imputer = FederatedImputer(rank=2)
    plain = imputer.fit(table.given, groups=table.groups).transform(table.given)
    frames = (
        pd.DataFrame(table.given, columns=names).assign(site=table.groups),
        pl.DataFrame(table.given, schema=names).with_columns(site=pl.Series(table.groups)),
    )
    for frame in frames:
        again = clone(imputer).fit(frame, groups="site")
        np.testing.assert_array_equal(again.transform(frame), plain)
        assert list(again.get_feature_names_out()) == names
        rounds = [e.result_.ledger.summary()["round"] for e in (again, imputer)]
        assert rounds[0] == rounds[1]  # names of columns travel in the opening
        for kind in ("pandas", "polars"):
            shown = again.set_output(transform=kind).transform(frame)
            assert list(shown.columns) == names
            np.testing.assert_array_equal(shown.to_numpy(), plain)
    tables = {str(g): table.given[table.groups == g] for g in np.unique(table.groups)}
    np.testing.assert_array_equal(clone(imputer).fit(tables).transform(table.given), plain)


def test_in_a_pipeline() -> None:
    table = Table(200, 6, columns=10)
    target = table.whole[:, 0] / table.units[0]
    pipeline = make_pipeline(FederatedImputer(rank=2, random_state=1), Ridge())
    pipeline.fit(table.given[:, 1:] / table.units[1:], target)
    mean = make_pipeline(SimpleImputer(), Ridge()).fit(table.given[:, 1:] / table.units[1:], target)
    held = Table(200, 6, columns=10)
    rows = held.given[:, 1:] / held.units[1:]
    assert pipeline.score(rows, target) > mean.score(rows, target)
    assert pipeline.get_params()["federatedimputer__rank"] == 2


def test_a_weight_is_how_often_a_row_counts() -> None:
    table = Table(60, 7, columns=8)
    times = np.random.default_rng(0).integers(0, 4, 60)
    times[table.groups == 0] = 2
    options: dict[str, Any] = {"rank": 2, "algorithm": "em", "tol": 1e-8, "penalty": 5.0}
    weighted = FederatedImputer(**options)
    weighted.fit(table.given, groups=table.groups, sample_weight=times)
    repeated = FederatedImputer(**options)
    repeated.fit(np.repeat(table.given, times, axis=0), groups=np.repeat(table.groups, times))
    a, b = (i.transform(table.given) / table.units for i in (weighted, repeated))
    np.testing.assert_allclose(a, b, atol=1e-6)
    assert weighted.result_.samples == times.sum()
    plain = FederatedImputer(**options).fit(table.given, groups=table.groups)
    assert np.abs(plain.transform(table.given) / table.units - a).max() > 1e-2


def test_ranks_are_compared_in_the_same_rounds() -> None:
    table = Table(300, 8, rank=3, columns=12)
    chosen = FederatedImputer(rank="1:5").fit(table.given, groups=table.groups)
    assert chosen.rank_ == chosen.result_.model.rank == 3
    assert chosen.n_components_ == 1
    assert [row["n_components"] for row in chosen.selection_.table] == [1, 2, 3, 4, 5]
    alone = FederatedImputer(rank=3).fit(table.given, groups=table.groups)
    assert alone.rank_ == 3
    assert table.error(chosen.transform(table.given)) < 1.01 * table.error(
        alone.transform(table.given)
    )
    assert FederatedImputer().fit(table.given).rank_ is None


def test_warm_starts_several_starts_and_batches() -> None:
    table = Table(300, 9, columns=12)
    imputer = FederatedImputer(rank=2, warm_start=True).fit(table.given, groups=table.groups)
    first, filled = imputer.n_rounds_, imputer.transform(table.given)
    imputer.fit(table.given, groups=table.groups)
    assert imputer.n_rounds_ < 0.6 * first
    assert np.abs((imputer.transform(table.given) - filled) / table.units).max() < 0.02
    several = FederatedImputer(rank=2, n_init=3, random_state=5)
    several.fit(table.given, groups=table.groups)
    assert table.error(several.transform(table.given)) == pytest.approx(
        table.error(filled), rel=2e-3
    )
    online = FederatedImputer(rank=2)
    for start in range(0, 300, 50):
        online.partial_fit(table.given[start : start + 50])
    assert table.error(online.transform(table.given)) < 1.2 * table.error(filled)


def test_a_larger_penalty_shrinks_towards_the_means() -> None:
    table = Table(60, 10, columns=12)
    sizes = [
        np.abs(FederatedImputer(rank=2, penalty=p).fit(table.given).result_.params.loadings[0])
        for p in (0.0, 1.0, 100.0)
    ]
    totals = [float((size / table.units[:, None]).sum()) for size in sizes]
    assert totals[0] > totals[1] > 2 * totals[2]


def test_intervals_draws_and_model_files(tmp_path: Path) -> None:
    table = Table(300, 11)
    result = FederatedImputer(rank=2).fit(table.given, groups=table.groups).result_
    low, high = result.impute_intervals(table.given, 0.9)
    inside = ((low <= table.whole) & (table.whole <= high))[table.holes]
    assert 0.87 < inside.mean() < 0.93
    np.testing.assert_array_equal(low[~table.holes], table.whole[~table.holes])
    draws = result.impute_draws(table.given, 200, seed=3)
    np.testing.assert_array_equal(draws[:, ~table.holes], draws[:1, ~table.holes].repeat(200, 0))
    scale = np.broadcast_to(table.units, table.holes.shape)[table.holes]
    away = (draws.mean(axis=0) - result.impute(table.given))[table.holes] / scale
    assert np.abs(away).max() < 0.2
    half = (high - low)[table.holes] / 2 / 1.6449
    np.testing.assert_allclose(draws.std(axis=0)[table.holes] / half, 1, atol=0.3)
    result.save(tmp_path / "low.emfed")
    loaded = emfed.load(tmp_path / "low.emfed")
    np.testing.assert_array_equal(loaded.impute(table.given), result.impute(table.given))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"n_components": 2}, "n_components=2 does not go with rank=2"),
        ({"n_components": "1:3"}, "n_components='1:3' does not go with rank"),
        ({"covariance_type": "diag"}, "covariance_type='diag' does not go with rank"),
        ({"families": "gaussian"}, "families='gaussian' does not go with rank"),
        ({"start": "k-means"}, "start='k-means' does not go with rank"),
        ({"penalty": -1.0}, "penalty"),
        ({"penalty": np.nan}, "penalty"),
        ({"rank": None, "penalty": 2.0}, "give a rank too"),
        ({"rank": 0}, "rank"),
        ({"rank": 1.5}, "rank"),
        ({"rank": []}, "rank must hold a number"),
        ({"rank": "many"}, "rank must be"),
        ({"tol": 0.0}, "tol"),
        ({"algorithm": "sgd"}, "algorithm must be"),
        ({"covariance_floor": 2.0}, "covariance_floor"),
    ],
)
def test_what_does_not_apply_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(emfed.SettingsError, match=words):
        FederatedImputer(**({"rank": 2} | options)).fit(Table(20, columns=5).given)


def test_tables_that_cannot_be_used() -> None:
    table = Table(20, columns=5)
    frame = pd.DataFrame(table.given, columns=list("abcde"))
    with pytest.raises(
        emfed.DataError, match=r"rank=6 .* n_samples=20 .* n_features=5 .* at most 5"
    ):
        FederatedImputer(rank=6).fit(frame)
    with pytest.raises(emfed.DataError, match="rank=4 .* at most 3"):
        FederatedImputer(rank=4).fit(table.given[:3])
    with pytest.raises(emfed.DataError, match="single value in column 'c'"):
        FederatedImputer(rank=2).fit(frame.assign(c=np.nan), groups=table.groups)
    for imputer in (FederatedImputer(rank=2), FederatedImputer()):
        with pytest.raises(emfed.DataError, match="single value in column 2"):
            imputer.fit(frame.assign(c=np.nan).to_numpy())
    with pytest.raises(ValueError, match="infinity"):
        FederatedImputer(rank=2).fit(frame.replace(frame.iloc[0, 0], np.inf).fillna(np.inf))
    fitted = FederatedImputer(rank=2).fit(frame)
    with pytest.raises(ValueError, match="infinity"):
        fitted.transform(frame.fillna(np.inf))
    with pytest.raises(ValueError, match="feature"):
        fitted.transform(frame[list("abcd")])
    with pytest.raises(emfed.DataError, match="1e140"):
        FederatedImputer(rank=2).fit(np.where(table.holes, 1e200, table.whole))


@pytest.mark.filterwarnings("ignore:column 3 .* one single value:emfed.EmfedWarning")
def test_constant_columns_and_single_ones() -> None:
    table = Table(60, 12, columns=5)
    for value, groups in ((7.5, None), (7.5, table.groups), (1e-9, None), (1e-9, table.groups)):
        rows = table.given.copy()
        rows[:, 3] = np.where(table.holes[:, 3], np.nan, value)
        imputer = FederatedImputer(rank=2).fit(rows, groups=groups)
        filled = imputer.transform(rows)
        np.testing.assert_allclose(filled[:, 3], value, rtol=1e-12)
        assert np.isfinite(filled).all()
        rows[:, 3] = 2 * value  # a column that said nothing in the fit says nothing later
        np.testing.assert_allclose(imputer.transform(rows)[:, :3], filled[:, :3], rtol=1e-6)
    one = rows[:, :1]
    single = FederatedImputer(rank=1).fit(one).transform(one)
    np.testing.assert_allclose(single[np.isnan(one)], np.nanmean(one), rtol=1e-3)
    full = FederatedImputer(rank=5).fit(table.given, groups=table.groups)
    assert np.isfinite(full.transform(table.given)).all()


@pytest.mark.long
def test_a_table_of_exactly_this_rank_is_found() -> None:
    """Without noise the fit ends at its floor, and holes are filled to a part in a thousand."""
    rng = np.random.default_rng(0)
    whole = rng.normal(size=(80, 2)) @ rng.normal(size=(2, 8)) + 3
    given = np.where(rng.random(whole.shape) < 0.2, np.nan, whole)
    imputer = FederatedImputer(rank=2, penalty=0.0, max_iter=3000, tol=1e-6)
    filled = imputer.fit(given).transform(given)
    assert np.abs(filled - whole).max() < 5e-3
