"""Ranges of a peer's shard, however its answer is cut into packets."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from ckptkit.cache.fetch import Caller, PeerError, Peers

CONTENT = bytes(range(251)) * 2000


@contextmanager
def peer(together: int, sent: int) -> Iterator[str]:
    """A server of CONTENT that sends `together` bytes of a body with its header, and `sent` in all; gives its address."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve() -> None:
            connection, _ = server.accept()
            with connection:
                request = b""
                while b"\r\n\r\n" not in request:
                    request += connection.recv(1 << 16)
                first, last = map(
                    int, request.lower().partition(b"range: bytes=")[2].split(b"\r")[0].split(b"-")
                )
                body = CONTENT[first : last + 1]
                head = f"HTTP/1.1 206 Partial Content\r\nContent-Length: {len(body)}\r\n\r\n".encode()
                connection.sendall(head + body[:together])
                connection.sendall(body[together:sent])

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{server.getsockname()[1]}"
        finally:
            thread.join()


@pytest.mark.parametrize("size", [1, 4096, 8191, 8193, 300_000])
@pytest.mark.parametrize("together", [0, 1, 1 << 20])
def test_a_range_arrives_whole(size: int, together: int) -> None:
    """Also one that is small enough to come in one packet with its header."""
    buffer = bytearray(size)
    told: list[int] = []
    with peer(together, size) as address:
        peers = Peers(Caller("job", 1, "0" * 32), None)

        peers.read_into(address, "/v1/shards", 77, memoryview(buffer), told.append)

        peers.close()
    assert buffer == CONTENT[77 : 77 + size]
    assert told[-1] == size and told == sorted(told)


def test_a_range_that_ends_early_is_an_error() -> None:
    with peer(50, 100) as address:
        peers = Peers(Caller("job", 1, "0" * 32), None)

        with pytest.raises(PeerError, match="ended at byte 100 of"):
            peers.read_into(address, "/v1/shards", 0, memoryview(bytearray(4000)))

        peers.close()
