"""``emfed serve``, ``emfed join`` and ``emfed status``: a federation between machines."""

from __future__ import annotations

import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import typer

from emfed.cli.control import folder_of
from emfed.cli.help import EXIT_ERROR, EXIT_TOO_FEW, Command, examples, option, switch
from emfed.cli.tables import Decimal, Encoding, Separator, listed

BETWEEN = "A federation between machines"
JsonLogs = Annotated[bool, switch("--json-logs", "Write the log as lines of JSON, for collectors.")]


def serve(
    configs: Annotated[
        list[Path],
        typer.Argument(
            metavar="CONFIG",
            help="What to fit, as TOML; several, one after the other or with --at-once.",
        ),
    ],
    host: Annotated[str | None, option("The address to listen on; the file's if left out.")] = None,
    port: Annotated[int | None, option("The port; the file's if left out.")] = None,
    insecure: Annotated[
        bool, switch("--insecure", "No TLS, no keys: on this machine only, for trials.")
    ] = False,
    check: Annotated[
        bool, switch("--check", "Read the configuration, say what it means, and stop.")
    ] = False,
    relay: Annotated[
        str,
        option("The address of an `emfed relay` elsewhere; then nothing listens here."),
    ] = "",
    json_output: Annotated[
        bool, switch("--json", "Print each change of state as a line of JSON.")
    ] = False,
    json_logs: JsonLogs = False,
    at_once: Annotated[
        bool, switch("--at-once", "Serve all files at the same time, over one port.")
    ] = False,
) -> None:
    """Fit a model over a network: wait for sites, follow the fit with them, write the model.

    The server adds what sites send and reads the sums, as an analyst. It chooses what is fitted,
    and nothing that a site computes: every site follows the fit itself
    (docs/what-the-server-learns.md).

    Started again after a crash it goes on where it was. Ctrl-C ends the run with what it has
    reached; a second one stops at once, and the same command resumes.
    """
    from dataclasses import replace

    from emfed.deployment.config import read_config
    from emfed.deployment.hosting import place_of, serve
    from emfed.deployment.status import read_status
    from emfed.network.addresses import split_address, terminated_as_interrupted

    runs = []
    for config in configs:
        read = read_config(config)
        place = replace(read.server, host=host or read.server.host, port=port or read.server.port)
        runs.append(replace(read, server=place))
    if relay:
        split_address(relay)
    where = place_of(runs, insecure, relay)
    if check:
        for run in runs:
            typer.echo(json.dumps(_described(run), indent=1))
        return
    many = len(runs) > 1 and at_once
    told = [(run, _Progress(json_output, run.path.stem if many else "")) for run in runs]
    with terminated_as_interrupted(), _interruptible():
        serve(told, where, at_once=at_once, json_logs=json_logs)
    for run in [] if json_output else runs:
        typer.echo(f"the model is in {run.place('output')}/")
    doubtful = [_doubts(read_status(run.place("folder")), json_output) for run in runs]
    if any(doubtful):
        raise typer.Exit(DOUBTFUL)


