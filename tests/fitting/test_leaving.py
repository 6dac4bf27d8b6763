"""Workers that leave and come back: the answer is that of the rows of those who are here."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.protocols import FloatArray
from emfed.fitting.driver import run_fit
from emfed.fitting.session import LOSSES, Attendance
from emfed.fitting.settings import FitSettings
from emfed.network import LocalTransport, Site, Transport
from tests.helpers import BARE, first
from tests.network.processes import real_sites

RNG = np.random.default_rng(5)
TABLES = {
    name: RNG.normal(RNG.choice([-4.0, 4.0], (size, 1)) + shift, 1, (size, 2))
    for name, size, shift in (("a", 150, 0.0), ("b", 100, 1.0), ("c", 200, -1.0))
}
NAMES = list(TABLES)
FOLLOWING: dict[str, Any] = {"seed": 3, "rounds": 300}


def told(params: Any) -> FloatArray:
    """Weights and means, components in order, and all that is told of spreads."""
    order = np.argsort(params.means[:, 0])
    parts = (params.weights[order], params.means[order], np.sort(params.covariances, axis=None))
    return np.concatenate([np.ravel(part) for part in parts])


def pooled(kind: str, names: list[str], k: int = 2) -> FloatArray:
    """EM on the rows of these alone."""
    rows = {name: TABLES[name] for name in names}
    return told(emfed.fit(emfed.gaussian_mixture(k, kind), rows, "em", tol=1e-12).params)


def before(model: Any, network: Any, algorithm: Any = None, **settings: Any) -> emfed.Result:
    """The message loop, which sites elsewhere are still driven by."""
    given = FitSettings.read(model, algorithm, **settings)
    return run_fit(given, network).result


def simulated(away: Mapping[int, tuple[int, int | None]]) -> emfed.network.FaultyFederation:
    inner = emfed.network.StackedFederation(emfed.data.as_workers(TABLES))
    return emfed.network.FaultyFederation(inner, emfed.network.FaultPlan(away=away))


class Leaving(Transport):
    """The network of the same plan: whoever is away at a delivery gets and says nothing."""

    def __init__(self, where: Path, away: Mapping[int, tuple[int, int | None]]) -> None:
        self._inner = LocalTransport({n: Site(t, where / n, rules=BARE) for n, t in TABLES.items()})
        self._away, self.deliveries = away, 0

    def workers(self) -> list[str]:
        return NAMES

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        self.deliveries += 1
        now = self.deliveries - 1  # the opening is no exchange of the plan
        spans = {NAMES[n]: span for n, span in self._away.items()}
        out = {k for k, (first, last) in spans.items() if first <= now < (last or 1 << 40)}
        yield from self._inner.deliver({k: m for k, m in messages.items() if k not in out}, 1.0)


def remote(
    where: Path, away: Mapping[int, tuple[int, int | None]]
) -> emfed.network.RemoteFederation:
    return emfed.network.RemoteFederation(Leaving(where, away), attempts=2, pause=0)


@pytest.mark.parametrize("kind", ["full", "tied", "diag"])
@pytest.mark.parametrize("algorithm", ["auto", "FedEM", "em"])
def test_who_leaves_at_any_time_leaves_nothing_behind(algorithm: str, kind: str) -> None:
    """In the search for a start or in the rounds; tied covariances need the others' constants."""
    times = np.random.default_rng([7, len(algorithm), len(kind)]).integers(1, 30, 2)
    right = {names: pooled(kind, list(names)) for names in ("abc", "ac")}
    for time in times.tolist():
        result = before(
            emfed.gaussian_mixture(2, kind), simulated({1: (time, None)}), algorithm, **FOLLOWING
        )
        counted = "".join(n for n, w in zip(NAMES, result.worker_weights, strict=True) if w)
        assert result.converged
        assert counted == "ac" or result.rounds < time  # or it left when all was done
        np.testing.assert_allclose(told(result.params), right[counted], atol=2e-4)


@pytest.mark.long
def test_one_of_several_starts_that_compete_may_leave_and_one_of_several_candidates() -> None:
    """A range of components, three starts, partial participation: whatever rounds are made for."""
    model, left = emfed.gaussian_mixture(2, "full"), 0
    for options in (
        {"n_init": 3},
        {"n_components": (1, 2, 3)},
        {"participation": 0.7, "rounds": 600},
    ):
        for time in (3, 12, 25):
            result = before(model, simulated({2: (time, None)}), **{**FOLLOWING, **options})
            here = [n for n, w in zip(NAMES, result.worker_weights, strict=True) if w]
            left += here == ["a", "b"]
            right = pooled("full", here)
            np.testing.assert_allclose(told(result.params), right, atol=2e-3, err_msg=str(options))
    assert left >= 7  # or it left when all was done


