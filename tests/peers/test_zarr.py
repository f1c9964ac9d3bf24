"""zarr-python as the judge: what it writes is read, and what ckptkit writes it opens, bit for bit."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ckptkit import ops
from ckptkit.core.dtypes import TABLE, dtype_named
from ckptkit.errors import CorruptionError, ShardMissingError
from ckptkit.formats.base import WriteOptions
from ckptkit.formats.reference import gather, random_truth, stored_truth, toy, write
from ckptkit.formats.registry import detect
from ckptkit.formats.zarr_v3 import ZarrFormat
from ckptkit.stores.local import LocalStore

zarr: Any = pytest.importorskip("zarr")
pytestmark = pytest.mark.peers


def save(root: Path, shape: tuple[int, ...], dtype: str, **how: Any) -> np.ndarray:
    """An array `layer/w` of counted elements, as zarr-python saves it."""
    group = zarr.open_group(root, mode="w")
    how = {"chunks": shape, "compressors": None, **how}
    held = group.create_array("layer/w", shape=shape, dtype=dtype, **how)
    values = (np.arange(np.prod(shape)) + 1).reshape(shape).astype(dtype)
    held[...] = values
    return values


@pytest.mark.parametrize(
    ("shape", "dtype", "how"),
    [
        ((5, 6), "float32", {"chunks": (2, 4)}),
        ((5, 6), "int64", {"chunks": (2, 3), "shards": (4, 6)}),
        ((7, 4, 3), "float16", {"chunks": (2, 2, 3), "shards": (4, 4, 3)}),
        ((), "float64", {}),
        ((0, 3), "float32", {"chunks": (1, 3)}),
        ((4, 4), "complex64", {"chunks": (3, 3), "chunk_key_encoding": {"name": "v2", "separator": "."}}),
        ((4,), "bool", {"config": {"write_empty_chunks": True}}),
    ],
)
def test_what_zarr_writes_is_read(shape: Any, dtype: str, how: Any, tmp_path: Path) -> None:
    """Grids, shards with their index, both kinds of keys, scalars and empty arrays."""
    values = save(tmp_path, shape, dtype, **how)

    found = detect(LocalStore(tmp_path)).read(LocalStore(tmp_path))
    [(key, array)] = gather(tmp_path, found).items()

    assert key == ("w", "param") and found.format == "zarr"
    assert array.shape == shape and array.tobytes() == values.tobytes()


def through_native(root: Path, to: Path, **options: Any) -> np.ndarray:
    """The weights, read through a conversion into another layout."""
    ops.reshard(str(root), str(to), to="native", layout="dp=2,zero=3", **options)
    [array] = gather(to, detect(LocalStore(to)).read(LocalStore(to))).values()
    return array


@pytest.mark.parametrize(
    "how",
    [
        {"compressors": "auto"},
        {"compressors": [zarr.codecs.BloscCodec(cname="lz4", shuffle="shuffle")]},
        {"compressors": [zarr.codecs.GzipCodec(level=5), zarr.codecs.Crc32cCodec()]},
        {"filters": [zarr.codecs.TransposeCodec(order=(1, 0))]},
        {"serializer": zarr.codecs.BytesCodec(endian="big")},
        {"shards": (4, 6), "compressors": "auto"},
    ],
    ids=["zstd", "blosc", "gzip and crc32c", "transposed", "big-endian", "shards"],
)
def test_compressed_arrays_are_read(how: dict[str, Any], tmp_path: Path) -> None:
    """What a chunk went through does not matter: zarr decodes it, and every element arrives."""
    values = save(tmp_path / "a", (7, 9), "float32", chunks=(2, 3), **how)

    assert through_native(tmp_path / "a", tmp_path / "b").tobytes() == values.tobytes()


def test_damage_to_a_compressed_chunk_is_told(tmp_path: Path) -> None:
    """A chunk that its codec cannot decode names its file; nothing is written."""
    save(
        tmp_path / "a",
        (7, 9),
        "float32",
        chunks=(7, 9),
        compressors=[zarr.codecs.GzipCodec(), zarr.codecs.Crc32cCodec()],
    )
    path = tmp_path / "a/layer/w/c/0/0"
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)

    with pytest.raises(CorruptionError, match="layer/w/c/0/0 cannot be decoded"):
        through_native(tmp_path / "a", tmp_path / "b")

    assert not (tmp_path / "b").exists()


@pytest.mark.parametrize("how", [{}, {"shards": (4, 6)}, {"compressors": "auto", "shards": (4, 6)}])
def test_what_zarr_left_out_is_read_as_zarr_does_when_asked(how: dict[str, Any], tmp_path: Path) -> None:
    """Chunks that equal the fill value have no file: an error, or on request the value that zarr gives for them."""
    group = zarr.open_group(tmp_path / "a", mode="w")
    held = group.create_array(
        "w", shape=(8, 9), chunks=(2, 3), dtype="float32", fill_value=2.5, **{"compressors": None, **how}
    )
    held[:2] = 1.0
    held[5, 7] = 3.0
    with pytest.raises(ShardMissingError, match="--fill-missing"):
        ZarrFormat().read(LocalStore(tmp_path / "a"))

    found = through_native(tmp_path / "a", tmp_path / "b", fill_missing=True)

    assert found.tobytes() == np.asarray(held[...]).tobytes()


def test_zarr_reads_shards_that_we_write(tmp_path: Path) -> None:
    """Large arrays are shards of inner chunks, of which zarr reads a part without the rest; the last reaches past the edge."""
    truth = stored_truth({"w": ((5, 1 << 21), dtype_named("float32"))})

    write(ZarrFormat(), truth, tmp_path, options=WriteOptions(max_shard_size=36 << 20))

    array = zarr.open_group(tmp_path, mode="r")["model/w"]
    assert array.shards == (4, 1 << 21) and array.chunks == (2, 1 << 21)
    assert np.asarray(array[...]).tobytes() == truth.values["w", "param"].tobytes()
    assert np.asarray(array[3, 7:9]).tobytes() == truth.values["w", "param"][3, 7:9].tobytes()


@pytest.mark.parametrize("shape", [(), (0, 5), (5, 3)])
def test_zarr_reads_every_dtype_that_we_write(shape: tuple[int, ...], tmp_path: Path) -> None:
    """Types that zarr lacks are unsigned integers of their width, with their name as an attribute; rows are cut in chunks."""
    truth = stored_truth({dtype.name: (shape, dtype) for dtype in TABLE})
    truth.values["bool", "param"] = np.asarray(truth.values["bool", "param"] & 1)

    write(ZarrFormat(), truth, tmp_path, options=WriteOptions(max_shard_size=24))

    group = zarr.open_group(tmp_path, mode="r")["model"]
    assert set(group.array_keys()) == {dtype.name for dtype in TABLE}
    for dtype in TABLE:
        array = group[dtype.name]
        assert array.attrs["ckptkit"]["dtype"] == dtype.name
        assert array.shape == shape and array.dtype.itemsize == dtype.itemsize
        assert np.asarray(array[...]).tobytes() == truth.values[dtype.name, "param"].tobytes(), dtype


def test_zarr_reads_a_model_with_its_optimizer(tmp_path: Path) -> None:
    """Every array is where the names say, and zarr's walk through the groups finds no other."""
    truth = random_truth(toy(), "canonical", state=True)

    write(ZarrFormat(), truth, tmp_path)

    root = zarr.open_group(tmp_path, mode="r")
    found = {
        f"{top}/{path}": node
        for top in ("model", "optimizer")
        for path, node in root[top].members(max_depth=None)
        if isinstance(node, zarr.Array)
    }
    expected = {}
    for (name, role), values in truth.values.items():
        expected[f"model/{name}" if role in ("param", "buffer") else f"optimizer/{role}/{name}"] = values
    assert found.keys() == expected.keys()
    for path, values in expected.items():
        assert np.asarray(found[path][...]).tobytes() == values.tobytes(), path
    assert found[next(p for p in found if p.startswith("model/"))].attrs["ckptkit"]["role"] == "param"
    assert dtype_named("bfloat16") in truth.held.values()
