"""Model cards: what a reader must know of a fit before using it, as plain data and as text."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

import numpy as np

from emfed.core.ledger import KINDS, Ledger
from emfed.core.protocols import FloatArray, IntArray, ModelWords
from emfed.core.version import __version__
from emfed.models.component_summaries import width_of
from emfed.network.scoring import falls_short

if TYPE_CHECKING:
    from emfed.artifacts.result import Result


def software() -> dict[str, str]:
    """Versions of what computed the fit."""
    import scipy

    return {
        "emfed": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "scipy": scipy.__version__,
        "system": f"{platform.system()} {platform.machine()}",
    }


def now() -> str:
    """The time in UTC, ISO 8601."""
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def size(count: float) -> str:
    """Bytes in few characters."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


@dataclass(frozen=True, eq=False)
class Facts:
    """The circumstances of a fit, beside what it reached."""

    rows: IntArray
    """Rows of each worker, as the opening exchange told them."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Algorithm, participation and limits, as plain JSON types."""
    simulated: bool = True
    """Whether all workers were in one process: bytes were then measured, not sent."""
    scores: FloatArray | None = None
    """If the fit ended by asking, of each worker: mean and spread of its rows' log-likelihood, what
    the model expects of both, given how many rows of each component the worker has, and the share
    of each component."""
    validation: FloatArray | None = None
    """If the fit ended by it, what each worker told of rows held out: see `Validation`."""
    created: str = field(default_factory=now)
    software: Mapping[str, str] = field(default_factory=software)

    @property
    def log_likelihood(self) -> float | None:
        """The mean over all rows, where every worker told its own."""
        if self.scores is None or not np.isfinite(self.scores[:, 0]).all():
            return None
        return float(self.rows @ self.scores[:, 0] / self.rows.sum())

    @property
    def row_spread(self) -> float | None:
        """The standard deviation over all rows of their log-likelihood."""
        mean = self.log_likelihood
        if mean is None or self.scores is None or not np.isfinite(self.scores[:, 1]).all():
            return None
        squares = self.scores[:, 1] ** 2 + (self.scores[:, 0] - mean) ** 2
        return float(np.sqrt(self.rows @ squares / self.rows.sum()))

    @property
    def expected(self) -> FloatArray | None:
        """Mean and spread of the log-likelihood to expect of each worker, ``(workers, 2)``.

        None where the fit did not ask, or the model draws no samples and so claims nothing.
        """
        if self.scores is None or not np.isfinite(self.scores[:, 2:4]).any():
            return None
        return self.scores[:, 2:4]

    @property
    def shares(self) -> FloatArray | None:
        """The share of each component in each worker's rows, ``(workers, K)``, where it is known.

        Rows of NaN are of workers that did not tell.
        """
        if self.scores is None or self.scores.shape[1] <= 4:
            return None
        found = self.scores[:, 4:]
        return found if np.isfinite(found).any() else None

    def badly_served(self) -> IntArray:
        """Workers whose rows the common model explains clearly worse than it claims to."""
        if self.expected is None or self.scores is None:
            return np.empty(0, dtype=np.int64)
        return np.flatnonzero(falls_short(self.scores, self.rows))


def make_card(result: Result) -> dict[str, Any]:
    """The card as plain JSON types; everything in it is an aggregate over workers or a setting."""
    from emfed.artifacts.disclosure import protections  # which reads results, and these have cards

    facts, columns, words = result.facts, result.columns, result.model.words()
    value = None if facts is None else facts.log_likelihood
    made = [record for record in result.records if record.round > 0]
    width = width_of(result.model) or (columns and len(columns))
    data: dict[str, Any] = {"columns": width, "column_names": columns and list(columns)}
    if facts is not None:
        data |= {
            "workers": len(facts.rows),
            "rows": int(facts.rows.sum()),
            "raw_bytes": result.raw_bytes,
            "rows_of_a_worker": {
                "least": int(facts.rows.min()),
                "median": float(np.median(facts.rows)),
                "most": int(facts.rows.max()),
            },
        }
    return {
        "created": None if facts is None else facts.created,
        "software": {} if facts is None else dict(facts.software),
        "model": dict(result.model.describe()),
        "data": data,
        "settings": {} if facts is None else dict(facts.settings),
        "seed": result.seed,
        "protections": protections(result),
        "simulated": None if facts is None else facts.simulated,
        "bytes": result.ledger.summary(),
        "participation": {
            "rounds": len(made),
            "asked": sum(record.asked for record in made),
            "answered": sum(record.answered for record in made),
        },
        "convergence": {
            "stopped": result.stopped,
            "converged": result.converged,
            "squared_H": made[-1].squared_H if made else None,
            "guard_hits": result.guard_hits,
            words.key: None if value is None else words.factor * value,
        },
    }


