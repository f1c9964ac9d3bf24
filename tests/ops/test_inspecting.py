"""Inspection: what a checkpoint holds."""

import json
from pathlib import Path

import pytest

from ckptkit import ops
from ckptkit.errors import UsageError
from tests.ops.making import make


def test_an_inspection_says_what_a_checkpoint_is(trained: str) -> None:
    """Format, model, layout as --layout takes it, step, sizes of all files."""
    shown = ops.inspect(trained)
    files = list(Path(trained).iterdir())

    assert (shown.format, shown.model, shown.names, shown.step) == ("native", "zaya@1", "canonical", 1000)
    assert (shown.layout, shown.world) == ("tp=2,pp=2:2/1,ep=4,dp=4,zero=1", 16)
    assert (shown.files, shown.nbytes) == (len(files), sum(file.stat().st_size for file in files))
    assert shown.data_nbytes + shown.padding_nbytes + shown.replica_nbytes <= shown.nbytes
    assert "zaya@1" in shown.summary()


def test_tensors_are_folded_and_add_up(trained: str) -> None:
    """A row for each pattern, or one for each tensor: the same tensors, elements and bytes."""
    folded, full = ops.inspect(trained), ops.inspect(trained, everything=True)
    catalog = ops.open(trained).catalog

    assert sum(row.count for row in folded.tensors) == len(full.tensors) == len(catalog.tensors)
    assert (
        sum(row.nbytes for row in folded.tensors)
        == sum(row.nbytes for row in full.tensors)
        == folded.data_nbytes
    )
    (row,) = [row for row in folded.tensors if row.pattern == "layers.{0..2}.attn.q"]
    assert (row.count, row.axes, row.shape) == (3, ("head", "head_dim", "hidden"), (4, 8, 32))
    assert row.roles == {"param": "bfloat16", "master": "float32", "momentum": "float32"}
    assert [row.pattern for row in full.tensors] == list(catalog.tensors)
    assert sum(role.nbytes for role in folded.roles) == folded.data_nbytes


def test_padding_is_no_data(trained: str) -> None:
    """A vocabulary of 70 rows that two ranks hold as 2 x 128, in four arrays."""
    assert ops.inspect(trained).padding_nbytes == (2 * 128 - 70) * 32 * (2 + 3 * 4)


def test_extras_are_shortened_unless_asked_for(trained: str) -> None:
    """Lists of tensors by pattern, states by count."""
    short, full = ops.inspect(trained).extras, ops.inspect(trained, everything=True).extras

    assert short["by_coordinate"] == "16 states" and len(full["by_coordinate"]) == 16
    assert "layers.{0..2}.attn.q" in short["groups"][0]["tensors"]
    assert "layers.2.attn.q" in full["groups"][0]["tensors"]


def test_ranks_list_all_that_is_stored(trained: str) -> None:
    """The entries of all ranks are those of the files, in order, and end where data ends."""
    shown = ops.inspect(trained)
    catalog = ops.open(trained).catalog

    rows = [shown.rank(rank) for rank in range(16)]

    assert sum(map(len, rows)) == len(catalog.entries)
    for rank, entries in enumerate(rows):
        assert [row.offset for row in entries] == sorted(row.offset for row in entries)
        last = entries[-1]
        assert last.offset + last.nbytes == (Path(trained) / f"rank-{rank:05d}.safetensors").stat().st_size
    with pytest.raises(UsageError, match="ranks are 0 to 15"):
        shown.rank(16)


def test_a_folder_without_ranks_is_rank_zero(weights: str) -> None:
    """All of it."""
    shown = ops.inspect(weights)

    assert shown.layout in ("", "tp=1") and shown.world == 1
    assert len(shown.rank(0)) == len(ops.open(weights).catalog.entries)


def test_an_inspection_is_json(trained: str, tmp_path: Path) -> None:
    """Plain values only, with a schema number; sources are no part of it."""
    plain = json.loads(ops.inspect(trained, everything=True).to_json())

    assert plain["schema"] == 1 and plain["report"] == "Inspection" and "_source" not in plain


def test_a_run_is_inspected_at_its_newest_step(tmp_path: Path) -> None:
    """And says which."""
    make(tmp_path / "step-3", optimizer="none")

    assert any("taking step-3" in note for note in ops.inspect(str(tmp_path)).notes)
