"""Folders that several machines fill at the same time, each with files of its own; nobody renames the whole.

Such a folder is whole when its marker is there: who writes the marker has made sure of everything else. Every file appears whole, and
durable, or not at all:

- Local: written under a name of its own (direct I/O where it is worth it), synced, renamed, the folder synced. After a failed sync
  the file is written again under a new name: the kernel may have dropped its pages, and says "done" the next time. What a killed
  writer left under such a name goes when the file is written again.
- Remote: one upload, compared afterwards (`ckptkit.stores.uploads`).
"""

import contextlib
import fcntl
import os
import re
import secrets
import stat
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any

from ckptkit.errors import ShardMissingError, StoreError, UnsafeError
from ckptkit.stores import local_path
from ckptkit.stores.durable import PAGE, OutFile, make_folders, write_fault
from ckptkit.stores.remote import list_files
from ckptkit.stores.remote_folder import RemoteFolder
from ckptkit.stores.retrying import Retry
from ckptkit.stores.system import MEMORY_FILE_SYSTEMS, file_system

TEMPORARY = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{16}\.tmp")
"""Names of files that are not in place yet."""


class SharedFolder(ABC):
    """One folder. Methods may be called from several threads at once; paths are relative, with `/`."""

    url: str

    @abstractmethod
    def write_file(self, path: str, size: int, chunks: Iterable[memoryview]) -> None:
        """Write or replace one file from its bytes in order; it is durable when this returns.

        Raises StoreError where the store fails or the chunks have not `size` bytes; then there is no such file, or the old one.
        """

    def write_small(self, path: str, content: bytes) -> None:
        """As `write_file`, of bytes."""
        self.write_file(path, len(content), [memoryview(content)])

    @abstractmethod
    def write_new(self, path: str, content: bytes) -> bool:
        """Write a small file that must not be there; False where it is. Of two who do so at once one is told True, where the store can tell."""

    @abstractmethod
    def files(self) -> Mapping[str, int]:
        """Sizes of all files in the folder and below, by path; empty where there is none."""

    @abstractmethod
    def size(self, path: str) -> int:
        """Bytes of a file now, or -1 where there is none."""

    @abstractmethod
    def read(self, path: str) -> bytes:
        """The content of a small file. Raises ShardMissingError where there is none."""

    @abstractmethod
    def remove(self, path: str) -> None:
        """Remove a file, durably; nothing where there is none."""

    @abstractmethod
    def remove_empty(self) -> None:
        """Remove the folder itself where it is empty and stores have such."""

    def close(self) -> None:  # noqa: B027  (local folders keep nothing open)
        """Let go of what was opened; unfinished files never appear."""


def shared_folder(url: str, *, direct: bool = True) -> SharedFolder:
    """The folder at a path or URL; it is made when the first file is written.

    Raises UsageError for a scheme that cannot be written.
    """
    path = local_path(url)
    return _Remote(url) if path is None else _Local(os.path.abspath(path), direct)


