"""A worker elsewhere: messages in, messages out, and a disk between.

`Site.step` is the whole of it. It keeps nothing in memory that matters: every step reads the disk
and writes it before it answers, so a process may be killed at any point, or be started anew for
each message. It never raises for what a message says: it answers with a refusal and a reason. The
reason names no value of any record; the full story is in the site's own log.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, lru_cache
from math import prod
from pathlib import Path
from typing import Any, final

import numpy as np

from emfed.algorithms import build_algorithm
from emfed.algorithms.steps import check_bits, settled, split_upload
from emfed.core.errors import CheckpointError, DataError, EmfedError, SettingsError, WireError
from emfed.core.privacy import Privacy, discrete_gaussian, epsilon_of, mu_squared_of, price_on
from emfed.core.protocols import (
    WHOLE,
    Algorithm,
    FloatArray,
    Lattice,
    Model,
    Names,
    Opening,
    Oracle,
    Phase,
    Question,
    Request,
    Summaries,
    Task,
    View,
    WorkerStates,
)
from emfed.core.storage import DISK, Disk, write_atomic
from emfed.core.wire import (
    LARGEST_PAYLOAD,
    Header,
    Join,
    Kind,
    Message,
    Reason,
    RequestBody,
    as_json,
    decode_bundle,
    decode_constants,
    decode_count,
    decode_end,
    decode_floats,
    decode_question,
    decode_request,
    decode_text,
    encode_floats,
    encode_join,
    encode_moments,
    encode_refusal,
    encode_reply,
    fingerprint,
    inflate,
    is_grid,
    is_short,
    peek,
    read_json,
    read_short,
    seal_answer,
    seal_refusal,
)
from emfed.data import Workers, as_workers, with_columns
from emfed.data.summing import check_plain, plain_rows, rows_with_gaps
from emfed.data.workers import to_device
from emfed.models import build_model
from emfed.models.binding import (
    Bound,
    candidates_of,
    extra_owners,
    flatten,
    of_columns,
    rounded_columns,
    unflatten,
    unflatten_params,
)
from emfed.models.bounded import Asked, check_private, to_integers, whole_sums
from emfed.models.clusters import Buckets, Clusters
from emfed.models.components import SMALLEST_COMPONENT
from emfed.models.rows import mean_length
from emfed.models.side_by_side import SideBySide
from emfed.network import texts
from emfed.network.addresses import printable
from emfed.network.inprocess import (
    LoopFederation,
    WorkerRows,
    answer,
    check_suits,
    fresh_rows,
    narrow,
    stand_in,
)
from emfed.network.journal import Journal
from emfed.network.masking import (
    RunKeys,
    SiteIdentity,
    decode_roster,
    encode_roster,
    pack_words,
    secret_words,
    to_words,
)
from emfed.network.own_clusters import SMALLEST, encode_clusters
from emfed.network.plausible import MOST_ROWS
from emfed.network.rules import GuardedRows, Refusal, SiteRules, counts_named
from emfed.network.scoring import falls_short, scores_of, scores_width
from emfed.network.self_check import MISFIT, first_rows, suspicions
from emfed.network.spending import Allowance, DescribedRows, Secret, Tally, digest_of_rows
from emfed.network.store import (
    KEPT_RUNS,
    Joined,
    SiteStore,
    State,
    clear_old,
    clear_torn,
    runs_in,
)
from emfed.network.sums import (
    ENERGY_BITS,
    FIRST_QUESTION,
    PRIVATE_BITS,
    WEIGHT,
    NumberBlock,
    SiteSums,
    decode_lattice,
    encode_lattice,
    opening_sums,
    round_subject,
    to_fixed,
    with_weight,
)
from emfed.network.validation import LeftOut, validation_of

logger = logging.getLogger(__name__)
StateReport = Callable[[str, str], None]
"""Called with a kind (``state``, ``sent``) and words."""
NOBODY = Header(Kind.REFUSAL, 0, 0, 0, 0)
LARGEST_STATISTICS = LARGEST_PAYLOAD // 8
"""A model with more could only be named to use up a site's memory."""
SPARSE = "cells"
"""The model whose counts are those of a table of which a site only ever holds its own cells."""
ANSWERS = {
    "statistics": "exact expected statistics",
    "values": "mean log-likelihood and entropy",
    "scores": "mean and spread of the log-likelihood, found and expected, and components' shares",
    "validation": "mean log-likelihoods of rows that were held out, and what adapting gains",
}
"""What the journal calls an answer."""
MORE = "; another run follows"
"""How the journal's line of an end closes where the server goes on."""
RUN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_-]{0,63}")
"""What a run may be called in a site's folder: no path, no file of its own making."""
COVERED = 10.0
"""Epsilon of all private runs together up to which their noise hides a row that came between two
of them; at 10 that is a formality already."""
FEWEST_IN_A_CLUSTER = 2
"""The fewest rows of a cluster that a fit of k-means tells of: one is its own mean."""
NO_ROSTER = (
    "this site has no roster of the others' keys, so it cannot mask. Its people make one from "
    "everybody's NAME.pub (`emfed keys roster`, docs/deployment.md) and join with it; or the run "
    "goes without masks ([privacy] masks = false), which every site's owner must allow (unmasked = "
    "true in its rules)."
)
_ME = np.zeros(1, dtype=np.int64)
_ALONE = np.ones(1)


def mark(settings: str, instance: int) -> int:
    """The fingerprint of all messages to and from one instance of a worker in a run."""
    return fingerprint(settings.encode() + instance.to_bytes(8, "little"))


@lru_cache(maxsize=8)
def _bound(
    settings: str,
    columns: Names,
    constants: bytes,
    shapes: tuple[tuple[str, tuple[int, ...]], ...],
) -> Bound:
    """The model of a run and what binds it; the same for every message of it."""
    unbound = of_columns(build_model(read_json(settings)["model"]), columns)
    return Bound(unbound, np.frombuffer(constants), dict(shapes))


def _bound_of(joined: Joined) -> Bound:
    shapes = tuple(joined.shapes.items())
    return _bound(joined.settings, joined.columns, joined.constants.tobytes(), shapes)


@lru_cache(maxsize=16)
def _phase(text: str) -> Phase:
    content = read_json(text)
    number, since, seed = (_count(content, name) for name in ("phase", "since", "seed"))
    algorithm = build_algorithm(content.get("algorithm"))
    since = 0 if since == number else since
    return Phase(_view(content.get("view", {})), algorithm, seed, number, since)


