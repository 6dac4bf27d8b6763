"""The one place where a configuration and a transport become a run: `serve_run`."""

from __future__ import annotations

import contextlib
import json
import logging
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, final

from emfed.artifacts.disclosure import protections
from emfed.core import series
from emfed.core.configuration import TOML
from emfed.core.errors import CheckpointError, EmfedError, ParticipationError, WireError
from emfed.core.records import RoundRecord
from emfed.core.storage import remove_torn
from emfed.core.wire import Header, Kind, encode_end, open_answer, seal
from emfed.deployment.config import Config
from emfed.deployment.orders import Door, StandingOrders
from emfed.deployment.site import MODEL
from emfed.deployment.status import LATE_SECONDS, Noted, Status
from emfed.fitting.progress import rounds_left
from emfed.fitting.selection import with_setting
from emfed.fitting.serving import Served, reached_numbers, serve
from emfed.fitting.settings import ROUNDS
from emfed.network import Transport
from emfed.network.membership import Members
from emfed.network.site import mark

logger = logging.getLogger(__name__)
LOOK_SECONDS = 0.2
"""Between two looks at who is connected."""
ASK_SECONDS, ASK_AT_MOST = 5.0, 30.0
"""Before sites that refused, or were too few, are asked again: each time twice as long, up to the
second. What they say then is one more line of their journals."""
DETAIL_SECONDS, COMPONENTS_SECONDS, HISTORY = 0.5, 2.0, 240
"""Between two tables of sites, between two looks at the components, which reads the checkpoint, and
how many rounds people are shown."""

ENDED = {"callback": "ended by the operator", "rounds": "its limit on rounds"}
"""Why a run stopped, in words for sites, where the word of the program says little."""


@final
class AtOnce:
    """Several runs over one server's connections; sites end with the last of them."""

    def __init__(self, names: Iterable[str]) -> None:
        self._going, self._saying = set(names), threading.Lock()

    @contextlib.contextmanager
    def farewell(self, name: str) -> Iterator[bool]:
        """Whether other runs go on; within, no other run says that it is over.

        So a site hears of every run's end before that of the last one lets it go.
        """
        with self._saying:
            self._going.discard(name)
            yield bool(self._going)

    @property
    def going(self) -> bool:
        """Whether some run has not come to its end."""
        return bool(self._going)

    def leave(self, name: str) -> None:
        """A run has ended, well or not."""
        self._going.discard(name)


def serve_run(
    transport: Transport,
    config: Config,
    status: Status,
    secure: bool = False,
    at_once: AtOnce | None = None,
) -> None:
    """Fit, from the beginning or from where an earlier process was killed, and leave the model.

    The caller holds the lock of the run's folder. ``secure``: sites are known by the server's keys,
    and one whose key is removed is out. ``at_once``: the runs that share the transport.
    """
    others = AtOnce([]) if at_once is None else at_once
    keys = config.place("keys") if secure else None
    orders = StandingOrders(config.place("folder"))
    noted = Noted(transport, Door(orders, keys))
    noted.refusals.update(status["refusals"] or {})
    if status["state"] == "finished":
        with others.farewell(str(config.path)) as more:
            say_farewell(noted, replace(config, more=config.more or more), status)
        return
    try:
        with status.while_waiting(noted):
            served = _fit(noted, config, status, orders)
        noted.on_silence = None
        crossed = {"up": transport.received, "down": transport.sent}
        save_fit(config.place("output"), served, crossed)
    except EmfedError as error:
        error.on(TOML)
        logger.exception("the run cannot go on")
        status.say("failed", error=str(error), few=isinstance(error, ParticipationError))
        raise
    except Exception:  # of the network, say: whoever watches over us starts us again
        logger.exception("the server's program ends")
        raise
    choice = served.fitted.selection
    status.say(
        "finished",
        chosen=None if choice is None else choice.n_components,
        stopped=served.result.stopped,
        round=served.rounds,
        refusals={**noted.refusals, **served.refusals},
        stages=served.stage,
        converged=served.result.converged,
        doubts=served.fitted.doubts,
        up=served.bytes_up,
        down=served.bytes_down,
        raw=served.result.raw_bytes,
        untold=_members(config, served.stage).keys,
        told=False,
        why="",
    )
    with others.farewell(str(config.path)) as more:
        say_farewell(noted, replace(config, more=config.more or more), status)


def _members(config: Config, stage: int) -> Members:
    return Members.load(config.place("folder") / "fit" / f"stage-{stage:04d}" / "members")


