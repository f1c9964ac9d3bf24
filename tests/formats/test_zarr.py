"""zarr v3: what its files promise, and what is refused."""

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit import ops
from ckptkit.core.dtypes import dtype_named
from ckptkit.errors import CorruptionError, FormatError, ShardMissingError, UnsafeError, UsageError
from ckptkit.formats.base import ReadOptions, WriteOptions
from ckptkit.formats.reference import Truth, gather, same, stored_truth, write
from ckptkit.formats.registry import detect
from ckptkit.formats.suite import FormatSuite
from ckptkit.formats.zarr_root import Root
from ckptkit.formats.zarr_shards import crc32c
from ckptkit.formats.zarr_v3 import ZarrFormat
from ckptkit.stores.local import LocalStore

FLOAT32 = dtype_named("float32")
GROUP = {"zarr_format": 3, "node_type": "group", "attributes": {}}
BYTES = {"name": "bytes", "configuration": {"endian": "little"}}


class TestZarr(FormatSuite):
    make = ZarrFormat
    digests = True

    def written(self, root: Path, layout: str = "") -> tuple[Truth, Path]:
        """A few tensors with all their roles: the suite damages each file in turn, and there are two for each of them."""
        truth = self.truth()
        few = sorted({name for name, _ in truth.held})[:2]
        truth.held = {key: dtype for key, dtype in truth.held.items() if key[0] in few}
        truth.values = {key: truth.values[key] for key in truth.held}
        write(self.format, truth, root / "checkpoint", layout or "tp=1")
        return truth, root / "checkpoint"


def put(path: Path, node: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(node))


def array(root: Path, size: list[int], chunk: list[int], codecs: list[Any], **more: Any) -> Path:
    """Metadata of a float32 array `w` as another writer would put it."""
    put(root / "zarr.json", GROUP)
    grid = {"name": "regular", "configuration": {"chunk_shape": chunk}}
    node = {
        "zarr_format": 3, "node_type": "array", "shape": size, "data_type": "float32", "chunk_grid": grid,
        "chunk_key_encoding": {"name": "default"}, "fill_value": 0, "codecs": codecs, **more,
    }  # fmt: skip
    put(root / "w/zarr.json", node)
    return root / "w"


def chunk(path: Path, values: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(values.astype("<f4").tobytes())


def weights(root: Path) -> np.ndarray:
    return gather(root, ZarrFormat().read(LocalStore(root)))["w", "param"].view(np.float32)


def grid_of_5_by_6(root: Path) -> np.ndarray:
    """Chunks of 2 x 4, those at the edge padded with sevens."""
    values = np.arange(30, dtype=np.float32).reshape(5, 6)
    padded = np.full((6, 8), 7, np.float32)
    padded[:5, :6] = values
    folder = array(root, [5, 6], [2, 4], [BYTES])
    for a in range(3):
        for b in range(2):
            chunk(folder / f"c/{a}/{b}", padded[2 * a : 2 * a + 2, 4 * b : 4 * b + 4])
    return values


def test_chunks_of_a_grid_are_joined(tmp_path: Path) -> None:
    """Chunks that cut every axis are read without the padding past the edge."""
    values = grid_of_5_by_6(tmp_path)

    assert np.array_equal(weights(tmp_path), values)


def test_a_missing_chunk_is_an_error_with_its_name(tmp_path: Path) -> None:
    """zarr gives the fill value for it; a checkpoint that lost a file would be read as zeros."""
    grid_of_5_by_6(tmp_path)
    (tmp_path / "w/c/1/0").unlink()

    with pytest.raises(ShardMissingError, match=r"w/c/1/0 is missing.*write_empty_chunks"):
        weights(tmp_path)


def test_huge_shapes_of_no_chunks_fail_at_once(tmp_path: Path) -> None:
    """Metadata that promises 10^17 chunks is refused at the first that is absent, and 10^30 elements by their number."""
    array(tmp_path, [10**15, 100], [1, 1], [BYTES])
    with pytest.raises(ShardMissingError, match="w/c/0/0"):
        weights(tmp_path)

    array(tmp_path, [10**15, 10**15], [1, 1], [BYTES])
    with pytest.raises(FormatError, match="more elements"):
        weights(tmp_path)


def shard(root: Path, *, absent: bool = False, overlap: bool = False) -> np.ndarray:
    """One shard of 4 x 4 in inner chunks of 2 x 2, stored last to first, with its index at the end."""
    values = np.arange(16, dtype=np.float32).reshape(4, 4)
    inner = {"chunk_shape": [2, 2], "codecs": [BYTES], "index_codecs": [BYTES, {"name": "crc32c"}]}
    folder = array(root, [4, 4], [4, 4], [{"name": "sharding_indexed", "configuration": inner}])
    data, index = b"", np.zeros((2, 2, 2), "<u8")
    for a, b in ((1, 1), (1, 0), (0, 1), (0, 0)):
        index[a, b] = len(data), 16
        data += values[2 * a : 2 * a + 2, 2 * b : 2 * b + 2].tobytes()
    if absent:
        index[0, 1] = 2**64 - 1
    if overlap:
        index[0, 1, 0] = index[1, 1, 0] + 4
    (folder / "c/0").mkdir(parents=True)
    table = index.tobytes()
    (folder / "c/0/0").write_bytes(data + table + crc32c(table).to_bytes(4, "little"))
    return values


def test_shards_are_read_by_their_index(tmp_path: Path) -> None:
    """Inner chunks lie in any order."""
    values = shard(tmp_path)

    assert np.array_equal(weights(tmp_path), values)


def test_an_index_that_is_damaged_or_lies_is_refused(tmp_path: Path) -> None:
    """Its checksum is compared, an absent inner chunk is an error, and two chunks in one place are too."""
    shard(tmp_path / "a", absent=True)
    with pytest.raises(ShardMissingError, match=r"lacks the inner chunk \(0, 1\)"):
        weights(tmp_path / "a")
    shard(tmp_path / "b", overlap=True)
    with pytest.raises(FormatError, match="overlap"):
        weights(tmp_path / "b")
    shard(tmp_path / "c")
    path = tmp_path / "c/w/c/0/0"
    data = bytearray(path.read_bytes())
    data[70] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptionError, match="checksum"):
        weights(tmp_path / "c")