@lru_cache(maxsize=8)
def _agreed(settings: str, columns: tuple[str, ...] | None) -> bytes:
    """What the join settled, and must be the same at all sites of a masked run: or one of them
    would add up other numbers than the rest, and the server could tell them apart."""
    content = read_json(settings)
    told = {name: content.get(name) for name in ("model", "masks", "privacy", "weights")}
    return hashlib.sha256(as_json(told | {"columns": columns}).encode()).digest()


def _front(header: Header, joined: Joined) -> bytes:
    """What any masked answer is about: masks of other runs, phases and rounds do not cancel."""
    place = struct.pack("<QHQI", header.run, header.phase, header.round, header.generation)
    return place + _agreed(joined.settings, joined.columns)


def _count(content: Mapping[str, Any], name: str) -> int:
    number = content.get(name)
    if type(number) is not int or number < 0:
        raise WireError(f"the settings of a phase give {name}, a count.")
    return number


def _wanted(content: Mapping[str, Any]) -> tuple[str, ...] | None:
    """The columns that a hello asks for, None if it leaves them to the site."""
    columns = content.get("columns")
    if columns is None:
        return None
    if not isinstance(columns, list) or not all(isinstance(name, str) for name in columns):
        raise WireError("a hello names columns in a list.")
    return tuple(columns)


def _loss(content: Mapping[str, Any]) -> float:
    """What rounding of the summary may cost, 0 where it is told as it is."""
    loss = content.get("loss", 0.0)
    if not isinstance(loss, float | int) or not 0 <= loss <= 1:
        raise WireError("a hello that is to round summaries gives loss, from 0 to 1.")
    return float(loss)


def _round_of(kind: Kind, header: Header) -> int | None:
    """The round that an answer belongs to, for the journal; openings and questions have none."""
    in_round = kind in (Kind.REPLY, Kind.MASKED) and header.round < FIRST_QUESTION
    return header.round if in_round else None


def _old(joined: Joined, text: str) -> Refusal:
    """A message of the past, or of a server whose disk is: it is told the last number heard."""
    phase = _phase(joined.phase).number if joined.phase else 0
    return Refusal(Reason.OLD, text, max(phase, joined.told_in))


def _view(description: Any) -> View:
    try:
        return View.read(description)
    except ValueError as error:
        raise WireError(str(error)) from None


