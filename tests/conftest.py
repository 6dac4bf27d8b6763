"""Shared settings and data of the tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path

# Before numpy is imported, here and in the processes of tests: there is one test to a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# A shell starts what runs in the background deaf to Ctrl-C, and children inherit it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

import pytest
from hypothesis import HealthCheck, settings

from tests.artifacts.browser import Browser, find_browser

settings.register_profile(
    "ci",
    derandomize=True,  # the same examples on every machine
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
settings.load_profile("ci")

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="session")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Browser:
    """A real one, to look at pages with."""
    program = find_browser()
    if program is None:
        pytest.skip("no chromium: pages are not looked at in a browser")
    return Browser(program, tmp_path_factory.mktemp("profile"))


@pytest.fixture(scope="session")
def data_dir() -> Path:
    """Real data: ``EMFED_DATA``, by default the folder beside the checkout."""
    path = Path(os.environ.get("EMFED_DATA") or ROOT.parent / "shared" / "data")
    if not path.is_dir():
        pytest.skip("no real data: set EMFED_DATA to their folder")
    return path
