"""Workers elsewhere: sites with a disk, a server, and bytes between them; no engine."""

from fedem.federations.remote.federation import RemoteFederation
from fedem.federations.remote.opening import bind_constants, pack_constants
from fedem.federations.remote.rules import SiteRules
from fedem.federations.remote.site import Site
from fedem.federations.remote.transport import LocalTransport, Transport

__all__ = [
    "LocalTransport",
    "RemoteFederation",
    "Site",
    "SiteRules",
    "Transport",
    "bind_constants",
    "pack_constants",
]
