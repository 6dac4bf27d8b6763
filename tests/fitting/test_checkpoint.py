"""Checkpoints are whole or absent, and a resumed run is the run that was never interrupted."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.storage import load_checkpoint, save_checkpoint
from tests.helpers import KINDS, first, fit, make_data, make_model

TABLES = make_data(2, sizes=(20, 9, 14, 30))
CLOSE = make_data(2, sizes=(60, 40), spread=1.0)
QUANTISER = emfed.Dithering(2, block="row")
ALGORITHMS: list[Any] = [
    emfed.EM(),
    emfed.FedEM(QUANTISER, step_size=0.3, batch_size=7, memory_start="mean-field"),
    emfed.VRFedEM(
        QUANTISER, step_size=emfed.algorithms.Decreasing(0.5), batch_size=5, inner_rounds=4
    ),
]
OPTIONS: dict[str, Any] = {"participation": emfed.algorithms.Bernoulli(0.7), "seed": 4}


def without_times(records: emfed.fitting.Records) -> list[Any]:
    columns = records.columns()
    del columns["seconds"]
    return list(columns.items())


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("federation", ["loop", "stacked"])
@pytest.mark.parametrize("cut", [1, 5, 13])
def test_resumed_runs_continue_bit_for_bit(
    tmp_path: Path, algorithm: Any, federation: Any, cut: int
) -> None:
    path = tmp_path / "run.checkpoint"
    common = {**OPTIONS, "federation": federation, "monitor": emfed.fitting.Monitor(3)}
    whole = fit(make_model("full"), TABLES, algorithm, rounds=20, **common)
    fit(make_model("full"), TABLES, algorithm, rounds=cut, checkpoint=path, **common)
    resumed = fit(
        make_model("full"), TABLES, algorithm, rounds=20, checkpoint=path, resume=True, **common
    )
    np.testing.assert_array_equal(resumed.statistics, whole.statistics)
    assert without_times(resumed.records) == without_times(whole.records)
    assert (resumed.bytes_up, resumed.bytes_down) == (whole.bytes_up, whole.bytes_down)


@pytest.mark.parametrize(
    ("tables", "settings"),
    first(
        [
            (TABLES, {"n_components": "1:3", "n_init": 2, "participation": 0.7}),
            (CLOSE[:1], {"n_components": 3, "tol": 1e-9}),
            (CLOSE, {"n_components": "1:3", "algorithm": "em", "tol": 1e-9}),
            (CLOSE[:1], {"n_components": "1:3", "tol": 1e-9}),
            (TABLES, {"n_components": "1:4"}),
        ],
        3,
    ),
    ids=["partial", "long steps", "watched", "candidates alone", "candidates"],
)
def test_fits_of_candidates_resume_after_any_round(
    tmp_path: Path, tables: Any, settings: dict[str, Any]
) -> None:
    """K-means starts, candidates that are dropped on the way, and EM's long steps."""
    model, common = make_model("diag"), {"rounds": 40, "seed": 4, **settings}
    whole = emfed.fit(model, tables, **common)
    made = whole.records[-1].round
    assert made > 4
    for cut in (1, 2, 4, *range(7, made, 10)):
        path = tmp_path / f"{cut}"
        emfed.fit(model, tables, checkpoint=path, **(common | {"rounds": cut}))
        resumed = emfed.fit(model, tables, checkpoint=path, resume=True, **common)
        np.testing.assert_array_equal(resumed.statistics, whole.statistics)
        assert without_times(resumed.records) == without_times(whole.records)
        assert resumed.stopped == whole.stopped
        np.testing.assert_array_equal(resumed.ledger.counts, whole.ledger.counts)


def test_files_are_not_written_over(tmp_path: Path) -> None:
    precious = tmp_path / "precious.csv"
    precious.write_text("mine")
    with pytest.raises(emfed.CheckpointError, match="is there already: use resume=True"):
        fit(make_model("diag"), TABLES, rounds=1, checkpoint=precious)
    assert precious.read_text() == "mine"
    with pytest.raises(emfed.CheckpointError, match="not an emfed checkpoint"):
        fit(make_model("diag"), TABLES, rounds=1, checkpoint=precious, resume=True)
    for path in ("", tmp_path):
        with pytest.raises(emfed.SettingsError, match="must be the path of a file"):
            fit(make_model("diag"), TABLES, rounds=1, checkpoint=path)


