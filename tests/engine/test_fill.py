"""Filling memory by a plan: the bytes are those of a reshard, and damage is found before it is used."""

from pathlib import Path

import numpy as np
import pytest

from ckptkit.core.copies import copies_into
from ckptkit.core.layouts import Layout
from ckptkit.core.plan import make_plan
from ckptkit.core.shards import shards
from ckptkit.engine.fill import fill
from ckptkit.engine.sources import Sources
from ckptkit.errors import CorruptionError
from ckptkit.formats.native import NativeFormat
from ckptkit.formats.reference import random_truth, regions, toy, write
from ckptkit.stores.local import LocalStore


def test_memory_is_filled_as_files_would_be(tmp_path: Path) -> None:
    """Every element of another layout's rank files arrives where that layout has it; nothing at all is no error."""
    truth = random_truth(toy(), "canonical", state=True)
    write(NativeFormat(), truth, tmp_path, "tp=2,dp=2,zero=1")
    store = LocalStore(tmp_path)
    source = NativeFormat().read(store)
    target = (
        NativeFormat().lay_out(shards(truth.names, Layout.parse("pp=2"), truth.held, truth.tensors)).catalog
    )
    sizes = np.asarray([file.size for file in target.files], np.int64)
    images = [bytearray(size) for size in sizes.tolist()]
    copies = copies_into(make_plan(source, target))

    def sink(file: int, start: int, data: memoryview) -> None:
        images[file][start : start + data.nbytes] = data

    done = fill(copies, Sources(store, source, verify=True), sizes, sink, threads=2)
    none = fill(copies.take(np.zeros(0, np.int64)), Sources(store, source, verify=True), sizes, sink)

    assert done.checked_leaves > 0 and none.bytes_in == 0
    for key, region, box in regions(target, images):
        assert np.array_equal(region, truth.values[key][box]), key


def test_a_damaged_leaf_raises(tmp_path: Path) -> None:
    """Its file and leaf are named."""
    truth = random_truth(toy(), "canonical", state=True)
    write(NativeFormat(), truth, tmp_path)
    store = LocalStore(tmp_path)
    source = NativeFormat().read(store)
    path = tmp_path / source.files[0].path
    data = bytearray(path.read_bytes())
    data[source.files[0].data_start + 5] ^= 1
    path.write_bytes(data)
    copies = copies_into(make_plan(source, source))

    with pytest.raises(CorruptionError, match=r"leaf 0 of rank-00000\.safetensors"):
        fill(
            copies, Sources(store, source, verify=True), np.asarray([source.files[0].size]), lambda *_: None, threads=1
        )  # fmt: skip
