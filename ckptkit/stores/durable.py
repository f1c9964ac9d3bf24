"""Durable writing: a folder that appears whole or not at all.

Everything is written in a sibling `.NAME.ID.unfinished`, where ID tells what is being written, so that an interrupted
run finds its own work again. `commit` makes it durable and renames it as a whole. Order, always: bytes, fsync of each file,
fsync of folders, rename, fsync of the parent; an old folder goes only after that.

A failed fsync is final: the kernel may have dropped the pages and will report success the next time, so whatever was written
to that file since its last good fsync counts as lost.
"""

import errno
import fcntl
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from contextlib import suppress

import numpy as np

from ckptkit.errors import StoreError
from ckptkit.stores.folder import LOG, FileWriter, Folder
from ckptkit.stores.system import (
    MEMORY_FILE_SYSTEMS,
    clone,
    exchange,
    file_system,
    preallocate,
    start_writeback,
)

UNFINISHED = re.compile(r"\.(?P<name>.+)\.[0-9a-f]+(?P<replaced>\.replaced)?\.unfinished")
"""Names of folders that are not in place yet; with `replaced` of one that was whole and had to make room."""

_SHARING = ".sharing"
"""Ends the name of a link that is about to take a file's place."""

PAGE = 4096
"""Alignment that direct writes keep: offset, length and address."""

_ADVICE = {
    errno.ENOSPC: "Free some space or choose another destination, then run the same command again: what is durable is kept",
    errno.EDQUOT: "Your quota is used up. Free some space, then run the same command again: what is durable is kept",
    errno.EROFS: "The file system is read-only; choose another destination",
    errno.EACCES: "You may not write there; choose another destination or change its permissions",
    errno.EPERM: "You may not write there; choose another destination or change its permissions",
    errno.EFBIG: "Files may not grow that large there (a limit of the file system or of ulimit -f)",
    errno.EIO: "The disk reports a fault. Bytes not yet durable are lost; check the disk, then run the same command again",
    errno.EMFILE: "Too many open files; raise `ulimit -n`, then run the same command again",
}


def write_fault(path: str, action: str, error: OSError) -> StoreError:
    """A StoreError that says what failed, where, and what to do."""
    code = error.errno or 0
    advice = _ADVICE.get(code, "Mend the cause, then run the same command again")
    return StoreError(
        f"cannot {action} {path}: {os.strerror(code) if code else error}. {advice}", file=path, errno=code
    )


