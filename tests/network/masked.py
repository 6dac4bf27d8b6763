"""Sites that mask, each with keys of its own and a roster of all the others'."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric import ec

from emfed.network import Site
from emfed.network.masking import SiteIdentity
from tests.helpers import OPEN


def identities(names: Any) -> dict[str, SiteIdentity]:
    """Everybody knows everybody."""
    keys = {name: ec.generate_private_key(ec.SECP384R1()) for name in names}
    roster = {name: key.public_key() for name, key in keys.items()}
    return {name: SiteIdentity(name, key, roster) for name, key in keys.items()}


def masked_sites(tables: Mapping[str, Any], where: Path, **options: Any) -> dict[str, Site]:
    """One for each table."""
    known = identities(tables)
    settings: dict[str, Any] = {"rules": OPEN, **options}
    return {
        name: Site(table, where / name, identity=known[name], **settings)
        for name, table in tables.items()
    }
