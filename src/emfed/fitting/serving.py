"""`serve`: a run over a network that outlives its server, and whose workers come and go.

Who leaves, for good or for a while, and who comes back is the affair of the run itself
(`emfed.fitting.session`). When somebody new is let in the **stage** ends, and the next begins with
an opening of its own, at the parameters that were reached: the weights, the frame, the sample size
that scales priors and the second moment of a tied covariance all depend on who is in, so anything
less would fit a model of nobody's data. Memories start at zero with each stage, on both sides, and
are exact in it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import logging
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, final

import numpy as np

from emfed.artifacts.result import Result
from emfed.core.errors import CheckpointError, EmfedError, ParticipationError
from emfed.core.protocols import View
from emfed.core.records import RoundRecord
from emfed.core.storage import load_checkpoint, remove_torn, save_checkpoint
from emfed.fitting.driver import run_fit
from emfed.fitting.fitted import Fitted, Watch
from emfed.fitting.settings import ROUNDS, FitSettings, worker_weights
from emfed.fitting.stopping import Callback
from emfed.models.binding import Bound, of_columns
from emfed.models.side_by_side import SideBySide
from emfed.network import LocalTransport, RemoteFederation, Site, SiteRules, Transport
from emfed.network.membership import Members

logger = logging.getLogger(__name__)
CHECKPOINT = "run.checkpoint"
ADMIT_EVERY = 10
"""Rounds between two hellos to workers that are not in the run: each stage costs an opening."""


@final
@dataclass(frozen=True)
class Served:
    """What a run over a network reached.

    Parameters
    ----------
    fitted : Fitted
        The fit of the last stage; its records and ledger are those of that stage.
    stage : int
        How many stages there were.
    rounds : int
        The rounds of all stages together.
    refusals : mapping from str to str
        Workers that were refused, refused themselves or left, and why.
    bytes_up : int
        The bytes that workers sent, in the ledgers of all stages together.
    bytes_down : int
        The bytes that workers were sent, in the ledgers of all stages together.

    Examples
    --------
    See `serve`, which returns one:

    >>> from emfed.fitting import Served
    >>> [name for name in Served.__dataclass_fields__][:3]
    ['fitted', 'stage', 'rounds']
    """

    fitted: Fitted
    stage: int
    rounds: int
    refusals: Mapping[str, str]
    bytes_up: int
    bytes_down: int

    @property
    def result(self) -> Result:
        """What was fitted."""
        return self.fitted.result


@dataclass(frozen=True)
class _Stage:
    """Where a service stands: kept on disk before the stage begins."""

    number: int = 1
    rounds: int = 0
    """Rounds of the stages before."""
    excluded: Mapping[str, str] | None = None
    bytes_up: int = 0
    bytes_down: int = 0
    """Bytes sent in earlier stages."""

    @classmethod
    def load(cls, path: Path) -> _Stage:
        if not path.exists():
            return cls()
        _, about = load_checkpoint(path)
        moved = about.get("bytes_up", 0), about.get("bytes_down", 0)
        return cls(about["number"], about["rounds"], about["excluded"], *moved)

    def save(self, path: Path) -> None:
        about = {**dataclasses.asdict(self), "excluded": dict(self.excluded or {})}
        save_checkpoint(path, {"none": np.empty(0)}, about)


@final
class _Without(Transport):
    """A transport less the workers that are out for good."""

    def __init__(self, inner: Transport, out: Mapping[str, str]) -> None:
        self._inner, self._out = inner, out

    @property
    def between_machines(self) -> bool:
        return self._inner.between_machines

    def workers(self) -> list[str]:
        """The others."""
        return [key for key in self._inner.workers() if key not in self._out]

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        return self._inner.deliver(messages, deadline)

    def shut_out(self) -> Mapping[str, str]:
        return self._inner.shut_out()

    def waits(self) -> bool:
        return self._inner.waits()


def serve(
    model: Any,
    algorithm: Any,
    transport: Transport,
    directory: str | Path,
    *,
    minimum: int = 1,
    deadline: float = 60.0,
    attempts: int = 5,
    pause: float = 1.0,
    admit: bool = True,
    callbacks: Iterable[Callback] = (),
    **options: Any,
) -> Served:
    """Fit with the workers that a transport reaches; called again, go on where it was killed.

    Limits of the settings other than that on rounds hold for each stage.

    Parameters
    ----------
    model : Model or FitSettings
        The model, as in `fit`; or settings that say it all.
    algorithm : Algorithm or str or None
        The algorithm, as in `fit`.
    transport : Transport
        What carries messages to the sites.
    directory : str or Path
        The folder of the run: a call finds there what an earlier one left.
    minimum : int
        The least number of workers that must take part; see `emfed.network.RemoteFederation`.
    deadline : float
        The seconds that an exchange waits for answers.
    attempts : int
        How often an exchange is tried while fewer than ``minimum`` answer.
    pause : float
        The seconds before the second attempt; later pauses grow.
    admit : bool
        Whether workers that turn up in mid-run are let in, by a new stage.
    callbacks : iterable of callables
        Functions of each `RoundRecord`; one that returns True ends the fit.
    **options : object
        All other fields of `FitSettings`.

    Returns
    -------
    Served
        What the run reached.

    Raises
    ------
    ParticipationError
        If too few workers join or answer.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> rows = np.sin(np.arange(120.0)).reshape(40, 3)
    >>> rules = emfed.network.SiteRules(unmasked=True)
    >>> sites = {
    ...     name: emfed.network.Site(part, f"site-{name}", rules=rules)
    ...     for name, part in (("a", rows[:20]), ("b", rows[20:]))
    ... }
    >>> transport = emfed.network.LocalTransport(sites)
    >>> model = emfed.gaussian_mixture(1, "diag")
    >>> emfed.fitting.serve(model, "em", transport, "server").result.converged
    True
    """
    settings = read_settings(model, algorithm, options)
    where = Path(directory)
    where.mkdir(parents=True, exist_ok=True)
    remove_torn(where, ("stage",))
    stage = _Stage.load(where / "stage")
    hooks = (callbacks,) if callable(callbacks) else tuple(callbacks)
    rounds = ROUNDS if settings.rounds is None else settings.rounds
    while True:
        folder = where / f"stage-{stage.number:04d}"
        remove_torn(folder, (CHECKPOINT, "members", "members-here"))
        federation = RemoteFederation(
            _Without(transport, stage.excluded or {}),
            folder,
            deadline=deadline,
            minimum=minimum,
            attempts=attempts,
            pause=pause,
        )
        now = settings.but(rounds=rounds - stage.rounds)
        if stage.number > 1:
            now = _reached(now, where / f"stage-{stage.number - 1:04d}")
        change = _Change(federation, admit)
        kept = folder / CHECKPOINT
        watch = Watch((*hooks, change), None, kept, 1, resume=True, leads_on=settings.leads_on)
        fitted: Fitted | None = None
        try:
            fitted = run_fit(now, federation, watch)
            result = fitted.result
        except ParticipationError as error:  # who waits to be let in may make up the number
            if not (hasattr(error, "result") and change.needed(newcomers=True)):
                error.refused = {**(stage.excluded or {}), **federation.dismissed}
                error.reached = _as_far_as(stage, getattr(error, "result", None), error.refused)
                raise
            result = error.result
        out = {**(stage.excluded or {}), **federation.dismissed}
        made = result.rounds
        up, down = stage.bytes_up + result.bytes_up, stage.bytes_down + result.bytes_down
        if fitted is not None and (not change.needed() or stage.rounds + made >= rounds):
            everyone = {**federation.refusals, **out}
            return Served(fitted, stage.number, stage.rounds + made, everyone, up, down)
        stage = _Stage(stage.number + 1, stage.rounds + made, out, up, down)
        logger.warning("stage %d begins: %s", stage.number, change.why)
        stage.save(where / "stage")


def _as_far_as(stage: _Stage, result: Any, out: Mapping[str, str]) -> Served | None:
    """What a run that lacks workers had reached; None before its first round or its choice."""
    if result is None or not result.rounds or isinstance(result.model, SideBySide):
        return None
    fitted = Fitted(result, shortfall="it was ended while too few sites answered.")
    rounds, up = stage.rounds + result.rounds, stage.bytes_up + result.bytes_up
    return Served(fitted, stage.number, rounds, out, up, stage.bytes_down + result.bytes_down)


def read_settings(model: Any, algorithm: Any, options: Mapping[str, Any]) -> FitSettings:
    """Settings as they are, or from the words of `fit`."""
    if isinstance(model, FitSettings):
        return model
    return FitSettings.read(model, algorithm, **options)


@final
class _Change:
    """A callback that ends a stage when somebody is to be let in."""

    def __init__(self, federation: RemoteFederation, admit: bool) -> None:
        self._federation, self._admit = federation, admit
        self.why = ""
        self._waiting: set[str] = set()

    def __call__(self, record: RoundRecord) -> bool:
        """After a round."""
        return self.needed(record.round > 0 and record.round % ADMIT_EVERY == 0)

    def needed(self, newcomers: bool = False) -> bool:
        """Whether someone came, if asked to look; ``why`` says who."""
        if self.why:
            return True
        new = self._newcomers() if newcomers and self._admit else []
        if new:
            self.why = f"{', '.join(new)} joined"
        return bool(self.why)

    def _newcomers(self) -> list[str]:
        """Who can be reached, is not in the run and would join it now.

        A stage ends only for these: who was away at the opening, or answers "not now", waits for
        the next hello, and costs the others nothing.
        """
        federation = self._federation
        known = {*federation.members.keys, *federation.refusals}
        others = [key for key in federation.reachable() if key not in known]
        new = federation.greet(others) if others else []
        waiting = set(others) - set(new) - set(federation.refusals)
        for key in sorted(waiting - self._waiting):
            logger.warning("%s can be reached and does not join; it is asked again", key)
        self._waiting = waiting
        return new


def _reached(settings: FitSettings, folder: Path) -> FitSettings:
    """The settings of a stage that goes on from the parameters which another left on disk."""
    try:
        here = folder / "members-here"  # in a masked run that somebody left
        opening = Members.load(here if here.exists() else folder / "members").opening
        arrays, about = load_checkpoint(folder / CHECKPOINT)
        view, statistics = _best_of(arrays, about)
    except KeyError as error:
        raise CheckpointError(f"{folder} is not what a stage leaves: {error} is missing.") from None
    models = settings.candidates()
    model = models[0] if len(models) == 1 else SideBySide(models, watched=False)
    totals = opening.counts if opening.totals is None else opening.totals
    bound = Bound.told(
        of_columns(model, opening.columns), opening, worker_weights(settings.weights, totals)
    )
    viewed = bound.view(view)
    params: Any = viewed.to_user(viewed.maximize(statistics))
    given: dict[str, Any] = {"n_init": 1, "start_statistics": "expected"}
    if isinstance(viewed, SideBySide):
        if len(params.parts) == 1:
            params = params.parts[0]
        if settings.numbers is not None:
            given["n_components"] = [
                settings.numbers[j % len(settings.numbers)] for j in bound.parts_of(view)
            ]
    return settings.but(start=params, **given)


def _best_of(arrays: Mapping[str, Any], about: Mapping[str, Any]) -> tuple[View, Any]:
    """The candidates of a checkpoint and their statistics: a run may be trying other places."""
    told = about["hooks"].get("candidates", {})
    if told.get("led_on"):  # one after the other: all of them go on
        places = tuple(sorted(told["converged"]))
        own = {place: arrays[f"hooks/candidates/{place}/statistics"] for place in places}
        if "kept" in arrays:
            (now,) = View.read(about["view"]).parts or ()
            own[now] = arrays["kept"]
        return View(places), np.concatenate(list(own.values()))
    return View.read(about["view"]), arrays.get("kept", arrays["statistics"])


def reached_numbers(settings: FitSettings, directory: Path) -> dict[str, Any]:
    """The parameters that a run which goes on has reached, for people; nothing where none are yet.

    Of candidates side by side it is their parts' number alone, and of long arrays nothing.
    """
    stages = sorted(directory.glob(f"stage-*/{CHECKPOINT}"))
    try:
        params = _reached(settings, stages[-1].parent).start
    except (EmfedError, IndexError, OSError):
        return {}
    if hasattr(params, "parts"):
        return {"candidates": len(params.parts)}
    arrays = {name: np.asarray(value) for name, value in params.arrays().items()}
    return {name: value.tolist() for name, value in arrays.items() if value.size <= MOST_SHOWN}


MOST_SHOWN = 400
"""Numbers of an array that people are shown."""


def rehearse(
    model: Any,
    algorithm: Any,
    data: Any,
    *,
    rules: SiteRules | None = None,
    rounds: int = 2,
    listed: Sequence[str] | Literal["run"] | None = "run",
    **options: Any,
) -> list[dict[str, Any]]:
    """List every message that a site with these data would send, before any is sent.

    It is the site's own code, asked by a server in this process, in a folder that is thrown away.
    Alone, a site gets other numbers than in company; kinds, sizes and contents are those of a run
    (compressed uploads differ by a few bytes).

    Parameters
    ----------
    model : Model or FitSettings
        The model, as in `fit`; or settings that say it all.
    algorithm : Algorithm or str or None
        The algorithm, as in `fit`.
    data : table, path or Source
        The rows of the site.
    rules : SiteRules, optional
        The owner's rules.
    rounds : int
        How many rounds are rehearsed.
    listed : sequence of str, "run" or None
        The columns that the owner lists for servers to choose among, None if it lists none; by
        default those that the run names.
    **options : object
        All other fields of `FitSettings`.

    Returns
    -------
    list of dict
        One entry of the site's journal for each message: what was told, and how large it was.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> rows = np.sin(np.arange(120.0)).reshape(40, 3)
    >>> told = emfed.fitting.rehearse(emfed.gaussian_mixture(2), "em", rows, rounds=1)
    >>> len(told) > 2
    True
    """
    with tempfile.TemporaryDirectory(prefix="emfed-") as folder:
        settings = read_settings(model, algorithm, options)
        journal = Path(folder) / "journal"
        columns = settings.columns if listed == "run" else listed
        # Alone there is nobody to add up with: it shows what would be masked, bare.
        bare = dataclasses.replace(SiteRules() if rules is None else rules, unmasked=True)
        site = Site(data, Path(folder) / "site", rules=bare, journal=journal, columns=columns)
        federation = RemoteFederation(LocalTransport({"site": site}), attempts=1)
        with contextlib.suppress(ParticipationError):
            run_fit(settings.but(rounds=rounds), federation)
        lines = journal.read_text(encoding="utf-8").splitlines()
    entries = [json.loads(line) for line in lines]
    return [{k: v for k, v in e.items() if k not in ("time", "run")} for e in entries]
