"""The one reader of pickles: a machine that builds data and calls nothing.

It runs the opcodes of protocols 2 to 5 on plain Python values. Names become the stand-ins of `ckptkit.formats.standins`;
a call of a name either builds plain data by a rule of ours or is remembered as an `Opaque`. `pickle.Unpickler` is not used,
since a ten-byte pickle can make it allocate its memo of 32 GiB, hash a tuple until the stack overflows, or set attributes
of the classes that it is given.

What is read has at most as many values as the pickle has bytes, but it may be deep, and values may be shared or contain
themselves: walk it with `ckptkit.formats.plain`, which has limits, and never by recursion.

Source of the opcodes: CPython, `Lib/pickletools.py`.
"""

import pickletools
import struct
from collections.abc import Callable
from typing import Any

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.errors import FormatError, UnsafeError
from ckptkit.formats.standins import (
    STORAGES,
    Global,
    Opaque,
    Ordered,
    Storage,
    StoredTensor,
    hashable,
    lookup,
)

LIMIT = 1 << 30
"""Largest pickle that is read, in bytes. The index of a checkpoint with a million chunks has about 200 MB."""

MAX_MARKS = 1000
"""How deep unfinished containers may be nested."""

_FLOAT = struct.Struct(">d").unpack_from
_I32 = struct.Struct("<i").unpack_from
_U16 = struct.Struct("<H").unpack_from
_U32 = struct.Struct("<I").unpack_from
_U64 = struct.Struct("<Q").unpack_from


def loads(data: bytes, where: str) -> Any:
    """The value that a pickle describes. `where` names the file in messages.

    Nothing is imported, called or allocated beyond what the pickle's own size pays for. Time: about 0.3 µs an opcode.

    Raises:
        UnsafeError: it asks for a name outside the table of stand-ins, or uses an opcode that only code needs.
        FormatError: it is damaged or larger than `LIMIT`.
    """
    if len(data) > LIMIT:
        raise FormatError(f"{where}: a pickle of {len(data)} bytes; more than {LIMIT} are not read")
    try:
        return _run(data)
    except UnsafeError as error:
        raise UnsafeError(f"{where}: {error}", **error.facts) from None
    except FormatError as error:
        raise FormatError(f"{where}: {error}", **error.facts) from None
    except (IndexError, KeyError, ValueError, TypeError, OverflowError, struct.error, MemoryError) as error:
        raise FormatError(
            f"{where}: damaged pickle ({type(error).__name__}). Restore the file from another copy"
        ) from error


