"""SIGTERM: all ranks save at the same step, within the grace that is left, and end.

Ranks hear of it through the meeting: whoever is signalled flags it, and a thread of every rank looks for the flag. Each rank then says the
earliest step that it can still save, once: the one it stands at, if it is inside `on_step_end`, else the next. The highest of these is
the step for all. A rank waits only for threads of other ranks, never for their training, so nobody waits for someone who waits for him.
"""

import signal
import threading
import time
from types import FrameType
from typing import Any

from ckptkit.hooks.meeting import Meeting

POLL_S = 0.2


class Stopper:
    """Watches for SIGTERM, here and on other ranks.

    Args:
        grace_s: From the signal on.
    """

    def __init__(self, meeting: Meeting, grace_s: float) -> None:
        self.meeting, self.grace_s = meeting, grace_s
        self.requested = threading.Event()
        self.until = float("inf")
        self._completed = 0
        self._inside = False
        self._said = False
        self._step: int | None = None
        self._lock = threading.Lock()
        self._end = threading.Event()
        self._before: Any = None
        self._handles = threading.current_thread() is threading.main_thread()
        if self._handles:
            self._before = signal.signal(signal.SIGTERM, self._on_signal)
        self._thread = threading.Thread(target=self._watch, name="ckptkit-stop", daemon=True)
        self._thread.start()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        if not self.requested.is_set():
            self.until = time.monotonic() + self.grace_s
            self.requested.set()
        if callable(self._before) and self._before not in (signal.SIG_DFL, signal.SIG_IGN):
            self._before(number, frame)

    def _watch(self) -> None:
        flagged = False
        while not self._end.wait(POLL_S):
            if self.requested.is_set() and not flagged:
                self.meeting.flag("stop")
                flagged = True
            elif not flagged and self.meeting.there("stop"):
                flagged = True
                self.until = min(self.until, time.monotonic() + self.grace_s)
                self.requested.set()
            if flagged and not self._said:
                self._say()

    def _say(self) -> None:
        """Say the earliest step that this rank can save."""
        with self._lock:
            if self._said:
                return
            self._said = True
            earliest = self._completed if self._inside else self._completed + 1
        self.meeting.flag(f"stop/{self.meeting.rank}", str(earliest).encode())

    def due(self, step: int) -> bool:
        """In `on_step_end`: whether this is the step at which all save and end.

        Waits for the others' word, up to the grace. Where one does not come, this rank goes by what it has.
        """
        with self._lock:
            self._completed, self._inside = step, True
        try:
            if not self.requested.is_set():
                return False
            if self._step is None:
                self._say()
                self._step = self._agreed(step)
            return step >= self._step
        finally:
            with self._lock:
                self._inside = False

    def _agreed(self, step: int) -> int:
        found = [step] if self.meeting.world == 1 else []
        for rank in range(self.meeting.world if self.meeting.world > 1 else 0):
            left = max(self.until - time.monotonic(), 0.1)
            found.append(int(self.meeting.read(f"stop/{rank}", left)))
        return max(found)

    @property
    def left_s(self) -> float:
        """Seconds of the grace that are left."""
        return max(self.until - time.monotonic(), 0.0)

    def close(self) -> None:
        self._end.set()
        if self._handles and signal.getsignal(signal.SIGTERM) == self._on_signal:
            signal.signal(signal.SIGTERM, self._before)
        self._thread.join(2 * POLL_S + 1)
