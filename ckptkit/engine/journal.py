"""The journal: which segments of an unfinished folder are durable.

JSON lines in the folder's log. The first line says which plan and which source it belongs to; every other
one is a segment that was synced before the line was written, with what was computed from its bytes, so that no
durable byte is ever read again. A line that a crash tore is ignored, with all after it.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

from ckptkit.core.copies import Copies
from ckptkit.core.destination import Destination
from ckptkit.stores.folder import Folder

VERSION = 2


@dataclass(frozen=True, slots=True)
class Durable:
    """A durable segment.

    Attributes:
        file, segment: Its file, and its number in that file.
        digests: Of its leaves, 16 bytes each; empty where the destination has none.
        sums: Parts of checksums: `(fix-up, start, stop, crc32)`.
        prints: Parts of fingerprints: `(key, sum)`.
    """

    file: int
    segment: int
    digests: bytes
    sums: tuple[tuple[int, int, int, int], ...]
    prints: tuple[tuple[int, int], ...] = ()


def plan_hash(copies: Copies, destination: Destination) -> str:
    """What is written, in 32 hexadecimal digits: every copy, every literal, every file."""
    hasher = xxhash.xxh3_128()
    for name in copies.__slots__:
        hasher.update(np.ascontiguousarray(getattr(copies, name)).reshape(-1).view(np.uint8).data)

    def add(*values: object) -> None:
        hasher.update(json.dumps(values).encode())

    for file in destination.catalog.files:
        add(file.path, file.size, file.data_start)
    for number, literals in sorted(destination.literals.items()):
        for literal in literals:
            add(number, literal.offset, len(literal.data))
            hasher.update(literal.data)
    for number, fixups in sorted(destination.fixups.items()):
        add(number, [[fixup.kind, fixup.start, fixup.stop, *fixup.offsets] for fixup in fixups])
    add(destination.digests, destination.fingerprints, VERSION)
    return hasher.hexdigest()


class Journal:
    """The journal of one folder, kept in its log. Not for several threads at once."""

    def __init__(self, folder: Folder, plan: str, source: str) -> None:
        self._folder = folder
        self._head = {"version": VERSION, "plan": plan, "source": source}

    def read(self) -> list[Durable] | None:
        """Durable segments, or None where the journal is absent, unreadable, or of another plan or source."""
        log = self._folder.read_log()
        return None if log is None else self._parse(log)

    def read_all(self, logs: Iterable[bytes]) -> list[Durable]:
        """Durable segments of several logs; those of another plan or source do not count."""
        return [row for log in logs for row in self._parse(log) or ()]

    def _parse(self, log: bytes) -> list[Durable] | None:
        lines = log.split(b"\n")
        found = []
        for number, line in enumerate(lines[:-1]):  # what follows the last newline is torn or empty
            try:
                row = json.loads(line)
                if number == 0:
                    if row != self._head:
                        return None
                    continue
                sums = tuple((int(a), int(b), int(c), int(d)) for a, b, c, d in row["sums"])
                prints = tuple((int(key), int(value)) for key, value in row["prints"])
                digests = bytes.fromhex(row["digests"])
                found.append(Durable(int(row["file"]), int(row["segment"]), digests, sums, prints))
            except (ValueError, KeyError, TypeError):
                return found if number else None
        return found if len(lines) > 1 else None

    def start(self, durable: Iterable[Durable]) -> None:
        """Write a fresh journal of what is durable already; replaces the old one in one step."""
        self._folder.start_log([json.dumps(self._head), *map(_line, durable)])

    def append(self, durable: Iterable[Durable]) -> None:
        """Add segments that became durable, and make the lines durable."""
        self._folder.append_log(map(_line, durable))


def _line(row: Durable) -> str:
    digests = row.digests.hex()
    return json.dumps(
        {"file": row.file, "segment": row.segment, "digests": digests, "sums": row.sums, "prints": row.prints}
    )
