"""What a run leaves: the model, its records and a summary; for analysts and for sites."""

from __future__ import annotations

import json
import logging
import threading
from pathlib import Path
from typing import Any

from emfed.artifacts.disclosure import protections
from emfed.core.configuration import TOML
from emfed.core.storage import remove_torn, write_atomic
from emfed.deployment.config import Config
from emfed.deployment.site import MODEL, TABLE
from emfed.network.exchange.followed import Ended

logger = logging.getLogger(__name__)
REPORT = "report.html"


def leave_result(config: Config, end: Ended) -> dict[str, Any]:
    """Write what a run came to, and tell of it."""
    folder = config.place("output")
    folder.mkdir(parents=True, exist_ok=True)
    remove_torn(folder, (MODEL, TABLE))
    table = not hasattr(end.result, "fitted")
    write_atomic(folder / (TABLE if table else MODEL), end.state)
    if table:
        return {"converged": True, "doubts": [], "stopped": "complete", "why": ""}
    fitted = end.result.fitted()
    result = fitted.result
    result.records.to_csv(folder / "rounds.csv")
    choice = fitted.selection
    parameters = {name: value.tolist() for name, value in result.params.arrays().items()}
    about = {
        "round": result.records[-1].round,
        "stopped": result.stopped,
        "converged": result.converged,
        "doubts": fitted.doubts,
        "chosen": None if choice is None else choice.n_components,
        "up": result.ledger.total("up"),
        "down": result.ledger.total("down"),
        "raw": result.raw_bytes,
        "components": parameters,
        "why": "",
    }
    summary = {
        "rounds": about["round"],
        "stopped": result.stopped,
        "converged": result.converged,
        "doubts": fitted.doubts,
        "remarks": [TOML(remark) for remark in fitted.remarks],
        "protections": protections(result),
        "squared_H": result.records[-1].squared_H,
        "seed": result.seed,
        "bytes_up": about["up"],
        "bytes_down": about["down"],
        "raw_bytes": result.raw_bytes,
        "bytes": result.ledger.summary(),
        "parameters": parameters,
    }
    text = json.dumps(summary, indent=1) + "\n"
    (folder / "summary.json").write_text(text, encoding="utf-8")
    return about


_DRAWING = threading.Lock()


def draw_report(config: Config) -> None:
    """Draw the report beside the model; sites are told by now, and the model stays what it is."""
    from emfed.artifacts.result import load

    output: Path = config.place("output")
    if not (output / MODEL).exists():
        return
    try:
        with _DRAWING:  # matplotlib's, for runs that end at once
            load(output / MODEL).report(output / REPORT, title=config.path.stem)
    except Exception:  # fonts, a full disk: the run is over and its model whole
        logger.exception("the report could not be drawn; `emfed report` draws it from the model")
