"""The functions that an `Interposer` puts in place of those of `os`, `open`, `fcntl` and `ckptkit.stores.system`.

Each finds out where its call goes, leaves what is not below the folder alone, and gives the rest to `Interposer.pass_on`.
"""

import builtins
import ctypes
import fcntl
import io
import os
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.faults.calls import FICLONE, WRITING, Call, of_descriptor
from ckptkit.stores import system

if TYPE_CHECKING:
    from ckptkit.faults.interpose import Interposer


class _File(io.FileIO):
    """A raw file whose changes go through `os`, where they are seen."""

    def write(self, data: Any) -> int:
        return os.write(self.fileno(), data)

    def truncate(self, size: int | None = None) -> int:
        wanted = self.tell() if size is None else size
        os.ftruncate(self.fileno(), wanted)
        return wanted


def install(it: "Interposer") -> None:
    for name, kind in (("unlink", "unlink"), ("remove", "unlink"), ("rmdir", "rmdir"), ("mkdir", "mkdir")):
        it.replace(os, name, partial(_one_path, it, kind))
    for name in ("rename", "replace", "link"):
        it.replace(os, name, partial(_two_paths, it, "link" if name == "link" else "rename"))
    for name, make in (("symlink", _symlink), ("open", _open), ("posix_fallocate", _allocate)):
        it.replace(os, name, partial(make, it))
    for name, make in (("sendfile", _sendfile), ("copy_file_range", _copy_range)):
        it.replace(os, name, partial(make, it))
    plain, at = os.write, os.pwrite
    for name in ("write", "pwrite", "writev", "pwritev"):
        it.replace(os, name, partial(_write, it, name, plain, at))
    for name, kind in (("fsync", "sync"), ("fdatasync", "datasync")):
        it.replace(os, name, partial(_sync, it, kind))
    for name in ("truncate", "ftruncate"):
        it.replace(os, name, partial(_truncate, it))
    it.replace(fcntl, "ioctl", partial(_ioctl, it))
    it.replace(system, "_renameat2", partial(_exchange, it))
    it.replace(system, "_fallocate", partial(_fallocate, it))
    for module in (builtins, io):
        it.replace(module, "open", partial(_open_file, it))


def _fd(fd: Any) -> int:
    return fd if isinstance(fd, int) else int(fd.fileno())


def _one_path(it: "Interposer", kind: str, original: Any) -> Any:
    def call(path: Any, *args: Any, dir_fd: int | None = None, **more: Any) -> Any:
        where = it.place(path, dir_fd)
        if not it.below(where):
            return original(path, *args, dir_fd=dir_fd, **more)
        return it.pass_on(Call(kind, where), lambda _: original(path, *args, dir_fd=dir_fd, **more))

    return call


def _two_paths(it: "Interposer", kind: str, original: Any) -> Any:
    def call(
        src: Any, dst: Any, *, src_dir_fd: int | None = None, dst_dir_fd: int | None = None, **more: Any
    ) -> Any:
        def go(_: Call) -> Any:
            return original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **more)

        one, other = it.place(src, src_dir_fd), it.place(dst, dst_dir_fd)
        if not (it.below(one) or it.below(other)):
            return original(src, dst, src_dir_fd=src_dir_fd, dst_dir_fd=dst_dir_fd, **more)
        return it.pass_on(Call(kind, one, other), go)

    return call


def _symlink(it: "Interposer", original: Any) -> Any:
    def symlink(src: Any, dst: Any, *args: Any, dir_fd: int | None = None, **more: Any) -> Any:
        where = it.place(dst, dir_fd)
        if not it.below(where):
            return original(src, dst, *args, dir_fd=dir_fd, **more)
        call = Call("symlink", where, os.fsdecode(src))
        return it.pass_on(call, lambda _: original(src, dst, *args, dir_fd=dir_fd, **more))

    return symlink


