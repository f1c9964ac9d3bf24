"""Megatron's folders: a run with a tracker, and the folder of one iteration.

    latest_checkpointed_iteration.txt    the iteration, or `release`; written last, so that it marks the run as whole
    iter_0001000/                        one iteration; `release/` where the tracker says so

Both a run and the folder of an iteration are checkpoints. Source: Megatron-LM, `megatron/training/checkpointing.py`.
"""

import re
from collections.abc import Sequence

from ckptkit.errors import FormatError, ShardMissingError
from ckptkit.stores.base import Reader, Store

TRACKER = "latest_checkpointed_iteration.txt"
RELEASE = "release"
_ITERATION = re.compile(r"iter_\d{7,}|release")


class Subfolder(Store):
    """A folder of a store, as a store of its own."""

    def __init__(self, store: Store, folder: str) -> None:
        self.store, self.prefix = store, f"{folder}/"
        self.url = f"{store.url.rstrip('/')}/{folder}"
        self.parallel, self.readers = store.parallel, store.readers

    def files(self) -> Sequence[str]:
        return [path.removeprefix(self.prefix) for path in self.store.files() if path.startswith(self.prefix)]

    def exists(self, path: str) -> bool:
        return self.store.exists(self.prefix + path)

    def size(self, path: str) -> int:
        return self.store.size(self.prefix + path)

    def identity(self, path: str) -> str:
        return self.store.identity(self.prefix + path)

    def open(self, path: str) -> Reader:
        return self.store.open(self.prefix + path)

    def refresh(self) -> None:
        self.store.refresh()

    def local_path(self, path: str) -> str | None:
        return self.store.local_path(self.prefix + path)


def tracked(store: Store) -> str | None:
    """The folder that a run's tracker names, or None where there is no tracker.

    Raises:
        FormatError: the tracker holds neither a number nor `release`.
    """
    if not store.exists(TRACKER):
        return None
    text = store.read(TRACKER, 0, min(store.size(TRACKER), 64)).decode("utf-8", "replace").strip()
    if text == RELEASE:
        return RELEASE
    if not re.fullmatch(r"[0-9]{1,18}", text):
        raise FormatError(
            f"{TRACKER} of {store.url} holds {text[:40]!r}, which is no iteration. Write the number of a whole one into it",
            file=TRACKER,
        )
    return folder_of(int(text))


def folder_of(step: int | None) -> str:
    """The folder of an iteration, as Megatron names it."""
    return RELEASE if step is None else f"iter_{step:07d}"


def find_iteration(store: Store) -> tuple[Store, str]:
    """The folder of the iteration that a run or folder means: a store, and what its paths begin with.

    Raises:
        ShardMissingError: the tracker names a folder that is not there.
    """
    folder = tracked(store)
    if folder is None:
        return store, ""
    found = Subfolder(store, folder)
    if not found.files():
        raise ShardMissingError(
            f"{TRACKER} of {store.url} says {folder}, which is not there. Restore that folder, or write an iteration "
            "that is there into the tracker",
            file=folder,
        )
    return found, found.prefix


def target_prefix(where: str, step: int | None) -> str:
    """What the paths of a new checkpoint begin with: nothing where `where` is itself the folder of an iteration."""
    name = where.replace("\\", "/").rstrip("/").rpartition("/")[2]
    return "" if _ITERATION.fullmatch(name) else f"{folder_of(step)}/"


def tracker_of(prefix: str) -> list[tuple[str, bytes]]:
    """The tracker to write after the folder `prefix` of a run; none for the folder of an iteration alone."""
    if not prefix:
        return []
    folder = prefix.rstrip("/")
    return [
        (TRACKER, RELEASE.encode() if folder == RELEASE else str(int(folder.removeprefix("iter_"))).encode())
    ]
