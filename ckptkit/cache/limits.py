"""How much memory the slots of a node may take, measured: configuration, tmpfs, MemAvailable, cgroup. And who gets it."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, field

from ckptkit.cache.config import CacheConfig
from ckptkit.cache.messages import SlotRecord
from ckptkit.cache.tmpfs import Tmpfs

_GIB = 1 << 30
_BESIDE = 64 << 20
"""Bytes of a tmpfs that are left for records, digests, extras and indexes, beside a five-hundredth of it."""


@dataclass(frozen=True)
class Memory:
    """What the node says of its memory, in bytes. `cgroup` is what is left below the limit, None where there is no limit."""

    total: int
    available: int
    cgroup: int | None


@dataclass(frozen=True)
class Allotment:
    """Slots of an epoch. `refusal` says why there can be none; `log` what was given up for lack of memory, and the table."""

    slot_bytes: int
    per_rank: int
    replicas: int
    log: Sequence[str] = field(default=())
    refusal: str = ""


def memory() -> Memory:
    """The memory of this node, as the kernel tells it now."""
    found = {}
    with open("/proc/meminfo") as file:
        for line in file:
            name, _, rest = line.partition(":")
            found[name] = int(rest.split()[0]) << 10
    return Memory(found["MemTotal"], found["MemAvailable"], _cgroup_left())


def reserve(config: CacheConfig, total: int) -> int:
    """Bytes that slots leave free."""
    return config.slots.reserve or max(32 * _GIB, total // 10)


def allot(
    config: CacheConfig,
    tmpfs: Tmpfs,
    current: Sequence[SlotRecord],
    *,
    ranks: int,
    copies: int,
    nodes: int,
    bytes_max: int,
) -> Allotment:
    """Slots for `ranks` ranks on this node whose largest file has `bytes_max` bytes, within what there is.

    Slots that are there already count as memory that we may have.
    """
    slot = -(-int(bytes_max * config.slots.margin) // config.slots.round) * config.slots.round
    have = sum(tmpfs.slot_size(record.slot) for record in current)
    now = memory()
    size, free = tmpfs.space()
    bounds = {
        "slots.budget": config.slots.budget or now.total,
        "the tmpfs": max(free - _BESIDE - size // 500, 0) + have,
        "free memory less the reserve": max(now.available - reserve(config, now.total), 0) + have,
    }
    if now.cgroup is not None:
        bounds["the cgroup's limit"] = now.cgroup + have
    limit, why = min((bytes_, name) for name, bytes_ in bounds.items())
    most = min(copies, nodes - 1)
    lines = []
    for per_rank, k in [(config.slots.per_rank, most), *((2, k) for k in range(most, -1, -1))]:
        needed = (per_rank + 2 * k) * ranks * slot
        if needed <= limit:
            lines.append(
                f"{ranks} ranks x {per_rank} slots and {2 * k * ranks} for copies of {slot:,} bytes: {needed:,} of {limit:,} bytes"
            )
            return Allotment(slot, per_rank, 2 * k * ranks, tuple(lines))
        lines.append(f"{per_rank} slots a rank and {k} copies need {needed:,} bytes, {why} allows {limit:,}")
    return Allotment(slot, 0, 0, tuple(lines), f"not enough memory for two slots a rank: {lines[-1]}")


def _cgroup_left() -> int | None:
    """Bytes below the tightest limit of our cgroup (v2) and those above it."""
    try:
        with open("/proc/self/cgroup") as file:
            path = next(line.strip()[3:] for line in file if line.startswith("0::"))
    except (OSError, StopIteration):
        return None
    least: int | None = None
    at = "/sys/fs/cgroup" + path.rstrip("/")
    while at.startswith("/sys/fs/cgroup"):
        limit, used = _number(f"{at}/memory.max"), _number(f"{at}/memory.current")
        if limit is not None and used is not None:
            left = max(limit - used, 0)
            least = left if least is None else min(least, left)
        at = os.path.dirname(at)
    return least


def _number(path: str) -> int | None:
    try:
        with open(path) as file:
            return int(file.read())
    except (OSError, ValueError):  # absent, or "max"
        return None
