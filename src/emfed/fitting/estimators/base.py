"""What the estimators share: rows in, an emfed run, and what it reached under sklearn's names."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted

from emfed.algorithms import Decreasing, FedEM
from emfed.artifacts.result import Result
from emfed.core.errors import EmfedWarning, SettingsError, check_count, check_range
from emfed.core.protocols import WHOLE, Federation, FloatArray, IntArray, Model
from emfed.fitting.driver import open_run, result_of, run_fit
from emfed.fitting.estimators.intake import on_device, read_one_table, read_workers
from emfed.fitting.rounds import Run
from emfed.fitting.session import Session
from emfed.fitting.settings import FitSettings, read_range
from emfed.models.portraits import width_of
from emfed.network import StackedFederation

SHAPING = ("model", "n_components", "n_factors", "covariance_type", "families")
"""Settings, as models describe themselves, without which parameters of a fit start no other."""

BY_ROW = ("predict", "predict_proba", "score_samples", "impute")
"""Questions with an answer for each row, which may be asked of one part of them after another."""


class NotConverged(EmfedWarning, ConvergenceWarning):
    """A fit that ended before it had converged."""


def seed_of(random_state: Any) -> int:
    """A seed from scikit-learn's ``random_state``; None is 0, so that runs can be repeated."""
    if random_state is None:
        return 0
    if hasattr(random_state, "randint"):
        return int(random_state.randint(2**31 - 1))
    return check_count("random_state", random_state, 0)


def sample_seed(random_state: Any) -> int:
    """A seed for rows that are drawn: as in scikit-learn, None draws others each time."""
    return seed_of(check_random_state(None) if random_state is None else random_state)


def _one_number(estimator: Any) -> bool:
    """`partial_fit` is for one number of components: batches cannot be compared."""
    if hasattr(estimator._components(), "__index__"):
        return True
    raise AttributeError("partial_fit needs one n_components, not several to choose from.")


