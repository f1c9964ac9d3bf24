"""How fast background work may go: a token bucket, and a gate that is closed while ranks save."""

import threading
import time


class Throttle:
    """Bytes a second for the threads that share it. `rate` 0 is no limit.

    A quarter of a second's bytes may go at once; whoever takes more waits the longer afterwards.
    """

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self._free_at = time.monotonic()
        self._lock = threading.Lock()

    def take(self, nbytes: int) -> None:
        """Wait until `nbytes` more are within the rate."""
        if not self.rate:
            return
        with self._lock:
            now = time.monotonic()
            start = max(self._free_at, now - 0.25)
            self._free_at = start + nbytes / self.rate
            wait = self._free_at - now
        if wait > 0:
            time.sleep(wait)


class Gate:
    """Closed while at least one is inside: replication yields to saves."""

    def __init__(self) -> None:
        self._inside = 0
        self._changed = threading.Condition()

    def enter(self) -> None:
        with self._changed:
            self._inside += 1

    def leave(self) -> None:
        with self._changed:
            self._inside = max(self._inside - 1, 0)
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Wait until nobody is inside; whether that came in time."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._inside, timeout_s)
