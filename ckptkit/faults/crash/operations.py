"""What an operation does to a file system, as a list: by nodes (inodes), not by paths, since paths change.

A node keeps its number through renames. `Tree` is the content of a file system at one moment; operations are applied to it.
"""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TypeAlias

import xxhash

ROOT = 0
"""The node of the folder that is watched."""


@dataclass(frozen=True, slots=True)
class Make:
    """A new name for a new node: an empty `file` or `folder`, or a `link` that says `text`."""

    folder: int
    name: str
    node: int
    kind: str = "file"
    text: str = ""


@dataclass(frozen=True, slots=True)
class Link:
    """A further name of a file."""

    folder: int
    name: str
    node: int


@dataclass(frozen=True, slots=True)
class Remove:
    """A name goes; of a file or of an empty folder."""

    folder: int
    name: str
    node: int


@dataclass(frozen=True, slots=True)
class Rename:
    """A node gets another name in one step; what had that name is gone."""

    folder: int
    name: str
    to_folder: int
    to_name: str
    node: int


@dataclass(frozen=True, slots=True)
class Exchange:
    """Two names swap their nodes in one step."""

    folder: int
    name: str
    node: int
    to_folder: int
    to_name: str
    to_node: int


@dataclass(frozen=True, slots=True)
class Write:
    """Bytes of a file; it grows where they end beyond it."""

    node: int
    offset: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Resize:
    """A file's new size: by truncation, or by reserving space (which only grows). New bytes are zeros."""

    node: int
    size: int
    grow_only: bool = False


@dataclass(frozen=True, slots=True)
class Sync:
    """fsync of a file or folder; `data_only` is fdatasync: bytes and size, as POSIX wants."""

    node: int
    data_only: bool = False


@dataclass(frozen=True, slots=True)
class Mark:
    """A promise to the caller was made here: what `text` names is done, and must survive any later crash."""

    text: str


Op: TypeAlias = Make | Link | Remove | Rename | Exchange | Write | Resize | Sync | Mark


@dataclass
class Tree:
    """Folders, files and links by node.

    Attributes:
        folders: Node → name → node.
        files: Node → bytes.
        links: Node → what it says.
    """

    folders: dict[int, dict[str, int]] = field(default_factory=lambda: {ROOT: {}})
    files: dict[int, bytes] = field(default_factory=dict)
    links: dict[int, str] = field(default_factory=dict)

    def copy(self) -> "Tree":
        return Tree({n: dict(names) for n, names in self.folders.items()}, dict(self.files), dict(self.links))

    def walk(self, node: int = ROOT, prefix: str = "") -> Iterator[tuple[str, int]]:
        """`(path, node)` of everything below a folder, folders before their content, sorted."""
        for name in sorted(self.folders.get(node, {})):
            child = self.folders[node][name]
            yield prefix + name, child
            if child in self.folders:
                yield from self.walk(child, f"{prefix}{name}/")

    def content(self) -> str:
        """A digest of all that can be seen: paths, kinds and bytes."""
        hasher = xxhash.xxh3_128()
        for path, node in self.walk():
            hasher.update(path.encode(errors="surrogateescape"))
            if node in self.folders:
                hasher.update(b"\0folder")
            elif node in self.links:
                hasher.update(b"\0link" + self.links[node].encode(errors="surrogateescape"))
            else:
                data = self.files.get(node, b"")
                hasher.update(b"\0file" + len(data).to_bytes(8, "little") + data)
        return hasher.hexdigest()

    def put_at(self, root: str) -> None:
        """Make it real below an existing empty folder. Files with several names are linked."""
        done: dict[int, str] = {}
        for path, node in self.walk():
            where = os.path.join(root, path)
            if node in self.folders:
                os.mkdir(where)
            elif node in self.links:
                os.symlink(self.links[node], where)
            elif node in done:
                os.link(done[node], where)
            else:
                with open(where, "wb") as file:
                    file.write(self.files.get(node, b""))
                done[node] = where


def tree_at(root: str) -> tuple[Tree, dict[tuple[int, int], int]]:
    """What lies below a folder, and the node of each `(device, inode)`."""
    tree, known = Tree(), {}
    found = os.stat(root)
    known[found.st_dev, found.st_ino] = ROOT

    def add(path: str, folder: int) -> None:
        with os.scandir(path) as entries:
            listed = sorted(entries, key=lambda entry: entry.name)
        for entry in listed:
            found = entry.stat(follow_symlinks=False)
            key = (found.st_dev, found.st_ino)
            node = known.setdefault(key, len(known))
            tree.folders[folder][entry.name] = node
            if entry.is_symlink():
                tree.links[node] = os.readlink(entry.path)
            elif entry.is_dir(follow_symlinks=False):
                tree.folders[node] = {}
                add(entry.path, node)
            elif node not in tree.files:
                with open(entry.path, "rb") as file:
                    tree.files[node] = file.read()

    add(root, ROOT)
    return tree, known