def say_farewell(transport: Noted, config: Config, status: Status) -> None:
    """Tell members that the run is over, with the model file where the run hands it out.

    Those who are away are waited for; whoever is not told by then is told when `emfed serve` is
    started again. A site that was refused is told, and gets no model.
    """
    members, sites = _members(config, status["stages"] or 1), config.sites
    model = (config.place("output") / MODEL).read_bytes() if sites.deliver else b""
    stopped = str(status["stopped"])
    about = {
        "rounds": status["round"],
        "stopped": "converged" if status["converged"] else ENDED.get(stopped, stopped),
        "doubts": status["doubts"] or [],
        "more": config.more,
        "name": config.path.stem,
    }
    out, end = status["refusals"] or {}, time.monotonic() + sites.farewell
    untold = set(status["untold"] or ()) - set(transport.shut_out())
    messages = {}
    for number, key in enumerate(members.keys):
        mine = mark(members.settings[number], members.instances[number])
        header = Header(Kind.END, members.run, 0, number, mine)
        messages[key] = header, encode_end(about, b"" if key in out else model)
    while untold:
        here = [key for key in transport.workers() if key in untold and key in messages]
        wires = {key: seal(*messages[key]) for key in here}
        for key, answer in transport.deliver(wires, min(sites.deadline, 10.0)):
            try:
                kind = None if key not in here else open_answer(answer, messages[key])[0].kind
            except WireError:
                continue
            if kind is Kind.END or kind is Kind.REFUSAL:  # an older release refuses it
                untold.discard(key)
                logger.info("%s knows that the run is over", key)
        names = ", ".join(sorted(untold))
        why = f"waiting up to {sites.farewell:.0f} s for {names}, to say that it is over"
        status.say("finished", untold=sorted(untold), why=why if untold else "")
        if time.monotonic() > end:
            why = f"not told that it is over: {names}; `emfed serve`, started again, tells them"
            logger.warning("%s", why)
            status.say("finished", why=why)
            break
        if untold:
            time.sleep(LOOK_SECONDS)
    status.say("finished", told=True)  # as far as that goes: the program may end


class _MoreRounds(Exception):
    """The limit on rounds has changed: the fit goes on from its checkpoint under the new one."""


def _fit(transport: Noted, config: Config, status: Status, orders: StandingOrders) -> Served:
    """`serve`, again and again while there are too few sites, for as long as the user said."""
    sites, folder = config.sites, config.place("folder")
    shown = _Shown(transport, config, status, orders)
    transport.on_silence = shown.miss
    began = time.monotonic()
    transport.wait_until = began + sites.wait
    _gather(transport, config, shown, began)
    # Who is late is waited for, and not done without: so masks do not depend on who is here.
    shown.masked = config.masked(transport.between_machines)
    settings = config.settings.but(masks=shown.masked)
    pause, hopeless = ASK_SECONDS, None
    while True:
        shown.limit = orders.read().rounds or config.settings.rounds or ROUNDS
        status.say("running", rounds=shown.limit)
        try:
            return serve(
                settings.but(rounds=shown.limit),
                None,
                transport,
                folder / "fit",
                minimum=sites.fewest,
                deadline=sites.deadline,
                attempts=sites.attempts,
                admit=sites.admit,
                callbacks=[shown],
            )
        except _MoreRounds:
            continue  # the orders' change is in the log
        except ParticipationError as error:
            now = time.monotonic()
            if orders.read().finish:
                if error.reached is not None:
                    return error.reached
                if not _opened(folder):
                    raise
            few = _too_few(transport, config, error.refused)
            hopeless = max(hopeless or now, shown.began) if few else None
            patience = [(shown.began, sites.give_up)]
            patience += [(hopeless, sites.give_up_refused)] if hopeless is not None else []
            left = min(since + seconds for since, seconds in patience) - now
            if left < 0:
                raise _given_up(error, few) from None
            logger.warning("%s", error)
            why = (
                f"{_sentence(error)} {few} The run ends in {left:.0f} s unless that changes."
                if few
                else error
            )
            status.say("waiting", why=str(why), **shown.sites())
            time.sleep(min(pause, sites.deadline, left + LOOK_SECONDS))
            pause = min(2.0 * pause, ASK_AT_MOST)
            if not _opened(folder):  # who was not ready may have gone
                _gather(transport, config, shown, began)


