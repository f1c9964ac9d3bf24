"""Distributed checkpoints that torch stores as safetensors (`HuggingFaceStorageWriter`, `save_distributed=True`).

    shard-00001-model-00001-of-00002.safetensors    one a rank and output file

Each header says where its boxes begin: `__metadata__["DCP_SHARDING_INFO"]` is JSON `{name: {"saved_offsets": [...]}}`. Global
shapes are not stored: they are the furthest ends of boxes, so that the absence of a last rank shows only where the model is
known. Source: PyTorch, `torch/distributed/checkpoint/hf_storage.py`.
"""

import json
import re
from collections.abc import Sequence
from typing import Any

from ckptkit.core.dtypes import TABLE
from ckptkit.errors import FormatError, ShardMissingError
from ckptkit.formats.dcp_metadata import Chunk, Item, Stored
from ckptkit.formats.safetensors_file import Header, read_header, read_headers
from ckptkit.stores.base import Store

_FILE = re.compile(r"shard-(\d{5})-.*?(\d{5})-of-(\d{5})\.safetensors")
INFO = "DCP_SHARDING_INFO"


def shard_files(store: Store) -> list[str]:
    """The files of such a checkpoint, sorted; empty where it is none."""
    return [path for path in store.files() if _FILE.fullmatch(path)]


def looks_like(store: Store) -> bool:
    """Whether the first of such files states where its boxes begin."""
    paths = shard_files(store)
    try:
        return bool(paths) and INFO in read_header(store, paths[0]).metadata
    except FormatError:
        return False


def rank_of(path: str) -> int:
    """The rank whose file it is."""
    match = _FILE.fullmatch(path)
    return int(match[1]) - 1 if match else -1


def read_shards(store: Store, warnings: list[str]) -> tuple[list[Header], dict[str, Stored]]:
    """Headers, and every tensor with its boxes; an item is a tensor's bytes, counted from its file's data.

    Raises:
        ShardMissingError: a rank between others, or an output file, has no shard.
        FormatError: a header does not say where its boxes begin, or differs from others in a dtype.
    """
    paths = shard_files(store)
    ranks = {rank_of(path) for path in paths}
    missing = sorted(set(range(max(ranks) + 1)) - ranks)
    if missing:
        raise ShardMissingError(
            f"{store.url} has files of ranks up to {max(ranks)}, but none of rank {missing[0]}. Fetch them again",
            file=f"shard-{missing[0] + 1:05d}-...",
        )
    headers = read_headers(store, paths)
    found: dict[str, Stored] = {}
    for header in headers:
        offsets = _offsets(header)
        for name, shape, code, begin in zip(
            header.names, header.shapes, header.dtype.tolist(), header.begin.tolist(), strict=True
        ):
            start = offsets.get(name)
            if start is None or len(start) != len(shape):
                raise FormatError(
                    f"{header.path} does not say where its part of {name!r} begins",
                    file=header.path,
                    tensor=name,
                )
            dtype = TABLE[code]
            stored = found.setdefault(name, Stored(dtype, tuple(0 for _ in shape), []))
            if stored.dtype is not dtype or len(stored.shape) != len(shape):
                raise FormatError(
                    f"{name!r} is {dtype} with {len(shape)} axes in {header.path}, and not so in others",
                    file=header.path,
                    tensor=name,
                )
            ends = (a + n for a, n in zip(start, shape, strict=True))
            stored.shape = tuple(max(have, end) for have, end in zip(stored.shape, ends, strict=True))
            if not any((c.start, c.sizes) == (start, tuple(shape)) for c in stored.chunks):
                stored.chunks.append(Chunk(start, tuple(shape), Item(header.path, begin, 0)))
    warnings.append(
        "files of this kind do not state global shapes: if the last rank's file is missing, only a model's configuration tells"
    )
    return headers, found


def _offsets(header: Header) -> dict[str, tuple[int, ...]]:
    text = header.metadata.get(INFO)
    try:
        table: Any = json.loads(text) if text is not None else None
        return {name: _start(info["saved_offsets"]) for name, info in table.items()}
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise FormatError(
            f"{header.path}: {INFO} is missing or damaged ({error})", file=header.path
        ) from None


def _start(values: Sequence[Any]) -> tuple[int, ...]:
    if not all(type(n) is int and n >= 0 for n in values):
        raise ValueError("an offset is no whole number")
    return tuple(values)
