"""Old and new releases side by side: they say in words what to do."""

from __future__ import annotations

import io
import subprocess
import tarfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest
from benchmarks.deployments import FEDEM, MIXTURE, Deployment, mixture_tables

from emfed.core.errors import OtherRelease, ParticipationError
from emfed.core.wire import (
    SAME_RELEASE,
    Header,
    Kind,
    Reason,
    encode_refusal,
    kind_of,
    seal,
    seal_refusal,
)
from emfed.deployment.status import Noted
from emfed.fitting import serve
from emfed.models import gaussian_mixture
from emfed.network import LocalTransport, Site, SiteRules

OLD = {
    "message format 1": "479d21a",
    "message format 2": "fab1d6f",
}
"""Commits that stand for earlier releases."""
CONFIG = MIXTURE + FEDEM + "[fit]\ntol = 0.0\nrounds = 3\nseed = 3\n[sites]\nexpected = 2\n"
PLAIN = "unmasked = true\n"


def of_format(number: int) -> bytes:
    message = bytearray(seal(Header(Kind.HELLO, 1, 1, 0, 0), b"{}"))
    message[4] = number
    return bytes(message)


def test_a_message_of_another_format_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(OtherRelease, match=SAME_RELEASE):
        kind_of(of_format(1))
    site = Site(mixture_tables(1)["s0"].to_numpy(), tmp_path, journal=tmp_path / "journal")
    site.step(of_format(1))
    assert SAME_RELEASE in (tmp_path / "journal").read_text()  # the site's people read it


class Foreign(LocalTransport):
    """One site answers in the words of another release."""

    answer = of_format(1)

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        for key, message in messages.items():
            if key == "s1":
                yield (
                    key,
                    self.answer
                    or seal_refusal(
                        message, encode_refusal(Reason.DAMAGED, "unknown kind of message 99.")
                    ),
                )
            else:
                yield from super().deliver({key: message}, deadline)


@pytest.mark.parametrize("answer", [of_format(1), b""])
def test_a_server_tells_which_site_has_another_release(answer: bytes, tmp_path: Path) -> None:
    rules, tables = SiteRules(unmasked=True), mixture_tables(2)
    foreign = Foreign({n: Site(t.to_numpy(), tmp_path / n, rules=rules) for n, t in tables.items()})
    foreign.answer = answer
    noted = Noted(foreign)
    with pytest.raises(ParticipationError, match="s1: (message format|unknown kind)"):
        serve(gaussian_mixture(2), "em", noted, tmp_path / "run", minimum=2, attempts=1)
    assert SAME_RELEASE in noted.refusals["s1"]
    fitted = serve(gaussian_mixture(2), "em", noted, tmp_path / "run", minimum=1, attempts=1)
    assert fitted.result.rounds > 0  # the run goes on without it


def released(commit: str, folder: Path) -> Path:
    """The packages of an earlier release, unpacked from the repository's history."""
    found = subprocess.run(
        ["git", "archive", commit, "src"], cwd=Path(__file__).parents[2], capture_output=True
    )
    if found.returncode:
        pytest.skip(f"commit {commit} is not at hand: {found.stderr.decode(errors='replace')}")
    with tarfile.open(fileobj=io.BytesIO(found.stdout)) as archive:
        archive.extractall(folder, filter="data")
    return folder / "src"


def wait_for(deployment: Deployment, words: tuple[str, ...], seconds: float = 60.0) -> str:
    """What all processes said, once one of these words is in it."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        said = "\n".join(deployment.output(name) for name in ("serve", "s0", "s1"))
        if any(word in said for word in words):
            return said
        time.sleep(0.3)
    raise AssertionError(f"nobody said {words}: {said}")


@pytest.mark.long
@pytest.mark.parametrize("old", ["s1", "serve"])
@pytest.mark.parametrize("release", OLD)
def test_an_old_and_a_new_release_say_what_to_do(release: str, old: str, tmp_path: Path) -> None:
    packages = released(OLD[release], tmp_path / "old")
    with Deployment(tmp_path / "d", mixture_tables(2), CONFIG) as deployment:
        (deployment.folder / "rules.toml").write_text(PLAIN)
        deployment.releases[old] = packages
        (deployment.folder / "roster").rename(deployment.folder / "pinned")  # two have no masks
        config = deployment.folder / "run.toml"
        if old == "serve":
            config.write_text(config.read_text().replace("report = false\n", ""))
        deployment.serve()
        for name in ("s0", "s1"):
            aware = release != "message format 1" or name != old
            deployment.join(name, *(("--rules", "rules.toml") if aware else ()))
        said = wait_for(deployment, (SAME_RELEASE,))
        assert "Traceback" not in said
