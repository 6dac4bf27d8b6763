"""What a site's owner allows, and the record of what left the site."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, final

import numpy as np

from emfed.core.errors import SettingsError, check_count, check_range
from emfed.core.privacy import Privacy, check_delta, mu_squared_of
from emfed.core.protocols import FloatArray, IntArray, Latent, Model, Oracle
from emfed.core.wire import Reason
from emfed.models.components import SMALLEST_COMPONENT, thin


class Refusal(Exception):
    """A worker says no: a reason for the server's program, and words that reveal no record."""

    def __init__(self, reason: Reason, text: str, instance: int = 0) -> None:
        super().__init__(text)
        self.reason, self.text, self.instance = reason, text, instance


LARGEST_MODEL, PER_CELL = 1 << 22, 16
"""Numbers: 32 MB, or 16 times the data. A hello of 214 bytes (``times`` of 4e8) took 6.2 GB."""
LYING_SERVER = (
    "A server that lies can read whole rows of a site that it names, masked or not: masks hide a "
    "site from a server that follows the protocol. Join only servers whose operator, machine and "
    "program you trust with your rows."
)
"""What the default rules give away to a server that lies."""
MOST_NUMBERS = 10**30
"""More than any owner allows: products of counts are not worked out beyond, since thousands of
counts would take seconds, and floats end at 1e308."""


def counts_named(description: Any) -> int:
    """About how many numbers settings make necessary: counts multiply, what is listed adds up."""
    if isinstance(description, Mapping):
        return _product(v for name, v in description.items() if name != "samples")
    if isinstance(description, list | tuple):
        return sum(max(1, counts_named(value)) for value in description)
    if isinstance(description, str):  # a family in words, such as "categorical:5"
        return _product(int(digits) for digits in re.findall("[0-9]{1,18}", description))
    return min(abs(description), MOST_NUMBERS) if type(description) is int else 1


def _product(counts: Iterable[Any]) -> int:
    """The numbers that counts make necessary together, or `MOST_NUMBERS`."""
    found = 1
    for count in counts:
        found = min(found * max(1, counts_named(count)), MOST_NUMBERS)
    return found


