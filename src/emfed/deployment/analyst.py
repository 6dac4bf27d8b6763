"""An analyst's side of one run: it signs settings and orders, and tells people how the run fares.

The operator's orders are a file (`StandingOrders`). What it says and what stands in the transcript
are compared again and again, and what is missing there is signed: so an order holds whatever is
killed, and whenever.
"""

from __future__ import annotations

import json
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from emfed.core.errors import (
    EmfedError,
    FederationError,
    ParticipationError,
    SettingsError,
    WireError,
)
from emfed.core.records import RoundRecord
from emfed.core.storage import read_json_file, write_atomic
from emfed.core.sums import Ask, Fit, Sum
from emfed.deployment.config import Config
from emfed.deployment.orders import Orders, StandingOrders
from emfed.deployment.programs import program_of
from emfed.deployment.results import leave_result
from emfed.deployment.status import Status, StatusReport
from emfed.fitting.chronicle import looks
from emfed.fitting.doubts import analyst_hears
from emfed.fitting.program import settings_of
from emfed.fitting.progress import rounds_left
from emfed.fitting.settings import ROUNDS
from emfed.network.exchange.followed import Consent, Ended, MemberStore, Program
from emfed.network.exchange.frames import is_run, new_run
from emfed.network.exchange.member import Follower
from emfed.network.exchange.member_runs import MemberRuns, RunMember
from emfed.network.exchange.member_thread import MemberThread, Watcher
from emfed.network.exchange.records import RecordFile
from emfed.network.exchange.statements import Agreement, Roster, Signer, is_coded
from emfed.network.exchange.transcript import Stage, Transcript
from emfed.network.keys import ANALYST, site_keys

logger = logging.getLogger(__name__)
DETAIL_SECONDS, COMPONENTS_SECONDS, HISTORY = 0.5, 2.0, 240
"""Between two tables of sites, between two looks at the components, and how many rounds people are
shown."""
TELLING_SECONDS = 2.0
"""Before people hear that sites have not read settings, or the end, yet."""
MOST_NAMED = 8
"""Sites that a line names."""
REMOVED = "its key was removed at the server"
ENDED = {"callback": "ended by the operator", "rounds": "its limit on rounds"}
"""Why a fit stopped, in words for people, where the word of the program says little."""
OWN_LIMITS = ("seconds",)
"""What ``[fit]`` says to the analyst alone."""


def document_of(config: Config, secure: bool = True) -> dict[str, Any]:
    """What a configuration asks for, as all members are told."""
    settings = config.settings
    fit = {name: v for name, v in config.said["fit"].items() if name not in OWN_LIMITS}
    fit = {"scores": settings.scores, **fit}
    if settings.epsilon is not None:
        fit |= {"epsilon": settings.epsilon, "delta": settings.delta}
    about = {"model": config.said["model"], "algorithm": config.said["algorithm"], "fit": fit}
    document = {**about, "columns": config.said["columns"]}
    settings_of(document, config.masked(secure))  # whatever is wrong with it is said here
    return dict(json.loads(json.dumps(document)))


def run_of(folder: Path) -> str:
    """The name of the run in a folder, drawn when it is asked for first."""
    path = folder / "run.name"
    if not path.exists():
        write_atomic(path, new_run().encode())
    name = path.read_text("ascii", errors="replace")
    if not is_run(name):
        raise SettingsError(f"{path} is damaged: delete {folder}, or put it back from a backup.")
    return name


def recognise(folder: Path, config: Config, document: Mapping[str, Any]) -> None:
    """Refuse a folder that holds another run than the configuration's."""
    if (folder / "fit").is_dir():
        raise SettingsError(
            f"{folder} holds a run of release 0.1, which this one cannot go on with: finish it "
            "with that release, or give this run a folder and an output of its own ([server] "
            "folder and output)."
        )
    path, ours = folder / "configuration.json", dict(document)
    if not path.exists():
        write_atomic(path, (json.dumps(ours, indent=1) + "\n").encode())
        return
    try:
        theirs = dict(read_json_file(path))
    except (ValueError, TypeError):
        raise SettingsError(
            f"{path} is damaged: put it back from a backup. If {config.path.name} is what this run "
            "began with, deleting it does as well."
        ) from None
    changed = [name for name in ours if ours[name] != theirs.get(name)]
    if changed:
        raise SettingsError(
            f"{folder} holds a run with another {' and '.join(changed)} than "
            f"{config.path.name} says: put that back, or give the new run a folder and an "
            "output of its own ([server] folder and output)."
        )


