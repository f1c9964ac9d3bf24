"""Zips of torch.save: where we say tensors lie and where torch says, and what we write as torch reads it."""

import io
import struct
import zipfile
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from ckptkit.core.dtypes import BY_NAME, TABLE
from ckptkit.errors import CkptError, CorruptionError, FormatError, UnsafeError
from ckptkit.formats.plain import TensorValue
from ckptkit.formats.standins import Storage, StoredTensor
from ckptkit.formats.torch_zip import Archive, open_archive, tensors_of
from ckptkit.formats.torch_zip_writer import Skeleton, skeleton
from ckptkit.stores.base import Reader


class Bytes(Reader):
    """A file in memory."""

    def __init__(self, data: bytes) -> None:
        self.data, self.size = data, len(data)

    def readinto(self, offset: int, buffer: memoryview) -> None:
        buffer[:] = self.data[offset : offset + len(buffer)]

    def close(self) -> None:
        pass


def saved(value: Any) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def opened(data: bytes, start: int = 0, size: int | None = None) -> Archive:
    return open_archive(Bytes(data), "x.pt", start, size)


def sample() -> dict[str, Any]:
    base = torch.arange(60.0).reshape(6, 10)
    return {
        "base": base,
        "view": base[1:4, ::3],
        "t": base.t(),
        "expanded": torch.arange(3.0).expand(4, 3),
        "nested": [torch.tensor(3), {"deep": torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))}],
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(1.5, dtype=torch.float64),
        "large": torch.arange(5000, dtype=torch.int32),
    }


def fill(skeleton: Skeleton, contents: list[bytes], before: int = 0) -> bytes:
    """What the engine makes of a skeleton."""
    out = bytearray(before + skeleton.size)
    for literal in skeleton.literals:
        out[literal.offset : literal.offset + len(literal.data)] = literal.data
    for start, content in zip(skeleton.data, contents, strict=True):
        out[start : start + len(content)] = content
    for fixup in skeleton.fixups:
        for offset in fixup.offsets:
            out[offset : offset + 4] = zlib.crc32(out[fixup.start : fixup.stop]).to_bytes(4, "little")
    return bytes(out)


def test_tensors_lie_where_torch_says(tmp_path: Path) -> None:
    """Offsets equal those that torch.load gives under FakeTensorMode, views and shared storages included."""
    path = tmp_path / "x.pt"
    torch.save(sample(), path)
    with FakeTensorMode():
        fake = torch.load(path)

    archive = opened(path.read_bytes())

    for where, tensor in tensors_of(archive.value):
        real = fake
        for key in where:
            real = real[key]
        first = real.untyped_storage()._checkpoint_offset + real.storage_offset() * real.element_size()
        assert archive.place(tensor) == first, where
        assert (tensor.shape, tensor.strides) == (tuple(real.shape), real.stride())


@pytest.mark.parametrize("before", [0, 1, 1261])
def test_content_is_that_of_the_tensor_inside_a_larger_file(before: int) -> None:
    """An item streamed into a file at any offset gives the same values."""
    value = sample()
    data = saved(value)

    archive = opened(b"\xab" * before + data + b"\xcd" * 100, before, len(data))

    found = {path: archive.content(tensor) for path, tensor in tensors_of(archive.value)}
    assert len(found) == 9
    for path, content in found.items():
        real: Any = value
        for key in path:
            real = real[key]
        assert content == bytes(real.detach().contiguous().flatten().view(torch.uint8).tolist()), path


@pytest.mark.parametrize("dtype", [dtype.name for dtype in TABLE])
def test_every_dtype_is_read_and_written(dtype: str) -> None:
    """Each element type of the table comes back from torch.save, and torch reads it back from us."""
    kind = getattr(torch, dtype)
    content = bytes(range(1, 1 + 3 * BY_NAME[dtype].itemsize)) if dtype != "bool" else bytes([1, 0, 1])
    real = torch.frombuffer(bytearray(content), dtype=torch.uint8).view(kind)

    archive = opened(saved(real))
    assert archive.value.dtype is BY_NAME[dtype] and archive.content(archive.value) == content

    written = fill(
        skeleton(
            StoredTensor(Storage("0", None, len(content)), BY_NAME[dtype], 0, (3,), (1,)), [len(content)]
        ),
        [content],
    )
    again = torch.load(io.BytesIO(written), weights_only=True)
    assert again.dtype is kind and bytes(again.view(torch.uint8).tolist()) == content