def test_who_comes_back_counts_again() -> None:
    result = before(
        emfed.gaussian_mixture(2, "tied"), simulated({1: (9, 30)}), tol=0, rounds=120, seed=3
    )
    assert result.worker_weights.all()
    asked = [record.asked for record in result.records[1:]]
    assert {2, 3} <= {*asked[:60]}
    assert set(asked[-30:]) == {3}
    np.testing.assert_allclose(told(result.params), pooled("tied", NAMES), atol=1e-5)


def test_a_network_and_its_simulation_agree_on_who_is_here_and_on_every_byte(
    tmp_path: Path,
) -> None:
    """Same trajectory, same phases, same constants told anew; EM counts each exchange once."""
    for number, away in enumerate(({1: (12, None)}, {0: (10, 26), 2: (45, None)})):
        options: dict[str, Any] = {"tol": 0, "rounds": 60, "seed": 3, "start": "moments"}
        algorithm = emfed.FedEM(emfed.Dithering(4), step_size=0.5, in_metric=True)
        model = emfed.gaussian_mixture(2, "tied")
        here = before(model, simulated(away), algorithm, **options)
        there = emfed.fit(model, remote(tmp_path / str(number), away), algorithm, **options)
        np.testing.assert_allclose(here.statistics, there.statistics, atol=1e-9)
        np.testing.assert_array_equal(here.worker_weights, there.worker_weights)
        np.testing.assert_array_equal(here.ledger.counts, there.ledger.counts)


@pytest.mark.parametrize("algorithm", ["auto", "FedEM", "em"])
def test_over_a_network_the_answer_is_that_of_those_who_stayed(
    algorithm: str, tmp_path: Path
) -> None:
    for time in (2, 9):
        federation = remote(tmp_path / str(time), {0: (time, None)})
        model = emfed.gaussian_mixture(2, "full")
        result = emfed.fit(model, federation, algorithm, **FOLLOWING)
        here = [n for n, w in zip(NAMES, result.worker_weights, strict=True) if w]
        np.testing.assert_allclose(told(result.params), pooled("full", here), atol=2e-4)


def test_a_start_given_by_parameters_needs_only_those_who_are_here(tmp_path: Path) -> None:
    """Patience or not decides: without it a start waits for everyone, as it always did."""
    model = emfed.gaussian_mixture(2, "full")
    start = emfed.fit(model, TABLES, "em", rounds=2).params
    result = before(model, simulated({1: (1, None)}), start=start, **FOLLOWING)
    np.testing.assert_allclose(told(result.params), pooled("full", ["a", "c"]), atol=2e-4)
    over = remote(tmp_path / "here", {1: (1, None)})
    result = emfed.fit(model, over, start=start, **FOLLOWING)
    np.testing.assert_allclose(told(result.params), pooled("full", ["a", "c"]), atol=2e-4)
    waiting = remote(tmp_path / "waiting", {1: (1, None)})
    with pytest.raises(emfed.ParticipationError):
        emfed.fit(model, waiting, start=start, patience=None, **FOLLOWING)


def test_where_nobody_answers_nobody_has_left() -> None:
    away = dict.fromkeys(range(3), (12, 32))
    result = before(emfed.gaussian_mixture(2), simulated(away), tol=0, rounds=60, seed=3)
    assert result.worker_weights.all()
    np.testing.assert_allclose(told(result.params), pooled("full", NAMES), atol=1e-4)


def test_a_checkpoint_remembers_who_is_away(tmp_path: Path) -> None:
    """Bit for bit, over a network whose server was killed."""
    options: dict[str, Any] = {"tol": 0, "start": "moments", "seed": 3}
    model, away = emfed.gaussian_mixture(2, "tied"), {1: (6, None)}
    ends = []
    for parts in ((40,), (12, 40)):
        place = tmp_path / str(len(parts))
        sites = Leaving(place, away)
        for rounds in parts:
            network = emfed.network.RemoteFederation(sites, place / "server", attempts=1, pause=0)
            checkpoint = {"checkpoint": place / "run.checkpoint", "resume": True}
            place.mkdir(parents=True, exist_ok=True)
            result = emfed.fit(model, network, "FedEM", rounds=rounds, **checkpoint, **options)
        assert result.worker_weights[1] == 0
        ends.append(result.statistics)
    np.testing.assert_array_equal(*ends)


