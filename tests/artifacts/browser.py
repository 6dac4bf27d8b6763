"""A headless Chromium, driven over the two pipes of its own debugging protocol."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--disable-dev-shm-usage", "--remote-debugging-pipe"),
)
LOOK = """({
    images: document.images.length,
    widths: [...document.images].map(image => image.naturalWidth),
    page: document.documentElement.scrollWidth,
    text: document.body.innerText,
    font: parseFloat(getComputedStyle(document.body).fontSize),
})"""


def find_browser() -> str | None:
    return shutil.which("chromium") or shutil.which("chromium-browser")


class Browser:
    """One process per look: slow, and nothing is left behind."""

    def __init__(self, program: str, profile: Path) -> None:
        self.program, self.profile, self.looks = program, profile, 0

    def look(
        self, page: Path | str, width: int, picture: Path | None = None, until: str = "true"
    ) -> dict[str, Any]:
        """Sizes of the page and its images at this width, its text, and what the console says.

        ``until`` is an expression that a live page is waited for.
        """
        self.looks += 1
        ours_in, theirs_out = os.pipe()
        theirs_in, ours_out = os.pipe()
        # The protocol wants the descriptors 3 and 4; bash puts them there from higher ones.
        high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 20) for fd in (theirs_in, theirs_out)]
        command = [self.program, *FLAGS, f"--user-data-dir={self.profile}/{self.looks}"]
        process = subprocess.Popen(
            ["bash", "-c", f'exec "$@" 3<&{high[0]} 4>&{high[1]}', "bash", *command],
            pass_fds=high,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        for fd in (theirs_in, theirs_out, *high):
            os.close(fd)
        try:
            where = page if isinstance(page, str) else page.as_uri()
            return _Session(ours_in, ours_out).look(where, width, picture, until)
        finally:
            os.close(ours_out)
            os.close(ours_in)
            process.terminate()
            process.wait(timeout=30)


class _Session:
    def __init__(self, source: int, sink: int) -> None:
        self.source, self.sink = source, sink
        self.number, self.buffer = 0, b""
        self.events: list[dict[str, Any]] = []
        self.session: str | None = None

    def look(self, page: str, width: int, picture: Path | None, until: str) -> dict[str, Any]:
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        self.call("Page.navigate", url=page)
        self.wait_for("Page.loadEventFired")
        deadline = time.monotonic() + 30
        while not self.call("Runtime.evaluate", expression=until)["result"].get("value"):
            assert time.monotonic() < deadline, f"{until} did not come true"
            time.sleep(0.05)
        seen = self.call("Runtime.evaluate", expression=LOOK, returnByValue=True)
        if picture is not None:
            shot = self.call("Page.captureScreenshot", captureBeyondViewport=True)
            picture.write_bytes(base64.b64decode(shot["data"]))
        loud = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        console = [event for event in self.events if event["method"] in loud]
        return {**seen["result"]["value"], "console": console}

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self.number += 1
        message = {"id": self.number, "method": method, "params": params}
        if self.session is not None:
            message["sessionId"] = self.session
        os.write(self.sink, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return dict(answer["result"])
            if "method" in answer:
                self.events.append(answer)

    def wait_for(self, method: str) -> None:
        while not any(event["method"] == method for event in self.events):
            self.events.append(self.receive())

    def receive(self, seconds: float = 60) -> dict[str, Any]:
        deadline = time.monotonic() + seconds
        while b"\0" not in self.buffer:
            ready, _, _ = select.select([self.source], [], [], max(0, deadline - time.monotonic()))
            assert ready, "the browser does not answer"
            part = os.read(self.source, 1 << 20)
            assert part, "the browser has ended"
            self.buffer += part
        text, _, self.buffer = self.buffer.partition(b"\0")
        return dict(json.loads(text))