def test_resume_without_a_checkpoint_starts_anew(tmp_path: Path) -> None:
    path = tmp_path / "none"
    result = fit(make_model("diag"), TABLES, rounds=3, checkpoint=path, resume=True)
    assert path.exists()
    assert result.records[-1].round == 3


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"seed": 5}, "seed"),
        ({"weights": "uniform"}, "weights"),
        ({"participation": emfed.algorithms.Bernoulli(0.8)}, "participation"),
        ({"algorithm": emfed.FedEM(QUANTISER, step_size=0.2)}, "algorithm"),
        ({"model": make_model("diag", k=2)}, "model"),
        ({"tables": make_data(3, sizes=(20, 9, 14, 30))}, "data"),
        ({"tables": dict(zip("abcd", TABLES, strict=True))}, "workers"),
    ],
)
def test_a_checkpoint_of_another_run_is_refused(
    tmp_path: Path, change: dict[str, Any], names: str
) -> None:
    path = tmp_path / "run"
    setup = {
        "model": make_model("diag"),
        "tables": TABLES,
        "algorithm": emfed.FedEM(QUANTISER, step_size=0.3),
        **OPTIONS,
    }

    def go(arguments: dict[str, Any], **more: Any) -> Any:
        arguments = dict(arguments)
        model, tables, algorithm = (arguments.pop(n) for n in ("model", "tables", "algorithm"))
        return fit(model, tables, algorithm, checkpoint=path, **arguments, **more)

    go(setup, rounds=3)
    with pytest.raises(emfed.CheckpointError, match=f"another run, with other .*{names}"):
        go({**setup, **change}, rounds=5, resume=True)


@pytest.mark.parametrize("kind", KINDS)
def test_damaged_and_foreign_files_are_refused(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "run"
    fit(make_model(kind), TABLES, rounds=3, checkpoint=path)
    whole = path.read_bytes()
    rng = np.random.default_rng(0)
    cases = [whole[:n] for n in (0, 7, 8, 100, len(whole) // 2, len(whole) - 1)]
    cases += [b"hello", b"\0" * 64, whole + b"x", os.urandom(300)]
    for _ in range(40):  # one byte changed anywhere
        position = int(rng.integers(len(whole)))
        cases.append(whole[:position] + bytes([whole[position] ^ 0x41]) + whole[position + 1 :])
    for data in cases:
        path.write_bytes(data)
        with pytest.raises(emfed.CheckpointError):
            load_checkpoint(path)
    with pytest.raises(emfed.CheckpointError, match="no checkpoint at"):
        load_checkpoint(tmp_path / "absent")


def test_other_safetensors_files_are_foreign(tmp_path: Path) -> None:
    from safetensors.numpy import save_file

    path = tmp_path / "weights.safetensors"
    save_file({"a": np.ones(3)}, path)
    with pytest.raises(emfed.CheckpointError, match="is not an emfed checkpoint"):
        load_checkpoint(path)
    save_file({"a": np.ones(3)}, path, metadata={"format": "emfed-checkpoint", "version": "99"})
    with pytest.raises(emfed.CheckpointError, match="version 99"):
        load_checkpoint(path)


def run_script(script: str, *arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script), *arguments],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        **options,
    )


FULL_DISK = """
    import resource, signal, sys
    import numpy as np
    import emfed
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    tables = [np.random.default_rng(i).normal(size=(30, 3)) for i in range(4)]
    model = emfed.gaussian_mixture(2, "full")
    path = sys.argv[1]
    algorithm = emfed.FedEM(emfed.Dithering(2), step_size=0.3)
    emfed.fit(model, tables, algorithm, rounds=5, checkpoint=path)
    before = open(path, "rb").read()
    def no_more_space(record):
        if record.round == 8:  # from now on the system refuses to write more than 1000 bytes
            resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))
    try:
        emfed.fit(model, tables, algorithm, rounds=50, checkpoint=path, checkpoint_every=10,
                  resume=True, callbacks=[no_more_space])
    except emfed.CheckpointError as error:
        print(error)
        print(error.result.records[-1].round, error.result.params.means.shape)
    print(open(path, "rb").read() == before)
    import os
    print(sorted(os.listdir(os.path.dirname(path))))
"""


def test_a_full_disk_loses_nothing(tmp_path: Path) -> None:
    path = tmp_path / "run"
    done = run_script(FULL_DISK, str(path))
    lines = done.stdout.splitlines()
    assert done.returncode == 0, done.stderr
    assert "cannot write the checkpoint" in lines[0]
    assert "untouched" in lines[0]
    assert lines[1] == "10 (2, 3)"  # what the run had reached is in the error
    assert lines[2] == "True"  # the previous checkpoint stands
    assert lines[3] == "['run']"  # and nothing is left beside it


def test_a_real_full_disk(tmp_path: Path) -> None:
    mount = tmp_path / "small"
    mount.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(mount)],
        capture_output=True,
        check=False,
    )
    if made.returncode:
        pytest.skip("cannot mount a small file system here; the size-limit test covers this")
    try:
        save_checkpoint(mount / "run", {"a": np.zeros(100)}, {"n": 1})
        with pytest.raises(emfed.CheckpointError, match="No space left on device"):
            save_checkpoint(mount / "run", {"a": np.zeros(100_000)}, {"n": 2})
        arrays, description = load_checkpoint(mount / "run")
        assert description == {"n": 1}
        assert len(arrays["a"]) == 100
        assert [p.name for p in mount.iterdir()] == ["run"]
    finally:
        subprocess.run(["umount", str(mount)], check=True)


