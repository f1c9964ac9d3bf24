"""Random tensors that exist only while they are read."""

import ml_dtypes
import numpy as np
import pytest

from ckptkit.core.dtypes import dtype_named
from ckptkit.errors import FormatError, ShardMissingError
from ckptkit.ops.random_store import BLOCK, Kind, RandomStore, RandomTensor

N = 3 * BLOCK + 77


def read(kind: Kind, dtype: str = "float32", stream: str = "w", seed: int = 0) -> np.ndarray:
    data = RandomStore(seed, {"w": RandomTensor(stream, kind, dtype_named(dtype), N)}).read("w")
    return np.frombuffer(data, ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)


@pytest.mark.parametrize("kind", [Kind(0, 0.02), Kind(1, 0.1), Kind(0, 1e-4, squared=True)])
def test_values_are_finite_and_of_their_kind(kind: Kind) -> None:
    """Normal around zero, positive around one, squares of small gradients: nothing else comes out."""
    found = read(kind).astype(np.float64)

    assert np.isfinite(found).all()
    if kind.squared:
        assert (found >= 0).all() and 0.2e-8 < found.mean() < 5e-8
    else:
        assert (
            abs(found.mean() - kind.mean) < 0.5 * kind.mean + 0.01
            and found.std() < 5 * kind.std + 0.3 * kind.mean
        )


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float64"])
def test_a_parameter_is_its_master_rounded(dtype: str) -> None:
    """One stream in two dtypes: the lower one is the float32 values cast by ml_dtypes or numpy."""
    kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype

    assert read(Kind(0, 0.02), dtype).tobytes() == read(Kind(0, 0.02)).astype(kind).tobytes()


def test_any_range_reads_as_the_whole_does() -> None:
    """Offsets within an element and across blocks give the same bytes as reading everything."""
    store = RandomStore(3, {"w": RandomTensor("w", Kind(0, 1), dtype_named("bfloat16"), N)})
    whole = store.read("w")

    for first, count in ((0, 1), (1, 2), (2 * BLOCK - 3, 9), (N, 5), (2 * N - 4, 4)):
        assert store.read("w", first, count) == whole[first : first + count]


def test_seeds_streams_and_blocks_differ() -> None:
    """No two tensors, seeds or blocks share their values."""
    parts = [read(Kind(0, 1)), read(Kind(0, 1), seed=1), read(Kind(0, 1), stream="v")]
    blocks = [part[k * BLOCK : (k + 1) * BLOCK] for part in parts for k in range(3)]

    for i, a in enumerate(blocks):
        for b in blocks[:i]:
            assert (a == b).mean() < 0.01


def test_reading_past_the_end_is_an_error() -> None:
    """As of any file."""
    store = RandomStore(0, {"w": RandomTensor("w", Kind(0, 1), dtype_named("float32"), 4)})

    with pytest.raises(FormatError, match="ends at byte 16"):
        store.read("w", 8, 16)
    with pytest.raises(ShardMissingError):
        store.read("v")
