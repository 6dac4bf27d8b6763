"""`check_model` passes the package's own models and names what is broken in others."""

from __future__ import annotations

import dataclasses
from typing import Any, ClassVar

import numpy as np
import pytest

import emfed
from emfed.models.covariances import Diagonal
from emfed.models.row_owner import RowOwner
from emfed.testing import CHECKS, check_model
from tests.helpers import make_data


class SumsNotMeans(emfed.models.LinearGaussian):
    def expected_statistics(self, data: Any, params: Any, weights: Any = None) -> Any:
        total = data.shape[-2] if weights is None else weights.sum(axis=-1)[..., None]
        return total * super().expected_statistics(data, params, weights)


class LongShot(emfed.models.LinearGaussian):
    """T goes half as far again as it should."""

    def maximize(self, statistics: Any) -> Any:
        return dataclasses.replace(super().maximize(statistics), mean=1.5 * statistics)


class Unguarded(Diagonal):
    def inside(self, statistics: Any) -> bool:
        return bool(np.all(np.isfinite(statistics)))

    def protect(self, before: Any, after: Any) -> Any:
        return after


class WrongLikelihood(Diagonal):
    """The E-step forgets the weights of the components, the likelihood does not."""

    def expected_statistics(self, data: Any, params: Any, weights: Any = None) -> Any:
        k = self.n_components
        flat = dataclasses.replace(params, weights=np.full_like(params.weights, 1 / k))
        return super().expected_statistics(data, flat, weights)


class SaysItTakesNaN(Diagonal):
    @property
    def allows_missing(self) -> bool:
        return True


class SinglePrecision(Diagonal):
    def features(self, xp: Any, rows: Any) -> Any:
        return super().features(xp, rows.astype(np.float32) * rows.dtype.type(1 / 3) * 3)


class OneWorkerOnly(emfed.models.LinearGaussian):
    def expected_statistics(self, data: Any, params: Any, weights: Any = None) -> Any:
        return super().expected_statistics(data.reshape(-1, data.shape[-1]), params, weights)


class ForgetsWeights(emfed.models.LinearGaussian):
    def expected_statistics(self, data: Any, params: Any, weights: Any = None) -> Any:
        return super().expected_statistics(data, params)


class Shifted(emfed.models.LinearGaussian):
    """The E-step pulls towards a place of its own."""

    def expected_statistics(self, data: Any, params: Any, weights: Any = None) -> Any:
        return super().expected_statistics(data, params, weights) + 0.3


class ScoresAreSums(emfed.models.LinearGaussian):
    def score_samples(self, data: Any, params: Any) -> Any:
        return 2 * super().score_samples(data, params)


class SharesOfThree(Diagonal):
    def responsibilities(self, data: Any, params: Any) -> Any:
        return 3 * super().responsibilities(data, params)


class AlwaysOthers(Diagonal):
    drawn: ClassVar[list[int]] = []

    def sample(self, params: Any, count: int, seed: int) -> Any:
        self.drawn.append(seed)
        return super().sample(params, count, len(self.drawn))


class FarClusters(Diagonal):
    def start_at(self, mass: Any, centres: Any, spread: Any) -> Any:
        return super().start_at(mass, centres, -spread)


@dataclasses.dataclass(frozen=True)
class FillsOverWhatWasSeen(RowOwner):
    def impute(self, data: Any, params: Any) -> Any:
        return 1 + super().impute(data, params)


class SaysOtherwise(emfed.models.LinearGaussian):
    def describe(self) -> dict[str, Any]:
        return super().describe() | {"unit": "cm"}


BROKEN = [
    (ScoresAreSums(0.5), "rows are scored", "is not the mean of score_samples"),
    (SharesOfThree(3), "rows are scored", "shares (rows, components) that sum to one"),
    (AlwaysOthers(3), "draws are rows", "other rows with the same seed"),
    (FarClusters(3), "clusters start it", "parameters outside the domain"),
    (FillsOverWhatWasSeen(2), "holes are filled", "changes values that were seen"),
    (SaysOtherwise(0.5), "settings travel", "cannot be made from these settings"),
    (Shifted(0.5), "fixed points are stationary", "h = 0 must mean a stationary point"),
    (SumsNotMeans(0.5), "statistics average", "must be averages over samples, not sums"),
    (LongShot(0.5), "maximize minimises", "maximize does not minimise the surrogate"),
    (Unguarded(3), "guard holds", "maximize is not finite"),
    (WrongLikelihood(3), "em descends", "do not belong to one model"),
    (SaysItTakesNaN(3), "missing is as said", "allows_missing is True, but check() refuses NaN"),
    (SinglePrecision(3), "float32 is exact", "float32 rows lose the answer"),
    (OneWorkerOnly(0.5), "axes broadcast", "a leading axis does not broadcast"),
    (ForgetsWeights(0.5), "weights repeat", "is not the weighted mean"),
]


@pytest.mark.parametrize(("model", "check", "words"), BROKEN, ids=lambda v: type(v).__name__)
def test_a_broken_model_is_caught_and_told(model: Any, check: str, words: str) -> None:
    report = check_model(model, make_data(0), raises=False)
    assert check in report.broken
    assert words in report.broken[check]
    with pytest.raises(emfed.ContractError, match=type(model).__name__) as caught:
        check_model(model, make_data(0))
    assert words in str(caught.value)


def test_a_good_model_keeps_everything() -> None:
    report = check_model(emfed.models.LinearGaussian(0.5), make_data(0))
    assert report.kept == tuple(CHECKS)
    assert not report.broken
    assert "ok      em descends" in str(report)


def test_what_is_no_model_is_told() -> None:
    with pytest.raises(emfed.SettingsError, match="model must be something like"):
        check_model("gaussian", make_data(0))
    with pytest.raises(emfed.DataError, match="at least 8 rows"):
        check_model(emfed.models.LinearGaussian(0.5), make_data(0)[0][:5])


def test_checks_say_what_they_expect() -> None:
    for name, check in CHECKS.items():
        assert check.__doc__, name