class OutFile(FileWriter):
    """A local file being written. Writes are positioned; threads may write disjoint ranges at once."""

    def __init__(self, path: str, size: int, *, direct: bool, memory: bool) -> None:
        self.path = path
        self.size = size
        self.failed = False
        self._memory = memory
        self._direct = -1
        self._fd = -1
        try:
            self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            if os.fstat(self._fd).st_nlink > 1:  # shared with another checkpoint, whose bytes must not change
                os.close(self._fd)
                os.unlink(path)
                self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o666)
            if os.fstat(self._fd).st_size != size:
                os.ftruncate(self._fd, 0)
                # A memory file system would fill the pages with zeros first: twice the work.
                if memory:
                    os.ftruncate(self._fd, size)
                else:
                    preallocate(self._fd, size)
            if direct and hasattr(os, "O_DIRECT"):
                try:
                    self._direct = os.open(path, os.O_WRONLY | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
                except OSError as error:
                    if error.errno != errno.EINVAL:
                        raise
        except OSError as error:
            self.close()
            raise write_fault(path, "create", error) from error

    @property
    def direct(self) -> bool:  # type: ignore[override]
        """Whether aligned writes can bypass the page cache."""
        return self._direct >= 0

    def fileno(self) -> int:
        return self._fd

    def write(self, offset: int, data: memoryview, direct: bool = True) -> None:
        """Write `data` at `offset`. Aligned parts bypass the page cache where that is asked for and works."""
        nbytes = data.nbytes
        try:
            if (
                direct
                and self._direct >= 0
                and offset % PAGE == 0
                and nbytes >= PAGE
                and _address(data) % PAGE == 0
            ):
                body = nbytes - nbytes % PAGE
                if self._write_direct(offset, data[:body]):
                    offset, data = offset + body, data[body:]
            if data.nbytes:
                _write_all(self._fd, offset, data)
                if not self._memory:
                    start_writeback(self._fd, offset, data.nbytes)
        except OSError as error:
            raise write_fault(self.path, f"write bytes {offset}:{offset + nbytes} of", error) from error

    def _write_direct(self, offset: int, data: memoryview) -> bool:
        try:
            _write_all(self._direct, offset, data)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            # Accepted at open, refused at write (some network and stacked file systems): buffered from here on. The
            # descriptor stays open, since other threads may be using it.
            self._direct = -1
            return False
        return True

    def read(self, offset: int, nbytes: int) -> bytes:
        """Bytes that were written before."""
        try:
            return os.pread(self._fd, nbytes, offset)
        except OSError as error:
            raise write_fault(self.path, "read back", error) from error

    def sync(self) -> None:
        """Make what was written so far durable. Raises StoreError; never succeeds after it has failed once."""
        if self.failed:
            raise StoreError(
                f"{self.path}: an earlier sync failed, so its bytes cannot be trusted", file=self.path
            )
        try:
            os.fdatasync(self._fd)
        except OSError as error:
            self.failed = True
            raise write_fault(self.path, "sync", error) from error
        if self._direct >= 0 and hasattr(os, "posix_fadvise"):
            # What went through the page cache need not stay there: sources have more use for the memory.
            with suppress(OSError):
                os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        for fd in (self._direct, self._fd):
            if fd >= 0:
                os.close(fd)
        self._direct = self._fd = -1


class UnfinishedFolder(Folder):
    """The `.NAME.ID.unfinished` sibling of a folder that is to appear, locked against other runs.

    Args:
        target: Path of the folder to appear.
        identity: Hexadecimal text that names what is written; equal for runs that may continue each other.
        overwrite: Whether `target` may exist; it is replaced at `commit`.
        note: Told what was found and thrown away.
        swap: Exchanges two paths in one step; gives False where the system cannot.
        shared: Whether other processes may write to the folder at the same time (`ckptkit.stores.parts`).

    Attributes:
        log_name: The file that holds the log.
        path: Of the unfinished folder.
        resumed: Whether it was there already.

    Raises:
        StoreError: the target exists, another run is writing it, or the parent cannot be written.
    """

    log_name = LOG

    def __init__(
        self,
        target: str,
        identity: str,
        *,
        overwrite: bool = False,
        note: Callable[[str], None] = lambda text: None,
        swap: Callable[[str, str], bool] = exchange,
        shared: bool = False,
    ) -> None:
        self.target = self.url = os.path.abspath(target)
        self.overwrite, self._swap = overwrite, swap
        self.parent, self.name = os.path.split(self.target)
        self.path = os.path.join(self.parent, f".{self.name}.{identity}.unfinished")
        self._lock = self._log = -1
        check_target(self.target, overwrite)
        try:
            make_folders(self.parent)
            self._clear_others(note)
            self.resumed = os.path.isdir(self.path)
            if not self.resumed:
                try:
                    os.mkdir(self.path)
                except FileExistsError:
                    if not (shared and os.path.isdir(self.path)):
                        raise
                    self.resumed = True  # another process was faster
            self._lock = _lock(self.path, shared=shared)
        except FileExistsError as error:
            way = self.path if os.path.isdir(self.parent) else error.filename or self.parent
            raise StoreError(f"{way} is in the way; remove it", file=way) from error
        except OSError as error:
            raise write_fault(self.path, "create", error) from error
        self.file_system = file_system(self.path)
        self.in_memory = self.file_system in MEMORY_FILE_SYSTEMS
        self.direct = not self.in_memory

    def _clear_others(self, note: Callable[[str], None]) -> None:
        """Remove what runs with other arguments left for the same target; they cannot continue it any more."""
        ours = re.compile(rf"\.{re.escape(self.name)}\.[0-9a-f]+(\.replaced)?\.unfinished")
        with os.scandir(self.parent) as found:
            others = [
                (e.path, match) for e in found if (match := ours.fullmatch(e.name)) and e.path != self.path
            ]
        for other, match in others:
            if match.group(1) and not os.path.isdir(self.target):
                continue  # a whole folder, set aside by a run that stopped between its two renames
            lock = _lock(other)
            try:
                note(f"removed {other}, left by an interrupted run with other arguments or another source")
                shutil.rmtree(other)
            finally:
                os.close(lock)

    def file(self, path: str, size: int, direct: bool = False) -> OutFile:
        """Create, or open again, one file of `size` bytes; `path` is relative, with `/`."""
        full = os.path.join(self.path, *path.split("/"))
        folder = os.path.dirname(full)
        if folder != self.path:
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                raise write_fault(folder, "create", error) from error
        return OutFile(full, size, direct=direct, memory=self.in_memory)

    def share(self, path: str, other: str) -> bool:
        """Make a file in the folder a hard link to `other`, else a clone of it; False where the file system can do neither."""
        full = os.path.join(self.path, *path.split("/"))
        temporary = full + _SHARING
        try:
            with suppress(FileNotFoundError):
                os.unlink(temporary)
            os.makedirs(os.path.dirname(full), exist_ok=True)
            try:
                os.link(other, temporary, follow_symlinks=False)
            except OSError:
                with open(other, "rb") as source, open(temporary, "xb") as target:
                    if not clone(source.fileno(), target.fileno()):
                        os.unlink(temporary)
                        return False
                    os.fsync(target.fileno())
            os.rename(temporary, full)
        except OSError as error:
            raise write_fault(full, "share", error) from error
        return True

    def file_size(self, path: str) -> int:
        """Bytes of a file in the folder, or -1 where there is none."""
        try:
            return os.lstat(os.path.join(self.path, *path.split("/"))).st_size
        except OSError:
            return -1

    def write_small(self, path: str, content: bytes) -> None:
        """Write a whole small file and make it durable."""
        file = self.file(path, len(content), direct=False)
        try:
            if content:
                file.write(0, memoryview(content))
            file.sync()
        finally:
            file.close()

    def check_space(self, needed: int) -> None:
        """Raise StoreError when the file system has not `needed` bytes free, beside what this folder holds already."""
        try:
            system = os.statvfs(self.path)
        except OSError as error:
            raise write_fault(self.path, "look at", error) from error
        free = system.f_bavail * system.f_frsize
        have = _allocated(self.path)
        if needed > free + have:
            raise StoreError(
                f"{self.target} needs {needed:,} bytes, but {self.parent} has {free + have:,} free. Free some space or "
                "choose another destination; nothing was written",
                file=self.target,
                needed=needed,
                free=free + have,
            )

    def restart(self) -> None:
        """Throw away what is in the folder."""
        try:
            for entry in os.scandir(self.path):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
        except OSError as error:
            raise write_fault(self.path, "clear", error) from error

    def sync_folders(self) -> None:
        """Make the names of all files durable."""
        try:
            for folder, _, _ in os.walk(self.path):
                sync_folder(folder)
        except OSError as error:
            raise write_fault(self.path, "sync", error) from error

    def commit(self, marker: tuple[str, bytes] | None = None) -> None:
        """Rename the folder, whose files are durable already, to the target; remove the folder it replaces.

        Raises:
            StoreError: the target exists and may not be replaced, or the rename failed; nothing is lost.
        """
        if marker is not None:
            self.write_small(*marker)
        self._remove_log()
        self._remove_links()
        self.sync_folders()
        check_target(self.target, self.overwrite)
        old = ""
        try:
            if os.path.lexists(self.target) and os.listdir(self.target):
                old = self.path
                if not self._swap(self.path, self.target):
                    # Two steps where one is impossible. A crash in between leaves both folders, each whole.
                    old = f"{self.path[: -len('.unfinished')]}.replaced.unfinished"
                    os.rename(self.target, old)
                    os.rename(self.path, self.target)
            else:
                os.rename(self.path, self.target)
            sync_folder(self.parent)
        except OSError as error:
            raise write_fault(self.target, "put in place", error) from error
        finally:
            self.close()
        if old:
            try:
                shutil.rmtree(old)
            except OSError as error:
                raise StoreError(
                    f"{self.target} is complete, but the folder it replaced cannot be removed: {error}. Remove {old}",
                    file=old,
                ) from error

    def _remove_links(self) -> None:
        """Remove links that a killed run made and did not put in place."""
        for folder, _, names in os.walk(self.path):
            for name in names:
                if name.endswith(_SHARING):
                    os.unlink(os.path.join(folder, name))

    def discard(self) -> None:
        """Remove the folder and all in it."""
        shutil.rmtree(self.path, ignore_errors=True)
        self.close()

    def close(self) -> None:
        """Let go of the lock; the folder stays."""
        for fd in (self._log, self._lock):
            if fd >= 0:
                os.close(fd)
        self._log = self._lock = -1

    def read_log(self) -> bytes | None:
        path = os.path.join(self.path, self.log_name)
        try:
            with open(path, "rb") as file:
                return file.read()
        except FileNotFoundError:
            return None
        except OSError as error:
            raise write_fault(path, "read", error) from error

    def start_log(self, lines: Iterable[str]) -> None:
        """Begin a log with these lines, which replaces the old one in one step."""
        path = os.path.join(self.path, self.log_name)
        temporary = path + ".new"
        try:
            self._log = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
            self._write_log(lines)
            os.rename(temporary, path)
            # An older log must not come back beside files that are written from here on: it would vouch for them.
            sync_folder(self.path)
        except OSError as error:
            raise write_fault(path, "write", error) from error

    def append_log(self, lines: Iterable[str]) -> None:
        path = os.path.join(self.path, self.log_name)
        if self._log < 0:
            raise StoreError(f"{path} is closed", file=path)
        try:
            self._write_log(lines)
        except OSError as error:
            raise write_fault(path, "write", error) from error

    def _write_log(self, lines: Iterable[str]) -> None:
        view = memoryview("".join(f"{line}\n" for line in lines).encode())
        while view:
            view = view[os.write(self._log, view) :]
        os.fdatasync(self._log)

    def _remove_log(self) -> None:
        log, self._log = self._log, -1
        path = os.path.join(self.path, self.log_name)
        try:
            if log >= 0:
                os.close(log)
            os.unlink(path)
        except FileNotFoundError:
            pass
        except OSError as error:
            raise write_fault(path, "remove", error) from error
        tidy(self.path)  # parts of which this run took over the work


def tidy(path: str) -> None:
    """Remove logs, locks and marks of parts (`ckptkit.stores.parts`) from a folder."""
    try:
        for name in os.listdir(path):
            if name.startswith((f"{LOG}.", ".lock.", ".part.")):
                with suppress(FileNotFoundError):
                    os.unlink(os.path.join(path, name))
    except OSError as error:
        raise write_fault(path, "tidy", error) from error


def replace_file(folder: str, name: str, content: bytes) -> None:
    """Write one small file of a folder that is in place: readers find the old content or the new, also after a crash."""
    path = os.path.join(folder, name)
    temporary = f"{path}.{os.getpid()}.new"
    try:
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o666)
        try:
            _write_all(fd, 0, memoryview(content))
            os.fsync(fd)
        finally:
            os.close(fd)
        os.rename(temporary, path)
        sync_folder(folder)
    except OSError as error:
        with suppress(OSError):
            os.unlink(temporary)
        raise write_fault(path, "write", error) from error


