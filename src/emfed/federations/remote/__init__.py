"""Workers elsewhere: sites with a disk, a server, and bytes between them; no engine."""

from emfed.federations.remote.federation import RemoteFederation
from emfed.federations.remote.opening import bind_constants, pack_constants
from emfed.federations.remote.rules import SiteRules
from emfed.federations.remote.site import Site
from emfed.federations.remote.transport import LocalTransport, Transport

__all__ = [
    "LocalTransport",
    "RemoteFederation",
    "Site",
    "SiteRules",
    "Transport",
    "bind_constants",
    "pack_constants",
]