class _Local(SharedFolder):
    def __init__(self, path: str, direct: bool) -> None:
        self.url, self._direct = path, direct
        self._made: set[str] = set()

    def write_file(self, path: str, size: int, chunks: Iterable[memoryview]) -> None:
        full = self._below(path)
        folder = os.path.dirname(full)
        self._make(folder)
        temporary = os.path.join(folder, f".{os.path.basename(full)}.{secrets.token_hex(8)}.tmp")
        memory = file_system(folder) in MEMORY_FILE_SYSTEMS
        try:
            _sweep(folder, os.path.basename(full))
            file = OutFile(
                temporary, size, direct=self._direct and not memory and size >= 16 * PAGE, memory=memory
            )
            try:
                with contextlib.suppress(OSError):  # a file system without locks
                    fcntl.flock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
                given = 0
                for chunk in chunks:
                    if given + chunk.nbytes <= size:
                        file.write(given, chunk)
                    given += chunk.nbytes
                if given != size:
                    raise StoreError(
                        f"{full} was announced with {size:,} bytes, but was given {given:,}", file=full
                    )
                file.sync()
            finally:
                file.close()
            os.rename(temporary, full)
            _sync(folder)
        except OSError as error:
            raise write_fault(full, "put in place", error) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)

    def write_new(self, path: str, content: bytes) -> bool:
        full = self._below(path)
        aside = f"{path}.{secrets.token_hex(8)}.claim"
        self.write_small(aside, content)
        try:
            os.link(self._below(aside), full, follow_symlinks=False)
            _sync(os.path.dirname(full))
            return True
        except FileExistsError:
            return False
        except OSError as error:
            raise write_fault(full, "create", error) from error
        finally:
            with contextlib.suppress(OSError):
                os.unlink(self._below(aside))

    def files(self) -> Mapping[str, int]:
        found: dict[str, int] = {}
        try:
            for folder, _, names in os.walk(self.url, onerror=_raise):
                for name in names:
                    full = os.path.join(folder, name)
                    with contextlib.suppress(FileNotFoundError):
                        status = os.lstat(full)
                        if stat.S_ISREG(status.st_mode):
                            found[os.path.relpath(full, self.url)] = status.st_size
        except FileNotFoundError:
            return {}
        except OSError as error:
            raise StoreError(f"cannot list {self.url}: {error.strerror}", file=self.url) from error
        return found

    def size(self, path: str) -> int:
        try:
            return os.lstat(self._below(path)).st_size
        except (FileNotFoundError, NotADirectoryError):
            return -1
        except OSError as error:
            raise StoreError(f"cannot look at {self._below(path)}: {error.strerror}", file=path) from error

    def read(self, path: str) -> bytes:
        full = self._below(path)
        try:
            fd = os.open(full, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            with os.fdopen(fd, "rb") as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise ShardMissingError(f"{full} is missing", file=path) from error
        except OSError as error:
            raise StoreError(f"cannot read {full}: {error.strerror}", file=path) from error

    def remove(self, path: str) -> None:
        full = self._below(path)
        try:
            os.unlink(full)
            _sync(os.path.dirname(full))
        except (FileNotFoundError, NotADirectoryError):
            pass
        except OSError as error:
            raise write_fault(full, "remove", error) from error

    def remove_empty(self) -> None:
        with contextlib.suppress(OSError):
            for folder, _, _ in os.walk(self.url, topdown=False):
                os.rmdir(folder)
            _sync(os.path.dirname(self.url))

    def _below(self, path: str) -> str:
        return os.path.join(self.url, *_checked(path).split("/"))

    def _make(self, folder: str) -> None:
        """Make a folder; the names of all that are new are durable."""
        if folder in self._made:
            return
        try:
            make_folders(folder)
        except OSError as error:
            raise write_fault(folder, "create", error) from error
        self._made.add(folder)


class _Remote(RemoteFolder, SharedFolder):
    """Objects below a URL, written as a `RemoteFolder` writes them, but without an owner of the whole."""

    def _take_over(self, identity: str, overwrite: bool) -> Mapping[str, Mapping[str, Any]]:
        return {}

    def __init__(self, url: str, retry: Retry | None = None) -> None:
        super().__init__(url, "", retry=retry)

    def check_mine(self) -> None:
        """Several may write here, each its own files."""

    def write_file(self, path: str, size: int, chunks: Iterable[Any]) -> None:
        try:
            super().write_file(_checked(path), size, chunks)
        except BaseException:
            with self._lock:
                writer = self._writers.pop(path, None)
            if writer is not None:
                writer.abort()
            raise

    def write_small(self, path: str, content: bytes) -> None:
        self.write_file(path, len(content), [content])

    def write_new(self, path: str, content: bytes) -> bool:
        self.make_parent(_checked(path))

        def request(name: str) -> bool:
            try:
                self.place.fs.pipe_file(name, content, mode="create")
                return True
            except FileExistsError:
                return self.get(path) == content  # perhaps ours, whose answer was lost

        if self.size(path) >= 0:
            return False
        return self.request("create", path, request)

    def files(self) -> Mapping[str, int]:
        found = list_files(self.place, self.retry)
        return {path: int(info.get("size") or 0) for path, info in found.items()}

    def size(self, path: str) -> int:
        try:
            found = self.request("look at", path, lambda name: self.info(path))
        except ShardMissingError:
            return -1
        return int(found.get("size") or 0)

    def read(self, path: str) -> bytes:
        return self.get(path)

    def remove(self, path: str) -> None:
        self._remove([_checked(path)])

    def remove_empty(self) -> None:
        """Object stores have no folders."""


def _checked(path: str) -> str:
    if not path or path.startswith("/") or ".." in path.split("/") or "\0" in path:
        raise UnsafeError(f"{path!r} is no path inside a folder", file=path)
    return path


def _sweep(folder: str, name: str) -> None:
    """Remove what writers of this file left when they were killed; those that are alive hold a lock."""
    with os.scandir(folder) as entries:
        left = [e.path for e in entries if (match := TEMPORARY.fullmatch(e.name)) and match["name"] == name]
    for path in left:
        with contextlib.suppress(OSError):
            fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                os.unlink(path)
            finally:
                os.close(fd)


def _raise(error: OSError) -> None:
    raise error


def _sync(folder: str) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