def check_target(target: str, overwrite: bool) -> None:
    """Raise StoreError when `target` cannot become a new folder. An empty folder is no obstacle."""
    try:
        found = os.lstat(target)
    except (FileNotFoundError, NotADirectoryError):
        return
    except OSError as error:
        raise write_fault(target, "look at", error) from error
    if not stat.S_ISDIR(found.st_mode):
        what = "a link" if stat.S_ISLNK(found.st_mode) else "no folder"
        raise StoreError(
            f"{target} exists and is {what}; remove it or choose another destination", file=target
        )
    try:
        empty = not os.listdir(target)
    except OSError as error:
        raise write_fault(target, "look at", error) from error
    if not empty and not overwrite:
        raise StoreError(f"{target} exists; choose another destination or give --overwrite", file=target)


def _lock(folder: str, *, shared: bool = False) -> int:
    """An open, locked descriptor of a folder. Raises StoreError while another process holds it in a way that excludes this."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            os.close(fd)
            raise StoreError(
                f"another run is writing {folder}; wait for it to end, or stop it", file=folder
            ) from error
        # The file system has no locks (some network ones): go on without.
    return fd


def make_folders(path: str) -> None:
    """Make a folder and those above it, where they are missing; their names are durable. Raises OSError."""
    missing = []
    at = os.path.abspath(path)
    while not os.path.isdir(at):
        missing.append(at)
        at = os.path.dirname(at)
    for new in reversed(missing):
        try:
            os.mkdir(new)
        except FileExistsError:
            if not os.path.isdir(new):
                raise
        sync_folder(os.path.dirname(new))


def sync_folder(path: str) -> None:
    """Make the names in a folder durable. Raises OSError."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.EBADF):  # file systems that cannot sync a folder
            raise
    finally:
        os.close(fd)


def _allocated(folder: str) -> int:
    total = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                total += os.lstat(os.path.join(path, name)).st_blocks * 512
            except OSError:
                continue
    return total


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).ctypes.data)


def _write_all(fd: int, offset: int, data: memoryview) -> None:
    done = os.pwrite(fd, data, offset)
    while done < data.nbytes:
        done += os.pwrite(fd, data[done:], offset + done)
