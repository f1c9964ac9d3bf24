"""A job's folder on tmpfs: slots as named files, records by rename, one daemon at a time.

    <root>/<job>/            0700
      daemon.lock            held with flock for the daemon's life; holds its pid
      node.json              node id, boot id, format
      epoch.json  commits/   what the protocol remembers
      index/<hash>.npz       indexes
      slots/0007.dat         a rank file's bytes; allocated whole, populated once
      slots/0007.json .digests .extras

tmpfs outlives the daemon and dies with the kernel, so nothing is fsynced: a rename is all that makes a record whole. Every file is opened
relative to a descriptor of its folder, without following links, and every name is made of numbers or hex digits here; no text from
outside reaches a path.
"""

import contextlib
import errno
import fcntl
import itertools
import json
import mmap
import os
import re
import stat
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from ckptkit.cache.config import NODE
from ckptkit.errors import FormatError, StoreError, UsageError

FORMAT = 1
"""Of everything in the folder. A daemon leaves a folder of another format alone."""

_CHUNK = 4 << 20
_RESERVE = 256 << 20
_FLAGS = os.O_CLOEXEC | os.O_NOFOLLOW
_SLOT = re.compile(r"([0-9]{4,6})\.(dat|json|digests|extras)")
_HASH = re.compile(r"[0-9a-f]{32}")
_DECISION = re.compile(r"[0-9a-z-]{1,64}\.json")
_FOLDERS = ("slots", "index", "commits")


@dataclass(frozen=True)
class Found:
    """What `scan` finds of one slot. `record` is None where it is missing or cannot be read; `nbytes` is allocated."""

    number: int
    nbytes: int
    record: dict[str, Any] | None


