"""Metrics: what saves cost and how old the last durable step is; to the log, to Prometheus where its client is installed, and to a callback."""

import logging
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

log = logging.getLogger("ckptkit.hooks")


class Metrics:
    """Counts and times of one rank's saves.

    Args:
        rank: For the log and the label of Prometheus' series.
        callback: Given each event as a dict; what it raises is logged.
    """

    def __init__(self, rank: int, callback: Callable[[Mapping[str, Any]], None] | None) -> None:
        self.rank = rank
        self._callback = callback
        self._lock = threading.Lock()
        self.values: dict[str, float] = {
            "saves_total": 0, "saves_failed_total": 0, "saves_skipped_total": 0, "failed_in_a_row": 0, "stall_seconds_total": 0.0,
            "copied_bytes_total": 0, "copy_bytes_per_second": 0.0, "durable_step": -1, "durable_time": 0.0,
        }  # fmt: skip
        self._series = _series(self.values)

    def event(self, event: Mapping[str, Any]) -> None:
        """Take an event from any thread."""
        kind = event["event"]
        line = " ".join(f"{key}={value}" for key, value in event.items() if value not in ("", None, ()))
        level = {"failed": logging.WARNING, "differing": logging.ERROR, "skipped": logging.WARNING}.get(
            kind, logging.DEBUG
        )
        log.log(level, "rank=%d %s", self.rank, line)
        if self._callback is not None:
            try:
                self._callback({**event, "rank": self.rank})
            except Exception:
                log.exception("on_event raised")

    def add(self, **changes: float) -> None:
        """Add to counters."""
        with self._lock:
            for name, change in changes.items():
                self.values[name] += change
        self._publish(changes)

    def set(self, **values: float) -> None:
        """Set gauges."""
        with self._lock:
            self.values.update(values)
        self._publish(values)

    @property
    def durable_age_s(self) -> float | None:
        """Seconds since the last durable step of this run was committed; None where there was none."""
        return None if self.values["durable_step"] < 0 else time.time() - self.values["durable_time"]

    def _publish(self, names: Mapping[str, float]) -> None:
        for name in names:
            gauge = self._series.get(name)
            if gauge is not None:
                gauge.labels(rank=str(self.rank)).set(self.values[name])


_made: dict[str, Any] = {}


def _series(names: Mapping[str, float]) -> dict[str, Any]:
    """Prometheus' gauges; the trainer serves them, where it serves any."""
    with suppress(ImportError):
        from prometheus_client import Gauge

        for name in names:
            if name not in _made:
                _made[name] = Gauge(f"ckptkit_hooks_{name}", f"ckptkit: {name.replace('_', ' ')}", ["rank"])
    return _made
