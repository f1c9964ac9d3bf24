"""Fingerprints of checkpoints: those that are stored, and those that have to be computed."""

from collections.abc import Iterable
from threading import Lock

from ckptkit.core.fingerprints import MASK, axis_names, sum_of_run, unsigned
from ckptkit.core.plan import Key
from ckptkit.ops.reports import Progress
from ckptkit.ops.sources import Source
from ckptkit.ops.streaming import Chunk, visit


def stored(source: Source) -> dict[Key, int]:
    """What the checkpoint says itself, by tensor and role; empty where its format has no fingerprints."""
    found: dict[Key, int] = {}
    for text, value in source.catalog.facts.get("fingerprints", {}).items():
        tensor, _, role = text.rpartition("/")
        found[tensor, role] = int(value, 16)
    return found


def compute(
    source: Source,
    keys: Iterable[Key],
    *,
    threads: int | None = None,
    memory: int = 256 << 20,
    progress: Progress | None = None,
) -> dict[Key, int]:
    """Fingerprints from the bytes as they are now, each of which is read. Raises as `ckptkit.ops.streaming.visit`."""
    catalog = source.catalog
    held = {key: catalog.held[key] for key in keys}
    found = dict.fromkeys(held, 0)
    lock = Lock()

    def add(chunk: Chunk) -> None:
        tensor = catalog.tensors[chunk.key[0]]
        bits = chunk.bits[0].view(unsigned(held[chunk.key].itemsize))
        part = sum_of_run(bits, axis_names(tensor.axes), tensor.shape, chunk.first)
        with lock:
            found[chunk.key] = found[chunk.key] + part & MASK

    visit([source], held, add, threads=threads, memory=memory, progress=progress)
    return found


def fingerprints(source: Source, *, progress: Progress | None = None) -> tuple[dict[Key, int], int]:
    """Of everything the checkpoint holds, and how many had to be computed since they are not stored."""
    have = stored(source)
    missing = [key for key in source.catalog.held if key not in have]
    made = compute(source, missing, progress=progress) if missing else {}
    return {key: have[key] if key in have else made[key] for key in source.catalog.held}, len(missing)
