"""Host buffers that a device copies into: shared memory, registered in segments where that works.

Registered memory is copied to at the full rate of the copy engine. One registration of many GiB may fail or hold a lock of the
driver for long, so memory is registered in segments of at most 1 GiB; no copy may cross a segment's edge. Where
registration fails, what was done is undone and copies bounce through small pinned buffers.
"""

import ctypes
import mmap
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch

from ckptkit.errors import StoreError

SEGMENT = 1 << 30


def segments(start: int, nbytes: int) -> Iterator[tuple[int, int]]:
    """A range of a buffer cut at the edges of segments, as `(start, nbytes)`."""
    stop = start + nbytes
    while start < stop:
        edge = min(stop, (start // SEGMENT + 1) * SEGMENT)
        yield start, edge - start
        start = edge


class HostBuffer:
    """Writable memory for one rank file.

    Args:
        memory: Page-aligned; borrowed, and kept alive.
        slot: The cache's slot that it is, or None.

    Attributes:
        tensor: All of it, as uint8.
        mode: `host` (no device), `registered`, or `bounce`.
        prepared: Whether what no save changes (header, padding) is in it.
    """

    def __init__(self, memory: memoryview, slot: Any = None) -> None:
        self.memory = memory
        self.nbytes = memory.nbytes
        self.tensor = torch.frombuffer(memory, dtype=torch.uint8)
        self.slot = slot
        self.mode = "host"
        self.prepared = False
        self._segments: list[int] = []

    @classmethod
    def own(cls, nbytes: int) -> "HostBuffer":
        """Fresh zeros, every page present. Raises StoreError where there is no memory."""
        flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_POPULATE", 0)
        try:
            return cls(memoryview(mmap.mmap(-1, max(nbytes, mmap.PAGESIZE), flags)))
        except (OSError, ValueError) as error:
            raise StoreError(
                f"no memory for a buffer of {nbytes:,} bytes: {error}. Save with fewer buffers, or on more ranks"
            ) from error

    def register(self, device: torch.device) -> str:
        """Let a device copy to it at full rate; gives `registered`, or `bounce` where that cannot be, or `host`."""
        if device.type != "cuda":
            return self.mode
        runtime = _Runtime.find()
        address = self.tensor.data_ptr()
        for start in range(0, self.nbytes, SEGMENT):
            size = min(SEGMENT, self.nbytes - start)
            if runtime is None or not runtime.register(address + start, size):
                self.unregister()
                self.mode = "bounce"
                return self.mode
            self._segments.append(address + start)
        self.mode = "registered"
        return self.mode

    def unregister(self) -> None:
        """Undo `register`, in reverse order."""
        runtime = _Runtime.find()
        while self._segments:
            address = self._segments.pop()
            if runtime is not None:
                runtime.unregister(address)

    def close(self) -> None:
        """Let go of registrations; memory goes with the last view of it."""
        self.unregister()


class _Runtime:
    """`cudaHostRegister` of CUDA, `hipHostRegister` of ROCm."""

    _found: "_Runtime | None" = None
    _looked = False

    def __init__(self, register: Any, unregister: Any, clear: Any) -> None:
        self._register, self._unregister, self._clear = register, unregister, clear

    @classmethod
    def find(cls) -> "_Runtime | None":
        """The runtime that torch uses; None where it cannot be reached."""
        if not cls._looked:
            cls._looked = True
            cls._found = cls._of_hip() if torch.version.hip else cls._of_cuda()
        return cls._found

    @classmethod
    def _of_cuda(cls) -> "_Runtime | None":
        if not torch.cuda.is_available():
            return None
        runtime = torch.cuda.cudart()
        major = (torch.version.cuda or "").partition(".")[0]
        clear = _symbol((f"libcudart.so.{major}", "libcudart.so"), "cudaGetLastError")
        return cls(
            lambda address, size: int(
                runtime.cudaHostRegister(address, size, 1)
            ),  # portable: for every device
            lambda address: int(runtime.cudaHostUnregister(address)),
            clear,
        )

    @classmethod
    def _of_hip(cls) -> "_Runtime | None":
        names = ("libamdhip64.so", *(f"libamdhip64.so.{n}" for n in (7, 6, 5)))
        register, unregister = _symbol(names, "hipHostRegister"), _symbol(names, "hipHostUnregister")
        if register is None or unregister is None:
            return None
        register.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint]
        unregister.argtypes = [ctypes.c_void_p]
        return cls(
            lambda address, size: register(address, size, 1), unregister, _symbol(names, "hipGetLastError")
        )

    def register(self, address: int, nbytes: int) -> bool:
        try:
            done = self._register(address, nbytes) == 0
        except RuntimeError:
            done = False
        if not done:
            self._forget()
        return done

    def unregister(self, address: int) -> None:
        with suppress(RuntimeError):
            if self._unregister(address) != 0:
                self._forget()

    def _forget(self) -> None:
        """A failed call leaves its error for the next one to find."""
        if self._clear is not None:
            self._clear()
        with suppress(RuntimeError):
            torch.cuda.current_stream().query()


def _symbol(libraries: tuple[str, ...], name: str) -> Any:
    for library in libraries:
        with suppress(OSError, AttributeError):
            return getattr(ctypes.CDLL(library), name)
    return None
