"""Fits that share their exchanges: candidates, competing starts and trials run side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from emfed.core.sums import Ask, Finish, Fit, Sum, finished
from emfed.fitting.asks import Joint

T = TypeVar("T")


def together(fits: Sequence[Fit[T]]) -> Fit[list[T]]:
    """Run fits side by side: each exchange holds the asks of all that have not ended.

    Where an exchange is refused (`Finish`) all of them end, each with what it has.
    """
    ended: dict[int, T] = {}
    asks: dict[int, Ask] = {}

    def advance(place: int, answer: Sum | None) -> None:
        asks.pop(place, None)
        try:
            asks[place] = next(fits[place]) if answer is None else fits[place].send(answer)
        except StopIteration as end:
            ended[place] = end.value

    for place in range(len(fits)):
        advance(place, None)
    while asks:
        places = sorted(asks)
        joint = Joint.of([asks[place] for place in places])
        try:
            answers = joint.split((yield joint if len(places) > 1 else joint.asks[0]))
        except Finish as finish:
            for place in places:
                ended[place] = finished(fits[place], finish)
            break
        for place, answer in zip(places, answers, strict=True):
            advance(place, answer)
    return [ended[place] for place in range(len(fits))]
