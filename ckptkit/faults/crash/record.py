"""Recording: a real operation's changes below a folder, in the order in which the system made them."""

import os
import threading
from types import TracebackType
from typing import Any, Self

from ckptkit.faults.crash.operations import (
    Exchange,
    Link,
    Make,
    Mark,
    Op,
    Remove,
    Rename,
    Resize,
    Sync,
    Tree,
    Write,
    tree_at,
)
from ckptkit.faults.interpose import Call, Interposer, Proceed


class Recorder:
    """Records all changes below `root` while it is entered. Threads are made to take turns.

    What lies there at the beginning counts as durable.

    Attributes:
        start: Content at the beginning.
        ops: What happened since.

    Raises:
        RuntimeError: at the exit, when a change came by a way that cannot be seen; names it.
    """

    def __init__(self, root: str) -> None:
        self.root = os.path.realpath(root)
        self.start: Tree
        self.ops: list[Op] = []
        self._nodes: dict[tuple[int, int], int] = {}
        self._count = 0
        self._lock = threading.RLock()
        self._interposer = Interposer(self.root, self.handle)

    def begin(self) -> None:
        """Look at what is there. Who calls `handle` for every change needs no more than that."""
        self.start, self._nodes = tree_at(self.root)
        self._count = len(self._nodes)

    def __enter__(self) -> Self:
        self.begin()
        self._interposer.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._interposer.__exit__(kind, error, trace)
        if self._interposer.escapes and error is None:
            raise RuntimeError(
                "changes came by a way that cannot be recorded: " + "; ".join(self._interposer.escapes[:5])
            )

    def mark(self, text: str) -> None:
        """Note that something was promised to the caller."""
        with self._lock:
            self.ops.append(Mark(text))

    def handle(self, call: Call, proceed: Proceed) -> Any:
        """Carry a call out and record it."""
        with self._lock:
            before = _inode(call.path), _inode(call.other) if call.other and call.kind != "symlink" else None
            result = proceed(call)
            if result != -1 or call.kind not in ("allocate", "exchange"):
                self._note(call, before[0], before[1], result)
            return result

    def _note(
        self, call: Call, one: tuple[int, int] | None, other: tuple[int, int] | None, result: Any
    ) -> None:
        kind = call.kind
        if kind == "open":
            if one is None and _inode(call.path) is not None:
                self.ops.append(Make(*self._entry(call.path), self._new(call.path)))
            elif call.size == 0 and one is not None:
                self.ops.append(Resize(self._known(one), 0))
        elif kind == "mkdir":
            self.ops.append(Make(*self._entry(call.path), self._new(call.path), "folder"))
        elif kind == "symlink":
            self.ops.append(Make(*self._entry(call.path), self._new(call.path), "link", call.other))
        elif kind == "write":
            data = bytes(call.data[:result])
            self.ops.append(Write(self._of(call.fd), call.offset, data))
        elif kind == "copy":
            # A clone takes its source's size; the other copies give the number of bytes.
            nbytes = result if isinstance(result, int) and result > 0 else call.size
            self.ops.append(Write(self._of(call.fd), call.offset, _read_back(call.fd, call.offset, nbytes)))
        elif kind in ("truncate", "allocate"):
            node = self._of(call.fd) if call.fd >= 0 else self._known(one)
            self.ops.append(Resize(node, call.size, grow_only=kind == "allocate"))
        elif kind in ("sync", "datasync"):
            self.ops.append(Sync(self._of(call.fd), data_only=kind == "datasync"))
        elif kind in ("unlink", "rmdir"):
            self.ops.append(Remove(*self._entry(call.path), self._known(one)))
        elif kind == "link":
            self.ops.append(Link(*self._entry(call.other), self._known(one)))
        elif kind == "exchange":
            first, second = self._entry(call.path), self._entry(call.other)
            self.ops.append(Exchange(*first, self._known(one), *second, self._known(other)))
        elif kind == "rename":
            if one != other:
                self.ops.append(Rename(*self._entry(call.path), *self._entry(call.other), self._known(one)))
        else:
            raise AssertionError(kind)

    def _entry(self, path: str) -> tuple[int, str]:
        folder, name = os.path.split(path)
        return self._known(_inode(folder)), name

    def _new(self, path: str) -> int:
        """A number for a node that was just made: inode numbers are used again by file systems, these are not."""
        key = _inode(path)
        assert key is not None
        self._nodes[key] = self._count
        self._count += 1
        return self._count - 1

    def _known(self, key: tuple[int, int] | None) -> int:
        if key is None or key not in self._nodes:
            raise RuntimeError("a call on something outside the recorded folder, or made by another way")
        return self._nodes[key]

    def _of(self, fd: int) -> int:
        found = os.fstat(fd)
        return self._known((found.st_dev, found.st_ino))


def _inode(path: str) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _read_back(fd: int, offset: int, nbytes: int) -> bytes:
    # The descriptor may be open for writing alone.
    again = os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.pread(again, nbytes, offset)
    finally:
        os.close(again)
