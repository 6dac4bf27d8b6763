"""``emfed serve``, ``emfed join`` and ``emfed status``: a federation between machines."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from emfed.cli.control import folder_of
from emfed.cli.help import Command, examples
from emfed.cli.tables import Decimal, Encoding, Separator, listed

BETWEEN = "A federation between machines"


def serve(
    config: Annotated[Path, typer.Argument(help="What to fit, as TOML; docs/deployment.md.")],
    host: Annotated[
        str | None, typer.Option(help="The address to listen on; the file's if left out.")
    ] = None,
    port: Annotated[int | None, typer.Option(help="The port; the file's if left out.")] = None,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS, no keys: on this machine only, for trials.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--check", help="Read the configuration, say what it means, and stop.")
    ] = False,
    app_folder: Annotated[
        Path | None,
        typer.Option("--app", help="Write a Flower app for `flwr run` here, and stop."),
    ] = None,
    json_output: Annotated[
        bool, typer.Option("--json", help="Print each change of state as a line of JSON.")
    ] = False,
) -> None:
    """Fit a model over a network: wait for sites, make rounds, write the model.

    Started again after a crash it goes on where it was. Ctrl-C stops it; the same command resumes.
    """
    from dataclasses import replace

    from emfed.network.addresses import terminated_as_interrupted
    from emfed.network.deployment.config import read_config
    from emfed.network.deployment.hosting import Host, WebSocketHost
    from emfed.network.deployment.status import log_to, read_status

    settings = read_config(config)
    place = settings.server
    place = replace(place, host=host or place.host, port=port or place.port)
    settings = replace(settings, server=place)
    if app_folder is not None:
        from emfed.network.flower.hosting import write_app

        write_app(app_folder)
        (app_folder / "emfed.toml").write_bytes(config.read_bytes())
        typer.echo(f"wrote {app_folder}; run it with: flwr run {app_folder}")
        return
    if check:
        typer.echo(json.dumps(_described(settings), indent=1))
        return
    kind: type[Host] = WebSocketHost
    if place.engine == "flower":
        from emfed.network.flower.hosting import FlowerHost

        kind = FlowerHost
    server = kind(settings, insecure=insecure)
    log_to(settings.place("folder") / "logs" / "serve.log")
    with terminated_as_interrupted():
        try:
            server.run(_Progress(json_output))
        except KeyboardInterrupt:
            typer.echo("emfed: interrupted; the same command goes on from here", err=True)
            raise typer.Exit(130) from None
    if not json_output:
        typer.echo(f"the model is in {settings.place('output')}/")
    _doubt(read_status(settings.place("folder")), json_output)


DOUBTFUL = 3
"""The exit code of a run that left a model which must not be taken for a good one."""


def _doubt(status: dict[str, Any], json_output: bool) -> None:
    """Say loudly, and by the exit code, that a finished run did not end well."""
    doubts = status.get("doubts") or []
    for words in [] if json_output else doubts:
        typer.echo(f"emfed: THIS FIT DID NOT END WELL: {words}", err=True)
    if doubts:
        raise typer.Exit(DOUBTFUL)


def _described(settings: Any) -> dict[str, Any]:
    return {
        **settings.said,
        "sites": vars(settings.sites),
        "server": vars(settings.server),
    }


class _Progress:
    """Says what changed since it was last told."""

    def __init__(self, json_output: bool) -> None:
        self._json, self._last = json_output, ""
        self._refusals: set[str] = set()

    def __call__(self, status: dict[str, Any]) -> None:
        """Print a line if there is news."""
        if not self._json:
            refusals = refusal_lines(status)
            for refusal in refusals:
                if refusal not in self._refusals:
                    typer.echo(refusal)
            self._refusals = set(refusals)
        line = json.dumps(status) if self._json else status_line(status)
        if line and line != self._last:
            self._last = line
            typer.echo(line)


def refusal_lines(status: dict[str, Any]) -> list[str]:
    """Who does not take part, and why."""
    return [f"{site} refuses: {why}" for site, why in (status.get("refusals") or {}).items()]


def status_line(status: dict[str, Any]) -> str:
    """Where a run stands, in one line."""
    state = status.get("state")
    if state in ("waiting", "paused"):
        return f"{state}: {status.get('why', '')}"
    if state == "failed":
        return f"failed: {status.get('error', '')}"
    if state == "running" and "round" not in status:
        return "the run begins"
    if state not in ("running", "finished"):
        return ""
    squared = status.get("squared_H")
    size = "" if squared is None else f", |H|² {squared:.2e}"
    ended = "finished, but not well" if status.get("doubts") else "finished"
    head = f"{ended}: " if state == "finished" else ""
    stages = status.get("stages", 1)
    tail = f", in {stages} stages" if stages > 1 else ""
    asked = status.get("asked")  # not known just after a resumption
    answers = f"{status.get('answered', 0)} of {asked} sites answered, " if asked else ""
    return (
        f"{head}round {status.get('round', 0)} of {status.get('rounds', '?')}{size}, {answers}"
        f"{status.get('up', 0) / 1000:.1f} kB up, {status.get('down', 0) / 1000:.1f} kB down{tail}"
    )


def join(
    address: Annotated[str, typer.Argument(help="The server's, like em.example.org:9400.")],
    data: Annotated[Path, typer.Option(help="This site's rows: .csv, .tsv, .xlsx or .parquet.")],
    ca: Annotated[Path, typer.Option(help="The server's ca.pem, got by a way you trust.")] = Path(
        "ca.pem"
    ),
    key: Annotated[
        Path | None, typer.Option(help="This site's private key, of `emfed keys site NAME`.")
    ] = None,
    columns: Annotated[
        str | None, typer.Option(help="Columns to use, 'age,height'; all if left out.")
    ] = None,
    rules: Annotated[
        Path | None, typer.Option(help="This site's own rules, as TOML; docs/deployment.md.")
    ] = None,
    roster: Annotated[
        Path | None,
        typer.Option(
            help="Folder of everybody's NAME.pub (`emfed keys roster`), so that all answers are "
            "masked; 'roster' if there is one."
        ),
    ] = None,
    folder: Annotated[
        Path | None,
        typer.Option(help="Where this site keeps memory and logs; site-NAME if left out."),
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Show what would be sent, send nothing but a refusal."),
    ] = False,
    insecure: Annotated[
        bool, typer.Option("--insecure", help="No TLS, no key: to this machine only, for trials.")
    ] = False,
    separator: Separator = None,
    decimal: Decimal = ".",
    encoding: Encoding = "utf-8",
    device: Annotated[
        str | None, typer.Option(metavar="NAME", help="Compute on this site's GPU: cuda.")
    ] = None,
    stay: Annotated[
        bool, typer.Option("--stay", help="Wait for the next run when one is over.")
    ] = False,
    engine: Annotated[
        str, typer.Option(help="websocket; or flower, where the server's run.toml says so.")
    ] = "websocket",
) -> None:
    """Take part with this site's rows: statistics leave, rows do not.

    Runs until the run is over or until Ctrl-C, through crashes of its own and of the server. Every
    message that leaves is shown here and kept in FOLDER/messages.jsonl. The model, if the run hands
    it out, is FOLDER/model.emfed.
    """
    from emfed.core.errors import SettingsError
    from emfed.data.files import TextForm
    from emfed.network.addresses import terminated_as_interrupted
    from emfed.network.deployment.joining import Guest, WebSocketGuest
    from emfed.network.deployment.site import read_rules
    from emfed.network.deployment.status import log_to

    kind: type[Guest] = WebSocketGuest
    if engine == "flower":
        from emfed.network.flower.joining import FlowerGuest

        kind = FlowerGuest
    elif engine != "websocket":
        raise SettingsError(f"--engine must be websocket or flower; got {engine!r}.")
    where = folder or Path(f"site-{(data if key is None else key).stem}")
    if dry_run:
        where /= "dry-run"  # the site itself may be at work, with other data or rules
    if roster is None and not insecure and Path("roster").is_dir():
        roster = Path("roster")
    guest = kind(
        address,
        where,
        data,
        None if insecure else ca,
        None if insecure else key,
        None if columns is None else listed(columns),
        read_rules(rules),
        dry_run=dry_run,
        form=TextForm(separator, decimal, encoding),
        device=device,
        roster=roster,
        stay=stay,
    )
    guest.check()
    log_to(where / "logs" / "join.log")
    with terminated_as_interrupted():
        try:
            guest.run(lambda kind, words: typer.echo(f"{_clock()} {kind}: {words}"))
        except KeyboardInterrupt:
            sent = (
                "nothing but refusals was sent"
                if dry_run
                else f"what was sent is in {guest.journal}"
            )
            typer.echo(f"emfed: stopped; {sent}", err=True)
            raise typer.Exit(130) from None


def _clock() -> str:
    return time.strftime("%H:%M:%S")


def status(
    where: Annotated[
        Path, typer.Argument(help="The server's configuration or folder, or a site's folder.")
    ] = Path("run"),
    json_output: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Say where a run stands.

    Exit code 0: finished or under way; 1: failed, no server works on it, or nothing there; 3:
    finished, but it did not converge or was thrown off.
    """
    from emfed.network.addresses import alone
    from emfed.network.deployment.status import LOCK, read_status

    folder = folder_of(where)
    if (folder / "site.json").exists():
        _site_status(folder, json_output)
        return
    found = read_status(folder)
    if not found:
        typer.echo(f"emfed: {folder} holds no run", err=True)
        raise typer.Exit(1)
    with alone(folder / LOCK) as gone:
        pass
    found["working"] = not gone
    typer.echo(json.dumps(found) if json_output else status_line(found))
    for refusal in [] if json_output else refusal_lines(found):
        typer.echo(refusal)
    left = gone and found.get("state") in ("running", "waiting")
    if left and not json_output:
        typer.echo("no server works on it now; `emfed serve` goes on from here")
    if left or found.get("state") == "failed":
        raise typer.Exit(1)
    _doubt(found, json_output)