def _open(it: "Interposer", original: Any) -> Any:
    def open(path: Any, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if not flags & WRITING:
            return original(path, flags, mode, dir_fd=dir_fd)
        where = it.place(path, dir_fd)
        if not it.below(where):
            return original(path, flags, mode, dir_fd=dir_fd)
        call = Call("open", where, size=0 if flags & os.O_TRUNC else -1)
        return it.pass_on(call, lambda _: original(path, flags, mode, dir_fd=dir_fd))

    return open


def _write(it: "Interposer", name: str, plain: Any, at: Any, original: Any) -> Any:
    vector, positioned = name.endswith("v"), name.startswith("p")

    def write(fd: int, data: Any, offset: int | None = None, *flags: Any) -> int:
        where = of_descriptor(fd)
        if not it.below(where):
            return original(fd, data, *([offset] if positioned else []), *flags)
        if positioned:
            assert offset is not None
            start = offset
        elif fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_APPEND:
            start = os.fstat(fd).st_size
        else:
            start = os.lseek(fd, 0, os.SEEK_CUR)
        joined = b"".join(bytes(part) for part in data) if vector else data
        view = memoryview(joined).cast("B")

        def go(call: Call) -> int:
            return at(fd, call.data, start) if positioned else plain(fd, call.data)

        return it.pass_on(Call("write", where, fd=fd, offset=start, data=view), go)

    return write


def _sync(it: "Interposer", kind: str, original: Any) -> Any:
    def sync(fd: Any) -> None:
        number = _fd(fd)
        where = of_descriptor(number)
        if not it.below(where):
            return original(fd)
        return it.pass_on(Call(kind, where, fd=number), lambda _: original(fd))

    return sync


def _truncate(it: "Interposer", original: Any) -> Any:
    def truncate(path: Any, length: int) -> None:
        where = it.place(path)
        if not it.below(where):
            return original(path, length)
        fd = path if isinstance(path, int) else -1
        return it.pass_on(Call("truncate", where, fd=fd, size=length), lambda _: original(path, length))

    return truncate


def _allocate(it: "Interposer", original: Any) -> Any:
    def posix_fallocate(fd: int, offset: int, length: int) -> None:
        where = of_descriptor(fd)
        if not it.below(where):
            return original(fd, offset, length)
        call = Call("allocate", where, fd=fd, size=offset + length)
        return it.pass_on(call, lambda _: original(fd, offset, length))

    return posix_fallocate


def _fallocate(it: "Interposer", original: Any) -> Any:
    """`fallocate(2)` as `system.preallocate` calls it: its arguments are of ctypes."""

    def fallocate(fd: int, mode: int, offset: Any, length: Any) -> int:
        where = of_descriptor(fd)
        if mode or not it.below(where):
            return original(fd, mode, offset, length)
        call = Call("allocate", where, fd=fd, size=offset.value + length.value)
        return _as_errno(lambda: it.pass_on(call, lambda _: original(fd, mode, offset, length)))

    return original and fallocate


def _exchange(it: "Interposer", original: Any) -> Any:
    def renameat2(folder: int, one: bytes, folder2: int, other: bytes, flags: Any) -> int:
        first, second = it.place(one), it.place(other)
        if not (it.below(first) or it.below(second)):
            return original(folder, one, folder2, other, flags)
        call = Call("exchange", first, second)
        return _as_errno(lambda: it.pass_on(call, lambda _: original(folder, one, folder2, other, flags)))

    return original and renameat2


def _as_errno(go: Callable[[], int]) -> int:
    """A handler's OSError, in the way that functions of C report theirs."""
    try:
        return go()
    except OSError as error:
        ctypes.set_errno(error.errno or 0)
        return -1


def _sendfile(it: "Interposer", original: Any) -> Any:
    def sendfile(out_fd: int, in_fd: int, offset: Any, count: int, *more: Any) -> int:
        where = of_descriptor(out_fd)
        if not it.below(where):
            return original(out_fd, in_fd, offset, count, *more)
        call = Call("copy", where, fd=out_fd, offset=os.lseek(out_fd, 0, os.SEEK_CUR), size=count)
        return it.pass_on(call, lambda c: original(out_fd, in_fd, offset, c.size, *more))

    return sendfile


def _copy_range(it: "Interposer", original: Any) -> Any:
    def copy_file_range(
        src: int, dst: int, count: int, offset_src: int | None = None, offset_dst: int | None = None
    ) -> int:
        where = of_descriptor(dst)
        if not it.below(where):
            return original(src, dst, count, offset_src, offset_dst)
        start = os.lseek(dst, 0, os.SEEK_CUR) if offset_dst is None else offset_dst
        call = Call("copy", where, fd=dst, offset=start, size=count)
        return it.pass_on(call, lambda c: original(src, dst, c.size, offset_src, offset_dst))

    return copy_file_range


def _ioctl(it: "Interposer", original: Any) -> Any:
    def ioctl(fd: Any, request: int, *more: Any) -> Any:
        if request != FICLONE:
            return original(fd, request, *more)
        number = _fd(fd)
        where = of_descriptor(number)
        if not it.below(where):
            return original(fd, request, *more)
        source = more[0] if isinstance(more[0], int) else more[0].fileno()
        call = Call("copy", where, fd=number, size=os.fstat(source).st_size)
        return it.pass_on(call, lambda _: original(fd, request, *more))

    return ioctl


def _flags(mode: str) -> int:
    """What `open` gives the system for a mode that writes."""
    flags = os.O_CLOEXEC | (os.O_RDWR if "+" in mode else os.O_WRONLY)
    if "w" in mode:
        flags |= os.O_CREAT | os.O_TRUNC
    if "x" in mode:
        flags |= os.O_CREAT | os.O_EXCL
    if "a" in mode:
        flags |= os.O_CREAT | os.O_APPEND
    return flags


def _open_file(it: "Interposer", original: Any) -> Any:
    def open(
        file: Any, mode: str = "r", buffering: int = -1, encoding: str | None = None, errors: str | None = None,
        newline: str | None = None, closefd: bool = True, opener: Any = None,
    ) -> Any:  # fmt: skip
        writes = any(letter in mode for letter in "wax+")
        if not writes or opener is not None or not it.below(it.place(file)):
            return original(file, mode, buffering, encoding, errors, newline, closefd, opener)
        raw = _File(
            file if isinstance(file, int) else os.open(file, _flags(mode), 0o666),
            mode.replace("t", ""),
            closefd,
        )
        raw.name = file
        if buffering == 0:
            return raw
        size = buffering if buffering > 1 else io.DEFAULT_BUFFER_SIZE
        kind = io.BufferedRandom if "+" in mode else io.BufferedWriter
        buffer: Any = kind(raw, size)
        if "b" in mode:
            return buffer
        return io.TextIOWrapper(buffer, encoding, errors, newline, line_buffering=buffering == 1)

    return open