@final
class AnalystRun(Watcher):
    """One run of an operator.

    It is begun when enough sites are connected (`look`), and then works in a thread of its own.

    Parameters
    ----------
    config : Config
        What is fitted, with whom.
    signer : Signer
        The analyst.
    roster : Roster
        Public keys of all members.
    secure : bool
        Whether sites are known by keys.
    report : callable
        Stated of each change of the status.
    contacts : callable
        When sites last said anything, as far as that is known here.
    """

    def __init__(
        self,
        config: Config,
        signer: Signer,
        roster: Roster,
        *,
        secure: bool,
        report: StatusReport,
        contacts: Callable[[], Mapping[str, float]] = dict,
    ) -> None:
        self.config, self.folder = config, config.place("folder")
        self.name, self.document = run_of(self.folder), document_of(config, secure)
        self.status = Status(self.folder, report)
        self.orders = StandingOrders(self.folder)
        self.interrupted = False
        """Set to end after the exchange under way: Ctrl-C."""
        self.error: EmfedError | None = None
        """Why the run could not come to its end, if so."""
        self.over = False
        """Whether nothing more happens here."""
        self._signer, self._roster, self._secure = signer, roster, secure
        self._contacts = contacts
        self._file = self.folder / "analyst.sqlite"
        self._runs: MemberRuns | None = None
        self._thread: MemberThread | None = None
        self._began = self._heard = self._ended = time.monotonic()
        self._signed = 0.0
        self._hopeless: float | None = None
        self._finishing = False
        self._log: dict[str, int] = {}
        self._shown = _Shown(config)
        self._about: Transcript | None = None
        self._told: tuple[Any, ...] = ()

    # In the main thread.

    @property
    def announced(self) -> bool:
        """Whether sites can see this run by now."""
        return self.over or (self._about is not None and self._about.stage is not Stage.EMPTY)

    @property
    def begun(self) -> bool:
        """Whether settings are signed."""
        return self._thread is not None

    @property
    def end(self) -> Ended | None:
        """How it ended, if it did."""
        return None if self._thread is None else self._thread.end

    def look(self, runs: MemberRuns) -> None:
        """See whether the run can begin, or has come to an end."""
        self._runs = runs
        if self.over:
            return
        try:
            if self._thread is None:
                self._gather(runs)
            elif self._thread.error is not None:
                error = self._thread.error
                words = f"the run's thread ended: {error}"  # its log has it in full
                raise error if isinstance(error, EmfedError) else EmfedError(words)
            elif self._thread.end is not None:
                self._conclude(self._thread.end)
            else:
                self._check_patience()
        except EmfedError as error:
            self._fail(error)

    def stop(self) -> None:
        """End soon; the same command goes on."""
        if self._thread is not None:
            self._thread.stop()

    @property
    def waited_to_tell(self) -> bool:
        """Whether sites that are away were waited for long enough.

        Of an end without a model nobody says that it has heard.
        """
        final = self.end is not None and self.end.final
        seconds = self.config.sites.farewell if final else TELLING_SECONDS
        return time.monotonic() - self._ended > seconds

    def still_untold(self, silent: Sequence[str]) -> list[str]:
        """Which of these have not been told that the run is over, by an earlier server either."""
        before = self.status["untold"]
        return [name for name in silent if not isinstance(before, list) or name in before]

    def say_untold(self, untold: Sequence[str]) -> None:
        """Say which sites do not know yet that the run is over."""
        if self.error is not None:
            return
        names, why = ", ".join(untold), ""
        if untold and self.waited_to_tell:
            why = f"not told that it is over: {names}; `emfed serve`, started again, tells them"
        elif untold and time.monotonic() - self._ended > TELLING_SECONDS:
            seconds = self.config.sites.farewell
            why = f"waiting up to {seconds:.0f} s for {names}, to say that it is over"
        if [*untold] != self.status["untold"] or why != self.status["why"]:
            self.status.say("finished", untold=[*untold], why=why)

    def _fail(self, error: EmfedError) -> None:
        logger.error("the run cannot go on: %s", error)
        self.stop()
        self.error, self.over = error, True
        few = isinstance(error, ParticipationError)
        self.status.say("failed", error=str(error), few=few)

    def _gather(self, runs: MemberRuns) -> None:
        """Wait until those expected are connected, or long enough and there are enough."""
        if self._file.exists() and _entries(self._file):
            self._start(runs, None)
            return
        orders, sites = self.orders.read(), self.config.sites
        if orders.finish:
            raise ParticipationError("the operator ended the run before it began.")
        out = self._out(orders)
        here = [name for name in runs.here or () if name not in out]
        waited, fewest = time.monotonic() - self._began, self.config.fewest(self._secure)
        enough = len(here) >= max(fewest, sites.expected - len(out))
        enough |= waited > sites.wait and len(here) >= fewest
        if enough and not orders.paused:
            self._start(runs, self._agreement(here, out))
        elif waited > sites.give_up and not orders.paused:
            raise ParticipationError(
                f"after {waited:.0f} s {len(here)} sites are here; {fewest} are needed. "
                "`emfed serve`, started again, goes on."
            )
        else:
            expected = max(fewest, sites.expected - len(out))
            self._say_waiting(orders, f"{len(here)} of {expected} sites are here", here)

    def _agreement(self, here: list[str], out: Mapping[str, str]) -> Agreement:
        """The settings, which name who may take part: more than half of them are here."""
        known = sorted(self._known() - {*here, *out}) if self.config.sites.admit else []
        named = sorted([*here, *known[: len(here) - 1]])
        return Agreement(
            tuple(named),
            (ANALYST,),
            self.config.masked(self._secure),
            wait=self.config.sites.wait_for,
            newcomers=self.config.sites.admit and self.config.settings.epsilon is None,
            run=self.name,
            program=self.document,
            title=self.config.path.stem,
            coded=is_coded(self.config.masked(self._secure), self.document),
        )

    def _known(self) -> set[str]:
        """The sites that have a key."""
        return {*site_keys(self.config.place("keys"))} if self._secure else set()

    def _start(self, runs: MemberRuns, settings: Agreement | None) -> None:
        def make(store: MemberStore) -> Follower:
            consent = Consent(self._accept)
            return Follower(self._signer, self._roster, store, consent, settings=settings)

        self._signed = time.monotonic()
        self._thread = runs.start(self.name, RunMember(self._file, make, self))

    def _accept(self, agreement: Agreement) -> Program:
        if agreement.program != self.document:
            raise FederationError(
                f"{self.folder} holds a fit with other settings than {self.config.path.name}: put "
                "these back, or give the new one a folder and an output of its own."
            )
        program = program_of(self.document, agreement.masked, (self._record,), self._sum)
        return _Begun(program, self._begin_epoch)

    def _begin_epoch(self, sites: tuple[str, ...]) -> None:
        assert self._about is not None
        self._shown.begin(self._about.epoch, sites)

    def _check_patience(self) -> None:
        """End where too few sites take part for too long."""
        about, sites = self._about, self.config.sites
        if about is None or about.paused:
            self._heard = time.monotonic()
            return
        now, waits = time.monotonic(), [(self._heard, sites.give_up)]
        words = _too_few(about, self.config.fewest(self._secure))
        self._hopeless = (self._hopeless or now) if words else None
        if self._hopeless is not None:
            waits.append((self._hopeless, sites.give_up_refused))
        if min(since + seconds for since, seconds in waits) < now:
            told = words or "nothing came of all waiting."
            raise ParticipationError(
                f"{told} Change {self.config.path.name} or ask the sites' owners: `emfed serve`, "
                "started again, goes on."
            )

    def _conclude(self, end: Ended) -> None:
        """Leave what the fit came to."""
        self.over, self._ended = True, time.monotonic()
        if not end.final:
            raise FederationError(
                f"the run has ended: {end.words} Another one needs a folder and an output of its "
                "own."
            )
        about = self._about
        assert about is not None
        try:
            told = leave_result(self.config, end)
        except OSError as error:
            raise EmfedError(
                f"{error.filename or self.config.place('output')} cannot be written "
                f"({error.strerror}): mend that; the same command goes on from here."
            ) from None
        self.status.say("finished", **told, **self._facts(about))

    # In the member's thread.

    def said(self, follower: Follower, post: bytes) -> None: ...

    def ended(self, end: Ended) -> None: ...

    def troubled(self, words: str) -> None:
        self.status.say(self.status["state"] or "waiting", trouble=words)

    def moved(self, follower: Follower) -> None:
        """Sign what the operator wants, and tell where the run stands."""
        about = self._about = follower.transcript
        if len(about) != self._log.get("entries"):
            self._log["entries"], self._heard = len(about), time.monotonic()
        orders = self.orders.read()
        if about.stage in (Stage.GATHERING, Stage.RUNNING) and not follower.ordering:
            for word, argument in self._missing(orders, about):
                logger.info("the analyst orders: %s %s", word, argument)
                follower.order(word, argument)
                break
        self._tell(follower, orders)

    def _missing(self, orders: Orders, about: Transcript) -> Iterator[tuple[str, str]]:
        """What the operator wants and the transcript does not have."""
        ends = orders.finish or self.interrupted or self._is_late(about)
        if ends and not self._finishing and self._shown.can_end(about):
            self._finishing = True
            yield "finish", ""
        if orders.paused != about.paused:
            yield ("pause" if orders.paused else "resume"), ""
        if orders.rounds not in (None, *(rounds for _, rounds in about.extensions[-1:])):
            yield "extend", str(orders.rounds)
        out = self._out(orders)
        for name in about.agreement.sites:
            if name in out and name not in about.expelled and self._can_leave(about, name):
                yield "expel", name
            elif name not in out and name in about.expelled:
                yield "readmit", name
        if about.stage is Stage.GATHERING and not orders.paused and self._can_begin(about):
            yield "begin", ""

    def _out(self, orders: Orders) -> dict[str, str]:
        """Who is to be out, and why."""
        out = dict(orders.expelled)
        if self._secure:
            known = self._known()
            named = () if self._about is None else self._about.agreement.sites
            out |= {name: REMOVED for name in named if name and name not in known}
        return out

    def _can_leave(self, about: Transcript, name: str) -> bool:
        """Whether the fit can go on without a site; the operator hears why not."""
        leaving = [one for one in about.members if one in {*about.leavers, name}]
        try:
            if leaving:
                about.next_set(leaving, ())
        except WireError as error:
            self._shown.trouble = (
                f"{name} is not expelled, because that would end the run: {error} `emfed control "
                "finish` ends it with what was reached."
            )
            return False
        return True

    def _can_begin(self, about: Transcript) -> bool:
        """Whether the fit can begin with those who are ready, and no one else is on the way."""
        named, sites = about.agreement.sites, self.config.sites
        here = {name for name in named if name in about.hellos and name not in about.expelled}
        away = {*about.refusals, *about.expelled}
        connected = {*((self._runs.here if self._runs else None) or ())}
        coming = {name for name in named if name in connected and name not in away}
        wanted = min(sites.expected, len(named) - len({*named} & away))
        complete = len(here) >= wanted and here >= coming
        waited = time.monotonic() - self._began > sites.wait
        fewest = self.config.fewest(self._secure)
        return (complete or waited) and len(here) >= fewest and 2 * len(here) > len(named)

    def _is_late(self, about: Transcript) -> bool:
        """Whether the time that ``seconds`` gives is over."""
        limit = self.config.settings.seconds
        if limit is None or about.stage is not Stage.RUNNING:
            return False
        return time.time() - (self.status["since"] or time.time()) > limit

    def _record(self, record: RoundRecord) -> None:
        self._heard = time.monotonic()
        if self._about is not None and self._shown.record(record, self.status):
            self.status.say("running", why="", **self._shown.words(), **self._facts(self._about))

    def _sum(self, ask: Ask, answer: Sum) -> None:
        self._heard = time.monotonic()
        analyst_hears(ask, answer, self.status.tell)
        began = self._shown.look(ask, answer)
        if began:
            self.status.say(self.status["state"] or "running", began=began)

    # What people are told.

    def _tell(self, follower: Follower, orders: Orders) -> None:
        """Say what has changed, but for rounds."""
        about = follower.transcript
        if about.stage in (Stage.EMPTY, Stage.GATHERING):
            if time.monotonic() - self._signed < TELLING_SECONDS and not about.refusals:
                return  # they are there, and read the settings
            here = [n for n in about.agreement.sites if n in about.hellos]
            told = f"{len(here)} of {self.config.sites.expected} sites are ready"
            self._say_waiting(orders, told, here)
        elif about.stage is Stage.RUNNING:
            if not self.status["since"]:
                self.status.say("running", since=time.time())
            silent, paused = tuple(sorted(follower.silent)), about.paused
            now = (silent, paused, about.epoch, self._shown.trouble, bool(about.refusals))
            if now == self._told:
                return
            state = "paused" if paused else "waiting" if silent else "running"
            why = self._pause() if paused else _silence(about, follower) if silent else ""
            self._told = now
            if why:
                logger.warning("%s", why)
            self.status.say(state, why=why, rounds=self._shown.limit(about), **self._facts(about))

    def _say_waiting(self, orders: Orders, told: str, here: list[str]) -> None:
        about, connected = self._about, {*((self._runs.here if self._runs else None) or ())}
        named = self._known() if about is None else {*about.agreement.sites} - {""}
        gone = sorted(named - {*here} - self._out(orders).keys())
        words = [
            f"{name} ({'connected' if name in connected else 'not connected'})" for name in gone
        ]
        more = [f"and {len(words) - MOST_NAMED} more"] if len(words) > MOST_NAMED else []
        why = told + (f"; not: {', '.join([*words[:MOST_NAMED], *more])}" if words else "")
        why += f", paused {self._pause()}" if orders.paused else ""
        refusals = () if about is None else (*about.refusals.items(),)
        now = (why, refusals, self.orders.trouble)
        if now != self._told:
            self._told = now
            facts = {"online": sorted(connected), "trouble": self.orders.trouble}
            facts |= self._facts(about) if about is not None else {}
            self.status.say("paused" if orders.paused else "waiting", why=why, **facts)

    def _pause(self) -> str:
        """Why the run stands still by an order."""
        return self.orders.trouble or "by the operator; `emfed control resume` goes on"

    def _facts(self, about: Transcript) -> dict[str, Any]:
        """Who takes part, and what is sure."""
        connected, contacts = {*((self._runs.here if self._runs else None) or ())}, self._contacts()
        out, gone = self._out(self.orders.read()), _gone(about)
        refusals = {**about.refusals, **gone, **{n: out[n] for n in about.expelled if n in out}}
        named = [name for name in about.agreement.sites if name]
        table = {
            name: {
                "in": name in about.members,
                "connected": name in connected,
                "last": contacts.get(name),
                "refusal": refusals.get(name, ""),
            }
            for name in named
        }
        counted = {"sites": len(about.members), "rows": self._shown.rows}
        return {
            "sites": table,
            "refusals": refusals,
            "out": sorted({*about.expelled, *gone}),
            "counted": counted,
            "stages": max(about.epoch, 0) + 1,
            "confirmed": about.stage is Stage.FINAL,
            "trouble": self._shown.trouble or self.orders.trouble,
            "wait_for": about.agreement.wait,
        }


