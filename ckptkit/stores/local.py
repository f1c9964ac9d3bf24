"""Local folders as stores.

No read leaves the root: `..`, absolute paths and links that point outside are refused, whatever an index says. One
exception is deliberate: in a Hugging Face cache (`models--X/snapshots/REVISION`) files are links into
the sibling `models--X/blobs`, which the same program filled; those links are followed.

A source that is not what it should be (a directory or a pipe where a file is expected, a file that ends early) is a
FormatError; a file system that does not answer is a StoreError.
"""

import errno
import os
import stat
import time
from collections.abc import Iterator, Sequence

from ckptkit.errors import FormatError, ShardMissingError, StoreError, UnsafeError
from ckptkit.stores.base import Reader, Store

# Opening a pipe must not wait for its other end.
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | getattr(os, "O_NONBLOCK", 0)

_MOST_BUFFERS = 1024  # IOV_MAX


class LocalReader(Reader):
    """An open local file. Reads are positioned, so that threads share one descriptor."""

    def __init__(self, fd: int, size: int, where: str) -> None:
        self._fd = fd
        self.size = size
        self.where = where

    def fileno(self) -> int:
        """The descriptor, for copies in the kernel."""
        return self._fd

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on. Raises FormatError when the file ends before that, StoreError on a fault."""
        want = buffer.nbytes
        try:
            got = os.preadv(self._fd, (buffer,), offset)
            while got < want:
                more = os.preadv(self._fd, (buffer.cast("B")[got:],), offset + got)
                if not more:
                    raise FormatError(
                        f"{self.where} ends at byte {offset + got}, but bytes {offset}:{offset + want} are needed. It is "
                        "truncated, or was changed while it was read",
                        file=self.where,
                    )
                got += more
        except OSError as error:
            raise StoreError(
                f"cannot read {self.where} at byte {offset}: {error.strerror}. Check the disk, then run again",
                file=self.where,
            ) from error

    def scatter(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """As `readinto`, in one system call."""
        if 1 < len(buffers) <= _MOST_BUFFERS:
            try:
                if os.preadv(self._fd, buffers, offset) == sum(buffer.nbytes for buffer in buffers):
                    return
            except OSError:
                pass  # the fault is met again below, and reported with its place
        super().scatter(offset, buffers)

    def close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class LocalStore(Store):
    """A folder of the local file system.

    Args:
        deep: Whether files of folders below are listed too.

    Raises:
        StoreError: `root` is missing or no folder.
    """

    parallel = 32

    def __init__(self, root: str | os.PathLike[str], *, deep: bool = True) -> None:
        self._deep = deep
        self.root = os.path.realpath(root)
        self.url = os.fspath(root)
        if not os.path.isdir(self.root):
            what = "is not a folder" if os.path.exists(self.root) else "does not exist"
            raise StoreError(f"{self.url} {what}; give the folder that holds the checkpoint", file=self.url)
        self._allowed = [self.root, *_hub_blobs(self.root)]

    def files(self) -> Sequence[str]:
        """Every file below the root, sorted; links to files count, links to folders are not followed."""
        try:
            return sorted(_walk(self.root, "", self._deep))
        except OSError as error:
            raise StoreError(
                f"cannot list {error.filename or self.url}: {error.strerror}", file=self.url
            ) from error

    def exists(self, path: str) -> bool:
        try:
            return stat.S_ISREG(os.stat(self._resolve(path)).st_mode)
        except OSError as error:
            fault = self._fault(path, error)
            if isinstance(fault, ShardMissingError):
                return False
            raise fault from error

    def size(self, path: str) -> int:
        return self._stat(path).st_size

    def identity(self, path: str) -> str:
        found = self._stat(path)
        return f"{found.st_size}-{found.st_mtime_ns}-{found.st_ino}"

    def open(self, path: str) -> LocalReader:
        try:
            fd = os.open(self._resolve(path), _READ)
        except OSError as error:
            raise self._fault(path, error) from error
        try:
            found = os.fstat(fd)
            self._must_be_file(path, found)
        except BaseException:
            os.close(fd)
            raise
        return LocalReader(fd, found.st_size, os.path.join(self.url, path))

    def local_path(self, path: str) -> str | None:
        return self._resolve(path)

    def age_s(self) -> float:
        """Seconds since the folder's list of files was last changed."""
        try:
            return time.time() - os.stat(self.root).st_mtime
        except OSError as error:
            raise StoreError(
                f"{self.url}: cannot look at the folder: {error.strerror}", file=self.url
            ) from error

    def _stat(self, path: str) -> os.stat_result:
        try:
            found = os.stat(self._resolve(path))
        except OSError as error:
            raise self._fault(path, error) from error
        self._must_be_file(path, found)
        return found

    def _must_be_file(self, path: str, found: os.stat_result) -> None:
        if not stat.S_ISREG(found.st_mode):
            what = "a directory" if stat.S_ISDIR(found.st_mode) else "no regular file"
            raise FormatError(
                f"{os.path.join(self.url, path)} is {what}, but should be a file of data", file=path
            )

    def _resolve(self, path: str) -> str:
        """The real path of a file, which lies in the root (or the blobs of its cache). Raises UnsafeError."""
        parts = path.split("/")
        if not path or path.startswith("/") or ".." in parts or "\0" in path:
            raise UnsafeError(
                f"{self.url} refers to {path!r}, which is not a path inside it. Nothing was read; do not trust this "
                "checkpoint before you know why",
                file=path,
            )
        plain = os.path.join(self.root, *parts)
        real = os.path.realpath(plain)
        if real != plain and not any(
            real == root or real.startswith(root + os.sep) for root in self._allowed
        ):
            raise UnsafeError(
                f"{os.path.join(self.url, path)} is a link to {real}, outside the checkpoint. Copy the file in its place "
                "if you trust it",
                file=path,
            )
        return real

    def _fault(self, path: str, error: OSError) -> FormatError | StoreError | UnsafeError:
        where = os.path.join(self.url, path)
        # No file has a name that the file system cannot hold, so a checkpoint that says so lacks it.
        if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ENAMETOOLONG):
            return ShardMissingError(f"{where} is missing", file=path)
        if error.errno == errno.EISDIR:
            return FormatError(f"{where} is a directory, but should be a file of data", file=path)
        if error.errno == errno.ELOOP:  # a link appeared after its path was resolved
            return UnsafeError(f"{where} became a link while it was opened", file=path)
        return StoreError(f"cannot open {where}: {error.strerror}", file=path)


def _walk(folder: str, prefix: str, deep: bool) -> Iterator[str]:
    with os.scandir(folder) as found:
        for entry in found:
            if entry.is_dir(follow_symlinks=False):
                if deep:
                    yield from _walk(entry.path, f"{prefix}{entry.name}/", deep)
            elif entry.is_file():
                yield prefix + entry.name


def _hub_blobs(root: str) -> list[str]:
    """The blobs folder beside a snapshot of a Hugging Face cache, if `root` is one."""
    snapshots, _ = os.path.split(root)
    repository, name = os.path.split(snapshots)
    blobs = os.path.join(repository, "blobs")
    is_cache = name == "snapshots" and "--" in os.path.basename(repository) and os.path.isdir(blobs)
    return [blobs] if is_cache else []