class Tmpfs:
    """The folder of one job, locked.

    Args:
        folder: `<root>/<job>`; made where it is missing.
        node: Id of this node.
        discard: Whether a folder of another format is cleared.

    Attributes:
        fresh: Whether there was nothing to take over: a new folder, or one from before the last boot.

    Raises:
        UsageError: another daemon has it, another user owns it, or it is of another format. Nothing was changed.
        StoreError: it cannot be made.
    """

    def __init__(self, folder: str, node: str, *, discard: bool = False) -> None:
        self.folder = folder
        self._fds: dict[str, int] = {}
        self._maps: dict[int, mmap.mmap] = {}
        self._maps_lock = threading.Lock()
        self._writes = itertools.count()
        try:
            os.makedirs(os.path.dirname(folder), mode=0o700, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                os.mkdir(folder, 0o700)
            self._fds[""] = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | _FLAGS)
            self._check_owner()
            self._lock()
            self.fresh = self._take_over(node, discard)
        except OSError as error:
            self.close()
            raise StoreError(f"cannot use {folder}: {error.strerror}", file=folder) from error
        except BaseException:
            self.close()
            raise

    def _check_owner(self) -> None:
        found = os.fstat(self._fds[""])
        if found.st_uid != os.geteuid():
            raise UsageError(
                f"{self.folder} belongs to user {found.st_uid}; run the daemon as that user", file=self.folder
            )
        if stat.S_IMODE(found.st_mode) & 0o077:
            os.fchmod(self._fds[""], 0o700)

    def _lock(self) -> None:
        fd = os.open("daemon.lock", os.O_RDWR | os.O_CREAT | _FLAGS, 0o600, dir_fd=self._fds[""])
        self._fds["daemon.lock"] = fd
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno != errno.EWOULDBLOCK:
                raise
            first = os.pread(fd, 64, 0).decode("ascii", "replace").strip()
            raise UsageError(
                f"a daemon of this job runs on this node already (process {first or 'unknown'}, {self.folder}); stop it, or use it",
                file=self.folder,
            ) from None
        os.ftruncate(fd, 0)
        os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)

    def _take_over(self, node: str, discard: bool) -> bool:
        boot = _boot_id()
        known = self.read_json("node.json")
        other = known is not None and known.get("format") != FORMAT
        if other and not discard:
            assert known is not None
            raise UsageError(
                f"{self.folder} has format {known.get('format')!r}, this ckptkit knows {FORMAT}. Drain what it holds with the version that "
                "wrote it (`ckptkit cache drain`), or start with --discard to throw it away",
                file=self.folder,
            )
        fresh = known is None or known.get("boot") != boot or other
        if fresh:
            self._wipe()
        for name in _FOLDERS:
            with contextlib.suppress(FileExistsError):
                os.mkdir(name, 0o700, dir_fd=self._fds[""])
            self._fds[name] = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=self._fds[""])
        for name in ("", *_FOLDERS):
            for left in os.listdir(self._fds[name]):
                if left.endswith(".tmp"):
                    os.unlink(left, dir_fd=self._fds[name])
        assert NODE.fullmatch(node)
        self.write_json("node.json", {"node": node, "boot": boot, "format": FORMAT})
        return fresh

    def _wipe(self) -> None:
        for name in _FOLDERS:
            try:
                fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | _FLAGS, dir_fd=self._fds[""])
            except FileNotFoundError:
                continue
            try:
                for left in os.listdir(fd):
                    os.unlink(left, dir_fd=fd)
            finally:
                os.close(fd)
        for left in os.listdir(self._fds[""]):
            if left.endswith((".json", ".tmp")):
                os.unlink(left, dir_fd=self._fds[""])

    # ── records ──────────────────────────────────────────────────────────────────────────────────────────────

    def write_json(self, name: str, value: Mapping[str, Any]) -> None:
        """Replace `name` (`epoch.json`, `commits/3-1200.json`) as a whole."""
        folder, name = self._split(name)
        self._write(folder, name, json.dumps(value, separators=(",", ":"), allow_nan=False).encode())

    def read_json(self, name: str) -> dict[str, Any] | None:
        """The object in a record; None where it is missing or cannot be read."""
        folder, name = self._split(name)
        try:
            value = json.loads(self._read(folder, name))
        except (OSError, ValueError, RecursionError):
            return None
        return value if isinstance(value, dict) else None

    def commits(self) -> list[dict[str, Any]]:
        """Every record in `commits/` that can be read, by name."""
        names = sorted(name for name in os.listdir(self._fds["commits"]) if _DECISION.fullmatch(name))
        return [found for name in names if (found := self.read_json(f"commits/{name}")) is not None]

    def remove(self, name: str) -> None:
        folder, name = self._split(name)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(name, dir_fd=self._fds[folder])

    def write_slot(self, number: int, record: Mapping[str, Any]) -> None:
        """Replace a slot's record."""
        self._write(
            "slots", f"{number:04d}.json", json.dumps(record, separators=(",", ":"), allow_nan=False).encode()
        )

    def write_side(self, number: int, kind: str, content: bytes) -> None:
        """Replace a slot's `digests` or `extras`."""
        assert kind in ("digests", "extras")
        self._write("slots", f"{number:04d}.{kind}", content)

    def read_side(self, number: int, kind: str) -> bytes:
        """A slot's `digests` or `extras`. Raises FormatError where there are none."""
        assert kind in ("digests", "extras")
        try:
            return self._read("slots", f"{number:04d}.{kind}")
        except OSError as error:
            raise FormatError(f"slot {number} has no {kind} ({error.strerror})", slot=number) from error

    def drop_side(self, number: int, kind: str) -> None:
        """Remove a slot's `digests` or `extras`."""
        assert kind in ("digests", "extras")
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{number:04d}.{kind}", dir_fd=self._fds["slots"])

    def put_index(self, index_hash: str, content: bytes) -> None:
        """Keep an index, whose hash was checked."""
        self._write("index", f"{_hash(index_hash)}.npz", content)

    def open_index(self, index_hash: str) -> int | None:
        """A descriptor of an index, or None where it is not here."""
        try:
            return os.open(f"{_hash(index_hash)}.npz", os.O_RDONLY | _FLAGS, dir_fd=self._fds["index"])
        except FileNotFoundError:
            return None

    def read_index(self, index_hash: str) -> bytes | None:
        fd = self.open_index(index_hash)
        if fd is None:
            return None
        with os.fdopen(fd, "rb") as file:
            return file.read()

    def indexes(self) -> list[str]:
        """Hashes of all indexes here."""
        return sorted(
            n[:32] for n in os.listdir(self._fds["index"]) if n.endswith(".npz") and _HASH.fullmatch(n[:-4])
        )

    def remove_index(self, index_hash: str) -> None:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(f"{_hash(index_hash)}.npz", dir_fd=self._fds["index"])

    # ── slots ────────────────────────────────────────────────────────────────────────────────────────────────

    def scan(self) -> Iterator[Found]:
        """Every slot, by number."""
        for name in sorted(os.listdir(self._fds["slots"])):
            match = _SLOT.fullmatch(name)
            if match is None or match[2] != "dat":
                continue
            number = int(match[1])
            found = os.stat(name, dir_fd=self._fds["slots"], follow_symlinks=False)
            if stat.S_ISREG(found.st_mode):
                yield Found(number, found.st_size, self.read_json(f"slots/{number:04d}.json"))

    def allocate(self, number: int, nbytes: int) -> int:
        """Make a slot's file, or let it grow, and reserve its memory, so that a lack of it is an error here and no SIGBUS in a trainer.

        The memory comes from the NUMA node of the calling thread. Gives the size that it had before. Raises OSError; what was there stays.
        """
        try:
            fd = self._create(number)
        except FileExistsError:
            fd = self.open_slot(number, writable=True)
        before = 0
        try:
            before = os.fstat(fd).st_size
            for at in range(before, nbytes, _RESERVE):
                os.posix_fallocate(fd, at, min(_RESERVE, nbytes - at))
        except OSError:
            os.ftruncate(fd, before)
            raise
        finally:
            os.close(fd)
        return before

    def populate(self, number: int, start: int, stop: int) -> None:
        """Write every page of a part of a slot once: what a first access costs is paid here. Raises OSError."""
        fd = self.open_slot(number, writable=True)
        zeros = memoryview(bytes(_CHUNK))
        try:
            for at in range(start, stop, _CHUNK):
                os.pwrite(fd, zeros[: min(_CHUNK, stop - at)], at)
        finally:
            os.close(fd)

    def slot_size(self, number: int) -> int:
        """Bytes that are allocated for a slot; 0 where it has no memory."""
        try:
            return os.stat(f"{number:04d}.dat", dir_fd=self._fds["slots"], follow_symlinks=False).st_size
        except FileNotFoundError:
            return 0

    def open_slot(self, number: int, *, writable: bool) -> int:
        """A descriptor of a slot's bytes. Raises OSError."""
        mode = os.O_RDWR if writable else os.O_RDONLY
        return os.open(f"{number:04d}.dat", mode | _FLAGS, dir_fd=self._fds["slots"])

    @contextlib.contextmanager
    def mapped(self, number: int, nbytes: int, *, writable: bool = False) -> Iterator[memoryview]:
        """The first `nbytes` of a slot as memory. Raises OSError.

        A slot stays mapped once it was: to map its pages again for every save costs more than to digest them.
        """
        with self._maps_lock:
            whole = self._maps.get(number)
            if whole is None or len(whole) < nbytes:
                fd = self.open_slot(number, writable=True)
                try:
                    whole = mmap.mmap(fd, 0, mmap.MAP_SHARED, mmap.PROT_READ | mmap.PROT_WRITE)
                finally:
                    os.close(fd)
                self._maps[number] = whole
        if len(whole) < nbytes:
            raise OSError(errno.EINVAL, f"slot {number} has {len(whole)} bytes, not {nbytes}")
        view = memoryview(whole)[:nbytes]
        yield view if writable else view.toreadonly()

    def _unmap(self, number: int) -> None:
        with self._maps_lock:
            whole = self._maps.pop(number, None)
        if whole is not None:
            with contextlib.suppress(BufferError):  # whoever still reads unmaps it in the end
                whole.close()

    def free(self, number: int) -> None:
        """Give a slot's memory back. No process may have it mapped: its mapping would show other pages from then on."""
        self._unmap(number)
        for kind in ("json", "digests", "extras", "dat"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{number:04d}.{kind}", dir_fd=self._fds["slots"])

    def release(self, number: int) -> None:
        """Give a slot's memory back, but keep its record. As for `free`, no process may have it mapped."""
        self._unmap(number)
        for kind in ("digests", "extras", "dat"):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(f"{number:04d}.{kind}", dir_fd=self._fds["slots"])

    def space(self) -> tuple[int, int]:
        """Bytes of the whole file system, and of what is free in it."""
        found = os.fstatvfs(self._fds[""])
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def close(self) -> None:
        """Let go of the folder; everything stays."""
        for number in list(self._maps):
            self._unmap(number)
        while self._fds:
            os.close(self._fds.popitem()[1])

    # ── inside ───────────────────────────────────────────────────────────────────────────────────────────────

    def _create(self, number: int) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | _FLAGS
        return os.open(f"{number:04d}.dat", flags, 0o600, dir_fd=self._fds["slots"])

    def _split(self, name: str) -> tuple[str, str]:
        folder, _, last = name.rpartition("/")
        assert folder in ("", *_FOLDERS) and last and not last.startswith("."), name
        return folder, last

    def _write(self, folder: str, name: str, content: bytes) -> None:
        here = self._fds[folder]
        # A name of its own: two pulls may bring the same index at once.
        temporary = f"{name}.{next(self._writes)}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | _FLAGS, 0o600, dir_fd=here)
        try:
            try:
                view = memoryview(content)
                while view:
                    view = view[os.write(fd, view) :]
            finally:
                os.close(fd)
            os.rename(temporary, name, src_dir_fd=here, dst_dir_fd=here)
        except BaseException:
            os.unlink(temporary, dir_fd=here)
            raise

    def _read(self, folder: str, name: str) -> bytes:
        fd = os.open(name, os.O_RDONLY | _FLAGS, dir_fd=self._fds[folder])
        with os.fdopen(fd, "rb") as file:
            return file.read()


def on_numa_node(node: int | None) -> None:
    """Keep the calling thread on the CPUs of a NUMA node, where that is given and known, so that memory it touches first lies there."""
    if node is None:
        return
    with (
        contextlib.suppress(OSError, ValueError),
        open(f"/sys/devices/system/node/node{int(node)}/cpulist") as file,
    ):
        cpus: set[int] = set()
        for part in file.read().strip().split(","):
            first, _, last = part.partition("-")
            cpus |= set(range(int(first), int(last or first) + 1))
        os.sched_setaffinity(0, cpus & os.sched_getaffinity(0) or cpus)


def _boot_id() -> str:
    with open("/proc/sys/kernel/random/boot_id") as file:
        return file.read().strip()


def _hash(text: str) -> str:
    if not _HASH.fullmatch(text):
        raise UsageError(f"{text!r} is no hash of an index")
    return text
