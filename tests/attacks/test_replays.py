"""Old messages of a masked run come again, or late, at either end, and nothing comes of it."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import emfed
from emfed.core.protocols import WHOLE
from emfed.core.storage import ScratchDisk
from emfed.core.wire import Header, Kind, encode_end, seal
from emfed.fitting.session import Session
from emfed.network import LocalTransport, RemoteFederation, Site, SiteRules
from tests.helpers import first
from tests.network.masked import masked_sites

RNG = np.random.default_rng(7)
TABLES = {f"s{i}": RNG.normal(RNG.choice([-3, 3], (60, 1)), 1, (60, 2)) for i in range(3)}


class Replaying(LocalTransport):
    """Before and after each message come others that were sent before; so it is with answers."""

    def __init__(self, sites: Mapping[str, Site], seed: int, most: int = 2) -> None:
        super().__init__(sites)
        self.rng, self.most = np.random.default_rng(seed), most
        self.down = {key: list[bytes]() for key in sites}
        self.up: list[tuple[str, bytes]] = []
        self.replayed = 0

    def _some(self, of: list[Any]) -> list[Any]:
        count = int(self.rng.integers(self.most + 1)) if of else 0
        self.replayed += count
        # Half of them are among the last few, where the most harm can be done.
        back = self.rng.choice([len(of), min(len(of), 8)], size=count)
        return [of[-1 - int(self.rng.integers(n))] for n in back]

    def deliver(self, messages: Mapping[str, bytes], deadline: float) -> Iterator[Any]:
        for key, message in messages.items():
            known = self.down[key]
            for sent in [*self._some(known), message, *self._some([*known, message])]:
                answer = self.sites[key].step(sent)
                yield from self._some(self.up)
                yield key, answer
                self.up.append((key, answer))
            known.append(message)
        for key in messages:  # when all are ready, or all have answered
            for sent in self._some(self.down[key]):
                self.up.append((key, self.sites[key].step(sent)))


FITS: dict[str, dict[str, Any]] = {
    "a range of components": {"n_components": "1:2", "likelihood": True, "scores": True},
    "starts that compete": {"n_init": 2},
    "memories": {"algorithm": emfed.FedEM(emfed.SubtractiveDithering(0.2), step_size=0.5)},
}


def two_fits(transport: LocalTransport, settings: dict[str, Any]) -> list[Any]:
    """Two runs of the same sites, in which every message is sent once."""
    return [
        emfed.fit(
            emfed.gaussian_mixture(2, kind), RemoteFederation(transport, attempts=1), **settings
        )
        for kind in ("diag", "full")
    ]


@pytest.mark.filterwarnings("ignore::emfed.EmfedWarning")
@pytest.mark.parametrize("kind", first(FITS))
@pytest.mark.parametrize("seed", first(range(8)))
def test_replays_of_any_message_at_either_end_change_no_bit(
    kind: str, seed: int, tmp_path: Path
) -> None:
    """The second run hears messages of the first, too; no owner allows a change of company.

    Nor does a message that comes again cost a look at the rows, of which owners allow so many.
    """
    settings: dict[str, Any] = {"seed": 3, "rounds": 2, "tol": 0, "masks": True} | FITS[kind]
    more: dict[str, Any] = {"rules": SiteRules(largest_changes=0), "disk": ScratchDisk()}
    quiet = LocalTransport(masked_sites(TABLES, tmp_path / "quiet", **more))
    noisy = Replaying(masked_sites(TABLES, tmp_path / "noisy", **more), seed)
    for here, there in zip(two_fits(quiet, settings), two_fits(noisy, settings), strict=True):
        np.testing.assert_array_equal(there.statistics, here.statistics)
    assert noisy.replayed > 100
    for name, site in quiet.sites.items():
        assert site._tally.read() == noisy.sites[name]._tally.read()


def test_the_end_of_an_earlier_run_does_not_end_the_present_one(tmp_path: Path) -> None:
    site = Site(TABLES["s0"], tmp_path, disk=ScratchDisk())
    for run in ("1", "2"):
        (tmp_path / run.rjust(16, "0")).mkdir()
        os.utime(tmp_path / run.rjust(16, "0"), (int(run), int(run)))
    for run, over in ((2, True), (1, False), (3, True)):
        end = encode_end({"rounds": 1}, f"model {run}".encode())
        site.step(seal(Header(Kind.END, run, 0, 0, 0), end))
        assert site.over is over
        assert site.delivered.read_bytes() == f"model {max(2, run)}".encode()


def test_a_roster_that_comes_again_does_not_take_the_place_of_a_newer_one(tmp_path: Path) -> None:
    """A site whose disk is lost has another key. The others keep it, whatever they hear again."""
    sites = masked_sites(TABLES, tmp_path, disk=ScratchDisk())
    transport = Replaying(sites, 0, most=0)
    session = Session(
        emfed.gaussian_mixture(1, "diag"), RemoteFederation(transport, pause=0), masks=True
    )
    ask = partial(session.ask, "values", WHOLE, session.view(WHOLE).start(0))
    before = ask()
    shutil.rmtree(tmp_path / "s0")
    np.testing.assert_array_equal(ask(), before)
    for key, sent in transport.down.items():
        for message in reversed(sent):
            sites[key].step(message)
    transport.up.clear()
    session.federation.attempts = 1
    np.testing.assert_array_equal(ask(), before)
