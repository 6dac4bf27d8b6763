"""What we ask of a SuperLink's control interface: which nodes it lets in, and the run.

The requests carry the secret that `superlink.LocalOnly` wants, so Flower's own command line, which
cannot send it, is not used.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from flwr.cli.build import build_fab_from_disk
from flwr.common.config import parse_config_args
from flwr.common.serde import fab_to_proto, user_config_to_proto
from flwr.proto.control_pb2 import (
    ListNodesRequest,
    RegisterNodeRequest,
    StartRunRequest,
    StopRunRequest,
    UnregisterNodeRequest,
)
from flwr.supercore.control import ControlHttpClient
from flwr.supercore.fab import Fab
from flwr.supercore.interceptors import RuntimeVersionHttpInterceptor
from flwr.supercore.primitives.asymmetric import public_key_to_bytes

from emfed.core.errors import EmfedError
from emfed.network.flower.superlink import HEADER

logger = logging.getLogger(__name__)
GONE = "unregistered"


class Showing:
    """Sends the secret with every request."""

    def __init__(self, secret: str) -> None:
        self._secret = secret

    def intercept(self, context: Any, call_next: Any) -> Any:
        """Add it, and go on."""
        context.request.headers[HEADER] = self._secret
        return call_next(context)


class Control:
    """A SuperLink on this machine, and the secret that it knows us by."""

    def __init__(self, address: str, authority: Path | None, secret: str) -> None:
        self._address, self._authority, self._secret = address, authority, secret

    @contextlib.contextmanager
    def _asking(self, what: str) -> Iterator[ControlHttpClient]:
        checks: list[Any] = [
            RuntimeVersionHttpInterceptor(component_name="flwr CLI"),
            Showing(self._secret),
        ]
        authority = None if self._authority is None else str(self._authority)
        try:
            with ControlHttpClient.from_server_address(
                self._address, authority is None, authority, interceptors=checks
            ) as client:
                yield client
        except Exception as error:
            said = getattr(getattr(error, "response", None), "text", str(error))
            raise EmfedError(f"the SuperLink did not {what}: {said[:300]}") from None

    def admit(self, sites: Mapping[str, EllipticCurvePublicKey]) -> tuple[list[str], list[str]]:
        """Register keys that are new, shut out nodes whose key is gone; the names of both.

        Flower never takes back a key that was shut out. Such a site needs a new key, and holds up
        nobody else.
        """
        keys = {name: public_key_to_bytes(key) for name, key in sites.items()}
        with self._asking("take the sites' keys") as client:
            found = client.ListNodes(ListNodesRequest()).nodes_info
            nodes = [node for node in found if node.status != GONE]
            out = [node for node in nodes if keys.get(node.name) != node.public_key]
            for node in out:
                client.UnregisterNode(UnregisterNodeRequest(node_id=node.node_id))
            known = {node.name for node in nodes if keys.get(node.name) == node.public_key}
            new = [name for name in keys if name not in known]
        taken = []
        for name in new:
            try:
                with self._asking(f"take the key of {name}") as client:
                    client.RegisterNode(RegisterNodeRequest(public_key=keys[name], name=name))
                taken.append(name)
            except EmfedError as error:
                logger.error(
                    "%s. Flower does not take back a key that was removed: the site makes a new "
                    "one (`emfed keys site`), for `emfed keys add --replace`",
                    error,
                )
        return taken, [node.name for node in out]

    def start_run(self, app: Path, settings: str = "") -> int:
        """Submit an app, with settings like ``--run-config`` of ``flwr run``; the run's number."""
        with self._asking("start the run") as client:
            bundle = build_fab_from_disk(app)
            given = parse_config_args([settings] if settings else None)
            request = StartRunRequest(
                fab=fab_to_proto(Fab(hashlib.sha256(bundle).hexdigest(), bundle, {})),
                override_config=user_config_to_proto(given),
            )
            return int(client.StartRun(request).run_id)

    def stop_run(self, number: int) -> None:
        """Tell it that a run has ended."""
        with self._asking("stop the run") as client:
            client.StopRun(StopRunRequest(run_id=number))
