"""Workers in Ray actors: the stacked trajectory, through real kills, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

import emfed
from emfed.data import WorkerData
from emfed.fitting import FitSettings, in_process
from emfed.fitting.fitted import Watch
from emfed.imputation import Structure, impute
from emfed.models.site_owner import COLUMNS
from emfed.network import RayFederation, StackedFederation
from emfed.network.shards import Shard, divide
from tests.helpers import first, fit, make_data, make_model
from tests.imputation.tables import small_table

ray = pytest.importorskip("ray", reason="no Ray for this Python: pip install ray")

SIZES = (20, 9, 14, 30, 41, 9, 12)
TABLES = make_data(2, sizes=SIZES)
QUANTISER = emfed.Dithering(2, block="row")
FEDEM = emfed.FedEM(QUANTISER, step_size=0.3, batch_size=7, memory_start="mean-field")
VRFEDEM = emfed.VRFedEM(QUANTISER, step_size=0.3, batch_size=5, inner_rounds=4)


@pytest.fixture(scope="module")
def user_ray() -> Iterator[None]:
    """A Ray that the user started: federations join it and leave it alone."""
    os.environ["RAY_USAGE_STATS_ENABLED"] = "0"
    ray.init(
        address="local",
        num_cpus=8,
        include_dashboard=False,
        log_to_driver=False,
        object_store_memory=200 * 2**20,
        _system_config={"prestart_worker_first_driver": False},  # eight processes for nobody
    )
    yield
    assert ray.is_initialized()
    ray.shutdown()


@pytest.fixture(scope="module")
def federation(user_ray: None) -> Iterator[emfed.network.RayFederation]:
    with emfed.network.RayFederation(TABLES, actors=3) as made:
        yield made


def records(result: emfed.Result) -> dict[str, Any]:
    columns = dict(result.records.columns())
    del columns["seconds"]
    return columns


def assert_same_run(ours: emfed.Result, stacked: emfed.Result) -> None:
    np.testing.assert_allclose(ours.statistics, stacked.statistics, rtol=0, atol=1e-9)
    np.testing.assert_array_equal(ours.ledger.counts, stacked.ledger.counts)
    mine, other = records(ours), records(stacked)
    for name, values in other.items():
        known = [i for i, v in enumerate(values) if v is not None]
        assert [mine[name][i] is None for i in range(len(values))] == [v is None for v in values]
        np.testing.assert_allclose(
            [float(mine[name][i]) for i in known],
            [float(values[i]) for i in known],
            rtol=1e-9,
            atol=1e-9,
            err_msg=name,
        )


@pytest.mark.parametrize(
    ("kind", "algorithm", "options"),
    [
        ("full", emfed.EM(), {}),
        ("full", FEDEM, {"participation": emfed.algorithms.Bernoulli(0.7)}),
        ("tied", VRFEDEM, {"participation": emfed.algorithms.FixedSize(2), "weights": "uniform"}),
        ("diag", emfed.FedEM(emfed.SubtractiveDithering(0.1), step_size=0.5, simulations=3), {}),
        ("diag", emfed.FedEM(QUANTISER, step_size=0.5, broadcast=QUANTISER), {}),
    ],
    ids=["em", "FedEM", "VR-FedEM", "simulated", "broadcast"],
)
def test_same_seed_same_trajectory(
    federation: emfed.network.RayFederation, kind: str, algorithm: Any, options: dict[str, Any]
) -> None:
    options = {"rounds": 25, "monitor": emfed.fitting.Monitor(5), **options}
    stacked = fit(make_model(kind), TABLES, algorithm, **options)
    assert_same_run(
        fit(make_model(kind), None, algorithm, federation=federation, **options), stacked
    )


@pytest.mark.usefixtures("user_ray")
def test_an_actor_that_is_killed_in_a_fit_changes_nothing() -> None:
    """What workers keep travels with what they are asked, so nothing is lost with an actor."""
    settings = FitSettings.read(make_model("full"), None, seed=3, scores=True)
    here = in_process.fit(settings, StackedFederation(emfed.data.as_workers(TABLES)).workers).result
    with RayFederation(TABLES, actors=3) as cluster:
        before = cluster.processes

        def kill(record: Any) -> bool:
            if record.round == 3:
                os.kill(cluster.processes[1], signal.SIGKILL)
            return False

        there = in_process.fit(settings, cluster.workers, Watch((kill,))).result
        assert cluster.processes[1] != before[1]
        assert cluster.processes[::2] == before[::2]
    np.testing.assert_allclose(there.statistics, here.statistics, rtol=0, atol=1e-12)
    np.testing.assert_array_equal(there.ledger.counts, here.ledger.counts)
    assert here.facts is not None
    assert there.facts is not None
    np.testing.assert_allclose(
        there.facts.by_worker.scores, here.facts.by_worker.scores, rtol=0, atol=1e-12
    )


def test_checkpoints_resume_in_either(
    federation: emfed.network.RayFederation, tmp_path: Path
) -> None:
    options: dict[str, Any] = {
        "participation": emfed.algorithms.Bernoulli(0.7),
        "checkpoint": tmp_path / "run",
    }
    fit(make_model("full"), None, FEDEM, rounds=7, federation=federation, **options)
    fit(make_model("full"), TABLES, FEDEM, rounds=12, resume=True, **options)
    resumed = fit(
        make_model("full"), None, FEDEM, rounds=20, resume=True, federation=federation, **options
    )
    del options["checkpoint"]
    assert_same_run(resumed, fit(make_model("full"), TABLES, FEDEM, rounds=20, **options))


def test_faults_above_ray(federation: emfed.network.RayFederation) -> None:
    plan = emfed.network.FaultPlan(3, lose_reply=0.2, lose_disk=0.05)
    runs = []
    for inner in (federation, emfed.network.StackedFederation(emfed.data.as_workers(TABLES))):
        faulty = emfed.network.FaultyFederation(inner, plan)
        runs.append(emfed.fitting.open_run(make_model("diag"), faulty, FEDEM, tol=0))
        for _ in range(30):
            runs[-1].step()
    ours, stacked = runs
    assert ours.server.generation == stacked.server.generation > 0
    np.testing.assert_allclose(ours.statistics, stacked.statistics, rtol=0, atol=1e-9)
    np.testing.assert_allclose(ours.memories, stacked.memories, rtol=0, atol=1e-9)


@pytest.mark.long
@pytest.mark.usefixtures("user_ray")
def test_actors_open_their_own_files_and_agree_on_columns(tmp_path: Path) -> None:
    paths = {}
    for index, table in enumerate(TABLES):
        order = [1, 0] if index > 3 else [0, 1]
        frame = pl.DataFrame({"ab"[j]: table[:, j] for j in order})
        paths[f"site {index}"] = tmp_path / f"{index}.parquet"
        frame.write_parquet(paths[f"site {index}"])
    with emfed.network.RayFederation(paths, actors=2) as federation:
        result = fit(make_model("full"), None, rounds=5, federation=federation)
    stacked = fit(make_model("full"), paths, rounds=5)
    assert_same_run(result, stacked)
    assert result.columns == ("a", "b")
    pl.DataFrame({"a": [1.0], "c": [2.0]}).write_parquet(paths["site 6"])
    with pytest.raises(emfed.DataError, match="worker 'site 6'.* expected the columns .*'a', 'b'"):
        emfed.network.RayFederation(paths, actors=4)
    paths["site 2"].unlink()
    with pytest.raises((emfed.DataError, FileNotFoundError), match=r"2\.parquet"):
        emfed.network.RayFederation(paths, actors=2)


@pytest.mark.long
def test_rows_mapped_from_a_file_stay_there(user_ray: None, tmp_path: Path) -> None:
    np.save(tmp_path / "rows.npy", np.concatenate(TABLES))
    offsets = np.concatenate([[0], np.cumsum(SIZES)])
    mapped = np.load(tmp_path / "rows.npy", mmap_mode="r")
    for rows in (mapped, np.asarray(mapped), mapped[: int(offsets[-1])]):
        portions = divide(emfed.data.WorkerData(rows, offsets), None, 3)
        assert {type(part.data).__name__ for part in portions.parts} == {"Mapped"}
        for part, start in zip(portions.parts, portions.edges, strict=False):
            shard = Shard(part.first, part.data)
            shard.ready()
            np.testing.assert_array_equal(shard.federation.data.worker(0), TABLES[start])
    with emfed.network.RayFederation(emfed.data.WorkerData(mapped, offsets)) as other:
        result = fit(make_model("full"), None, FEDEM, rounds=5, federation=other)
    assert_same_run(result, fit(make_model("full"), TABLES, FEDEM, rounds=5))
    for rows in (mapped[:, ::-1], np.load(tmp_path / "rows.npy", mmap_mode="c"), np.array(mapped)):
        portions = divide(emfed.data.WorkerData(rows, offsets), None, 3)
        assert all(isinstance(part.data, emfed.data.WorkerData) for part in portions.parts)


@pytest.mark.usefixtures("user_ray")
def test_groups_names_and_bad_rows() -> None:
    rows, groups = np.concatenate(TABLES), np.repeat([f"w{i}" for i in range(7)], SIZES)
    with emfed.network.RayFederation(rows, groups, actors=2) as federation:
        result = fit(make_model("diag"), None, rounds=3, federation=federation)
    assert_same_run(result, fit(make_model("diag"), rows, groups=groups, rounds=3))
    bad = [t.copy() for t in TABLES]
    bad[5][3, 1] = np.inf
    message = "worker '5'.* row 3"
    with pytest.raises(emfed.DataError, match=message):
        fit(make_model("diag"), bad, rounds=3)
    with (
        emfed.network.RayFederation(bad, actors=2) as federation,
        pytest.raises(emfed.DataError, match=message),
    ):
        fit(make_model("diag"), None, rounds=3, federation=federation)


@pytest.mark.usefixtures("user_ray")
def test_settings_are_checked() -> None:
    for options, message in (
        ({"actors": 0}, "actors must be a whole number"),
        ({"deadline": 0}, "deadline must lie in"),
        ({"address": "10.1.2.3:4"}, "uses the Ray at .* already"),
    ):
        with pytest.raises(emfed.SettingsError, match=message):
            emfed.network.RayFederation(TABLES, **options)
    federation = emfed.network.RayFederation(TABLES[:2], actors=50)
    assert len(federation.processes) == 2
    federation.close()
    federation.close()
    with pytest.raises(emfed.FederationError, match="is closed"):
        fit(make_model("diag"), None, rounds=1, federation=federation)


@pytest.mark.long
@pytest.mark.usefixtures("user_ray")
def test_actors_that_find_no_place_are_an_error_and_not_a_hang() -> None:
    class Greedy:
        def here(self) -> bool:
            return True

    others, quiet = [], 0
    while quiet < 4:  # actors of tests before this one may still be going
        if free := int(ray.available_resources().get("CPU", 0)):
            others.append(ray.remote(Greedy).options(num_cpus=free).remote())
            assert ray.get(others[-1].here.remote(), timeout=60)
        quiet = 0 if free else quiet + 1
        time.sleep(0.5)
    with pytest.raises(emfed.FederationError, match="each takes one CPU, and 0 of 8 are free"):
        emfed.network.RayFederation(TABLES, start_timeout=2)
    for other in others:
        ray.kill(other)


def test_portions_are_even_and_none_is_empty() -> None:
    rng = np.random.default_rng(0)
    for _ in range(200):
        sizes = rng.integers(1, 50, size=rng.integers(1, 12)) ** rng.integers(1, 3)
        count = int(rng.integers(1, 15))
        data = emfed.data.WorkerData(
            np.arange(sizes.sum() * 2.0).reshape(-1, 2), np.concatenate([[0], np.cumsum(sizes)])
        )
        portions = divide(data, None, count)
        assert len(portions.parts) == min(count, len(sizes))
        assert portions.size == len(sizes)
        assert all(p.size > 0 for p in portions.parts)
        np.testing.assert_array_equal(
            np.concatenate([p.data.rows for p in portions.parts]), data.rows
        )
        shares = [len(p.data.rows) for p in portions.parts]
        assert max(shares) <= sizes.sum() / len(shares) + 2 * sizes.max()


@pytest.mark.usefixtures("user_ray")
@pytest.mark.parametrize(
    ("algorithm", "how"),
    first(
        [
            (emfed.VRFedEM(QUANTISER, step_size=0.2, batch_size=5, inner_rounds=2), signal.SIGKILL),
            (emfed.EM(), signal.SIGSTOP),
            (emfed.FedEM(QUANTISER, step_size=0.2), signal.SIGKILL),
        ]
    ),
    ids=["VR-FedEM killed", "EM stuck", "FedEM killed"],
)
def test_an_actor_that_is_lost_costs_nothing(algorithm: Any, how: signal.Signals) -> None:
    """Whoever drives the fit keeps what workers remember."""
    deadline = 3.0 if how == signal.SIGSTOP else None
    start = emfed.fit(make_model("diag"), TABLES, rounds=20).params
    options: dict[str, Any] = {"start": start, "tol": 0}
    with emfed.network.RayFederation(TABLES, actors=2, deadline=deadline) as federation:
        run = emfed.fitting.open_run(make_model("diag"), federation, algorithm, **options)
        undisturbed = emfed.fitting.open_run(make_model("diag"), TABLES, algorithm, **options)
        first = federation.processes
        for round_ in range(1, 41):
            if round_ == 5:
                os.kill(federation.processes[1], how)
            run.step()
            undisturbed.step()
        assert federation.processes[0] == first[0]
        assert federation.processes[1] != first[1]
    np.testing.assert_allclose(run.statistics, undisturbed.statistics, rtol=0, atol=1e-8)


@pytest.mark.long
@pytest.mark.usefixtures("user_ray")
def test_an_actor_that_dies_again_and_again_is_an_error() -> None:
    def deadly(round_: int) -> Any:
        if round_ == 3:
            os._exit(1)
        return TABLES[0]

    streams = [emfed.data.Stream(deadly), emfed.data.Stream(lambda round_: TABLES[1])]
    with (
        emfed.network.RayFederation(streams, actors=2) as federation,
        pytest.raises(emfed.FederationError, match="lost 3 times in a row") as caught,
    ):
        fit(make_model("diag"), None, emfed.FedEM(step_size=0.5), federation=federation)
    assert caught.value.result.records[-1].round == 2


def start(script: str, *arguments: str, **options: Any) -> subprocess.Popen[str]:
    """A program of a user, leader of a group of its own."""
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        **options,
    )


def alive(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def assert_gone(processes: list[int], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while left := [p for p in processes if alive(p)]:
        assert time.monotonic() < end, [Path(f"/proc/{p}/cmdline").read_text() for p in left]
        time.sleep(0.1)


SCRIPT = """
    import os, signal, sys, time
    from pathlib import Path
    import numpy as np
    import emfed

    def descendants():
        parents = {}
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    fields = (entry / "stat").read_text().rpartition(")")[2].split()
                except OSError:
                    continue
                parents[int(entry.name)] = int(fields[1])
        found = {os.getpid()}
        while more := {p for p, parent in parents.items() if parent in found} - found:
            found |= more
        return found - {os.getpid()}

    def tell(record):
        if record.round == 3:
            # Ray's two agents outlive a driver that was killed by a minute; all else must go.
            found = [
                p
                for p in descendants()
                if sys.argv[2] != "kill" or "Agent" not in Path(f"/proc/{p}/cmdline").read_text()
            ]
            print(*found, flush=True)
            settings = {
                "RAY_USAGE_STATS_ENABLED=0" in Path(f"/proc/{p}/environ").read_text()
                for p in found
                if any(
                    name in Path(f"/proc/{p}/cmdline").read_text()
                    for name in ("gcs_server", "raylet/raylet", "dashboard.py")
                )
            }
            print(settings, "RAY_USAGE_STATS_ENABLED" in os.environ, flush=True)
        if record.round > 3:
            time.sleep(0.05)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    tables = [np.random.default_rng(i).normal(size=(30, 3)) for i in range(4)]
    result = emfed.fit(
        emfed.gaussian_mixture(2, "diag"), tables, rounds=int(sys.argv[1]), callbacks=[tell],
        federation="ray",
    )
    print(result.stopped, flush=True)
