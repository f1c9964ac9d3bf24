"""The reader and the writer of pickles, against CPython's and torch's own, and against hostile input."""

import argparse
import collections
import contextlib
import io
import os
import pickle
import random
import struct
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ckptkit.errors import CkptError, FormatError, UnsafeError
from ckptkit.formats import pickles
from ckptkit.formats.pickling import dumps
from ckptkit.formats.plain import from_plain, to_plain
from ckptkit.formats.standins import Global, Opaque, Ordered, StoredTensor

scalars = (
    st.none()
    | st.booleans()
    | st.integers(-(1 << 200), 1 << 200)
    | st.floats(allow_nan=False)
    | st.text(max_size=20)
    | st.binary(max_size=300)
)
keys = st.text(max_size=8) | st.integers() | st.tuples(st.integers(), st.text(max_size=3))
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=5)
        | st.dictionaries(keys, inner, max_size=5)
        | st.tuples(inner)
        | st.tuples(inner, inner, inner, inner)
        | st.sets(st.integers(), max_size=4)
    ),
    max_leaves=25,
)


def no_tensors(tensor: StoredTensor) -> bytes:
    raise AssertionError("no tensor expected")


@given(values, st.integers(2, 5))
@settings(max_examples=150, deadline=None)
def test_plain_values_read_as_cpython_reads_them(value: Any, protocol: int) -> None:
    """Whatever pickle writes of plain values, in each protocol, comes back equal."""
    assert pickles.loads(pickle.dumps(value, protocol), "x") == value


@given(values, st.sampled_from([2, 4]))
@settings(max_examples=100, deadline=None)
def test_written_values_are_read_by_cpython(value: Any, protocol: int) -> None:
    """CPython's own unpickler gives back what was written."""
    assert pickle.loads(dumps(value, protocol).data) == value


@given(values)
@settings(max_examples=100, deadline=None)
def test_plain_json_is_reversible(value: Any) -> None:
    """Values become JSON and come back with their types."""
    assert from_plain(to_plain(value, no_tensors)) == value


def test_shared_and_cyclic_values_are_read_once() -> None:
    """A list that is used twice stays one list, and one that contains itself does not hang."""
    shared: list[Any] = [1]
    shared.append(shared)

    found = pickles.loads(pickle.dumps({"a": shared, "b": shared}), "x")

    assert found["a"] is found["b"]
    assert found["a"][1] is found["a"]
    with pytest.raises(FormatError, match="nested deeper"):
        to_plain(found, no_tensors)


def test_known_objects_are_kept_without_being_made(tmp_path: Path) -> None:
    """A namespace, an enumeration's member, a path and numpy values become stand-ins that remember what they were."""
    value = {
        "args": argparse.Namespace(lr=0.1, path=Path("/data")),
        "state": np.arange(4, dtype=np.uint32),
        "lr": np.float64(0.25),
        "odict": collections.OrderedDict(a=1),
        "default": collections.defaultdict(list, {1: [2]}),
        "milestones": collections.Counter([30, 60, 60]),
    }

    found = pickles.loads(pickle.dumps(value, 2), "x")

    assert isinstance(found["args"], Opaque)
    assert found["args"].attributes["lr"] == 0.1
    assert found["odict"] == {"a": 1} and isinstance(found["odict"], Ordered)
    assert found["default"] == {1: [2]}
    assert to_plain(found["lr"], no_tensors) == 0.25


@pytest.mark.parametrize("protocol", [2, 4])
def test_kept_objects_are_written_back_unchanged(protocol: int) -> None:
    """What stood for an object gives the object again, through JSON too."""
    value = {
        "args": argparse.Namespace(lr=0.1, betas=(0.9, 0.95), path=Path("/data"), dtype=torch.bfloat16),
        "rng": np.random.RandomState(3).get_state(),
        "python": random.Random(4).getstate(),
        "size": torch.Size([2, 3]),
    }
    read = pickles.loads(pickle.dumps(value, protocol), "x")

    again = pickle.loads(dumps(from_plain(to_plain(read, no_tensors)), protocol).data)

    assert again["args"] == value["args"]
    assert again["python"] == value["python"] and again["size"] == value["size"]
    assert again["rng"][0] == "MT19937" and np.array_equal(again["rng"][1], value["rng"][1])  # type: ignore[index]


