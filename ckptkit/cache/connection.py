"""One connection to a daemon's Unix socket, kept alive by a thread of its own.

Every call has a deadline and ends in a reply, a `RefusedError` or an `AwayError`; nothing here waits for a daemon that is gone. The thread
takes replies and reconnects with growing pauses for as long as the connection is open; calls made meanwhile fail at once.
"""

import contextlib
import itertools
import os
import queue
import random
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from ckptkit.cache.wire import Decoder, Message, WireError, encode
from ckptkit.errors import StoreError

_PAUSES_S = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0)
_MOST_FDS = 64
_SMALL = 1 << 14


class AwayError(StoreError):
    """The daemon does not answer: it is not running, is being restarted, or is stuck. Nothing is known about the call."""


class RefusedError(StoreError):
    """The daemon answered no. `code` is one of HTTP's: 400 nonsense, 403 not allowed, 404 unknown, 409 stale, 413 too big,
    425 not yet, 507 no memory."""


def connect_unix(path: str, timeout_s: float) -> socket.socket:
    """A stream to a Unix socket, also where its path is longer than an address may be. Raises OSError."""
    made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    folder = -1
    try:
        made.settimeout(timeout_s)
        if len(os.fsencode(path)) > 100:
            head, name = os.path.split(path)
            folder = os.open(head, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
            path = f"/proc/self/fd/{folder}/{name}"
        made.connect(path)
    except BaseException:
        made.close()
        raise
    finally:
        if folder >= 0:
            os.close(folder)
    return made


class Connection:
    """Calls to one daemon.

    Args:
        path: Of the socket.
        greet: Called with a function that makes calls, whenever a connection was made and before any other call goes out: it
            introduces us again. What it raises ends the attempt; a RefusedError ends the connection for good.
        on_event: Told events, in the thread.
        on_late: Told replies that came after the call's deadline, in the thread. May `tell`, but not `call`.
        time_scale: Multiplies every time in here.
    """

    def __init__(
        self,
        path: str,
        greet: Callable[["Caller"], None],
        on_event: Callable[[dict[str, Any]], None] = lambda event: None,
        on_late: Callable[[dict[str, Any]], None] = lambda reply: None,
        *,
        time_scale: float = 1.0,
    ) -> None:
        self.path = path
        self.scale = time_scale
        self._greet, self._on_event, self._on_late = greet, on_event, on_late
        self._closed = threading.Event()
        self._live: _Live | None = None
        self._refused: RefusedError | None = None
        self.away_since: float | None = time.monotonic()
        self._thread: threading.Thread | None = None

    def open(self, timeout_s: float) -> None:
        """Connect, and go on trying until `timeout_s` is over. Raises AwayError, or RefusedError where we are not let in."""
        until = time.monotonic() + timeout_s
        for pause in itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1])):
            try:
                self._connect()
                break
            except AwayError:
                if time.monotonic() + pause > until:
                    raise
                time.sleep(pause)
        self._thread = threading.Thread(target=self._keep, name="ckptkit-cache", daemon=True)
        self._thread.start()

    def call(
        self, name: str, *, blobs: Sequence[bytes] = (), deadline_s: float | None = None, **fields: Any
    ) -> Message:
        """Make a call and give its reply.

        Args:
            deadline_s: Longest time that this takes; 5 s where it is not given. Not scaled.

        Raises:
            RefusedError: the daemon says no.
            AwayError: there is no connection, or no answer in time.
        """
        live = self._live
        if live is None:
            raise self._refused or self._away("is not running, or is being restarted")
        return live.call(name, fields, blobs, 5.0 * self.scale if deadline_s is None else deadline_s)

    def tell(self, name: str, **fields: Any) -> None:
        """Make a call without waiting for its reply."""
        live = self._live
        if live is not None:
            with contextlib.suppress(StoreError):
                live.tell(name, fields)

    def close(self) -> None:
        self._closed.set()
        live, self._live = self._live, None
        if live is not None:
            live.shut()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(5)

    def _away(self, why: str) -> AwayError:
        return AwayError(
            f"the cache daemon at {self.path} {why}. Start it with `ckptkit cache serve`, or look at its log",
            file=self.path,
        )

    def _connect(self) -> None:
        try:
            live = _Live(self, connect_unix(self.path, 5.0 * self.scale))
        except OSError as error:
            raise self._away(f"does not answer ({error.strerror or error})") from error
        try:
            live.greeting = True
            self._greet(live.call_alone)
            live.greeting = False
        except RefusedError as error:
            live.shut()
            live.sock.close()
            self._refused = error
            raise
        except (AwayError, OSError) as error:
            live.shut()
            live.sock.close()
            raise self._away(f"does not answer ({error})") from error
        self._live, self.away_since = live, None

    def _keep(self) -> None:
        """The thread: take messages, reconnect."""
        while not self._closed.is_set():
            live = self._live
            if live is not None:
                live.take_until_end(self._on_event, self._on_late)
                live.sock.close()
                self._live = None
                if self.away_since is None:
                    self.away_since = time.monotonic()
            for pause in itertools.chain(_PAUSES_S, itertools.repeat(_PAUSES_S[-1])):
                # Spread, so that the ranks of a node do not all come at once.
                if self._closed.wait(pause * self.scale * (0.75 + random.random() / 2)):
                    return
                try:
                    self._connect()
                    break
                except RefusedError:
                    return
                except AwayError:
                    continue