def test_a_folder_that_is_not_there() -> None:
    with pytest.raises(emfed.CheckpointError, match="cannot write .* No such file or directory"):
        fit(make_model("diag"), TABLES, rounds=1, checkpoint="/nowhere/at/all/run")


def test_numbers_of_numpy_are_settings_too(tmp_path: Path) -> None:
    algorithm = emfed.FedEM(
        emfed.Dithering(np.int64(2)), step_size=np.float64(0.3), batch_size=np.int32(5)
    )
    options: dict[str, Any] = {
        "seed": np.int64(4),
        "participation": emfed.algorithms.FixedSize(np.int64(2)),
        "checkpoint": tmp_path / "run",
    }
    model = emfed.gaussian_mixture(np.int64(2), "diag")
    fit(model, TABLES, algorithm, rounds=np.int64(3), **options)
    result = fit(model, TABLES, algorithm, rounds=5, resume=True, **options)
    assert result.records[-1].round == 5


def test_an_error_in_mid_run_carries_what_was_reached() -> None:
    def fail(record: emfed.fitting.RoundRecord) -> None:
        if record.round == 4:
            raise ValueError("mine")

    with pytest.raises(ValueError, match="mine") as caught:
        fit(make_model("diag"), TABLES, rounds=9, callbacks=[fail])
    assert caught.value.result.records[-1].round == 4


def test_step_sizes_that_are_functions_are_told_apart(tmp_path: Path) -> None:
    def make(value: float) -> Any:
        return emfed.FedEM(step_size=lambda k: value)

    path = tmp_path / "run"
    fit(make_model("diag"), TABLES, make(0.1), rounds=3, checkpoint=path)
    with pytest.raises(emfed.CheckpointError, match="algorithm"):
        fit(make_model("diag"), TABLES, make(0.9), rounds=5, checkpoint=path, resume=True)


def test_checkpoints_obey_the_umask(tmp_path: Path) -> None:
    fit(make_model("diag"), TABLES, rounds=1, checkpoint=tmp_path / "run")
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "run").stat().st_mode == plain.stat().st_mode


@pytest.fixture
def ctrl_c_works() -> Iterator[None]:
    """Ctrl-C raises, even where the tests were started with it ignored (in the background)."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("ctrl_c_works")
def test_ctrl_c_ends_after_the_round_with_what_was_reached(tmp_path: Path) -> None:
    path = tmp_path / "run"

    def interrupt(record: emfed.fitting.RoundRecord) -> None:
        if record.round == 6:
            os.kill(os.getpid(), signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    stopped = fit(
        make_model("full"),
        TABLES,
        ALGORITHMS[1],
        rounds=20,
        checkpoint=path,
        callbacks=[interrupt],
        **OPTIONS,
    )
    assert stopped.stopped == "interrupted"
    assert stopped.records[-1].round == 6
    assert signal.getsignal(signal.SIGINT) is before
    resumed = fit(
        make_model("full"),
        TABLES,
        ALGORITHMS[1],
        rounds=20,
        checkpoint=path,
        resume=True,
        **OPTIONS,
    )
    whole = fit(make_model("full"), TABLES, ALGORITHMS[1], rounds=20, **OPTIONS)
    np.testing.assert_array_equal(resumed.statistics, whole.statistics)


@pytest.mark.usefixtures("ctrl_c_works")
def test_a_second_ctrl_c_does_not_wait() -> None:
    def impatient(record: emfed.fitting.RoundRecord) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit(make_model("diag"), TABLES, rounds=20, callbacks=[impatient])


def test_runs_in_other_threads_leave_signals_alone() -> None:
    out: list[emfed.Result] = []
    thread = threading.Thread(target=lambda: out.append(fit(make_model("diag"), TABLES, rounds=3)))
    thread.start()
    thread.join()
    assert out[0].stopped == "rounds"


def test_numbers_stay_numbers_and_views_whole(tmp_path: Path) -> None:
    """What a state holds beside vectors comes back in its shape."""
    arrays = {"number": np.array(0.5), "view": np.arange(6.0).reshape(2, 3).T, "none": np.empty(0)}
    save_checkpoint(tmp_path / "c", arrays, {})
    found, _ = load_checkpoint(tmp_path / "c")
    assert {name: a.shape for name, a in found.items()} == {n: a.shape for n, a in arrays.items()}
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array)
