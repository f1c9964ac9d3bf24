"""Stand-ins: what the names in a checkpoint's pickles become, without importing what they name.

A pickle names globals (`torch._utils._rebuild_tensor_v2`, `argparse.Namespace`) and asks the reader to call them. Here a
name is looked up in a table and nothing else: a few have a rule that builds plain data (a tensor becomes the description
of a region), the rest become an `Opaque`, which only remembers what was to be called with what. A name outside the table
is an `UnsafeError`. There is no way to allow more than the table: nothing that a checkpoint needs is missing from it.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.errors import FormatError, UnsafeError


class Global:
    """A name in the table. `call` builds plain data from arguments; where it is None, calls give an `Opaque`."""

    __slots__ = ("call", "module", "name")

    def __init__(self, module: str, name: str, call: Callable[..., Any] | None = None) -> None:
        self.module, self.name, self.call = module, name, call

    def __repr__(self) -> str:
        return f"{self.module}.{self.name}"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Global) and (self.module, self.name) == (other.module, other.name)

    def __hash__(self) -> int:
        return hash((self.module, self.name))


class Opaque:
    """An object that was not built: the name of its class, its arguments, and the state it was to be given.

    `new` tells `cls.__new__(*args)` from `cls(*args)`. `state` is None where there is none. Equal by identity.
    """

    __slots__ = ("args", "cls", "new", "state")

    def __init__(self, cls: Global, args: tuple[Any, ...] = (), state: Any = None, new: bool = False) -> None:
        self.cls, self.args, self.state, self.new = cls, args, state, new

    def __repr__(self) -> str:
        return f"<{self.cls}>"

    def is_a(self, *names: str) -> bool:
        """Whether the class has one of these names, whatever its module."""
        return self.cls.name in names

    @property
    def attributes(self) -> dict[str, Any]:
        """The state as attributes: plain objects and named tuples of `(dict, slots)` have them."""
        state = self.state
        if isinstance(state, tuple) and len(state) == 2:
            state = {**(state[0] or {}), **(state[1] or {})}
        return state if isinstance(state, dict) else {}


class Size(tuple[int, ...]):
    """A `torch.Size`: a tuple that is written back under its name."""

    __slots__ = ()


class Ordered(dict[Any, Any]):
    """An `OrderedDict`; `attributes` is what module state dicts hang on it (`_metadata`)."""

    __slots__ = ("attributes",)

    def __init__(self, pairs: Any = ()) -> None:
        super().__init__(pairs)
        self.attributes: Any = None


@dataclass(frozen=True, slots=True)
class Storage:
    """Bytes that a pickle refers to by key: `data/<key>` of its zip. `dtype` is None for untyped storages."""

    key: str
    dtype: DType | None
    nbytes: int


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor that lies in a storage. `offset` and `strides` count elements."""

    storage: Storage
    dtype: DType
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @property
    def size(self) -> int:
        return prod(self.shape)

    @property
    def span(self) -> int:
        """Elements from the first to one past the last; 0 for a tensor without elements."""
        if 0 in self.shape:
            return 0
        return 1 + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))

    @property
    def contiguous(self) -> bool:
        step = 1
        for n, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if n != 1 and stride != step:
                return 0 in self.shape
            step *= n
        return True


