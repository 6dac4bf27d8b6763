"""The server's end: a `Federation` whose workers are reached by bytes through a `Transport`.

`emfed.fit` and `Run` drive it like any other. docs/protocol.md states its rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from pathlib import Path
from typing import Any, final

import numpy as np

from emfed.algorithms import EM
from emfed.algorithms.steps import check_bits, from_lattice, no_room, wrap_check
from emfed.core.errors import (
    CheckpointError,
    ParticipationError,
    SettingsError,
    WireError,
    check_count,
    check_range,
    check_type,
)
from emfed.core.noise import SITES_DRAW
from emfed.core.privacy import Privacy
from emfed.core.protocols import (
    Algorithm,
    Federation,
    FloatArray,
    IntArray,
    Lattice,
    Model,
    Names,
    Opening,
    Phase,
    Question,
    Replies,
    Request,
    WorkerStates,
    at_origin,
)
from emfed.core.registry import plain
from emfed.core.storage import DISK, Disk
from emfed.core.wire import (
    NEWS,
    Header,
    Kind,
    Message,
    Reason,
    RequestBody,
    decode_bundle,
    decode_floats,
    decode_reply,
    encode_bundle,
    encode_count,
    encode_floats,
    encode_question,
    encode_request,
    encode_text,
    floats_size,
    numbers_size,
    read_json,
    steps_size,
)
from emfed.models import build_model
from emfed.models.binding import Bound, extra_owners, flatten, of_columns, told_parameters
from emfed.models.bounded import Asked
from emfed.models.clusters import Buckets
from emfed.network import texts
from emfed.network.connection import Connection, logger
from emfed.network.inprocess import answer_width
from emfed.network.masking import (
    SMALLEST_SET,
    encode_roster,
    encode_set,
    next_numbers,
    packed_size,
    sum_words,
    unpack_words,
)
from emfed.network.membership import Members, RollCall, new_run, reasons
from emfed.network.own_clusters import decode_clusters
from emfed.network.plausible import (
    MOST_ROWS,
    impossible_answer,
    impossible_statistics,
    impossible_upload,
)
from emfed.network.scoring import SCORES
from emfed.network.site import mark
from emfed.network.sums import (
    FIRST_QUESTION,
    PRIVATE_BITS,
    WEIGHT,
    Opened,
    Shape,
    add_up,
    answer_shape,
    encode_lattice,
    from_fixed,
    opening_shape,
    private_shape,
    shape_size,
    upload_shape,
)
from emfed.network.transport import Transport

MOST_EVALUATIONS = 1 << 40
"""Evaluations of a reply: a worker that claims more must not end the run by its limit on epochs."""
LAST_PHASE, LAST_QUESTION = 60_000, 2 * FIRST_QUESTION - (1 << 20)
"""Phases have 16 bits, questions four bytes; a number that a worker made up must leave some."""
QUESTIONS_AT_ONCE = 1024
"""Numbers of questions that the server writes down as used, so that few questions wait for that."""
ASKED_ANEW = 3
"""Times that a question is asked where masks do not cancel: a disk that is lost in between changes
keys."""
SUMS_BETWEEN = 20
"""Sums after which another one may be given up at once: a site that says no to each must not reset
everybody's memory with it."""
STRANGERS = (Reason.UNKNOWN_RUN, Reason.OTHER_INSTANCE)
"""Refusals that say hello helps."""


class MasksDiffer(WireError):
    """A whole set answered, and its masks did not cancel."""


@final
@dataclass
class _Asked:
    """Who is asked for a masked answer, with what; and whose memory turned out to be lost."""

    numbers: list[int]
    messages: Callable[[Collection[int]], dict[str, Message]]
    lost: set[int] = field(default_factory=set)
    remembers: bool = False
    """Whether an answer follows from a memory: then who lost its disk does not answer."""


