"""Which nodes a SuperLink lets in: those whose public keys lie in the server's folder."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from flwr.proto.control_pb2 import ListNodesRequest, RegisterNodeRequest, UnregisterNodeRequest
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from fedem.errors import FedemError
from fedem.federations.flower.keys import read_public_key

GONE = "unregistered"


def admit(
    address: str, authority: Path | None, sites: Mapping[str, Path]
) -> tuple[list[str], list[str]]:
    """Register keys that are new, shut out nodes whose key is gone; returns the names of both."""
    keys = {name: public_key_to_bytes(read_public_key(path)) for name, path in sites.items()}
    checks: list[Any] = [RuntimeVersionHttpInterceptor(component_name="flwr CLI")]
    with ControlHttpClient.from_server_address(
        address,
        authority is None,
        None if authority is None else str(authority),
        interceptors=checks,
    ) as client:
        try:
            nodes = [
                node
                for node in client.ListNodes(ListNodesRequest()).nodes_info
                if node.status != GONE
            ]
            out = [node for node in nodes if keys.get(node.name) != node.public_key]
            for node in out:
                client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
            known = {node.name for node in nodes if keys.get(node.name) == node.public_key}
            new = [name for name in keys if name not in known]
            for name in new:
                client.RegisterNode(RegisterNodeRequest(public_key=keys[name], name=name))
        except Exception as error:
            said = getattr(getattr(error, "response", None), "text", str(error))
            raise FedemError(f"the SuperLink did not take the sites' keys: {said[:300]}") from None
    return new, [node.name for node in out]