def test_a_worker_that_keeps_losing_its_memory_resets_the_others_a_few_times_only() -> None:
    class Forgetful(emfed.network.FaultyFederation):
        def exchange(self, request: Any) -> Any:
            if len(request.workers):
                self._wipe(np.array([1]))
            return super().exchange(request)

    network = Forgetful(
        emfed.network.StackedFederation(emfed.data.as_workers(TABLES)), emfed.network.FaultPlan()
    )
    result = before(emfed.gaussian_mixture(2), network, "FedEM", tol=0, rounds=130, seed=3)
    assert result.records[-1].generation <= 2 * (LOSSES + 3)
    assert result.worker_weights[1] == 0
    np.testing.assert_allclose(told(result.params), pooled("full", ["a", "c"]), atol=1e-3)


@pytest.mark.parametrize("algorithm", first(["auto", "FedEM"]))
def test_a_process_that_is_killed_leaves_the_model_to_the_others(
    algorithm: str, tmp_path: Path
) -> None:
    """Real processes over TLS: three sites, minimum two, one gone for good after round 3."""
    children: dict[str, Any] = {}
    with real_sites(TABLES, tmp_path, children) as transport:
        transport._absent = 0.3  # seconds that a question waits for a site that went away

        def leave(record: emfed.fitting.RoundRecord) -> None:
            if record.round == 3:
                children["b"].kill()
                children["b"].wait()

        model = emfed.gaussian_mixture(2, "full")
        served = emfed.fitting.serve(
            model,
            algorithm,
            transport,
            tmp_path / "server",
            minimum=2,
            deadline=20.0,
            callbacks=[leave],
            masks=False,
            **FOLLOWING,
        )
    assert served.stage == 1
    assert served.result.worker_weights[1] == 0
    assert served.result.converged
    right = pooled("full", ["a", "c"])
    np.testing.assert_allclose(told(served.result.params), right, atol=2e-4)


@pytest.mark.parametrize("algorithm", first(["auto", "FedEM"]))
@pytest.mark.parametrize("leaves", first([True, False]))
def test_an_old_backup_of_the_server_goes_on(leaves: bool, algorithm: str, tmp_path: Path) -> None:
    """Sites are ahead of it: in rounds, in phases and, where one left since, in constants."""
    sites = Leaving(tmp_path, {1: (20, None)} if leaves else {})
    options: dict[str, Any] = {"tol": 0, "seed": 3, "attempts": 2, "pause": 0, "minimum": 2}

    def serve(rounds: int) -> Any:
        model = emfed.gaussian_mixture(2, "tied")
        return emfed.fitting.serve(
            model, algorithm, sites, tmp_path / "s", rounds=rounds, **options
        )

    serve(5)
    shutil.copytree(tmp_path / "s", tmp_path / "backup")
    serve(35)
    shutil.rmtree(tmp_path / "s")
    shutil.copytree(tmp_path / "backup", tmp_path / "s")
    served = serve(90)
    assert served.rounds == 90
    assert not served.refusals
    here = ["a", "c"] if leaves else NAMES
    np.testing.assert_allclose(told(served.result.params), pooled("tied", here), atol=1e-4)


@pytest.mark.parametrize("algorithm", first(["auto", "FedEM"]))
def test_an_old_backup_of_a_site_costs_memories_and_no_more(algorithm: str, tmp_path: Path) -> None:
    sites = Leaving(tmp_path, {})
    options: dict[str, Any] = {"tol": 0, "seed": 3, "attempts": 2, "pause": 0}

    def serve(rounds: int) -> Any:
        model = emfed.gaussian_mixture(2, "full")
        return emfed.fitting.serve(
            model, algorithm, sites, tmp_path / "s", rounds=rounds, **options
        )

    serve(8)
    shutil.copytree(tmp_path / "b", tmp_path / "backup")
    serve(20)
    shutil.rmtree(tmp_path / "b")
    shutil.copytree(tmp_path / "backup", tmp_path / "b")
    served = serve(90)
    assert served.result.worker_weights.all()
    np.testing.assert_allclose(told(served.result.params), pooled("full", NAMES), atol=1e-4)


@pytest.mark.parametrize(("clock", "rounds"), [(0, 320), (1000, 40), (5000, 10)])
def test_who_left_often_is_asked_again_within_bounds(clock: int, rounds: int) -> None:
    """The pause doubled every time, for ever: after twelve times it was 40,960 rounds."""
    often = replace(Attendance.of(3), leaves=np.array([0, 0, 12]), clock=clock)
    after = often.staying(np.array([True, True, False]))
    assert after.again[2] - after.clock == rounds
