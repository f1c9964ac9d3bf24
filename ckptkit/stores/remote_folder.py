"""Folders being written to remote stores, which know no rename.

Order, always: the object `.unfinished` first; then data, each object by one sequential upload, many at once, compared after it;
then the marker; then the log and `.unfinished` go. While `.unfinished` is there no reader of ckptkit takes the folder for a
checkpoint, and other readers lack the marker. Where a store uploads in parts an object appears when its last part is in, so
that half an object is never seen.

There are no locks. `.unfinished` names its writer: a second run that writes to the same URL takes the folder over, and the first one finds
that out before its next object appears, or at the latest at its commit, and fails.

A folder to be overwritten is removed at the start: remote stores cannot exchange two folders. Until the new one is whole there is none.
"""

import json
import secrets
import threading
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

from ckptkit.errors import CkptError, ShardMissingError, StoreError
from ckptkit.stores.filesystems import Place, connect
from ckptkit.stores.folder import LOG, UNFINISHED_MARK, Folder
from ckptkit.stores.remote import info_of, list_files, names_in, tag
from ckptkit.stores.retrying import Retry, ShortBodyError
from ckptkit.stores.uploads import COPIES, PART, ObjectWriter, part_bytes

T = TypeVar("T")
_MOST_OPEN = 32


