"""Copies of a shard: which leaf is taken from where. Retention. How fast background work goes."""

import threading
import time
from collections.abc import Callable

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.cache.copies import Copy, digests_of, extras_of, fill, widen, wrong_leaves
from ckptkit.cache.durable import DurableStep, to_remove
from ckptkit.cache.hashing import Hashing, data_start, leaves_in
from ckptkit.cache.messages import Version
from ckptkit.cache.throttle import Gate, Throttle
from ckptkit.core.catalog import LEAF
from ckptkit.core.layouts import Layout
from ckptkit.errors import CorruptionError, FormatError, StoreError
from ckptkit.formats.native import step_dir
from ckptkit.formats.native_digests import RankDigests, leaf_count
from ckptkit.formats.native_manifest import Manifest

START = 4096
SIZE = 3 * LEAF + 100


def rank_file() -> bytes:
    header = (START - 8).to_bytes(8, "little") + b" " * (START - 8)
    return header + np.random.default_rng(1).bytes(SIZE)


DATA = rank_file()


def digests(data: bytes = DATA) -> RankDigests:
    parts = [
        xxhash.xxh3_128_digest(data[START + k * LEAF : START + (k + 1) * LEAF])
        for k in range(leaf_count(SIZE))
    ]
    return RankDigests(
        data_start=START, data_size=SIZE, header=xxhash.xxh3_128_digest(data[:START]), extras=xxhash.xxh3_128_digest(b"extras"), index=bytes(16),
        world=1, rank=0, step=1, epoch=1, incarnation=bytes(16), leaves=np.frombuffer(b"".join(parts), np.uint8).reshape(-1, 16),
    )  # fmt: skip


GOOD = digests()


class Fake(Copy):
    """A copy with bad bytes; `heals` makes it right at the second read, as after a flip on the wire."""

    kind = "peer"

    def __init__(
        self,
        name: str,
        bad: tuple[int, ...] = (),
        *,
        heals: bool = False,
        dead: bool = False,
        extras: bytes = b"extras",
    ) -> None:
        self.where, self.heals, self.dead, self.extras = name, heals, dead, extras
        data = bytearray(DATA)
        for offset in bad:
            data[offset] ^= 1
        self.data = bytes(data)
        self.reads: list[tuple[int, int]] = []

    def small(self, what: str) -> bytes:
        if self.dead:
            raise StoreError(f"{self.where} is dead")
        return self.extras if what == "extras" else digests(self.data).to_bytes()

    def read_into(self, offset: int, buffer: memoryview, arrived: Callable[[int], None]) -> None:
        if self.dead:
            raise StoreError(f"{self.where} is dead")
        source = DATA if self.heals and self.reads else self.data
        self.reads.append((offset, buffer.nbytes))
        buffer[:] = source[offset : offset + buffer.nbytes]


def filled(*copies: Fake) -> bytes:
    buffer = bytearray(len(DATA))
    fill(copies, GOOD, 0, memoryview(buffer))
    return bytes(buffer)


def test_leaves_are_taken_one_by_one_from_the_first_copy_that_has_them_right() -> None:
    """The header of the first is bad and two leaves, one leaf of the second: the rest is not read twice."""
    first, second, third = Fake("a", (5, START + 1, START + LEAF)), Fake("b", (START + 1,)), Fake("c")

    assert filled(first, second, third) == DATA
    assert first.reads[0] == (0, len(DATA))
    assert second.reads[:3] == [(0, START), (START, LEAF), (START + LEAF, LEAF)]
    assert third.reads == [(START, LEAF)]


def test_a_flip_on_the_way_is_read_again_from_the_same_copy() -> None:
    first, second = Fake("a", (START + 7,), heals=True), Fake("b")

    assert filled(first, second) == DATA
    assert second.reads == []


def test_a_leaf_that_is_right_nowhere_is_an_error_that_names_all() -> None:
    with pytest.raises(CorruptionError, match=r"bytes 4096:1052672 .*a: 1 leaves differ.*b: 1 leaves differ"):
        filled(Fake("a", (START + 1,)), Fake("b", (START + 1,)))
    with pytest.raises(StoreError, match=r"bytes 4096:1052672 .*dead.*b: 1 leaves differ"):
        filled(
            Fake("a", dead=True), Fake("b", (START + 1,))
        )  # it may be right in the one that was not reached
    with pytest.raises(CorruptionError, match="there is none"):
        fill((), GOOD, 0, memoryview(bytearray(START)))


