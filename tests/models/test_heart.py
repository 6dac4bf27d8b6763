"""Four hospitals with real missing values of mixed types: what is held out is imputed.

Twice, over random hold-outs. ``singly``: one entry in ten, anywhere. Hospitals differ, so each one
adapts the federated mixture to its own rows (`Result.adapt`); both sides have the same K, prior and
starts. ``compare``: two columns of each hospital as a whole (Switzerland has no cholesterol), and
one entry in twenty of the rest: what a hospital never measured, and the others know.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from tests.helpers import first, plain_fit
from tests.real import HEART, heart_disease

FAMILIES = list(HEART.values())
CATEGORIES = [isinstance(family, emfed.models.Categorical) for family in FAMILIES]
K, PRIOR = 5, 8.0


def column_means(torn: Any) -> Any:
    """Means over all hospitals, of codes the most frequent one."""
    out = torn.copy()
    for c, coded in enumerate(CATEGORIES):
        seen = torn[~np.isnan(torn[:, c]), c]
        value = np.bincount(seen.astype(int)).argmax() if coded else seen.mean()
        out[np.isnan(torn[:, c]), c] = value
    return out


def alone(parts: list[Any], fallback: list[Any]) -> Any:
    """Each hospital imputes with a mixture of its own rows; columns it never saw by the means."""
    out = []
    for part, filled in zip(parts, fallback, strict=True):
        seen = ~np.isnan(part).all(axis=0)
        mine = [family for family, there in zip(FAMILIES, seen, strict=True) if there]
        model = emfed.mixed_mixture(K, mine, prior_rows=PRIOR)
        result = plain_fit(model, [part[:, seen]], rounds=80)
        filled = filled.copy()
        filled[:, seen] = result.impute(part[:, seen])
        out.append(filled)
    return np.concatenate(out)


def together(parts: list[Any], seed: int, site: bool = False) -> Any:
    """One federated mixture, compressed; with ``site`` the hospital's number is a column."""
    families = [*FAMILIES, emfed.models.Categorical(len(parts))] if site else FAMILIES
    numbers = [np.full((len(part), 1), float(h)) for h, part in enumerate(parts)]
    tables = [np.hstack(pair) for pair in zip(parts, numbers, strict=True)] if site else parts
    algorithm = emfed.FedEM(emfed.Dithering(8, block="row"), step_size=0.5)
    model = emfed.mixed_mixture(K, families, prior_rows=PRIOR)
    result = plain_fit(model, tables, algorithm, rounds=120, seed=seed)
    return result.impute(np.concatenate(tables))[:, : len(FAMILIES)]


def held_out(sizes: list[int], rng: Any, whole: int, share: float) -> Any:
    """So many whole columns of each hospital, no column twice, and a share of all entries."""
    width = len(FAMILIES)
    held = rng.random((sum(sizes), width)) < share
    who = np.repeat(np.arange(len(sizes)), sizes)
    columns = rng.permutation(width)
    for hospital in range(len(sizes)):
        for column in columns[whole * hospital : whole * (hospital + 1)]:
            held[who == hospital, column] = True
    return held


def error(rows: Any, filled: Any, held: Any) -> float:
    """Squared errors in units of the variance, wrong codes in units of the most frequent one's."""
    parts = []
    for c, coded in enumerate(CATEGORIES):
        truth, guess = rows[held[:, c], c], filled[held[:, c], c]
        seen = rows[~np.isnan(rows[:, c]), c]
        if coded:
            usual = np.bincount(seen.astype(int)).argmax()
            parts.append((truth != guess) / (seen != usual).mean())
        else:
            parts.append((truth - guess) ** 2 / seen.var())
    return float(np.concatenate(parts).mean())


def compare(
    folder: Path, repeats: int, whole: int = 2, share: float = 0.05, site: bool = False
) -> Any:
    """Errors of the federated mixture, of hospitals alone and of means, ``(repeats, 3)``."""
    hospitals = heart_disease(folder)
    rows = np.concatenate(list(hospitals.values()))
    sizes = [len(part) for part in hospitals.values()]
    cuts = np.cumsum(sizes)[:-1]
    found = []
    for repeat in range(repeats):
        held = held_out(sizes, np.random.default_rng(repeat), whole, share) & ~np.isnan(rows)
        torn = np.where(held, np.nan, rows)
        parts, means = np.split(torn, cuts), column_means(torn)
        guesses = (together(parts, repeat, site), alone(parts, np.split(means, cuts)), means)
        found.append([error(rows, guess, held) for guess in guesses])
    return np.array(found)