@final
class Site:
    """One worker's end of any number of runs.

    Which rows a mini-batch holds follows from a secret on the site's disk.

    Parameters
    ----------
    data : table, str, Path, Source or Stream
        The rows: a table, a frame, the path of a Parquet file, a `Source` or a `Stream`.
    directory : str or Path
        Where the site keeps what it must not lose; it belongs to this site alone.
    rules : SiteRules, optional
        The owner's rules.
    journal : str or Path, optional
        A file that gets a line for every message sent.
    columns : sequence of str, optional
        The columns that servers may choose among.
    disk : Disk
        What writes files; tests put in one that fails.
    device : str, optional
        The device of the passes over rows, such as "cuda".
    identity : SiteIdentity, optional
        The keys with which the site takes part in masked sums; in other runs it does only if its
        rules say so.
    simulated : bool
        Whether the run's seed, which the server knows, takes the place of the site's secret: for
        comparisons with a simulation.

    Examples
    --------
    >>> import numpy as np
    >>> from emfed.network import Site, SiteRules
    >>> site = Site(np.zeros((20, 2)), "north", rules=SiteRules(smallest_rows=20))
    >>> site.rules.smallest_rows
    20
    """

    def __init__(
        self,
        data: Any,
        directory: str | Path,
        *,
        rules: SiteRules | None = None,
        journal: str | Path | None = None,
        columns: Names = None,
        disk: Disk = DISK,
        device: Any | None = None,
        identity: SiteIdentity | None = None,
        simulated: bool = False,
    ) -> None:
        self._simulated = simulated
        self.rules = SiteRules() if rules is None else rules
        self.directory, self.disk = Path(directory), disk
        self._data, self._listed = _read_site(data, columns, device), columns is not None
        copies = [] if self.rules.second_ledger is None else [Path(self.rules.second_ledger)]
        self._tally = Tally(self.directory, disk, copies)
        self._secret = Secret(self.directory, disk)
        self._sums = None if identity is None else SiteSums(identity, self._secret, self.rules)
        self._described = DescribedRows(self.directory, disk)
        self._allowance = Allowance(self.directory, disk, copies)
        self._cleared = False
        self._summaries: dict[int, Mapping[str, FloatArray]] = {}
        """Summaries of runs that said hello to this process."""
        self._allowed: set[str] = set()
        """Hellos of runs that the rules of this process were seen to allow."""
        self.warnings: list[str] = []
        """What the owner should look at in these rows. The server is not told."""
        self._journal = Journal(None if journal is None else Path(journal))
        self.delivered = self.directory / "model.emfed"
        """Where the model file goes that a run hands out at its end."""
        self.approve: Callable[[Mapping[str, Any]], None] | None = None
        """Called with what a hello says; raises `Refusal` where the owner has not agreed."""
        self.over = False
        """Whether the last message said that a run is over."""

    @property
    def _width(self) -> int:
        return _width_of(self._data)

    def _bulk(self, hidden: bool) -> int:
        return bulk_of(self._data, hidden)

    def step(self, message: bytes) -> bytes:
        """Answer one message."""
        header, refusal, self.over = NOBODY, None, False
        try:
            self.disk.make_directory(self.directory)  # a lost disk may come back empty
            with self.disk.lock(self.directory / "lock"):
                if not self._cleared:
                    clear_torn(self.directory, self.disk)
                    self._cleared = True
                header, body = self.read(message)
                kind, answer, note = self._answer(header, body)
        except Refusal as error:
            refusal = error
        except WireError as error:
            refusal = Refusal(Reason.DAMAGED, str(error))
        except SettingsError as error:
            logger.error("%s", error)
            refusal = Refusal(Reason.REFUSED, str(error))
        except DataError as error:
            # The error may name a value, so it is for the owner alone; rows of a stream may be
            # better the next time.
            if (words := _for_owner(error)) not in self.warnings:
                self._warn(header.run, words)
            text = "its data cannot be used by this model; its log says why"
            refusal = Refusal(Reason.REFUSED if header.kind is Kind.HELLO else Reason.FAILED, text)
        except Exception as error:
            refusal = _failed(error, self.directory)
        if refusal is not None:
            kind, note = Kind.REFUSAL, f"{refusal.reason.name.lower().replace('_', ' ')}: {refusal}"
            body = encode_refusal(refusal.reason, refusal.text, refusal.instance)
            reply = seal_refusal(message, body)
        else:
            reply = seal_answer(replace(header, kind=kind), answer)
        self._journal.write(
            run=f"{header.run:016x}",
            kind=kind.name.lower(),
            round=_round_of(kind, header),
            bytes=len(reply),
            content=note,
        )
        return reply

    def _store(self, run: int) -> SiteStore:
        return SiteStore(self.directory / f"{run:016x}", self.disk)

    def read(self, message: bytes) -> Message:
        """Header and body; a short message leaves out what is on this disk."""
        if not is_short(message):
            return peek(message)
        short = read_short(message)
        header = short.told_to(self._runs(short.run))
        if header is None:
            raise Refusal(Reason.UNKNOWN_RUN, "nothing known here fits this message: say hello.")
        return header, short.body

    def _runs(self, low: int) -> Iterator[tuple[int, int, int]]:
        """Run, number and fingerprint of the runs that end in these eight bits, the last first."""
        for path in runs_in(self.directory, self.disk):
            if path.name.endswith(f"{low:02x}"):
                joined = SiteStore(path, self.disk).joined()
                if joined is not None and joined.number >= 0:
                    mine = mark(joined.settings, joined.instance)
                    yield int(path.name, 16), joined.number, mine

    def _answer(self, header: Header, body: bytes) -> tuple[Kind, bytes, str]:
        """The answer to a message, or to the last of a bundle, with what it holds in words."""
        kind = header.kind
        if kind is Kind.BUNDLE:
            *news, (kind, body) = decode_bundle(body)
            for told, content in news:
                self._take(told, header, content)
        if kind is Kind.HELLO:
            return self._hello(header, body)
        if kind is Kind.REQUEST:
            return self._round(header, body)
        if kind is Kind.QUESTION:
            return self._question(header, body)
        if kind is Kind.SET:
            return self._set(header, body)
        if kind is Kind.END:
            return self._end(header, body)
        raise WireError(f"a worker has no answer to a {kind.name.lower()}.")

    def _end(self, header: Header, body: bytes) -> tuple[Kind, bytes, str]:
        """A run is over; the model file is kept, if one came. It is read by nobody here."""
        about, model = decode_end(body)
        runs = [path.name for path in runs_in(self.directory, self.disk)]
        name = about.get("name")
        named = isinstance(name, str) and RUN_NAME.fullmatch(name)  # one of several runs
        earlier = f"{header.run:016x}" in runs[1:] and not named
        if model and not (earlier and self.delivered.is_file()):
            write_atomic(self.delivered, model)
            if named:
                folder = self.delivered.with_name("models")
                folder.mkdir(exist_ok=True)
                write_atomic(folder / f"{name}.emfed", model)
        self.over = about.get("more") is not True and not earlier  # another run follows
        kept = f"took its model, {len(model)} bytes, to {self.delivered}" if model else "no model"
        rounds, stopped = (printable(str(about.get(name))[:80]) for name in ("rounds", "stopped"))
        more = "" if self.over else MORE
        return Kind.END, b"", f"the run ended after {rounds} rounds ({stopped}); {kept}{more}"

    # The opening.

    def _hello(self, header: Header, body: bytes) -> tuple[Kind, bytes, str]:
        """Say who this is and describe the data, or say why not."""
        content = decode_text(body)
        wanted = _wanted(content)
        model, masked = self._admitted(content), content.get("masks") is True
        settings, before = inflate(body), self._store(header.run).joined()
        privacy = texts.privacy_of(content)
        covered = privacy is not None and self._covered(header.run, privacy)
        if before is None or before.settings != settings:  # else it is the same answer again
            self._spend(chosen=False)
            if not covered:  # else noise covers who came, and a no would tell
                self.rules.check_change(self._described.fewest_changed(self._data, self._secret))
                self._described.remember(self._data, self._secret)
        if not self._listed:
            self.rules.check_columns(wanted, self._data.columns)
        data = _arranged(self._data, wanted)
        model = of_columns(model, data.columns)
        opening = LoopFederation(data).open(model) if privacy is None else _unseen(model, data)
        count = int(opening.counts[0])
        summary = _of_one(opening.summaries)
        self.rules.check_opening(count, model.summary_shares(summary))
        uniform = texts.is_uniform(settings)
        if masked:
            given = opening.summaries, opening.totals, opening.counts, uniform
            summary = _of_one(with_weight(*given))
        hidden = masked or covered  # no number of this site alone is told as it is
        # Counts that a description names are a first guess: a chain has the square of its
        # states. Of any number of rows: a refusal tells nothing of how many are here.
        sizes = [one.layout.size for one in _alone(model, MOST_ROWS, summary)]
        self.rules.check_size(sum(sizes), self._bulk(hidden))
        alone = _alone(model, count, summary)
        self.rules.check_statistics(int(count * mean_length(summary)), alone, hidden)
        shapes = {name: values.shape for name, values in summary.items()}
        new = Joined(settings, 0, count, shapes, data.columns, rows=self._digest)
        joined = self._join(header.run, new, privacy)
        if privacy is None:
            others = [pair for pair in self._summaries.items() if pair[0] != header.run]
            self._summaries = {**dict(others[1 - KEPT_RUNS :]), header.run: summary}
        elif missing := rows_with_gaps(data):
            self._warn(header.run, f"{missing} rows have a missing value and are left out")
        weighted = opening.totals is not None and not hidden  # masked, it is in the sum
        about = texts.join_about(data.columns, joined.shapes, weighted)
        if masked:
            mine = encode_roster({0: self._keys(header.run, joined).announcement})
            note = "its columns and its key for masks: no number of any row"
            join = Join(joined.instance, about | {"key": True}, 1, mine)
            return Kind.JOIN, encode_join(join), note
        if privacy is not None:
            join = Join(joined.instance, about | {"private": True}, 1, b"")
            return Kind.JOIN, encode_join(join), "its columns: no number of any row"
        values = flatten(summary)
        numbers = encode_moments(values, rounded_columns(joined.shapes), _loss(content))
        total = None if opening.totals is None else float(opening.totals[0])
        note = f"{count} rows; {', '.join(sorted(summary))}: {len(values)} numbers over all of them"
        join = Join(joined.instance, about, count, numbers, total)
        return Kind.JOIN, encode_join(join), note

    def _admitted(self, content: Mapping[str, Any]) -> Model:
        """Return the model of a hello, if the owner's rules let this site take part at all."""
        masked, privacy = content.get("masks") is True, texts.privacy_of(content)
        check_ask(self.rules, content.get("model"), self._data, masked or privacy is not None)
        if self.approve is not None:
            self.approve(content)
        return self._permitted(content)

    def _permitted(self, content: Mapping[str, Any]) -> Model:
        """Return the model of a run that the owner's rules allow, whatever the rows are."""
        masked, privacy = content.get("masks") is True, texts.privacy_of(content)
        model: Model = build_model(content.get("model"))
        self.rules.check_privacy(privacy)
        if privacy is not None:
            # Of another model the join itself would tell whether rows suit it: a largest code.
            check_private(model)
            check_plain(self._data)
        if not masked and not self.rules.unmasked:
            told = "statistics" if privacy is None else "statistics, with noise"
            raise Refusal(
                Reason.REFUSED,
                "the owner takes part in masked sums alone, and this run tells the server each "
                f"site's own {told}. With three sites or more ask for masks ([privacy] masks); "
                "else every site's owner must allow it (unmasked = true in its rules).",
            )
        if masked and self._sums is None:
            raise Refusal(Reason.REFUSED, NO_ROSTER)
        if content.get("weights") is not None:
            self.rules.check_uniform(content["weights"] == texts.UNIFORM)
        return model

    def _join(self, run: int, new: Joined, privacy: Privacy | None) -> Joined:
        """Keep what this site joins with, under the instance that it has in the run."""
        store = self._store(run)
        before = store.joined()
        if before is not None and before.settings == new.settings:
            if before.count != new.count or before.rows != new.rows:
                raise Refusal(Reason.REFUSED, "its data changed since the run began.")
            store.settle("joined")
            return before
        if before is not None and before.number >= 0:
            raise Refusal(Reason.REFUSED, "this run began with other settings.")
        if before is None:
            store.forget()  # what is left of another instance
        if privacy is not None:
            self._charge(run, privacy)
        instance = int.from_bytes(os.urandom(8), "little") if before is None else before.instance
        new = replace(new, instance=instance)
        store.join(new)
        clear_old(self.directory, store.directory, self.disk)
        return new

    def _covered(self, run: int, privacy: Privacy) -> bool:
        """Whether the noise of a run takes the place of rules on what small differences tell.

        An owner with a ``largest_epsilon`` said how much that may be. Else it is noise by name
        alone once all private runs together cost more than `COVERED`.
        """
        if self.rules.largest_epsilon is not None:
            return True
        total, runs = self._allowance.read()
        mine = runs[f"{run:016x}"].budget if f"{run:016x}" in runs else 0.0
        return total - mine + privacy.mu_squared <= mu_squared_of(COVERED, self.rules.delta)

    def _charge(self, run: int, privacy: Privacy) -> None:
        """Take a run's whole budget off what the owner gives away, before anything is told."""
        rules = self.rules
        if not self._allowance.charge(f"{run:016x}", privacy.mu_squared, rules.largest_cost):
            assert rules.largest_epsilon is not None
            assert rules.largest_cost is not None
            left = max(0.0, rules.largest_cost - self._allowance.read()[0])
            words = f"{epsilon_of(left, rules.delta):.3g} of them are left: ask for less"
            raise Refusal(
                Reason.REFUSED,
                f"the owner gives away epsilon {rules.largest_epsilon:g} over all runs, and about "
                f"{words if left > 0 else 'nothing is left'}.",
            )

    def _private(
        self,
        header: Header,
        described: Mapping[str, Any],
        numbers: bytes,
        about: bytes,
        subject: bytes,
    ) -> tuple[Kind, bytes, str]:
        """Sums over clipped rows with this site's noise, charged before anything of it leaves.

        Without masks nobody else's noise is in the answer: this site's own is all of it.

        The noise follows from the site's secret, its instance in the run, the question and the
        sums. So an answer that is
        asked for again is the same bit for bit, after whatever kill, and is charged once; over
        other rows it has other noise, and is charged.
        """
        joined = self._known(header)[1]
        if texts.privacy_of(read_json(joined.settings)) is None:
            raise Refusal(Reason.REFUSED, "this run was not opened as a private one.")
        asked = Asked.read(described, decode_floats(numbers))
        masked = texts.is_masked(joined.settings)
        if not masked and asked.shares != 1:
            raise WireError("without masks a private answer has the noise of one site.")
        self.rules.check_size(asked.size, self._bulk(True))
        data = self._rows(joined)
        if asked.columns != data.worker(0).shape[1]:
            raise WireError("a private question is about other columns than the run's.")
        self._spend(chosen=False)
        exact = to_integers(asked, whole_sums(asked, plain_rows(data, 0, refuse=False)))
        # A site that forgot the run forgot for which sets it told its answers: it has other noise.
        place = joined.instance.to_bytes(8, "little")
        own = hashlib.sha256(about).digest() + place + exact.astype("<i8").tobytes()
        cost = price_on(asked.step, asked.size, asked.shares)
        name = self._secret.derive("charged", own).hex()[:16]
        if not self._allowance.use(f"{header.run:016x}", cost, name):
            raise Refusal(Reason.REFUSED, "the budget of this private run is used up.")
        noise = discrete_gaussian(asked.size, secret_words(self._secret.derive("noise", own)))
        told, note = (exact + noise, PRIVATE_BITS), f"{asked.size} sums over clipped rows, with"
        if not masked:
            return (
                Kind.ANSWER,
                pack_words(to_words(*told), PRIVATE_BITS),
                f"{note} all of the noise",
            )
        fresh = int.from_bytes(self._secret.derive("fresh", own)[:8], "little")
        least = asked.shares + self.rules.colluders
        note = f"{note} noise, to be added up"
        return self._ready(header, about, subject, [told], note, (least, fresh))

    def _keys(self, run: int, joined: Joined) -> RunKeys:
        """The keys of a masked run, with those of the others as far as they were told."""
        if self._sums is None:
            raise Refusal(Reason.REFUSED, NO_ROSTER)
        keys, told = self._sums.keys(run, joined.instance), self._store(run).roster()
        if told is not None:
            keys.learn(told[decode_count(told)[1] :])
        return keys

    def _set(self, header: Header, body: bytes) -> tuple[Kind, bytes, str]:
        """The answer that waits, masked for the set that the server names."""
        store, joined = self._known(header)
        keys = self._keys(header.run, joined)
        assert self._sums is not None
        if store.roster() is None:
            raise Refusal(Reason.UNKNOWN_RUN, "its roster is lost: say hello.")
        told = self._sums.masked(store, keys, header.worker, header.round, body)
        if told is None:
            return Kind.LOST_MEMORY, b"", "the answer that was ready is lost: no content"
        words, size = told
        return Kind.MASKED, words, f"{len(words)} bytes, masked: a part of the sum of {size} sites"

    def _ready(
        self,
        header: Header,
        about: bytes,
        subject: bytes,
        blocks: Sequence[NumberBlock],
        note: str,
        private: tuple[int, int | None] = (0, None),
    ) -> tuple[Kind, bytes, str]:
        """Keep an answer until the server has named a set.

        Of a ``private`` one: how many sites the set must have, and its fresh number.
        """
        assert self._sums is not None
        store = self._store(header.run)
        told = self._sums.ready(store, header.round, about, subject, blocks, private, header.worker)
        return Kind.READY, told, f"ready: {note}"

    def _waits(self, header: Header, about: bytes) -> tuple[Kind, bytes, str] | None:
        """The same word again, where the answer waits: a repeated message costs no look at rows."""
        assert self._sums is not None
        fresh = self._sums.again(self._store(header.run), header.round, about)
        if fresh is None:
            return None
        return Kind.READY, fresh.to_bytes(8, "little"), "ready, as before"

    def _known(self, header: Header) -> tuple[SiteStore, Joined]:
        """The run a message belongs to, if this is the instance it is meant for."""
        store = self._store(header.run)
        joined = store.joined()
        if joined is None:
            raise Refusal(Reason.UNKNOWN_RUN, "nothing is known here of this run: say hello.")
        if header.fingerprint != mark(joined.settings, joined.instance):
            raise Refusal(
                Reason.OTHER_INSTANCE, "this is for another holder of this key.", joined.instance
            )
        if joined.number not in (-1, header.worker):
            raise WireError(f"a message to worker {header.worker}; this is {joined.number}.")
        self._check_still(joined)
        return store, joined

    def _check_still(self, joined: Joined) -> None:
        """Refuse a run that the rules of this process do not allow, if earlier ones did."""
        if joined.settings in self._allowed:
            return
        content = read_json(joined.settings)
        hidden = content.get("masks") is True or texts.privacy_of(content) is not None
        check_ask(self.rules, content.get("model"), self._data, hidden)
        self._permitted(content)
        self.rules.check_opening(joined.count, np.empty(0))
        if not self._listed:
            self.rules.check_columns(joined.columns, self._data.columns)
        self._allowed = {*list(self._allowed)[1 - KEPT_RUNS :], joined.settings}

    def _take(self, kind: Kind, header: Header, body: bytes) -> None:
        """Constants and settings: kept, if they are news."""
        store, joined = self._known(header)
        if kind is Kind.ROSTER:
            number, start = decode_count(body)
            decode_roster(body[start:])
            if self._sums is not None:
                self._sums.forget_last(store)
            known = store.roster()
            if known is None or (known != body and number >= decode_count(known)[0]):
                store.put_roster(body)
            return
        if kind is Kind.CONSTANTS:
            number, start = decode_count(body)
            constants = decode_constants(body[start:], sum(map(prod, joined.shapes.values())))
            told = replace(joined, constants=constants, number=header.worker, told_in=number)
            if joined.number >= 0:
                same = number == joined.told_in and np.array_equal(joined.constants, constants)
                if not (number > joined.told_in or same):
                    raise _old(joined, "this run told other constants since, or before.")
        else:
            own = {"phase": header.phase, "since": header.phase}
            told = replace(joined, phase=as_json(own | decode_text(body)))
            phase = _phase(told.phase)
            if joined.phase not in ("", told.phase):
                now = _phase(joined.phase).number
                if phase.number < now:
                    return  # long delayed: its request is old too
                if phase.number == now:
                    raise _old(joined, "this phase had other settings before.")
        before, after = ((j.number, j.told_in, j.phase) for j in (joined, told))
        if before != after:
            store.join(told)
        if kind is Kind.CONSTANTS and joined.number < 0:
            self._compare(header.run, told)

    def _compare(self, run: int, joined: Joined) -> None:
        """Compare the rows here with what the run told of all rows, and warn the owner."""
        if run not in self._summaries:
            return  # this process did not hear the hello
        try:
            whole, data = _whole(joined), self._rows(joined)
            masked = texts.is_masked(joined.settings)
            rows = float(joined.constants[0])
            share = self._share(joined, data) if masked else joined.count / rows
            found = suspicions(
                self._summaries[run], whole, share, first_rows(data, 0), joined.columns
            )
        except Exception:  # it looks on: the run does not depend on it
            logger.exception("these rows could not be compared with the others'")
            return
        for words in found:
            self._warn(run, words)

    def _warn(self, run: int, words: str) -> None:
        """Tell the owner, in the log and in the journal, and nobody else."""
        logger.warning("look at these rows: %s", words)
        self.warnings.append(words)
        self._journal.write(run=f"{run:016x}", kind="warning", round=None, bytes=0, content=words)

    def _model(self, joined: Joined, view: View) -> Model:
        """The model that a view names, bound; under the owner's rule on small groups."""
        if joined.number < 0:
            raise Refusal(Reason.UNKNOWN_RUN, "the constants of this run never came: say hello.")
        bound, masked = _bound_of(joined), texts.is_masked(joined.settings)
        self.rules.check_size((view.clusters or 1) * self._width, self._bulk(masked))
        model = bound.view(view)
        if model.layout.size > LARGEST_STATISTICS:
            raise SettingsError(f"{model.layout.size} statistics are more than a message can hold.")
        self.rules.check_size(model.layout.size, self._bulk(masked))
        if masked:
            # Of a sum the unknowns are all values of all rows, and nobody knows whose they are.
            steps = joined.constants[0] * mean_length(_whole(joined))
            self.rules.check_spare(int(steps) * self._width, model.layout.size)
        if isinstance(model, Buckets):  # of a start
            own = SMALLEST_COMPONENT if masked else self.rules.smallest_cluster
            return model.silent_below(self.rules.smallest_group or own)
        if isinstance(model, Clusters) and not masked:  # a sum has a floor of its own
            return model.silent_below(self.rules.smallest_group or FEWEST_IN_A_CLUSTER)
        # What these rows alone cannot have, such as more components than rows, was not judged
        # at the join.
        steps = joined.count * mean_length(_whole(joined))
        for part in model.models if isinstance(model, SideBySide) else [model]:
            self.rules.check_statistics(int(steps), [part], masked=masked)
        return model

    def _rows(self, joined: Joined) -> Workers:
        """The data, in the columns of the run: those that it joined with, to the last row."""
        data = _arranged(self._data, joined.columns)
        if int(data.counts[0]) != joined.count or joined.rows not in ("", self._digest):
            raise Refusal(Reason.REFUSED, "its data changed since the run began.")
        return data

    @cached_property
    def _digest(self) -> str:
        """What tells these rows from others; empty for a stream."""
        return digest_of_rows(self._data, self._secret)

    def _question(self, header: Header, body: bytes) -> tuple[Kind, bytes, str]:
        store, joined = self._known(header)
        kind, described, numbers = decode_question(body)
        masked = texts.is_masked(joined.settings)
        # A private answer costs its noise once: asked anew, under another number, it is the same.
        private = kind == "private"
        front = _front(header, joined)
        if private:
            front = struct.pack("<Q", header.run) + _agreed(joined.settings, joined.columns)
        bound = kind not in ("private", "opening")
        constants = joined.constants.tobytes() if bound else b""
        asked = hashlib.sha256(constants + body).digest()
        about = front + kind.encode() + asked
        if masked:
            self._keys(header.run, joined)
            if (waits := self._waits(header, about)) is not None:
                return waits
        if private:
            return self._private(header, described, numbers, about, asked)
        self._check_open(joined)
        if kind == "opening":
            return self._opening(header, joined, about)
        model, data = self._model(joined, _view(described)), self._rows(joined)
        if kind == "clusters" and masked:
            raise Refusal(Reason.REFUSED, "clusters are one site's own: masked runs do without.")
        if kind == "clusters":
            return self._own_clusters(model, joined, data)
        params = self._asked_at(store, joined, model, _view(described), numbers)
        self._spend(chosen=bool(len(numbers)))
        if self.rules.smallest_group is not None:
            exact = answer(Question("statistics", WHOLE, params), model, data.pieces(_ME), _ALONE)
            GuardedRows.check(model, exact[None], data.counts, self.rules.smallest_group)
        if kind == "scores":
            told = scores_of(model, params, data.pieces(_ME), 1)[0]
            values = told[: scores_width(model)]
            if falls_short(told[None], data.counts)[0]:
                self._warn(header.run, MISFIT)
        elif kind == "validation":
            if masked and (not isinstance(model, SideBySide) or len(model.models) != 2):
                self._check_folds()  # which part a site looks at would follow from its number
            me, total = np.array([joined.number]), float(joined.constants[0])
            values = validation_of(model, params, data, me, total)[0]
        else:
            values = answer(Question(kind, WHOLE, params), model, data.pieces(_ME), _ALONE)
        note = f"{ANSWERS[kind]}: {len(values)} numbers"
        if masked:
            sites = self._keys(header.run, joined).sites
            told = [to_fixed(values, self._share(joined, data), sites)]
            return self._ready(header, about, asked, told, note)
        return Kind.ANSWER, encode_floats(values), note

    def _asked_at(
        self, store: SiteStore, joined: Joined, model: Model, view: View, numbers: bytes
    ) -> Any:
        """Return the parameters of a question, told as statistics, as themselves, or not at all.

        Then they are those of the last round, which a site knows as long as its disk does.
        """
        if is_grid(numbers):
            statistics = decode_floats(numbers, model.layout.size)
            if not model.inside(statistics):
                raise WireError("a question at statistics that no rows have.")
            self._check_components(joined, model, statistics)
            return model.maximize(statistics)
        if numbers:
            return unflatten_params(decode_floats(numbers), model.start(0))
        if texts.is_masked(joined.settings):  # other sites may have been told others in that round
            raise WireError("a question of a masked run brings its parameters.")
        state = store.state() if joined.phase else None
        now = state is not None and state.phase == joined.phase
        if state is None or not now or _phase(joined.phase).view != view:
            raise Refusal(Reason.NOT_NOW, "the parameters of the last round are not here.")
        return model.maximize(state.statistics)

    def _check_components(self, joined: Joined, model: Model, statistics: FloatArray) -> None:
        """Refuse statistics in which a component has few rows of all sites, where that shows."""
        if texts.is_masked(joined.settings) and not texts.is_uniform(joined.settings):
            self.rules.check_components(model, statistics, float(joined.constants[0]))

    def _own_clusters(self, model: Model, joined: Joined, data: Workers) -> tuple[Kind, bytes, str]:
        """Clusters of these rows alone; an empty answer where the owner or a stream has none."""
        if not isinstance(model, Buckets):
            raise WireError("a question about clusters names a view of them.")
        if data.streaming or not self.rules.own_clusters:
            return Kind.ANSWER, b"", "no clusters of its own: nothing"
        self._spend(chosen=False)
        smallest = max(model.inner.smallest, self.rules.smallest_group or SMALLEST)
        told = encode_clusters(model, data, 0, joined.number, smallest)
        note = f"at most {model.most} clusters of its rows, none with fewer than {smallest}"
        return Kind.ANSWER, told, f"{note}: shares and means in {len(told)} bytes"

    @staticmethod
    def _check_open(joined: Joined) -> None:
        """Refuse what has no noise in a private run."""
        if texts.privacy_of(read_json(joined.settings)) is not None:
            raise Refusal(Reason.REFUSED, "this run is private: every answer in it has noise.")

    def _opening(self, header: Header, joined: Joined, about: bytes) -> tuple[Kind, bytes, str]:
        """What the summary of all rows follows from, to be added up."""
        if not texts.is_masked(joined.settings):
            raise WireError("an opening is asked for in a masked run alone.")
        unbound = of_columns(build_model(read_json(joined.settings)["model"]), joined.columns)
        self._spend(chosen=False)
        opening = LoopFederation(self._rows(joined)).open(unbound)
        uniform = texts.is_uniform(joined.settings)
        given = opening.summaries, opening.totals, opening.counts, uniform
        summary = _of_one(with_weight(*given))
        note = f"moments of the columns, to be added up: {', '.join(sorted(summary))}"
        total = joined.count if opening.totals is None else float(opening.totals[0])
        width = int(np.prod(joined.shapes.get("mean", (0,))))
        owners = extra_owners(unbound, width).tolist()
        told = [opening_sums(summary, joined.count, total, owners, uniform)]
        return self._ready(header, about, b"", told, note)

    @staticmethod
    def _share(joined: Joined, data: Workers) -> float:
        """w_i: the part of all rows, or of their weight, that is here; or that of any site."""
        rows, uniform = float(joined.constants[0]), texts.is_uniform(joined.settings)
        if data.row_weights is None and not uniform:
            return joined.count / rows
        each = unflatten(joined.constants[1:], joined.shapes)[WEIGHT]
        if uniform:
            return 1 / max(1, round(rows * float(each[0])))
        return float(data.totals[0]) / (rows * float(each[0]))

    def _spend(self, chosen: bool) -> None:
        """Count a look at the rows, whatever comes of it; refuse one too many."""
        rules = self.rules
        limits = {"answered": rules.largest_rounds, "chosen": rules.largest_choices}
        met = self._tally.spend(limits if chosen else {"answered": rules.largest_rounds})
        if met is not None:
            what = "messages about the rows" if met == "answered" else "parameters of your choice"
            raise Refusal(Reason.REFUSED, f"the owner answers {limits[met]} {what}, no more.")

    # Rounds.

    def _round(self, header: Header, content: bytes) -> tuple[Kind, bytes, str]:
        """One round of the algorithm, written before it is told."""
        store, joined = self._known(header)
        self._check_open(joined)
        if not joined.phase:
            raise Refusal(Reason.UNKNOWN_RUN, "the settings of this run never came: say hello.")
        phase = _phase(joined.phase)
        if header.phase > phase.number:
            raise Refusal(Reason.UNKNOWN_RUN, "the settings of this phase never came: say hello.")
        if header.phase < phase.number:
            raise _old(joined, f"phase {header.phase} is over.")
        self.rules.check_algorithm(phase.algorithm.rows_at_once)
        if phase.view.folds and texts.is_masked(joined.settings):
            self._check_folds()
        model, algorithm = self._model(joined, phase.view), phase.algorithm
        masked, lattice = texts.is_masked(joined.settings), None
        self.rules.check_size(counts_named(algorithm.describe()), self._bulk(masked))
        q = model.layout.size
        if masked:
            self._keys(header.run, joined)
            lattice, content = decode_lattice(content)
        body = decode_request(content, header.round, q)
        state = self._state(store, joined, q)
        lost = Kind.LOST_MEMORY, b"", "memory lost: no content"
        if header.round < state.round:
            raise _old(joined, f"round {header.round} is over; round {state.round} was next.")
        statistics = _told(body, state, model, phase)
        if statistics is None:
            return lost
        if state.round >= 0:
            self.rules.check_step(state.statistics, statistics)
        self._check_components(joined, model, statistics)
        data = self._rows(joined)
        at = settled(statistics) if masked else statistics
        request = Request(
            round=header.round,
            generation=header.generation,
            kind=body.kind,
            statistics=at,
            params=model.maximize(at),
            workers=np.array([joined.number], dtype=np.int64),
            accepted=np.array([body.accepted], dtype=np.int64),
            lattice=lattice,
            weights=np.array([self._share(joined, data)]) if masked else None,
            encode=True,
        )
        new, replies = self._work(header.run, model, phase, state, request, data)
        if len(replies.lost_memory):
            then = replace(new, round=state.round, statistics=state.statistics, links=state.links)
            store.put(then)
            return lost
        if not len(replies.workers):
            raise _old(joined, "a request that was overtaken by another.")
        if new is not state:
            if lattice is not None:
                asked = request.kind.encode() + encode_lattice(lattice) + at.tobytes()
                asked = _front(header, joined) + joined.constants.tobytes() + asked
                new = _linked(state, new, asked + state.phase.encode())
            new = replace(new, statistics=statistics)
            store.put(new)
        else:
            store.settle("state")
        payload = new.rows["payload"][0].tobytes()
        if lattice is not None:
            return self._upload(header, lattice, joined, new, payload)
        evaluations = int(replies.evaluations[0])
        note = f"{len(payload)} bytes for {q} statistics over {evaluations} evaluated rows"
        return Kind.REPLY, encode_reply(evaluations, joined.count, payload), note

    @staticmethod
    def _check_folds() -> None:
        """Refuse models that leave sites out: all sites less some are those some."""
        raise Refusal(
            Reason.REFUSED,
            "a model without single sites, beside one with them, tells what these sites added: "
            "masked runs leave nobody out.",
        )

    def _upload(
        self, header: Header, lattice: Lattice, joined: Joined, state: State, payload: bytes
    ) -> tuple[Kind, bytes, str]:
        """Symbols on the lattice and how long the innovation was, to be added up.

        Masks depend on all that they follow from (`Links`), as it was when they were worked out.
        """
        told = np.frombuffer(payload, dtype=np.int64)
        subject = round_subject(_phase(joined.phase).view, state.statistics)
        subject = hashlib.sha256(joined.constants.tobytes() + subject).digest()
        about = b"round" + state.links.about.encode()
        symbols, energy, check = split_upload(told)
        blocks: list[NumberBlock] = [(symbols, lattice.bits)]
        for number, bits in ((energy, ENERGY_BITS), (check, check_bits(lattice))):
            words = np.array([number], dtype=object if bits > 64 else np.uint64)
            blocks.append((words if bits > 64 else words.view(np.int64), bits))
        note = f"{len(symbols)} statistics, to be added up"
        waits = self._waits(header, about)
        return waits or self._ready(header, about, subject, blocks, note)

    def _state(self, store: SiteStore, joined: Joined, q: int) -> State:
        """What the last round left, of the parts that the phase goes on with; or a fresh state."""
        phase, state = _phase(joined.phase), store.state()
        if state is not None and state.phase == joined.phase:
            return state
        before = None if state is None else _phase(state.phase)
        if state is None or before is None or not 0 < phase.since <= before.number:
            return _fresh(phase.algorithm, q, joined.phase)
        bound = _bound_of(joined)
        places = bound.kept(before.view, phase.view)
        columns = phase.algorithm.state_fields(len(state.statistics))
        rows = narrow(state.rows, columns, places)
        return State(rows, state.round, state.statistics[places], joined.phase, state.links)

    def _work(
        self,
        run: int,
        model: Model,
        phase: Phase,
        state: State,
        request: Request,
        data: Workers,
    ) -> tuple[State, Any]:
        """The algorithm's own worker step, for this worker alone."""
        again = bool(state.rows["pending_round"][0] == request.round)
        if not again:
            self._spend(chosen=state.round < 0)
        check_suits(data, phase.algorithm)
        rows_now = fresh_rows(model, data, request.round, _ME)
        lasting = not data.streaming
        oracle: Oracle = WorkerRows(model, rows_now, _ME, Workers.pieces, request.workers, lasting)
        if not self._simulated:
            oracle.own_seed = self._secret.seed(f"{run:016x} {phase.number}")
        if self.rules.smallest_group is not None:
            oracle = GuardedRows(oracle, model, request.params, self.rules.smallest_group)
        if phase.view.folds:
            oracle = LeftOut(oracle, model, request)
        task = Task(model, phase.seed, state.rows, request, oracle)
        rows, replies = phase.algorithm.worker_step(task)
        if again and len(replies.workers):
            return state, replies
        return State(rows, request.round, request.statistics, state.phase), replies


