"""The face of Python: `fit` and `select_components`, and what runs a fit wherever its rows are."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from emfed.artifacts.result import Result
from emfed.core.errors import EmfedWarning, SettingsError, check_count
from emfed.data.workers import as_workers
from emfed.fitting import in_process
from emfed.fitting.fitted import NOBODY, Fitted, Watch
from emfed.fitting.private_in_process import private_fit
from emfed.fitting.progress import progress
from emfed.fitting.selection import Selection
from emfed.fitting.settings import FitSettings
from emfed.fitting.stopping import Callback, Monitor, Stop
from emfed.models.devices import PassPrecision
from emfed.network import FEDERATIONS, Federation, LiveSites, RayFederation

FederationName = Literal["stacked", "loop", "ray"] | Federation
"""Where the workers of a table run."""


def run(settings: FitSettings, federation: Federation | LiveSites, watch: Watch = NOBODY) -> Fitted:
    """Fit what the settings say, wherever the rows are."""
    if isinstance(federation, LiveSites):
        from emfed.fitting import live  # with keys, which a fit in this process does not need

        return live.fit(settings, federation, watch)
    if settings.epsilon is not None:
        return private_fit(settings, federation.workers, watch)
    return in_process.fit(settings, federation.workers, watch, federation.present)


def fit(
    model: Any,
    data: Any,
    algorithm: Any = None,
    *,
    groups: Any | None = None,
    sample_weight: Any | None = None,
    federation: FederationName = "stacked",
    callbacks: Iterable[Callback] | Callback = (),
    monitor: Monitor | None = None,
    checkpoint: str | Path | None = None,
    checkpoint_every: int = 100,
    resume: bool = False,
    threads: int | None = None,
    device: Any | None = None,
    precision: PassPrecision = "double",
    verbose: bool = False,
    **settings: Any,
) -> Result:
    """Fit a model on the rows of many workers, in this process or wherever they are.

    Ctrl-C ends the fit after the present round and returns what was reached; an error in mid-run
    carries that as ``error.result``.

    Parameters
    ----------
    model : Model or callable
        A model such as ``gaussian_mixture(3)``, or a function from a number of components to one
        (with ``n_components``).
    data : table, dict, list, Federation or LiveSites
        A dict or list of tables, one for each worker; one table with ``groups``; one table alone,
        which is one worker; a `Federation` that has its own data; or sites elsewhere, such as
        `emfed.network.listen` gives.
    algorithm : Algorithm or str, optional
        "auto" (the default), "em", "FedEM", "VR-FedEM", or an `Algorithm`.
    groups : array or str, optional
        The worker of each row of one table: values, or the name of a column of a data frame.
    sample_weight : array or sequence of arrays, optional
        How much each row counts, in the shape of the data.
    federation : {"stacked", "loop", "ray"}
        How data that are here are driven: many workers at a time, one at a time, or in processes of
        this machine.
    callbacks : callable or iterable of callables
        Functions of each `RoundRecord`; one that returns True ends the fit.
    monitor : Monitor, optional
        What records |h|^2 and the objective, at the cost of full passes.
    checkpoint : str or Path, optional
        A file that the state is written to.
    checkpoint_every : int
        The rounds from one checkpoint to the next; one is written at the end, too.
    resume : bool
        Whether the fit goes on from the checkpoint, if it is there.
    threads : int, optional
        The threads of the linear algebra.
    device : str, optional
        The device of the passes over rows, such as "cuda"; rows that do not fit are streamed to it.
    precision : {"double", "fast"}
        Whether answers of the device agree with numpy's to rounding, or to six digits.
    verbose : bool
        Whether a bar on stderr shows rounds, bytes and the time that may be left.
    **settings : object
        All other fields of `FitSettings`: ``n_components``, ``start``, ``n_init``,
        ``participation``, ``weights``, ``tol``, ``rounds``, ``seed``, ``scores``, ...

    Returns
    -------
    Result
        Parameters in the user's units, records, ledger, predictions. With several numbers of
        components, that of the best; `select_components` gives all.

    Raises
    ------
    DataError
        If rows cannot be used.
    SettingsError
        If a setting is unknown or out of range, or settings contradict each other.

    Examples
    --------
    >>> import emfed
    >>> from sklearn.datasets import load_iris
    >>> rows = load_iris().data
    >>> emfed.fit(emfed.gaussian_mixture(2), {"a": rows[::2], "b": rows[1::2]}).converged
    True
    """
    watch = Watch(
        (callbacks,) if callable(callbacks) else tuple(callbacks),
        monitor,
        None if checkpoint is None else Path(checkpoint),
        checkpoint_every,
        resume,
    )
    given = FitSettings.read(model, algorithm, **settings)
    with (
        threads_of(threads),
        federation_of(federation, data, groups, sample_weight, device, precision) as network,
        shown(given.limits, watch, verbose) as watched,
    ):
        return warned(run(given, network, watched)).result


@contextlib.contextmanager
def shown(stop: Stop, watch: Watch, verbose: bool, title: str = "fit") -> Iterator[Watch]:
    """Who looks at a fit, with a bar beside them where the user wants one."""
    if not verbose:
        yield watch
        return
    with progress(stop, title, always=True) as show:
        yield replace(watch, callbacks=(show, *watch.callbacks))


def warned(fitted: Fitted) -> Fitted:
    """The same, after a warning for each remark."""
    for remark in (*fitted.remarks, *([fitted.shortfall] if fitted.shortfall else [])):
        warnings.warn(remark, EmfedWarning, stacklevel=3)
    return fitted


def select_components(
    model: Any,
    data: Any,
    n_components: Any = "1:8",
    *,
    groups: Any | None = None,
    sample_weight: Any | None = None,
    federation: FederationName = "stacked",
    callbacks: Iterable[Callback] | Callback = (),
    threads: int | None = None,
    device: Any | None = None,
    precision: PassPrecision = "double",
    verbose: bool = False,
    **settings: Any,
) -> Selection:
    """Fit a mixture with each number of components in one run, and choose by BIC, ICL or AIC.

    All candidates share the opening exchange, the search for starts and every round: a message
    holds the statistics of all. Those that will hardly be chosen any more are dropped on the way,
    unless ``drop=False``, and their fits are those of that moment. At the end everyone is asked
    once for the log-likelihood and the entropy of each.

    Parameters
    ----------
    model : Model or callable
        A model of any number of components, or a function from that number to a model.
    data : table, dict, list or Federation
        The rows, as in `fit`.
    n_components : str, int or iterable of int
        The numbers of components: a range such as "1:8" with both ends, a collection, or one.
    groups : array or str, optional
        The worker of each row of one table: values, or the name of a column of a data frame.
    sample_weight : array or sequence of arrays, optional
        How much each row counts, in the shape of the data.
    federation : {"stacked", "loop", "ray"}
        How data that are here are driven, as in `fit`.
    callbacks : callable or iterable of callables
        Functions of each `RoundRecord`; one that returns True ends the fit.
    threads : int, optional
        The threads of the linear algebra.
    device : str, optional
        The device of the passes over rows, such as "cuda".
    precision : {"double", "fast"}
        Whether answers of the device agree with numpy's to rounding, or to six digits.
    verbose : bool
        Whether a bar on stderr shows rounds, bytes and the time that may be left.
    **settings : object
        All other fields of `FitSettings`: ``criterion``, ``drop``, ``start``, ``seed``, ...

    Returns
    -------
    Selection
        Every fit, and the best by the criterion.

    Examples
    --------
    >>> import emfed
    >>> from sklearn.datasets import load_iris
    >>> rows = load_iris().data
    >>> emfed.select_components(emfed.gaussian_mixture(1), [rows[::2], rows[1::2]], "1:3").criterion
    'bic'
    """
    watch = Watch((callbacks,) if callable(callbacks) else tuple(callbacks))
    given = FitSettings.read(model, n_components=n_components, **settings)
    with (
        threads_of(threads),
        federation_of(federation, data, groups, sample_weight, device, precision) as network,
        shown(given.limits, watch, verbose) as watched,
    ):
        fitted = warned(run(given, network, watched))
    if fitted.selection is None:  # one number alone was left to try
        assert given.numbers is not None
        k = given.numbers[0]
        return Selection(fitted.result, k, {k: fitted.result}, (), given.criterion)
    return fitted.selection


@contextlib.contextmanager
def federation_of(
    federation: Any,
    data: Any,
    groups: Any | None = None,
    sample_weight: Any | None = None,
    device: Any | None = None,
    precision: PassPrecision = "double",
) -> Any:
    """A federation by name over these data, closed at the end; or the one given, left open."""
    if isinstance(data, Federation | LiveSites) and groups is None and sample_weight is None:
        data, federation = None, data
    if device is not None and not (isinstance(federation, str) and federation in FEDERATIONS):
        raise SettingsError(
            "device goes with federation='stacked' or 'loop'; another federation has its own data: "
            "give it workers of as_workers(data, device='cuda')."
        )
    if isinstance(federation, Federation | LiveSites):
        if not (data is None and groups is None and sample_weight is None):
            raise SettingsError("a Federation has its own data: give None, or name a federation.")
        yield federation
        return
    if isinstance(federation, str) and federation in FEDERATIONS:
        rows = as_workers(data, groups, sample_weight, device=device, precision=precision)
        made: Federation = FEDERATIONS[federation](rows)
    elif federation == "ray":
        made = RayFederation(data, groups, sample_weight=sample_weight)
    else:
        raise SettingsError(
            f"federation must be one of {', '.join(FEDERATIONS)}, ray or a Federation; "
            f"got {federation!r}."
        )
    try:
        yield made
    finally:
        made.close()


def threads_of(count: int | None) -> Any:
    """A context in which the linear algebra uses so many threads."""
    if count is None:
        return contextlib.nullcontext()
    from threadpoolctl import threadpool_limits

    return threadpool_limits(check_count("threads", count))
