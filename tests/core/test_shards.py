"""Shards: who stores what, and how evenly."""

import numpy as np
import pytest

from ckptkit.core.dtypes import dtype_named
from ckptkit.core.layouts import Layout
from ckptkit.core.schema import Declare, Family, Name, Schema, StoredNames, Tensor
from ckptkit.core.shards import CHUNK, deal, shards
from ckptkit.errors import LayoutError

F32, BF16 = dtype_named("float32"), dtype_named("bfloat16")


def bytes_per_rank(catalog: object) -> np.ndarray:
    entries, files = catalog.entries, catalog.files  # type: ignore[attr-defined]
    return np.bincount(entries.file, entries.nbytes, len(files))


def test_replicated_tensors_are_spread_over_all_ranks() -> None:
    """8 ranks, 100 replicated tensors of 1 MiB and equal shards: no rank has more than 1.2 of the mean."""
    tensors = {f"w{k}": Tensor(f"w{k}", ("a",), (1 << 18,)) for k in range(100)}
    held = {(name, role): F32 for name in tensors for role in ("param", "exp_avg")}

    loads = bytes_per_rank(shards(StoredNames(tensors), Layout(dp=8, zero=1), held, tensors))

    assert loads.sum() == 2 * 100 << 20
    assert loads.max() <= 1.2 * loads.mean()


def test_one_large_tensor_is_cut_and_shared() -> None:
    """A tensor as large as all others together does not lie on one rank."""
    tensors = {
        "big": Tensor("big", ("a", "b"), (1 << 12, 1 << 10)),
        "small": Tensor("small", ("a",), (1 << 12,)),
    }

    loads = bytes_per_rank(
        shards(StoredNames(tensors), Layout(dp=8), {(t, "param"): BF16 for t in tensors}, tensors)
    )

    assert loads.max() <= 1.2 * loads.mean()


def test_many_small_groups_balance_together() -> None:
    """One norm a stage and a role: 64 tensors of one row on 4 stages of 8 ranks each, all below the size that is cut."""
    schema = Schema(
        id="norms@1", first=(), layer=(Declare("n.{i}", "hidden"),), last=(), rules={}, families=(),
        sizes=lambda config: dict(config),
    )  # fmt: skip
    model = schema.bind({"layers": 64, "hidden": 100})
    held = {
        (name, role): F32 for name in model.tensors for role in ("param", "master", "exp_avg", "exp_avg_sq")
    }

    loads = bytes_per_rank(shards(model.names(), Layout(pp=4, dp=8), held, model.tensors))

    assert loads.tolist() == [8 * 400] * 32  # 64 tensors of 4 roles, each of 400 bytes, over 32 ranks


def test_small_tensors_are_not_cut_and_one_rank_cuts_nothing() -> None:
    """Runs have at least CHUNK elements, more or less."""
    assert len(deal([(CHUNK,), (7,), (0,)], 4).tensor) == 3
    assert len(deal([(1 << 30,)], 1).tensor) == 1
    cut = deal([(40 * CHUNK,)], 4)
    assert (cut.last - cut.first).min() >= CHUNK


def test_a_deal_starts_from_what_ranks_have() -> None:
    """The rank with the least gets the first run."""
    assert deal([(5,), (4,)], 3, [9, 0, 4]).rank.tolist() == [1, 2]


def test_layers_keep_their_numbers_through_virtual_stages() -> None:
    """10 layers on 2 stages, by 1 and by 5 chunks a stage: each layer's tensor lies on its stage, under its own number."""
    schema = Schema(
        id="ten@1", first=(), layer=(Declare("w.{i}", "hidden"),), last=(), rules={},
        families=(Family("hf", layer=(Name("layer.{i}", "w.{i}: hidden"),)),), sizes=lambda config: dict(config),
    )  # fmt: skip
    model = schema.bind({"layers": 10, "hidden": 1})
    held = {(name, "param"): F32 for name in model.tensors}

    def stages(text: str) -> dict[str, int]:
        found = shards(model.names("hf"), Layout.parse(text), held, model.tensors)
        return {found.locals[found.entries.local[e]].key: int(found.entries.file[e]) for e in range(10)}

    assert stages("pp=2") == {f"layer.{i}": i // 5 for i in range(10)}
    assert stages("pp=2,vpp=5") == {f"layer.{i}": i % 2 for i in range(10)}


def test_parts_of_one_name_are_stored_alike_or_refused() -> None:
    """A joined tensor cannot be half bfloat16, or have moments for one half."""
    schema = Schema(
        id="qk@1", first=(Declare("q", "head"), Declare("k", "head")), layer=(), last=(), rules={},
        families=(Family("hf", (Name("qk", "[q: head | k: head]"),)),), sizes=lambda config: dict(config),
    )  # fmt: skip
    model = schema.bind({"layers": 0, "head": 4})
    alike = {("q", "param"): F32, ("k", "param"): F32}

    for held in ({**alike, ("k", "param"): BF16}, {**alike, ("k", "exp_avg"): F32}, {("q", "param"): F32}):
        with pytest.raises(
            LayoutError, match=r"qk is made of q .* and k .*, which are not stored alike"
        ) as caught:
            shards(model.names("hf"), Layout(), held, model.tensors)
        assert caught.value.tensor == "qk"
    assert len(shards(model.names("hf"), Layout(), alike, model.tensors).entries) == 1


def test_empty_tensors_have_an_entry_and_no_run() -> None:
    """A tensor without elements is stored once, whole, whatever the layout cuts."""
    tensors = {"none": Tensor("none", ("a", "b"), (0, 4)), "w": Tensor("w", ("a",), (8,))}
    held = {(name, role): F32 for name in tensors for role in ("param", "master")}

    for text in ("dp=4,zero=3", "dp=4,zero=1", "dp=4"):
        entries = shards(StoredNames(tensors), Layout.parse(text), held, tensors).entries
        mine = entries.take(np.flatnonzero(entries.local == 0))
        assert (mine.role.tolist(), mine.first.tolist(), mine.last.tolist()) == ([0, 2], [0, 0], [0, 0])
