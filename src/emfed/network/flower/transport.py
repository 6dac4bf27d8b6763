"""Flower as a transport: opaque bytes to nodes and back."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping
from typing import Any, final

from flwr.app import ConfigRecord, Message, RecordDict
from flwr.serverapp import Grid

from emfed.network import Transport

logger = logging.getLogger(__name__)
QUERY = "emfed"
MESSAGE_TYPE = f"query.{QUERY}"
RECORD, BLOB = "emfed", "blob"
PAUSE = 0.2
"""Seconds between two looks for answers."""
ABSENT = 15.0
"""Seconds that a round waits for nodes that are not connected, if others are."""


def wrap(message: bytes) -> RecordDict:
    """Bytes as the content of a message of Flower's."""
    return RecordDict({RECORD: ConfigRecord({BLOB: message})})


def unwrap(content: RecordDict) -> bytes:
    """The inverse of `wrap`; anything else is no bytes at all."""
    record = content.get(RECORD)
    blob = record.get(BLOB) if isinstance(record, ConfigRecord) else None
    return blob if isinstance(blob, bytes) else b""


@final
class GridTransport(Transport):
    """Nodes of a SuperLink, known by the names under which their keys were registered.

    The SuperLink has checked each node's key before a message gets here, and the name belongs to
    the key. Nodes without a name go by their number, which lasts as long as their connection.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid = grid
        self._waiting: dict[str, tuple[str, int, float]] = {}
        """Messages without an answer: to whom, to which node, and when they expire."""
        self.sent = self.received = 0
        """Bytes handed to Flower and taken from it."""

    @property
    def between_machines(self) -> bool:
        """Whether nodes have keys, by whose names they go; in a trial they have none."""
        found = self.nodes()
        return bool(found) and not any(key.startswith("node-") for key in found)

    def nodes(self) -> dict[str, int]:
        """Connected nodes by key."""
        listed: Any = getattr(self._grid, "get_nodes", None)
        if listed is None:
            return {f"node-{number}": number for number in sorted(self._grid.get_node_ids())}
        found = {}
        for node in listed():
            found[node.name or f"node-{node.node_id}"] = int(node.node_id)
        return dict(sorted(found.items()))

    def workers(self) -> list[str]:
        """Keys of the nodes that are connected, in order."""
        return list(self.nodes())

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        """Send to nodes as they are there; answers of earlier calls are given, too."""
        began = time.monotonic()
        unsent, asked = dict(messages), set[str]()
        while unsent or asked:
            asked |= self._push(unsent, deadline - (time.monotonic() - began))
            for number, key, answer in self._pull():
                asked.discard(number)
                if answer is not None:
                    yield key, answer
            spent = time.monotonic() - began
            some = len(unsent) < len(messages)
            if spent > deadline or (some and not asked and spent > ABSENT):
                break
            time.sleep(PAUSE)

    def _push(self, unsent: dict[str, bytes], seconds: float) -> set[str]:
        """Send what can be sent now; a message expires with its deadline."""
        if not unsent or seconds <= 0:
            return set()
        nodes = self.nodes()
        ready = [key for key in unsent if key in nodes]
        if not ready:
            return set()
        lifetime = seconds + 5
        out = [
            Message(
                wrap(unsent[key]),
                dst_node_id=nodes[key],
                message_type=MESSAGE_TYPE,
                ttl=lifetime,
            )
            for key in ready
        ]
        pushed = set()
        for key, number in zip(ready, self._grid.push_messages(out), strict=False):
            if number:
                self._waiting[number] = (key, nodes[key], time.monotonic() + lifetime)
                self.sent += len(unsent.pop(key))
                pushed.add(number)
        return pushed

    def _pull(self) -> list[tuple[str, str, bytes | None]]:
        """What has arrived: to which message, whose, and the bytes, None if Flower has an error."""
        now = time.monotonic()
        self._waiting = {k: v for k, v in self._waiting.items() if v[2] > now}
        if not self._waiting:
            return []
        out: list[tuple[str, str, bytes | None]] = []
        for message in self._grid.pull_messages(list(self._waiting)):
            number = message.metadata.reply_to_message_id
            if number not in self._waiting:
                continue
            key, node, _ = self._waiting[number]
            if message.metadata.src_node_id != node:
                names = {other: name for name, other in self.nodes().items()}
                liar = names.get(message.metadata.src_node_id, "an unknown node")
                logger.warning("%s answered in the name of %s: that is not taken", liar, key)
                continue
            del self._waiting[number]
            if message.has_error():
                logger.warning("%s does not answer: %s", key, message.error.reason)
                out.append((number, key, None))
            else:
                blob = unwrap(message.content)
                self.received += len(blob)
                out.append((number, key, blob))
        return out