@final
@dataclass(frozen=True)
class SiteRules:
    """What the owner of the data insists on.

    The server cannot change it, and is told no more than which rule it met. The defaults hold where
    the owner says nothing.

    Parameters
    ----------
    smallest_rows : int
        No answer at all from fewer rows, and none where fewer rows changed since the site joined
        last.
    spare_rows : int or None
        So many rows more than a message has statistics; None is any number. With fewer, the
        statistics are equations that have the rows as their solution. Each step of a sequence is a
        row here. With masks the values of all sites' rows count.
    models : sequence of str or None
        The names of the models that may be fitted; None is all that tell how many rows stand behind
        each number.
    any_columns : bool
        Whether the server may choose among columns that the owner did not list.
    mini_batches : bool
        Whether the server may ask about a few rows at a time.
    largest_rounds : int or None
        How many messages that look at the rows are answered in all, over all runs in one folder:
        joins, rounds, questions, and refusals of these.
    largest_choices : int or None
        How many of them may be at parameters that the server chose freely, which are the first
        round of every phase and all questions.
    largest_step : float or None
        How far S may move between two rounds of a phase, as a multiple of its length.
    smallest_group : int or None
        The fewest rows behind any number that is told; see `GuardedRows`. Not recommended: each
        refusal depends on rows, so a server that chooses its questions learns from it whether such
        a group is here.
    largest_model : int or None
        The numbers that a model or algorithm may need here, by the counts that its description
        names; None is 4 million, or 16 for each number of the site's own data.
    unmasked : bool
        Whether the site takes part in runs without masks, where the server follows the statistics
        of each site.
    smallest_set : int
        How many sites a masked sum has at least that this one takes part in.
    largest_changes : int or None
        How often, over all runs, the sites that it adds up with may change.
    smallest_observers : int
        How many sites have seen each cell of a table whose masked sum this one is in, at least, by
        the server's word.
    smallest_component : int or None
        With masks, how many rows of all sites together stand behind each component, by the
        statistics that a round begins at. Below it the site does not go on. A server leaves out
        components with fewer than 3; where sites count alike, only a larger number is insisted on.
    smallest_cluster : int
        The fewest rows of a cluster of which the k-means of a start tells, where nothing is masked;
        ``smallest_group``, if there is one, takes its place.
    ask_first : bool
        Whether `emfed join` asks the owner about each fit before it answers a server.
    own_clusters : bool
        Whether the site tells clusters of its own rows, with ``smallest_group`` rows each or 10,
        where a run without masks merges everybody's for its start.
    largest_epsilon : float or None
        What the owner gives away of any one row over all runs, at ``delta``; only private runs are
        then answered, until it is used up. None is any run, as far as the other rules allow it.
    delta : float
        The probability with which a private run may tell more.
    colluders : int
        How many other sites may work together with the server before a row is less private than a
        run says.
    second_ledger : str or None
        A folder on another disk that keeps what was given away, too, so that a backup which is put
        back does not forget it.

    Raises
    ------
    SettingsError
        If a rule is out of its range.

    Examples
    --------
    >>> from emfed.network import SiteRules
    >>> SiteRules(models=["gaussian-mixture"], largest_rounds=500).models
    ('gaussian-mixture',)
    """

    smallest_rows: int = 10
    spare_rows: int | None = 1
    models: Sequence[str] | None = None
    any_columns: bool = False
    mini_batches: bool = False
    largest_rounds: int | None = 10_000
    largest_choices: int | None = 1_000
    largest_step: float | None = 8.0
    smallest_group: int | None = None
    largest_model: int | None = None
    unmasked: bool = False
    smallest_set: int = 3
    largest_changes: int | None = 1
    smallest_observers: int = 3
    smallest_component: int | None = SMALLEST_COMPONENT
    smallest_cluster: int = 5
    ask_first: bool = False
    own_clusters: bool = True
    largest_epsilon: float | None = None
    delta: float = 1e-5
    colluders: int = 1
    second_ledger: str | None = None

    def __post_init__(self) -> None:
        check_count("smallest_rows", self.smallest_rows)
        check_count("smallest_set", self.smallest_set, 3)
        check_count("smallest_observers", self.smallest_observers)
        check_count("smallest_cluster", self.smallest_cluster)
        check_count("colluders", self.colluders, 0)
        check_delta(self.delta)
        if self.largest_epsilon is not None:
            check_range("largest_epsilon", self.largest_epsilon, 0, np.inf, open_low=True)
        counts = (
            *("largest_rounds", "largest_choices", "largest_model"),
            *("smallest_group", "smallest_component"),
        )
        for name in (*counts, "spare_rows", "largest_changes"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name), 1 if name in counts else 0)
        if self.largest_step is not None:
            check_range("largest_step", self.largest_step, 0, np.inf, open_low=True)
        for name in ("any_columns", "mini_batches", "unmasked", "ask_first", "own_clusters"):
            if type(getattr(self, name)) is not bool:
                raise SettingsError(f"{name} must be true or false; got {getattr(self, name)!r}.")
        if self.models is not None:
            if isinstance(self.models, str):
                raise SettingsError(f"models must be a list of names; got {self.models!r}.")
            object.__setattr__(self, "models", tuple(str(name) for name in self.models))

    @classmethod
    def loosest(cls, **rules: Any) -> SiteRules:
        """Everything that a server may ask is answered, but for these rules: for a server that the
        owner trusts with the rows, for tests, and for comparisons."""
        limits = ("rounds", "choices", "step", "changes")
        free = {f"largest_{name}": None for name in limits}
        loose = {"smallest_rows": 1, "spare_rows": None, "models": (ANY,), "any_columns": True}
        loose |= {"smallest_observers": 1, "smallest_component": None}
        loose |= {"smallest_cluster": 2}
        return cls(**{**free, **loose, "mini_batches": True, "unmasked": True, **rules})

    def on_this_machine(self) -> SiteRules:
        """The same in a trial without keys: nothing leaves the machine, and nothing is masked."""
        return replace(self, unmasked=True)

    def gives_away(self) -> list[str]:
        """What a server that lies can find out under these rules, in sentences.

        First what it can under the default rules, too; then what looser rules add.
        """
        default, told = SiteRules(), [LYING_SERVER]
        if self.largest_epsilon is not None:
            told = [
                "A server that lies learns of each row what epsilon "
                f"{self.largest_epsilon:g} allows over all runs, and whether this site has enough "
                "rows to join."
            ]
        if self.smallest_rows < default.smallest_rows or self.spare_rows is None:
            told.append(
                "A site with fewer rows than a message has statistics tells its rows: they are the "
                "solution of as many equations."
            )
        if self.models is not None:
            told.append(
                "Models that the owner names are fitted even where their numbers may stand for "
                "single rows."
            )
        if self.any_columns:
            told.append(
                "The server chooses the columns: it learns moments of any column with any other."
            )
        if self.mini_batches:
            told.append("Answers about mini-batches tell of as few rows as a batch has.")
        for name, words in (
            ("largest_rounds", "More answers"),
            ("largest_choices", "More answers at parameters of its choice"),
            ("largest_step", "Longer moves between two rounds"),
            ("largest_changes", "More changes of who adds up"),
        ):
            mine = getattr(self, name)
            if mine is None or mine > getattr(default, name):
                told.append(f"{words} let differences isolate single rows or sites.")
        if (self.smallest_component or 0) < SMALLEST_COMPONENT:
            told.append("A component of a masked sum may stand for one row.")
        if self.smallest_cluster < default.smallest_cluster:
            told.append("Without masks a start tells sums over very few rows.")
        if self.unmasked:
            told.append("Without masks the server follows the statistics of this very site.")
        if self.smallest_group is not None:
            told.append(
                "Refusals for small groups (smallest_group) depend on rows: each answers a server "
                "that asks whether a row lies in a range of its choice. Leave this rule out."
            )
        return told

    @property
    def largest_cost(self) -> float | None:
        """Mu squared that the owner gives away over all runs."""
        if self.largest_epsilon is None:
            return None
        return mu_squared_of(self.largest_epsilon, self.delta)

    def check_privacy(self, privacy: Privacy | None) -> None:
        """Refuse a run that is not private where the owner wants it so."""
        if privacy is None and self.largest_epsilon is not None:
            raise Refusal(
                Reason.REFUSED,
                "the owner answers private runs alone: give the run an epsilon.",
            )
        if privacy is not None and privacy.delta > self.delta:
            raise Refusal(
                Reason.REFUSED, f"the owner's rules allow a delta of {self.delta:g} at most."
            )

    def check_model(self, name: str) -> None:
        """Refuse a model that is not allowed."""
        if self.models is not None and ANY not in self.models and name not in self.models:
            allowed = ", ".join(self.models) or "none"
            raise Refusal(Reason.REFUSED, f"the owner allows the models {allowed}; not {name!r}.")

    def check_columns(self, wanted: Sequence[str] | None, known: Sequence[str] | None) -> None:
        """Refuse some of the columns where the owner listed none."""
        if wanted is None or known is None or self.any_columns or set(wanted) >= set(known):
            return
        raise Refusal(
            Reason.REFUSED,
            "the owner has not listed the columns that a server may choose among: it does so with "
            "--columns.",
        )

    def check_statistics(
        self, rows: int, candidates: Sequence[Model], masked: bool = False
    ) -> None:
        """Refuse models whose numbers may stand for a few rows, at the join and once for all.

        ``rows`` counts the steps of sequences. ``masked``: they are told as parts of a sum alone.
        """
        counted = [m.group_shares(np.zeros(m.layout.size)).size > 0 for m in candidates]
        if self.models is None and not all(counted):
            raise Refusal(
                Reason.REFUSED,
                "this model does not tell how many rows stand behind its numbers: an owner who "
                "allows it names it in `models`.",
            )
        if not masked:  # else the rows of all count, which the opening tells
            self.check_spare(rows, sum(model.layout.size for model in candidates))

    def check_spare(self, rows: int, told: int) -> None:
        """Refuse so many statistics of so many rows of a site, or of so many values in a sum."""
        if self.spare_rows is not None and rows < told + self.spare_rows:
            raise Refusal(
                Reason.REFUSED,
                f"{told} statistics of so few rows are equations that have the rows as their "
                "solution: ask for fewer components, or use secure sums over more rows.",
            )

    def check_components(self, model: Model, statistics: FloatArray, rows: float) -> None:
        """Refuse to go on from a sum over so many rows in which a component has too few of them.

        Masks make sure that all sites are told the same statistics, not that these are true.
        """
        least = self.smallest_component
        if least is not None and thin(model.component_shares(statistics), rows, least).any():
            raise Refusal(
                Reason.NOT_NOW,
                f"a component of the sum of all sites has fewer than {least} rows, and the owner "
                "does not go on from there (smallest_component in its rules): ask for fewer "
                "components.",
            )

    def check_uniform(self, uniform: bool) -> None:
        """Refuse weights of the server's choice, and such under which rows cannot be counted."""
        if not uniform:
            raise Refusal(
                Reason.REFUSED,
                "with masks sites count by their rows, or alike: other weights would leave little "
                "of the sum but one site's part.",
            )
        if (self.smallest_component or 0) > SMALLEST_COMPONENT:
            raise Refusal(
                Reason.REFUSED,
                "where sites count alike (weights = 'uniform') the sum does not tell how many rows "
                "a component has, and the owner asks for that (smallest_component in its rules).",
            )

    def check_change(self, changed: int) -> None:
        """Refuse to describe rows of which a few came or went since they were described last."""
        if 0 < changed < self.smallest_rows:
            raise Refusal(
                Reason.REFUSED,
                "a few of its rows are others than when it joined last: the difference of two runs "
                "would tell of these. It joins when more have changed, or with the rows of before.",
            )

    def check_algorithm(self, rows_at_once: int) -> None:
        """Refuse answers about a few rows."""
        if rows_at_once and not self.mini_batches:
            raise Refusal(
                Reason.REFUSED, "the owner answers with full passes, not with mini-batches."
            )

    def check_step(self, before: FloatArray, after: FloatArray) -> None:
        """Refuse statistics that no step from the last ones leads to."""
        if self.largest_step is None or before.shape != after.shape:
            return
        longest = self.largest_step * max(1.0, float(np.linalg.norm(before)))
        if not float(np.linalg.norm(after - before)) <= longest:
            raise Refusal(
                Reason.REFUSED, "the owner follows one path of parameters: this step is too long."
            )

    def check_size(self, needed: int, cells: int) -> None:
        """Refuse what needs more memory than is in proportion, before any is taken."""
        chosen = self.largest_model
        limit = max(LARGEST_MODEL, PER_CELL * cells) if chosen is None else chosen
        if needed > limit:
            raise Refusal(
                Reason.REFUSED,
                f"this needs about {needed:.2g} numbers here, and the owner allows {limit:.2g} "
                "(largest_model in its rules): ask for a smaller model.",
            )

    def check_opening(self, rows: int, shares: FloatArray) -> None:
        """Refuse to describe too few rows, or groups of these shares if one is too small."""
        if rows < self.smallest_rows:
            raise Refusal(Reason.REFUSED, "the owner answers for more rows than there are here.")
        if self.smallest_group is None:
            return
        if rows < self.smallest_group or _small(rows * shares, self.smallest_group):
            raise Refusal(Reason.REFUSED, "the owner describes no group as small as one here.")