STORAGES: dict[str, str] = {
    "DoubleStorage": "float64", "FloatStorage": "float32", "HalfStorage": "float16", "BFloat16Storage": "bfloat16",
    "LongStorage": "int64", "IntStorage": "int32", "ShortStorage": "int16", "CharStorage": "int8",
    "ByteStorage": "uint8", "BoolStorage": "bool", "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}  # fmt: skip
"""Storage classes by the element type that they tell; other element types use `UntypedStorage`."""


def tensor(storage: Any, offset: Any, shape: Any, strides: Any, dtype: DType | None = None) -> StoredTensor:
    """The tensor that a rebuild function was asked for. Raises FormatError when it leaves its storage."""
    kind = dtype or (storage.dtype if isinstance(storage, Storage) else None)
    ints = (offset, *shape, *strides) if isinstance(shape, tuple) and isinstance(strides, tuple) else (-1,)
    if kind is None or len(ints) != 1 + 2 * len(shape) or any(type(n) is not int or n < 0 for n in ints):
        raise FormatError(
            f"a tensor is described by {_short((storage, offset, shape, strides))}, which is no region"
        )
    found = StoredTensor(storage, kind, offset, tuple(shape), tuple(strides))
    if (found.offset + found.span) * kind.itemsize > storage.nbytes:
        raise FormatError(
            f"a {kind} tensor of shape {found.shape} at element {found.offset} ends {found.offset + found.span} elements "
            f"into storage {storage.key!r}, which has {storage.nbytes} bytes"
        )
    return found


def _tensor_v2(storage: Any, offset: Any, shape: Any, strides: Any, *_: Any) -> StoredTensor:
    return tensor(storage, offset, shape, strides)


def _tensor_v3(
    storage: Any, offset: Any, shape: Any, strides: Any, grad: Any, hooks: Any, dtype: Any, *_: Any
) -> Any:
    if not isinstance(dtype, DType):
        raise FormatError(f"a tensor's dtype is {_short(dtype)}")
    return tensor(storage, offset, shape, strides, dtype)


def _parameter(data: Any, *_: Any) -> StoredTensor:
    if not isinstance(data, StoredTensor):
        raise FormatError(f"a parameter is made of {_short(data)}, not of a tensor")
    return data


def _from_type(function: Any, kind: Any, args: Any, state: Any = None) -> StoredTensor:
    """A tensor with attributes or of a subclass; both are left aside."""
    if (
        not isinstance(function, Global)
        or function.call not in (_tensor_v2, _tensor_v3)
        or type(args) is not tuple
    ):
        raise UnsafeError(f"a tensor is to be rebuilt by {_short(function)}, which is not allowed")
    return function.call(*args)


def _encode(text: Any, encoding: Any = "latin1") -> bytes:
    """How protocol 2 writes bytes."""
    if type(text) is not str or encoding not in ("latin1", "latin-1"):
        raise FormatError(f"bytes are written as {_short(text)} in encoding {_short(encoding)}")
    return text.encode("latin1")


def _bytearray(data: Any = b"", encoding: Any = "latin1") -> bytes:
    return _encode(data, encoding) if isinstance(data, str) else bytes(_typed(data, bytes))


def _size(items: Any = ()) -> Size:
    items = tuple(_typed(items, tuple, list))
    if any(type(n) is not int for n in items):
        raise FormatError(f"a torch.Size holds {_short(items)}")
    return Size(items)


def _ordered(items: Any = ()) -> Ordered:
    pairs = _typed(items, list, tuple)
    if any(not isinstance(pair, list | tuple) or len(pair) != 2 or not hashable(pair[0]) for pair in pairs):
        raise FormatError("an OrderedDict is made of something else than pairs")
    return Ordered(pairs)


def _defaultdict(factory: Any = None) -> Ordered:
    return Ordered()


def _set(items: Any = ()) -> set[Any]:
    found = _typed(items, list, tuple)
    if not all(map(hashable, found)):
        raise FormatError("a set holds something that cannot be in one")
    return set(found)


def _frozenset(items: Any = ()) -> frozenset[Any]:
    return frozenset(_set(items))


def _complex(real: Any = 0.0, imaginary: Any = 0.0) -> complex:
    return complex(_typed(real, int, float), _typed(imaginary, int, float))


def _reconstructor(cls: Any, base: Any, state: Any) -> Opaque:
    """How protocols 0 and 1 make a plain object."""
    if (
        not isinstance(cls, Global)
        or not isinstance(base, Global)
        or base.name != "object"
        or state is not None
    ):
        raise UnsafeError(f"{_short(cls)} is to be made from {_short(base)}, which is not allowed")
    return Opaque(cls, new=True)


def _typed(value: Any, *types: type) -> Any:
    if not isinstance(value, types):
        raise FormatError(f"expected {' or '.join(t.__name__ for t in types)}, found {_short(value)}")
    return value


def _short(value: Any) -> str:
    """A value in a message: never its content, which may be deep or long."""
    return repr(value) if isinstance(value, Global | Opaque | int) else type(value).__name__


_SCALARS = (str, int, float, bytes, bool, type(None), DType, Global, Opaque, complex)


def hashable(key: Any, depth: int = 3) -> bool:
    """Whether a value may be a key: a scalar, or a tuple at most three deep. Deeper ones could exhaust the stack."""
    if type(key) in _SCALARS:
        return True
    return isinstance(key, tuple) and depth > 0 and all(hashable(part, depth - 1) for part in key)


RULES: dict[tuple[str, str], Callable[..., Any]] = {
    ("collections", "OrderedDict"): _ordered,
    ("collections", "defaultdict"): _defaultdict,
    ("torch", "Size"): _size,
    ("torch._utils", "_rebuild_tensor_v2"): _tensor_v2,
    ("torch._utils", "_rebuild_tensor_v3"): _tensor_v3,
    ("torch._utils", "_rebuild_parameter"): _parameter,
    ("torch._utils", "_rebuild_parameter_with_state"): _parameter,
    ("torch._tensor", "_rebuild_from_type_v2"): _from_type,
    ("_codecs", "encode"): _encode,
    ("copyreg", "_reconstructor"): _reconstructor,
    ("builtins", "bytearray"): _bytearray,
    ("builtins", "bytes"): _bytearray,
    ("builtins", "set"): _set,
    ("builtins", "frozenset"): _frozenset,
    ("builtins", "complex"): _complex,
}
"""Names that become plain data."""

_NUMPY = ("numpy.core.multiarray", "numpy._core.multiarray")
_NAMES: dict[str, str] = {
    "_io": "BytesIO",
    "builtins": "object dict list int float str bool tuple slice",
    "argparse": "Namespace",
    "collections": "Counter deque",
    "types": "SimpleNamespace",
    "datetime": "datetime date timedelta timezone",
    "functools": "partial",
    "pathlib": "PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "pathlib._local": "PosixPath WindowsPath PurePosixPath PureWindowsPath",
    "signal": "Signals",
    "uuid": "UUID",
    "numpy": "dtype ndarray",
    **{module: "_reconstruct scalar" for module in _NUMPY},
    "numpy.core.numeric": "_frombuffer",
    "numpy._core.numeric": "_frombuffer",
    "numpy.random._pickle": "__randomstate_ctor __generator_ctor __bit_generator_ctor",
    "numpy.random._mt19937": "MT19937",
    "numpy.random._pcg64": "PCG64",
    "torch": "Tensor device Generator " + " ".join(STORAGES),
    "torch.cuda": " ".join(STORAGES),
    "torch.nn.parameter": "Parameter",
    "torch.nn.functional": "gelu silu relu sigmoid tanh softmax",
    "torch.storage": "UntypedStorage TypedStorage _UntypedStorage",
    "torch.serialization": "_get_layout",
    "torch.distributed.checkpoint.metadata": "Metadata TensorStorageMetadata BytesStorageMetadata ChunkStorageMetadata "
    "TensorProperties MetadataIndex StorageMeta _MEM_FORMAT_ENCODING",
    "torch.distributed._shard.sharded_tensor.metadata": "TensorProperties MEM_FORMAT_ENCODING",  # before torch 2.3
    "torch.distributed.checkpoint.filesystem": "_StorageInfo",
    "deepspeed.utils.tensor_fragment": "fragment_address",
    "torch.distributed.checkpoint.planner": "SavePlan WriteItem WriteItemType TensorWriteData BytesIOWriteData",
}
"""Names that become an `Opaque`, by module."""

_PACKAGES = (
    "megatron.", "transformer_engine.", "deepspeed.", "apex.", "modelopt.", "bytecheckpoint.", "omegaconf.", "lightning.",
    "pytorch_lightning.", "transformers.", "accelerate.", "torchtitan.", "nemo.",
)  # fmt: skip
"""Packages whose classes become an `Opaque`: configuration objects, enumerations, loss scalers."""

_RENAMED = {"__builtin__": "builtins", "copy_reg": "copyreg"}


def lookup(module: str, name: str) -> Global | DType:
    """What a name stands for: an element type, or a `Global`.

    Raises:
        UnsafeError: the name is outside the table.
    """
    module = _RENAMED.get(module, module)
    if module == "torch" and name in BY_NAME:
        return BY_NAME[name]
    rule = RULES.get((module, name))
    if rule is not None:
        return Global(module, name, rule)
    if name in _NAMES.get(module, "").split():
        return Global(module, name)
    # Within a package only classes are let in: functions have no place in data, and a path through attributes
    # (`enums.os.system`) would reach modules that the package itself imports.
    if f"{module}.".startswith(_PACKAGES) and all(part.lstrip("_")[:1].isupper() for part in name.split(".")):
        return Global(module, name)
    module_itself = module.startswith("torch.nn.modules.")
    hint = (
        "It holds a whole module: save its state_dict()"
        if module_itself
        else "Re-save the checkpoint without that object"
    )
    raise UnsafeError(
        f"the pickle asks for {module[:80]}.{name[:80]}, which is not data that checkpoints hold; nothing was run. "
        f"{hint}: ckptkit has no option to run foreign code",
        name=f"{module}.{name}",
    )
