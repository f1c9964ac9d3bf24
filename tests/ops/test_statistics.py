"""Statistics, against numpy on the whole tensor."""

import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from ckptkit import ops
from ckptkit.formats import reference
from ckptkit.formats.native import NativeFormat
from tests.ops.making import values

NUMPY = {"bfloat16": ml_dtypes.bfloat16, "float32": np.float32}


def plain(row, bits) -> dict[str, Any]:
    """What numpy says of a whole tensor."""
    array = bits.reshape(-1).view(NUMPY[row.dtype]).astype(np.float64)
    finite = array[np.isfinite(array)]
    return {
        "elements": array.size,
        "min": finite.min(),
        "max": finite.max(),
        "mean": pytest.approx(finite.mean(), rel=1e-9, abs=1e-12),
        "rms": pytest.approx(np.sqrt((finite**2).mean()), rel=1e-9),
        "nans": np.isnan(array).sum(),
        "infs": np.isinf(array).sum(),
        "zeros": (array == 0).sum(),
    }


@pytest.mark.parametrize("layout", ["tp=1", "tp=2,pp=2,ep=4,dp=4,zero=1", "dp=3,zero=3"])
def test_statistics_are_those_of_numpy_in_every_layout(trained: str, tmp_path: Path, layout: str) -> None:
    """Padding (70 rows of a vocabulary padded to 256) and replicas are not counted."""
    made = ops.reshard(trained, str(tmp_path / "x"), layout=layout).url
    truth = values(trained)

    report = ops.stats(made)

    assert {(row.tensor, row.role) for row in report.tensors} == truth.keys()
    for row in report.tensors:
        for name, expected in plain(row, truth[row.tensor, row.role]).items():
            assert getattr(row, name) == expected, (row.tensor, row.role, name)
    assert report.sick == []


def test_a_sick_tensor_is_found(tmp_path: Path) -> None:
    """NaN, infinities and zeros are counted exactly, and left out of the rest."""
    truth = reference.random_truth(reference.tiny_zaya(), "canonical", param="float32")
    for key, array in truth.values.items():
        truth.values[key] = np.ones(array.shape, np.float32).view(np.uint32)
    norm = truth.values["norm", "param"].view(np.float32)
    norm[:5] = [np.nan, np.inf, -np.inf, 0, -0.0]
    truth.values["layers.2.attn.q", "param"][:] = 0
    truth.values["layers.1.router.balancing", "buffer"][:] = 0
    reference.write(NativeFormat(), truth, tmp_path / "c", "tp=2")

    report = ops.stats(str(tmp_path / "c"))

    (row,) = [row for row in report.tensors if row.tensor == "norm"]
    assert (row.nans, row.infs, row.zeros, row.min, row.max, row.mean) == (1, 2, 2, 0.0, 1.0, 27 / 29)
    # All zeros are sick in a matrix, not in a bias, which may start so.
    assert report.sick == ["layers.2.attn.q/param", "norm/param"]


def test_a_tensor_without_a_finite_value_has_no_numbers(tmp_path: Path) -> None:
    """None rather than a number that means nothing; JSON has it as null."""
    truth = reference.random_truth(reference.tiny_zaya(), "canonical", param="float32")
    truth.values["norm", "param"][:] = np.float32(np.nan).view(np.uint32)
    reference.write(NativeFormat(), truth, tmp_path / "c")

    (row,) = ops.stats(str(tmp_path / "c"), only=["norm"]).tensors

    assert row.nans == 32 and row.min is row.max is row.mean is row.rms is None
    assert json.loads(ops.stats(str(tmp_path / "c"), only=["norm"]).to_json())["tensors"][0]["mean"] is None


def test_small_moments_do_not_vanish(tmp_path: Path) -> None:
    """Squares of 1e-30 are zero in float32; the rms is taken in float64."""
    truth = reference.random_truth(reference.tiny_zaya(), "canonical", param="float32")
    truth.values["norm", "param"][:] = np.float32(1e-30).view(np.uint32)
    reference.write(NativeFormat(), truth, tmp_path / "c")

    (row,) = ops.stats(str(tmp_path / "c"), only=["norm/param"]).tensors

    assert row.rms == pytest.approx(1e-30, rel=1e-6) and row.zeros == 0
