"""Model cards: what a reader must know of a fit before using it, as plain data and as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from emfed.artifacts.facts import Facts
from emfed.core.ledger import KINDS, Ledger
from emfed.core.protocols import IntArray, ModelWords
from emfed.models.component_summaries import width_of

if TYPE_CHECKING:
    from emfed.artifacts.result import Result


def size(count: float) -> str:
    """Bytes in few characters."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"


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
            "workers": facts.workers,
            "rows": facts.rows,
            "raw_bytes": result.raw_bytes,
        }
        if facts.by_worker is not None:
            data["rows_of_a_worker"] = _some(facts.by_worker.rows)
    return {
        "created": None if facts is None else facts.created,
        "software": {} if facts is None else dict(facts.software),
        "model": dict(result.model.describe()),
        "data": data,
        "settings": {} if facts is None else dict(facts.settings),
        "seed": result.seed,
        "protections": protections(result),
        "company": None if (company := result.company) is None else company.described(),
        "doubts": result.doubts,
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


def _some(rows: IntArray) -> dict[str, float]:
    return {"least": int(rows.min()), "median": float(np.median(rows)), "most": int(rows.max())}


def worker_table(ledger: Ledger, facts: Facts | None, words: ModelWords) -> dict[str, list[Any]]:
    """One row per worker: name, messages and bytes each way; rows and fit where they are known."""
    n = ledger.counts.shape[-1]
    names = [str(i) for i in range(n)] if ledger.names is None else list(ledger.names)
    counted = ledger.counts[: KINDS.index("monitor")]  # what totals count, too
    messages, payload, envelope = (counted[:, :, part].sum(axis=0) for part in range(3))
    table: dict[str, list[Any]] = {"worker": names}
    known = None if facts is None else facts.by_worker
    if known is not None:
        table["rows"] = known.rows.tolist()
    for d, direction in enumerate(("up", "down")):
        table[f"messages_{direction}"] = messages[d].tolist()
        table[f"bytes_{direction}"] = (payload[d] + envelope[d]).tolist()
        table[f"payload_{direction}"] = payload[d].tolist()
    if known is not None and known.scores is not None:
        scores = words.factor * known.scores[:, 0]
        table[words.key] = [None if np.isnan(v) else v for v in scores.tolist()]
        if (expected := known.expected) is not None:
            table["expected"] = [None if np.isnan(v) else v for v in expected[:, 0].tolist()]
            bad = set(known.badly_served.tolist())
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