"""


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="processes are found in /proc")
@pytest.mark.parametrize("how", first(["kill", "ctrl-c", "end"]))
def test_no_process_stays_behind(how: str) -> None:
    user = start(SCRIPT, "6" if how == "end" else "100000", how, env=without_usage_setting())
    assert user.stdout is not None
    processes = [int(p) for p in user.stdout.readline().split()]
    assert len(processes) >= 4
    # Nothing that we start reports to anyone, and the user's environment is as it was.
    assert user.stdout.readline().split() == ["{True}", "False"]
    if how == "ctrl-c":
        os.killpg(user.pid, signal.SIGINT)  # as a terminal does
    elif how == "kill":
        user.kill()
    out, err = user.communicate(timeout=60)
    if how != "kill":
        assert out.strip() == {"end": "rounds", "ctrl-c": "interrupted"}[how], err
        assert user.returncode == 0
    assert_gone(processes)


def without_usage_setting() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != "RAY_USAGE_STATS_ENABLED"}


BY_ADDRESS = """
    import os, signal, sys
    import numpy as np
    import emfed
    tables = [np.random.default_rng(i).normal(size=(30, 3)) for i in range(5)]
    model = emfed.gaussian_mixture(2, "diag")
    algorithm = emfed.FedEM(emfed.Dithering(2), step_size=0.3)
    stacked = emfed.fit(model, tables, algorithm, rounds=20)
    with emfed.network.RayFederation(tables, actors=2, address=sys.argv[1]) as federation:
        with emfed.network.RayFederation(tables, actors=1, address=sys.argv[1]) as second:
            alone = emfed.fit(model, None, algorithm, rounds=20, federation=second)
        result = emfed.fit(model, None, algorithm, rounds=20, federation=federation)
        print(np.abs(result.statistics - stacked.statistics).max() < 1e-9)
        print(np.abs(alone.statistics - stacked.statistics).max() < 1e-9)
        os.kill(federation.processes[0], signal.SIGKILL)
        again = emfed.fit(model, None, algorithm, rounds=20, federation=federation)
        print(np.abs(again.statistics - stacked.statistics).max() < 1e-9)
    import ray
    print(ray.is_initialized())
