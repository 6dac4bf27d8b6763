"""The same conversation over gRPC, one bidirectional stream a site: what WebSockets stand beside.

Certificates of both ends; the site's is signed by the same authority. It carries messages and does
nothing else that the engine does (no reconnecting, no second holders, no words).
"""

from __future__ import annotations

import asyncio
import queue
import time
from collections.abc import AsyncIterator, Iterator, Mapping
from pathlib import Path
from typing import Any

import grpc
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.x509.oid import NameOID

from emfed.network import keys as made
from emfed.network.websocket.background import Background

METHOD = "/emfed/talk"
ANSWER = b"a" * 17


class GrpcServer:
    """As much of a transport as the benchmark needs."""

    def __init__(self, keys: Path) -> None:
        self._streams: dict[str, asyncio.Queue[bytes]] = {}
        self._answers: queue.SimpleQueue[tuple[str, bytes]] = queue.SimpleQueue()
        self._background = Background("grpc")
        self.port = self._background.run(self._open(keys))

    async def _open(self, keys: Path) -> int:
        files = [(keys / name).read_bytes() for name in ("server.key", "server.pem", "ca.pem")]
        shown = grpc.ssl_server_credentials([(files[0], files[1])], files[2], True)
        handler = grpc.stream_stream_rpc_method_handler(self._talk)
        self._server = grpc.aio.server()
        self._server.add_generic_rpc_handlers(
            (grpc.method_handlers_generic_handler("emfed", {"talk": handler}),)
        )
        port = self._server.add_secure_port("127.0.0.1:0", shown)
        await self._server.start()
        return int(port)

    async def _talk(self, answers: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        name = (await anext(answers)).decode()
        questions = self._streams[name] = asyncio.Queue()

        async def take() -> None:
            async for answer in answers:
                self._answers.put((name, answer))

        taking = asyncio.create_task(take())
        try:
            while True:
                yield await questions.get()
        finally:
            taking.cancel()

    def wait_for(self, expected: int, seconds: float) -> None:
        end = time.monotonic() + seconds
        while len(self._streams) < expected:
            assert time.monotonic() < end, f"{len(self._streams)} of {expected} came"
            time.sleep(0.02)

    def deliver(
        self, messages: Mapping[str, bytes], deadline: float
    ) -> Iterator[tuple[str, bytes]]:
        def ask() -> None:
            for name, message in messages.items():
                self._streams[name].put_nowait(message)

        self._background.call(ask)
        for _ in messages:
            yield self._answers.get(timeout=deadline)

    def __enter__(self) -> GrpcServer:
        return self

    def __exit__(self, *_: object) -> None:
        self._background.run(self._server.stop(None), 10)
        self._background.stop()


def _credentials(folder: Path, name: str) -> Any:
    """The server's authority, and a certificate of the site's by the same authority."""
    key = made.read_private_key(folder / f"{name}.key")
    authority = folder / "keys"
    encoding = (serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8)
    private = key.private_bytes(*encoding, serialization.NoEncryption())
    signer = serialization.load_pem_private_key((authority / "ca.key").read_bytes(), None)
    issuer = x509.load_pem_x509_certificate((authority / "ca.pem").read_bytes())
    subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
    builder = made._builder(subject, issuer.subject, key.public_key(), made.SERVER_DAYS)
    own = builder.sign(signer, hashes.SHA384()).public_bytes(serialization.Encoding.PEM)
    return grpc.ssl_channel_credentials((authority / "ca.pem").read_bytes(), private, own)


async def answer_all(port: int, folder: Path, names: list[str]) -> None:
    """Sites in one event loop, each with a connection of its own."""

    async def one(name: str) -> None:
        options = [("grpc.use_local_subchannel_pool", 1)]
        shown = _credentials(folder, name)
        async with grpc.aio.secure_channel(f"127.0.0.1:{port}", shown, options) as channel:
            call = channel.stream_stream(METHOD)()
            await call.write(name.encode())
            while (question := await call.read()) is not grpc.aio.EOF:
                assert question
                await call.write(ANSWER)

    await asyncio.gather(*map(one, names), return_exceptions=True)
