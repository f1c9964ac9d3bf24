"""The daemon's log: one JSON object a line on standard error, with wall-clock time for people and monotonic time for differences."""

import json
import sys
import time
from typing import Any, TextIO


class Log:
    """Writes events. `base` is in every line: job and node.

    Texts come from outside, too; JSON keeps them in their line.
    """

    def __init__(self, stream: TextIO | None = None, **base: Any) -> None:
        self._stream, self._base = stream, base

    def __call__(self, event: str, **facts: Any) -> None:
        now = time.time()
        stamp = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(now)) + f".{int(now % 1 * 1000):03d}Z"
        line = {"time": stamp, "mono": round(time.monotonic(), 3), "event": event, **self._base, **facts}
        stream = self._stream or sys.stderr
        try:
            stream.write(json.dumps(line, default=str, separators=(",", ":")) + "\n")
            stream.flush()
        except (OSError, ValueError):
            pass  # a full disk or a closed pipe is no reason to stop
