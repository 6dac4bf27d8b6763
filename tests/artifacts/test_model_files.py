"""Model files give back what was saved, bit for bit, and refuse everything else clearly."""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.numpy import load as load_tensors
from safetensors.numpy import save as save_tensors

import emfed
from emfed.artifacts.model_card import card_markdown
from emfed.artifacts.modelfiles import SEAL
from emfed.core.registry import MODELS, STORED
from emfed.core.storage import load_checkpoint, load_sealed, save_checkpoint, save_sealed
from emfed.core.storage.sealed import _digest
from tests.helpers import make_data, plain_fit
from tests.registry import REGISTRY

each = pytest.mark.parametrize("name", REGISTRY)


def fitted(name: str = "full", **options: Any) -> tuple[emfed.Result, Any]:
    entry = REGISTRY[name]
    options = {"rounds": 5, "scores": True} | options
    result = plain_fit(entry.make(**entry.priors), entry.tables, **options)
    return result, np.concatenate(entry.tables)


@each
def test_what_was_saved_answers_bit_for_bit(name: str, tmp_path: Path) -> None:
    result, rows = fitted(name, algorithm=emfed.FedEM(emfed.Dithering(8), step_size=0.3))
    result.save(tmp_path / "m.emfed")
    again = emfed.load(tmp_path / "m.emfed")
    assert type(again.model) is type(result.model)
    assert again.model.describe() == result.model.describe()
    for key, value in result.params.arrays().items():
        np.testing.assert_array_equal(again.params.arrays()[key], value)
    np.testing.assert_array_equal(again.score_samples(rows), result.score_samples(rows))
    assert again.log_likelihood(rows) == result.log_likelihood(rows)
    if hasattr(result.model, "responsibilities"):
        np.testing.assert_array_equal(again.predict_proba(rows), result.predict_proba(rows))
    if hasattr(result.model, "impute"):
        np.testing.assert_array_equal(again.impute(rows), result.impute(rows))
        np.testing.assert_array_equal(
            again.impute_draws(rows, 2, 3), result.impute_draws(rows, 2, 3)
        )
        np.testing.assert_array_equal(again.impute_intervals(rows), result.impute_intervals(rows))
    assert again.records == result.records
    assert again.workers() == result.workers()
    assert again.card == result.card


@each
def test_each_worker_tells_how_well_the_model_fits_it(name: str) -> None:
    entry = REGISTRY[name]
    result, rows = fitted(name)
    assert result.facts is not None
    assert result.facts.by_worker.scores is not None
    for table, (mean, spread) in zip(
        entry.tables, result.facts.by_worker.scores[:, :2], strict=True
    ):
        scores = result.score_samples(table)
        # Parameters travel on a grid that costs all rows together 1e-12 nats, one worker more.
        assert mean == pytest.approx(scores.mean(), abs=3e-6)
        assert spread == pytest.approx(scores.std(), abs=1e-5)
    assert result.facts.log_likelihood == pytest.approx(result.log_likelihood(rows), abs=1e-6)
    assert result.facts.row_spread == pytest.approx(result.score_samples(rows).std(), abs=3e-6)
    closing = result.ledger.summary()["closing"]
    assert closing["up"]["messages"] == closing["down"]["messages"] == len(entry.tables)
    assert closing["up"]["payload"] > 0


def test_all_workers_but_one_are_well_served() -> None:
    rng = np.random.default_rng(0)
    tables = {f"site {i}": rng.normal(size=(200, 2)) for i in range(6)}
    tables["far"] = 6 + 4 * rng.normal(size=(20, 2))
    result = plain_fit(emfed.gaussian_mixture(1), tables, rounds=3, scores=True)
    table = result.workers()
    bad = [n for n, b in zip(table["worker"], table["badly_served"], strict=True) if b]
    assert bad == ["far"]


def test_a_rare_or_wide_component_is_no_bad_service() -> None:
    """Its rows have a low log-likelihood, and the model says so itself."""
    rng = np.random.default_rng(0)
    tables = {f"site {i}": rng.normal(size=(200, 2)) for i in range(6)}
    tables["wide"] = 60 + 9 * rng.normal(size=(100, 2))
    model = emfed.gaussian_mixture(2)
    result = plain_fit(model, tables, field_tol=1e-10, scores=True, start="k-means")
    table = result.workers()
    assert table["log_likelihood"][-1] < min(table["log_likelihood"][:-1]) - 4
    assert not any(table["badly_served"])
    np.testing.assert_allclose(table["log_likelihood"], table["expected"], atol=0.3)