Caller = Callable[..., Message]


class _Live:
    """One connected socket."""

    def __init__(self, owner: Connection, sock: socket.socket) -> None:
        self.owner, self.sock = owner, sock
        sock.settimeout(None)
        seconds = max(5.0 * owner.scale, 0.05)
        whole = struct.pack("ll", int(seconds), int(seconds % 1 * 1e6))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, whole)
        self.greeting = False
        self._decoder = Decoder()
        self._numbers = itertools.count(1)
        self._waiting: dict[int, queue.SimpleQueue[Message | None]] = {}
        self._sending = threading.Lock()
        self._ended = False

    def call(self, name: str, fields: dict[str, Any], blobs: Sequence[bytes], deadline_s: float) -> Message:
        until = time.monotonic() + deadline_s
        answer: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        number = self._begin(name, fields, blobs, deadline_s, answer)
        try:
            message = answer.get(timeout=max(until - time.monotonic(), 0.001))
        except queue.Empty:
            raise self.owner._away(f"did not answer {name} within {deadline_s:g} s") from None
        finally:
            self._waiting.pop(number, None)
        if message is None:
            raise self.owner._away(f"ended while it was asked to {name}")
        return _checked(name, message)

    def tell(self, name: str, fields: dict[str, Any]) -> None:
        """As `call`, without the reply."""
        number = self._begin(name, fields, (), 1.0, queue.SimpleQueue())
        self._waiting.pop(number, None)

    def call_alone(
        self, name: str, *, blobs: Sequence[bytes] = (), deadline_s: float = 5.0, **fields: Any
    ) -> Message:
        """As `call`, before the thread takes replies."""
        until = time.monotonic() + deadline_s
        answer: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        number = self._begin(name, fields, blobs, deadline_s, answer)
        try:
            while answer.empty():
                left = until - time.monotonic()
                if left <= 0:
                    raise self.owner._away(f"did not answer {name} within {deadline_s:g} s")
                self.sock.settimeout(left)
                try:
                    if not self._receive(lambda event: None, lambda reply: None):
                        raise self.owner._away(f"ended while it was asked to {name}")
                except TimeoutError:
                    continue
                finally:
                    self.sock.settimeout(None)
        finally:
            self._waiting.pop(number, None)
        message = answer.get()
        assert message is not None
        return _checked(name, message)

    def _begin(
        self,
        name: str,
        fields: dict[str, Any],
        blobs: Sequence[bytes],
        deadline_s: float,
        answer: "queue.SimpleQueue[Message | None]",
    ) -> int:
        number = next(self._numbers)
        data = encode({"id": number, "call": name, **fields}, blobs)
        if not self._sending.acquire(timeout=max(deadline_s, 0.001)):
            raise self.owner._away("takes no calls")
        try:
            if self._ended:
                raise self.owner._away("closed the connection")
            self._waiting[number] = answer
            if blobs or len(data) > _SMALL:
                self.sock.sendall(data)
            elif self.sock.send(data, socket.MSG_DONTWAIT) != len(data):
                raise BlockingIOError("its buffer is full")
        except OSError as error:
            # Part of a message may have gone out, so that nothing after it would be understood.
            self._waiting.pop(number, None)
            self.shut()
            raise self.owner._away(f"takes no calls ({error})") from error
        finally:
            self._sending.release()
        return number

    def take_until_end(
        self, on_event: Callable[[dict[str, Any]], None], on_late: Callable[[dict[str, Any]], None]
    ) -> None:
        with contextlib.suppress(OSError, WireError):
            while self._receive(on_event, on_late):
                pass
        self._ended = True
        for answer in list(self._waiting.values()):
            answer.put(None)

    def _receive(
        self, on_event: Callable[[dict[str, Any]], None], on_late: Callable[[dict[str, Any]], None]
    ) -> bool:
        data, fds, _, _ = socket.recv_fds(self.sock, 1 << 18, _MOST_FDS, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return False
        self._decoder.feed(data, fds)
        while message := self._decoder.take():
            number = message.fields.get("id")
            answer = self._waiting.get(number) if isinstance(number, int) else None
            if answer is not None:
                answer.put(message)
                continue
            for fd in message.fds:
                os.close(fd)
            (on_event if number is None else on_late)(message.fields)
        return True

    def shut(self) -> None:
        """Make the other thread's `recv` return."""
        self._ended = True
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)


def _checked(name: str, message: Message) -> Message:
    error = message.fields.get("error")
    if error is None:
        return message
    for fd in message.fds:
        os.close(fd)
    detail = str(error.get("detail", "no reason given"))
    raise RefusedError(
        f"the cache daemon refused to {name}: {detail}", code=error.get("code"), detail=detail, call=name
    )