def _for_owner(error: DataError) -> str:
    """What is wrong with the rows, to somebody who has a file and no Python."""
    words = str(error).removeprefix("worker 'site': ")
    return words.replace("missing=True", "`missing = true` in the server's [model]")


def _failed(error: Exception, directory: Path) -> Refusal:
    """What a site says that cannot answer for now; the log has the rest.

    A full disk is nobody's mistake: words are enough, every round anew. What was spent and told is
    in files; where one is damaged, to begin anew is for the owner to decide.
    """
    disk = isinstance(error, OSError) or isinstance(error.__cause__, OSError)
    if isinstance(error, CheckpointError) and not disk:
        logger.error("%s Without %s the site is one that lost its disk.", error, directory)
        return Refusal(Reason.FAILED, "a file of its memory is damaged; its log says which")
    if isinstance(error, EmfedError) and not disk:  # as at parameters where an E-step gives none
        logger.error("%s", error)
    else:
        told = error if disk else ""
        logger.error("a message could not be answered: %s", told, exc_info=None if disk else error)
    return Refusal(Reason.FAILED, "it could not be worked out here; its log says more")


def _width_of(data: Workers) -> int:
    return max(1, len(data.columns or ()))


def bulk_of(data: Workers, hidden: bool) -> int:
    """Numbers that the data hold, about; none where nobody may learn how many there are.

    A limit that grows with the rows tells their number to whoever asks for ever larger models.
    """
    return 0 if hidden else int(data.counts.sum()) * _width_of(data)


