"""Stores: where the bytes of a checkpoint live, seen from a reader.

Paths are relative to the checkpoint's root, with `/` between folders. A store never leaves its root: a path with
`..`, an absolute path or a link that points outside is refused.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Self

from ckptkit.errors import FormatError


class Reader(ABC):
    """An open file. Methods may be called from several threads at once."""

    size: int
    small_run: int = 16 << 10
    """Reads below this cost less as part of a larger one, with bytes in between that are thrown away."""

    @abstractmethod
    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` with the bytes from `offset` on.

        Raises FormatError when the file ends before that, StoreError when the store fails.
        """

    def scatter(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """Fill several buffers with consecutive bytes from `offset` on. Raises as `readinto`."""
        for buffer in buffers:
            self.readinto(offset, buffer)
            offset += buffer.nbytes

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Store(ABC):
    """A checkpoint's root, read-only."""

    url: str
    parallel: int = 32
    """How many small reads are worth having in flight."""
    readers: int = 1
    """How many threads at least should read data, where a read is mostly waiting."""

    @abstractmethod
    def files(self) -> Sequence[str]:
        """Every regular file below the root, sorted. Raises StoreError when the root is missing or no directory."""

    @abstractmethod
    def exists(self, path: str) -> bool: ...

    @abstractmethod
    def size(self, path: str) -> int:
        """Bytes of a file. Raises ShardMissingError when it is absent, FormatError when it is no regular file."""

    @abstractmethod
    def identity(self, path: str) -> str:
        """A short text that changes when the file's content may have changed (size, time, inode or ETag)."""

    @abstractmethod
    def open(self, path: str) -> Reader: ...

    def refresh(self) -> None:  # noqa: B027  (most stores remember nothing)
        """Forget what was remembered of files, so that `size` and `identity` tell what they are now."""

    def age_s(self) -> float:
        """Seconds since the store was last changed; negative where its clock is ahead of ours, 0 where it does not tell."""
        return 0.0

    def read(self, path: str, offset: int = 0, nbytes: int | None = None) -> bytes:
        """Bytes `[offset, offset + nbytes)` of a file, to its end unless given. Raises FormatError when it ends before that."""
        with self.open(path) as reader:
            count = reader.size - offset if nbytes is None else nbytes
            # Sizes come from files that may be damaged: no memory is asked for before they are seen to fit.
            if offset < 0 or offset + max(count, 0) > reader.size:
                raise FormatError(
                    f"{path} ends at byte {reader.size}, but bytes {offset}:{offset + count} are asked for",
                    file=path,
                )
            data = bytearray(max(count, 0))
            reader.readinto(offset, memoryview(data))
        return bytes(data)

    def local_path(self, path: str) -> str | None:
        """The file's path in the local file system where it has one (for links and copies in the kernel)."""
        return None


class Virtual(ABC):
    """A file that exists only while it is read: made of others (`ckptkit.engine.derived`)."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """Its size."""

    @abstractmethod
    def identity(self, of: Callable[[str], str]) -> str:
        """As `Store.identity`, from that of the files that it is made of."""

    @abstractmethod
    def open(self, store: Store, path: str) -> Reader:
        """Read it. `store` holds what it is made of; `path` is its own name, for messages."""
