"""A file system in front of a folder: rules of `storage` for any program, and power loss.

    with Mount(backing, at) as mount:
        ...                       # programs work below `at`
        mount.power_loss(seed)    # from here on every call fails; `backing` holds what a crash may have left

The mounted folder records every change. At a power loss what was not synced is lost, torn or kept as `crash.model` allows, drawn from
the seed. Needs /dev/fuse, fusermount3 and the Python library mfusepy; `missing()` says what is not there. Slow, since every call
passes through Python: for drills, not for measurements.

rename with flags is refused, as some file systems do; programs then take their other way.
"""

import errno
import importlib
import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from types import TracebackType
from typing import Any, Self

from ckptkit.errors import StoreError, UsageError
from ckptkit.faults.crash.record import Recorder
from ckptkit.faults.crash.states import drawn
from ckptkit.faults.inject.storage import Rule, Rules
from ckptkit.faults.interpose import Call, Proceed


def missing() -> str:
    """What keeps a mount from working here; empty where nothing does."""
    if not os.access("/dev/fuse", os.R_OK | os.W_OK):
        return "/dev/fuse is missing or may not be opened"
    if shutil.which("fusermount3") is None:
        return "fusermount3 is not installed (apt install fuse3)"
    if importlib.util.find_spec("mfusepy") is None:
        return "mfusepy is not installed (pip install mfusepy)"
    return ""


class Mount:
    """A folder seen through the recording file system, served by a process of its own.

    Args:
        backing: Holds the files; nobody else may change it meanwhile.
        at: Empty folder to mount at.
        rules: What goes wrong besides; their paths are those in `backing`.
        model: Of `crash.model`, for power loss.

    Raises:
        UsageError: mounts do not work here.
        StoreError: this one failed.
    """

    def __init__(self, backing: str, at: str, rules: tuple[Rule, ...] = (), model: str = "posix") -> None:
        why = missing()
        if why:
            raise UsageError(f"no FUSE here: {why}")
        self.backing, self.at = os.path.realpath(backing), os.path.realpath(at)
        # Beside the folder, not in it: the order for a power loss.
        self._order = f"{self.backing}.power-loss"
        plan = {"rules": [rule.as_dict() for rule in rules], "model": model, "order": self._order}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "ckptkit.faults.inject.fuse", self.backing, self.at, json.dumps(plan)],
            stderr=subprocess.PIPE,
        )
        until = time.monotonic() + 60
        while not os.path.ismount(self.at):
            if self._process.poll() is not None or time.monotonic() > until:
                self.close()
                stderr = self._process.stderr
                said = stderr.read().decode(errors="replace") if stderr is not None else ""
                raise StoreError(
                    f"cannot mount at {self.at}: {said.strip()[-500:] or 'no answer'}", file=self.at
                )
            time.sleep(0.01)

    def power_loss(self, seed: int) -> None:
        """Every call fails with EIO from here on; `backing` gets a content that a crash may leave. Then it is unmounted."""
        with open(self._order, "w", encoding="utf-8") as file:
            file.write(str(seed))
        self._process.send_signal(signal.SIGUSR1)
        while os.path.exists(self._order) and self._process.poll() is None:
            time.sleep(0.005)
        self.close()

    def close(self) -> None:
        """Unmount; who has files open there gets errors."""
        subprocess.run(["fusermount3", "-u", "-z", self.at], capture_output=True, check=False)
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
        if self._process.stderr is not None:
            self._process.stderr.close()