def test_a_site_with_more_or_fewer_values_missing_is_judged_by_what_it_has() -> None:
    rng = np.random.default_rng(1)
    tables = [rng.normal(size=(300, 4)) * [1, 20, 1, 1] + [0, 3, 0, 9] for _ in range(4)]
    for table, share in zip(tables[1:], (0.2, 0.5, 0.7), strict=True):
        table[rng.random(table.shape) < share] = np.nan
    tables[3][:, 1] = np.nan  # a whole column
    model = emfed.gaussian_mixture(1, missing=True)
    result = plain_fit(model, tables, field_tol=1e-10, scores=True)
    table = result.workers()
    assert np.ptp(table["log_likelihood"]) > 4
    assert not any(table["badly_served"])
    np.testing.assert_allclose(table["log_likelihood"], table["expected"], atol=0.3)
    tables[2] = tables[2] * 3 + 5
    result = plain_fit(model, tables, rounds=0, start=result.params, scores=True)
    assert result.workers()["badly_served"] == [False, False, True, False]


def test_what_to_expect_is_right() -> None:
    """Rows that the model draws have the log-likelihood it expects, component by component."""
    rng = np.random.default_rng(3)
    tables = [rng.normal(size=(3000, 2)), 8 + 3 * rng.normal(size=(1000, 2))]
    model = emfed.gaussian_mixture(2, "diag")
    result = plain_fit(model, tables, field_tol=1e-10, start="k-means")
    rows, labels = result.sample(20_000, seed=5)
    parts = [rows[labels == k] for k in (0, 1)]
    drawn = plain_fit(model, parts, rounds=0, start=result.params, scores=True)
    assert drawn.facts is not None
    assert drawn.facts.by_worker.scores is not None
    np.testing.assert_allclose(
        drawn.facts.by_worker.scores[:, 0], drawn.facts.by_worker.scores[:, 2], atol=0.06
    )
    np.testing.assert_allclose(
        drawn.facts.by_worker.scores[:, 1], drawn.facts.by_worker.scores[:, 3], atol=0.1
    )


def test_the_card_says_what_a_reader_must_know(tmp_path: Path) -> None:
    result, _ = fitted(seed=7, participation=emfed.algorithms.Bernoulli(0.5), rounds=20)
    result.save(tmp_path / "m.emfed")
    card = emfed.load(tmp_path / "m.emfed").card
    assert card["seed"] == 7
    assert card["data"]["workers"] == 4
    assert card["data"]["columns"] == 3
    assert card["settings"]["participation"] == result.card["settings"]["participation"]
    assert card["settings"]["limits"] == {"rounds": 20}
    assert card["bytes"]["round"]["up"]["payload"] > 0
    assert 0 < card["participation"]["answered"] < 80
    assert card["convergence"]["stopped"] == "rounds"
    assert set(card["software"]) >= {"emfed", "python", "numpy", "scipy"}
    assert card["created"].endswith("Z")
    json.dumps(card, allow_nan=False)
    # Any reader of safetensors sees the same card and the parameters.
    from safetensors import safe_open

    with safe_open(tmp_path / "m.emfed", framework="numpy") as file:
        assert json.loads(file.metadata()["description"])["card"] == card
        np.testing.assert_array_equal(file.get_tensor("params/means"), result.params.means)


def test_workers_may_stay_unnamed(tmp_path: Path) -> None:
    tables = {"Sankt Anna, Größe": make_data()[0], "Ω": make_data()[1]}
    result = plain_fit(emfed.gaussian_mixture(2), tables, rounds=2)
    result.save(tmp_path / "named.emfed")
    assert emfed.load(tmp_path / "named.emfed").workers()["worker"] == list(tables)
    result.save(tmp_path / "unnamed.emfed", names=False)
    assert emfed.load(tmp_path / "unnamed.emfed").workers()["worker"] == ["0", "1"]
    content = (tmp_path / "unnamed.emfed").read_bytes()
    assert "Größe".encode() not in content
    assert b"Gr\\u00f6" not in content


