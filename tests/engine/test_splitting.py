"""Splitting and scheduling: whatever the grids of both sides are, every element arrives where it belongs.

Cells here are a few bytes, so that borders fall inside runs, elements and loops; real ones are a thousand times larger.
"""

import random
import threading

import ml_dtypes
import numpy as np
import pytest

from ckptkit.core.catalog import Catalog
from ckptkit.core.copies import copies_into
from ckptkit.core.plan import make_plan
from ckptkit.engine.grids import Grid
from ckptkit.engine.mover import Buffer, Mover, Slab, Worker
from ckptkit.engine.schedule import make_schedule
from ckptkit.engine.sources import Sources
from ckptkit.stores.base import Reader, Store
from tests.engine.toy import BF16, FAMILIES, LAYOUTS, Toy


class MemoryReader(Reader):
    def __init__(self, data: np.ndarray) -> None:
        self.data, self.size = data, len(data)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        assert offset + buffer.nbytes <= self.size
        buffer[:] = self.data[offset : offset + buffer.nbytes].tobytes()

    def close(self) -> None:
        pass


class MemoryStore(Store):
    url = "memory"

    def __init__(self, catalog: Catalog, files: list[np.ndarray]) -> None:
        self.data = {file.path: data for file, data in zip(catalog.files, files, strict=True)}

    def files(self) -> list[str]:
        return sorted(self.data)

    def exists(self, path: str) -> bool:
        return path in self.data

    def size(self, path: str) -> int:
        return len(self.data[path])

    def identity(self, path: str) -> str:
        return "the same"

    def open(self, path: str) -> Reader:
        return MemoryReader(self.data[path])


UNTOUCHED = 0xEE


class Collector(Mover):
    """Keeps slabs in memory; what no part fills stays UNTOUCHED."""

    def collect(self, files: list[np.ndarray], worker: Worker) -> list[int]:
        self.files = files
        self.seen: list[int] = []
        for task in range(self.schedule.tasks):
            self.run_task(task, worker)
        return self.seen

    def begin(self, slab: Slab, buffer: Buffer) -> None:
        buffer.array[:] = UNTOUCHED

    def finish(self, slab: Slab, data: memoryview) -> None:
        self.files[slab.file][slab.start : slab.stop] = np.frombuffer(data, np.uint8)
        self.seen.append(slab.number)


def grid(catalog: Catalog, cell: int) -> Grid:
    sizes = np.asarray([file.size for file in catalog.files])
    return Grid(sizes, np.asarray([file.data_start for file in catalog.files]), cell)


@pytest.mark.parametrize("seed", range(6))
def test_any_two_grids_give_every_element(seed) -> None:
    """Random layouts, names, headers, cells, casts and tasks, against a loop over elements."""
    rng = random.Random(seed)
    toy = Toy(seed)
    rounded = {
        key: bits.view(np.float32).astype(ml_dtypes.bfloat16).view(np.uint16)
        for key, bits in toy.values.items()
    }
    for _ in range(20):
        dtype = rng.choice([None, BF16])
        source = toy.catalog(rng.choice(LAYOUTS), rng.choice(FAMILIES), rng.choice([0, 13, 64]))
        target = toy.catalog(rng.choice(LAYOUTS), rng.choice(FAMILIES), rng.choice([0, 7, 64]), dtype)
        cell = rng.choice([7, 16, 40, 64, 100, 1000])
        slabs = grid(target, cell)
        blocks = grid(source, rng.choice([8, 24, 64, 100, 1000]))
        everything = np.ones(slabs.cells, bool)
        schedule = make_schedule(
            copies_into(make_plan(source, target)),
            slabs,
            blocks,
            everything,
            rng.choice([cell, cell * 4, cell * 64]),
        )
        store = MemoryStore(source, toy.bytes_of(source))
        mover = Collector(Sources(store, source, verify=False), schedule, threading.Event())
        mover.direct = rng.random() < 0.5

        found = [np.zeros(file.size, np.uint8) for file in target.files]
        seen = mover.collect(found, Worker(cell))

        assert sorted(seen) == list(range(slabs.cells))  # each once
        for file, got, want in zip(
            target.files, found, toy.bytes_of(target, rounded if dtype else None), strict=True
        ):
            body = slice(file.data_start, None)
            padding = (got == UNTOUCHED) & (want == 0)
            assert ((got == want) | padding)[body].all(), (source.layout, target.layout, cell)


def test_files_that_share_blocks_advance_together() -> None:
    """A cut on the inner axis reads each source block once, although every file needs a part of every block."""
    toy = Toy(sizes={"hidden": 64, "vocab": 64, "ffn": 64})
    source, target = toy.catalog("tp=1", "transposed"), toy.catalog("ep=4,dp=4,etp=1", "transposed")
    inner = toy.catalog("tp=4,etp=4,dp=1", "transposed")
    for wanted in (target, inner):
        slabs, blocks = grid(wanted, 256), grid(source, 256)
        schedule = make_schedule(
            copies_into(make_plan(source, wanted)), slabs, blocks, np.ones(slabs.cells, bool), 64 * 256
        )

        task = np.searchsorted(schedule.task, np.arange(len(schedule.parts)), side="right")
        reads = len(np.unique(np.column_stack([task, schedule.parts.block]), axis=0))

        assert reads <= 1.2 * blocks.cells


def test_a_slab_is_finished_as_soon_as_its_last_block_has_passed() -> None:
    """So few buffers are in use at a time, however long a task is."""
    toy = Toy(sizes={"hidden": 64, "vocab": 64})
    source, target = toy.catalog("tp=1"), toy.catalog("dp=3,zero=3")
    slabs, blocks = grid(target, 128), grid(source, 128)
    schedule = make_schedule(
        copies_into(make_plan(source, target)), slabs, blocks, np.ones(slabs.cells, bool), 1 << 30
    )
    store = MemoryStore(source, toy.bytes_of(source))
    worker = Worker(128)

    assert schedule.tasks == 1
    files = [np.zeros(file.size, np.uint8) for file in target.files]
    Collector(Sources(store, source, verify=False), schedule, threading.Event()).collect(files, worker)

    assert slabs.cells > 100
    assert len(worker.free) <= slabs.cells // 10


@pytest.mark.parametrize(("before", "after"), [("megatron", "canonical"), ("megatron", "transposed")])
def test_many_small_copies_at_equal_distances_become_one(before, after) -> None:
    """Neighbours that continue each other are joined, series are folded; the bytes are the same as one by one."""
    toy = Toy(sizes={"expert": 64, "vocab": 12}, roles=("param",))
    source, target = toy.catalog("tp=1", before), toy.catalog("ep=4,dp=4", after, 8)
    slabs, blocks = grid(target, 4096), grid(source, 8000)
    copies, everything = copies_into(make_plan(source, target)), np.ones(slabs.cells, bool)
    store = MemoryStore(source, toy.bytes_of(source))
    found, parts = [], []
    for fold in (True, False):
        schedule = make_schedule(copies, slabs, blocks, everything, 1 << 20, fold=fold)
        files = [np.full(file.size, UNTOUCHED, np.uint8) for file in target.files]
        Collector(Sources(store, source, verify=False), schedule, threading.Event()).collect(
            files, Worker(4096)
        )
        found.append(files)
        parts.append(len(schedule.parts))

    for once, singly, want in zip(*found, toy.bytes_of(target), strict=True):
        assert np.array_equal(once, singly)
        assert np.array_equal(once[8:], want[8:])
    assert parts[0] < parts[1] / 2
