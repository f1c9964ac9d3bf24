"""The pulse of a rank: what a supervisor on the same node watches.

One file a rank, a JSON object a line. Times are the node's monotonic clock, which all of its processes share, so that clock
jumps mean nothing. A beat costs one `write` to the page cache and is never synced: it matters only while the node lives.

    {"what": "beat", "at": 81123.402, "step": 1200, "loss": 2.31}
    {"what": "corruption", "at": 81123.9, "step": 1200, "rank": 3, "detail": "layers.0.attn.q (param) leaf 17"}

A supervisor says where by `CKPTKIT_PULSE`, a folder. Without it every method does nothing.
"""

import faulthandler
import json
import math
import os
import signal
import time
from typing import Any

__all__ = ["FOLDER", "Pulse"]

FOLDER = "CKPTKIT_PULSE"
"""The environment variable that names the folder."""


class Pulse:
    """Tells a supervisor how a rank fares.

    SIGUSR1 writes the stack of every thread to `rank-NNNNN.stack`, which a supervisor asks for before it ends a rank that hangs.

    Args:
        rank: This process's global rank; from `RANK` unless given.
        folder: Where the files are; from `CKPTKIT_PULSE` unless given. Must exist.
    """

    def __init__(self, rank: int | None = None, folder: str | None = None) -> None:
        self.rank = int(os.environ.get("RANK", "0")) if rank is None else rank
        folder = os.environ.get(FOLDER) if folder is None else folder
        self._fd = -1
        self._stack = None
        if folder:
            flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
            self._fd = os.open(beats_file(folder, self.rank), flags, 0o600)
            self._stack = open(stack_file(folder, self.rank), "w")  # noqa: SIM115  (as long as the process)
            faulthandler.register(signal.SIGUSR1, self._stack, all_threads=True)

    def beat(self, step: int, loss: float | None = None) -> None:
        """Tell that `step` optimizer steps are complete. A loss that is no number is told as such."""
        if self._fd >= 0:
            # JSON has no NaN: what is not finite goes as text.
            value = loss if loss is None or math.isfinite(loss) else str(loss)
            self._write({"what": "beat", "step": step, "loss": value})

    def tell(self, what: str, **facts: Any) -> None:
        """Tell an event: `restored`, `saved`, `corruption` and the like, with plain values."""
        if self._fd >= 0:
            self._write({"what": what, **facts})

    def _write(self, line: dict[str, Any]) -> None:
        text = json.dumps({"at": round(time.monotonic(), 6), **line}) + "\n"
        try:
            os.write(self._fd, text.encode())
        except OSError:
            self.close()  # a full or lost disk must never end the training

    def close(self) -> None:
        if self._fd >= 0:
            faulthandler.unregister(signal.SIGUSR1)
            os.close(self._fd)
            self._fd = -1
            assert self._stack is not None
            self._stack.close()


def beats_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank-{rank:05}.pulse")


def stack_file(folder: str, rank: int) -> str:
    return os.path.join(folder, f"rank-{rank:05}.stack")