def check_ask(rules: SiteRules, description: Any, data: Workers, hidden: bool) -> None:
    """Refuse a model that the owner does not allow, or that is too large, before it is made."""
    named = isinstance(description, Mapping) and str(description.get("model"))
    if named:
        rules.check_model(named)
    if named != SPARSE:
        rules.check_size(counts_named(description) * _width_of(data), bulk_of(data, hidden))


def _linked(before: State, after: State, asked: bytes) -> State:
    """A state that remembers what its answer was about."""
    was, now = (int(s.rows["committed_round"][0]) for s in (before, after))
    return replace(after, links=before.links.after((was, now), asked))


def _told(body: RequestBody, state: State, model: Model, phase: Phase) -> FloatArray | None:
    """Return S of a request, as it came or by steps from the last round; None if that is lost."""
    if body.statistics is not None:
        if len(body.statistics):
            return body.statistics
        origin = model.origin()
        if origin is None:
            raise WireError("a request has no statistics, and nothing to derive them from.")
        return origin
    if state.round < body.accepted:
        return None
    statistics = state.statistics
    for number, step in enumerate(body.steps[state.round - body.accepted :], state.round):
        statistics = phase.algorithm.follow(model, phase.seed, number, statistics, step)
    return statistics


def _arranged(workers: Workers, columns: tuple[str, ...] | None) -> Workers:
    """Return the worker with these columns in this order; others it may have are left out."""
    try:
        return workers if columns is None else with_columns(workers, columns)
    except DataError as error:
        raise Refusal(Reason.REFUSED, str(error)) from None


