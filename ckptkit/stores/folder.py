"""Folders being written: what every destination is, local or remote.

A `Folder` appears whole or not at all. Files are written into it, then `commit` puts it in place; until then no reader of ckptkit
takes it for a checkpoint. Whoever ends early calls `discard` (or `close`, which keeps what a later run may go on with). To write
a native step directory, or any other folder, from outside the engine:

    with stores.create_folder("s3://runs/zaya1/step-00001200.e3", identity) as folder:
        folder.write_file("rank-00000.safetensors", size, chunks)   # any number of these, from several threads at once
        folder.write_file("rank-00000.digests", len(data), [data])
        folder.commit(("manifest.json", manifest))                  # the marker: written last, when all else is in place

Leaving the block without `commit`, by an error or not, puts nothing in place. `identity` names the content: a later call with the
same one finds `folder.resumed` true, and `folder.whole(path, size)` tells which files need not be written again.

What `commit` means differs by store, and so does its strength:

- Local (`ckptkit.stores.durable`): bytes and names are synced, then the folder is renamed. It appears in one step.
- Remote (`ckptkit.stores.remote_folder`): every object was compared with what was sent; the marker goes up after all others,
  and the object that says "unfinished" goes last. `ordered` is true: a file takes its bytes from first to last.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Self

from ckptkit.errors import StoreError

UNFINISHED_MARK = ".unfinished"
"""In folders of remote stores, which cannot be renamed: the file that says that the folder is not whole yet."""

LOG = ".journal"
"""The log of an unfinished folder (see `Folder.append_log`); never part of a whole one."""


class FileWriter(ABC):
    """A file being written, of a known size. Not visible to readers before the folder is committed.

    Attributes:
        path: For messages.
        size: Bytes that it will have.
        direct: Whether aligned writes can bypass the page cache.
    """

    path: str
    size: int
    direct: bool = False

    @abstractmethod
    def write(self, offset: int, data: memoryview, direct: bool = True) -> None:
        """Write `data`, which is only borrowed, at `offset`. In an `ordered` folder offsets must follow each other.

        Aligned parts bypass the page cache where `direct` asks for it and the file can.

        Several threads may write disjoint ranges at once, except in an `ordered` folder. Raises StoreError.
        """

    @abstractmethod
    def sync(self) -> None:
        """Make what was written so far durable; in an `ordered` folder all of it must have been written.

        Raises StoreError; never succeeds after it has failed once.
        """

    @abstractmethod
    def close(self) -> None:
        """Let go of descriptors and buffers. What was not synced may be lost."""

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes that were written before. Not in an `ordered` folder."""
        raise NotImplementedError(f"{self.path} cannot be read back while it is written")

    def fileno(self) -> int:
        """A descriptor, for copies in the kernel. Not in an `ordered` folder."""
        raise NotImplementedError(f"{self.path} has no descriptor")


class Folder(ABC):
    """A folder that appears whole or not at all.

    Attributes:
        url: What is to appear.
        resumed: Whether an interrupted run with the same identity left something that can be gone on with.
        ordered: Whether files take their bytes from first to last only, a few files at a time, and become durable as a whole.
        direct: Whether writes that bypass the page cache are worth it.
    """

    url: str
    resumed: bool = False
    ordered: bool = False
    direct: bool = False

    @abstractmethod
    def file(self, path: str, size: int, direct: bool = False) -> FileWriter:
        """Create, or open again, one file of `size` bytes; `path` is relative, with `/`. Raises StoreError."""

    @abstractmethod
    def write_small(self, path: str, content: bytes) -> None:
        """Write a whole small file and make it durable. Raises StoreError."""

    @abstractmethod
    def file_size(self, path: str) -> int:
        """Bytes of a file in the folder, or -1 where there is none."""

    @abstractmethod
    def check_space(self, needed: int) -> None:
        """Raise StoreError where it is known that `needed` bytes will not fit, beside what the folder holds already."""

    @abstractmethod
    def restart(self) -> None:
        """Throw away what is in the folder. Raises StoreError."""

    @abstractmethod
    def commit(self, marker: tuple[str, bytes] | None = None) -> None:
        """Put the folder in place: when this returns, readers find it whole. All files must have been synced. The log goes.

        Args:
            marker: Path and content of the file that makes the folder a whole checkpoint; written after all others.

        Raises:
            StoreError: it is not in place (or, where the message says so, in place but something is left to tidy up).
        """

    @abstractmethod
    def discard(self) -> None:
        """Remove all that was written. Does not raise."""

    @abstractmethod
    def close(self) -> None:
        """Let go of the folder; without `commit`, what is durable stays for a later call with the same identity."""

    def open_files(self, sizes: Sequence[int]) -> int:
        """How many files of these sizes may be written at a time; in an `ordered` folder each holds buffers."""
        return len(sizes)

    def whole(self, path: str, size: int) -> bool:
        """Whether an interrupted run with this identity left this file durable and complete. Local folders never say so."""
        return False

    def write_file(self, path: str, size: int, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
        """Write one file from its bytes in order, and make it durable. Threads may write several files at once.

        Raises StoreError where the store fails or the chunks have not `size` bytes together.
        """
        file = self.file(path, size)
        try:
            given = 0
            for chunk in chunks:
                data = memoryview(chunk).cast("B")
                if data.nbytes and given + data.nbytes <= size:
                    file.write(given, data)
                given += data.nbytes
            if given != size:
                raise StoreError(
                    f"{path} of {self.url} was announced with {size:,} bytes, but was given {given:,}",
                    file=path,
                )
            file.sync()
        finally:
            file.close()

    # A log: lines that outlive a crash, for whoever goes on with an unfinished folder.

    @abstractmethod
    def read_log(self) -> bytes | None:
        """The log that an interrupted run left, or None. A line that a crash tore has no newline. Raises StoreError."""

    @abstractmethod
    def start_log(self, lines: Iterable[str]) -> None:
        """Begin a log with these lines; replaces what was there. Raises StoreError."""

    @abstractmethod
    def append_log(self, lines: Iterable[str]) -> None:
        """Add lines, durably. Not for several threads at once. Raises StoreError."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