class _Files:
    """The calls of a file system, passed on to the backing folder; mfusepy finds them by their names."""

    use_ns = True

    def __init__(self, root: str, rules: Rules, model: str, order: str) -> None:
        self._root, self._rules, self._model, self._order = root, rules, model, order
        self._recorder = Recorder(root)
        self._recorder.begin()
        self._lock = threading.RLock()
        self.dead = False

    def lose_power(self) -> None:
        with self._lock:
            self.dead = True
            with open(self._order, encoding="utf-8") as file:
                seed = int(file.read())
            tree = drawn(self._recorder.start, self._recorder.ops, self._model, seed)
            for entry in os.scandir(self._root):
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path)
                else:
                    os.unlink(entry.path)
            tree.put_at(self._root)
            os.unlink(self._order)

    def _at(self, path: str) -> str:
        if self.dead:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return self._root + path.rstrip("/")

    def _change(self, call: Call, proceed: Proceed) -> Any:
        with self._lock:
            self._at("")
            return self._rules(call, lambda call: self._recorder.handle(call, proceed))

    # Looking

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._at(path))
        keys = ("st_mode", "st_ino", "st_nlink", "st_uid", "st_gid", "st_size", "st_blocks")
        times = {f"st_{k}time": getattr(found, f"st_{k}time_ns") for k in "amc"}
        return {**{key: getattr(found, key) for key in keys}, **times}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._at(path))]

    def readlink(self, path: str) -> str:
        return os.readlink(self._at(path))

    def statfs(self, path: str) -> dict[str, int]:
        found = os.statvfs(self._at(path))
        keys = (
            "f_bavail",
            "f_bfree",
            "f_blocks",
            "f_bsize",
            "f_favail",
            "f_ffree",
            "f_files",
            "f_flag",
            "f_frsize",
            "f_namemax",
        )
        return {key: getattr(found, key) for key in keys}

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._at(path)
        return os.pread(fh, size, offset)

    # Changing

    def open(self, path: str, flags: int) -> int:
        where = self._at(path)
        clean = flags & (os.O_ACCMODE | os.O_TRUNC)
        if not flags & (os.O_WRONLY | os.O_RDWR | os.O_TRUNC):
            return os.open(where, clean)
        call = Call("open", where, size=0 if flags & os.O_TRUNC else -1)
        return self._change(call, lambda _: os.open(where, os.O_RDWR | (flags & os.O_TRUNC)))

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        where = self._at(path)
        return self._change(Call("open", where), lambda _: os.open(where, os.O_RDWR | os.O_CREAT, mode))

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        call = Call("write", self._at(path), fd=fh, offset=offset, data=memoryview(data))
        return self._change(call, lambda call: os.pwrite(fh, call.data, offset))

    def truncate(self, path: str, length: int, fh: int | None = None) -> int:
        where = self._at(path)
        self._change(Call("truncate", where, size=length), lambda _: os.truncate(where, length))
        return 0

    def fallocate(self, path: str, mode: int, offset: int, size: int, fh: int) -> int:
        if mode:
            raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
        call = Call("allocate", self._at(path), fd=fh, size=offset + size)
        self._change(call, lambda _: os.posix_fallocate(fh, offset, size))
        return 0

    def flush(self, path: str, fh: int) -> int:
        return 0

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        call = Call("datasync" if datasync else "sync", self._at(path), fd=fh)
        self._change(
            call, lambda _: None
        )  # what is durable is what was recorded; the disk below need not hurry
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def opendir(self, path: str) -> int:
        return os.open(self._at(path), os.O_RDONLY | os.O_DIRECTORY)

    def fsyncdir(self, path: str, datasync: int, fh: int) -> int:
        self._change(Call("sync", self._at(path), fd=fh), lambda _: None)
        return 0

    def releasedir(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def mkdir(self, path: str, mode: int) -> int:
        where = self._at(path)
        self._change(Call("mkdir", where), lambda _: os.mkdir(where, mode))
        return 0

    def rmdir(self, path: str) -> int:
        where = self._at(path)
        self._change(Call("rmdir", where), lambda _: os.rmdir(where))
        return 0

    def unlink(self, path: str) -> int:
        where = self._at(path)
        self._change(Call("unlink", where), lambda _: os.unlink(where))
        return 0

    def rename(self, old: str, new: str) -> int:
        one, other = self._at(old), self._at(new)
        self._change(Call("rename", one, other), lambda _: os.rename(one, other))
        return 0

    def link(self, target: str, source: str) -> int:
        one, other = self._at(source), self._at(target)
        self._change(Call("link", one, other), lambda _: os.link(one, other))
        return 0

    def symlink(self, target: str, source: str) -> int:
        where = self._at(target)
        self._change(Call("symlink", where, source), lambda _: os.symlink(source, where))
        return 0

    def chmod(self, path: str, mode: int) -> int:
        os.chmod(self._at(path), mode)
        return 0

    def utimens(self, path: str, times: tuple[int, int] | None = None) -> int:
        if times is None:
            os.utime(self._at(path))
        else:
            os.utime(self._at(path), ns=times)
        return 0


def serve(backing: str, at: str, plan: dict[str, Any]) -> None:
    """Mount and serve until it is unmounted."""
    mfusepy: Any = importlib.import_module("mfusepy")

    class Served(_Files, mfusepy.Operations):
        """What mfusepy takes: the calls that are defined, and its defaults for the others."""

    class Fuse(mfusepy.FUSE):
        def rename_fuse_3(self, old: bytes, new: bytes, flags: int) -> int:
            return -errno.EINVAL if flags else super().rename_fuse_3(old, new, flags)

    files = Served(
        backing, Rules([Rule.of(values) for values in plan["rules"]]), plan["model"], plan["order"]
    )

    def watch() -> None:
        while True:
            signal.sigwait({signal.SIGUSR1})
            files.lose_power()

    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    threading.Thread(target=watch, name="power", daemon=True).start()
    Fuse(files, at, foreground=True, nothreads=True, fsname="ckptkit-faults")


if __name__ == "__main__":
    serve(sys.argv[1], sys.argv[2], json.loads(sys.argv[3]))
