"""What the estimators share: rows in, an emfed run, and what it reached under sklearn's names."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MethodType
from typing import Any, ClassVar, Self, final

import numpy as np
from sklearn.base import BaseEstimator
from sklearn.exceptions import ConvergenceWarning
from sklearn.utils import check_random_state
from sklearn.utils.validation import check_is_fitted

from emfed.algorithms import Decreasing, FedEM
from emfed.artifacts.result import Result
from emfed.core.errors import EmfedWarning, SettingsError, check_count, check_range, worded
from emfed.core.protocols import FloatArray, IntArray, Model, plural
from emfed.core.wording import Face, Setting
from emfed.data.reading import is_frame, label
from emfed.data.sources import Source
from emfed.data.tables import Workers
from emfed.data.weights import check_row_weights
from emfed.data.workers import open_table
from emfed.fitting.by_hand import Run, go_on, open_run, workers_of
from emfed.fitting.estimators.intake import (
    as_frame,
    find_categories,
    frames_of,
    is_tables,
    on_device,
    read_one_table,
    read_workers,
    same_columns,
    tables_of,
)
from emfed.fitting.face import run, shown
from emfed.fitting.fitted import NOBODY, Fitted
from emfed.fitting.selection import with_setting
from emfed.fitting.settings import FitSettings, read_range
from emfed.models import FAMILIES
from emfed.models.component_summaries import width_of
from emfed.network import Federation, LiveSites, StackedFederation
from emfed.network.live import numbered

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


@final
class OneNumber:
    """A method that an estimator has where its number of components is one, not a range.

    scikit-learn's ``available_if`` says no more than that there is no such attribute.
    """

    def __init__(self, method: Any) -> None:
        self.method = method

    def __get__(self, estimator: Any, owner: Any = None) -> Any:
        if estimator is None:
            return self.method
        given, name = estimator._components(), estimator._face(Setting(estimator._number))
        if not hasattr(given, "__index__"):
            raise AttributeError(
                f"partial_fit needs one {name}, and {name}={given!r} is several to choose from: "
                "candidates are compared by how well they explain the same rows, and a batch is "
                "seen only once. Let fit choose on rows that you have, then go on: "
                f"estimator.set_params({name}=estimator.{name}_).partial_fit(X)."
            )
        return MethodType(self.method, estimator)


@final
class EstimatorFace(Face):
    """Settings as an estimator's arguments."""

    name = "estimator"

    def __init__(self, renamed: Mapping[str, str], families: bool) -> None:
        self.renamed, self.families = renamed, families

    def setting(self, mentioned: Setting) -> str:
        """An argument of this estimator, or of the one that takes families of columns."""
        name = self.renamed.get(mentioned.name, mentioned.name)
        maker = "FederatedMixture" if mentioned.of and not self.families else ""
        return super().setting(Setting(name, mentioned.value, maker))