def _run(data: bytes) -> Any:
    """The machine. One function with local variables, since an index has millions of opcodes; tests of opcodes are
    ordered by how often they occur in one."""
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[int, Any] = {}
    names: dict[tuple[str, str], Global | DType] = {}
    storages: dict[str, Storage] = {}
    push, pop = stack.append, stack.pop
    end = len(data)
    at = 0
    while True:
        op = data[at]
        at += 1
        if op == 0x94:  # MEMOIZE
            memo[len(memo)] = stack[-1]
        elif op == 0x68:  # BINGET
            push(memo[data[at]])
            at += 1
        elif op == 0x6A:  # LONG_BINGET
            push(memo[_U32(data, at)[0]])
            at += 4
        elif op == 0x71:  # BINPUT
            memo[data[at]] = stack[-1]
            at += 1
        elif op == 0x72:  # LONG_BINPUT
            memo[_U32(data, at)[0]] = stack[-1]
            at += 4
        elif op == 0x4B:  # BININT1
            push(data[at])
            at += 1
        elif op == 0x4D:  # BININT2
            push(_U16(data, at)[0])
            at += 2
        elif op == 0x4A:  # BININT
            push(_I32(data, at)[0])
            at += 4
        elif op == 0x85:  # TUPLE1
            stack[-1] = (stack[-1],)
        elif op == 0x86:  # TUPLE2
            last = pop()
            stack[-1] = (stack[-1], last)
        elif op == 0x87:  # TUPLE3
            last = pop()
            middle = pop()
            stack[-1] = (stack[-1], middle, last)
        elif op == 0x52:  # REDUCE
            args = pop()
            stack[-1] = _call(stack[-1], args)
        elif op == 0x29:  # EMPTY_TUPLE
            push(())
        elif op == 0x81:  # NEWOBJ
            args = pop()
            cls = stack[-1]
            if type(cls) is not Global or type(args) is not tuple:
                raise UnsafeError("the pickle makes an object of what is no class")
            stack[-1] = Opaque(cls, args, None, True) if cls.call is None else cls.call(*args)
        elif op == 0x62:  # BUILD
            state = pop()
            _build(stack[-1], state)
        elif op == 0x28:  # MARK
            marks.append(len(stack))
            if len(marks) > MAX_MARKS:
                raise FormatError(f"the pickle nests more than {MAX_MARKS} containers")
        elif op == 0x74:  # TUPLE
            mark = marks.pop()
            items = tuple(stack[mark:])
            del stack[mark:]
            push(items)
        elif op == 0x4E:  # NONE
            push(None)
        elif op == 0x8C:  # SHORT_BINUNICODE
            stop = at + 1 + data[at]
            push(str(_span(data, at + 1, stop, end), "utf-8", "surrogatepass"))
            at = stop
        elif op == 0x58:  # BINUNICODE
            stop = at + 4 + _U32(data, at)[0]
            push(str(_span(data, at + 4, stop, end), "utf-8", "surrogatepass"))
            at = stop
        elif op == 0x65:  # APPENDS
            mark = marks.pop()
            items_ = stack[mark:]
            del stack[mark:]
            _typed_list(stack[-1]).extend(items_)
        elif op == 0x75:  # SETITEMS
            mark = marks.pop()
            flat = stack[mark:]
            del stack[mark:]
            target = _typed_dict(stack[-1])
            if len(flat) % 2:
                raise FormatError("damaged pickle: a dictionary with a key but no value")
            for index in range(0, len(flat), 2):
                key = flat[index]
                if type(key) is not str and not hashable(key):
                    raise FormatError(f"the pickle has a {type(key).__name__} as a key")
                target[key] = flat[index + 1]
        elif op == 0x7D:  # EMPTY_DICT
            push({})
        elif op == 0x5D:  # EMPTY_LIST
            push([])
        elif op == 0x88:  # NEWTRUE
            push(True)
        elif op == 0x89:  # NEWFALSE
            push(False)
        elif op == 0x47:  # BINFLOAT
            push(_FLOAT(data, at)[0])
            at += 8
        elif op == 0x8A:  # LONG1
            stop = at + 1 + data[at]
            push(int.from_bytes(_span(data, at + 1, stop, end), "little", signed=True))
            at = stop
        elif op == 0x73:  # SETITEM
            value = pop()
            key = pop()
            if not hashable(key):
                raise FormatError(f"the pickle has a {type(key).__name__} as a key")
            _typed_dict(stack[-1])[key] = value
        elif op == 0x61:  # APPEND
            value = pop()
            _typed_list(stack[-1]).append(value)
        elif op == 0x51:  # BINPERSID
            stack[-1] = _storage(stack[-1], storages)
        elif op == 0x63 or op == 0x93:  # GLOBAL, STACK_GLOBAL
            if op == 0x63:
                middle_ = data.index(b"\n", at)
                stop = data.index(b"\n", middle_ + 1)
                module, name = str(data[at:middle_], "utf-8"), str(data[middle_ + 1 : stop], "utf-8")
                at = stop + 1
            else:
                name = pop()
                module = pop()
                if type(name) is not str or type(module) is not str:
                    raise FormatError("damaged pickle: a name that is no text")
            found = names.get((module, name))
            if found is None:
                found = names[module, name] = lookup(module, name)
            push(found)
        elif op == 0x2E:  # STOP
            if len(stack) != 1 or marks:
                raise FormatError("damaged pickle: it ends with unfinished values")
            return stack[0]
        elif op == 0x95:  # FRAME
            if _U64(data, at)[0] > end - at - 8:
                raise FormatError("damaged pickle: a frame reaches past its end")
            at += 8
        elif op == 0x80:  # PROTO
            if data[at] > 5:
                raise FormatError(f"pickle protocol {data[at]} is not known")
            at += 1
        elif op in _BYTES:
            size, width = _BYTES[op]
            stop = at + width + size(data, at)[0]
            push(bytes(_span(data, at + width, stop, end)))
            at = stop
        elif op == 0x8D:  # BINUNICODE8
            stop = at + 8 + _U64(data, at)[0]
            push(str(_span(data, at + 8, stop, end), "utf-8", "surrogatepass"))
            at = stop
        elif op == 0x8F:  # EMPTY_SET
            push(set())
        elif op == 0x90 or op == 0x91:  # ADDITEMS, FROZENSET
            mark = marks.pop()
            items_ = stack[mark:]
            del stack[mark:]
            if not all(map(hashable, items_)):
                raise FormatError("the pickle has a set of what cannot be in one")
            if op == 0x91:
                push(frozenset(items_))
            elif type(stack[-1]) is set:
                stack[-1].update(items_)
            else:
                raise FormatError(f"the pickle adds items to a {type(stack[-1]).__name__}")
        elif op == 0x32:  # DUP
            push(stack[-1])
        elif op == 0x30:  # POP
            pop()
        elif op == 0x31:  # POP_MARK
            del stack[marks.pop() :]
        else:
            raise UnsafeError(
                f"the pickle uses opcode {_opcode(op)}, which is neither needed for data nor safe; nothing was run"
            )


