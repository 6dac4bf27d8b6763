"""What the operator wants of a run that goes on: pause, finish, more rounds, somebody out.

It is one small file in the run's folder, which only its owner may enter. `emfed control` changes
it; the analyst's program reads it again and again, and signs what sites have not heard. What it
says holds until it is changed, through crashes. There is no port to protect and nothing to be
repeated.

Decision: docs/decisions/025-operating-a-run.md
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from emfed.core.configuration import read_settings
from emfed.core.errors import EmfedError, SettingsError
from emfed.core.storage import read_json_file, write_atomic
from emfed.network.addresses import alone, printable

logger = logging.getLogger(__name__)
ORDERS = "orders.json"


@final
@dataclass(frozen=True, kw_only=True)
class Orders:
    """What holds now."""

    paused: bool = False
    finish: bool = False
    """End after this round, with what was reached."""
    rounds: int | None = None
    """The limit on rounds, in the place of the configuration's."""
    expelled: dict[str, str] = field(default_factory=dict)
    """Sites that are out, and why."""


def read_orders(folder: Path) -> Orders:
    """What the operator last said."""
    path = folder / ORDERS
    try:
        said = dict(read_json_file(path))
        expelled = {str(name): str(why) for name, why in dict(said.pop("expelled", {})).items()}
        return dataclasses.replace(read_settings(said, str(path), Orders), expelled=expelled)
    except FileNotFoundError:
        return Orders()
    except (ValueError, TypeError, SettingsError):
        raise SettingsError(
            f"{path} is damaged: delete it, and say again with `emfed control` what is to hold."
        ) from None


def change_orders(
    folder: Path, expel: Mapping[str, str | None] | None = None, **changes: Any
) -> Orders:
    """Say something new; two who do so at once do not undo each other.

    ``expel`` has sites that are out from now on, with the reason; None lets one back in.
    """
    if not folder.is_dir():
        raise SettingsError(f"{folder} holds no run.")
    with alone(folder / "orders.lock", 5.0) as mine:
        if not mine:
            raise EmfedError(f"another command changes {folder / ORDERS}: try again.")
        before = read_orders(folder)
        if expel is not None:
            out = {**before.expelled, **expel}
            changes["expelled"] = {name: why for name, why in out.items() if why is not None}
        orders = dataclasses.replace(before, **changes)
        text = json.dumps(dataclasses.asdict(orders), indent=1) + "\n"
        write_atomic(folder / ORDERS, text.encode())
    return orders


@final
class StandingOrders:
    """The orders that a server heeds; they go on to hold while their file cannot be read.

    A server that never could read them does nothing: somebody may be expelled in there.
    """

    def __init__(self, folder: Path) -> None:
        self.folder, self._held, self._known = folder, Orders(), False
        self.trouble = ""
        """Why the file tells nothing now, in words; empty if it does."""

    def read(self) -> Orders:
        """What holds now; what is new, or wrong with the file, is logged once.

        Where the file is deleted meanwhile, what was said before holds until there is another one:
        nobody is let in again by a file that is gone.
        """
        if self._known and not (self.folder / ORDERS).exists():
            return self._held
        try:
            orders = read_orders(self.folder)
        except (SettingsError, OSError) as error:
            words = str(error) if isinstance(error, SettingsError) else f"{error}: mend that."
            holds = "what was said before holds" if self._known else "the run waits"
            trouble = f"{words} Until then {holds}."
            if trouble != self.trouble:
                self.trouble = trouble
                logger.error("%s", trouble)
            return self._held if self._known else Orders(paused=True)
        for words in _news(self._held, orders):
            logger.warning("%s", printable(words))
        self._held, self._known, self.trouble = orders, True, ""
        return orders


def _news(before: Orders, now: Orders) -> list[str]:
    told = []
    if before.finish != now.finish:
        told.append("the operator ends the run" if now.finish else "the operator ends it no more")
    if before.paused != now.paused:
        told.append(f"the operator {'pauses the run' if now.paused else 'lets the run go on'}")
    if before.rounds != now.rounds:
        told.append(f"the operator's limit on rounds: {now.rounds or 'that of the configuration'}")
    for name in sorted(before.expelled.keys() | now.expelled.keys()):
        if (why := now.expelled.get(name)) is None:
            told.append(f"{name} may take part again")
        elif why != before.expelled.get(name):
            told.append(f"{name} is out: {why}")
    return told
