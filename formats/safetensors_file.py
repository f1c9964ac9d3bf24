"""One safetensors file: its header, read with suspicion and written as the official writer does.

A file is `u64 N` (little-endian), `N` bytes of JSON, data. The JSON maps each name to `{dtype, shape, data_offsets}`, offsets
counting from the data's start, and `__metadata__` to strings. Format: https://github.com/huggingface/safetensors.

Reading is as strict as the reference reader about what bytes mean, and stricter where it lets pass what cannot be meant: a name
twice (it keeps the last), sizes whose product overflows behind a zero. No tensor bytes are read.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import prod
from typing import Any, NoReturn

import numpy as np

from ckptkit.core.boxes import MAX_ELEMENTS
from ckptkit.core.catalog import I64, U8
from ckptkit.core.dtypes import BY_SAFETENSORS, DType
from ckptkit.errors import FormatError, LayoutError
from ckptkit.stores.base import Store

HEADER_LIMIT = 100_000_000
"""Bytes of JSON that the reference reader accepts."""

_FIRST_READ = 16384
_F4 = BY_SAFETENSORS["F4"].code  # its shapes count 4-bit elements in a file, bytes everywhere else
_UNSUPPORTED = frozenset({"C128"})  # in our table, but no reader of safetensors knows it
_DAMAGED = (
    "The file is damaged or was not written by a safetensors writer: fetch it again, or convert it afresh"
)


@dataclass(frozen=True, slots=True)
class Header:
    """A checked header. Columns are parallel, in the order of the data.

    Attributes:
        path, size: The file, and its bytes.
        data_start: Where the data begins.
        names, shapes: Of each tensor; shapes in stored elements (bytes where a dtype packs two a byte).
        dtype: Codes of `ckptkit.core.dtypes.TABLE`.
        begin: Bytes from the data's start.
        metadata: `__metadata__`.
    """

    path: str
    size: int
    data_start: int
    names: list[str]
    shapes: list[tuple[int, ...]]
    dtype: U8
    begin: I64
    metadata: dict[str, str]


def read_headers(store: Store, paths: Sequence[str]) -> list[Header]:
    """The headers of several files, `store.parallel` at a time. Raises what the first bad file raises."""
    if len(paths) == 1:
        return [read_header(store, paths[0])]
    with ThreadPoolExecutor(max(1, min(store.parallel, len(paths)))) as pool:
        return list(pool.map(lambda path: read_header(store, path), paths))


def read_header(store: Store, path: str) -> Header:
    """The header of one file.

    Raises:
        FormatError: it is no safetensors file, or one that contradicts itself; names the file and the tensor.
        ShardMissingError, StoreError, UnsafeError: from the store.
    """
    with store.open(path) as file:
        size = file.size
        text = bytearray(min(size, _FIRST_READ))
        file.readinto(0, memoryview(text))
        length = int.from_bytes(text[:8], "little")
        _check_start(path, size, length, bytes(text[:64]))
        if 8 + length > len(text):
            rest = bytearray(8 + length - len(text))
            file.readinto(len(text), memoryview(rest))
            text += rest
    return parse_header(path, size, bytes(text[8 : 8 + length]))


def _check_start(path: str, size: int, length: int, first: bytes) -> None:
    """Refuse what the first bytes already tell."""
    looks = ""
    if 8 + length <= size and length <= HEADER_LIMIT and first[8:9] in (b"{", b" ", b"\n", b"\t", b"\r", b""):
        pass
    elif first.startswith(b"PK\x03\x04"):
        looks = "a zip file, as torch.save writes them: load it with torch, or convert it to safetensors"
    elif len(first) > 1 and first[0] == 0x80 and first[1] <= 5:
        looks = "a pickle, which is never executed here: convert it to safetensors where you trust it"
    elif first.startswith(b"version https://git-lfs"):
        looks = "a Git LFS pointer, not the file itself: run `git lfs pull` in its repository"
    elif first.startswith((b"<!DOCTYPE", b"<html")):
        looks = "a web page, so its download failed: fetch it again"
    if looks:
        raise FormatError(f"{path} should be a safetensors file but is {looks}", file=path)
    if size < 8:
        raise FormatError(
            f"{path} has {size} bytes; a safetensors file has at least 8. Fetch it again", file=path
        )
    if length > HEADER_LIMIT:
        raise FormatError(
            f"{path}: the header length is {length} bytes, and no reader takes more than {HEADER_LIMIT}. {_DAMAGED}",
            file=path,
        )
    if 8 + length > size:
        raise FormatError(
            f"{path} is truncated: its header alone is {length} bytes, the file has {size}. Fetch it again",
            file=path,
        )


def parse_header(path: str, size: int, text: bytes) -> Header:
    """Check a header's JSON against a file of `size` bytes. Raises FormatError as `read_header` does."""
    try:
        table = json.loads(
            text.decode("utf-8"),
            object_pairs_hook=_no_twins,
            parse_constant=_no_constant,
            parse_float=_no_float,
        )
    except _Twice as twice:
        raise FormatError(
            f"{path}: the header has {twice.key!r} twice. {_DAMAGED}", file=path, tensor=twice.key
        ) from None
    except RecursionError:
        raise FormatError(f"{path}: the header's JSON is nested too deeply. {_DAMAGED}", file=path) from None
    except ValueError as error:
        raise FormatError(
            f"{path}: the header is not the JSON it should be ({error}). {_DAMAGED}", file=path
        ) from None
    if not isinstance(table, dict):
        raise FormatError(
            f"{path}: the header is a JSON {type(table).__name__}, not an object. {_DAMAGED}", file=path
        )
    data_start = 8 + len(text)
    if b"\\ud" in text.lower() and not _is_text(table):
        raise FormatError(f"{path}: a name in the header is no valid text. {_DAMAGED}", file=path)
    metadata = table.pop("__metadata__", None)
    metadata = {} if metadata is None else metadata
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise FormatError(
            f"{path}: __metadata__ must map names to strings, and does not. {_DAMAGED}", file=path
        )
    data = size - data_start
    rows = sorted((_row(path, name, info, data) for name, info in table.items()), key=lambda row: row[:2])
    _check_tiling(path, rows, data)
    return Header(
        path=path,
        size=size,
        data_start=data_start,
        names=[row[2] for row in rows],
        shapes=[row[4] for row in rows],
        dtype=np.asarray([row[3] for row in rows], np.uint8),
        begin=np.asarray([row[0] for row in rows], np.int64),
        metadata=metadata,
    )


