"""Diff: how much differs, where, and what only one side has."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from ckptkit import ops
from ckptkit.errors import UsageError
from ckptkit.formats import reference
from ckptkit.formats.native import NativeFormat
from ckptkit.ops.differences import differences
from tests.ops.making import TRAINED, flip, make


def written(path: Path, change=None, layout: str = "tp=1", dtype: str = "float32") -> str:
    """Weights of a tiny ZAYA1, around one in `float32`, with `change(values)` applied, as native."""
    truth = reference.random_truth(reference.tiny_zaya(), "canonical", param=dtype)
    rng = np.random.default_rng(0)
    for key, array in truth.values.items():
        if array.itemsize == 4:
            truth.values[key] = (1 + rng.random(array.shape, np.float32)).view(np.uint32)
    if change:
        change(
            {name: array.view(np.float32) for (name, _), array in truth.values.items() if array.itemsize == 4}
        )
    reference.write(NativeFormat(), truth, path, layout)
    return str(path)


def test_equal_checkpoints_have_no_difference(trained: str, tmp_path: Path) -> None:
    """Layout and format do not count; everything is compared."""
    other = ops.reshard(trained, str(tmp_path / "o"), layout="dp=3,zero=3").url

    report = ops.diff(trained, other)

    assert report.exit_code == 0 and not report.tensors
    assert report.tensors_compared == len(ops.open(trained).catalog.held)
    assert any("per-rank states are not compared" in note for note in report.notes)


def test_differences_are_measured_and_sorted(tmp_path: Path) -> None:
    """Largest first; counts, largest absolute and relative difference and its index, as numpy has them."""

    def change(values) -> None:
        values["norm"][5] += 0.5
        values["layers.1.attn.q"][1, 2, 3] -= 0.25
        values["layers.1.attn.q"][3, 7, 9] += 8.0

    a, b = written(tmp_path / "a"), written(tmp_path / "b", change, layout="tp=2,ep=2")
    before = ops.inspect(a).values("layers.1.attn.q[3, 7, 9]").item()

    report = ops.diff(a, b)

    assert report.exit_code == 1 and report.tensors_differing == 2
    first, second = report.tensors
    assert (first.tensor, first.differing, first.at) == ("layers.1.attn.q", 2, (3, 7, 9))
    assert first.max_abs == pytest.approx(8.0, rel=1e-6) and first.max_rel == pytest.approx(
        8 / (before + 8), rel=1e-6
    )
    assert (second.tensor, second.differing, second.at, second.elements) == ("norm", 1, (5,), 32)


def test_tolerances_are_those_of_numpy(tmp_path: Path) -> None:
    """Elements count as equal where |a - b| <= atol + rtol * |b|."""

    def change(values) -> None:
        values["norm"][:] *= np.float32(1.001)

    a, b = written(tmp_path / "a"), written(tmp_path / "b", change)

    assert ops.diff(a, b).tensors[0].differing == 32
    assert ops.diff(a, b, rtol=0.01).exit_code == ops.diff(a, b, atol=0.01).exit_code == 0
    x, y = (ops.inspect(url).values("norm") for url in (a, b))
    expected = int((~np.isclose(x.astype(np.float64), y.astype(np.float64), rtol=0, atol=0.0014)).sum())
    assert 0 < expected < 32 and ops.diff(a, b, atol=0.0014).tensors[0].differing == expected
    with pytest.raises(UsageError):
        ops.diff(a, b, atol=-1)


def test_a_value_that_is_not_finite_is_the_largest_difference(tmp_path: Path) -> None:
    """NaN against a number is infinitely far, at any tolerance; two NaN differ in bits only."""

    def change(values) -> None:
        values["norm"][5] = np.nan

    a, b = written(tmp_path / "a"), written(tmp_path / "b", change)

    report = ops.diff(a, b, atol=1e30)

    assert report.tensors[0].max_abs == float("inf") and report.tensors[0].at == (5,)
    assert json.loads(report.to_json())["tensors"][0]["max_abs"] == "inf"
    assert ops.diff(b, b).exit_code == 0


def test_where_differences_lie_is_said(trained: str, tmp_path: Path) -> None:
    """All in one rank's pieces of the damaged side: one sentence; by rank, exact counts of A's."""
    damaged = Path(shutil.copytree(trained, tmp_path / "damaged"))
    shown = ops.inspect(trained)
    rows = [row for row in shown.rank(13) if row.role == "momentum"][:2]
    for row in rows:
        flip(damaged / row.file, row.offset + 8)
        flip(damaged / row.file, row.offset + 400)

    report = ops.diff(str(damaged), trained, by_rank=True)

    assert report.where == "all in rank 13's pieces of A and rank 13's pieces of B"
    assert report.by_rank == {13: 4} and all(row.by_rank == {13: 2} for row in report.tensors)
    assert {row.tensor for row in report.tensors} == {row.key for row in rows}


def test_differences_in_two_ranks_are_not_said_to_be_in_one(trained: str, tmp_path: Path) -> None:
    """No sentence is better than a wrong one."""
    damaged = Path(shutil.copytree(trained, tmp_path / "damaged"))
    for rank in (3, 13):
        flip(damaged / f"rank-{rank:05d}.safetensors", -3)

    assert ops.diff(str(damaged), trained).where == ""


def test_what_one_side_lacks_is_listed(trained: str, weights: str, tmp_path: Path) -> None:
    """Missing tensors, other shapes and other dtypes; casts that are exact are compared by value."""
    hub = ops.reshard(trained, str(tmp_path / "hub"), to="hub", drop_optimizer=True).url
    wide = ops.reshard(weights, str(tmp_path / "wide"), dtype="float32").url
    other = make(
        tmp_path / "other", to="hf", optimizer="none", settings={"hidden_size": 48, "num_hidden_layers": 3}
    )

    assert "norm/exp_avg" in ops.diff(trained, hub).only_a and ops.diff(trained, hub).exit_code == 1
    assert "norm/exp_avg" in ops.diff(hub, trained).only_b
    assert ops.diff(trained, hub, only=("*/param", "*/buffer")).exit_code == 0
    cast = ops.diff(weights, wide)
    assert "norm/param: bfloat16, float32" in cast.dtypes and cast.tensors_differing == 0
    shapes = ops.diff(weights, other)
    assert "norm/param: [32], [48]" in shapes.shapes and "hidden_size: 32, 48" in shapes.config


def test_top_limits_the_list_and_not_the_count(tmp_path: Path, weights: str) -> None:
    """Zero lists all."""
    other = make(tmp_path / "other", to="hf", optimizer="none", seed=1)
    count = len(ops.open(weights).catalog.held)

    short, full = ops.diff(weights, other, top=3), ops.diff(weights, other, top=0)

    assert len(short.tensors) == 3 and short.tensors_differing == count == len(full.tensors)
    assert short.tensors == full.tensors[:3]


def test_extras_that_differ_are_named(tmp_path: Path, trained: str) -> None:
    """Another step, in the extras and in each group."""
    other = make(tmp_path / "o", layout=TRAINED, step=7)

    report = ops.diff(trained, other)

    assert report.exit_code == 1 and report.tensors_differing == 0
    assert {"step: 1000, 7", "groups[0].step: 1000, 7"} <= set(report.extras)


def test_plain_values_are_compared_by_path() -> None:
    """Nested values, and keys of one side only."""
    assert differences({"a": {"b": [1, 2]}, "c": 1}, {"a": {"b": [1, 3]}, "d": None}) == [
        "a.b: [1, 2], [1, 3]", "c: 1, absent", "d: absent, None",
    ]  # fmt: skip
