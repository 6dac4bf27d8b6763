"""A verdict holds only if every seed does; figures of a broken run fail."""

from __future__ import annotations

import json

import numpy as np
import pytest

from emfed.core.errors import EmfedError, SettingsError
from paper import NAMES, verdicts
from paper.config import packaged


def judged(
    monkeypatch: pytest.MonkeyPatch,
    entry: dict[str, object],
    values: list[float],
    quick: bool = False,
) -> verdicts.Verdict | None:
    text = json.dumps({"seeds": [0], "verdicts": [{"name": "n", "measure": "m", **entry}]})
    monkeypatch.setattr(verdicts, "packaged", lambda name, file: text)
    out = verdicts.judge("x", {"m": np.array(values)}, quick)
    return out[0] if out else None


@pytest.mark.parametrize(
    ("entry", "values", "holds", "worst"),
    [
        ({"at_most": 2}, [1, 2], True, 2),
        ({"at_most": 2}, [1, 2.1, 0], False, 2.1),
        ({"at_least": 2}, [2, 9], True, 2),
        ({"at_least": 2}, [1.9, 9], False, 1.9),
        ({"at_least": 1, "at_most": 3}, [2, 2.9], True, 2.9),
        ({"at_least": 1, "at_most": 3}, [0.5, 2], False, 0.5),
        ({"value": 10, "tolerance": 0.1}, [9, 11], True, 9),
        ({"value": 10, "tolerance": 0.1}, [10, 11.2], False, 11.2),
        ({"at_most": 2}, [1, np.nan], False, np.nan),
        ({"at_least": 2}, [np.nan], False, np.nan),
        ({"at_most": 2}, [1, np.inf], False, np.inf),
        ({"at_least": 2}, [3, np.inf], True, 3),
    ],
)
def test_every_seed_must_hold(
    monkeypatch: pytest.MonkeyPatch,
    entry: dict[str, object],
    values: list[float],
    holds: bool,
    worst: float,
) -> None:
    verdict = judged(monkeypatch, entry, values)
    assert verdict is not None
    assert verdict.holds is holds
    np.testing.assert_equal(verdict.value, worst)
    json.dumps(verdict.plain(), allow_nan=False)


def test_quick_runs_have_bounds_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judged(monkeypatch, {"at_most": 1}, [5.0], quick=True) is None
    loose = judged(monkeypatch, {"at_most": 1, "quick": {"at_most": 9}}, [5.0], quick=True)
    same = judged(monkeypatch, {"at_most": 1, "quick": {}}, [5.0], quick=True)
    assert loose is not None
    assert loose.holds
    assert same is not None
    assert not same.holds


def test_claims_about_data_that_are_not_here_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [
        {"name": "here", "measure": "m", "at_most": 2, "optional": True},
        {"name": "away", "measure": "q", "at_most": 2, "optional": True, "quick": {}},
        {"name": "small", "measure": "r", "at_most": 2, "full": False, "quick": {}},
    ]
    text = json.dumps({"seeds": [0], "verdicts": entries})
    monkeypatch.setattr(verdicts, "packaged", lambda name, file: text)
    assert [v.name for v in verdicts.judge("x", {"m": [1.0]}, False)] == ["here"]
    assert verdicts.not_judged("x", {"m": [1.0]}, False) == ["away"]
    assert verdicts.not_judged("x", {"q": [1.0], "r": [1.0]}, True) == []
    with pytest.raises(EmfedError, match="no measure 'r'"):
        verdicts.judge("x", {"q": [1.0]}, True)


def test_wrong_expectations_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SettingsError, match="did you mean 'at_most'"):
        judged(monkeypatch, {"atmost": 1}, [5.0])
    text = json.dumps({"seeds": [0], "verdicts": [{"name": "n", "measure": "q", "at_most": 1}]})
    monkeypatch.setattr(verdicts, "packaged", lambda name, file: text)
    with pytest.raises(EmfedError, match="no measure 'q'"):
        verdicts.judge("x", {"m": [1.0]}, False)


@pytest.mark.parametrize("name", NAMES)
def test_every_experiment_expects_something_in_both_versions(name: str) -> None:
    expected = json.loads(packaged(name, "expected.json"))
    assert expected["seeds"] == list(range(5))
    assert len(expected["verdicts"]) >= 2
    assert any("quick" in entry for entry in expected["verdicts"])
    for entry in expected["verdicts"]:
        assert {"at_least", "at_most", "value"} & set(entry)
