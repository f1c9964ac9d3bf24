"""Which slots a node has: lanes of its ranks and the pool for copies, kept over epochs.

Slots outlive the ranks that asked for them. A new epoch may bring other ranks, larger shards, or a smaller budget; slots that hold something stay,
whatever lane they end in, since a restore may need them.
"""

import asyncio
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from ckptkit.cache.messages import SlotRecord
from ckptkit.cache.slots import REPLICA, SlotTable, own_lane
from ckptkit.cache.tmpfs import Tmpfs, on_numa_node


def next_table(
    current: Iterable[SlotRecord], *, ranks: int, per_rank: int, replicas: int, slot_bytes: int
) -> SlotTable:
    """The slots for an epoch, from those that there are.

    Lanes get at least `per_rank` slots, the pool `replicas`. Free slots beyond that are left out; ones in use are not, and where
    their lane is no more they go to the lane with the fewest.
    """
    lanes: dict[str, list[SlotRecord]] = {own_lane(rank): [] for rank in range(ranks)}
    lanes[REPLICA] = []
    number = -1
    # What is in use first, at home where that still is; then free slots where some are missing.
    for record in sorted(
        current, key=lambda record: (record.state == "FREE", record.lane not in lanes, record.slot)
    ):
        number = max(number, record.slot)
        lane = record.lane
        if lane not in lanes:
            lane = min((own_lane(rank) for rank in range(ranks)), key=lambda name: len(lanes[name]))
        if record.state != "FREE" or len(lanes[lane]) < (replicas if lane == REPLICA else per_rank):
            lanes[lane].append(record if lane == record.lane else replace(record, lane=lane))
    for lane, records in lanes.items():
        while len(records) < (replicas if lane == REPLICA else per_rank):
            number += 1
            records.append(SlotRecord(number, lane))
    return SlotTable((record for records in lanes.values() for record in records), slot_bytes)


class Memory:
    """Allocates and populates slots, in one thread a NUMA node, so that a rank's lane lies next to its device.

    Args:
        ready: Told the number of every slot that may be used from now on.
        rate: Told the bytes a second of the last population.
    """

    def __init__(self, tmpfs: Tmpfs, ready: Callable[[int], None], rate: Callable[[float], None]) -> None:
        self._tmpfs, self._ready, self._rate = tmpfs, ready, rate
        self._threads: dict[int | None, ThreadPoolExecutor] = {}

    async def make(self, slots: Iterable[int], slot_bytes: int, numa: int | None = None) -> None:
        """Give slots their memory, or more of it. Raises OSError where there is not enough."""
        loop = asyncio.get_running_loop()
        thread = self._threads.setdefault(numa, ThreadPoolExecutor(1, f"numa-{numa}"))
        for slot in slots:
            await loop.run_in_executor(thread, self._make, slot, slot_bytes, numa)
            self._ready(slot)

    def _make(self, slot: int, slot_bytes: int, numa: int | None) -> None:

        on_numa_node(numa)
        before = self._tmpfs.allocate(slot, slot_bytes)
        began = time.monotonic()
        self._tmpfs.populate(slot, before, slot_bytes)
        if slot_bytes > before:
            self._rate((slot_bytes - before) / max(time.monotonic() - began, 1e-6))

    def close(self) -> None:
        for thread in self._threads.values():
            thread.shutdown(wait=True, cancel_futures=True)