@given(
    st.lists(
        st.tuples(
            st.lists(st.integers(0, 4), max_size=3),
            st.sampled_from(["float32", "bfloat16", "int64", "uint8"]),
        ),
        max_size=6,
    ),
    st.integers(0, 200),
    st.text(max_size=40),
)
@settings(max_examples=60, deadline=None)
def test_what_we_write_torch_and_zipfile_read(
    tensors: list[tuple[list[int], str]], start: int, note: str
) -> None:
    """Values, aliases and checksums are right at any offset in a file; torch loads it with weights_only."""
    contents, value = [], {}
    for number, (shape, name) in enumerate(tensors):
        dtype = BY_NAME[name]
        real = torch.arange(torch.Size(shape).numel()).to(getattr(torch, name)).reshape(shape)
        contents.append(bytes(real.flatten().view(torch.uint8).tolist()))
        storage = Storage(str(number), dtype, len(contents[-1]))
        value[f"t{number}"] = StoredTensor(storage, dtype, 0, tuple(shape), real.stride())
        value[f"alias{number}"] = value[f"t{number}"]
    whole = {"tensors": value, "note": note, "rng": TensorValue(BY_NAME["uint8"], (3,), b"abc")}

    data = fill(skeleton(whole, [len(c) for c in contents], start), contents, start)[start:]

    assert zipfile.ZipFile(io.BytesIO(data)).testzip() is None
    loaded = torch.load(io.BytesIO(data), weights_only=True)
    assert loaded["note"] == note and bytes(loaded["rng"].tolist()) == b"abc"
    for number, content in enumerate(contents):
        tensor = loaded["tensors"][f"t{number}"]
        assert bytes(tensor.flatten().view(torch.uint8).tolist()) == content
        assert loaded["tensors"][f"alias{number}"].data_ptr() == tensor.data_ptr()
    assert {
        path: opened(data).content(t) for path, t in tensors_of(opened(data).value) if "rng" not in path
    } == {
        ("tensors", f"{kind}{number}"): content
        for number, content in enumerate(contents)
        for kind in ("t", "alias")
    }


def test_a_zip_above_4_gib_is_written_and_found_in_zip64_form() -> None:
    """Sizes and offsets beyond 32 bits lie in zip64 fields, where zipfile and we find them."""

    class Sparse(io.RawIOBase):
        """A file of literals, zeros elsewhere."""

        def __init__(self, skeleton: Skeleton) -> None:
            self.skeleton, self.at = skeleton, 0

        def seek(self, offset: int, whence: int = 0) -> int:
            self.at = offset + (0, self.at, self.skeleton.size)[whence]
            return self.at

        def tell(self) -> int:
            return self.at

        def seekable(self) -> bool:
            return True

        def read(self, size: int = -1) -> bytes:
            stop = self.skeleton.size if size < 0 else min(self.skeleton.size, self.at + size)
            out = bytearray(stop - self.at)
            for literal in self.skeleton.literals:
                first, last = max(literal.offset, self.at), min(literal.offset + len(literal.data), stop)
                if first < last:
                    out[first - self.at : last - self.at] = literal.data[
                        first - literal.offset : last - literal.offset
                    ]
            self.at = stop
            return bytes(out)

    class SparseReader(Reader):
        def __init__(self, skeleton: Skeleton) -> None:
            self.file, self.size = Sparse(skeleton), skeleton.size

        def readinto(self, offset: int, buffer: memoryview) -> None:
            self.file.seek(offset)
            buffer[:] = self.file.read(len(buffer))

        def close(self) -> None:
            pass

    sizes = [5 << 30, 16, 1 << 32]
    dtype = BY_NAME["uint8"]
    value = [StoredTensor(Storage(str(k), dtype, n), dtype, 0, (n,), (1,)) for k, n in enumerate(sizes)]
    made = skeleton(value, sizes)

    infos = {info.filename: info for info in zipfile.ZipFile(Sparse(made)).infolist()}
    archive = open_archive(SparseReader(made), "x.pt")

    assert [infos[f"archive/data/{k}"].file_size for k in range(3)] == sizes
    assert infos["archive/data/2"].header_offset > 5 << 30
    assert [archive.place(tensor) for tensor in archive.value] == list(made.data)


