"""Every change that this process makes below a folder, seen before it happens.

`Interposer` stands between the program and the calls of `os`, `open` and the few calls of Linux that ckptkit makes through
`ckptkit.stores.system`. The program is the real one; its calls are passed to a handler, which lets them proceed, changes them, delays them
or raises in their place. Recording (`crash.record`) and faults of storage (`inject.storage`) are handlers.

What does not come through here would be missed: an audit hook notes every opening, renaming or removal below the folder that did
not (`escapes`), writable memory maps included. What C code writes through a descriptor that Python opened is not seen; ckptkit
has no such code, and a test compares with `strace`.

Linux only: paths of descriptors come from /proc/self/fd.
"""

import fcntl
import os
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from ckptkit.faults.calls import WRITING, Call, Handler, Proceed, of_descriptor
from ckptkit.faults.wrappers import install

__all__ = ["Call", "Handler", "Interposer", "Proceed"]

_active: "Interposer | None" = None
_hooked = False


class Interposer:
    """Passes all changes below `root` to `handler` while it is entered. One at a time in a process.

    Attributes:
        escapes: Changes below `root` that came by another way; what the handler knows is then incomplete.
    """

    def __init__(self, root: str, handler: Handler) -> None:
        self.root = os.path.realpath(root)
        self.handler = handler
        self.escapes: list[str] = []
        self._seen = threading.local()
        self._originals: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> Self:
        global _active, _hooked
        if _active is not None:
            raise RuntimeError("an interposer is active already")
        if not _hooked:
            sys.addaudithook(_audit)
            _hooked = True
        _active = self
        install(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _active
        _active = None
        for module, name, original in reversed(self._originals):
            setattr(module, name, original)
        self._originals.clear()

    def replace(self, module: Any, name: str, make: Callable[[Any], Any]) -> None:
        """Put `make(original)` in place of a function until the exit."""
        original = getattr(module, name)
        self._originals.append((module, name, original))
        setattr(module, name, make(original))

    def pass_on(self, call: Call, proceed: Proceed) -> Any:
        """Give a call to the handler; calls that the handler makes itself are not given to it again."""
        if getattr(self._seen, "inside", False):
            return proceed(call)
        self._seen.inside = True
        try:
            return self.handler(call, proceed)
        finally:
            self._seen.inside = False

    def below(self, path: str) -> bool:
        return path == self.root or path.startswith(self.root + os.sep)

    def place(self, path: Any, dir_fd: int | None = None) -> str:
        """Absolute path, links resolved but for the last part; of a descriptor its file's."""
        if isinstance(path, int):
            return of_descriptor(path)
        plain = os.fsdecode(path)
        if dir_fd is not None and not os.path.isabs(plain):
            plain = os.path.join(of_descriptor(dir_fd), plain)
        folder, name = os.path.split(os.path.abspath(plain))
        return os.path.join(os.path.realpath(folder), name) if name else folder

    def note_escape(self, what: str, path: Any) -> None:
        if getattr(self._seen, "inside", False):
            return
        try:
            where = self.place(path)
        except (OSError, TypeError, ValueError):
            return
        if self.below(where):
            self.escapes.append(f"{what} {where}")


def _audit(event: str, arguments: tuple[Any, ...]) -> None:
    """The audit hook: what it sees outside of `pass_on` was not interposed."""
    current = _active
    if current is None:
        return
    if event == "open":
        path, _, flags = arguments
        if isinstance(flags, int) and flags & WRITING and not isinstance(path, int):
            current.note_escape("open", path)
    elif event in ("os.rename", "os.link", "os.remove", "os.rmdir", "os.mkdir", "os.truncate"):
        if not (event in ("os.remove", "os.rmdir", "os.mkdir", "os.rename") and _relative(arguments)):
            current.note_escape(event, arguments[0])
    elif event == "os.symlink":
        current.note_escape(event, arguments[1])
    elif event == "mmap.__new__" and arguments[0] >= 0 and len(arguments) > 2 and arguments[2] in (0, 2):
        flags = fcntl.fcntl(arguments[0], fcntl.F_GETFL)
        if flags & (os.O_WRONLY | os.O_RDWR):
            current.note_escape("mmap", arguments[0])


def _relative(arguments: tuple[Any, ...]) -> bool:
    """Whether the event names a descriptor of a folder: its path alone means nothing."""
    return any(isinstance(value, int) and value >= 0 for value in arguments[-2:]) and not os.path.isabs(
        os.fsdecode(arguments[0])
    )