class FederatedEstimator(BaseEstimator):
    """Fits a model on one table, on one with groups, or on a table for each worker."""

    step = Decreasing(first=1.0, power=0.6, offset=1.0)
    """gamma_k of the k-th `partial_fit`: online EM."""

    # What an estimator says of itself.

    def _model(self, k: int) -> Model:
        """The model with so many components."""
        raise SettingsError(f"{type(self).__name__} has no model.")

    def _components(self) -> Any:
        """The number of components, or several to choose from."""
        return self.n_components

    @property
    def _missing(self) -> bool:
        """Whether NaN is a missing value."""
        return False

    def _publish(self, result: Result) -> None:
        """Set the fitted attributes of the kind of model."""

    # Fitting.

    def fit(
        self,
        X: Any,
        y: Any = None,
        *,
        groups: Any | None = None,
        sample_weight: Any | None = None,
    ) -> Self:
        """Fit the model; nothing but aggregates leaves a worker.

        ``X`` is one table, whose rows belong to the workers that ``groups`` names (values, or a
        column of a data frame; without it all rows are one worker's), or a dict or list of tables,
        one per worker. ``sample_weight`` has the same shape. ``y`` is ignored.
        """
        width = getattr(self, "n_features_in_", None)
        settings = self._settings()
        network = self._network(X, groups, sample_weight, reset=True)
        warm = self._warm(settings.numbers or (1,), width)
        if warm is not None:
            settings = settings.but(start=warm, n_init=1)
        found = run_fit(settings, network)
        if found.result.stopped == "interrupted":
            raise KeyboardInterrupt
        self.selection_ = found.selection
        numbers = settings.numbers or (1,)
        k = numbers[0] if found.selection is None else found.selection.n_components
        self._described = self._model(k).describe()
        self._keep(found.result, found.result.converged, found.log_likelihood or np.nan)
        if isinstance(X, Federation):
            self._take_columns(found.result)
        for remark in found.remarks:
            warnings.warn(remark, EmfedWarning, stacklevel=2)
        if not self.converged_:
            warnings.warn(
                f"{type(self).__name__} did not converge in {self.n_iter_} rounds:"
                " allow more with max_iter, or a larger tol; several starts (n_init) or fewer "
                "components may help too.",
                NotConverged,
                stacklevel=2,
            )
        return self

    def _network(
        self, X: Any, groups: Any | None, sample_weight: Any | None, reset: bool
    ) -> Federation:
        """Where the rows are: a federation of sites as it is, or tables in this process."""
        if isinstance(X, Federation):
            if groups is not None or sample_weight is not None:
                raise SettingsError("a Federation has its own data: leave out the other arguments.")
            return X
        missing = self._missing
        workers = read_workers(self, X, groups, sample_weight, reset=reset, missing=missing)
        return StackedFederation(workers)

    def _take_columns(self, result: Result) -> None:
        """What scikit-learn wants to know of X, as sites elsewhere told it."""
        self.groups_column_ = None
        self.n_features_in_ = width_of(result.model) or 0
        if result.columns is not None:
            self.feature_names_in_ = np.array(result.columns, dtype=object)
        elif hasattr(self, "feature_names_in_"):
            del self.feature_names_in_

    def _settings(self) -> FitSettings:
        """The options of the fit, checked."""
        if self.tol is not None:
            check_range("tol", self.tol, 0, np.inf, open_low=True, open_high=True)
        return FitSettings(
            self._model,
            n_components=self._numbers(),
            criterion=getattr(self, "criterion", "bic"),
            algorithm=self.algorithm,
            follow_em=bool(self.follow_em),
            start=self.start,
            n_init=check_count("n_init", self.n_init),
            rounds=check_count("max_iter", self.max_iter),
            tol=None if self.tol is None else float(self.tol),
            seed=seed_of(self.random_state),
            participation=getattr(self, "participation", None),
            likelihood=True,
        )

    def _numbers(self) -> list[int]:
        return read_range(self._components())

    def _warm(self, numbers: Sequence[int], width: int | None) -> Any:
        """Where the last fit, on so many columns, ended, if the next is to go on from there."""
        if not (self.warm_start and hasattr(self, "result_")):
            return None
        if len(numbers) > 1:
            warnings.warn(
                "warm_start goes on with one number of components; with several to choose from "
                "the fit starts anew.",
                EmfedWarning,
                stacklevel=3,
            )
            return None
        changed = self._changed(numbers[0], SHAPING)
        if width != self.n_features_in_:
            changed.append(f"columns from {width} to {self.n_features_in_}")
        if changed:
            raise SettingsError(
                f"warm_start=True goes on from the last fit, but since then changed "
                f"{', '.join(changed)}: put that back, or fit with warm_start=False."
            )
        return self.result_.params

    def _changed(self, k: int, names: Sequence[str] | None = None) -> list[str]:
        """Settings of the model that are not those it was fitted with, in words."""
        before, now = self._described, self._model(k).describe()
        return [
            f"{name} from {before.get(name)!r} to {now.get(name)!r}"
            for name in (names or {**before, **now})
            if before.get(name) != now.get(name)
        ]

    def _keep(self, result: Result, converged: bool, likelihood: float) -> None:
        """The fitted attributes that all estimators have."""
        self.result_ = result
        self.records_ = result.records
        self.bytes_ = result.bytes_up + result.bytes_down
        self.converged_ = bool(converged)
        self.n_rounds_ = self.n_iter_ = self.n_batches_ = max(1, result.rounds)
        self.guard_hits_ = result.guard_hits
        self.lower_bound_ = float(likelihood)
        self._publish(result)

    def save(self, path: str | Path, *, names: bool = True) -> None:
        """Write the fitted model as a file, which `emfed.load` reads; see `emfed.Result.save`."""
        check_is_fitted(self, "result_")
        self.result_.save(path, names=names)

    def summary(self, X: Any = None, level: float = 0.95) -> Any:
        """Every parameter with its standard error, z and confidence bounds; prints as a table.

        ``X`` are the rows of the fit in one table; not needed where the fit asked for the errors.
        """
        check_is_fitted(self, "result_")
        known = self.result_ if X is None else self.result_.with_errors(self._rows(X))
        return known.summary(level)

    # Online EM.

    @available_if(_one_number)
    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        *,
        groups: Any | None = None,
        sample_weight: Any | None = None,
    ) -> Self:
        """One round of online EM on these rows: S moves by gamma_k towards their statistics.

        The first call sets the frame and the start; gamma_k is `step`, k**-0.6 by default, the
        decreasing steps under which the paper's FedEM converges, where k counts the rounds of an
        earlier fit too.
        """
        if isinstance(X, Federation):
            raise SettingsError(
                "partial_fit takes rows of this process: use fit for sites elsewhere."
            )
        settings, first = self._settings(), not hasattr(self, "result_")
        network = self._network(X, groups, sample_weight, reset=first)
        k = self._numbers()[0]
        if not first and (changed := self._changed(k)):
            raise SettingsError(
                f"partial_fit goes on with the model as it is, but since then changed "
                f"{', '.join(changed)}: put that back, or begin anew with fit or a new estimator."
            )
        batches = 1 if first else self.n_batches_ + 1
        run = self._open(network, settings) if first else self._resume(network, settings)
        run.step()
        self._described = self._model(k).describe()
        self._keep(result_of(run, "rounds"), False, np.nan)
        self.n_batches_ = self.n_rounds_ = self.n_iter_ = batches
        return self

    def _online_model(self, k: int) -> Model:
        """The model for batches, where it differs."""
        return self._model(k)

    def _online(self, result: Result) -> tuple[Model, FloatArray]:
        """Model and statistics to go on from with other rows."""
        return result.model, result.statistics

    def _open(self, network: Federation, settings: FitSettings) -> Run:
        """The opening exchange and a start from the first rows."""
        return open_run(
            self._online_model(self._numbers()[0]),
            network,
            FedEM(step_size=1.0, memory_rate=0.0),
            start=settings.start,
            n_init=settings.n_init,
            seed=settings.seed,
        )

    def _resume(self, network: Federation, settings: FitSettings) -> Run:
        """A round with new rows, in the frame of the first ones."""
        model, statistics = self._online(self.result_)
        session = Session(model, network, seed=settings.seed)
        session.adopt(model)
        step = self.step(self.n_batches_ + 1)
        return Run(session, WHOLE, FedEM(step_size=step, memory_rate=0.0), statistics)

    # What can be asked.

    def _rows(self, X: Any) -> Any:
        """Checked rows for a fitted model."""
        check_is_fitted(self, "result_")
        return read_one_table(self, X, missing=self._missing)

    def _answer(self, name: str, X: Any) -> Any:
        parts = on_device(self, self._rows(X), by_row=name in BY_ROW)
        ask = getattr(self.result_, name)
        found = [ask(rows) for rows in parts]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def __sklearn_tags__(self) -> Any:
        """NaN is allowed where it is a missing value."""
        tags = super().__sklearn_tags__()
        tags.input_tags.allow_nan = self._missing
        return tags


