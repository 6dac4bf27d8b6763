"""A page about a run, or about a site, for the people of this machine; and numbers for monitoring.

It listens on this machine's own address alone. Everything is below a secret path that only the
owner can read (``page.secret`` in the folder), so other accounts of the machine see nothing. A
request must name this machine in its Host header: a web site that points its name here (DNS
rebinding) is refused. The page loads nothing from elsewhere, and its policy forbids it to.

What is shown is read from the folder's files: the page changes nothing, with one exception. At a
site that asks its owner about each fit, the owner may answer on the page.
"""

from __future__ import annotations

import json
import logging
import math
import secrets
import sys
import threading
import time
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, final
from urllib.parse import parse_qs

from emfed.core.errors import EmfedError
from emfed.network.keys import WARNING_DAYS, write_private

logger = logging.getLogger(__name__)
FILES = {"": ("page.html", "text/html"), "page.js": ("page.js", "text/javascript")}
FILES["page.css"] = ("page.css", "text/css")
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
TICK_SECONDS, BEAT_SECONDS = 0.5, 15.0
"""Between two looks for news, and the longest silence on a live page's connection."""
MOST_READERS = 32
"""Pages that are open at once: each is a thread."""
MOST_CALLERS = 128
"""Connections at once, of any account of this machine: more are closed unread."""
LARGEST_FORM = 1000
"""Bytes of what a page may send back."""
StateFunction = Callable[[], Mapping[str, Any]]
"""What is shown, as plain JSON."""
Answer = Callable[[str, bool], object]
"""Takes the owner's word about a fit."""


@final
class Console:
    """The page of one folder, in a thread; use it in a ``with``."""

    def __init__(
        self,
        folder: Path,
        port: int,
        state: StateFunction,
        answer: Answer | None = None,
    ) -> None:
        path = folder / "page.secret"
        if not path.exists():
            write_private(path, secrets.token_urlsafe(24).encode())
        self._secret = path.read_text(encoding="ascii")
        try:
            self._server = _Server(port, self._secret, state, answer)
        except OSError as error:  # another run's page has it, say
            self._server = _Server(0, self._secret, state, answer)
            logger.warning("the page cannot have port %d: %s", port, error.strerror or error)
        self.port = int(self._server.server_address[1])
        self._place = folder / "page.port"
        self._place.write_text(str(self.port), encoding="ascii")
        logger.info("the page listens on 127.0.0.1:%d; `emfed status` shows its address", self.port)

    def __enter__(self) -> Console:
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.closing.set()
        self._server.shutdown()
        self._server.server_close()
        self._place.unlink(missing_ok=True)  # `emfed status` names no page that is gone


