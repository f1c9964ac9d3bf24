"""zarr v3: a group of uncompressed arrays, readable with zarr-python and others. Compressed ones of other writers are read too.

    model/<name>/zarr.json, c/0/0 ...                 weights
    optimizer/<role>/<name>/zarr.json, c/0/0 ...      masters and moments
    zarr.json                                         the root group, written last

The root's attribute `ckptkit` holds the extras, and digests of every other file (`ckptkit.formats.zarr_root`). A root without it
was written by something else: then every array below it is read, under its path with dots.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import ClassVar

import numpy as np
import xxhash

from ckptkit.core.catalog import NAMED_ROLES, ROLE_CODE, ROLES, Catalog, Entries, Extras, File
from ckptkit.core.destination import Destination, Literal, Written
from ckptkit.core.dtypes import TABLE
from ckptkit.core.layouts import Layout
from ckptkit.core.schema import STATE_ROLES
from ckptkit.errors import CkptError, CorruptionError, FormatError, LayoutError, ShardMissingError
from ckptkit.formats import model_config
from ckptkit.formats.base import Format, ReadOptions, WriteOptions
from ckptkit.formats.binding import model_of
from ckptkit.formats.carried import carried
from ckptkit.formats.chunks import Locals, bind_stored
from ckptkit.formats.model_config import small_files
from ckptkit.formats.native_manifest import load_json
from ckptkit.formats.peft_names import known_names
from ckptkit.formats.stored_keys import sort_keys
from ckptkit.formats.zarr_arrays import NODE, Array, array_json, parse_array, regions
from ckptkit.formats.zarr_chunks import FilledChunk
from ckptkit.formats.zarr_root import Root, node_bytes
from ckptkit.formats.zarr_shards import shard_index
from ckptkit.stores.base import Store, Virtual

_UNSAFE = re.compile(r"[^A-Za-z0-9._-]|^\.|^__")
_INNER = 16 << 20
"""Bytes of a chunk at most, unless a row has more: what other readers fetch and hold at once."""
_LONGEST = 255
"""Bytes of a file's name in most file systems."""


@dataclass(frozen=True, slots=True)
class _Held:
    """An array as what it is: a name and a role, `param` for every weight."""

    name: str
    role: str
    array: Array


