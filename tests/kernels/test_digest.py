"""Leaf digests are XXH3-128 bit by bit; the expected values come from the xxhash package."""

import pytest
import torch
import xxhash

from ckptkit.errors import UsageError
from ckptkit.kernels.digest import leaf_digests, whole_leaf_digests
from tests.kernels.forms import DEVICE, ON_GPU, drawn_bytes, forms

every_form = pytest.mark.parametrize("backend", forms("leaf_digests"))

# XXH3 has another algorithm for 1-3, 4-8, 9-16, 17-128, 129-240 and longer inputs; it works in blocks of 1,024 bytes and
# stripes of 64. Each border, both sides; on a GPU, where it costs nothing, every length up to the second block.
BORDERS = (3, 8, 16, 32, 64, 96, 128, 160, 192, 240, 256, 320, 1024, 1088, 2048, 3072)
LENGTHS = [*range(1, 2050)] if ON_GPU else sorted({1, 2} | {n + d for n in BORDERS for d in (-1, 0, 1)})


def expected(data: torch.Tensor, leaf_nbytes: int) -> list[str]:
    raw = data.cpu().numpy().tobytes()
    return [xxhash.xxh3_128_hexdigest(raw[at : at + leaf_nbytes]) for at in range(0, len(raw), leaf_nbytes)]


def digests(data: torch.Tensor, leaf_nbytes: int, backend: str) -> list[str]:
    return [bytes(row).hex() for row in leaf_digests(data, leaf_nbytes, backend).cpu().numpy()]


@every_form
def test_a_single_leaf_of_any_length(backend: str) -> None:
    """Every algorithm of XXH3, at its shortest and its longest input."""
    for length in LENGTHS:
        data = drawn_bytes(length, seed=length)
        assert digests(data, 4096, backend) == expected(data, 4096), length


@every_form
@pytest.mark.parametrize("tail", [0, 1, 7, 100, 239, 241, 1000, 1023, 1024, 1025, 1087, 2047])
def test_a_short_last_leaf_beside_whole_ones(backend: str, tail: int) -> None:
    """The last leaf has its own length; those before it are whole."""
    data = drawn_bytes(3 * 2048 + tail, seed=tail)

    assert digests(data, 2048, backend) == expected(data, 2048)


@every_form
def test_leaves_of_a_mebibyte(backend: str) -> None:
    """The size that checkpoints use: 1,023 scrambles, then a block without one."""
    data = drawn_bytes((1 << 20) + 5, seed=1)

    assert digests(data, 1 << 20, backend) == expected(data, 1 << 20)


@every_form
def test_a_flipped_bit_changes_its_leaf_only(backend: str) -> None:
    """What a digest is for."""
    data = drawn_bytes(4 * 2048, seed=2)
    before = digests(data, 2048, backend)

    data[2 * 2048 + 77] ^= 16

    changed = [a != b for a, b in zip(before, digests(data, 2048, backend), strict=True)]
    assert changed == [False, False, True, False]


@every_form
def test_bytes_that_begin_anywhere(backend: str) -> None:
    """A view into a larger buffer need not be aligned."""
    data = drawn_bytes(5000, seed=3)[3:]

    assert digests(data, 2048, backend) == expected(data, 2048)


@every_form
def test_tensors_of_any_dtype_and_shape(backend: str) -> None:
    """Bytes in memory order, whatever they mean."""
    data = drawn_bytes(7 * 11 * 13 * 2, seed=4).view(torch.bfloat16).view(7, 11, 13)

    assert digests(data, 1024, backend) == expected(data.view(-1).view(torch.uint8), 1024)


@every_form
def test_no_bytes_have_no_leaves(backend: str) -> None:
    """An empty tensor is not one leaf of nothing."""
    assert leaf_digests(torch.empty(0, 4, device=DEVICE), 1024, backend).shape == (0, 16)


def test_the_form_by_torch_operations() -> None:
    """The yardstick that kernels are timed beside computes the same on any device."""
    data = drawn_bytes(3 * 4096, seed=5)

    rows = whole_leaf_digests(data.view(3, 4096)).cpu().numpy()

    assert [bytes(row).hex() for row in rows] == expected(data, 4096)


def test_strided_tensors_are_refused() -> None:
    """Their bytes are no one range."""
    with pytest.raises(UsageError, match="not contiguous"):
        leaf_digests(torch.zeros(4, 4, device=DEVICE).T)


@pytest.mark.parametrize("leaf_nbytes", [0, -1024, 1000])
def test_leaves_are_whole_blocks(leaf_nbytes: int) -> None:
    """XXH3's block is the unit of the kernels."""
    with pytest.raises(UsageError, match=f"not {leaf_nbytes}"):
        leaf_digests(torch.zeros(4, device=DEVICE), leaf_nbytes)
