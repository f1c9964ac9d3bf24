"""A file system of fsspec whose requests fail: for tests of stores that must hold against such.

It keeps objects in memory, like an object store: an object appears when its last part is in, an upload that is not ended leaves
nothing. `Faults` says what goes wrong, by a seeded draw for each request. One `World` is shared by all file systems of a test.
"""

import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from random import Random
from typing import Any, ClassVar

import fsspec
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem


@dataclass
class Faults:
    """Shares of requests that go wrong, each between 0 and 1.

    Attributes:
        drop: No answer; of requests that write, half have been done all the same.
        truncate: A read gives fewer bytes than asked for.
        lie: A size is wrong, in a listing or of one object.
        slow_s: Each request takes up to so long.
        refuse: Kinds of requests (`write`, `part`, ...) that are never answered; `forbid`: that are refused for good.
        dead_after: From this request on there is no answer at all.
    """

    seed: int = 0
    drop: float = 0.0
    truncate: float = 0.0
    lie: float = 0.0
    slow_s: float = 0.0
    refuse: frozenset[str] = frozenset()
    forbid: frozenset[str] = frozenset()
    dead_after: int | None = None


@dataclass(repr=False)
class World:
    """What the server holds.

    Attributes:
        objects: Content by name.
        uploads: Uploads in parts that are not ended, by number.
        requests, failed: How many there were, by kind.
        log: Requests that changed something, in order: `kind name`.
    """

    objects: dict[str, bytes] = field(default_factory=dict)
    uploads: dict[int, list[bytes]] = field(default_factory=dict)
    requests: Counter[str] = field(default_factory=Counter)
    failed: Counter[str] = field(default_factory=Counter)
    log: list[str] = field(default_factory=list)
    faults: Faults = field(default_factory=Faults)
    lock: threading.RLock = field(default_factory=threading.RLock)
    draws: Random = field(default_factory=lambda: Random(0))

    def set(self, **faults: Any) -> None:
        """From now on these faults, from a fresh draw."""
        self.faults = Faults(**faults)
        self.draws = Random(self.faults.seed)
        self.requests.clear()
        self.failed.clear()
        self.log.clear()

    def request(self, kind: str, name: str, done: Any = lambda: None) -> Any:
        """One request: what `done` gives, unless it goes wrong."""
        faults = self.faults
        with self.lock:
            self.requests[kind] += 1
            total = self.requests.total()
            dropped, late = self.draws.random() < faults.drop, self.draws.random() < 0.5
            pause = self.draws.random() * faults.slow_s
        if pause:
            time.sleep(pause)
        with self.lock:
            if kind in faults.refuse or (faults.dead_after is not None and total > faults.dead_after):
                self.failed[kind] += 1
                raise ConnectionResetError(f"{kind}: refused")
            if kind in faults.forbid:
                raise PermissionError(f"{kind}: not allowed")
            if dropped and not late:
                self.failed[kind] += 1
                raise TimeoutError(f"{kind}: no answer")
            found = done()
            if kind in ("write", "part", "end", "remove", "abort"):
                self.log.append(f"{kind} {name}")
            if dropped:
                self.failed[kind] += 1
                raise TimeoutError(f"{kind}: the answer was lost")
            return found

    def draw(self, share: float) -> bool:
        with self.lock:
            return self.draws.random() < share


class FaultyFileSystem(AbstractFileSystem):
    protocol = "faulty"
    cachable = False
    world: ClassVar[World] = World()

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(path).removeprefix("faulty://").strip("/")

    def _entry(self, name: str) -> dict[str, Any]:
        size = len(self.world.objects[name])
        if self.world.draw(self.world.faults.lie):
            size += self.world.draws.choice([-1, 1, 4096])
        return {"name": name, "size": size, "type": "file", "ETag": f'"{hash(self.world.objects[name]):x}"'}

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> Any:
        path = self._strip_protocol(path)

        def answer() -> list[dict[str, Any]]:
            found: dict[str, dict[str, Any]] = {}
            for name in self.world.objects:
                if name.startswith(f"{path}/"):
                    rest = name[len(path) + 1 :]
                    head, deeper, _ = rest.partition("/")
                    folder = {"name": f"{path}/{head}", "size": 0, "type": "directory"}
                    found[head] = folder if deeper else self._entry(name)
            if not found and path in self.world.objects:
                return [self._entry(path)]
            if not found:
                raise FileNotFoundError(path)
            return list(found.values())

        entries = self.world.request("list", path, answer)
        return entries if detail else [entry["name"] for entry in entries]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        path = self._strip_protocol(path)

        def answer() -> dict[str, Any]:
            if path in self.world.objects:
                return self._entry(path)
            if any(name.startswith(f"{path}/") for name in self.world.objects):
                return {"name": path, "size": 0, "type": "directory"}
            raise FileNotFoundError(path)

        found: dict[str, Any] = self.world.request("info", path, answer)
        return found

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        path = self._strip_protocol(path)

        def answer() -> bytes:
            if path not in self.world.objects:
                raise FileNotFoundError(path)
            data = self.world.objects[path][start:end]
            return data[: len(data) // 2] if self.world.draw(self.world.faults.truncate) else data

        found: bytes = self.world.request("read", path, answer)
        return found

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        path = self._strip_protocol(path)
        self.world.request("write", path, lambda: self.world.objects.__setitem__(path, bytes(value)))

    def rm_file(self, path: str) -> None:
        path = self._strip_protocol(path)
        if path not in self.world.objects and self.world.draws.random() < 0.5:
            raise FileNotFoundError(path)  # some stores tell, some do not
        self.world.request("remove", path, lambda: self.world.objects.pop(path, None))

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """There are none."""

    def _open(self, path: str, mode: str = "rb", block_size: Any = None, **kwargs: Any) -> "FaultyFile":
        kwargs.pop("autocommit", None)
        kwargs.pop("cache_options", None)
        return FaultyFile(self, path, mode, block_size or "default", **kwargs)


class FaultyFile(AbstractBufferedFile):
    """Uploads in parts. A part whose answer was lost is sent again under the same number, as S3 takes it."""

    number: int | None = None
    parts: int = 0

    def _initiate_upload(self) -> None:
        def begin() -> int:
            number = len(self.fs.world.uploads) + self.fs.world.requests.total()
            self.fs.world.uploads[number] = []
            return number

        self.number = self.fs.world.request("begin", self.path, begin)

    def _upload_chunk(self, final: bool = False) -> bool:
        uploads = self.fs.world.uploads
        self.buffer.seek(0)
        data = self.buffer.read()
        if data:

            def add() -> None:
                del uploads[self.number][self.parts :]
                uploads[self.number].append(data)

            self.fs.world.request("part", self.path, add)
            self.parts += 1
        self.buffer.seek(0)
        self.buffer.truncate()
        if final:

            def end() -> None:
                if self.number not in uploads:
                    raise FileNotFoundError("no such upload")
                self.fs.world.objects[self.path] = b"".join(uploads.pop(self.number))

            self.fs.world.request("end", self.path, end)
        return True

    def discard(self) -> None:
        if self.number is not None:
            self.fs.world.request("abort", self.path, lambda: self.fs.world.uploads.pop(self.number, None))


def install() -> World:
    """A fresh world behind `faulty://`, without faults."""
    fsspec.register_implementation("faulty", FaultyFileSystem, clobber=True)
    FaultyFileSystem.world = World()
    return FaultyFileSystem.world