@final
class _Shown:
    """What people see of a fit as it goes on."""

    def __init__(self, config: Config) -> None:
        self._settings = config.settings
        self.rows = 0
        """Rows of all sites of the present set; 0: not known yet."""
        self.trouble = ""
        self._epoch, self._sites = -1, 0
        self._mark = (-1, -1)
        self._sent = 0
        """Bytes in each direction."""
        self._record: RoundRecord | None = None
        self._history: deque[tuple[int, float | None, float | None]] = deque(maxlen=HISTORY)
        self._drawn = 0.0
        self._components: dict[str, Any] = {}

    def begin(self, epoch: int, sites: tuple[str, ...]) -> None:
        """A fit begins with a set, or is replayed from there."""
        self._epoch, self._sites = epoch, len(sites)
        self.rows, self._sent, self._record = 0, 0, None
        self._history.clear()

    def limit(self, about: Transcript) -> int:
        """The limit on rounds."""
        return about.extended(len(about)) or self._settings.rounds or ROUNDS

    def can_end(self, about: Transcript) -> bool:
        """Whether the fit has reached something with the present set, or not begun."""
        reached = self._record is not None and self._epoch == about.epoch
        return about.stage is Stage.GATHERING or reached

    def record(self, record: RoundRecord, status: Status) -> bool:
        """Take a round; False if people were told of it before a restart."""
        self._record = record
        self._history.append((record.round, record.squared_H, record.gain))
        if self._mark < (0, 0):  # what an earlier process told
            self._mark = tuple(status["mark"] or (-1, -1))
        at = self._epoch, record.round
        new, self._mark = at > self._mark, max(self._mark, at)
        return new

    def look(self, ask: Ask, answer: Sum) -> dict[str, int]:
        """Count an exchange, look at where it is made; gives what the first set begins with."""
        self._sent += answer.bytes // 2
        first, self.rows = not self.rows, round(answer.rows)
        late = time.monotonic() - self._drawn > COMPONENTS_SECONDS
        if late and ask.purpose == "round":  # those of a start are no components
            for one in looks(ask):
                self._drawn = time.monotonic()
                arrays = one.model.to_user(one.params).arrays()
                self._components = {name: value.tolist() for name, value in arrays.items()}
                break
        begins = first and self._epoch == 0
        return {"sites": self._sites, "rows": self.rows} if begins else {}

    def words(self) -> dict[str, Any]:
        """All of it, as the status has it."""
        record, stop = self._record, self._settings.limits
        assert record is not None
        limit = self._settings.rounds or ROUNDS
        watched = [v[1] if stop.tolerance else v[2] for v in self._history]
        values = [v for v in watched if v is not None]
        words = self._settings.candidates()[0].words()
        return {
            "mark": self._mark,
            "round": record.round,
            "squared_H": record.squared_H,
            "gain": record.gain,
            "left": record.left,
            "objective": record.objective,
            "up": self._sent,
            "down": self._sent,
            "history": list(self._history),
            "rounds_left": rounds_left(values, stop.nats, stop.tolerance, limit, record.round),
            "part": words.part,
            "per_row": words.per_row,
            "components": self._components,
        }


