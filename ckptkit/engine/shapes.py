"""How work is cut: threads, and bytes of what they hold."""

from dataclasses import dataclass

from ckptkit.core.catalog import LEAF
from ckptkit.engine.executor import usable_cpus
from ckptkit.engine.writer import SEGMENT


@dataclass(frozen=True)
class Shape:
    """Threads, bytes of slabs that a worker may hold, and how far tasks may be apart."""

    threads: int
    task: int
    window: int | None = None


def choose_shape(
    total: int, threads: int | None, memory: int, readers: int, *, direct: bool, ordered: bool
) -> Shape:
    """Choose what the caller left open.

    A slab is one leaf: it stays in the CPU's cache, and disks take writes of that size best. On a disk a write keeps its thread waiting, so
    there are three threads a CPU. Remote stores are mostly waited for. A remote destination has two thirds of the memory for its
    uploads, and slabs that wait for their turn are held beside those being made.

    Args:
        total: Bytes to write.
        threads: As the caller says.
        memory: Bytes of buffers for all.
        readers: Reads that the source is worth having in flight.
        direct: Whether writes may bypass the page cache, as on a disk.
        ordered: Whether the destination takes files from first byte to last.
    """
    given, window = threads, None
    threads = given or max(default_threads(direct or ordered), readers)
    if ordered:
        memory //= 3
        threads = given or min(threads, 8)
    threads = max(1, min(threads, memory // (4 * LEAF)))
    tasks = threads
    if ordered:
        window = threads + 2
        tasks += window
    share = max((memory - threads * 2 * LEAF) // tasks, LEAF)
    small = max(LEAF, -(-total // (threads * 4)))  # so that every thread has something to do
    return Shape(threads, min(share, SEGMENT, small), window)


def default_threads(direct: bool) -> int:
    """Workers where the caller does not say: more than CPUs where writes keep a thread waiting."""
    return min(3 * usable_cpus(), 16) if direct else min(usable_cpus(), 32)