def test_a_known_checksum_is_computed() -> None:
    """The check value that every list of CRCs gives for CRC-32C."""
    assert crc32c(b"123456789") == 0xE3069283


@pytest.mark.parametrize(
    ("codecs", "more", "told"),
    [
        ([], {}, "codecs"),
        ([{"name": "sharding_indexed", "configuration": {"chunk_shape": [2, 2], "codecs": [
            {"name": "sharding_indexed", "configuration": {}}], "index_codecs": [BYTES]}}, ], {}, "hold shards"),
        ([BYTES], {"chunk_grid": {"name": "rectangular", "configuration": {}}}, "rectangular"),
        ([BYTES], {"data_type": "string"}, "'string' is no element type"),
        ([BYTES], {"attributes": {"ckptkit": {"dtype": "bfloat16"}}}, "'bfloat16' cannot be stored as float32"),
        ([BYTES], {"shape": [-1, 2]}, r"its shape is \[-1, 2\]"),
    ],
)  # fmt: skip
def test_what_is_no_region_is_refused(codecs: list[Any], more: Any, told: str, tmp_path: Path) -> None:
    """What hides a tensor's bytes is told by name, with what to do."""
    array(tmp_path, [2, 2], [2, 2], codecs, **more)

    with pytest.raises(FormatError, match=told):
        weights(tmp_path)


@pytest.mark.skipif(find_spec("zarr") is not None, reason="zarr is installed")
@pytest.mark.parametrize("codec", [{"name": "zstd", "configuration": {}}, "gzip"])
def test_compressed_arrays_need_zarr(codec: Any, tmp_path: Path) -> None:
    """Before anything is read: which codec, and what to install."""
    array(tmp_path, [2, 2], [2, 2], [BYTES, codec])

    with pytest.raises(UsageError, match=r"bytes, (zstd|gzip).*ckptkit\[zarr\].*compressors=None"):
        weights(tmp_path)


def filled(root: Path, to: Path) -> np.ndarray:
    """The weights of a sparse array, taken as whole, through a conversion."""
    source = ops.open(str(root), fill_missing=True)
    assert any("taken as their arrays' fill values" in text for text in source.catalog.facts["warnings"])
    ops.reshard(str(root), str(to), to="native", layout="dp=2,zero=3", fill_missing=True)
    return gather(to, detect(LocalStore(to)).read(LocalStore(to)))["w", "param"].view(np.float32)


@pytest.mark.parametrize("value", [7.5, "NaN", "-Infinity", "0x3f800001", 0])
def test_missing_chunks_are_the_fill_value_where_one_says_so(value: Any, tmp_path: Path) -> None:
    """Asked for, what zarr leaves out is what zarr gives for it, in chunks that cut every axis and reach past the edge."""
    values = grid_of_5_by_6(tmp_path / "a")
    node = json.loads((tmp_path / "a/w/zarr.json").read_text())
    put(tmp_path / "a/w/zarr.json", {**node, "fill_value": value})
    for path in ("c/1/0", "c/2/1"):
        (tmp_path / "a/w" / path).unlink()

    found = filled(tmp_path / "a", tmp_path / "b")

    one = (
        np.uint32(0x3F800001).view(np.float32)
        if value == "0x3f800001"
        else np.float32(str(value).replace("Infinity", "inf"))
    )
    values[2:4, :4] = values[4:, 4:] = one
    assert found.tobytes() == values.tobytes()


def test_missing_inner_chunks_are_the_fill_value_where_one_says_so(tmp_path: Path) -> None:
    """In shards the index says what is absent."""
    values = shard(tmp_path / "a", absent=True)

    values[:2, 2:] = 0
    assert np.array_equal(filled(tmp_path / "a", tmp_path / "b"), values)


