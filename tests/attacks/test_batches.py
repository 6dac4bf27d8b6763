"""A server that knows which rows are in each mini-batch solves for the rows."""

from __future__ import annotations

from pathlib import Path

import numpy as np

import emfed
from emfed.algorithms.steps import batch_indices
from emfed.network import Site, SiteRules
from tests.attacks.malicious import Server

ROWS = np.random.default_rng(3).normal(size=(60, 2)) * [3.0, 0.2] + [50.0, 7.0]
BATCH, BATCHES = 10, SiteRules(mini_batches=True, unmasked=True)


def recovered(site: Site) -> int:
    """Rows that the server finds, in their order, from batches that follow from its own seed."""
    server = Server({"a": site}, emfed.gaussian_mixture(1, "diag"))
    server.begin(emfed.FedEM(step_size=0.5, memory_rate=0.0, batch_size=BATCH), seed=5)
    here, rounds = server.model.statistics_of(server.model.start(0)), 90
    means, picked = [], np.zeros((rounds, len(ROWS)))
    for k in range(rounds):
        told = server.ask(here)["a"] + here
        means.append(server.model.layout.split(told)["first"][0])
        who, counts = np.zeros(1, dtype=np.int64), np.array([len(ROWS)])
        picked[k, batch_indices(5, server.round, who, counts, BATCH, False)[0][0]] = 1 / BATCH
    frame = server.model.constants.frame
    found = np.linalg.lstsq(picked, np.array(means), rcond=None)[0] * frame.scale + frame.origin
    return int((np.abs(found - ROWS).max(axis=1) < 1e-6).sum())


def test_batches_that_follow_from_the_servers_seed_give_all_rows_away(tmp_path: Path) -> None:
    assert recovered(Site(ROWS, tmp_path, rules=BATCHES, simulated=True)) == len(ROWS)


def test_batches_that_follow_from_the_sites_secret_give_no_row_away(tmp_path: Path) -> None:
    assert recovered(Site(ROWS, tmp_path, rules=BATCHES)) == 0


def test_a_site_draws_the_same_rows_again_after_a_crash_and_others_do_not(tmp_path: Path) -> None:
    def upload(where: Path) -> np.ndarray:
        server = Server({"a": Site(ROWS, where, rules=BATCHES)}, emfed.gaussian_mixture(1, "diag"))
        server.begin(emfed.FedEM(step_size=0.5, memory_rate=0.0, batch_size=BATCH))
        here = server.model.statistics_of(server.model.start(0))
        first = server.ask(here)["a"]
        again = Site(ROWS, where, rules=BATCHES)  # a new process
        server.federation._line.transport.sites["a"] = again
        server.round, server.accepted[:] = 0, -1
        np.testing.assert_array_equal(server.ask(here)["a"], first)
        return first

    one, other = upload(tmp_path / "a"), upload(tmp_path / "b")
    assert not np.array_equal(one, other)
    assert (tmp_path / "a").stat().st_mode & 0o077 == 0
