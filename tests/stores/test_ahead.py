"""Reading ahead: the bytes are always those that were asked for, sequences cost few requests, memory is bounded."""

import threading

from hypothesis import given
from hypothesis import strategies as st

from ckptkit.stores import ahead
from ckptkit.stores.ahead import ReadAhead

DATA = bytes(range(251)) * 400


class Server:
    """Counts what is asked for."""

    def __init__(self) -> None:
        self.requests: list[tuple[int, int]] = []

    def fetch(self, offset: int, nbytes: int) -> bytes:
        assert offset >= 0 and nbytes > 0 and offset + nbytes <= len(DATA)
        self.requests.append((offset, nbytes))
        return DATA[offset : offset + nbytes]


@given(
    st.lists(
        st.tuples(st.sampled_from("ab"), st.integers(0, len(DATA) - 1), st.integers(1, 5000)), max_size=40
    )
)
def test_any_reads_give_their_bytes(reads: list[tuple[str, int, int]]) -> None:
    """Whatever was read before, also of other objects and past windows."""
    server, window = Server(), ReadAhead()
    for name, offset, nbytes in reads:
        nbytes = min(nbytes, len(DATA) - offset)

        assert window.read(name, len(DATA), offset, nbytes, server.fetch) == DATA[offset : offset + nbytes]


def test_a_read_from_front_to_back_takes_few_requests_and_each_byte_once() -> None:
    """Requests double; nothing is asked for twice, and nothing behind the end."""
    server, window = Server(), ReadAhead()
    for offset in range(0, len(DATA), 500):
        nbytes = min(500, len(DATA) - offset)
        assert window.read("a", len(DATA), offset, nbytes, server.fetch) == DATA[offset : offset + nbytes]

    assert len(server.requests) < 10
    assert sum(nbytes for _, nbytes in server.requests) == len(DATA)


def test_reads_at_random_places_ask_for_nothing_more() -> None:
    """Only what goes on where the last one ended is read ahead."""
    server, window = Server(), ReadAhead()
    places = [9000, 100, 50000, 20000, 77000]
    for offset in places:
        window.read("a", len(DATA), offset, 10, server.fetch)

    assert server.requests == [(offset, 10) for offset in places]


def test_what_waits_is_bounded(monkeypatch) -> None:
    """Over all objects that a thread reads in turn; those that lost their window are read again, rightly."""
    monkeypatch.setattr(ahead, "HELD", 4000)
    monkeypatch.setattr(ahead, "WINDOW", 3000)
    server, window = Server(), ReadAhead()
    for offset in range(0, 50_000, 500):
        for name in "abcdefgh":
            assert window.read(name, len(DATA), offset, 500, server.fetch) == DATA[offset : offset + 500]
            assert sum(len(one.data) for one in window._windows.values()) <= 4000


def test_threads_do_not_share_windows() -> None:
    """Each has its own sequence."""
    server, window = Server(), ReadAhead()
    window.read("a", len(DATA), 0, 500, server.fetch)
    thread = threading.Thread(target=lambda: window.read("a", len(DATA), 500, 500, server.fetch))
    thread.start()
    thread.join()

    assert server.requests == [(0, 500), (500, 500)]