class ZarrFormat(Format):
    """Whole tensors, one array each; with a model, under the names of Transformers."""

    name: ClassVar[str] = "zarr"
    names: ClassVar[str] = "transformers"
    any_names: ClassVar[bool] = True
    roles: ClassVar[tuple[str, ...]] = NAMED_ROLES
    extras: ClassVar[bool] = True
    marker: ClassVar[str | None] = NODE

    def detect(self, store: Store) -> bool:
        if not store.exists(NODE):
            return False
        try:
            node = load_json(NODE, store.read(NODE))
        except CkptError:
            return True  # reading says what is wrong
        return isinstance(node, dict) and node.get("node_type") != "array"

    def read(self, store: Store, options: ReadOptions = ReadOptions()) -> Catalog:
        warnings: list[str] = []
        if not store.exists(NODE):
            raise FormatError(
                f"{store.url} has no {NODE}, which is written last: its writing was not finished", file=NODE
            )
        root = Root.parse(store.url, store.read(NODE))
        files = carried(store, warnings)
        model = model_of(model_config.read_config(files, options, store.url), options, store.url)
        arrays = _arrays(store, root)
        paths_ = [array.path.replace("/", ".") for array in arrays]
        known = known_names(model, paths_) if model is not None and root is None else set()
        held = _ours(arrays) if root is not None else _foreign(arrays, known, warnings)
        shapes = {one.name: one.array.shape for one in held}
        bound = bind_stored(model, shapes, store.url, warnings)
        paths = [path for path in store.files() if path.rpartition("/")[2] != NODE and "/" in path]
        sizes = dict(zip(paths, map(store.size, paths), strict=True))
        number: dict[str, int] = {}
        derived: dict[str, Virtual] = {}
        filled = 0
        locals_ = Locals()
        table = []
        for one in held:
            name = bound.renamed.get(one.name, one.name)
            if name not in bound.locals:
                continue
            item, array = bound.locals[name], one.array
            role = ROLE_CODE[bound.tensors[item.segments[0].tensor].kind if one.role == "param" else one.role]
            if 0 in array.shape:
                file = number.setdefault(f"{array.path}/{NODE}", len(number))
                table.append((file, locals_.whole(item), role, array.dtype.code, 0, 0, 0))
            # What we wrote has every chunk, and their digests.
            for region in regions(store, array, sizes, options.fill_missing and root is None):
                if region.virtual is not None:
                    derived[region.file] = region.virtual
                    filled += isinstance(region.virtual, FilledChunk)
                file = number.setdefault(region.file, len(number))
                local, first, last = locals_.chunk(item, region.start, region.sizes, region.strides)
                table.append((file, local, role, array.dtype.code, first, last, region.offset))
        extras, facts = Extras(), {}
        if root is not None:
            extras = Extras(dict(root.common), dict(root.by_coordinate), list(root.by_sample))
            facts = dict(root.facts)
        extras.files = files
        if filled:
            warnings.append(f"{filled} chunks are not there and were taken as their arrays' fill values")
        listed = [File(path, _size(store, path, sizes, derived), 0, 0) for path in number]
        identities = {path: store.identity(path) for path in [NODE, *number] if path not in derived}
        return Catalog(
            format=self.name, where=store.url, tensors=bound.tensors, locals=locals_.items, files=listed,
            entries=Entries(*np.asarray(table, np.int64).reshape(-1, 7).T), layout=Layout(), model=bound.model, names=bound.family,
            extras=extras, facts={**facts, "warnings": warnings},
            leaves=(lambda k: root.leaves(listed[k].path, listed[k].size)) if root is not None else None,
            identities=identities | {path: one.identity(store.identity) for path, one in derived.items()}, derived=derived,
        )  # fmt: skip

    def problems(self, store: Store, catalog: Catalog) -> Iterable[CkptError]:
        """Files carried along that are not what was written."""
        root = Root.parse(store.url, store.read(NODE))
        for path, digest in root.carried.items() if root is not None else ():
            try:
                if xxhash.xxh3_128_hexdigest(store.read(path)) != digest:
                    yield CorruptionError(
                        f"{path} in {store.url} is not what was written: its digest differs", file=path
                    )
            except CkptError as error:
                yield error

    def lay_out(self, shards: Catalog, options: WriteOptions = WriteOptions()) -> Destination:
        """Whole arrays; large ones are cut between rows into shards of at most `max_shard_size`, of inner chunks of equal size."""
        entries = shards.entries
        sizes = np.asarray([item.size for item in shards.locals], np.int64)
        if shards.layout is not None and shards.layout.world != 1:
            raise LayoutError(
                f"format zarr holds whole tensors, not those of {shards.layout.world} ranks; leave out --layout"
            )
        if len(entries) and (entries.first.any() or (entries.last != sizes[entries.local]).any()):
            raise LayoutError("format zarr holds whole tensors, not runs of them")
        files: list[File] = []
        nodes: dict[str, bytes] = {}
        rows: list[tuple[int, int, int, int, int, int]] = []
        literals: dict[int, Sequence[Literal]] = {}
        for k in np.lexsort((entries.local, entries.role)).tolist():
            item, dtype = shards.locals[int(entries.local[k])], TABLE[entries.dtype[k]]
            role = ROLES[entries.role[k]]
            path = _path(item.key, role)
            chunk, inner = _grid(item.shape, dtype.itemsize, options.max_shard_size)
            ours = {"dtype": dtype.name, "name": item.key, "role": role if role in STATE_ROLES else "param"}
            nodes[f"{path}/{NODE}"] = node_bytes(array_json(item.shape, dtype, chunk, inner, ours))
            code = int(entries.local[k]), int(entries.role[k]), int(entries.dtype[k])
            if item.size == 0:
                rows.append((-1, *code, 0, 0))
                continue
            step, part = prod(chunk), prod(inner)
            for number, first in enumerate(range(0, item.size, step)):
                key = "/".join(["c", str(number), *["0"] * (len(chunk) - 1)]) if chunk else "c"
                last = min(first + step, item.size)
                rows.append((len(files), *code, first, last))
                held = -(-(last - first) // part) if inner != chunk else step // part
                nbytes = held * part * dtype.itemsize
                if inner != chunk:
                    index = shard_index(step // part, held, part * dtype.itemsize)
                    literals[len(files)] = [Literal(nbytes, index)]
                    nbytes += len(index)
                files.append(File(f"{path}/{key}", nbytes, 0, 0))
        table = np.asarray(rows, np.int64).reshape(-1, 6)
        if len(table) and not files:  # nothing has bytes, but entries have a file
            files.append(File(f"{next(iter(nodes)).removesuffix(NODE)}c/0", 0, 0, 0))
        table[table[:, 0] < 0, 0] = 0
        for group in {"/".join(path.split("/")[:n]) for path in nodes for n in (1, 2)} - _parents(nodes):
            nodes[f"{group}/{NODE}"] = node_bytes({"zarr_format": 3, "node_type": "group", "attributes": {}})
        small = dict(small_files(shards, {NODE, "model", "optimizer"}))
        root = Root.of(shards, options.facts, nodes, small)
        root.check()
        catalog = Catalog(
            format=self.name, where=shards.where, tensors=shards.tensors, locals=shards.locals, files=files,
            entries=Entries(*table.T), layout=shards.layout, model=shards.model, names=shards.names, extras=shards.extras,
            facts=shards.facts,
        )  # fmt: skip

        def finish(written: Sequence[Written]) -> Iterable[tuple[str, bytes]]:
            yield from nodes.items()
            yield from small.items()
            yield NODE, root.to_bytes(written)

        return Destination(catalog=catalog, literals=literals, digests=True, finish=finish)


def _size(store: Store, path: str, sizes: Mapping[str, int], derived: Mapping[str, Virtual]) -> int:
    if path in derived:
        return derived[path].nbytes
    return sizes[path] if path in sizes else store.size(path)


def _parents(nodes: Mapping[str, bytes]) -> set[str]:
    """Folders that are arrays, not groups."""
    return {path.rpartition("/")[0] for path in nodes}


def _grid(shape: tuple[int, ...], itemsize: int, largest: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shape of files, and that of the chunks in them: some rows each."""
    whole = tuple(max(n, 1) for n in shape)
    row = itemsize * prod(whole[1:])
    if not whole or row * whole[0] <= min(_INNER, largest):
        return whole, whole
    inner = max(1, min(_INNER, largest) // row)
    files = -(-whole[0] // inner) if row * whole[0] <= largest else max(1, largest // row // inner)
    return (files * inner, *whole[1:]), (inner, *whole[1:])


def _path(key: str, role: str) -> str:
    """The array of a name: what file systems or zarr would take otherwise is written as in URLs."""
    name = _UNSAFE.sub(lambda match: "".join(f"%{byte:02X}" for byte in match[0].encode()), key)
    if not name or len(name) > _LONGEST:
        raise LayoutError(f"format zarr cannot name a folder after {key[:80]!r}", tensor=key)
    return f"optimizer/{role}/{name}" if role in STATE_ROLES else f"model/{name}"


def _arrays(store: Store, root: Root | None) -> list[Array]:
    """Every array: those that our root lists, or all below the folder.

    Raises:
        ShardMissingError: one that is listed is absent.
        CorruptionError: one is not what was written.
    """
    if root is None:
        paths = [path for path in store.files() if path.endswith("/" + NODE)]
    else:
        paths = list(root.nodes)

    def load(path: str) -> Array | None:
        if not store.exists(path):
            raise ShardMissingError(f"{path} is missing in {store.url}; fetch it again", file=path)
        data = store.read(path)
        if root is not None and xxhash.xxh3_128_hexdigest(data) != root.nodes[path]:
            raise CorruptionError(
                f"{path} in {store.url} is not what was written: its digest differs", file=path
            )
        node = load_json(path, data)
        if not isinstance(node, dict) or node.get("zarr_format") != 3:
            raise FormatError(f"{path} in {store.url} is no metadata of zarr v3", file=path)
        if node.get("node_type") == "group":
            return None
        return parse_array(path.removesuffix("/" + NODE), node)

    with ThreadPoolExecutor(max(1, min(store.parallel, len(paths)))) as pool:
        return [array for array in pool.map(load, paths) if array is not None]


def _ours(arrays: Sequence[Array]) -> list[_Held]:
    """Arrays as their attributes say."""
    held = []
    seen: set[tuple[str, str]] = set()
    for array in arrays:
        name, role = array.ours.get("name"), array.ours.get("role")
        if not isinstance(name, str) or role not in ("param", *STATE_ROLES) or (name, role) in seen:
            raise FormatError(
                f"{array.path}/{NODE} says that it is {role!r} of {str(name)[:80]!r}",
                file=f"{array.path}/{NODE}",
            )
        seen.add((name, role))
        held.append(_Held(name, role, array))
    return held


def _foreign(arrays: Sequence[Array], known: set[str], warnings: list[str]) -> list[_Held]:
    """Arrays of other writers: keys are paths with dots."""
    by_key: dict[str, Array] = {}
    for array in arrays:
        key = array.path.replace("/", ".")
        if key in by_key:
            raise FormatError(
                f"{by_key[key].path} and {array.path} have the same name {key}", file=array.path
            )
        by_key[key] = array
    paths: dict[str, tuple[str | int, ...]] = {key: tuple(a.path.split("/")) for key, a in by_key.items()}
    keys = sort_keys(by_key, (), paths, known)
    left = [*keys.unknown, *keys.extras]
    if left:
        warnings.append(f"{len(left)} arrays belong to no parameter and were left out, such as {left[0]}")
    held = [_Held(name, "param", by_key[key]) for name, key in keys.weights.items()]
    return held + [_Held(name, role, by_key[key]) for (name, role), key in keys.state.items()]
