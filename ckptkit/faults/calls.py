"""Calls that change a folder, as handlers see them."""

import os
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

FICLONE = 0x40049409
WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC
"""Flags of an `open` that may change something."""


@dataclass(slots=True)
class Call:
    """One call that changes something, or makes it durable.

    Attributes:
        kind: `open` (for writing, or making a file), `write`, `truncate`, `allocate`, `copy` (in the kernel, clones included),
            `sync`, `datasync`, `rename`, `exchange`, `link`, `symlink`, `unlink`, `mkdir`, `rmdir`.
        path: Absolute; of the first file.
        other: The second path of a rename, exchange or link; what a symlink says.
        fd: Descriptor, or -1.
        offset: In the file; of a write or copy.
        data: Of a write; a handler may shorten it.
        size: New size of a truncation, bytes of an allocation or copy.
    """

    kind: str
    path: str
    other: str = ""
    fd: int = -1
    offset: int = 0
    data: memoryview = field(default_factory=lambda: memoryview(b""))
    size: int = 0


Proceed: TypeAlias = Callable[[Call], Any]
"""Carries a call out, with the data it has then, and gives what the system gave."""
Handler: TypeAlias = Callable[[Call, Proceed], Any]


def of_descriptor(fd: int) -> str:
    """The path of an open file, as the system knows it now."""
    return os.readlink(f"/proc/self/fd/{fd}").removesuffix(" (deleted)")
