"""Chunks of zarr arrays that are no plain bytes: compressed ones, and those that a writer left out.

Each is a virtual file of its elements, row-major and little-endian, decoded by zarr-python when it is read; so any codec that zarr
knows is read, from any store. zarr-python is needed for these only.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from math import prod
from threading import Lock
from typing import Any

import numpy as np

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.errors import CkptError, CorruptionError, FormatError, UsageError
from ckptkit.stores.base import Reader, Store, Virtual

_LARGEST = 1 << 32
"""Bytes of one chunk; it is held whole while it is read."""


def need_zarr(file: str, codecs: Sequence[str]) -> None:
    """Raise UsageError where zarr-python, which decodes chunks, is not installed."""
    if find_spec("zarr") is None:
        raise UsageError(
            f"{file}: its chunks went through {', '.join(codecs)}, and the package zarr, which decodes them, is not installed: "
            "pip install 'ckptkit[zarr]', or write the array again with compressors=None",
            file=file,
        )


@dataclass(frozen=True)
class CodedChunk(Virtual):
    """A chunk in a file.

    Attributes:
        file, offset, length: Where its bytes are.
        node: A `zarr.json` of an array that is this chunk alone.
        shape, dtype: Of the chunk, as stored.
    """

    file: str
    offset: int
    length: int
    node: Mapping[str, Any]
    shape: tuple[int, ...]
    dtype: DType

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize

    def identity(self, of: Callable[[str], str]) -> str:
        return f"{of(self.file)} {self.offset}"

    def open(self, store: Store, path: str) -> Reader:
        return _ChunkReader(store, path, self)

    def decoded(self, store: Store) -> bytes:
        """Its elements.

        Raises:
            CorruptionError: zarr cannot decode it, or gives something else than the metadata says.
        """
        import zarr
        from zarr.core.buffer import default_buffer_prototype
        from zarr.storage import MemoryStore

        make = default_buffer_prototype().buffer.from_bytes
        key = "/".join(["c", *("0" for _ in self.shape)])
        data = store.read(self.file, self.offset, self.length)
        held = MemoryStore({"zarr.json": make(json.dumps(self.node).encode()), key: make(data)})
        try:
            array = np.asarray(zarr.open_array(held, mode="r")[...])
            if array.shape != self.shape or array.dtype.itemsize != self.dtype.itemsize:
                raise ValueError(f"it holds {array.dtype} {array.shape}")
            return array.astype(array.dtype.newbyteorder("<"), copy=False).tobytes()
        except CkptError:
            raise
        except Exception as error:  # whatever a codec makes of damaged bytes
            raise CorruptionError(
                f"{self.file} cannot be decoded at {self.offset}: {type(error).__name__}: {str(error)[:200]}. It was damaged, or its "
                "metadata is another array's",
                file=self.file,
            ) from error


@dataclass(frozen=True)
class FilledChunk(Virtual):
    """A chunk that is not there: its elements are `value`, the bytes of one."""

    value: bytes
    count: int

    @property
    def nbytes(self) -> int:
        return self.count * len(self.value)

    def identity(self, of: Callable[[str], str]) -> str:
        return f"fill {self.value.hex()}"

    def open(self, store: Store, path: str) -> Reader:
        return _FillReader(path, self)


class _ChunkReader(Reader):
    """Decodes the chunk once, when it is first read."""

    def __init__(self, store: Store, path: str, chunk: CodedChunk) -> None:
        self.size = chunk.nbytes
        self._store, self._path, self._chunk = store, path, chunk
        self._lock, self._data = Lock(), b""

    def readinto(self, offset: int, buffer: memoryview) -> None:
        with self._lock:
            if not self._data and self.size:
                self._data = self._chunk.decoded(self._store)
        _copy(self._path, self._data, offset, buffer)

    def close(self) -> None:
        self._data = b""


class _FillReader(Reader):
    def __init__(self, path: str, chunk: FilledChunk) -> None:
        self.size = chunk.nbytes
        self._path, self._value = path, chunk.value

    def readinto(self, offset: int, buffer: memoryview) -> None:
        if offset < 0 or offset + buffer.nbytes > self.size:
            raise FormatError(f"{self._path} ends at byte {self.size}", file=self._path)
        width = len(self._value)
        at = offset % width
        out = np.frombuffer(buffer, np.uint8)
        out[:] = np.resize(np.frombuffer(self._value[at:] + self._value[:at], np.uint8), len(out))

    def close(self) -> None:
        pass


def _copy(path: str, data: bytes, offset: int, buffer: memoryview) -> None:
    if offset < 0 or offset + buffer.nbytes > len(data):
        raise FormatError(f"{path} ends at byte {len(data)}, not {offset + buffer.nbytes}", file=path)
    buffer.cast("B")[:] = data[offset : offset + buffer.nbytes]


def check_size(shape: tuple[int, ...], dtype: DType, file: str) -> None:
    """Raise FormatError for chunks that are too large to be decoded at once."""
    if prod(shape) * dtype.itemsize > _LARGEST:
        raise FormatError(
            f"{file}: its coded chunks of {shape} have {prod(shape) * dtype.itemsize} bytes each, more than is decoded at once",
            file=file,
        )


def single(node: Mapping[str, Any], shape: tuple[int, ...], codecs: Sequence[Any]) -> dict[str, Any]:
    """The `zarr.json` of an array that is one chunk of the array of `node`."""
    return {
        "zarr_format": 3, "node_type": "array", "shape": list(shape), "data_type": node["data_type"],
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": node.get("fill_value"), "codecs": list(codecs), "attributes": {}, "storage_transformers": [],
    }  # fmt: skip


def fill_bytes(value: Any, dtype: DType, file: str) -> bytes:
    """The bytes of one element of a fill value, as the specification writes it in JSON.

    Raises:
        FormatError: it is none of this type.
    """
    try:
        if dtype.kind == "c":
            half = BY_NAME[f"float{4 * dtype.itemsize}"]
            real, imaginary = value
            return fill_bytes(real, half, file) + fill_bytes(imaginary, half, file)
        if isinstance(value, str) and value.startswith("0x"):
            return int(value, 16).to_bytes(dtype.itemsize, "little")
        if dtype.kind == "f" and value in ("NaN", "Infinity", "-Infinity"):
            value = float(value.replace("Infinity", "inf"))
        if not isinstance(value, bool | int | float) or isinstance(value, bool) != (dtype.kind == "b"):
            raise ValueError("no value of that type")
        code = "?" if dtype.kind == "b" else f"<{dtype.kind}{dtype.itemsize}"
        return np.asarray(value, np.dtype(code)).tobytes()
    except (ValueError, TypeError, OverflowError) as error:
        raise FormatError(
            f"{file}: its fill value {str(value)[:60]!r} is none of {dtype}: {error}", file=file
        ) from None
