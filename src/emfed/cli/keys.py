"""``emfed keys``: the keys of a deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from emfed.cli.help import Command, examples, group, option, switch

keys_app = group(
    "Make the keys of a federation and say which sites may join.\n\nThe server's keys are "
    "made at the server, each site's at the site; ca.pem and NAME.pub are what travels.",
    "emfed keys server --host em.example.org",
    "emfed keys site oslo",
    "emfed keys add oslo.pub",
    "emfed keys roster oslo.pub bergen.pub tromso.pub",
)
Folder = Annotated[Path, option("The server's folder of keys.", names="--keys")]


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
        option("A name or address by which sites reach the server; may be repeated."),
    ] = None,
    keys: Folder = Path("keys"),
) -> None:
    """Make the authority and the server's certificate; again, to renew the certificate."""
    from emfed.network.keys import certificate_hosts, make_server_keys

    for path in make_server_keys(keys, host or []):
        typer.echo(f"wrote {path}")
    typer.echo(f"good for {', '.join(certificate_hosts(keys / 'server.pem'))}")
    typer.echo(f"send {keys / 'ca.pem'} to every site; keep the rest to yourself")


@keys_app.command(cls=Command, epilog=examples("emfed keys site oslo"))
def site(
    name: Annotated[str, typer.Argument(help="The site's name; it names its files and log lines.")],
    out: Annotated[Path, option("Folder for the two files.")] = Path(),
) -> None:
    """Make a site's key pair; the private half stays at the site."""
    from emfed.network.keys import fingerprint, make_site_key, read_public_key, show_fingerprint

    private, public = make_site_key(out, name)
    digest = show_fingerprint(fingerprint(read_public_key(public)))
    typer.echo(f"wrote {private} (keep it)")
    typer.echo(f"wrote {public} (send it to the server and to every other site)")
    typer.echo(f"fingerprint {digest}")


@keys_app.command(cls=Command, epilog=examples("emfed keys add oslo.pub bergen.pub"))
def add(
    public: Annotated[list[Path], typer.Argument(help="Public keys, named after their sites.")],
    keys: Folder = Path("keys"),
    replace: Annotated[
        bool, switch("--replace", "Take the new key of a site whose old one is there.")
    ] = False,
) -> None:
    """Let sites join: a server that runs sees them within seconds."""
    from emfed.network.keys import add_site

    for path in public:
        typer.echo(f"site {add_site(keys, path, replace=replace)} may join")


@keys_app.command(
    cls=Command, epilog=examples("emfed keys rotate oslo.key", "emfed keys rotate oslo.rotate")
)
def rotate(
    file: Annotated[Path, typer.Argument(help="At the site NAME.key; at the server NAME.rotate.")],
    keys: Folder = Path("keys"),
    now: Annotated[
        bool, switch("--now", "At a site that is not running: use the new key from now on.")
    ] = False,
) -> None:
    """Give a site a new key, without a moment without one: first at the site, then at the server.

    At the site this makes the next key and NAME.rotate, which the present key signs. The server's
    people give that to the same command. The site, which may run all the time, changes over by
    itself.
    """
    from emfed.network.keys import rotate_site_key, take_rotation

    if file.suffix == ".rotate":
        typer.echo(f"site {take_rotation(keys, file)} has a new key")
    else:
        told = rotate_site_key(file, now)
        typer.echo(f"wrote {told}: send it to the server, for `emfed keys rotate {told.name}`")
        if now:
            typer.echo(f"{file.stem}.pub is the new key: send it to every other site, to be pinned")


@keys_app.command(cls=Command, epilog=examples("emfed keys seal /media/stick/oslo.seal"))
def seal(
    path: Annotated[Path, typer.Argument(help="The file to write; keep it away from the data.")],
) -> None:
    """Make a secret that encrypts a site's files at rest, for `emfed join --seal`."""
    from emfed.network.keys import make_seal

    make_seal(path)
    typer.echo(f"wrote {path}: without it what it sealed cannot be read")


@keys_app.command(cls=Command, epilog=examples("emfed keys remove oslo"))
def remove(
    names: Annotated[list[str], typer.Argument(help="Names of sites.")],
    keys: Folder = Path("keys"),
) -> None:
    """Shut sites out: a server that runs ends their connections within seconds."""
    from emfed.network.keys import remove_site

    for name in names:
        typer.echo(f"site {name} may no longer join; its key is now {remove_site(keys, name)}")


@keys_app.command(cls=Command, epilog=examples("emfed keys roster oslo.pub bergen.pub tromso.pub"))
def roster(
    public: Annotated[
        list[Path] | None, typer.Argument(help="Public keys, each got by a way you trust.")
    ] = None,
    out: Annotated[Path, option("The site's folder of everybody's keys.")] = Path("roster"),
    digest: Annotated[
        str | None, option("The digest that another site read to you: pin nothing else.")
    ] = None,
    replace: Annotated[
        bool, switch("--replace", "Take the new key of a site whose old one is pinned.")
    ] = False,
) -> None:
    """Pin everybody's keys at a site that masks what it tells, or show what is pinned.

    The digest is the same at every site that pinned the same keys: compare it by telephone. The
    server must not be the one who vouches for them.
    """
    from emfed.network.keys import fingerprint, show_fingerprint
    from emfed.network.roster import pin_keys, roster_digest

    found = pin_keys(public or [], out, digest, replace=replace)
    for name, key in found.items():
        typer.echo(f"{name}\t{show_fingerprint(fingerprint(key))}")
    typer.echo(f"{len(found)} sites, digest {roster_digest(found)}")


@keys_app.command("list", cls=Command, epilog=examples("emfed keys list"))
def show(keys: Folder = Path("keys")) -> None:
    """Name the sites that may join, with the fingerprints of their keys."""
    from emfed.network.keys import (
        check_certificate,
        fingerprint,
        read_site_keys,
        show_fingerprint,
        site_keys,
    )

    good, bad = read_site_keys(keys)
    for name, path in site_keys(keys).items():
        if name in good:
            typer.echo(f"{name}\t{show_fingerprint(fingerprint(good[name]))}\t{path}")
    for words in bad.values():
        typer.echo(f"no key: {words}", err=True)
    if (keys / "server.pem").exists():
        typer.echo(f"the server's certificate lasts {check_certificate(keys / 'server.pem')} days")
