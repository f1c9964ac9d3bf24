"""Reading ahead: who reads an object from front to back gets larger requests, as a kernel does for files.

A request to a remote store costs the time of some hundred KiB, and the engine asks for blocks of 1 MiB. When a thread's read begins where
its last one of the same object ended, twice as much is asked for as the last time, up to `WINDOW`; what was not asked for yet waits in
this thread's windows, `HELD` bytes at most. Reads at random cost nothing more than themselves.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

WINDOW = 8 << 20
"""Most bytes of one request."""

HELD = 8 << 20
"""Most bytes that wait in one thread's windows, of all objects."""


@dataclass(slots=True)
class _Window:
    """What one thread knows of one object: bytes from `start` on, where its last read ended, how much it asked for."""

    start: int
    data: bytes
    end: int
    asked: int


class ReadAhead(threading.local):
    """The windows of each thread."""

    def __init__(self) -> None:
        self._windows: OrderedDict[str, _Window] = OrderedDict()

    def read(
        self, name: str, size: int, offset: int, nbytes: int, fetch: Callable[[int, int], bytes]
    ) -> memoryview:
        """Bytes `[offset, offset + nbytes)` of the object `name` of `size` bytes, by `fetch(offset, nbytes)` where they are not here."""
        window = self._windows.get(name)
        if (
            window is not None
            and window.start <= offset
            and offset + nbytes <= window.start + len(window.data)
        ):
            window.end = offset + nbytes
            found = memoryview(window.data)[offset - window.start :][:nbytes]
            if window.end == window.start + len(window.data):
                window.data = b""  # the caller's view keeps it for as long as it is needed
            return found
        ahead = min(2 * window.asked, WINDOW) if window is not None and window.end == offset else nbytes
        asked = min(max(ahead, nbytes), size - offset)
        data = fetch(offset, asked)
        self._windows[name] = _Window(offset, data if asked > nbytes else b"", offset + nbytes, asked)
        self._windows.move_to_end(name)
        self._shrink()
        return memoryview(data)[:nbytes]

    def _shrink(self) -> None:
        """Forget the data of windows that were not used for longest; where they ended is still known of some."""
        held = sum(len(window.data) for window in self._windows.values())
        for window in self._windows.values():
            if held <= HELD:
                break
            held -= len(window.data)
            window.data = b""
        while len(self._windows) > 64:
            self._windows.popitem(last=False)
