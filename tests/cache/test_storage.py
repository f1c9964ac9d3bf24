"""The folder on tmpfs, slots for an epoch, and how much memory they may take."""

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from ckptkit.cache import limits
from ckptkit.cache.config import CacheConfig, parse_config
from ckptkit.cache.hashing import Hashing
from ckptkit.cache.lanes import next_table
from ckptkit.cache.messages import SlotRecord, Version
from ckptkit.cache.sealing import Sealing
from ckptkit.cache.slots import REPLICA, own_lane
from ckptkit.cache.tmpfs import Tmpfs, on_numa_node
from ckptkit.errors import FormatError, UsageError
from ckptkit.formats.native_digests import RankDigests

MIB = 1 << 20


@pytest.fixture
def folder(tmp_path: Path) -> Tmpfs:
    return Tmpfs(str(tmp_path / "root" / "job"), "n0")


def test_the_folder_is_private_and_taken_over_by_the_next_daemon(folder: Tmpfs) -> None:
    """Records stay; what was half written goes."""
    assert os.stat(folder.folder).st_mode & 0o777 == 0o700
    assert folder.fresh
    folder.allocate(3, MIB)
    folder.write_slot(3, {"slot": 3})
    folder.write_side(3, "extras", b"x")
    half = Path(folder.folder) / "slots" / "0003.json.tmp"
    half.write_text("{")
    folder.close()

    again = Tmpfs(folder.folder, "n0")

    assert not again.fresh
    assert [(found.number, found.nbytes, found.record) for found in again.scan()] == [(3, MIB, {"slot": 3})]
    assert again.read_side(3, "extras") == b"x"
    assert not half.exists()


def test_two_threads_that_write_one_file_at_once_leave_it_whole(folder: Tmpfs) -> None:
    """As two pulls do that bring the same index."""
    content = os.urandom(3 * MIB)
    name = xxhash.xxh3_128_hexdigest(content)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: folder.put_index(name, content), range(64)))

    assert folder.read_index(name) == content
    assert os.listdir(f"{folder.folder}/index") == [f"{name}.npz"]


def test_one_daemon_at_a_time(folder: Tmpfs) -> None:
    with pytest.raises(UsageError, match=f"process {os.getpid()}"):
        Tmpfs(folder.folder, "n0")


def test_a_folder_that_others_may_read_is_closed_to_them(tmp_path: Path) -> None:
    (tmp_path / "job").mkdir(mode=0o755)

    Tmpfs(str(tmp_path / "job"), "n0").close()

    assert (tmp_path / "job").stat().st_mode & 0o777 == 0o700


def test_links_are_not_followed(folder: Tmpfs, tmp_path: Path) -> None:
    """Whoever could put a link into the folder gets no file outside it read or written."""
    outside = tmp_path / "outside"
    outside.write_bytes(b"secret")
    for name in ("0001.dat", "0001.extras"):
        os.symlink(outside, Path(folder.folder) / "slots" / name)

    assert list(folder.scan()) == []
    with pytest.raises(OSError):
        folder.open_slot(1, writable=True)
    with pytest.raises(FormatError):
        folder.read_side(1, "extras")
    folder.write_side(1, "extras", b"new")
    assert outside.read_bytes() == b"secret"


def test_a_slot_grows_in_place_and_keeps_what_it_holds(folder: Tmpfs) -> None:
    """An old mapping stays valid, too."""
    folder.allocate(0, MIB)
    folder.populate(0, 0, MIB)
    with folder.mapped(0, MIB, writable=True) as view:
        view[:4] = b"held"
        assert folder.allocate(0, 3 * MIB) == MIB
        folder.populate(0, MIB, 3 * MIB)
        assert bytes(view[:4]) == b"held"

    assert folder.slot_size(0) == 3 * MIB
    with folder.mapped(0, 3 * MIB) as view:
        assert bytes(view[:4]) == b"held" and not any(view[MIB:])


def test_an_unknown_format_is_not_touched(folder: Tmpfs) -> None:
    folder.write_json("node.json", {"format": 7, "boot": "x"})
    folder.close()

    with pytest.raises(UsageError, match="format 7"):
        Tmpfs(folder.folder, "n0")

    assert json.loads((Path(folder.folder) / "node.json").read_text())["format"] == 7
    assert Tmpfs(folder.folder, "n0", discard=True).fresh


_records = st.lists(
    st.tuples(
        st.sampled_from([*(own_lane(r) for r in range(6)), REPLICA]),
        st.sampled_from(["FREE", "SEALED", "WRITING", "QUARANTINED"]),
    ),
    max_size=30,
)


@given(_records, st.integers(1, 5), st.integers(2, 4), st.integers(0, 10))
def test_slots_for_an_epoch_keep_all_that_are_in_use(
    given_: list, ranks: int, per_rank: int, replicas: int
) -> None:
    """Every lane gets what it needs; no slot is twice in the table; nothing in use is dropped, nothing free is hoarded."""
    current = [
        SlotRecord(number, lane, state, version=None if state == "FREE" else Version(1, number, "0" * 32))
        for number, (lane, state) in enumerate(given_)
    ]

    table = next_table(current, ranks=ranks, per_rank=per_rank, replicas=replicas, slot_bytes=MIB)

    used = {record.slot: record.version for record in current if record.state != "FREE"}
    assert {slot: table[slot].version for slot in used} == used
    assert set(table.lanes) <= {*(own_lane(rank) for rank in range(ranks)), REPLICA}
    for lane in (own_lane(rank) for rank in range(ranks)):
        assert len(table.lanes[lane]) >= per_rank
    assert len(table.lanes.get(REPLICA, ())) >= replicas
    for lane, slots in table.lanes.items():
        full = replicas if lane == REPLICA else per_rank
        free = sum(table[slot].state == "FREE" for slot in slots)
        assert free <= max(full - (len(slots) - free), 0)
    again = next_table(table, ranks=ranks, per_rank=per_rank, replicas=replicas, slot_bytes=MIB)
    assert {record.slot: record for record in again} == {record.slot: record for record in table}