ANY = "*"
"""Among ``models``: all of them."""


@final
class GuardedRows(Oracle):
    """A worker's data with the rule on small groups.

    The statistics of a mixture are sums over the rows of each component. A component that holds
    more than nothing but less than ``smallest`` rows of what a message is computed from (all local
    rows, or the mini-batch) would be a statement about a few records, so the worker does not answer
    that round. It may answer another: components move. The same holds for all that a model counts
    (`Model.group_shares`): rows of a component with a code or in which a column was seen, first
    states and transitions of a chain. Statistics that count nothing are not about groups.
    """

    def __init__(self, inner: Oracle, model: Model, params: Any, smallest: int) -> None:
        self._inner, self._model, self._params, self._smallest = inner, model, params, smallest
        self.counts, self.own_seed, self.lasting = inner.counts, inner.own_seed, inner.lasting

    def full(
        self, params: Any, subset: IntArray, latent: Latent | None = None, each: bool = False
    ) -> FloatArray:
        """The full pass, if no group is too small."""
        statistics = self._inner.full(params, subset, latent, each)
        self.check(self._model, statistics, self.counts[subset], self._smallest)
        return statistics

    def take(self, indices: IntArray, subset: IntArray) -> Any:
        """Picked rows, if no group among them is too small."""
        rows = self._inner.take(indices, subset)
        counts = np.minimum(self.counts[subset], indices.shape[1])
        real = (np.arange(indices.shape[1]) < counts[:, None]).astype(np.float64)
        statistics = self._model.expected_statistics(rows, self._params, real)
        self.check(self._model, statistics, counts, self._smallest)
        return rows

    @staticmethod
    def check(model: Model, statistics: FloatArray, counts: IntArray, smallest: int) -> None:
        """Refuse for now if the statistics, of so many rows each, tell of a small group."""
        if _small(model.group_shares(statistics) * counts[:, None], smallest):
            raise Refusal(
                Reason.NOT_NOW, "the owner tells nothing of a group as small as one here now."
            )


def _small(rows: FloatArray, smallest: int) -> bool:
    """Whether some group is there and too small; sums of shares are exact to rounding only."""
    return bool(np.any((rows > 0) & (rows < smallest - 1e-9)))
