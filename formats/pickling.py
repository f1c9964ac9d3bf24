"""Writing pickles whose names are torch's, without importing torch.

The inverse of `ckptkit.formats.pickles`: plain values and the stand-ins of `ckptkit.formats.standins` become a pickle.
`pickle.Pickler` cannot do it, since it imports every name that it writes. Only names of the stand-ins' table can be written,
so that nothing foreign passes from one checkpoint into another.
"""

import struct
from typing import Any

from ckptkit.core.dtypes import DType
from ckptkit.errors import FormatError
from ckptkit.formats.plain import TensorValue
from ckptkit.formats.standins import STORAGES, Global, Opaque, Ordered, Size, Storage, StoredTensor, lookup

MAX_DEPTH = 200

_STORAGE_OF = {dtype: name for name, dtype in STORAGES.items()}


class Pickled:
    """A pickle and the tensors whose content it does not hold.

    Attributes:
        data: The pickle.
        contents: Bytes of the storages that came with a value (`TensorValue`), by key.
    """

    def __init__(self, data: bytes, contents: dict[str, bytes]) -> None:
        self.data, self.contents = data, contents


def dumps(value: Any, protocol: int = 2, first_key: int = 0) -> Pickled:
    """Pickle a value. Tensors with content get storages with keys from `first_key` on.

    Equal strings and the same containers are written once. Protocol 2 is what `torch.save` writes, 4 what DCP's `.metadata`
    has.

    Raises:
        FormatError: the value is deeper than `MAX_DEPTH`, or holds something that a pickle of ours cannot.
    """
    writer = _Writer(protocol, first_key)
    writer.out += b"\x80" + bytes([protocol])
    writer.put(value, 0)
    writer.out += b"."
    return Pickled(bytes(writer.out), writer.contents)


