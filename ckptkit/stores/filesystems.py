"""From a URL to the fsspec file system that serves it.

Options and credentials come in the ways that fsspec and the store's own library document (environment, configuration
files, instance roles); a URL holds neither. No data and no listing is cached.
"""

import threading
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from ckptkit.errors import StoreError, UsageError
from ckptkit.stores.retrying import plain

READ_ONLY = frozenset({"http", "https"})
"""Schemes that can be read only."""

_EXTRAS = {
    "s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs", "az": "azure", "abfs": "azure", "abfss": "azure", "adl": "azure",
    "http": "http", "https": "http", "ssh": "ssh", "sftp": "ssh",
}  # fmt: skip


_ONE_AT_A_TIME = frozenset({"ftp", "sftp", "smb", "ssh"})
"""Schemes whose libraries have one connection that threads must not share: requests wait for each other."""


@dataclass(frozen=True, slots=True)
class Place:
    """A folder or file of a remote store.

    Attributes:
        url: As given, without a trailing slash. Holds no secrets.
        fs: Its fsspec file system. Methods may be called from several threads at once.
        path: As the file system names it, without a trailing slash.
        flat: Whether the store lists all that lies below a folder in one go.
        has_folders: Whether folders are made before files are put into them.
    """

    url: str
    fs: Any
    path: str
    flat: bool
    has_folders: bool

    def below(self, path: str) -> str:
        """The file system's name of a file below."""
        return f"{self.path}/{path}" if self.path else path

    def relative(self, name: str) -> str | None:
        """The path below of what the file system calls `name`; None where it does not lie below."""
        prefix = f"{self.path}/" if self.path else ""
        stripped = name.lstrip("/") if not self.path.startswith("/") else name
        if not stripped.startswith(prefix) or stripped == prefix:
            return None
        return stripped[len(prefix) :]


def scheme_of(url: str) -> str:
    """The scheme of a URL in lower case; empty for a path."""
    scheme, mark, _ = url.partition("://")
    return scheme.lower() if mark else ""


def is_remote(url: str) -> bool:
    return scheme_of(url) not in ("", "file")


def connect(url: str, *, write: bool = False) -> Place:
    """The place that a URL of a remote store names. Makes no request.

    Raises:
        UsageError: the scheme is not known, its library is not installed, it cannot be written, or the URL holds a secret.
        StoreError: the library refuses its configuration.
    """
    url = check(url, write=write)
    scheme = scheme_of(url)
    from fsspec.asyn import AsyncFileSystem
    from fsspec.core import url_to_fs
    from fsspec.registry import get_filesystem_class
    from fsspec.spec import AbstractFileSystem

    try:
        kind = get_filesystem_class(scheme)
        # Only these have caches of listings, and only these take the option.
        is_async = issubclass(kind, AsyncFileSystem)
        options = {"use_listings_cache": False} if is_async else {}
        fs, path = url_to_fs(url, **options)
    except ImportError as error:
        extra = _EXTRAS.get(scheme)
        way = f"pip install 'ckptkit[{extra}]'" if extra else plain(error)
        raise UsageError(f"{url}: the library for {scheme}:// is not installed; {way}") from error
    except ValueError as error:
        raise UsageError(
            f"{url}: there is no store for {scheme}:// ({plain(error)}); use a path or a URL such as s3://, gs://, az://, "
            "https:// or ssh://"
        ) from error
    except Exception as error:
        raise StoreError(f"{url}: cannot set up {scheme}://: {plain(error)}", file=url) from error
    flat = kind._find is not AsyncFileSystem._find if is_async else kind.find is not AbstractFileSystem.find
    if scheme in _ONE_AT_A_TIME:
        fs = _OneAtATime(fs, fs.__dict__.setdefault("_ckptkit_lock", threading.RLock()))
    return Place(url, fs, path.rstrip("/"), flat, not is_async)


class _OneAtATime:
    """A file system (or an open file of it) whose methods exclude each other."""

    def __init__(self, target: Any, lock: threading.RLock) -> None:
        self._target, self._lock = target, lock

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._target, name)
        if not callable(found):
            return found

        def call(*arguments: Any, **options: Any) -> Any:
            with self._lock:
                given = found(*arguments, **options)
                return _OneAtATime(given, self._lock) if name == "open" else given

        return call


def check(url: str, *, write: bool = False) -> str:
    """The URL without trailing slashes. Raises UsageError for one that ckptkit does not take."""
    scheme = scheme_of(url)
    if "::" in url:
        raise UsageError(
            f"{url.split('::')[0]}::…: chained URLs are not taken; give the URL of the store itself"
        )
    parts = urlsplit(url)
    if parts.password is not None:
        raise UsageError(
            f"{scheme}://…@{parts.hostname}: URLs with a password end in logs; give it in the way that the store's own library "
            "takes it (docs/stores.md)"
        )
    if scheme in READ_ONLY and (parts.query or parts.fragment):
        raise UsageError(
            f"{scheme}://{parts.netloc}{parts.path}: URLs with a query are not taken, since signatures in them end in logs"
        )
    if write and scheme in READ_ONLY:
        raise UsageError(
            f"{url}: {scheme}:// can be read only; write to an object store, over ssh:// or to a disk"
        )
    start = len(scheme) + 3
    return url[:start] + url[start:].rstrip("/")
