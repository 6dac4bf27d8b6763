"""Fits that share their exchanges: candidates, competing starts and trials run side by side."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from emfed.core.sums import Ask, Fit
from emfed.fitting.asks import Together

T = TypeVar("T")


def together(fits: Sequence[Fit[T]]) -> Fit[list[T]]:
    """Run fits side by side: each exchange holds the asks of all that have not ended.

    Examples
    --------
    Three fits that ask for 1, 2 and 3 sums take three exchanges, not six:

    >>> from emfed.testing.sums import Counting, counted
    >>> counting = Counting()
    >>> counted(together([counting.fit(1), counting.fit(2), counting.fit(3)]))
    ([1, 2, 3], 3)
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
        if len(places) == 1:
            advance(places[0], (yield asks[places[0]]))
            continue
        joint = Together.of([asks[place] for place in places])
        told = joint.split((yield joint))
        for place, own in zip(places, told, strict=True):
            advance(place, own)
    return [ended[place] for place in range(len(fits))]
