"""A site's end of a masked sum: what it is ready to tell, for which sets it told it, and openings.

Three files in the folder of a run. ``ready`` and ``asked`` are the answers that wait for a set,
that of the last round and of the last question: integers, what they are about, and the fresh number
that each was announced with. Rounds and questions are numbered, and a message with a lower number
than the one that waits is old, so no message that comes late or again takes an answer's place.
``sets`` says for which sets of sites each question was answered: written before a masked answer
leaves, and never forgotten in the run.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from emfed.algorithms.steps import check_bits
from emfed.core.errors import CheckpointError, WireError
from emfed.core.messages import Lattice
from emfed.core.protocols import FloatArray, Model, Opening, Summaries, View
from emfed.core.storage import load_checkpoint, save_checkpoint
from emfed.core.wire import Reason
from emfed.models.binding import extra_owners
from emfed.models.matrices import triangle
from emfed.network.masking import (
    RunKeys,
    SetMembers,
    SiteIdentity,
    check_set,
    context_of,
    decode_set,
    next_numbers,
    pack_words,
    packed_size,
    sum_words,
    to_words,
    unpack_words,
)
from emfed.network.rules import Refusal, SiteRules
from emfed.network.spending import Secret
from emfed.network.store import KEPT_RUNS, SiteStore

NumberBlock = tuple[NDArray[Any], int]
"""Signed integers, and the bits that each takes modulo a power of two."""
Shape = Sequence[tuple[int, int]]
"""How many integers each block has, of how many bits."""
FIXED_BITS, FIXED_STEP = 64, 2.0**-32
"""Answers to questions, in fixed point: averages over rows, times a weight that is at most one."""
MOST_FIXED = 2.0**52
"""The largest of them: a thousand sites have room, and 1e6 nats of a mean row."""
EXACT_BITS, EXACT_STEP = 256, Fraction(1, 2**96)
"""Sums of an opening: so wide that raw second moments lose nothing to cancellation."""
SHARE_ROUNDING = 1e-9
"""What rounding may add to a site's share of all rows."""
CHECK: NumberBlock = (np.zeros(1, dtype=np.int64), 64)
"""A word that is zero in every answer: its sum is zero if the masks were those of one set."""
FIRST_QUESTION = 1 << 27
"""Numbers from here on are those of questions, below of rounds; all questions take four bytes."""
_LATTICE = struct.Struct("<dBd")


def encode_lattice(lattice: Lattice) -> bytes:
    """A request's lattice, after the rest of its body."""
    return _LATTICE.pack(lattice.step, lattice.bits, lattice.rate)


def decode_lattice(body: bytes) -> tuple[Lattice, bytes]:
    """The inverse of `encode_lattice`, and the rest of the body."""
    if len(body) < _LATTICE.size:
        raise WireError("a masked request ends with its lattice.")
    step, bits, rate = _LATTICE.unpack_from(body, len(body) - _LATTICE.size)
    if not (2.0**-80 <= step < 1e300 and 2 <= bits <= 64 and 0 <= rate <= 1):
        raise WireError("a lattice that cannot be.")
    return Lattice(step, bits, rate), body[: -_LATTICE.size]


LATTICE_SIZE = _LATTICE.size
"""Bytes of a lattice in a request."""


def round_subject(view: View, statistics: FloatArray) -> bytes:
    """What a round asks, whichever round it is: S to seven digits, and of which model."""
    return hashlib.sha256(repr(view).encode() + statistics.astype(np.float32).tobytes()).digest()


ENERGY_BITS = 128
"""Bits of a squared length: on the finest lattice those of statistics near 1 have 70."""


def upload_shape(lattice: Lattice, q: int) -> Shape:
    """A round's blocks: symbols, then their length with `wrap_check`, and the check of masks."""
    return ((q, lattice.bits), (1, ENERGY_BITS), (1, check_bits(lattice)), (1, 64))


def answer_shape(width: int) -> Shape:
    """A question's blocks: the answer and the weight behind it, then the check."""
    return ((width + 1, FIXED_BITS), (1, 64))


PRIVATE_BITS = 48
"""Bits of a number of a private answer: room for 100 million rows on any lattice."""


def private_shape(width: int) -> Shape:
    """The blocks of a private answer: its numbers, then the check."""
    return ((width, PRIVATE_BITS), (1, 64))


def shape_size(shape: Shape) -> int:
    """Bytes of a masked answer."""
    return sum(packed_size(count, bits) for count, bits in shape)


