"""Removing checkpoints so that no reader ever takes the rest of one for a whole one.

The file that makes it whole goes first, durably; a folder of a format without such a file is renamed to an unfinished one first.
Whatever happens then, what is left is known to be nothing, and the next removal takes it.
"""

import fcntl
import os
import shutil
import time
from contextlib import suppress
from functools import partial

from ckptkit.errors import ShardMissingError, StoreError
from ckptkit.stores import local_path
from ckptkit.stores.durable import UNFINISHED, sync_folder, write_fault
from ckptkit.stores.folder import UNFINISHED_MARK


def remove_folder(url: str, marker: str | None) -> None:
    """Remove a checkpoint's folder and all in it.

    Args:
        marker: The file that makes it whole, where its format has one.

    Raises:
        StoreError: it could not be removed; what is left is no whole checkpoint, or nothing was done.
        UsageError: the store cannot be written.
    """
    path = local_path(url)
    if path is None:
        _remove_remote(url, marker)
        return
    path = os.path.abspath(path)
    try:
        if marker is not None and os.path.lexists(os.path.join(path, marker)):
            os.unlink(os.path.join(path, marker))
            sync_folder(path)
        elif marker is None and not UNFINISHED.fullmatch(os.path.basename(path)):
            parent, name = os.path.split(path)
            gone = os.path.join(parent, f".{name}.{os.urandom(6).hex()}.unfinished")
            os.rename(path, gone)
            sync_folder(parent)
            path = gone
        shutil.rmtree(path)
        sync_folder(os.path.dirname(path))
    except OSError as error:
        raise write_fault(path, "remove", error) from error


def in_use(url: str) -> bool:
    """Whether a run holds an unfinished local folder. Runs that write to remote stores hold no locks: always False."""
    path = local_path(url)
    if path is None:
        return False
    try:
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise StoreError(f"cannot look at {path}: {error.strerror}", file=path) from error
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(fd)
    return False


def idle_s(url: str) -> float:
    """Seconds since anything was last written in a local folder; 0 for remote stores, which do not tell."""
    path = local_path(url)
    if path is None:
        return 0.0
    newest = 0.0
    try:
        for folder, _, names in os.walk(path):
            newest = max(
                [newest, os.stat(folder).st_mtime, *(os.lstat(f"{folder}/{n}").st_mtime for n in names)]
            )
    except OSError:  # it was put in place meanwhile
        return 0.0
    return max(time.time() - newest, 0.0)


def _remove_remote(url: str, marker: str | None) -> None:
    from ckptkit.stores.filesystems import connect
    from ckptkit.stores.remote import list_files
    from ckptkit.stores.retrying import Retry

    place, retry = connect(url, write=True), Retry.from_environment()
    names = list(list_files(place, retry))
    if marker is None and UNFINISHED_MARK not in names:
        names.append(UNFINISHED_MARK)
        retry.call("write", url, lambda: place.fs.pipe_file(place.below(UNFINISHED_MARK), b"{}"))
    # The marker first; the mark that says "unfinished" last.
    for name in sorted(names, key=lambda name: (name != marker, name == UNFINISHED_MARK)):
        with suppress(ShardMissingError):  # an earlier try, whose answer was lost
            retry.call("remove", f"{url}/{name}", partial(place.fs.rm_file, place.below(name)))
    with suppress(ShardMissingError):  # in stores that have folders; elsewhere there is nothing any more
        retry.call("remove", url, partial(place.fs.rm, place.path, recursive=True))