def predicted(result: emfed.Result, rows: Any) -> list[Any]:
    """Of each column the means, or the probabilities of codes, of all rows."""
    shares = result.predict_proba(rows)
    columns = result.model.by_column(result.params).values()
    values = (np.asarray(next(iter(column.values()))) for column in columns)
    return [shares @ v.reshape(shares.shape[1], -1) for v in values]


def filled(rows: Any, predictions: list[list[Any]]) -> Any:
    """What was not seen, from the mean of several predictions: means, and the likeliest codes."""
    columns = [np.mean(parts, axis=0) for parts in zip(*predictions, strict=True)]
    guess = [p.argmax(axis=1) if p.shape[1] > 1 else p[:, 0] for p in columns]
    return np.where(np.isnan(rows), np.stack(guess, axis=1), rows)


def singly_alone(parts: list[Any], k: int, starts: int) -> Any:
    """Each hospital by its own mixtures; columns it never saw by the means of all."""
    means = np.split(column_means(np.concatenate(parts)), np.cumsum([len(p) for p in parts])[:-1])
    for part, out in zip(parts, means, strict=True):
        seen = ~np.isnan(part).all(axis=0)
        mine = [family for family, there in zip(FAMILIES, seen, strict=True) if there]
        model = emfed.mixed_mixture(k, mine, prior_rows=5.0)
        fits = [
            plain_fit(model, [part[:, seen]], rounds=300, tol=1e-5, seed=s) for s in range(starts)
        ]
        out[:, seen] = filled(part[:, seen], [predicted(fit, part[:, seen]) for fit in fits])
    return np.concatenate(means)


def singly_together(parts: list[Any], k: int, starts: int, worth: float = 50.0) -> Any:
    """Federated and compressed mixtures, which each hospital adapts to its rows."""
    model = emfed.mixed_mixture(k, FAMILIES, prior_rows=5.0)
    fits = [emfed.fit(model, parts, "auto", tol=1e-5, seed=s) for s in range(starts)]
    adapted = ([fit.adapt(part, worth) for fit in fits] for part in parts)
    pairs = zip(parts, adapted, strict=True)
    return np.concatenate([filled(p, [predicted(fit, p) for fit in mine]) for p, mine in pairs])


def singly(folder: Path, repeats: range, k: int = 8, starts: int = 4) -> Any:
    """Errors ``(repeats, 3)`` on one entry in ten: together, alone, means."""
    hospitals = heart_disease(folder)
    rows = np.concatenate(list(hospitals.values()))
    sizes = [len(part) for part in hospitals.values()]
    found = []
    for repeat in repeats:
        held = held_out(sizes, np.random.default_rng(repeat), 0, 0.1) & ~np.isnan(rows)
        torn = np.where(held, np.nan, rows)
        parts = np.split(torn, np.cumsum(sizes)[:-1])
        guesses = (
            singly_together(parts, k, starts),
            singly_alone(parts, k, starts),
            column_means(torn),
        )
        found.append([error(rows, guess, held) for guess in guesses])
    return np.array(found)


def test_the_table_is_what_it_should_be(data_dir: Path) -> None:
    hospitals = heart_disease(data_dir)
    assert {name: len(rows) for name, rows in hospitals.items()} == {
        "cleveland": 303,
        "hungarian": 294,
        "switzerland": 123,
        "va": 200,
    }
    chol = list(HEART).index("chol")
    assert np.isnan(hospitals["switzerland"][:, chol]).all()


@pytest.mark.parametrize("hold_outs", first([3, 10]))
def test_together_beats_alone_and_means(data_dir: Path, hold_outs: int) -> None:
    together_, alone_, means = compare(data_dir, hold_outs).T
    assert together_.mean() < 0.95 * alone_.mean() < 0.95 * means.mean()
    assert (together_ < alone_).mean() >= 0.9
    assert np.all(together_ < means)


@pytest.mark.long
@pytest.mark.parametrize(("hold_outs", "starts"), first([(3, 1), (3, 3), (10, 3)]))
def test_single_entries_are_imputed_better_together(
    data_dir: Path, hold_outs: int, starts: int
) -> None:
    together_, alone_, means = singly(data_dir, range(10, 10 + hold_outs), starts=starts).T
    assert together_.mean() < alone_.mean()
    assert (together_ < alone_).mean() >= 0.6
    assert np.all(together_ < 0.9 * means)
