"""Fits that share their exchanges: candidates, competing starts and trials run side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

from emfed.core.sums import Finish, Fit, Gather, Gathers, Unmasked
from emfed.fitting.asks import Joint

T = TypeVar("T")


def together(fits: Sequence[Fit[T]]) -> Fit[list[T]]:
    """Run fits side by side: each exchange holds the asks of all that have not ended.

    Fits that want a sum wait for those that hear workers one by one. An exchange that is refused
    (`Finish`) is refused to all that are part of it.
    """
    ended: dict[int, T] = {}
    asks: dict[int, Any] = {}

    def advance(place: int, step: Callable[[], Any]) -> None:
        asks.pop(place, None)
        try:
            asks[place] = step()
        except StopIteration as end:
            ended[place] = end.value

    for place, fit in enumerate(fits):
        advance(place, partial(next, fit))
    while asks:
        heard = sorted(place for place, ask in asks.items() if isinstance(ask, Gather))
        places = heard or sorted(asks)
        try:
            answers = yield from _exchange([asks[place] for place in places], bool(heard))
        except Finish as finish:
            for place in places:
                advance(place, partial(fits[place].throw, finish))
        else:
            for place, answer in zip(places, answers, strict=True):
                advance(place, partial(fits[place].send, answer))
    return [ended[place] for place in range(len(fits))]


def _exchange(asks: Sequence[Any], heard: bool) -> Unmasked[list[Any]]:
    """One exchange for asks of one kind; what each is told."""
    if len(asks) == 1:
        return [(yield asks[0])]
    if heard:
        return list((yield Gathers(tuple(asks))))
    joint = Joint.of(asks)
    return list(joint.split((yield joint)))