class _Writer:
    def __init__(self, protocol: int, first_key: int) -> None:
        self.protocol = protocol
        self.next_key = first_key
        self.out = bytearray()
        self.contents: dict[str, bytes] = {}
        self.known: dict[Any, int] = {}
        self.alive: list[Any] = []  # what `known` has by identity must not be freed

    def memo(self, key: Any) -> None:
        index = self.known[key] = len(self.known)
        self.out += bytes((0x71, index)) if index < 256 else b"r" + index.to_bytes(4, "little")

    def again(self, key: Any) -> bool:
        index = self.known.get(key)
        if index is None:
            return False
        self.out += bytes((0x68, index)) if index < 256 else b"j" + index.to_bytes(4, "little")
        return True

    def put(self, value: Any, depth: int) -> None:
        """Append one value."""
        if depth > MAX_DEPTH:
            raise FormatError(f"a value is nested deeper than {MAX_DEPTH}; such state cannot be carried over")
        kind = type(value)
        if value is None:
            self.out += b"N"
        elif kind is bool:
            self.out += b"\x88" if value else b"\x89"
        elif kind is int:
            self.integer(value)
        elif kind is float:
            self.out += b"G" + struct.pack(">d", value)
        elif kind is str:
            self.text(value)
        elif kind is bytes or kind is bytearray:
            self.octets(bytes(value))
        elif kind is DType:
            self.name("torch", value.name)
        elif kind is Global:
            self.name(value.module, value.name)
        elif kind is StoredTensor:
            self.tensor(value)
        elif kind is TensorValue:
            storage = Storage(str(self.next_key), value.dtype, len(value.data))
            self.contents[storage.key] = value.data
            self.next_key += 1
            strides = [1] * len(value.shape)
            for axis in range(len(strides) - 2, -1, -1):
                strides[axis] = strides[axis + 1] * value.shape[axis + 1]
            self.tensor(StoredTensor(storage, value.dtype, 0, value.shape, tuple(strides)))
        elif kind is complex:
            self.name("builtins", "complex")
            self.put((value.real, value.imag), depth + 1)
            self.out += b"R"
        else:
            self.container(value, kind, depth)

    def container(self, value: Any, kind: type, depth: int) -> None:
        if kind is tuple and all(type(item) is int for item in value):
            self.tuple(value, depth)
            return
        key = ("at", id(value))
        if self.again(key):
            return
        self.alive.append(value)
        if kind is tuple:
            self.tuple(value, depth)
            self.memo(key)
        elif kind is Size:
            self.name("torch", "Size")
            self.tuple((tuple(value),), depth)
            self.out += b"R"
            self.memo(key)
        elif kind is list:
            self.out += b"]"
            self.memo(key)
            if value:
                self.out += b"("
                for item in value:
                    self.put(item, depth + 1)
                self.out += b"e"
        elif kind is dict or kind is Ordered:
            if kind is Ordered:
                self.name("collections", "OrderedDict")
                self.out += b")R"
            else:
                self.out += b"}"
            self.memo(key)
            if value:
                self.out += b"("
                for name, item in value.items():
                    self.put(name, depth + 1)
                    self.put(item, depth + 1)
                self.out += b"u"
            if kind is Ordered and value.attributes is not None:
                self.put(value.attributes, depth + 1)
                self.out += b"b"
        elif kind is Opaque:
            self.name(value.cls.module, value.cls.name)
            self.tuple(value.args, depth)
            self.out += b"\x81" if value.new else b"R"
            self.memo(key)
            if value.state is not None:
                self.put(value.state, depth + 1)
                self.out += b"b"
        elif kind is set or kind is frozenset:
            self.name("builtins", kind.__name__)
            self.put((list(value),), depth)
            self.out += b"R"
            self.memo(key)
        else:
            raise FormatError(f"a {kind.__name__} cannot be written into a checkpoint of this format")

    def tuple(self, items: tuple[Any, ...], depth: int) -> None:
        if len(items) > 3:
            self.out += b"("
        for item in items:
            self.put(item, depth + 1)
        self.out += b")\x85\x86\x87"[len(items) : len(items) + 1] if len(items) < 4 else b"t"

    def integer(self, value: int) -> None:
        if 0 <= value < 1 << 8:
            self.out += bytes((0x4B, value))
        elif 0 <= value < 1 << 16:
            self.out += b"M" + value.to_bytes(2, "little")
        elif -(1 << 31) <= value < 1 << 31:
            self.out += b"J" + value.to_bytes(4, "little", signed=True)
        else:
            data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
            if len(data) > 255:
                raise FormatError(
                    f"an integer of {value.bit_length()} bits cannot be written into a checkpoint"
                )
            self.out += bytes((0x8A, len(data))) + data

    def text(self, value: str) -> None:
        if self.again(value):
            return
        data = value.encode("utf-8", "surrogatepass")
        self.out += b"X" + len(data).to_bytes(4, "little") + data
        self.memo(value)

    def octets(self, value: bytes) -> None:
        if self.protocol >= 3:
            self.out += b"B" + len(value).to_bytes(4, "little") + value
            return
        # Protocol 2 has no opcode for bytes; this is how Python itself writes them.
        self.name("_codecs", "encode")
        self.put((value.decode("latin1"), "latin1"), 0)
        self.out += b"R"

    def name(self, module: str, name: str) -> None:
        if self.again((module, name)):
            return
        lookup(module, name)
        self.out += b"c" + module.encode() + b"\n" + name.encode() + b"\n"
        self.memo((module, name))

    def tensor(self, value: StoredTensor) -> None:
        """As `torch._utils` is told to rebuild it: v2 where a storage class tells the element type, else v3."""
        cls = _STORAGE_OF.get(value.dtype.name)
        self.name("torch._utils", "_rebuild_tensor_v2" if cls else "_rebuild_tensor_v3")
        self.out += b"(("
        self.text("storage")
        self.name("torch" if cls else "torch.storage", cls or "UntypedStorage")
        self.text(value.storage.key)
        self.text("cpu")
        self.integer(value.storage.nbytes // value.dtype.itemsize if cls else value.storage.nbytes)
        self.out += b"tQ"
        self.integer(value.offset)
        self.tuple(tuple(value.shape), 0)
        self.tuple(value.strides, 0)
        self.out += b"\x89"
        self.name("collections", "OrderedDict")
        self.out += b")R"
        if not cls:
            self.name("torch", value.dtype.name)
        self.out += b"tR"
