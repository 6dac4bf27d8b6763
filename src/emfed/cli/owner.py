"""``emfed owner``: what the owner of a site's rows decides and checks."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer

from emfed.cli.help import Command, examples, group, switch

owner_app = group(
    "Decide and check what a site tells: fits that wait for a word, the journal, erasure.",
    "emfed owner approve site-oslo",
    "emfed owner journal site-oslo",
)
Folder = Annotated[Path, typer.Argument(help="The site's folder, like site-oslo.")]


@owner_app.command(
    cls=Command,
    epilog=examples("emfed owner approve site-oslo", "emfed owner approve site-oslo 3f2a --no"),
)
def approve(
    folder: Folder,
    fit: Annotated[str, typer.Argument(help="The fit's number, or its beginning.")] = "",
    no: Annotated[bool, switch("--no", "Do not take part in it.")] = False,
) -> None:
    """Answer for a fit that waits, or list all that the owner was asked about.

    Fits wait where the rules say `ask_first = true`. An answer holds for every run of that fit, and
    may be changed.
    """
    from emfed.deployment.approval import answer_fit, known_fits

    if fit:
        words = answer_fit(folder, fit, not no)
        typer.echo(f"{'refused' if no else 'approved'}: {words}")
        return
    answers = {None: "waits", True: "approved", False: "refused"}
    for number, about in known_fits(folder).items():
        typer.echo(f"{number}\t{answers[about.get('answer')]}\t{about['words']}")


@owner_app.command(cls=Command, epilog=examples("emfed owner journal site-oslo"))
def journal(folder: Folder) -> None:
    """Check that no line of the journal was altered, and sum up what the site told in each run.

    Each line says of which sum the site sent a part: what was asked, about which state, and with
    which sites it was added up.
    Exit code 1 says that one was. The digest at the end stands for the whole journal: kept
    elsewhere, it shows later that nothing before it was changed.
    """
    from emfed.deployment.site import JOURNAL
    from emfed.network.journal import audit, check_journal

    lines, wrong = check_journal(folder / JOURNAL)
    if wrong:
        typer.echo(f"emfed: {folder / JOURNAL}: {wrong}", err=True)
        raise typer.Exit(1)
    head = (folder / f"{JOURNAL}.head").read_text(encoding="ascii").split()[-1] if lines else "none"
    for words in audit(folder / JOURNAL):
        typer.echo(words)
    typer.echo(f"{lines} lines, whole and unaltered; digest {head}")


@owner_app.command(cls=Command, epilog=examples("emfed owner erase site-oslo"))
def erase(folder: Folder) -> None:
    """Forget everything that was computed from the rows, after some of them had to be erased.

    Erase the rows in your own file first. This removes the site's copy of them and its files of all
    runs, and keeps the journal and what was spent of its allowances. The next `emfed join` takes
    part in new runs with the rows that are left; from one that was under way the site is out.
    """
    from emfed.deployment.site import erase_site

    runs = erase_site(folder)
    typer.echo(
        f"{time.strftime('%Y-%m-%d')}: the copy of the rows and what {runs} runs left are "
        "erased; models that were fitted before still count those rows"
    )
