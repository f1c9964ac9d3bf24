"""The way of bytes to a disk: past the page cache, or through it.

Neither is always the faster. Direct writes cost no processor time and leave memory to others, and a fast NVMe takes them from many threads
at once; some virtual disks take twice as much from the page cache, whose pages lie together. So both are timed on what is written anyway,
from one sync to the next, and the faster one goes on.
"""

_FIRST = 2
"""Periods through the page cache before the other way is tried: the first begins with nothing to write back, and looks faster than it is."""

_AGAIN = 24
"""Every so many periods the other way is tried again, for one period: disks are shared, and what was faster may not stay it."""


class Way:
    """Which way the files of one destination are written.

    Args:
        fixed: The way, where it is not to be chosen.

    Attributes:
        direct: Whether writes bypass the page cache now.
        possible: Whether they ever do.
    """

    def __init__(self, fixed: bool | None = None) -> None:
        self._fixed = fixed is not None
        self.direct = bool(fixed)
        self.possible = fixed is not False
        self._rates: dict[bool, float] = {}  # bytes a second, by `direct`
        self._periods = 0

    def judge(self, nbytes: int, seconds: float) -> None:
        """Say what was written in a period that began and ended with a sync; chooses the way for the next one."""
        if self._fixed or nbytes <= 0 or seconds <= 0:
            return
        rate = nbytes / seconds
        self._rates[self.direct] = (self._rates.get(self.direct, rate) + rate) / 2
        self._periods += 1
        if self._periods < _FIRST:
            return
        if len(self._rates) < 2:
            self.direct = not self.direct
            return
        faster = self._rates[True] > self._rates[False]
        self.direct = faster != (self._periods % _AGAIN == 0)