def test_a_model_of_ones_own(tmp_path: Path) -> None:
    @dataclass(frozen=True, eq=False)
    class Mine(STORED["gaussian-mixture/full"]):
        pass

    result = plain_fit(Mine(2), make_data(), rounds=3)
    with pytest.raises(emfed.ModelFileError, match="register_model"):
        result.save(tmp_path / "m.emfed")
    assert not list(tmp_path.iterdir())
    emfed.models.register_model("mine")(Mine)
    try:
        result.save(tmp_path / "m.emfed")
        rows = np.concatenate(make_data())
        np.testing.assert_array_equal(
            emfed.load(tmp_path / "m.emfed").predict(rows), result.predict(rows)
        )
        with pytest.raises(emfed.SettingsError, match="another class"):
            emfed.models.register_model("mine")(STORED["gaussian-mixture/full"])
    finally:
        del STORED["mine"], MODELS._makers["mine"]
    with pytest.raises(emfed.ModelFileError, match="'mine', which is not known here"):
        emfed.load(tmp_path / "m.emfed")
    with pytest.raises(emfed.SettingsError, match="dataclass"):
        emfed.models.register_model("whole numbers")(int)


def test_arrays_keep_their_shapes(tmp_path: Path) -> None:
    arrays = {
        "one": np.array(2.5),
        "none": np.empty((0, 3)),
        "turned": np.arange(6.0).reshape(2, 3).T,
    }
    save_checkpoint(tmp_path / "x", arrays, {"n": 1})
    again, description = load_checkpoint(tmp_path / "x")
    assert description == {"n": 1}
    for name, value in arrays.items():
        assert again[name].shape == value.shape
        np.testing.assert_array_equal(again[name], value)


# Files that are none.


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("whole") / "m.emfed"
    fitted()[0].save(path)
    return path.read_bytes()


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_damaged_files_are_refused(whole: bytes, tmp_path: Path, data: Any) -> None:
    damaged = bytearray(whole)
    if data.draw(st.booleans()):
        del damaged[data.draw(st.integers(0, len(whole) - 1)) :]
    else:
        place = data.draw(st.integers(0, len(whole) - 1))
        damaged[place] ^= data.draw(st.integers(1, 255))
    (tmp_path / "bad.emfed").write_bytes(bytes(damaged))
    with pytest.raises(emfed.ModelFileError):
        emfed.load(tmp_path / "bad.emfed")


def forged(whole: bytes, change: Any) -> bytes:
    """The file with its description and arrays changed, under a digest that fits."""
    length = int.from_bytes(whole[:8], "little")
    metadata = json.loads(whole[8 : 8 + length])["__metadata__"]
    arrays, description = load_tensors(whole), json.loads(metadata["description"])
    change(metadata, arrays, description)
    metadata["description"] = json.dumps(description)
    metadata["digest"] = _digest(arrays, metadata["description"])
    return save_tensors(arrays, metadata)


def field(description: Any, *path: str) -> Any:
    for name in path:
        description = description["fields"][name]
    return description


FORGERIES: dict[str, tuple[Any, str]] = {
    "version": (lambda m, a, d: m.update(version="2"), "version 2; this release reads version 1"),
    "format": (lambda m, a, d: m.update(format="other"), "not an emfed model file"),
    "checkpoint": (
        lambda m, a, d: m.update(format="emfed-checkpoint"),
        "it is an emfed checkpoint",
    ),
    "type": (lambda m, a, d: d["model"].update(type="os.system"), "not known here"),
    "not a model": (lambda m, a, d: d.update(model=5), "no model"),
    "a field more": (lambda m, a, d: d["model"]["fields"].update(x=1), "fields"),
    "a field less": (lambda m, a, d: d["model"]["fields"].pop("bound"), "fields"),
    "text for a number": (
        lambda m, a, d: d["model"]["fields"].update(n_components="many"),
        "n_components",
    ),
    "a huge model": (
        lambda m, a, d: d["model"]["fields"].update(n_components=10**15),
        "statistics",
    ),
    "a negative model": (lambda m, a, d: d["model"]["fields"].update(n_components=-1), "whole"),
    "other statistics": (lambda m, a, d: a.update(statistics=a["statistics"][:-1]), "statistics"),
    "float32": (lambda m, a, d: a.update(statistics=a["statistics"].astype("f4")), "statistics"),
    "no statistics": (lambda m, a, d: a.pop("statistics"), "statistics"),
    "NaN": (lambda m, a, d: a.update(statistics=np.nan * a["statistics"]), "statistics"),
    "another frame": (
        lambda m, a, d: a.update({"model/bound/frame/origin": np.zeros(7)}),
        "the model has 72 statistics",
    ),
    "a broken frame": (
        lambda m, a, d: a.update({"model/bound/frame/scale": np.ones((1, 2))}),
        "fit together",
    ),
    "other parameters": (
        lambda m, a, d: a.update({"params/means": a["params/means"] + 1}),
        "means",
    ),
    "records": (lambda m, a, d: a.pop("records/round"), "round"),
    "ledger": (lambda m, a, d: a.update(ledger=np.zeros((2, 2))), "ledger"),
    "rows": (lambda m, a, d: a.update({"workers/rows": np.zeros(3, dtype=np.int64)}), "rows"),
    "names": (lambda m, a, d: a.update({"workers/names": np.frombuffer(b"[]", np.uint8)}), "name"),
    "nothing": (lambda m, a, d: d.clear(), "model"),
    "deep": (lambda m, a, d: d.update(model=json.loads("[" * 90 + "]" * 90)), "no model"),
}