def add_up(answers: Sequence[bytes], shape: Shape) -> list[NDArray[Any]] | None:
    """The sum of a whole set's answers, block by block, without the check; None if that fails."""
    parts = [_split(answer, shape) for answer in answers]
    sums = [sum_words([p[j] for p in parts], bits) for j, (_, bits) in enumerate(shape)]
    return sums[:-1] if not sums[-1].any() else None


def _split(answer: bytes, shape: Shape) -> list[NDArray[Any]]:
    """Words of each block."""
    if len(answer) != shape_size(shape):
        raise WireError(f"a masked answer has {shape_size(shape)} bytes; got {len(answer)}.")
    out, position = [], 0
    for count, bits in shape:
        size = packed_size(count, bits)
        out.append(unpack_words(answer[position : position + size], count, bits))
        position += size
    return out


def to_fixed(values: FloatArray, weight: float, sites: int) -> NumberBlock:
    """An answer in fixed point, weighted, with its weight.

    A refusal of what has no room would tell that some row is far from all that was expected. If it
    were cut, a server that says how large the numbers are would let all sites but one be cut, and
    read the one. So a random number takes its place, larger than what the others can tell: the sum
    is as high or as low as it should be, and tells nothing else. So it is with all numbers where
    the server lies about the number of rows, and this site had more than all of them.
    """
    told = np.concatenate([values * weight, [weight]]) / FIXED_STEP
    inside = (np.abs(told) <= MOST_FIXED) & (0 < weight <= 1 + SHARE_ROUNDING)
    most = (1 << 62) // max(sites, 1)
    drawn = np.frombuffer(os.urandom(8 * len(told)), np.uint64) % np.uint64(most // 2)
    hidden = np.where(told > 0, 1, -1) * (most // 2 + drawn.astype(np.int64))
    return np.where(inside, np.rint(np.where(inside, told, 0)).astype(np.int64), hidden), FIXED_BITS


def from_fixed(total: NDArray[np.int64]) -> tuple[FloatArray, float]:
    """The weighted mean over a set, and the set's weight."""
    values = total.astype(np.float64) * FIXED_STEP
    if not values[-1] > 0:
        raise WireError("a sum of answers with no weight behind it.")
    return values[:-1] / values[-1], float(values[-1])


# Openings: sums from which the summary of all rows follows exactly.


MOMENTS = ("mean", "scatter", "observed", "length", "extra")
"""Parts of a summary that are moments of what was seen of each column."""
WEIGHT = "weight"
"""The mean weight of a row, where rows have weights: a site needs it to know its share."""


def _others(shapes: Mapping[str, Sequence[int]]) -> list[str]:
    """Parts of a summary that are plain means over rows, by weight."""
    return [name for name in sorted(shapes) if name not in (*MOMENTS, WEIGHT)]


def _sizes(shapes: Mapping[str, Sequence[int]]) -> dict[str, int]:
    return {name: int(np.prod(shape)) for name, shape in shapes.items()}


def _pairs(mean: int, scatter: int) -> list[tuple[int, int]]:
    """The columns whose product each number of a scatter is about."""
    if scatter in (0, mean):
        return [(j, j) for j in range(scatter)]
    rows, columns, _ = triangle(mean)
    return list(zip(rows.tolist(), columns.tolist(), strict=True))


def _exact(values: Any) -> list[Fraction]:
    return [Fraction(float(x)) for x in np.ravel(values)]


def opening_sums(
    summary: Summaries, count: int, total: float, owners: Sequence[int], uniform: bool = False
) -> NumberBlock:
    """Rows, their weight and its square, steps, and the raw moments of one site, as integers of
    `EXACT_STEP`; ``owners`` are the columns that ``extra`` is about.

    Where sites count alike each weighs one, and the weight of its rows takes the square's place.
    """
    mean, scatter = _exact(summary.get("mean", ())), _exact(summary.get("scatter", ()))
    weight = Fraction(1) if uniform else Fraction(float(total))
    third = Fraction(float(total)) if uniform else weight**2
    steps = weight * (_exact(summary["length"])[0] if "length" in summary else 1)
    seen = [steps * x for x in _exact(summary.get("observed", np.ones(len(mean))))]
    sums: list[Fraction | int] = [count, weight, third, steps, *seen]
    sums += [s * m for s, m in zip(seen, mean, strict=True)]
    pairs = zip(_pairs(len(mean), len(scatter)), scatter, strict=True)
    sums += [seen[i] * (within + mean[i] * mean[j]) for (i, j), within in pairs]
    extra = _exact(summary.get("extra", ()))
    sums += [seen[j] * x for j, x in zip(owners, extra, strict=True)]
    parts = [np.array([round(Fraction(x) / EXACT_STEP) for x in sums], object)]
    for name in _others({name: values.shape for name, values in summary.items()}):
        values = np.ravel(summary[name])
        parts.append(np.zeros(values.size, object))
        for j in np.flatnonzero(values).tolist():  # most cells of a table are empty
            parts[-1][j] = round(Fraction(float(values[j])) * weight / EXACT_STEP)
    return np.concatenate(parts), EXACT_BITS


def opening_shape(shapes: Mapping[str, Sequence[int]]) -> Shape:
    """The blocks of `opening_sums`."""
    sizes = _sizes(shapes)
    moments = 2 * sizes.get("mean", 0) + sizes.get("scatter", 0) + sizes.get("extra", 0)
    return ((4 + moments + sum(sizes[name] for name in _others(shapes)), EXACT_BITS), (1, 64))


@final
@dataclass(frozen=True, eq=False)
class Opened:
    """What an opening's sum tells."""

    rows: int
    total: float
    """The sum of the rows' weights, their number where they have none."""
    effective: float
    """How many sites of equal weight they are worth."""
    whole: dict[str, FloatArray]
    """The summary of all rows."""

    @classmethod
    def of(
        cls,
        sums: NDArray[Any],
        shapes: Mapping[str, Sequence[int]],
        owners: Sequence[int],
        uniform: bool = False,
    ) -> Opened:
        """Read the sum of what `opening_sums` gives of each site."""
        sizes, names = _sizes(shapes), _others(shapes)
        ends = len(sums) - np.cumsum([0, *(sizes[name] for name in reversed(names))])
        left = [int(x) * EXACT_STEP for x in sums[: ends[-1]]]

        def take(count: int) -> list[Fraction]:
            taken = left[:count]
            del left[:count]
            return taken

        d, width = sizes.get("mean", 0), sizes.get("scatter", 0)
        rows, total, third, steps = take(4)
        if rows < 1 or third <= 0 or steps <= 0 or total <= 0:
            raise WireError("the sum of an opening has no rows in it.")
        effective = total if uniform else total**2 / third
        seen = take(d)
        some = [s if s > 0 else Fraction(1) for s in seen]
        mean = [f / s for f, s in zip(take(d), some, strict=True)]
        pairs = zip(_pairs(d, width), take(width), strict=True)
        found: dict[str, Any] = {
            "mean": mean,
            "scatter": [raw / some[i] - mean[i] * mean[j] for (i, j), raw in pairs],
            "observed": [s / steps for s in seen],
            "length": [steps / total],
            "extra": [x / some[j] for j, x in zip(owners, take(len(owners)), strict=True)],
            WEIGHT: [total / rows],
        }
        for name, start, end in zip(names, ends[:0:-1], ends[-2::-1], strict=True):
            found[name] = np.zeros(end - start)
            for j in np.flatnonzero(sums[start:end]).tolist():
                found[name][j] = float(int(sums[start + j]) * EXACT_STEP / total)
        whole = {
            name: np.array(found[name], dtype=np.float64).reshape(tuple(shapes[name]))
            for name in shapes
        }
        return cls(int(rows), float(third if uniform else total), float(effective), whole)


def with_weight(
    summaries: Summaries, totals: FloatArray | None, counts: Any, uniform: bool = False
) -> dict[str, FloatArray]:
    """Summaries of workers, with the mean weight of their rows where these have any.

    Where workers count alike, all rows of one weigh one together.
    """
    if totals is None and not uniform:
        return dict(summaries)
    weight = np.ones(len(counts)) if uniform or totals is None else totals
    return {**summaries, WEIGHT: (weight / counts)[:, None]}


def add_up_opening(model: Model, opening: Opening, uniform: bool = False) -> Opening:
    """An opening of a simulation as a masked run knows it: the summary of all rows."""
    summaries = with_weight(opening.summaries, opening.totals, opening.counts, uniform)
    shapes = {name: values.shape[1:] for name, values in summaries.items()}
    owners = extra_owners(model, int(np.prod(shapes.get("mean", (0,))))).tolist()
    totals = opening.counts if opening.totals is None else opening.totals
    sums: Any = sum(
        opening_sums({n: v[i] for n, v in summaries.items()}, count, total, owners, uniform)[0]
        for i, (count, total) in enumerate(
            zip(opening.counts.tolist(), totals.tolist(), strict=True)
        )
    )
    found = Opened.of(sums, shapes, owners, uniform)
    return replace(opening, summaries=summaries, effective=found.effective, whole=found.whole)


# What a site keeps.


@final
@dataclass(frozen=True)
class Ready:
    """An answer that waits for the server to name a set."""

    about: bytes
    """A digest of everything that was agreed about it; masks depend on it."""
    subject: int
    """64 bits of what was asked, whenever that was: sets that differ by a few would tell. Zero is
    an opening, which is told anew when somebody has left."""
    fresh: int
    words: bytes
    shape: Shape
    number: int
    """That of the round or of the question."""
    least: int = 0
    """For a private answer, how many sites the set must have, so that the noise is what it cost. It
    is told for one set: two sets would have some of the noise in common."""


@final
class SiteSums:
    """The masked answers of a site, over all runs; its folder and its lock are the site's."""

    def __init__(self, identity: SiteIdentity, secret: Secret, rules: SiteRules) -> None:
        self.identity, self._secret, self._rules = identity, secret, rules
        self.smallest = rules.smallest_set
        self._keys: dict[tuple[int, int], RunKeys] = {}
        self._made: dict[Path, tuple[int, SetMembers]] = {}
        """The fresh number that this process made last in a run, and the set that it was told for.
        What is on disk tells neither: where an old disk was put back, the number that follows from
        its last set may have been used for other rows."""

    def keys(self, run: int, instance: int) -> RunKeys:
        """The site's keys in a run."""
        if (run, instance) not in self._keys:
            made = RunKeys(self.identity, self._secret.read(), run, instance)
            last = list(self._keys.items())[1 - KEPT_RUNS :]
            self._keys = {**dict(last), (run, instance): made}
        return self._keys[run, instance]

    def again(self, store: SiteStore, number: int, about: bytes) -> int | None:
        """The fresh number of the answer to just this, where it waits.

        A question before the last is refused; which round is old, the site's state says.
        """
        found = self.waiting(store, number)
        if found is not None and FIRST_QUESTION <= number < found.number:
            text = f"question {number} is over; {found.number} was next."
            raise Refusal(Reason.OLD, text, found.number)
        if found is None or found.about != hashlib.sha256(about).digest():
            return None
        store.settle(_slot(number))
        return found.fresh

    def ready(
        self,
        store: SiteStore,
        number: int,
        about: bytes,
        subject: bytes,
        blocks: Sequence[NumberBlock],
        private: tuple[int, int | None] = (0, None),
        me: int = -1,
    ) -> bytes:
        """Write down an answer; gives the fresh number that the server is to name it by.

        It is empty where the number follows from the last set: the server knows it. A ``private``
        answer brings how many sites its set must have, and the number that it had where it was made
        before: it is told for one set.
        """
        words = b"".join(pack_words(to_words(*block), block[1]) for block in (*blocks, CHECK))
        shape = tuple((len(numbers), bits) for numbers, bits in (*blocks, CHECK))
        digest_of = hashlib.sha256(subject).digest()[:8]
        topic = int.from_bytes(digest_of, "little") if subject else 0
        least, fresh = private
        last = self._made.pop(store.directory, (0, {}))[1]
        follows = not least and me in last
        if follows:
            fresh = next_numbers(last)[me]
        elif fresh is None:
            fresh = int.from_bytes(os.urandom(8), "little")
        digest = hashlib.sha256(about).digest()
        self._keep(store, Ready(digest, topic, fresh, words, shape, number, least))
        others = list(self._made.items())[1 - KEPT_RUNS :]
        self._made = {**dict(others), store.directory: (fresh, {})}
        return b"" if follows else fresh.to_bytes(8, "little")

    def forget_last(self, store: SiteStore) -> None:
        """The server may not know the last set: the next number is drawn and told."""
        self._made.pop(store.directory, None)

    @staticmethod
    def _keep(store: SiteStore, ready: Ready) -> None:
        about = {
            "about": ready.about.hex(),
            "subject": f"{ready.subject:016x}",
            "fresh": f"{ready.fresh:016x}",
            "shape": [list(block) for block in ready.shape],
            "number": ready.number,
            "least": ready.least,
        }
        words = np.frombuffer(ready.words, dtype=np.uint8)
        path = store.directory / _slot(ready.number)
        save_checkpoint(path, {"words": words}, about, store.disk)

    @staticmethod
    def waiting(store: SiteStore, number: int) -> Ready | None:
        """The round's or question's answer that waits, if one does; a damaged file holds none."""
        path = store.directory / _slot(number)
        if store.disk.read(path) is None:
            return None
        try:
            arrays, about = load_checkpoint(path, store.disk)
        except CheckpointError:
            return None
        return Ready(
            bytes.fromhex(about["about"]),
            int(about["subject"], 16),
            int(about["fresh"], 16),
            arrays["words"].tobytes(),
            tuple((count, bits) for count, bits in about["shape"]),
            about["number"],
            about["least"],
        )

    def masked(
        self, store: SiteStore, keys: RunKeys, me: int, number: int, body: bytes
    ) -> tuple[bytes, int] | None:
        """The answer that waits, masked for the set that the server names; and the set's size.

        None if it is not here: the disk that it was on is lost, or an old backup of it is here.
        """
        ready = self.waiting(store, number)
        if ready is None:
            return None
        history = _History.read(store)
        told = history.told_for(ready)
        members = decode_set(body, told, history.newest)
        if members is None:
            text = "this set follows from one that is not the last here: name all of it."
            raise Refusal(Reason.FAILED, text)
        if members.get(me) != ready.fresh:
            return None
        smallest = max(self.smallest, ready.least)
        why = check_set(members, smallest, told)
        if ready.least and told and members not in told:
            why = why or "a private answer is told for one set."
        if ready.subject:  # of an opening the company decides, over all runs
            why = why or history.objection(ready.subject, members, self.smallest)
        if not why and (strange := keys.strangers(members, me)):
            names = ", ".join(keys.names.get(n, f"worker {n}") for n in strange)
            why = (
                f"this set has members whose keys no identity in this site's roster has signed, or "
                f"that are there twice: {names}. Put their NAME.pub into the roster (`emfed keys "
                "roster`)."
            )
        if why:
            raise Refusal(Reason.NOT_NOW, why)
        if members in told:  # the same again, of any run: nobody came or went by it
            store.settle("sets")
        else:
            self._enter(store, self._names(keys, me, members))
            history.add(ready, members).write(store)
            if self._made.get(store.directory, (None,))[0] == ready.fresh:
                self._made[store.directory] = ready.fresh, members
        context, parts = context_of(ready.about, members), _split(ready.words, ready.shape)
        out = []
        for place, (words, (_, bits)) in enumerate(zip(parts, ready.shape, strict=True)):
            own = context + bytes([place])
            out.append(pack_words(keys.masked(words, bits, me, members, own), bits))
        return b"".join(out), len(members)

    def _enter(self, store: SiteStore, names: list[str]) -> None:
        """Count a change of who adds up, before anything is told; refuse one too many."""
        before = _Company.read(store)
        company = before.with_(names)
        if not company.within(limit := self._rules.largest_changes):
            raise Refusal(
                Reason.NOT_NOW,
                f"who adds up changes again ({before.difference(names)}), which tells of who comes "
                f"or goes, and the owner allows that {limit} times over all runs: run without "
                "change, or the owner allows more (largest_changes in its rules).",
            )
        company.write(store)

    def _names(self, keys: RunKeys, me: int, members: SetMembers) -> list[str]:
        """The names of a set's members, by verified keys."""
        return sorted({self.identity.name, *(keys.names[n] for n in members if n != me)})


@final
class _Company:
    """With which sites this one added up last, in any run, and how often that changed.

    Two sums over sets that differ by one site differ by that site's part, and a server can ask at
    nearly the same statistics, in one run or in two. So every change counts, and the owner says
    how many there may be.
    """

    def __init__(self, names: list[str], changes: int, known: bool) -> None:
        self._names, self._changes, self._known = names, changes, known

    @staticmethod
    def _path(store: SiteStore) -> Path:
        return store.directory.parent / "company"

    @classmethod
    def read(cls, store: SiteStore) -> _Company:
        """What is on disk; damage is an error, since forgetting would tell."""
        if store.disk.read(cls._path(store)) is None:
            return cls([], 0, False)
        about = load_checkpoint(cls._path(store), store.disk)[1]
        return cls(about["names"], about["changes"], True)

    def with_(self, names: list[str]) -> _Company:
        """After a sum over these sites."""
        if names == self._names:
            return self
        return _Company(names, self._changes + bool(self._names), False)

    def difference(self, names: list[str]) -> str:
        """Who comes and who goes, in words."""
        came, went = sorted({*names} - {*self._names}), sorted({*self._names} - {*names})
        told = [f"{', '.join(who)} {how}" for who, how in ((came, "comes"), (went, "goes")) if who]
        return "; ".join(told)

    def within(self, limit: int | None) -> bool:
        """Whether so many changes are allowed."""
        return limit is None or self._changes <= limit

    def write(self, store: SiteStore) -> None:
        """Before the answer leaves, if it is news."""
        path = self._path(store)
        if self._known:
            store.disk.settle(path)
            return
        about = {"names": self._names, "changes": self._changes}
        save_checkpoint(path, {"none": np.empty(0)}, about, store.disk)


def _slot(number: int) -> str:
    """The file of the answer that waits: rounds do not displace questions, nor these rounds."""
    return "ready" if number < FIRST_QUESTION else "asked"


def _place(ready: Ready) -> str:
    """Where sets are remembered: private answers may be asked for again after others, and are told
    for one set for good."""
    return ready.about.hex() if ready.least else _slot(ready.number)


LastTold = Mapping[str, tuple[str, list[dict[int, int]]]]
"""What each answer that waits is about, and the sets that it was told for."""


@final
class _History:
    """For which sets each subject was answered in a run; exactly so the answers that wait, and all
    private ones."""

    def __init__(
        self,
        subjects: NDArray[Any],
        which: NDArray[Any],
        sets: list[list[int]],
        last: LastTold,
        newest: SetMembers,
    ) -> None:
        self._subjects, self._which, self._sets, self._last = subjects, which, sets, last
        self.newest = newest
        """The set that was answered last, whatever it was about."""

    @classmethod
    def read(cls, store: SiteStore) -> _History:
        """What is on disk; damage is an error, since forgetting would tell."""
        path = store.directory / "sets"
        if store.disk.read(path) is None:
            return cls(np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.int64), [], {}, {})
        arrays, about = load_checkpoint(path, store.disk)
        last = {
            slot: (digest, [_from_text(told) for told in sets])
            for slot, (digest, sets) in about["last"].items()
        }
        newest = _from_text(about["newest"])
        return cls(arrays["subjects"], arrays["which"], about["sets"], last, newest)

    def told_for(self, ready: Ready) -> list[dict[int, int]]:
        """The sets for which this very answer was told, with the fresh numbers of all."""
        digest, sets = self._last.get(_place(ready), ("", []))
        return sets if digest == ready.about.hex() else []

    def _told(self, subject: int) -> list[list[int]]:
        found = np.unique(self._which[self._subjects == np.uint64(subject)])
        return [self._sets[int(j)] for j in found]

    def objection(self, subject: int, members: SetMembers, smallest: int) -> str:
        """Why not for this set, where the same was answered in another round; empty if it may."""
        told, mine = self._told(subject), set(members)
        apart = [len(mine ^ set(other)) for other in told]
        if any(0 < n < smallest for n in apart):
            return "this was answered for a set that hardly differs: the difference would tell."
        return "this was answered for two sets already." if 0 not in apart and len(told) > 1 else ""

    def add(self, ready: Ready, members: SetMembers) -> _History:
        """Remember one more answer."""
        mine, sets_now = sorted(members), [*self.told_for(ready), dict(members)]
        told = {**self._last, _place(ready): (ready.about.hex(), sets_now)}
        if mine in self._told(ready.subject):
            return _History(self._subjects, self._which, self._sets, told, members)
        sets = self._sets if mine in self._sets else [*self._sets, mine]
        subjects = np.append(self._subjects, np.uint64(ready.subject))
        return _History(subjects, np.append(self._which, sets.index(mine)), sets, told, members)

    def write(self, store: SiteStore) -> None:
        """Before the answer leaves."""
        arrays = {"subjects": self._subjects, "which": self._which}
        last = {
            slot: [digest, [_to_text(told) for told in sets]]
            for slot, (digest, sets) in self._last.items()
        }
        about = {"sets": self._sets, "last": last, "newest": _to_text(self.newest)}
        save_checkpoint(store.directory / "sets", arrays, about, store.disk)


def _to_text(members: SetMembers) -> list[list[Any]]:
    return [[n, f"{f:016x}"] for n, f in members.items()]


def _from_text(told: list[list[Any]]) -> dict[int, int]:
    return {n: int(f, 16) for n, f in told}