def _too_few(transport: Noted, config: Config, refused: Mapping[str, str]) -> str:
    """Say so where those who have not refused cannot be enough, even if all of them come."""
    many = max(config.sites.expected, len({*transport.workers(), *refused}))
    least = config.fewest(transport.between_machines)
    if many - len(refused) < least:
        return f"{len(refused)} of {many} sites refuse, and the run needs {least}."
    stages = len(_stages(config.place("folder")))
    if config.settings.epsilon is None or not stages:
        return ""
    # Every site adds its share of the noise: without one there is less of it than was promised.
    lost = sorted(refused.keys() & {*_members(config, stages).keys})
    names = ", ".join(lost)
    return f"{names} refused, and a private run needs all who joined it." if lost else ""


def _sentence(error: ParticipationError) -> str:
    """What it says, with a full stop: words of a site may come last, and have none."""
    return f"{str(error).rstrip('.')}."


def _given_up(error: ParticipationError, few: str) -> ParticipationError:
    """What is said at the end of a run that waited in vain."""
    change = "Change run.toml or ask the sites' owners: " if few else ""
    ended = ParticipationError(
        f"{_sentence(error)} {few + ' ' if few else ''}{change}`emfed serve`, started again, goes "
        "on."
    )
    ended.refused = error.refused
    return ended


@final
class _Shown:
    """A callback of the fit: tells people where it stands, and heeds the operator's orders."""

    def __init__(
        self, transport: Noted, config: Config, status: Status, orders: StandingOrders
    ) -> None:
        self._transport, self._config, self.status = transport, config, status
        self.orders = orders
        self._folder, self.limit = config.place("folder"), 0
        self.began = time.monotonic()
        """When a round last came to its end."""
        self.masked, self._told = False, ""
        """Whether rounds wait for everybody, and which wait is in the log already."""
        self._gains: list[float] = []
        self._history: deque[tuple[int, float | None, float | None]] = deque(maxlen=HISTORY)
        self._detailed = self._drawn = 0.0
        self._details: dict[str, Any] = {}

    def __call__(self, record: RoundRecord) -> bool:
        """After a round; True ends the fit."""
        self.began, self._told = time.monotonic(), ""
        self._history.append((record.round, record.squared_H, record.gain))
        if record.gain is not None:
            self._gains.append(record.gain)
        if self.began - self._detailed > DETAIL_SECONDS or record.round >= self.limit:
            self._detailed = self.began
            self._details = self._detail(record)
        status = self.status
        status.say(
            "running",
            why="",
            round=record.round,
            squared_H=record.squared_H,
            gain=record.gain,
            answered=record.answered,
            asked=record.asked,
            seconds=record.seconds,
            up=status["up"] + record.bytes_up,
            down=status["down"] + record.bytes_down,
            epsilon=self._config.settings.epsilon,  # charged as a whole when sites join
            **self._details,
        )
        return self._heed()

    def _heed(self) -> bool:
        """Wait while the operator wants that; whether the fit is to end."""
        orders = self.orders.read()
        while orders.paused and not orders.finish:
            self.status.say("paused", why=self.pause, trouble=self.orders.trouble)
            time.sleep(LOOK_SECONDS)
            self.began, orders = time.monotonic(), self.orders.read()
        if orders.rounds not in (None, self.limit):
            raise _MoreRounds
        return orders.finish

    def miss(self, silent: list[str]) -> None:
        """Say whom the run waits for: a masked round needs everybody, for minutes."""
        waited = time.monotonic() - self.began
        minutes = int(waited) // 60
        said = self._transport.objections
        names = [f"{name} ({said[name]})" if name in said else name for name in silent]
        why = f"no answer from {', '.join(names)}" + f" for {minutes} min" * bool(minutes)
        if self.masked and waited > LATE_SECONDS:  # a lost disk heals sooner
            why += "; without it there is no sum, so the run waits some minutes"
            others = set(self._transport.workers()) - set(silent)
            if len(others) >= self._config.fewest(self._transport.between_machines):
                why += " (`emfed control expel` goes on at once)"
        if self._told != why:
            self._told = why
            logger.warning("%s", why)
        self.status.say("waiting", why=why, **self.sites())

    @property
    def pause(self) -> str:
        """Why the run stands still by an order."""
        return self.orders.trouble or "by the operator; `emfed control resume` goes on"

    def sites(self) -> dict[str, Any]:
        """Who is in, with rows, last contact and refusals in words."""
        transport, rows = self._transport, dict[str, int | None]()
        stages = _stages(self._folder)
        with contextlib.suppress(CheckpointError, OSError, IndexError):
            members = Members.load(stages[-1])
            counts = members.counts.tolist()
            rows = {
                k: None if members.roster else n for k, n in zip(members.keys, counts, strict=True)
            }
        here, out = {*transport.workers()}, transport.shut_out()
        refusals = {**transport.refusals, **out}
        table = {}
        for name in sorted({*rows, *here, *refusals}):
            when, seconds = transport.contacts.get(name, (None, None))
            table[name] = {
                "in": name in rows and name not in out,
                "connected": name in here,
                "rows": rows.get(name),
                "last": when,
                "seconds": seconds,
                "refusal": refusals.get(name, ""),
            }
        trouble = self.orders.trouble
        return {
            "sites": table,
            "refusals": refusals,
            "out": sorted(out),
            "traffic": transport.traffic,
            "trouble": trouble,
        }

    def _detail(self, record: RoundRecord) -> dict[str, Any]:
        stop = self._config.settings.limits
        watched = [v[1] if stop.tolerance else v[2] for v in self._history]
        values = [v for v in watched if v is not None]
        ahead = rounds_left(values, stop.nats, stop.tolerance, self.limit, record.round)
        details = {**self.sites(), "history": list(self._history), "rounds_left": ahead}
        words = self._config.settings.candidates()[0].words()
        details |= {"part": words.part, "per_row": words.per_row}
        if len(self._gains) >= 5:
            recent = self._gains[-20:]
            details["left"] = series.left(recent[-1], series.rate(recent))
        if self.began - self._drawn > COMPONENTS_SECONDS:
            self._drawn = self.began
            details["components"] = reached_numbers(self._config.settings, self._folder / "fit")
        elif "components" in self._details:
            details["components"] = self._details["components"]
        return details


