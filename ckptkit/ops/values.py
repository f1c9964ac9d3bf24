"""Stored bits as numbers, for statistics and comparisons."""

import numpy as np
import numpy.typing as npt

from ckptkit.core.dtypes import BY_NAME, DType
from ckptkit.engine.convert import convert

Bits = npt.NDArray[np.uint8]


def is_number(dtype: DType) -> bool:
    """Whether elements are real numbers one by one: not complex, and not two in a byte."""
    return dtype.kind in "fiub" and dtype.name != "float4_e2m1fn_x2"


def numbers(bits: Bits, dtype: DType) -> npt.NDArray[np.floating]:
    """Elements as float32 where that is exact, else float64 (64-bit integers may lose low bits)."""
    if dtype.name in ("float32", "float64"):
        return bits.view(dtype.name)
    if dtype.name == "bfloat16":
        # The upper half of a float32: a shift is many times faster than a cast of each value.
        return (bits.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
    wide = BY_NAME["float32" if dtype.kind == "f" or dtype.itemsize <= 2 else "float64"]
    return convert(bits.view(f"V{dtype.itemsize}"), dtype.code, wide.code).view(wide.name)


def differing(a: Bits, b: Bits, itemsize: int) -> npt.NDArray[np.int64]:
    """Positions of elements whose bits differ."""
    if np.array_equal(a, b):
        return np.zeros(0, np.int64)
    unequal = a != b
    return np.flatnonzero(unequal.reshape(-1, itemsize).any(axis=1))