def relay(
    keys: Annotated[
        Path,
        typer.Argument(
            metavar="KEYS", help="The folder of keys; server.key, server.pem, ca.pem and sites/."
        ),
    ] = Path("keys"),
    host: Annotated[str, option("The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, option("The port.", min=1, max=65535)] = 9400,
    folder: Annotated[Path, option("Where it keeps the lists of all runs.")] = Path("relay"),
    mailboxes: Annotated[
        Path | None, option("Mailboxes of sites to which another platform carries messages.")
    ] = None,
    json_logs: JsonLogs = False,
) -> None:
    """Add up what sites send, for the runs of an analyst elsewhere, until Ctrl-C.

    It reads no sum, has no key of any, and no model code is needed. The analyst says
    `emfed serve run.toml --relay HOST:PORT`, with a folder of keys that has ca.key.
    """
    from emfed.deployment.relaying import serve_relay
    from emfed.deployment.status import logging_to
    from emfed.network.addresses import terminated_as_interrupted

    with (
        logging_to(folder / "logs" / "relay.log", json_logs),
        terminated_as_interrupted(),
        _interruptible(),
    ):
        serve_relay(keys, folder, host, port, typer.echo, mailboxes)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """Ctrl-C ends the command with code 130, and a word on how to go on."""
    try:
        yield
    except KeyboardInterrupt:
        typer.echo("emfed: interrupted; the same command goes on from here", err=True)
        raise typer.Exit(130) from None


DOUBTFUL = 3
"""The exit code of a run that left a model which must not be taken for a good one."""


def _doubts(status: dict[str, Any], json_output: bool) -> bool:
    """Say loudly that a finished run did not end well, if so."""
    doubts = status.get("doubts") or []
    for words in [] if json_output else doubts:
        typer.echo(f"emfed: THIS FIT DID NOT END WELL: {words}", err=True)
    return bool(doubts)


def _described(settings: Any) -> dict[str, Any]:
    return {
        **settings.said,
        "sites": vars(settings.sites),
        "server": vars(settings.server),
    }


class _Progress:
    """Says what changed since it was last told."""

    def __init__(self, json_output: bool, name: str = "") -> None:
        """``name`` tells a run from others at the same time."""
        self._json, self._last, self._name = json_output, "", name
        self._refusals: set[str] = set()

    def __call__(self, status: dict[str, Any]) -> None:
        """Print a line if there is news."""
        from emfed.deployment.status import bearing_full_disks

        with bearing_full_disks():
            self._print(status)

    def _print(self, status: dict[str, Any]) -> None:
        front = f"{self._name}: " if self._name else ""
        status = status | {"run": self._name} if self._name else status
        if not self._json:
            refusals = refusal_lines(status)
            for refusal in refusals:
                if refusal not in self._refusals:
                    typer.echo(f"{front}{refusal}")
            self._refusals = set(refusals)
        from emfed.deployment.views import status_line

        line = json.dumps(status) if self._json else status_line(status)
        if line and line != self._last:
            self._last = line
            typer.echo(line if self._json else f"{front}{line}")


def refusal_lines(status: dict[str, Any]) -> list[str]:
    """Who does not take part, and why; and what else the operator should mend."""
    refusals, out = (status.get("refusals") or {}).items(), status.get("out") or ()
    lines = [
        f"{site} {'is out' if site in out else 'takes no part'}: {why}" for site, why in refusals
    ]
    return [*lines, *([status["trouble"]] if status.get("trouble") else [])]


def join(
    address: Annotated[
        str,
        typer.Argument(help="The server's, like em.example.org:9400; or mailbox:FOLDER."),
    ],
    data: Annotated[Path, option("This site's rows: .csv, .tsv, .xlsx or .parquet.")],
    ca: Annotated[Path, option("The server's ca.pem, got by a way you trust.")] = Path("ca.pem"),
    key: Annotated[
        Path | None, option("This site's private key, of `emfed keys site NAME`.")
    ] = None,
    columns: Annotated[str | None, option("Columns to use, 'age,height'; all if left out.")] = None,
    rules: Annotated[
        Path | None, option("This site's own rules, as TOML; docs/deployment.md.")
    ] = None,
    roster: Annotated[
        Path | None,
        option(
            "Folder of everybody's NAME.pub (`emfed keys roster`), whose signatures are checked; "
            "'roster' if left out.",
        ),
    ] = None,
    folder: Annotated[
        Path | None, option("Where this site keeps memory and logs; site-NAME if left out.")
    ] = None,
    dry_run: Annotated[
        bool, switch("--dry-run", "Show what would be sent; send nothing about the rows.")
    ] = False,
    insecure: Annotated[
        bool, switch("--insecure", "No TLS, no key: to this machine only, for trials.")
    ] = False,
    separator: Separator = None,
    decimal: Decimal = ".",
    encoding: Encoding = "utf-8",
    categories: Annotated[
        str,
        option(
            "Columns of words, each with its words in the order that all sites agreed on: "
            "ward=icu|surgery,sex=f|m. The run's family is then categorical.",
        ),
    ] = "",
    device: Annotated[
        str | None, option("Compute on this site's GPU: cuda.", metavar="NAME")
    ] = None,
    seal: Annotated[
        Path | None, option("Encrypt this site's files with a secret of `emfed keys seal`.")
    ] = None,
    page: Annotated[int, option("The page's port on this machine; 0: any.", min=0, max=65535)] = 0,
    json_logs: JsonLogs = False,
    stay: Annotated[bool, switch("--stay", "Wait for the next run when one is over.")] = False,
) -> None:
    """Take part with this site's rows: masked sums of statistics leave, under the owner's rules.

    The site follows each fit by itself, so no server can choose what it computes, and it writes the
    model at the end: FOLDER/model.emfed (docs/what-the-server-learns.md).

    Runs until the run is over or until Ctrl-C, through crashes of its own and of the server. Every
    message that leaves is shown here and kept in FOLDER/messages.jsonl.
    """
    from emfed.data.files import TextForm
    from emfed.deployment.joining import Joining
    from emfed.deployment.rehearsal import rehearse
    from emfed.deployment.site import JOURNAL, read_rules
    from emfed.deployment.status import logging_to
    from emfed.network.addresses import terminated_as_interrupted

    where = folder or Path(f"site-{(data if key is None else key).stem}")
    if dry_run:
        where /= "dry-run"  # the site itself may be at work, with other data or rules
    if roster is None and not insecure and Path("roster").is_dir():
        roster = Path("roster")
    guest = Joining(
        address,
        where,
        data,
        None if insecure else ca,
        None if insecure else key,
        None if columns is None else listed(columns),
        read_rules(rules),
        form=TextForm(separator, decimal, encoding, categories),
        device=device,
        roster=roster,
        stay=stay,
        page=page,
        seal=seal,
    )

    def tell(kind: str, words: str) -> None:
        typer.echo(f"{_clock()} {kind}: {words}")

    guest.check()
    logged = logging_to(where / "logs" / "join.log", json_logs)
    with logged, terminated_as_interrupted():
        try:
            if dry_run:
                rehearse(guest, tell)
                return
            outcome = guest.run(tell)
        except KeyboardInterrupt:
            sent = "nothing about the rows was sent"
            sent = sent if dry_run else f"what was sent is in {where / JOURNAL}"
            typer.echo(f"emfed: stopped; {sent}", err=True)
            raise typer.Exit(130) from None
    for words in outcome.failed:
        typer.echo(f"emfed: {words}", err=True)
    for words in outcome.doubts:
        typer.echo(f"emfed: THIS FIT DID NOT END WELL: {words}", err=True)
    for code, reasons in (
        (EXIT_ERROR, outcome.failed),
        (EXIT_TOO_FEW, outcome.refused),
        (DOUBTFUL, outcome.doubts),
    ):
        if reasons:
            raise typer.Exit(code)


def _clock() -> str:
    return time.strftime("%H:%M:%S")


def status(
    where: Annotated[
        Path, typer.Argument(help="The server's configuration or folder, or a site's folder.")
    ] = Path("run"),
    json_output: Annotated[bool, switch("--json", "Print JSON.")] = False,
    watch: Annotated[
        bool, switch("--watch", "Show it again and again, until Ctrl-C or the end.")
    ] = False,
) -> None:
    """Say where a run stands, or what left a site.

    Exit code 0: finished or under way; 1: failed, no server works on it, or nothing there; 3:
    finished, but it did not converge or was thrown off; 4: too few sites took part.
    """
    from emfed.deployment.console import page_address
    from emfed.deployment.views import SiteView, run_view

    folder = folder_of(where)
    if (folder / "site.json").exists():
        view = SiteView(folder)
        if watch:
            _watch(view, lambda state: False)
        _site_status(view, json_output)
        return
    if not (folder / "status.json").exists():
        typer.echo(f"emfed: {folder} holds no run", err=True)
        raise typer.Exit(1)
    if watch:
        ended = ("finished", "failed")
        _watch(lambda: run_view(folder, str(where)), lambda state: state.get("state") in ended)
    found = run_view(folder, str(where))
    typer.echo(json.dumps(found) if json_output else found["line"])
    if not json_output:
        for refusal in refusal_lines(found):
            typer.echo(refusal)
        address = page_address(folder)
        if address is not None and found["working"]:
            typer.echo(f"page: {address}")
    left = not found["working"] and found.get("state") in ("running", "waiting", "paused")
    if left and not json_output:
        typer.echo("no server works on it now; `emfed serve` goes on from here")
    if left or found.get("state") == "failed":
        raise typer.Exit(EXIT_TOO_FEW if found.get("few") and not left else EXIT_ERROR)
    if _doubts(found, json_output):
        raise typer.Exit(DOUBTFUL)


WATCH_SECONDS = 1.0
"""Between two looks of ``--watch``."""


def _watch(view: Callable[[], dict[str, Any]], over: Callable[[dict[str, Any]], bool]) -> None:
    """What the page shows, in a terminal, until Ctrl-C or the end.

    In a pipe or a file, which cannot be drawn over, it is shown once, and then each line that is
    new.
    """
    from rich.console import Console, Group
    from rich.live import Live
    from rich.table import Table
    from rich.text import Text

    def shown(state: dict[str, Any]) -> Group:
        parts: list[Any] = [Text(f"{state['title']}: {state['line']}", style="bold")]
        parts += [Text(words, style="red") for words in state["reasons"]]
        numbers = {"gain": "a round gains", "left": "left to gain", "epsilon": "epsilon spent"}
        told = [f"{words} {state[k]:.3g}" for k, words in numbers.items() if state.get(k)]
        parts += [Text(", ".join(told))] if told else []
        for title, columns, rows in _tables(state):
            table = Table(*columns, title=title, title_justify="left", box=None)
            for row in rows:
                table.add_row(*(Text("" if v is None else str(v)) for v in row))
            parts.append(table)
        return Group(*parts)

    console, state = Console(), view()
    last = state["line"]
    drawn: contextlib.AbstractContextManager[Live | None] = contextlib.nullcontext()
    if console.is_terminal:  # elsewhere `Live` says nothing before it ends
        drawn = Live(shown(state), console=console, auto_refresh=False)
    else:
        console.print(shown(state), soft_wrap=True)  # who reads on wants whole lines
    with contextlib.suppress(KeyboardInterrupt), drawn as live:
        while not over(state):
            sys.stdout.flush()
            time.sleep(WATCH_SECONDS)
            state = view()
            if live is not None:
                live.update(shown(state), refresh=True)
            elif state["line"] != last:
                last = state["line"]
                typer.echo(last)


def _short(value: Any) -> str:
    """Parameters with four digits each: more cannot be read while they change."""
    if isinstance(value, list):
        return f"[{', '.join(map(_short, value))}]"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _tables(state: dict[str, Any]) -> list[tuple[str, list[str], list[list[Any]]]]:
    """Titles, columns and rows of what the page shows as tables."""

    def clock(seconds: float | None) -> str:
        return "" if seconds is None else time.strftime("%H:%M:%S", time.localtime(seconds))

    sites = [
        [
            name,
            f"{'in' if s['in'] else 'not in'}, {'connected' if s['connected'] else 'away'}",
            clock(s["last"]),
            s["refusal"],
        ]
        for name, s in (state.get("sites") or {}).items()
    ]
    traffic = [
        [kind, way, *row]
        for way, kinds in (state.get("traffic") or {}).items()
        for kind, row in kinds.items()
    ]
    messages = [
        [m["time"], m["kind"], m["bytes"], m["content"]] for m in state.get("messages") or []
    ]
    components = (state.get("components") or {}).items()
    numbers = [[name, _short(value)[:160]] for name, value in components]
    rules = [[name, value] for name, value in (state.get("rules") or {}).items()]
    found = [
        ("sites", ["site", "is", "last word", "why not"], sites),
        ("components", ["parameter", "value"], numbers),
        ("messages by kind", ["kind", "way", "messages", "bytes"], traffic),
        ("what left this site", ["when", "kind", "bytes", "content"], messages[:15]),
        ("rules", ["rule", "value"], rules),
    ]
    return [table for table in found if table[2]]


def _site_status(view: Any, json_output: bool) -> None:
    """What left a site: messages and bytes by kind, and the last one."""
    state = view()
    last = view.last
    if json_output:
        kinds = {k: {"messages": row[0], "bytes": row[1]} for k, row in view.kinds.items()}
        typer.echo(json.dumps({"sent": kinds, "last": last, "warnings": view.warnings}))
        return
    for words in state["reasons"]:
        typer.echo(words)
    if state["page"]:
        typer.echo(f"page: {state['page']}")
    for fit in state["pending"]:
        typer.echo(f"waits for your word ({fit['fit']}): {fit['words']}")
    for kind, row in view.kinds.items():
        typer.echo(f"{kind}\t{row[0]} messages\t{row[1]} bytes")
    if last is not None:
        from emfed.deployment.site import describe

        typer.echo(f"last: {last['time']} {describe(last)}")
    else:
        typer.echo("nothing was sent")


def doctor(
    where: Annotated[
        str, typer.Argument(help="At the server its run.toml; at a site the server's address.")
    ] = "run.toml",
    ca: Annotated[Path, option("The server's ca.pem, at a site.")] = Path("ca.pem"),
    key: Annotated[Path | None, option("The site's private key.")] = None,
    json_output: Annotated[bool, switch("--json", "Print JSON.")] = False,
) -> None:
    """Say what is wrong at this end of a federation, and how to mend it.

    It looks at names, port, TLS, clock, keys, disk and versions, asks the server whether it knows
    the site's key, and changes nothing. Exit code 1: something is wrong.
    """
    from emfed.deployment.doctor import look_at_server, look_at_site

    path = Path(where)
    folder = Path(f"site-{key.stem}") if key is not None else Path()
    server = path.exists() or path.suffix == ".toml"
    found = list(look_at_server(path) if server else look_at_site(where, ca, key, folder))
    if json_output:
        typer.echo(json.dumps([vars(finding) for finding in found]))
    for finding in [] if json_output else found:
        typer.echo(f"{'good ' if finding.good else 'WRONG'} {finding.what}")
        if not finding.good:
            typer.echo(f"      to mend it: {finding.mend}")
    if not all(finding.good for finding in found):
        raise typer.Exit(1)


def add_commands(app: typer.Typer) -> None:
    """Give the main command its share."""
    for function, epilog in (
        (
            serve,
            examples(
                "emfed serve run.toml",
                "emfed serve run.toml --host 0.0.0.0",
                "emfed serve first.toml second.toml",
                "emfed serve first.toml second.toml --at-once",
                "emfed serve run.toml --relay em.example.org:9400",
            ),
        ),
        (relay, examples("emfed relay keys --host 0.0.0.0 --port 9400")),
        (
            join,
            examples(
                "emfed join em.example.org:9400 --data rows.csv --key oslo.key",
                "emfed join em.example.org:9400 --data rows.parquet --key oslo.key \\",
                "    --rules rules.toml --dry-run",
            ),
        ),
        (
            doctor,
            examples("emfed doctor run.toml", "emfed doctor em.example.org:9400 --key oslo.key"),
        ),
        (status, examples("emfed status run.toml --watch", "emfed status site-oslo")),
    ):
        app.command(cls=Command, epilog=epilog, rich_help_panel=BETWEEN)(function)
