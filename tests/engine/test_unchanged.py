"""Files that do not change are shared with the source; everything that differs at all is written."""

import os

import numpy as np
import pytest

from ckptkit.core.catalog import LEAF
from ckptkit.core.copies import copies_into
from ckptkit.core.destination import Literal
from ckptkit.core.plan import make_plan
from ckptkit.engine.run import run
from ckptkit.engine.sources import Sources
from ckptkit.engine.unchanged import copy_unchanged
from ckptkit.engine.ways import Way
from ckptkit.engine.writer import Outputs
from ckptkit.errors import CorruptionError
from ckptkit.stores.durable import UnfinishedFolder
from ckptkit.stores.local import LocalStore
from tests.engine.toy import Toy, destination, leaves_of, write


def copying(source: int, target: int) -> bool:
    """Stands in for a clone where the file system has none."""
    os.pwrite(target, os.pread(source, 1 << 30, 0), 0)
    return True


class Setting:
    """One file of 2 MB to another of the same layout, header and order."""

    def __init__(self, path) -> None:
        toy = Toy(sizes={"hidden": 128, "vocab": 1800, "layers": 1})
        self.source, self.target = toy.catalog("tp=1", start=64), toy.catalog("tp=1", start=64)
        rng = np.random.default_rng(0)
        self.data = rng.integers(0, 256, self.source.files[0].size, np.uint8)
        self.data[:64] = 0xAA
        assert len(self.data) > LEAF
        self.path = path
        write(str(path / "src"), self.source, [self.data])
        self.source.leaves = lambda number: leaves_of(self.data, 64)
        self.wanted = destination(self.target, digests=True)

    def run(self, clone=copying) -> tuple[list[int], Outputs]:
        plan = make_plan(self.source, self.target)
        sources = Sources(LocalStore(self.path / "src"), self.source, verify=True)
        folder = UnfinishedFolder(str(self.path / "out"), "ab")
        outputs = Outputs(folder, self.wanted, Way(False))
        try:
            return copy_unchanged(plan, self.wanted, copies_into(plan), sources, outputs, clone), outputs
        finally:
            outputs.files.close()
            sources.close()
            folder.close()


def test_an_unchanged_file_is_cloned_with_its_digests(tmp_path) -> None:
    setting = Setting(tmp_path)

    done, outputs = setting.run()

    assert done == [0]
    leaves = outputs.result()[0].leaves
    assert leaves is not None and np.array_equal(leaves.digests, leaves_of(setting.data, 64).digests)
    assert outputs.unsynced == {0}


def test_a_clone_has_the_fingerprints_of_its_tensors(tmp_path) -> None:
    """The same as where every slab is written."""
    setting = Setting(tmp_path)
    setting.wanted.fingerprints = True

    done, outputs = setting.run()

    assert done == [0]
    prints = outputs.result()[0].fingerprints
    result = run(
        make_plan(setting.source, setting.target),
        setting.wanted,
        LocalStore(tmp_path / "src"),
        str(tmp_path / "w"),
    )
    assert prints and prints == result.written[0].fingerprints


def test_a_damaged_leaf_is_not_cloned_silently(tmp_path) -> None:
    setting = Setting(tmp_path)
    path = tmp_path / "src" / setting.source.files[0].path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(bytes(data))

    with pytest.raises(CorruptionError, match="leaf 1"):
        setting.run()


@pytest.mark.parametrize("change", ["header", "padding", "order", "size"])
def test_a_file_that_differs_is_left_to_the_writer(tmp_path, change) -> None:
    setting = Setting(tmp_path)
    entries, file = setting.target.entries, setting.target.files[0]
    if change == "header":
        setting.wanted.literals = {0: [Literal(0, b"\xaa" * 63 + b"\xab")]}
    elif change == "padding":
        setting.wanted.literals = {
            0: [Literal(0, b"\xaa" * 63)]
        }  # the last byte is zero, in the source it is not
    elif change == "order":
        same = np.flatnonzero(entries.nbytes == entries.nbytes[0])[:2]
        entries.offset[same] = entries.offset[same[::-1]]
    else:
        file.size += 4096

    assert setting.run()[0] == []


def test_where_nothing_can_be_cloned_nothing_is(tmp_path) -> None:
    setting = Setting(tmp_path)
    assert setting.run(lambda source, target: False)[0] == []