_BYTES: dict[int, tuple[Callable[[bytes, int], tuple[int]], int]] = {
    0x43: (lambda data, at: (data[at],), 1),  # SHORT_BINBYTES
    0x42: (_U32, 4),  # BINBYTES
    0x8E: (_U64, 8),  # BINBYTES8
    0x96: (_U64, 8),  # BYTEARRAY8
}


def _span(data: bytes, start: int, stop: int, end: int) -> bytes:
    if stop > end:
        raise FormatError(f"damaged pickle: a value of {stop - start} bytes reaches past its end")
    return data[start:stop]


def _call(function: Any, args: Any) -> Any:
    if type(function) is not Global or type(args) is not tuple:
        raise UnsafeError(
            f"the pickle calls a {type(function).__name__}, which is no allowed name; nothing was run"
        )
    return Opaque(function, args) if function.call is None else function.call(*args)


def _build(target: Any, state: Any) -> None:
    """Remember a state. Only stand-ins take one, and once."""
    if type(target) is Opaque and target.state is None:
        target.state = state
    elif type(target) is Ordered:
        target.attributes = state
    elif isinstance(target, Storage):
        raise FormatError("the pickle gives a state to a storage")
    elif not isinstance(target, StoredTensor):  # a tensor's own attributes are left aside
        raise UnsafeError(f"the pickle sets the state of a {type(target).__name__}; nothing was run")


def _typed_list(target: Any) -> list[Any]:
    if type(target) is not list:
        raise UnsafeError(f"the pickle appends to a {type(target).__name__}, which is no list")
    return target


def _typed_dict(target: Any) -> dict[Any, Any]:
    if type(target) is not dict and type(target) is not Ordered:
        raise UnsafeError(f"the pickle sets items of a {type(target).__name__}, which is no dictionary")
    return target


def _storage(key: Any, known: dict[str, Storage]) -> Storage:
    """The storage that a persistent id names: `('storage', class, key, location, elements)`."""
    if type(key) is not tuple or len(key) != 5 or key[0] != "storage":
        raise UnsafeError("the pickle refers to something outside it that is no tensor storage")
    _, cls, name, location, count = key
    if type(name) is not str or type(location) is not str or type(count) is not int or count < 0:
        raise FormatError("damaged pickle: a storage's key, location or size is of the wrong type")
    if type(cls) is not Global or not (cls.name in STORAGES or cls.module == "torch.storage"):
        raise UnsafeError(f"the pickle has a storage of class {cls!r}, which is none")
    dtype = BY_NAME[STORAGES[cls.name]] if cls.name in STORAGES else None
    found = Storage(name, dtype, count * (dtype.itemsize if dtype else 1))
    before = known.setdefault(name, found)
    if before.nbytes != found.nbytes:
        raise FormatError(
            f"storage {name!r} has {before.nbytes} bytes in one place and {found.nbytes} in another"
        )
    return found


def _opcode(op: int) -> str:
    known = pickletools.code2op.get(chr(op))  # type: ignore[attr-defined]
    return known.name if known else f"0x{op:02x}"
