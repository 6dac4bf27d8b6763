"""What a run reached, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np

from emfed.artifacts import errors
from emfed.artifacts.cards import Facts, make_card, size, worker_table
from emfed.artifacts.modelfiles import read_model, write_model
from emfed.artifacts.validation import Validation
from emfed.core.errors import SettingsError, check_count, check_range
from emfed.core.ledger import Ledger
from emfed.core.protocols import (
    AssignsRows,
    DrawsRows,
    FillsRows,
    FloatArray,
    IntArray,
    ScoresRows,
    free_parameters,
)
from emfed.core.records import Records
from emfed.core.streams import check_seed
from emfed.data.reading import in_words, match_columns, read_table
from emfed.data.sources import ParquetRows, Source
from emfed.models.adapting import adapt
from emfed.models.mixture import MixtureModel
from emfed.models.portraits import width_of

CRITERIA = ("aic", "bic", "icl")


def criterion(name: str, likelihood: float, entropy: float, rows: float, free: int) -> float:
    """AIC, BIC or ICL from the mean log-likelihood and the mean entropy of the components.

    ICL (Biernacki, Celeux, Govaert 2000) in the form with the entropy: BIC + 2 x entropy.
    """
    if name not in CRITERIA:
        raise SettingsError(f"criterion must be one of {', '.join(CRITERIA)}; got {name!r}.")
    charge = 2.0 * free if name == "aic" else float(np.log(rows)) * free
    return charge - 2 * rows * (float(likelihood) - (float(entropy) if name == "icl" else 0.0))


@final
@dataclass(frozen=True, eq=False)
class Result:
    """What a run reached. ``params`` are in the user's units; ``model`` knows its data."""

    model: Any
    params: Any
    records: Records
    stopped: str
    """The limit that was met, ``callback`` or ``interrupted``."""
    seed: int
    statistics: FloatArray
    ledger: Ledger
    """Every byte by worker, direction and kind; payload and envelope apart."""
    columns: tuple[str, ...] | None = None
    """Names of the data's columns, where it had any."""
    worker_weights: FloatArray | None = None
    """w_i of each worker, summing to one."""
    samples: float = 0
    """Rows of all workers together, each counted with its weight."""
    facts: Facts | None = None
    """Rows per worker, settings, versions, date; and the fit of each worker, if asked for."""
    pooled_summary: Mapping[str, FloatArray] | None = None
    """What the opening exchange told of all rows together: what `adapt` starts from."""
    confirmed: bool = True
    """Whether a full pass, or a bold step, found that little was left to gain."""
    uncertainty: FloatArray | None = None
    """R with R^T R the covariance of the statistics, where the fit asked for it; see `errors`."""

    def __repr__(self) -> str:
        return f"<Result: {self.outcome}>"

    @property
    def outcome(self) -> str:
        """How the fit ended, in a line: rounds, bytes, and beside them the size of the rows."""
        ended = "converged" if self.converged else f"stopped by {self.stopped}"
        raw = self.raw_bytes
        beside = "" if raw is None else f" (the rows themselves are {size(raw)})"
        up, down = size(self.bytes_up), size(self.bytes_down)
        private = self.privacy
        told = f"; {private['words']}" if private else ""
        return f"{ended} in {self.rounds} rounds, {up} up and {down} down{beside}{told}"

    @property
    def privacy(self) -> Mapping[str, Any] | None:
        """For a private fit, the epsilon and delta that each site spent, and how, in words."""
        return None if self.facts is None else self.facts.settings.get("privacy")

    @property
    def raw_bytes(self) -> int | None:
        """The size of all rows as doubles, what pooling them would send; None if not known."""
        width, facts = width_of(self.model), self.facts
        return None if facts is None or width is None else 8 * width * int(facts.rows.sum())

    @property
    def rounds(self) -> int:
        """The number of the last round."""
        return self.records[-1].round

    @property
    def bytes_up(self) -> int:
        """All bytes that workers sent."""
        return self.ledger.total("up")

    @property
    def bytes_down(self) -> int:
        """All bytes that workers were sent."""
        return self.ledger.total("down")

    @property
    def converged(self) -> bool:
        """Whether the run ended because little was left to gain, and a full pass confirmed it.

        A private fit ends with its budget, after as many rounds as were planned.
        """
        return self.confirmed and self.stopped in ("nats", "tolerance", "budget")

    @property
    def guard_hits(self) -> int:
        """How often a step had to be halved to stay where T is defined."""
        return sum(record.guard_hits for record in self.records)

    @property
    def card(self) -> dict[str, Any]:
        """The model card: data, settings, bytes, participation, convergence, versions."""
        return make_card(self)

    def workers(self) -> dict[str, list[Any]]:
        """One row per worker: rows, messages and bytes each way, and fit where it is known."""
        return worker_table(self.ledger, self.facts)

    @property
    def validation(self) -> Validation | None:
        """What rows that were held out say of the model, by worker; None: the fit did not ask."""
        facts = self.facts
        if facts is None or facts.validation is None:
            return None
        return Validation.of(self.workers()["worker"], facts.rows, facts.validation)

    def save(self, path: str | Path, *, names: bool = True) -> None:
        """Write a model file, which `emfed.load` reads; without ``names`` workers are unnamed."""
        write_model(path, self, names)

    def report(self, path: str | Path, *, title: str | None = None) -> None:
        """Write the report of the fit: one HTML page that needs no network and no data."""
        from emfed.artifacts.fits import write_report

        write_report(self, path, title)

    def plot(self, what: str = "components") -> Any:
        """A matplotlib figure of the fit.

        ``what`` is ``"components"`` (in the model's own principal axes), ``"course"``,
        ``"selection"`` (numbers of components that were compared), ``"sites"`` (how well each is
        served) or ``"shares"`` (components by site), where the fit knows of it.
        """
        from emfed.artifacts.fits import plot

        return plot(self, what)

    def adapt(self, data: Any, worth: float = 50.0) -> Result:
        """This model fitted to the rows of one worker, who alone needs it; nothing is sent.

        The common model counts as much as ``worth`` rows of it would: near 0 the worker's own rows
        decide, and where there are far fewer than ``worth`` of them the common model stays. Records
        and ledger stay those of the common fit; the card says that it was adapted.
        """
        check_range("worth", worth, 0, np.inf, open_low=True, open_high=True)
        if self.pooled_summary is None:
            raise SettingsError("this result lacks the summary of all rows: fit the model again.")
        rows, _ = self._inner(data)
        model, statistics = adapt(self.model, self.statistics, self.pooled_summary, rows, worth)
        facts = self.facts
        if facts is not None:
            told = {"adapted": {"rows": len(rows), "worth": worth}}
            facts = replace(
                facts, settings={**facts.settings, **told}, scores=None, validation=None
            )
        params = model.to_user(model.maximize(statistics))
        adapted = replace(self, model=model, statistics=statistics, params=params, facts=facts)
        return replace(adapted, uncertainty=None)

    def with_errors(self, data: Any) -> Result:
        """The same with its uncertainty, from the rows of the fit in one table; nothing is sent."""
        rows, _ = self._inner(data)
        chart = errors.Chart.at(self.model, self.statistics, self.samples)
        told = [self.model.expected_statistics(rows, params) for params in chart.questions()]
        return replace(self, uncertainty=chart.root(np.array(told), self.samples)[0])

    def errors_of(self, function: Callable[[Any], Any]) -> tuple[FloatArray, FloatArray]:
        """A function of the parameters, and the standard error of each number it gives.

        Errors are those of the observed information, carried on by the delta method: say,
        ``result.errors_of(lambda params: params.means[1] - params.means[0])``. The fit must have
        asked for them (``errors=True``).
        """
        shape = np.shape(function(self.params))
        values, moves = errors.spread(self.model, self.statistics, self._root(), function)
        found = np.sqrt((moves**2).sum(axis=0))
        return values.reshape(shape), found.reshape(shape)

    def summary(self, level: float = 0.95) -> errors.Summary:
        """Every parameter with its standard error, z and confidence bounds: it prints as a table.

        ``summary().table`` holds the columns. Bounds are worked out on the scale of log-odds for
        shares and of logs for what is positive. Errors are those of the observed information: right
        where the model is. The fit must have asked for them (``errors=True``).
        """
        check_range("level", level, 0, 1, open_low=True, open_high=True)
        return errors.summarise(self, self._root(), level)

    def _root(self) -> FloatArray:
        if self.uncertainty is None:
            raise SettingsError(
                "this fit did not ask for standard errors: fit with errors=True (`emfed fit "
                "--errors`, errors = true under [fit] of a run.toml), or give the rows of the fit: "
                "result.with_errors(rows), estimator.summary(rows)."
            )
        return self.uncertainty

    def log_likelihood(self, data: Any) -> float:
        """The mean log-likelihood of rows, per sample, in the user's units."""
        return float(self.model.log_likelihood(*self._inner(data)))

    def score_samples(self, data: Any) -> FloatArray:
        """The log-likelihood of each row, in the user's units."""
        if not isinstance(self.model, ScoresRows):
            raise self._cannot("score single rows", "log_likelihood() gives their mean")
        return np.asarray(self.model.score_samples(*self._inner(data)))

    def predict_proba(self, data: Any) -> FloatArray:
        """p(component | row)."""
        if not isinstance(self.model, AssignsRows):
            raise self._cannot(
                "predict: it has no components", "fit a mixture or k_means, or use log_likelihood()"
            )
        return np.asarray(self.model.responsibilities(*self._inner(data)))

    def predict(self, data: Any) -> IntArray:
        """The most likely component of each row."""
        if isinstance(self.model, MixtureModel):  # on a device: labels alone come back
            return self.model.labels(*self._inner(data)).astype(np.int64)
        return np.argmax(self.predict_proba(data), axis=-1).astype(np.int64)

    @property
    def free_parameters(self) -> int:
        """How many numbers of the model were free: what AIC and BIC charge for."""
        return free_parameters(self.model)

    def aic(self, data: Any) -> float:
        """Akaike's criterion of the model on these rows; smaller is better."""
        rows, params = self._inner(data)
        likelihood = float(self.model.log_likelihood(rows, params))
        return criterion("aic", likelihood, 0.0, rows.shape[0], self.free_parameters)

    def bic(self, data: Any) -> float:
        """The Bayesian criterion (Schwarz) of the model on these rows; smaller is better."""
        rows, params = self._inner(data)
        likelihood = float(self.model.log_likelihood(rows, params))
        return criterion("bic", likelihood, 0.0, rows.shape[0], self.free_parameters)

    def icl(self, data: Any) -> float:
        """BIC plus twice the entropy of the rows' components, so that these be distinct."""
        rows, params = self._inner(data)
        _, likelihood, spread = self.model.evaluate(rows, params)
        return criterion("icl", float(likelihood), float(spread), len(rows), self.free_parameters)

    def sample(self, count: int = 1, seed: int = 0) -> tuple[FloatArray, IntArray]:
        """Rows that the fitted model draws, in the user's units, and the component of each."""
        count, seed = check_count("count", count), check_seed(seed)
        params = self.model.maximize(self.statistics)
        if not isinstance(self.model, DrawsRows):
            raise self._cannot(
                "draw rows", "fit gaussian_mixture, mixed_mixture, factor_analysis or ppca"
            )
        rows, labels = self.model.sample(params, count, seed)
        return np.asarray(rows), labels

    def impute(self, data: Any) -> FloatArray:
        """Rows with NaN replaced by posterior means (of categories: the likeliest code)."""
        return np.asarray(self._imputable().impute(*self._inner(data)))

    def impute_draws(self, data: Any, draws: int = 5, seed: int = 0) -> FloatArray:
        """Random completions from the posterior, ``(draws, rows, columns)``."""
        draws, seed = check_count("draws", draws), check_seed(seed)
        return np.asarray(self._imputable().draw(*self._inner(data), draws, seed))

    def impute_intervals(self, data: Any, level: float = 0.9) -> tuple[FloatArray, FloatArray]:
        """Lower and upper ends of central predictive intervals of what is NaN."""
        check_range("level", level, 0, 1, open_low=True, open_high=True)
        return self._imputable().intervals(*self._inner(data), level)

    def _imputable(self) -> FillsRows:
        if not isinstance(self.model, FillsRows):
            raise self._cannot(
                "impute: it has no missing values",
                "fit mixed_mixture(...) or gaussian_mixture(..., missing=True)",
            )
        return self.model

    def _cannot(self, what: str, instead: str) -> SettingsError:
        name = self.model.describe().get("model", type(self.model).__name__)
        return SettingsError(f"the model {name!r} cannot {what}; {instead}.")

    def _inner(self, data: Any) -> tuple[Any, Any]:
        """Checked rows, and the parameters in the units of the statistics.

        Columns that the fit did not have, such as the workers' names, are left out.
        """
        if isinstance(data, (str, Path)):
            data = ParquetRows(data, self.columns)
        if isinstance(data, Source):
            data = data.read(0, data.shape[0])
        elif self.columns is not None and set(self.columns) < set(getattr(data, "columns", ())):
            data = data[list(self.columns)]
        known = {} if self.facts is None else self.facts.settings.get("categories", {})
        rows, columns = read_table(data, "the data", in_words(data, known))
        if columns is not None and self.columns is not None:
            rows = match_columns(rows, columns, self.columns, "the data")
        self.model.check(rows, "the data", self.columns or columns)
        return rows, self.model.maximize(self.statistics)


def load(path: str | Path) -> Result:
    """Read a model file: a result that predicts, scores and imputes as the one that was saved.

    Files hold no code. One that is damaged, cut short or something else is a `ModelFileError`.
    """
    return Result(**read_model(path))