def _read_site(data: Any, columns: Names, device: Any | None) -> Workers:
    """A table, frame, path, source or stream as the rows of one worker, on a device if asked."""
    workers: Workers = data if isinstance(data, Workers) else as_workers({"site": data})
    if workers.size != 1:
        raise DataError(f"a site is one worker; these are the data of {workers.size}.")
    return to_device(workers if columns is None else with_columns(workers, tuple(columns)), device)


def _of_one(summaries: Summaries) -> dict[str, FloatArray]:
    """The summary of the only worker here."""
    return {name: values[0] for name, values in summaries.items()}


def _alone(model: Model, count: int, summary: Summaries) -> list[Model]:
    """The candidates of a run, bound to this site's rows alone, as far as these can have them."""
    found = []
    for candidate in candidates_of(model):
        with contextlib.suppress(DataError, SettingsError):
            one = {name: values[None] for name, values in summary.items()}
            found.append(candidate.bind(one, np.array([count]), _ALONE))
    return found


def _unseen(model: Model, data: Workers) -> Opening:
    """The opening of a private run, in which no row has a say: no value of a row, however large,
    makes it fail."""
    opening = stand_in(model, data.worker(0).shape[1])
    return replace(opening, counts=data.counts, columns=data.columns)


def _whole(joined: Joined) -> dict[str, FloatArray]:
    """Return the summary of all rows of all sites, as the run told it."""
    return unflatten(joined.constants[1:], joined.shapes)


def _fresh(algorithm: Algorithm, q: int, phase: str) -> State:
    """A worker that has not been asked yet."""
    rows: WorkerStates = {
        name: np.full((1, *column.shape), column.fill, dtype=column.dtype)
        for name, column in algorithm.state_fields(q).items()
    }
    nothing: FloatArray = np.zeros(q)
    return State(rows, -1, nothing, phase)
