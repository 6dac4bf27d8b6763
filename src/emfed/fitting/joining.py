"""Fits that share their exchanges: candidates, competing starts and trials run side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from emfed.core.sums import Ask, Finish, Fit, finished
from emfed.fitting.asks import Together

T = TypeVar("T")


def together(fits: Sequence[Fit[T]]) -> Fit[list[T]]:
    """Run fits side by side: each exchange holds the asks of all that have not ended.

    A fit that is told to finish ends all of them, each with what it has.
    """
    ended: dict[int, T] = {}
    asks: dict[int, Ask] = {}

    def advance(place: int, told: Any) -> None:
        asks.pop(place, None)
        try:
            asks[place] = fits[place].send(told)
        except StopIteration as end:
            ended[place] = end.value

    for place in range(len(fits)):
        advance(place, None)
    while asks:
        places = sorted(asks)
        joint = Together.of([asks[place] for place in places])
        try:
            told = joint.split((yield joint if len(places) > 1 else joint.asks[0]))
        except Finish as finish:
            for place in places:
                ended[place] = finished(fits[place], finish)
            break
        for place, own in zip(places, told, strict=True):
            advance(place, own)
    return [ended[place] for place in range(len(fits))]
