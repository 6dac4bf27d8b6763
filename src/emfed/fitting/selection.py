"""How many components? All numbers are fitted side by side, in the rounds of one federation."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, final

import numpy as np

from emfed.algorithms import AutoEM
from emfed.artifacts.result import CRITERIA, Result, criterion
from emfed.core.errors import EmfedWarning, SettingsError, check_count
from emfed.core.protocols import Federation, FloatArray, Model
from emfed.core.wire import ENVELOPE, floats_size
from emfed.data.workers import as_workers
from emfed.fitting.candidates import Rivals
from emfed.fitting.driver import fit
from emfed.fitting.opening import named_algorithm
from emfed.models.markov import HiddenMarkov
from emfed.models.several import Several
from emfed.network import FEDERATIONS

Criterion = Literal["aic", "bic", "icl"]


@final
@dataclass(frozen=True, eq=False)
class Selection:
    """The fit of every number of components, and the best by the criterion."""

    best: Result
    n_components: int
    """That of the best."""
    results: Mapping[int, Result]
    """Every fit; they share records and ledger, as they shared the rounds."""
    table: tuple[dict[str, float], ...]
    """One row per number of components: free parameters, log-likelihood per row, aic, bic, icl."""
    criterion: str

    def __repr__(self) -> str:
        tried = ", ".join(str(k) for k in self.results)
        return f"<Selection of {self.n_components} components by {self.criterion} among {tried}>"

    def to_frame(self) -> Any:
        """The table as a polars data frame."""
        import polars as pl

        return pl.DataFrame(list(self.table))


def read_range(components: Any, name: str = "components") -> list[int]:
    """Numbers from a number, a collection of them, or a range ``"2:8"``; ``name`` is for errors."""
    if isinstance(components, str):
        ends = components.split(":")
        if len(ends) != 2 or not all(end.strip().isdigit() for end in ends):
            raise SettingsError(
                f"{name} must be a number, a collection of them, or a range such as '2:8'; got "
                f"{components!r}."
            )
        low, high = (int(end) for end in ends)
        found = list(range(low, high + 1))
    elif isinstance(components, Iterable):
        found = list(components)
    else:
        found = [components]
    numbers = sorted({check_count(name, k) for k in found})
    if not numbers:
        raise SettingsError(f"{name}: {components!r} holds no number.")
    return numbers


def within_rows(model: Model, numbers: list[int], rows: int) -> list[int]:
    """Numbers of components that so many rows can have, if any; a warning names the others."""
    can = [k for k in numbers if k <= rows]
    if len(can) in (0, len(numbers)) or isinstance(model, HiddenMarkov):  # states share sequences
        return numbers
    warnings.warn(
        f"{rows} rows cannot have {', '.join(map(str, numbers[len(can) :]))} components: tried "
        f"are {', '.join(map(str, can))}.",
        EmfedWarning,
        stacklevel=4,
    )
    return can


def select_components(
    model: Model | Callable[[int], Model],
    data: Any,
    components: Any = "1:8",
    *,
    criterion: Criterion = "bic",
    groups: Any | None = None,
    sample_weight: Any | None = None,
    federation: Literal["stacked", "loop"] | Federation = "stacked",
    start: Any = "auto",
    n_init: int = 1,
    drop: bool = True,
    **options: Any,
) -> Selection:
    """Fit a mixture with each number of components in one run, and choose by BIC, ICL or AIC.

    ``model`` is a mixture, whose number of components is replaced, or a function from that number
    to a model. ``components`` is a collection of numbers or a range such as ``"2:8"``, both ends
    included; numbers that the rows cannot have are left out, with a warning. All candidates share
    the opening exchange, the search for starts (``n_init`` of each) and every round: a message
    holds the statistics of all. Where the run ends by convergence, candidates that will hardly be
    chosen any more are dropped on the way (`candidates.py`), and their fits are those of that
    moment; not with ``drop=False`` or a ``checkpoint``. At the end everyone is asked once more for
    the log-likelihood and the entropy of each. ``options`` are those of `fit`.
    """
    if criterion not in CRITERIA:
        raise SettingsError(f"criterion must be one of {', '.join(CRITERIA)}; got {criterion!r}.")
    numbers = read_range(components)
    if isinstance(federation, str) and federation in FEDERATIONS:
        workers = as_workers(data, groups, sample_weight)
        numbers = within_rows(_with(model, numbers[0]), numbers, int(workers.counts.sum()))
        federation = FEDERATIONS[federation](workers)
        data = groups = sample_weight = None
    several = Several(tuple(_with(model, k) for k in numbers), watched=False)
    if getattr(federation, "carries_bytes", False):
        raise SettingsError(
            "numbers of components are compared in one process; over a network fit them one by one."
        )
    rivals, hooks = Rivals(criterion), options.pop("callbacks", ())
    whole = fit(
        several,
        data,
        groups=groups,
        sample_weight=sample_weight,
        federation=federation,
        start=start,
        n_init=n_init,
        callbacks=[
            *((hooks,) if callable(hooks) else hooks),
            *(watching(rivals, options) if drop else ()),
        ],
        **options,
    )
    if not isinstance(federation, Federation):  # said by fit already
        raise SettingsError(f"federation must be a Federation or a name; got {federation!r}.")
    return choose_among(whole, federation, numbers, criterion, rivals)


def watching(rivals: Rivals, options: Mapping[str, Any]) -> list[Rivals]:
    """The callback, where a run ends by convergence and is not to be resumed, whole as it began."""
    algorithm = named_algorithm(options.get("algorithm"))
    converges = isinstance(algorithm, AutoEM) and options.get("rounds") is None
    converges |= options.get("nats") is not None or options.get("tolerance") is not None
    return [rivals] if converges and options.get("checkpoint") is None else []


def choose_among(
    whole: Result,
    network: Federation,
    numbers: Sequence[int],
    by: Criterion,
    rivals: Rivals | None = None,
) -> Selection:
    """The best of models that were fitted side by side, after one more exchange about them all.

    ``rivals`` knows those that were dropped on the way.
    """
    if by not in CRITERIA:
        raise SettingsError(f"criterion must be one of {', '.join(CRITERIA)}; got {by!r}.")
    dropped = {} if rivals is None else rivals.dropped
    alive = [j for j in range(len(numbers)) if j not in dropped]
    told = dict(zip(alive, _values(whole, network), strict=True))
    results, values = {}, {}
    for j, k in enumerate(numbers):
        if j in dropped:
            left = dropped[j]
            results[k], values[k] = _as_result(whole, left.model, left.statistics), left.values
        else:
            results[k], values[k] = part_of(whole, alive.index(j)), told[j]
    table = tuple(_row(k, results[k], values[k], whole.samples) for k in numbers)
    best = _sound(results, numbers, [row[by] for row in table])
    return Selection(results[numbers[best]], numbers[best], results, table, by)


def _sound(results: Mapping[int, Result], numbers: Sequence[int], charged: list[float]) -> int:
    """Where the criterion is least among models without a collapsed component, if there are any.

    A component on a few rows has a likelihood without bound, which no criterion means.
    """
    order = np.argsort(charged, kind="stable").tolist()
    good = [
        j
        for j in order
        if not (r := results[numbers[j]]).model.remarks(r.model.maximize(r.statistics))
    ]
    if good and good[0] != order[0]:
        out = ", ".join(str(numbers[j]) for j in order[: order.index(good[0])])
        warnings.warn(
            f"components: {out} would be chosen, but a component has collapsed there; left out.",
            EmfedWarning,
            stacklevel=4,
        )
    return good[0] if good else order[0]


def _with(model: Any, k: int) -> Any:
    """The model with so many components."""
    if not isinstance(model, Model):
        return model(k)
    plain: Any = model
    fields = [f.name for f in dataclasses.fields(plain)] if dataclasses.is_dataclass(plain) else []
    if "n_components" in fields:
        return dataclasses.replace(plain, n_components=k)
    if "inner" in fields:
        return dataclasses.replace(plain, inner=_with(plain.inner, k))
    raise SettingsError(
        f"{type(model).__name__} has no number of components: give a function from it to a model."
    )


def _values(whole: Result, network: Federation) -> FloatArray:
    """Log-likelihood and entropy of each part at the end: one more exchange, which is charged."""
    model, weights = dataclasses.replace(whole.model, watched=True), whole.worker_weights
    assert weights is not None
    params = whole.model.maximize(whole.statistics)
    everyone = np.arange(network.size, dtype=np.int64)
    whole.ledger.add("round", "down", everyone, floats_size(model.layout.size), ENVELOPE)
    whole.ledger.add("round", "up", everyone, floats_size(2 * len(model.models)), ENVELOPE)
    return np.asarray(model.values(network.mean_statistics(model, params, weights)))


def part_of(whole: Result, position: int) -> Result:
    """One of the models that were fitted side by side, as a result of its own."""
    several = whole.model
    return _as_result(whole, several.models[position], whole.statistics[several.cuts[position]])


def _as_result(whole: Result, model: Any, statistics: FloatArray) -> Result:
    params = model.to_user(model.maximize(statistics))
    return dataclasses.replace(whole, model=model, params=params, statistics=statistics)


def _row(k: int, result: Result, values: FloatArray, rows: float) -> dict[str, float]:
    """What the table says of one number of components."""
    likelihood, entropy = values.tolist()
    free = result.free_parameters
    charged = {name: criterion(name, likelihood, entropy, rows, free) for name in CRITERIA}
    return {
        "n_components": k,
        "free_parameters": free,
        "log_likelihood": likelihood,
        "entropy": entropy,
        **charged,
    }
