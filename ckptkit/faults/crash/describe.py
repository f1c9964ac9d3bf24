"""Recorded operations in words, with the paths that their nodes had at the time."""

from collections.abc import Mapping, Sequence

from ckptkit.faults.crash.model import Fate, folders_of, node_of
from ckptkit.faults.crash.operations import (
    ROOT,
    Exchange,
    Link,
    Make,
    Mark,
    Op,
    Remove,
    Rename,
    Resize,
    Sync,
    Write,
)


def describe(ops: Sequence[Op], fates: Mapping[int, Fate]) -> list[str]:
    """A line for each operation; those with a fate end with it."""
    names = _Names()
    lines = []
    for number, op in enumerate(ops):
        fate = fates.get(number)
        lines.append(names.line(op) + (f"   <- {fate}" if fate else ""))
        names.follow(op)
    return lines


def touching(ops: Sequence[Op], numbers: Sequence[int]) -> list[int]:
    """Operations on the same files and folders as the given ones, and promises."""
    nodes = {node for n in numbers for node in _nodes(ops[n])}
    return [n for n, op in enumerate(ops) if isinstance(op, Mark) or nodes & set(_nodes(op))]


def _nodes(op: Op) -> tuple[int, ...]:
    if isinstance(op, Sync):
        return (op.node,)
    node = node_of(op)
    return folders_of(op) if node is None else (node,)


class _Names:
    """Paths of nodes, followed through renames. Nodes from before the recording are named when they first appear."""

    def __init__(self) -> None:
        self._path: dict[int, str] = {ROOT: "."}

    def of(self, node: int) -> str:
        return self._path.get(node, f"node {node}")

    def at(self, folder: int, name: str) -> str:
        above = self.of(folder)
        return name if above == "." else f"{above}/{name}"

    def line(self, op: Op) -> str:
        match op:
            case Make():
                verb = {"file": "create", "folder": "mkdir", "link": "symlink"}[op.kind]
                return f"{verb} {self.at(op.folder, op.name)}"
            case Link():
                return f"link {self.of(op.node)} to {self.at(op.folder, op.name)}"
            case Remove():
                return f"remove {self.at(op.folder, op.name)}"
            case Rename():
                return f"rename {self.at(op.folder, op.name)} to {self.at(op.to_folder, op.to_name)}"
            case Exchange():
                return f"exchange {self.at(op.folder, op.name)} and {self.at(op.to_folder, op.to_name)}"
            case Write():
                return f"write {self.of(op.node)} [{op.offset}:{op.offset + len(op.data)}]"
            case Resize():
                return f"{'reserve' if op.grow_only else 'truncate'} {self.of(op.node)} to {op.size}"
            case Sync():
                return f"{'fdatasync' if op.data_only else 'fsync'} {self.of(op.node)}"
            case Mark():
                return f"promise: {op.text}"

    def follow(self, op: Op) -> None:
        match op:
            case Make() | Link() | Remove():
                self._name(op.node, self.at(op.folder, op.name))
            case Rename():
                self._name(op.node, self.at(op.to_folder, op.to_name))
            case Exchange():
                first, second = self.at(op.folder, op.name), self.at(op.to_folder, op.to_name)
                self._name(op.node, second)
                self._name(op.to_node, first)

    def _name(self, node: int, path: str) -> None:
        """Name a node; what lies in a folder moves along."""
        old = self._path.get(node)
        self._path[node] = path
        if old is not None and old != path:
            for other, where in list(self._path.items()):
                if where.startswith(old + "/"):
                    self._path[other] = path + where[len(old) :]