@pytest.mark.parametrize("value", ["seven", None, True, [0, 0]])
def test_a_fill_value_of_another_type_is_refused(value: Any, tmp_path: Path) -> None:
    grid_of_5_by_6(tmp_path)
    node = json.loads((tmp_path / "w/zarr.json").read_text())
    put(tmp_path / "w/zarr.json", {**node, "fill_value": value})
    (tmp_path / "w/c/1/0").unlink()

    with pytest.raises(FormatError, match="fill value"):
        ZarrFormat().read(LocalStore(tmp_path), ReadOptions(fill_missing=True))


def test_what_we_wrote_lacks_nothing(tmp_path: Path) -> None:
    """All chunks of a checkpoint of ours are listed with their digests: one that is gone was lost, whatever is asked."""
    write(ZarrFormat(), stored_truth({"w": ((5, 4), FLOAT32)}), tmp_path)
    (tmp_path / "model/w/c/0/0").unlink()

    with pytest.raises(ShardMissingError):
        ZarrFormat().read(LocalStore(tmp_path), ReadOptions(fill_missing=True))


def test_bfloat16_of_other_writers_is_read(tmp_path: Path) -> None:
    """tensorstore has a data type for it; ours is uint16 with an attribute."""
    folder = array(tmp_path, [2], [2], [BYTES], data_type="bfloat16")
    chunk(folder / "c/0", np.zeros(1, np.float32))

    assert ZarrFormat().read(LocalStore(tmp_path)).held == {("w", "param"): dtype_named("bfloat16")}


def test_large_arrays_are_cut_between_rows(tmp_path: Path) -> None:
    """Chunks have at most the size asked for, equal shapes, and the last one is full."""
    truth = stored_truth({"w": ((5, 4), FLOAT32)})

    write(ZarrFormat(), truth, tmp_path, options=WriteOptions(max_shard_size=40))

    chunks = {p.name: p for p in (tmp_path / "model/w/c").iterdir()}
    assert {name: (path / "0").stat().st_size for name, path in chunks.items()} == {"0": 32, "1": 32, "2": 32}
    same(gather(tmp_path, ZarrFormat().read(LocalStore(tmp_path))), truth.values)


def test_larger_arrays_are_shards_of_inner_chunks(tmp_path: Path) -> None:
    """Rows of 8 MiB: two to an inner chunk of 16 MiB, some of these in a file with their index, the last file shorter."""
    values = np.zeros((5, 1 << 21), np.uint32)
    values[:, 0] = np.arange(5)
    truth = stored_truth({"w": (values.shape, FLOAT32)})
    truth.values["w", "param"] = values

    write(ZarrFormat(), truth, tmp_path, options=WriteOptions(max_shard_size=36 << 20))

    node = json.loads((tmp_path / "model/w/zarr.json").read_text())
    assert node["chunk_grid"]["configuration"]["chunk_shape"] == [4, 1 << 21]
    [codec] = node["codecs"]
    assert codec["name"] == "sharding_indexed" and codec["configuration"]["chunk_shape"] == [2, 1 << 21]
    sizes = {p.parent.name: p.stat().st_size for p in (tmp_path / "model/w/c").glob("*/0")}
    assert sizes == {"0": (32 << 20) + 36, "1": (16 << 20) + 36}
    same(gather(tmp_path, ZarrFormat().read(LocalStore(tmp_path))), truth.values)


def test_names_of_any_kind_stay_in_the_folder(tmp_path: Path) -> None:
    """Slashes, dots and what zarr keeps for itself are written as in URLs and come back."""
    names = ("../../x", "a/b", "..", "__c", "ü", "%2F", "a.b")
    truth = stored_truth({name: ((2,), FLOAT32) for name in names})

    write(ZarrFormat(), truth, tmp_path / "z")

    assert {p.name for p in tmp_path.iterdir()} == {"z"}
    assert {p.name for p in (tmp_path / "z").iterdir()} == {"model", "zarr.json"}
    same(gather(tmp_path / "z", ZarrFormat().read(LocalStore(tmp_path / "z"))), truth.values)


def test_attributes_of_others_do_no_damage(tmp_path: Path) -> None:
    """A note that some program adds to the root, in its own spacing, leaves the checkpoint whole; ours changed does not."""
    truth = stored_truth({"a": ((2,), FLOAT32), "b": ((3,), FLOAT32)})
    write(ZarrFormat(), truth, tmp_path)
    node = json.loads((tmp_path / "zarr.json").read_text())
    node["attributes"]["note"] = "seen"
    put(tmp_path / "zarr.json", node)
    assert len(ZarrFormat().read(LocalStore(tmp_path)).held) == 2

    node["attributes"]["ckptkit"]["common"]["step"] = 7
    put(tmp_path / "zarr.json", node)

    with pytest.raises(CorruptionError, match="checksum"):
        ZarrFormat().read(LocalStore(tmp_path))


def test_a_root_that_names_files_outside_is_refused(tmp_path: Path) -> None:
    """Also where its checksum is right: nothing outside the folder is opened."""
    outside = Root({}, {}, [], {}, {"../x/zarr.json": "0"}, {})
    (tmp_path / "zarr.json").write_bytes(outside.to_bytes(()))

    with pytest.raises(UnsafeError, match=r"\.\./x/zarr\.json"):
        ZarrFormat().read(LocalStore(tmp_path))
