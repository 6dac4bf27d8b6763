"""``emfed keys``: the keys of a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from emfed.cli.help import Command, Group, examples

keys_app = typer.Typer(
    cls=Group,
    help="Make the keys of a federation and say which sites may join.\n\nThe server's keys are "
    "made at the server, each site's at the site; ca.pem and NAME.pub are what travels.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Folder = Annotated[Path, typer.Option("--keys", help="The server's folder of keys.")]


@keys_app.command(
    cls=Command,
    epilog=examples(
        "emfed keys server --host em.example.org",
        "emfed keys server --host 10.0.0.5 --host em.example.org --keys /etc/emfed/keys",
    ),
)
def server(
    host: Annotated[
        list[str] | None,
        typer.Option(help="A name or address by which sites reach the server; may be repeated."),
    ] = None,
    keys: Folder = Path("keys"),
) -> None:
    """Make the authority and the server's certificate; again, to renew the certificate."""
    from emfed.network.flower.keys import certificate_hosts, make_server_keys

    for path in make_server_keys(keys, host or []):
        typer.echo(f"wrote {path}")
    typer.echo(f"good for {', '.join(certificate_hosts(keys / 'server.pem'))}")
    typer.echo(f"send {keys / 'ca.pem'} to every site; keep the rest to yourself")


@keys_app.command(cls=Command, epilog=examples("emfed keys site oslo"))
def site(
    name: Annotated[str, typer.Argument(help="The site's name; it names its files and log lines.")],
    out: Annotated[Path, typer.Option(help="Folder for the two files.")] = Path(),
) -> None:
    """Make a site's key pair; the private half stays at the site."""
    from emfed.network.flower.keys import make_site_key

    private, public = make_site_key(out, name)
    typer.echo(f"wrote {private} (keep it) and {public} (send it to the server)")


@keys_app.command(cls=Command, epilog=examples("emfed keys add oslo.pub bergen.pub"))
def add(
    public: Annotated[list[Path], typer.Argument(help="Public keys, named after their sites.")],
    keys: Folder = Path("keys"),
) -> None:
    """Let sites join: a server that runs sees them within seconds."""
    from emfed.network.flower.keys import add_site

    for path in public:
        typer.echo(f"site {add_site(keys, path)} may join")


@keys_app.command("list", cls=Command)
def show(keys: Folder = Path("keys")) -> None:
    """Name the sites that may join."""
    from emfed.network.flower.keys import site_keys

    for name, path in site_keys(keys).items():
        typer.echo(f"{name}\t{path}")