class RemoteFolder(Folder):
    """A folder that is written to a remote store. Methods may be called from several threads at once.

    Args:
        url: Of the folder to appear.
        identity: Names what is written; equal for runs that may continue each other.
        overwrite: Whether there may be a folder already; it is removed now.
        note: Told what was found and thrown away.
        memory: Bytes of buffers for uploads.
        retry: How stubborn requests are.
        part: Bytes of a part of an upload, at least.

    Raises:
        UsageError: the scheme cannot be written. StoreError: there is something at `url` already, or no access.
    """

    ordered = True

    def __init__(
        self,
        url: str,
        identity: str,
        *,
        overwrite: bool = False,
        note: Callable[[str], None] = lambda text: None,
        memory: int = 128 << 20,
        retry: Retry | None = None,
        part: int = PART,
    ) -> None:
        self.part = part
        self.place: Place = connect(url, write=True)
        self.url = self.place.url
        self.retry = retry or Retry.from_environment()
        self._note, self._memory = note, memory
        self._token = secrets.token_hex(8)
        self._lock = threading.Lock()
        self._writers: dict[str, ObjectWriter] = {}
        self._tags: dict[str, str] = {}  # of every object that is in place and was compared
        self._made: set[str] = set()  # folders, where the store has such
        self._logs = 0
        self._stop = threading.Event()
        self.compares_md5 = True
        self.pool = ThreadPoolExecutor(_MOST_OPEN, "upload")
        try:
            self._found = self._take_over(identity, overwrite)
        except BaseException:
            self.close()
            raise

    def _take_over(self, identity: str, overwrite: bool) -> Mapping[str, Mapping[str, Any]]:
        found = list_files(self.place, self.retry)
        left = self._read_mark() if UNFINISHED_MARK in found else None
        if not overwrite:
            _must_be_free(self.url, found)
        self.resumed = left is not None and left.get("identity") == identity
        mark = json.dumps({"identity": identity, "writer": self._token})
        self.put(UNFINISHED_MARK, mark.encode())
        self._abort_uploads()
        if self.resumed:
            return found
        if left is not None:
            self._note(
                f"removed what an interrupted run with other arguments or another source left at {self.url}"
            )
        # Small objects first: markers and indices are small, and without them no reader takes the rest for a checkpoint.
        self._remove(sorted(set(found) - {UNFINISHED_MARK}, key=lambda path: found[path].get("size") or 0))
        return {}

    def file(self, path: str, size: int, direct: bool = False) -> ObjectWriter:
        """The writer of one object; the same one when it is asked for again before it is complete."""
        with self._lock:
            if path not in self._writers:
                self._writers[path] = ObjectWriter(self, path, size)
            return self._writers[path]

    def write_file(self, path: str, size: int, chunks: Iterable[bytes | bytearray | memoryview]) -> None:
        try:
            super().write_file(path, size, chunks)
        except BaseException:
            with self._lock:
                writer = self._writers.pop(path, None)
            if writer is not None:
                writer.abort()
            raise

    def whole(self, path: str, size: int) -> bool:
        """Whether an object of this size is in place, written by a run with the same identity."""
        if path not in self._found or self._found[path].get("size") != size:
            return False
        self._tags.setdefault(path, tag(self._found[path], times=False))
        return True

    def file_size(self, path: str) -> int:
        size = self._found.get(path, {}).get("size", -1)
        return size if self.whole(path, size) else -1

    def write_small(self, path: str, content: bytes) -> None:
        self.write_file(path, len(content), [content])

    def check_space(self, needed: int) -> None:
        """Remote stores do not tell."""

    def restart(self) -> None:
        self._remove(sorted(set(self._found) - {UNFINISHED_MARK}))
        self._found = {}

    def open_files(self, sizes: Sequence[int]) -> int:
        largest = max((part_bytes(size, self.part) for size in sizes), default=1)
        return max(1, min(self._memory // (COPIES * largest), _MOST_OPEN))

    # What writers of objects need.

    def request(self, action: str, path: str, request: Callable[[str], T]) -> T:
        """The answer to a request about one object, whose name `request` gets; tried again. Raises StoreError."""
        name = self.place.below(path)
        return self.retry.call(action, f"{self.url}/{path}", lambda: request(name), self._stop)

    def put(self, path: str, content: bytes) -> None:
        """Write an object in one request."""
        self.make_parent(path)
        self.request("write", path, lambda name: self.place.fs.pipe_file(name, content))

    def get(self, path: str) -> bytes:
        """The whole content of a small object. Raises ShardMissingError where there is none, StoreError."""

        def request(name: str) -> bytes:
            size = self.info(path).get("size")
            data: bytes = self.place.fs.cat_file(name)
            if len(data) != size:
                raise ShortBodyError(f"{size} bytes were promised, got {len(data)}")
            return data

        return self.request("read", path, request)

    def make_parent(self, path: str) -> None:
        """Make the folder that an object lies in, in stores that have folders; object stores have none."""
        parent, _, _ = self.place.below(path).rpartition("/")
        if self.place.has_folders and parent and parent not in self._made:
            self.request("write", path, lambda name: self.place.fs.makedirs(parent, exist_ok=True))
            self._made.add(parent)

    def info(self, path: str) -> Mapping[str, Any]:
        """What the store says of an object now. Raises the library's errors."""
        return info_of(self.place, path)

    def check_mine(self) -> None:
        """Raise StoreError where another run has taken the folder over."""
        try:
            mark = self._read_mark()
        except ShardMissingError:
            mark = {}
        if mark.get("writer") != self._token:
            raise StoreError(
                f"another run writes to {self.url} since this one began, so this one ends. Wait for the other, or write elsewhere",
                file=self.url,
            )

    def is_in_place(self, path: str, tag: str) -> None:
        """Told by a writer whose object was compared."""
        with self._lock:
            self._tags[path] = tag
            self._writers.pop(path, None)

    # The end.

    def commit(self, marker: tuple[str, bytes] | None = None) -> None:
        open_ = [path for path, writer in self._writers.items() if writer.begun]
        assert not open_, f"{open_[0]} was not synced"
        self.check_mine()
        found = list_files(self.place, self.retry)
        for path, known in self._tags.items():
            now = tag(found[path], times=False) if path in found else "absent"
            if now != known:
                raise StoreError(
                    f"{self.url}/{path} is no longer what was uploaded ({known}, now {now}): something else writes there. Nothing was "
                    "put in place; run the same command again",
                    file=path,
                )
        self._abort_uploads()  # such as one whose beginning was not confirmed
        logs = [path for path in found if path == LOG or path.startswith(f"{LOG}.")]
        self._remove([path for path in found if path not in (*self._tags, *logs, UNFINISHED_MARK)])
        if marker is not None:
            self.write_small(*marker)
        self._remove(logs)
        self._remove([UNFINISHED_MARK])  # from here on the folder is whole for every reader
        self.close()

    def discard(self) -> None:
        """Remove all that was uploaded, if no other run has taken the folder over."""
        try:
            self._abort()
            self.check_mine()
            found = list_files(self.place, self.retry)
            self._remove([*sorted(set(found) - {UNFINISHED_MARK}), UNFINISHED_MARK])
        except CkptError as error:
            self._note(f"what was uploaded to {self.url} could not be removed: {error}")
        finally:
            self.close()

    def close(self) -> None:
        self._stop.set()
        self._abort()
        self.pool.shutdown(cancel_futures=True)

    def _abort(self) -> None:
        with self._lock:
            writers, self._writers = list(self._writers.values()), {}
        for writer in writers:
            writer.abort()

    # The log: one object when it is begun, and one for each time that lines are added, since objects cannot grow.

    def _log_name(self, number: int) -> str:
        return f"{LOG}.{number:06}" if number else LOG

    def read_log(self) -> bytes | None:
        names = sorted(path for path in self._found if path == LOG or path.startswith(f"{LOG}."))
        if LOG not in names:
            return None
        return b"".join(map(self.get, names))

    def start_log(self, lines: Iterable[str]) -> None:
        self.put(LOG, "".join(f"{line}\n" for line in lines).encode())
        self._remove([path for path in self._found if path.startswith(f"{LOG}.")])

    def append_log(self, lines: Iterable[str]) -> None:
        content = "".join(f"{line}\n" for line in lines).encode()
        if content:
            self._logs += 1
            self.put(self._log_name(self._logs), content)

    # Requests.

    def _read_mark(self) -> Mapping[str, Any]:
        def request(name: str) -> Mapping[str, Any]:
            try:
                found: Mapping[str, Any] = json.loads(self.place.fs.cat_file(name))
            except ValueError as error:
                raise ShortBodyError(f"{UNFINISHED_MARK} is no JSON") from error
            return found

        return self.request("read", UNFINISHED_MARK, request)

    def _remove(self, paths: Sequence[str]) -> None:
        list(self.pool.map(self._remove_one, paths))

    def _remove_one(self, path: str) -> None:
        with suppress(ShardMissingError):  # an earlier try, whose answer was lost
            self.request("remove", path, self.place.fs.rm_file)

    def _abort_uploads(self) -> None:
        """Abort uploads in parts that a killed run left below this folder (S3, which would keep and bill them)."""
        fs = self.place.fs
        if not hasattr(fs, "list_multipart_uploads") or not hasattr(fs, "abort_mpu"):
            return
        bucket, _, prefix = self.place.path.partition("/")
        try:
            for upload in fs.list_multipart_uploads(bucket):
                if upload["Key"].startswith(f"{prefix}/"):
                    fs.abort_mpu(bucket, upload["Key"], upload["UploadId"])
        except Exception as error:  # noqa: BLE001  (a right that writing does not need may be missing)
            self._note(
                f"uploads that an interrupted run may have left at {self.url} were not looked for: {type(error).__name__}"
            )


def replace_file(url: str, name: str, content: bytes) -> None:
    """Write one small object below `url`, in one request, which stores carry out as a whole."""
    place = connect(url, write=True)
    path = place.below(name)

    def request() -> None:
        if place.has_folders:
            place.fs.makedirs(path.rpartition("/")[0], exist_ok=True)
        place.fs.pipe_file(path, content)

    Retry.from_environment().call("write", f"{url}/{name}", request, threading.Event())


def check_target(url: str, overwrite: bool) -> None:
    """Raise StoreError when there is something at `url` that may not be replaced; what is unfinished may."""
    place = connect(url, write=True)
    if not overwrite:
        _must_be_free(place.url, names_in(place, Retry.from_environment()))


def _must_be_free(url: str, found: Collection[str]) -> None:
    if found and UNFINISHED_MARK not in found:
        raise StoreError(f"{url} exists; choose another destination or give --overwrite", file=url)
