"""The one place where a configuration and a transport become a run: `serve_run`."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

from emfed.core.errors import EmfedError, ParticipationError, WireError
from emfed.core.records import RoundRecord
from emfed.core.storage import remove_torn
from emfed.core.wire import Header, Kind, encode_end, open_answer, seal
from emfed.fitting.serving import Served, serve
from emfed.fitting.settings import ROUNDS
from emfed.fitting.words import in_toml
from emfed.network import Transport
from emfed.network.deployment.config import Config
from emfed.network.deployment.site import MODEL
from emfed.network.deployment.status import Noted, Status
from emfed.network.masking import SMALLEST_SET
from emfed.network.membership import Members
from emfed.network.site import mark

logger = logging.getLogger(__name__)
LOOK_SECONDS = 0.2
"""Between two looks at who is connected."""


def serve_run(transport: Transport, config: Config, status: Status) -> None:
    """Fit, from the beginning or from where an earlier process was killed, and leave the model.

    The caller holds the lock of the run's folder.
    """
    noted = Noted(transport)
    noted.refusals.update(status["refusals"] or {})
    if status["state"] == "finished":
        say_farewell(noted, config, status)
        return
    try:
        served = _fit(noted, config, status)
        crossed = {"up": transport.received, "down": transport.sent}
        save_fit(config.place("output"), served, crossed)
    except EmfedError as error:
        error.args = (in_toml(str(error)), *error.args[1:])
        logger.exception("the run cannot go on")
        status.say("failed", error=str(error))
        raise
    except Exception:  # of the network, say: whoever watches over us starts us again
        logger.exception("the server's program ends")
        raise
    status.say(
        "finished",
        stopped=served.result.stopped,
        round=served.rounds,
        refusals={**noted.refusals, **served.refusals},
        stages=served.stage,
        converged=served.result.converged,
        doubts=served.fitted.doubts,
        up=served.bytes_up,
        down=served.bytes_down,
        untold=_members(config, served.stage).keys,
    )
    say_farewell(noted, config, status)


def _members(config: Config, stage: int) -> Members:
    return Members.load(config.place("folder") / "fit" / f"stage-{stage:04d}" / "members")


def say_farewell(transport: Noted, config: Config, status: Status) -> None:
    """Tell members that the run is over, with the model file where the run hands it out.

    Those who are away are waited for; whoever is not told by then is told when `emfed serve` is
    started again. A site that was refused is told, and gets no model.
    """
    members, sites = _members(config, status["stages"] or 1), config.sites
    model = (config.place("output") / MODEL).read_bytes() if sites.deliver else b""
    about = {
        "rounds": status["round"],
        "stopped": str(status["stopped"]),
        "doubts": status["doubts"] or [],
    }
    untold, end = set(status["untold"] or ()), time.monotonic() + sites.farewell
    while untold:
        messages = {}
        for number, key in enumerate(members.keys):
            if key in untold:
                mine = mark(members.settings[number], members.instances[number])
                header = Header(Kind.END, members.run, 0, number, mine)
                messages[key] = header, encode_end(about, b"" if key in status["refusals"] else model)
        here = [key for key in transport.workers() if key in messages]
        wires = {key: seal(*messages[key]) for key in here}
        for key, answer in transport.deliver(wires, min(sites.deadline, 10.0)):
            try:
                kind = None if key not in here else open_answer(answer, messages[key])[0].kind
            except WireError:
                continue
            if kind is Kind.END or kind is Kind.REFUSAL:  # an older release refuses it
                untold.discard(key)
                logger.info("%s knows that the run is over", key)
        status.say("finished", untold=sorted(untold))
        if time.monotonic() > end:
            logger.warning("not told that the run is over: %s", ", ".join(sorted(untold)))
            return
        if untold:
            time.sleep(LOOK_SECONDS)


def _fit(transport: Noted, config: Config, status: Status) -> Served:
    """`serve`, again and again while there are too few sites, for as long as the user said."""
    sites, settings = config.sites, config.settings
    began = time.monotonic()
    _gather(transport, config, status)
    if settings.masks is None:  # who is late is waited for, and not done without
        many = sites.expected >= SMALLEST_SET
        settings = settings.but(masks=transport.between_machines and many)
    status.say("running", rounds=settings.rounds or ROUNDS)

    def show(record: RoundRecord) -> None:
        nonlocal began
        began = time.monotonic()
        status.say(
            "running",
            round=record.round,
            squared_H=record.squared_H,
            answered=record.answered,
            asked=record.asked,
            seconds=record.seconds,
            refusals=dict(transport.refusals),
            up=status["up"] + record.bytes_up,
            down=status["down"] + record.bytes_down,
        )

    while True:
        try:
            return serve(
                settings,
                None,
                transport,
                config.place("folder") / "fit",
                minimum=sites.fewest,
                deadline=sites.deadline,
                attempts=sites.attempts,
                admit=sites.admit,
                callbacks=[show],
            )
        except ParticipationError as error:
            if time.monotonic() - began > sites.give_up:
                raise
            logger.warning("%s", error)
            status.say("waiting", why=str(error), refusals=dict(transport.refusals))
            time.sleep(min(5.0, sites.deadline))


def _gather(transport: Noted, config: Config, status: Status) -> None:
    """Wait until those expected are there, or long enough and there are enough."""
    sites, began = config.sites, time.monotonic()
    while True:
        here = transport.workers()
        status.say("waiting", online=here, why=f"{len(here)} of {sites.expected} sites are here")
        waited = time.monotonic() - began
        if len(here) >= sites.expected or (waited > sites.wait and len(here) >= sites.fewest):
            return
        if (config.place("folder") / "fit").exists() and len(here) >= sites.fewest:
            return  # a run that goes on knows its sites
        if waited > sites.give_up:
            raise ParticipationError(
                f"after {waited:.0f} s {len(here)} sites are here; {sites.fewest} are needed."
            )
        time.sleep(LOOK_SECONDS)


def save_fit(folder: Path, served: Served, crossed: dict[str, int]) -> None:
    """Leave the model file, records and bytes where the user asked for them.

    ``crossed`` are the bytes that the engine carried since this process started. Bytes up and down
    are those of all stages, ``bytes`` by kind those of the last.
    """
    folder.mkdir(parents=True, exist_ok=True)
    remove_torn(folder, (MODEL,))
    result = served.result
    result.save(folder / MODEL)
    result.records.to_csv(folder / "rounds.csv")
    summary = {
        "rounds": served.rounds,
        "stages": served.stage,
        "stopped": result.stopped,
        "converged": result.converged,
        "doubts": served.fitted.doubts,
        "remarks": list(served.fitted.remarks),
        "refusals": dict(served.refusals),
        "squared_H": result.records[-1].squared_H,
        "bytes_up": served.bytes_up,
        "bytes_down": served.bytes_down,
        "bytes": result.ledger.summary(),
        "crossed": crossed,
        "parameters": {name: value.tolist() for name, value in result.params.arrays().items()},
    }
    text = json.dumps(summary, indent=1) + "\n"
    (folder / "summary.json").write_text(text, encoding="utf-8")
