"""The sums that a fit was sent: its whole state, since the fit follows from them."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from emfed.core.errors import CheckpointError
from emfed.core.storage import load_checkpoint, save_checkpoint
from emfed.core.sums import ONCE_BITS, Ask, Gather, Gathers, Resumable, Sum

FORMAT = "sums"
SAME = 1e-9
"""How far the first sum of the rows may be from the one in a file, beside it: other machines add in
another order."""


@final
@dataclass(frozen=True, eq=False)
class Answered:
    """An ask that was answered, its sum, and the seconds that it took."""

    digest: bytes
    sum: Sum
    seconds: float


@final
@dataclass
class KnownRounds:
    """The last states of rounds in which workers are heard one by one, in place of all replies."""

    _states: dict[Hashable, Resumable] = field(default_factory=dict)
    _kept: dict[str, NDArray[Any]] = field(default_factory=dict)
    _file: dict[str, NDArray[Any]] = field(default_factory=dict)

    def see(self, ask: Gather | Gathers) -> None:
        """Note the states of what is asked."""
        self._states |= {one.memory: one for one in _each(ask) if isinstance(one, Resumable)}

    def keep(self, others: Mapping[str, NDArray[Any]]) -> None:
        """Keep the states as they are now, with other arrays beside them."""
        states = {
            f"rounds/{memory}/{name}": np.array(array)
            for memory, one in self._states.items()
            for name, array in one.state.arrays().items()
        }
        self._kept = states | {name: np.array(array) for name, array in others.items()}

    def known(self, ask: Gather | Gathers) -> list[Any] | None:
        """The states of a file that these gathers go on from, once; None: it has none."""
        found = []
        for one in _each(ask):
            own = _under(f"rounds/{one.memory}/", self._file)
            if not (own and isinstance(one, Resumable)):
                return None
            found.append((one, own))
        for one, own in found:
            for name in own:
                del self._file[f"rounds/{one.memory}/{name}"]
        return [type(one.state).of(own) for one, own in found]

    def taken(self) -> dict[str, NDArray[Any]]:
        """What a file has beside the states, once."""
        found = {n: a for n, a in self._file.items() if not n.startswith("rounds/")}
        self._file = {n: a for n, a in self._file.items() if n not in found}
        return found

    def save(self) -> dict[str, NDArray[Any]]:
        """What was kept."""
        return self._kept

    def load(self, arrays: Mapping[str, NDArray[Any]]) -> None:
        """The inverse of `save`."""
        self._file = dict(arrays)


def _each(ask: Gather | Gathers) -> Sequence[Gather]:
    return ask.gathers if isinstance(ask, Gathers) else [ask]


def _under(prefix: str, arrays: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
    return {n.removeprefix(prefix): a for n, a in arrays.items() if n.startswith(prefix)}


@final
@dataclass
class KnownSums:
    """The answers to a fit's asks, in order.

    Parameters
    ----------
    about : mapping
        What the fit follows from besides, as plain JSON types: a file of another fit is refused.
    """

    about: Mapping[str, Any]
    entries: list[Answered] = field(default_factory=list)
    rounds: KnownRounds = field(default_factory=KnownRounds)

    def add(self, ask: Ask, answer: Sum, seconds: float) -> None:
        """Note an answer."""
        self.entries.append(Answered(ask.digest(bits=ONCE_BITS), answer, seconds))

    def expect(self, place: int, ask: Ask) -> Answered:
        """The answer at a place, if it is one to this ask."""
        entry = self.entries[place]
        if entry.digest != ask.digest(bits=ONCE_BITS) or len(entry.sum.value) != ask.size:
            raise CheckpointError(
                f"the checkpoint's exchange {place + 1} was about something else: it was made with "
                "other settings, rows or another release. Begin anew with another file."
            )
        return entry

    def save(self, path: Path, next_round: int) -> None:
        """Write all to one file."""
        sums = [entry.sum for entry in self.entries]
        arrays = {
            "values": np.concatenate([np.empty(0), *(s.value for s in sums)]),
            "sizes": np.array([len(s.value) for s in sums], dtype=np.int64),
            "digests": np.frombuffer(b"".join(e.digest for e in self.entries), dtype=np.uint8),
            "numbers": np.array([[s.rows, s.noise] for s in sums]).reshape(-1, 2),
            "counts": np.array([[s.missing, s.bytes] for s in sums], dtype=np.int64).reshape(-1, 2),
            "seconds": np.array([entry.seconds for entry in self.entries]),
            **{f"heard/{name}": array for name, array in self.rounds.save().items()},
        }
        save_checkpoint(
            path, arrays, {"format": FORMAT, "round": next_round, "about": dict(self.about)}
        )

    def load(self, path: Path) -> None:
        """Go on from a file; one of another fit is refused."""
        arrays, said = load_checkpoint(path)
        if said.get("format") != FORMAT:
            raise CheckpointError(f"{path} is of an older release: begin anew with another file.")
        other = [name for name, value in self.about.items() if said["about"].get(name) != value]
        if other:
            raise CheckpointError(
                f"{path} belongs to another run, with other {', '.join(other)}. Use the settings "
                "and data it was made with, or start anew."
            )
        values = np.split(arrays["values"], np.cumsum(arrays["sizes"])[:-1])
        digests = arrays["digests"].tobytes()
        self.entries = [
            Answered(
                digests[16 * j : 16 * j + 16],
                Sum(values[j], *arrays["numbers"][j].tolist(), *arrays["counts"][j].tolist()),
                float(arrays["seconds"][j]),
            )
            for j in range(len(arrays["sizes"]))
        ]
        self.rounds.load(_under("heard/", arrays))

    def first(self, ask: Ask, answer: Sum) -> Sum:
        """The first sum as the file has it: rows whose own is another one are refused.

        Elsewhere rows are added up in another order, and later asks follow from every bit.
        """
        before = self.expect(0, ask).sum
        if before.rows != answer.rows or not np.allclose(
            before.value, answer.value, rtol=SAME, atol=SAME * np.abs(before.value).max()
        ):
            raise CheckpointError(
                "the checkpoint belongs to another run, with other data or weights. Use those it "
                "was made with, or start anew."
            )
        return replace(answer, value=before.value)
