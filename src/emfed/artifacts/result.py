"""What a run reached, and what can be asked of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, final

import numpy as np

from emfed.artifacts import errors, fits
from emfed.artifacts.company import Company
from emfed.artifacts.facts import Facts
from emfed.artifacts.model_card import make_card, size, worker_table
from emfed.artifacts.modelfiles import read_model, write_model
from emfed.artifacts.own_rows import OwnRows, look_at
from emfed.artifacts.promises import broken
from emfed.artifacts.validation import Validation
from emfed.core.errors import SettingsError, check_count, check_range
from emfed.core.ledger import Ledger
from emfed.core.protocols import (
    AssignsRows,
    DrawsRows,
    FillsRows,
    FloatArray,
    HoldsSequences,
    IntArray,
    ScoresRows,
    free_parameters,
)
from emfed.core.records import Records
from emfed.core.streams import check_seed
from emfed.core.wording import Setting, Wording
from emfed.data.reading import in_words, match_columns, read_table
from emfed.data.sources import ParquetRows, Source, chunks
from emfed.data.workers import open_table
from emfed.models.adapting import adapt
from emfed.models.clusters import Clusters
from emfed.models.component_summaries import width_of
from emfed.models.mixture import MixtureEStep

CRITERIA = ("aic", "bic", "icl")
ENDINGS = {
    "nats": "little was left to gain",
    "tolerance": "the mean field was small enough",
    "budget": "its budget was spent",
    "interrupted": "it was interrupted",
    "callback": "a callback ended it",
    "silence": "nobody answered",
}


def ending(stopped: str) -> str:
    """Why a run ended, in words, as `Result.stopped` names it."""
    return ENDINGS.get(stopped, f"it met its limit on {stopped}")


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
    """What a fit reached, and what can be asked of it.

    Parameters
    ----------
    model : Model
        The model, bound to the data.
    params : Parameters
        The parameters, in the user's units.
    records : Records
        One record for each round.
    stopped : str
        The limit that was met, "callback" or "interrupted".
    seed : int
        The seed of the fit.
    statistics : array of shape (q,)
        The statistics S that the parameters are T of.
    ledger : Ledger
        Every byte by worker, direction and kind; payload and envelope apart.
    columns : tuple of str, optional
        The names of the data's columns, where it had any.
    worker_weights : array of shape (workers,), optional
        The weight w_i of each worker, which sum to one; None where workers told sums alone.
    samples : float
        The rows of all workers together, each counted with its weight.
    facts : Facts, optional
        What is known of workers and rows, settings, versions, date; and how well the model fits
        them, if asked for.
    pooled_summary : mapping from str to array, optional
        What the opening exchange told of all rows together: what `adapt` starts from.
    confirmed : bool
        Whether a full pass, or a bold step, found that little was left to gain.
    uncertainty : array, optional
        A root R, with R^T R the covariance of the statistics, where the fit asked for it.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> result = emfed.fit(emfed.gaussian_mixture(2, "tied"), data, seed=0)
    >>> result.predict(data.worker(0)).shape
    (50,)
    >>> result.converged
    True
    """

    model: Any
    params: Any
    records: Records
    stopped: str
    seed: int
    statistics: FloatArray
    ledger: Ledger
    columns: tuple[str, ...] | None = None
    worker_weights: FloatArray | None = None
    samples: float = 0
    facts: Facts | None = None
    pooled_summary: Mapping[str, FloatArray] | None = None
    confirmed: bool = True
    uncertainty: FloatArray | None = None

    def __repr__(self) -> str:
        return f"<Result: {self.outcome}>"

    @property
    def ending(self) -> str:
        """Why the run ended, in words; ``stopped`` is short, for programs."""
        return ending(self.stopped)

    @property
    def outcome(self) -> str:
        """How the fit ended, in a line: rounds, bytes, and beside them the size of the rows."""
        ended = "converged" if self.converged else f"not converged ({self.ending})"
        raw = self.raw_bytes
        beside = "" if raw is None else f" (the rows themselves are {size(raw)})"
        up, down = size(self.bytes_up), size(self.bytes_down)
        private = self.privacy
        told = f"; {private['words']}" if private else ""
        return f"{ended} in {self.rounds} rounds, {up} up and {down} down{beside}{told}"

    @property
    def privacy(self) -> Mapping[str, Any] | None:
        """What a fit with noise promises of each row; None: it had no noise.

        Where ``private`` is true: the epsilon and delta that each site spent, and how, in
        ``words``. Else ``words`` say why the noise protects nobody.
        """
        return None if self.facts is None else self.facts.settings.get("privacy")

    @property
    def raw_bytes(self) -> int | None:
        """The size of all rows as doubles, what pooling them would send; None if not known."""
        width, facts = width_of(self.model), self.facts
        if facts is None or width is None:
            return None
        each = self.model.length if isinstance(self.model, HoldsSequences) else 1.0
        return round(8 * width * each * facts.rows)

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
        """Tell of each worker: rows, messages and bytes each way, and fit where it is known.

        Returns
        -------
        dict of lists
            The columns of the table by name.
        """
        return worker_table(self.ledger, self.facts, self.model.words())

    @property
    def validation(self) -> Validation | None:
        """What rows that were held out say of the model, by worker; None: the fit did not ask."""
        return None if self.facts is None else Validation.of(self.facts, self.workers()["worker"])

    @property
    def company(self) -> Company | None:
        """Who took part to the end, of those who began; None: all were in one process."""
        return None if self.facts is None else self.facts.company

    @property
    def doubts(self) -> list[str]:
        """Why this is not what a fit that ended well would be; empty if it is."""
        short = [] if self.converged else [f"the fit did not converge: {self.ending}."]
        company = self.company
        return [*short, *([company.doubt] if company is not None and company.doubt else [])]

    def save(self, path: str | Path, *, names: bool = True) -> None:
        """Write a model file, which `emfed.load` reads.

        Parameters
        ----------
        path : str or Path
            Where it is written.
        names : bool
            Whether it holds the names of workers.
        """
        write_model(path, self, names)

    def report(self, path: str | Path, *, title: str | None = None) -> None:
        """Write the report of the fit: one HTML page that needs no network and no data.

        Parameters
        ----------
        path : str or Path
            Where it is written.
        title : str, optional
            The title of the page.
        """
        fits.write_report(self, path, title)

    def own_rows(self, data: Any) -> OwnRows:
        """Look at rows of one site that took part in the fit: how well this model fits them.

        Nothing is sent. Where sums were masked, only the site itself can know.

        Parameters
        ----------
        data : table, path or Source
            The rows, with the columns of the fit; other columns of a data frame are left out.

        Returns
        -------
        OwnRows
            It prints as a table; ``report`` writes a page.
        """
        return look_at(self, self._inner(data)[0])

    def plot(self, what: str | None = None) -> Any:
        """Draw a matplotlib figure of the fit.

        Parameters
        ----------
        what : {"components", "course", "sites", "shares", "selection"}, optional
            The components in the model's own principal axes, the course of the fit, how well each
            site is served, components by site, or the numbers of components that were compared,
            where the fit knows of it; the first of these that it has if left out.

        Returns
        -------
        matplotlib.figure.Figure
            The figure.
        """
        return fits.plot(self, what)

    def adapt(self, data: Any, worth: float = 50.0) -> Result:
        """Fit this model to the rows of one worker, who alone needs it; nothing is sent.

        Records and ledger stay those of the common fit; the card says that it was adapted.

        Parameters
        ----------
        data : table, path or Source
            The rows, with the columns of the fit; other columns of a data frame are left out.
        worth : float
            The common model counts as much as so many rows of it would: near 0 the worker's own
            rows decide, and where there are far fewer of them the common model stays.

        Returns
        -------
        Result
            The adapted model.
        """
        check_range("worth", worth, 0, np.inf, open_low=True, open_high=True)
        if self.pooled_summary is None:
            raise SettingsError("this result lacks the summary of all rows: fit the model again.")
        rows, _ = self._inner(data)
        model, statistics = adapt(self.model, self.statistics, self.pooled_summary, rows, worth)
        facts = self.facts
        if facts is not None:
            told = {"adapted": {"rows": len(rows), "worth": worth}}
            settings = broken({**facts.settings, **told}, "it was adapted to rows without noise")
            facts = replace(facts, settings=settings, scores=None, held_out=None, by_worker=None)
        params = model.to_user(model.maximize(statistics))
        adapted = replace(self, model=model, statistics=statistics, params=params, facts=facts)
        return replace(adapted, uncertainty=None)

    def with_errors(self, data: Any) -> Result:
        """Work out the uncertainty from the rows of the fit in one table; nothing is sent.

        Parameters
        ----------
        data : table, path, Source, or dict or list of tables
            The rows, with the columns of the fit; other columns of a data frame are left out.

        Returns
        -------
        Result
            The same result with its uncertainty.
        """
        tables = data.values() if isinstance(data, Mapping) else data
        several = isinstance(data, (Mapping, list, tuple)) and all(np.ndim(t) > 1 for t in tables)
        own = [self._inner(table)[0] for table in (tables if several else [data])]
        rows = own[0] if len(own) == 1 else np.concatenate(own)
        chart = errors.Chart.at(self.model, self.statistics, self.samples)
        told = [self.model.expected_statistics(rows, params) for params in chart.questions()]
        root, facts = chart.root(np.array(told), self.samples)[0], self.facts
        if facts is not None:
            why = "its standard errors are those of the rows, without noise"
            facts = replace(facts, settings=broken(facts.settings, why))
        return replace(self, uncertainty=root, facts=facts)

    def errors_of(self, function: Callable[[Any], Any]) -> tuple[FloatArray, FloatArray]:
        """Compute a function of the parameters, and the standard error of each number it gives.

        Errors are those of the observed information, carried on by the delta method: say,
        ``result.errors_of(lambda params: params.means[1] - params.means[0])``. The fit must have
        asked for them (``errors=True``).

        Parameters
        ----------
        function : callable
            A function from parameters in the user's units to a number or an array.

        Returns
        -------
        tuple of two arrays
            The values, and their standard errors.
        """
        shape = np.shape(function(self.params))
        values, moves = errors.spread(self.model, self.statistics, self._root(), function)
        found = np.sqrt((moves**2).sum(axis=0))
        return values.reshape(shape), found.reshape(shape)

    def summary(self, level: float = 0.95) -> errors.Summary:
        """Tell every parameter with its standard error, z and confidence bounds, as a table.

        Bounds are worked out on the scale of log-odds for shares and of logs for what is positive.
        Errors are those of the observed information: right where the model is. The fit must have
        asked for them (``errors=True``).

        Parameters
        ----------
        level : float
            The probability of the confidence bounds.

        Returns
        -------
        Summary
            It prints as a table; ``table`` holds the columns.
        """
        check_range("level", level, 0, 1, open_low=True, open_high=True)
        return errors.summarise(self, self._root(), level)

    def _root(self) -> FloatArray:
        if self.uncertainty is None:
            raise SettingsError(
                Wording(
                    "this fit did not ask for standard errors: fit with {} (`emfed fit --errors`, "
                    "errors = true under [fit] of a run.toml), or give the rows of the fit: "
                    "result.with_errors(rows), estimator.summary(rows).",
                    Setting("errors", True),
                )
            )
        return self.uncertainty

    def log_likelihood(self, data: Any) -> float:
        """Compute the mean log-likelihood of rows, per sample, in the user's units.

        Parameters
        ----------
        data : table, path or Source
            The rows, with the columns of the fit; other columns of a data frame are left out.

        Returns
        -------
        float
            The mean log-likelihood.
        """
        return self._means(data)[0]

    def score_samples(self, data: Any) -> FloatArray:
        """Compute the log-likelihood of each row, in the user's units.

        Parameters
        ----------
        data : table, path or Source
            The rows, with the columns of the fit; other columns of a data frame are left out.

        Returns
        -------
        array of shape (rows,)
            The log-likelihoods.
        """
        if not isinstance(self.model, ScoresRows):
            raise self._cannot("score single rows", "log_likelihood() gives their mean")
        return self._by_row(self.model.score_samples, data)

    def predict_proba(self, data: Any) -> FloatArray:
        """Compute the probability of each component given each row.

        Parameters
        ----------
        data : table, path or Source
            The rows, with the columns of the fit; other columns of a data frame are left out.

        Returns
        -------
        array of shape (rows, K)
            The probabilities.
        """
        if not isinstance(self.model, AssignsRows):
            raise self._cannot(
                "predict: it has no components", "fit a mixture or k_means, or use log_likelihood()"
            )
        return self._by_row(self.model.responsibilities, data)

    def predict(self, data: Any) -> IntArray:
        """Find the most likely component of each row.

        Parameters
        ----------
        data : table, path or Source
            The rows, with the columns of the fit; other columns of a data frame are left out.

        Returns
        -------
        array of shape (rows,)
            The components, counted from 0.
        """
        if isinstance(self.model, (MixtureEStep, Clusters)):  # labels alone leave a device
            return self._by_row(self.model.labels, data).astype(np.int64, copy=False)
        return np.argmax(self.predict_proba(data), axis=-1).astype(np.int64, copy=False)

    @property
    def free_parameters(self) -> int:
        """How many numbers of the model were free: what AIC and BIC charge for."""
        return free_parameters(self.model)

    def aic(self, data: Any) -> float:
        """Compute Akaike's criterion of the model on these rows; smaller is better.

        Parameters
        ----------
        data : table, path or Source
            The rows, with the columns of the fit; other columns of a data frame are left out.

        Returns
        -------
        float
            The criterion.
        """
        likelihood, _, count = self._means(data)
        return criterion("aic", likelihood, 0.0, count, self.free_parameters)

    def bic(self, data: Any) -> float:
        """Compute the Bayesian criterion (Schwarz) of the model on these rows; smaller is better.

        Parameters
        ----------
        data : table, path or Source
            The rows, with the columns of the fit; other columns of a data frame are left out.

        Returns
        -------
        float
            The criterion.
        """
        likelihood, _, count = self._means(data)
        return criterion("bic", likelihood, 0.0, count, self.free_parameters)

    def icl(self, data: Any) -> float:
        """Compute BIC plus twice the entropy of the rows' components, so that these be distinct.

        Parameters
        ----------
        data : table, path or Source
            The rows, with the columns of the fit; other columns of a data frame are left out.

        Returns
        -------
        float
            The criterion; smaller is better.
        """
        likelihood, spread, count = self._means(data, entropy=True)
        return criterion("icl", likelihood, spread, count, self.free_parameters)

    def sample(self, count: int = 1, seed: int = 0) -> tuple[FloatArray, IntArray]:
        """Draw rows from the fitted model, in the user's units.

        Parameters
        ----------
        count : int
            The number of rows.
        seed : int
            The seed.

        Returns
        -------
        tuple of two arrays
            The rows, and the component of each.
        """
        count, seed = check_count("count", count), check_seed(seed)
        params = self.model.maximize(self.statistics)
        if not isinstance(self.model, DrawsRows):
            raise self._cannot(
                "draw rows", "fit gaussian_mixture, mixed_mixture, factor_analysis or ppca"
            )
        rows, labels = self.model.sample(params, count, seed)
        return np.asarray(rows), labels

    def impute(self, data: Any) -> FloatArray:
        """Replace NaN by posterior means (of categories: the likeliest code).

        Parameters
        ----------
        data : table, path or Source
            The rows, with the columns of the fit; other columns of a data frame are left out.

        Returns
        -------
        array of shape (rows, columns)
            The rows, filled in.
        """
        return self._by_row(self._imputable().impute, data)

    def impute_draws(self, data: Any, draws: int = 5, seed: int = 0) -> FloatArray:
        """Draw random completions from the posterior.

        Parameters
        ----------
        data : table, path or Source
            The rows, with the columns of the fit; other columns of a data frame are left out.
        draws : int
            The number of completions.
        seed : int
            The seed.

        Returns
        -------
        array of shape (draws, rows, columns)
            The completions.
        """
        draws, seed = check_count("draws", draws), check_seed(seed)
        return np.asarray(self._imputable().draw(*self._inner(data), draws, seed))

    def impute_intervals(self, data: Any, level: float = 0.9) -> tuple[FloatArray, FloatArray]:
        """Compute central predictive intervals of what is NaN.

        Parameters
        ----------
        data : table, path or Source
            The rows, with the columns of the fit; other columns of a data frame are left out.
        level : float
            The probability of an interval.

        Returns
        -------
        tuple of two arrays
            The lower and the upper ends.
        """
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

    def _by_row(self, ask: Callable[[Any, Any], Any], data: Any) -> Any:
        """An answer for each row; a source is asked block by block."""
        found = [np.asarray(ask(rows, params)) for rows, params in self._parts(data)]
        return found[0] if len(found) == 1 else np.concatenate(found)

    def _means(self, data: Any, entropy: bool = False) -> tuple[float, float, int]:
        """Mean log-likelihood, mean entropy of the components if asked, and the number of rows."""
        likelihood = spread = 0.0
        count = 0
        for rows, params in self._parts(data):
            if entropy:
                _, told, mixed = self.model.evaluate(rows, params)
            else:
                told, mixed = self.model.log_likelihood(rows, params), np.zeros(())
            count += rows.shape[0]
            likelihood += (float(told) - likelihood) * (rows.shape[0] / count)
            spread += (float(mixed) - spread) * (rows.shape[0] / count)
        return likelihood, spread, count

    def _parts(self, data: Any) -> Iterator[tuple[Any, Any]]:
        """Checked rows and the parameters, block by block where the rows are in a file."""
        source = self._source(data)
        if source is None:
            yield self._inner(data)
            return
        params = self.model.maximize(self.statistics)
        for first, rows in chunks(source):
            self.model.check(rows, "the data", source.columns, first)
            yield rows, params

    def _source(self, data: Any) -> Source | None:
        """A path, source or large lazy frame with the columns of the fit; None for what is here."""
        if isinstance(data, (str, Path)):
            return ParquetRows(data, self.columns)
        found = open_table(data, "the data") if type(data).__name__ == "LazyFrame" else data
        if not isinstance(found, Source):
            return None
        same = self.columns is None or found.columns in (None, self.columns)
        return found if same else found.with_columns(self.columns or ())

    def _inner(self, data: Any) -> tuple[Any, Any]:
        """Checked rows, and the parameters in the units of the statistics.

        Columns that the fit did not have, such as the workers' names, are left out.
        """
        if (source := self._source(data)) is not None:
            data = source.read(0, source.shape[0])
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

    Files hold no code.

    Parameters
    ----------
    path : str or Path
        The path of the file.

    Returns
    -------
    Result
        The result.

    Raises
    ------
    ModelFileError
        If the file is damaged, cut short or something else.

    Examples
    --------
    >>> import emfed
    >>> data = emfed.data.synthetic_federation(workers=4, rows_per_worker=50)
    >>> result = emfed.fit(emfed.gaussian_mixture(2, "tied"), data, seed=0)
    >>> result.save("mixture.emfed")
    >>> emfed.load("mixture.emfed").rounds == result.rounds
    True
    """
    return Result(**read_model(path))
