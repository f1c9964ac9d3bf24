"""Short probes of both stores, for an estimate of how long a run takes."""

import os
import tempfile
import time

from ckptkit import stores
from ckptkit.core.catalog import LEAF
from ckptkit.ops.sources import Source

_PROBE_S = 0.3
_PROBE_BYTES = 32 << 20


def read_rate(source: Source) -> float | None:
    """Bytes a second of a few reads from the largest files."""
    files = sorted(source.catalog.files, key=lambda file: -file.size)[:4]
    buffer = memoryview(bytearray(LEAF))
    began = time.monotonic()
    nbytes = 0
    for file in files:
        with source.store.open(file.path) as reader:
            for offset in range(0, reader.size, LEAF):
                part = buffer[: min(LEAF, reader.size - offset)]
                reader.readinto(offset, part)
                nbytes += len(part)
                if time.monotonic() - began > _PROBE_S or nbytes >= _PROBE_BYTES:
                    return nbytes / max(time.monotonic() - began, 1e-6)
    return nbytes / max(time.monotonic() - began, 1e-6) if nbytes else None


def write_rate(target: str, notes: list[str]) -> float | None:
    """Bytes a second of a file that is written, synced and removed beside a destination; None where that is remote."""
    folder = stores.local_path(target)
    if folder is None:
        notes.append(
            "the time is not estimated: nothing is written to a remote store to find out how fast it is"
        )
        return None
    while not os.path.isdir(folder) and folder != os.path.dirname(folder):
        folder = os.path.dirname(folder)
    data = os.urandom(LEAF)
    try:
        with tempfile.TemporaryFile(dir=folder) as file:
            began = time.monotonic()
            nbytes = 0
            while nbytes < _PROBE_BYTES and time.monotonic() - began < _PROBE_S:
                file.write(data)
                nbytes += LEAF
            file.flush()
            os.fsync(file.fileno())
            return nbytes / max(time.monotonic() - began, 1e-6)
    except OSError as error:
        notes.append(f"the destination cannot be written: {folder}: {error.strerror}")
        return None
