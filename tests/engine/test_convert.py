"""Casts: round to nearest even, once; NaN stays NaN; what cannot be cast is refused."""

import math
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

from ckptkit.core.dtypes import TABLE, dtype_named
from ckptkit.engine.convert import check_cast, convert
from ckptkit.errors import LayoutError


def cast(values: np.ndarray, source: str, destination: str) -> np.ndarray:
    bits = values.view(f"V{values.dtype.itemsize}")
    return convert(bits, dtype_named(source).code, dtype_named(destination).code)


def nearest_bfloat16(value: float) -> float:
    """By exact fractions: the nearest of the two neighbours, the even one in the middle."""
    scale = Fraction(2) ** (math.frexp(value)[1] - 8)
    return float(round(Fraction(value) / scale) * scale)  # round() of a Fraction is to even


@pytest.mark.parametrize(("source", "dtype"), [("float32", np.float32), ("float64", np.float64)])
def test_bfloat16_is_the_nearest_even(source, dtype) -> None:
    """From float64, a value just above the middle of two neighbours must not be rounded twice."""
    rng = np.random.default_rng(0)
    values = rng.standard_normal(2000).astype(dtype)
    middles = (1 + (2 * np.arange(128) + 1) / 256).astype(dtype)
    nudged = np.concatenate([np.nextafter(middles, dtype(0)), middles, np.nextafter(middles, dtype(9))])
    values = np.concatenate([values, nudged])

    got = cast(values, source, "bfloat16").view(ml_dtypes.bfloat16).astype(np.float64)

    assert got.tolist() == [nearest_bfloat16(float(v)) for v in values]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_nan_stays_nan_and_zero_keeps_its_sign(name) -> None:
    nan = np.asarray([0x7FC00000, 0xFFC00000, 0x7F800001, 0x7FFFFFFF], np.uint32).view(np.float32)

    back = cast(cast(nan, "float32", name), name, "float32").view(np.float32)
    zeros = cast(cast(np.asarray([0.0, -0.0], np.float32), "float32", name), name, "float32").view(np.float32)

    assert np.isnan(back).all()
    assert np.signbit(zeros).tolist() == [False, True]


@pytest.mark.parametrize("name", ["float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"])
def test_every_small_value_survives_a_wider_type(name) -> None:
    """All bit patterns of 8 and 16 bits, through float32 and float64 and back."""
    size = dtype_named(name).itemsize
    bits = np.arange(1 << (8 * size), dtype=f"u{size}")
    for wide in ("float32", "float64"):
        up = cast(bits, name, wide)
        back = cast(up.view(wide), wide, name).view(bits.dtype)

        number = ~np.isnan(up.view(wide))
        assert (back == bits)[number].all()


def test_bytes_are_moved_by_bits_where_nothing_is_cast() -> None:
    values = np.arange(5, dtype=np.float32)
    assert cast(values, "float32", "float32").tobytes() == values.tobytes()


def test_integers_that_do_not_fit_are_refused() -> None:
    fits = np.asarray([-128, 127], np.int64)
    assert cast(fits, "int64", "int8").view(np.int8).tolist() == [-128, 127]
    for value, to in ((128, "int8"), (-1, "uint64"), (1 << 40, "int32")):
        with pytest.raises(LayoutError, match="does not fit"):
            cast(np.asarray([value], np.int64), "int64", to)


def test_casts_that_lose_meaning_are_refused() -> None:
    for source, destination in (
        ("float32", "int32"),
        ("complex64", "float32"),
        ("float32", "float4_e2m1fn_x2"),
    ):
        with pytest.raises(LayoutError, match="cannot be cast"):
            check_cast(dtype_named(source), dtype_named(destination))


def test_every_pair_of_floats_can_be_cast() -> None:
    floats = [d for d in TABLE if d.is_float and d.name not in ("float4_e2m1fn_x2",)]
    one = np.asarray([1.0], np.float32)
    for source in floats:
        start = cast(one, "float32", source.name)
        for destination in floats:
            made = cast(start.view(f"u{source.itemsize}"), source.name, destination.name)
            back = cast(made.view(f"u{destination.itemsize}"), destination.name, "float32").view(np.float32)
            assert back.tolist() == [1.0], (source, destination)
