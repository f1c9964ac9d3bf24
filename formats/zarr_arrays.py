"""Arrays of zarr v3: their `zarr.json`, and where their chunks lie.

A chunk is always stored at full size, past the edge of the array too. With the codec `sharding_indexed` a file holds several
inner chunks in any order, and an index of `(offset, nbytes)` pairs with a CRC-32C. Chunks that are no plain bytes are virtual files
(`ckptkit.formats.zarr_chunks`).

Sources: the Zarr core specification, version 3, and its `sharding_indexed` codec.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise, product
from math import prod
from typing import Any

import numpy as np

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.errors import CorruptionError, FormatError, ShardMissingError
from ckptkit.formats.zarr_chunks import CodedChunk, FilledChunk, check_size, fill_bytes, need_zarr, single
from ckptkit.formats.zarr_shards import ABSENT, Sharding, crc32c
from ckptkit.stores.base import Reader, Store, Virtual

NODE = "zarr.json"
OURS = "ckptkit"
"""The attribute of nodes that ckptkit wrote."""
_NATIVE = {
    name for name, t in BY_NAME.items() if t.kind in "biuc" or name in ("float16", "float32", "float64")
}
"""Data types that zarr itself has; others are written as unsigned integers of their width."""
_FILL = "fetch it again, write the array with write_empty_chunks=True, or say --fill-missing where nothing can be lost"
_Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Array:
    """One array. `chunk` is the shape that a file holds; `codecs` are those of a chunk, or of a shard's inner chunk, that is coded."""

    path: str
    shape: _Shape
    dtype: DType
    chunk: _Shape
    separator: str
    v2_keys: bool
    sharding: Sharding | None
    ours: Mapping[str, Any]
    codecs: tuple[Any, ...] = ()
    node: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Region:
    """A box of an array in a file: where it starts, its size, and the strides of its storage where not row-major.

    `virtual` is what the file is where it is none of the store's.
    """

    file: str
    offset: int
    start: _Shape
    sizes: _Shape
    strides: _Shape | None
    virtual: Virtual | None = None


def stored_type(dtype: DType) -> str:
    """The data type that `dtype` is written as: zarr has no bfloat16 and no float8."""
    return dtype.name if dtype.name in _NATIVE else f"uint{8 * dtype.itemsize}"


def array_json(
    shape: _Shape, dtype: DType, chunk: _Shape, inner: _Shape, ours: Mapping[str, Any]
) -> dict[str, Any]:
    """The `zarr.json` of an uncompressed array on a regular grid; in shards where `inner` chunks are smaller than `chunk`."""
    kind = stored_type(dtype)
    fill: Any = False if kind == "bool" else 0
    if kind.startswith("float"):
        fill = 0.0
    elif kind.startswith("complex"):
        fill = [0.0, 0.0]
    endian = {"configuration": {"endian": "little"}} if dtype.itemsize > 1 else {}
    codecs: list[dict[str, Any]] = [{"name": "bytes", **endian}]
    if inner != chunk:
        index = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
        settings = {
            "chunk_shape": list(inner),
            "codecs": codecs,
            "index_codecs": index,
            "index_location": "end",
        }
        codecs = [{"name": "sharding_indexed", "configuration": settings}]
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(shape),
        "data_type": kind,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill,
        "codecs": codecs,
        "attributes": {OURS: dict(ours)},
        "storage_transformers": [],
    }


def parse_array(path: str, node: Mapping[str, Any]) -> Array:
    """The array of a parsed `zarr.json`; `path` is the array's, without the file.

    Raises:
        FormatError: the metadata makes no sense, or says something (compression, another grid) that is not read.
    """
    file = f"{path}/{NODE}"
    shape = _shape(node.get("shape"), file, "shape")
    attributes = node.get("attributes") or {}
    ours = attributes.get(OURS, {}) if isinstance(attributes, dict) else {}
    if not isinstance(ours, dict):
        raise FormatError(f"{file}: the attribute {OURS!r} is no object", file=file)
    grid, settings = _named(node.get("chunk_grid"), file)
    if grid != "regular":
        raise FormatError(f"{file}: its chunk grid is {grid!r}; only regular ones are read", file=file)
    chunk = _shape(settings.get("chunk_shape"), file, "chunk shape")
    if len(chunk) != len(shape) or 0 in chunk:
        raise FormatError(f"{file}: chunks of {chunk} do not cut an array of {shape}", file=file)
    if node.get("storage_transformers"):
        raise FormatError(f"{file} has storage transformers, which are not read", file=file)
    encoding, settings = _named(node.get("chunk_key_encoding"), file)
    separator = settings.get("separator", "/" if encoding == "default" else ".")
    if encoding not in ("default", "v2") or separator not in ("/", "."):
        raise FormatError(f"{file}: chunk keys {encoding!r} with {separator!r} are not read", file=file)
    dtype = _dtype(node.get("data_type"), ours, file)
    sharding, coded = _codecs(node.get("codecs"), chunk, dtype, file)
    if coded:
        check_size(sharding.inner if sharding is not None else chunk, dtype, file)
    return Array(path, shape, dtype, chunk, separator, encoding == "v2", sharding, ours, coded, node)


