"""Values of pickles as JSON and back, so that extras travel between formats without pickle.

JSON has no tuples, bytes, non-finite floats, element types or objects. Those become `{"$": kind, ...}`:

    {"$": "tuple", "v": [...]}          also size, set, frozenset
    {"$": "bytes", "v": base64}
    {"$": "float", "v": "nan"}
    {"$": "dtype", "v": "bfloat16"}
    {"$": "dict", "v": [[key, value], ...]}         keys that are no text
    {"$": "tensor", "dtype": ..., "shape": [...], "v": base64}
    {"$": "object", "class": [module, name], "args": ..., "state": ..., "new": bool}
    {"$": "name", "v": [module, name]}

Anything else is itself. Objects and names are those of `ckptkit.formats.standins`; others are refused when read back.
"""

import base64
import json
import math
import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ckptkit.core.dtypes import DType, dtype_named
from ckptkit.errors import FormatError
from ckptkit.formats.standins import Global, Opaque, Size, StoredTensor, lookup

MAX_DEPTH = 100
MAX_VALUES = 5_000_000
"""A pickle can share one list in many places; written out, that could grow without end."""


@dataclass(frozen=True, slots=True)
class TensorValue:
    """A small tensor with its content, row-major and little-endian: RNG state, a scalar."""

    dtype: DType
    shape: tuple[int, ...]
    data: bytes


def to_plain(value: Any, content: Callable[[StoredTensor], bytes]) -> Any:
    """A value as JSON. `content` gives a tensor's elements in row-major order.

    Raises:
        FormatError: the value is nested deeper than `MAX_DEPTH`, has more than `MAX_VALUES` parts or an unknown type.
    """
    left = MAX_VALUES

    def plain(value: Any, depth: int) -> Any:
        nonlocal left
        left -= 1
        if depth > MAX_DEPTH or left < 0:
            raise FormatError(
                f"state that is nested deeper than {MAX_DEPTH} or has more than {MAX_VALUES} parts cannot be carried over"
            )
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return value if math.isfinite(value) else {"$": "float", "v": repr(value)}
        if isinstance(value, list):
            return [plain(item, depth + 1) for item in value]
        if isinstance(value, dict):
            if all(type(key) is str for key in value) and "$" not in value:
                return {key: plain(item, depth + 1) for key, item in value.items()}
            return {"$": "dict", "v": [[plain(k, depth + 1), plain(v, depth + 1)] for k, v in value.items()]}
        if isinstance(value, tuple | set | frozenset):
            kind = "size" if isinstance(value, Size) else type(value).__name__
            return {"$": kind, "v": [plain(item, depth + 1) for item in value]}
        if isinstance(value, bytes):
            return {"$": "bytes", "v": base64.b64encode(value).decode()}
        if isinstance(value, DType):
            return {"$": "dtype", "v": value.name}
        if isinstance(value, StoredTensor | TensorValue):
            data = value.data if isinstance(value, TensorValue) else content(value)
            return {
                "$": "tensor", "dtype": value.dtype.name, "shape": list(value.shape), "v": base64.b64encode(data).decode(),
            }  # fmt: skip
        if isinstance(value, Global):
            return {"$": "name", "v": [value.module, value.name]}
        if isinstance(value, Opaque):
            number = numpy_scalar(value)
            if number is not None:
                return plain(number, depth)
            return {
                "$": "object", "class": [value.cls.module, value.cls.name], "args": plain(list(value.args), depth + 1),
                "state": plain(value.state, depth + 1), "new": value.new,
            }  # fmt: skip
        raise FormatError(f"a {type(value).__name__} cannot be carried over")

    return plain(value, 0)


def from_plain(value: Any) -> Any:
    """The value that `to_plain` made JSON of; tensors become `TensorValue`.

    Raises:
        FormatError: it is no such JSON. UnsafeError: it names an object outside the table of stand-ins.
    """
    try:
        return _back(value, 0)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise FormatError(f"extras are damaged: {type(error).__name__}: {error}") from error


