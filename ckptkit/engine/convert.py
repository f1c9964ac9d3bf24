"""Values from one element type to another: round to nearest even, NaN stays NaN, overflow is infinity.

The one place that interprets bytes. The casts of numpy and ml_dtypes are used as they are where they round once; from
wider types to those of ml_dtypes, which would round twice, see `_to_float32`.
"""

import ml_dtypes
import numpy as np
import numpy.typing as npt

from ckptkit.core.dtypes import TABLE, DType
from ckptkit.errors import LayoutError

Array = npt.NDArray[np.generic]

_PLAIN = "float64 float32 float16 int64 int32 int16 int8 uint64 uint32 uint16 uint8 bool complex64 complex128"
_EXTENDED = "bfloat16 float8_e4m3fn float8_e5m2 float8_e4m3fnuz float8_e5m2fnuz float8_e8m0fnu"
_NUMPY: dict[str, np.dtype] = {
    **{name: np.dtype(name) for name in _PLAIN.split()},
    **{name: np.dtype(getattr(ml_dtypes, name)) for name in _EXTENDED.split()},
}


def check_cast(source: DType, destination: DType) -> None:
    """Raise LayoutError for a cast that would not keep values' meaning."""
    packed = "float4_e2m1fn_x2"
    allowed = (
        source is destination
        or (source.kind == "f" and destination.kind == "f" and packed not in (source.name, destination.name))
        or (source.kind in "iub" and destination.kind in "fiu")
        or (source.kind == "c" and destination.kind == "c")
    )
    if not allowed:
        raise LayoutError(
            f"values cannot be cast from {source} to {destination}; keep {source}, or choose a wider type"
        )


def convert(bits: Array, source: int, destination: int) -> Array:
    """`bits` (unsigned integers of the source's width) as bits of the destination; dtype codes of `TABLE`.

    Raises LayoutError when an integer does not fit the destination's integer type.
    """
    one, other = TABLE[source], TABLE[destination]
    check_cast(one, other)
    values = np.ascontiguousarray(bits).view(_NUMPY[one.name])
    with np.errstate(all="ignore"):
        if one.kind in "iu" and other.kind in "iu":
            made = values.astype(_NUMPY[other.name])
            if not np.array_equal(made.astype(values.dtype), values) or bool(
                ((made < 0) != (values < 0)).any()
            ):
                raise LayoutError(f"an integer does not fit when cast from {one} to {other}; keep {one}")
        elif other.kind == "f" and other.name not in ("float64", "float32", "float16"):
            made = _to_float32(values).astype(_NUMPY[other.name])
        else:
            made = values.astype(_NUMPY[other.name])
    return made.view(f"V{other.itemsize}")


def overflows(bits: Array, source: int, made: Array, destination: int) -> int:
    """How many finite values are not finite any more in `made`, the result of `convert` (infinity, or NaN in types without it)."""
    one, other = TABLE[source], TABLE[destination]
    if other.kind != "f" or (one.kind == "f" and _largest(one) <= _largest(other)):
        return 0
    values = np.ascontiguousarray(bits).view(_NUMPY[one.name])
    with np.errstate(all="ignore"):  # signalling NaNs
        limit = _largest(other)
        if not values.size or (-limit <= values.min() and values.max() <= limit):  # a NaN is neither
            return 0
        gone = ~np.isfinite(np.ascontiguousarray(made).view(_NUMPY[other.name]))
        return int(np.count_nonzero(np.isfinite(values[gone])))


def _largest(dtype: DType) -> float:
    return float(ml_dtypes.finfo(_NUMPY[dtype.name]).max)


def _to_float32(values: Array) -> Array:
    """float32 values that round to any type of at most 11 significant bits as `values` do.

    From wider types the last bit is set wherever something was cut off ("round to odd"), since rounding twice to nearest
    can give another neighbour.
    """
    if values.dtype.itemsize <= 2 or values.dtype == np.float32:
        return values.astype(np.float32)
    near: npt.NDArray[np.float32] = values.astype(np.float32)
    exact = np.asarray(values, np.float64) if values.dtype.kind == "f" else values.astype(np.longdouble)
    inexact = np.isfinite(near) & (near != exact)
    even = (near.view(np.uint32) & np.uint32(1)) == 0
    toward = np.where(exact > near, np.float32(np.inf), np.float32(-np.inf))
    odd = np.nextafter(near, toward)
    return np.where(inexact & even, odd, near)
