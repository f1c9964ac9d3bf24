"""The Unix socket for the ranks of this node and for `ckptkit cache`: sessions, limits, descriptors.

What a call means is the handler's business. Here: who may connect (the daemon's own user, or one that the configuration
names), how much may be sent and how slowly, one call of a session after the other.
"""

import asyncio
import contextlib
import itertools
import os
import socket
import traceback
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ckptkit.cache.logs import Log
from ckptkit.cache.peercred import Peer, peer_of
from ckptkit.cache.wire import Decoder, Message, WireError, encode
from ckptkit.errors import CkptError, StoreError


@dataclass
class Reply:
    """An answer. Descriptors are closed after they were sent."""

    fields: Mapping[str, Any] = field(default_factory=dict)
    blobs: Sequence[bytes] = ()
    fds: Sequence[int] = ()


class CallError(CkptError):
    """A call that is refused with a code of HTTP."""

    def __init__(self, code: int, detail: str) -> None:
        super().__init__(detail, code=code)


class Session:
    """One connection. `number` is never used twice."""

    def __init__(self, number: int, sock: socket.socket, peer: Peer) -> None:
        self.number, self.sock, self.peer = number, sock, peer
        self.greeted = False
        self.facts: dict[str, Any] = {}
        self._sending = asyncio.Lock()

    async def send(
        self, fields: Mapping[str, Any], blobs: Sequence[bytes] = (), fds: Sequence[int] = ()
    ) -> None:
        data = memoryview(encode(fields, blobs, len(fds)))
        loop = asyncio.get_running_loop()
        async with self._sending:
            while fds:
                try:
                    sent = socket.send_fds(self.sock, [data], list(fds))
                except BlockingIOError:
                    await _writable(loop, self.sock)
                    continue
                data, fds = data[sent:], ()
            await loop.sock_sendall(self.sock, data)

    def close(self) -> None:
        """Make the session's reader end."""
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


class UdsServer:
    """Listens at a path.

    Args:
        handle: Called with session and message for every call; gives the reply or raises CallError.
        closed: Told when a session has ended.
        uids: Users that may connect.
        blob_limit: Most bytes that may follow one line.
        slow_s: Time in which a message that was begun must be complete.
        most: Sessions at a time.
        refused: Told the reason for every connection or message that was not taken, for metrics.
    """

    def __init__(
        self, path: str, handle: Callable[[Session, Message], Awaitable[Reply]], closed: Callable[[Session], None], *,
        uids: frozenset[int], blob_limit: int, slow_s: float, most: int, log: Log, refused: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.path = path
        self._handle, self._closed, self._refused = handle, closed, refused
        self._uids, self._blob_limit, self._slow_s, self._most = uids, blob_limit, slow_s, most
        self._log = log
        self._numbers = itertools.count(1)
        self._tasks: dict[asyncio.Task[None], Session] = {}
        self._accepting: asyncio.Task[None] | None = None
        self._sock: socket.socket | None = None

    @property
    def sessions(self) -> list[Session]:
        return list(self._tasks.values())

    def start(self) -> None:
        """Listen. The socket's folder must be private already. Raises StoreError."""
        made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
        head, name = os.path.split(self.path)
        try:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)  # of a daemon that was killed: we hold the lock
            folder = os.open(head, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            try:
                before = os.umask(0o177)
                try:
                    made.bind(f"/proc/self/fd/{folder}/{name}")
                finally:
                    os.umask(before)
            finally:
                os.close(folder)
            made.listen(128)
        except OSError as error:
            made.close()
            raise StoreError(f"cannot listen at {self.path}: {error.strerror}", file=self.path) from error
        self._sock = made
        self._accepting = asyncio.create_task(self._accept())

    async def stop(self) -> None:
        if self._accepting is not None:
            self._accepting.cancel()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._sock is not None:
            self._sock.close()
            with contextlib.suppress(OSError):
                os.unlink(self.path)

    async def _accept(self) -> None:
        assert self._sock is not None
        loop = asyncio.get_running_loop()
        while True:
            try:
                sock, _ = await loop.sock_accept(self._sock)
            except OSError as error:  # out of descriptors, for example: others still work
                self._log("uds accept failed", error=str(error))
                await asyncio.sleep(0.1)
                continue
            sock.setblocking(False)
            try:
                self._admit(sock)
            except (StoreError, OSError) as error:
                self._refused("peer")
                self._log("connection refused", reason=str(error))
                sock.close()

    def _admit(self, sock: socket.socket) -> None:
        if len(self._tasks) >= self._most:
            raise StoreError(f"{self._most} connections are open already")
        peer = peer_of(sock)
        if peer.uid not in self._uids:
            os.close(peer.pidfd)
            raise StoreError(f"user {peer.uid} may not use this daemon")
        session = Session(next(self._numbers), sock, peer)
        task = asyncio.create_task(self._serve(session))
        self._tasks[task] = session
        task.add_done_callback(self._tasks.pop)

    async def _serve(self, session: Session) -> None:
        loop = asyncio.get_running_loop()
        decoder = Decoder(blob_limit=self._blob_limit)
        try:
            while True:
                message = decoder.take()
                if message is None:
                    limit = None if decoder.empty else self._slow_s
                    async with asyncio.timeout(limit):
                        data = await loop.sock_recv(session.sock, 1 << 18)
                    if not data:
                        return
                    decoder.feed(data)
                    continue
                await self._answer(session, message)
        except TimeoutError:
            self._refused("slow")
            self._log("connection closed", session=session.number, reason="a message took too long to arrive")
        except WireError as error:
            self._refused("malformed")
            self._log("connection closed", session=session.number, reason=str(error))
        except OSError:
            pass
        except Exception as error:  # noqa: BLE001  (a fault of ours in one call must not touch others)
            self._refused("fault")
            self._log(
                "fault in a call",
                session=session.number,
                error=f"{type(error).__name__}: {error}",
                traceback=traceback.format_exc(limit=-4),
            )
        finally:
            session.sock.close()
            self._closed(session)
            os.close(session.peer.pidfd)

    async def _answer(self, session: Session, message: Message) -> None:
        number = message.fields.pop("id", None)
        name = message.fields.get("call")
        if type(number) is not int or not isinstance(name, str):
            raise WireError("a message is no call: it has no id or no name")
        try:
            reply = await self._handle(session, message)
        except CallError as error:
            if error.code in (400, 403, 413):
                self._refused(str(error.code))
                self._log("call refused", call=name[:40], code=error.code, reason=str(error))
            reply = Reply({"error": {"code": error.code, "detail": str(error)[:2000]}})
        try:
            await session.send({"id": number, **reply.fields}, reply.blobs, reply.fds)
        finally:
            for fd in reply.fds:
                os.close(fd)


async def _writable(loop: asyncio.AbstractEventLoop, sock: socket.socket) -> None:
    ready = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_writer(sock, wake)
    try:
        await ready
    finally:
        loop.remove_writer(sock)