def test_files_that_are_no_zips_of_torch_are_refused_with_a_reason() -> None:
    """Old files, programs, foreign zips and truncated ones each say what they are and what to do."""
    old = io.BytesIO()
    torch.save({"a": torch.ones(3)}, old, _use_new_zipfile_serialization=False)
    foreign = io.BytesIO()
    with zipfile.ZipFile(foreign, "w") as file:
        file.writestr("a/readme", "hello")

    with pytest.raises(FormatError, match=r"before version 1\.6"):
        opened(old.getvalue())
    with pytest.raises(FormatError, match=r"no data\.pkl"):
        opened(foreign.getvalue())
    with pytest.raises(FormatError, match=r"no file of torch\.save"):
        opened(b"\x00" * 100)
    with pytest.raises(CorruptionError, match="truncated"):
        opened(saved(sample())[:-300])
    with pytest.raises(CorruptionError, match="truncated"):
        opened(saved(sample()), 0, 1 << 40)


def _rezip(data: bytes, change: dict[str, bytes], method: int = zipfile.ZIP_STORED, twice: str = "") -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(data)) as source, zipfile.ZipFile(out, "w", method) as target:
        for info in source.infolist():
            content = change.get(info.filename.partition("/")[2], source.read(info.filename))
            target.writestr(info.filename, content)
            if info.filename.endswith(twice or "\0"):
                with pytest.warns(UserWarning, match="Duplicate"):
                    target.writestr(info.filename, content)
    return out.getvalue()


def test_zips_that_lie_are_refused() -> None:
    """Bombs, twins, short storages, other byte orders and members outside the folder are errors."""
    data = saved({"a": torch.arange(10.0)})

    with pytest.raises(FormatError, match="compressed"):
        opened(_rezip(data, {"data/0": b"\0" * 1_000_000}, zipfile.ZIP_DEFLATED))
    with pytest.raises(FormatError, match="two members"):
        opened(_rezip(data, {}, twice="data/0"))
    with pytest.raises(FormatError, match="should have 40 bytes"):
        archive = opened(_rezip(data, {"data/0": b"short"}))
        archive.place(archive.value["a"])
    with pytest.raises(FormatError, match="byte order"):
        opened(_rezip(data, {"byteorder": b"big"}))
    with pytest.raises(UnsafeError):
        opened(data.replace(b"archive/version", b"archive/../sion"))
    with pytest.raises(UnsafeError, match=r"posix\.system"):
        opened(_rezip(data, {"data.pkl": b"cposix\nsystem\n(X\x02\x00\x00\x00idtR."}))


def test_overlapping_members_are_refused() -> None:
    """A directory that puts two storages on the same bytes is refused, so that sizes stay honest."""
    data = bytearray(saved([torch.ones(4), torch.zeros(4)]))
    names = [(i.filename, i.header_offset) for i in zipfile.ZipFile(io.BytesIO(bytes(data))).infolist()]
    offsets = dict(names)
    at = data.rfind(b"archive/data/1") - 46
    assert struct.unpack_from("<I", data, at + 42)[0] == offsets["archive/data/1"]
    struct.pack_into("<I", data, at + 42, offsets["archive/data/0"])

    with pytest.raises(FormatError, match="overlap"):
        opened(bytes(data))


@given(st.data())
@settings(max_examples=80, deadline=None)
def test_damage_gives_one_of_our_errors_or_an_archive(data: st.DataObject) -> None:
    """Flipped and cut bytes anywhere outside the payloads never raise anything else."""
    whole = bytearray(saved({"a": torch.arange(10.0), "b": [torch.ones(2), 3.5, "text"]}))
    for _ in range(data.draw(st.integers(1, 4))):
        whole[data.draw(st.integers(0, len(whole) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, 40))
    try:
        archive = opened(bytes(whole[: len(whole) - cut]))
        for _, tensor in tensors_of(archive.value):
            archive.content(tensor)
    except CkptError:
        pass
