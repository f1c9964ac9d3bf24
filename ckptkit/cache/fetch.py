"""Ranged reads from a peer's daemon: bytes go from the socket into the caller's buffer, without a copy in between.

Plain blocking HTTP/1.1 in whatever thread calls; used by ranks that restore and by daemons that pull copies. A connection is kept and
used again. Nothing here is trusted: callers compare leaves with digests.
"""

import contextlib
import http.client
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ckptkit.errors import FormatError, StoreError

_STEP = 1 << 20


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks: sent with every request."""

    job: str
    epoch: int
    inc: str

    @property
    def headers(self) -> dict[str, str]:
        return {"X-Ckpt-Job": self.job, "X-Ckpt-Epoch": str(self.epoch), "X-Ckpt-Inc": self.inc}


class PeerError(StoreError):
    """A peer did not answer, or not with what was asked for. `code` is that of HTTP, or 0."""


def client_context(ca: str, cert: str, key: str) -> ssl.SSLContext:
    """TLS 1.3 with a certificate of our own. Raises StoreError where a file cannot be used."""
    try:
        made = ssl.create_default_context(ssl.Purpose.SERVER_AUTH, cafile=ca)
        made.minimum_version = ssl.TLSVersion.TLSv1_3
        made.load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise StoreError(f"cannot use the certificates {ca}, {cert}, {key}: {error}", file=cert) from error
    return made


class Peers:
    """Kept connections to peers, for several threads.

    Args:
        tls: None to talk in clear.
        timeout_s: A peer that sends nothing for so long is given up.
        source: Address from which connections go out; empty for any.
    """

    def __init__(
        self, caller: Caller, tls: ssl.SSLContext | None, timeout_s: float = 15.0, source: str = ""
    ) -> None:
        self.caller, self.tls, self.timeout_s = caller, tls, timeout_s
        self._source = (source, 0) if source else None
        self._idle: dict[str, list[http.client.HTTPConnection]] = {}
        self._lock = threading.Lock()

    def get(self, address: str, path: str, limit: int = 1 << 30) -> bytes:
        """A whole small answer. Raises PeerError, also where it has more than `limit` bytes."""
        with self._request(address, path, {}) as (_, response):
            size = _length(response, address, path)
            if response.status != 200 or size > limit:
                raise _unexpected(address, path, response, f"{size} bytes")
            data = response.read()
            if len(data) != size:
                raise PeerError(f"{address} ended early in {path}", code=0)
            return data

    def read_into(
        self,
        address: str,
        path: str,
        offset: int,
        buffer: memoryview,
        arrived: Callable[[int], None] = lambda nbytes: None,
    ) -> None:
        """Fill `buffer` with the bytes from `offset` on. Raises PeerError; the buffer is then undefined.

        `arrived` is told after each MiB or so how many bytes are there: who compares them then finds them in the processor's cache.
        """
        wanted = f"bytes={offset}-{offset + buffer.nbytes - 1}"
        with self._request(address, path, {"Range": wanted}) as (connection, response):
            size = _length(response, address, path)
            if response.status != 206 or size != buffer.nbytes:
                raise _unexpected(address, path, response, f"{size} bytes for {wanted}")
            done = 0
            for done in _received(connection, response, buffer):
                arrived(done)
            if done < size:
                raise PeerError(f"{address} ended at byte {offset + done} of {path}", code=0)

    def post(self, address: str, path: str, body: bytes) -> bytes:
        """Send a message and give the answer. Raises PeerError."""
        with self._request(address, path, {"Content-Type": "application/json"}, body) as (_, response):
            data = response.read(1 << 20)
            if response.status != 200:
                raise PeerError(
                    f"{address} refused {path}: {response.status} {data[:200]!r}", code=response.status
                )
            return data

    @contextlib.contextmanager
    def _request(
        self, address: str, path: str, headers: dict[str, str], body: bytes | None = None
    ) -> Iterator[tuple[http.client.HTTPConnection, http.client.HTTPResponse]]:
        try:
            connection, response = self._answer(address, path, headers, body)
        except (OSError, http.client.HTTPException) as error:
            raise PeerError(
                f"{address} does not answer {path}: {error or type(error).__name__}", code=0
            ) from error
        try:
            yield connection, response
            response.read()
        except (OSError, http.client.HTTPException) as error:
            connection.close()
            raise PeerError(f"{address} failed in {path}: {error or type(error).__name__}", code=0) from error
        except BaseException:
            connection.close()
            raise
        if response.will_close:
            connection.close()
            return
        with self._lock:
            self._idle.setdefault(address, []).append(connection)

    def _answer(
        self, address: str, path: str, headers: dict[str, str], body: bytes | None
    ) -> tuple[http.client.HTTPConnection, http.client.HTTPResponse]:
        kept = self._take(address)
        if kept is not None:
            try:
                return kept, _ask(kept, path, self.caller.headers | headers, body)
            except (OSError, http.client.HTTPException):
                kept.close()  # it idled too long; a new one tells what is the matter
        fresh = self._connect(address)
        try:
            return fresh, _ask(fresh, path, self.caller.headers | headers, body)
        except BaseException:
            fresh.close()
            raise

    def _take(self, address: str) -> http.client.HTTPConnection | None:
        with self._lock:
            idle = self._idle.get(address)
            return idle.pop() if idle else None

    def _connect(self, address: str) -> http.client.HTTPConnection:
        host, _, port = address.rpartition(":")
        host = host.strip("[]")
        if self.tls is not None:
            return http.client.HTTPSConnection(
                host, int(port), timeout=self.timeout_s, context=self.tls, source_address=self._source
            )
        return http.client.HTTPConnection(
            host, int(port), timeout=self.timeout_s, source_address=self._source
        )

    def close(self) -> None:
        with self._lock:
            for connections in self._idle.values():
                for connection in connections:
                    connection.close()
            self._idle.clear()


def _ask(
    connection: http.client.HTTPConnection, path: str, headers: dict[str, str], body: bytes | None
) -> http.client.HTTPResponse:
    connection.request("GET" if body is None else "POST", path, body, headers)
    return connection.getresponse()


def _received(
    connection: http.client.HTTPConnection, response: http.client.HTTPResponse, buffer: memoryview
) -> Iterator[int]:
    """Fill `buffer` with a body of its size; gives after each MiB or so how many bytes are there, fewer than all where the peer ended."""
    done, size, sock = 0, buffer.nbytes, connection.sock
    if sock is None or isinstance(sock, ssl.SSLSocket):
        while done < size and (got := response.readinto(buffer[done : done + _STEP])):
            done += got
            yield done
        return
    # In clear: what came with the header, then one call of the system for each MiB; it wakes us when that is there.
    early = response.readinto(buffer[: min(len(response.fp.peek()), size)])
    timeout = sock.gettimeout()
    sock.settimeout(None)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _timeval(timeout or 0.0))
    done = early
    if done:
        yield done
    while done < size and (got := sock.recv_into(buffer[done:], min(_STEP, size - done), socket.MSG_WAITALL)):
        done += got
        yield done
    if done == size:
        response.close()
        sock.settimeout(timeout)


def _timeval(seconds: float) -> bytes:
    return struct.pack("@ll", int(seconds), round(seconds % 1 * 1e6))


def _length(response: http.client.HTTPResponse, address: str, path: str) -> int:
    if response.length is None:
        raise FormatError(f"{address} answers {path} without a length", file=path)
    return response.length


def _unexpected(address: str, path: str, response: http.client.HTTPResponse, what: str) -> PeerError:
    return PeerError(f"{address} answers {path} with {response.status} and {what}", code=response.status)