"""


ANOTHER = """
    import numpy as np, ray
    import emfed
    tables = [np.random.default_rng(i).normal(size=(30, 3)) for i in range(4)]
    forgotten = emfed.network.RayFederation(tables)
    ray.shutdown()
    ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False)
    with emfed.network.RayFederation(tables) as federation:
        print(emfed.fit(emfed.gaussian_mixture(2, "diag"), None, rounds=100, tol=0,
                        federation=federation).rounds)
        print(ray.available_resources().get("CPU", 0))
    forgotten.close()
    print(ray.is_initialized())
"""


@pytest.mark.long
def test_a_ray_that_the_user_starts_after_ours_is_the_users() -> None:
    user = start(ANOTHER, env={**os.environ, "RAY_USAGE_STATS_ENABLED": "0"})
    out, err = user.communicate(timeout=120)
    assert out.split() == ["100", "0", "True"], err


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def cluster() -> Iterator[tuple[str, dict[str, str], subprocess.Popen[bytes]]]:
    """A cluster that asks for a token: its address, how to get in, its process."""
    port, folder = free_port(), tempfile.mkdtemp(prefix="ray")  # paths of sockets must be short
    command = (
        f"{Path(sys.executable).parent / 'ray'} start --head --block --node-ip-address=127.0.0.1 "
        f"--port={port} --num-cpus=4 --include-dashboard=false --object-store-memory=100000000 "
        f"--disable-usage-stats --temp-dir={folder}"
    )
    # Left unset, Ray asks for a token if the user's home has a file with one.
    token = {**os.environ, "RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}
    head = subprocess.Popen(
        command.split(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        env=token,
    )
    try:
        end = time.monotonic() + 60
        while True:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert time.monotonic() < end
            time.sleep(0.2)
        yield f"127.0.0.1:{port}", token, head
    finally:
        os.killpg(head.pid, signal.SIGKILL)  # asked politely it takes half a minute
        head.wait(timeout=60)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_running_cluster_by_its_address(
    cluster: tuple[str, dict[str, str], subprocess.Popen[bytes]],
) -> None:
    address, token, head = cluster
    out, err = start(BY_ADDRESS, address, env=token).communicate(timeout=120)
    told = [word for word in out.split() if word in ("True", "False")]  # Ray prints too
    assert told == ["True", "True", "True", "False"], err
    assert head.poll() is None  # the cluster is not ours to end


@pytest.mark.long
def test_a_cluster_that_asks_for_a_token_says_so(
    cluster: tuple[str, dict[str, str], subprocess.Popen[bytes]],
) -> None:
    address, token, _ = cluster
    stranger = {**token, "RAY_AUTH_MODE": "disabled"}
    out, err = start(NOBODY, address, env=stranger).communicate(timeout=120)
    assert "FederationError the Ray at" in out, err
    assert "RAY_AUTH_MODE=token" in out


NOBODY = """
    import sys
    import numpy as np
    import emfed
    address = sys.argv[1] if len(sys.argv) > 1 else None
    if address is None:
        sys.modules["ray"] = None
    try:
        emfed.network.RayFederation([np.ones((3, 2))], address=address)
    except emfed.EmfedError as error:
        print(type(error).__name__, error)
"""


def test_without_ray_or_cluster_the_message_says_what_to_do() -> None:
    out, err = start(NOBODY).communicate(timeout=60)
    assert "SettingsError" in out, err
    assert "pip install ray" in out
    began = time.monotonic()
    out, err = start(NOBODY, f"127.0.0.1:{free_port()}").communicate(timeout=60)
    assert "FederationError no Ray answers at" in out, err
    assert "ray start --head" in out
    assert time.monotonic() - began < 30


def test_cells_are_sent_once_from_actors_as_from_one_process(user_ray: None) -> None:
    table = small_table(workers=7, records=600)
    data = WorkerData(table.rows, table.offsets, list(table.workers), COLUMNS)
    structure = Structure(1, 3.0)
    with emfed.network.RayFederation(data, actors=3) as federation:
        found = impute(federation, grid=table.grid, structure=structure)
    wanted = impute(emfed.network.StackedFederation(data), grid=table.grid, structure=structure)
    assert np.array_equal(found.params.sites, wanted.params.sites)
    assert found.ledger.summary() == wanted.ledger.summary()
    assert list(found.table.workers) == list(table.workers)
