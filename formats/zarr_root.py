"""The root group of a zarr checkpoint of ours: extras, and digests of every other file, in the attribute `ckptkit`.

`checksum` in it is the xxh3-128 of the rest of the attribute, as JSON with sorted keys and no spaces: a program that formats the file
anew or adds attributes of its own does no damage.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import xxhash

from ckptkit.core.catalog import LEAF, Catalog, Leaves
from ckptkit.core.destination import Written
from ckptkit.errors import CorruptionError, FormatError, LayoutError, UnsafeError
from ckptkit.formats.native_manifest import load_json
from ckptkit.formats.zarr_arrays import NODE, OURS

VERSION = 1
_FIELDS: dict[str, type] = {
    "common": dict, "by_coordinate": dict, "by_sample": list, "facts": dict, "nodes": dict, "carried": dict, "data": dict,
}  # fmt: skip


@dataclass(frozen=True)
class Root:
    """What the root says.

    Attributes:
        common, by_coordinate, by_sample: As in `Extras`.
        facts: What is known of the origin.
        nodes, carried: xxh3-128 of every other `zarr.json`, and of files carried along, in hex.
        data: Path of a chunk to the digests of its leaves, 32 hex digits each, one after the other.
    """

    common: Mapping[str, Any]
    by_coordinate: Mapping[str, Any]
    by_sample: Sequence[Any]
    facts: Mapping[str, Any]
    nodes: Mapping[str, str]
    carried: Mapping[str, str]
    data: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        shards: Catalog,
        facts: Mapping[str, Any],
        nodes: Mapping[str, bytes],
        small: Mapping[str, bytes],
    ) -> "Root":
        """The root of what is to be written."""
        extras = shards.extras
        return cls(
            extras.common,
            extras.by_coordinate,
            extras.by_sample,
            facts,
            {path: xxhash.xxh3_128_hexdigest(data) for path, data in nodes.items()},
            {path: xxhash.xxh3_128_hexdigest(data) for path, data in small.items()},
        )

    @classmethod
    def parse(cls, where: str, data: bytes) -> "Root | None":
        """The root of a checkpoint, or None for a group of other writers.

        Raises:
            FormatError: it is no group of zarr v3, or of a newer version of ckptkit.
            CorruptionError: it does not match its checksum.
            UnsafeError: it names a file outside the checkpoint.
        """
        path = f"{where}/{NODE}"
        node = load_json(path, data)
        if not isinstance(node, dict) or (node.get("zarr_format"), node.get("node_type")) != (3, "group"):
            raise FormatError(f"{path} is no group of zarr v3", file=path)
        attributes = node.get("attributes") or {}
        if not isinstance(attributes, dict):
            raise FormatError(f"{path} does not make sense: its attributes are no object", file=path)
        ours = attributes.get(OURS)
        if ours is None:
            return None
        if not isinstance(ours, dict):
            raise FormatError(f"{path}: the attribute {OURS!r} is no object", file=path)
        if ours.get("version") != VERSION:
            raise FormatError(
                f"{path} has format version {ours.get('version')!r}; this ckptkit reads {VERSION}. Update ckptkit",
                file=path,
            )
        stated = ours.pop("checksum", None)
        if stated != _digest(node):
            raise CorruptionError(
                f"{path} does not match its checksum: it was changed after it was written", file=path
            )
        if any(not isinstance(ours.get(name), kind) for name, kind in _FIELDS.items()):
            raise FormatError(f"{path}: the attribute {OURS!r} is not what ckptkit writes", file=path)
        root = cls(**{name: ours[name] for name in _FIELDS})
        for listed in (*root.nodes, *root.carried, *root.data):
            if ".." in listed.split("/") or listed.startswith("/") or "\\" in listed:
                raise UnsafeError(f"{path} names the file {listed!r}, outside the checkpoint", file=path)
        return root

    def check(self) -> None:
        """Raise LayoutError, before any byte moves, for extras that are no plain JSON."""
        try:
            self.to_bytes(())
        except (TypeError, ValueError, RecursionError) as error:
            raise LayoutError(f"extras are no plain JSON: {error}") from None

    def to_bytes(self, written: Sequence[Written]) -> bytes:
        """The root's `zarr.json`, once the chunks are written."""
        ours: dict[str, Any] = {"version": VERSION, **{name: getattr(self, name) for name in _FIELDS}}
        ours["data"] = {
            file.path: file.leaves.digests.tobytes().hex() for file in written if file.leaves is not None
        }
        node: dict[str, Any] = {"zarr_format": 3, "node_type": "group", "attributes": {OURS: ours}}
        ours["checksum"] = _digest(node)
        return node_bytes(node)

    def leaves(self, path: str, size: int) -> Leaves | None:
        """Digests of a chunk's file, or None where there are none. Raises FormatError where they are not of its size."""
        text = self.data.get(path)
        if text is None:
            return None
        try:
            digests = np.frombuffer(bytes.fromhex(text), np.uint8).reshape(-1, 16)
        except (TypeError, ValueError):
            digests = np.zeros((0, 16), np.uint8)
        if len(digests) != -(-size // LEAF):
            raise FormatError(f"{NODE} has digests of another size of {path}", file=NODE)
        return Leaves(0, size, digests)


def node_bytes(node: Mapping[str, Any]) -> bytes:
    """A `zarr.json` as zarr-python writes it: indented by two."""
    return json.dumps(node, indent=2, sort_keys=True, allow_nan=False, ensure_ascii=False).encode()


def _digest(node: Mapping[str, Any]) -> str:
    """Of the node and our attribute: other attributes are other programs' own."""
    kept = {name: node.get(name) for name in ("zarr_format", "node_type")}
    kept["attributes"] = node["attributes"][OURS]
    text = json.dumps(kept, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return xxhash.xxh3_128_hexdigest(text.encode())
