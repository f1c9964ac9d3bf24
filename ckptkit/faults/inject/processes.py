"""Faults of processes and nodes, from outside: signals and limits. Only for processes that the caller started."""

import os
import resource
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import suppress


def kill(pid: int) -> None:
    """Kill -9; nothing where it is gone already."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def interrupt(pid: int, number: int = signal.SIGTERM) -> None:
    """Ask it to end."""
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def hang(pid: int) -> None:
    """Stop it, as a hang looks from outside: its connections stay open, nothing is answered."""
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGSTOP)


def go_on(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGCONT)


class Slow:
    """Lets a process run for a share of the time only, until `end` or for `seconds`: a slow rank, a busy node."""

    def __init__(self, pid: int, share: float, seconds: float = 3600.0, period_s: float = 0.05) -> None:
        self._pid, self._share, self._period_s = pid, min(max(share, 0.01), 1.0), period_s
        self._until = time.monotonic() + seconds
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"slow {pid}", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while time.monotonic() < self._until and not self._stop.is_set():
            hang(self._pid)
            self._stop.wait(self._period_s * (1 - self._share))
            go_on(self._pid)
            self._stop.wait(self._period_s * self._share)

    def end(self) -> None:
        """Let it run freely again."""
        self._stop.set()
        self._thread.join()
        go_on(self._pid)


def limit_memory(pid: int, nbytes: int) -> None:
    """Let it have no more address space than that: allocations fail from here on, as when memory is out."""
    _, hard = resource.prlimit(pid, resource.RLIMIT_AS)
    resource.prlimit(pid, resource.RLIMIT_AS, (nbytes, hard))


def lose_node(pids: Iterable[int], memory: Iterable[str], reap: Callable[[], None] = lambda: None) -> None:
    """A node loses power: all its processes at once, then what they had in memory (folders on tmpfs).

    Args:
        pids: Stopped first, so that none sees another die; then killed.
        memory: Folders that vanish with the node.
        reap: Waits for the ends of the processes, so that none writes to what is removed.
    """
    every = list(pids)
    for pid in every:
        hang(pid)
    for pid in every:
        kill(pid)
    reap()
    for folder in memory:
        shutil.rmtree(folder, ignore_errors=True)