def test_digests_and_extras_are_proved_before_they_are_used() -> None:
    wrong, dead, good = Fake("a", (START,), extras=b"other"), Fake("b", dead=True), Fake("c")

    assert digests_of([wrong, dead, good], GOOD.content.hex())[1].content == GOOD.content
    assert extras_of([wrong, dead, good], GOOD) == b"extras"
    with pytest.raises(StoreError, match=r"another save.*dead"):
        digests_of([wrong, dead], GOOD.content.hex())
    with pytest.raises(CorruptionError, match="another save"):
        digests_of([wrong], GOOD.content.hex())
    with pytest.raises(CorruptionError, match="differ from their digest"):
        extras_of([wrong], GOOD)


@given(st.integers(0, len(DATA)), st.integers(0, len(DATA)))
def test_ranges_are_widened_to_leaves_and_no_further(a: int, b: int) -> None:
    start, stop = sorted((a, b))
    edges = [0, START, *(min(START + (k + 1) * LEAF, len(DATA)) for k in range(leaf_count(SIZE)))]

    low, high = widen(GOOD, start, stop)

    if start == stop:
        assert (low, high) == (start, stop)
        return
    assert low == max(edge for edge in edges if edge <= start)
    assert high == min(edge for edge in edges if edge >= stop)
    inside = [k - 1 for k in range(len(edges) - 1) if edges[k] < stop and edges[k + 1] > start]
    assert list(leaves_in(GOOD, start, stop)) == inside


@settings(max_examples=20)
@given(st.lists(st.integers(0, len(DATA) - 1), max_size=4))
def test_wrong_leaves_are_exactly_those_that_changed(offsets: list[int]) -> None:
    data = bytearray(DATA)
    for offset in set(offsets):
        data[offset] ^= 0x80
    expected = sorted({-1 if offset < START else (offset - START) // LEAF for offset in offsets})

    assert list(wrong_leaves(GOOD, 0, memoryview(data))) == expected
    pool = Hashing(2)
    assert pool.bad_leaves(memoryview(data), GOOD) == tuple(expected)
    pool.close()


@pytest.mark.parametrize(
    "header", [b"", b"\0" * 8, b"\xff" * 8, (100).to_bytes(8, "little"), (2**40).to_bytes(8, "little")]
)
def test_a_slot_without_a_rank_file_is_said_so(header: bytes) -> None:
    with pytest.raises(FormatError, match="no rank file"):
        data_start(memoryview(header.ljust(64, b"\0")), 64 if header else 3)


# ── retention ────────────────────────────────────────────────────────────────────────────────────────────────────


def step(number: int, epoch: int = 1) -> DurableStep:
    return DurableStep(
        step_dir(number, epoch),
        number,
        epoch,
        Manifest("", [], Layout.parse("dp=1"), "stored", step=number, epoch=epoch),
    )


def gone(
    steps: list[DurableStep],
    pins: frozenset[str] = frozenset(),
    *,
    last: int = 1,
    every: int = 0,
    epoch: int = 1,
    restored: Version | None = None,
):
    found = to_remove(steps, set(pins), keep_last=last, keep_every=every, epoch=epoch, restored=restored)
    return [(item.epoch, item.step) for item in found]


def test_the_oldest_go_first_and_the_newest_never() -> None:
    steps = [step(number) for number in (1, 2, 3, 4)]

    assert gone(steps, last=2) == [(1, 1), (1, 2)]
    assert gone(steps, last=9) == []
    assert gone(steps, last=0) == [(1, 1), (1, 2), (1, 3)]
    assert gone(steps, frozenset({step_dir(1, 1)})) == [(1, 2), (1, 3)]
    assert gone(steps, every=2) == [(1, 1), (1, 3)]
    assert gone([]) == []


def test_a_mistaken_fresh_run_does_not_age_out_the_real_one() -> None:
    """Steps of earlier epochs above the point of restart stay, and do not count."""
    real, mistaken = [step(100), step(200)], [step(1, 2), step(2, 2), step(3, 2)]

    assert gone(real + mistaken, epoch=2) == [(2, 1), (2, 2)]
    assert gone(real + mistaken, epoch=2, restored=Version(1, 100, "0" * 32)) == [(1, 100), (2, 1), (2, 2)]


# ── rates ────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_throttle_without_a_rate_does_not_wait_and_one_with_does() -> None:
    """Bytes beyond the burst take their time, over all threads together."""
    Throttle(0).take(1 << 60)
    throttle = Throttle(1_000_000)
    began = time.monotonic()
    threads = [threading.Thread(target=throttle.take, args=(150_000,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert time.monotonic() - began >= 0.3  # 600,000 bytes at this rate, less a quarter of a second


def test_a_gate_is_open_when_nobody_is_inside() -> None:
    gate = Gate()
    assert gate.wait(0)
    gate.enter()
    gate.enter()
    gate.leave()
    assert not gate.wait(0.01)
    threading.Timer(0.05, gate.leave).start()
    assert gate.wait(20)
