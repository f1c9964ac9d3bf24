"""Stores: where the bytes of checkpoints live. Every durable write goes through here.

`open_store` and `folders` are the one place that knows URL schemes; a further kind of store is added here.
"""

import os
import time
from urllib.parse import unquote, urlsplit

from ckptkit.errors import StoreError, UsageError
from ckptkit.stores.base import Store

__all__ = ["age_s", "folders", "free_bytes", "is_folder", "is_weight_file", "local_path", "open_store"]


def local_path(url: str) -> str | None:
    """The path that a plain path or a `file://` URL means, or None for a URL of another scheme.

    Raises UsageError for a `file://` URL of another host.
    """
    scheme, mark, _ = url.partition("://")
    if not mark:
        return url
    if scheme.lower() != "file":
        return None
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost"):
        raise UsageError(f"{url}: file:// URLs name no other host ({parts.netloc!r}); write file:///path")
    return unquote(parts.path)


def _path(url: str) -> str:
    path = local_path(url)
    if path is None:
        scheme = url.partition("://")[0]
        raise UsageError(
            f"{url}: there is no store for {scheme}:// yet; use a path or a file:// URL (mount the bucket, or copy it "
            "to a local disk first)"
        )
    if not path:
        raise UsageError("the path of the checkpoint is empty")
    return path


def open_store(url: str) -> Store:
    """The store at a URL: a plain path or `file://`. A single file of weights is a store of its own.

    Raises:
        UsageError: the scheme is not supported.
        StoreError: there is no folder and no file of weights at `url`.
    """
    from ckptkit.stores.local import LocalStore
    from ckptkit.stores.single import SingleFileStore

    path = _path(url)
    return SingleFileStore(path) if is_weight_file(url) else LocalStore(path)


def is_weight_file(url: str) -> bool:
    """Whether there is one file at `url` that may be a checkpoint alone."""
    path = _path(url)
    return path.endswith((".pt", ".pth", ".bin", ".ckpt")) and os.path.isfile(path)


def is_folder(url: str) -> bool:
    """Whether there is a folder at `url`. Raises UsageError for an unsupported scheme."""
    return os.path.isdir(_path(url))


def folders(url: str) -> list[str]:
    """Names of the folders directly below `url`, sorted. Raises StoreError when it is no folder."""
    path = _path(url)
    try:
        with os.scandir(path) as found:
            return sorted(entry.name for entry in found if entry.is_dir())
    except OSError as error:
        raise StoreError(f"{url}: cannot list the folder: {error.strerror}", file=url) from error


def age_s(url: str) -> float:
    """Seconds since a folder's list of files was last changed; negative where the store's clock is ahead of ours."""
    try:
        return time.time() - os.stat(_path(url)).st_mtime
    except OSError as error:
        raise StoreError(f"{url}: cannot look at the folder: {error.strerror}", file=url) from error


def free_bytes(url: str) -> int | None:
    """Bytes that can still be written at `url` without privileges, or None where the store does not tell."""
    try:
        system = os.statvfs(_path(url))
    except OSError:
        return None
    return system.f_bavail * system.f_frsize