def regions(store: Store, array: Array, sizes: Mapping[str, int], fill: bool = False) -> Iterator[Region]:
    """Every chunk of an array.

    Args:
        sizes: Of the files that there are, by path.
        fill: Whether a chunk that is absent is one of the fill value. zarr leaves such chunks out; a loss looks the same.

    Raises:
        ShardMissingError: a chunk is absent.
        FormatError: a file has another size than its chunk.
        CorruptionError: an index does not match its checksum.
        UsageError: chunks are coded, and zarr-python is not installed.
    """
    if array.codecs:
        need_zarr(f"{array.path}/{NODE}", _names(array.codecs))
    counts = tuple(-(-n // c) for n, c in zip(array.shape, array.chunk, strict=True))
    for index in _indices(counts) if 0 not in counts else ():
        path = _chunk_path(array, index)
        start = tuple(k * c for k, c in zip(index, array.chunk, strict=True))
        if path not in sizes:
            if fill:
                yield _filled(array, path, start, array.chunk)
                continue
            raise ShardMissingError(
                f"{path} is missing in {store.url}: chunk {index} of {array.path}. A zarr writer leaves out chunks that equal the "
                f"fill value, which cannot be told from a loss: {_FILL}",
                file=path,
                tensor=array.path,
            )
        if array.sharding is not None:
            with store.open(path) as reader:
                yield from _inner(reader, path, array, array.sharding, start, fill)
            continue
        if array.codecs:
            yield _coded(array, path, 0, sizes[path], start, array.chunk)
            continue
        want = prod(array.chunk) * array.dtype.itemsize
        if sizes[path] != want:
            raise FormatError(
                f"{path} has {sizes[path]} bytes instead of the {want} of a chunk; it was cut short or belongs to another "
                "checkpoint",
                file=path,
                tensor=array.path,
            )
        yield _region(array, path, 0, start, array.chunk)


def _coded(array: Array, path: str, offset: int, length: int, start: _Shape, chunk: _Shape) -> Region:
    """A chunk that zarr decodes."""
    made = CodedChunk(path, offset, length, single(array.node, chunk, array.codecs), chunk, array.dtype)
    place = _region(array, f"{path}#{offset}", 0, start, chunk)
    return replace(place, virtual=made)


def _filled(array: Array, path: str, start: _Shape, chunk: _Shape, which: str = "") -> Region:
    """A chunk of the fill value."""
    value = fill_bytes(array.node.get("fill_value"), array.dtype, f"{array.path}/{NODE}")
    place = _region(array, f"{path}#fill{which}", 0, start, chunk)
    return replace(place, virtual=FilledChunk(value, prod(chunk)))


def _region(array: Array, path: str, offset: int, start: _Shape, chunk: _Shape) -> Region:
    sizes = tuple(min(c, n - a) for a, c, n in zip(start, chunk, array.shape, strict=True))
    strides = tuple(prod(chunk[d + 1 :]) for d in range(len(chunk)))
    return Region(path, offset, start, sizes, None if sizes[1:] == chunk[1:] else strides)


def _inner(
    reader: Reader, path: str, array: Array, sharding: Sharding, origin: _Shape, fill: bool
) -> Iterator[Region]:
    """The inner chunks of one shard that lie inside the array."""
    inner = sharding.inner
    grid = tuple(c // i for c, i in zip(array.chunk, inner, strict=True))
    length = 16 * prod(grid)
    total = length + 4 * sharding.index_crc
    if reader.size < total:
        raise FormatError(
            f"{path} has {reader.size} bytes, fewer than its index of {total}; it was cut short", file=path
        )
    data = bytearray(total)
    reader.readinto(reader.size - total if sharding.at_end else 0, memoryview(data))
    if sharding.index_crc and crc32c(data[:length]) != int.from_bytes(data[length:], "little"):
        raise CorruptionError(
            f"the index of {path} does not match its checksum: the file was damaged or cut short", file=path
        )
    table = np.frombuffer(data, "<u8", 2 * prod(grid)).reshape(*grid, 2)
    want = prod(inner) * array.dtype.itemsize
    low, high = (0, reader.size - total) if sharding.at_end else (total, reader.size)
    taken: list[tuple[int, int]] = []
    for index in product(*map(range, grid)):
        start = tuple(o + k * i for o, k, i in zip(origin, index, inner, strict=True))
        if any(a >= n for a, n in zip(start, array.shape, strict=True)):
            continue
        offset, nbytes = int(table[index][0]), int(table[index][1])
        if offset == nbytes == ABSENT:
            if fill:
                yield _filled(array, path, start, inner, "-".join(map(str, index)))
                continue
            raise ShardMissingError(
                f"{path} lacks the inner chunk {index} of {array.path}; a zarr writer leaves out what equals the fill value, which "
                f"cannot be told from a loss: {_FILL}",
                file=path,
                tensor=array.path,
            )
        if (nbytes != want and not array.codecs) or not low <= offset <= high - nbytes:
            raise FormatError(
                f"the index of {path} puts chunk {index} at {offset} with {nbytes} bytes; it should have {want} within "
                f"{low}:{high}",
                file=path,
                tensor=array.path,
            )
        taken.append((offset, nbytes))
        if array.codecs:
            yield _coded(array, path, offset, nbytes, start, inner)
        else:
            yield _region(array, path, offset, start, inner)
    taken.sort()
    if any(b - a < length for (a, length), (b, _) in pairwise(taken)):
        raise FormatError(f"inner chunks of {path} overlap; it was not written by one save", file=path)


def _indices(counts: _Shape) -> Iterator[_Shape]:
    """Every index of a grid, one at a time: metadata may promise any number, and the first absent chunk ends it."""
    if not counts:
        yield ()
        return
    for k in range(counts[0]):
        for rest in _indices(counts[1:]):
            yield k, *rest


def _chunk_path(array: Array, index: _Shape) -> str:
    if array.v2_keys:
        key = array.separator.join(map(str, index)) or "0"
    else:
        key = array.separator.join(["c", *map(str, index)])
    return f"{array.path}/{key}"


def _codecs(codecs: Any, chunk: _Shape, dtype: DType, file: str) -> tuple[Sharding | None, tuple[Any, ...]]:
    """How chunks share a file, where they do; and what they went through, where that is more than plain little-endian bytes."""
    if isinstance(codecs, list) and len(codecs) == 1 and _named(codecs[0], file)[0] == "sharding_indexed":
        settings = _named(codecs[0], file)[1]
        inner = _shape(settings.get("chunk_shape"), file, "inner chunk shape")
        if len(inner) != len(chunk) or 0 in inner or any(c % i for c, i in zip(chunk, inner, strict=True)):
            raise FormatError(f"{file}: shards of {chunk} are no multiple of chunks of {inner}", file=file)
        coded = _coding(settings.get("codecs"), dtype, file)
        index = settings.get("index_codecs")
        names = [_named(codec, file) for codec in index] if isinstance(index, list) else []
        if [name for name, _ in names] not in (["bytes"], ["bytes", "crc32c"]) or (
            names[0][1].get("endian") != "little"
        ):
            raise FormatError(f"{file}: the index of its shards is coded as {index!r}", file=file)
        location = settings.get("index_location", "end")
        if location not in ("start", "end"):
            raise FormatError(f"{file}: the index of its shards is at {location!r}", file=file)
        return Sharding(inner, location == "end", len(names) == 2), coded
    return None, _coding(codecs, dtype, file)


def _coding(codecs: Any, dtype: DType, file: str) -> tuple[Any, ...]:
    """The codecs of a chunk; empty for plain bytes, of which parts are parts of a tensor."""
    names = [_named(codec, file) for codec in codecs] if isinstance(codecs, list) else []
    if not names:
        raise FormatError(f"{file}: its codecs are {str(codecs)[:80]}", file=file)
    if any(name == "sharding_indexed" for name, _ in names):
        raise FormatError(
            f"{file}: its shards are coded once more, or hold shards; neither is read", file=file
        )
    plain = [name for name, _ in names] == ["bytes"] and (
        dtype.itemsize == 1 or names[0][1].get("endian") == "little"
    )
    return () if plain else tuple(codecs)


def _names(codecs: Sequence[Any]) -> list[str]:
    return [codec if isinstance(codec, str) else str(codec.get("name")) for codec in codecs]


def _dtype(name: Any, ours: Mapping[str, Any], file: str) -> DType:
    held = BY_NAME.get(name) if isinstance(name, str) else None
    if held is None:
        raise FormatError(f"{file}: data type {name!r} is no element type of tensors", file=file)
    meant = ours.get("dtype", held.name)
    dtype = BY_NAME.get(meant) if isinstance(meant, str) else None
    if dtype is None or (dtype is not held and stored_type(dtype) != held.name):
        raise FormatError(f"{file}: {meant!r} cannot be stored as {held.name}", file=file)
    return dtype


def _named(value: Any, file: str) -> tuple[str, Mapping[str, Any]]:
    """`(name, configuration)` of an extension point, which may be a bare name."""
    if isinstance(value, str):
        return value, {}
    if isinstance(value, dict) and isinstance(value.get("name"), str):
        settings = value.get("configuration") or {}
        if isinstance(settings, dict):
            return value["name"], settings
    raise FormatError(f"{file} does not make sense at {str(value)[:80]!r}", file=file)


def _shape(value: Any, file: str, what: str) -> _Shape:
    if not isinstance(value, list) or any(type(n) is not int or not 0 <= n < 1 << 62 for n in value):
        raise FormatError(f"{file}: its {what} is {str(value)[:80]}", file=file)
    if prod(value) >= 1 << 59:
        raise FormatError(f"{file}: its {what} {str(value)[:80]} has more elements than any file", file=file)
    return tuple(value)
