"""The TCP side of the daemon's HTTP server: TLS with client certificates, how many may connect, how slowly they may ask.

aiohttp parses and answers; it does not say when a handshake fails and lets a client take for ever over a header. So connections are
accepted here, handed over when they are trusted, and watched while no request of theirs is being answered.
"""

import asyncio
import contextlib
import ssl
from collections.abc import Callable
from typing import cast

from aiohttp import web

from ckptkit.cache.logs import Log
from ckptkit.errors import StoreError


def server_context(ca: str, cert: str, key: str) -> ssl.SSLContext:
    """TLS 1.3; who has no certificate of the CA does not get past the handshake. Raises StoreError."""
    try:
        made = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH, cafile=ca)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.verify_mode = ssl.CERT_REQUIRED
        made.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise StoreError(f"cannot use the certificates {ca}, {cert}, {key}: {error}", file=cert) from error
    return made


class Door:
    """Listens for peers.

    Args:
        server: What answers requests: a protocol factory of aiohttp.
        tls: None to talk in clear.
        header_s: Time in which a handshake must end, and a request's header must have come.
        idle_s: Time after which a connection without a request is closed.
        most: Connections at a time.
        refused: Told the reason for every connection that was not taken or was closed, for metrics.
    """

    def __init__(
        self, server: web.Server, tls: ssl.SSLContext | None, *, header_s: float, idle_s: float, most: int, log: Log,
        refused: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.server, self.tls = server, tls
        self.header_s, self.idle_s, self.most = header_s, idle_s, most
        self.log, self.refused = log, refused
        self.connections: set[Connection] = set()
        self.by_handler: dict[asyncio.Protocol, Connection] = {}
        self._listening: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen, and give the port. Raises StoreError."""
        loop = asyncio.get_running_loop()
        try:
            self._listening = await loop.create_server(lambda: Connection(self), host, port, backlog=512)
        except OSError as error:
            raise StoreError(
                f"cannot listen at {host}:{port}: {error.strerror}", file=f"{host}:{port}"
            ) from error
        return int(self._listening.sockets[0].getsockname()[1])

    async def stop(self) -> None:
        if self._listening is not None:
            self._listening.close()
        for connection in list(self.connections):
            connection.abort()

    def busy(self, request: web.BaseRequest, busy: bool) -> None:
        """Told when an answer to a request begins and ends."""
        connection = self.by_handler.get(request.protocol)
        if connection is not None:
            connection.watch(not busy)

    def turn_away(self, reason: str, peer: object, detail: str = "") -> None:
        self.refused(reason)
        self.log("connection refused", reason=reason, peer=str(peer), detail=detail[:300])


class Connection(asyncio.Protocol):
    """One connection: a handshake, then bytes to and from aiohttp's protocol."""

    def __init__(self, door: Door) -> None:
        self.door = door
        self.handler: asyncio.Protocol | None = None
        self.peer: object = None
        self._transport: asyncio.Transport | None = None
        self._early: list[bytes] = []
        self._timer: asyncio.TimerHandle | None = None
        self._asking = False
        self._upgrade: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.peer = transport.get_extra_info("peername")
        if len(self.door.connections) >= self.door.most:
            self.door.turn_away("connections", self.peer)
            self._transport.abort()
            return
        self.door.connections.add(self)
        if self.door.tls is None:
            self._hand_over(self._transport)
        else:
            self._upgrade = asyncio.get_running_loop().create_task(self._shake_hands())

    async def _shake_hands(self) -> None:
        assert self._transport is not None and self.door.tls is not None
        try:
            secured = await asyncio.get_running_loop().start_tls(
                self._transport,
                self,
                self.door.tls,
                server_side=True,
                ssl_handshake_timeout=self.door.header_s,
            )
        except (OSError, ssl.SSLError, asyncio.CancelledError) as error:
            self.door.turn_away("tls", self.peer, str(error))
            self.door.connections.discard(self)
            self._transport.abort()
            return
        if secured is None:  # the peer went in the middle
            self.door.connections.discard(self)
            return
        self._hand_over(secured)

    def _hand_over(self, transport: asyncio.Transport) -> None:
        self._transport = transport
        self.handler = self.door.server()
        self.door.by_handler[self.handler] = self
        self.handler.connection_made(transport)
        self.watch(True)
        early, self._early = self._early, []
        for data in early:
            self.data_received(data)

    def data_received(self, data: bytes) -> None:
        if self.handler is None:
            self._early.append(data)
            return
        if self._timer is not None and not self._asking:
            self._asking = True
            self._start(self.door.header_s)
        self.handler.data_received(data)

    def eof_received(self) -> bool | None:
        return self.handler.eof_received() if self.handler is not None else None

    def connection_lost(self, exc: Exception | None) -> None:
        self.door.connections.discard(self)
        self._stop()
        if self.handler is not None:
            self.door.by_handler.pop(self.handler, None)
            self.handler.connection_lost(exc)

    def pause_writing(self) -> None:
        if self.handler is not None:
            self.handler.pause_writing()

    def resume_writing(self) -> None:
        if self.handler is not None:
            self.handler.resume_writing()

    def watch(self, on: bool) -> None:
        """Whether the connection owes us a request."""
        self._stop()
        self._asking = False
        if on:
            self._start(self.door.idle_s)

    def _start(self, seconds: float) -> None:
        self._stop()
        self._timer = asyncio.get_running_loop().call_later(seconds, self._too_slow)

    def _stop(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _too_slow(self) -> None:
        if self._asking:
            self.door.turn_away("slow", self.peer, f"no whole request within {self.door.header_s:g} s")
        self.abort()

    def abort(self) -> None:
        with contextlib.suppress(RuntimeError):
            if self._transport is not None:
                self._transport.abort()
