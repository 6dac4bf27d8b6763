"""What a site's owner allows: one table of rules, two presets, and what they give away in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, final

import numpy as np

from emfed.core.configuration import check_keys
from emfed.core.errors import SettingsError, check_choice, check_count, check_range
from emfed.core.privacy import check_delta, mu_squared_of
from emfed.core.settings.declaring import Declared, documented
from emfed.models.components import SMALLEST_COMPONENT

ANY = "*"
"""Among ``models``: all of them."""
CAREFUL, TRUSTING = "careful", "trusting"
"""The presets; rules that are written beside ``preset`` override it."""
SERVER = (
    "The server learns who takes part, when, and how many bytes. Where sums are masked it learns "
    "no number of a single site, whatever it does: `emfed serve` reads sums as an analyst, `emfed "
    "relay` reads none. Where sites leave or come, two sums differ by theirs."
)
MEMBERS = (
    "Analysts and all sites learn sums over the sites that take part, and the model. All sites but "
    "one together know the part of the last one: of three sites each reads the sum of the other "
    "two (smallest_set asks for more sites)."
)
LYING_SITE = (
    "A site that lies together with the server can steer the sums and so read single rows, not "
    "whose they are: join only with sites that you trust that far."
)
"""What is left under the default rules (docs/decisions/003)."""
GONE: Mapping[str, str] = {
    "largest_step": (
        "every site computes the fit's steps itself, so no server can choose one: delete this line"
    ),
    "smallest_group": (
        "its refusals depended on the rows, and told of them: write smallest_component, which all "
        "sites judge alike by the sum over them"
    ),
    "smallest_cluster": (
        "sums over a site's own clusters are masked like all others: leave unmasked = false, or "
        "write own_clusters = false"
    ),
}
"""Rules of release 0.1 that are refused, and what takes their place."""


def _rule(careful: Any, trusting: Any, help: str, takes: str) -> Any:
    """Declare a rule: its value in each preset, and its help for docstring and documentation."""
    about = {"declared": Declared(help=help, takes=takes), TRUSTING: trusting}
    return field(default=careful, metadata=about)


@final
@documented
@dataclass(frozen=True)
class SiteRules:
    """What the owner of the data insists on.

    The server cannot change it, and is told no more than which rule was met. What is not given is
    that of the preset ``careful``.

    Parameters
    ----------
    {settings}

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

    models: Sequence[str] | None = _rule(
        None,
        (ANY,),
        "The models that may be fitted, by name; None is all that tell how many rows stand behind "
        'each number, "*" is all.',
        "sequence of str or None",
    )
    any_columns: bool = _rule(
        False,
        True,
        "Whether an analyst may choose among columns that the owner did not list.",
        "bool",
    )
    smallest_rows: int = _rule(
        10,
        1,
        "The site takes part with so many rows at least, and not where fewer rows than that "
        "changed since it took part before. In a private fit noise takes the place of both.",
        "int",
    )
    spare_rows: int | None = _rule(
        1,
        None,
        "So many rows more than a sum has statistics; None is any number. With fewer, the "
        "statistics are equations that have the rows as their solution. Each step of a sequence "
        "is a row here. With masks the rows of all sites count.",
        "int or None",
    )
    smallest_component: int | None = _rule(
        SMALLEST_COMPONENT,
        None,
        "Rows of all sites together behind each component of a masked sum, at least. All sites "
        "judge alike, by the sum; below it this one does not go on.",
        "int or None",
    )
    smallest_observers: int = _rule(
        3,
        1,
        "Sites that have seen each cell of a table whose sum is told, at least.",
        "int",
    )
    smallest_set: int = _rule(
        3, 3, "Sites in a masked sum that this one takes part in, at least.", "int"
    )
    largest_changes: int | None = _rule(
        1,
        None,
        "How often, over all runs, the sites that it adds up with may change: two sums with and "
        "without a site differ by that site's part.",
        "int or None",
    )
    largest_rounds: int | None = _rule(
        10_000,
        None,
        "Exchanges for which the site looks at its rows, over all runs.",
        "int or None",
    )
    largest_fits: int | None = _rule(
        100,
        None,
        "Fits that the site takes part in, over all runs: two of them tell more than one.",
        "int or None",
    )
    largest_choices: int | None = _rule(
        0,
        None,
        "Numbers that an analyst may choose in a run's settings: parameters as a start, priors "
        "with a location, fixed variances. Words do not count.",
        "int or None",
    )
    largest_model: int | None = _rule(
        None,
        None,
        "Numbers that a model may need here, by the counts that its description names; None is 4 "
        "million, or 16 for each number of the site's own data.",
        "int or None",
    )
    mini_batches: bool = _rule(
        False, True, "Whether an answer may be about a few rows at a time.", "bool"
    )
    own_clusters: bool = _rule(
        True,
        True,
        "Whether the site tells clusters of its own rows, where a run without masks merges "
        "everybody's for its start.",
        "bool",
    )
    unmasked: bool = _rule(
        False,
        True,
        "Whether the site takes part in runs without masks, where all members see the statistics "
        "of each site.",
        "bool",
    )
    ask_first: bool = _rule(
        False, False, "Whether each fit waits for the owner's word before anything leaves.", "bool"
    )
    largest_epsilon: float | None = _rule(
        None,
        None,
        "What the owner gives away of any one row over all runs, at ``delta``; only private runs "
        "are then taken part in, until it is used up. None is any run that the other rules allow.",
        "float or None",
    )
    delta: float = _rule(
        1e-5, 1e-5, "The probability with which a private run may tell more.", "float"
    )
    colluders: int = _rule(
        1,
        1,
        "How many other sites may work together before a row is less private than a run says.",
        "int",
    )
    second_ledger: str | None = _rule(
        None,
        None,
        "A folder on another disk that keeps what was given away, too, so that a backup which is "
        "put back does not forget it.",
        "str or None",
    )

    def __post_init__(self) -> None:
        least = {"smallest_set": 3, "colluders": 0, "spare_rows": 0}
        least |= {"largest_changes": 0, "largest_choices": 0}
        for known in fields(self):
            name, kind, value = known.name, str(known.type), getattr(self, known.name)
            if kind.startswith("int") and not (value is None and "None" in kind):
                check_count(name, value, least.get(name, 1))
            elif kind == "bool" and type(value) is not bool:
                raise SettingsError(f"{name} must be true or false; got {value!r}.")
        check_delta(self.delta)
        if self.largest_epsilon is not None:
            check_range("largest_epsilon", self.largest_epsilon, 0, np.inf, open_low=True)
        if self.models is not None:
            if isinstance(self.models, str):
                raise SettingsError(f"models must be a list of names; got {self.models!r}.")
            object.__setattr__(self, "models", tuple(str(name) for name in self.models))

    @classmethod
    def trusting(cls, **rules: Any) -> SiteRules:
        """The preset for an owner who trusts analysts and the other sites with the rows."""
        return cls(**{known.name: known.metadata[TRUSTING] for known in fields(cls)} | rules)

    @classmethod
    def read(cls, table: Mapping[str, Any]) -> SiteRules:
        """The rules of a TOML table: ``preset`` and overrides, where ``false`` is no limit."""
        for name, instead in GONE.items():
            if name in table:
                raise SettingsError(f"{name} is no rule any more: {instead}.")
        check_keys(table, ["preset", *(known.name for known in fields(cls))], "the owner's rules")
        preset = table.get("preset", CAREFUL)
        check_choice("preset", preset, (CAREFUL, TRUSTING))
        optional = {known.name for known in fields(cls) if "None" in str(known.type)}
        said: dict[str, Any] = {
            name: None if value is False and name in optional else value
            for name, value in table.items()
            if name != "preset"
        }
        try:
            return cls(**said) if preset == CAREFUL else cls.trusting(**said)
        except TypeError as error:
            raise SettingsError(f"the owner's rules: {error}") from None

    def on_this_machine(self) -> SiteRules:
        """The same in a trial without keys: nothing leaves the machine, and nothing is masked."""
        return replace(self, unmasked=True)

    def gives_away(self) -> list[str]:
        """What others can find out under these rules, in sentences.

        First what they can under the preset ``careful``, too; then what looser rules add.
        """
        careful, told = SiteRules(), [SERVER, MEMBERS, LYING_SITE]
        if self.largest_epsilon is not None:
            told = [
                f"Of any one row nobody learns more than epsilon {self.largest_epsilon:g} allows "
                "over all runs, whoever lies. The server learns who takes part, when, and how many "
                "bytes."
            ]
        if self.unmasked:
            told.append(
                "Without masks all members, the server too, read the statistics of this very site."
            )
        if self.smallest_rows < careful.smallest_rows or self.spare_rows is None:
            told.append(
                "With fewer rows than a sum has statistics it tells the rows: they are the "
                "solution of as many equations."
            )
        if self.models is not None:
            told.append(
                "Models that the owner names are fitted even where their numbers may stand for "
                "single rows."
            )
        if self.any_columns:
            told.append(
                "Analysts choose the columns: they learn moments of any column with any other."
            )
        if self.mini_batches:
            told.append(
                "Sums over mini-batches tell of as few rows as a batch has, and analysts know "
                "which these are."
            )
        for name, words in (
            ("largest_rounds", "More exchanges"),
            ("largest_fits", "More fits"),
            ("largest_choices", "Numbers of an analyst's choice in the settings"),
            ("largest_changes", "More changes of who adds up"),
        ):
            mine, usual = getattr(self, name), getattr(careful, name)
            if mine is None or mine > usual:
                told.append(f"{words} let differences of sums isolate single rows or sites.")
        if (self.smallest_component or 0) < SMALLEST_COMPONENT:
            told.append("A component of a masked sum may stand for one row.")
        if self.smallest_observers < careful.smallest_observers:
            told.append("The sum of a cell that one site saw is that site's.")
        return told

    @property
    def largest_cost(self) -> float | None:
        """Mu squared that the owner gives away over all runs."""
        if self.largest_epsilon is None:
            return None
        return mu_squared_of(self.largest_epsilon, self.delta)


def rules_table() -> str:
    """All rules and their values in both presets, as the Markdown table of the documentation."""

    def written(value: Any) -> str:
        if value is None or value is False:
            return "false"
        if isinstance(value, tuple):
            return str(list(value)).replace("'", '"')
        return "true" if value is True else f"{value:,}" if type(value) is int else str(value)

    lines = [f"| rule | {CAREFUL} | {TRUSTING} | |", "| --- | --- | --- | --- |"]
    for known in fields(SiteRules):
        values = (known.default, known.metadata[TRUSTING])
        words = known.metadata["declared"].help.replace("``", "`").replace("None is", "`false` is")
        lines.append(f"| `{known.name}` | {' | '.join(map(written, values))} | {words} |")
    return "\n".join(lines) + "\n"
