"""What a crash may leave: which operations are durable at a moment, and what may become of the others.

Two models, from what systems promise:

- `posix`: nothing is durable but what was synced. Of what came later, each change may have reached the disk or not, in any
  order and on its own: a name, a size, each sector of 512 bytes. fsync of a file says nothing about its name; the name is durable
  once its folder was synced. A size may be there without its bytes, which then are zeros or anything.
- `ext4`: ext4's default, ordered data. Changes of names and sizes go through one journal, in order, and any fsync that needs the journal
  writes all of it. A file that grew has the bytes. Bytes written over old ones, or into reserved space, are as in `posix`.

In both, rename and exchange are one step (all journaling file systems do so, and POSIX wants it of what other processes see), a name
points to a node that exists, and a failed fsync is not modelled. Sources: POSIX.1-2024 (fsync, fdatasync, rename); the ext4 and JBD2
documentation of Linux; T. S. Pillai et al., "All File Systems Are Not Created Equal" (OSDI 2014), for the kinds of states.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ckptkit.faults.crash.operations import (
    Exchange,
    Link,
    Make,
    Mark,
    Op,
    Remove,
    Rename,
    Resize,
    Sync,
    Tree,
    Write,
)

SECTOR = 512
"""What a disk writes whole or not at all."""

MODELS = ("posix", "ext4")

Fate = str
"""What became of an operation: `kept`, `lost`; of a write also `head`, `tail`, `odd` (only those of its sectors) and, where the
file grew, `hollow` (the size without the bytes: zeros) and `junk` (the size, and bytes that nobody wrote)."""


def folders_of(op: Op) -> tuple[int, ...]:
    """The folders whose list of names an operation changes."""
    match op:
        case Make() | Link() | Remove():
            return (op.folder,)
        case Rename() | Exchange():
            return (op.folder, op.to_folder) if op.folder != op.to_folder else (op.folder,)
        case _:
            return ()


def node_of(op: Op) -> int | None:
    """The file whose bytes or size an operation changes."""
    return op.node if isinstance(op, Write | Resize) else None


def is_change(op: Op) -> bool:
    return not isinstance(op, Sync | Mark)


def growing(start: Tree, ops: Sequence[Op]) -> set[int]:
    """Writes that end beyond their file's size at that moment, by number."""
    sizes = {node: len(data) for node, data in start.files.items()}
    found = set()
    for number, op in enumerate(ops):
        if isinstance(op, Write):
            end = op.offset + len(op.data)
            if end > sizes.get(op.node, 0):
                found.add(number)
                sizes[op.node] = end
        elif isinstance(op, Resize):
            sizes[op.node] = max(op.size, sizes.get(op.node, 0)) if op.grow_only else op.size
    return found


def pending(ops: Sequence[Op], model: str, grown: Collection[int]) -> list[int]:
    """Which of the operations that were done are not durable, by number; `grown` as `growing` gives it."""
    open_names: dict[int, set[int]] = {}  # operation → folders that were not synced since
    open_data: dict[int, list[int]] = {}  # file → operations
    for number, op in enumerate(ops):
        folders, node = folders_of(op), node_of(op)
        if folders:
            open_names[number] = set(folders)
        elif node is not None:
            open_data.setdefault(node, []).append(number)
        elif isinstance(op, Sync) and model == "posix":
            open_data.pop(op.node, None)
            for row, left in list(open_names.items()):
                left.discard(op.node)
                if not left:
                    del open_names[row]
        elif isinstance(op, Sync):
            data = open_data.pop(op.node, [])
            # fdatasync writes the journal only for a file whose size changed or whose inode is new.
            new = any(isinstance(ops[n], Make) and ops[n].node == op.node for n in open_names)  # type: ignore[union-attr]
            if not op.data_only or new or any(isinstance(ops[n], Resize) or n in grown for n in data):
                open_names.clear()
                for rows in open_data.values():
                    rows[:] = [n for n in rows if not isinstance(ops[n], Resize)]
    return sorted([*open_names, *(n for rows in open_data.values() for n in rows)])