def _opened(folder: Path) -> bool:
    """Whether a run knows its sites already."""
    return bool(_stages(folder))


def _stages(folder: Path) -> list[Path]:
    """Who is in each stage so far, as files."""
    return sorted((folder / "fit").glob("stage-*/members"))


def _gather(transport: Noted, config: Config, shown: _Shown, began: float) -> None:
    """Wait until those expected are there, or long enough and there are enough."""
    sites, folder = config.sites, config.place("folder")
    fewest = config.fewest(transport.between_machines)
    while True:
        here, orders = transport.workers(), shown.orders.read()
        out = orders.expelled.keys() & transport.everybody()
        expected = max(fewest, sites.expected - len(out))
        why = f"{len(here)} of {expected} sites are here"
        if len(here) < expected and (away := transport.away()):
            why += f"; not here: {away}"
        state = "paused" if orders.paused else "waiting"
        pause = f", paused {shown.pause}" if orders.paused else ""
        shown.status.say(state, online=here, why=why + pause, **shown.sites())
        waited = time.monotonic() - began
        enough = len(here) >= expected or (waited > sites.wait and len(here) >= fewest)
        if _opened(folder) and (len(here) >= fewest or orders.finish):
            enough = True
        if orders.finish and not _opened(folder):
            raise ParticipationError("the operator ended the run before its first round.")
        if enough and not orders.paused:
            return
        if waited > sites.give_up and not orders.paused:
            raise ParticipationError(
                f"after {waited:.0f} s {len(here)} sites are here; {fewest} are needed. "
                "`emfed serve`, started again, goes on."
            )
        time.sleep(LOOK_SECONDS)


def save_fit(folder: Path, served: Served, crossed: dict[str, int]) -> None:
    """Leave the model file, records and bytes where the user asked for them.

    ``crossed`` are the bytes that the engine carried since this process started. Bytes up and down
    are those of all stages, ``bytes`` by kind those of the last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_torn(folder, (MODEL,))
    remarks = [TOML(remark) for remark in served.fitted.remarks]
    result = with_setting(served.result, "remarks", remarks) if remarks else served.result
    result.save(folder / MODEL)
    result.records.to_csv(folder / "rounds.csv")
    summary = {
        "rounds": served.rounds,
        "stages": served.stage,
        "stopped": result.stopped,
        "converged": result.converged,
        "doubts": served.fitted.doubts,
        "remarks": remarks,
        "refusals": dict(served.refusals),
        "protections": protections(result),
        "squared_H": result.records[-1].squared_H,
        "bytes_up": served.bytes_up,
        "bytes_down": served.bytes_down,
        "raw_bytes": result.raw_bytes,
        "bytes": result.ledger.summary(),
        "crossed": crossed,
        "parameters": {name: value.tolist() for name, value in result.params.arrays().items()},
    }
    text = json.dumps(summary, indent=1) + "\n"
    (folder / "summary.json").write_text(text, encoding="utf-8")