def worker_table(ledger: Ledger, facts: Facts | None, words: ModelWords) -> dict[str, list[Any]]:
    """One row per worker: name, rows, messages and bytes each way, and fit where it is known."""
    n = ledger.counts.shape[-1]
    names = [str(i) for i in range(n)] if ledger.names is None else list(ledger.names)
    counted = ledger.counts[: KINDS.index("monitor")]  # what totals count, too
    messages, payload, envelope = (counted[:, :, part].sum(axis=0) for part in range(3))
    table: dict[str, list[Any]] = {"worker": names}
    if facts is not None:
        table["rows"] = facts.rows.tolist()
    for d, direction in enumerate(("up", "down")):
        table[f"messages_{direction}"] = messages[d].tolist()
        table[f"bytes_{direction}"] = (payload[d] + envelope[d]).tolist()
        table[f"payload_{direction}"] = payload[d].tolist()
    if facts is not None and facts.scores is not None:
        scores = words.factor * facts.scores[:, 0]
        table[words.key] = [None if np.isnan(v) else v for v in scores.tolist()]
        if (expected := facts.expected) is not None:
            table["expected"] = [None if np.isnan(v) else v for v in expected[:, 0].tolist()]
            bad = set(facts.badly_served().tolist())
            table["badly_served"] = [i in bad for i in range(n)]
    return table


def card_markdown(card: Mapping[str, Any]) -> str:
    """A card as Markdown: one heading a part, one line a fact."""
    lines = ["# Model card", ""]
    plain = {k: v for k, v in card.items() if not isinstance(v, Mapping)}
    lines += [f"- {_words(name)}: {in_words(value)}" for name, value in plain.items()]
    for name, part in card.items():
        if isinstance(part, Mapping):
            raw = card.get("data", {}).get("raw_bytes")
            body = _traffic(part, raw) if name == "bytes" else bullets(part)
            lines += ["", f"## {_words(name)}", "", *body]
    return "\n".join(lines) + "\n"


def bullets(part: Mapping[str, Any], depth: int = 0) -> list[str]:
    """Names and values, one to a line; what has parts of its own one step in."""
    lines = []
    for name, value in part.items():
        inner = _inner(value)
        if inner is None:
            lines.append(f"{'  ' * depth}- {_words(name)}: {in_words(value)}")
        elif isinstance(inner, Mapping):
            lines += [f"{'  ' * depth}- {_words(name)}", *bullets(inner, depth + 1)]
        else:
            lines += [f"{'  ' * depth}- {_words(name)}", *_rows(inner, depth + 1)]
    return lines


def _inner(value: Any) -> Any:
    """A mapping (pairs with names are one), rows of them, or None for a plain value."""
    if isinstance(value, Mapping):
        if len(value) > 1 and "family" in value:  # a family and its settings: one line
            return None
        return value
    if not isinstance(value, (list, tuple)) or not value:
        return None
    if all(isinstance(row, Mapping) and "family" not in row for row in value):
        return value
    if all(isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) for row in value):
        return dict(value)
    return None


def _rows(rows: Sequence[Mapping[str, Any]], depth: int) -> list[str]:
    """Each row on a line; one that has parts of its own as bullets below its first."""
    lines = []
    for row in rows:
        if all(_inner(value) is None for value in row.values()):
            told = "; ".join(f"{_words(name)} {in_words(value)}" for name, value in row.items())
            lines.append(f"{'  ' * depth}- {told}")
        else:
            (name, value), *rest = row.items()
            lines.append(f"{'  ' * depth}- {_words(name)}: {in_words(value)}")
            lines += bullets(dict(rest), depth + 1)
    return lines


def _traffic(part: Mapping[str, Any], raw: int | None) -> list[str]:
    """The kinds of messages there were, as a table, and the sum beside the size of the rows."""
    lines = ["| messages | direction | number | payload | envelope |", "|" + " --- |" * 5]
    for kind, ways in part.items():
        for way, counts in ways.items():
            if counts["messages"]:
                lines.append(f"| {kind} | {way} | {' | '.join(str(n) for n in counts.values())} |")
    counted = [c for kind, ways in part.items() if kind != "monitor" for c in ways.values()]
    total = size(sum(c["payload"] + c["envelope"] for c in counted))
    beside = "" if raw is None else f" (the rows themselves: {size(raw)})"
    return [*lines, "", f"All but monitor: {total}{beside}."]


def _words(name: str) -> str:
    return name.replace("_", " ").replace("squared H", "|H|²")


def in_words(value: Any) -> str:
    """A setting as people write it."""
    if value is None:
        return "none"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, Mapping) and "family" in value:
        more = [f"{_words(n)} {in_words(v)}" for n, v in value.items() if n != "family"]
        return f"{value['family']} ({', '.join(more)})" if more else str(value["family"])
    return ", ".join(map(in_words, value)) if isinstance(value, (list, tuple)) else str(value)