def fates(op: Op, model: str, grows: bool) -> tuple[Fate, ...]:
    """What may become of an operation that is not durable, `kept` and `lost` first."""
    found = ["kept", "lost"]
    if isinstance(op, Write) and op.data:
        sectors = (op.offset + len(op.data) - 1) // SECTOR - op.offset // SECTOR + 1
        if sectors > 1:
            found += ["head", "tail"] + (["odd"] if sectors > 2 else [])
        if grows and model == "posix":
            found += ["hollow", "junk"]
    if isinstance(op, Write) and model == "ext4" and grows:
        # The journal holds the size back until the bytes are there, so a file that grows has a head of them.
        found = [fate for fate in found if fate in ("kept", "lost", "head")]
    return tuple(found)


@dataclass
class Disk:
    """Applies operations, each with its fate, to what was there at the beginning."""

    tree: Tree

    def apply(self, op: Op, fate: Fate = "kept") -> None:
        folders, files = self.tree.folders, self.tree.files
        if isinstance(op, Make):
            # The node is there, if unreachable, even where its first name was lost: a later name may not be.
            if op.kind == "folder":
                folders.setdefault(op.node, {})
            elif op.kind == "link":
                self.tree.links[op.node] = op.text
            else:
                files.setdefault(op.node, b"")
        if fate == "lost" or not is_change(op):
            return
        match op:
            case Make():
                folders[op.folder][op.name] = op.node
            case Link():
                folders[op.folder][op.name] = op.node
            case Remove():
                if folders[op.folder].get(op.name) == op.node:
                    del folders[op.folder][op.name]
            case Rename():
                self._unname(op.node, op.folder, op.name)
                folders[op.to_folder][op.to_name] = op.node
            case Exchange():
                # Both nodes keep being named once, whatever happened to earlier renames.
                self._unname(op.node, op.folder, op.name)
                self._unname(op.to_node, op.to_folder, op.to_name)
                folders[op.folder][op.name] = op.to_node
                folders[op.to_folder][op.to_name] = op.node
            case Resize():
                data = files.get(op.node, b"")
                if not (op.grow_only and len(data) >= op.size):
                    files[op.node] = data[: op.size].ljust(op.size, b"\0")
            case Write():
                files[op.node] = _written(files.get(op.node, b""), op, fate)

    def _unname(self, node: int, folder: int, name: str) -> None:
        """Take the name away that a renamed node has; a folder has one only, even where an earlier rename was lost."""
        names = self.tree.folders[folder]
        if names.get(name) == node:
            del names[name]
        if node in self.tree.folders:
            for others in self.tree.folders.values():
                for other in [key for key, value in others.items() if value == node]:
                    del others[other]


def _written(old: bytes, op: Write, fate: Fate) -> bytes:
    end = op.offset + len(op.data)
    if fate == "kept":
        return old[: op.offset].ljust(op.offset, b"\0") + op.data + old[end:]
    grown = bytearray(old.ljust(end, b"\0"))
    if fate == "hollow":
        return bytes(grown)
    if fate == "junk":
        first = max(len(old), op.offset)
        grown[first:end] = b"\xa5" * (end - first)
        return bytes(grown)
    first, last = op.offset // SECTOR, (end - 1) // SECTOR + 1
    middle = (first + last) // 2
    for sector in range(first, last):
        stays = {"head": sector < middle, "tail": sector >= middle, "odd": (sector - first) % 2 == 1}[fate]
        if stays:
            low, high = max(op.offset, sector * SECTOR), min(end, (sector + 1) * SECTOR)
            grown[low:high] = op.data[low - op.offset : high - op.offset]
    if fate == "head":
        # Sizes follow the bytes in order.
        del grown[max(len(old), min(end, middle * SECTOR)) :]
    return bytes(grown)


def after_crash(start: Tree, ops: Sequence[Op], fate: Mapping[int, Fate], skip: int = 0) -> Tree:
    """What is on the disk after a crash behind the last of `ops`, where `fate` names what was not simply kept.

    `start` holds the first `skip` operations already.
    """
    disk = Disk(start.copy())
    for number in range(skip, len(ops)):
        disk.apply(ops[number], fate.get(number, "kept"))
    return disk.tree