class FederatedEstimator(BaseEstimator):
    """Fits a model on one table, on one with groups, or on a table for each worker."""

    step = Decreasing(first=1.0, power=0.6, offset=1.0)
    """gamma_k of the k-th `partial_fit`: online EM."""
    _number: ClassVar[str] = "n_components"
    """What the number of components is called here."""
    _renamed: ClassVar[Mapping[str, str]] = {"rounds": "max_iter", "seed": "random_state"}
    """Settings of a fit that have another name here."""

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

    def _label(self, X: Any) -> None:
        """Set what a fit tells of each row of X."""

    # Columns.

    def _read_families(self, tables: list[Any], reset: bool) -> None:
        """Find the categories of columns whose family is the word "categorical"."""
        given: Any = getattr(self, "families", None)
        if not reset or given is None or hasattr(tables[0], "toarray"):  # sparse: refused later
            return
        if isinstance(tables[0], list):  # rows as lists
            tables = [np.asarray(tables[0], dtype=object)]
        first = tables[0]
        elsewhere = isinstance(first, Workers)
        width = first.shape[1] if len(getattr(first, "shape", ())) == 2 else 0
        names = list(first.columns) if is_frame(first) else list(range(width))
        if elsewhere:
            names = list(first.columns or range(self.n_features_in_))
        if isinstance(given, Mapping):
            if absent := [name for name in given if name not in names]:
                raise SettingsError(
                    f"families names {absent[0]!r}, which is not among the columns {names}."
                )
            words = [name for name, family in given.items() if _is_word(family)]
        elif isinstance(given, (list, tuple)):
            if names and len(given) != len(names):
                raise SettingsError(
                    f"families lists {len(given)} families, and X has {len(names)} columns: give "
                    "one for each, or name the exceptions as {column: family}."
                )
            words = [name for name, family in zip(names, given, strict=False) if _is_word(family)]
        else:
            words = names if _is_word(given) else []
        if words and elsewhere:
            raise SettingsError(
                f"families: the categories of {words[0]!r} would be found in all rows, and these "
                "are read block by block: say Categorical(n), of a column with codes 0 to n - 1."
            )
        self.categories_ = find_categories(tables, words)

    def _families(self) -> Any:
        """The families as a model takes them, with the number of categories where there are any."""
        given: Any = self.families
        known: Any = getattr(self, "categories_", {})
        if isinstance(given, Mapping):
            found = {name: _family(family, known.get(name)) for name, family in given.items()}
            if all(isinstance(name, str) for name in found):
                return found
            every = range(self.n_features_in_)
            return [found.get(column, "gaussian") for column in every]
        if isinstance(given, (list, tuple)) or (_is_word(given) and known):
            each = given if isinstance(given, (list, tuple)) else [given] * len(known)
            names = getattr(self, "feature_names_in_", range(len(each)))
            return [_family(f, known.get(n)) for n, f in zip(names, each, strict=False)]
        return _family(given, None)

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

        Parameters
        ----------
        X : table, path, Source, dict, list or Federation
            One table, whose rows belong to the workers that ``groups`` names; a dict or list of
            tables, one for each worker; or a federation of sites elsewhere. Large Parquet files and
            lazy frames of polars are read block by block in every pass, never as a whole.
        y : None
            Ignored.
        groups : array or str, optional
            The worker of each row of one table: values, or a column of a data frame. Without it all
            rows are one worker's.
        sample_weight : array or sequence of arrays, optional
            How much each row counts, in the shape of the data.

        Returns
        -------
        FederatedEstimator
            The fitted estimator.
        """
        width = getattr(self, "n_features_in_", None)
        with worded(self._face):
            settings = self._settings()
            network = self._network(X, groups, sample_weight, reset=True)
            warm = self._warm(settings.numbers or (1,), width)
            if warm is not None:
                settings = settings.but(start=warm, n_init=1)
            # Of several sites, how well each is served, which includes the log-likelihood. Who is
            # elsewhere is counted when the federation is opened.
            alone = isinstance(network, StackedFederation) and network.size == 1
            found = self._run(settings.but(scores=not alone), network)
        result = found.result
        if known := getattr(self, "categories_", None):
            told = {str(name): [label(v) for v in values] for name, values in known.items()}
            result = with_setting(result, "categories", told)
        if said := result.facts.settings.get("remarks") if result.facts else None:
            result = with_setting(result, "remarks", [self._face(line) for line in said])
        self.selection_ = found.selection
        numbers = settings.numbers or (1,)
        k = numbers[0] if found.selection is None else found.selection.n_components
        self._described = self._model(k).describe()
        value = np.nan if found.log_likelihood is None else found.log_likelihood
        self._keep(result, result.converged, value)
        if isinstance(X, Federation | LiveSites):
            self._take_columns(result)
        self._label(X)
        for remark in found.remarks:
            warnings.warn(self._face(remark), EmfedWarning, stacklevel=2)
        if result.stopped == "interrupted":
            raise KeyboardInterrupt(
                f"{type(self).__name__} holds what {plural(self.n_iter_, 'round')} have reached."
            )
        if not self.converged_:
            fewer = self._fewer(found.result.model.words().part)
            words = (
                f"{type(self).__name__} did not converge in {plural(self.n_iter_, 'round')}: allow "
                f"more with max_iter, or a larger tol; several starts (n_init) or {fewer} may help "
                "too."
            )
            warnings.warn(words, NotConverged, stacklevel=2)
        return self

    def _run(self, settings: FitSettings, network: Federation | LiveSites) -> Fitted:
        """The fit, with a bar and a last line where the user wants to see it."""
        name = type(self).__name__
        with shown(settings.limits, NOBODY, bool(self.verbose), name) as watch:
            found = run(settings, network, watch)
        if self.verbose:
            sys.stderr.write(f"{name}: {found.result.outcome}\n")
        return found

    @property
    def _face(self) -> Face:
        """How messages call settings here."""
        return EstimatorFace(self._renamed, hasattr(self, "families"))

    def _fewer(self, parts: str) -> str:
        """What a fit that does not converge may do with."""
        return f"fewer {parts}s"

    def _network(
        self, X: Any, groups: Any | None, sample_weight: Any | None, reset: bool
    ) -> Federation | LiveSites:
        """Where the rows are: a federation of sites as it is, or tables in this process."""
        if reset:
            self._frames = None if isinstance(X, Federation | LiveSites) else frames_of(X)
        if isinstance(X, Federation | LiveSites):
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
        if result.columns is not None and result.columns != numbered(len(result.columns)):
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
            criterion=self._criterion(),
            algorithm=self.algorithm,
            follow_em=bool(self.follow_em),
            start=self.start,
            n_init=check_count("n_init", self.n_init),
            moves=check_count("moves", self.moves, 0),
            rounds=check_count("max_iter", self.max_iter),
            tol=None if self.tol is None else float(self.tol),
            seed=seed_of(self.random_state),
            participation=getattr(self, "participation", None),
            likelihood=True,
            epsilon=getattr(self, "epsilon", None),
            delta=getattr(self, "delta", 1e-6),
            noise_seed=getattr(self, "noise_seed", None),
        )

    def _criterion(self) -> Any:
        """What chooses among several numbers."""
        return getattr(self, "criterion", "bic")

    def _numbers(self) -> list[int]:
        return read_range(self._components(), self._number)

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
        self.raw_bytes_ = result.raw_bytes
        self.converged_ = bool(converged)
        self.n_rounds_ = self.n_iter_ = self.n_batches_ = max(1, result.rounds)
        self.guard_hits_ = result.guard_hits
        self.lower_bound_ = float(likelihood)
        self._publish(result)

    def save(self, path: str | Path, *, names: bool = True) -> None:
        """Write the fitted model as a file, which `emfed.load` reads.

        Parameters
        ----------
        path : str or Path
            Where it is written.
        names : bool
            Whether it holds the names of workers.
        """
        check_is_fitted(self, "result_")
        self.result_.save(path, names=names)

    def summary(self, X: Any = None, level: float = 0.95) -> Any:
        """Tell every parameter with its standard error, z and confidence bounds, as a table.

        Parameters
        ----------
        X : table, optional
            The rows of the fit in one table; not needed where the fit asked for the errors.
        level : float
            The probability of the confidence bounds.

        Returns
        -------
        Summary
            It prints as a table; ``table`` holds the columns.
        """
        check_is_fitted(self, "result_")
        known = self.result_ if X is None else self.result_.with_errors(self._rows(X))
        if known.uncertainty is None:
            raise SettingsError(
                "standard errors need one more pass over the rows of the fit: call summary(X) with "
                "them. Where rows stay with their owners, emfed.fit(..., errors=True) asks for it."
            )
        return known.summary(level)

    def report(self, path: str | Path, *, title: str | None = None) -> None:
        """Write the report of the fit, one HTML page that needs no network and no data.

        Parameters
        ----------
        path : str or Path
            Where it is written.
        title : str, optional
            The title of the page.
        """
        check_is_fitted(self, "result_")
        self.result_.report(path, title=title)

    def plot(self, what: str | None = None) -> Any:
        """Draw the fit as a matplotlib figure; see `emfed.Result.plot`.

        Parameters
        ----------
        what : {"components", "course", "sites", "shares", "selection"}, optional
            What is drawn; the first of these that the fit has if left out.

        Returns
        -------
        matplotlib.figure.Figure
            The figure.
        """
        check_is_fitted(self, "result_")
        return self.result_.plot(what)

    def validate(
        self, X: Any, *, groups: Any | None = None, sample_weight: Any | None = None
    ) -> Any:
        """Find out whether the fitted model serves each worker of these rows.

        Models that hold rows out are fitted from here; see docs/judging-a-fit.md.

        Parameters
        ----------
        X : table, dict, list or Federation
            The rows, as in `fit`.
        groups : array or str, optional
            The worker of each row of one table.
        sample_weight : array or sequence of arrays, optional
            How much each row counts, in the shape of the data.

        Returns
        -------
        Validation or None
            What the held-out rows say; None where the model has no likelihood.
        """
        check_is_fitted(self, "result_")
        settings, chosen = self._settings(), self.selection_
        numbers = settings.numbers or (1,)
        k = numbers[0] if chosen is None else chosen.n_components
        again = settings.but(n_components=[k], start=self.result_.params, n_init=1, validate=True)
        network = self._network(X, groups, sample_weight, reset=False)
        fitted = run(again, network)
        for remark in fitted.remarks:
            warnings.warn(self._face(remark), EmfedWarning, stacklevel=2)
        return fitted.result.validation

    # Online EM.

    @OneNumber
    def partial_fit(
        self,
        X: Any,
        y: Any = None,
        *,
        groups: Any | None = None,
        sample_weight: Any | None = None,
    ) -> Self:
        """Make one round of online EM on these rows: S moves by gamma_k towards their statistics.

        The first call sets the frame and the start; gamma_k is `step`, k**-0.6 by default, the
        decreasing steps of online EM, where k counts the rounds of an earlier fit too.

        Parameters
        ----------
        X : table, dict or list
            The rows of this batch, as in `fit`.
        y : None
            Ignored.
        groups : array or str, optional
            The worker of each row of one table.
        sample_weight : array or sequence of arrays, optional
            How much each row counts, in the shape of the data.

        Returns
        -------
        FederatedEstimator
            The estimator, one round further.
        """
        if isinstance(X, Federation | LiveSites):
            raise SettingsError(
                "partial_fit takes rows of this process: use fit for sites elsewhere."
            )
        with worded(self._face):
            settings, first = self._settings(), not hasattr(self, "result_")
            network = self._network(X, groups, sample_weight, reset=first)
            assert isinstance(network, Federation)
            k = self._numbers()[0]
        if not first and (changed := self._changed(k)):
            raise SettingsError(
                f"partial_fit goes on with the model as it is, but since then changed "
                f"{', '.join(changed)}: put that back, or begin anew with fit or a new estimator."
            )
        batches = 1 if first else self.n_batches_ + 1
        run = self._open(network, settings) if first else self._resume(network, settings)
        next(run, None)  # the opening may say all
        self._described = self._model(k).describe()
        self._keep(run.result, False, np.nan)
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
            tol=0,
        )

    def _resume(self, network: Federation, settings: FitSettings) -> Run:
        """A round with new rows, in the frame of the first ones."""
        model, statistics = self._online(self.result_)
        step = FedEM(step_size=self.step(self.n_batches_ + 1), memory_rate=0.0)
        return go_on(model, statistics, workers_of(network), step, settings.seed)

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


def weighted_score(estimator: Any, X: Any, sample_weight: Any | None) -> float:
    """The mean log-likelihood of the rows, each counted with its weight."""
    if sample_weight is None:
        return float(estimator._answer("log_likelihood", X))
    each = np.asarray(estimator._answer("score_samples", X))
    weights = check_row_weights(sample_weight, len(each), "sample_weight", some=True)
    return float(weights @ each / weights.sum())


def _is_word(family: Any) -> bool:
    return isinstance(family, str) and family in FAMILIES and FAMILIES[family].nominal


def _family(given: Any, categories: Any) -> Any:
    """A family; of categories that were found, with their number."""
    if not _is_word(given):
        return given
    if categories is None:
        raise SettingsError(
            "families: 'categorical' reads the categories off the rows, and these are not here: "
            "say Categorical(n), of columns with codes 0 to n - 1."
        )
    made: Any = FAMILIES[given]
    return made(len(categories))


class MixtureMethods:
    """What can be asked of a fitted mixture."""

    result_: Result

    def predict(self: Any, X: Any) -> IntArray:
        """Find the most likely component of each row.

        Parameters
        ----------
        X : table
            The rows.

        Returns
        -------
        array of shape (rows,)
            The components, counted from 0.
        """
        return np.asarray(self._answer("predict", X))

    def predict_proba(self: Any, X: Any) -> FloatArray:
        """Compute the probability of each component given each row.

        Parameters
        ----------
        X : table
            The rows.

        Returns
        -------
        array of shape (rows, K)
            The probabilities.
        """
        return np.asarray(self._answer("predict_proba", X))

    def fit_predict(self: Any, X: Any, y: Any = None, **options: Any) -> Any:
        """Fit, then find the most likely component of each row of X.

        Parameters
        ----------
        X : table, dict or list
            The rows, as in `fit`.
        y : None
            Ignored.
        **options : object
            The other arguments of `fit`.

        Returns
        -------
        array or list of arrays
            The components, ``labels_``.
        """
        return self.fit(X, **options).labels_

    def _label(self: Any, X: Any) -> None:
        """The component of each row of X; a list where X is one table per worker."""
        if isinstance(X, Federation | LiveSites):
            self.labels_ = None  # the rows are elsewhere
        elif is_tables(X):
            tables = [open_table(table, "X") for table in tables_of(X)]
            first = tables[0]
            self.labels_ = [
                self.predict(t if isinstance(t, Source) else same_columns(t, first, "X"))
                for t in tables
            ]
        else:
            self.labels_ = self.predict(X)

    def score_samples(self: Any, X: Any) -> FloatArray:
        """Compute the log-likelihood of each row.

        Parameters
        ----------
        X : table
            The rows.

        Returns
        -------
        array of shape (rows,)
            The log-likelihoods.
        """
        return np.asarray(self._answer("score_samples", X))

    def score(self: Any, X: Any, y: Any = None, sample_weight: Any | None = None) -> float:
        """Compute the mean log-likelihood of the rows, each counted with its weight.

        Parameters
        ----------
        X : table
            The rows.
        y : None
            Ignored.
        sample_weight : array of shape (rows,), optional
            How much each row counts.

        Returns
        -------
        float
            The mean log-likelihood.
        """
        return weighted_score(self, X, sample_weight)

    def aic(self: Any, X: Any) -> float:
        """Compute Akaike's criterion on these rows; smaller is better.

        Parameters
        ----------
        X : table
            The rows.

        Returns
        -------
        float
            The criterion.
        """
        return float(self._answer("aic", X))

    def bic(self: Any, X: Any) -> float:
        """Compute the Bayesian criterion on these rows; smaller is better.

        Parameters
        ----------
        X : table
            The rows.

        Returns
        -------
        float
            The criterion.
        """
        return float(self._answer("bic", X))

    def icl(self: Any, X: Any) -> float:
        """Compute BIC plus twice the entropy of the rows' components; smaller is better.

        Parameters
        ----------
        X : table
            The rows.

        Returns
        -------
        float
            The criterion.
        """
        return float(self._answer("icl", X))

    def sample(self: Any, n_samples: int = 1) -> tuple[Any, IntArray]:
        """Draw rows from the fitted model.

        As in scikit-learn, a number as ``random_state`` draws the same rows each time. Where the
        fit was given data frames the rows come as one, with its columns and words.

        Parameters
        ----------
        n_samples : int
            The number of rows.

        Returns
        -------
        tuple of an array or data frame and an array
            The rows, and the component of each.
        """
        check_is_fitted(self, "result_")
        rows, labels = self.result_.sample(n_samples, sample_seed(self.random_state))
        return as_frame(self, rows), labels
