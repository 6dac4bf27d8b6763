"""What the operator wants of a run that goes on: pause, finish, more rounds, somebody out.

It is one small file in the run's folder, which only its owner may enter. `emfed control` changes
it; the server reads it at every round and while it waits. What it says holds until it is changed,
through crashes and under every engine. There is no port to protect and nothing to be repeated.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, final

from emfed.core.configuration import read_settings
from emfed.core.errors import EmfedError, SettingsError
from emfed.core.storage import read_json_file, write_atomic
from emfed.network.addresses import alone
from emfed.network.keys import site_keys

ORDERS = "orders.json"
REMOVED = "its key was removed at the server"


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
class Door:
    """Who is shut out of a run: by an order, or because its key is gone from the server's folder.

    Both can be taken back, and the site returns.
    """

    def __init__(self, folder: Path | None, keys: Path | None) -> None:
        self._folder, self._keys = folder, keys
        self._seen: tuple[object, ...] = ()
        self._out: dict[str, str] = {}

    def out(self, known: set[str]) -> dict[str, str]:
        """Who of these, and why; files are read again when they have changed."""
        if self._folder is None:
            return self._out
        places = [self._folder / ORDERS, *([] if self._keys is None else [self._keys / "sites"])]
        seen = (len(known), *map(_changed, places))
        if seen != self._seen:
            self._out = dict(read_orders(self._folder).expelled)
            if self._keys is not None:
                good = site_keys(self._keys)
                self._out |= {name: REMOVED for name in known if name not in good}
            self._seen = seen
        return self._out


def _changed(path: Path) -> int:
    """When a file or folder last changed."""
    try:
        return path.stat().st_mtime_ns
    except FileNotFoundError:
        return 0