class MixtureMethods:
    """What can be asked of a fitted mixture."""

    result_: Result

    def predict(self: Any, X: Any) -> IntArray:
        """The most likely component of each row."""
        return np.asarray(self._answer("predict", X))

    def predict_proba(self: Any, X: Any) -> FloatArray:
        """p(component | row)."""
        return np.asarray(self._answer("predict_proba", X))

    def fit_predict(self: Any, X: Any, y: Any = None, **options: Any) -> IntArray:
        """Fit, then the most likely component of each row of X, one table."""
        self.fit(X, **options)
        return np.asarray(self.predict(X))

    def score_samples(self: Any, X: Any) -> FloatArray:
        """The log-likelihood of each row."""
        return np.asarray(self._answer("score_samples", X))

    def score(self: Any, X: Any, y: Any = None) -> float:
        """The mean log-likelihood of the rows."""
        return float(self._answer("log_likelihood", X))

    def aic(self: Any, X: Any) -> float:
        """Akaike's criterion on these rows; smaller is better."""
        return float(self._answer("aic", X))

    def bic(self: Any, X: Any) -> float:
        """The Bayesian criterion on these rows; smaller is better."""
        return float(self._answer("bic", X))

    def icl(self: Any, X: Any) -> float:
        """BIC plus twice the entropy of the rows' components; smaller is better."""
        return float(self._answer("icl", X))

    def sample(self: Any, n_samples: int = 1) -> tuple[FloatArray, IntArray]:
        """Rows that the fitted model draws, and the component of each.

        As in scikit-learn, a number as ``random_state`` draws the same rows each time.
        """
        check_is_fitted(self, "result_")
        rows, labels = self.result_.sample(n_samples, sample_seed(self.random_state))
        return rows, labels
