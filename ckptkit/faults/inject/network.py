"""Faults of connections: a TCP proxy in front of any server, on loopback, whose behaviour changes while it runs.

with Proxy(("127.0.0.1", port)) as proxy:
    client.connect(proxy.address)
    proxy.behave(Behaviour(partition=True))
"""

import selectors
import socket
import struct
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

Address = tuple[str, int]

_CHUNK = 64 << 10


@dataclass(frozen=True)
class Behaviour:
    """What the proxy does. All false and zero: it passes bytes on.

    Attributes:
        partition: Nothing passes, in both directions; connections stay open, new ones are accepted and go nowhere.
        refuse: New connections are reset.
        reset: Connections that are open are reset now; new ones pass.
        delay_s: Each chunk arrives so much later.
        rate: Bytes a second in each direction; 0 for no limit.
        truncate: A connection is closed after so many bytes of the answer; -1 for no limit.
        flip_at: One bit of this byte of the answer is flipped; -1 for none.
        status: Answer every new connection with this HTTP status (503) instead of asking the server; 0 for not.
    """

    partition: bool = False
    refuse: bool = False
    reset: bool = False
    delay_s: float = 0.0
    rate: float = 0.0
    truncate: int = -1
    flip_at: int = -1
    status: int = 0


@dataclass(eq=False)
class _Pair:
    """A connection of a client, and the one to the server that goes with it."""

    client: socket.socket
    server: socket.socket
    answered: int = 0
    closed: threading.Event = field(default_factory=threading.Event)


class Proxy:
    """Passes connections to `target` on, as it is told to behave.

    Attributes:
        address: To connect to.
        connections: Accepted so far.
    """

    def __init__(self, target: Address, behaviour: Behaviour = Behaviour()) -> None:
        self.target = target
        self.connections = 0
        self._behaviour = behaviour
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address: Address = self._listener.getsockname()[:2]
        self._pairs: list[_Pair] = []
        self._threads: list[threading.Thread] = []
        self._lock = threading.Lock()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._accept, name="proxy", daemon=True)
        self._thread.start()

    def behave(self, behaviour: Behaviour = Behaviour()) -> None:
        """From now on; without an argument: heal."""
        self._behaviour = behaviour
        if behaviour.reset:
            with self._lock:
                pairs, self._pairs = self._pairs, []
            for pair in pairs:
                _end(pair, reset=True)

    def close(self) -> None:
        self._over.set()
        # Wakes the thread that accepts.
        with suppress(OSError):
            socket.create_connection(self.address, 1).close()
        self._thread.join(5)
        self._listener.close()
        with self._lock:
            pairs = list(self._pairs)
        for pair in pairs:
            _end(pair, reset=False)
        for served in self._threads:
            served.join(15)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _accept(self) -> None:
        while not self._over.is_set():
            client, _ = self._listener.accept()
            if self._over.is_set():
                client.close()
                return
            self.connections += 1
            served = threading.Thread(
                target=self._serve, args=(client,), name="proxy connection", daemon=True
            )
            self._threads.append(served)
            served.start()

    def _serve(self, client: socket.socket) -> None:
        behaviour = self._behaviour
        if behaviour.refuse:
            _reset(client)
            return
        if behaviour.status:
            _answer(client, behaviour.status)
            return
        while self._behaviour.partition and not self._over.wait(0.01):
            pass
        if self._over.is_set():
            client.close()
            return
        try:
            server = socket.create_connection(self.target, 10)
        except OSError:
            _reset(client)
            return
        pair = _Pair(client, server)
        with self._lock:
            self._pairs.append(pair)
        other = threading.Thread(
            target=self._pass_on, args=(pair, client, server), name="proxy up", daemon=True
        )
        other.start()
        self._pass_on(pair, server, client)
        other.join()
        _end(pair, reset=False)
        with self._lock, suppress(ValueError):
            self._pairs.remove(pair)

    def _pass_on(self, pair: _Pair, source: socket.socket, sink: socket.socket) -> None:
        answer = source is pair.server
        selector = selectors.DefaultSelector()
        try:
            selector.register(source, selectors.EVENT_READ)
            while not (pair.closed.is_set() or self._over.is_set()):
                if self._behaviour.partition or not selector.select(0.05):
                    self._over.wait(0.005 if self._behaviour.partition else 0)
                    continue
                data = source.recv(_CHUNK)
                if not data:
                    with suppress(OSError):
                        sink.shutdown(socket.SHUT_WR)
                    return
                self._send(pair, sink, data, answer)
        except (OSError, ValueError):
            _end(pair, reset=True)
        finally:
            selector.close()

    def _send(self, pair: _Pair, sink: socket.socket, data: bytes, answer: bool) -> None:
        behaviour = self._behaviour
        if behaviour.delay_s:
            time.sleep(behaviour.delay_s)
        if behaviour.rate:
            time.sleep(len(data) / behaviour.rate)
        while self._behaviour.partition and not pair.closed.is_set():
            time.sleep(0.005)
        if answer:
            start = pair.answered
            pair.answered += len(data)
            if start <= behaviour.flip_at < pair.answered:
                at = behaviour.flip_at - start
                data = data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]
            if 0 <= behaviour.truncate < pair.answered:
                sink.sendall(data[: max(behaviour.truncate - start, 0)])
                _end(pair, reset=False)
                return
        sink.sendall(data)


def _answer(client: socket.socket, status: int) -> None:
    """An HTTP answer without a body, to whatever was asked."""
    with client, suppress(OSError):
        client.settimeout(5)
        asked = b""
        while b"\r\n\r\n" not in asked and (more := client.recv(_CHUNK)):
            asked += more
        client.sendall(
            f"HTTP/1.1 {status} Injected\r\nContent-Length: 0\r\nConnection: close\r\n\r\n".encode()
        )


def _end(pair: _Pair, reset: bool) -> None:
    pair.closed.set()
    for one in (pair.client, pair.server):
        if reset:
            _reset(one)
        else:
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()


def _reset(one: socket.socket) -> None:
    """Close with a reset instead of an orderly end."""
    with suppress(OSError):
        one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Another thread may wait in it.
        one.shutdown(socket.SHUT_RD)
    one.close()
