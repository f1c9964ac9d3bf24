"""Progress of long commands, on standard error: a bar on a terminal, a plain line every ten seconds elsewhere.

Rate and time left come from the last half minute, not from the start, so that they follow a store that changes its pace.
"""

import sys
import time
from collections import deque
from collections.abc import Callable
from threading import Lock
from types import TracebackType
from typing import Any, Self, TextIO

from ckptkit.cli import show

WINDOW_S = 30.0
LINE_EVERY_S = 10.0


class Meter:
    """How fast something goes. Times are given by the caller, in seconds."""

    def __init__(self) -> None:
        self._seen: deque[tuple[float, int]] = deque()

    def add(self, now: float, done: int) -> None:
        """Note that `done` of the work was done at `now`."""
        if self._seen and done < self._seen[-1][1]:
            self._seen.clear()  # a new phase counts from its own start
        if len(self._seen) > 1 and now - self._seen[-2][0] < 0.1:
            self._seen.pop()
        self._seen.append((now, done))
        while len(self._seen) > 2 and now - self._seen[1][0] > WINDOW_S:
            self._seen.popleft()

    @property
    def rate(self) -> float:
        """Work per second over the window; 0 while unknown."""
        if len(self._seen) < 2 or self._seen[-1][0] <= self._seen[0][0]:
            return 0.0
        return (self._seen[-1][1] - self._seen[0][1]) / (self._seen[-1][0] - self._seen[0][0])


def status(done: int, total: int, rate: float, unit: str = "bytes") -> str:
    """`3.40/8.10 GB, 412 MB/s, 11 s left`; what is unknown is left out."""
    amount: Callable[[float], str] = show.nbytes if unit == "bytes" else lambda n: f"{round(n):,}"
    parts = [f"{amount(done)} of {amount(total)}" if total else amount(done)]
    if rate > 0:
        parts.append(show.rate(rate) if unit == "bytes" else f"{amount(rate)} {unit}/s")
        if total > done:
            parts.append(f"{show.duration((total - done) / rate)} left")
    return ", ".join(parts)


class Progress:
    """Shows how far a command is. Call it with `(done, total)` from any thread, as often as you like.

    Use as a context; leaving it removes the bar. Standard output is never touched. A closed standard error is
    ignored: the work goes on.
    """

    def __init__(
        self,
        what: str,
        unit: str = "bytes",
        stream: TextIO | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.what = what
        self.unit = unit
        self._stream = sys.stderr if stream is None else stream
        self._clock = clock
        self._meter = Meter()
        self._lock = Lock()
        self._last_line = clock()
        self._last_draw = float("-inf")
        self._bar: Any = None
        self._task: Any = None

    def __enter__(self) -> Self:
        self._last_line = self._clock()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._lock:
            if self._bar is not None:
                self._bar.stop()
                self._bar = None

    def __call__(self, done: int, total: int, what: str | None = None) -> None:
        """Say that `done` of `total` is done, and of what (else what it was).

        Args:
            done: Bytes, or whatever `unit` says.
            total: The same for all; 0 where it is not known.
            what: The present phase, for example `reading headers`.
        """
        now = self._clock()
        with self._lock:
            if what is not None and what != self.what:
                self.what, self._meter = what, Meter()
            self._meter.add(now, done)
            try:
                if self._stream.isatty():
                    self._draw(now, done, total)
                elif now - self._last_line >= LINE_EVERY_S:
                    self._last_line = now
                    part = f" {100 * done // total}%" if total else ""
                    self._stream.write(
                        f"{self.what}{part}: {status(done, total, self._meter.rate, self.unit)}\n"
                    )
                    self._stream.flush()
            except (BrokenPipeError, ValueError):  # nobody looks any more
                pass

    def _draw(self, now: float, done: int, total: int) -> None:
        if now - self._last_draw < 0.1 and done < total:
            return
        self._last_draw = now
        if self._bar is None:
            self._start()
        text = status(done, total, self._meter.rate, self.unit)
        self._bar.update(self._task, description=self.what, completed=done, total=total or None, text=text)

    def _start(self) -> None:
        """The bar appears with the first report, so that quick commands and `--help` never load rich."""
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        columns = (
            TextColumn("{task.description}"),
            BarColumn(bar_width=None, style="dim", complete_style="cyan", finished_style="green"),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[text]}", style="dim"),
        )
        console = Console(file=self._stream, stderr=True)
        self._bar = Progress(*columns, console=console, transient=True, expand=True, redirect_stdout=False)
        self._task = self._bar.add_task(self.what, total=None, text="")
        self._bar.start()
