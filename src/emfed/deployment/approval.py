"""The owner's word about each fit, where the owner's rules ask for it.

A fit is what signed settings name: the model with all its settings, the columns, whether sums are
masked, and the epsilon and delta of a private one. The first run of a fit puts the question into
the site's folder; until the owner has answered, nothing is said of it. An answer holds for every
later run of the same fit, until the owner takes it back.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from emfed.core.errors import SettingsError
from emfed.core.storage import read_json_file, write_atomic
from emfed.core.wire.text import as_json
from emfed.network.addresses import alone, printable

APPROVALS = "approvals.json"
MOST_PENDING = 20
"""Questions that wait for an answer: a server that asks about ever new fits fills no disk."""


def describe_fit(content: Mapping[str, Any]) -> str:
    """What a fit is, in words for its owner."""
    model = content.get("model")
    about = dict(model) if isinstance(model, Mapping) else {}
    kind, columns = about.pop("model", None) or about.pop("kind", "?"), content.get("columns")
    settings = ", ".join(f"{name} {value}" for name, value in sorted(about.items()))
    which = "all columns" if not columns else f"the columns {', '.join(map(str, columns))}"
    masked = "masked" if content.get("masks") else "not masked: all members read this site's"
    noise = "without noise, not private"
    if content.get("privacy") is not None:
        epsilon, delta = content["privacy"]
        noise = f"private: epsilon {epsilon:g}, delta {delta:g}"
    alike = "" if content.get("weights") is None else "; sites count alike"
    words = f"{kind} ({settings}), of {which}{alike}; sums are {masked}; {noise}"
    return printable(words[:2000])


def _read(folder: Path) -> dict[str, dict[str, Any]]:
    path = folder / APPROVALS
    try:
        found = read_json_file(path)
        return {str(fit): dict(about) for fit, about in found.items()}
    except FileNotFoundError:
        return {}
    except (ValueError, TypeError, AttributeError):
        raise SettingsError(f"{path} is damaged: delete it, and answer again.") from None


def pending_fits(folder: Path) -> list[dict[str, Any]]:
    """Fits that wait for the owner's word."""
    found = _read(folder)
    return [{"fit": fit, **about} for fit, about in found.items() if about.get("answer") is None]


def known_fits(folder: Path) -> dict[str, dict[str, Any]]:
    """All fits that the owner was asked about, with what was answered."""
    return _read(folder)


def answer_fit(folder: Path, fit: str, answer: bool) -> str:
    """The owner's word; ``fit`` may be the beginning of its number. Returns what it is."""
    with alone(folder / "approvals.lock", 5.0):
        found = _read(folder)
        meant = [known for known in found if fit and known.startswith(fit)]
        if len(meant) != 1:
            known = ", ".join(found) or "none"
            raise SettingsError(
                f"{fit!r} is the beginning of no fit, or of several; known: {known}."
            )
        found[meant[0]] |= {"answer": answer, "answered": time.time()}
        write_atomic(folder / APPROVALS, (json.dumps(found, indent=1) + "\n").encode())
    return str(found[meant[0]]["words"])


Approve = Callable[[Mapping[str, Any]], bool | None]


def owners_word(folder: Path, content: Mapping[str, Any]) -> bool | None:
    """What the owner answered about a fit; the first time, put the question. None: nothing yet."""
    asked = {name: content.get(name) for name in ("model", "columns", "masks", "privacy")}
    asked |= {"weights": content["weights"]} if "weights" in content else {}
    fit = hashlib.sha256(as_json(asked).encode()).hexdigest()[:12]
    with alone(folder / "approvals.lock", 5.0):
        found = _read(folder)
        about = found.get(fit)
        if about is None:
            if sum(known.get("answer") is None for known in found.values()) >= MOST_PENDING:
                return None
            about = {"words": describe_fit(content), "asked": time.time(), "answer": None}
            found[fit] = about
            write_atomic(folder / APPROVALS, (json.dumps(found, indent=1) + "\n").encode())
    answer = about.get("answer")
    return answer if isinstance(answer, bool) else None
