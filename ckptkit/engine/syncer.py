"""A thread that makes what is written durable while more is being written."""

import threading
import time

from ckptkit.engine.journal import Journal
from ckptkit.engine.writer import Writer


class Syncer(threading.Thread):
    """Makes complete segments durable, now and then, and tells the way of writing how fast it was."""

    def __init__(self, writer: Writer, journal: Journal, stop: threading.Event, every_s: float) -> None:
        super().__init__(name="syncer", daemon=True)
        self._every_s = every_s
        self._writer, self._journal, self._stop_run = writer, journal, stop
        self._end = threading.Event()
        self._error: Exception | None = None
        self.bytes = 0

    def run(self) -> None:
        before, began = self._writer.done_bytes, time.monotonic()
        while not self._end.wait(self._every_s):
            if self._sync():  # without a sync, bytes may be anywhere
                done, now = self._writer.done_bytes, time.monotonic()
                self._writer.outputs.way.judge(done - before, now - began)
                before, began = done, now

    def _sync(self) -> bool:
        """Whether anything became durable."""
        before = self.bytes
        if self._error is None:
            try:
                self.bytes += self._writer.make_durable(self._journal)
            except Exception as error:  # noqa: BLE001  (raised by `end`)
                self._error = error
                self._stop_run.set()
        return self.bytes > before

    def end(self) -> Exception | None:
        """Sync the rest, and give the error if there was one."""
        self._end.set()
        self.join()
        self._sync()
        return self._error