def page_address(folder: Path) -> str | None:
    """What the owner of a folder opens, if a page was served there."""
    try:
        port, secret = ((folder / f"page.{name}").read_text("ascii") for name in ("port", "secret"))
    except OSError:
        return None
    return f"http://127.0.0.1:{port}/{secret}/"


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = MOST_CALLERS  # with the 5 that are the default a crowd keeps others out

    def __init__(self, port: int, secret: str, state: StateFunction, answer: Answer | None) -> None:
        self.secret, self.state, self.answer = secret, state, answer
        self.closing, self.readers = threading.Event(), threading.Semaphore(MOST_READERS)
        self._callers = threading.Semaphore(MOST_CALLERS)
        super().__init__(("127.0.0.1", port), _Handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        if self._callers.acquire(blocking=False):
            super().process_request(request, client_address)
        else:
            self.shutdown_request(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._callers.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A browser that goes in mid-answer is no news; the rest is for the log."""
        if not isinstance(sys.exception(), OSError):
            logger.exception("the page could not be shown")


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    server_version, sys_version = "emfed", ""
    timeout = 60

    def _path(self) -> str | None:
        """The path below the secret one, None if this request is not to be answered."""
        port = self.server.server_address[1]
        hosts = {f"{name}:{port}" for name in ("127.0.0.1", "localhost", "[::1]")}
        shown, _, rest = self.path.lstrip("/").partition("/")
        if self.headers.get("Host") not in hosts:
            self._say(421, "text/plain", "this page answers to this machine's name only\n")
        elif not secrets.compare_digest(shown.encode(), self.server.secret.encode()):
            self._say(404, "text/plain", "nothing here: the address is in page.secret\n")
        else:
            return rest.partition("?")[0]
        return None

    def do_GET(self) -> None:
        path = self._path()
        if path is not None:
            self._in_words(self._show, path)

    def do_POST(self) -> None:
        path = self._path()
        if path is not None:
            self._in_words(self._take, path)

    def _in_words(self, answer: Callable[[str], None], path: str) -> None:
        """Say what is wrong with the folder's files, or with what was asked, on the page."""
        try:
            answer(path)
        except EmfedError as error:
            self._say(500 if self.command == "GET" else 400, "text/plain", f"{error}\n")

    def _show(self, path: str) -> None:
        if path in FILES:
            name, kind = FILES[path]
            text = (Path(__file__).parent / name).read_text(encoding="utf-8")
            self._say(200, kind, text)
        elif path == "state":
            self._say(200, "application/json", _as_json(self.server.state()))
        elif path == "events":
            self._tell()
        elif path == "metrics":
            self._say(200, "text/plain; version=0.0.4", metrics(self.server.state()))
        elif path == "health":
            good, reasons = health(self.server.state())
            words = json.dumps({"healthy": good, "reasons": reasons}) + "\n"
            self._say(200 if good else 503, "application/json", words)
        else:
            self._say(404, "text/plain", "nothing here\n")

    def _take(self, path: str) -> None:
        answer = self.server.answer
        here = f"http://{self.headers.get('Host')}"
        length = self.headers.get("Content-Length", "")
        if path != "answer" or answer is None or self.headers.get("Origin") != here:
            self._say(403, "text/plain", "this page changes nothing\n")
        elif not length.isdigit() or int(length) > LARGEST_FORM:
            self._say(413, "text/plain", "too large\n")
        else:
            form = parse_qs(self.rfile.read(int(length)).decode(errors="replace"))
            answer(form.get("fit", [""])[0], form.get("answer") == ["yes"])
            self._say(303, "text/plain", "", Location="./")

    def _say(self, status: int, kind: str, text: str, **more: str) -> None:
        body = text.encode()
        self.send_response(status)
        headers = {
            "Content-Type": kind if "version" in kind else f"{kind}; charset=utf-8",
            "Content-Length": str(len(body)),
            "Content-Security-Policy": POLICY,
            "X-Content-Type-Options": "nosniff",
            "Referrer-Policy": "no-referrer",
            "Cache-Control": "no-store",
            "Cross-Origin-Resource-Policy": "same-origin",
            **more,
        }
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def _tell(self) -> None:
        """Server-sent events: the state whenever it has changed."""
        if not self.server.readers.acquire(blocking=False):
            self._say(503, "text/plain", "too many pages are open\n")
            return
        try:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Cache-Control", "no-store")
            self.end_headers()
            last, beat = "", time.monotonic()
            while not self.server.closing.is_set():
                try:
                    text = _as_json(self.server.state())
                except EmfedError as error:  # a file that is damaged now may be mended soon
                    text = json.dumps({"line": str(error), "reasons": []})
                if text != last or time.monotonic() - beat > BEAT_SECONDS:
                    self.wfile.write(f"data: {text}\n\n".encode())
                    self.wfile.flush()
                    last, beat = text, time.monotonic()
                self.server.closing.wait(TICK_SECONDS)
        except OSError:  # the page was closed
            return
        finally:
            self.server.readers.release()

    def log_message(self, format: str, *args: Any) -> None:
        """Requests are not worth a line; the address holds the secret."""


def _as_json(state: Mapping[str, Any]) -> str:
    """What a browser can read: numbers of a fit that ran away are not finite, and become null."""

    def finite(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {name: finite(part) for name, part in value.items()}
        if isinstance(value, list | tuple):
            return [finite(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(finite(state), allow_nan=False)


SILENT_SECONDS = 60.0
"""A run that goes on and says nothing for so long, besides the wait for a site, has stalled."""


def health(state: Mapping[str, Any]) -> tuple[bool, list[str]]:
    """Whether all is well, and what is not, in words."""
    bad, words = [], []
    status, now = state.get("state"), time.time()
    if status == "failed":
        bad.append(f"the run failed: {state.get('error', '')}")
    if status in ("running", "waiting") and not state.get("working", True):
        bad.append("no server works on the run")
    allowed = SILENT_SECONDS + float(state.get("wait_for") or 0.0)
    if status == "running" and now - float(state.get("time") or now) > allowed:
        bad.append(f"no round came to its end in {now - float(state['time']):.0f} s")
    if status == "waiting":
        bad.append(f"waiting: {state.get('why', '')}")
    bad += [f"it did not end well: {doubt}" for doubt in state.get("doubts") or ()]
    if (days := state.get("certificate_days", WARNING_DAYS)) < WARNING_DAYS:
        words.append(f"the certificate lasts {days} days: renew it with `emfed keys server`")
    words += [state["trouble"]] if state.get("trouble") else []
    for name, site in (state.get("sites") or {}).items():
        if site["refusal"]:
            words.append(f"{name}: {site['refusal']}")
        elif site["in"] and not site["connected"] and status != "finished":
            words.append(f"{name} is not connected")
    return not bad, bad + words


def metrics(state: Mapping[str, Any]) -> str:
    """The same as numbers, in the text format of Prometheus."""
    lines: list[str] = []

    def add(name: str, kind: str, about: str, rows: Mapping[str, Any]) -> None:
        numbers = {labels: value for labels, value in rows.items() if value is not None}
        if numbers:
            lines.append(f"# HELP emfed_{name} {about}\n# TYPE emfed_{name} {kind}")
            lines.extend(f"emfed_{name}{labels} {value}" for labels, value in numbers.items())

    sites = state.get("sites") or {}
    add("healthy", "gauge", "Whether all is well.", {"": int(health(state)[0])})
    status = state.get("state")
    states = ("waiting", "running", "paused", "finished", "failed")
    add(
        "state",
        "gauge",
        "Where the run stands.",
        {f'{{state="{s}"}}': int(s == status) for s in states},
    )
    add("round", "gauge", "The last round.", {"": state.get("round")})
    add("round_limit", "gauge", "The limit on rounds.", {"": state.get("rounds")})
    counted = state.get("counted") or {}
    add("sites_counted", "gauge", "Sites in the sums.", {"": counted.get("sites")})
    add("rows_counted", "gauge", "Rows in the sums.", {"": counted.get("rows")})
    add("squared_H", "gauge", "The squared length of the mean field.", {"": state.get("squared_H")})
    gain = "What a round gains per row: nats, of k-means squared distance."
    add("gain", "gauge", gain, {"": state.get("gain")})
    add("left", "gauge", "What is still to be gained, in the same unit.", {"": state.get("left")})
    add("epsilon", "gauge", "Privacy budget that was spent.", {"": state.get("epsilon")})
    days = state.get("certificate_days")
    add("certificate_days", "gauge", "Days until the certificate ends.", {"": days})
    add("last_word_seconds", "gauge", "When the run last said something.", {"": state.get("time")})
    for column, about in (
        ("connected", "Whether a site is connected."),
        ("last", "When a site last said anything."),
    ):
        kept = {f'{{site="{name}"}}': site[column] for name, site in sites.items()}
        rows = {k: int(v) if isinstance(v, bool) else v for k, v in kept.items()}
        add(f"site_{column}", "gauge", about, rows)
    for place, (name, about) in enumerate((("messages", "Messages"), ("bytes", "Bytes"))):
        rows = {
            f'{{direction="{way}",kind="{kind}"}}': row[place]
            for way, kinds in (state.get("traffic") or {}).items()
            for kind, row in kinds.items()
        }
        add(f"{name}_total", "counter", f"{about} since the program started.", rows)
    return "\n".join(lines) + "\n"
