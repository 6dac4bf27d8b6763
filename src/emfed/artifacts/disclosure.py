"""What left each site, in words for readers who do not know the method."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from emfed.artifacts.page import Section, Table
from emfed.core.ledger import KINDS
from emfed.core.protocols import plural
from emfed.network.scoring import SCORES

if TYPE_CHECKING:
    from emfed.artifacts.facts import ByWorker
    from emfed.artifacts.result import Result

FEW_ROWS = 10
"""Below this, an average says much of each row that went into it."""
TELLING_ROWS = 2
"""Up to this many, mean and spread of a column are its values."""
FIELDS = {
    "mass": "how much of the site's data each component accounts for",
    "first": "for each component, the average of each column over the rows it accounts for",
    "second": "for each component, the average of squares, or of products of two columns",
    "total": "the average of products of two columns",
    "mean": "the average of each column",
    "moments": "for each component, averages of each column and of simple functions of it",
    "observed": "for each component and column, the share of values that were there",
    "latent": "averages of the hidden factors' products",
    "factor": "averages of the hidden factors",
    "cross": "averages of products of hidden factors and columns",
    "squares": "for each component, the average of the squares of each column",
    "square": "the average of the squares of all values together",
    "initial": "how often each state comes first",
    "transitions": "how often each state follows another",
}
NEEDLESS = (
    ", and the share of each component",
    ", which row belongs to which component",
    " over the rows it accounts for",
)
"""Parts of sentences that only a model with several components needs."""
WORDS = {
    "opening": (
        "opening",
        "once, before the first round",
        "the number of rows, and the average and spread of each column (for tied covariances and "
        "regressions also of products of two columns; where values may be missing, the share seen)",
    ),
    "start": (
        "start",
        "before the first round",
        "what finds a start: shares and means of clusters of the site's own rows (merge), sums and "
        "counts of its rows in common clusters (k-means), or its exact statistics at the starting "
        "parameters",
    ),
    "round": (
        "rounds",
        "each time the site takes part",
        "the change of the site's statistics since its last message, as listed below",
    ),
    "question": (
        "questions",
        "now and then, where candidates are compared, and at the end",
        "for each candidate two numbers: the mean log-likelihood of the site's rows, and the mean "
        "entropy of their components",
    ),
    "monitor": (
        "monitor",
        "where the course of the fit is recorded; no total counts it",
        "the mean log-likelihood of the site's rows at some rounds, or its exact statistics there",
    ),
    "closing": (
        "closing",
        "at the end",
        "mean and spread of the log-likelihood of the site's rows, as they are and as the model "
        "expects them, and the share of each component",
    ),
}


def n_parts(result: Result) -> int:
    """Components, clusters or states of the model."""
    return int(result.model.describe().get("n_components", 1))


def _of_model(text: str, result: Result) -> str:
    """A text about mixtures in the words of this model, and of one component where it has one."""
    words = result.model.words()
    if n_parts(result) == 1:
        text = "1, the share of all rows" if text == FIELDS["mass"] else text
        for lost in ("for each component, ", "for each component and column, ", *NEEDLESS):
            text = text.replace(lost, "")
    return text.replace("log-likelihood", words.score).replace("component", words.part)


def disclosure(result: Result) -> Section:
    """The section that a data-protection officer reads."""
    return Section(
        "What left each site",
        text=[*_ways(result), *_did_not(result)],
        tables=[_messages(result), _statistics(result)],
    )


def _known(result: Result) -> ByWorker | None:
    """What single sites told."""
    return None if result.facts is None else result.facts.by_worker


def masked(result: Result) -> bool:
    """Whether sites masked what they sent."""
    return result.facts is not None and result.facts.settings.get("masks") is True


def _private(result: Result) -> bool:
    return result.privacy is not None and bool(result.privacy["private"])


def protections(result: Result) -> str:
    """Which protections were on, in a sentence or two."""
    private = result.privacy
    noise = "No noise was added to protect single persons (no differential privacy)."
    if private is not None:
        and_ = "and the fit is " * (not private["private"])
        noise = f"Every answer had noise, {and_}{private['words']}."
    if _followed(result):
        return f"{MEMBERS[masked(result)]} {noise}"
    told = "sums over all sites that took part" if masked(result) else "the messages of each site"
    return (
        f"Secure sums were {'on' if masked(result) else 'off'}: the server learned {told}. {noise} "
        "Release 0.1 fitted it: there a server that lied could read rows of a site."
    )


def _followed(result: Result) -> bool:
    """Whether all members followed the fit, so that nobody was asked anything."""
    facts = result.facts
    return facts is None or facts.simulated or facts.company is not None


MEMBERS = {
    True: (
        "Secure sums were on: what left a site was masked, and the relay that added up has no key "
        "of the sums. The sites and the analyst learned sums over all sites that took part. A "
        "relay that lies can stop a fit or leave sites out, which is counted. Sites that put "
        "together what they know can take their own parts off a sum."
    ),
    False: (
        "Secure sums were off: whoever added up saw the part of each site, which is as much as "
        "averages over its rows."
    ),
}
"""What members and relay learned of fits that everyone follows, with masks and without."""


def least_rows(result: Result) -> str:
    """The least number of rows behind a number that left a site: where averages hide least."""
    facts, known = result.facts, _known(result)
    parts, words = n_parts(result), result.model.words()
    if facts is None:
        return "Messages are averages over a site's rows."
    if known is None:
        return (
            f"Who reads the sums knows those over {facts.workers} sites and their "
            f"{plural(facts.rows, words.row)} together; how many each has was not told."
        )
    rows, shares, names = int(known.rows.min()), known.shares, result.workers()["worker"]
    if shares is None and parts > 1:
        return (
            f"The smallest site has {plural(rows, words.row)}; numbers about one {words.part} "
            "rest on fewer of them, and the fit did not ask on how many." + _telling(rows)
        )
    site, whose = int(np.argmin(known.rows)), ""
    least = float(rows)
    if shares is not None and parts > 1:
        behind = np.where(np.isfinite(shares), shares * known.rows[:, None], np.inf)
        site, part = (int(i) for i in np.unravel_index(np.argmin(behind), behind.shape))
        least, whose = float(behind[site, part]), f"{words.part} {part} at "
    told = f"{least:,.1f}" if least < FEW_ROWS and whose else f"{least:,.0f}"
    told = "less than 0.1" if whose and least < 0.05 else f"{'about ' * bool(whose)}{told}"
    return (
        f"The least number of {words.row}s behind a number that left a site is {told} "
        f"({whose}site {names[site]}{', at the end of the fit' * bool(whose)})." + _telling(least)
    )


def _telling(rows: float) -> str:
    """What averages over so few rows say."""
    if rows <= TELLING_ROWS:
        return " Averages over so few are the rows themselves, or give them away."
    return " That is few enough to say much about each." if rows < FEW_ROWS else ""


def _setting(result: Result) -> dict[str, Any]:
    """What the file says of the algorithm."""
    told = {} if result.facts is None else result.facts.settings.get("algorithm", {})
    return told if isinstance(told, dict) else {}


def _operator(settings: dict[str, Any]) -> str | None:
    """What shortens uploads, in a word; None where they are exact.

    Only EM and the identity are known to be: an algorithm that does not say is not called exact.
    """
    compressor = settings.get("compressor")
    name = compressor.get("compressor") if isinstance(compressor, dict) else None
    if settings.get("algorithm") == "em" or name == "identity":
        return None
    return str(name or "dither with a noise chosen round by round")


def _ways(result: Result) -> list[str]:
    facts = result.facts
    simulated = facts is None or facts.simulated
    operator = _operator(_setting(result))
    how = "from which the server computes the common model and sends it back"
    if _followed(result):
        how = "and from the sums over all sites each of them computes the common model"
    lines = [
        f"A site sends averages over its rows (statistics), {how}. The table lists every kind of "
        f"message, how often it was sent and how large it was. {least_rows(result)}",
    ]
    if simulated:
        lines.append(
            "This fit was a simulation: the tables of all sites were read by one process on one "
            "machine, which played the parts of sites and server. Bytes are those of the messages "
            "that sites would have sent, encoded by the code that sends them."
        )
    if masked(result):
        rounded = "The numbers of a round were rounded to a common unit, and masked."
        return [*lines, rounded]
    lines.append(
        "The statistics of a round were sent exactly."
        if operator is None
        else "The statistics of a round were rounded at random to few symbols before they were "
        f"sent ({operator}). That saves bytes; it is no guarantee of privacy."
    )
    return lines


def _did_not(result: Result) -> list[str]:
    known = _known(result)
    tiny = known is not None and int(known.rows.min()) <= TELLING_ROWS
    whose = " with more rows than two" if tiny else ""
    lines = [
        _of_model(
            f"What no message holds of a site{whose}: single rows or cells, row names, which row "
            "belongs to which component, the smallest or largest value of a column, files, and any "
            "key to them.",
            result,
        ),
        protections(result)
        + " What this does not promise: statistics are aggregates, not anonymous data."
        + f" Where a {result.model.words().part} accounts for one or two rows, its averages come "
        "close to them." * (not _private(result) and n_parts(result) > 1),
    ]
    if known is not None and (few := int((known.rows < FEW_ROWS).sum())):
        table, row = result.workers()["worker"], result.model.words().row
        names = [table[i] for i in np.flatnonzero(known.rows < FEW_ROWS)[:8].tolist()]
        lines.append(
            f"Look at this: {few} site{'s have' if few > 1 else ' has'} fewer than {FEW_ROWS} "
            f"{row}s ({', '.join(names)}{', …' if few > len(names) else ''}). An average over so "
            f"few {row}s says much about each of them; over one {row} it is the {row}."
        )
    return lines


def _messages(result: Result) -> Table:
    rows = []
    workers = result.ledger.counts.shape[-1]
    for kind in KINDS:
        told = result.ledger.summary()[kind]
        up, down = told["up"], told["down"]
        if not (up["messages"] or down["messages"]):
            continue
        name, when, what = WORDS[kind]
        if kind == "closing":
            what = _closing(result, what)
        if kind == "round" and _setting(result).get("algorithm") == "em":
            what = "the site's statistics, as listed below"
        mean = up["payload"] / max(1, up["messages"])
        rows.append(
            (
                name,
                when,
                _of_model(what, result),
                f"{up['messages'] / workers:,.1f}",
                f"{mean:,.0f}",
                f"{(up['payload'] + up['envelope']) / workers:,.0f}",
                f"{(down['payload'] + down['envelope']) / workers:,.0f}",
            )
        )
    return Table(
        "Messages of a site, on average over sites. Payload is what depends on data; the rest of a "
        "message is its envelope.",
        (
            "message",
            "when",
            "what a site says in it",
            "messages sent",
            "payload of one, bytes",
            "bytes sent in all",
            "bytes received in all",
        ),
        rows,
    )


def _closing(result: Result, what: str) -> str:
    """What sites said at the end: a model that draws no rows expects nothing of theirs."""
    facts = result.facts
    if facts is None or facts.expected is None:
        what = what.replace(", as they are and as the model expects them", "")
    shares = facts is not None and facts.scores is not None and len(facts.scores) > SCORES
    return what if shares else what.replace(NEEDLESS[0], "")


def _statistics(result: Result) -> Table:
    layout = result.model.layout
    told = {name: FIELDS.get(name, "an average over the site's rows") for name, _ in layout.fields}
    rows = [(n, _of_model(told[n], result), _shape(shape)) for n, shape in layout.fields]
    several = result.facts is not None and "selection" in result.facts.settings
    tail = " Each message held them for every number of components that was tried." * several
    return Table(
        f"The statistics of a round: {layout.size:,} averages over the rows of a site, in units in "
        f"which all data together have mean 0 and spread 1.{tail}",
        ("part", "what it is", "numbers"),
        rows,
    )


def _shape(shape: Sequence[int]) -> str:
    return " x ".join(f"{n:,}" for n in shape) or "1"
