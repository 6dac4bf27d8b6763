"""Model files: a fitted model, its records, its ledger and its card, in one sealed file.

What predicts is the bound model and the statistics S: the parameters are T(S). They are in the file
too, in the user's units, for readers in other languages.

Decision: docs/decisions/021-model-files.md
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from emfed.artifacts.company import Company
from emfed.artifacts.facts import ByWorker, Facts
from emfed.artifacts.promises import as_read
from emfed.artifacts.validation import NUMBERS
from emfed.core.errors import EmfedError, EmfedWarning, ModelFileError
from emfed.core.ledger import DIRECTIONS, PARTS, Ledger
from emfed.core.protocols import Model, Parameters
from emfed.core.records import Records
from emfed.core.registry import STORED
from emfed.core.storage import Seal, decode, encode, load_sealed, save_sealed
from emfed.core.wording import Wording
from emfed.network.scoring import SCORES, over_all

if TYPE_CHECKING:
    from emfed.artifacts.result import Result

SEAL = Seal("emfed-model", "1", "model file", ModelFileError)
_ADVICE = "free space or choose another place."


def write_model(path: str | Path, contents: Result, names: bool = True) -> None:
    """Write atomically; without ``names`` the workers stay unnamed."""
    params = contents.params
    arrays: dict[str, NDArray[Any]] = {"statistics": contents.statistics}
    known = {cls: name for name, cls in STORED.items()}
    if type(contents.model) not in known:
        raise ModelFileError(
            f"model files do not know {type(contents.model).__name__}: decorate the class, a "
            "dataclass, with emfed.models.register_model before saving and loading."
        )
    tree = encode(contents.model, known, "model", arrays)
    description: dict[str, Any] = {
        "model": tree,
        "stopped": contents.stopped,
        "confirmed": contents.confirmed,
        "seed": contents.seed,
        "columns": contents.columns and list(contents.columns),
        "samples": contents.samples,
        "facts": None,
        "card": contents.card,
    }
    arrays |= {f"records/{name}": a for name, a in contents.records.to_arrays().items()}
    arrays |= {
        f"summary/{name}": np.asarray(a) for name, a in (contents.pooled_summary or {}).items()
    }
    arrays["ledger"] = contents.ledger.counts
    if isinstance(params, Parameters):
        arrays |= {f"params/{name}": np.asarray(a) for name, a in params.arrays().items()}
    if names and contents.ledger.names is not None:
        text = json.dumps(list(contents.ledger.names), ensure_ascii=False)
        arrays["workers/names"] = np.frombuffer(text.encode(), dtype=np.uint8)
    told: dict[str, NDArray[Any] | None] = {"uncertainty": contents.uncertainty}
    told["workers/weights"] = contents.worker_weights
    if (facts := contents.facts) is not None:
        told |= {"scores": facts.scores, "held_out": facts.held_out}
        if (own := facts.by_worker) is not None:
            told |= {"workers/rows": own.rows, "workers/scores": own.scores}
            told["workers/held_out"] = own.held_out
        company = facts.company if names or facts.company is None else facts.company.unnamed()
        description["facts"] = {
            "workers": facts.workers,
            "rows": facts.rows,
            "company": None if company is None else company.described(),
            "settings": dict(facts.settings),
            "simulated": facts.simulated,
            "created": facts.created,
            "software": dict(facts.software),
        }
    arrays |= {name: array for name, array in told.items() if array is not None}
    save_sealed(path, SEAL, arrays, description, _ADVICE)


def read_model(path: str | Path) -> dict[str, Any]:
    """The fields of a result, read and checked; whatever the bytes, all or a `ModelFileError`."""
    arrays, description = load_sealed(path, SEAL)
    try:
        found = _contents(arrays, description)
    except (EmfedError, ArithmeticError, ValueError, TypeError, LookupError, AttributeError) as e:
        if isinstance(e, ModelFileError):
            raise ModelFileError(Wording("{}: {}", path, e.message)) from None
        raise ModelFileError(
            f"{path} is no model file of this release: its parts do not fit together "
            f"({type(e).__name__}: {str(e)[:200]})."
        ) from e
    if lost := _lost_promise(description["facts"], found["facts"]):
        warnings.warn(f"{path} is {lost}.", EmfedWarning, stacklevel=3)
    return found


def _lost_promise(told: Any, facts: Facts | None) -> str:
    """Why an epsilon that the file claims is none, in words; empty where it claims none."""
    claimed = None if told is None else told["settings"].get("privacy")
    if facts is None or claimed is None or "private" in claimed:
        return ""
    promise = facts.settings["privacy"]
    return "" if promise["private"] else str(promise["words"])


def _finite(array: NDArray[Any]) -> bool:
    return array.dtype == np.float64 and bool(np.isfinite(array).all())


def _ledger(arrays: dict[str, NDArray[Any]]) -> Ledger:
    counts = arrays["ledger"]
    if counts.ndim != 4 or counts.shape[1:3] != (len(DIRECTIONS), len(PARTS)):
        raise ModelFileError(f"its ledger has the shape {counts.shape}.")
    ledger = Ledger(counts.shape[3], _names(arrays, counts.shape[3]))
    ledger.restore(counts.astype(np.int64))
    return ledger


def _contents(arrays: dict[str, NDArray[Any]], description: dict[str, Any]) -> dict[str, Any]:
    model = decode(description["model"], STORED, arrays)
    if not isinstance(model, Model):
        raise ModelFileError("its description is that of no model.")
    statistics = arrays["statistics"]
    if statistics.dtype != np.float64 or statistics.shape != (model.layout.size,):
        raise ModelFileError(
            f"the model has {model.layout.size} statistics; the file holds {statistics.shape}."
        )
    if not model.inside(statistics):
        raise ModelFileError("its statistics are none that the model can have.")
    params = model.to_user(model.maximize(statistics))
    _check_params(params, arrays)
    ledger = _ledger(arrays)
    summary = _under("summary/", arrays)
    if not all(map(_finite, summary.values())):
        raise ModelFileError("its summary of the rows holds other things than finite numbers.")
    root, width = arrays.get("uncertainty"), len(model.streamed(statistics)[1])
    if root is not None and not (_finite(root) and root.shape[1:] == (width,)):
        raise ModelFileError(f"its uncertainty is not one of {width} statistics.")
    columns = description["columns"]
    if columns is not None and not all(isinstance(name, str) for name in columns):
        raise ModelFileError("its columns have no names.")
    return {
        "model": model,
        "params": params,
        "statistics": statistics,
        "records": Records.from_arrays(_under("records/", arrays)),
        "ledger": ledger,
        "stopped": str(description["stopped"]),
        "confirmed": bool(description["confirmed"]),
        "seed": int(description["seed"]),
        "columns": None if columns is None else tuple(columns),
        "worker_weights": arrays.get("workers/weights"),
        "samples": float(description["samples"]),
        "facts": _facts(arrays, description["facts"], ledger.counts.shape[-1]),
        "pooled_summary": summary or None,
        "uncertainty": root,
    }


def _under(prefix: str, arrays: dict[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}


def _check_params(params: Any, arrays: dict[str, NDArray[Any]]) -> None:
    """What other readers are shown is what this one computes."""
    shown = _under("params/", arrays)
    if shown and isinstance(params, Parameters):
        for name, value in params.arrays().items():
            if not np.allclose(shown[name], value, rtol=1e-6, atol=1e-9, equal_nan=True):
                raise ModelFileError(f"its parameters {name!r} are not those of its statistics.")


def _names(arrays: dict[str, NDArray[Any]], count: int) -> list[str] | None:
    if "workers/names" not in arrays:
        return None
    names = json.loads(arrays["workers/names"].tobytes().decode())
    if not (isinstance(names, list) and len(names) == count):
        raise ModelFileError(f"it has not one name for each of {count} workers.")
    return [str(name) for name in names]


def _facts(arrays: dict[str, NDArray[Any]], told: Any, count: int) -> Facts | None:
    width = max(SCORES, *(np.shape(arrays[n])[-1] for n in arrays if n.endswith("scores")), 0)
    shapes: dict[str, tuple[int, ...]] = {"workers/rows": (count,), "workers/weights": (count,)}
    shapes |= {"workers/held_out": (count, NUMBERS), "workers/scores": (count, width)}
    shapes |= {"held_out": (2,), "scores": (width,)}
    for name, shape in shapes.items():
        if name in arrays and arrays[name].shape != shape:
            raise ModelFileError(f"{name} has the shape {arrays[name].shape}, not {shape}.")
    if told is None:
        return None
    by_worker, scores, company = None, arrays.get("scores"), told.get("company")
    rows, workers = told.get("rows"), told.get("workers", count)
    if "workers/rows" in arrays:
        own = arrays["workers/rows"].astype(np.int64), arrays.get("workers/scores")
        by_worker = ByWorker(*own, arrays.get("workers/held_out"))
        if rows is None:  # release 0.1: where sums were masked it divided them by the workers
            rows, scores = own[0].sum(), None if own[1] is None else over_all(own[1], own[0])
            by_worker = None if told["settings"].get("masks") else by_worker
    software = {str(k): str(v) for k, v in told["software"].items()}
    settings = as_read(told["settings"], bool(told["simulated"]), software.get("emfed", "0.1"))
    return Facts(
        workers=int(workers),
        rows=int(rows),
        settings=settings,
        simulated=bool(told["simulated"]),
        by_worker=by_worker,
        scores=scores,
        held_out=arrays.get("held_out"),
        company=Company.read(company),
        created=str(told["created"]),
        software=software,
    )