def config(tmp_path: Path, budget: int) -> CacheConfig:
    return parse_config(
        {
            "job": "job", "root": str(tmp_path), "listen": "127.0.0.1:0", "tls": {"mode": "off"},
            "slots": {"budget": budget, "reserve": MIB, "round": MIB},
        }
    )  # fmt: skip


@pytest.mark.parametrize(
    ("budget", "expected"),
    [
        (100, (3, 8)),  # 2 ranks x 3 + 2 x 2 copies x 2 ranks = 14 slots of 2 MiB
        (28, (3, 8)), (27, (2, 8)), (24, (2, 8)), (23, (2, 4)), (16, (2, 4)), (15, (2, 0)), (8, (2, 0)), (7, None),
    ],
)  # fmt: skip
def test_what_is_given_up_first(
    folder: Tmpfs, tmp_path: Path, budget: int, expected: tuple[int, int] | None
) -> None:
    """The third slot, then copies one by one; below two slots a rank there is no cache, and it is said why."""
    found = limits.allot(
        config(tmp_path, budget * MIB), folder, [], ranks=2, copies=2, nodes=9, bytes_max=MIB + 1
    )

    assert found.slot_bytes == 2 * MIB
    if expected is None:
        assert "not enough memory" in found.refusal and "slots.budget" in found.refusal
    else:
        assert (found.per_rank, found.replicas) == expected
        assert not found.refusal and found.log


def test_slots_that_are_there_count_as_memory_that_we_have(folder: Tmpfs, tmp_path: Path) -> None:
    """A restarted daemon must not refuse what it holds already."""
    folder.allocate(0, 8 * MIB)
    more = limits.allot(
        config(tmp_path, 0), folder, [SlotRecord(0, own_lane(0))], ranks=1, copies=0, nodes=1, bytes_max=MIB
    )
    free = limits.memory().available

    assert more.per_rank == 3
    assert free > 0


def test_copies_are_no_more_than_other_nodes(folder: Tmpfs, tmp_path: Path) -> None:
    assert (
        limits.allot(config(tmp_path, 0), folder, [], ranks=2, copies=3, nodes=2, bytes_max=MIB).replicas == 4
    )


def test_a_thread_stays_on_its_numa_node() -> None:
    """First touch decides where memory lies; a node that does not exist changes nothing."""
    seen: dict[int, set[int]] = {}

    def look(node: int) -> None:
        on_numa_node(node)
        seen[node] = os.sched_getaffinity(0)

    for node in (0, 4000):
        thread = threading.Thread(target=look, args=(node,))
        thread.start()
        thread.join()

    assert seen[0] <= os.sched_getaffinity(0)
    assert seen[4000] == os.sched_getaffinity(0)


def sealed(folder: Tmpfs, *, verify: bool, change: bool, given: bool) -> tuple[str, str]:
    """What becomes of a slot with a small rank file, whose bytes may have changed after the device's digests."""
    start = 4096
    data = (start - 8).to_bytes(8, "little") + b" " * (start - 8) + b"x" * 5000
    version = Version(1, 7, "ab" * 16)
    record = SlotRecord(0, own_lane(0), "WRITING", 1, version, 0, 1, "cd" * 16, len(data), writer_done=True)
    extras = b"{}"
    made = RankDigests(
        data_start=start, data_size=5000, header=xxhash.xxh3_128_digest(data[:start]), extras=xxhash.xxh3_128_digest(extras),
        index=bytes.fromhex("cd" * 16), world=1, rank=0, step=7, epoch=1, incarnation=bytes.fromhex("ab" * 16),
        leaves=np.frombuffer(xxhash.xxh3_128_digest(data[start:]), np.uint8).reshape(1, 16),
    )  # fmt: skip
    folder.allocate(0, MIB)
    with folder.mapped(0, MIB, writable=True) as view:
        view[: len(data)] = data
        if change:
            view[start + 10] ^= 1
    folder.write_side(0, "extras", extras)
    if given:
        folder.write_side(0, "digests", made.to_bytes())
    pool = Hashing(1)
    found = Sealing(folder, pool, verify=verify).seal(record)
    pool.close()
    if found[0]:
        assert RankDigests.parse("d", folder.read_side(0, "digests")).content.hex() == found[0]
        assert change or found[0] == made.content.hex()
    return found


def test_digests_of_the_device_are_compared_unless_that_is_turned_off(folder: Tmpfs) -> None:
    """Turned off, they are believed until the first scrub or reader; without any the daemon computes them."""
    assert sealed(folder, verify=True, change=False, given=True)[0]
    assert "leaf 0" in sealed(folder, verify=True, change=True, given=True)[1]
    assert sealed(folder, verify=False, change=True, given=True)[0]
    folder.drop_side(0, "digests")
    assert sealed(folder, verify=True, change=True, given=False)[0]


def test_digests_of_another_shard_are_refused(folder: Tmpfs) -> None:
    """Whatever says another rank, step or index than the seal does is not of this shard."""
    sealed(folder, verify=True, change=False, given=True)
    other = SlotRecord(
        0, own_lane(0), "WRITING", 1, Version(1, 8, "ab" * 16), 0, 1, "cd" * 16, 9096, writer_done=True
    )
    pool = Hashing(1)

    digest, reason = Sealing(folder, pool, verify=False).seal(other)

    pool.close()
    assert not digest and "step is 7, not 8" in reason
