"""Calls of Linux that Python lacks, each with what stands in for it elsewhere."""

import ctypes
import errno
import fcntl
import os

_AT_FDCWD = -100
_RENAME_EXCHANGE = 2
_SYNC_FILE_RANGE_WRITE = 2
_FICLONE = 0x40049409
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs"})


def _function(name: str) -> "ctypes._NamedFuncPointer | None":
    try:
        return getattr(ctypes.CDLL(None, use_errno=True), name, None)
    except OSError:
        return None


_renameat2 = _function("renameat2")
_fallocate = _function("fallocate64") or _function("fallocate")
_sync_file_range = _function("sync_file_range")
_UNSUPPORTED = {errno.ENOSYS, errno.EOPNOTSUPP, errno.EINVAL}


def exchange(one: str, other: str) -> bool:
    """Swap two paths in one step; False where the system cannot. Raises OSError for a real fault."""
    if _renameat2 is None:
        return False
    flags = ctypes.c_uint(_RENAME_EXCHANGE)
    if _renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), flags) == 0:
        return True
    code = ctypes.get_errno()
    if code in _UNSUPPORTED:
        return False
    raise OSError(code, os.strerror(code), one)


def preallocate(fd: int, size: int) -> None:
    """Reserve `size` bytes, which read as zeros; only sets the size where the file system cannot reserve.

    `os.posix_fallocate` would write zeros there. Raises OSError when there is no space.
    """
    if size and _fallocate is not None:
        if _fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(size)) == 0:
            return
        code = ctypes.get_errno()
        if code not in _UNSUPPORTED:
            raise OSError(code, os.strerror(code))
    os.ftruncate(fd, size)


def clone(source: int, destination: int) -> bool:
    """Make one open file share all bytes of another; False where the file system cannot (or not between these two)."""
    try:
        fcntl.ioctl(destination, _FICLONE, source)
    except OSError:
        return False
    return True


def start_writeback(fd: int, offset: int, nbytes: int) -> None:
    """Ask the kernel to begin writing buffered pages out, so that the last fsync has little left to do."""
    if _sync_file_range is not None:
        _sync_file_range(
            fd, ctypes.c_int64(offset), ctypes.c_int64(nbytes), ctypes.c_uint(_SYNC_FILE_RANGE_WRITE)
        )


def file_system(path: str) -> str:
    """Type of the file system that holds `path` (`ext4`, `tmpfs`, …), or `unknown`."""
    try:
        device = os.stat(path).st_dev
        wanted = f"{os.major(device)}:{os.minor(device)}"
        with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as mounts:
            for line in mounts:
                fields = line.split(" ")
                if fields[2] == wanted:
                    return fields[fields.index("-") + 1]
    except (OSError, ValueError, IndexError):
        pass
    return "unknown"
