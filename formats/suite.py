"""The conformance suite: what every format must do. A format passes by subclassing it in a test module:

    class TestNative(FormatSuite):
        make = NativeFormat

Needs pytest. Checkpoints are made and read back by `ckptkit.formats.reference`.
"""

import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from ckptkit.core.catalog import Catalog, Extras
from ckptkit.core.dtypes import TABLE, DType, dtype_named
from ckptkit.core.layouts import Layout
from ckptkit.core.schema import Model
from ckptkit.errors import CkptError, LayoutError, UnsafeError
from ckptkit.formats import registry
from ckptkit.formats.base import Format, ReadOptions
from ckptkit.formats.reference import (
    TOY,
    TOY_CONFIG,
    ZAYA_CONFIG,
    Truth,
    adapted,
    gather,
    json_bytes,
    leaf_digests,
    random_truth,
    same,
    stored_truth,
    tiny_zaya,
    toy,
    write,
)
from ckptkit.stores.local import LocalStore

DTYPE_SHAPES: tuple[tuple[int, ...], ...] = ((), (0,), (0, 5), (3, 5))


class FormatSuite:
    """Subclass in a test module; every test takes its own empty folder.

    Attributes:
        make: The format.
        layouts: Layouts to write, for a format that holds ranks.
        stored: Whether it can hold tensors of no known model.
        digests: Whether damage to data is found by digests.
        unneeded: Files that a checkpoint is whole without (they are derived, or empty).
        files: What it needs to be given along.
    """

    make: ClassVar[Callable[[], Format]]
    layouts: ClassVar[tuple[str, ...]] = (
        "tp=1",
        "tp=2,pp=2,ep=4,dp=4,zero=1",
        "tp=1,pp=3,ep=2,dp=6,zero=1:whole",
        "tp=4,ep=2,etp=2,dp=2,zero=1:megatron",
        "pp=2:1/2,cp=2,dp=2,zero=2:deepspeed",
        "tp=2,dp=3,zero=3",
    )
    stored: ClassVar[bool] = True
    digests: ClassVar[bool] = False
    unneeded: ClassVar[tuple[str, ...]] = ()
    files: ClassVar[Mapping[str, bytes]] = {}

    @property
    def format(self) -> Format:
        return type(self).make()

    @property
    def state(self) -> bool:
        return "master" in self.format.roles

    def truth(self, seed: int = 0) -> Truth:
        """A toy with all that the format holds, configuration file included."""
        made = self.random(toy(), seed)
        files = {"config.json": json_bytes(TOY_CONFIG), "merges.txt": b"a b\n", "spm.model": b"\x80\xff\0"}
        made.extras = Extras(files={**files, **self.files})
        if self.format.extras:
            made.extras.common.update(
                step=1200, groups=[{"kind": "adamw", "lr": 1e-3, "tensors": ["norm", "scale"]}]
            )
        return made

    def known(self, seed: int = 0) -> Truth:
        """A tiny ZAYA1, whose schema readers find by themselves."""
        made = self.random(tiny_zaya(), seed)
        made.extras = Extras(files={"config.json": json_bytes(ZAYA_CONFIG), **self.files})
        return made

    def random(self, model: Model, seed: int = 0, state: bool | None = None) -> Truth:
        """What the format holds of a model; of one that holds adapters only, those of every matrix."""
        parts = self.format.parts
        model = model if "base" in parts else adapted(model)
        state = self.state if state is None else state
        return random_truth(model, self.format.names, state=state, seed=seed, parts=parts)

    def read(self, root: Path) -> Catalog:
        return self.format.read(LocalStore(root), ReadOptions(model=TOY))

    def written(self, root: Path, layout: str = "") -> tuple[Truth, Path]:
        """A checkpoint in a folder of its own."""
        truth = self.truth()
        write(
            self.format,
            truth,
            root / "checkpoint",
            layout or ("tp=2,dp=2,zero=1" if self.format.ranks else "tp=1"),
        )
        return truth, root / "checkpoint"

    @pytest.mark.parametrize("model", ["toy", "zaya"])
    def test_every_layout_gives_back_every_bit(self, model: str, tmp_path: Path) -> None:
        """What was written in a layout is read back bit for bit, in the same layout, names and dtypes."""
        for number, layout in enumerate(self.layouts if self.format.ranks else ("tp=1",)):
            truth = self.truth(seed=number) if model == "toy" else self.known(seed=number)
            root = tmp_path / str(number)

            write(self.format, truth, root, layout)
            found = self.read(root) if model == "toy" else self.format.read(LocalStore(root))

            same(gather(root, found), truth.values)
            assert found.held == truth.held
            assert found.layout == Layout.parse(layout)
            assert found.names == truth.names.name
            assert {name: found.tensors[name] for name, _ in truth.held} == truth.stored

    def test_writing_is_repeatable(self, tmp_path: Path) -> None:
        """Equal content gives equal files."""
        for name in "ab":
            self.written(tmp_path / name)

        files = {name: _contents(tmp_path / name) for name in "ab"}

        assert files["a"] == files["b"]

    def test_a_read_checkpoint_can_be_written_again(self, tmp_path: Path) -> None:
        """Reading and writing again gives the same files: a catalog loses nothing."""
        truth, root = self.written(tmp_path / "first")
        found = self.read(root)
        again = Truth(truth.names, found.tensors, found.held, gather(root, found), found.extras)

        write(self.format, again, tmp_path / "second" / "checkpoint", str(found.layout))

        assert _contents(tmp_path / "second") == _contents(tmp_path / "first")

    @pytest.mark.parametrize("dtype", TABLE, ids=str)
    def test_every_dtype_or_a_named_refusal(self, dtype: DType, tmp_path: Path) -> None:
        """Scalars, empty tensors and matrices of every dtype come back as raw bytes, or the format names what it cannot hold."""
        if not self.stored:
            pytest.skip("holds known models only")
        for number, shape in enumerate(DTYPE_SHAPES):
            truth = stored_truth({"a.tensor": (shape, dtype), "b": ((2,), dtype_named("float32"))})
            root = tmp_path / str(number)
            try:
                write(self.format, truth, root)
            except LayoutError as refused:
                assert dtype.name in str(refused)
                continue

            found = self.format.read(LocalStore(root))

            same(gather(root, found), truth.values)
            assert found.held == truth.held

    def test_an_empty_checkpoint_is_one(self, tmp_path: Path) -> None:
        """No tensor at all is written and read like any number of them."""
        if not self.stored:
            pytest.skip("holds known models only")

        write(self.format, stored_truth({}), tmp_path / "empty")

        assert self.format.read(LocalStore(tmp_path / "empty")).held == {}

    def test_fewer_rows_than_ranks(self, tmp_path: Path) -> None:
        """Three rows, a scalar and a bias of one element over eight ranks: empty shards are no fault."""
        if not (self.stored and self.format.ranks):
            pytest.skip("holds no ranks")
        float32 = dtype_named("float32")
        truth = stored_truth({"w": ((3, 2), float32), "step": ((), float32), "bias": ((1,), float32)})

        write(self.format, truth, tmp_path / "c", "dp=8,zero=3")

        same(gather(tmp_path / "c", self.format.read(LocalStore(tmp_path / "c"))), truth.values)

    def test_extras_come_back(self, tmp_path: Path) -> None:
        """Step, groups, per-coordinate and per-sample state, and binary files come back equal."""
        if not self.format.extras:
            pytest.skip("holds no extras")
        truth = self.truth()
        layout = "tp=2,dp=2,zero=1" if self.format.ranks else "tp=1"
        truth.extras.by_coordinate = {
            f"tp={t},pp=0,cp=0,dp={d}": {"rng": [t, d]} for t in range(2) for d in range(2)
        }
        truth.extras.by_sample = [{"position": 7 * rank} for rank in range(2)]

        write(self.format, truth, tmp_path / "c", layout)
        found = self.read(tmp_path / "c")

        assert found.extras.common == truth.extras.common
        assert found.extras.by_coordinate == truth.extras.by_coordinate
        assert found.extras.by_sample == truth.extras.by_sample
        assert dict(found.extras.files) == truth.extras.files
        assert found.step == 1200

    def test_it_is_detected(self, tmp_path: Path) -> None:
        """Of all formats its own is found in what it wrote; an empty folder and foreign files are none of its."""
        write(self.format, self.known(), tmp_path / "own")
        (tmp_path / "empty").mkdir()
        (tmp_path / "foreign").mkdir()
        (tmp_path / "foreign" / "notes.txt").write_text("nothing")

        assert registry.detect(LocalStore(tmp_path / "own")).name == self.format.name
        assert not self.format.detect(LocalStore(tmp_path / "empty"))
        assert not self.format.detect(LocalStore(tmp_path / "foreign"))

    def test_roles_that_it_cannot_hold_are_refused(self, tmp_path: Path) -> None:
        """Optimizer state is written or refused, never left out in silence."""
        truth = self.random(toy(), state=True)
        truth.extras = Extras(files=dict(self.files))
        if self.state:
            write(self.format, truth, tmp_path / "c")
            assert self.read(tmp_path / "c").held == truth.held
        else:
            with pytest.raises(LayoutError, match="master"):
                write(self.format, truth, tmp_path / "c")

    def test_without_its_marker_it_is_not_whole(self, tmp_path: Path) -> None:
        """A checkpoint whose last file is not there yet is never read as a whole one."""
        marker = self.format.marker
        if marker is None:
            pytest.skip("whole by content")
        _, root = self.written(tmp_path)
        (root / marker).unlink()

        with pytest.raises(CkptError):
            self.read(root)

    def test_no_damaged_file_gives_wrong_values(self, tmp_path: Path) -> None:
        """Any file removed, cut, lengthened, replaced by a folder or a link out: an error, or every value as it was."""
        truth, root = self.written(tmp_path)
        weights = {file.path for file in self.read(root).files}
        for path in sorted(_contents(root)):
            for kind, damage in _DAMAGES.items():
                copy = tmp_path / "damaged"
                shutil.copytree(root, copy)
                damage(copy / path)
                try:
                    found = self.read(copy)
                    values = gather(copy, found)
                except CkptError as error:
                    assert str(error)
                    if kind == "linked out":
                        assert isinstance(error, UnsafeError), path
                else:
                    assert path not in weights, f"{path} {kind} was accepted"
                    same(values, truth.values)
                shutil.rmtree(copy)

    def test_a_file_too_many_changes_nothing(self, tmp_path: Path) -> None:
        """A stray copy of a file, and a foreign one, are never merged in."""
        truth, root = self.written(tmp_path)
        first = self.read(root).files[0].path
        shutil.copy(root / first, root / f"stray-{Path(first).name}")
        (root / "notes.txt").write_text("nothing")

        same(gather(root, self.read(root)), truth.values)

    def test_flipped_bits_are_found_or_harmless(self, tmp_path: Path) -> None:
        """A bit flipped anywhere never crashes a reader, and is found by a format that has digests."""
        _, root = self.written(tmp_path)
        files = _contents(root)
        rng = np.random.default_rng(7)
        for path in sorted(files):
            for at in sorted(rng.choice(8 * len(files[path]), min(12, 8 * len(files[path])), replace=False)):
                flipped = bytearray(files[path])
                flipped[at // 8] ^= 1 << at % 8
                (root / path).write_bytes(flipped)
                found = self._damage_found(root)
                assert found or not self.digests, f"bit {at} of {path} went unnoticed"
            (root / path).write_bytes(files[path])

        assert not self._damage_found(root)

    def _damage_found(self, root: Path) -> bool:
        store = LocalStore(root)
        try:
            found = self.read(root)
            if list(self.format.problems(store, found)):
                return True
            assert dict(found.extras.files) is not None
            for number, file in enumerate(found.files):
                leaves = found.leaves(number) if found.leaves is not None else None
                if (
                    leaves is not None
                    and leaves.digests.tobytes()
                    != leaf_digests((root / file.path).read_bytes(), file.data_start).digests.tobytes()
                ):
                    return True
        except CkptError:
            return True
        return False


def _contents(root: Path) -> dict[str, bytes]:
    """Every file below a folder."""
    return {
        str(path.relative_to(root)): path.read_bytes() for path in sorted(root.rglob("*")) if path.is_file()
    }


def _cut(path: Path, keep: Callable[[int], int]) -> None:
    os.truncate(path, keep(path.stat().st_size))


def _lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n")


def _make_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def _link_out(path: Path) -> None:
    folder = next(parent for parent in path.parents if parent.name == "damaged")
    outside = folder.parent / f"outside-{path.name}"
    shutil.move(path, outside)
    path.symlink_to(outside)


_DAMAGES: dict[str, Callable[[Path], None]] = {
    "removed": Path.unlink,
    "cut by a byte": lambda path: _cut(path, lambda size: size - 1),
    "cut in half": lambda path: _cut(path, lambda size: size // 2),
    "emptied": lambda path: _cut(path, lambda size: 0),
    "lengthened": _lengthen,
    "made a folder": _make_folder,
    "linked out": _link_out,
}