@final
class RemoteFederation(Federation):
    """Workers elsewhere, which a transport reaches.

    With a ``directory``, and a checkpoint of the `Run` written every round, a server that was
    killed goes on where it was.

    Parameters
    ----------
    transport : Transport
        What carries messages to the sites.
    directory : str or Path, optional
        Where the server keeps who is in the run.
    deadline : float
        A message is answered within so many seconds or counts as lost.
    minimum : int
        The answers that a round needs (or all, if fewer are asked): those missing are asked again.
    attempts : int
        How often they are asked in all; then `ParticipationError` ends the run, which can be
        resumed.
    pause : float
        The seconds between the first two attempts; each pause is twice as long as the one before.
    columns : sequence of str, optional
        The columns that every worker must have, by default those of most workers.
    masks : bool, optional
        Whether fits that do not say mask their sums; None is masks between machines with three
        sites or more.
    disk : Disk
        What writes files; tests put in one that fails.

    Examples
    --------
    >>> import numpy as np
    >>> import emfed
    >>> rows = np.sin(np.arange(120.0)).reshape(40, 3)
    >>> rules = emfed.network.SiteRules(unmasked=True)
    >>> sites = {
    ...     "a": emfed.network.Site(rows[:20], "site-a", rules=rules),
    ...     "b": emfed.network.Site(rows[20:], "site-b", rules=rules),
    ... }
    >>> with emfed.network.RemoteFederation(emfed.network.LocalTransport(sites)) as federation:
    ...     emfed.fit(emfed.gaussian_mixture(1, "diag"), federation).converged
    True
    """

    def __init__(
        self,
        transport: Transport,
        directory: str | Path | None = None,
        *,
        deadline: float = 60.0,
        minimum: int = 1,
        attempts: int = 5,
        pause: float = 1.0,
        columns: Names = None,
        masks: bool | None = None,
        disk: Disk = DISK,
    ) -> None:
        check_type("transport", transport, Transport, "LocalTransport({'a': Site(...)})")
        check_range("deadline", deadline, 0, np.inf, open_low=True)
        self.minimum = check_count("minimum", minimum)
        self.attempts = check_count("attempts", attempts)
        self.columns = None if columns is None else tuple(columns)
        self._wants_masks = masks
        self.directory, self.disk = None if directory is None else Path(directory), disk
        self.members = Members(new_run())
        check_range("pause", pause, 0, np.inf, open_high=True)
        self._line = Connection(transport, float(deadline), self.attempts, float(pause))
        self._roll = RollCall(self._line)
        self._bound: Bound | None = None
        self._model: Model | None = None
        self._algorithm: Algorithm | None = None
        self._seed, self._phase, self._settings = 0, 0, b""
        self._numbers: dict[str, int] = {}
        self._knows: dict[str, set[Kind]] = {}
        self._last_set: Mapping[int, int] = {}
        self._due: dict[int, int] = {}
        """The number with which each site is ready next, from the last set that it was in."""
        self._steps: dict[int, bytes] = {}
        self._told_in = 0
        """The phase under whose number the constants are told."""
        self._out: set[int] = set()
        self._missed: IntArray = np.empty(0, dtype=np.int64)
        self.overtaken = False
        self._asked: tuple[int, int, int, set[int], int] = (-1, -1, -1, set(), 0)
        self._denied: set[str] = set()
        """Who does not answer for now, in the last exchange."""
        self._sums_since = SUMS_BETWEEN
        """Sums since one was given up."""
        self._question = FIRST_QUESTION
        """The number of the last question; sites take those with a lower one for old."""
        if self.directory is not None:
            disk.make_directory(self.directory)

    @property
    def refusals(self) -> dict[str, str]:
        """Workers that are not, or no longer, in the run, and why."""
        return {**self._line.transport.shut_out(), **self._line.refusals}

    @property
    def dismissed(self) -> dict[str, str]:
        """The workers who are out for good."""
        return dict(self._line.refusals)

    def reachable(self) -> list[str]:
        """Keys of the workers that can be reached now, in the run or not."""
        return self._line.transport.workers()

    @property
    def masks_by_default(self) -> bool:
        """Masks as it was told; or between machines, with three sites or more."""
        transport = self._line.transport
        if self._wants_masks is not None:
            return self._wants_masks
        return transport.between_machines and len(transport.workers()) >= SMALLEST_SET

    def greet(self, keys: Sequence[str]) -> list[str]:
        """Say hello to workers that are not in the run; tell those that answer hello as its members
        did."""
        return self._roll.greet(self.members, keys)

    @property
    def outside(self) -> dict[str, int]:
        """Bytes up and down of workers that are not in the run, which no ledger holds."""
        return self._line.traffic.outside

    # The opening.

    @property
    def size(self) -> int:
        """The number of workers in the run."""
        return len(self.members.keys)

    @property
    def carries_bytes(self) -> bool:
        """Every message is bytes."""
        return True

    def _path(self, name: str) -> Path | None:
        return None if self.directory is None else self.directory / name

    def open(self, model: Model, columns: Names = None, rounded: bool = False) -> Opening:
        """Say hello to everyone who can be reached; or go on with those of before a crash."""
        description = plain(model.describe())
        path, traffic = self._path("members"), self._line.begin()
        self._bound, self._algorithm, self._steps = None, None, {}
        if path is not None and self.disk.read(path) is not None:
            self.members = Members.load(path, self.disk)
            self.disk.settle(path)
            if self.members.description != description:
                raise CheckpointError(
                    f"{path} belongs to a run of another model: use that, or another folder."
                )
            if texts.privacy_of(read_json(self.members.settings[0])) != self._roll.privacy:
                raise CheckpointError(
                    f"{path} belongs to a run with another epsilon or delta: use those, or another "
                    "folder."
                )
            traffic.open(self.members.keys, self.members.traffic)
            self._know_members()
        else:
            wanted = self.columns if columns is None else tuple(columns)
            # What workers could not build is refused here, and at once.
            of_columns(build_model(description), wanted)
            before = self.members.keys
            self._meet(model, description, wanted, rounded)
            self._note_changes(before)
            self.members.traffic = traffic.open(self.members.keys)
            self._keep_members()
        self.masks = self._roll.masks = bool(self.members.roster)
        if self._roll.privacy is not None:
            return Opening(self.members.counts, {}, self.members.columns, self.members.keys)
        return self.members.opening

    def _meet(self, model: Model, description: Any, columns: Names, rounded: bool) -> None:
        """Say hello to all, and hear what they tell together.

        Who joins and then refuses its part of the sum is done without: the others open anew, under
        another number, since they joined one another's roster.
        """
        least = max(self.minimum, SMALLEST_SET) if self.masks else self.minimum
        wanted = None if columns is None else tuple(columns)
        self._roll.masks, self._roll.uniform = self.masks, self.uniform
        while True:
            self.members = self._roll.gather(new_run(), description, wanted, least, model, rounded)
            self._know_members()
            if self._roll.privacy is not None:
                self.members.effective = float(self.size)  # nothing was added up yet
                return
            if not self.masks:
                return
            try:
                self._add_up_opening(self.members)
            except ParticipationError:
                if not self.dismissed.keys() & {*self.members.keys}:
                    raise
            else:
                return

    def open_private(
        self,
        model: Model,
        columns: Names,
        privacy: Privacy,
        masks: bool | None = None,
        noise_seed: int | None = None,
    ) -> tuple[int, tuple[str, ...] | None, Sequence[str] | None]:
        if noise_seed is not None:
            raise SettingsError(SITES_DRAW)
        wanted = self._wants_masks if masks is None else masks
        several = len(self._line.transport.workers()) >= SMALLEST_SET
        self.masks, self._roll.privacy = several if wanted is None else wanted, privacy
        try:
            opening = self.open(model, columns)
        finally:
            self._roll.privacy = None
        return int(prod(self.members.shapes["mean"])), opening.columns, opening.names

    def release(self, asked: Asked, purpose: str, number: int) -> IntArray:
        """Masked, over everybody: a sum of fewer would have less noise than was counted on.

        Without masks each site's answer has all of the noise, and they are added up here.
        """
        about, numbers = asked.describe()
        body = encode_question("private", about, encode_floats(numbers))
        if self.masks:
            total: IntArray = self._ask_all(purpose, body, (), private_shape(asked.size))[1][0]
            return total
        told = self._each(purpose, body, packed_size(asked.size, PRIVATE_BITS))
        return sum_words([unpack_words(t, asked.size, PRIVATE_BITS) for t in told], PRIVATE_BITS)

    def _each(self, purpose: str, body: bytes, size: int) -> list[bytes]:
        """Everybody's own answer of so many bytes to a question; raises unless all came."""
        self._next_question()
        found: dict[int, bytes] = {}

        def take(key: str, kind: Kind, told: bytes) -> bool:
            fits = kind is Kind.ANSWER and len(told) == size
            if fits:
                found[self._numbers[key]] = told
            return fits

        for _ in self._line.tries():
            left = [n for n in range(self.size) if n not in found]
            asked = self._everyone(body, ()).messages(left)
            asked = {key: told for key, told in asked.items() if key not in self.refusals}
            self._line.ahead = {}
            self._rejoin(self._collect(purpose, asked, take))
            self._catch_up(len(asked))
            if len(found) == self.size:
                return [found[n] for n in sorted(found)]
            if any(key in self.refusals for key in self.members.keys):
                break
        raise ParticipationError(
            f"{purpose}: {len(found)} of {self.size} sites answered, and a private run needs all "
            f"of them (refusals: {self.refusals or 'none'}). The run can be resumed when they are "
            "back."
        )

    def _next_question(self) -> None:
        """Number a question: higher than any before in this run, by any process of the server."""
        self._question += 1
        if self._question > self.members.questions:
            self.members.questions = self._question + QUESTIONS_AT_ONCE
            self._keep_members()

    def _know_members(self) -> None:
        self._question = self.members.questions
        self._numbers = {key: number for number, key in enumerate(self.members.keys)}
        self._knows = {key: set() for key in self.members.keys}
        self._last_set, self._due = {}, {}

    def _add_up_opening(self, members: Members) -> None:
        """Note the number of rows and the summary of all who are here, from one masked sum."""
        shapes = members.shapes
        body, asked = encode_question("opening", {}, b""), opening_shape(shapes)
        who, sums = self._ask_all("opening", body, (), asked)
        width = int(np.prod(shapes.get("mean", (0,))))
        owners = extra_owners(
            of_columns(build_model(members.description), members.columns), width
        ).tolist()
        uniform = texts.is_uniform(members.settings[0])
        try:
            found = Opened.of(sums[0], shapes, owners, uniform)
            if not len(who) <= found.rows < MOST_ROWS:
                raise WireError(f"{len(who)} workers have {found.rows} rows together.")
        except (WireError, OverflowError) as error:
            raise ParticipationError(
                f"what the sites told of their rows cannot be: {error} One of them is broken or "
                "lies, and a sum does not tell which: ask their owners."
            ) from None
        each, rest = divmod(found.rows, len(who))
        members.counts, members.effective = np.zeros(self.size, dtype=np.int64), found.effective
        members.counts[who] = each + (np.arange(len(who)) < rest)
        if WEIGHT in shapes:  # rows have weights, or sites count alike
            totals = np.where(members.counts > 0, found.total / len(who), 0.0)
            members.totals = None if found.total == found.rows else totals
        members.values = np.tile(flatten(found.whole), (self.size, 1))

    def open_again(self) -> Opening:
        """The sum is asked for anew, over those who are here.

        It is kept apart from everyone's, by which a checkpoint is known, for whoever reads the
        statistics of that checkpoint (`emfed.fitting.serving`).
        """
        here, path = replace(self.members), self._path("members-here")
        self._add_up_opening(here)
        if path is not None:
            here.save(path, self.disk)
        return here.opening

    def _note_changes(self, before: Sequence[str]) -> None:
        """Say who left and who came since the fit before on this federation, if there was one."""
        now = self.members.keys
        gone, new = ([k for k in a if k not in b] for a, b in ((before, now), (now, before)))
        if before and (gone or new):
            logger.warning(
                "since the last fit left: %s; came: %s", gone or "nobody", new or "nobody"
            )

    def close(self) -> None:
        """Close the transport."""
        self._line.transport.close()

    def _keep_members(self) -> None:
        path, members = self._path("members"), self.members
        if members.roster and members.effective is None:
            return  # the sum of the opening is not known yet: a crash begins it anew
        if path is not None:
            members.save(path, self.disk)

    def attach(self, ledger: Any) -> None:
        """Charge everything to this ledger."""
        self._line.traffic.attach(ledger)

    def bind(self, bound: Bound) -> None:
        """Workers are told the constants with the first message that needs them.

        Constants that may differ from what workers know come under a number that is new to all,
        and is on disk before anyone is told.
        """
        if self._bound is not None or self.members.phase:
            self.members.phase += 1
            self._keep_members()
        self._bound, self._told_in = bound, self.members.phase
        for known in self._knows.values():
            known.discard(Kind.CONSTANTS)

    @property
    def gone(self) -> IntArray:
        """Members that were dismissed or refused for good."""
        out = [n for key, n in self._numbers.items() if key in self.refusals]
        return np.array(out, dtype=np.int64)

    @property
    def missed(self) -> IntArray:
        return self._missed

    def leave_out(self, workers: IntArray) -> None:
        self._out = set(workers.tolist())

    @property
    def returned(self) -> IntArray:
        there, keys = {*self._line.transport.workers()}, self.members.keys
        back = [n for n in self._out if keys[n] in there and keys[n] not in self.refusals]
        return np.array(sorted(back), dtype=np.int64)

    @property
    def last_phase(self) -> int:
        """The last phase as it is on disk: written before anyone is told."""
        return self.members.phase

    def begin(self, phase: Phase) -> None:
        """Settings go with the first request; a worker's state is its own affair."""
        assert self._bound is not None
        if phase.number > self.members.phase:
            self.members.phase = phase.number
            self._keep_members()
        self._model, self._algorithm = self._bound.view(phase.view), phase.algorithm
        self._seed, self._phase = phase.seed, phase.number
        self._settings = encode_text(texts.settings(phase))
        self._steps = {}
        for known in self._knows.values():
            known.discard(Kind.SETTINGS)

    # Messages to members.

    def _mark(self, number: int) -> int:
        return mark(self.members.settings[number], self.members.instances[number])

    def _header(self, kind: Kind, number: int, round_: int) -> Header:
        return Header(kind, self.members.run, round_, number, self._mark(number))

    def _with_news(self, message: Message, need: Sequence[Kind]) -> Message:
        """A message, after what its receiver must know and perhaps does not."""
        header, body = message
        told = {Kind.SETTINGS: self._settings}
        if self.masks:
            entries = encode_roster(self.members.roster)
            told[Kind.ROSTER] = encode_count(self.members.rosters) + entries
        need = [*(k for k in need if k is not Kind.ROSTER), *([Kind.ROSTER] if self.masks else [])]
        news = [kind for kind in need if kind not in self._knows[self.members.keys[header.worker]]]
        if not news:
            return message
        if Kind.CONSTANTS in news:
            assert self._bound is not None
            told[Kind.CONSTANTS] = encode_count(self._told_in) + self._bound.wire
        parts = [*((kind, told[kind]) for kind in news), (header.kind, body)]
        return replace(header, kind=Kind.BUNDLE), encode_bundle(parts)

    @property
    def _familiar(self) -> set[str]:
        """The workers who know the run and their number in it: told in the short form."""
        return {key for key, known in self._knows.items() if Kind.CONSTANTS in known}

    def _rejoin(self, keys: Iterable[str]) -> set[int]:
        """Say hello to those who know nothing of the run; gives back those who lost their disk."""
        numbers = [self._numbers[key] for key in dict.fromkeys(keys)]
        if not numbers:
            return set()
        lost = self._roll.again(self.members, numbers)
        if len(lost):  # its key is another now
            self._tell_roster()
        for number in numbers:
            self._knows[self.members.keys[number]] = set()
        return set(lost.tolist())

    def _tell_roster(self) -> None:
        """Everybody is to get the keys of all, under a new number that is on disk before."""
        self.members.rosters += 1
        self._keep_members()
        for known in self._knows.values():
            known.discard(Kind.ROSTER)

    # Rounds.

    def keep_step(self, round_: int, step: bytes) -> None:
        """Keep steps as long as those since are shorter than the statistics."""
        assert self._model is not None
        if self._algorithm is None or not self._algorithm.broadcasts_steps:
            return
        self._steps[round_] = step
        full, kept = floats_size(self._model.layout.size), 0
        for number in sorted(self._steps, reverse=True):
            kept += len(self._steps[number])
            if kept > full:
                del self._steps[number]

    def _request(self, request: Request, position: int) -> Message:
        """One worker's request: the statistics, or the steps since its last round if shorter."""
        number, since = int(request.workers[position]), int(request.accepted[position])
        told = request.statistics
        assert self._model is not None
        if at_origin(self._model, request.statistics):
            told = told[:0]
        header = replace(
            self._header(Kind.REQUEST, number, request.round),
            generation=request.generation,
            phase=self._phase,
        )
        rounds = range(since, request.round)
        body = RequestBody(since, request.kind, told)
        if since >= 0 and all(r in self._steps for r in rounds):
            steps = tuple(self._steps[r] for r in rounds)
            if steps_size(map(len, steps)) <= numbers_size(told):
                body = RequestBody(since, request.kind, None, steps)
        end = b"" if request.lattice is None else encode_lattice(request.lattice)
        return header, encode_request(request.round, body) + end

    def exchange(self, request: Request) -> Replies:
        """Ask, until everyone or, after the deadline, enough have answered."""
        self.overtaken = False
        if request.lattice is not None and self.masks:
            return self._exchange_masked(request, request.lattice)
        found: dict[int, Replies] = {}
        lost: set[int] = set()
        heard, enough = self._progress(request)
        for _ in self._line.tries():
            asked = {}
            for position, number in enumerate(request.workers.tolist()):
                key = self.members.keys[number]
                if number not in found and number not in lost and key not in self.refusals:
                    asked[key] = self._with_news(self._request(request, position), NEWS)
            self._line.ahead = {}
            strangers = self._listen(request, asked, found, lost)
            self.overtaken = self._catch_up(len(asked))
            if self.overtaken:
                break
            lost |= self._rejoin(strangers)
            heard |= set(found) | lost
            if len(heard) >= enough:
                break
            if len(np.setdiff1d(self.returned, request.workers)):
                raise ParticipationError(
                    f"round {request.round}: {len(heard)} workers answered, {enough} are needed, "
                    "and there are others to ask. The run can be resumed."
                )
        else:
            raise ParticipationError(
                f"round {request.round}: {len(heard)} workers answered, {enough} are needed, and "
                f"{self.attempts} attempts of {self._line.deadline:g} s are over. The run can be "
                "resumed."
            )
        joined = Replies.join([found[n] for n in sorted(found)], len(request.statistics))
        return replace(joined, lost_memory=np.array(sorted(lost), dtype=np.int64))

    def _catch_up(self, asked: int) -> bool:
        """Whether most workers are ahead of this server: then numbers go on after theirs.

        So it is where a backup of the server was put back. One worker alone that says so is not
        believed.
        """
        ahead = self._line.ahead
        if not ahead or 2 * len(ahead) < asked:
            return False
        logger.warning(
            "%s are ahead of this server, as after an old backup was put back: the run goes on "
            "from what the server has, with memories at zero",
            ", ".join(sorted(ahead)),
        )
        phases = [number for number in ahead.values() if number < FIRST_QUESTION]
        questions = [number for number in ahead.values() if number >= FIRST_QUESTION]
        self.members.phase = max(self.members.phase, min(max(phases, default=0), LAST_PHASE))
        self._question = max(self._question, min(max(questions, default=0), LAST_QUESTION))
        self._keep_members()
        return True

    def _exchange_masked(self, request: Request, lattice: Lattice) -> Replies:
        """A round that tells the sum alone: it stands in the row of the first who took part."""
        assert self._model is not None
        heard, enough = self._progress(request)

        def messages(missing: Collection[int]) -> dict[str, Message]:
            out = {}
            for position, number in enumerate(request.workers.tolist()):
                if number in missing:
                    message = self._with_news(self._request(request, position), NEWS)
                    out[self.members.keys[number]] = message
            return out

        q = len(request.statistics)
        if len(request.workers) < SMALLEST_SET:  # too few were drawn: nobody has a say
            return replace(Replies.empty(q), energies=np.empty(0))
        asked = _Asked(request.workers.tolist(), messages, remembers=True)
        shape, least = upload_shape(lattice, q), max(enough, SMALLEST_SET)
        try:
            members, sums = self._add_up(request.purpose, asked, shape, least)
        except MasksDiffer as error:
            logger.warning("round %d: %s", request.round, error)
            self._steps = {}  # sites that follow steps may differ in S: it is sent in full
            self._tell_roster()
            members, sums = [], []
        heard |= {*members, *asked.lost}
        lost = np.array(sorted(asked.lost), dtype=np.int64)
        if not members:
            return replace(Replies.empty(q), lost_memory=lost, energies=np.empty(0))
        energy = float(sums[1][0])
        told = int(sums[2][0]) % (1 << check_bits(lattice))
        if wrap_check(sums[0].tolist(), lattice) != told:
            return no_room(request, q, energy, lost)
        workers, n = np.array(members, dtype=np.int64), len(members)
        assert request.weights is not None
        first = request.weights[np.searchsorted(request.workers, workers[0])]
        values = np.zeros((n, q))
        values[0] = from_lattice(self._model, self._seed, request, workers, sums[0]) / first
        return Replies(
            workers=workers,
            rounds=np.full(n, request.round),
            values=values,
            rates=np.full(n, lattice.rate),
            evaluations=self.members.counts[workers],
            bytes_up=np.full(n, shape_size(shape)),
            lost_memory=lost,
            energies=np.array([energy, *[0.0] * (n - 1)]),
        )

    def _ask_all(
        self, purpose: str, body: bytes, need: Sequence[Kind], shape: Shape
    ) -> tuple[list[int], list[Any]]:
        """The sum of the answers of all who are here; asked anew where keys changed meanwhile."""
        for _ in range(ASKED_ANEW):
            self._next_question()
            asked = self._everyone(body, need)
            try:
                who, sums = self._add_up(purpose, asked, shape, len(asked.numbers))
                if who:
                    return who, sums
            except MasksDiffer as error:
                logger.warning("%s: %s", purpose, error)
                self._tell_roster()
            if self.overtaken and self._bound is not None:
                self.bind(self._bound)
        raise ParticipationError(
            f"{purpose}: the masks of {ASKED_ANEW} sums did not cancel. The run can be resumed."
        )

    def _everyone(self, body: bytes, need: Sequence[Kind]) -> _Asked:
        """A question to all members who are here."""

        def messages(missing: Collection[int]) -> dict[str, Message]:
            out = {}
            for number in missing:
                header = self._header(Kind.QUESTION, number, self._question)
                out[self.members.keys[number]] = self._with_news((header, body), need)
            return out

        return _Asked([n for n in range(self.size) if n not in self._out], messages)

    def _add_up(
        self, purpose: str, asked: _Asked, shape: Shape, least: int
    ) -> tuple[list[int], list[Any]]:
        """The sum of masked answers over all who are asked, and who they are; of nobody if some are
        missing (`missed`) or lost their memory.

        First everyone says that it is ready; then all get told so, and answer. A sum without those
        who are missing would tell of them, beside the sums before: who comes or goes is for the
        session to decide, once and for good.
        """
        ready, fresh = self._await_ready(purpose, asked)
        answers, told = dict[int, bytes](), {*fresh}
        if len(fresh) == len(asked.numbers):
            answers = self._take_masked(purpose, ready, fresh, asked.lost)
            for number in [n for n in answers if len(answers[n]) != shape_size(shape)]:
                self._line.dismiss(
                    self.members.keys[number],
                    f"its masked answer has {len(answers.pop(number))} bytes where "
                    f"{shape_size(shape)} are due, as of another release of emfed: install the "
                    "server's release there, or the newer one at both.",
                )
            told = {*answers}
        gone = [n for n in asked.numbers if n not in told and n not in asked.lost]
        self._missed = np.array(gone, dtype=np.int64)
        if self.overtaken:
            return [], []
        if len(answers) == len(asked.numbers):
            sums = add_up([answers[n] for n in sorted(answers)], shape)
            if sums is None:
                raise MasksDiffer("masks did not cancel: sites were asked different things.")
            self._sums_since += 1
            return sorted(answers), sums
        if not asked.lost and len(told) < max(least, SMALLEST_SET):
            why = reasons(self._line.objections | self.refusals)
            mend = "What these sites say is for their owners to mend; the server asks again."
            if not self._line.objections:
                mend = (
                    "The run can be resumed when they are back; fewer than three have no sum: let "
                    "another site join, or run without masks, which every site must allow in its "
                    "rules."
                )
            raise ParticipationError(
                f"{purpose}: {len(told)} of {len(asked.numbers)} sites are there, and a masked sum "
                f"needs {max(least, SMALLEST_SET)}. {mend}{why}"
            )
        return [], []

    def _await_ready(
        self, purpose: str, asked: _Asked
    ) -> tuple[dict[int, Message], dict[int, int]]:
        """Return the messages of those who are ready, and the fresh number that each named."""
        ready: dict[int, Message] = {}
        fresh: dict[int, int] = {}
        keys = self.members.keys
        self._line.objections, self.overtaken = {}, False
        for _ in self._line.tries():
            missing = [n for n in asked.numbers if n not in fresh and n not in asked.lost]
            messages = asked.messages([n for n in missing if keys[n] not in self.refusals])
            self._line.ahead = {}
            lost = self._rejoin(self._take_ready(purpose, messages, fresh, asked.lost))
            if asked.remembers:  # who lost its disk has other keys now, and no memory
                asked.lost |= lost
            self.overtaken = self._catch_up(len(messages))
            ready |= {self._numbers[k]: m for k, m in messages.items() if self._numbers[k] in fresh}
            out = {*fresh, *asked.lost, *(n for n in missing if keys[n] in self.refusals)}
            if self.overtaken or out.issuperset(missing):
                break
        return ready, fresh

    def _collect(
        self,
        purpose: str,
        messages: Mapping[str, Message],
        take: Callable[[str, Kind, bytes], bool],
        waits: Collection[Reason | None] = (None, Reason.OLD),
    ) -> list[str]:
        """Deliver, and offer answers to ``take`` until it has taken one of each worker.

        ``waits`` are refusals after which a worker may still answer. Returns those who know
        nothing of the run.
        """
        strangers: list[str] = []
        waiting, self._denied = set(messages), set()
        for key, kind, body in self._line.deliver(purpose, messages, self._familiar):
            if kind is Kind.REFUSAL:
                reason = self._line.heed(key, body)
                strangers += [key] if reason in STRANGERS else []
                self._denied |= {key} if reason is Reason.NOT_NOW else set()
                waiting -= {key} if reason not in waits else set()
            elif key in waiting and take(key, kind, body):
                waiting.discard(key)
            if not waiting:
                break
        return strangers

    def _take_ready(
        self,
        purpose: str,
        messages: dict[str, Message],
        fresh: dict[int, int],
        lost: set[int],
    ) -> list[str]:
        """Who is ready, by its fresh number; returns those who know nothing of the run."""
        due = self._due

        def take(key: str, kind: Kind, body: bytes) -> bool:
            if kind is Kind.LOST_MEMORY:
                lost.add(self._numbers[key])
            elif kind is Kind.READY and len(body) in (0, 8):
                number = self._numbers[key]
                if body or number in due:  # who says no number that is known is asked again
                    fresh[number] = int.from_bytes(body, "little") if body else due[number]
                if messages[key][0].kind is Kind.BUNDLE:
                    self._knows[key] |= {*self._news_of(messages[key])}
            else:
                return False
            return True

        return self._collect(purpose, messages, take)

    @staticmethod
    def _news_of(message: Message) -> list[Kind]:
        return [kind for kind, _ in decode_bundle(message[1])[:-1]]

    def _take_masked(
        self,
        purpose: str,
        ready: Mapping[int, Message],
        members: Mapping[int, int],
        lost: set[int],
    ) -> dict[int, bytes]:
        """Masked answers of a set, by number: of all of it, or of those who still answer.

        Who lost its answer, or its disk, since it was ready ends the set: the others have told
        theirs for this one alone, so all are asked something new.
        """
        answers: dict[int, bytes] = {}
        # Who answers takes its next number from this set, whether or not all others answer.
        keys, last, self._last_set = self.members.keys, self._last_set, dict(members)
        due, short = next_numbers(last), encode_set(members, last)
        self._due |= next_numbers(members)
        whole = encode_set(members)

        def take(key: str, kind: Kind, told: bytes) -> bool:
            if kind is Kind.MASKED:  # and not the word that it is ready, once more
                answers[self._numbers[key]] = told
            elif kind is Kind.LOST_MEMORY:
                lost.add(self._numbers[key])
            return kind in (Kind.MASKED, Kind.LOST_MEMORY)

        for attempt in self._line.tries():
            missing = [n for n in members if n not in answers and keys[n] not in self.refusals]
            # Who is ready with the number that follows from the last set knows that set.
            bodies = {n: whole if attempt or due.get(n) != members[n] else short for n in missing}
            messages = {keys[n]: (replace(ready[n][0], kind=Kind.SET), bodies[n]) for n in missing}
            strangers = self._collect(purpose, messages, take, waits=())
            lost |= self._rejoin(strangers)
            if lost or all(n in answers or keys[n] in self.refusals for n in members):
                break
        else:  # an objection may pass: only one that outlasts all attempts ends the set
            if strangers or self._denied:
                self._give_up_set(purpose)
        return answers

    def _give_up_set(self, purpose: str) -> None:
        """Let all be asked something new, since some never answer for this set.

        So it is where an answer was told for a set with an answer that is gone: sites tell it for
        no other set. What else they may object to, they say again.
        """
        if self._sums_since < SUMS_BETWEEN:
            return
        self._sums_since, self.overtaken = 0, True
        logger.warning(
            "%s: a set that sites do not answer for is given up, and all are asked anew, with "
            "memories at zero.%s",
            purpose,
            reasons(self._line.objections),
        )

    def _progress(self, request: Request) -> tuple[set[int], int]:
        """Who answered this round in earlier calls, and how many answers it needs."""
        which = (self._phase, request.round, request.generation)
        if self._asked[:3] != which:
            self._asked = (*which, set(), min(self.minimum, len(request.workers)))
        return self._asked[3], self._asked[4]

    def _listen(
        self, request: Request, asked: dict[str, Message], found: dict[int, Replies], lost: set[int]
    ) -> list[str]:
        """Take what comes; returns those who know nothing of the run."""

        def take(key: str, kind: Kind, body: bytes) -> bool:
            number, reply = self._numbers[key], None
            if kind is Kind.LOST_MEMORY:
                lost.add(number)
            elif kind is Kind.REPLY and (reply := self._read(request, number, body)) is not None:
                found[number] = reply
                self._knows[key] |= {*NEWS}
            return kind is Kind.LOST_MEMORY or reply is not None

        return self._collect(request.purpose, asked, take)

    def _read(self, request: Request, number: int, body: bytes) -> Replies | None:
        """A worker's upload, None if it cannot be read."""
        assert self._model is not None
        assert self._algorithm is not None
        try:
            evaluations, payload = decode_reply(body, int(self.members.counts[number]))
            if evaluations > MOST_EVALUATIONS:
                return None
            mine = request.take(np.flatnonzero(request.workers == number))
            model, seed = self._model, self._seed
            found = self._algorithm.read_upload(model, seed, mine, evaluations, payload)
            if self._impossible(number, request.statistics, found.values):
                return None
            return found
        except WireError as error:
            logger.warning("the answer of %s cannot be read: %s", self.members.keys[number], error)
            return None

    def _impossible(self, number: int, statistics: FloatArray, values: FloatArray) -> bool:
        """Whether no rows can say this; whoever says it is out of the run, with that reason."""
        assert self._model is not None
        share = float(self.members.counts[number] / self.members.counts.sum())
        why = impossible_upload(values, statistics, share)
        if not why and isinstance(self._algorithm, EM):  # it sends exact statistics, less S
            why = impossible_statistics(self._model, statistics + values[0])
        if why:
            self._line.dismiss(self.members.keys[number], why)
        return bool(why)

    # Everyone at once: questions.

    def _hear(self, question: Question, width: int) -> dict[int, FloatArray]:
        """Everyone's answer, by number; raises unless enough came."""
        assert self._bound is not None
        self._next_question()
        found: dict[int, FloatArray] = {}
        members = {k: n for k, n in self._numbers.items() if n not in self._out}
        enough = len(members) if question.everyone else min(self.minimum, len(members))
        for attempt in self._line.tries():
            left = {k: n for k, n in members.items() if n not in found and k not in self.refusals}
            messages = self._questions(question, left, again=attempt > 0)
            self._line.ahead = {}
            self._rejoin(self._take_answers(question, messages, width, found))
            if self._catch_up(len(messages)):
                self.bind(self._bound)
            all_said = all(n in found or k in self.refusals for k, n in members.items())
            if all_said or (attempt and len(found) >= enough):
                break
        if len(found) < enough:
            raise ParticipationError(
                f"a question ({question.purpose}) was answered by {len(found)} of {len(members)} "
                f"workers in {self.attempts} attempts; {enough} are needed (refusals: "
                f"{self.refusals or 'none'}). The run can be resumed."
            )
        self._missed = np.setdiff1d(np.arange(self.size), list(found))
        return found

    def _questions(
        self, question: Question, members: Mapping[str, int], again: bool
    ) -> dict[str, Message]:
        """Address a question to some; who knows the parameters is not told them the first time."""
        view, values = question.view.describe(), told_parameters(question)
        whole, short = (encode_question(question.kind, view, v) for v in (values, values[:0]))
        informed = () if again or question.informed is None else question.informed.tolist()
        messages = {}
        for key, number in members.items():
            header = self._header(Kind.QUESTION, number, self._question)
            body = short if number in informed else whole
            messages[key] = self._with_news((header, body), (Kind.CONSTANTS,))
        return messages

    def _take_answers(
        self,
        question: Question,
        messages: dict[str, Message],
        width: int,
        found: dict[int, FloatArray],
    ) -> list[str]:
        """Take answers to a question; returns those who know nothing of the run."""
        assert self._bound is not None
        model = self._bound.view(question.view)

        def take(key: str, kind: Kind, body: bytes) -> bool:
            if kind is not Kind.ANSWER:
                return False
            try:
                if isinstance(model, Buckets):
                    told = decode_clusters(body, model, self._numbers[key])
                    told = np.append(told, len(body))
                else:
                    told = decode_floats(body, width)
            except WireError as error:
                logger.warning("the answer of %s cannot be read: %s", key, error)
                return False
            if why := impossible_answer(question.kind, model, told):
                self._line.dismiss(key, why)
            else:
                found[self._numbers[key]] = told
            self._knows[key].add(Kind.CONSTANTS)
            return True

        return self._collect(question.purpose, messages, take, waits=())

    def ask(self, question: Question, weights: FloatArray) -> FloatArray:
        """Everyone is asked; those who do not answer after some attempts are left out."""
        assert self._bound is not None
        width = answer_width(question, self._bound.view(question.view))
        if self.masks:
            view = question.view.describe()
            body = encode_question(question.kind, view, told_parameters(question))
            _, sums = self._ask_all(question.purpose, body, (Kind.CONSTANTS,), answer_shape(width))
            return from_fixed(sums[0])[0]
        found = self._hear(question, width)
        numbers = np.array(sorted(found), dtype=np.int64)
        shares = weights[numbers] / weights[numbers].sum() if len(numbers) < self.size else weights
        return np.asarray(shares @ np.stack([found[n] for n in numbers.tolist()]))

    def scores(self, question: Question) -> FloatArray:
        """Each worker's own answer; NaN for what a model cannot tell and who did not answer."""
        assert self._bound is not None
        width = answer_width(question, self._bound.view(question.view))
        out = np.full((self.size, max(width, SCORES) + (question.kind == "clusters")), np.nan)
        if self.masks:  # nobody's own, and so everybody's mean
            out[:, :width] = self.ask(question, np.empty(0))
            return out
        for number, values in self._hear(question, width).items():
            out[number, : len(values)] = values
        return out

    # Worker state stays with the workers.

    def worker_states(self) -> tuple[IntArray, WorkerStates]:
        """None: each worker keeps its own."""
        return np.empty(0, dtype=np.int64), {}

    def restore_states(self, workers: IntArray, rows: WorkerStates) -> None:
        """Nothing to put back."""
        if len(workers):
            raise SettingsError("this checkpoint holds workers' memories: it is not a network's.")