_Row = tuple[int, int, str, int, tuple[int, ...]]
"""Begin, end, name, dtype code, shape."""


def _row(path: str, name: str, info: Any, data: int) -> _Row:
    def fail(why: str) -> NoReturn:
        raise FormatError(f"{path}: tensor {name!r} {why}. {_DAMAGED}", file=path, tensor=name)

    if not isinstance(info, dict):
        fail("is no JSON object")
    code, shape, offsets = info.get("dtype"), info.get("shape"), info.get("data_offsets")
    dtype = BY_SAFETENSORS.get(code) if isinstance(code, str) else None
    if dtype is None or code in _UNSUPPORTED:
        known = ", ".join(c for c in BY_SAFETENSORS if c not in _UNSUPPORTED)
        raise FormatError(
            f"{path}: tensor {name!r} has the unknown dtype {code!r}; known: {known}", file=path, tensor=name
        )
    if not isinstance(shape, list) or not all(type(n) is int and n >= 0 for n in shape):
        fail(f"has the shape {_short(shape)}, which is no list of sizes")
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(type(n) is int for n in offsets):
        fail(f"has the data_offsets {_short(offsets)}, which are no two whole numbers")
    if dtype.code == _F4:
        if not shape or shape[-1] % 2:
            fail(f"has the shape {shape}; two {code} elements share a byte, so the last size must be even")
        shape = [*shape[:-1], shape[-1] // 2]
    if prod(n for n in shape if n) > MAX_ELEMENTS:
        fail(f"has the shape {_short(shape)}, more elements than can be addressed")
    begin, end = offsets
    if not 0 <= begin <= end <= data:
        why = "the file is truncated" if 0 <= begin <= end else "they are in no order"
        fail(f"has the data_offsets {begin}:{end}, but the file has {data} bytes of data ({why})")
    nbytes = prod(shape) * dtype.itemsize
    if end - begin != nbytes:
        fail(f"has {end - begin} bytes of data, but its shape {shape} of {code} needs {nbytes}")
    return begin, end, name, dtype.code, tuple(shape)


def _check_tiling(path: str, rows: Sequence[_Row], data: int) -> None:
    """Tensors must cover the data once: no overlap, no hole, nothing after the last."""
    at, before = 0, "the start of the data"
    for begin, end, name, *_ in rows:
        if begin != at:
            kind = "overlap" if begin < at else "leave a hole"
            between = f"bytes {begin}:{at} twice" if begin < at else f"bytes {at}:{begin}"
            raise FormatError(
                f"{path}: {before} and {name!r} {kind} ({between}). {_DAMAGED}", file=path, tensor=name
            )
        at, before = end, repr(name)
    if at != data:
        raise FormatError(
            f"{path} has {data - at} bytes after {before} that belong to no tensor. {_DAMAGED}", file=path
        )


def _short(value: object) -> str:
    text = repr(value) if not isinstance(value, int) or abs(value) < 1 << 64 else "a huge number"
    return text if len(text) <= 80 else text[:77] + "..."


def _is_text(table: Any) -> bool:
    """Whether no string has half a surrogate pair, which JSON can write and UTF-8 cannot."""
    try:
        json.dumps(table, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True


class _Twice(ValueError):
    def __init__(self, key: str) -> None:
        super().__init__(key)
        self.key = key


def _no_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        seen: set[str] = set()
        for key, _ in pairs:
            if key in seen:
                raise _Twice(key)
            seen.add(key)
    return found


def _no_constant(text: str) -> NoReturn:
    raise ValueError(f"{text} is no JSON value")


def _no_float(text: str) -> NoReturn:
    raise ValueError(f"{text[:40]} is no whole number")


def written_shape(shape: Sequence[int], dtype: DType) -> list[int]:
    """A shape as a header says it. A scalar of a packed type becomes one axis of two elements."""
    if dtype.code != _F4:
        return list(shape)
    return [*shape[:-1], shape[-1] * 2] if shape else [2]


def check_writable(dtypes: Iterable[DType], where: str) -> None:
    """Raise LayoutError for a dtype that safetensors has no name for."""
    for dtype in dtypes:
        if dtype.safetensors in _UNSUPPORTED:
            raise LayoutError(
                f"{where}: safetensors cannot hold {dtype}; leave such tensors out (--only) or cast them (--dtype)"
            )


def entry_text(name: str, shape: Sequence[int], dtype: DType, begin: int) -> str:
    """One tensor's member of the header's JSON object; `shape` in stored elements."""
    sizes = ",".join(map(str, written_shape(shape, dtype)))
    end = begin + prod(shape) * dtype.itemsize
    return (
        f'{json.dumps(name, ensure_ascii=False)}:{{"dtype":"{dtype.safetensors}","shape":[{sizes}],'
        f'"data_offsets":[{begin},{end}]}}'
    )


def header_bytes(
    members: Iterable[str], metadata: Mapping[str, str], *, multiple: int = 8, nbytes: int = 0
) -> bytes:
    """A whole header, length field included, padded with spaces.

    Args:
        members: `entry_text` of each tensor, in the order of the data.
        multiple: What the number of bytes becomes a multiple of.
        nbytes: The number of bytes wanted, where it is fixed beforehand.
    """
    first = (
        [f'"__metadata__":{json.dumps(metadata, ensure_ascii=False, separators=(",", ":"))}']
        if metadata
        else []
    )
    text = ("{" + ",".join([*first, *members]) + "}").encode()
    total = nbytes or -(-(8 + len(text)) // multiple) * multiple
    assert 8 + len(text) <= total, f"header of {len(text)} bytes does not fit in {total}"
    if total - 8 > HEADER_LIMIT:
        raise LayoutError(
            f"a header of {total} bytes exceeds the {HEADER_LIMIT} that readers take; use smaller files"
        )
    return (total - 8).to_bytes(8, "little") + text + b" " * (total - 8 - len(text))
