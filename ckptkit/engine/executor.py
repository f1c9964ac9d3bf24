"""Threads: how many there should be, and how they share tasks.

Threads, since everything that takes time (reads, writes, syncs, numpy copies) runs outside Python's lock. Each thread
starts in a stretch of the task list of its own, so that threads seldom write the same file (writes to one
file exclude each other in most file systems); who runs out takes half of the longest stretch that is left. Files that take
bytes in order only are written by tasks in order.
"""

import os
import threading
from collections.abc import Callable
from itertools import pairwise


def usable_cpus() -> int:
    """CPUs that this process may use: its affinity, and the quota of its cgroup if there is one."""
    try:
        count = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        count = os.cpu_count() or 1
    quota = _cgroup_quota()
    return max(1, min(count, int(-(-quota // 1)))) if quota else count


def _cgroup_quota() -> float | None:
    """CPUs' worth of time that the cgroup grants (version 2, then 1), or None where it does not limit."""
    groups = {}
    try:
        with open("/proc/self/cgroup", encoding="utf-8") as file:
            for line in file:
                _, controllers, path = line.rstrip("\n").split(":", 2)
                groups[controllers] = path
    except (OSError, ValueError):
        return None
    for path in ("/sys/fs/cgroup" + groups.get("", ""), "/sys/fs/cgroup"):
        text = _text(os.path.join(path, "cpu.max")).split()
        if len(text) == 2:
            return None if text[0] == "max" else int(text[0]) / int(text[1])
    group = next((path for names, path in groups.items() if "cpu" in names.split(",")), None)
    for path in (f"/sys/fs/cgroup/cpu{group}", "/sys/fs/cgroup/cpu"):
        quota, period = (
            _text(os.path.join(path, "cpu.cfs_quota_us")),
            _text(os.path.join(path, "cpu.cfs_period_us")),
        )
        if quota and period:
            return int(quota) / int(period) if int(quota) > 0 else None
    return None


def _text(path: str) -> str:
    try:
        with open(path, encoding="utf-8") as file:
            return file.read().strip()
    except OSError:
        return ""


class Stretches:
    """Task numbers `0 … tasks - 1`, shared by workers."""

    def __init__(self, tasks: int, workers: int) -> None:
        self._lock = threading.Lock()
        edges = [tasks * k // workers for k in range(workers + 1)]
        self._left = [[a, b] for a, b in pairwise(edges)]

    def next(self, worker: int) -> int | None:
        """The next task of one worker, or None when none is left anywhere."""
        with self._lock:
            mine = self._left[worker]
            if mine[0] >= mine[1]:
                longest = max(self._left, key=lambda stretch: stretch[1] - stretch[0])
                if longest[0] >= longest[1]:
                    return None
                middle = (longest[0] + longest[1]) // 2
                mine[0], mine[1] = middle, longest[1]
                longest[1] = middle
            mine[0] += 1
            return mine[0] - 1

    def ended(self, task: int) -> None:
        """Nobody waits for it."""


class Window:
    """Task numbers in order, so that no task begins while one that is `size` or more before it has not ended."""

    def __init__(self, tasks: int, size: int, stop: threading.Event) -> None:
        self._changed = threading.Condition()
        self._tasks, self._size, self._stop = tasks, size, stop
        self._next = 0
        self._running: set[int] = set()

    def next(self, worker: int) -> int | None:
        """The next task, once it may begin; None when none is left, or the run stops."""
        with self._changed:
            while self._running and self._next - min(self._running) >= self._size:
                if self._stop.is_set():
                    return None
                self._changed.wait(0.1)
            if self._next == self._tasks:
                return None
            self._running.add(self._next)
            self._next += 1
            return self._next - 1

    def ended(self, task: int) -> None:
        with self._changed:
            self._running.remove(task)
            self._changed.notify_all()


def run_tasks(
    tasks: int,
    workers: int,
    work: Callable[[int, int], None],
    stop: threading.Event,
    tick: Callable[[], None] = lambda: None,
    every_s: float = 0.1,
    window: int | None = None,
) -> None:
    """Call `work(task, worker)` for every task, on `workers` threads; `tick()` now and then on the caller's.

    Tasks are shared out in stretches, or given in order where there is a `window` (see `Window`).

    The first error sets `stop` and is raised once all threads have ended. So is an error of `tick`, and a
    KeyboardInterrupt.
    """
    queue = Stretches(tasks, workers) if window is None else Window(tasks, window, stop)
    errors: list[BaseException] = []

    def loop(worker: int) -> None:
        try:
            while not stop.is_set():
                task = queue.next(worker)
                if task is None:
                    return
                work(task, worker)
                queue.ended(task)
        except BaseException as error:  # noqa: BLE001  (raised again on the caller's thread)
            if not stop.is_set():
                errors.append(error)
                stop.set()

    threads = [
        threading.Thread(target=loop, args=(k,), name=f"mover-{k}", daemon=True) for k in range(workers)
    ]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(every_s)
                tick()
    except BaseException:
        stop.set()
        raise
    finally:
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    if errors:
        raise errors[0]
