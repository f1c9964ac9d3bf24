"""Headers of safetensors files: what is accepted, and what each refusal says. The judge is the `safetensors` library."""

import json
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import SafetensorError, deserialize, safe_open

from ckptkit.core.dtypes import BY_SAFETENSORS, TABLE, dtype_named
from ckptkit.errors import CkptError, FormatError, LayoutError, ShardMissingError
from ckptkit.formats.safetensors_file import (
    Header,
    entry_text,
    header_bytes,
    parse_header,
    read_header,
    read_headers,
)
from ckptkit.stores.local import LocalStore

PICKLE = b"\x80\x02}q\x00X\x01\x00\x00\x00aq\x01K\x01s."


def file_of(header: object, data: bytes = b"", *, length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text) if length is None else length) + text + data


def tensor(begin: int, end: int, shape: list[Any], dtype: str = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def read(folder: Path, content: bytes) -> Header:
    (folder / "x.safetensors").write_bytes(content)
    return read_header(LocalStore(folder), "x.safetensors")


def judge_accepts(content: bytes) -> bool:
    try:
        deserialize(content)
    except SafetensorError:
        return False
    return True


GOOD = file_of({"__metadata__": {"k": "v"}, "b": tensor(8, 12, [1]), "a": tensor(0, 8, [2])}, bytes(12))

BAD: dict[str, tuple[bytes, str]] = {
    "no bytes": (b"", "has 0 bytes"),
    "header of 2^60": (file_of({}, length=1 << 60), r"header length is 1152921504606846976"),
    "header cut": (GOOD[:20], "truncated"),
    "data cut": (GOOD[:-1], r"'b'.*8:12.*11 bytes.*truncated"),
    "deep JSON": (file_of(b"[" * 200_000), "nested too deeply"),
    "deep JSON objects": (file_of(b'{"a":' * 100_000), "nested too deeply"),
    "no JSON": (file_of(b"{oops}"), "not the JSON"),
    "no UTF-8": (file_of(b'{"\xff":1}'), "not the JSON"),
    "NaN": (file_of(b'{"a":{"dtype":"F32","shape":[NaN],"data_offsets":[0,4]}}', bytes(4)), "NaN is no JSON"),
    "a list": (file_of([]), "a JSON list"),
    "overlap": (file_of({"a": tensor(0, 8, [2]), "b": tensor(4, 12, [2])}, bytes(12)), r"'a' and 'b' overlap \(bytes 4:8"),
    "hole": (file_of({"a": tensor(0, 4, [1]), "b": tensor(8, 12, [1])}, bytes(12)), r"'a' and 'b' leave a hole \(bytes 4:8"),
    "hole at the start": (file_of({"a": tensor(4, 8, [1])}, bytes(8)), "the start of the data and 'a' leave a hole"),
    "bytes at the end": (file_of({"a": tensor(0, 4, [1])}, bytes(7)), "3 bytes after 'a'"),
    "negative offset": (file_of({"a": tensor(-4, 0, [1])}, bytes(4)), r"'a'.*-4:0.*no order"),
    "offsets backwards": (file_of({"a": tensor(4, 0, [1])}, bytes(4)), r"'a'.*4:0.*no order"),
    "offset far out": (file_of({"a": tensor(0, 1 << 70, [1])}, bytes(4)), "'a'.*truncated"),
    "one offset": (file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0]}}, bytes(4)), "no two whole numbers"),
    "offset as text": (file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": ["0", "4"]}}, bytes(4)), "whole numbers"),
    "offset as float": (file_of({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0.0, 4]}}, bytes(4)), "whole number"),
    "offset of a million digits": (file_of(b'{"a":{"data_offsets":[0,' + b"9" * 10**6 + b"]}}"), "not the JSON|no two"),
    "name twice": (file_of(b'{"a":%b,"a":%b}' % ((json.dumps(tensor(0, 4, [1])).encode(),) * 2), bytes(4)), "'a' twice"),
    "unknown dtype": (file_of({"a": tensor(0, 4, [1], "F33")}, bytes(4)), "'a' has the unknown dtype 'F33'; known: F64"),
    "dtype no text": (file_of({"a": {"dtype": 7, "shape": [1], "data_offsets": [0, 4]}}, bytes(4)), "unknown dtype 7"),
    "product of 2^128": (file_of({"a": tensor(0, 0, [1 << 62, 1 << 62])}), "more elements than can be addressed"),
    "overflow behind a zero": (file_of({"a": tensor(0, 0, [0, 1 << 62, 1 << 62])}), "more elements"),
    "product that wraps to 4": (file_of({"a": tensor(0, 4, [(1 << 64) + 1])}, bytes(4)), "more elements|a huge"),
    "negative size": (file_of({"a": tensor(0, 4, [-1])}, bytes(4)), r"\[-1\], which is no list of sizes"),
    "size true": (file_of({"a": tensor(0, 4, [True])}, bytes(4)), "no list of sizes"),
    "shape no list": (file_of({"a": {"dtype": "F32", "shape": 1, "data_offsets": [0, 4]}}, bytes(4)), "no list of sizes"),
    "shape and bytes differ": (file_of({"a": tensor(0, 8, [1])}, bytes(8)), "'a' has 8 bytes of data, but its shape"),
    "entry no object": (file_of({"a": 7}), "'a' is no JSON object"),
    "metadata no text": (file_of({"__metadata__": {"k": 1}}), "__metadata__"),
    "metadata a number": (file_of({"__metadata__": 0}), "__metadata__"),
    "half a surrogate": (file_of(b'{"\\ud800":%b}' % json.dumps(tensor(0, 4, [1])).encode(), bytes(4)), "no valid text"),
    "half a byte of F4": (file_of({"a": tensor(0, 1, [1], "F4")}, bytes(1)), "last size must be even"),
    "zip": (b"PK\x03\x04" + bytes(100), "a zip file, as torch.save writes them"),
    "pickle": (PICKLE, "a pickle, which is never executed"),
    "git lfs pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n", "git lfs pull"),
    "web page": (b"<!DOCTYPE html><html>no</html>", "a web page"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_with_file_and_reason(case: str, tmp_path: Path) -> None:
    """Each refusal is a FormatError that names the file, what is wrong with it, and what to do."""
    content, reason = BAD[case]

    with pytest.raises(FormatError, match=reason) as caught:
        read(tmp_path, content)

    assert "x.safetensors" in str(caught.value)
    assert caught.value.exit_code == 3


STRICTER = {"name twice", "overflow behind a zero", "half a byte of F4"}


@pytest.mark.parametrize("case", sorted(BAD.keys() - STRICTER))
def test_the_reference_reader_refuses_them_too(case: str) -> None:
    """Nothing is refused that the reference reader takes, but for what it should not."""
    assert not judge_accepts(BAD[case][0])


def test_a_good_file_is_read_in_data_order(tmp_path: Path) -> None:
    """Tensors come in the order of their bytes, whatever the order of the JSON."""
    header = read(tmp_path, GOOD)

    assert (header.names, header.shapes, header.begin.tolist()) == (["a", "b"], [(2,), (1,)], [0, 8])
    assert header.metadata == {"k": "v"}
    assert header.data_start == len(GOOD) - 12


@pytest.mark.parametrize("length", [128, 128 + 256 * 3])
def test_a_header_length_that_looks_like_a_pickle_is_read(length: int, tmp_path: Path) -> None:
    """A length whose first bytes are those of a pickle is no reason to refuse a file."""
    text = json.dumps({"a": tensor(0, 4, [1])}).encode()

    header = read(tmp_path, file_of(text + b" " * (length - len(text)), bytes(4)))

    assert header.names == ["a"]


def test_a_header_longer_than_the_first_read(tmp_path: Path) -> None:
    """A header of any length is read whole."""
    header = read(
        tmp_path, file_of({f"layer.{i}": tensor(4 * i, 4 * i + 4, [1]) for i in range(2000)}, bytes(8000))
    )

    assert len(header.names) == 2000


def test_a_directory_and_an_absent_file(tmp_path: Path) -> None:
    """A folder in a file's place, and no file at all, are said to be that."""
    (tmp_path / "x.safetensors").mkdir()
    store = LocalStore(tmp_path)

    with pytest.raises(FormatError, match="directory"):
        read_header(store, "x.safetensors")
    with pytest.raises(ShardMissingError, match=r"y\.safetensors"):
        read_headers(store, ["y.safetensors", "x.safetensors"])


def test_many_tensors_are_fast() -> None:
    """50,000 tensors are parsed in about 0.3 s of processor time; a pass that is quadratic takes minutes."""
    float32 = dtype_named("float32")
    content = header_bytes(
        (entry_text(f"model.layers.{i}.weight", (4, 4), float32, 64 * i) for i in range(50_000)), {}
    )

    start = time.process_time()
    header = parse_header("x", len(content) + 64 * 50_000, content[8:])

    assert len(header.names) == 50_000
    assert time.process_time() - start < 2


@pytest.mark.parametrize("dtype", TABLE, ids=str)
def test_written_headers_are_valid_for_the_reference_reader(dtype: Any, tmp_path: Path) -> None:
    """Headers of every dtype and shape open in the reference reader, or the dtype is none of safetensors."""
    if dtype.safetensors == "C128":
        pytest.skip("no type of safetensors; check_writable refuses it")
    shapes = [(0,), (0, 5), (3, 4)]
    members, offset = [], 0
    for number, shape in enumerate(shapes):
        members.append(entry_text(f't{number} "ü', shape, dtype, offset))
        offset += dtype.itemsize * (12 if number == 2 else 0)

    content = header_bytes(members, {"format": "pt"}) + bytes(offset)

    assert judge_accepts(content)
    assert len(content) % 8 == offset % 8
    (tmp_path / "x").write_bytes(content)
    with safe_open(tmp_path / "x", "pt") as file:
        assert set(file.keys()) == {f't{number} "ü' for number in range(3)}
        assert file.metadata() == {"format": "pt"}
    assert parse_header("x", len(content), content[8 : len(content) - offset]).shapes == shapes


def test_dtype_codes_are_those_of_the_reference(tmp_path: Path) -> None:
    """Every code in our table but C128 is known to the reference reader; of its codes we lack those without whole bytes."""
    with pytest.raises(SafetensorError) as caught:
        deserialize(file_of({"a": tensor(0, 1, [1], "none")}, b"0"))
    known = set(
        str(caught.value)
        .split("expected one of")[1]
        .split(" at line")[0]
        .replace("`", "")
        .replace(" ", "")
        .split(",")
    )

    assert BY_SAFETENSORS.keys() - known == {"C128"}
    assert known - BY_SAFETENSORS.keys() == {"F6_E2M3", "F6_E3M2"}


def test_a_header_above_the_limit_is_not_written() -> None:
    """What no reader would take is never written."""
    with pytest.raises(LayoutError, match="exceeds the 100000000"):
        header_bytes([], {"k": "v"}, nbytes=100_000_016)


NUMBERS = st.one_of(
    st.integers(-2, 40), st.sampled_from([1 << 31, 1 << 62, 1 << 63, 1 << 64, 0.5, True, None, "1"])
)
ENTRIES = st.fixed_dictionaries(
    {
        "dtype": st.sampled_from([*BY_SAFETENSORS, "F33", None]),
        "shape": st.one_of(st.lists(NUMBERS, max_size=3), NUMBERS),
        "data_offsets": st.one_of(st.lists(NUMBERS, min_size=2, max_size=2), st.lists(NUMBERS, max_size=3)),
    }
)
ANYTHING: st.SearchStrategy[Any] = st.one_of(
    NUMBERS, st.lists(NUMBERS, max_size=3), st.sampled_from(sorted(BY_SAFETENSORS))
)
TABLES: st.SearchStrategy[dict[str, Any]] = st.dictionaries(
    st.sampled_from(["a", "b", "c", "__metadata__", ""]),
    st.one_of(ENTRIES, NUMBERS, st.dictionaries(st.text(), st.text())),
)


@st.composite
def nearly_good(draw: st.DrawFn) -> bytes:
    """A correct file, of which one number or a few bytes may be wrong."""
    members: dict[str, Any] = {}
    offset = 0
    for name in draw(st.lists(st.sampled_from("abcdef"), unique=True, max_size=4)):
        code = draw(st.sampled_from(sorted(BY_SAFETENSORS.keys() - {"C128"})))
        shape = draw(st.lists(st.integers(0, 3), max_size=3))
        if code == "F4":
            shape = [*shape, 2]
        size = BY_SAFETENSORS[code].itemsize
        for n in shape:
            size *= n
        size = size // 2 if code == "F4" else size
        members[name] = tensor(offset, offset + size, shape, code)
        offset += size
    wrong = draw(st.booleans())
    if members and wrong:
        chosen = members[draw(st.sampled_from(sorted(members)))]
        field = draw(st.sampled_from(["dtype", "shape", "data_offsets"]))
        chosen[field] = draw(ANYTHING)
    content = bytearray(file_of(members, bytes(offset + draw(st.sampled_from([0, 0, 0, 1])))))
    for _ in range(draw(st.sampled_from([0, 0, 1, 2]))):
        content[draw(st.integers(0, len(content) - 1))] = draw(st.integers(0, 255))
    return bytes(content[: len(content) - draw(st.sampled_from([0, 0, 0, 1, 9]))])


def accepted(content: bytes, folder: Path) -> bool:
    try:
        read(folder, content)
    except CkptError:
        return False
    return True


@settings(max_examples=400)
@given(
    content=st.one_of(
        nearly_good(), TABLES.map(lambda table: file_of(table, bytes(16))), st.binary(max_size=64)
    )
)
def test_any_bytes_are_read_or_refused(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """No input raises anything but CkptError, and what is accepted is accepted by the reference reader, with the same tensors."""
    folder = tmp_path_factory.getbasetemp()

    if accepted(content, folder):
        header = read(folder, content)
        theirs = dict(deserialize(content))

        assert theirs.keys() == set(header.names)
        for name, shape, code in zip(header.names, header.shapes, header.dtype, strict=True):
            assert TABLE[code].safetensors == theirs[name]["dtype"]
            packed = TABLE[code].safetensors == "F4"
            assert (
                [*shape[:-1], shape[-1] * 2] == theirs[name]["shape"]
                if packed
                else list(shape) == theirs[name]["shape"]
            )


@settings(max_examples=400)
@given(content=nearly_good())
def test_we_are_stricter_only_on_purpose(content: bytes, tmp_path_factory: pytest.TempPathFactory) -> None:
    """What the reference reader takes we take, but for names and fields that come twice, sizes that overflow, and half bytes."""
    if judge_accepts(content) and not accepted(content, tmp_path_factory.getbasetemp()):
        with pytest.raises(FormatError, match=r"twice|more elements|must be even|unknown dtype"):
            read(tmp_path_factory.getbasetemp(), content)