class _Evil:
    def __init__(self, function: Any, *args: Any) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> Any:
        return self.function, self.args


@pytest.mark.parametrize(
    "function", [os.system, eval, exec, open, getattr, __import__, os.remove, pickle.loads]
)
@pytest.mark.parametrize("protocol", [2, 4])
def test_foreign_functions_are_refused_by_name_and_not_run(
    function: Any, protocol: int, tmp_path: Path
) -> None:
    """A call hidden in optimizer state is refused, with its name in the message; nothing happens."""
    target = tmp_path / "ran"
    state = {"state": {0: {"exp_avg": [_Evil(function, f"touch {target}")]}}}

    with pytest.raises(UnsafeError, match=function.__name__):
        pickles.loads(pickle.dumps(state, protocol), "model.pt")

    assert not target.exists()


@pytest.mark.parametrize(
    "module, name",
    [
        ("torch", "serialization.os.system"), ("megatron.core.enums", "os.system"), ("megatron.core.utils", "run"),
        ("posix", "system"), ("builtins", "eval"), ("torch", "load"), ("torch.hub", "load"), ("numpy", "load"),
        ("functools", "reduce"), ("torch._utils", "_rebuild_tensor_v2.__globals__"), ("megatron", "core"),
        ("deepspeed.os", "system"), ("__main__", "Config"), ("collections", "ChainMap"), ("transformers.utils", "run"), ("omegaconf.os", "system"),
    ],
)  # fmt: skip
def test_names_outside_the_table_are_refused(module: str, name: str) -> None:
    """Neither attributes of allowed modules nor lower-case names of known packages get through."""
    short = b"\x80\x04" + b"".join(b"\x8c" + bytes([len(t)]) + t.encode() for t in (module, name)) + b"\x93."

    with pytest.raises(UnsafeError, match="ckptkit has no option to run foreign code"):
        pickles.loads(short, "x")


def _pickle(*parts: bytes) -> bytes:
    return b"\x80\x02" + b"".join(parts) + b"."


def deep_tuple(levels: int) -> bytes:
    return b"K\x01" + b"\x85" * levels


@pytest.mark.parametrize(
    "data, error",
    [
        (_pickle(b"N", b"r\xff\xff\xff\xff"), None),  # a memo index of 2^32 allocates nothing here
        (_pickle(b"}", deep_tuple(100_000), b"Ns"), FormatError),  # hashing it would exhaust the stack
        (_pickle(b"(" * 100_000), FormatError),
        (_pickle(b"(", deep_tuple(100_000), b"\x91"), FormatError),
        (_pickle(b"\x8e" + struct.pack("<Q", 1 << 60)), FormatError),
        (_pickle(b"B\xff\xff\xff\xff"), FormatError),
        (_pickle(b"\x95" + struct.pack("<Q", 1 << 60)), FormatError),
        (_pickle(b"\x82\x01"), UnsafeError),  # EXT1
        (_pickle(b"(S'x'\nios\nsystem\n"), UnsafeError),  # STRING, INST
        (_pickle(b"(c__builtin__\neval\no"), UnsafeError),  # OBJ
        (_pickle(b"\x97"), UnsafeError),  # NEXT_BUFFER
        (_pickle(b"K\x01)R"), UnsafeError),  # calls a number
        (_pickle(b"]}b"), UnsafeError),  # state of a list
        (_pickle(b"ctorch\nTensor\n}b"), UnsafeError),  # state of a class
        (_pickle(b"X\x01\x00\x00\x00aK\x01a"), UnsafeError),  # appends to a text
        (_pickle(b"K\x01Q"), UnsafeError),  # a foreign persistent id
        (_pickle(b"}]Ns"), FormatError),  # a list as a key
        (_pickle(b"("), FormatError),
        (b"\x80\x09N.", FormatError),
        (b"", FormatError),
        (b"garbage", CkptError),
    ],
)
def test_hostile_opcodes_are_refused(data: bytes, error: type[CkptError] | None) -> None:
    """Each trick gives a clear error, or plain data; never a crash, a call or a large allocation."""
    if error is None:
        assert pickles.loads(data, "x") is None
    else:
        with pytest.raises(error):
            pickles.loads(data, "x")


