"""Packing and unpacking equal slices of bytes; digests equal xxhash's of the packed bytes."""

import pytest
import torch
import xxhash

from ckptkit.errors import UsageError
from ckptkit.kernels.pack import PackPlan, digest_in_place, pack, unpack
from tests.kernels.forms import DEVICE, drawn_bytes, forms

every_form = pytest.mark.parametrize("backend", forms("pack"))
LEAF = 4096

# Sizes and offsets in bytes, and the buffer's size.
CASES = {
    "whole leaves": ([3 * LEAF, LEAF], [0, 3 * LEAF], 4 * LEAF),
    "one tensor, short last leaf": ([2 * LEAF + 1000], [0], 2 * LEAF + 1000),
    "tail of a few bytes": ([LEAF + 5], [0], LEAF + 5),
    "many in a leaf": ([1024] * 11, [1024 * i for i in range(11)], 11 * 1024),
    "many in a block": ([34] * 200, [34 * i for i in range(200)], 34 * 200),
    "gaps before, between and after": ([500, 3000, 2048], [100, 2048, 9000], 3 * LEAF + 77),
    "shifted by 1": ([2 * LEAF], [1], 2 * LEAF + 1),
    "shifted by 2": ([2 * LEAF], [2], 2 * LEAF + 2),
    "shifted by 4": ([2 * LEAF], [4], 2 * LEAF + 4),
    "shifted by 8": ([2 * LEAF], [8], 2 * LEAF + 8),
    "shifted by a block": ([3 * LEAF], [1024], 3 * LEAF + 1024),
    "an empty tensor among others": ([LEAF, 0, 100], [0, LEAF, LEAF], LEAF + 100),
    "out of order": ([100, LEAF, 60], [LEAF, 0, LEAF + 100], LEAF + 160),
}
every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())


def arranged(case: tuple[list[int], list[int], int]) -> tuple[list[torch.Tensor], PackPlan, bytes]:
    """Tensors, their plan, and the bytes that the buffer should have."""
    sizes, offsets, nbytes = case
    tensors = [drawn_bytes(size, seed=i) for i, size in enumerate(sizes)]
    whole = bytearray(nbytes)
    for tensor, offset in zip(tensors, offsets, strict=True):
        whole[offset : offset + tensor.numel()] = tensor.cpu().numpy().tobytes()
    return tensors, PackPlan(tensors, offsets, nbytes, LEAF), bytes(whole)


def digests_of(raw: bytes) -> list[str]:
    return [xxhash.xxh3_128_hexdigest(raw[at : at + LEAF]) for at in range(0, len(raw), LEAF)]


def packed(plan: PackPlan, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    """The buffer and its digests, both full of something else before."""
    out = torch.full((plan.nbytes,), 0xAA, dtype=torch.uint8, device=DEVICE)
    digests = torch.full((plan.leaf_count, 16), 0xAA, dtype=torch.uint8, device=DEVICE)
    pack(plan, out, digests, backend)
    return out, digests


@every_form
@every_case
def test_pack_puts_every_byte_in_its_place(case: tuple[list[int], list[int], int], backend: str) -> None:
    """The buffer is the tensors at their offsets and zeros elsewhere, and the digests are those of the buffer."""
    _, plan, raw = arranged(case)

    out, digests = packed(plan, backend)

    assert out.cpu().numpy().tobytes() == raw
    assert [bytes(row).hex() for row in digests.cpu().numpy()] == digests_of(raw)


@every_form
@every_case
def test_digesting_in_place_says_what_pack_would(
    case: tuple[list[int], list[int], int], backend: str
) -> None:
    """The digests are those of the buffer that pack would write; no buffer is written, and the tensors stay."""
    tensors, plan, raw = arranged(case)
    before = [tensor.clone() for tensor in tensors]
    digests = torch.full((plan.leaf_count, 16), 0xAA, dtype=torch.uint8, device=DEVICE)

    digest_in_place(plan, digests, backend)

    assert [bytes(row).hex() for row in digests.cpu().numpy()] == digests_of(raw)
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@every_form
@every_case
def test_unpack_brings_every_byte_back(case: tuple[list[int], list[int], int], backend: str) -> None:
    """Tensors that were overwritten hold what they held, and every leaf is good."""
    tensors, plan, _ = arranged(case)
    before = [tensor.clone() for tensor in tensors]
    out, digests = packed(plan, backend)
    for tensor in tensors:
        tensor.fill_(0x55)

    good = unpack(plan, out, digests, backend)

    assert good.dtype == torch.bool and good.shape == (plan.leaf_count,) and bool(good.all())
    assert all(torch.equal(a, b) for a, b in zip(tensors, before, strict=True))


@every_form
def test_unpack_names_the_leaf_that_changed(backend: str) -> None:
    """One wrong byte in the buffer, one wrong digest: each spoils its leaf."""
    _, plan, _ = arranged(CASES["gaps before, between and after"])
    out, digests = packed(plan, backend)

    out[LEAF + 9] ^= 1
    digests[3, 15] ^= 1

    assert unpack(plan, out, digests, backend).tolist() == [True, False, True, False]


@every_form
def test_a_plan_serves_again_after_unpack(backend: str) -> None:
    """Unpacking leaves nothing behind that a later pack would write into gaps."""
    tensors, plan, _ = arranged(CASES["gaps before, between and after"])
    out, digests = packed(plan, backend)
    out.fill_(0xFF)
    unpack(plan, out, digests, backend)
    for i, tensor in enumerate(tensors):
        tensor.copy_(drawn_bytes(tensor.numel(), seed=i))

    again, _ = packed(plan, backend)

    assert again.cpu().numpy().tobytes() == arranged(CASES["gaps before, between and after"])[2]


@pytest.mark.parametrize(
    ("offsets", "nbytes"),
    [([0, 99], 300), ([0, 250], 300), ([-1, 100], 300)],
    ids=["overlap", "end", "start"],
)
def test_tensors_must_fit_the_buffer(offsets: list[int], nbytes: int) -> None:
    """The message says which tensor, and where it would lie."""
    with pytest.raises(UsageError, match=r"tensor [01] would take bytes -?\d+ to \d+ of a buffer of 300"):
        PackPlan([drawn_bytes(100, seed=0), drawn_bytes(100, seed=1)], offsets, nbytes)


def test_a_buffer_of_another_size_is_refused() -> None:
    """Before anything is written."""
    plan = PackPlan([drawn_bytes(100, seed=0)], [0])

    with pytest.raises(UsageError, match=r"packed buffer must be .* \(100,\)"):
        pack(
            plan,
            torch.empty(99, dtype=torch.uint8, device=DEVICE),
            torch.empty(1, 16, dtype=torch.uint8, device=DEVICE),
        )
