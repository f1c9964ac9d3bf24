"""Stores: where the bytes of checkpoints live. Every durable write goes through here.

These functions are the one place that tells local paths from URLs of remote stores; a further kind of store is added here.
To read, `open_store`. To write a folder that appears whole or not at all, `create_folder`; `ckptkit.stores.folder` says how.
"""

import os
import posixpath
from collections.abc import Callable
from urllib.parse import unquote, urlsplit

from ckptkit.errors import StoreError, UsageError
from ckptkit.stores.base import Store
from ckptkit.stores.folder import Folder
from ckptkit.stores.system import MEMORY_FILE_SYSTEMS, file_system

__all__ = [
    "check_target",
    "create_folder",
    "destination",
    "folders",
    "free_bytes",
    "is_empty",
    "is_folder",
    "is_weight_file",
    "local_path",
    "on_disk",
    "open_store",
    "real",
    "write_file",
]

_WEIGHT_FILES = (".pt", ".pth", ".bin", ".ckpt")


def local_path(url: str) -> str | None:
    """The path that a plain path or a `file://` URL means, or None for the URL of a remote store.

    Raises UsageError for a `file://` URL of another host, and for an empty path.
    """
    scheme, mark, _ = url.partition("://")
    path = url
    if mark:
        if scheme.lower() != "file":
            return None
        parts = urlsplit(url)
        if parts.netloc not in ("", "localhost"):
            raise UsageError(f"{url}: file:// URLs name no other host ({parts.netloc!r}); write file:///path")
        path = unquote(parts.path)
    if not path:
        raise UsageError("the path of the checkpoint is empty")
    return path


def open_store(url: str, *, deep: bool = True) -> Store:
    """The store at a path or URL. A single file of weights is a store of its own.

    Args:
        deep: Whether files of folders below are listed too.

    Raises:
        UsageError: the scheme is not known, or its library is not installed.
        StoreError: there is no folder and no file of weights at `url`, or the store does not answer.
    """
    if not is_weight_file(url):
        return _folder_store(url, deep=deep)
    from ckptkit.stores.single import SingleFileStore

    path = local_path(url)
    parent, name = posixpath.split(url) if path is None else os.path.split(os.path.abspath(path))
    return SingleFileStore(_folder_store(parent, deep=False), url, name)


def _folder_store(url: str, *, deep: bool = True) -> Store:
    path = local_path(url)
    if path is None:
        from ckptkit.stores.remote import RemoteStore

        return RemoteStore(url, deep=deep)
    from ckptkit.stores.local import LocalStore

    return LocalStore(path, deep=deep)


def is_weight_file(url: str) -> bool:
    """Whether there is one file at `url` that may be a checkpoint alone."""
    if not url.endswith(_WEIGHT_FILES):
        local_path(url)  # for its errors
        return False
    path = local_path(url)
    if path is None:
        from ckptkit.stores import remote

        return remote.is_file(url)
    return os.path.isfile(path)


def is_folder(url: str) -> bool:
    """Whether there is a folder at `url`; in an object store, whether there is something below. Raises UsageError, StoreError."""
    path = local_path(url)
    if path is None:
        from ckptkit.stores import remote

        return remote.is_folder(url)
    return os.path.isdir(path)


def is_empty(url: str) -> bool:
    """Whether there is nothing in the folder at `url`, or no folder. Raises UsageError, StoreError."""
    path = local_path(url)
    if path is None:
        from ckptkit.stores import filesystems, remote, retrying

        return not remote.names_in(filesystems.connect(url), retrying.Retry.from_environment())
    try:
        return not os.path.isdir(path) or not os.listdir(path)
    except OSError as error:
        raise StoreError(f"{url}: cannot list the folder: {error.strerror}", file=url) from error


def folders(url: str) -> list[str]:
    """Names of the folders directly below `url`, sorted. Raises StoreError when it is no folder."""
    path = local_path(url)
    if path is None:
        from ckptkit.stores import remote

        return remote.folders(url)
    try:
        with os.scandir(path) as found:
            return sorted(entry.name for entry in found if entry.is_dir())
    except OSError as error:
        raise StoreError(f"{url}: cannot list the folder: {error.strerror}", file=url) from error


def free_bytes(url: str) -> int | None:
    """Bytes that can still be written at `url` without privileges, or None where the store does not tell."""
    path = local_path(url)
    if path is None:
        return None
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    try:
        system = os.statvfs(path)
    except OSError:
        return None
    return system.f_bavail * system.f_frsize


def destination(url: str) -> str:
    """The absolute path, or the URL without a trailing slash, of a folder to be written.

    Raises UsageError for a scheme that cannot be written.
    """
    path = local_path(url)
    if path is None:
        from ckptkit.stores.filesystems import connect

        return connect(url, write=True).url
    return os.path.abspath(path)


def real(url: str) -> str:
    """A text that is equal for paths and URLs which name the same place, with `/` between folders."""
    path = local_path(url)
    if path is not None:
        return os.path.realpath(path)
    from ckptkit.stores.filesystems import connect

    place = connect(url)
    protocols = place.fs.protocol
    scheme = protocols if isinstance(protocols, str) else protocols[0]
    return f"{scheme}://{place.url.partition('://')[2]}"


def on_disk(url: str) -> bool:
    """Whether writing to `url` is slower than memory: it, or the nearest folder above that exists, is no memory file system."""
    path = local_path(url)
    if path is None:
        return not url.startswith("memory://")
    while not os.path.isdir(path) and path != os.path.dirname(path):
        path = os.path.dirname(path)
    return file_system(path) not in MEMORY_FILE_SYSTEMS


def check_target(url: str, overwrite: bool) -> None:
    """Raise StoreError when `url` cannot become a new folder. An empty folder is no obstacle, nor is an unfinished one."""
    path = local_path(url)
    if path is None:
        from ckptkit.stores import remote_folder

        remote_folder.check_target(url, overwrite)
    else:
        from ckptkit.stores import durable

        durable.check_target(path, overwrite)


def write_file(url: str, name: str, content: bytes) -> None:
    """Write or replace one small file directly in the folder at `url` (a tracker, a list of bans), as a whole.

    Raises UsageError for a scheme that cannot be written, StoreError where the store fails.
    """
    path = local_path(url)
    if path is None:
        from ckptkit.stores import remote_folder

        remote_folder.replace_file(url, name, content)
    else:
        from ckptkit.stores import durable

        durable.replace_file(path, name, content)


def create_folder(
    url: str,
    identity: str,
    *,
    overwrite: bool = False,
    note: Callable[[str], None] = lambda text: None,
    memory: int = 128 << 20,
) -> Folder:
    """Begin a folder that appears at `url` whole or not at all; see `ckptkit.stores.folder` for what to do with it.

    Args:
        url: A path, or the URL of a store that can be written.
        identity: Hexadecimal text that names the content. Equal for calls that may continue each other's work.
        overwrite: Whether there may be a folder already. A local one is replaced at `commit`; a remote one is removed now.
        note: Told what was found and thrown away.
        memory: Bytes of buffers for uploads to remote stores.

    Raises:
        UsageError: the scheme is not known, cannot be written, or its library is not installed.
        StoreError: there is something at `url` already, another run is writing it (local), or the store fails.
    """
    path = local_path(url)
    if path is None:
        from ckptkit.stores.remote_folder import RemoteFolder

        return RemoteFolder(url, identity, overwrite=overwrite, note=note, memory=memory)
    from ckptkit.stores.durable import UnfinishedFolder

    return UnfinishedFolder(path, identity, overwrite=overwrite, note=note)