def _site_status(folder: Path, json_output: bool) -> None:
    """What left a site: messages and bytes by kind, and the last one."""
    journal = folder / "messages.jsonl"
    lines = journal.read_text(encoding="utf-8").splitlines() if journal.exists() else []
    entries = [json.loads(line) for line in lines if line.endswith("}")]
    noted = [entry["content"] for entry in entries if entry["kind"] == "warning"]
    entries = [entry for entry in entries if entry["kind"] != "warning"]
    kinds: dict[str, dict[str, int]] = {}
    for entry in entries:
        row = kinds.setdefault(entry["kind"], {"messages": 0, "bytes": 0})
        row["messages"] += 1
        row["bytes"] += entry["bytes"]
    if json_output:
        last = entries[-1] if entries else None
        typer.echo(json.dumps({"sent": kinds, "last": last, "warnings": noted}))
        return
    for words in noted:
        typer.echo(f"look at your rows: {words}")
    for kind, row in kinds.items():
        typer.echo(f"{kind}\t{row['messages']} messages\t{row['bytes']} bytes")
    if entries:
        from emfed.network.deployment.site import describe

        typer.echo(f"last: {entries[-1]['time']} {describe(entries[-1])}")
    else:
        typer.echo("nothing was sent")


def add_commands(app: typer.Typer) -> None:
    """Give the main command its share."""
    for function, epilog in (
        (serve, examples("emfed serve run.toml", "emfed serve run.toml --host 0.0.0.0")),
        (
            join,
            examples(
                "emfed join em.example.org:9400 --data rows.csv --key oslo.key",
                "emfed join em.example.org:9400 --data rows.parquet --key oslo.key \\",
                "    --rules rules.toml --dry-run",
            ),
        ),
        (status, examples("emfed status run.toml", "emfed status site-oslo")),
    ):
        app.command(cls=Command, epilog=epilog, rich_help_panel=BETWEEN)(function)