@final
class _Begun:
    """A program, and who is told when a fit of it begins."""

    def __init__(self, program: Program, tell: Callable[[tuple[str, ...]], None]) -> None:
        self._program, self._tell = program, tell

    def begin(self, sites: tuple[str, ...], *about: Any) -> Fit[Any]:
        """The fit of an epoch over these sites."""
        self._tell(sites)
        return self._program.begin(sites, *about)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._program, name)


def _entries(path: Path) -> bool:
    """Whether an earlier process has some of the run's list."""
    file = RecordFile(path)
    try:
        return bool(file.entries())
    finally:
        file.close()


def _gone(about: Transcript) -> dict[str, str]:
    """Why sites that began are in the set no more."""
    wait = f"it was away for more than {about.agreement.wait:.0f} s, and the others went on"
    return {
        name: "expelled" if name in about.expelled else "it left" if name in about.leavers else wait
        for name in sorted(about.first - {*about.members})
    }


def _too_few(about: Transcript, fewest: int) -> str:
    """Say so where those who have not refused cannot be enough."""
    if about.stage is not Stage.GATHERING:
        return ""
    named = len(about.agreement.sites)
    left = named - len({*about.refusals} | about.expelled)
    if left >= max(fewest, named // 2 + 1):
        return ""
    said = "; ".join(f"{name}: {why.rstrip('.')}" for name, why in sorted(about.refusals.items()))
    needs = max(fewest, named // 2 + 1)
    return f"{named - left} of {named} sites refuse, and the run needs {needs}: {said}."


def _silence(about: Transcript, follower: Follower) -> str:
    """Whom the run waits for, until when, what then, and what the operator may do."""
    silent, now = follower.silent_since, time.monotonic()
    names, wait = ", ".join(sorted(silent)), about.agreement.wait
    left = max(0.0, min(silent.values()) + wait - now)
    then = time.strftime("%H:%M:%S", time.localtime(time.time() + left))
    why = f"no word from {names}; "
    try:
        about.next_set([name for name in about.members if name in silent], ())
    except WireError as error:
        return f"{why}the run waits, since it cannot go on without: {error}"
    return (
        f"{why}the others go on without at {then} ([sites] wait_for = {wait:g}); `emfed control "
        f"expel` goes on at once"
    )