@given(st.binary(max_size=200))
@settings(max_examples=300, deadline=None)
def test_random_bytes_give_a_value_or_one_of_our_errors(data: bytes) -> None:
    """No input leads to another exception."""
    with contextlib.suppress(CkptError):
        pickles.loads(b"\x80\x04" + data, "x")


@given(st.integers(0, 400), st.integers(0, 255))
@settings(max_examples=150, deadline=None)
def test_a_flipped_byte_gives_a_value_or_one_of_our_errors(position: int, byte: int) -> None:
    """Damage of a real pickle is an error of ours, or a different value; never another exception."""
    data = bytearray(
        pickle.dumps(
            {"a": argparse.Namespace(x=[1, (2, 3)], y={"z": np.float32(1)}), "b": torch.Size([1])}, 2
        )
    )
    data[position % len(data)] = byte
    with contextlib.suppress(CkptError):
        pickles.loads(bytes(data), "x")


def test_shared_values_cannot_explode_when_written_out() -> None:
    """Thirty lists, each holding the one before twice, have 2^30 leaves; JSON of them is refused."""
    value: Any = []
    for _ in range(30):
        value = [value, value]
    read = pickles.loads(pickle.dumps(value), "x")

    with pytest.raises(FormatError, match="cannot be carried over"):
        to_plain(read, no_tensors)


def test_json_cannot_bring_in_a_foreign_name() -> None:
    """Extras of an untrusted checkpoint must not end in a pickle of ours as a call."""
    with pytest.raises(UnsafeError, match=r"os\.system"):
        from_plain({"$": "object", "class": ["os", "system"], "args": ["id"], "state": None, "new": False})
    with pytest.raises(UnsafeError, match="posix"):
        dumps(Opaque(Global("posix", "system"), ("id",)))


def test_tensors_keep_views_and_shared_storages() -> None:
    """A transposed slice and its base name one storage, with the strides and offset that torch has."""
    base = torch.arange(60.0).reshape(6, 10)
    view = base[1:4, ::3].t()
    storage = base.untyped_storage()

    out = io.BytesIO()
    torch.save({"base": base, "view": view, "parameter": torch.nn.Parameter(base)}, out)
    with zipfile.ZipFile(out) as file:
        found = pickles.loads(file.read("archive/data.pkl"), "x")

    assert found["view"].storage == found["base"].storage == found["parameter"].storage
    assert found["base"].storage.nbytes == storage.nbytes()
    for name, tensor in (("base", base), ("view", view)):
        assert (found[name].offset, found[name].shape, found[name].strides) == (
            tensor.storage_offset(), tuple(tensor.shape), tensor.stride(),
        )  # fmt: skip


@pytest.mark.parametrize(
    "offset, shape, strides",
    [(1, (4,), (1,)), (0, (2, 3), (3, 1)), (0, (2,), (4,)), (0, (1 << 62, 4), (1, 1)), (-1, (1,), (1,))],
)
def test_a_tensor_outside_its_storage_is_refused(
    offset: int, shape: tuple[int, ...], strides: tuple[int, ...]
) -> None:
    """Sizes and strides that leave the four stored elements are an error, whatever they multiply to."""
    storage = b"(X\x07\x00\x00\x00storagectorch\nFloatStorage\nX\x01\x00\x00\x000X\x03\x00\x00\x00cpuK\x04tQ"
    tail = b"ctorch._utils\n_rebuild_tensor_v2\n(" + storage
    numbers = b"".join(pickle.dumps(part, 2)[2:-1] for part in (offset, shape, strides))

    with pytest.raises(FormatError):
        pickles.loads(b"\x80\x02" + tail + numbers + b"\x89NtR.", "x")
