"""Folders of remote stores (object stores, HTTP, SSH) as stores, over fsspec.

Reads are ranged requests, larger ones where an object is read from front to back (`ckptkit.stores.ahead`); nothing else is kept but one
listing, which a store takes when it is first asked what there is.
What was listed holds: an object that is shorter when it is read is an error. Faults that may pass are tried again
(`ckptkit.stores.retrying`); a short body counts as one.
"""

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import partial
from typing import Any

from ckptkit.errors import FormatError, ShardMissingError, StoreError, UnsafeError
from ckptkit.stores.ahead import ReadAhead
from ckptkit.stores.base import Reader, Store
from ckptkit.stores.filesystems import READ_ONLY, Place, connect, scheme_of
from ckptkit.stores.retrying import Retry, ShortBodyError, is_final

_TIMES = ("LastModified", "Last-Modified", "last_modified", "updated", "mtime", "modified", "created")

_REQUEST = 16 << 20
"""Most bytes of one request; larger reads are several, one after the other."""


class RemoteReader(Reader):
    """An object. A read is one request (or several of 16 MiB), or none where it was read ahead."""

    small_run = 1 << 20
    """A request costs as much time as some hundred KiB more in another."""

    def __init__(self, place: Place, path: str, size: int, retry: Retry, ahead: ReadAhead) -> None:
        self._place, self._name, self._retry, self._ahead = place, place.below(path), retry, ahead
        self.size = size
        self.where = f"{place.url}/{path}"

    def readinto(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from `offset` on. Raises FormatError when the object ends before that, StoreError on a fault."""
        view = buffer.cast("B")
        self._must_hold(offset, view.nbytes)
        for start in range(0, view.nbytes, _REQUEST):
            part = view[start : start + _REQUEST]
            part[:] = self._read(offset + start, part.nbytes)

    def scatter(self, offset: int, buffers: Sequence[memoryview]) -> None:
        """As `readinto`, in one request where they are not large."""
        total = sum(buffer.nbytes for buffer in buffers)
        if total > _REQUEST:
            super().scatter(offset, buffers)
            return
        self._must_hold(offset, total)
        data = self._read(offset, total)
        for buffer in buffers:
            buffer.cast("B")[:] = data[: buffer.nbytes]
            data = data[buffer.nbytes :]

    def _must_hold(self, offset: int, nbytes: int) -> None:
        if offset + nbytes > self.size:
            raise FormatError(
                f"{self.where} ends at byte {self.size}, but bytes {offset}:{offset + nbytes} are needed. It is truncated, or "
                "belongs to another checkpoint",
                file=self.where,
            )

    def _read(self, offset: int, nbytes: int) -> memoryview:
        if not nbytes:
            return memoryview(b"")
        return self._ahead.read(self._name, self.size, offset, nbytes, self._fetch)

    def _fetch(self, offset: int, nbytes: int) -> bytes:
        def request() -> bytes:
            data: bytes = self._place.fs.cat_file(self._name, start=offset, end=offset + nbytes)
            if len(data) != nbytes:
                raise ShortBodyError(f"asked for bytes {offset}:{offset + nbytes}, got {len(data)} bytes")
            return data

        return self._retry.call("read", self.where, request)

    def close(self) -> None:
        """Nothing is held."""


class RemoteStore(Store):
    """A folder of a remote store.

    Args:
        url: Of the folder.
        deep: Whether folders below are listed too.

    Raises UsageError as `connect`. Makes no request.
    """

    parallel = 32
    readers = 16

    def __init__(self, url: str, *, deep: bool = True, retry: Retry | None = None) -> None:
        self.place = connect(url)
        self.url = self.place.url
        self._deep = deep
        self._retry = retry or Retry.from_environment()
        self._lock = threading.Lock()
        self._ahead = ReadAhead()
        self._listing: dict[str, Mapping[str, Any]] | None = None
        self._ranges_checked = scheme_of(url) not in READ_ONLY

    def listing(self) -> dict[str, Mapping[str, Any]]:
        """What there is: path to what the store says of it. Taken once, until `refresh`."""
        with self._lock:
            if self._listing is None:
                self._listing = list_files(self.place, self._retry, deep=self._deep)
            return self._listing

    def files(self) -> Sequence[str]:
        found = sorted(self.listing())
        if not found and not is_folder(self.url, self._retry):
            raise StoreError(
                f"{self.url} does not exist, or cannot be listed; give the folder that holds the checkpoint",
                file=self.url,
            )
        return found

    def exists(self, path: str) -> bool:
        self._check_path(path)
        if path in self.listing():
            return True
        if scheme_of(self.url) not in READ_ONLY:
            return False
        try:  # a web server need not list its folders
            self._info(path)
        except ShardMissingError:
            return False
        return True

    def size(self, path: str) -> int:
        return _size(self._entry(path), f"{self.url}/{path}")

    def identity(self, path: str) -> str:
        return tag(self._entry(path))

    def refresh(self) -> None:
        """The next question lists the folder again: one request, however many files are looked at."""
        with self._lock:
            self._listing = None
            self._ahead = ReadAhead()

    def _entry(self, path: str) -> Mapping[str, Any]:
        """What the store says of a file. Raises ShardMissingError, FormatError for a folder."""
        self._check_path(path)
        listing = self.listing()
        found = listing.get(path)
        if found is None or found.get("size") is None:  # lists of web servers hold names only
            found = self._info(path)
            with self._lock:
                listing[path] = found
        return found

    def open(self, path: str) -> RemoteReader:
        size = self.size(path)
        reader = RemoteReader(self.place, path, size, self._retry, self._ahead)
        if not self._ranges_checked and size > 1:
            self._check_ranges(path, size)
        return reader

    def age_s(self) -> float:
        """Seconds since the newest object was written; 0 where the store does not tell."""
        times = [written for info in self.listing().values() if (written := _written(info)) is not None]
        return time.time() - max(times) if times else 0.0

    def _info(self, path: str) -> Mapping[str, Any]:
        where = f"{self.url}/{path}"
        found: Mapping[str, Any] = self._retry.call("look at", where, lambda: info_of(self.place, path))
        if found.get("type") == "directory":
            raise FormatError(f"{where} is a directory, but should be a file of data", file=path)
        return found

    def _check_path(self, path: str) -> None:
        parts = path.split("/")
        if not path or path.startswith("/") or ".." in parts or "\0" in path or "://" in path:
            raise UnsafeError(
                f"{self.url} refers to {path!r}, which is not a path inside it. Nothing was read; do not trust this "
                "checkpoint before you know why",
                file=path,
            )

    def _check_ranges(self, path: str, size: int) -> None:
        """Raise StoreError where a web server sends whole files whatever part is asked for. Reads one byte."""
        where = f"{self.url}/{path}"

        def request() -> bytes:
            # Unlike `cat_file` this looks at the status before it takes the body.
            with self.place.fs.open(self.place.below(path), "rb", cache_type="none", size=size) as file:
                file.seek(size - 1)
                data: bytes = file.read(1)
            return data

        try:
            self._retry.call("read", where, request)
        except StoreError as error:
            if isinstance(error.__cause__, ValueError):
                raise StoreError(
                    f"{where}: the server does not answer requests for ranges of bytes, so that each read would fetch the whole "
                    "file. Download the checkpoint, then read the copy",
                    file=where,
                ) from error
            raise
        self._ranges_checked = True


def list_files(place: Place, retry: Retry, *, deep: bool = True) -> dict[str, Mapping[str, Any]]:
    """Every file below a place, by path; empty where there is none. Raises StoreError.

    The general `find` of fsspec leaves out folders that fail, so that it is not used.
    """
    if deep and place.flat:
        entries = _answer(
            place, retry, lambda: list(place.fs.find(place.path, detail=True, withdirs=False).values())
        )
    else:
        entries = _walk(place, retry, deep)
    rows = {place.relative(e["name"]): e for e in entries if "name" in e and e.get("type") != "directory"}
    return {path: info for path, info in rows.items() if path and not path.endswith("/")}


def _answer(place: Place, retry: Retry, ask: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Entries of a listing; none where the folder is absent."""

    def request() -> list[dict[str, Any]]:
        place.fs.invalidate_cache()
        try:
            return ask()
        except (FileNotFoundError, NotADirectoryError) as error:
            if not is_final(error):
                raise
            return []

    return retry.call("list", place.url, request)


def _folder_path(place: Place) -> str:
    return f"{place.path}/" if scheme_of(place.url) in READ_ONLY else place.path


def _walk(place: Place, retry: Retry, deep: bool) -> list[dict[str, Any]]:
    web = scheme_of(place.url) in READ_ONLY
    found: list[dict[str, Any]] = []
    folders = [_folder_path(place)]
    while folders:
        for entry in _answer(place, retry, partial(place.fs.ls, folders.pop(), detail=True)):
            if entry.get("type") != "directory":
                if not (web and ("?" in entry["name"] or "#" in entry["name"])):  # links that sort the page
                    found.append(entry)
            elif deep and place.relative(entry["name"]):
                folders.append(entry["name"])
    return found


def info_of(place: Place, path: str) -> Mapping[str, Any]:
    """What the store says of one file now. Raises the library's errors."""
    place.fs.invalidate_cache()
    found: Mapping[str, Any] = place.fs.info(place.below(path))
    return found


def is_folder(url: str, retry: Retry | None = None) -> bool:
    """Whether there is a folder, that is, something below. Raises UsageError, StoreError."""
    place = connect(url)
    # To a web server every URL is a file; those of folders end with a slash.
    kind = _kind_of(place, _folder_path(place), retry or Retry.from_environment())
    return kind is not None and (scheme_of(url) in READ_ONLY or kind == "directory")


def is_file(url: str) -> bool:
    """Whether there is one file of that name. Raises UsageError, StoreError."""
    place = connect(url)
    return _kind_of(place, place.path, Retry.from_environment()) == "file"


def _kind_of(place: Place, name: str, retry: Retry) -> str | None:
    """`file`, `directory`, or None where there is nothing. (fsspec's own `isdir` takes a fault for that.)"""

    def request() -> str:
        place.fs.invalidate_cache()
        return str(place.fs.info(name).get("type", "file"))

    try:
        return retry.call("look at", place.url, request)
    except ShardMissingError:
        return None


def folders(url: str) -> list[str]:
    """Names of the folders directly below, sorted. Raises UsageError, and StoreError where there is nothing."""
    place = connect(url)
    found = names_in(place, Retry.from_environment())
    if not found and not is_folder(url):
        raise StoreError(f"{place.url} does not exist", file=place.url)
    return sorted(name for name, kind in found.items() if kind == "directory")


def names_in(place: Place, retry: Retry) -> dict[str, str]:
    """What lies directly in a folder: name to `file` or `directory`; empty where there is none. Raises StoreError."""
    found = _answer(place, retry, partial(place.fs.ls, _folder_path(place), detail=True))
    names = {place.relative(entry["name"]): str(entry.get("type")) for entry in found}
    return {name.rstrip("/"): kind for name, kind in names.items() if name}


def tag(info: Mapping[str, Any], *, times: bool = True) -> str:
    """A text that changes when an object's content may have: size and ETag, or else the time, where `times` count.

    Times of a listing and of a single object may differ in precision; compare those of one kind.
    """
    etag = next((info[name] for name in ("ETag", "etag", "md5Hash", "generation") if info.get(name)), "")
    if not etag and times:
        etag = _written(info) or ""
    return f"{info.get('size')}-{str(etag).removeprefix('W/').strip(chr(34))}"


def _size(info: Mapping[str, Any], where: str) -> int:
    size = info.get("size")
    if not isinstance(size, int):
        raise StoreError(
            f"{where}: the store does not tell its size; download the checkpoint, then read the copy",
            file=where,
        )
    return size


def _written(info: Mapping[str, Any]) -> float | None:
    """When an object was written, in seconds since 1970, or None where the store does not tell."""
    found = next((info[name] for name in _TIMES if info.get(name)), None)
    if isinstance(found, datetime):
        return found.timestamp()
    if isinstance(found, str):
        try:
            return datetime.fromisoformat(found).timestamp()
        except ValueError:
            pass
        try:
            return parsedate_to_datetime(found).timestamp()
        except ValueError:
            return None
    return float(found) if isinstance(found, (int, float)) else None
