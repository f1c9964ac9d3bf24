"""Streaming: replicas, restricted roles, and chunks."""

import shutil
from dataclasses import replace
from pathlib import Path
from threading import Lock

import numpy as np
import pytest

from ckptkit import ops
from ckptkit.core.catalog import Catalog, Entries, File
from ckptkit.errors import CorruptionError, CoverageError
from ckptkit.ops.sources import Source
from ckptkit.ops.streaming import SLAB, Chunk, compare_replicas, only_roles, prove, visit
from tests.ops.making import flip, make, values


def with_replica(source: Source, copy: str) -> Source:
    """The source as if the file `copy` of its folder held everything of its only file once more."""
    catalog = source.catalog
    (file,) = catalog.files
    again = Entries(**{name: getattr(catalog.entries, name).copy() for name in Entries.__slots__})
    again.file[:] = 1
    doubled = Catalog(
        format=catalog.format,
        where=catalog.where,
        tensors=catalog.tensors,
        locals=catalog.locals,
        files=[file, File(copy, file.size, file.data_start, 1)],
        entries=Entries.concat([catalog.entries, again]),
        layout=catalog.layout,
    )
    return replace(source, catalog=doubled)


def test_replicas_are_compared_and_named_when_they_differ(tmp_path: Path) -> None:
    """Every byte of equal copies is compared; one flipped bit is an error that names both files."""
    made = Path(make(tmp_path / "a", optimizer="none"))
    shutil.copy(made / "rank-00000.safetensors", made / "copy")
    source = with_replica(ops.open(str(made)), "copy")

    assert compare_replicas(source, prove(source)) > 0
    flip(made / "copy", -3)
    with pytest.raises(CorruptionError, match=r"rank-00000\.safetensors.*copy"):
        compare_replicas(source, prove(source))


def test_every_element_is_visited_once(trained: str) -> None:
    """Chunks of all threads together are the tensors, each element once, in its own bits."""
    source = ops.open(trained)
    held = source.catalog.held
    found = {key: np.zeros(array.nbytes, np.uint8) for key, array in values(trained).items()}
    seen = {key: 0 for key in held}
    lock = Lock()

    def look(chunk: Chunk) -> None:
        item = held[chunk.key].itemsize
        with lock:
            found[chunk.key][chunk.first * item : chunk.last * item] = chunk.bits[0]
            seen[chunk.key] += chunk.last - chunk.first

    visit([source], held, look, threads=3)

    for key, array in values(trained).items():
        assert seen[key] == array.size and found[key].tobytes() == array.tobytes()


def test_tensors_larger_than_a_slab_come_in_several_chunks(tmp_path: Path) -> None:
    """And with several checkpoints at once each chunk has the same elements of all."""
    settings = {"vocab_size": 80_000, "num_hidden_layers": 1, "hidden_size": 32, "head_dim": 8}
    urls = [make(tmp_path / layout, settings=settings, optimizer="none", layout=layout) for layout in ("tp=2", "dp=3,zero=3")]  # fmt: skip
    sources = [ops.open(url) for url in urls]
    sizes: list[int] = []

    def look(chunk: Chunk) -> None:
        a, b = chunk.bits
        assert np.array_equal(a, b)
        if chunk.key == ("embed", "param"):
            sizes.append(chunk.last - chunk.first)

    visit(sources, sources[0].catalog.held, look, memory=16 << 20)

    assert sum(sizes) == 80_000 * 32 and max(sizes) <= SLAB // 2 < 80_000 * 32


def test_a_restricted_source_lacks_the_rest(trained: str) -> None:
    """Parameters are then made from masters, and momentum from nothing."""
    masters = only_roles(ops.open(trained), ["master"])
    held = ops.open(trained).catalog.held
    wrong: list[Chunk] = []

    visit(
        [masters, ops.open(trained)],
        {key: dtype for key, dtype in held.items() if key[1] == "param"},
        lambda chunk: None if np.array_equal(chunk.bits[0], chunk.bits[1]) else wrong.append(chunk),
    )

    assert not wrong
    with pytest.raises(CoverageError):
        visit(
            [masters],
            {("layers.0.attn.q", "momentum"): held["layers.0.attn.q", "momentum"]},
            lambda chunk: None,
        )
