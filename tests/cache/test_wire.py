"""Messages on the Unix socket, and who is at its other end."""

import os
import socket
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.cache.messages import Owner
from ckptkit.cache.peercred import peer_of, start_time, watch
from ckptkit.cache.wire import Decoder, WireError, encode

_values = (
    st.none() | st.booleans() | st.integers() | st.text(max_size=5) | st.lists(st.integers(), max_size=3)
)
_names = st.text(max_size=5).filter(lambda name: name not in ("blobs", "fds"))
_sent = st.lists(
    st.tuples(st.dictionaries(_names, _values, max_size=3), st.lists(st.binary(max_size=20), max_size=8)),
    max_size=4,
)


@settings(max_examples=40)
@given(_sent, st.lists(st.integers(1, 40), min_size=1, max_size=10))
def test_messages_arrive_as_they_were_sent_however_the_stream_is_cut(sent: list, cuts: list[int]) -> None:
    stream = b"".join(encode(fields, blobs) for fields, blobs in sent)
    decoder, found = Decoder(), []
    while stream:
        cuts.append(cuts.pop(0))
        decoder.feed(stream[: cuts[-1]])
        stream = stream[cuts[-1] :]
        while message := decoder.take():
            found.append((message.fields, message.blobs))

    assert found == [(fields, blobs) for fields, blobs in sent]
    assert decoder.empty


@given(st.binary(max_size=300))
def test_bytes_that_are_no_message_are_an_error_or_wait_for_more(stream: bytes) -> None:
    decoder = Decoder(line_limit=200, blob_limit=100)
    decoder.feed(stream)
    try:
        while decoder.take() is not None:
            pass
    except WireError:
        return
    assert len(stream) <= 200 + 1 + 100 or b"\n" in stream


def test_limits_hold() -> None:
    for line_limit, blob_limit, stream in ((10, 10, b"x" * 11), (100, 10, encode({}, [b"x" * 11]))):
        decoder = Decoder(line_limit, blob_limit)
        decoder.feed(stream)
        with pytest.raises(WireError, match=r"more than 10 bytes|at most 10"):
            decoder.take()


def test_descriptors_stay_with_their_message() -> None:
    decoder = Decoder()
    decoder.feed(encode({"a": 1}, fds=2) + encode({"b": 2}) + encode({"c": 3}, fds=1), [7, 8, 9])

    taken = [decoder.take() for _ in range(3)]

    assert [message.fds for message in taken if message] == [[7, 8], [], [9]]
    decoder.feed(encode({}, fds=1))
    with pytest.raises(WireError, match="1 descriptors, 0 came"):
        decoder.take()


def test_the_peer_of_a_socket_is_known_by_number_and_start() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        found = peer_of(ours)
    os.close(found.pidfd)

    assert found.owner == Owner(os.getpid(), start_time(os.getpid()) or -1)
    assert found.uid == os.geteuid()


def test_a_process_is_watched_until_it_ends_and_not_confused_with_a_later_one() -> None:
    child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    started = start_time(child.pid)
    assert started is not None

    pidfd = watch(Owner(child.pid, started))
    assert pidfd is not None
    os.close(pidfd)
    assert watch(Owner(child.pid, started + 1)) is None
    child.communicate()
    assert watch(Owner(child.pid, started)) is None
