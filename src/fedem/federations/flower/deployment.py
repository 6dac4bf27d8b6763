"""Command lines of a deployment: SuperLink, SuperExec, SuperNode and the run itself."""

from __future__ import annotations

import ipaddress
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from fedem.errors import FedemError, SettingsError
from fedem.federations.flower.processes import (
    Child,
    console_script,
    environment,
    flower_command,
    make_tools,
)

CONNECTION = "fedem"
"""The name of our SuperLink in Flower's own configuration."""
SITE_APP = "fedem.federations.flower.clientapp:main"


def split_address(address: str) -> tuple[str, int]:
    """``host:port`` or ``[v6]:port``."""
    host, _, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise SettingsError(
            f"an address looks like em.example.org:9400 or [::1]:9400; got {address!r}."
        )
    return host, int(port)


def join_address(host: str, port: int) -> str:
    """The inverse of `split_address`."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def is_loopback(host: str) -> bool:
    """Whether an address is this machine's to itself."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


@dataclass(frozen=True)
class Link:
    """Where the SuperLink listens, with which keys (None: insecure), and its folder."""

    host: str
    port: int
    keys: Path | None
    folder: Path

    def __post_init__(self) -> None:
        if self.keys is None and not is_loopback(self.host):
            raise SettingsError(
                "without TLS the server binds this machine's own address only: use --host "
                f"127.0.0.1, or make keys with `fedem keys server`; got {self.host}."
            )

    @property
    def local(self) -> str:
        """The address by which processes of this machine reach it."""
        everywhere = {"0.0.0.0": "127.0.0.1", "::": "::1"}
        return join_address(everywhere.get(self.host, self.host), self.port)

    def environment(self) -> dict[str, str]:
        """Of all processes at the server."""
        tools = make_tools(
            self.folder / "bin", {"flwr-serverapp": console_script("flwr-serverapp")}
        )
        home = self.folder / "flower"
        return environment(home, PATH=str(tools), FEDEM_SERVER_FOLDER=str(self.folder))

    def superlink(self) -> Child:
        """The guarded SuperLink, with a database and tasks in processes of their own."""
        command = [
            *(sys.executable, "-P", "-m", "fedem.federations.flower.superlink"),
            *("--host", self.host, "--port", str(self.port)),
            *("--database", str(self.folder / "flower.db"), "--isolation", "process"),
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
                *("--superexec-auth-secret-file", str(self.keys / "exec.secret")),
            ]
        return self._child("superlink", command)

    def superexec(self) -> Child:
        """The process that starts the server's program when a run is there."""
        command = [*flower_command("flower-superexec"), "--runtime-api-address", self.local]
        if self.keys is None:
            command.append("--insecure")
        else:
            command += [
                *("--root-certificates", str(self.keys / "ca.pem")),
                *("--superexec-auth-secret-file", str(self.keys / "exec.secret")),
            ]
        return self._child("superexec", command)

    def _child(self, name: str, command: list[str]) -> Child:
        return Child(name, command, self.environment(), self.folder / "logs" / f"{name}.log")

    def flwr(self, *arguments: str, timeout: float = 60) -> dict[str, object]:
        """Run ``flwr`` against this SuperLink, and read its JSON."""
        self._write_connection()
        done = subprocess.run(
            [*flower_command("flwr"), *arguments, CONNECTION, "--format", "json"],
            env=self.environment(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        start = done.stdout.find("{")
        try:
            answer = json.loads(done.stdout[start:]) if start >= 0 else {}
        except json.JSONDecodeError:
            answer = {}
        if done.returncode != 0 or not isinstance(answer, dict) or not answer.get("success"):
            said = " ".join((done.stdout + " " + done.stderr).split())
            raise FedemError(f"flwr {' '.join(arguments[:2])} failed: {said[-400:]}")
        return answer

    def _write_connection(self) -> None:
        lines = [
            "[superlink]",
            f'default = "{CONNECTION}"',
            f"[superlink.{CONNECTION}]",
            f"address = {json.dumps(self.local)}",
            "insecure = true"
            if self.keys is None
            else f"root-certificates = {json.dumps(str((self.keys / 'ca.pem').resolve()))}",
        ]
        home = self.folder / "flower"
        home.mkdir(parents=True, exist_ok=True)
        (home / "config.toml").write_text("\n".join(lines) + "\n", encoding="utf-8")

    def register(self, public: Path, name: str) -> None:
        """Let the node with this key in; it may be in already."""
        try:
            self.flwr("supernode", "register", str(public), "--name", name)
        except FedemError as error:
            if "already" not in str(error):
                raise

    def start_run(self, app: Path) -> str:
        """Submit the app; returns Flower's number of the run."""
        return str(self.flwr("run", str(app))["run-id"])


def supernode(
    address: str,
    folder: Path,
    *,
    authority: Path | None,
    key: Path | None,
    port: int,
    more: Mapping[str, str],
    client: str = SITE_APP,
) -> Child:
    """A SuperNode whose only program is ours; without ``authority`` it speaks without TLS."""
    host, _ = split_address(address)
    if authority is None and not is_loopback(host):
        raise SettingsError(
            "without TLS a site joins a server on its own machine only: give --ca and --key, or "
            f"drop --insecure; got {address}."
        )
    tools = make_tools(
        folder / "bin",
        {"flwr-clientapp": client, "flower-superexec": console_script("flower-superexec")},
    )
    command = [
        *flower_command("flower-supernode"),
        *("--superlink", address, "--host", "127.0.0.1", "--port", str(port)),
    ]
    if authority is None:
        command.append("--insecure")
    else:
        command += ["--root-certificates", str(authority)]
    if key is not None:
        command += ["--auth-supernode-private-key", str(key)]
    variables = environment(folder / "flower", PATH=str(tools), **more)
    return Child("supernode", command, variables, folder / "logs" / "supernode.log")
