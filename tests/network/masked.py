"""Sites that mask, each with keys of its own and a roster of all the others'."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from emfed.network import Site
from emfed.network.masking import SiteIdentity
from tests.helpers import OPEN


def masked_sites(tables: Mapping[str, Any], where: Path, **options: Any) -> dict[str, Site]:
    """One for each table."""
    known = SiteIdentity.everybody(tables)
    settings: dict[str, Any] = {"rules": OPEN, **options}
    return {
        name: Site(table, where / name, identity=known[name], **settings)
        for name, table in tables.items()
    }