@pytest.mark.parametrize("name", FORGERIES)
def test_forged_files_are_refused(name: str, whole: bytes, tmp_path: Path) -> None:
    change, message = FORGERIES[name]
    (tmp_path / "bad.emfed").write_bytes(forged(whole, change))
    with pytest.raises(emfed.ModelFileError, match=message) as caught:
        emfed.load(tmp_path / "bad.emfed")
    assert "bad.emfed" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "content", [b"", b"x", b"PAR1" * 10, b"\xff" * 40, b"a,b\n1,2\n", bytes(64)]
)
def test_other_files_are_refused(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "other").write_bytes(content)
    with pytest.raises(emfed.ModelFileError, match="model file"):
        emfed.load(tmp_path / "other")
    with pytest.raises(emfed.ModelFileError, match="there is no model file"):
        emfed.load(tmp_path / "nowhere")
    with pytest.raises(emfed.ModelFileError, match="folder or a device"):
        emfed.load(tmp_path)


def test_a_hostile_header_costs_no_memory(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "bad.emfed"
    with path.open("wb") as file:
        file.write((4 << 30).to_bytes(8, "little"))
        file.truncate(5 << 30)  # takes no room on disk
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(emfed.ModelFileError, match="first bytes"):
        emfed.load(path)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 50_000


def test_a_full_disk_leaves_the_old_file(whole: bytes, tmp_path: Path) -> None:
    path = tmp_path / "m.emfed"
    path.write_bytes(whole)
    script = (
        "import resource, signal, sys, emfed\n"
        f"result = emfed.load({str(path)!r})\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        "try:\n"
        f"    result.save({str(path)!r})\n"
        "except emfed.ModelFileError as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60
    )
    assert "cannot write the model file" in done.stdout
    assert "untouched" in done.stdout
    assert path.read_bytes() == whole
    assert [p.name for p in tmp_path.iterdir()] == ["m.emfed"]


def as_of_0_1(result: emfed.Result, path: Path, simulated: bool) -> None:
    """A model file of release 0.1, which did not say what the noise followed from."""
    result.save(path)
    arrays, told = load_sealed(path, SEAL)
    for name in ("private", "noise"):
        del told["facts"]["settings"]["privacy"][name]
    told["facts"]["simulated"] = simulated
    save_sealed(path, SEAL, arrays, told, "")


def test_an_epsilon_of_0_1_that_was_made_in_one_process_is_shown_as_none(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    private = emfed.fit(emfed.ppca(1), rng.normal(size=(2000, 2)) * [1, 9], epsilon=3.0)
    path = tmp_path / "model.emfed"
    as_of_0_1(private, path, simulated=True)
    why = "not private: emfed .* fitted it in one process, and drew its noise from the seed"
    with pytest.warns(emfed.EmfedWarning, match=f"model.emfed is {why}"):
        found = emfed.load(path)
    found.report(tmp_path / "page.html")
    page = (tmp_path / "page.html").read_text(encoding="utf-8")
    for told in (repr(found), json.dumps(found.card), card_markdown(found.card), page):
        assert re.search(why, told)
        assert "epsilon" not in told
    found.save(path)  # which says so by itself
    assert emfed.load(path).privacy == found.privacy


def test_an_epsilon_of_0_1_of_a_run_between_machines_stays(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    private = emfed.fit(emfed.ppca(1), rng.normal(size=(2000, 2)) * [1, 9], epsilon=3.0)
    as_of_0_1(private, tmp_path / "model.emfed", simulated=False)
    found = emfed.load(tmp_path / "model.emfed").privacy
    assert found is not None
    assert found["private"] is True
    assert found["noise"] == "each site's secret"
    assert found["epsilon"] == pytest.approx(3.0)
