"""The index of a PyTorch distributed checkpoint: what `.metadata` says, checked, and the same written.

    state_dict_metadata   key -> TensorStorageMetadata(properties, size, chunks) or BytesStorageMetadata()
    planner_data          key -> the path of dictionary keys and list indices that it was flattened from
    storage_data          MetadataIndex(fqn, offset, index) -> _StorageInfo(relative_path, offset, length)

Every chunk and every object is an item: a complete `torch.save` zip of its own inside a `.distcp` file. Where a run saved
without collectives, each rank wrote a `__<rank>.metadata` for its own chunks, and the checkpoint is their union.

Source: PyTorch, `torch/distributed/checkpoint/metadata.py` and `filesystem.py`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple, TypeGuard

from ckptkit.core.dtypes import DType
from ckptkit.errors import FormatError, ShardMissingError, UnsafeError
from ckptkit.formats import pickles
from ckptkit.formats.pickling import dumps
from ckptkit.formats.standins import Global, Opaque, Size
from ckptkit.stores.base import Store

NAME = ".metadata"
_OF_RANK = re.compile(r"__(\d+)\.metadata")
_MODULE = "torch.distributed.checkpoint.metadata"
_FIELDS = ("state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version")


class Item(NamedTuple):
    """A zip inside a file: bytes `[offset, offset + length)` of `path`."""

    path: str
    offset: int
    length: int


class Chunk(NamedTuple):
    """A box of a tensor and the item that holds it. The item is None for a box without elements that was not stored."""

    start: tuple[int, ...]
    sizes: tuple[int, ...]
    item: Item | None


@dataclass(slots=True)
class Stored:
    """A tensor: its global shape and its chunks."""

    dtype: DType
    shape: tuple[int, ...]
    chunks: list[Chunk]


@dataclass
class Index:
    """What a checkpoint's metadata says.

    Attributes:
        tensors, objects: By flat key.
        paths: Where a key came from in the nested state, where the metadata tells.
        sources: The metadata files.
        attributes: What else the metadata says, such as Megatron's `mcore_data`.
    """

    tensors: dict[str, Stored] = field(default_factory=dict)
    objects: dict[str, Item] = field(default_factory=dict)
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    sources: list[str] = field(default_factory=list)
    attributes: dict[str, Any] = field(default_factory=dict)

    @property
    def files(self) -> list[str]:
        """Every file that an item lies in, sorted."""
        found = {item.path for item in self.objects.values()}
        for tensor in self.tensors.values():
            found.update(chunk.item.path for chunk in tensor.chunks if chunk.item is not None)
        return sorted(found)


def metadata_files(store: Store) -> list[str]:
    """`.metadata`, or else the metadata of every rank, in rank order."""
    if store.exists(NAME):
        return [NAME]
    ranks = ((match, path) for path in store.files() if (match := _OF_RANK.fullmatch(path)))
    return [path for _, path in sorted((int(match[1]), path) for match, path in ranks)]


def read_index(store: Store) -> Index:
    """Read and check the metadata of the checkpoint at a store's root.

    Raises:
        ShardMissingError: there is no metadata, or a file that it names is absent.
        UnsafeError: it names a file outside the folder, or its pickle asks for something outside the table.
        FormatError: it contradicts itself.
    """
    paths = metadata_files(store)
    if not paths:
        raise ShardMissingError(
            f"{store.url} has no {NAME}: the save did not finish, or this is no distributed checkpoint",
            file=NAME,
        )
    index = Index(sources=paths)
    for path in paths:
        if store.size(path) > pickles.LIMIT:
            raise FormatError(
                f"{path} has {store.size(path)} bytes; more than {pickles.LIMIT} are no index of a checkpoint",
                file=path,
            )
        _add(index, pickles.loads(store.read(path), path), path)
    for path in index.files:
        if not store.exists(path):
            raise ShardMissingError(
                f"{path} is missing from {store.url}: {paths[0]} says that it holds chunks", file=path
            )
    return index


def _add(index: Index, value: Any, where: str) -> None:
    """Add what one metadata file says to the union."""
    if not isinstance(value, Opaque) or not value.cls.name.endswith("Metadata"):
        raise FormatError(f"{where} holds no Metadata of torch.distributed.checkpoint", file=where)
    fields = value.attributes
    described, placed = fields.get("state_dict_metadata"), fields.get("storage_data")
    if not isinstance(described, dict) or not isinstance(placed, dict):
        raise FormatError(f"{where} lacks state_dict_metadata or storage_data", file=where)
    items = _items(placed, where)
    index.attributes.update((name, value) for name, value in fields.items() if name not in _FIELDS)
    paths = fields.get("planner_data")
    if isinstance(paths, dict):
        index.paths.update((k, v) for k, v in paths.items() if isinstance(k, str) and _is_path(v))
    for key, what in described.items():
        if not isinstance(key, str) or not isinstance(what, Opaque):
            raise FormatError(f"{where}: the metadata of {key!r} is none", file=where)
        if what.is_a("BytesStorageMetadata"):
            item = items.get((key, None)) or items.get((key, ()))
            if item is None:
                raise FormatError(
                    f"{where} lists the object {key!r}, but not where it lies", file=where, tensor=key
                )
            index.objects.setdefault(key, item)
        elif what.is_a("TensorStorageMetadata"):
            found = _stored(key, what, items, where)
            known = index.tensors.setdefault(key, found)
            if (known.dtype, known.shape) != (found.dtype, found.shape):
                raise FormatError(
                    f"{key!r} is {found.dtype} {found.shape} in {where} and {known.dtype} {known.shape} in another rank's",
                    file=where,
                    tensor=key,
                )
            if known is not found:
                seen = {(chunk.start, chunk.sizes) for chunk in known.chunks}
                known.chunks += [chunk for chunk in found.chunks if (chunk.start, chunk.sizes) not in seen]
        else:
            raise FormatError(
                f"{where}: {key!r} is described by a {what.cls}, which is not known", file=where, tensor=key
            )


def _is_path(value: Any) -> bool:
    return isinstance(value, tuple) and all(isinstance(part, str | int) for part in value)


_Where = tuple[str, tuple[int, ...] | None]


def _items(placed: Mapping[Any, Any], where: str) -> dict[_Where, Item]:
    """Items by key and offset; a hint of an index that the key may carry is no part of its identity."""
    items: dict[_Where, Item] = {}
    for index, info in placed.items():
        if not isinstance(index, Opaque) or not isinstance(info, Opaque):
            raise FormatError(f"{where}: an entry of storage_data is not what it should be", file=where)
        of, at = index.attributes, info.attributes
        key, offset = of.get("fqn"), of.get("offset")
        path, start, length = at.get("relative_path"), at.get("offset"), at.get("length")
        if type(key) is not str or not (offset is None or _is_ints(offset)):
            raise FormatError(f"{where}: an entry of storage_data has no key", file=where)
        if (
            type(path) is not str
            or type(start) is not int
            or type(length) is not int
            or start < 0
            or length < 0
        ):
            raise FormatError(f"{where}: {key!r} has no place in a file", file=where, tensor=key)
        if "/" in path or "\\" in path or "\0" in path or path in ("", ".", ".."):
            raise UnsafeError(
                f"{where} says that {key!r} lies in {path!r}, which is no file of this folder. Nothing was read; do not trust "
                "this checkpoint before you know why",
                file=where,
                tensor=key,
            )
        if at.get("transform_descriptors"):
            raise FormatError(
                f"{where}: {key!r} is stored through an extension (compressed or encrypted), which is not known here. "
                "Save it again without one",
                file=where,
                tensor=key,
            )
        items[key, None if offset is None else tuple(offset)] = Item(path, start, length)
    return items


def _is_ints(value: Any) -> TypeGuard[tuple[int, ...]]:
    return isinstance(value, tuple) and all(type(n) is int and n >= 0 for n in value)


def _stored(key: str, what: Opaque, items: Mapping[_Where, Item], where: str) -> Stored:
    fields = what.attributes
    shape, chunks, properties = fields.get("size"), fields.get("chunks"), fields.get("properties")
    state = properties.state if isinstance(properties, Opaque) else None
    state = tuple(state.values()) if isinstance(state, dict) else state
    dtype = (
        next((part for part in state if isinstance(part, DType)), None) if isinstance(state, tuple) else None
    )
    if (
        dtype is None
        or not _is_ints(shape)
        or not isinstance(chunks, list)
        or prod(n or 1 for n in shape) >> 60
    ):
        raise FormatError(
            f"{where}: tensor {key!r} has no dtype, size or chunks that make sense", file=where, tensor=key
        )
    found = Stored(dtype, tuple(shape), [])
    for chunk in chunks:
        box = chunk.attributes if isinstance(chunk, Opaque) else {}
        start, sizes = box.get("offsets"), box.get("sizes")
        if not _is_ints(start) or not _is_ints(sizes) or not len(start) == len(sizes) == len(shape):
            raise FormatError(f"{where}: a chunk of {key!r} has no box", file=where, tensor=key)
        if any(a + n > full for a, n, full in zip(start, sizes, shape, strict=True)):
            raise FormatError(
                f"{where}: the chunk at {tuple(start)} of size {tuple(sizes)} leaves {key!r}, whose shape is {tuple(shape)}",
                file=where,
                tensor=key,
            )
        item = items.get((key, tuple(start)))
        if item is None and len(chunks) == 1:
            item = items.get((key, None))
        if item is None and 0 not in sizes:
            raise FormatError(
                f"{where} does not say where the chunk at {tuple(start)} of {key!r} lies",
                file=where,
                tensor=key,
            )
        found.chunks.append(Chunk(tuple(start), tuple(sizes), item))
    return found


def write_index(index: Index) -> bytes:
    """`.metadata` for an index, as recent torch writes it but for what differs from run to run (ids, paths)."""
    made = _Maker()
    described: dict[str, Opaque] = {}
    placed: dict[Opaque, Opaque] = {}
    for key, tensor in index.tensors.items():
        described[key] = made.tensor(tensor)
        for number, chunk in enumerate(tensor.chunks):
            if chunk.item is not None:
                placed[made.index(key, Size(chunk.start), number)] = made.info(chunk.item)
    for key, item in index.objects.items():
        described[key] = made.new(_MODULE, "BytesStorageMetadata")
        placed[made.index(key, None, None)] = made.info(item)
    state = {
        "state_dict_metadata": described,
        "planner_data": dict(index.paths),
        "storage_data": placed,
        "storage_meta": None,
        "version": "1.0.0",
    }
    return dumps(made.new(_MODULE, "Metadata", state), 4).data


class _Maker:
    """Stand-ins of the metadata's classes."""

    def __init__(self) -> None:
        self.classes: dict[tuple[str, str], Global] = {}
        self.properties: dict[DType, Opaque] = {}

    def cls(self, module: str, name: str) -> Global:
        return self.classes.setdefault((module, name), Global(module, name))

    def new(self, module: str, name: str, state: Any = None) -> Opaque:
        return Opaque(self.cls(module, name), (), state, True)

    def index(self, key: str, offset: Size | None, number: int | None) -> Opaque:
        return self.new(_MODULE, "MetadataIndex", {"fqn": key, "offset": offset, "index": number})

    def info(self, item: Item) -> Opaque:
        state = {"relative_path": item.path, "offset": item.offset, "length": item.length}
        return self.new("torch.distributed.checkpoint.filesystem", "_StorageInfo", state)

    def tensor(self, tensor: Stored) -> Opaque:
        if tensor.dtype not in self.properties:
            layout = Opaque(self.cls("torch.serialization", "_get_layout"), ("torch.strided",))
            memory = Opaque(self.cls(_MODULE, "_MEM_FORMAT_ENCODING"), (0,))
            state = (tensor.dtype, layout, False, memory, False)
            self.properties[tensor.dtype] = self.new(_MODULE, "TensorProperties", state)
        chunks = [
            self.new(_MODULE, "ChunkStorageMetadata", {"offsets": Size(c.start), "sizes": Size(c.sizes)})
            for c in tensor.chunks
        ]
        state_ = {"properties": self.properties[tensor.dtype], "size": Size(tensor.shape), "chunks": chunks}
        return self.new(_MODULE, "TensorStorageMetadata", state_)


