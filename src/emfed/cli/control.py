"""``emfed control``: what an operator tells a run that goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from emfed.cli.help import Command, examples, group, option

control_app = group(
    "Tell a run that goes on what to do: pause, finish, more rounds, somebody out.\n\nWhat is "
    "said holds until it is changed, also through a restart of the server.",
    "emfed control pause run.toml",
    "emfed control expel run.toml oslo --why 'wrong units'",
)
Where = Annotated[Path, typer.Argument(help="The server's configuration or its folder.")]
SiteName = Annotated[str, typer.Argument(help="The site's name.")]


def folder_of(where: Path) -> Path:
    """The folder of a run, from its configuration or as it is given."""
    from emfed.deployment.config import read_config

    return read_config(where).place("folder") if where.is_file() else where


def _order(where: Path, words: str, **changes: Any) -> None:
    from emfed.deployment.orders import change_orders
    from emfed.deployment.status import read_status

    folder = folder_of(where)
    change_orders(folder, **changes)
    typer.echo(words)
    if read_status(folder).get("state") == "finished":
        typer.echo("emfed: this run is finished already: nothing changes", err=True)


@control_app.command(cls=Command, epilog=examples("emfed control pause run.toml"))
def pause(where: Where) -> None:
    """Stop after this round and wait; sites stay connected."""
    _order(where, "the run pauses after this round", paused=True)


@control_app.command(cls=Command, epilog=examples("emfed control resume run.toml"))
def resume(where: Where) -> None:
    """Go on after a pause."""
    _order(where, "the run goes on", paused=False, finish=False)


@control_app.command(cls=Command, epilog=examples("emfed control finish run.toml"))
def finish(where: Where) -> None:
    """End after this round, and leave the model that was reached."""
    _order(where, "the run ends after this round", finish=True)


@control_app.command(cls=Command, epilog=examples("emfed control extend run.toml 500"))
def extend(
    where: Where,
    rounds: Annotated[int, typer.Argument(min=1, help="The new limit on rounds, in all.")],
) -> None:
    """Set another limit on rounds, while the run goes on."""
    from emfed.core.errors import SettingsError
    from emfed.deployment.status import read_status

    made = read_status(folder_of(where)).get("round", 0)
    if rounds <= made:
        raise SettingsError(
            f"the run has made {made} rounds: say a limit above that, or end it with `emfed "
            "control finish`."
        )
    _order(where, f"the limit is {rounds} rounds", rounds=rounds, finish=False)


@control_app.command(
    cls=Command, epilog=examples("emfed control expel run.toml oslo --why 'wrong units'")
)
def expel(
    where: Where,
    site: SiteName,
    why: Annotated[str, option("Words for the log and for people.")] = "",
) -> None:
    """Take a site out: the others go on without its rows."""
    from emfed.core.errors import SettingsError
    from emfed.deployment.status import read_status
    from emfed.network.addresses import printable

    known = read_status(folder_of(where)).get("sites")
    if known and site not in known:
        raise SettingsError(
            f"no site {site!r} was here; known are {', '.join(known)}. `emfed keys remove` keeps "
            "out one that never came."
        )
    words = printable(f"expelled by the operator{': ' * bool(why)}{why}")
    _order(where, f"{site} is out", expel={site: words})


@control_app.command(cls=Command, epilog=examples("emfed control readmit run.toml oslo"))
def readmit(where: Where, site: SiteName) -> None:
    """Let a site that was expelled take part again."""
    from emfed.deployment.orders import read_orders

    known = site in read_orders(folder_of(where)).expelled
    words = f"{site} may take part" if known else f"{site} was not expelled"
    _order(where, words, expel={site: None})
