"""What a member's journal says of a post: of a part, all that it was a part of."""

from __future__ import annotations

from typing import Any

from emfed.network.exchange.member import Follower
from emfed.network.exchange.statements import (
    BODIES,
    Confirmation,
    Post,
    SetChange,
    SignedOrder,
    StatementKind,
    Turn,
)
from emfed.network.journal import Journal

SILENT = (StatementKind.FETCH, StatementKind.OFFER)
"""Kinds that say nothing of their own: they ask for the list of sums, or hand it on."""
WORDS = {
    StatementKind.HELLO: "its key for this process, and commitments to its rows and noise",
    StatementKind.SECRETS: "secrets of the group, sealed to its members",
    StatementKind.NOSUM: "that a sum had no room or was forged",
    StatementKind.FAULT: "that it cannot go on",
}


def journal_post(journal: Journal, follower: Follower, post: bytes) -> dict[str, Any]:
    """Write down what leaves, before it does; gives the line, which is empty for what says nothing.

    Of a part: the exchange and attempt, the ask in words, the digest of the state that it is about,
    and the sites that add up. With the list of sums that is all that its numbers depend on.
    """
    about = Post.decode(post)
    kind = StatementKind(about.kind)
    if kind in SILENT:
        return {}
    transcript = follower.transcript
    line: dict[str, Any] = {"kind": kind.name.lower(), "run": transcript.agreement.run}
    line |= {"bytes": len(post), "content": _words(kind, about.body)}
    ask = follower.following
    if kind is StatementKind.PART and ask is not None:
        turn = Turn.decode(about.body)
        line |= {
            "content": ask.words(),
            "exchange": turn.exchange,
            "attempt": turn.attempt,
            "about": ask.digest().hex(),
            "set": list(transcript.members),
            "masked": transcript.agreement.masked,
        }
    journal.write(**line)
    return line


def _words(kind: StatementKind, body: bytes) -> str:
    if kind is StatementKind.ORDER:
        order = SignedOrder.decode(body)
        return f"{order.word} {order.argument}".strip()
    if kind is StatementKind.CHANGE:
        change = BODIES[kind].decode(body)
        assert isinstance(change, SetChange)
        return f"that {', '.join(change.leaving)} left and {', '.join(change.coming)} came"
    if kind is StatementKind.CONFIRM:
        confirmation = BODIES[kind].decode(body)
        assert isinstance(confirmation, Confirmation)
        return f"that the model of {confirmation.exchange} sums is the one it came to"
    return WORDS.get(kind, kind.name.lower())