def rank_of(path: str) -> int:
    """The rank in a `.distcp` file's name, or -1."""
    match = re.fullmatch(r".*?__(\d+)_\d+\.distcp", path)
    return int(match[1]) if match else -1


def check_files(store: Store, index: Index) -> None:
    """Compare the index with the files' sizes.

    Raises:
        FormatError: an item reaches past its file's end, two boxes lie in one item, or a file goes on after its last item.
    """
    sizes = {path: store.size(path) for path in index.files}
    ends = dict.fromkeys(sizes, 0)
    owners: dict[Item, tuple[str, Chunk | None]] = {}

    def check(key: str, item: Item, chunk: Chunk | None) -> None:
        end = item.offset + item.length
        ends[item.path] = max(ends[item.path], end)
        if end > sizes[item.path]:
            raise FormatError(
                f"{item.path} has {sizes[item.path]} bytes, but {key!r} should be at {item.offset}:{end}. It is truncated, "
                "or of another checkpoint; restore it",
                file=item.path,
                tensor=key,
            )
        owner, box = owners.setdefault(item, (key, chunk))
        # Tied weights may lie in the same items, each box of the one in that of the other.
        if box is not chunk and (owner == key or chunk is None or box != chunk):
            raise FormatError(
                f"{key!r} and {owner!r} both lie at byte {item.offset} of {item.path}, which one save never does",
                file=item.path,
                tensor=key,
            )

    for key, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            if chunk.item is not None and 0 not in chunk.sizes:
                check(key, chunk.item, chunk)
    for key, item in index.objects.items():
        check(key, item, None)
    for tensor in index.tensors.values():
        for chunk in tensor.chunks:
            if chunk.item is not None and 0 in chunk.sizes:
                ends[chunk.item.path] = max(ends[chunk.item.path], chunk.item.offset + chunk.item.length)
    for path, end in ends.items():
        if sizes[path] != end:
            raise FormatError(
                f"{path} has {sizes[path]} bytes, but its last item ends at {end}. It is of another save; restore it",
                file=path,
            )


def items_by_file(index: Index) -> dict[str, list[tuple[str, Item]]]:
    """Every item with its key, by file, in the order of the bytes."""
    found: dict[str, list[tuple[str, Item]]] = {}
    for key, tensor in index.tensors.items():
        for chunk in tensor.chunks:
            if chunk.item is not None:
                found.setdefault(chunk.item.path, []).append((key, chunk.item))
    for key, item in index.objects.items():
        found.setdefault(item.path, []).append((key, item))
    for path, items in found.items():
        first = {item: key for key, item in reversed(items)}  # tied weights share their items
        found[path] = sorted(((key, item) for item, key in first.items()), key=lambda pair: pair[1].offset)
    return found
