"""One object, uploaded from its first byte to its last.

An object that fits in one part is one request. A larger one goes up part by part, each tried again on its own where the library
allows it, while the next part is being filled. Afterwards the store is asked for the object's size, and for its MD5 where it
offers one.
"""

import hashlib
import re
from base64 import b64encode
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

from ckptkit.errors import StoreError
from ckptkit.stores.filesystems import Place
from ckptkit.stores.folder import FileWriter
from ckptkit.stores.remote import tag
from ckptkit.stores.retrying import ShortBodyError

if TYPE_CHECKING:
    from ckptkit.stores.remote_folder import RemoteFolder

PART = 5 << 20
"""S3 takes none that is smaller, but for the last."""
_MOST_PARTS = 9_000  # S3 allows 10,000
COPIES = 4
"""Parts in memory while an object goes up: one being filled, one on its way, and the library's copies of that."""

_MD5 = re.compile(r"[0-9a-f]{32}(-[0-9]+)?")


def part_bytes(size: int, smallest: int = PART) -> int:
    """Bytes of a part of an object: `smallest`, or a multiple of it where that would be too many parts."""
    return max(smallest, -(-size // _MOST_PARTS // smallest) * smallest)


class ObjectWriter(FileWriter):
    """An object being written; see the module. One thread at a time may write.

    Attributes:
        begun: Whether anything was sent or is held for sending.
    """

    def __init__(self, folder: "RemoteFolder", path: str, size: int) -> None:
        self.folder, self.size = folder, size
        self.path, self.url = path, f"{folder.url}/{path}"
        self._part_bytes = part_bytes(size, folder.part)
        self._part = bytearray()
        self._position = 0
        self._sending: Future[None] | None = None
        self._file: Any = None  # of fsspec, when there is more than one part
        self._sums = Sums(folder.place)
        self.begun = False

    def write(self, offset: int, data: memoryview, direct: bool = True) -> None:
        assert offset == self._position, f"{self.path}: byte {offset} came after {self._position}"
        self.begun = True
        data = data.cast("B")
        self._position += data.nbytes
        while data:
            room = self._part_bytes - len(self._part)
            self._part += data[:room]
            data = data[room:]
            if len(self._part) == self._part_bytes and self._position - data.nbytes < self.size:
                self._send(last=False)

    def sync(self) -> None:
        """Upload the rest, wait, and compare. The object is in place then. Raises StoreError."""
        if self._position != self.size:
            raise StoreError(f"{self.url} got {self._position:,} of {self.size:,} bytes", file=self.path)
        self._send(last=True)
        self._wait()

    def close(self) -> None:
        """Nothing: a writer lives until its object is complete, or its folder is closed."""

    def abort(self) -> None:
        """Give the upload up; nothing of it appears."""
        if self._sending is not None:
            self._sending.cancel()
            with suppress(BaseException):  # told before, or of no interest any more
                self._sending.result()
        self._drop()

    def _send(self, *, last: bool) -> None:
        """Hand the part over to a thread of the folder's; only one is on its way at a time."""
        self._wait()
        part, self._part = self._part, bytearray()
        self._sending = self.folder.pool.submit(self._upload, part, last)

    def _wait(self) -> None:
        sending, self._sending = self._sending, None
        if sending is not None:
            try:
                sending.result()
            except BaseException:
                self._drop()
                raise

    # On a thread of the folder's.

    def _upload(self, part: bytearray, last: bool) -> None:
        self._sums.add(part)
        if last and self._sums.count == 1:
            self.folder.check_mine()
            self.folder.put(self.path, bytes(part))
        else:
            if part:
                self._upload_part(part)
            if last:
                self.folder.check_mine()
                self._complete()
        if last:
            self.folder.is_in_place(self.path, self._compared())

    def _upload_part(self, part: bytearray) -> None:
        """Send one part. Its failed tries left nothing: the library holds the bytes until they are sent."""
        fresh = True
        self.folder.make_parent(self.path)

        def request(name: str) -> None:
            nonlocal fresh
            if self._file is None or (self._file.closed and self._sums.count == 1):
                # The second where beginning the upload failed.
                self._file, fresh = self.folder.place.fs.open(name, "wb", block_size=self._part_bytes), True
            file = self._file
            if not _buffered(file):
                if not fresh:
                    raise StoreError(
                        f"cannot write {self.url}: the connection was lost in the middle", file=self.path
                    )
                fresh = False
                file.write(part)
                return
            file.blocksize = len(part)  # the last part is shorter, and is sent like the others
            if fresh:
                fresh = False
                file.write(part)
            else:
                file.buffer.seek(0, 2)
                file.flush()

        self.folder.request("write", self.path, request)

    def _complete(self) -> None:
        """End the upload, so that the object appears."""
        file = self._file

        def request(_: str) -> None:
            if not _buffered(file):
                file.close()
                return
            file.forced = False
            try:
                if file.buffer is not None:
                    file.buffer.seek(0, 2)
                    file.flush(force=True)
            except Exception:
                # The answer may be what was lost, and not the request.
                if not self._landed():
                    raise
            file.close()

        self.folder.request("write", self.path, request)
        self._file = None

    def _landed(self) -> bool:
        try:
            info = self.folder.info(self.path)
        except Exception:  # noqa: BLE001
            return False
        return info.get("size") == self.size and self._sums.match(info) is not False

    def _compared(self) -> str:
        """The tag of the object, after size and MD5 were compared. Raises StoreError where they differ."""

        def request(_: str) -> Mapping[str, Any]:
            found = self.folder.info(self.path)
            if found.get("size") != self.size:
                raise ShortBodyError(
                    f"{self.size:,} bytes were uploaded, but the store has {found.get('size')}"
                )
            return found

        found = self.folder.request("compare", self.path, request)
        if self.folder.compares_md5 and self._sums.match(found) is False:
            self._read_back()
            self.folder.compares_md5 = False  # an encrypted bucket: what looks like an MD5 is none
        return tag(found, times=False)

    def _read_back(self) -> None:
        """Compare the object's bytes with what was sent. Raises StoreError where they differ."""
        again, cat = Sums(self.folder.place), self.folder.place.fs.cat_file
        for start in range(0, self.size, self._part_bytes):
            stop = min(start + self._part_bytes, self.size)
            again.add(self.folder.request("read back", self.path, partial(cat, start=start, end=stop)))
        if again != self._sums:
            raise StoreError(
                f"{self.url} holds other bytes than were uploaded. Nothing was put in place; run the same command again",
                file=self.path,
            )

    def _drop(self) -> None:
        """Abort an upload in parts, as well as that goes."""
        file, self._file = self._file, None
        self._part = bytearray()
        if file is None:
            return
        with suppress(Exception):  # the error that led here is the one to tell
            if _buffered(file):
                file.closed = True  # or it would be completed when it is closed, which happens at the latest when it is freed
                file.discard()
            else:  # what was written is there already, or appears now
                file.close()
                self.folder.place.fs.rm_file(self.folder.place.below(self.path))


class Sums:
    """MD5s in the form in which a store offers them: of parts (S3), or of the whole."""

    def __init__(self, place: Place) -> None:
        protocols = place.fs.protocol
        self._of_parts = "s3" in ((protocols,) if isinstance(protocols, str) else protocols)
        self._parts: list[bytes] = []
        self._whole = hashlib.md5(usedforsecurity=False)
        self.count = 0

    def add(self, part: bytes | bytearray) -> None:
        self.count += 1
        if self._of_parts:
            self._parts.append(hashlib.md5(part, usedforsecurity=False).digest())
        else:
            self._whole.update(part)

    def match(self, info: Mapping[str, Any]) -> bool | None:
        """Whether what the store says of an object fits; None where it offers no MD5."""
        if not self._of_parts:
            offered = info.get("md5Hash")  # Google; in base64
            return bool(offered == b64encode(self._whole.digest()).decode()) if offered else None
        etag = str(info.get("ETag") or "").strip('"')
        if not _MD5.fullmatch(etag):
            return None
        joined = hashlib.md5(b"".join(self._parts), usedforsecurity=False).hexdigest()
        return etag in (self._parts[0].hex() if self.count == 1 else "", f"{joined}-{self.count}")

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Sums)
            and self._parts == other._parts
            and self._whole.digest() == other._whole.digest()
        )

    __hash__ = None  # type: ignore[assignment]


def _buffered(file: Any) -> bool:
    """Whether a file of fsspec holds each part until it is sent, so that sending can be tried again."""
    from fsspec.spec import AbstractBufferedFile

    return isinstance(file, AbstractBufferedFile)
