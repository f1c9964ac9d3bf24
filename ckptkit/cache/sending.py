"""Ranges of slots to peers, by `sendfile` in threads: one event loop cannot feed as many links as a node has, and has messages to answer."""

import asyncio
import contextlib
import os
import select
import socket
import time
from concurrent.futures import ThreadPoolExecutor

_PIECE = 8 << 20
"""Bytes that are sent under one timeout."""
_FIRST = 64 << 10
"""Sent by the loop: afterwards nothing of its own waits in front of what the threads send."""


class Sender:
    """Sends from `threads` threads; more requests than that wait for one."""

    def __init__(self, threads: int = 8) -> None:
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="send")

    async def send(
        self, transport: asyncio.Transport, fd: int, start: int, stop: int, patience_s: float
    ) -> None:
        """Send bytes `[start, stop)` of a file. `fd` is taken over.

        Raises:
            OSError: the peer went away.
            TimeoutError: it took less than 8 MiB in `patience_s`.
        """
        with os.fdopen(fd, "rb", buffering=0) as file:
            first = min(start + _FIRST, stop)
            async with asyncio.timeout(patience_s):
                loop = asyncio.get_running_loop()
                await loop.sendfile(transport, file, start, first - start, fallback=False)
            if first == stop:
                return
            # Their own descriptors, since the loop may close its own while a thread is at work.
            link = socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno()))
            source = os.dup(file.fileno())
        job = self._pool.submit(_send, link, source, first, stop, patience_s)
        try:
            await asyncio.wrap_future(job)
        finally:
            if not job.done() or job.cancelled():
                _stop(link)
            if job.cancelled():
                link.close()
                os.close(source)

    def close(self) -> None:
        """Let no more begin. Whoever waits in `send` must be cancelled, too."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _send(link: socket.socket, source: int, start: int, stop: int, patience_s: float) -> None:
    try:
        poll = select.poll()
        poll.register(link, select.POLLOUT)
        due = 0.0
        piece = start
        while start < stop:
            if start >= piece:
                piece, due = start + _PIECE, time.monotonic() + patience_s
            try:
                sent = os.sendfile(link.fileno(), source, start, stop - start)
            except BlockingIOError:
                left = due - time.monotonic()
                if left <= 0 or not poll.poll(left * 1000):
                    raise TimeoutError("the peer takes no more") from None
                continue
            if not sent:
                raise ConnectionResetError("the file ended early")
            start += sent
    finally:
        link.close()
        os.close(source)


def _stop(link: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it is closed already
        link.shutdown(socket.SHUT_RDWR)
