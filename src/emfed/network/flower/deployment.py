"""Command lines of a deployment: SuperLink, SuperExec, SuperNode and the run itself."""

from __future__ import annotations

import logging
import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from emfed.network.addresses import (
    check_insecure_server,
    check_insecure_site,
    join_address,
    split_address,
)
from emfed.network.flower.processes import (
    Child,
    environment,
    flower_command,
    make_tools,
    without_proxy,
)
from emfed.network.flower.superlink import SECRET
from emfed.network.keys import read_private_key, write_private

if TYPE_CHECKING:
    from emfed.network.flower.registry import Control

logger = logging.getLogger(__name__)
RUNTIME = "emfed.network.flower.runtime"
"""The module of Flower's processes at the server, as we start them."""


@dataclass(frozen=True)
class Link:
    """Where the SuperLink listens, with which keys (None: insecure), and its folder."""

    host: str
    port: int
    keys: Path | None
    folder: Path

    def __post_init__(self) -> None:
        if self.keys is None:
            check_insecure_server(self.host)

    @property
    def local(self) -> str:
        """The address by which processes of this machine reach it."""
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        return join_address(everywhere.get(self.host, self.host), self.port)

    def environment(self, more: Mapping[str, str]) -> dict[str, str]:
        """The environment of all processes at the server."""
        tools = make_tools(self.folder / "bin", {"flwr-serverapp": f"{RUNTIME}:serverapp"})
        own = without_proxy(split_address(self.local)[0])
        return environment(self.folder / "flower", PATH=str(tools), **own, **more)

    def superlink(self, **more: str) -> Child:
        """The guarded SuperLink, with a database and tasks in processes of their own."""
        command = [
            *(sys.executable, "-P", "-m", "emfed.network.flower.superlink"),
            *("--host", self.host, "--port", str(self.port)),
            *("--database", str(self.folder / "flower.db"), "--isolation", "process"),
            *("--superexec-auth-secret-file", str(self._task_secret)),
            "--disable-runtime-dependency-installation",
        ]
        if self.keys is None:
            command.append("--insecure")
        else:
            command += [
                *("--ssl-certfile", str(self.keys / "server.pem")),
                *("--ssl-keyfile", str(self.keys / "server.key")),
                *("--ssl-ca-certfile", str(self.keys / "ca.pem")),
                *("--enable-supernode-auth",),
            ]
        return self._child("superlink", command, {SECRET: str(self.secret), **more})

    def superexec(self, **more: str) -> Child:
        """The process that starts the server's program when a run is there."""
        command = [
            *(sys.executable, "-P", "-c", f"from {RUNTIME} import superexec; superexec()"),
            *("--runtime-api-address", self.local),
            *("--superexec-auth-secret-file", str(self._task_secret)),
        ]
        if self.keys is None:
            command.append("--insecure")
        else:
            command += ["--root-certificates", str(self.keys / "ca.pem")]
        return self._child("superexec", command, {SECRET: str(self.secret), **more})

    def _child(self, name: str, command: list[str], more: Mapping[str, str]) -> Child:
        return Child(name, command, self.environment(more), self.folder / "logs" / f"{name}.log")

    @property
    def secret(self) -> Path:
        """A file that only we can read: who shows its content may control the SuperLink."""
        return secret_in(self.folder, "control.secret")

    @property
    def _task_secret(self) -> Path:
        """Lets the server's own processes, and no others, take its tasks."""
        return secret_in(self.folder, "exec.secret")

    @property
    def control(self) -> Control:
        """What the SuperLink can be asked from here."""
        from emfed.network.flower.registry import Control

        authority = None if self.keys is None else self.keys / "ca.pem"
        return Control(self.local, authority, self.secret.read_text(encoding="utf-8"))


def secret_in(folder: Path, name: str) -> Path:
    """A file of random bytes that only we can read, made where it is not there."""
    path = folder / name
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        write_private(path, secrets.token_hex(32).encode())
    return path


@dataclass(frozen=True)
class Node:
    """A site's SuperNode and its program, ours; without ``authority`` it has no TLS."""

    address: str
    folder: Path
    authority: Path | None
    key: Path | None
    port: int
    more: Mapping[str, str]
    """Environment of the site's program."""

    def __post_init__(self) -> None:
        if self.authority is None:
            check_insecure_site(self.address)

    def supernode(self) -> Child:
        """The process that speaks with the server."""
        command = [
            *flower_command("flower-supernode"),
            *("--superlink", self.address, "--isolation", "process"),
            *("--host", "127.0.0.1", "--port", str(self.port)),
            *("--superexec-auth-secret-file", str(self.folder / "exec.secret")),
        ]
        if self.authority is None:
            command.append("--insecure")
        else:
            command += ["--root-certificates", str(self.authority)]
        if self.key is not None:
            command += ["--auth-supernode-private-key", str(self.key)]
        return self._child("supernode", command)

    def site_process(self) -> Child:
        """The process that answers; it speaks with the SuperNode on this machine only."""
        program = (sys.executable, "-P", "-m", "emfed.network.flower.site_process")
        secret = str(self.folder / "exec.secret")
        return self._child("site_process", [*program, f"127.0.0.1:{self.port}", secret])

    def _child(self, name: str, command: list[str]) -> Child:
        variables = environment(self.folder / "flower", **self.more)
        return Child(name, command, variables, self.folder / "logs" / f"{name}.log")

    @property
    def _session(self) -> Path:
        return self.folder / "session"

    def remember(self, number: int) -> None:
        """Note the number under which the server knows us, until the session has ended."""
        self._session.write_text(str(number), encoding="utf-8")

    def release(self) -> None:
        """End a session that a crash left open: the server would refuse us for a minute."""
        if self.key is None or self.authority is None or not self._session.exists():
            return
        try:
            _deactivate(self.address, self.authority, self.key, int(self._session.read_text()))
        except Exception as error:  # the server then ends it by itself, later
            logger.info("the last session could not be ended: %s", error)
        self._session.unlink(missing_ok=True)


def _deactivate(address: str, authority: Path, key: Path, number: int) -> None:
    """Tell the SuperLink that a node is gone, as the node itself would have."""
    from flwr.proto.fleet_pb2 import DeactivateNodeRequest
    from flwr.supercore.interceptors.http.runtime_version import RuntimeVersionHttpInterceptor
    from flwr.supernode.fleet_http_client import FleetHttpClient
    from flwr.supernode.node_auth_http_interceptor import NodeAuthHttpInterceptor

    private = read_private_key(key)
    checks: list[Any] = [
        RuntimeVersionHttpInterceptor(component_name="SuperNode"),
        NodeAuthHttpInterceptor(private, private.public_key()),
    ]
    with FleetHttpClient.from_server_address(
        address, False, str(authority), interceptors=checks
    ) as client:
        client.DeactivateNode(DeactivateNodeRequest(node_id=number))