def _back(value: Any, depth: int) -> Any:
    if depth > 2 * MAX_DEPTH:
        raise FormatError("extras are nested too deeply")
    if isinstance(value, list):
        return [_back(item, depth + 1) for item in value]
    if not isinstance(value, dict):
        return value
    kind = value.get("$")
    if kind is None:
        return {key: _back(item, depth + 1) for key, item in value.items()}
    if kind == "object":
        cls = lookup(*value["class"])
        if not isinstance(cls, Global):
            raise FormatError("extras are damaged: an object of an element type")
        return Opaque(
            cls, tuple(_back(value["args"], depth + 1)), _back(value["state"], depth + 1), bool(value["new"])
        )
    if kind == "tensor":
        dtype, shape = dtype_named(value["dtype"]), tuple(map(int, value["shape"]))
        data = base64.b64decode(value["v"], validate=True)
        if len(data) != math.prod(shape) * dtype.itemsize:
            raise FormatError(f"extras are damaged: a {dtype} tensor of shape {shape} with {len(data)} bytes")
        return TensorValue(dtype, shape, data)
    inner = value["v"]
    if kind == "dict":
        return {_key(_back(k, depth + 1)): _back(v, depth + 1) for k, v in inner}
    if kind == "bytes":
        return base64.b64decode(inner, validate=True)
    if kind == "float":
        return float(inner)
    if kind == "dtype":
        return dtype_named(inner)
    if kind == "name":
        return lookup(*inner)
    makers: dict[str, Callable[[Any], Any]] = {
        "tuple": tuple,
        "size": Size,
        "set": set,
        "frozenset": frozenset,
    }
    return makers[kind]([_back(item, depth + 1) for item in inner])


def _key(value: Any) -> Any:
    return tuple(map(_key, value)) if isinstance(value, list) else value


def numpy_scalar(value: Opaque) -> int | float | bool | None:
    """The number in a pickled numpy scalar (`numpy.core.multiarray.scalar`), or None for anything else."""
    if not value.is_a("scalar") or len(value.args) != 2 or not isinstance(value.args[0], Opaque):
        return None
    code, data = value.args[0].args[:1], value.args[1]
    formats = {"f8": "d", "f4": "f", "f2": "e", "b1": "?"} | {
        f"{sign}{size}": letter for sign, letters in (("i", "bhiq"), ("u", "BHIQ")) for size, letter in zip((1, 2, 4, 8), letters, strict=True)
    }  # fmt: skip
    letter = formats.get(code[0]) if code and isinstance(code[0], str) else None
    if letter is None or not isinstance(data, bytes) or len(data) != struct.calcsize(letter):
        return None
    return struct.unpack("<" + letter, data)[0]


def scalar(value: Any) -> int | float | bool | None:
    """The number in a plain value: itself, or that of a tensor of one element. None for anything else."""
    if isinstance(value, int | float):
        return value
    if not isinstance(value, dict) or value.get("$") not in ("tensor", "float"):
        return None
    if value["$"] == "float":
        return float(value["v"])
    dtype, data = dtype_named(value["dtype"]), base64.b64decode(value["v"])
    if len(data) != dtype.itemsize:
        return None
    if dtype.name == "bfloat16":
        return float(struct.unpack("<f", b"\0\0" + data)[0])
    letter = {
        "f": {8: "d", 4: "f", 2: "e"},
        "i": {1: "b", 2: "h", 4: "i", 8: "q"},
        "u": {1: "B", 2: "H", 4: "I", 8: "Q"},
        "b": {1: "?"},
    }.get(dtype.kind, {}).get(dtype.itemsize)
    found: int | float | bool | None = struct.unpack("<" + letter, data)[0] if letter else None
    return found


def own_json(text: Any, what: str, file: str = "", /, **more: type) -> dict[str, Any]:
    """What ckptkit noted as JSON in a format that has no place for it.

    Args:
        text: The note as it was found.
        what: What it is, for messages.
        file: The file it is in, where that is known.
        more: Fields of the format's own and their types; those that every note may have are known.

    Raises:
        FormatError: it is no JSON, no object, or a field has another type.
    """
    where = {"file": file} if file else {}
    try:
        found = json.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(f"{what} is no JSON: {error}", **where) from None
    shape = {"common": dict, "by_coordinate": dict, "by_sample": list, "layout": str, "facts": dict, **more}
    if not isinstance(found, dict) or any(
        not isinstance(found[k], t) for k, t in shape.items() if k in found
    ):
        raise FormatError(f"{what} is not what ckptkit writes", **where)
    return found
