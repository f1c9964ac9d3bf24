"""The incident log: a line of JSON for programs and a line of text for people, for every start, fault and decision."""

import datetime
import json
import os
from dataclasses import asdict, dataclass
from typing import Any

from ckptkit.errors import StoreError

__all__ = ["Entry", "IncidentLog"]


@dataclass(frozen=True)
class Entry:
    """One line.

    Attributes:
        time: Wall clock, ISO 8601 with the zone, for people; nothing is ordered by it.
        node: The node's name.
        attempt: Counts from 1, by this supervisor.
        kind: `start`, `crash`, `hang`, `nan`, `spike`, `corruption`, `slow`, `membership`, `ban`, `leave`, `give-up`,
            `interrupted`, `finished`.
        rank, step: Where it was seen, if anywhere.
        action: What is done about it; empty where nothing.
        detail: For a person.
    """

    time: str
    node: str
    attempt: int
    kind: str
    rank: int | None
    step: int | None
    action: str
    detail: str

    def text(self) -> str:
        where = "" if self.rank is None else f" rank {self.rank}"
        at = "" if self.step is None else f" step {self.step}"
        then = f" → {self.action}" if self.action else ""
        return f"{self.time}  {self.node}  #{self.attempt}  {self.kind}{where}{at}: {self.detail}{then}"


class IncidentLog:
    """Appends to `incidents.jsonl` and `incidents.log` in a folder; every line is durable before the call returns.

    Raises StoreError where the folder cannot be written.
    """

    def __init__(self, folder: str, node: str) -> None:
        self.folder, self.node = folder, node
        self.entries: list[Entry] = []
        try:
            os.makedirs(folder, exist_ok=True)
            self._files = [self._open(name) for name in ("incidents.jsonl", "incidents.log")]
        except OSError as error:
            raise StoreError(
                f"cannot write the incident log in {folder}: {error.strerror}; choose another --log",
                file=folder,
            ) from error

    def _open(self, name: str) -> int:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        return os.open(os.path.join(self.folder, name), flags, 0o644)

    def add(
        self,
        kind: str,
        detail: str,
        *,
        attempt: int,
        rank: int | None = None,
        step: int | None = None,
        action: str = "",
        **facts: Any,
    ) -> Entry:
        """Note something. `facts` go to the JSON line only."""
        now = datetime.datetime.now().astimezone().isoformat(timespec="milliseconds")
        entry = Entry(now, self.node, attempt, kind, rank, step, action, " ".join(detail.split()))
        self.entries.append(entry)
        lines = json.dumps({**asdict(entry), **facts}), entry.text()
        for fd, line in zip(self._files, lines, strict=True):
            try:
                os.write(fd, f"{line}\n".encode())
                os.fsync(fd)
            except OSError:
                continue  # a full disk must not end the run that is watched
        return entry

    def close(self) -> None:
        for fd in self._files:
            os.close(fd)
